"""Masks against their definitions, written out position by position, and pictures of patterns."""

from __future__ import annotations

import os
import pickle
import pkgutil
import re
import subprocess
import sys

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxsparse import display, masks

IDS = (3, 3, 3, -1, -1, 5, 3, 5, 5, 5, 0, 0, 0)

LEAVES = {
    "causal()": (masks.causal(), lambda i, j: j <= i),
    "band(1)": (masks.band(1), lambda i, j: i == j),
    "band(4)": (masks.band(4), lambda i, j: -4 < i - j < 4),
    "strided(1)": (masks.strided(1), lambda i, j: True),
    "strided(3)": (masks.strided(3), lambda i, j: abs(i - j) in (0, 3, 6, 9, 12)),
    "block(1)": (masks.block(1), lambda i, j: i == j),
    "block(5)": (masks.block(5), lambda i, j: (i < 5) == (j < 5) and (i < 10) == (j < 10)),
    f"documents({IDS})": (masks.documents(IDS), lambda i, j: IDS[i] == IDS[j]),
    "sliding_window(3)": (masks.sliding_window(3), lambda i, j: i - 3 <= j <= i),
    "sliding_window(0, right=2)": (masks.sliding_window(0, 2), lambda i, j: i <= j <= i + 2),
    "padding(5)": (masks.padding(5), lambda i, j: j < 5),
    "padding(0)": (masks.padding(0), lambda i, j: False),
    "global_tokens((0, 7))": (masks.global_tokens([7, 0, 7]), lambda i, j: {i, j} & {0, 7}),
    "global_tokens(())": (masks.global_tokens([]), lambda i, j: False),
    "offset(causal(), rows=3)": (masks.offset(masks.causal(), rows=3), lambda i, j: j <= i + 3),
    "offset(causal() | padding(2), rows=-4, columns=1)": (
        masks.offset(masks.causal() | masks.padding(2), rows=-4, columns=1),
        lambda i, j: j + 1 <= i - 4 or j + 1 < 2,
    ),
}
RANDOM = [
    masks.random(0.5, 13),
    masks.random(0.5, 13, seed=2**32 - 1),
    masks.random(0.25, 13, seed=7, band_width=3),
]
sizes = st.integers(0, len(IDS))
expressions = st.recursive(
    st.sampled_from([mask for mask, _ in LEAVES.values()] + RANDOM),
    lambda operands: st.one_of(
        operands.map(lambda a: ~a),
        st.builds(lambda a, b: a & b, operands, operands),
        st.builds(lambda a, b: a | b, operands, operands),
    ),
    max_leaves=6,
)


def dense(mask, m, k, xp=np):
    return mask(xp.arange(m)[:, None], xp.arange(k)[None, :])


def from_csr(row_offsets, column_indices, shape):
    stored = np.zeros(shape, bool)
    for i in range(shape[0]):
        stored[i, column_indices[row_offsets[i] : row_offsets[i + 1]]] = True
    return stored


@pytest.mark.smoke
@pytest.mark.parametrize("expression", LEAVES)
def test_definition(expression):
    mask, definition = LEAVES[expression]
    expected = [[bool(definition(i, j)) for j in range(11)] for i in range(13)]
    np.testing.assert_array_equal(dense(mask, 13, 11), expected)
    assert repr(mask) == expression


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32, np.int64])
def test_operands_broadcast_and_differences_are_signed(dtype):
    mask, definition = masks.band(4), LEAVES["band(4)"][1]
    rows, columns = np.array([[0], [9]], dtype), np.array([2, 12, 8], dtype)
    np.testing.assert_array_equal(
        mask(rows, columns), [[definition(i, j) for j in (2, 12, 8)] for i in (0, 9)]
    )
    assert mask(rows, 2).tolist() == [[True], [False]]
    assert mask(3, 5) and not mask(3, 7)


def test_operators():
    a, b = masks.band(3), masks.causal()
    x, y = dense(a, 6, 7), dense(b, 6, 7)
    np.testing.assert_array_equal(dense(a & b, 6, 7), np.logical_and(x, y))
    np.testing.assert_array_equal(dense(a | b, 6, 7), np.logical_or(x, y))
    np.testing.assert_array_equal(dense(~a, 6, 7), np.logical_not(x))
    for operation in (lambda: a & 1, lambda: a | np.True_, lambda: 1 & a):
        with pytest.raises(TypeError, match="unsupported operand"):
            operation()


