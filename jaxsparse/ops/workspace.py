"""The most bytes of workspace that CUDA kernels of spmm and sddmm take, by the formulas in ffi/.

XLA has to know it at lowering, before a kernel is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray

from jaxsparse.layouts.tile_starts import NO_STARTS, TILE

# Before tensor cores multiply, a kernel writes planes of 16 bits of the dense operand, and where
# the entries of tiles begin if the topology does not say so. An x of 16 bits may need no planes
# after all, if addresses are aligned, which is not known here. There is no place for them where so
# few entries are stored that another kernel is chosen.
_PLANES = {"float32": 3, "bfloat16": 1, "float16": 1}
_LEAST_DENSITY_TO_PREPARE = 1 / 64
_PREPARATION_BYTES = 2**29  # that may be taken where nobody asked for it
# d on tensor cores, as `FitsTensorCores` in ffi/sddmm/sddmm_cuda.cc
_WIDEST_SAMPLED = {"float32": 128, "bfloat16": 256, "float16": 256}
_UNSHARED = "tensor_cores_unsplit"  # elsewhere several blocks may share a tile of the result
# kSpmmMostParts in ffi/spmm/problem.h, kIfFaster.most in ffi/spmm/spmm_cuda.cc
_MOST_PARTS, _MOST_PARTS_OF_TILE = 512, 8
_WIDEST_TILE_BYTES = TILE * 128 * 4


def spmm_bytes(
    variant: str | None,
    values: ShapedArray,
    pattern: Sequence[ShapedArray],
    x: ShapedArray,
    shape: Sequence[Any],
    matrix: tuple[Any, Any],
    rows: Any,
) -> int:
    """Of a product by x, whose matrices are of that shape: planes, starts of tiles, and parts.

    `matrix` is the shape (m, k) of the stored matrix, and `rows` are those of the result.
    """
    if not _may_prepare(x, values, *pattern):
        return 0
    batch = jnp.broadcast_shapes(values.shape[:-1], pattern[0].shape[:-1], x.shape[:-2])
    parts = _parts_bytes(variant, math.prod(batch) * _padded(rows, shape[1]))
    size = _preparation_bytes(pattern, matrix, x, shape) + parts
    return _granted(variant, pattern, matrix, size)


def sddmm_bytes(variant: str | None, pattern: Sequence[ShapedArray], y: ShapedArray) -> int:
    """Of products of rows of x and y: planes of y, and starts of tiles."""
    if not _may_prepare(y, *pattern) or y.shape[-1] > _WIDEST_SAMPLED[y.dtype.name]:
        return 0
    matrix = (pattern[0].shape[-1] - 1, y.shape[-2])
    size = _preparation_bytes(pattern, matrix, y, y.shape[-2:])
    return _granted(variant, pattern, matrix, size)


def _may_prepare(dense: ShapedArray, *others: ShapedArray) -> bool:
    """Whether tensor cores take the dense operand's dtype, and every size is a number by now."""
    sizes = (size for x in (dense, *others) for size in x.shape)
    return dense.dtype.name in _PLANES and all(isinstance(size, int) for size in sizes)


def _granted(
    variant: str | None, pattern: Sequence[ShapedArray], matrix: tuple[int, int], size: int
) -> int:
    """So many bytes if tensor cores are asked for, or may be chosen."""
    if variant is not None:
        return size if variant.startswith("tensor_cores") else 0
    entries = pattern[1].shape[-1]
    pays = entries >= _LEAST_DENSITY_TO_PREPARE * math.prod(matrix) and size <= _PREPARATION_BYTES
    return size if pays else 0


def _preparation_bytes(
    pattern: Sequence[ShapedArray],
    matrix: tuple[int, int],
    dense: ShapedArray,
    shape: Sequence[int],
) -> int:
    """As `Preparation` in ffi/types.h; `shape` is that of a matrix of `dense`."""
    offsets, *_, given_starts = pattern
    size: int = math.prod(dense.shape[:-2]) * _padded(*shape) * 2 * _PLANES[dense.dtype.name]
    if given_starts.shape[-1:] == NO_STARTS:
        rows, columns = matrix
        starts_of_entry = _tiles(rows) * (_tiles(columns) + 1) * TILE * 4
        size += math.prod(offsets.shape[:-1]) * starts_of_entry
    return size


def _parts_bytes(variant: str | None, results: int) -> int:
    """What blocks tell each other: `kSpmmArrivedBytes`, `SpmmPartsBytes` in ffi/spmm/problem.h."""
    of_all = 0 if variant == _UNSHARED else _MOST_PARTS_OF_TILE * results * 4
    return _MOST_PARTS * 4 + min(of_all, _MOST_PARTS * _WIDEST_TILE_BYTES)


def _tiles(size: int) -> int:
    return -(-size // TILE)


def _padded(lines: int, width: int) -> int:
    """Numbers of a dense matrix in tiles, of whatever width."""
    widest = 32 if width <= 32 else 64 if width <= 64 else 128
    return _tiles(lines) * TILE * -(-width // widest) * widest
