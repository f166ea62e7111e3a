"""Block masks: their lists and bits, how they are made of masks, topologies and arrays, checks."""

from __future__ import annotations

import dataclasses
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsparse import BlockMask, Topology, masks
from jaxsparse.block_mask import words as words_of_cells
from jaxsparse.block_mask.cell_states import states_of
from jaxsparse.block_mask.from_mask import most_of
from jaxsparse.layouts.block_mask import block_mask_of
from jaxsparse.masks.expression import as_mask
from jaxsparse.masks.function_intervals import truth_of_function
from jaxsparse.masks.intervals import Interval
from jaxsparse.primitive.jaxpr import equations

SIZES = [1, 63, 64, 65, 127, 129, 200, 1000]
IDS = np.sort(np.random.default_rng(1).integers(0, 9, 1000)) // 2 * 3
TABLE = jnp.asarray(IDS)
FLAGS = jnp.asarray(np.arange(1000) % 100 < 3)


def documents_by_a_table(rows, columns):
    return (TABLE[rows] == TABLE[columns]) & (columns <= rows)


def dilated_blocks(rows, columns):
    near = jnp.where(rows > 300, abs(rows - columns) < 70, (rows - columns) % 256 < 64)
    return near & (rows // 100 == columns // 100)


def numpy_alone(rows, columns):
    return IDS[rows] == IDS[columns]


KINDS = [
    masks.causal(),
    masks.band(70),
    masks.sliding_window(100, 3),
    masks.strided(1),
    masks.strided(190),
    masks.block(64),
    masks.block(100),
    masks.documents(IDS),
    masks.padding(130),
    masks.global_tokens([0, 700, *range(192, 300)]),
    masks.random(0.5, 1000, band_width=64),
    masks.random(0.999, 1000),
    masks.offset(masks.causal() & masks.documents(IDS), rows=0, columns=0),
    masks.offset(masks.sliding_window(5), rows=-70, columns=2**31 - 1),
    ~masks.causal() | masks.global_tokens([5]),
    masks.from_function(documents_by_a_table),
    masks.from_function(dilated_blocks),
    masks.from_function(numpy_alone),
    masks.from_function(lambda rows, columns: True),
    masks.from_function(lambda rows, columns: FLAGS[rows] | (columns < 0)),
]


def stored(mask, T, S):
    return np.asarray(mask(np.arange(T, dtype=np.int32)[:, None], np.arange(S, dtype=np.int32)))


def decoded(lists, shape):
    """What lists store, by the words of ffi/attention/problem.h, entry by entry."""
    offsets, entries, bits_at, bits, order = map(np.asarray, lists)
    down, across = (-(-size // 128) for size in shape)
    dense = np.zeros((128 * down, 128 * across), bool)
    word, i = np.meshgrid(np.arange(128), np.arange(32), indexing="ij")
    rows = 16 * (word // 32) + word % 32 // 4 + 8 * (i // 2 % 2)
    columns = 8 * (i // 4) + 2 * (word % 32 % 4) + i % 2
    cells = np.zeros(down, int)
    for row in range(down):
        for entry in range(offsets[row], offsets[row + 1]):
            column, slot = entries[entry] & 0xFFFFFF, bits_at[entry]
            for cell in range(4):
                state = entries[entry] >> (24 + 2 * cell) & 3
                cells[row] += state != 0
                at = 128 * row + cell // 2 * 64, 128 * column + cell % 2 * 64
                if state == 2:
                    dense[at[0] : at[0] + 64, at[1] : at[1] + 64] = True
                elif state == 1:
                    dense[at[0] + rows, at[1] + columns] = bits[slot][word] >> i & 1
                    slot += 1
    assert (np.diff(cells[order]) <= 0).all()
    assert not dense[shape[0] :].any() and not dense[:, shape[1] :].any()
    return dense[: shape[0], : shape[1]]


def assert_stores(mask, expected):
    np.testing.assert_array_equal(decoded(mask.rows, mask.shape), expected)
    np.testing.assert_array_equal(decoded(mask.columns, mask.shape[::-1]), expected.T)
    mask.verify()


def assert_same(actual, expected):
    """The same lists, of which the actual ones may have more room."""
    for x, y in (actual.rows, expected.rows), (actual.columns, expected.columns):
        for name in x._fields:
            a, b = np.asarray(getattr(x, name)), np.asarray(getattr(y, name))
            padded = np.zeros_like(a)
            padded[: len(b)] = b
            np.testing.assert_array_equal(a, padded, err_msg=name)
            assert a.dtype == b.dtype


# ---- Bits ----


def test_words():
    cells = np.random.default_rng(0).random((3, 64, 64)) < 0.5
    words = words_of_cells.pack_on_host(cells)
    for w, l, i in (0, 0, 0), (1, 6, 2), (3, 31, 31), (2, 17, 13):
        row, column = 16 * w + l // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (l % 4) + i % 2
        assert words_of_cells.place(row, column) == (32 * w + l, i)
        np.testing.assert_array_equal(words[:, 32 * w + l] >> i & 1, cells[:, row, column])
    transposed = words_of_cells.pack_on_host(cells.swapaxes(1, 2))
    np.testing.assert_array_equal(words_of_cells.unpack_on_host(words), cells)
    np.testing.assert_array_equal(words_of_cells.transpose_on_host(words), transposed)
    np.testing.assert_array_equal(words_of_cells.pack(jnp.asarray(cells)), words)
    np.testing.assert_array_equal(words_of_cells.unpack(jnp.asarray(words)), cells)
    np.testing.assert_array_equal(words_of_cells.transpose(jnp.asarray(words)), transposed)


# ---- Of masks ----


@pytest.mark.smoke
@pytest.mark.parametrize("mask", KINDS, ids=repr)
def test_kinds(mask):
    for T, S in zip([*SIZES, 1000, 129], [*SIZES[::-1], 1000, 128], strict=True):
        expected = stored(mask, T, S)
        made = BlockMask.from_mask(mask, (T, S))
        assert_stores(made, expected)
        assert_same(made, BlockMask.from_dense(expected))
        assert made.density == expected.mean()


def cell_states(xp, mask, shape):
    down, across = (range(2 * -(-size // 128)) for size in shape)
    return states_of(xp, mask, down, across, shape)


def assert_sound(states, expected):
    for (i, j), state in np.ndenumerate(states):
        cell = expected[64 * i : 64 * (i + 1), 64 * j : 64 * (j + 1)]
        assert state == 1 or (cell.any() if state else ~cell.any()) or not cell.size
        assert state != 2 or (cell.all() and cell.size == 64 * 64)
        assert state == 0 or cell.size


expressions = st.recursive(
    st.sampled_from(KINDS)
    | st.builds(
        lambda mask, rows, columns: masks.offset(mask, rows=rows, columns=columns),
        st.sampled_from([KINDS[0], KINDS[1], KINDS[4], KINDS[6], KINDS[9], KINDS[16]]),
        st.integers(-400, 400) | st.sampled_from([1 - 2**31, 2**31 - 1, 2**31 - 500]),
        st.integers(-400, 400),
    ),
    lambda operands: st.one_of(
        operands.map(lambda a: ~a),
        st.builds(lambda a, b: a & b, operands, operands),
        st.builds(lambda a, b: a | b, operands, operands),
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(expressions, st.integers(1, 400), st.integers(1, 400))
def test_expressions(mask, T, S):
    expected = stored(mask, T, S)
    assert_sound(cell_states(np, mask, (T, S)), expected)
    made = BlockMask.from_mask(mask, (T, S))
    assert_stores(made, expected)
    assert_same(made, BlockMask.from_topology(Topology.from_mask(mask, (T, S))))


def test_intervals_decide_what_they_should():
    """Every cell but those in which both values occur, of masks whose cells are like that."""
    shape = (1000, 1000)
    exact = [
        *(masks.causal(), masks.band(70), masks.sliding_window(64, 64), masks.strided(190)),
        *(masks.block(64), masks.block(100), masks.documents(IDS), masks.padding(130)),
        *(masks.global_tokens(range(64, 130)), masks.random(1.0, 1000), KINDS[15]),
        masks.causal() & masks.documents(IDS) & ~masks.band(300),
        as_mask(lambda rows, columns: (rows - 300 >> 6 == columns // 64) & (columns < 500)),
        as_mask(lambda rows, columns: jnp.maximum(rows, columns) - jnp.minimum(rows, 9) > 3),
        as_mask(lambda rows, columns: jnp.sign(rows * 2 - columns) + rows % 64 < 70),
    ]
    for mask in exact:
        expected = np.pad(stored(mask, *shape), ((0, 24), (0, 24)), mode="edge")
        cells = expected.reshape(16, 64, 16, 64)
        partial = cells.any((1, 3)) & ~cells.all((1, 3))
        partial[-1] |= cells.any((1, 3))[-1]
        partial[:, -1] |= cells.any((1, 3))[:, -1]
        undecided = cell_states(np, mask, shape) == 1
        # Documents may share an end, and then a cell has two.
        assert (undecided & ~partial).sum() <= 2 * ("documents" in repr(mask)), mask


FUNCTIONS = [
    lambda x, y: x + y < 7,
    lambda x, y: x - y >= -3,
    lambda x, y: x * y != 12,
    lambda x, y: (-x < y) ^ (abs(x) > 5),
    lambda x, y: x // 7 == y // 7,
    lambda x, y: x % 7 == y % 7,
    lambda x, y: jax.lax.div(x, np.int32(7)) > jax.lax.rem(y, np.int32(5)),
    lambda x, y: jnp.clip(x, -3, 60) >= jnp.sign(y) * 8,
    lambda x, y: (x >> 3 <= y << 2) | (x**2 < jnp.square(y)),
    lambda x, y: jnp.where(x > y, jnp.minimum(x, 9), jnp.maximum(y, 4)) == 9,
    lambda x, y: (x > 0) == (y > 0),
    lambda x, y: jnp.where(x > 2, y > 3, x + y == 2),
    lambda x, y: (x > 3).astype(int) + (y > 5) != 1,
    lambda x, y: jnp.bool_(x) | ~jnp.logical_xor(y > 1, x != y),
    lambda x, y: (x.astype(jnp.float32) < 1.5) & (jnp.uint32(y) > 3),
    lambda x, y: TABLE[x] == 6,
    lambda x, y: FLAGS[y] & (x < 5),
    lambda x, y: jnp.squeeze(x[None] > y[None], 0),
    lambda x, y: jax.jit(lambda y, x: x // y, static_argnums=())(jnp.abs(x) + 1, y) > 2,
]
near = st.integers(-90, 90) | st.integers(-(2**31), 2**31 - 64)
near |= st.sampled_from([-(2**31), 2**31 - 64, -(2**30) - 3, 2**30 - 3])


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(FUNCTIONS), near, near, st.integers(0, 4), st.integers(0, 4))
def test_intervals_of_functions_are_sound(function, row, column, height, width):
    rows = np.arange(row, row + 5)[: height + 1].astype(np.int32)
    columns = np.arange(column, column + 5)[: width + 1].astype(np.int32)
    with np.errstate(over="ignore"):
        truth = truth_of_function(
            function, *(Interval(np, x[:1, None], x[-1:, None]) for x in (rows, columns))
        )
    # Of one size always, so that JAX compiles once.
    down, across = np.resize(rows, 5), np.resize(columns, 5)
    values = np.asarray(function(jnp.asarray(down)[:, None], jnp.asarray(across)[None]))
    assert np.all(truth.may) or not values.any()
    assert not np.any(truth.must) or values.all()


def test_functions_that_cannot_be_traced_are_evaluated():
    calls = []

    def mask(rows, columns):
        calls.append(np.shape(rows))
        return np.asarray(rows) >= np.asarray(columns)

    assert_stores(BlockMask.from_mask(mask, (200, 100)), np.tri(200, 100, dtype=bool))
    assert calls.pop(0) == (1, 1) and all(shape[1:] == (64, 1) for shape in calls)
    truth = truth_of_function(mask, *(Interval(np, *np.zeros((2, 1), np.int32)),) * 2)
    assert truth.may and not truth.must


def test_long_masks_take_little():
    mask = BlockMask.from_mask(masks.sliding_window(1024), (131_072, 131_072))
    assert mask.rows.entries.shape == (9180,) and mask.nbytes < 5e6
    assert BlockMask.from_mask(masks.causal(), (65_536, 65_536)).rows.bits.shape == (1024, 128)


# ---- In programs ----


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


def test_states_of_jax_are_those_of_numpy():
    def everything():
        return [cell_states(jnp, mask, (600, 1000)) for mask in KINDS]

    for mask, states in zip(KINDS, jax.jit(everything)(), strict=True):
        np.testing.assert_array_equal(states, cell_states(np, mask, (600, 1000)), err_msg=str(mask))


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


def test_nothing_in_a_program_has_the_size_of_the_scores():
    T = 65_536

    def make(ids):
        mask = masks.documents(ids) & masks.sliding_window(4096)
        return BlockMask.from_mask(mask, (T, T), max_cells=9000)

    program = jax.make_jaxpr(make)(jnp.zeros(T, jnp.int32))
    shapes = walked_shapes(program)
    assert max(map(np.prod, shapes)) <= 2 * (T // 64) ** 2 * 16
    made = jax.eval_shape(make, jnp.zeros(T, jnp.int32))
    # Tiles that no document can reach have no room.
    assert made.rows.entries.shape == (512 * 33 - 32 * 33 // 2,)
    assert made.rows.bits.shape == (9000, 128)


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
    jax.clear_caches()
    assert_stores(make(ids, 7, 30), expected)
    for rooms in (6, 30), (7, 11):
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="is too small"):
            jax.block_until_ready(make(ids, *rooms))


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


# ---- As data ----


def test_in_transformations():
    mask = BlockMask.from_mask(masks.band(100), (300, 200))
    again = [
        jax.jit(lambda m: m)(mask),
        jax.jit(lambda m: m.T.T, donate_argnums=0)(jax.tree.map(jnp.copy, mask)),
        pickle.loads(pickle.dumps(mask)),
        jax.tree.unflatten(jax.tree.structure(mask), jax.tree.leaves(mask)),
    ]
    two = jax.vmap(lambda m: m)(jax.tree.map(lambda x: jnp.stack([x, x]), mask))
    again.append(jax.tree.map(lambda x: x[1], two))
    exported = jax.export.export(jax.jit(lambda m: m.T))(mask)
    again.append(jax.export.deserialize(exported.serialize()).call(mask).T)
    for other in again:
        assert_same(other, mask)
        assert other.shape == mask.shape
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(mask)]
    assert paths[0] == ".rows.offsets" and len(paths) == 10
    with pytest.raises(dataclasses.FrozenInstanceError):
        mask.shape = (1, 1)


def test_texts():
    mask = BlockMask.from_mask(masks.causal() & masks.padding(256), (5000, 300))
    # The last of three columns of tiles is empty, the last row reaches beyond the shape.
    assert repr(mask) == (
        "BlockMask(shape=(5000, 300), tiles: 41 empty, 4 partial, 75 full, 9.6 KB)"
    )
    lines = str(mask).splitlines()
    assert len(lines) == 2 + 24 + 2 and lines[3] == "│▒▒▒▒ │" and lines[-2] == "│▒▒▒▒ │"
    assert lines[10] == "│████ │"
    seen = []
    jax.jit(lambda m: seen.extend([repr(m), str(m)]) or m.shape[0])(mask)
    assert seen[0] == seen[1] and "room for" in seen[0]
    assert repr(jax.tree.map(lambda x: None, mask)) == "BlockMask(shape=(5000, 300))"
    batch = BlockMask.from_dense(np.ones((3, 130, 128), bool))
    assert (
        repr(batch)
        == str(batch)
        == ("BlockMask(shape=(130, 128), batch=(3,), tiles: 0 empty, 3 partial, 3 full, 6.2 KB)")
    )


def test_plot():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pytest.importorskip("matplotlib").use("Agg")
    mask = BlockMask.from_mask(masks.causal(), (300, 200))
    axes = mask.plot(title="causal")
    image = np.ma.filled(axes.images[0].get_array(), 0)
    assert image.shape == (5, 4) and axes.get_title() == "causal"
    assert image[1, 0] == 1 and image[0, 1] == 0 and image[4].tolist() == [1, 1, 1, 1]
    assert image[0, 0] == 65 / 128
    pyplot.close("all")
    for bad in (BlockMask.plot, lambda m: m.density and m.plot()):
        with pytest.raises(
            ValueError, match=r"BlockMask\.plot: needs one mask, got a batch \(1,\)"
        ):
            bad(jax.tree.map(lambda x: x[None], mask))


def damaged(change):
    """A mask of (300, 200), changed by a function of one of its arrays."""
    field, function = change
    mask = BlockMask.from_mask(masks.band(60), (300, 200))
    array = np.array(getattr(mask.rows, field))
    result = function(array)
    array = array if result is None else result
    return dataclasses.replace(mask, rows=mask.rows._replace(**{field: array}))


def setting(index, value):
    def change(array):
        array[index] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("offsets", setting(0, 1)), "rows: offsets must start at 0"),
        (("offsets", setting(1, 5)), "got [5, 4] at row 1 of tiles"),
        (("offsets", setting(-1, 9)), "end within the 5 entries, got [4, 9] at row 2 of tiles"),
        (("offsets", lambda x: x[:-1]), "rows.offsets must be int32 (4,), with room"),
        (("entries", lambda x: x.astype(np.int32)), "rows.entries must be uint32 (5,)"),
        (("entries", setting(3, 7 | 1 << 24)), "row 1 of tiles, tile 7: there are 2 columns"),
        (("entries", setting(1, 1 << 24)), "row 0 of tiles, tile 0: the tiles of a row must rise"),
        (("entries", setting(0, 3 << 24)), "row 0 of tiles, tile 0: a cell's state must be 0, 1"),
        (("entries", lambda x: x | 1 << 30), "row 2 of tiles, tile 1: a cell outside of the shape"),
        (("entries", setting(4, 1 | 2 << 24)), "tile 1: a cell that reaches beyond"),
        (("bits_at", setting(2, 0)), "row 1 of tiles, tile 0: bits_at must count the partial"),
        (("bits", lambda x: x[:4]), "tile 1: there are words of 4 cells"),
        (("bits", setting(-1, 2**32 - 1)), "row 2 of tiles, tile 1: bits outside of the shape"),
        (("bits", lambda x: np.pad(x, ((0, 1), (0, 0)), constant_values=1)), "last cell must be 0"),
        (("order", setting(0, 2)), "rows: order must have each row of tiles once"),
        (("bits", setting((0, 0), 0)), "rows and columns differ at the cell in row 0, column 0 of"),
        (("entries", setting(0, 1 << 24 | 1 << 26 | 1 << 28 | 2 << 30)), "bits_at must count"),
    ],
)  # fmt: skip
def test_verify(change, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        damaged(change).verify()
    assert str(caught.value).startswith("BlockMask.verify: ")


def test_verify_compares_lists():
    one, other = (BlockMask.from_mask(masks.band(width), (300, 200)) for width in (60, 70))
    full = BlockMask.from_dense(np.ones((128, 128), bool))
    for rows, columns in (one, other), (other, one):
        with pytest.raises(ValueError, match="rows and columns differ at the cell in row"):
            dataclasses.replace(rows, columns=columns.columns).verify()
    half = full.rows._replace(entries=full.rows.entries & 0x0FFFFFFF)
    with pytest.raises(ValueError, match="row 1, column 0 of the tile 0 in row 0 of tiles"):
        dataclasses.replace(full, rows=half).verify()
    with pytest.raises(ValueError, match="needs a concrete mask, got a traced one"):
        jax.jit(lambda m: m.verify())(one)
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), one)
    batch = dataclasses.replace(batch, rows=batch.rows._replace(order=jnp.zeros((2, 3), jnp.int32)))
    with pytest.raises(ValueError, match=r"rows of mask \(0,\): order must have each row"):
        batch.verify()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: BlockMask.from_mask(np.eye(3), (3, 3)), TypeError,
         "from_mask: mask must be a mask or a function, got ndarray: BlockMask.from_dense takes"),
        (lambda: BlockMask.from_mask(masks.causal(), (3,)), ValueError, "must be (T, S), got (3,)"),
        (lambda: BlockMask.from_mask(masks.causal(), (3, 2**31)), ValueError, "S must be <"),
        (lambda: BlockMask.from_mask(masks.causal(), (3, 3), max_cells=-1), ValueError,
         "BlockMask.from_mask: max_cells must be >= 0, got -1"),
        (lambda: BlockMask.from_mask(masks.documents([1, 2]), (3, 2)), IndexError,
         "documents: rows must be in [0, 2), got 2"),
        (lambda: jax.jit(lambda x: BlockMask.from_mask(masks.documents(x), (3, 2)))(np.arange(2)),
         IndexError, "documents: rows must be in [0, 2), got 2"),
        (lambda: BlockMask.from_mask(lambda i, j: i + j, (3, 3)), ValueError, "must return bool"),
        (lambda: BlockMask.from_dense(np.eye(3)), ValueError,
         "BlockMask.from_dense: mask must be bool (..., T, S), got float64 (3, 3)"),
        (lambda: BlockMask.from_dense(np.ones(3, bool)), ValueError, "got bool (3,)"),
        (lambda: BlockMask.from_blocks(np.eye(3), (64, 64)), ValueError, "got float64 (3, 3)"),
        (lambda: BlockMask.from_blocks(np.eye(3) > 0, 64), ValueError, "must be (rows, columns)"),
        (lambda: BlockMask.from_blocks(np.eye(3) > 0, (64, 96)), ValueError,
         "the sizes of a block must be multiples of 64 or divide it, got (64, 96)"),
        (lambda: BlockMask.from_blocks(np.eye(3) > 0, (64, 64), shape=(200, 192)), ValueError,
         "chosen must be (..., 4, 3) for shape (200, 192) in blocks of (64, 64), got (3, 3)"),
        (lambda: BlockMask.from_blocks(np.eye(3) > 0, (64, 64), within=True), TypeError, "within"),
        (lambda: BlockMask.from_dense(np.eye(3) > 0).reshape_batch(2), ValueError,
         "BlockMask.reshape_batch: sizes must be those of 1 masks, batch (), got (2,)"),
        (lambda: jax.jit(lambda m: m.density)(BlockMask.from_dense(np.eye(3) > 0)), ValueError,
         "BlockMask.density: needs a concrete mask, got a traced one"),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


# ---- As a layout of topologies ----


def test_layout():
    dense = np.random.default_rng(0).random((200, 130)) < 0.02
    static = Topology.from_mask(dense)
    topology = static.with_layout("block_mask")
    for carrying in (
        topology,
        topology.T.T,
        topology.padded(2000),
        pickle.loads(pickle.dumps(topology)),
        jax.jit(lambda t: t)(topology),
        jax.jit(lambda t: t.with_layout("block_mask", max_tiles=4))(static.as_dynamic()),
    ):
        carried = carrying.layouts["block_mask"]
        assert_stores(carried, dense)
        assert block_mask_of(carrying) is carried
        carrying.verify()
    assert_stores(topology.T.layouts["block_mask"], dense.T)
    other = Topology.from_mask(dense[:, ::-1])
    for wrong in BlockMask.from_topology(other), topology.layouts["block_mask"].T:
        with pytest.raises(ValueError, match=r"Topology\.verify: "):
            static.with_layouts({**static.layouts, "block_mask": wrong}).verify()
    # Made once for a concrete pattern, also in a program.
    made = block_mask_of(static)
    assert block_mask_of(static.as_dynamic()) is made
    seen = []
    jax.jit(lambda x: seen.append(block_mask_of(static)) or x)(1.0)
    assert seen[0] is made
    assert_stores(jax.jit(block_mask_of)(static.as_dynamic()), dense)
