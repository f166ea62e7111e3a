"""The stride by whose remainders rows and columns are regrouped, where a user names none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxsparse.block_mask.from_mask import most_of
from jaxsparse.block_mask.orders import Residues, reordered
from jaxsparse.block_mask.words import TILE
from jaxsparse.integers import integer
from jaxsparse.masks.expression import Mask

Orders = tuple[Any, Any]


def check_orders(
    operation: str,
    regroup: Any,
    orders: Orders,
    shape: tuple[int, int],
    find: Callable[[], int],
) -> Orders:
    """The orders of rows and columns that options ask for; those given are arrays.

    Args:
        operation: to begin messages with.
        regroup: a stride, True for the one that ``find`` returns, None or False.
        orders: the options ``row_order`` and ``column_order``.
        shape: of the mask.
        find: called for a stride; 1 leaves rows and columns as they are.

    Raises:
        TypeError, ValueError: for a stride and orders at once, and orders that are none.
    """
    given = any(order is not None for order in orders)
    if regroup is None or regroup is False:
        rows, columns = (
            _check_order(operation, name, order, size)
            for name, order, size in zip(("row_order", "column_order"), orders, shape, strict=True)
        )
        return rows, columns
    if given:
        raise ValueError(
            f"{operation}: regroup={regroup} sets the order of rows and columns: leave it out, or "
            "row_order and column_order"
        )
    stride = find() if regroup is True else integer(operation, "regroup", regroup, 1)
    return (Residues(stride), Residues(stride)) if stride > 1 else (None, None)


def _check_order(operation: str, name: str, order: Any, size: int) -> Any:
    """An order given by a user: `Residues`, or int32, a traced array of JAX or one of NumPy."""
    if order is None or isinstance(order, Residues):
        return order
    traced = isinstance(order, jax.core.Tracer)
    array: Any = order if traced else np.asarray(order)
    if not np.issubdtype(array.dtype, np.integer) or array.shape != (size,):
        raise ValueError(
            f"{operation}: {name} must be integers ({size},), a permutation of the positions, got "
            f"{array.dtype} {array.shape}"
        )
    if not traced and not np.array_equal(np.sort(array), np.arange(size)):
        raise ValueError(f"{operation}: {name} must have each of the {size} positions once")
    return array.astype(np.int32)


def stride_of_mask(mask: Mask, shape: tuple[int, int]) -> int:
    """That with the fewest tiles that may be stored: one which the mask has, or a power of 2."""

    def tiles(stride: int) -> int:
        orders = Residues(stride), Residues(stride)
        return most_of(reordered(mask, *orders, shape) if stride > 1 else mask, shape)[0]

    return _best(mask._strides() or _powers(shape), tiles)


def stride_of_dense(mask: Any) -> int:
    """That with the fewest tiles of all arrays ``(..., T, S)`` of bool.

    Raises:
        ValueError: if the array is traced.
    """
    if isinstance(mask, jax.core.Tracer):
        raise ValueError(
            "BlockMask.from_dense: regroup=True needs a concrete array: give the stride"
        )
    shape = mask.shape[-2:]
    entries = [np.nonzero(one) for one in np.asarray(mask).reshape(-1, *shape)]
    rows, columns = ([one[axis] for one in entries] for axis in (0, 1))
    return stride_of_entries(rows, columns, shape)


def stride_of_entries(
    rows: Sequence[npt.NDArray[Any]], columns: Sequence[npt.NDArray[Any]], shape: tuple[int, int]
) -> int:
    """That with the fewest tiles of all patterns, by their entries in the order of rows.

    It is a power of 2, or the greatest of which all neighbours in a row are multiples apart.
    """
    across = -(-shape[1] // TILE)

    def tiles(stride: int) -> int:
        order, total = Residues(stride), 0
        for entries in zip(rows, columns, strict=True):
            down, along = (
                order.places(np, x.astype(np.int64), size) // TILE
                for x, size in zip(entries, shape, strict=True)
            )
            total += np.unique(down * across + along).size
        return total

    distances = [np.diff(y)[np.diff(x) == 0] for x, y in zip(rows, columns, strict=True)]
    common = int(np.gcd.reduce(np.concatenate(distances))) if distances else 1
    return _best({*_powers(shape), max(common, 1)}, tiles)


def _powers(shape: tuple[int, int]) -> list[int]:
    return [1 << k for k in range(1, (min(shape) // 2).bit_length())]


def _best(strides: Iterable[int], tiles: Callable[[int], int]) -> int:
    counts = {stride: tiles(stride) for stride in {1, *strides}}
    return min(counts, key=lambda stride: (counts[stride], stride))
