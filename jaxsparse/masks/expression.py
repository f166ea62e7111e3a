"""Masks as expressions: how they are evaluated, combined, compared and printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import ArrayLike

from jaxsparse.masks.arguments import Table, traced_or_integer
from jaxsparse.masks.function_intervals import divisors_of_function, truth_of_function
from jaxsparse.masks.intervals import Interval, Module, Truth

_CALL, _NOT, _AND, _OR = 3, 2, 1, 0  # How tightly the parts of an expression bind, as in Python.

MaskFunction = Callable[[Any, Any], Any]
MaskClass = TypeVar("MaskClass", bound="type[Mask]")


class Diagonals(NamedTuple):
    """Neighbouring diagonals: ``-right <= rows - columns <= left``; None for no bound."""

    left: int | None
    right: int | None

    def __and__(self, other: Diagonals) -> Diagonals:
        bounds = ([x for x in pair if x is not None] for pair in zip(self, other, strict=True))
        return Diagonals(*(min(pair, default=None) for pair in bounds))


class Mask:
    """An immutable predicate ``mask(rows, columns) -> bool array``, made by the functions below.

    ``rows`` and ``columns`` are integers in [0, 2**31), of shapes that broadcast as in a NumPy
    ufunc. The result is a JAX array if either is one, traced or not, or if the mask depends on
    traced arrays; else it is a NumPy array, and no JAX backend is started.

    The expression that made a mask is its ``repr``, by which masks compare equal and hash: a mask
    can be a static argument of :func:`jax.jit`. It can be pickled, too, if the functions in it can.
    A mask of traced arrays (see :func:`documents`) is a pytree of them: it can be used in the
    program that made it and passed through transformations, but not be hashed.

    ``&`` and ``|`` take a function for either operand, as :func:`from_function` does.

    Raises:
      TypeError: if ``rows`` or ``columns`` are not integers; when hashed, for traced arrays.

    >>> from jaxsparse.masks import band, causal
    >>> mask = band(2) & causal()
    >>> mask
    band(2) & causal()
    >>> mask(np.arange(3)[:, None], np.arange(3))
    array([[ True, False, False],
           [ True,  True, False],
           [False,  True,  True]])
    >>> (mask | (lambda rows, columns: columns < 1))(2, np.arange(3))
    array([ True,  True,  True])
    """

    # A kind of mask is a dataclass of this one. `_children` names those of its fields that hold
    # masks or arrays; an array is a Table if it is concrete, else a leaf of the pytree. The other
    # fields are parameters, which hash.
    _name: ClassVar[str]
    _children: ClassVar[tuple[str, ...]] = ()
    _binding: ClassVar[int] = _CALL

    def _stored(self, xp: Any, rows: Any, columns: Any) -> Any:
        """Bool that broadcasts to the positions, int32 arrays of the module ``xp``."""
        raise NotImplementedError

    def _truth(self, rows: Interval, columns: Interval) -> Truth:
        """Whether positions of cells may be stored, and whether all must be."""
        return rows.truth(self._stored(Module(rows.xp), rows, columns))

    @property
    def is_traced(self) -> bool:
        """Whether the mask holds traced arrays."""
        children = (getattr(self, name) for name in self._children)
        return any(
            x.is_traced if isinstance(x, Mask) else isinstance(x, jax.Array) for x in children
        )

    @property
    def is_known_by_name(self) -> bool:
        """Whether masks that are equal to it store the same positions, at any time.

        Not where it holds traced arrays, or functions, which may read what changes.
        """
        children = (getattr(self, name) for name in self._children)
        return not self.is_traced and all(
            x.is_known_by_name for x in children if isinstance(x, Mask)
        )

    @property
    def _diagonals(self) -> Diagonals | None:
        """The diagonals of which the mask stores all positions, and no others; else None."""
        return None

    def _strides(self) -> frozenset[int]:
        """The numbers by whose remainders of positions it stores some or not."""
        children = (getattr(self, name) for name in self._children)
        return frozenset().union(*(x._strides() for x in children if isinstance(x, Mask)))

    def _check_positions(self, rows: npt.NDArray[Any], columns: npt.NDArray[Any]) -> None:
        """Raises an IndexError if a table in the mask ends before a position."""
        for child in (getattr(self, name) for name in self._children):
            if isinstance(child, Mask):
                child._check_positions(rows, columns)

    def __call__(self, rows: ArrayLike, columns: ArrayLike) -> npt.NDArray[np.bool_] | jax.Array:
        positions_of_jax = isinstance(rows, jax.Array) or isinstance(columns, jax.Array)
        xp: Any = jnp if positions_of_jax or self.is_traced else np
        positions = []
        for name, operand in ("rows", rows), ("columns", columns):
            module: Any = jnp if isinstance(operand, jax.Array) else np
            array = module.asarray(operand)
            if not module.issubdtype(array.dtype, module.integer):
                raise TypeError(f"{self}: {name} must be integers, got dtype {array.dtype}")
            # Signed, so that differences are exact; narrow, as memory traffic is the cost.
            positions.append(array if array.dtype == np.int32 else array.astype(np.int32))
        shape = np.broadcast_shapes(positions[0].shape, positions[1].shape)
        # Of one rank, so that what a function returns says along which dimensions it varies.
        positions = [
            x if x.ndim == len(shape) else x.reshape((1,) * (len(shape) - x.ndim) + x.shape)
            for x in positions
        ]
        stored: npt.NDArray[np.bool_] | jax.Array = broadcast_stored(
            self, self._stored(xp, *positions), shape
        )
        return stored

    def __repr__(self) -> str:
        arguments = []
        for field, value in self._fields():
            array = isinstance(value, jax.Array)
            text = f"<{value.dtype}{list(value.shape)}>" if array else repr(value)
            if field.default is MISSING:
                arguments.append(text)
            elif array or value != field.default:
                arguments.append(f"{field.name}={text}")
        return f"{self._name}({', '.join(arguments)})"

    def _fields(self) -> list[tuple[Any, Any]]:
        return [(field, getattr(self, field.name)) for field in fields(self)]  # type: ignore

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        pairs = [(a, b) for (_, a), (_, b) in zip(self._fields(), other._fields(), strict=True)]
        return all(a is b or (not isinstance(a, jax.Array) and a == b) for a, b in pairs)

    def __hash__(self) -> int:
        if self.is_traced:
            raise TypeError(f"a mask of traced arrays can't be hashed: {self}")
        return hash((type(self), *(value for _, value in self._fields())))

    def __and__(self, other: Mask | MaskFunction) -> Mask:
        return _And(self, as_mask(other)) if callable(other) else NotImplemented

    def __rand__(self, other: MaskFunction) -> Mask:
        return _And(as_mask(other), self) if callable(other) else NotImplemented

    def __or__(self, other: Mask | MaskFunction) -> Mask:
        return _Or(self, as_mask(other)) if callable(other) else NotImplemented

    def __ror__(self, other: MaskFunction) -> Mask:
        return _Or(as_mask(other), self) if callable(other) else NotImplemented

    def __invert__(self) -> Mask:
        return _Not(self)


@dataclass_transform(frozen_default=True, eq_default=False)
def kind(cls: MaskClass) -> MaskClass:
    """Makes a kind of mask of a class: a frozen dataclass, and a pytree of its traced arrays."""
    dataclass(frozen=True, repr=False, eq=False)(cls)

    def flatten(mask: Mask) -> Any:
        children: dict[str, Any] = {}
        static: dict[str, Any] = {}
        for field, value in mask._fields():
            child = field.name in cls._children and not isinstance(value, Table)
            (children if child else static)[field.name] = value
        keys = [(jax.tree_util.GetAttrKey(name), value) for name, value in children.items()]
        return keys, (tuple(children), tuple(static.items()))

    def unflatten(parts: Any, children: Any) -> Mask:
        names, static = parts
        return cls(**dict(static), **dict(zip(names, children, strict=True)))

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls


def broadcast_stored(source: Any, stored: Any, shape: tuple[int, ...]) -> Any:
    """What a mask or mask function returned as a bool array of the shape of its positions.

    ``source`` says whose it is in an error; its repr may be long, so it is not made before.
    """
    stored = check_stored(source, stored, shape)
    if stored.shape == shape:
        return stored
    return (jnp if isinstance(stored, jax.Array) else np).broadcast_to(stored, shape)


def check_stored(source: Any, stored: Any, shape: tuple[int, ...]) -> Any:
    """The same as an array that broadcasts to that shape."""
    stored = stored if isinstance(stored, jax.Array) else np.asarray(stored)
    # A vector is refused: whether it goes along the rows or the columns, it does not say.
    fits = stored.ndim in (0, len(shape)) and all(
        size in (1, whole) for size, whole in zip(stored.shape, shape, strict=False)
    )
    if stored.dtype != np.bool_ or not fits:
        raise ValueError(
            f"{source}: mask must return bool {shape}, got {stored.dtype} {stored.shape}, "
            "where sizes of 1, and True and False alone, are broadcast"
        )
    return stored


# ---- Masks of other masks ----


@kind
class _Not(Mask):
    operand: Mask
    _children = ("operand",)
    _binding = _NOT

    def _stored(self, xp: Any, rows: Any, columns: Any) -> Any:
        return ~self.operand._stored(xp, rows, columns)

    def _truth(self, rows: Interval, columns: Interval) -> Truth:
        return ~self.operand._truth(rows, columns)

    def __repr__(self) -> str:
        return f"~{_operand(self.operand, _NOT)}"


@kind
class _And(Mask):
    left: Mask
    right: Mask
    _children = ("left", "right")
    _binding = _AND

    def _stored(self, xp: Any, rows: Any, columns: Any) -> Any:
        return self.left._stored(xp, rows, columns) & self.right._stored(xp, rows, columns)

    def _truth(self, rows: Interval, columns: Interval) -> Truth:
        return self.left._truth(rows, columns) & self.right._truth(rows, columns)

    @property
    def _diagonals(self) -> Diagonals | None:
        left, right = self.left._diagonals, self.right._diagonals
        return None if left is None or right is None else left & right

    def __repr__(self) -> str:
        return f"{_operand(self.left, _AND)} & {_operand(self.right, _AND + 1)}"


@kind
class _Or(Mask):
    left: Mask
    right: Mask
    _children = ("left", "right")
    _binding = _OR

    def _stored(self, xp: Any, rows: Any, columns: Any) -> Any:
        return self.left._stored(xp, rows, columns) | self.right._stored(xp, rows, columns)

    def _truth(self, rows: Interval, columns: Interval) -> Truth:
        return self.left._truth(rows, columns) | self.right._truth(rows, columns)

    def __repr__(self) -> str:
        return f"{_operand(self.left, _OR)} | {_operand(self.right, _OR + 1)}"


def _operand(mask: Mask, binding: int) -> str:
    return repr(mask) if mask._binding >= binding else f"({mask!r})"


@kind
class _Offset(Mask):
    operand: Mask
    rows: Table | jax.Array = Table(0)
    columns: Table | jax.Array = Table(0)
    _name = "offset"
    _children = ("operand", "rows", "columns")

    def _stored(self, xp: Any, rows: Any, columns: Any) -> Any:
        return self.operand._stored(xp, *self._shifted(rows, columns))

    def _truth(self, rows: Interval, columns: Interval) -> Truth:
        return self.operand._truth(*self._shifted(rows, columns))

    def _check_positions(self, rows: npt.NDArray[Any], columns: npt.NDArray[Any]) -> None:
        self.operand._check_positions(*self._shifted(rows, columns))

    def _shifted(self, rows: Any, columns: Any) -> tuple[Any, Any]:
        return rows + array_of(self.rows), columns + array_of(self.columns)


def offset(
    mask: Mask | MaskFunction, *, rows: int | jax.Array = 0, columns: int | jax.Array = 0
) -> Mask:
    """A mask for a part of its positions: ``mask(rows + i, columns + j)`` at (i, j).

    Of T queries and S keys, ``offset(mask, rows=S - T)`` aligns the last query with the last key
    (bottom-right, as ``torch.nn.attention.bias.causal_lower_right``): what decoding with a cache of
    keys and chunks of a long prompt need. ``causal()`` alone aligns the first ones.

    ``rows`` and ``columns`` may be traced integers.

    Raises:
      TypeError, ValueError: if they are not integers greater than -2**31 and less than 2**31, or
        ``mask`` is no mask function.

    >>> from jaxsparse.masks import causal
    >>> offset(causal(), rows=3)(0, np.arange(5))
    array([ True,  True,  True,  True, False])
    """
    if not callable(mask):
        raise TypeError(f"offset: mask must be a mask or a function, got {mask!r}")
    offsets = (
        traced_or_integer("offset", name, value, 1 - 2**31)
        for name, value in (("rows", rows), ("columns", columns))
    )
    return _Offset(as_mask(mask), *offsets)


def array_of(table: Table | jax.Array) -> Any:
    """The NumPy array of a concrete table, or the traced array."""
    return table.array if isinstance(table, Table) else table


# ---- Masks of functions ----


@kind
class _Function(Mask):
    function: MaskFunction

    @property
    def is_known_by_name(self) -> bool:
        return False

    def _stored(self, xp: Any, rows: Any, columns: Any) -> Any:
        shape = np.broadcast_shapes(rows.shape, columns.shape)
        return check_stored(self, self.function(rows, columns), shape)

    def _truth(self, rows: Interval, columns: Interval) -> Truth:
        return truth_of_function(self.function, rows, columns)

    def _strides(self) -> frozenset[int]:
        return divisors_of_function(self.function)

    def __repr__(self) -> str:
        return f"from_function({getattr(self.function, '__qualname__', repr(self.function))})"


def from_function(function: MaskFunction) -> Mask:
    """The mask of a function of rows and columns, which combines with others.

    The function takes int32 arrays that broadcast: NumPy arrays where a pattern is made on the
    host, else JAX arrays. It returns bool that broadcasts to their common shape: ``True`` and
    ``columns < 3`` are fine. It may use NumPy, jax.numpy and arrays from outside, which are
    constants of the mask, or traced. Functions compare by identity, so define one once.

    Raises:
      TypeError: if ``function`` can't be called.
      ValueError: when called, if it returns something else.

    >>> from jaxsparse.masks import band
    >>> first_keys = from_function(lambda rows, columns: columns < 2)
    >>> (band(1) | first_keys)(3, np.arange(5))
    array([ True,  True, False,  True, False])
    """
    if not callable(function):
        raise TypeError(f"from_function: function must be callable, got {function!r}")
    return as_mask(function)


def as_mask(function: Mask | MaskFunction) -> Mask:
    """A mask as it is, a function as a mask."""
    return function if isinstance(function, Mask) else _Function(function)
