"""The transformation within and around optax and Flax, and runs that resume."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")
ocp = pytest.importorskip("orbax.checkpoint")

from pruning_problems import (  # noqa: E402
    assert_same_bits,
    gradients_at,
    parameters,
    run,
)

from jaxsparse.pruning import (  # noqa: E402
    PruneState,
    bits_like,
    bits_to_masks,
    dense_parameters,
    masks_to_bits,
    one_shot,
    polynomial,
    prune,
    verify,
)

# ---- Within and around optax ----


# Means of two gradients: whether a program fuses the division into the sum then changes no bit.


def test_multi_steps_inside():
    """Mini-batches between two updates leave the master alone."""
    params = parameters()
    tx = prune(
        optax.MultiSteps(optax.sgd(0.125), 2).gradient_transformation(), one_shot(0.5, step=8)
    )
    history = run(tx, params, 10)
    assert_same_bits(history[0][0], params)
    assert_same_bits(history[2][0], history[1][0])
    dense = run(optax.MultiSteps(optax.sgd(0.125), 2), params, 10)
    assert_same_bits(history[6][0], dense[6][0])
    pruned, state = history[8]
    assert_same_bits(dense_parameters(pruned, state), dense[8][0])
    assert np.count_nonzero(pruned["first"]["kernel"]) == 48
    assert state.inner_state.gradient_step == 4


def test_multi_steps_outside():
    params = parameters()
    tx = optax.MultiSteps(prune(optax.sgd(0.125), one_shot(0.5, step=2)), 2)
    history = run(tx, params, 5)
    counts = [int(np.count_nonzero(pruned["first"]["kernel"])) for pruned, _ in history]
    assert counts == [96] * 3 + [48] * 2
    assert history[-1][1].inner_opt_state.step == 2
    dense = run(optax.MultiSteps(optax.sgd(0.125), 2), params, 5)[-1][0]
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
                checkpointer.save(path, masks_to_bits(nnx.state((model, optimizer))))
            model = model_of(seed=1)  # nothing of the old run is left
            optimizer = optimizer_of(model)
            state = nnx.state((model, optimizer))
            with ocp.StandardCheckpointer() as checkpointer:
                packed = checkpointer.restore(path, bits_like(state))
            nnx.update((model, optimizer), bits_to_masks(packed, state))
        assert_same_bits(
            jax.tree.leaves(nnx.state((model, optimizer))),
            jax.tree.leaves(nnx.state((unbroken, unbroken_optimizer))),
        )
    stored = jax.tree.leaves(jax.eval_shape(masks_to_bits, nnx.state(optimizer)))
    assert not any(x.dtype == bool for x in stored)
