"""The lists of tiles of chosen blocks: a mask by a table of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.batching import over_batch
from jaxsparse.block_mask.from_mask import cells_of_mask, most_of, of_mask_in_program
from jaxsparse.block_mask.room import check_room
from jaxsparse.block_mask.tiles import TileLists, lists_on_host
from jaxsparse.block_mask.words import CELL
from jaxsparse.integers import integer
from jaxsparse.masks.arguments import Table
from jaxsparse.masks.expression import Mask, array_of, as_mask, kind
from jaxsparse.masks.intervals import Interval, Truth
from jaxsparse.masks.positions import TracedMaskError

OPERATION = "BlockMask.from_blocks"


@kind
class _Blocks(Mask):
    """Positions of chosen blocks, by an int32 table of 0 and 1 ``(rows, columns)`` of blocks."""

    chosen: Table | jax.Array
    block: tuple[int, int]
    _name = "blocks"
    _children = ("chosen",)

    def _stored(self, xp: Any, rows: Any, columns: Any) -> Any:
        chosen = xp.asarray(array_of(self.chosen))
        return chosen[rows // self.block[0], columns // self.block[1]] != 0

    def _truth(self, rows: Interval, columns: Interval) -> Truth:
        """Of cells, of which each lies in a block, or consists of blocks."""
        xp, chosen = rows.xp, array_of(self.chosen)
        if isinstance(chosen, Interval):
            return Truth.unknown(xp)
        parts = [max(1, CELL // size) for size in self.block]
        widths = [(0, -size % part) for size, part in zip(chosen.shape, parts, strict=True)]
        down, across = (-(-size // part) for size, part in zip(chosen.shape, parts, strict=True))
        of_cells = xp.pad(xp.asarray(chosen), widths).reshape(down, parts[0], across, parts[1])
        sizes = [max(CELL, size) for size in self.block]
        at = rows.low // sizes[0], columns.low // sizes[1]
        may, must = xp.any(of_cells != 0, axis=(1, 3)), xp.all(of_cells != 0, axis=(1, 3))
        return Truth(xp, may[at], must[at])


def _everything(rows: Any, columns: Any) -> Any:
    return True


def of_blocks(
    chosen: Any,
    block: tuple[int, int],
    within: Any,
    shape: tuple[int, int],
    max_tiles: int | None,
    max_cells: int | None,
) -> tuple[TileLists, TileLists]:
    """The lists by rows and by columns of the positions of chosen blocks that a mask stores."""
    batch = chosen.shape[:-2]
    inside = as_mask(_everything if within is None else within)

    def mask_of(table: Any) -> Mask:
        return _Blocks(table, block) & inside

    if 0 in (*shape, *batch):
        return lists_on_host(OPERATION, [], batch, shape, max_tiles, max_cells)
    if not isinstance(chosen, jax.core.Tracer) and not inside.is_traced:
        tables = np.asarray(chosen)
        try:
            cells = [
                cells_of_mask(mask_of(Table(tables[i] != 0)), shape) for i in np.ndindex(batch)
            ]
        except TracedMaskError:
            pass
        else:
            return lists_on_host(OPERATION, cells, batch, shape, max_tiles, max_cells)
    table = jnp.asarray(chosen).astype(bool).astype(jnp.int32)
    # A block of whole cells makes none of them partial.
    of_cells = all(size % CELL == 0 for size in block)
    most = most_of(inside if of_cells else mask_of(table), shape)
    rooms = check_room(OPERATION, max_tiles, max_cells, *most)

    def one(table: jax.Array) -> tuple[TileLists, TileLists]:
        return of_mask_in_program(mask_of(table), shape, *rooms)

    return over_batch(one, len(batch), table)


def check_blocks(chosen: Any, block: Any, shape: Any) -> tuple[Any, tuple[int, int], Any]:
    """The array, the sizes of a block and the shape that they cover."""
    chosen = chosen if isinstance(chosen, jax.Array) else np.asarray(chosen)
    if chosen.ndim < 2 or not (chosen.dtype == bool or jnp.issubdtype(chosen.dtype, jnp.integer)):
        raise ValueError(
            f"{OPERATION}: chosen must be bool or integers (..., blocks down, blocks across), got "
            f"{chosen.dtype} {chosen.shape}"
        )
    if np.ndim(block) != 1 or len(block) != 2:
        raise ValueError(f"{OPERATION}: block must be (rows, columns), got {block!r}")
    rows, columns = (integer(OPERATION, "a block's size", size, 1) for size in block)
    for size in rows, columns:
        if size % CELL and CELL % size:
            raise ValueError(
                f"{OPERATION}: the sizes of a block must be multiples of {CELL} or divide it, got "
                f"{(rows, columns)}"
            )
    down, across = chosen.shape[-2:]
    shape = (down * rows, across * columns) if shape is None else tuple(shape)
    return chosen, (rows, columns), shape


def check_covers(chosen: Any, block: tuple[int, int], shape: tuple[int, int]) -> None:
    """Raises ValueError unless there is a table's entry for each block of the shape."""
    needed = tuple(-(-size // by) for size, by in zip(shape, block, strict=True))
    if tuple(chosen.shape[-2:]) != needed:
        raise ValueError(
            f"{OPERATION}: chosen must be (..., {needed[0]}, {needed[1]}) for shape {shape} in "
            f"blocks of {block}, got {chosen.shape}"
        )
