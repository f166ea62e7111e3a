"""The transformation: exact masks, a live master copy, optax and Flax around it, checkpoints."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")
ocp = pytest.importorskip("orbax.checkpoint")

from jaxsparse import CSR, Topology  # noqa: E402
from jaxsparse.pruning import (  # noqa: E402
    PruneState,
    PruningSchedule,
    Target,
    dense_parameters,
    half_epochs,
    make_masks,
    one_shot,
    pack_masks,
    packed_like,
    polynomial,
    prune,
    unpack_masks,
    verify,
)

CUBIC = polynomial(0.25, begin=2, end=10, frequency=2)


def bits(x):
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def assert_same_bits(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(bits(x), bits(y)), a, b)


def parameters(dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "first": {"kernel": jnp.asarray(rng.standard_normal((12, 8)), dtype)},
        "second": {
            "kernel": jnp.asarray(rng.standard_normal((8, 6)), dtype),
            "bias": jnp.zeros(6, dtype),
        },
    }


def gradients_at(step, params):
    """Large and uneven, so that many weights change sign and place."""
    rng = np.random.default_rng(step)
    return jax.tree.map(
        lambda x: jnp.asarray(
            rng.standard_normal(x.shape) * 4.0 ** rng.integers(-8, 3, x.shape), x.dtype
        ),
        params,
    )


def run(tx, params, steps, update=None, state=None, start=0):
    """(params, state) after each step."""

    @jax.jit
    def jitted(gradients, state, params):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    update = jitted if update is None else update
    state = tx.init(params) if state is None else state
    history = []
    for step in range(start, start + steps):
        params, state = update(gradients_at(step, params), state, params)
        history.append((params, state))
    return history


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


# ---- Within and around optax ----


def test_multi_steps_inside():
    """Mini-batches between two updates leave the master alone."""
    params = parameters()
    tx = prune(
        optax.MultiSteps(optax.sgd(0.125), 4).gradient_transformation(), one_shot(0.5, step=8)
    )
    history = run(tx, params, 10)
    assert_same_bits(history[2][0], params)
    dense = run(optax.MultiSteps(optax.sgd(0.125), 4), params, 10)
    assert_same_bits(history[6][0], dense[6][0])
    pruned, state = history[8]
    assert_same_bits(dense_parameters(pruned, state), dense[8][0])
    assert np.count_nonzero(pruned["first"]["kernel"]) == 48
    assert state.inner_state.gradient_step == 2


def test_multi_steps_outside():
    params = parameters()
    tx = optax.MultiSteps(prune(optax.sgd(0.125), one_shot(0.5, step=2)), 3)
    history = run(tx, params, 7)
    counts = [int(np.count_nonzero(pruned["first"]["kernel"])) for pruned, _ in history]
    assert counts == [96] * 5 + [48] * 2
    assert history[-1][1].inner_opt_state.step == 2
    dense = run(optax.MultiSteps(optax.sgd(0.125), 3), params, 7)[-1][0]
    assert_same_bits(dense_parameters(history[-1][0], history[-1][1].inner_opt_state), dense)


def test_a_chain_before_it():
    params = parameters()
    tx = optax.chain(optax.clip(0.5), prune(optax.sgd(0.125), one_shot(0.5, step=2)))
    pruned, (_, state) = run(tx, params, 4)[-1]
    dense = run(optax.chain(optax.clip(0.5), optax.sgd(0.125)), params, 4)[-1][0]
    assert_same_bits(dense_parameters(pruned, state), dense)
    assert isinstance(state, PruneState) and np.count_nonzero(pruned["first"]["kernel"]) == 48


def test_multi_transform_outside_and_inside():
    params = parameters()
    groups = {"first": "a", "second": {"kernel": "b", "bias": "rest"}}

    def outer(wrap):
        rates = {"a": 0.125, "b": 0.5, "rest": 0.25}
        return optax.multi_transform(
            {name: wrap(name, optax.sgd(rate)) for name, rate in rates.items()}, groups
        )

    schedules = {"a": one_shot(0.5, step=1), "b": one_shot(0.25, step=2)}
    tx = outer(lambda name, inner: prune(inner, schedules[name]) if name in schedules else inner)
    dense = run(outer(lambda name, inner: inner), params, 3)[-1][0]
    pruned, _ = run(tx, params, 3)[-1]
    assert np.count_nonzero(pruned["first"]["kernel"]) == 48
    assert np.count_nonzero(pruned["second"]["kernel"]) == 12
    kept = np.asarray(pruned["second"]["kernel"]) != 0
    np.testing.assert_array_equal(pruned["second"]["kernel"][kept], dense["second"]["kernel"][kept])
    np.testing.assert_array_equal(pruned["second"]["bias"], dense["second"]["bias"])

    inside = prune(outer(lambda name, inner: inner), one_shot(0.5, step=1))
    pruned, state = run(inside, params, 3)[-1]
    assert_same_bits(dense_parameters(pruned, state), dense)


def test_extra_arguments_reach_the_inner_optimizer():
    seen = []

    def update(updates, state, params=None, *, value, **_):
        seen.append(value)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    tx = prune(inner, one_shot(0.5, step=1))
    params = {"w": jnp.ones((2, 2))}
    tx.update(params, tx.init(params), params, value=3.0)
    assert seen == [3.0]


@pytest.mark.parametrize("narrow", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("inner", [optax.sgd(0.125), optax.adam(1e-2)], ids=["sgd", "adam"])
def test_conditions_around_it_and_gradients_of_another_dtype(narrow, inner):
    """As the docstring has it: gradients are cast to the parameters' dtype first."""
    as_parameters = optax.stateless(lambda u, params: optax.tree.cast_like(u, params))
    pruned = prune(inner, one_shot(0.5, step=2))
    tx = optax.chain(as_parameters, optax.apply_if_finite(pruned, 3))
    params = parameters()
    state = tx.init(params)
    for step in range(3):
        gradients = optax.tree.cast(gradients_at(step, params), narrow)
        updates, state = tx.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    assert np.count_nonzero(params["first"]["kernel"]) == 48


