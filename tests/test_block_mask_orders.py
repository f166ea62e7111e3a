"""Block masks whose rows and columns are regrouped: by remainders, and in orders that are given."""

from __future__ import annotations

import functools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_masks import IDS, KINDS, assert_same, assert_stores, stored
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jaxsparse import BlockMask, Topology, explain, masks, merge_attention, sparse_attention
from jaxsparse.block_mask.cell_states import states_of
from jaxsparse.block_mask.orders import Residues, inverse, ordered, reordered, restored

STRIDED = masks.strided(7) & masks.causal()


def in_order(dense, rows, columns):
    """An array of bool at places of two orders."""
    for axis, order in enumerate((rows, columns), -2):
        if isinstance(order, Residues):
            size = dense.shape[axis]
            order = sorted(range(size), key=lambda i, n=order.stride: (i % n, i))
        dense = dense if order is None else np.take(dense, order, axis)
    return dense


def permutations(*shape):
    rng = np.random.default_rng(0)
    return [rng.permutation(size).astype(np.int32) for size in shape]


# ---- Orders ----


@pytest.mark.parametrize(("size", "stride"), [(1, 1), (12, 4), (13, 4), (15, 4), (5, 7), (129, 64)])
def test_residues(size, stride):
    order, every = Residues(stride), np.arange(size)
    positions = order.positions(np, every, size)
    assert positions.tolist() == sorted(range(size), key=lambda i: (i % stride, i))
    np.testing.assert_array_equal(order.places(np, positions, size), every)
    x = np.random.default_rng(0).random((2, size, 3)).astype(np.float32)
    for by in order, jnp.asarray(positions):
        np.testing.assert_array_equal(ordered(by, x, 1), x[:, positions])
        np.testing.assert_array_equal(restored(by, ordered(by, x, 1), 1), x)
    np.testing.assert_array_equal(inverse(positions), inverse(jnp.asarray(positions)))


moved = st.builds(
    lambda mask, rows, columns: masks.offset(mask, rows=rows, columns=columns),
    st.sampled_from([*KINDS[:7], KINDS[9], masks.strided(6), masks.strided(128)]),
    st.integers(-400, 400) | st.sampled_from([2**31 - 1, 1 - 2**31]),
    st.integers(-400, 400),
)
expressions = st.recursive(
    moved | st.sampled_from([KINDS[7], KINDS[10], KINDS[16]]),
    lambda operands: st.one_of(
        operands.map(lambda a: ~a),
        st.builds(lambda a, b: a & b, operands, operands),
        st.builds(lambda a, b: a | b, operands, operands),
    ),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None)
