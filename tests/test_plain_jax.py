"""Plain JAX, Optax and Flax on trees of sparse matrices: values change, patterns do not."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxsparse
from jaxsparse import CSR

RNG = np.random.default_rng(0)
DENSE = np.where(RNG.random((6, 9)) < 0.4, RNG.standard_normal((6, 9)), 0).astype(np.float32)
MASK = DENSE != 0
X = jnp.asarray(RNG.standard_normal((9, 3)), jnp.float32)


def params_of(matrix):
    return {"matrix": matrix, "bias": jnp.ones((6, 1))}


def loss(params):
    matrix = params["matrix"]
    y = matrix @ X if isinstance(matrix, CSR) else jnp.dot(matrix, X, precision="highest")
    return jnp.sum((jnp.tanh(y + params["bias"]) - 0.5) ** 2)


def dense_loss(params):
    return loss({**params, "matrix": params["matrix"] * MASK})


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1, weight_decay=0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
    "every second": optax.MultiSteps(optax.sgd(0.1), 2),
    "lion": optax.lion(0.1),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("grad", [jax.grad, jaxsparse.grad])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, grad, jit):
    """Every optimizer does with a matrix what it does with a dense one that is masked."""
    tx = OPTIMIZERS[name]

    def steps(loss, params):
        def step(params, state):
            updates, state = tx.update(grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        state, step = tx.init(params), jax.jit(step) if jit else step
        for _ in range(4):
            params, state = step(params, state)
        return params

    a = CSR.fromdense(DENSE)
    sparse = steps(loss, params_of(a))
    dense = steps(dense_loss, params_of(jnp.asarray(DENSE)))
    np.testing.assert_allclose(sparse["matrix"].todense(), dense["matrix"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sparse["bias"], dense["bias"], rtol=1e-4, atol=1e-5)
    assert jax.tree.structure(sparse) == jax.tree.structure(params_of(a))
    assert sparse["matrix"].topology is a.topology
    assert optax.tree.size(sparse) == MASK.sum() + 6


def test_indices_beyond_16_bits():
    """Columns that no float32 nor 16-bit number can hold survive three steps."""
    columns = np.sort(RNG.choice(2**24 + 7, (4, 100), replace=False), axis=1)
    topology = jaxsparse.Topology(np.arange(5) * 100, columns.ravel(), (4, 2**24 + 7))
    a = CSR(jnp.ones(400), topology)
    tx = optax.adamw(0.1)
    state = tx.init(a)
    for _ in range(3):
        updates, state = tx.update(jax.tree.map(jnp.ones_like, a), state, a)
        a = optax.apply_updates(a, updates)
    np.testing.assert_array_equal(a.topology.column_indices, columns.ravel())


def test_global_norm_counts_values_alone():
    a = CSR.fromdense(DENSE)
    np.testing.assert_allclose(optax.global_norm(a), np.linalg.norm(DENSE), rtol=1e-6)
    for dynamic in (CSR.fromdense(DENSE, nse=30), CSR.fromdense(DENSE[None])):
        with pytest.raises(TypeError, match="float0"):
            optax.global_norm(jaxsparse.grad(lambda a: jnp.sum(a.values))(dynamic))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_stop_at_dynamic_patterns(name, jit):
    """The pattern of such a matrix is among its leaves: arithmetic fails instead of changing it."""
    a, tx = CSR.fromdense(DENSE, nse=30), OPTIMIZERS[name]
    gradient = jaxsparse.grad(lambda a: jnp.sum((a @ X) ** 2))(a)
    gradient = (jax.jit(lambda g: g) if jit else lambda g: g)(gradient)
    with pytest.raises(TypeError, match=r"float0|power|multiply"):
        state = tx.init(a)
        for _ in range(2):
            updates, state = tx.update(gradient, state, a)
            optax.apply_updates(a, updates)
    np.testing.assert_array_equal((a - 0.5 * gradient).values, a.values - 0.5 * gradient.values)


@pytest.mark.parametrize("jit", [False, True])
def test_gradient_descent_by_hand(jit):
    step = lambda a: a - 0.1 * jaxsparse.grad(lambda a: jnp.sum((a @ X) ** 2) / 2)(a)  # noqa: E731
    step = jax.jit(step) if jit else step
    expected = DENSE - 0.1 * MASK * (DENSE @ X @ X.T)
    for a in CSR.fromdense(DENSE), CSR.fromdense(DENSE, nse=30):
        np.testing.assert_allclose(step(a).todense(), expected, rtol=1e-5, atol=1e-6)
        scanned, _ = jax.lax.scan(lambda a, _: (step(a), None), a, length=1)
        np.testing.assert_allclose(scanned.todense(), expected, rtol=1e-5, atol=1e-6)
        gradient = jax.jit(jaxsparse.grad(lambda a: jnp.sum((a @ X) ** 2) / 2))(a)
        np.testing.assert_allclose((a - 0.1 * gradient).todense(), expected, rtol=1e-5, atol=1e-6)


def test_transformations_of_jax():
    a, dense = CSR.fromdense(DENSE), jnp.asarray(DENSE)
    tangent = jax.tree.map(jnp.ones_like, a)
    product = lambda a: (a @ X if isinstance(a, CSR) else jnp.dot(a, X, precision="highest")) ** 2  # noqa: E731
    primal, derivative = jax.jvp(product, (a,), (tangent,))
    expected = jax.jvp(product, (dense,), (jnp.asarray(MASK, jnp.float32),))
    np.testing.assert_allclose(primal, expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(derivative, expected[1], rtol=1e-5, atol=1e-5)
    jacobians = [jac(lambda a: jnp.sum(product(a), 1))(a) for jac in (jax.jacfwd, jax.jacrev)]
    expected = jax.jacfwd(lambda a: jnp.sum(product(a), 1))(dense) * MASK
    for jacobian in jacobians:
        np.testing.assert_allclose(jacobian.todense(), expected, rtol=1e-4, atol=1e-5)
    batch = jax.tree.map(lambda v: jnp.stack([v, 2 * v]), a)
    np.testing.assert_allclose(
        jax.vmap(lambda a: a @ X)(batch), jnp.stack([a @ X, 2 * (a @ X)]), rtol=1e-6
    )
    exported = jax.export.export(
        jax.jit(lambda a: 2 * a), disabled_checks=jaxsparse.EXPORT_DISABLED_CHECKS
    )(a)
    again = jax.export.deserialize(exported.serialize()).call(a)
    np.testing.assert_array_equal(again.todense(), 2 * DENSE)


def test_flax_parameters():
    class Model(nnx.Module):
        def __init__(self, matrix):
            self.matrix = nnx.Param(matrix)
            self.bias = nnx.Param(jnp.ones((6, 1)))

    def model_loss(model):
        return loss({"matrix": model.matrix[...], "bias": model.bias[...]})

    a, tx = CSR.fromdense(DENSE), optax.adamw(0.1)
    model = Model(a)
    state = tx.init(nnx.state(model, nnx.Param))

    @nnx.jit
    def step(model, state):
        value, gradient = nnx.value_and_grad(model_loss)(model)
        params = nnx.state(model, nnx.Param)
        updates, state = tx.update(gradient, state, params)
        nnx.update(model, optax.apply_updates(params, updates))
        return value, state

    losses = []
    for _ in range(5):
        value, state = step(model, state)
        losses.append(value)
    assert losses[-1] < losses[0]
    assert model.matrix.get_value().topology is a.topology


def test_programs_are_compiled_for_static_patterns_and_not_for_dynamic_ones():
    traced = []

    @jax.jit
    def product(a):
        traced.append(a.topology.static)
        return a @ X

    mirrored = np.ascontiguousarray(DENSE[:, ::-1])
    for dense in (DENSE, DENSE.copy(), mirrored):
        np.testing.assert_allclose(product(CSR.fromdense(dense)), dense @ X, rtol=1e-5, atol=1e-6)
    assert traced == [True, True]  # an equal pattern is the same one
    for dense in (DENSE, mirrored):
        a = CSR.fromdense(dense, nse=30)
        np.testing.assert_allclose(product(a), dense @ X, rtol=1e-5, atol=1e-6)
    assert traced == [True, True, False]
    with pytest.raises(ValueError, match="positions"):
        jax.tree.map(jnp.add, CSR.fromdense(DENSE), CSR.fromdense(mirrored))


def test_kinds_of_topologies():
    topology = CSR.fromdense(DENSE).topology
    assert topology.static and topology.T.static and topology.T.T is not None
    assert topology.as_static() is topology and topology.as_dynamic().as_static().static
    assert not jax.tree.map(lambda x: x, topology).static
    padded = jaxsparse.Topology([0, 1], [0, 1], (1, 2))
    assert not padded.static and padded.as_static().static
    batch = CSR.fromdense(DENSE[None]).topology
    assert not batch.static
    with pytest.raises(ValueError, match=re.escape("as_static: needs one concrete pattern")):
        batch.as_static()
    with pytest.raises(ValueError, match="got a traced"):
        jax.jit(lambda t: t.as_static().row_offsets)(topology)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: jaxsparse.grad(lambda a: a.values.sum())(a=a), "got 0 of them and a by name"),
        (lambda a: jaxsparse.grad(lambda a: a.values.sum(), 1)(a), "argnums=1 needs arguments"),
        (lambda a: jaxsparse.grad(lambda a: a.values.sum(), (0, -2))(a), "argnums=(0, -2) needs"),
    ],
)
def test_arguments_of_grad(call, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        call(CSR.fromdense(DENSE))


def test_a_gradient_that_left_a_program_says_how_to_get_its_positions():
    a = CSR.fromdense(DENSE, nse=30)
    gradient = jax.jit(jaxsparse.grad(lambda a: jnp.sum(a.values)))(a)
    for use in (gradient.todense, lambda: gradient @ X, lambda: gradient.T, gradient.to_scipy):
        with pytest.raises(ValueError, match=re.escape("use a.with_values(gradient.values)")):
            use()
    assert repr(gradient).startswith("CSR(values=float32[30]")
