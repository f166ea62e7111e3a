"""Packed matrices: each place of each pattern against an oracle in NumPy, trees, files, errors."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from edge_cases import EDGE_CASES
from reference import pack_gaps, packed_matrix, to_dense

from jaxsparse import CSR, EXPORT_DISABLED_CHECKS, Packed, Topology, _ffi
from jaxsparse.ops.packed_streams import PANEL_COLUMNS
from jaxsparse.packed_form import (
    entries_of_gaps,
    microseconds_of_gaps,
    microseconds_of_streams,
    parts_for,
    range_of_parts,
)
from jaxsparse.pruning import STRUCTURES

FORMS = [(1, 1), (2, 1), (0, 3), (1, 3), (0, 1), (2, 2)]  # cell, parts


def random_matrix(topology, seed=0, dtype=jnp.bfloat16):
    values = np.random.default_rng(seed).standard_normal(topology.nse)
    values[topology.nnz :] = np.nan  # padding is never read
    return CSR(jnp.asarray(values, dtype), topology)


def striped(m, k, stripe, seed=0):
    """Lanes whose streams would drift apart: a dense stripe of columns, the rest nearly empty."""
    rng = np.random.default_rng(seed)
    mask = rng.random((m, k)) < 0.01
    mask[:, :stripe] |= (np.arange(stripe) % 8 < 2)[None, :]
    mask[: m // 2, stripe : 2 * stripe] = True
    return Topology.from_mask(mask)


PATTERNS = {name: lambda make=make: make()[0] for name, make in EDGE_CASES.items()} | {
    f"{round(100 * sparsity)}_percent": lambda sparsity=sparsity: Topology.from_mask(
        np.random.default_rng(3).random((50, 900)) >= sparsity
    )
    for sparsity in (0.0, 0.5, 0.7, 0.9, 0.98)
}
PATTERNS |= {"striped": lambda: striped(33, 1500, 512)}


def parts_that_fit(topology, parts, cell=1):
    least, most = range_of_parts(topology.shape[1], cell)
    return min(max(parts, least), most)


@pytest.mark.parametrize("cell, parts", FORMS)
def test_every_place(cell, parts):
    """The numbers that lanes read from their streams stand where they should."""
    for name, make in PATTERNS.items():
        a = random_matrix(make())
        packed = a.pack(cell=cell, parts=parts_that_fit(a.topology, parts, cell))
        expected = to_dense(a.values, a.topology)
        np.testing.assert_array_equal(packed_matrix(packed), expected, err_msg=name)


def test_gaps_are_those_of_the_format():
    """Each gap, step and source, against a packer that goes over the streams one by one."""
    for number, (name, make) in enumerate(PATTERNS.items()):
        topology = make()
        parts = parts_that_fit(topology, 1 + number % 3, 0)
        packed = random_matrix(topology).pack(cell=0, parts=parts, repackable=True)
        offsets, columns = (np.asarray(x) for x in topology.concrete_arrays("test"))
        k = topology.shape[1]
        gaps, starts, sources = pack_gaps(offsets, columns, packed.rows, columns=k, parts=parts)
        expected = gaps, starts, np.where(sources < 0, topology.nse, sources)
        for got, wanted in zip(
            (packed.masks, packed.starts, packed.sources), expected, strict=True
        ):
            np.testing.assert_array_equal(np.ravel(got), wanted, err_msg=name)


def test_strips_are_of_rows_whose_longest_streams_are_alike():
    """Rows stand by what the longest streams of their parts take, alone in a strip."""
    for name, make in PATTERNS.items():
        topology = make()
        parts = parts_that_fit(topology, 2, 0)
        offsets, columns = (np.asarray(x) for x in topology.concrete_arrays("test"))
        order, taken = np.asarray(topology.pattern.row_order), []
        for row in order:
            alone = {row: offsets[row], row + 1: offsets[row + 1]}
            gaps, starts, _ = pack_gaps(
                alone, columns, [row], columns=topology.shape[1], parts=parts
            )
            gaps = gaps.reshape(-1, 1, 32) >> 4 * np.arange(8, dtype=np.uint32)[:, None] & 15
            streams = (gaps > 0).reshape(-1, 4, 2, 32).sum(1)  # numbers of each, of a step
            pieces = itertools.pairwise(starts)
            taken.append(sum(streams[a:b].sum(0).max() for a, b in pieces))
        packed = random_matrix(topology).pack(cell=0, parts=parts)
        expected = order[np.argsort(-np.array(taken, int), kind="stable")]
        np.testing.assert_array_equal(packed.rows, expected, err_msg=name)


@pytest.mark.parametrize("number, name", [*enumerate(PATTERNS)])
def test_written_out(number, name):
    topology = PATTERNS[name]()
    a = random_matrix(topology)
    cell, parts = FORMS[number % len(FORMS)]
    packed = a.pack(cell=cell, parts=parts_that_fit(topology, parts, cell), trainable=True)
    expected = to_dense(a.values, topology)
    np.testing.assert_array_equal(np.asarray(packed.todense(), np.float64), expected)
    stored = np.asarray(packed.stored())
    assert stored[expected != 0].all() and stored.sum() <= max(cell, 1) * topology.nnz
    assert packed.verify() is packed


def test_back_to_rows():
    a = random_matrix(PATTERNS["padding"]())
    for cell, trainable in (1, True), (1, False), (0, True), (0, False):
        back = CSR.from_packed(a.pack(cell=cell, trainable=trainable))
        assert (back.topology is a.topology) == trainable
        np.testing.assert_array_equal(back.todense(), a.todense())
        np.testing.assert_array_equal(back.topology.nnz, a.topology.nnz)


def test_few_rows_serve_a_panel():
    """Whatever the pattern is, in a ring of 64 rows; and there is little padding."""
    for name in ("striped", "0_percent", "50_percent", "uneven", "full"):
        for cell in 1, 2:
            packed = random_matrix(PATTERNS[name]()).pack(cell=cell, parts=1)
            free, needed = np.moveaxis(np.asarray(packed.panels), -1, 0)
            assert (needed - free <= 48).all() and (np.diff(free, axis=1) >= 0).all()
    half = Topology.from_mask(np.random.default_rng(0).random((256, 4096)) < 0.5)
    packed = random_matrix(half).pack()
    assert packed.cell == 1 and packed.nbytes < 0.7 * 2 * packed.size
    assert "% of dense, cell 1" in repr(packed) and packed.parts == 8


def test_parts():
    """Between 1 and the most; a tall matrix has enough strips to fill a GPU with fewer parts."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        m, k = (int(x) for x in 2 ** rng.uniform(0, 18, 2))
        for cell in 0, 1, 2:
            parts, (least, most) = parts_for(m, k, cell), range_of_parts(k, cell)
            assert 1 <= least <= parts <= most <= max(least, -(-k // PANEL_COLUMNS))
            assert parts_for(2**20, k, cell) <= parts <= parts_for(1, k, cell)
            assert cell or k <= 8192 * parts
    a = random_matrix(PATTERNS["striped"]())
    for cell in 0, 1:
        assert a.pack(cell=cell).parts == parts_for(*a.shape, cell) > 1


def test_form_for_the_columns_of_x():
    """Gaps for a few columns of matrices that are sparse enough; the estimate of their entries."""
    rng = np.random.default_rng(0)
    for density, shape in (0.5, (1600, 4096)), (0.1, (3200, 1024)), (0.05, (1600, 4096)):
        topology = Topology.from_mask(rng.random(shape) < density)
        a = random_matrix(topology)
        cells = [a.pack(columns=n).cell for n in (1, 8, 16, 17)]
        assert cells[-1] == a.pack().cell != 0
        assert cells == sorted(cells)  # none is of gaps for more columns where it is not for fewer
        lengths = np.diff(topology.row_offsets)[np.asarray(topology.pattern.row_order)]
        by_gaps = a.pack(cell=0)
        assert by_gaps.parts == (1 if shape[1] == 1024 else 2)
        estimate = entries_of_gaps(lengths, shape[1], by_gaps.parts)
        assert estimate == pytest.approx(by_gaps.values.size, rel=0.085)
        assert [a.pack(jnp.int8, columns=n).cell for n in (1, 17, None)] == [0, 1, 1]
    lengths, nnz, wide = np.full(8192, 2458), 2458 * 8192, jnp.dtype(jnp.bfloat16)
    of_gaps = microseconds_of_gaps(lengths, 8192, 1, wide)
    assert of_gaps < microseconds_of_gaps(lengths, 8192, 8, wide)
    for dtype in wide, jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn):
        of_streams = microseconds_of_streams(nnz, (8192, 8192), 1, dtype)
        assert microseconds_of_gaps(lengths, 8192, 1, dtype) < 0.8 * of_streams
        # Fewer bytes count where memory binds alone.
        assert (microseconds_of_gaps(lengths, 8192, 1, dtype) < of_gaps) == (dtype != wide)
        of_eight = microseconds_of_gaps(lengths, 8192, 8, dtype)
        assert of_eight <= microseconds_of_gaps(lengths, 8192, 8, wide)


def test_pairs_are_stored_together():
    """With no zeros between, where pruning keeps both or none, whatever the sparsity."""
    scores = jnp.asarray(np.random.default_rng(0).standard_normal((64, 1024)))
    for density, cell in (0.5, 1), (0.25, 1), (0.125, 2):
        kept = jnp.int32(density * scores.size)
        masks = [STRUCTURES[name](scores, kept) for name in ("unstructured", "pairs")]
        assert [int(mask.sum()) for mask in masks] == [kept, kept]
        free, paired = (Topology.from_mask(mask) for mask in masks)
        assert random_matrix(free).pack().cell == cell
        packed = random_matrix(paired).pack(parts=1)
        assert (
            packed.cell == 2 and packed.nbytes < random_matrix(paired).pack(cell=1, parts=1).nbytes
        )
        assert np.count_nonzero(packed.values) == kept


@pytest.mark.parametrize("cell", [0, 1])
def test_other_values(cell):
    """`repack` takes them under jit without compiling again; columns may come in any order."""
    topology = PATTERNS["odd"]()
    a = random_matrix(topology)
    packed = a.pack(cell=cell, trainable=True)
    traced = []

    @jax.jit
    def repack(packed, values):
        traced.append(values)
        return packed.repack(values).todense()

    for seed in 1, 2:
        b = random_matrix(topology, seed)
        np.testing.assert_array_equal(repack(packed, b.values), b.todense())
    assert len(traced) == 1
    with pytest.raises(ValueError, match="trainable=True"):
        a.pack().repack(a.values)
    with pytest.raises(ValueError, match=r"values must have shape"):
        packed.repack(a.values[:-1])


@pytest.mark.parametrize("cell", [0, 2])
def test_tree(cell):
    packed = random_matrix(PATTERNS["uneven"]()).pack(cell=cell, parts=2)
    leaves, tree = jax.tree.flatten(packed)
    assert len(leaves) == 5
    again = jax.tree.unflatten(tree, leaves)
    assert isinstance(again, Packed) and again.shape == packed.shape
    assert str(jax.tree.map(lambda x: x.shape, packed)).startswith("Packed of shape (50, 2100)")
    dense = jax.jit(Packed.todense)(packed)
    np.testing.assert_array_equal(dense, packed.todense())


@pytest.mark.parametrize("cell", [0, 1])
def test_export(cell):
    packed = random_matrix(PATTERNS["odd"]()).pack(cell=cell)
    run = jax.jit(lambda packed: (packed, packed.todense()))
    exported = jax.export.export(run, disabled_checks=EXPORT_DISABLED_CHECKS)(packed)
    program = jax.export.deserialize(exported.serialize())
    same, dense = program.call(packed)
    np.testing.assert_array_equal(dense, packed.todense())
    assert same.shape == packed.shape and same.verify() is same


def through_checkpoints(packed, tmp_path):
    """By the names of the arrays, and to a target that the file's metadata describe."""
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "arrays", packed.arrays)
        checkpointer.save(tmp_path / "packed", packed)
    with ocp.StandardCheckpointer() as checkpointer:
        again = Packed.from_arrays(checkpointer.restore(tmp_path / "arrays"), packed.shape)
        found = checkpointer.metadata(tmp_path / "packed").item_metadata.tree
        described = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in found.items() if x}
        target = Packed.from_arrays(described, packed.shape)
        restored = checkpointer.restore(tmp_path / "packed", target)
    return again, restored


