"""Layouts of sparse recurrent matrices, which kernels of scans take."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrent_forms import compiles, dense, explain, shape

from jaxsparse import CSR, H200, Device, Topology, _ffi, recurrent
from jaxsparse.recurrent.layout import can_be_laid_out, lay_out, lay_out_side_by_side
from jaxsparse.recurrent.plan import make_plan


def with_scan_layout(topology, layout):
    return topology.with_layouts({**topology.layouts, "scan_layout": layout})


def unpacked(topology, words, form, products, parts):
    """The entries (row, column, place of the value) that a layout holds."""
    h = topology.shape[1]
    records = np.asarray(words).reshape(form.blocks, -1).astype(np.int32)
    groups = form.lanes * form.threads // form.group
    slots = form.lanes * form.entries * form.threads
    rows_at = form.units
    groups_at = rows_at + products * form.units + 1
    columns_at, values_at = groups_at + groups, groups_at + groups + slots
    unit_at = np.concatenate([r[: form.units] for r in records])
    assert sorted(unit_at[unit_at >= 0]) == list(range(h))
    places = form.blocks * form.units
    width = form.columns // form.cluster
    entries = set()
    for block, record in enumerate(records):
        first_of_cluster = block // form.cluster * form.cluster
        for slot in np.flatnonzero(record[values_at : values_at + slots] >= 0):
            lane, thread = divmod(slot, form.threads)
            lane //= form.entries
            group = (lane * form.threads + thread) // form.group
            rank, place = divmod(record[groups_at + group], 1 << 16)
            owner = records[first_of_cluster + rank]
            starts = owner[rows_at : rows_at + products * form.units + 1]
            row = np.searchsorted(starts, place, side="right") - 1
            product, i = divmod(row, form.units)
            column = record[columns_at + slot] + block % form.cluster * width
            part, at = divmod(column, places)
            entries.add(
                (
                    product * h + owner[i],
                    part * h + unit_at[at],
                    int(record[values_at + slot]),
                )
            )
    return entries


@pytest.mark.parametrize("options", [(None, True), (4, False)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "gates, h, density, batch",
    [(1, 37, 0.2, 1), (4, 61, 0.1, 3), (3, 150, 0.02, 8), (1, 5, 0.5, 2)],
)
def test_layouts_hold_every_entry_once(gates, h, density, batch, dtype, options):
    mask = np.random.default_rng(h).random((gates * h, h)) < density
    mask[h // 2] = False
    topology = Topology.from_mask(mask, nse=int(mask.sum()) + 3)
    layout = lay_out(topology, gates, batch, jnp.dtype(dtype), H200, *options)
    with_scan_layout(topology, layout).verify()
    rows, columns = np.nonzero(mask)
    values = np.arange(len(rows))
    assert unpacked(topology, layout.words, layout.forms[0], gates, 1) == set(
        zip(rows.tolist(), columns.tolist(), values.tolist(), strict=True)
    )
    assert unpacked(topology, layout.transposed_words, layout.forms[1], 1, gates) == set(
        zip(columns.tolist(), rows.tolist(), values.tolist(), strict=True)
    )


def test_clusters_side_by_side():
    """They don't find room on all multiprocessors."""
    topology = Topology.from_mask(np.eye(4200, dtype=bool))
    share = dataclasses.replace(H200, multiprocessors=16)
    layout = lay_out(topology, 1, 4, jnp.dtype("f4"), share)
    form = dense(hidden=4200, dtype="float32", sparse=True, layout_form=layout.forms[0])
    plan = make_plan(dataclasses.replace(form, directions=12), H200, "sparse_pairs")
    assert plan.cluster == 4 and plan.blocks == 12 and plan.scans == 10


def test_layouts_are_made_once_for_a_pattern():
    topology = Topology.from_mask(np.eye(32, dtype=bool))
    first = lay_out(topology, 1, 4, jnp.dtype("float32"), H200)
    assert lay_out(topology, 1, 4, jnp.dtype("float32"), H200) is first
    assert lay_out(topology, 1, 2, jnp.dtype("float32"), H200) is not first


