"""What the public functions of scans are given, checked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.csr import CSR
from jaxsparse.ops.arguments import as_array, check_floating
from jaxsparse.recurrent.cells import Cell

_PRECISIONS = {
    None: None,
    "highest": jax.lax.Precision.HIGHEST,
    "float32": jax.lax.Precision.HIGHEST,
    "high": jax.lax.Precision.HIGH,
    "default": jax.lax.Precision.DEFAULT,
    "tensorfloat32": jax.lax.Precision.DEFAULT,
}


class Direction:
    """The checked operands of one direction."""

    def __init__(
        self,
        operation: str,
        side: str,
        cell: Cell,
        recurrent: Any,
        carry: Any,
        xs: Any,
        bias: Any,
        parameters: Any,
        resets: Any,
    ):
        check_cell(operation, cell)
        self.xs = as_array_of_rank(operation, f"{side}xs", xs, 3)
        self.length, b, width = self.xs.shape
        self.sparse = isinstance(recurrent, CSR)
        self.recurrent = as_weights(operation, f"{side}recurrent", recurrent)
        self.heads, h, rows = heads_and_sizes(self.recurrent)
        if self.heads == 1 and not self.sparse:
            self.recurrent = self.recurrent.reshape(h, rows)
        if h == 0 or rows == 0 or rows % h:
            expected = "(h, gates * h), (heads, d, gates * d), or a CSR matrix (gates * h, h)"
            if self.sparse:
                expected = "a CSR matrix (gates * h, h)"
            raise ValueError(
                f"{operation}: {side}recurrent must be {expected}, got shape "
                f"{tuple(self.recurrent.shape)}"
            )
        if width == 0 or width % h:
            raise ValueError(
                f"{operation}: the last dimension of {side}xs must be gates * h, for recurrent "
                f"weights of shape {tuple(self.recurrent.shape)} a multiple of {h}, got {width}"
            )
        self.h, self.gates, self.dtype = h, rows // h, self.xs.dtype
        self.input_gates = width // h
        self.carry, self.tree = carry_leaves(operation, f"{side}carry", carry, (b, h))
        values = self.recurrent.values if self.sparse else self.recurrent
        check_floating(operation, recurrent=values)
        check_floating(operation, xs=self.xs)
        self.bias: Any = None
        if bias is not None:
            self.bias = as_vector(operation, f"{side}recurrent_bias", bias, rows)
        self.parameters, self.parameter_tree = parameter_leaves(
            operation, f"{side}parameters", parameters, h
        )
        self.resets: Any = None
        if resets is not None:
            self.resets = as_resets(operation, f"{side}resets", resets, (self.length, b))
        self.cell = cell

    @property
    def form(self) -> Any:
        """What the two directions of one scan must share."""
        carries = [x.dtype.name for x in self.carry]
        values = self.recurrent.values if self.sparse else self.recurrent
        return (
            self.xs.shape,
            self.h,
            self.heads,
            self.gates,
            self.dtype.name,
            str(self.tree),
            carries,
            "CSR" if self.sparse else "dense",
            values.dtype.name,
            self.bias is not None,
            str(self.parameter_tree),
            self.resets is not None,
        )


def check_precision(operation: str, precision: Any) -> Any:
    """The `jax.lax.Precision` that is asked for, or None; ValueError if there is no such."""
    if isinstance(precision, jax.lax.Precision):
        return precision
    if not isinstance(precision, str | None) or precision not in _PRECISIONS:
        raise ValueError(
            f"{operation}: precision must be a jax.lax.Precision or one of {list(_PRECISIONS)}, "
            f"got {precision!r}"
        )
    return _PRECISIONS[precision]


def counted_steps(operation: str, seq_lengths: Any, length: int, b: int) -> Any:
    """Which steps count, (T, B), or None if all do."""
    if seq_lengths is None:
        return None
    lengths = as_array_of_rank(operation, "seq_lengths", seq_lengths, 1)
    if lengths.shape != (b,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"{operation}: seq_lengths must be {b} integers, got {lengths.dtype} of shape "
            f"{lengths.shape}"
        )
    # Of any width: neither may T wrap in their dtype, nor they in int32.
    longest = min(jnp.iinfo(lengths.dtype).max, jnp.iinfo(jnp.int32).max)
    lengths = jnp.clip(lengths, 0, int(longest)).astype(jnp.int32)
    return jnp.arange(length, dtype=jnp.int32)[:, None] < lengths[None]


def without_padding(x: Any, mask: Any) -> Any:
    """What a layer takes, (T, B, features), with zeros at the steps that do not count.

    Weights' gradients are sums over all steps, in which 0 times NaN would be NaN.
    """
    if mask is None:
        return x
    # The GPU compiler of jaxlib 0.11.2 fuses the choice into a product and then refuses its own
    # program: a pass that moves reshapes in fusions forgets that of the mask.
    return jax.lax.optimization_barrier(jnp.where(mask[:, :, None], x, 0))


def steps_and_resets(
    operation: str, seq_lengths: Any, resets: Any, length: int, b: int
) -> tuple[Any, Any]:
    """Which steps count, and before which the carry is reset, (T, B); None for all and for none."""
    mask = counted_steps(operation, seq_lengths, length, b)
    if resets is not None:
        resets = as_resets(operation, "resets", resets, (length, b))
        # A step that does not count resets nothing.
        resets = resets if mask is None else resets & mask
    return mask, resets


def check_cell(operation: str, cell: Any) -> None:
    """TypeError unless a cell can be one."""
    if not callable(cell):
        raise TypeError(f"{operation}: cell must be a function, got {type(cell).__name__}")
    try:
        hash(cell)
    except TypeError:
        raise TypeError(
            f"{operation}: cell must be hashable, {type(cell).__name__} is not"
        ) from None


def as_weights(operation: str, name: str, weights: Any) -> Any:
    """A matrix, (heads, k, m) of a block-diagonal one, or a CSR matrix."""
    if not isinstance(weights, CSR):
        return as_array_of_rank(operation, name, weights, 2, 3)
    weights.topology.check_transpose(f"{operation}: {name}")
    if weights.topology.batch_shape or weights.values.ndim != 1:
        raise ValueError(
            f"{operation}: {name} must be one matrix, got values of shape "
            f"{weights.values.shape}: use jax.vmap"
        )
    return weights


def heads_and_sizes(weights: Any) -> tuple[int, int, int]:
    """How many heads weights have, and how many features they take and give."""
    if isinstance(weights, CSR):
        m, k = weights.shape
        return 1, k, m
    *heads, k, m = weights.shape
    count = heads[0] if heads else 1
    return count, count * k, count * m


def carry_leaves(
    operation: str, name: str, carry: Any, shape: tuple[int, int], sizes: str = "(B, h)"
) -> tuple[list[jax.Array], Any]:
    """The leaves of a carry, of a shape whose sizes errors call so, and their tree."""
    leaves, tree = jax.tree.flatten(carry)
    if not leaves:
        raise ValueError(f"{operation}: {name} must have a leaf: the state, its last one")
    arrays = [as_array_of_rank(operation, name, x, 2) for x in leaves]
    for i, x in enumerate(arrays):
        if x.shape != shape:
            raise ValueError(
                f"{operation}: the leaves of {name} must have shape {sizes} = {shape}, "
                f"got {x.shape}"
            )
        check_floating(operation, **{f"carry {i}": x})
    return arrays, tree


def as_vector(operation: str, name: str, x: Any, size: int) -> jax.Array:
    """An array of one dimension and a size."""
    vector = as_array_of_rank(operation, name, x, 1)
    check_floating(operation, **{name: vector})
    if vector.shape != (size,):
        raise ValueError(f"{operation}: {name} must have shape {(size,)}, got {vector.shape}")
    return vector


def parameter_leaves(
    operation: str, name: str, parameters: Any, h: int
) -> tuple[list[jax.Array], Any]:
    """The leaves of a cell's parameters, of shape (h,), and their tree."""
    leaves, tree = jax.tree.flatten(parameters)
    arrays = [as_array_of_rank(operation, name, x, 1) for x in leaves]
    for x in arrays:
        check_floating(operation, parameters=x)
        if x.shape != (h,):
            raise ValueError(
                f"{operation}: the leaves of {name} must have shape (h,) = {(h,)}, got {x.shape}"
            )
    return arrays, tree


def as_resets(operation: str, name: str, resets: Any, shape: tuple[int, int]) -> jax.Array:
    """Booleans (T, B): before which steps the carry is zero."""
    array = as_array_of_rank(operation, name, resets, 2)
    if array.dtype != jnp.bool_ or array.shape != shape:
        raise ValueError(
            f"{operation}: {name} must be booleans of shape (T, B) = {shape}, got {array.dtype} of "
            f"shape {array.shape}"
        )
    return array


def as_array_of_rank(operation: str, name: str, x: Any, *ranks: int) -> jax.Array:
    array = as_array(operation, name, x, ranks[0])
    if array.ndim not in ranks:
        raise ValueError(
            f"{operation}: {name} must have {' or '.join(map(str, ranks))} dimensions, got shape "
            f"{array.shape}: use jax.vmap"
        )
    return array