@given(
    expressions,
    st.integers(1, 500),
    st.integers(1, 500),
    st.sampled_from([2, 3, 6, 12, 64, 128, 190, 450]),
    st.sampled_from([2, 6, 64, 128]),
)
def test_intervals_of_remainders(mask, T, S, stride, other):
    """States of cells in the orders are sound, whatever the strides of mask and orders."""
    orders = Residues(stride), Residues(other if (T + S) % 3 == 0 else stride)
    expected = in_order(stored(mask, T, S), *orders)
    down, across = (range(2 * -(-size // 128)) for size in (T, S))
    states = states_of(np, reordered(mask, *orders, (T, S)), down, across, (T, S))
    for (i, j), state in np.ndenumerate(states):
        cell = expected[64 * i : 64 * (i + 1), 64 * j : 64 * (j + 1)]
        assert state == 1 or (cell.all() and cell.size == 64 * 64 if state else not cell.any())
    made = BlockMask.from_mask(mask, (T, S), row_order=orders[0], column_order=orders[1])
    assert_stores(made, expected)


def test_remainders_are_known_of_functions_too():
    """Cells are decided without evaluating them: those of other remainders are empty."""

    def every_eighth(rows, columns):
        return ((rows - columns) % 8 == 3) & (columns <= rows)

    shape, order = (4096, 4096), Residues(8)
    for mask in masks.from_function(every_eighth), masks.offset(masks.strided(8), rows=-3):
        states = states_of(np, reordered(mask, order, order, shape), range(64), range(64), shape)
        groups = np.arange(64) // 8
        assert (states[(groups[:, None] - groups[None]) % 8 != 3] == 0).all()
        assert (states == 0).mean() > 7 / 8 - 1e-9
    made = BlockMask.from_mask(every_eighth, shape, regroup=True)
    assert made.row_order == made.column_order == order


# ---- How they are made ----


@pytest.mark.parametrize(("shape", "count"), [((1, 63), 1), ((200, 327), 3)])
def test_all_ways(shape, count):
    rows, columns = permutations(*shape)
    ids = jnp.asarray(IDS[: max(shape)], jnp.int32)
    dense = stored(STRIDED & masks.documents(IDS), *shape)
    topology = Topology.from_mask(dense, nse=dense.size)
    options = (
        {"regroup": 7},
        {"row_order": Residues(3), "column_order": columns},
        {"row_order": rows},
    )
    for each in options[:count]:
        made = BlockMask.from_mask(STRIDED & masks.documents(IDS), shape, **each)
        expected = BlockMask.from_dense(in_order(dense, made.row_order, made.column_order))
        assert_same(made, expected)
        np.testing.assert_array_equal(made.verify().to_dense(), dense)
        arrays = {k: v for k, v in each.items() if isinstance(v, np.ndarray)}
        static = {k: v for k, v in each.items() if k not in arrays}

        @jax.jit
        def traced(ids, topology, dense, arrays, static=static):
            every = {**arrays, **static}
            return (
                BlockMask.from_mask(STRIDED & masks.documents(ids), shape, **every),
                BlockMask.from_topology(topology, **every),
                BlockMask.from_dense(dense, **every),
            )

        others = [BlockMask.from_topology(topology, **each), BlockMask.from_dense(dense, **each)]
        of_mask, *in_program = traced(ids, topology, dense, arrays)
        assert_stores(of_mask, np.asarray(expected.to_dense()))
        for other in (*others, *in_program):
            assert_same(other, made)
            np.testing.assert_array_equal(other.to_dense(), dense)
            assert other.is_regrouped and repr(other).count("regrouped") == 1


def test_batches():
    dense = np.stack([stored(masks.strided(n), 200, 130) for n in (4, 4, 12)])
    made = BlockMask.from_dense(dense, row_order=permutations(200)[0])
    assert made.row_order.shape == (3, 200)
    same = BlockMask.from_topology(Topology.from_mask(dense), row_order=permutations(200)[0])
    vmapped = jax.vmap(lambda x: BlockMask.from_dense(x, row_order=permutations(200)[0]))(dense)
    for one in made, same, vmapped:
        again = one.reshape_batch(1, 3).verify()
        assert again.row_order.shape == (1, 3, 200)
        np.testing.assert_array_equal(again.to_dense()[0], dense)
    by_remainders = BlockMask.from_dense(dense, regroup=True)
    assert by_remainders.row_order == Residues(4)
    np.testing.assert_array_equal(by_remainders.to_dense(), dense)
    np.testing.assert_allclose(by_remainders.sparsity, 1 - dense.mean((1, 2)))


@pytest.mark.parametrize(
    ("mask", "size", "by_intervals", "by_positions"),
    [
        (STRIDED, 900, 7, 7),
        (masks.strided(7) & masks.strided(2), 900, 7, 14),
        (~masks.strided(7) | masks.band(3), 900, None, None),
        (masks.causal(), 900, None, None),
        # Intervals say nothing of this function.
        (masks.from_function(lambda i, j: (i & 15) == (j & 15)), 2048, None, 16),
    ],
)
def test_strides_that_are_found(mask, size, by_intervals, by_positions):
    """Of a mask by intervals of cells, of arrays and topologies by what they store."""
    shape = (size, size)
    dense = stored(mask, *shape)
    for made, stride in (
        (BlockMask.from_mask(mask, shape, regroup=True), by_intervals),
        (BlockMask.from_dense(dense, regroup=True), by_positions),
        (BlockMask.from_topology(Topology.from_mask(dense), regroup=True), by_positions),
    ):
        assert made.row_order == made.column_order == (stride and Residues(stride))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: BlockMask.from_mask(STRIDED, (9, 9), regroup=0), ValueError,
         "BlockMask.from_mask: regroup must be >= 1, got 0"),
        (lambda: BlockMask.from_mask(STRIDED, (9, 9), regroup=2.0), TypeError, "regroup"),
        (lambda: BlockMask.from_mask(STRIDED, (9, 9), regroup=2, row_order=np.arange(9)),
         ValueError, "regroup=2 sets the order of rows and columns"),
        (lambda: BlockMask.from_mask(STRIDED, (9, 8), row_order=np.arange(8)), ValueError,
         "row_order must be integers (9,), a permutation of the positions, got int64 (8,)"),
        (lambda: BlockMask.from_dense(np.ones((2, 3), bool), column_order=[0, 1, 1]), ValueError,
         "BlockMask.from_dense: column_order must have each of the 3 positions once"),
        (lambda: BlockMask.from_dense(np.ones((2, 3), bool), column_order=[0, 1.0, 2]), ValueError,
         "column_order must be integers (3,)"),
        (lambda: jax.jit(lambda x: BlockMask.from_dense(x, regroup=True))(np.ones((2, 3), bool)),
         ValueError, "from_dense: regroup=True needs a concrete array: give the stride"),
        (lambda: jax.jit(lambda t: BlockMask.from_topology(t, regroup=True))(
            Topology.from_mask(np.ones((2, 3), bool), nse=9)),
         ValueError, "regroup=True needs a concrete topology: give the stride"),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


# ---- As data ----


def test_as_data():
    rows, columns = permutations(300, 200)
    for options in {"regroup": 7}, {"row_order": rows, "column_order": columns}:
        mask = BlockMask.from_mask(STRIDED, (300, 200), **options)
        dense = stored(STRIDED, 300, 200)
        exported = jax.export.export(jax.jit(lambda m: m.T))(mask)
        again = [
            jax.jit(lambda m: m)(mask),
            pickle.loads(pickle.dumps(mask)),
            mask.T.T,
            jax.export.deserialize(exported.serialize()).call(mask).T,
            jax.tree.unflatten(jax.tree.structure(mask), jax.tree.leaves(mask)),
        ]
        for other in again:
            np.testing.assert_array_equal(other.verify().to_dense(), dense)
        np.testing.assert_array_equal(mask.T.to_dense(), dense.T)
        assert mask.density == dense.mean()
        assert "regrouped" in str(mask).splitlines()[0] and "regrouped" in repr(mask)
        assert str(jax.tree.map(lambda x: None, mask)) == "BlockMask(shape=(300, 200))"
    assert mask.nbytes > BlockMask.from_mask(STRIDED, (300, 200)).nbytes
    damaged = jax.tree.unflatten(
        jax.tree.structure(mask), [*jax.tree.leaves(mask)[:-1], jnp.zeros(200, jnp.int32)]
    )
    with pytest.raises(ValueError, match="column_order must have each of the 200 positions once"):
        damaged.verify()


def test_plot():
    pytest.importorskip("matplotlib").use("Agg")
    axes = BlockMask.from_mask(STRIDED, (300, 200), regroup=7).plot()
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("column, regrouped", "row, regrouped")


def test_as_a_layout():
    dense = stored(STRIDED, 300, 200)
    topology = Topology.from_mask(dense).with_layout("block_mask", regroup=7)
    for carrying in topology, topology.T.T, jax.jit(lambda t: t)(topology):
        carrying.verify()
    other = BlockMask.from_dense(dense[:, ::-1], regroup=7)
    with pytest.raises(ValueError, match=r"Topology\.verify: "):
        topology.with_layouts({**topology.layouts, "block_mask": other}).verify()


# ---- Attention ----


def operands(T, S, *, heads=4, key_heads=2, batch=2):
    rng = np.random.default_rng(0)
    sizes = (T, heads, 8), (S, key_heads, 8), (S, key_heads, 5)
    return [jnp.asarray(rng.standard_normal((batch, *x)), jnp.float32) for x in sizes]


@functools.partial(jax.jit, static_argnames="implementation")
def attended(mask, *arrays, implementation=None):
    """Results and gradients of a sum in which each number has a weight of its own."""
    sinks = jnp.arange(4, dtype=jnp.float32)

    def loss(*arrays):
        out, lse = sparse_attention(
            *arrays, mask, return_lse=True, sinks=sinks, implementation=implementation
        )
        total = 0.0
        for x in out, lse:
            weights = jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)
            total += jnp.sum(jnp.where(jnp.isfinite(x), weights * x, 0))
        return total, (out, lse)

    (_, results), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*arrays)
    return [*results, *gradients]