def on_even_steps(tx):
    """A condition as a program may have it around an optimizer."""

    def update(updates, state, params):
        count, inner_state = state
        updates, inner_state = jax.lax.cond(
            count % 2 == 0,
            lambda: tx.update(updates, inner_state, params),
            lambda: (jax.tree.map(jnp.zeros_like, updates), inner_state),
        )
        return updates, (count + 1, inner_state)

    return optax.GradientTransformation(lambda params: (jnp.int32(0), tx.init(params)), update)


CONDITIONS = {
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "conditionally_transform": lambda tx: optax.conditionally_transform(tx, lambda step: step < 9),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
    "cond": on_even_steps,
}


def test_conditions_around_it_and_gradients_wider_than_parameters():
    """An optimizer that computes in the parameters' dtype: updates have the gradients' own."""
    as_parameters = optax.stateless(lambda u, params: optax.tree.cast_like(u, params))
    pruned = prune(optax.chain(as_parameters, optax.sgd(0.125)), one_shot(0.5, step=1))
    params = {"kernel": jnp.arange(1, 9, dtype=jnp.bfloat16).reshape(2, 4)}
    gradients = {"kernel": jnp.full((2, 4), 0.3)}
    for condition in CONDITIONS.values():
        tx = condition(pruned)
        state = tx.init(params)
        updates, new_state = jax.eval_shape(tx.update, gradients, state, params)
        assert updates["kernel"].dtype == jnp.float32
        assert jax.tree.map(jnp.result_type, new_state) == jax.tree.map(jnp.result_type, state)
    updates, _ = jax.jit(tx.update)(gradients, state, params)
    got = optax.apply_updates(params, updates)["kernel"]
    np.testing.assert_array_equal(got[0], jnp.zeros(4))
    np.testing.assert_array_equal(got[1], params["kernel"][1] - jnp.bfloat16(0.125 * 0.3))


