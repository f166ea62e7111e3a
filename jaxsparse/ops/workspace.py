"""The most bytes of workspace that CUDA kernels of spmm and sddmm take, by the formulas in ffi/.

XLA has to know it at lowering, before a kernel is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray

from jaxsparse.pattern import NO_STARTS, TILE

# Before tensor cores multiply, a kernel writes planes of 16 bits of the dense operand, and where
# the entries of tiles begin if the topology does not say so. An x of 16 bits may need no planes
# after all, if addresses are aligned, which is not known here. There is no place for them where so
# few entries are stored that another kernel is chosen.
_PLANES = {"float32": 3, "bfloat16": 1, "float16": 1}
_LEAST_DENSITY_TO_PREPARE = 1 / 64
_PREPARATION_BYTES = 2**29  # that may be taken where nobody asked for it
# d on tensor cores, as `FitsTensorCores` in ffi/sddmm/sddmm_cuda.cc
_WIDEST_SAMPLED = {"float32": 128, "bfloat16": 256, "float16": 256}
_UNSHARED = "tensor_cores_unshared"  # elsewhere several blocks may share a tile of the result
# kSpmmMostParts in ffi/spmm/problem.h, kIfFaster.most in ffi/spmm/spmm_cuda.cc
_MOST_PARTS, _MOST_PARTS_OF_TILE = 512, 8
_WIDEST_TILE_BYTES = TILE * 128 * 4


def preparation_bytes(
    variant: str | None,
    dense: ShapedArray,
    shape: Sequence[Any],
    pattern: Sequence[ShapedArray],
    product: tuple[ShapedArray, Any] | None = None,
) -> int:
    """The workspace of tensor cores: as `Preparation` in ffi/common/types.h.

    `shape` is that of a matrix of `dense`. `product` is None for sddmm; for spmm, the values and
    the number of rows of the result, and there is space for what blocks tell each other, too.
    """
    offsets, indices, _, transposed_offsets, *_, given_starts = pattern
    values, rows_of_result = product or (dense, 0)
    sizes = (size for x in (values, dense, *pattern) for size in x.shape)
    if dense.dtype.name not in _PLANES or not all(isinstance(size, int) for size in sizes):
        return 0  # no tensor cores for float64; and a size that is no number yet can't be compared
    if product is None and shape[1] > _WIDEST_SAMPLED[dense.dtype.name]:
        return 0
    rows, columns = (x.shape[-1] - 1 for x in (offsets, transposed_offsets))
    size = math.prod(dense.shape[:-2]) * _padded(*shape) * 2 * _PLANES[dense.dtype.name]
    if given_starts.shape[-1:] == NO_STARTS:
        starts_of_entry = _tiles(rows) * (_tiles(columns) + 1) * TILE * 4
        size += math.prod(offsets.shape[:-1]) * starts_of_entry
    if product is not None:
        batch = jnp.broadcast_shapes(values.shape[:-1], offsets.shape[:-1], dense.shape[:-2])
        size += _parts_bytes(variant, math.prod(batch) * _padded(rows_of_result, shape[1]))
    entries = indices.shape[-1]
    pays = entries >= _LEAST_DENSITY_TO_PREPARE * rows * columns and size <= _PREPARATION_BYTES
    forced = variant is not None and variant.startswith("tensor_cores")
    return size if forced or (variant is None and pays) else 0


def _tiles(size: int) -> int:
    return -(-size // TILE)


def _padded(lines: int, width: int) -> int:
    """Numbers of a dense matrix in tiles, of whatever width."""
    widest = 32 if width <= 32 else 64 if width <= 64 else 128
    return _tiles(lines) * TILE * -(-width // widest) * widest


def _parts_bytes(variant: str | None, results: int) -> int:
    """As `kSpmmArrivedBytes` and `SpmmPartsBytes` in ffi/spmm/problem.h."""
    of_all = 0 if variant == _UNSHARED else _MOST_PARTS_OF_TILE * results * 4
    return _MOST_PARTS * 4 + min(of_all, _MOST_PARTS * _WIDEST_TILE_BYTES)