def test_pack():
    matrix = CSR.fromdense(jnp.eye(32))
    packed = recurrent.pack(matrix, batch=4, dtype=jnp.bfloat16)
    assert packed.values is matrix.values and "scan_layout" in packed.topology.layouts
    np.testing.assert_array_equal(packed.todense(), matrix.todense())
    jax.tree.map(lambda x: jnp.stack([x, x]), packed).topology.verify()
    doubled = jax.jit(lambda m: m * 2)(packed)
    assert (
        doubled.topology.layouts["scan_layout"].forms
        == packed.topology.layouts["scan_layout"].forms
    )
    assert "scan_layout" not in packed.T.topology.layouts
    packed.topology.verify()
    with pytest.raises(ValueError, match=r"recurrent\.pack: matrix must be \(gates \* h, h\)"):
        recurrent.pack(CSR.fromdense(jnp.ones((3, 2))), batch=1, dtype=jnp.float32)
    with pytest.raises(ValueError, match="a batch of 40 in float32"):
        recurrent.pack(matrix, batch=40, dtype=jnp.float32)
    with pytest.raises(ValueError, match="needs one concrete pattern"):
        traced = matrix.with_values(matrix.values, matrix.topology.as_dynamic())
        jax.jit(lambda m: recurrent.pack(m, batch=1, dtype=jnp.float32))(traced)
    assert can_be_laid_out(matrix.topology)
    with pytest.raises(ValueError, match="piece_bytes must be 4, 8 or 16, and no more than the 8"):
        recurrent.pack(matrix, batch=4, dtype=jnp.bfloat16, piece_bytes=16)
    full = CSR.fromdense(np.ones((1024, 1024), np.float32))
    with pytest.raises(ValueError, match=r"recurrent\.pack: "):
        recurrent.pack(full, batch=4, dtype=jnp.float32, device=Device("tiny", 90, 4, 50_000))


@pytest.mark.parametrize(
    "gates, change",
    [(1, lambda o, c: (o, c)), (2, lambda o, c: (o[::-1], c)), (2, lambda o, c: (o, c + 9))],
)
def test_layouts_of_no_recurrent_matrix(gates, change):
    offsets, columns = change(np.arange(0, 34, 2, np.int32), np.zeros(34, np.int32))
    form = {"hidden": 8, "products": gates, "state_parts": 1, "blocks": 2, "cluster": 1}
    sizes = {"most_threads": 512, "fewest_threads": 32, "entries": 4, "group": 4, "piece_bytes": 8}
    with pytest.raises(ValueError, match="not one of a recurrent matrix of this size"):
        _ffi.lay_out_sparse(
            offsets, columns, np.zeros(0, np.int32), bank_aware=True, **form, **sizes
        )


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"cluster": 0}, "cluster of a layout is missing or out of range"),
        ({"piece_bytes": -4}, "piece_bytes of a layout is missing or out of range"),
        ({"units": 1 << 25}, "units of a layout is missing or out of range"),
        ({"units": 1 << 20, "blocks": 64}, "the sizes of a layout are out of range"),
        ({"piece_bytes": 3}, "the sizes of a layout are out of range"),
    ],
)
def test_forms_of_no_layout(sizes, message):
    topology = Topology.from_mask(np.eye(32, dtype=bool))
    form = lay_out(topology, 1, 4, jnp.dtype("float32"), H200).forms[0]
    with pytest.raises(ValueError, match=message):
        _ = dataclasses.replace(form, **sizes).words