@pytest.mark.parametrize(
    "name, cell, parts", [("odd", 1, 1), ("striped", 2, 3), ("uneven", 1, 2), ("striped", 0, 3)]
)
def test_checkpoint(name, cell, parts, tmp_path):
    packed = random_matrix(PATTERNS[name]()).pack(cell=cell, parts=parts)
    for each in through_checkpoints(packed, tmp_path):
        assert (each.shape, each.cell, each.parts) == (packed.shape, cell, parts)
        np.testing.assert_array_equal(each.verify().todense(), packed.todense())


def test_arrays_that_do_not_fit():
    packed = random_matrix(PATTERNS["odd"]()).pack()  # (37, 53)
    arrays = {name: getattr(packed, name) for name in Packed.ARRAYS}
    with pytest.raises(TypeError, match="got none of masks, rows"):
        Packed.from_arrays({n: arrays[n] for n in ("values", "starts", "panels")}, (37, 53))
    for shape in (37,), (-37, 53):
        with pytest.raises(ValueError, match=r"from_arrays: shape must be \(m, k\), got"):
            Packed.from_arrays(arrays, shape)
    with pytest.raises(ValueError, match=r"rows of .* must have shape \(38,\), got \(37,\)"):
        Packed.from_arrays(arrays, (38, 53))
    with pytest.raises(ValueError, match=r"masks of .* must have shape \(3, 6, 32\), got"):
        Packed.from_arrays(arrays, (37, 300))
    of_gaps = random_matrix(PATTERNS["odd"]()).pack(cell=0).arrays
    for name, other, shape in (
        ("values", arrays["values"], r"\(w, 256\), got \(\d+, 64\)"),
        ("masks", of_gaps["masks"][1:], r"\(\d+, 32\), got"),
        ("starts", of_gaps["starts"][1:], r"\(6,\), got \(5,\)"),
    ):
        with pytest.raises(
            ValueError, match=rf"{name} of .* cells of 0 .* must have shape {shape}"
        ):
            Packed.from_arrays(of_gaps | {name: other}, (37, 53))
    with pytest.raises(
        ValueError, match=r"values of a packed matrix must be bfloat16, .*e4m3fn, got float32"
    ):
        wide = jax.ShapeDtypeStruct(packed.values.shape, jnp.float32)
        Packed.from_arrays(arrays | {"values": wide}, (37, 53))
    with pytest.raises(ValueError, match=r"Packed\.verify: rows must name each row once"):
        Packed.from_arrays(arrays | {"rows": np.zeros(37, np.int32)}, (37, 53))