SHARPNESS = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))


@pytest.mark.parametrize("place", ["around", "opaque", "inside"])
def test_sharpness_aware_minimization(place):
    """It adds states times 0 and 1, which makes integers of masks."""
    schedule = one_shot(0.5, step=1 if place != "inside" else 3)
    tx = {
        "around": lambda: optax.contrib.sam(prune(optax.sgd(0.125), schedule), SHARPNESS),
        "opaque": lambda: optax.contrib.sam(
            prune(optax.sgd(0.125), schedule), SHARPNESS, opaque_mode=True
        ),
        "inside": lambda: prune(optax.contrib.sam(optax.sgd(0.125), SHARPNESS), schedule),
    }[place]()
    params = {"w": parameters()["first"]["kernel"]}
    state = tx.init(params)

    def slope(params, _=None):
        return jax.tree.map(lambda w: 2 * (w - 1), params)

    @jax.jit
    def update(state, params):
        options = {"grad_fn": slope} if place == "opaque" else {}
        updates, state = tx.update(slope(params), state, params, **options)
        return optax.apply_updates(params, updates), state

    for _ in range(6):
        params, state = update(state, params)
    found = [node for node in jax.tree.leaves(state, is_leaf=is_state) if is_state(node)]
    mask = np.asarray(found[0].masks["w"], bool)
    assert mask.sum() == 48
    # Around it, differences of parameters are added to parameters, which rounds.
    exact = place != "around"
    np.testing.assert_allclose(params["w"][~mask], 0, atol=0 if exact else 1e-6)
    if exact:
        verify(params, state)


def is_state(node):
    return isinstance(node, PruneState)


def test_specifications_of_the_state():
    """`optax.tree.map_params` finds the trees that are like the parameters."""
    params = parameters()
    tx = prune(optax.adam(1e-2), one_shot(0.5, step=1), "*/kernel")
    specs = jax.tree.map(lambda x: f"{x.ndim} dimensions", params)
    state = optax.tree.map_params(
        tx,
        lambda x, spec: x if isinstance(x, optax.MaskedNode) else spec,
        tx.init(params),
        specs,
        transform_non_params=lambda _: "whole",
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )
    expected = {
        "first": {"kernel": "2 dimensions"},
        "second": {"kernel": "2 dimensions", "bias": optax.MaskedNode()},
    }
    assert state.masks == state.pruned_weights == expected
    assert state.step == "whole" and state.inner_state[0].mu == specs


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
    with pytest.raises(ValueError, match=r"got others at 36 of 36 of second/kernel: something"):
        verify({**pruned, "second": params["second"]}, state)
    with pytest.raises(TypeError, match="state must hold a PruneState, got tuple without one"):
        verify(params, (optax.EmptyState(),))


# ---- Within Flax ----


def model_of(seed=0):
    rngs = nnx.Rngs(seed)
    return nnx.Sequential(nnx.Linear(12, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 4, rngs=rngs))


X = jax.random.normal(jax.random.key(0), (16, 12))
Y = jax.random.normal(jax.random.key(1), (16, 4))


@nnx.jit(donate_argnames=("model", "optimizer"))
def train_step(model, optimizer):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(X) - Y) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


TX = prune(
    optax.adam(1e-2),
    polynomial(0.25, begin=2, end=8, frequency=2),
    "*/kernel",
    structure="row_balanced",
)


def optimizer_of(model):
    return nnx.Optimizer(model, TX, wrt=nnx.Param)


