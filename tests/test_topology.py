"""Topologies: what is derived from a pattern, what is refused, and patterns that are traced."""

from __future__ import annotations

import functools
import itertools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import combinations
from patterns import (
    BAD,
    PATTERNS,
    SQUARE,
    TOPOLOGY,
    WIDE,
    assert_same_topology,
    everything,
    leaves,
    normal,
    operations,
    pattern,
)
from reference import stored_mask

from jaxsparse import CSR, Topology, masks
from jaxsparse.primitive import equations

CONSTRUCTORS = {
    "host": Topology,
    "jit": lambda offsets, columns, shape: jax.jit(Topology, static_argnums=2)(
        offsets, columns, shape
    ),
}


def assert_oriented(pattern, offsets, columns, column_count):
    """One orientation, from its definition."""
    lengths = np.diff(offsets)
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    indices = np.zeros(pattern.column_indices.shape, np.int32)
    indices[: len(columns)] = columns
    for name, expected in dict(
        row_offsets=offsets, column_indices=indices, row_order=order
    ).items():
        actual = getattr(pattern, name)
        assert isinstance(actual, jax.Array) and actual.dtype == jnp.int32
        np.testing.assert_array_equal(actual, expected, err_msg=name)
    compact = pattern.compact_column_indices
    assert (compact is not None) == (column_count <= 2**16)
    if compact is not None:
        assert compact.dtype == jnp.uint16
        np.testing.assert_array_equal(compact, indices)


@pytest.mark.smoke
@pytest.mark.parametrize("construct", CONSTRUCTORS)
@pytest.mark.parametrize("name", PATTERNS)
def test_derived_arrays(name, construct):
    offsets, columns, (m, k) = PATTERNS[name]
    nnz, nse = offsets[-1], len(columns)
    topology = CONSTRUCTORS[construct](offsets, columns, (m, k))
    assert (topology.shape, topology.nse, topology.batch_shape) == ((m, k), nse, ())
    assert_oriented(topology.pattern, offsets, columns[:nnz], k)

    rows = np.repeat(np.arange(m), np.diff(offsets))
    by_column = np.lexsort((rows, columns[:nnz]))
    counts = np.bincount(columns[:nnz].astype(int), minlength=k)
    t_offsets = np.concatenate([[0], np.cumsum(counts)])
    assert_oriented(topology.transposed_pattern, t_offsets, rows[by_column], m)
    np.testing.assert_array_equal(topology.permutation, [*by_column, *range(nnz, nse)])
    np.testing.assert_array_equal(topology.row_indices, [*rows, *[m] * (nse - nnz)])