def damaged(packed, name, change):
    leaves = {n: getattr(packed, n) for n in Packed.__slots__}
    leaves[name] = jnp.asarray(change(np.array(leaves[name])))
    static = {n: leaves[n] for n in ("shape", "cell", "parts")}
    order = (*Packed.ARRAYS, "scales", "sources", "topology")
    return Packed(*(leaves[n] for n in order), **static)


@pytest.mark.parametrize("cell", [0, 1])
@pytest.mark.parametrize(
    "name, change",
    [
        ("values", lambda x: x[:-1]),
        ("masks", lambda x: np.full_like(x, 0xFFFFFFFF)),
        ("starts", lambda x: x[::-1]),
        ("panels", lambda x: x[:, :-1]),
        ("panels", lambda x: x + 1),
        ("rows", lambda x: x * 0),
        ("sources", lambda x: x + 1),
    ],
)
def test_verify(name, change, cell):
    packed = random_matrix(PATTERNS["uneven"]()).pack(cell=cell, trainable=True)
    with pytest.raises(ValueError, match=r"Packed\.verify: "):
        damaged(packed, name, change).verify()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn])
def test_verify_of_gaps(dtype):
    """Each number with a gap stands in the matrix, and none is without; steps are all needed."""
    packed = random_matrix(PATTERNS["uneven"]()).pack(dtype, cell=0, parts=2)
    last = np.argwhere(np.asarray(packed.masks) == 0)[-1]  # of streams that have no entry left

    def change(name, add):
        def changed(x):
            x[tuple(last) if name == "masks" else (last[0], 8 * last[1])] += add
            return x

        return damaged(packed, name, changed)

    with pytest.raises(ValueError, match="values must be 0 where masks have no gap"):
        change("values", 1).verify()
    with pytest.raises(ValueError, match="masks have gaps that lead out of the matrix"):
        damaged(packed, "masks", lambda x: np.where(x == 0, x, x | 0xF)).verify()
    first = np.argwhere(np.asarray(packed.masks) & 0xF00)[0]  # of a stream with two entries or more

    def interrupt(x):
        if x.dtype == np.uint32:
            x[tuple(first)] &= ~np.uint32(0xF)
        else:
            x[first[0], 8 * first[1]] = 0
        return x

    interrupted = damaged(damaged(packed, "values", interrupt), "masks", interrupt)
    with pytest.raises(ValueError, match="masks have gaps behind the last number of a stream"):
        interrupted.verify()
    longer = damaged(packed, "values", lambda x: np.pad(x, ((0, 1), (0, 0))))
    longer = damaged(longer, "masks", lambda x: np.pad(x, ((0, 1), (0, 0))))
    longer = damaged(longer, "starts", lambda x: x + (np.arange(len(x)) == len(x) - 1))
    longer = damaged(
        longer, "panels", lambda x: np.stack([x[..., 0], np.diff(longer.starts)[:, None]], -1)
    )
    with pytest.raises(ValueError, match="starts are not where the masks' words begin"):
        longer.verify()