def assert_close(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("T", "S"), [(129, 203), (65, 1)])
def test_attention(T, S):
    arrays = operands(T, S)
    rows, columns = permutations(T, S)
    expected = attended(BlockMask.from_mask(STRIDED, (T, S)), *arrays)
    for options in {"regroup": 7}, {"regroup": 150}, {"row_order": rows, "column_order": columns}:
        mask = BlockMask.from_mask(STRIDED, (T, S), **options)
        assert_close(attended(mask, *arrays), expected)
    # Composed of products where there is no kernel, the pattern is in no order of its own.
    topology = Topology.from_mask(stored(STRIDED, T, S)).with_layout("block_mask", regroup=7)
    for implementation in None, "xla":
        assert_close(attended(topology, *arrays, implementation=implementation), expected)


def test_attention_with_orders_for_each_head_and_sequence():
    T = 150
    arrays, grouped = operands(T, T, key_heads=4), operands(T, T, key_heads=2)
    dense = np.random.default_rng(1).random((2, 4, T, T)) < 0.1
    rng = np.random.default_rng(2)
    orders = np.stack([rng.permutation(T) for _ in range(16)]).astype(np.int32)
    rows, columns = orders.reshape(2, 2, 4, T)

    @jax.jit
    @jax.vmap
    @jax.vmap
    def make(x, i, j):
        return BlockMask.from_dense(x, row_order=i, column_order=j)

    for some in np.s_[:, :], np.s_[:1, :]:
        mask = make(dense[some], rows[some], columns[some])
        np.testing.assert_array_equal(mask.verify().to_dense(), dense[some])
        assert_close(attended(mask, *arrays), attended(BlockMask.from_dense(dense[some]), *arrays))
    with pytest.raises(ValueError, match="masks of 2 heads with one key head must have the same"):
        sparse_attention(*grouped, make(dense, rows, columns))
    of_sequences = columns[:, :1]
    mask = make(dense[:, :1], rows[:, :1], of_sequences)
    expected = attended(BlockMask.from_dense(dense[:, :1]), *grouped)
    assert_close(attended(mask, *grouped), expected)


