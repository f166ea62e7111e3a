"""Predicted times of kernels beside those measured on an H200."""

from __future__ import annotations

import json
import pathlib
import re

import jax
import numpy as np
import pytest

from jaxsparse import CSR, Topology, explain, sddmm, spmm
from jaxsparse.recurrent import H200

RESULTS = pathlib.Path(__file__).parent.parent / "benchmarks" / "results" / "h200"


def abstract_topology(shape, entries):
    """A pattern of which there are only shapes."""
    empty = Topology(np.zeros(shape[0] + 1, np.int32), np.zeros(0, np.int32), shape)
    leaves, structure = jax.tree.flatten(empty)
    sizes = [x.shape if x.shape != (0,) else (entries,) for x in leaves]
    return structure.unflatten(
        jax.ShapeDtypeStruct(size, x.dtype) for size, x in zip(sizes, leaves, strict=True)
    )


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
    "name, figures",
    [
        ("spmm_rnn_variants", 36),
        ("spmm_rnn_variants_float16", 24),
        ("spmm_rnn_tensor_cores", 24),
        ("sddmm_rnn_variants", 18),
    ],
)
def test_predictions_are_near_what_was_measured(name, figures):
    rows = [
        (row, re.fullmatch(r"jaxsparse\[(.+)\]", row["implementation"]))
        for row in json.loads((RESULTS / f"{name}.json").read_text())["results"]
    ]
    forced = [(row, match[1]) for row, match in rows if match]
    assert len(forced) == figures
    errors = np.abs([np.log(predicted(row)[variant] / row["us"]) for row, variant in forced])
    assert np.median(errors) < np.log(1.04) and np.max(errors) < np.log(1.15)


def test_the_fastest_kernel_is_chosen():
    """Or one that takes hardly longer, of those that were measured."""
    problems = {}
    for row in json.loads((RESULTS / "spmm_rnn_variants.json").read_text())["results"]:
        if "[" in row["implementation"]:
            variant = row["implementation"].removeprefix("jaxsparse[").removesuffix("]")
            problems.setdefault(row["problem"], {})[variant] = row
    assert len(problems) == 18
    for measured in problems.values():
        times = {variant: row["us"] for variant, row in measured.items()}
        costs = predicted(next(iter(measured.values())))
        chosen = min(times, key=costs.__getitem__)
        assert times[chosen] < 1.05 * min(times.values())