def test_verify_wants_the_first_piece_at_the_beginning():
    packed = random_matrix(PATTERNS["uneven"]()).pack()
    shifted = damaged(damaged(packed, "values", lambda x: x[3:]), "starts", lambda x: x - 3)
    with pytest.raises(ValueError, match="starts are not where the masks' words begin"):
        shifted.verify()


def test_errors():
    a = random_matrix(PATTERNS["odd"]())
    with pytest.raises(ValueError, match=r"dtype must be bfloat16, float16, int8 or .*got float32"):
        a.astype(jnp.float32).pack()
    for cell in 3, True, 0.0:
        with pytest.raises(ValueError, match=f"cell must be None, 0, 1 or 2, got {cell}"):
            a.pack(cell=cell)
    with pytest.raises(ValueError, match="parts must be None or 1 to 1 for 53 columns, got 2"):
        a.pack(parts=2)
    with pytest.raises(ValueError, match=r"columns must be None or a positive .*, got 0"):
        a.pack(columns=0)
    wide = CSR.fromdense(jnp.ones((1, 20000), jnp.bfloat16))
    with pytest.raises(ValueError, match="parts must be None or 3 to 8 for 20000 columns, got 2"):
        wide.pack(cell=0, parts=2)
    with pytest.raises(ValueError, match="needs one concrete pattern"):
        jax.jit(lambda a: a.pack().todense())(CSR(a.values, a.topology.as_dynamic()))
    with pytest.raises(ValueError, match="needs one matrix"):
        CSR(jnp.stack([a.values] * 2), a.topology).pack()