def test_attention_is_differentiable_in_both_modes():
    arrays = operands(40, 50, batch=1)
    mask = BlockMask.from_mask(masks.strided(4), (40, 50), regroup=4)
    out = lambda *x: sparse_attention(*x, mask)  # noqa: E731
    check_grads(out, arrays, 1, rtol=2e-2, atol=2e-2)
    listed = BlockMask.from_mask(masks.strided(4), (40, 50), row_order=permutations(40)[0])
    other = lambda *x: sparse_attention(*x, listed)  # noqa: E731
    tangents = [jnp.cos(x) for x in arrays]
    assert_close(jax.jvp(out, arrays, tangents), jax.jvp(other, arrays, tangents))


def test_a_strided_and_a_local_part():
    T = 300
    arrays = operands(T, T)
    local, strided = masks.band(20), masks.strided(16) & ~masks.band(20)
    parts = [
        BlockMask.from_mask(local & masks.causal(), (T, T)),
        BlockMask.from_mask(strided & masks.causal(), (T, T), regroup=16),
    ]
    merged = merge_attention(
        *zip(*(sparse_attention(*arrays, part, return_lse=True) for part in parts), strict=True)
    )
    whole = sparse_attention(*arrays, (local | strided) & masks.causal(), return_lse=True)
    assert_close(merged, whole)


def test_explain():
    shape = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.float32)
    mask = BlockMask.from_mask(masks.strided(64) & masks.causal(), (4096, 4096), regroup=64)
    text = str(explain(sparse_attention, shape, shape, shape, mask))
    assert "mask (4096, 4096) with 32 of 1024 tiles" in text
