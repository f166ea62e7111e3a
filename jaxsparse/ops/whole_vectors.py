"""Zeros behind rows that are no multiple of 16 bytes, where a GPU's kernels then take less time.

Such rows, as those of images of 7 x 7 pixels, kernels read and write number by number, and some do
not take them at all.
"""

from __future__ import annotations

import math

from jax.core import ShapedArray

from jaxsparse.device import AnyDevice, Device
from jaxsparse.primitive import FfiCall, TypedCall, core_dims, variants_of

_VECTOR = 16  # bytes that a thread reads or writes at once
# Microseconds of a copy, beside what its bytes take to be read and written. An array that XLA
# makes itself it makes with the zeros, so that a copy counts for about half of what it takes.
_START, _BYTES = 1.0, 4.1e6


def with_whole_vectors(
    call: TypedCall, made: FfiCall, dimension: str, device: AnyDevice
) -> FfiCall:
    """How a target is called, with zeros behind a core dimension if that is taken to be faster.

    The dimension is one of columns that do not depend on one another, or one that is summed over.
    """
    sizes = [size for aval in (*call.operands, *call.results) for size in aval.shape]
    is_open = not all(isinstance(size, int) for size in sizes)
    if not isinstance(device, Device) or call.params["variant"] is not None or is_open:
        return made
    arrays, size = _arrays_with(dimension, call)
    numbers = _VECTOR // min(aval.dtype.itemsize for aval in arrays)
    missing = -size % numbers
    if not missing:
        return made
    whole = size + missing
    remark = f"rows of {size} numbers are padded to {whole}, to be whole vectors"
    padded = made._replace(padded=(dimension, whole), remark=made.remark or remark)
    moved = sum(2 * math.prod(aval.shape) * aval.dtype.itemsize for aval in arrays)
    copies = len(arrays) * _START + moved / _BYTES
    pays = _microseconds(call, padded, device) + copies < _microseconds(call, made, device)
    return padded if pays else made


def _arrays_with(dimension: str, call: TypedCall) -> tuple[list[ShapedArray], int]:
    """The operands and results that have a core dimension, and its size."""
    operands, results = call.operation.signature(call.params)
    arrays, size = [], 0
    for (_, spec), aval in zip((*operands, *results), (*call.operands, *call.results), strict=True):
        dims = core_dims(spec)
        if dimension in dims:
            arrays.append(aval)
            size = aval.shape[dims.index(dimension) - len(dims)]
    return arrays, size


def _microseconds(call: TypedCall, made: FfiCall, device: Device) -> float:
    """Of the variant that would be chosen."""
    return min((cost for _, cost in variants_of(call, made, device)[:1]), default=math.inf)