def tile_starts(offsets, columns, shape):
    """From their definition, with tiles of 64 x 64; a row that does not rise is in none.

    None, if there would be more than two for each entry.
    """
    down, across = -(-shape[0] // 64), -(-shape[1] // 64)
    if down * (across + 1) * 64 > 2 * len(columns):
        return np.zeros(1, np.int32)
    starts = np.zeros((down, across + 1, 64), np.int32)
    for row, (begin, end) in enumerate(itertools.pairwise(offsets)):
        stored = columns[begin:end]
        rises = (np.diff(stored) > 0).all()
        for tile in range(across + 1):
            before = int((stored < 64 * tile).sum()) if rises else 0
            starts[row // 64, tile, row % 64] = begin + before
        if not rises:
            starts[row // 64, across, row % 64] = ~end
    return starts.reshape(-1)


@combinations(
    "m, k, padding, construct",
    [(1, 1), (64, 64), (65, 130), (200, 63), (3, 900)],
    [0, 9],
    CONSTRUCTORS,
)
def test_tile_starts(m, k, padding, construct):
    offsets, columns, shape = pattern(m, k, density=0.4, seed=m, padding=padding)
    topology = CONSTRUCTORS[construct](offsets, columns, shape)
    assert topology.layouts["tile_starts"].dtype == jnp.int32
    np.testing.assert_array_equal(
        topology.layouts["tile_starts"], tile_starts(offsets, columns, shape)
    )


def test_tile_starts_of_rows_that_do_not_rise():
    """A traced pattern may have such rows."""
    offsets, columns, shape = pattern(70, 140, density=0.4)
    columns = columns.copy()
    falling, repeating = offsets[np.flatnonzero(np.diff(offsets) >= 2)[[3, -1]]]
    columns[falling : falling + 2] = columns[falling : falling + 2][::-1]
    columns[repeating + 1] = columns[repeating]
    topology = CONSTRUCTORS["jit"](offsets, columns, shape)
    expected = tile_starts(offsets, columns, shape)
    assert (expected < 0).sum() == 2
    np.testing.assert_array_equal(topology.layouts["tile_starts"], expected)


def test_no_tile_starts_where_there_are_fewer_entries():
    for entries, starts in (63, 1), (64, 128):
        topology = Topology(np.arange(65).clip(0, entries), np.zeros(entries, int), (64, 1))
        assert topology.layouts["tile_starts"].shape == (starts,)
        jitted = CONSTRUCTORS["jit"](topology.row_offsets, topology.column_indices, (64, 1))
        assert_same_topology(jitted, topology)


def test_checks_leave_tile_starts_to_kernels(monkeypatch):
    topology = Topology(*pattern(64, 64))
    assert topology.operands()[-3] is topology.layouts["tile_starts"]
    monkeypatch.setenv("JAXSPARSE_CHECK", "1")
    assert topology.operands()[-3].shape == (1,) != topology.layouts["tile_starts"].shape


@pytest.mark.parametrize("name", PATTERNS)
def test_transpose(name):
    offsets, columns, (m, k) = PATTERNS[name]
    topology = Topology(offsets, columns, (m, k))
    t = topology.transposed_pattern
    expected = Topology(t.row_offsets, t.column_indices, (k, m))
    assert_same_topology(topology.T, expected)
    assert_same_topology(jax.jit(lambda t: t.T.T)(topology), topology)


@pytest.mark.parametrize("construct", [*CONSTRUCTORS, "vmap"])
def test_batch(construct):
    patterns = [pattern(9, 7, 0.1 * i, seed=i) for i in range(6)]
    nse = max(len(columns) for _, columns, _ in patterns) + 2
    offsets = np.stack([o for o, _, _ in patterns]).reshape(2, 3, -1)
    columns = np.stack([np.resize(c, nse) if len(c) else np.ones(nse, int) for _, c, _ in patterns])
    columns = columns.reshape(2, 3, nse)
    make = functools.partial(Topology, shape=(9, 7))
    topology = {
        "host": make,
        "jit": jax.jit(make),
        "vmap": jax.jit(jax.vmap(make)),  # of patterns that are a batch already
    }[construct](offsets, columns)
    assert (topology.batch_shape, topology.nse) == ((2, 3), nse)
    np.testing.assert_array_equal(topology.nnz, offsets[..., -1])
    np.testing.assert_array_equal(topology.sparsity, 1 - offsets[..., -1] / 63)
    rows = np.asarray(topology.row_indices)
    for i, j in np.ndindex(2, 3):
        one = jax.tree.map(lambda x, at=(i, j): np.asarray(x)[at], topology)
        assert_same_topology(one, make(offsets[i, j], columns[i, j]))
        np.testing.assert_array_equal(rows[i, j], one.row_indices)
    assert_same_topology(topology.T.T, topology)


@pytest.mark.parametrize("batch", [(0,), (2, 0)])
def test_batch_of_none(batch):
    topology = Topology(np.zeros((*batch, 4), int), np.zeros((*batch, 5), int), (3, 2))
    assert (topology.batch_shape, topology.nse, topology.nnz.shape) == (batch, 5, batch)


NARROW = ["int8", "uint8", "int16", "uint16", "int32", "uint32"]


@pytest.mark.parametrize(
    ("construct", "dtype"),
    [*(("jit", d) for d in NARROW), *(("host", d) for d in [*NARROW, "int64", "uint64"])],
)
def test_integer_dtypes(construct, dtype):
    offsets, columns, shape = pattern(9, 70, seed=7)
    actual = CONSTRUCTORS[construct](offsets.astype(dtype), columns.astype(dtype), shape)
    assert_same_topology(actual, Topology(offsets.tolist(), columns.tolist(), shape))


def test_x64():
    offsets, columns, shape = pattern(9, 7, padding=2)
    expected = Topology(offsets, columns, shape)
    with jax.enable_x64(True):
        traced = jax.jit(functools.partial(Topology, shape=shape))
        assert_same_topology(traced(jnp.asarray(offsets), jnp.asarray(columns)), expected)
        # 2**32 is 0 in 32 bits, but has to count as large.
        clamped = traced(jnp.array([0] * 9 + [2**32]), jnp.full(9, 2**32))
        assert clamped.nnz == 9 and (np.asarray(clamped.column_indices) == 6).all()


# ---- Bad patterns ----


@pytest.mark.parametrize("name", BAD)
def test_bad_pattern_is_refused(name):
    offsets, columns, message, _ = BAD[name]
    with pytest.raises(ValueError, match="Topology: .*" + re.escape(message)):
        Topology(offsets, columns, (3, 4))
    batch = [[0, 1, 2, 3], offsets], [[0, 1, 2, 3], columns]
    with pytest.raises(ValueError, match=r"of pattern \(1,\)"):
        Topology(*batch, (3, 4))


@pytest.mark.parametrize(
    ("offsets", "columns", "shape", "message"),
    [
        ([0, 1.0], [0], (1, 1), "row_offsets must be integers, got float64"),
        ([0, 1], [0.0], (1, 1), "column_indices must be integers, got float64"),
        ([0, 1], [True], (1, 1), "column_indices must be integers, got bool"),
        ([0, 1], [0], (2, 1), "row_offsets must have shape (..., 3) for 2 rows, got (2,)"),
        (0, [0], (1, 1), "row_offsets must have shape (..., 2) for 1 rows, got ()"),
        ([0, 1], 0, (1, 1), "column_indices must have shape (..., nse)"),
        ([0, 1], [[0]], (1, 1), "of row_offsets (), got (1, 1)"),
        ([[0, 1]] * 2, [[0]] * 3, (1, 1), "of row_offsets (2,), got (3, 1)"),
        ([0, 1], [0], (1,), "shape must be two integers (m, k), got (1,)"),
        ([0, 1], [0], 1, "shape must be two integers (m, k), got 1"),
        ([0, 1], [0], (1, 1.0), "shape must be two integers (m, k), got (1, 1.0)"),
        ([0, 1], [0], (1, -1), "sizes must be in [0, 2147483647), got (1, -1)"),
        ([0, 1], [0], (1, 2**31), "sizes must be in [0, 2147483647), got (1, 2147483648)"),
        ([0, 2**31], [0], (1, 1), "must fit int32, got values from 0 to 2147483648"),
        ([0, 1], [-(2**40)], (1, 1), "column_indices must fit int32, got values from -1099511"),
        ([0, 1], np.array([2**63], np.uint64), (1, 1), "to 9223372036854775808"),
    ],
)  # fmt: skip
def test_bad_argument_is_refused(offsets, columns, shape, message):
    with pytest.raises(ValueError, match="Topology: .*" + re.escape(message)):
        Topology(offsets, columns, shape)


@pytest.mark.parametrize(("offsets", "columns"), [([0.0, 1], [0]), ([0, 1], [0.0])])
def test_floats_are_refused_under_jit(offsets, columns):
    with pytest.raises(ValueError, match="must be integers, got float32"):
        CONSTRUCTORS["jit"](np.asarray(offsets), np.asarray(columns), (1, 1))


# ---- Traced patterns ----


def random_problem(seed):
    rng = np.random.default_rng(seed)
    limits = np.iinfo(np.int32)
    return rng.integers(limits.min, limits.max, 4), rng.integers(limits.min, limits.max, 4)


@pytest.mark.parametrize("problem", [*BAD, *range(4)])
def test_bad_traced_pattern_is_clamped(problem):
    offsets, columns = random_problem(problem) if isinstance(problem, int) else BAD[problem][:2]
    topology, results = jax.jit(everything)(
        jnp.asarray(offsets, jnp.int32),
        jnp.asarray(columns, jnp.int32),
        jnp.ones((4, 2)),
        jnp.ones((3, 2)),
    )
    for one, k in (topology.pattern, 4), (topology.transposed_pattern, 3):
        offsets, columns = np.asarray(one.row_offsets), np.asarray(one.column_indices)
        assert offsets[0] == 0 and offsets[-1] <= 4 and (np.diff(offsets) >= 0).all()
        assert ((columns >= 0) & (columns < k)).all()
    assert sorted(topology.permutation.tolist()) == [0, 1, 2, 3]
    for result in results:
        assert np.isfinite(result).all()


def test_bad_traced_pattern_without_columns_is_clamped():
    topology = CONSTRUCTORS["jit"](np.array([0, 2, 1, 3]), np.array([5, -1, 0]), (3, 0))
    assert_same_topology(topology, Topology([0, 0, 0, 0], [0, 0, 0], (3, 0)))


def primitives(function, *operands):
    """The names of all primitives, at any depth."""
    return [e.primitive.name for e in equations(jax.make_jaxpr(function)(*operands).jaxpr)]


def test_traced_pattern_is_sorted_once():
    offsets, columns, shape = pattern(9, 7)
    make = functools.partial(Topology, shape=shape)
    # Once to transpose it, and the rows of both orientations by length.
    for function in make, lambda *args: make(*args).T.T:
        assert primitives(function, offsets, columns).count("sort") == 3


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("name", operations())
def test_gradients_do_not_sort(name, implementation):
    function, shapes = operations(implementation)[name]
    operands, every = normal(shapes), tuple(range(len(shapes)))

    def first(*operands):
        return jax.grad(lambda *xs: jnp.sum(function(*xs) ** 2), every)(*operands)

    def second(*operands):
        return jax.grad(lambda *xs: sum(jnp.sum(g**2) for g in first(*xs)), every)(*operands)

    for gradient in first, second:
        assert "sort" not in primitives(gradient, *operands)
    assert "stablehlo.sort" not in jax.jit(second).lower(*operands).as_text()


def test_new_pattern_needs_no_tracing():
    traces = []

    @jax.jit
    def product(offsets, columns, other, values, x):
        traces.append(1)
        return CSR(values, Topology(offsets, columns, (3, 4))) @ x, CSR(values, other) @ x

    values, x = normal([(4,), (4, 2)])
    for offsets, columns in ([0, 2, 2, 4], [0, 3, 1, 2]), ([0, 0, 4, 4], [0, 1, 2, 3]):
        offsets, columns = np.array(offsets), np.array(columns)
        inside, outside = product(offsets, columns, Topology(offsets, columns, (3, 4)), values, x)
        np.testing.assert_array_equal(inside, outside)
    assert len(traces) == 1


# ---- Pytrees ----


def test_pytree():
    flat, treedef = jax.tree.flatten(TOPOLOGY)
    assert all(isinstance(leaf, jax.Array) for leaf in flat)
    assert_same_topology(jax.tree.unflatten(treedef, flat), TOPOLOGY)
    assert_same_topology(pickle.loads(pickle.dumps(TOPOLOGY)), TOPOLOGY)
    assert list(leaves(WIDE)) == [
        ".pattern.row_offsets",
        ".pattern.column_indices",
        ".pattern.row_order",
        ".transposed_pattern.row_offsets",
        ".transposed_pattern.column_indices",
        ".transposed_pattern.row_order",
        ".transposed_pattern.compact_column_indices",
        ".permutation",
        ".tile_starts",
        ".row_cuts[0]",
        ".row_cuts[1]",
    ]


@pytest.mark.parametrize("leaf", [None, object(), 0])
def test_unflattening_accepts_any_leaf(leaf):
    topology = jax.tree.map(lambda _: leaf, TOPOLOGY)
    assert topology.shape == TOPOLOGY.shape
    assert topology.permutation is leaf and topology.pattern.row_offsets is leaf
    assert "shape=(6, 5)" in repr(topology) and str(topology) == repr(topology)


def test_shape_is_static():
    assert jax.jit(lambda t: t.shape[0] * t.nse * jnp.ones(t.shape))(TOPOLOGY).shape == (6, 5)


# ---- Masks ----


@pytest.mark.parametrize("shape", [(6, 9), (0, 3), (3, 0)])
@pytest.mark.parametrize("padding", [None, 0, 4])
def test_from_mask(shape, padding):
    mask = masks.band(2) | masks.strided(3)
    dense = mask(np.arange(shape[0])[:, None], np.arange(shape[1])[None])
    nnz = int(dense.sum())
    nse = None if padding is None else nnz + padding
    topology = Topology.from_mask(mask, shape, nse=nse)
    assert (topology.nse, topology.nnz) == (nnz + (padding or 0), nnz)
    np.testing.assert_array_equal(
        stored_mask(topology.row_offsets, topology.column_indices, shape), dense
    )
    for array in dense, jnp.asarray(dense), 1.0 * dense, 1j * dense * -1j, jnp.bfloat16(dense):
        assert_same_topology(Topology.from_mask(array, nse=nse), topology)
    assert_same_topology(Topology.from_mask(dense, shape, nse=nse), topology)
    if padding:
        make = functools.partial(Topology.from_mask, nse=nse)
        assert_same_topology(jax.jit(make)(dense), topology)
        assert_same_topology(jax.jit(make)(dense.astype(np.uint8)), topology)
        assert_same_topology(jax.jit(lambda: make(mask, shape))(), topology)
        assert_same_topology(jax.jit(lambda d: make(lambda i, j: d[i, j], shape))(dense), topology)


def test_from_mask_batched():
    dense = np.random.default_rng(0).random((2, 2, 5, 6)) < 0.4
    counts = dense.sum((-2, -1))
    topology = Topology.from_mask(dense)
    assert topology.nse == counts.max()
    np.testing.assert_array_equal(topology.nnz, counts)
    make = functools.partial(Topology.from_mask, nse=topology.nse)
    assert_same_topology(jax.jit(make)(dense), topology)
    assert_same_topology(jax.jit(jax.vmap(make))(dense), topology)
    for entry in np.ndindex(2, 2):
        one = jax.tree.map(lambda x, entry=entry: np.asarray(x)[entry], topology)
        assert_same_topology(one, make(dense[entry]))


def test_from_mask_under_jit_leaves_out_what_does_not_fit():
    dense = np.random.default_rng(0).random((5, 6)) < 0.5
    rows, columns = (x[:7] for x in np.nonzero(dense))
    first = np.zeros_like(dense)
    first[rows, columns] = True
    traced = jax.jit(functools.partial(Topology.from_mask, nse=7))(dense)
    assert_same_topology(traced, Topology.from_mask(first))


ADDITIVE = np.where(np.tri(3, dtype=bool), 0.0, -np.inf)


@pytest.mark.parametrize("make", [Topology.from_mask, lambda m: CSR.fromdense(np.ones((3, 3)), m)])
@pytest.mark.parametrize(
    ("mask", "got"),
    [
        (ADDITIVE, "got -inf (float64)"),
        (np.where(np.tri(3), 0, -10_000), "got -10000 (int64)"),
        (ADDITIVE.astype(jnp.bfloat16), "got -inf (bfloat16)"),
        (np.full((3, 3), np.nan), "got nan (float64)"),
        (3 * np.eye(3, dtype=np.uint8), "got 3 (uint8)"),
        (0.5 * np.eye(3, dtype=np.float32), "got 0.5 (float32)"),
        (np.full((3, 3), None), "must be bool, got dtype object"),
        (np.full((3, 3), "x"), "must be bool, got dtype <U1"),
    ],
)
def test_arrays_that_are_no_masks(make, mask, got):
    with pytest.raises(ValueError, match=re.escape(got)) as error:
        make(mask)
    assert "write mask == 0 for an additive mask" in str(error.value) or "dtype" in got
    if mask.dtype == ADDITIVE.dtype:
        with pytest.raises(ValueError, match=re.escape("a traced mask must be bool, or integers")):
            jax.jit(functools.partial(Topology.from_mask, nse=9))(mask)


def test_reshape_batch():
    dense = np.random.default_rng(0).random((6, 4, 5)) < 0.4
    flat = jax.jit(lambda topologies: [t.reshape_batch(6) for t in topologies])
    topologies = []
    for sizes in (2, 3), (6, 1), (1, 6, 1), (6,):
        topology = Topology.from_mask(dense).reshape_batch(*sizes)
        assert_same_topology(topology, Topology.from_mask(dense.reshape(*sizes, 4, 5)))
        topologies.append(topology)
    for one in flat(topologies):
        assert_same_topology(one, Topology.from_mask(dense))
    assert_same_topology(topology.reshape_batch(6).reshape_batch(1, 6).reshape_batch(6), topology)
    with pytest.raises(ValueError, match=re.escape("of 6 patterns, batch (6,), got (2, 2)")):
        topology.reshape_batch(2, 2)
    assert_same_topology(SQUARE.reshape_batch(1).reshape_batch(), SQUARE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Topology.from_mask(masks.causal()), "a mask function needs a shape (m, k)"),
        (lambda: Topology.from_mask([True]), "needs an array (..., m, k), got (1,)"),
        (lambda: Topology.from_mask([[True]], (1, 2)), "mask (1, 1) does not have shape (1, 2)"),
        (lambda: Topology.from_mask(masks.causal(), (2, 2), 2), "nse=2 is less than the 3 entries"),
        (lambda: Topology.from_mask(np.tri(2), nse=2), "nse=2 is less than the 3 entries"),
        (lambda: jax.jit(Topology.from_mask)(np.tri(2)), "must be given as nse=..."),
    ],
)
def test_from_mask_errors(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


# ---- What it tells of itself ----


def test_nnz_and_sparsity():
    topology = Topology([0, 2, 2, 3], [0, 2, 1, 9], (3, 4))
    assert (topology.nnz, topology.sparsity) == (3, 0.75)
    assert type(topology.nnz) is int
    assert Topology([0], [], (0, 4)).sparsity == 0
    nnz, sparsity = jax.jit(lambda t: (t.nnz, t.sparsity))(topology)
    assert (nnz, sparsity) == (3, 0.75)


def test_constant_of_a_traced_function_is_concrete():
    @jax.jit
    def function(x):
        assert type(TOPOLOGY.nnz) is int and "stored" in str(TOPOLOGY)
        return x

    function(0)


def test_str():
    topology = Topology([0, 2, 2, 3], [0, 2, 1, 9], (3, 4))
    assert str(topology).splitlines() == [
        "Topology of shape (3, 4), 3 stored, 1 padding, 75.0 % sparse",
        "┌────┐",
        "│█ █ │",
        "│    │",
        "│ █  │",
        "└────┘",
    ]
    assert "padding" not in str(SQUARE)
    assert repr(topology) == "Topology(shape=(3, 4), column_indices=(4,))"
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), topology)
    assert str(batch) == "Topology of shape (3, 4), batch (2,), nse 4"
    traced = []
    jax.jit(lambda t: traced.append((str(t), repr(t))))(topology)
    assert traced == [(repr(topology), repr(topology))]


def test_plot():
    pytest.importorskip("matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    _, ax = plt.subplots()
    assert SQUARE.plot(ax=ax, title="a band") is ax and ax.get_title() == "a band"
    band = masks.band(2)(np.arange(5)[:, None], np.arange(5))
    np.testing.assert_array_equal(ax.get_images()[0].get_array().filled(0), band)
    plt.close("all")
    with pytest.raises(ValueError, match="plot: needs one concrete pattern"):
        jax.tree.map(lambda x: x[None], SQUARE).plot()
    with pytest.raises(ValueError, match="plot: needs one concrete pattern"):
        jax.jit(lambda t: t.plot() and 0)(SQUARE)
