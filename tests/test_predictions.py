"""Predicted times of kernels beside those measured on an H200."""

from __future__ import annotations

import pathlib

import jax
import numpy as np
import pytest

from benchmarks.panels import read_result
from jaxsparse import CSR, H200, Topology, explain, sddmm, spmm

RESULTS = pathlib.Path(__file__).parent.parent / "benchmarks" / "results" / "h200"


def abstract_topology(shape, entries):
    """A pattern of which there are only shapes."""
    offsets, columns = (jax.ShapeDtypeStruct((size,), "int32") for size in (shape[0] + 1, entries))
    return jax.eval_shape(lambda *arrays: Topology(*arrays, shape), offsets, columns)


def predicted(row):
    """Microseconds of all kernels that fit."""
    topology = abstract_topology((row["m"], row["k"]), row["nnz"])
    dtype = jax.numpy.dtype(row["dtype"])
    y = jax.ShapeDtypeStruct((row["k"], row["n"]), dtype)
    if row["operation"] == "spmm":
        values = jax.ShapeDtypeStruct((row["nnz"],), dtype)
        (call,) = explain(lambda v, t, x: spmm(CSR(v, t), x), values, topology, y, device=H200)
    else:
        x = jax.ShapeDtypeStruct((row["m"], row["n"]), dtype)
        (call,) = explain(lambda x, y, t: sddmm(x, y, t).values, x, y, topology, device=H200)
    return dict(call.variants)


@pytest.mark.parametrize(
    "name, variant, figures, usual, most",
    [
        ("spmm_rnn_variants", "tensor_cores", 26, 1.03, 1.07),
        ("spmm_rnn_variants", "staged_rows", 26, 1.1, 1.25),
        ("spmm_rnn_variants", "tiled_rows", 26, 1.1, 1.4),
        ("spmm_rnn_variants_float16", "tensor_cores", 26, 1.06, 1.12),
        ("spmm_rnn_variants_float16", "staged_rows", 26, 1.12, 1.25),
        ("spmm_rnn_variants_float16", "tiled_rows", 26, 1.11, 1.31),
        ("sddmm_rnn_variants", "tensor_cores", 26, 1.05, 1.21),
    ],
)
def test_predictions_are_near_what_was_measured(name, variant, figures, usual, most):
    """Those of staged and tiled rows with what is added for uneven ones, which these are not."""
    rows = read_result(RESULTS / f"{name}.json")["results"]
    forced = [row for row in rows if row["implementation"] == f"jaxsparse[{variant}]"]
    assert len(forced) == figures
    errors = np.abs([np.log(predicted(row)[variant] / row["us"]) for row in forced])
    assert np.median(errors) < np.log(usual) and np.max(errors) < np.log(most)


@pytest.mark.parametrize(
    "name, count",
    [
        ("spmm_rnn_variants", 26),
        ("spmm_rnn_variants_float16", 26),
        ("spmm_networks_variants", 24),  # of 16 of them rows of x begin amid a sector
    ],
)
def test_the_fastest_kernel_is_chosen(name, count):
    """Or one that takes hardly longer, of those that were measured."""
    problems = {}
    for row in read_result(RESULTS / f"{name}.json")["results"]:
        if "[" in row["implementation"]:
            variant = row["implementation"].removeprefix("jaxsparse[").removesuffix("]")
            problems.setdefault(row["problem"], {})[variant] = row
    assert len(problems) == count
    losses = []
    for measured in problems.values():
        times = {variant: row["us"] for variant, row in measured.items()}
        costs = predicted(next(iter(measured.values())))
        chosen = min(times, key=costs.__getitem__)
        losses.append(times[chosen] / min(times.values()))
    assert np.mean(losses) < 1.02 and max(losses) < 1.15


def test_predictions_of_what_is_chosen_for_pruned_weights():
    """Sampled products so small that waiting counts; the largest on staged entries are far off."""
    results = read_result(RESULTS / "sddmm_dlmc.json")["results"]
    rows = [row for row in results if row["implementation"] == "jaxsparse"]
    assert len(rows) == 144
    errors = np.abs([np.log(min(predicted(row).values()) / row["us"]) for row in rows])
    assert np.median(errors) < np.log(1.06) and np.quantile(errors, 0.9) < np.log(1.2)
    assert np.max(errors) < np.log(1.4)
