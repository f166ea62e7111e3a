"""Abstract evaluation: the types of results, from the names of core dimensions.

Every operand has the same number of leading batch dimensions; where an operand is not batched its
size there is 1, and kernels read it with stride 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray

from jaxsparse.primitive.declaration import Operation, core_dims
from jaxsparse.primitive.sharding import result_sharding

MAX_BATCH_RANK = 8  # kMaxBatchRank in ffi/types.h


def abstract_eval(operation: Operation, *avals: ShapedArray, **params: Any) -> list[ShapedArray]:
    results = []
    inferred = _infer(operation, avals, params)
    dtypes = operation.result_dtypes(avals, params)
    for (batch, core, dims), dtype in zip(inferred, dtypes, strict=True):
        results.append(
            ShapedArray(
                (*batch, *core),
                dtype,
                sharding=result_sharding(operation, avals, params, len(batch), dims),
                manual_axis_type=avals[0].manual_axis_type,
            )
        )
    return results


def _infer(
    operation: Operation, avals: Sequence[ShapedArray], params: dict[str, Any]
) -> list[tuple[tuple[int, ...], tuple[int, ...], list[str]]]:
    """Batch shape, core shape and core dimensions of every result, or ValueError."""
    signature = operation.signature(params)
    if len(avals) != len(signature.operands):
        raise ValueError(
            f"{operation.name}: takes {len(signature.operands)} operands, got {len(avals)}"
        )
    sizes: dict[str, int] = {}
    batches = []
    for (name, spec), aval in zip(signature.operands, avals, strict=True):
        dims = core_dims(spec)
        split = aval.ndim - len(dims)
        if split < 0:
            raise ValueError(
                f"{operation.name}: {name} needs {len(dims)} dimensions ({spec}), "
                f"got shape {aval.shape}"
            )
        batches.append(aval.shape[:split])
        for dim, size in zip(dims, aval.shape[split:], strict=True):
            base, extra = (dim[:-2], 1) if dim.endswith("+1") else (dim, 0)
            if dim.isdigit():
                sizes[dim] = int(dim)
            if sizes.setdefault(base, size - extra) != size - extra:
                raise ValueError(
                    f"{operation.name}: {name} has shape {aval.shape}, expected {spec} with "
                    f"{base} = {sizes[base]}"
                )
    if len({len(batch) for batch in batches}) > 1:
        raise ValueError(f"{operation.name}: operands differ in batch dimensions: {batches}")
    if len(batches[0]) > MAX_BATCH_RANK:
        raise ValueError(
            f"{operation.name}: takes at most {MAX_BATCH_RANK} batch dimensions, got {batches[0]}"
        )
    try:
        batch = jnp.broadcast_shapes(*batches)
    except ValueError:
        named = {name: b for (name, _), b in zip(signature.operands, batches, strict=True) if b}
        raise ValueError(
            f"{operation.name}: batch dimensions of the operands must broadcast, got {named}"
        ) from None
    return [
        (
            batch,
            tuple(int(dim) if dim.isdigit() else sizes[dim] for dim in core_dims(spec)),
            core_dims(spec),
        )
        for _, spec in signature.results
    ]