@pytest.mark.parametrize(
    "name, place, number, message",
    [
        ("row_offsets", 0, 1, "row_offsets must begin with 0, got 1"),
        ("row_offsets", 3, -5, "row_offsets must not fall, got -5 behind"),
        ("row_offsets", 3, 2**30, "row_offsets must not fall"),
        ("row_offsets", -1, 2**31 - 1, r"must end with at most \d+, .* got 2147483647"),
        ("column_indices", 7, 300, "column_indices must be of 300 columns, got 300"),
        ("column_indices", 0, -1, "column_indices must be of 300 columns, got -1"),
        ("column_indices", 1, 0, "row 0 stores column 0 twice"),
        ("row_order", 2, 20, "row_order must name each of 20 rows once, got row 20 at place 2"),
        ("row_order", 2, 0, "row_order must name each of 20 rows once, got row 0 at place 2"),
        ("row_order", 2, -1, "got row -1"),
        ("columns", None, -1, "columns must be from 0"),
        ("cell", None, 3, "cell must be 1 or 2"),
        ("parts", None, 0, "parts must be at least 1"),
        ("parts", None, 2**30, r"of \d+ columns each"),
    ],
)
@pytest.mark.parametrize("by_gaps", [False, True])
def test_damaged_pattern(name, place, number, message, by_gaps):
    """The packer writes nothing out of bounds: it says what is wrong."""
    arguments = {
        "row_offsets": np.arange(0, 21 * 5, 5, dtype=np.int32),
        "column_indices": np.tile(np.arange(5, dtype=np.int32) * 60, 20),
        "row_order": np.arange(20, dtype=np.int32),
        "columns": 300,
        "parts": 1,
    }
    packers = [functools.partial(_ffi.pack_streams, cell=1)]
    if by_gaps:
        packers = [_ffi.pack_gaps, _ffi.order_for_gaps]
    for pack in packers:
        pack(**arguments)
    if by_gaps and name == "cell":
        return
    if place is None:
        arguments[name] = number
    else:
        arguments[name][place] = number
    for pack in packers:
        with pytest.raises(ValueError, match=message):
            pack(**arguments)
