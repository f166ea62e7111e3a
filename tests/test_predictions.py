"""Predicted times of kernels beside those measured on an H200."""

from __future__ import annotations

import json
import pathlib

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


NEWER = ("tiled_entries",)  # kernels that the figures do not know


def predicted(row):
    """Microseconds of the kernel that was chosen."""
    topology = abstract_topology((row["m"], row["k"]), row["nnz"])
    y = jax.ShapeDtypeStruct((row["k"], row["n"]), np.float32)
    if row["operation"] == "spmm":
        values = jax.ShapeDtypeStruct((row["nnz"],), np.float32)
        (call,) = explain(lambda v, t, x: spmm(CSR(v, t), x), values, topology, y, device=H200)
    else:
        x = jax.ShapeDtypeStruct((row["m"], row["n"]), np.float32)
        (call,) = explain(lambda x, y, t: sddmm(x, y, t).values, x, y, topology, device=H200)
    return next(us for name, us in call.variants if name not in NEWER)


@pytest.mark.parametrize("operation, figures, far", [("spmm", 64, 3), ("sddmm", 24, 1)])
def test_predictions_are_near_what_was_measured(operation, figures, far):
    rows = [
        row
        for row in json.loads((RESULTS / f"{operation}_rnn.json").read_text())["results"]
        if row["implementation"] == "jaxsparse" and row["pass"] == "forward" and row["us"]
    ]
    assert len(rows) == figures
    errors = np.abs([np.log(predicted(row) / row["us"]) for row in rows])
    assert np.median(errors) < np.log(1.05) and np.sum(errors > np.log(1.2)) <= far
