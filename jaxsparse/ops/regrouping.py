"""Operands of attention in the orders of a mask's rows and columns, and results put back.

Functions of scores get positions of an axis with an order as an operand of its own, in this order:
a kernel knows places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.block_mask import BlockMask
from jaxsparse.block_mask.orders import Residues, inverse, ordered, restored
from jaxsparse.ops.attention_masks import OPERATION
from jaxsparse.ops.score_functions import AXES, ScoreFunction

# Of a mask over heads: sequences, groups of heads, heads of a group.
_BATCH = ("b", "g", "r")
_QUERY, _KEY, _LSE = "b t g r h", "b t g h", "b g r t"


def regrouped(
    mask: BlockMask, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A query (B, T, K, N / K, H), keys and values (B, S, K, H) in the orders of a mask over heads.

    Raises:
        ValueError: if heads of one key head have orders of columns of their own.
    """
    order = _of_batch(mask.column_order, len(mask.batch_shape))
    if order is not None and not isinstance(order, Residues) and order.shape[2] > 1:
        raise ValueError(
            f"{OPERATION}: masks of {order.shape[2]} heads with one key head must have the same "
            f"column_order, or a key head each, got {order.shape[1]} key heads"
        )
    rows = _of_batch(mask.row_order, len(mask.batch_shape))
    key, value = (_ordered(order, x, _KEY) for x in (key, value))
    return _ordered(rows, query, _QUERY), key, value


def restored_results(
    mask: BlockMask, out: jax.Array, lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Results (B, T, K, N / K, E) and (B, K, N / K, T) where their queries were."""
    order = _of_batch(mask.row_order, len(mask.batch_shape))
    if order is None or isinstance(order, Residues) or math.prod(order.shape[:3]) == 1:
        one = order if order is None or isinstance(order, Residues) else order.reshape(-1)
        return restored(one, out, 1), restored(one, lse, lse.ndim - 1)
    back = jnp.vectorize(inverse, signature="(t)->(t)")(order)
    return _taken(back, out, _QUERY), _taken(back, lse, _LSE)


def regrouped_scores(
    mask: BlockMask,
    function: ScoreFunction,
    axes: Sequence[str],
    values: Sequence[jax.Array],
    offsets: jax.Array | None,
    heads: tuple[int, int],
) -> tuple[ScoreFunction, tuple[str, ...], list[jax.Array]]:
    """A function of scores and what it reads in the orders of a mask over heads (K, N / K).

    Operands are (B or 1, K or 1, N / K or 1, ...), offsets (B or 1, 2).

    Raises:
        ValueError: if it reads an operand by distances.
    """
    if any("d" in each for each in axes):
        raise ValueError(
            f"{OPERATION}: a regrouped mask goes without operands by distances, of which its "
            "orders have no places: compute what they say of row and column in score"
        )
    rank = len(mask.batch_shape)
    orders = {"t": _of_batch(mask.row_order, rank), "s": _of_batch(mask.column_order, rank)}
    named = list(zip(axes, values, strict=True))
    row, column = function.reads_positions
    given = (row and orders["t"] is not None, column and orders["s"] is not None)
    for i, (axis, is_given) in enumerate(zip("ts", given, strict=True)):
        if is_given:
            every = jnp.arange(mask.shape[i], dtype=jnp.int32).reshape(1, 1, 1, -1)
            of_batch = axis
            if offsets is not None:
                every, of_batch = every + offsets[:, i].reshape(-1, 1, 1, 1), f"b{axis}"
            named.append((of_batch, every))
    for axis, order in orders.items():
        named = [_operand_in_order(order, axis, *each, heads) for each in named]
    return function.with_positions(given), tuple(of for of, _ in named), [x for _, x in named]


def _operand_in_order(
    order: Any, axis: str, axes: str, x: jax.Array, heads: tuple[int, int]
) -> tuple[str, jax.Array]:
    """An operand of scores in an order of one of its axes, and its axes then."""
    if order is None or axis not in axes:
        return axes, x
    at = x.ndim - 2 if axis == "t" and "s" in axes else x.ndim - 1
    if isinstance(order, Residues) or math.prod(order.shape[:3]) == 1:
        one = order if isinstance(order, Residues) else order.reshape(-1)
        return axes, ordered(one, x, at)
    b, k, r, size = order.shape
    own = {*axes, *("b" if b > 1 else ""), *("n" if k * r > 1 else "")}
    of_heads = heads if "n" in own else (1, 1)
    x = jnp.broadcast_to(x, (max(b, x.shape[0]), *of_heads, *x.shape[3:]))
    places = order.reshape(b, k, r, *(size if d == at else 1 for d in range(3, x.ndim)))
    taken = jnp.take_along_axis(x, places, axis=at, mode="clip")
    return "".join(sorted(own, key=AXES.index)), taken


def _of_batch(order: Any, rank: int) -> Any:
    """An order with as many dimensions in front as there may be, (B, K, N / K), of sizes or 1."""
    if order is None or isinstance(order, Residues):
        return order
    return order.reshape(*(1,) * (len(_BATCH) - rank), *order.shape)


def _ordered(order: Any, x: jax.Array, dims: str) -> jax.Array:
    if order is None or isinstance(order, Residues):
        return ordered(order, x, 1)
    if math.prod(order.shape[:3]) == 1:
        return ordered(order.reshape(-1), x, 1)
    return _taken(order, x, dims)


def _taken(order: jax.Array, x: jax.Array, dims: str) -> jax.Array:
    """By orders (B, K, N / K, T), each a dimension of x, or of size 1."""
    names = (*_BATCH, "t")
    sizes = dict(zip(names, order.shape, strict=True))
    present = [dim for dim in names if dim in dims]
    order = order.reshape([sizes[dim] for dim in present])
    wanted = dims.split()
    moved = order.transpose([present.index(dim) for dim in wanted if dim in present])
    places = moved.reshape([sizes.get(dim, 1) for dim in wanted])
    taken: jax.Array = jnp.take_along_axis(x, places, axis=wanted.index("t"), mode="clip")
    return taken
