"""Block masks made in programs, with static room, and those of topologies, arrays and blocks."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_masks import IDS, KINDS, assert_same, assert_stores, decoded, stored

from jaxsparse import BlockMask, Topology, masks
from jaxsparse.block_mask.from_mask import most_of
from jaxsparse.primitive.jaxpr import equations


def walked_shapes(jaxpr):
    return [v.aval.shape for e in equations(jaxpr.jaxpr) for v in e.outvars]


def packed(ids, length, shift):
    mask = masks.documents(ids) & masks.causal() & masks.padding(length)
    return BlockMask.from_mask(mask | masks.offset(masks.band(3), rows=shift), (400, 300))


def test_traced_masks():
    ids, lengths, shifts = np.stack([IDS[200:600], IDS[:400]]), np.array([250, 10]), [5, -90]
    shifts = np.array(shifts)
    made = jax.jit(jax.vmap(packed))(ids, lengths, shifts)
    made.verify()
    assert made.batch_shape == (2,)
    dense = jax.jit(BlockMask.to_dense)(made)
    for i in range(2):
        concrete = packed(*(x[i] for x in (ids, lengths, shifts)))
        np.testing.assert_array_equal(dense[i], concrete.to_dense())
        one = jax.tree.map(lambda x, i=i: x[i], made)
        assert_stores(one, np.asarray(concrete.to_dense()))
        assert (one.density, one.shape) == (concrete.density, (400, 300))


def test_functions_of_traced_arrays():
    def make(ids, limit):
        return BlockMask.from_mask(
            lambda rows, columns: (ids[rows] == ids[columns]) & (columns < limit), (300, 200)
        )

    made = jax.jit(make)(IDS[:300], 150)
    expected = (IDS[:300, None] == IDS[None, :200]) & (np.arange(200) < 150)
    assert_stores(made, expected)
    states = [np.sort(made.rows.entries[:6] >> 24)]
    by_kind = jax.jit(
        lambda ids: BlockMask.from_mask(masks.documents(ids) & masks.padding(150), (300, 200))
    )(IDS[:300])
    np.testing.assert_array_equal(np.sort(by_kind.rows.entries[:6] >> 24), states[0])


def test_strict_promotion():
    def make(ids, chosen, topology, dense):
        mask = masks.documents(ids) & masks.global_tokens(ids) | masks.random(0.9, 300)
        blocks = BlockMask.from_blocks(chosen, (64, 16), within=masks.strided(3) & masks.block(9))
        function = BlockMask.from_mask(lambda rows, columns: ids[rows] == ids[columns], (300, 300))
        made = BlockMask.from_mask(mask, (300, 200)), blocks, function
        made += BlockMask.from_topology(topology), BlockMask.from_dense(dense)
        return [x.to_dense() for x in made]

    topology = Topology.from_mask(np.eye(70, dtype=bool), nse=80)
    operands = IDS[:300].astype(np.int32), np.eye(3, 4, dtype=bool), topology, np.eye(70) > 0
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert jax.eval_shape(make, *operands)[0].shape == (300, 200)


def test_a_long_mask_takes_little_memory_in_a_program():
    """Beside the lists: no array of all positions, of all cells, or of those of partial cells."""
    T = 131_072

    def make(ids):
        mask = masks.documents(ids) & masks.sliding_window(1023)
        return BlockMask.from_mask(mask, (T, T), max_tiles=9180, max_cells=4600)

    compiled = jax.jit(make).lower(jax.ShapeDtypeStruct((T,), jnp.int32)).compile()
    analysis = compiled.memory_analysis()
    assert analysis.output_size_in_bytes < 5e6
    assert analysis.temp_size_in_bytes + analysis.output_size_in_bytes < 10e6
    ids = np.arange(T, dtype=np.int32) // 10_000
    expected = BlockMask.from_mask(masks.documents(ids) & masks.sliding_window(1023), (T, T))
    made = compiled(ids)
    for name in ("offsets", "order"):
        for x, y in (made.rows, expected.rows), (made.columns, expected.columns):
            np.testing.assert_array_equal(getattr(x, name), getattr(y, name))
    assert made.density == expected.density
    program = jax.make_jaxpr(lambda ids: make(ids).rows.entries)(jnp.zeros(T, jnp.int32))
    assert max(map(np.prod, walked_shapes(program))) < T**2 / 500

    def without_room(ids):  # tiles that no document can reach have none
        mask = masks.documents(ids) & masks.sliding_window(1023)
        return BlockMask.from_mask(mask, (T, T), max_cells=9).rows.entries

    assert jax.eval_shape(without_room, ids).shape == (9180,)


def test_room_of_traced_masks():
    mask = masks.causal() & masks.documents(np.arange(1000))
    traced = jax.tree.map(lambda x: x, mask)
    assert most_of(traced, (1000, 1000)) == (8, 16)
    ids = jax.ShapeDtypeStruct((131_072,), jnp.int32)

    def make(ids):
        return BlockMask.from_mask(masks.causal() & masks.documents(ids), (131_072, 131_072))

    message = (
        "BlockMask.from_mask: room for all 524800 tiles and 2098176 partial cells that there may "
        "be would take 2057 MB: say how many there are at most, by max_tiles=... and max_cells=..."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(make, ids)


def test_what_has_no_room(monkeypatch):
    def make(ids, max_tiles, max_cells):
        return BlockMask.from_mask(
            masks.documents(ids), (300, 300), max_tiles=max_tiles, max_cells=max_cells
        )

    ids = np.arange(300) // 75
    expected = ids[:, None] == ids
    make = jax.jit(make, static_argnums=(1, 2))
    few = make(ids, 3, 2)
    few.verify()
    left = decoded(few.rows, (300, 300))
    assert (left <= expected).all() and left.any()
    assert not left[128:, 128:].any()  # tiles in their order
    with pytest.raises(ValueError, match=r"from_mask: max_tiles=3 is less than the 7 tiles"):
        BlockMask.from_mask(masks.documents(ids), (300, 300), max_tiles=3)
    with pytest.raises(ValueError, match=r"from_dense: max_cells=2 is less than the 12 partial"):
        BlockMask.from_dense(expected, max_cells=2)
    monkeypatch.setenv("JAXSPARSE_CHECK", "1")
    assert_stores(make(ids, 7, 30), expected)
    batch = jax.vmap(lambda ids: make(ids, 7, 12))(np.stack([ids, ids // 2]))
    for i, one in enumerate((ids, ids // 2)):
        assert_stores(jax.tree.map(lambda x, i=i: x[i], batch), one[:, None] == one)
    for rooms in (6, 30), (7, 11):
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="is too small"):
            jax.block_until_ready(make(ids, *rooms))


def truncated(dense, max_tiles, max_cells):
    """What there is room for: the first tiles, and of their partial cells the first."""
    kept = np.zeros_like(dense)
    tiles = cells = 0
    for row, column in np.ndindex(*(-(-size // 128) for size in dense.shape)):
        tile = np.s_[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)]
        tiles += dense[tile].any()
        if tiles > max_tiles:
            break
        for i, j in np.ndindex(2, 2):
            cell = np.s_[64 * i : 64 * (i + 1), 64 * j : 64 * (j + 1)]
            stored = dense[tile][cell]
            full = stored.size == 64 * 64 and stored.all()
            cells += stored.any() and not full
            if full or cells <= max_cells:
                kept[tile][cell] = stored
    return kept


def of_cells(rng, shape):
    """An array of which cells are empty, partial or full at random, and so are tiles."""
    states = rng.choice(3, [-(-size // 64) for size in shape], p=rng.dirichlet([1, 1, 1]))
    states *= (
        (rng.random([-(-size // 128) for size in shape]) < rng.random())
        .repeat(2, 0)
        .repeat(2, 1)[: states.shape[0], : states.shape[1]]
    )
    whole = states.repeat(64, 0).repeat(64, 1)[: shape[0], : shape[1]]
    return (whole == 2) | (whole == 1) & (rng.random(shape) < 0.3)


@pytest.mark.parametrize(
    ("shape", "max_tiles", "max_cells"),
    [
        ((300, 700), 18, 60),
        ((700, 300), 7, 9),
        ((129, 4300), 40, 20),
        ((65, 63), 1, 1),
        ((1, 1000), 9, 9),
    ],
)
def test_room_in_programs(shape, max_tiles, max_cells):
    """Of arrays at random: the lists that the host makes of what there is room for."""
    rng = np.random.default_rng(0)
    dense = np.stack([of_cells(rng, shape) for _ in range(24)])
    room = {"max_tiles": max_tiles, "max_cells": max_cells}
    made = jax.jit(jax.vmap(lambda dense: BlockMask.from_dense(dense, **room)))(dense)
    table = jax.jit(lambda dense: BlockMask.from_topology(
        Topology.from_mask(dense, nse=dense[0].size), **room))(dense)  # fmt: skip
    for i in range(len(dense)):
        expected = BlockMask.from_dense(truncated(dense[i], max_tiles, max_cells))
        for batch in made, table:
            assert_same(jax.tree.map(lambda x, i=i: x[i], batch), expected)


def test_kinds_in_programs():
    """Masks of every kind, moved by traced numbers: the positions that they store on the host."""
    kinds, sizes = [masks.offset(m, rows=0, columns=0) for m in KINDS[:-3]], (200, 129)

    @jax.jit
    def make(zero):
        moved = [masks.offset(m, rows=zero, columns=zero) for m in kinds]
        return [BlockMask.from_mask(m, sizes) for m in moved]

    for mask, made in zip(kinds, make(0), strict=True):
        assert_stores(made, stored(mask, *sizes))


# ---- Of topologies, arrays and blocks ----


@pytest.mark.parametrize("density", [0.0, 0.02, 1.0])
def test_topologies_and_arrays(density):
    dense = np.random.default_rng(0).random((2, 3, 200, 333)) < density
    dense[0, 1, 64:192, :256] = True
    made = BlockMask.from_dense(dense)
    topologies = Topology.from_mask(dense, nse=200 * 333)
    assert made.batch_shape == (2, 3)
    same = [BlockMask.from_topology(topologies), made.reshape_batch(3, 2).reshape_batch(2, 3)]
    if density == 0.02:
        same.append(jax.jit(BlockMask.from_topology)(topologies))
        same.append(jax.jit(BlockMask.from_dense)(dense))
        same.append(jax.jit(jax.vmap(BlockMask.from_dense))(dense))
    for entry in np.ndindex(2, 3):
        one = jax.tree.map(lambda x, entry=entry: x[entry], made)
        assert_stores(one, dense[entry])
        for other in same:
            assert_same(jax.tree.map(lambda x, entry=entry: x[entry], other), one)
    np.testing.assert_allclose(made.sparsity, 1 - dense.mean((2, 3)))
    np.testing.assert_array_equal(made.to_dense(), dense)


@pytest.mark.parametrize("shape", [(0, 0), (0, 70), (70, 0)])
def test_empty_shapes(shape):
    ids = jnp.zeros(70, jnp.int32)
    for made in (
        BlockMask.from_mask(masks.causal(), shape),
        BlockMask.from_dense(np.zeros(shape, bool)),
        BlockMask.from_topology(Topology.from_mask(np.zeros(shape, bool))),
        jax.jit(BlockMask.from_topology)(Topology.from_mask(np.zeros(shape, bool), nse=3)),
        jax.jit(BlockMask.from_dense)(np.zeros(shape, bool)),
        jax.jit(lambda ids: BlockMask.from_mask(masks.documents(ids), shape))(ids),
        BlockMask.from_blocks(np.zeros((-(-shape[0] // 64), -(-shape[1] // 64)), bool), (64, 64),
                              shape=shape),
    ):  # fmt: skip
        assert made.verify().to_dense().shape == made.shape == shape
        assert (made.density, made.sparsity) == (0, 0)
        assert str(made).startswith("BlockMask of shape")
    assert BlockMask.from_dense(np.zeros((0, 5, 6), bool)).verify().to_dense().shape == (0, 5, 6)


@pytest.mark.parametrize(
    ("block", "blocks"), [((64, 64), (5, 4)), ((16, 128), (19, 2)), ((192, 1), (2, 250))]
)
def test_blocks(block, blocks):
    shape = (300, 250)
    chosen = np.random.default_rng(0).random((2, *blocks)) < 0.4
    expected = chosen.repeat(block[0], 1).repeat(block[1], 2)[:, :300, :250]
    within = masks.causal() & masks.documents(IDS)
    made = BlockMask.from_blocks(chosen, block, shape=shape)
    causal = BlockMask.from_blocks(chosen.astype(np.int8), block, within=within, shape=shape)
    traced = jax.jit(
        lambda chosen, ids: BlockMask.from_blocks(
            chosen, block, within=masks.causal() & masks.documents(ids), shape=shape
        )
    )(chosen, IDS)
    for i in range(2):
        one, seen, in_program = (
            jax.tree.map(lambda x, i=i: x[i], x) for x in (made, causal, traced)
        )
        assert_same(one, BlockMask.from_dense(expected[i]))
        inside = expected[i] & stored(within, *shape)
        assert_same(seen, BlockMask.from_dense(inside))
        assert_stores(in_program, inside)
    if block == (64, 64):
        partial = jax.eval_shape(lambda x: BlockMask.from_blocks(x, block), chosen).rows.bits
        assert partial.shape == (2, 1, 128)
