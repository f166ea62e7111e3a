"""Sums, maxima and the like of what each row stores.

Sums are products with a column of ones. Maxima and the logarithms of sums of exponentials are one
primitive. Its derivative is composed: of a maximum it is the mean tangent of the entries that equal
it, and of logsumexp their mean by the weights of the softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import ad

from jaxsparse import backend
from jaxsparse.device import AnyDevice
from jaxsparse.ops import arguments
from jaxsparse.ops.arguments import CUTS, ROWS, operands_of_pattern
from jaxsparse.ops.sparse_softmax import sparse_softmax_p
from jaxsparse.ops.sums_of_rows import spread_over_entries, sums_of_rows
from jaxsparse.pattern import row_indices
from jaxsparse.precision import accumulator_dtype
from jaxsparse.primitive import FfiCall, Operation, Signature, bind, make_primitive
from jaxsparse.topology import Topology

_SUMS = ("sum", "mean")
_OF_PRIMITIVE = ("max", "logsumexp")


def reduce_rows(
    values: Any,
    topology: Topology,
    reduction: str = "sum",
    *,
    implementation: str | None = None,
    variant: str | None = None,
) -> jax.Array:
    r"""What the stored entries of each row come to.

    .. math:: y_i = \sum_{e \in \mathrm{row}(i)} v_e

    for "sum", and accordingly for the others: a node of a graph aggregates what comes along its
    edges. A row without entries gets 0, of "max" and "logsumexp" -inf. Padding counts nothing.
    Results repeat bitwise, on a GPU too, where ``jax.ops.segment_sum`` adds in no fixed order. Sums
    are taken in float32, or float64 for float64. Differentiable to any order; the derivative of a
    maximum is shared by all entries that equal it, as that of ``jnp.max``, and 0 if it is NaN.

    Args:
        values: ``(..., nse)``, float32, float64, bfloat16 or float16; batch dimensions broadcast.
        topology: whose rows they are of; may have leading batch dimensions.
        reduction: "sum", "mean", "max" or "logsumexp".
        implementation: None (the platform's own), "cpu", "cuda" or "xla".
        variant: the name of a kernel variant to force, see ``python -m jaxsparse info``; sums and
            means are products, and have the variants of `spmm`.

    Returns:
        ``(..., m)``, of the dtype of the values.

    Raises:
        TypeError: for values that are no array of these dtypes, or no topology.
        ValueError: for another number of values, batch dimensions that do not broadcast, and a
            reduction that does not exist; at lowering, for an implementation or variant that can't
            be had.

    >>> import jax.numpy as jnp
    >>> topology = Topology([0, 2, 2, 3], [0, 2, 1], (3, 4))
    >>> reduce_rows(jnp.array([1.0, 3.0, 5.0]), topology, "mean")
    Array([2., 0., 5.], dtype=float32)
    """
    operation = "reduce_rows"
    if not isinstance(topology, Topology):
        raise TypeError(f"{operation}: topology must be a Topology, got {type(topology).__name__}")
    values = arguments.as_array(operation, "values", values, 1)
    dtype = arguments.check_floating(operation, values=values)
    backend.check_implementation(operation, implementation)
    if reduction not in (*_SUMS, *_OF_PRIMITIVE):
        raise ValueError(
            f"{operation}: reduction must be one of {[*_SUMS, *_OF_PRIMITIVE]}, got {reduction!r}"
        )
    arguments.check_values(operation, "values", values, topology)
    columns = arguments.columns_alone(topology)
    if reduction in _SUMS:
        (wide,), pattern = arguments.align([values], [1], accumulator_dtype(dtype), topology)
        sums = sums_of_rows(wide, pattern, columns, implementation, variant)[..., 0]
        if reduction == "mean":
            sums /= jnp.maximum(jnp.diff(topology.row_offsets), 1).astype(sums.dtype)
        return sums.astype(dtype)
    (values,), pattern = arguments.align([values], [1], dtype, topology)
    options = {"implementation": implementation, "variant": variant}
    reduced: jax.Array = bind(
        reduce_rows_p, values, *pattern, reduction=reduction, columns=columns, **options
    )[0]
    return reduced


def _signature(params: dict[str, Any]) -> Signature:
    pattern = operands_of_pattern(params["columns"])
    return Signature((("values", "e"), *pattern), (("out", "m"),))


def _ffi(params: dict[str, Any], avals: Sequence[ShapedArray], device: AnyDevice) -> FfiCall:
    attributes = {"reduction": params["reduction"]}
    return FfiCall(("values", *ROWS, CUTS), attributes, workspace=None)


def _plain(
    values: jax.Array,
    row_offsets: jax.Array,
    *pattern: jax.Array,
    reduction: str,
    columns: int | None,
) -> list[jax.Array]:
    size = row_offsets.shape[0] - 1
    v = values.astype(accumulator_dtype(values.dtype))
    out = jnp.full(size, -jnp.inf, v.dtype)
    if size:
        rows = row_indices(row_offsets, values.shape[0])  # m for padding, which is dropped
        out = out.at[rows].max(v, mode="drop")
        if reduction == "logsumexp":
            most = jnp.where(jnp.isfinite(out), out, 0)
            terms = jnp.exp(v - most.at[rows].get(mode="fill", fill_value=0))
            out = most + jnp.log(jnp.zeros_like(out).at[rows].add(terms, mode="drop"))
    return [out.astype(values.dtype)]


reduce_rows_p = make_primitive(
    Operation(
        name="reduce_rows",
        target="reduce_rows",
        params=("reduction", "columns"),
        signature=_signature,
        result_dtypes=lambda avals, params: [avals[0].dtype],
        shardable=(),
        xla=_plain,
        ffi=_ffi,
    )
)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    (values, *pattern), tangent = primals, tangents[0]
    (out,) = bind(reduce_rows_p, *primals, **params)
    if type(tangent) is ad.Zero:
        return [out], [ad.Zero(jax.typeof(out).to_tangent_aval())]
    wide = accumulator_dtype(values.dtype)
    values, tangent = values.astype(wide), tangent.astype(wide)
    by = (pattern, params["columns"], params["implementation"])
    if params["reduction"] == "max":
        equal = values == spread_over_entries(out.astype(wide)[..., None], *by)
        counts = jnp.maximum(sums_of_rows(equal.astype(wide), *by), 1)
        dout = sums_of_rows(jnp.where(equal, tangent, 0), *by) / counts
    else:
        of_softmax = {"columns": params["columns"], "implementation": params["implementation"]}
        (weights,) = bind(sparse_softmax_p, values, *pattern, scale=1.0, variant=None, **of_softmax)
        dout = sums_of_rows(weights * tangent, *by)
    return [out], [dout[..., 0].astype(out.dtype)]


ad.primitive_jvps[reduce_rows_p] = _jvp
