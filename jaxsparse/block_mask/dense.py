"""Block masks written out."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxsparse.batching import over_batch
from jaxsparse.block_mask.orders import Order, restored
from jaxsparse.block_mask.tiles import FULL, PARTIAL, STATES_AT, TileLists
from jaxsparse.block_mask.words import CELL, TILE, unpack
from jaxsparse.pattern import row_indices

Orders = tuple[Order | None, Order | None]


def _written_out(lists: TileLists, orders: Orders, shape: tuple[int, int]) -> jax.Array:
    """The positions of masks, bool ``(..., *shape)``; indices out of range are clamped."""
    leaves, structure = jax.tree.flatten((lists, orders))

    def one(*arrays: jax.Array) -> jax.Array:
        lists, (rows, columns) = jax.tree.unflatten(structure, arrays)
        return restored(columns, restored(rows, _one(lists, shape), 0), 1)

    return over_batch(one, lists.offsets.ndim - 1, *leaves)


# Jitted, so that an eager call compiles one program.
written_out: Callable[[TileLists, Orders, tuple[int, int]], jax.Array]
written_out = jax.jit(_written_out, static_argnums=2)


def _one(lists: TileLists, shape: tuple[int, int]) -> jax.Array:
    tile_rows, tile_columns = (-(-size // TILE) for size in shape)
    room = lists.entries.shape[0]
    columns = (lists.entries & (1 << STATES_AT) - 1).astype(jnp.int32)
    shifts = STATES_AT + 2 * jnp.arange(4, dtype=jnp.uint32)
    states = lists.entries[:, None] >> shifts[None] & 3
    partial = states == PARTIAL
    before = jnp.cumsum(partial, axis=1, dtype=jnp.int32) - partial.astype(jnp.int32)
    slots = lists.bits_at[:, None] + before
    cells = unpack(jnp.take(lists.bits, slots.reshape(-1), axis=0, mode="clip"))
    cells = cells.reshape(room, 4, CELL, CELL) & partial[..., None, None]
    cells |= (states == FULL)[..., None, None]
    tiles = cells.reshape(room, 2, 2, CELL, CELL).swapaxes(2, 3).reshape(room, TILE, TILE)
    grid = jnp.zeros((tile_rows, tile_columns, TILE, TILE), bool)
    grid = grid.at[row_indices(lists.offsets, room), columns].set(tiles, mode="drop")
    dense = grid.swapaxes(1, 2).reshape(tile_rows * TILE, tile_columns * TILE)
    return dense[: shape[0], : shape[1]]