def test_layouts_of_two_directions_have_one_form():
    rng = np.random.default_rng(0)
    masks = [rng.random((4 * 256, 256)) < density for density in (0.1, 0.12)]
    two = list(map(Topology.from_mask, masks))
    dtype = jnp.dtype("bfloat16")
    layouts = lay_out_side_by_side(two, 4, 4, dtype, dtype, H200)
    assert layouts[0].forms == layouts[1].forms
    for mask, topology, layout in zip(masks, two, layouts, strict=True):
        rows, columns = np.nonzero(mask)
        entries = set(zip(rows.tolist(), columns.tolist(), range(len(rows)), strict=True))
        assert unpacked(topology, layout.words, layout.forms[0], 4, 1) == entries
        with_scan_layout(topology, layout).verify()
    for form, (products, states) in zip(layouts[0].forms, ((4, 1), (1, 4)), strict=True):
        problem = dense(
            products, states, hidden=256, sparse=True, layout_form=form, directions=2, inputs=4
        )
        plan = make_plan(problem, H200, "sparse_pairs")
        assert plan.scans == 2 and 2 * plan.blocks <= H200.multiprocessors
    full = [Topology.from_mask(np.ones((1024, 1024), bool))] * 2
    small = Device("small", 90, 16, 50_000)
    assert lay_out_side_by_side(full, 1, 4, dtype, dtype, small) is None


def test_layouts_for_measurements():
    """Narrow loads, in the pattern's order: only where they are asked for."""
    matrix = CSR.fromdense(jnp.asarray(np.random.default_rng(0).random((96, 96)) < 0.3, "f4"))
    packed = recurrent.pack(matrix, batch=4, dtype=jnp.float32, piece_bytes=4, bank_aware=False)
    carry, xs = shape(4, 96), shape(9, 4, 96)

    def scan(variant):
        return lambda c, xs: recurrent.scan(recurrent.elman(), packed, c, xs, variant=variant)

    (source,) = compiles(scan("sparse_pairs_barrier"), carry, xs)
    assert ".piece_bytes = 4}" in source
    assert explain(scan(None), carry, xs)[0].plan.variant == "masked_fma"


@pytest.mark.parametrize("part", ["units", "place", "column", "value"])
def test_verify_finds_layouts_that_lead_out_of_bounds(part):
    matrix = CSR.fromdense(jnp.asarray(np.random.default_rng(0).random((96, 96)) < 0.3, "f4"))
    layout = recurrent.pack(matrix, batch=4, dtype=jnp.float32).topology.layouts["scan_layout"]
    form = layout.forms[0]
    slots = form.lanes * form.entries * form.threads
    at = {
        "units": 0,
        "place": 2 * form.units + 1,
        "column": form.words // form.blocks - 2 * slots,
        "value": form.words // form.blocks - slots,
    }[part]
    words = np.array(layout.words)
    words[at] = 0x7FFF
    bad = dataclasses.replace(layout, words=jnp.asarray(words))
    with pytest.raises(ValueError, match=r"Topology\.verify: the layout for scans leads out of"):
        with_scan_layout(matrix.topology, bad).verify()
    other = CSR.fromdense(jnp.ones((256, 64))).topology
    with pytest.raises(ValueError, match="not of this pattern's size"):
        with_scan_layout(other, layout).verify()


def test_export_of_a_matrix_that_is_laid_out():
    packed = recurrent.pack(CSR.fromdense(jnp.eye(64)), batch=4, dtype=jnp.float32)
    doubled = jax.export.export(jax.jit(lambda m: m * 2))(packed)
    again = jax.export.deserialize(doubled.serialize()).call(packed)
    assert (
        again.topology.layouts["scan_layout"].forms == packed.topology.layouts["scan_layout"].forms
    )
    np.testing.assert_array_equal(again.values, 2 * packed.values)


@pytest.mark.parametrize("piece_bytes", [4, 8, 16])
def test_layouts_avoid_bank_conflicts_and_padding(piece_bytes):
    rng = np.random.default_rng(0)
    topology = Topology.from_mask(rng.random((1024, 1024)) < 0.1)
    made = _ffi.lay_out_sparse(
        np.asarray(topology.row_offsets),
        np.asarray(topology.column_indices),
        np.zeros(0, np.int32),
        hidden=1024,
        products=1,
        state_parts=1,
        blocks=64,
        cluster=1,
        most_threads=928,
        fewest_threads=32,
        entries=6,
        group=4,
        piece_bytes=piece_bytes,
        bank_aware=True,
    )
    # Wavefronts over the fewest possible; rows in the order of their columns take 2 and more.
    assert 1 <= made["wavefronts"] < 1.5
    assert 0.8 < made["filling"] <= 1
