"""grad and value_and_grad of functions of CSR matrices.

Values are small integers wherever possible, so that results are exact and compared as such.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from csr_problems import DENSE, SHAPE, A, assert_same, integers, sparse

import jaxsparse
from jaxsparse import CSR, spmm


def loss(a, x, scale):
    """Of a CSR or a dense matrix."""
    y = a @ x if isinstance(a, CSR) else jnp.dot(a, x, precision="highest")
    return jnp.sum(scale * y**2)


MASK = (DENSE != 0).astype(np.float32)
OPERANDS = (A, jnp.asarray(integers(8, 9, 3)), jnp.float32(2))


def dense_gradients():
    value, gradients = jax.value_and_grad(loss, (0, 1, 2))(jnp.asarray(DENSE), *OPERANDS[1:])
    return value, (gradients[0] * MASK, *gradients[1:])


@pytest.mark.smoke
@pytest.mark.parametrize("argnums", [0, 1, -1, (0,), (0, 2), (2, 0), (0, 1, 2)])
@pytest.mark.parametrize("jit", [False, True])
def test_grad(argnums, jit):
    value, gradients = dense_gradients()
    wrap = jax.jit if jit else lambda f: f
    actual_value, actual = wrap(jaxsparse.value_and_grad(loss, argnums))(*OPERANDS)
    assert actual_value == value
    alone = wrap(jaxsparse.grad(loss, argnums))(*OPERANDS)
    assert_same(alone, actual)
    if isinstance(argnums, int):
        argnums, actual = (argnums,), (actual,)
    assert isinstance(actual, tuple)
    for position, gradient in zip(argnums, actual, strict=True):
        if position == 0:
            assert isinstance(gradient, CSR)
            assert jit or gradient.topology is A.topology
            assert_same(gradient.topology, A.topology)
            gradient = gradient.todense()
        np.testing.assert_array_equal(gradient, gradients[position])


@pytest.mark.parametrize("jit", [False, True])
def test_grad_of_nested_matrices_with_aux(jit):
    _, x, scale = OPERANDS
    params = {"layers": [(A, x), (2 * A, x)], "scale": scale, "bias": None}

    def fun(params, *, shift):
        losses = [loss(a, x, params["scale"]) for a, x in params["layers"]]
        return sum(losses) + shift, {"losses": losses, "shape": params["layers"][0][0].values}

    wrap = jax.jit if jit else lambda f: f
    both = wrap(jaxsparse.value_and_grad(fun, has_aux=True))
    (value, aux), gradient = both(params, shift=1.0)
    base, (dense, dx, dscale) = dense_gradients()
    assert value == 5 * base + 1 and aux["losses"] == [base, 4 * base]
    np.testing.assert_array_equal(aux["shape"], A.values)
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    for (da, dxi), factor in zip(gradient["layers"], (1, 2), strict=True):
        np.testing.assert_array_equal(da.todense(), factor * dense)
        np.testing.assert_array_equal(dxi, factor**2 * dx)
    np.testing.assert_array_equal(gradient["scale"], 5 * dscale)
    again, aux_again = wrap(jaxsparse.grad(fun, has_aux=True))(params, shift=1.0)
    assert_same((again, aux_again), (gradient, aux))


def test_gradient_descent_on_a_matrix():
    """A gradient can be scaled and subtracted, eagerly and in one program."""

    def step(a):
        return a - 0.5 * jaxsparse.grad(loss)(a, *OPERANDS[1:])

    expected = DENSE - 0.5 * dense_gradients()[1][0]
    for function in step, jax.jit(step):
        np.testing.assert_array_equal(function(A).todense(), expected)


def test_grad_of_padding_and_batches():
    dense = sparse(1, 3, *SHAPE)
    a, x = CSR.fromdense(dense, nse=40), OPERANDS[1]
    gradient = jaxsparse.grad(loss)(a, x, 1.0)
    expected = jax.grad(loss)(jnp.asarray(dense), x, 1.0) * (dense != 0)
    np.testing.assert_array_equal(gradient.todense(), expected)
    np.testing.assert_array_equal(CSR.fromdense(dense, gradient.topology).todense(), dense)
    padding = np.arange(40) >= a.topology.nnz[:, None]
    np.testing.assert_array_equal(np.asarray(gradient.values)[padding], 0)


def test_gradients_without_positions_say_so_and_take_those_of_another_matrix():
    a, x = CSR.fromdense(DENSE, nse=40), OPERANDS[1]
    gradient = jax.jit(jaxsparse.grad(loss))(a, x, 1.0)
    for read in (
        lambda: gradient.to_bcsr(),
        lambda: gradient.topology.nnz,
        lambda: gradient.topology.as_static(),
        lambda: gradient[:2],
    ):
        with pytest.raises(ValueError, match=r"without its positions: use a.with_values"):
            read()
    expected = 2 * (DENSE @ x) @ x.T * MASK
    np.testing.assert_array_equal((gradient * a).todense(), expected * DENSE)
    np.testing.assert_array_equal((gradient - a).todense(), expected - DENSE)
    np.testing.assert_array_equal((gradient > a).todense(), expected > DENSE)


def test_second_derivatives():
    direction = CSR(integers(9, A.nse), A.topology)

    def slope(a):
        gradient = jaxsparse.grad(loss)(a, *OPERANDS[1:])
        return jnp.sum(gradient.values * direction.values)

    # The loss is quadratic: its Hessian times the direction is the direction's own gradient.
    expected = jaxsparse.grad(loss)(direction, *OPERANDS[1:])
    assert_same(jaxsparse.grad(slope)(A), expected)


def test_grad_passes_arguments_on():
    def fun(a, n):
        return jnp.sum((a @ OPERANDS[1]) * n)

    _, counts = jaxsparse.grad(fun, (0, 1), allow_int=True)(A, 3)
    assert counts.dtype == jax.dtypes.float0
    with pytest.raises(TypeError, match="real- or complex-valued inputs"):
        jaxsparse.grad(fun, (0, 1))(A, 3)
    with pytest.raises(TypeError, match="scalar-output"):
        jaxsparse.grad(lambda a: a.values)(A)
    assert jaxsparse.grad(loss).__name__ == jaxsparse.value_and_grad(loss).__name__ == "loss"


def test_grad_of_a_matrix_made_by_spmm_and_fromdense():
    """Values that depend on each other stay differentiable through a change of topology."""

    def function(x):
        a = CSR.fromdense(x, MASK)
        return jnp.sum(spmm(a.T, spmm(a, OPERANDS[1])))

    def dense_function(x):
        a = jnp.where(MASK, x, 0)
        y = jnp.dot(a, OPERANDS[1], precision="highest")
        return jnp.sum(jnp.dot(a.T, y, precision="highest"))

    np.testing.assert_array_equal(jax.grad(function)(DENSE), jax.grad(dense_function)(DENSE))


def test_argnums_may_be_any_integer():
    a = CSR.fromdense(np.eye(2, dtype=np.float32))
    gradient = jaxsparse.grad(lambda x, a: jnp.sum(a @ x), np.int64(1))(jnp.ones(2), a)
    np.testing.assert_array_equal(gradient.values, 1)
