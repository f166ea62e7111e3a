"""Whether programs stop at a bad pattern where JAXSPARSE_CHECK=1."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from patterns import BAD, PATTERNS, WIDE, everything, leaves, normal, operations

import jaxsparse
from jaxsparse import CSR, Topology


@pytest.fixture
def check(monkeypatch):
    monkeypatch.setenv("JAXSPARSE_CHECK", "1")


def run(function, *operands):
    """In a program of its own, traced now."""
    return jax.block_until_ready(jax.jit(lambda *xs: function(*xs))(*operands))


@pytest.mark.smoke
@pytest.mark.parametrize("name", BAD)
def test_check_names_the_row(check, name):
    offsets, columns, _, row = BAD[name]
    x, y = jnp.ones((4, 2)), jnp.ones((3, 2))

    def product(offsets, columns):
        return everything(offsets, columns, x, y)[1]

    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"bad pattern at row {row} \("):
        run(product, np.array(offsets), np.array(columns))
    batch = np.array([[0, 1, 2, 3], offsets]), np.array([[0, 1, 2, 3], columns])
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=rf"bad pattern at row {row} of batch entry 1 \("
    ):
        run(lambda o, c: CSR(jnp.ones(4), Topology(o, c, (3, 4))) @ x, *batch)


def test_check_of_a_running_program(check):
    @jax.jit
    def product(offsets, columns):
        return CSR(jnp.ones(4), Topology(offsets, columns, (3, 4))) @ jnp.ones((4, 2))

    good, bad = (np.array([0, 1, 3, 4]), np.array([2, 0, 3, 1])), BAD["unsorted"][:2]
    expected = [[1, 1], [2, 2], [1, 1]]
    for _ in range(3):
        np.testing.assert_array_equal(product(*good), expected)
        # JAX raises a ValueError if it finds the error while it still dispatches.
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="bad pattern at row 2"):
            jax.block_until_ready(product(*map(np.array, bad)))
    np.testing.assert_array_equal(product(*good), expected)


@pytest.mark.parametrize("name", operations())
@pytest.mark.parametrize("corrupt", [lambda x: x[::-1], lambda x: x + 1], ids=["turned", "raised"])
def test_check_of_a_corrupted_topology(check, name, corrupt):
    function, shapes = operations(change=corrupt)[name]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"bad pattern at row \d+ \(offsets"):
        run(function, *normal(shapes))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: CSR.fromdense(x, nse=7),
        lambda x: CSR.fromdense(x, x != 0, nse=7),
        lambda x: CSR(jnp.ones(7), Topology.from_mask((x != 0).astype(int), nse=7)),
        lambda x: CSR(jnp.ones(7), Topology.from_mask(lambda i, j: x[i, j] != 0, x.shape, nse=7)),
        lambda x: jax.vmap(lambda x: CSR.fromdense(x, nse=7))(jnp.stack([0 * x, x])),
    ],
    ids=["fromdense", "mask", "integers", "function", "batch"],
)
def test_check_names_an_nse_that_is_too_small(monkeypatch, make):
    def total(x):
        return jnp.sum(make(x) @ jnp.ones((3, 2)))

    for enabled in "0", "1":
        monkeypatch.setenv("JAXSPARSE_CHECK", enabled)
        assert run(total, np.eye(4, 3)) == 6
    full = np.ones((4, 3))
    where = r"row 2( of batch entry 1)? \(offsets 6 to 9; nse=7 is too small\)"
    with pytest.raises(jax.errors.JaxRuntimeError, match=where):
        run(total, full)
    monkeypatch.setenv("JAXSPARSE_CHECK", "0")
    assert run(total, full) == 14


@pytest.mark.parametrize("value", [2, -1, 255])
def test_check_of_traced_integers_that_are_no_mask(monkeypatch, value):
    def total(mask):
        return jnp.sum(CSR(jnp.ones(9), Topology.from_mask(mask, nse=9)) @ jnp.ones((3, 2)))

    mask = np.eye(3, dtype=int)
    for enabled in "0", "1":
        monkeypatch.setenv("JAXSPARSE_CHECK", enabled)
        assert run(total, mask) == 6
    mask[2, 0] = value
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"bad pattern at row 0 \(offsets -1 to 1"):
        run(total, mask)


@pytest.mark.parametrize(
    "field",
    [
        ".pattern.row_offsets",
        ".pattern.column_indices",
        ".pattern.row_order",
        ".transposed_pattern.row_offsets",
        ".transposed_pattern.compact_column_indices",
        ".transposed_pattern.row_order",
        ".permutation",
    ],
)
def test_check_of_every_array(check, field):
    """A product and its gradient read all arrays of a pattern; each is too large by just 1."""
    assert field in leaves(WIDE)
    topology = jax.tree_util.tree_map_with_path(
        lambda path, x: x + 1 if jax.tree_util.keystr(path) == field else x, WIDE
    )
    x = jnp.ones((70_000, 1))
    with pytest.raises(jax.errors.JaxRuntimeError, match="bad pattern at"):
        run(jax.value_and_grad(lambda x: jnp.sum(CSR(jnp.ones(3), topology) @ x)), x)


def transformed(name):
    function, shapes = operations()[name]

    def grad(*xs):
        every = tuple(range(len(xs)))
        return jax.grad(lambda *xs: jnp.sum(function(*xs) ** 2), every)(*xs)

    def vmap(*xs):
        return jax.vmap(function)(*(jnp.stack([x, 2 * x]) for x in xs))

    return [function, grad, vmap], normal(shapes)


@pytest.mark.parametrize("name", operations())
def test_check_passes_good_patterns(monkeypatch, name):
    functions, operands = transformed(name)
    for function in functions:
        expected = run(function, *operands)
        with monkeypatch.context() as context:
            context.setenv("JAXSPARSE_CHECK", "1")
            actual = run(function, *operands)
            assert (
                "check_topology"
                in jax.jit(lambda *xs, f=function: f(*xs)).lower(*operands).as_text()
            )
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("name", PATTERNS)
def test_check_passes_good_traced_patterns(check, name):
    offsets, columns, shape = PATTERNS[name]

    def transposed(offsets, columns):
        a = CSR(jnp.ones(columns.shape[-1]), Topology(offsets, columns, shape))
        return a.T @ jnp.ones(shape[0]), jaxsparse.grad(lambda a: jnp.sum(a @ jnp.ones(shape[1])))(
            a
        )

    sums, gradient = run(transposed, offsets, columns)
    stored = columns[: offsets[-1]].astype(int)
    np.testing.assert_array_equal(sums, np.bincount(stored, minlength=shape[1]))
    np.testing.assert_array_equal(gradient.values, np.arange(len(columns)) < offsets[-1])