def test_nnx_optimizer():
    model = model_of()
    optimizer = optimizer_of(model)
    losses = [train_step(model, optimizer) for _ in range(40)]
    assert losses[-1] < 0.8 * losses[0]
    kernel = np.asarray(model.layers[0].kernel[...])
    assert np.count_nonzero(kernel, axis=0).tolist() == [3] * 32
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    master = dense_parameters(params, nnx.as_pure(optimizer.opt_state))
    assert np.count_nonzero(master["layers"][0]["kernel"]) > np.count_nonzero(kernel)
    verify(nnx.state(model, nnx.Param), optimizer.opt_state)
    with pytest.raises(ValueError, match=r"of layers/0/kernel, .* of layers/2/kernel: something"):
        verify(nnx.state(model_of(), nnx.Param), optimizer.opt_state)


def test_nnx_names_that_match_nothing():
    tx = prune(optax.sgd(0.1), one_shot(0.5, step=1), "layers/1/kernel")
    with pytest.raises(ValueError, match="'layers/1/kernel', which matches none of layers/0/bias"):
        nnx.Optimizer(model_of(), tx, wrt=nnx.Param)


def test_interrupted_runs_resume_bitwise(tmp_path):
    """Saved and restored at every phase: before, amid and after pruning."""
    unbroken, model = model_of(), model_of()
    unbroken_optimizer, optimizer = optimizer_of(unbroken), optimizer_of(model)
    for step in range(12):
        train_step(unbroken, unbroken_optimizer)
        train_step(model, optimizer)
        if step in (0, 4, 10):
            path = tmp_path / str(step)
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(path, pack_masks(nnx.state((model, optimizer))))
            model = model_of(seed=1)  # nothing of the old run is left
            optimizer = optimizer_of(model)
            state = nnx.state((model, optimizer))
            with ocp.StandardCheckpointer() as checkpointer:
                packed = checkpointer.restore(path, packed_like(state))
            nnx.update((model, optimizer), unpack_masks(packed, state))
        assert_same_bits(
            jax.tree.leaves(nnx.state((model, optimizer))),
            jax.tree.leaves(nnx.state((unbroken, unbroken_optimizer))),
        )
    stored = jax.tree.leaves(jax.eval_shape(pack_masks, nnx.state(optimizer)))
    assert not any(x.dtype == bool for x in stored)


# ---- Sharding ----


DEVICES = jax.devices("cpu")


@pytest.mark.skipif(len(DEVICES) < 8, reason="needs 8 CPU devices (tests/conftest.py)")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("structure", ["unstructured", "row_balanced"])
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_state_is_sharded_like_the_parameters(kind, structure, scope):
    mesh = jax.make_mesh((4, 2), ("data", "model"), (kind, kind), devices=DEVICES[:8])
    rng = np.random.default_rng(0)
    params = {
        "a": jnp.asarray(rng.standard_normal((16, 8)), jnp.float32),
        "b": jnp.asarray(rng.standard_normal((8, 12)), jnp.float32),
    }
    shardings = {"a": NamedSharding(mesh, P("data", "model")), "b": NamedSharding(mesh, P("model"))}
    tx = prune(optax.sgd(0.125), CUBIC, structure=structure, scope=scope)
    expected = run(tx, params, 6)[-1]

    @jax.jit
    def update(gradients, state, params):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    def placed(gradients, state, params):
        return update(jax.device_put(gradients, shardings), state, params)

    with jax.set_mesh(mesh):
        history = run(tx, jax.device_put(params, shardings), 6, placed)
        for sharded, state in history:
            for tree in sharded, state.masks, state.pruned_weights:
                for name, x in tree.items():
                    assert x.sharding.is_equivalent_to(shardings[name], x.ndim), (name, x.sharding)
        first = jax.tree.leaves(tx.init(jax.device_put(params, shardings)).masks)
        assert [x.sharding.spec for x in first] == [P("data", "model"), P("model")]
        packed = jax.jit(pack_masks)(state.masks)
        restored = unpack_masks(packed, state.masks)
        assert restored["a"].sharding.is_equivalent_to(shardings["a"], 2)
    assert update._cache_size() <= 2  # the first state's scalar is not committed
    assert_same_bits(sharded, expected[0])
    jax.tree.map(np.testing.assert_array_equal, state.masks, expected[1].masks)
    jax.tree.map(np.testing.assert_array_equal, restored, expected[1].masks)


