"""Cells of dynamic networks: one jnp function for all rows of a kind.

A cell is a function ``(x, r, children) -> carry`` of the pre-activations of a row's own inputs
``x`` and its products ``r`` (one array for each gate, in tuples; ``x`` is empty where rows have no
inputs) and the carries of its K children, zeros where there is none. A carry is a pytree of arrays
whose last leaf is the state that the products of parents take. The cell is pointwise: every array
has the same shape, and each element is computed from the elements at its own place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.recurrent import cells as recurrent_cells
from jaxsparse.recurrent.arguments import check_cell

Function = Callable[[Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell, and of how many children it takes the carries; `cell` and `chain` make them.

    Equal ones, of the same function, are compiled once.

    >>> tree_lstm(2).children
    2
    """

    function: Function
    children: int

    @property
    def __name__(self) -> str:
        return recurrent_cells.name_of(self.function)

    def __call__(self, x: Any, r: Any, children: Any) -> Any:
        return self.function(x, r, children)


def check_children(operation: str, children: Any) -> None:
    """TypeError or ValueError unless a cell can have so many children."""
    if isinstance(children, bool) or not isinstance(children, int):
        raise TypeError(f"{operation}: children must be an integer, got {children!r}")
    if children < 1:
        raise ValueError(f"{operation}: children must be at least 1, got {children}")


def cell(*, children: int) -> Callable[[Function], Cell]:
    """Makes a cell of a pointwise function ``(x, r, children) -> carry``.

    Args:
        children: K, how many children a row has at most; the function takes a tuple of as many
            carries.

    Raises:
        TypeError: if ``children`` is no integer, or what is decorated is no (hashable) function.
        ValueError: if ``children`` is not positive.

    >>> import jax.numpy as jnp
    >>> @cell(children=2)
    ... def average(x, r, children):
    ...     (product,) = r
    ...     left, right = children
    ...     return jnp.tanh(product) + (left + right) / 2
    >>> average((), (jnp.zeros(3),), (jnp.ones(3), jnp.zeros(3)))
    Array([0.5, 0.5, 0.5], dtype=float32)
    """
    check_children("dynamic.cell", children)

    def decorate(function: Function) -> Cell:
        check_cell("dynamic.cell", function)
        return Cell(function, children)

    return decorate


def chain(cell: recurrent_cells.Cell) -> Cell:
    """A recurrent cell as one of rows that follow one another: each has one child, the row before.

    What the cell outputs beside its carry is left out: its state is what the last leaf of the
    carry is.

    Args:
        cell: ``(x, r, carry) -> (carry, y)``: `recurrent.LSTM`, ``recurrent.elman()`` or your own.

    Raises:
        TypeError: if it is no (hashable) function.

    >>> from jaxsparse import recurrent
    >>> chain(recurrent.LSTM).children
    1
    >>> chain(recurrent.LSTM) == chain(recurrent.LSTM)
    True
    """
    check_cell("dynamic.chain", cell)
    return Cell(_Chained(cell), 1)


@dataclasses.dataclass(frozen=True)
class _Chained:
    """A recurrent cell as a function of its one child."""

    cell: recurrent_cells.Cell

    @property
    def __name__(self) -> str:
        return recurrent_cells.name_of(self.cell)

    def __call__(self, x: Any, r: Any, children: Any) -> Any:
        (child,) = children
        carry, _ = self.cell(x, r, child)
        return carry


def tree_lstm(children: int) -> Cell:
    r"""Long short-term memory of trees, with a forget gate for each child; the carry is (c, h).

    .. math::
        c = \sigma(i) \tanh(u) + \sum_k \sigma(f_k)\, c_k, \quad h = \sigma(o) \tanh(c)

    of the gates i, o, u, f_1, ..., f_K, the products of the weights; x, where rows have inputs, has
    the gates i, o, u, f, of which all children share the last one.

    Args:
        children: K.

    Raises:
        TypeError: if ``children`` is no integer.
        ValueError: if it is not positive.

    Source: Tai et al. 2015, "Improved Semantic Representations From Tree-Structured Long
    Short-Term Memory Networks": the N-ary Tree-LSTM, and by weights of another form the child-sum
    one (`jaxsparse.nn.ChildSumTreeLSTM`).

    >>> import jax.numpy as jnp
    >>> one, zero = jnp.ones(1), jnp.zeros(1)
    >>> c, h = tree_lstm(2)((), (zero,) * 5, ((one, one), (one, one)))
    >>> c
    Array([1.], dtype=float32)
    """
    check_children("dynamic.tree_lstm", children)
    return Cell(_TreeLSTM(children), children)


@dataclasses.dataclass(frozen=True)
class _TreeLSTM:
    children: int

    @property
    def __name__(self) -> str:
        return f"tree_lstm({self.children})"

    def __call__(self, x: Any, r: Any, children: Any) -> Any:
        i, o, u, *forget = r
        if x:
            x_i, x_o, x_u, x_f = x
            i, o, u, forget = i + x_i, o + x_o, u + x_u, [f + x_f for f in forget]
        c = jax.nn.sigmoid(i) * jnp.tanh(u)
        for f, (of_child, _) in zip(forget, children, strict=True):
            c = c + jax.nn.sigmoid(f) * of_child
        return c, jax.nn.sigmoid(o) * jnp.tanh(c)
