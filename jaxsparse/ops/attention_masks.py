"""What the masks of attention become: operands of its primitive."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import masks
from jaxsparse.block_mask import BlockMask
from jaxsparse.block_mask.room import cells_of, takes_much, tiles_of
from jaxsparse.block_mask.words import CELL, CELL_BYTES
from jaxsparse.layouts.block_mask import BlockMasks, block_mask_of
from jaxsparse.ops import arguments
from jaxsparse.pattern import is_concrete
from jaxsparse.topology import Topology

OPERATION = "sparse_attention"


def as_mask(mask: Any, shape: tuple[int, int]) -> Topology | BlockMask:
    """A mask as a pattern or a block mask of this shape.

    Raises:
        TypeError, ValueError: if it is of another type or shape.
    """
    if isinstance(mask, Topology):
        mask.check_positions()
        if mask.shape == shape:
            return mask if mask.static else mask.as_dynamic()
    elif mask is None or callable(mask):
        return _of_function(mask, shape)
    elif isinstance(mask, jax.Array | np.ndarray):
        if mask.dtype != bool:
            raise TypeError(f"{OPERATION}: an array for a mask must be bool, got {mask.dtype}")
        if mask.shape[-2:] == shape:
            return BlockMask.from_dense(mask)
    elif isinstance(mask, BlockMask):
        if mask.shape == shape:
            return mask
    else:
        raise TypeError(
            f"{OPERATION}: mask must be a BlockMask, a Topology, a mask function, an array of bool "
            f"or None, got {type(mask).__name__}"
        )
    raise ValueError(f"{OPERATION}: mask must have shape {shape}, got {mask.shape}")


def as_offsets(b: int, query_offset: Any, key_offset: Any) -> jax.Array | None:
    """Int32 positions of the first query and the first key, (B or 1, 2); None: all are 0.

    Raises:
        TypeError, ValueError: if they are no integers, or of another shape than () or (B,).
    """
    if query_offset is None and key_offset is None:
        return None
    offsets = []
    for name, x in (("query_offset", query_offset), ("key_offset", key_offset)):
        array = _checked_offset(name, 0 if x is None else x)
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{OPERATION}: {name} must be integers, got {array.dtype}")
        if array.shape not in ((), (b,)):
            raise ValueError(f"{OPERATION}: {name} must have shape () or ({b},), got {array.shape}")
        offsets.append(array.astype(jnp.int32).reshape(-1))
    return jnp.stack(jnp.broadcast_arrays(*offsets), -1)


def _checked_offset(name: str, x: Any) -> jax.Array:
    """An offset as an array; those of the host must be in the range of int32."""
    if isinstance(x, numbers.Integral | np.ndarray):
        limits = np.iinfo(np.int32)
        host = np.asarray(x)
        if host.size and not limits.min <= host.min() <= host.max() <= limits.max:
            raise ValueError(f"{OPERATION}: {name} must be in the range of int32, got {x}")
    return arguments.as_array(OPERATION, name, x, 0)


def at_offsets(mask: Any, query_offset: Any, key_offset: Any, shape: tuple[int, int]) -> Any:
    """A mask function as what it is of positions that begin there; another mask stays."""
    rows, columns = (0 if x is None else x for x in (query_offset, key_offset))
    known = isinstance(rows, numbers.Integral) and isinstance(columns, numbers.Integral)
    if mask is None or isinstance(mask, BlockMask | Topology) or not callable(mask):
        return mask
    if known:
        return masks.offset(mask, rows=rows, columns=columns) if rows or columns else mask

    known_by_name = isinstance(mask, masks.Mask) and mask.is_known_by_name
    of = (
        _compiled_at(mask, shape) if known_by_name else jax.jit(functools.partial(_at, mask, shape))
    )
    begins = jnp.broadcast_arrays(*(jnp.asarray(x, jnp.int32) for x in (rows, columns)))
    if begins[0].ndim == 0:
        return of(*begins)
    return jax.vmap(of)(*begins).reshape_batch(begins[0].shape[0], 1)


def _at(
    mask: Callable[[Any, Any], Any], shape: tuple[int, int], row: jax.Array, column: jax.Array
) -> BlockMask:
    """The block mask of a mask function, of positions that begin at a row and a column.

    They are data of its program also where both are known: a mask for each would be a program each.
    """
    return BlockMask.from_mask(masks.offset(mask, rows=row, columns=column), shape)


@functools.lru_cache(maxsize=32)
def _compiled_at(mask: masks.Mask, shape: tuple[int, int]) -> Any:
    """The same compiled, once for all calls of no program."""
    return jax.jit(functools.partial(_at, mask, shape))


def _of_function(mask: Callable[[Any, Any], Any] | None, shape: tuple[int, int]) -> BlockMask:
    mask = masks.padding(shape[1]) if mask is None else mask
    if isinstance(mask, masks.Mask) and mask.is_known_by_name:
        return _made_once(mask, shape, jax.sharding.get_abstract_mesh())
    return BlockMask.from_mask(mask, shape)


@functools.lru_cache(maxsize=32)
def _made_once(mask: masks.Mask, shape: tuple[int, int], mesh: Any) -> BlockMask:
    """One for each mesh of explicit axes, which is a part of the arrays' types."""
    with jax.ensure_compile_time_eval():
        return BlockMask.from_mask(mask, shape)