@pytest.mark.skipif(len(DEVICES) < 8, reason="needs 8 CPU devices (tests/conftest.py)")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_runs_resume_on_fewer_devices(tmp_path, kind):
    """Saved on 8 devices, restored on 8, 4 and 1."""
    tx = prune(optax.adam(1e-2), CUBIC)
    # 4 bytes of a packed "a" divide among 4 devices, 2 of "b" do not.
    specs = {"a": P(None, "model"), "b": P("data", "model")}

    def run_on(devices):
        data = 2 if devices == 8 else 1
        mesh = jax.make_mesh(
            (data, devices // data), ("data", "model"), (kind, kind), devices=DEVICES[:devices]
        )
        shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        rng = np.random.default_rng(devices)
        params = {
            "a": jnp.asarray(rng.standard_normal((6, 28)), jnp.float32),
            "b": jnp.asarray(rng.standard_normal((8, 12)), jnp.float32),
        }
        params = jax.device_put(params, shardings)
        return mesh, shardings, params, tx.init(params)

    @jax.jit
    def update(gradients, state, params):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    mesh, shardings, params, state = run_on(8)
    with jax.set_mesh(mesh):
        for step in range(5):
            gradients = jax.device_put(gradients_at(step, params), shardings)
            params, state = update(gradients, state, params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", pack_masks((params, state)))
    saved = jax.tree.map(np.asarray, (params, state))
    assert not saved[1].masks["a"].all()

    for devices in 8, 4, 1:
        mesh, shardings, *fresh = run_on(devices)
        fresh = tuple(fresh)
        like = packed_like(fresh)
        with ocp.StandardCheckpointer() as checkpointer:
            packed = checkpointer.restore(tmp_path / "run", like)
        assert packed[1].masks["b"].shape == (8, 2)
        restored = unpack_masks(packed, fresh)
        assert jax.tree.structure(restored) == jax.tree.structure(fresh)
        jax.tree.map(np.testing.assert_array_equal, restored, saved)
        params, state = restored
        for tree in params, state.masks, state.pruned_weights, state.inner_state[0].mu:
            for name, x in tree.items():
                assert x.sharding.is_equivalent_to(shardings[name], x.ndim), (name, x.sharding)
        assert state.step.sharding.is_fully_replicated
        with jax.set_mesh(mesh):
            gradients = jax.device_put(gradients_at(5, params), shardings)
            params, state = update(gradients, state, params)
        assert int(state.step) == 6


@pytest.mark.skipif(len(DEVICES) < 8, reason="needs 8 CPU devices (tests/conftest.py)")
def test_unpacking_places_every_leaf():
    mesh = jax.make_mesh((4,), ("model",), (AxisType.Auto,), devices=DEVICES[:4])
    split, whole = NamedSharding(mesh, P(None, "model")), NamedSharding(mesh, P())
    state = {
        "mask": jax.device_put(jnp.ones((3, 32), bool), split),
        "odd": jax.device_put(jnp.ones((3, 12), bool), split),
        "weight": jax.device_put(jnp.ones((3, 4)), split),
        "step": jnp.zeros([], jnp.int32),  # not committed: it belongs to no device
    }
    like = packed_like(state)
    assert like["mask"].sharding == like["weight"].sharding == split
    assert like["odd"].sharding.is_equivalent_to(whole, 2) and like["step"].sharding == whole
    packed = jax.tree.map(np.asarray, pack_masks(state))
    abstract = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=None if name == "step" else split)
        for name, x in state.items()
    }
    for target in state, abstract:
        restored = unpack_masks(packed, target)
        for name in "mask", "odd", "weight":
            assert restored[name].sharding.is_equivalent_to(split, 2)
        jax.tree.map(np.testing.assert_array_equal, restored, state)


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