def test_repr_has_the_parentheses_that_are_needed():
    a, b, c = masks.causal(), masks.band(2), masks.block(3)
    assert repr(a & b | c) == "causal() & band(2) | block(3)"
    assert repr(a & (b | c)) == "causal() & (band(2) | block(3))"
    assert repr(a & (b & c)) == "causal() & (band(2) & block(3))"
    assert repr(~(a & b) & ~~c) == "~(causal() & band(2)) & ~~block(3)"
    assert repr(RANDOM[2]) == "random(0.25, 13, seed=7, band_width=3)"


@given(expressions, sizes, sizes)
def test_repr_makes_an_equal_mask(mask, m, k):
    again = eval(repr(mask), vars(masks))
    assert again == mask and hash(again) == hash(mask)
    np.testing.assert_array_equal(dense(again, m, k), dense(mask, m, k))


def test_masks_that_differ_are_unequal_and_immutable():
    different = [mask for mask, _ in LEAVES.values()] + RANDOM
    different += [masks.random(0.5, 14), masks.random(0.6, 13), masks.documents(IDS[:-1])]
    different += [masks.causal() & masks.band(4), masks.causal() | masks.band(4)]
    different += [masks.band(4) & masks.causal(), ~masks.band(4)]
    assert len(set(different)) == len(different)
    with pytest.raises(AttributeError):
        masks.causal()._expression = "band(1)"


def first_keys(rows, columns):
    return columns < 3