def mask_operands(
    mask: BlockMask | None, topology: Topology | None
) -> tuple[list[jax.Array], dict[str, Any]]:
    """What the primitive takes of a mask over heads, and its params that say so."""
    lists = () if mask is None else (*mask.rows, *mask.columns)
    pattern = () if topology is None else topology.operands()
    of_heads = mask if mask is not None else topology
    assert of_heads is not None
    rank = len(of_heads.batch_shape)
    # As many dimensions in front of all: sequences, groups, heads of a group.
    batch = (*(1,) * (3 - rank), *of_heads.batch_shape)
    arrays = [x.reshape(*batch, *x.shape[rank:]) for x in (*lists, *pattern)]
    params = {
        "mask_of_group": batch[1] != 1,
        "mask_of_head": batch[2] != 1,
        "has_mask": mask is not None,
        "has_pattern": topology is not None,
        "columns": None if topology is None else arguments.columns_alone(topology),
    }
    return arrays, params


# A block mask takes up to 1 KB for each entry of a scattered pattern, such as a graph's: where it
# may take much it is not made of patterns for which it would take over so many bytes an entry.
_MOST_OF_ENTRY = 32


def block_mask(mask: Topology | BlockMask) -> BlockMask | None:
    """The block mask, or None where the pattern alone is better."""
    if isinstance(mask, BlockMask):
        return mask
    if BlockMasks.name not in mask.layouts and not _pays(mask):
        return None
    return block_mask_of(mask)


def _pays(topology: Topology) -> bool:
    """Whether to make the block mask of a topology, by what it takes."""
    if not is_concrete(topology.row_offsets, topology.column_indices):
        # What it takes in a program is what it may take.
        return not _may_take_much(topology)
    patterns = math.prod(topology.batch_shape)
    return not (_may_take_much(topology, patterns) and _takes_more_than_pays(topology))


def _may_take_much(topology: Topology, patterns: int = 1) -> bool:
    tiles, cells = (min(topology.nse, of(topology.shape)) for of in (tiles_of, cells_of))
    return takes_much(patterns * tiles, patterns * cells)


def _takes_more_than_pays(topology: Topology) -> bool:
    """By some rows of cells, spread evenly over the first pattern of a concrete topology."""
    offsets, columns = (
        np.asarray(x).reshape(-1, x.shape[-1])[0]
        for x in (topology.row_offsets, topology.column_indices)
    )
    begins = np.arange(0, topology.shape[0], CELL)[:: max(1, topology.shape[0] // (64 * CELL))]
    ends = np.minimum(begins + CELL, topology.shape[0])
    parts = [columns[offsets[i] : offsets[j]] // CELL for i, j in zip(begins, ends, strict=True)]
    cells, entries = sum(np.unique(part).size for part in parts), sum(map(len, parts))
    return bool(CELL_BYTES * cells > _MOST_OF_ENTRY * entries)


def with_block_mask(topology: Topology) -> Topology:
    """The topology with its block mask as a layout, where attention uses one.

    So a program that takes the topology as an argument does not make the mask at every run.
    """
    mask = block_mask(topology)
    if mask is None or BlockMasks.name in topology.layouts:
        return topology
    return topology.with_layouts({**topology.layouts, BlockMasks.name: mask})


def of_checked(topology: Topology) -> BlockMask | None:
    """Made in the program, of positions that it checks first; None where that may take much."""
    if _may_take_much(topology):
        return None
    offsets, columns = topology.operands()[:2]
    checked = Topology(offsets, columns, topology.shape, transpose=False)
    return BlockMask.from_topology(checked)


MaskOfHeads = TypeVar("MaskOfHeads", Topology, BlockMask)


def over_heads(mask: MaskOfHeads, b: int, groups: int, per_group: int) -> MaskOfHeads:
    """The mask with the batch dimensions of operands (B, K, N / K), or none of them."""
    batch: tuple[int, ...] = mask.batch_shape
    n = groups * per_group
    if batch == (n,) == (b,) and n > 1:
        raise ValueError(
            f"{OPERATION}: a batch of {n} masks is ambiguous for {b} sequences of {n} heads: write "
            f"mask.reshape_batch(1, {n}) for one for each head, mask.reshape_batch({b}, 1) for one "
            "for each sequence"
        )
    sequences, heads = batch if len(batch) == 2 else (1, *batch, 1)[:2]
    if len(batch) > 2 or sequences not in (1, b) or heads not in (1, n):
        hint = f": write mask.reshape_batch({b}, 1)" if batch == (b,) else ""
        raise ValueError(
            f"{OPERATION}: mask must be one, a batch of {n} or (1, {n}), one for each head, "
            f"({b}, 1), one for each sequence, or ({b}, {n}), got batch {batch}{hint}"
        )
    of_heads = (groups, per_group) if heads == n else (1, 1)
    if sequences != 1:
        return mask.reshape_batch(sequences, *of_heads)
    return mask.reshape_batch(*(of_heads if heads != 1 else ()))
