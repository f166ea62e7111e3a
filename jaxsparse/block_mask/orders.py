"""Orders of rows and columns, in which positions that see the same become neighbours."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.masks.arguments import Table
from jaxsparse.masks.expression import Mask, array_of, kind
from jaxsparse.masks.intervals import Interval, Truth, look_up
from jaxsparse.pattern import to_device


@dataclasses.dataclass(frozen=True)
class Residues:
    """Positions by their remainders: 0, n, 2 n, ..., then 1, n + 1, ..., up to n - 1, 2 n - 1, ...

    An order that is no array: arrays are brought into it by transposing them.

    Attributes:
        stride: n.

    >>> Residues(3).positions(np, np.arange(8), 8)
    array([0, 3, 6, 1, 4, 7, 2, 5])
    """

    stride: int

    def _group(self, xp: Any, places: Any, size: int) -> tuple[Any, Any]:
        """The remainder at places of the order, and the place among those of that remainder."""
        count, longer = divmod(size, self.stride)  # so many have count + 1 positions
        of_longer = longer * (count + 1)
        behind, least = places - of_longer, max(1, count)
        among = places < of_longer
        remainder = xp.where(among, places // (count + 1), longer + behind // least)
        return remainder, xp.where(among, places % (count + 1), behind % least)

    def positions(self, xp: Any, places: Any, size: int) -> Any:
        """The positions at places of the order, of so many positions."""
        remainder, turn = self._group(xp, places, size)
        return turn * self.stride + remainder

    def places(self, xp: Any, positions: Any, size: int) -> Any:
        """The places of positions: the inverse."""
        count, longer = divmod(size, self.stride)
        remainder = positions % self.stride
        return remainder * count + xp.minimum(remainder, longer) + positions // self.stride

    def interval(self, places: Interval, size: int) -> Interval:
        """What positions at places are in, and what their remainders are."""
        xp = places.xp
        first, last = (self._group(xp, x, size)[0] for x in (places.low, places.high))
        begin, end = (self.positions(xp, x, size) for x in (places.low, places.high))
        one = first == last
        low = xp.where(one, begin, xp.minimum(begin, first + 1))
        high = xp.where(one, end, size - 1)
        return Interval(xp, low, high, (self.stride, Interval(xp, first, last)))


Order = Residues | jax.Array
"""An order of positions: by remainders, or int32 ``(..., size)``: the position at each place."""


jax.tree_util.register_dataclass(Residues, data_fields=[], meta_fields=["stride"])
jax.export.register_pytree_node_serialization(
    Residues,
    serialized_name="jaxsparse.Residues",
    serialize_auxdata=lambda meta: json.dumps(meta).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(data)),
)


# ---- Masks ----


@kind
class _Reordered(Mask):
    """A mask at places of orders of its rows and columns."""

    operand: Mask
    rows: Residues | Table | jax.Array | None
    columns: Residues | Table | jax.Array | None
    shape: tuple[int, int]
    _name = "reordered"
    _children = ("operand", "rows", "columns")

    def _stored(self, xp: Any, rows: Any, columns: Any) -> Any:
        return self.operand._stored(xp, *self._positions(xp, rows, columns))

    def _truth(self, rows: Interval, columns: Interval) -> Truth:
        return self.operand._truth(*self._positions(rows.xp, rows, columns))

    def _check_positions(self, rows: Any, columns: Any) -> None:
        # An order has all positions, so that the greatest is asked for at some place.
        self.operand._check_positions(*(np.array(size - 1, np.int32) for size in self.shape))

    def _positions(self, xp: Any, *places: Any) -> list[Any]:
        orders = self.rows, self.columns
        return [
            _positions_at(xp, order, x, size)
            for order, x, size in zip(orders, places, self.shape, strict=True)
        ]


def _positions_at(xp: Any, order: Any, places: Any, size: int) -> Any:
    if order is None:
        return places
    if isinstance(order, Residues):
        if isinstance(places, Interval):
            return order.interval(places, size)
        return order.positions(xp, places, size)
    table = array_of(order)
    if isinstance(table, Interval):
        return Interval(xp, np.int32(0), np.int32(size - 1))
    if isinstance(places, Interval):
        return look_up(table, places)
    return xp.asarray(table)[places]


def reordered(mask: Mask, rows: Any, columns: Any, shape: tuple[int, int]) -> Mask:
    """The mask whose position (i, j) is that of ``mask`` at places i and j of two orders."""
    if rows is None and columns is None:
        return mask
    rows, columns = (Table(x) if isinstance(x, np.ndarray) else x for x in (rows, columns))
    return _Reordered(mask, rows, columns, shape)


# ---- Arrays ----


def with_batch(orders: Iterable[Any], batch: tuple[int, ...]) -> tuple[Any, ...]:
    """Orders of one mask, in NumPy or traced, as those of a batch; arrays are those of JAX."""

    def of_batch(order: Any) -> Any:
        if order is None or isinstance(order, Residues):
            return order
        if isinstance(order, np.ndarray):
            return to_device(np.broadcast_to(order, (*batch, *order.shape)))
        return jnp.broadcast_to(order, (*batch, *order.shape))

    return tuple(map(of_batch, orders))


def positions_of(order: Any, size: int) -> Any:
    """The position at each place, of NumPy unless the order is traced."""
    if isinstance(order, Residues):
        return order.positions(np, np.arange(size, dtype=np.int32), size)
    return np.arange(size, dtype=np.int32) if order is None else order


def places_of(order: Any, positions: Any, size: int) -> Any:
    """The places of positions in an order, of NumPy if both are."""
    if order is None:
        return positions
    if isinstance(order, Residues):
        on_host = isinstance(positions, np.ndarray)
        return order.places(np if on_host else jnp, positions, size)
    return inverse(order)[positions]


def inverse(order: Any) -> Any:
    """The place of each position in an order ``(size,)``."""
    size = order.shape[0]
    if isinstance(order, np.ndarray):
        places = np.empty(size, np.int32)
        places[order] = np.arange(size, dtype=np.int32)
        return places
    every = jnp.arange(size, dtype=jnp.int32)
    return jnp.zeros_like(every).at[order].set(every, unique_indices=True, mode="drop")


def ordered(order: Any, x: jax.Array, axis: int) -> jax.Array:
    """An array in an order along an axis. An order is one ``(size,)``, or None."""
    if order is None:
        return x
    if isinstance(order, Residues):
        return _by_residues(x, axis, order.stride)
    return _taken(x, order, axis)


def restored(order: Any, x: jax.Array, axis: int) -> jax.Array:
    """The array whose `ordered` one is this."""
    if order is None:
        return x
    if isinstance(order, Residues):
        return _from_residues(x, axis, order.stride)
    return _taken(x, inverse(order), axis)


def _taken(x: jax.Array, order: jax.Array, axis: int) -> jax.Array:
    taken: jax.Array = jnp.take(x, order, axis=axis, unique_indices=True, mode="clip")
    return taken


def _by_residues(x: jax.Array, axis: int, stride: int) -> jax.Array:
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    count, longer = divmod(x.shape[axis], stride)
    whole, rest = jnp.split(x, [count * stride], axis=axis)
    turns = jnp.swapaxes(whole.reshape(*before, count, stride, *after), axis, axis + 1)
    if not longer:
        return turns.reshape(x.shape)
    ended, others = jnp.split(turns, [longer], axis=axis)
    ended = jnp.concatenate([ended, jnp.expand_dims(rest, axis + 1)], axis=axis + 1)
    sizes = longer * (count + 1), (stride - longer) * count
    parts = (
        part.reshape(*before, size, *after)
        for part, size in zip((ended, others), sizes, strict=True)
    )
    return jnp.concatenate([*parts], axis=axis)


def _from_residues(x: jax.Array, axis: int, stride: int) -> jax.Array:
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    count, longer = divmod(x.shape[axis], stride)
    if not longer:
        turns = x.reshape(*before, stride, count, *after)
        return jnp.swapaxes(turns, axis, axis + 1).reshape(x.shape)
    ended, others = jnp.split(x, [longer * (count + 1)], axis=axis)
    ended = ended.reshape(*before, longer, count + 1, *after)
    ended, rest = jnp.split(ended, [count], axis=axis + 1)
    others = others.reshape(*before, stride - longer, count, *after)
    turns = jnp.concatenate([ended, others], axis=axis)
    whole = jnp.swapaxes(turns, axis, axis + 1).reshape(*before, count * stride, *after)
    return jnp.concatenate([whole, rest.reshape(*before, longer, *after)], axis=axis)
