"""The transformation: exact masks, a live master copy, trees of all kinds, errors."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

optax = pytest.importorskip("optax")

from pruning_problems import (  # noqa: E402
    CUBIC,
    assert_same_bits,
    bits,
    gradients_at,
    parameters,
    run,
)

from jaxsparse import CSR, Topology  # noqa: E402
from jaxsparse.pruning import (  # noqa: E402
    PruningSchedule,
    Target,
    dense_parameters,
    half_epochs,
    make_masks,
    one_shot,
    prune,
    verify,
)

# ---- What it computes ----


@pytest.mark.smoke
@pytest.mark.parametrize("structure", ["unstructured", "row_balanced", "refilled"])
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_parameters_are_master_times_mask_bitwise(scope, structure):
    """Against an independent dense run in NumPy.

    The rate is a power of two: a product is exact, whether or not it is fused with a sum.
    """
    params = parameters()
    tx = prune(optax.sgd(0.125), CUBIC, scope=scope, structure=structure)
    master = jax.tree.map(np.asarray, params)
    masks = jax.tree.map(lambda x: np.ones(x.shape, bool), master)
    returned = 0
    for step, (pruned, state) in enumerate(run(tx, params, 14), start=1):
        slopes = jax.tree.map(np.asarray, gradients_at(step - 1, params))
        master = jax.tree.map(lambda w, g: w - np.float32(0.125) * g, master, slopes)
        if step in (2, 4, 6, 8, 10):
            before = masks
            density = np.float32(CUBIC.density(step))
            masks = make_masks(master, density, scope=scope, structure=structure)
            masks["second"]["bias"] = np.ones(6, bool)
            masks = jax.tree.map(np.asarray, masks)
            returned += sum(
                jax.tree.leaves(jax.tree.map(lambda a, b: (~a & b).sum(), before, masks))
            )
        expected = jax.tree.map(lambda w, m: np.where(m, w, np.float32(0)), master, masks)
        assert_same_bits(pruned, expected)
        assert_same_bits(dense_parameters(pruned, state), master)
        np.testing.assert_array_equal(state.masks["first"]["kernel"], masks["first"]["kernel"])
        assert state.step == step
    assert returned > 0  # weights came back, or the master was tested for nothing
    assert not np.asarray(masks["first"]["kernel"]).all()


@pytest.mark.parametrize(
    "inner, dtype",
    [
        ("adamw", jnp.bfloat16),
        ("adamw", jnp.float16),
        ("adamw", jnp.float32),
        ("momentum", jnp.float32),
    ],
)
def test_kept_weights_are_those_of_the_optimizer_alone(inner, dtype):
    """One update of a state against the same update of the dense master, op by op."""
    within = {
        "adamw": optax.adamw(0.05, eps=1e-3, weight_decay=0.1),
        "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    }[inner]
    params = parameters(dtype)
    tx = prune(within, CUBIC)
    state, dense_state, master = tx.init(params), within.init(params), params
    for step in range(5):
        gradients = gradients_at(step, params)
        changes, dense_state = within.update(gradients, dense_state, master)
        master = optax.apply_updates(master, changes)
        updates, state = tx.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        assert_same_bits(dense_parameters(params, state), master)
        assert_same_bits(state.inner_state, dense_state)
        mask, kernel = state.masks["first"]["kernel"], params["first"]["kernel"]
        assert kernel.dtype == dtype
        assert (bits(kernel)[~np.asarray(mask)] == 0).all()
    assert not mask.all()


def test_updates_of_another_dtype_than_the_parameters():
    """Wider ones as optimizers with a master precision make, narrower ones after a cast."""
    for dtype, narrow in (jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16):
        params = parameters(dtype)
        cast = optax.stateless(lambda u, _, d=narrow: optax.tree.cast(u, d))
        tx = prune(optax.chain(optax.sgd(0.125), cast), CUBIC)
        for pruned, state in run(tx, params, 12):
            mask = np.asarray(state.masks["first"]["kernel"])
            kernel = pruned["first"]["kernel"]
            assert kernel.dtype == dtype and (bits(kernel)[~mask] == 0).all()
        master = dense_parameters(pruned, state)["first"]["kernel"]
        assert (bits(master)[mask] == bits(kernel)[mask]).all() and not mask.all()


def test_gradients_reach_pruned_weights_and_the_inner_optimizer_sees_the_master():
    seen = []
    spy = optax.stateless(lambda u, p: seen.append(p) or u)
    params = {"w": jnp.array([[4.0, 1.0]])}
    tx = prune(optax.chain(spy, optax.sgd(1.0)), one_shot(0.5, step=1))
    state = tx.init(params)
    for gradient in [[0.0, 0.0], [0.0, -2.0], [0.5, -2.0]]:
        updates, state = tx.update({"w": jnp.array([gradient])}, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(params["w"], [[3.5, 0.0]])
    np.testing.assert_array_equal(dense_parameters(params, state)["w"], [[3.5, 5.0]])
    np.testing.assert_array_equal(seen[2]["w"], [[4.0, 3.0]])


@pytest.mark.parametrize("score", ["magnitude_gradient", "random"])
def test_other_scores(score):
    params = parameters()
    tx = prune(optax.sgd(0.125), one_shot(0.5, step=3), score=score, seed=7)
    pruned, state = run(tx, params, 3)[-1]
    master = dense_parameters(pruned, state)
    key = jax.random.fold_in(jax.random.key(7), 3)
    expected = make_masks(master, 0.5, gradients=gradients_at(2, params), score=score, key=key)
    by_magnitude = make_masks(master, 0.5)["first"]["kernel"]
    for name in "first", "second":
        np.testing.assert_array_equal(state.masks[name]["kernel"], expected[name]["kernel"])
    assert (by_magnitude != state.masks["first"]["kernel"]).any()


def test_gates_and_a_gate_that_stays_dense():
    params = {"dense_h": {"kernel": jax.random.normal(jax.random.key(0), (16, 32))}}
    target = Target("*/kernel", gates=4, only=(0, 2))
    tx = prune(optax.sgd(0.125), one_shot(0.25, step=1), target, scope="gate")
    pruned, _ = run(tx, params, 1)[-1]
    gates = np.asarray(pruned["dense_h"]["kernel"]).reshape(16, 4, 8)
    assert np.count_nonzero(gates, axis=(0, 2)).tolist() == [32, 128, 32, 128]


def test_nan_weights_are_kept():
    params = {"w": jnp.array([[1.0, math.nan, 0.5, 2.0]])}
    tx = prune(optax.sgd(0.125), one_shot(0.5, step=1))
    updates, _ = tx.update({"w": jnp.zeros((1, 4))}, tx.init(params), params)
    np.testing.assert_array_equal(optax.apply_updates(params, updates)["w"], [[0, math.nan, 0, 2]])


def test_parameters_without_elements():
    params = {"empty": jnp.ones((0, 4)), "none": jnp.ones((3, 0)), "w": jnp.ones((2, 2))}
    tx = prune(optax.sgd(0.125), one_shot(0.5, step=1), scope="model")
    pruned, _ = run(tx, params, 1)[-1]
    assert pruned["empty"].shape == (0, 4) and np.count_nonzero(pruned["w"]) == 2


def test_one_program_for_all_steps():
    params, traces = parameters(), []
    tx = prune(optax.adam(1e-2), half_epochs(0.5, steps_per_epoch=4, epochs=4, fixed_epochs=1))

    @jax.jit
    def update(gradients, state, params):
        traces.append(1)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    counts = [
        int(np.count_nonzero(pruned["first"]["kernel"]))
        for pruned, _ in run(tx, params, 16, update)
    ]
    assert len(traces) == 1
    assert counts == [96] + [48] * 15


def test_masks_change_only_at_pruning_steps():
    schedule = PruningSchedule(optax.constant_schedule(0.5), 3, 8, 3)
    history = run(prune(optax.sgd(0.125), schedule), parameters(), 12)
    masks = [np.ones((12, 8), bool), *(np.asarray(s.masks["first"]["kernel"]) for _, s in history)]
    changed = [step for step in range(1, 13) if (masks[step] != masks[step - 1]).any()]
    assert changed == [3, 6, 8]


# ---- Trees of other things than matrices ----


@pytest.mark.parametrize(
    "other",
    [
        jax.random.key(0),
        jax.random.split(jax.random.key(0), (2, 3)),
        Topology.from_mask(np.eye(4) > 0),
        CSR.fromdense(jnp.eye(4)),
        jnp.arange(6).reshape(2, 3),
        jnp.ones((2, 3), bool),
    ],
    ids=["key", "keys", "topology", "csr", "integers", "booleans"],
)
@pytest.mark.parametrize("inner", [optax.sgd(0.125), optax.adam(1e-2)], ids=["sgd", "adam"])
def test_what_is_no_floating_array_stays_as_it_is(other, inner):
    params = {"w": jnp.arange(1.0, 17).reshape(4, 4), "other": other}
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(other)]

    @jax.jit
    def update(state, params):
        gradients = jax.grad(lambda p: jnp.sum(p["w"] ** 2) / 2, allow_int=True)(params)
        updates, state = tx.update(gradients, state, params)
        if any(is_key):  # nothing can be added to a random key
            updates["other"], rest = None, {**params, "other": None}
            return optax.apply_updates(rest, updates) | {"other": params["other"]}, state
        return optax.apply_updates(params, updates), state

    tx = prune(inner, one_shot(0.25, step=1))
    state = tx.init(params)
    new, state = update(state, params)
    assert np.flatnonzero(np.asarray(new["w"]).ravel()).tolist() == [12, 13, 14, 15]
    assert jax.tree.leaves(state.masks["other"]) == []
    assert jax.tree.structure(new) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(new["other"]), jax.tree.leaves(other), strict=True):
        assert (a == b).all() and a.dtype == b.dtype
    verify(new, state)


@pytest.mark.parametrize(
    "wrap, params",
    [
        (lambda tx: tx, {}),
        (lambda tx: tx, {"bias": jnp.zeros(3), "scale": jnp.ones((2, 3))}),
        (lambda tx: optax.masked(tx, {"w": False}), {"w": jnp.ones((2, 2))}),
        (lambda tx: optax.masked(tx, {"w": False, "b": True}), {"w": jnp.ones((2, 2)), "b": 2.0}),
        (lambda tx: optax.partition({"a": tx}, {"w": "a", "b": "a"}), {"w": {}, "b": {}}),
        (
            lambda tx: optax.partition(
                {"a": tx, "rest": optax.sgd(0.5)}, {"w": "rest", "b": "rest"}
            ),
            {"w": jnp.ones((2, 2)), "b": jnp.zeros(2)},
        ),
    ],
    ids=["empty", "no matrix", "masked", "masked but one", "partition of nothing", "no member"],
)
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_where_there_is_no_matrix_nothing_is_pruned(wrap, params, scope):
    tx = wrap(prune(optax.sgd(0.5), one_shot(0.5, step=1), scope=scope))
    state = tx.init(params)
    gradients = jax.tree.map(jnp.ones_like, params)
    updates, state = tx.update(gradients, state, params)
    new = optax.apply_updates(params, updates)
    for name, x in new.items():
        assert np.all(np.asarray(jax.tree.leaves(x)) != 0), name
    with pytest.raises(ValueError, match=r"make_masks: where .* 'w', which matches none of bias"):
        make_masks({"bias": jnp.zeros(3)}, 0.5, "w")


# ---- Weights that a later transformation brings back ----


def undone(params, jit=False):
    """(params, state) of a chain with a transformation too many."""
    tx = optax.chain(prune(optax.sgd(0.125), one_shot(0.5, step=1), "*/kernel"), optax.scale(0.5))
    state = tx.init(params)

    def update(state, params):
        updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(3):
        params, state = (jax.jit(update) if jit else update)(state, params)
    return jax.block_until_ready((params, state))


UNDONE = r"must be 0, got others at 48 of 48 of first/kernel, 24 of 24 of second/kernel: something"


def test_a_transformation_after_it_is_warned_of_once():
    with pytest.warns(UserWarning, match=f"prune: pruned weights {UNDONE}") as caught:
        params, state = undone(parameters())
    assert len(caught) == 1
    with pytest.raises(ValueError, match=f"verify: pruned weights {UNDONE}"):
        verify(params, state)


def test_compiled_programs_raise_if_asked(monkeypatch):
    params, state = undone(parameters(), jit=True)
    with pytest.raises(ValueError, match=f"verify: pruned weights {UNDONE}"):
        verify(params, state)
    monkeypatch.setenv("JAXSPARSE_CHECK", "1")
    with pytest.raises(Exception, match=f"prune: pruned weights {UNDONE}"):
        undone(parameters(), jit=True)
        jax.effects_barrier()


def test_verifying_what_is_right():
    params = parameters()
    params["first"]["kernel"] = params["first"]["kernel"].at[0, :2].set(jnp.inf)
    groups = {"first": "a", "second": {"kernel": "b", "bias": "b"}}
    tx = optax.partition({k: prune(optax.sgd(0.125), CUBIC) for k in "ab"}, groups)
    for pruned, state in run(tx, params, 12):
        verify(pruned, state)
        verify(jax.tree.map(lambda x: x * jnp.nan, pruned), state)
    with pytest.raises(ValueError, match=r"got others at 36 of 36 of second/kernel: something"):
        verify({**pruned, "second": params["second"]}, state)
    with pytest.raises(TypeError, match="state must hold a PruneState, got tuple without one"):
        verify(params, (optax.EmptyState(),))


# ---- Errors ----


@pytest.mark.parametrize(
    "error, options, message",
    [
        (TypeError, {"schedule": 0.5}, "schedule must be a PruningSchedule, got float"),
        (ValueError, {"score": "size"}, "prune: score must be one of .* got 'size'"),
        (ValueError, {"scope": "row"}, "prune: scope must be one of .* got 'row'"),
        (ValueError, {"structure": "block"}, "prune: structure must be one of .* got 'block'"),
    ],
)
def test_errors(error, options, message):
    with pytest.raises(error, match=message):
        prune(optax.sgd(0.1), **{"schedule": one_shot(0.5, step=1), **options})


def test_errors_of_init_and_update():
    params = parameters()
    with pytest.raises(ValueError, match=r"prune: .* got 'third/kernel', which matches none of"):
        prune(optax.sgd(0.1), one_shot(0.5, step=1), "third/kernel").init(params)
    tx = prune(optax.sgd(0.1), one_shot(0.5, step=1))
    with pytest.raises(ValueError, match="update needs params, got None"):
        tx.update(params, tx.init(params))
