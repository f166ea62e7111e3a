"""Heads of other sizes than kernels take: zeros behind them add nothing to products.

They are padded where a kernel takes them so, and is expected to cost less than one that takes them
as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from jaxsparse.device import AnyDevice, Device
from jaxsparse.primitive import (
    OPERATIONS,
    FfiCall,
    Operation,
    bind_local,
    typed_call,
    variants_of,
)

# Sizes of heads, both of keys and of values, that kernels by warpgroups take.
SIZES_OF_WARPGROUPS = (64, 128)
# What sizes of heads of keys and of values must be multiples of, for the kernel of few queries.
_STEPS_OF_DECODE = (16, 32)
_MOST_OF_DECODE = 256
MOST_OF_TILES = 256  # numbers of a head that kernels by tiles take in 16 bits, kMmaMostSize in C++
_ALIGNED = 8  # all other kernels of GPUs take multiples of this


def fits_decode(dtype: Any, sizes: tuple[int, int]) -> bool:
    """Whether the GPU's kernel of few queries takes heads of these sizes as they are."""
    return jnp.dtype(dtype).itemsize == 2 and all(
        0 < size <= _MOST_OF_DECODE and size % step == 0
        for size, step in zip(sizes, _STEPS_OF_DECODE, strict=True)
    )


def best_sizes(
    operation: Operation,
    params: dict[str, Any],
    avals: Sequence[ShapedArray],
    made: FfiCall,
    device: AnyDevice,
) -> tuple[int, int]:
    """What to pad heads of keys and of values to: as they are, or for a kernel that costs less."""
    sizes = (avals[0].shape[-1], avals[2].shape[-1])
    if not isinstance(device, Device):
        return sizes
    squares = [(s, s) for s in SIZES_OF_WARPGROUPS if max(sizes) <= s]
    aligned = tuple(-(-size // _ALIGNED) * _ALIGNED for size in sizes)
    best, least = sizes, math.inf
    for padded in (sizes, *squares, aligned):
        of_sizes = typed_call(operation, params, _padded_avals(operation, params, avals, padded))
        for _, cost in variants_of(of_sizes, made, device)[:1]:
            if cost < least:
                best, least = padded, cost
    return best


def _sizes_by_operand(name: str, padded: tuple[int, int]) -> dict[str, int]:
    """The last dimension of each operand that has heads' numbers."""
    h, e = padded
    by_name = {"query": h, "key": h, "value": e}
    more = {
        "attention": {},
        "attention_tangent": {f"d_{operand}": size for operand, size in by_name.items()},
        "attention_cotangent": {"ct_out": e},
    }
    return by_name | more[name]


def _padded_avals(
    operation: Operation,
    params: dict[str, Any],
    avals: Sequence[ShapedArray],
    padded: tuple[int, int],
) -> list[ShapedArray]:
    operands = operation.signature(params).operands
    sizes = _sizes_by_operand(operation.name, padded)
    return [
        ShapedArray((*aval.shape[:-1], sizes[operand]), aval.dtype) if operand in sizes else aval
        for (operand, _), aval in zip(operands, avals, strict=True)
    ]


def _padded_to(size: int, x: jax.Array) -> jax.Array:
    if x.shape[-1] == size:
        return x
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, size - x.shape[-1]),))


def with_padded_heads(
    primitive: Any, sizes: tuple[int, int], variant: str | None, *operands: jax.Array, **params: Any
) -> Any:
    """A call whose heads get zeros behind them: these add nothing to products."""
    operation = OPERATIONS[primitive]
    padded = _padded_avals(operation, params, [jax.typeof(x) for x in operands], sizes)
    results = bind_local(
        primitive,
        *(_padded_to(aval.shape[-1], x) for x, aval in zip(operands, padded, strict=True)),
        **params,
        implementation="cuda",
        variant=variant,
    )
    h, e = operands[0].shape[-1], operands[2].shape[-1]
    of_results: tuple[int | None, ...] = (
        (h, h, e) if operation.name == "attention_cotangent" else (e, None)
    )
    of_results += (None,) * (len(results) - len(of_results))  # of operands of scores
    return [
        x if size is None else x[..., :size] for x, size in zip(results, of_results, strict=True)
    ]
