"""Patterns, good and bad, and operations on them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import (
    CSR,
    Topology,
    masks,
    reduce_rows,
    sddmm,
    sparse_attention,
    sparse_softmax,
    spmm,
)

PAST_INT16 = 2**16 + 1


def pattern(m, k, density=0.3, seed=0, padding=0):
    """Offsets and columns of a random pattern, with nonsense as padding, and its shape."""
    rng = np.random.default_rng(seed)
    # The rows' lengths differ, some are 0.
    stored = rng.random((m, k)) < rng.uniform(-density, 2 * density, (m, 1))
    columns = np.concatenate([np.nonzero(stored)[1], rng.integers(-9, 2 * k + 9, padding)])
    return np.concatenate([[0], np.cumsum(stored.sum(1))]), columns, (m, k)


PATTERNS = {
    "random": pattern(23, 17),
    "padding": pattern(17, 23, seed=1, padding=7),
    "full": pattern(5, 9, density=9.0),
    "one_row": pattern(1, 40, density=0.9, seed=2),
    "one_column": pattern(40, 1, density=0.9, seed=3),
    "nothing": pattern(4, 6, density=0.0),
    "only_padding": pattern(4, 6, density=0.0, padding=3),
    "no_rows": pattern(0, 6),
    "no_rows_padding": pattern(0, 6, padding=2),
    "no_columns": pattern(6, 0),
    "no_columns_padding": pattern(6, 0, padding=2),
    "empty": pattern(0, 0),
    "widest_compact": pattern(3, 2**16, density=1e-3, seed=4),
    "wide": pattern(3, PAST_INT16, density=1e-3, seed=5),
    "tall": pattern(PAST_INT16, 3, density=0.01, seed=6),
}


def leaves(topology):
    """{name: array}."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(topology)}


def assert_same_topology(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    actual, expected = leaves(actual), leaves(expected)
    for name, leaf in expected.items():
        np.testing.assert_array_equal(actual[name], leaf, err_msg=name)
        assert actual[name].dtype == leaf.dtype, name


# Of shape (3, 4): what the constructor says, and the row that the check names.
BAD = {
    "unsorted": ([0, 2, 2, 4], [0, 1, 3, 2], "row 2 has unsorted columns [3, 2]", 2),
    "duplicate": ([0, 1, 3, 4], [3, 2, 2, 0], "row 1 has duplicate columns [2, 2]", 1),
    "column_beyond": ([0, 2, 2, 4], [0, 4, 1, 2], "row 0 has column 4, out of range for 4", 0),
    "negative_column": ([0, 1, 3, 4], [0, -1, 1, 2], "row 1 has column -1, out of range", 1),
    "falling": ([0, 3, 2, 4], [0, 1, 2, 3], "row_offsets must not fall, got 3 then 2 at row 1", 1),
    "start": ([1, 2, 2, 4], [0, 1, 2, 3], "row_offsets must start at 0, got 1", 0),
    "end": ([0, 2, 2, 9], [0, 1, 2, 3], "end at 9, beyond the 4 column indices", 2),
}


def everything(offsets, columns, x, y):
    """Every product, in both orientations, with a pattern of shape (3, 4)."""
    topology = Topology(offsets, columns, (3, 4))
    a = CSR(jnp.ones(topology.nse), topology)
    results = [a @ x, a.T @ y, y.T @ a, sddmm(y, x, topology).values, sparse_softmax(a).values]
    return topology, [*results, jax.grad(lambda x: jnp.sum((a @ x) ** 2))(x)]


TOPOLOGY = Topology(*pattern(6, 5, padding=2))
SQUARE = Topology.from_mask(masks.band(2), (5, 5))
WIDE = Topology([0, 2, 3], [60_000, 60_002, 69_999], (2, 70_000))


def operations(implementation=None, change=lambda leaf: leaf):
    """{name: (function of floating operands, their shapes)}, on patterns of changed leaves."""
    topology, square = jax.tree.map(change, (TOPOLOGY, SQUARE))
    nse, kwargs = topology.nse, {"implementation": implementation}
    return {
        "spmm": (lambda v, x: spmm(CSR(v, topology), x, **kwargs), [(nse,), (5, 3)]),
        "epilogue": (
            lambda v, x, b: spmm(CSR(v, topology), x, bias=b, activation="gelu", **kwargs),
            [(nse,), (5, 3), (6,)],
        ),
        "transposed": (lambda v, x: CSR(v, topology).T @ x, [(nse,), (6, 3)]),
        "sddmm": (lambda x, y: sddmm(x, y, topology, **kwargs).values, [(6, 3), (5, 3)]),
        "softmax": (lambda v: sparse_softmax(CSR(v, topology), **kwargs).values, [(nse,)]),
        "maximum": (lambda v: reduce_rows(v, topology, "max", **kwargs), [(nse,)]),
        "logsumexp": (lambda v: reduce_rows(v, topology, "logsumexp", **kwargs), [(nse,)]),
        "attention": (
            lambda q, k, v: sparse_attention(q, k, v, square, **kwargs),
            [(5, 2, 4)] * 3,
        ),
    }


def normal(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def skewed(rng, m, k):
    """Rows of a power law, some of which are empty and some in pieces, at random columns."""
    lengths = np.minimum(0.8 * k, rng.uniform(0.0005, 1, m) ** -1.1).astype(int) - 1
    columns = [np.sort(rng.choice(k, length, replace=False)) for length in lengths]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Topology(offsets, np.concatenate(columns), (m, k))
