"""How the rows of a pattern are cut into units of work, and how cuts go with their topology."""

from __future__ import annotations

import pathlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.panels import read_result
from jaxsparse import (
    CSR,
    EXPORT_DISABLED_CHECKS,
    H200,
    Topology,
    _ffi,
    explain,
    sparse_softmax,
    spmm,
)
from jaxsparse.layouts.row_cuts import row_cuts

RESULTS = pathlib.Path(__file__).parent.parent / "benchmarks" / "results" / "h200"

UNIT, ROW, SHORT = _ffi.PLACES_OF_UNIT, _ffi.PLACES_OF_ROW, _ffi.MOST_OF_WHOLE_ROW


def random_lengths(rng, kind, rows):
    """Of rows: a power law, a star, all about as long as what counts as long, Poisson."""
    lengths = {
        "power law": lambda: rng.zipf(1.8, rows).clip(0, 3000) - 1,
        "star": lambda: np.bincount([rng.integers(rows)], minlength=rows) * 5000,
        "limits": lambda: (
            rng.integers(SHORT - 1, SHORT + 2, rows) * rng.choice(2, rows, p=[0.8, 0.2])
        ),
        "even": lambda: rng.poisson(3, rows),
    }
    return lengths[kind]()


def topology_of(lengths, columns, padding=0, **options):
    """With the first columns in each row."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    stored = np.concatenate([np.arange(n) for n in lengths] + [np.zeros(padding)])
    return Topology(offsets, stored.astype(np.int32), (len(lengths), columns), **options)


def as_from_an_older_file(topology):
    return topology.with_layouts({"tile_starts": topology.layouts["tile_starts"]})


@pytest.mark.parametrize("kind", ["power law", "star", "limits", "even"])
def test_units(kind):
    rng = np.random.default_rng(0)
    for padding in 0, 1, 300:
        rows = int(rng.integers(60, 2000))
        lengths = random_lengths(rng, kind, rows)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        nse = int(offsets[-1]) + padding
        cuts = row_cuts(offsets, 10**6, nse)
        row, entry = cuts.reshape(-1, 2).T
        assert cuts.dtype == np.int32 and len(row) == -(-(nse + ROW * rows) // UNIT) + 1
        assert (row[0], entry[0]) == (0, 0) and (row[-1], entry[-1]) == (rows, offsets[-1])
        assert np.diff(row).min() >= 0 and np.diff(row).max() <= UNIT // ROW + 1
        assert np.diff(entry).min() >= 0 and np.diff(entry).max() <= UNIT + SHORT
        # A unit begins with a row, or within a long one, at its place.
        within = entry > offsets[row]
        assert (lengths[row[within]] > SHORT).all() and (entry < np.r_[offsets, nse][row + 1])[
            within
        ].all()
        places = UNIT * np.arange(len(row))
        assert (entry + ROW * row == places)[within].all()
        assert (entry[~within] == offsets[row[~within]]).all()
        # Its last unit follows from the row alone, as kernels take it.
        for r in np.unique(row[within]):
            last = (int(offsets[r + 1]) - 1 + ROW * r) // UNIT
            assert np.flatnonzero(within & (row == r))[-1] == last
        traced = jax.jit(lambda x, nse=nse: row_cuts(x, 10**6, nse))(offsets)
        np.testing.assert_array_equal(traced, cuts)


def test_cuts_come_with_graphs_alone():
    """Weights, bands and what else was measured keep their kernels: costs ask only for cuts."""
    measured = {
        (row["m"], row["k"], row["nnz"])
        for name in ("rnn", "imbalance", "dlmc", "networks", "square", "crossover")
        for row in read_result(RESULTS / f"spmm_{name}.json")["results"]
        if "nnz" in row
    }
    assert len(measured) > 100
    for size in 1024, 4096, 8192:
        measured.add((size, size, size * size // 100))  # 99 % sparse
    for m, k, nnz in measured:
        assert not _ffi.row_units(m, k, nnz) and not _ffi.row_units(k, m, nnz)
    assert row_cuts(np.array([0, 100], np.int32), 10**6, 100) is None  # a long row
    assert row_cuts(np.array([0, 1], np.int32), 128, 1) is None  # not few places
    assert row_cuts(np.array([0, 1], np.int32), 129, 1) is not None
    assert row_cuts(np.array([0, 0], np.int32), 129, 0) is None


def test_cuts_go_with_the_pattern():
    lengths = np.random.default_rng(1).zipf(1.7, 500).clip(0, 900) - 1
    topology = topology_of(lengths, 2000)
    cuts, transposed = topology.layouts["row_cuts"]
    assert cuts is not None and transposed is not None and topology.static
    for other in topology.T, topology.T.T.T, Topology(*topology.T.pattern[:2], topology.T.shape):
        for one, expected in zip(other.layouts["row_cuts"], (transposed, cuts), strict=True):
            np.testing.assert_array_equal(one, expected)
    alone = topology.without_transpose()
    assert alone.layouts["row_cuts"][1] is None and alone.operands()[-1] is cuts
    np.testing.assert_array_equal(alone.with_transpose().layouts["row_cuts"][1], transposed)
    assert [x is y for x, y in zip(topology.operands()[-2:], (cuts, transposed), strict=True)]
    loaded = pickle.loads(pickle.dumps(topology)).verify()
    np.testing.assert_array_equal(loaded.layouts["row_cuts"][0], cuts)
    padded, room = topology.padded(topology.nse + 999), topology_of(lengths, 2000, 999)
    expected = room.layouts["row_cuts"]
    traced = jax.jit(lambda t: t.padded(topology.nse + 999).layouts["row_cuts"])(topology)
    for made in padded.layouts["row_cuts"], traced:
        for one, other in zip(made, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    full = topology.padded(topology.shape[0] * topology.shape[1] // 128 + 1).verify()
    assert "row_cuts" not in full.layouts and full.operands()[-2].shape == (2,)
    with pytest.raises(ValueError, match="'row_cuts' is not for a pattern as"):
        topology_of(np.full(5, 5), 5).with_layout("row_cuts")
    wrong = {**topology.layouts, "row_cuts": (cuts.at[2].add(1), transposed)}
    with pytest.raises(ValueError, match="cuts of rows"):
        topology.with_layouts(wrong).verify()


def test_older_pickles_get_cuts():
    lengths = np.random.default_rng(1).zipf(1.7, 500).clip(0, 900) - 1
    for options in {}, {"transpose": False}:
        topology = topology_of(lengths, 2000, **options)
        older = as_from_an_older_file(topology)
        assert "row_cuts" not in older.layouts
        loaded = pickle.loads(pickle.dumps(older)).verify()
        for one, expected in zip(*(t.layouts["row_cuts"] for t in (loaded, topology)), strict=True):
            np.testing.assert_array_equal(one, expected)
        assert loaded.static and jax.tree.structure(loaded) == jax.tree.structure(topology)
        traced = jax.jit(lambda t: t.with_derived_layouts().layouts["row_cuts"])(older)
        np.testing.assert_array_equal(traced[0], topology.layouts["row_cuts"][0])
    shapes = jax.eval_shape(lambda: older)
    assert shapes.with_derived_layouts() is shapes


@pytest.mark.parametrize("epilogue", [False, True])
def test_older_exported_programs_run(epilogue):
    """Their calls have no cuts: they end in front of them, or numbers follow."""
    rng = np.random.default_rng(2)
    topology = topology_of(rng.integers(0, 5, 90), 400)
    assert "row_cuts" in topology.layouts
    rows, starts = topology.operands()[:3], topology.layouts["tile_starts"]
    shapes = (topology.nse, (400, 3), 90, topology.nse)
    values, x, bias, tangent = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes)
    of_spmm = {"permuted": False, "dense_on_left": False, "activation": "none"}
    shared = {"variant": "", "workspace": np.int64(0)}

    def product(values, x, bias):
        call = jax.ffi.ffi_call("jaxsparse_spmm", jax.ShapeDtypeStruct((90, 3), x.dtype))
        last = [bias] if epilogue else []
        return call(values, x, *rows, starts, *last, **of_spmm, **shared)

    def softmax(values, tangent):
        call = jax.ffi.ffi_call("jaxsparse_sparse_softmax", jax.typeof(values))
        last = [tangent] if epilogue else []
        return call(values, *rows, *last, scale=np.float64(1), **shared)

    def older(function, *operands):
        make = jax.export.export(jax.jit(function), disabled_checks=EXPORT_DISABLED_CHECKS)
        exported = make(*operands)
        return jax.export.deserialize(exported.serialize()).call(*operands)

    a = CSR(values, topology)
    expected = a @ x + (bias[:, None] if epilogue else 0)
    np.testing.assert_allclose(older(product, values, x, bias), expected, rtol=1e-5, atol=1e-5)

    def current(values):
        return sparse_softmax(CSR(values, topology)).values

    of_values, of_tangent = jax.jvp(current, (values,), (tangent,))
    # The derivative takes the softmax and the tangent.
    operand, expected = (of_values, of_tangent) if epilogue else (values, of_values)
    np.testing.assert_allclose(older(softmax, operand, tangent), expected, rtol=1e-5, atol=1e-6)


def test_older_exported_programs_take_topologies_without_cuts():
    topology = topology_of(np.random.default_rng(2).integers(0, 5, 90), 400)
    older = as_from_an_older_file(topology).as_dynamic()
    exported = jax.export.export(jax.jit(lambda t: t.row_indices))(older)
    program = jax.export.deserialize(exported.serialize())
    with pytest.raises(ValueError, match="structure"):
        program.call(topology.as_dynamic())
    np.testing.assert_array_equal(program.call(older), topology.row_indices)


def test_kernels_for_graphs_are_chosen():
    lengths = np.full(30_000, 8)  # too many for tiled rows to take no longer than launches
    topology = topology_of(lengths, 40_000)  # not square: its transpose is another problem
    assert topology.layouts["row_cuts"][1] is not None
    a = CSR(jnp.ones(topology.nse), topology)

    def chosen(function, *arguments):
        calls = explain(function, *arguments, device=H200)
        return [call.variants[0][0] for call in calls]

    x, dy = (jax.ShapeDtypeStruct((n, 64), jnp.float32) for n in topology.shape[::-1])
    assert chosen(lambda x: a @ x, x) == ["split_rows"]
    assert chosen(lambda dy: a.T @ dy, dy) == ["split_rows"]
    pullback = chosen(
        lambda x, dy: jax.vjp(lambda v, x: CSR(v, topology) @ x, a.values, x)[1](dy), x, dy
    )
    assert "split_rows" in pullback and "tiled_rows" not in pullback

    def loss(values):
        return jnp.sum(sparse_softmax(CSR(values, topology)).values ** 2)

    assert set(chosen(jax.grad(loss), a.values)) == {"runs_of_rows"}


def test_other_kernels_serve_without_cuts(monkeypatch):
    topology = topology_of(np.full(20_000, 8), 20_000)
    x = jax.ShapeDtypeStruct((20_000, 128), jnp.float32)

    def chosen(topology):
        a = CSR(jnp.ones(topology.nse), topology)
        (call,) = explain(lambda x: spmm(a, x), x, device=H200)
        return call.variants[0][0]

    assert chosen(topology) == "split_rows" == chosen(topology.T)
    without = as_from_an_older_file(topology)
    assert chosen(without.verify()) == "tiled_rows"
    monkeypatch.setenv("JAXSPARSE_CHECK", "1")
    assert chosen(topology) == "tiled_rows"