FUNCTIONS = {
    "keys": (first_keys, lambda i, j: j < 3),
    "rows": (lambda i, j: i > 5, lambda i, j: i > 5),
    "True": (lambda i, j: True, lambda i, j: True),
    "False": (lambda i, j: np.False_, lambda i, j: False),
    "NumPy": (lambda i, j: np.asarray(IDS)[i] == 3, lambda i, j: IDS[i] == 3),
    "JAX": (lambda i, j: jnp.equal(jnp.asarray(IDS)[j], 3), lambda i, j: IDS[j] == 3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    function, definition = FUNCTIONS[name]
    expected = np.array([[definition(i, j) for j in range(11)] for i in range(13)])
    window = dense(masks.band(4), 13, 11)
    cases = {
        function: expected,
        masks.from_function(function): expected,
        ~masks.from_function(function): ~expected,
        masks.band(4) & function: window & expected,
        function & masks.band(4): window & expected,
        masks.band(4) | function: window | expected,
        function | ~masks.band(4): ~window | expected,
        masks.offset(function, columns=2): np.roll(expected, -2, 1)[:, :9],
    }
    for mask, stored in cases.items():
        shape = stored.shape
        if isinstance(mask, masks.Mask):
            np.testing.assert_array_equal(dense(mask, *shape), stored)
        for block_rows in 1, 5, None:  # a block of one row is broadcast, too
            positions = masks.nonzero(mask, shape, block_rows=block_rows)
            np.testing.assert_array_equal(from_csr(*positions, shape), stored)
    made = []

    @jax.jit
    def program():
        made.extend(masks.nonzero(mask, (13, 11)) for mask in list(cases)[:-1])  # on the host
        mask = masks.from_function(function) & masks.band(4)
        return None if name == "NumPy" else masks.nonzero_traced(mask, (13, 11), 143)

    traced = program()
    for positions, stored in zip(made, list(cases.values())[:-1], strict=True):
        np.testing.assert_array_equal(from_csr(*positions, (13, 11)), stored)
    if traced is not None:
        positions = map(np.asarray, traced)
        np.testing.assert_array_equal(from_csr(*positions, (13, 11)), window & expected)


def test_masks_of_functions_compare_by_the_function():
    mask = masks.from_function(first_keys)
    assert repr(mask & masks.causal()) == "from_function(first_keys) & causal()"
    assert mask == masks.from_function(first_keys) and hash(mask) == hash(mask & mask and mask)
    assert mask != masks.from_function(lambda i, j: j < 3)
    assert masks.from_function(mask) is mask


EVERY_KIND = [mask for mask, _ in LEAVES.values()] + RANDOM + [masks.from_function(first_keys)]


@pytest.mark.parametrize("mask", [*EVERY_KIND, ~(EVERY_KIND[0] & RANDOM[0]) | first_keys], ids=repr)
def test_pickling(mask):
    again = pickle.loads(pickle.dumps(mask))
    assert again == mask and hash(again) == hash(mask) and repr(again) == repr(mask)
    np.testing.assert_array_equal(dense(again, 13, 13), dense(mask, 13, 13))
    assert not jax.tree.leaves(mask) and jax.tree.map(None, mask) == mask


def test_traced_arrays():
    """Of a mask that is made in a program, or is an argument of another one."""
    shape, fixed = (13, 13), masks.causal() | masks.from_function(first_keys)

    def make(ids, length, tokens, rows):
        mask = masks.documents(ids) & masks.padding(length) | masks.global_tokens(tokens)
        return masks.offset(mask, rows=rows) & ~fixed

    @jax.jit
    def positions(*arrays):
        mask = make(*arrays)
        assert len(jax.tree.leaves(mask)) == 4
        assert mask == mask and mask != make(*arrays[:-1], arrays[-1] + 0)
        text = "documents(<int32[13]>) & padding(<int32[]>) | global_tokens(<int32[2]>)"
        assert repr(mask).startswith(f"offset({text}, rows=<int32[]>) &")
        with pytest.raises(TypeError, match="a mask of traced arrays can't be hashed"):
            hash(mask)
        with pytest.raises(TypeError, match="depends on traced arrays: nonzero_traced takes such"):
            masks.nonzero(mask, shape)
        two = [jax.jit(lambda mask: masks.nonzero_traced(mask, shape, 169))(mask)]
        return [*two, masks.nonzero_traced(mask, shape, 169)], mask(5, np.arange(13))

    arrays = (np.array(IDS, np.int32), 9, np.array([2, 11]), 0)
    stored = dense(make(*arrays), *shape)
    each, row = positions(*arrays)
    for csr in each:
        np.testing.assert_array_equal(from_csr(*map(np.asarray, csr), shape), stored)
    np.testing.assert_array_equal(row, stored[5])
    lengths = np.arange(14)
    batch = jax.vmap(lambda n: make(*arrays[:1], n, *arrays[2:])(*np.ogrid[:13, :13]))(lengths)
    each = [dense(make(arrays[0], n, *arrays[2:]), 13, 13) for n in lengths]
    np.testing.assert_array_equal(batch, each)


def test_traced_tables_that_are_too_short():
    for mask in (
        masks.documents,
        lambda ids: ~masks.offset(masks.documents(ids), rows=-1) & first_keys,
    ):
        with pytest.raises(IndexError, match=r"documents: columns must be in \[0, 3\), got 3"):
            jax.jit(lambda ids, m=mask: masks.nonzero_traced(m(ids), (3, 4), 12))(np.zeros(3, int))


def test_sliding_window_is_that_of_jax():
    q = jnp.zeros((1, 9, 1, 9))
    v = jnp.eye(9)[None, :, None]
    for left, right in (3, 2), (0, 4), (2, 0):
        p = jax.nn.dot_product_attention(q, q, v, local_window_size=(left, right))
        mask = masks.sliding_window(left, right)
        np.testing.assert_array_equal(dense(mask, 9, 9), p[0, :, 0] > 0)


def test_public_names():
    names = {name for name in dir(masks) if not name.startswith("_")}
    files = {module.name for module in pkgutil.iter_modules(masks.__path__)}
    assert names - files == set(masks.__all__)


@pytest.mark.parametrize("mask", EVERY_KIND, ids=repr)
def test_numpy_and_jax_agree(mask):
    mask = ~(mask & masks.strided(2)) | mask
    expected = dense(mask, 13, 12)
    actual = dense(mask, 13, 12, jnp)
    traced = jax.jit(dense, static_argnums=(0, 1, 2, 3))(mask, 13, 12, jnp)
    mixed = mask(np.arange(13)[:, None], jnp.arange(12))
    assert isinstance(expected, np.ndarray) and isinstance(mixed, jax.Array)
    assert expected.dtype == actual.dtype == traced.dtype == bool
    for array in (actual, traced, mixed):
        np.testing.assert_array_equal(array, expected)


def test_numpy_starts_no_backend():
    program = """
import jax, numpy as np
from jaxsparse import masks
mask = masks.band(2) & masks.causal() | masks.random(0.5, 9) & ~masks.documents([1] * 9)
masks.nonzero(mask, (9, 9))
try:
    jax.devices()
except RuntimeError:
    print("no backend")
"""
    environment = {**os.environ, "JAX_PLATFORMS": "absent"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert result.stdout == "no backend\n", result.stderr


def test_positions_past_the_length():
    for name, mask in ("documents", masks.documents([4, 4])), ("random", masks.random(0, 2)):
        with pytest.raises(IndexError, match=re.escape(f"{name}: rows must be in [0, 2), got 2")):
            mask(2, 0)
        with pytest.raises(
            IndexError, match=re.escape(f"{name}: columns must be in [0, 2), got -1")
        ):
            mask(np.array([1, 0]), np.array([-1, 9]))
        np.testing.assert_array_equal(
            mask(jnp.array([0, 1, 2, 2, -1]), jnp.array([1, 0, 1, 2, -1])),
            [True, True, False, False, False],
        )


def test_traced_integers_do_not_wrap_around():
    with jax.enable_x64(True):
        wide = np.array([0, 2**32])
        assert not jax.jit(lambda ids: masks.documents(ids)(0, 1))(wide)
        assert jax.jit(lambda n: masks.padding(n)(0, 5))(wide[1])
        positions = jax.jit(lambda tokens: masks.global_tokens(tokens)(1, np.arange(3)))(wide)
        assert positions.tolist() == [True, False, False]
    assert not masks.documents([])(jnp.zeros(2, int), 0 * jnp.arange(2)).any()


def probabilities(sparsity, length, band_width):
    """p(d) by bisection of c, the definition of `masks.random`."""
    d = np.abs(np.subtract.outer(np.arange(length), np.arange(length)))
    target = d >= max(1, band_width)
    low, high = 0.0, float(length)
    for _ in range(60):
        c = (low + high) / 2
        p = np.where(target, np.minimum(1, c / np.maximum(1, d)), 0)
        low, high = (c, high) if p[target].mean() < 1 - sparsity else (low, c)
    return d, p


@pytest.mark.parametrize(
    ("sparsity", "band_width"), [(0.95, 0), (0.95, 64), (0.5, 16), (0.05, 1), (0.999, 0)]
)
def test_random_density_by_distance(sparsity, band_width):
    length = 768
    d, p = probabilities(sparsity, length, band_width)
    stored = dense(masks.random(sparsity, length, seed=3, band_width=band_width), length, length)
    assert not stored[p == 0].any() and stored[p == 1].all()
    target = d >= max(1, band_width)
    expected = (1 - sparsity) * target.sum()
    assert abs(stored.sum() - expected) < 4 * np.sqrt((p * (1 - p)).sum())
    for low, high in (1, 8), (8, 32), (32, 64), (64, 128), (128, 384), (384, 768):
        ring = (d >= low) & (d < high)
        deviation = np.sqrt((p * (1 - p))[ring].sum())
        assert abs(stored[ring].sum() - p[ring].sum()) <= 4 * deviation + 1e-3
        lower = ring & (np.tri(length) > 0)
        assert abs(stored[lower].sum() - p[lower].sum()) <= 4 * np.sqrt(0.5) * deviation + 1e-3


def test_random_positions_are_independent():
    length = 512
    _, p = probabilities(0.8, length, 1)
    deviation = np.sqrt(p * (1 - p))
    deviation[deviation == 0] = np.inf
    x, y, z = (
        (dense(masks.random(0.8, length, seed=seed), length, length) - p) / deviation
        for seed in (0, 2, 2**31)
    )
    pairs = [(x, y), (x, z), (y, z), (x, x.T), (x[1:, 1:], x[:-1, :-1])]
    pairs += [(x[1:, 1:], y[:-1, :-1]), (x[1:], y[:-1]), (x[:, 1:], y[:, :-1])]
    pairs += [(x[2**b :], x[: -(2**b)]) for b in range(9)]
    pairs += [(x[:, 2**b :], x[:, : -(2**b)]) for b in range(9)]
    scores = [(a * b).sum() / np.sqrt(a.size) for a, b in pairs]
    assert np.abs(scores).max() < 4.5
    # Counts of rows and of columns scatter as those of independent positions do.
    for axis in (0, 1):
        assert 0.75 < (x.sum(axis) ** 2).mean() / (length - 1) < 1.25


@pytest.mark.filterwarnings("error")
def test_random_limits():
    everything = ~np.eye(20, dtype=bool)
    np.testing.assert_array_equal(dense(masks.random(0, 20), 20, 20), everything)
    np.testing.assert_array_equal(
        dense(masks.random(0.0, 20, band_width=5), 20, 20), ~dense(masks.band(5), 20, 20)
    )
    assert not masks.random(0.5, 1)(0, 0)
    assert not dense(masks.random(1, 20), 20, 20).any()
    assert not dense(masks.random(0.5, 20, band_width=20), 20, 20).any()


@settings(deadline=None)
@given(expressions, sizes, sizes, st.integers(1, 15) | st.none())
def test_nonzero(mask, m, k, block_rows):
    stored = dense(mask, m, k)
    row_offsets, column_indices = masks.nonzero(mask, (m, k), block_rows=block_rows)
    assert row_offsets.dtype == column_indices.dtype == np.int32
    np.testing.assert_array_equal(row_offsets, [0, *np.cumsum(stored.sum(axis=1))])
    np.testing.assert_array_equal(column_indices, np.nonzero(stored)[1])


def test_nonzero_of_any_callable():
    row_offsets, column_indices = masks.nonzero(lambda i, j: jnp.equal(i + j, 2), (3, 2))
    assert row_offsets.tolist() == [0, 0, 1, 2] and column_indices.tolist() == [1, 0]


def test_nonzero_evaluates_blocks_of_rows():
    blocks = []

    def mask(rows, columns):
        blocks.append((rows.shape, columns.shape))
        return rows == columns

    masks.nonzero(mask, (5, 3), block_rows=2)
    assert blocks == [((2, 1), (1, 3)), ((2, 1), (1, 3)), ((1, 1), (1, 3))]
    blocks.clear()
    masks.nonzero(mask, (2**12, 2**11))
    assert [rows[0] for rows, _ in blocks] == [2**9] * 8


@pytest.mark.parametrize("shape", [(13, 9), (0, 4), (4, 0), (1, 1)])
@pytest.mark.parametrize("mask", [RANDOM[0], masks.block(5) & masks.causal()], ids=repr)
def test_nonzero_traced(mask, shape):
    row_offsets, column_indices = masks.nonzero(mask, shape)
    nnz = column_indices.size
    traced = jax.jit(masks.nonzero_traced, static_argnums=(0, 1, 2))
    for nse in {0, nnz // 2, nnz, nnz + 5}:
        offsets, indices = traced(mask, shape, nse)
        assert isinstance(offsets, jax.Array) and offsets.dtype == indices.dtype == jnp.int32
        np.testing.assert_array_equal(offsets, row_offsets)  # those that don't fit count, too
        np.testing.assert_array_equal(indices, np.pad(column_indices, (0, 5))[:nse])


def test_nonzero_traced_of_traced_data():
    def offsets(lengths):
        return masks.nonzero_traced(lambda i, j: j < lengths[i], (3, 4), 8)

    row_offsets, column_indices = jax.jit(offsets)(jnp.array([2, 0, 4]))
    assert row_offsets.tolist() == [0, 2, 2, 6]
    assert column_indices.tolist() == [0, 1, 0, 1, 2, 3, 0, 0]


def integers(rows, columns):
    return rows + columns


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: masks.band(0), ValueError, "band: width must be >= 1, got 0"),
        (lambda: masks.band(2.0), TypeError, "band: width must be an integer, got 2.0"),
        (lambda: masks.band(2**31), ValueError, "band: width must be < 2147483648"),
        (lambda: masks.strided(0), ValueError, "strided: stride must be >= 1, got 0"),
        (lambda: masks.strided("2"), TypeError, "strided: stride must be an integer, got '2'"),
        (lambda: masks.block(-3), ValueError, "block: size must be >= 1, got -3"),
        (lambda: masks.block(None), TypeError, "block: size must be an integer, got None"),
        (lambda: masks.documents([0.5]), TypeError, "ids must be integers, got dtype float64"),
        (lambda: masks.documents([[1]]), ValueError, "ids must be 1-D, got shape (1, 1)"),
        (lambda: masks.documents([2**31, 5]), ValueError, "int32, got [5, 2147483648]"),
        (lambda: masks.sliding_window(-1), ValueError, "sliding_window: left must be >= 0, got -1"),
        (lambda: masks.sliding_window(1, 0.5), TypeError, "right must be an integer, got 0.5"),
        (lambda: masks.padding(-1), ValueError, "padding: length must be >= 0, got -1"),
        (lambda: masks.padding([3, 4]), TypeError, "length must be an integer, got [3, 4]"),
        (lambda: jax.jit(masks.padding)(0.5), TypeError, "one integer, got a traced float32 ()"),
        (lambda: jax.vmap(masks.padding)(np.eye(2, dtype=int)), TypeError, "a traced int32 (2,)"),
        (lambda: masks.global_tokens([-1, 2]), ValueError, "in [0, 2**31), got [-1, 2]"),
        (lambda: masks.global_tokens(np.eye(3) > 0), TypeError, "integers, got dtype bool"),
        (lambda: masks.global_tokens(3), ValueError, "positions must be 1-D, got shape ()"),
        (lambda: jax.jit(masks.documents)(np.ones(2)), TypeError, "integers, got dtype float32"),
        (lambda: masks.offset(masks.causal(), rows=0.5), TypeError, "rows must be an integer"),
        (lambda: masks.offset(masks.causal(), columns=-(2**31)), ValueError, "columns must be >="),
        (lambda: masks.offset(True), TypeError, "offset: mask must be a mask or a function"),
        (lambda: masks.from_function(True), TypeError, "function must be callable, got True"),
        (lambda: (masks.causal() & integers)(1, 2), ValueError,
         "from_function(integers): mask must return bool (), got int32 ()"),
        (lambda: masks.random(1.5, 4), ValueError, "sparsity must be in [0, 1], got 1.5"),
        (lambda: masks.random(-0.1, 4), ValueError, "sparsity must be in [0, 1], got -0.1"),
        (lambda: masks.random(float("nan"), 4), ValueError, "in [0, 1], got nan"),
        (lambda: masks.random("0.5", 4), TypeError, "must be a real number, got '0.5'"),
        (lambda: masks.random(0.5, 0), ValueError, "random: length must be >= 1, got 0"),
        (lambda: masks.random(0.5, 4, seed=-1), ValueError, "seed must be >= 0, got -1"),
        (lambda: masks.random(0.5, 4, seed=2**32), ValueError, "seed must be < 4294967296"),
        (lambda: masks.random(0.5, 4, band_width=-1), ValueError, "band_width must be >= 0"),
        (lambda: masks.causal()(0.5, 1), TypeError, "causal(): rows must be integers, got dtype"),
        (lambda: masks.causal()(1, jnp.ones(2)), TypeError, "columns must be integers, got dtype"),
        (lambda: masks.nonzero(masks.causal(), (2,)), ValueError, "nonzero: shape must be (m, k)"),
        (lambda: masks.nonzero(masks.causal(), (-1, 2)), ValueError, "nonzero: m must be >= 0"),
        (lambda: masks.nonzero(masks.causal(), (1, 2.0)), TypeError, "k must be an integer"),
        (lambda: masks.nonzero(masks.causal(), (2, 2), block_rows=0), ValueError, "block_rows"),
        (lambda: masks.nonzero(integers, (2, 3)), ValueError, "bool (2, 3), got int32 (2, 3)"),
        (lambda: masks.nonzero(lambda i, j: j[0] > 1, (3, 3)), ValueError, "got bool (3,)"),
        (lambda: masks.nonzero(lambda i, j: j[:, 1:] > 1, (2, 3)), ValueError, "got bool (1, 2)"),
        (lambda: masks.nonzero(lambda i, j: None, (2, 3)), ValueError, "got object ()"),
        (lambda: masks.nonzero(lambda i, j: 1, (2, 3)), ValueError, "bool (2, 3), got int64 ()"),
        (lambda: masks.nonzero_traced(integers, (2, 3), 1), ValueError, "got int32 (2, 3)"),
        (lambda: masks.nonzero_traced(masks.causal(), (2, 3), -1), ValueError, "nse must be >= 0"),
        (lambda: masks.nonzero_traced(masks.causal(), (2**16, 2**15), 1), ValueError, "65536 * 32"),
        (lambda: display.grid([0], [], (1, 1)), ValueError, "must have shape (2,) for shape"),
        (lambda: display.grid([0, 2], [0], (1, 2)), ValueError, "row_offsets[-1] = 2, got (1,)"),
        (lambda: display.grid([[0, 1]], [[0]], (1, 1)), ValueError, "got (1, 2)"),
        (lambda: display.grid([0], [], (0, 0), rows=0), ValueError, "must be >= 1, got 0 and 32"),
        (lambda: display.plot([0], [], (1, 1)), ValueError, "plot: row_offsets must have shape"),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    if "plot" in message:
        pytest.importorskip("matplotlib").use("Agg")
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_nonzero_limits_nnz(monkeypatch):
    monkeypatch.setattr(masks.positions, "INT32_MAX", 10)
    assert masks.nonzero(masks.causal(), (4, 4))[0][-1] == 10
    with pytest.raises(ValueError, match="nnz must be <= 10, got 15 by row 4"):
        masks.nonzero(masks.causal(), (6, 6), block_rows=1)


def test_grid_of_positions():
    csr = masks.nonzero(masks.causal() & masks.band(2), (3, 5))
    assert display.grid(*csr, (3, 5)) == "┌─────┐\n│█    │\n│██   │\n│ ██  │\n└─────┘"


def test_grid_shades():
    # Cells of 1 x 16 with 0, 1, ..., 16 positions stored.
    row = np.concatenate([np.arange(16) < stored for stored in range(17)])
    picture = display.grid([0, row.sum()], np.flatnonzero(row), (1, row.size), columns=17)
    assert picture.splitlines()[1] == "│ ·░▒▒▓▓▓▓████████│"


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 6), st.integers(1, 6), st.data())
def test_grid_is_blank_where_nothing_is_stored(m, k, rows, columns, data):
    stored = np.array(data.draw(st.lists(st.booleans(), min_size=m * k, max_size=m * k)), bool)
    stored = stored.reshape(m, k)
    row_offsets = [0, *np.cumsum(stored.sum(axis=1))]
    lines = display.grid(
        row_offsets, np.nonzero(stored)[1], (m, k), rows=rows, columns=columns
    ).splitlines()
    rows, columns = min(rows, m), min(columns, k)
    blank = np.ones((rows, columns), bool)
    for i, j in np.argwhere(stored):
        blank[i * rows // m, j * columns // k] = False
    assert len(lines) == rows + 2 and {len(line) for line in lines} == {columns + 2}
    cells = [[cell == " " for cell in line[1:-1]] for line in lines[1:-1]]
    np.testing.assert_array_equal(np.array(cells, bool).reshape(rows, columns), blank)


def test_grid_ignores_padding():
    offsets, indices = masks.nonzero(masks.band(1), (3, 3))
    padded = np.concatenate([indices, [0, 2, 9]])
    assert display.grid(offsets, padded, (3, 3)) == display.grid(offsets, indices, (3, 3))


@pytest.fixture
def pyplot():
    pytest.importorskip("matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


def test_plot_of_positions(pyplot):
    mask = masks.band(2) & masks.causal()
    _, axes = pyplot.subplots(1, 2)
    ax = display.plot(*masks.nonzero(mask, (5, 7)), (5, 7), ax=axes[1], title="band")
    assert ax is axes[1]
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("column", "row", "band")
    (image,) = ax.get_images()
    np.testing.assert_array_equal(image.get_array().filled(0), dense(mask, 5, 7))
    assert image.get_extent() == [-0.5, 6.5, 4.5, -0.5]
    assert image.colorbar is None


def test_plot_of_cells(pyplot):
    shape = (1024, 3 * 512)
    mask = masks.block(96) | masks.strided(128)
    row_offsets, column_indices = masks.nonzero(mask, shape)
    ax = display.plot(row_offsets, column_indices, shape)
    (image,) = ax.get_images()
    stored = from_csr(row_offsets, column_indices, shape)
    expected = stored.reshape(512, 2, 512, 3).mean(axis=(1, 3))
    np.testing.assert_allclose(image.get_array().filled(0), expected)
    assert image.colorbar is not None
    ax.figure.canvas.draw()


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (2, 600)])
@pytest.mark.filterwarnings("error")
def test_pictures_of_nothing(pyplot, shape):
    offsets = np.zeros(shape[0] + 1, np.int32)
    lines = display.grid(offsets, [], shape).splitlines()
    assert len(lines) == min(16, shape[0]) + 2
    assert set("".join(lines)) <= set("┌─┐│ └┘")
    ax = display.plot(offsets, [], shape)
    ax.figure.canvas.draw()
    assert ax.get_images()[0].get_array().mask.all()


def test_plot_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape("pip install matplotlib")):
        display.plot([0, 1], [0], (1, 1))
