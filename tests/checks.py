"""Comparisons, and which implementations and variants this machine can run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import backend

PLATFORM = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()

DTYPES = {
    "float32": jnp.float32,
    "float64": jnp.float64,
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
}

# Half a unit in the last place of a result, and the sum's own rounding in float32.
EPSILON = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}


# They take patterns with cuts of rows alone: test_graph_kernels.py has their problems.
FOR_GRAPHS = {"split_rows", "runs_of_rows"}


def cases(operation):
    """Every (implementation, variant) of an operation on this platform, for any pattern."""
    variants = backend.TARGETS[operation]["variants"].get(PLATFORM, [])
    return [("xla", None), *((PLATFORM, name) for name in variants if name not in FOR_GRAPHS)]


def fits(operation, variant, *, dense_on_left=False, dtype="float32", d=1):
    """Whether a variant takes such problems: most products are for one side of the dense matrix."""
    left_only = {"panels", "generic_dots"}
    if variant in FOR_GRAPHS:
        return False
    if dtype == "float64" and (variant or "").startswith(("staged", "tensor_cores")):
        return False
    if (operation, variant) == ("sddmm", "tensor_cores"):
        return 0 < d <= (128 if dtype == "float32" else 256)
    if (operation, variant) == ("sddmm", "staged_entries"):
        return d <= 256
    if operation != "spmm" or variant is None:
        return True
    return (variant in left_only) == dense_on_left


def assert_close(actual, expected, dtype, magnitude):
    """|actual - expected| within the rounding of a result and of sums of the given magnitude.

    `magnitude` has the result's shape: the sum of the absolute values of what is added up.
    """
    actual = np.asarray(actual, np.float64)
    expected = np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    name = jnp.dtype(dtype).name
    sums = (
        np.asarray(magnitude, np.float64) * EPSILON["float64" if name == "float64" else "float32"]
    )
    limit = np.abs(expected) * EPSILON[name] + sums + np.finfo(np.float32).tiny
    if name == "float16":
        limit = limit + 2**-24  # its subnormals are spaced evenly
    same = np.isnan(actual) == np.isnan(expected)
    assert same.all(), f"NaN in different places: {np.argwhere(~same)[:5]}"
    with np.errstate(invalid="ignore"):
        close = (np.abs(actual - expected) <= limit) | (actual == expected) | np.isnan(expected)
    worst = np.argwhere(~close)[:3]
    assert close.all(), [(tuple(i), actual[tuple(i)], expected[tuple(i)]) for i in worst]
