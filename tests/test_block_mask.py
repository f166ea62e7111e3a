"""Block masks: their lists and bits, how they are made of masks, topologies and arrays, checks."""

from __future__ import annotations

import dataclasses
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_masks import KINDS, assert_same, assert_stores, cell_states, stored
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsparse import BlockMask, Topology, masks
from jaxsparse.block_mask import words as words_of_cells
from jaxsparse.layouts.block_mask import block_mask_of

SIZES = [1, 63, 64, 65, 127, 129, 200, 1000]

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
    in_order = words_of_cells.in_order_of_words(jnp.asarray(cells))
    np.testing.assert_array_equal(words_of_cells.pack(in_order), words)
    np.testing.assert_array_equal(words_of_cells.unpack(jnp.asarray(words)), cells)
    np.testing.assert_array_equal(words_of_cells.transpose(jnp.asarray(words)), transposed)


# ---- Of masks ----


@pytest.mark.smoke
@pytest.mark.parametrize("mask", KINDS, ids=repr)
def test_kinds(mask):
    sizes = list(zip([*SIZES, 1000, 129], [*SIZES[::-1], 1000, 128], strict=True))
    if repr(mask).startswith("from_function"):  # JAX compiles theirs for each number of cells
        sizes = sizes[-3:]
    for T, S in sizes:
        expected = stored(mask, T, S)
        made = BlockMask.from_mask(mask, (T, S))
        assert_stores(made, expected)
        assert_same(made, BlockMask.from_dense(expected))
        assert made.density == expected.mean()


def assert_sound(states, expected):
    for (i, j), state in np.ndenumerate(states):
        cell = expected[64 * i : 64 * (i + 1), 64 * j : 64 * (j + 1)]
        assert state == 1 or (cell.any() if state else ~cell.any()) or not cell.size
        assert state != 2 or (cell.all() and cell.size == 64 * 64)
        assert state == 0 or cell.size


expressions = st.recursive(
    st.sampled_from(KINDS[:-5] + KINDS[-3:-1])
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


def test_long_masks_take_little():
    mask = BlockMask.from_mask(masks.sliding_window(1024), (131_072, 131_072))
    assert mask.rows.entries.shape == (9180,) and mask.nbytes < 5e6
    assert BlockMask.from_mask(masks.causal(), (65_536, 65_536)).rows.bits.shape == (1024, 128)


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
        (("bits_at", setting(2, -1)), "row 1 of tiles, tile 0: there are words of"),
        (("bits_at", setting(2, 0)), "rows and columns differ at the cell in row"),
        (("bits", lambda x: x[:4]), "tile 1: there are words of 4 cells"),
        (("bits", setting(-1, 2**32 - 1)), "row 2 of tiles, tile 1: bits outside of the shape"),
        (("order", setting(0, 2)), "rows: order must have each row of tiles once"),
        (("bits", setting((0, 0), 0)), "rows and columns differ at the cell in row 0, column 0 of"),
        (("entries", setting(0, 1 << 24 | 1 << 26 | 1 << 28 | 2 << 30)), "rows and columns differ"),
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
