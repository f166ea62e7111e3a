"""What `dynamic.scan` and `dynamic.loss` are given, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse.csr import CSR
from jaxsparse.dynamic.cells import Cell
from jaxsparse.dynamic.script import Script
from jaxsparse.dynamic.step import KindOfCell
from jaxsparse.ops.arguments import as_array, check_floating
from jaxsparse.precision import promoted
from jaxsparse.recurrent.arguments import as_array_of_rank, as_vector, as_weights, carry_leaves


class Kind(NamedTuple):
    """One kind of rows: its cell, and what it multiplies and adds."""

    cell: Cell
    weights: Any  # (K h, P h); None where P is 0
    bias: Any  # (P h,) or None
    products: int


class Arguments(NamedTuple):
    """The checked operands of a scan."""

    kinds: list[Kind]
    carry: list[Any]  # (F, h) each
    tree: Any
    xs: Any  # (inputs, G h) or None
    gates: int
    h: int
    dtype: Any  # of states

    @property
    def of_cells(self) -> tuple[KindOfCell, ...]:
        """What the step is made of."""
        return tuple(
            KindOfCell(k.cell, self.gates, k.products, k.bias is not None) for k in self.kinds
        )


def checked_arguments(
    operation: str, cell: Any, weights: Any, carry: Any, script: Any, xs: Any, bias: Any
) -> Arguments:
    """The operands, or TypeError or ValueError."""
    form = check_script(operation, script).form
    cells, every_weights, biases = _of_kinds(operation, cell, weights, bias, form.kinds)
    leaves, tree = carry_leaves(
        operation, "carry", carry, _carry_shape(carry, form.leaves), "(leaves, h)"
    )
    h = leaves[0].shape[1]
    if h == 0:
        raise ValueError(f"{operation}: the leaves of carry must have units, got {leaves[0].shape}")
    taken = [c.children for c in cells]
    if max(taken) != form.slots:
        raise ValueError(
            f"{operation}: the cell takes {max(taken)} children, the script's rows have "
            f"{form.slots} slots: they must be equal, by dynamic.cell(children={form.slots}) or "
            f"dynamic.Layout(slots={max(taken)})"
        )
    kinds = []
    for i, (c, w, b) in enumerate(zip(cells, every_weights, biases, strict=True)):
        of = f"[{i}]" if len(cells) > 1 else ""
        w, products = (None, 0) if w is None else _weights(operation, f"weights{of}", w, c, h)
        if b is not None and products == 0:
            raise ValueError(f"{operation}: bias{of} is given, but there are no products for it")
        b = None if b is None else as_vector(operation, f"bias{of}", b, products * h)
        kinds.append(Kind(c, w, b, products))
    dtype, gates = leaves[-1].dtype, 0
    if xs is not None:
        xs = as_array_of_rank(operation, "xs", xs, 2)
        check_floating(operation, xs=xs)
        if form.inputs == 0:
            raise ValueError(f"{operation}: xs are given, but no row of the script has inputs")
        if xs.shape[0] != form.inputs or xs.shape[1] == 0 or xs.shape[1] % h:
            raise ValueError(
                f"{operation}: xs must be (inputs, gates * h) with {form.inputs} inputs and "
                f"h = {h}, got shape {xs.shape}"
            )
        dtype, gates = xs.dtype, xs.shape[1] // h
    return Arguments(kinds, leaves, tree, xs, gates, h, dtype)


def check_script(operation: str, script: Any) -> Script:
    """A script, one and of its form's size, or TypeError or ValueError."""
    if not isinstance(script, Script):
        raise TypeError(
            f"{operation}: script must be a dynamic.Script, got {type(script).__name__}: "
            "dynamic.pack makes one of graphs"
        )
    words = as_array(operation, "script", script.words, 1)
    if words.ndim != 1:
        raise ValueError(
            f"{operation}: needs one script, got a batch {words.shape[:-1]}: use jax.vmap"
        )
    if words.dtype != jnp.int32 or words.shape != (script.form.words,):
        raise ValueError(
            f"{operation}: the script must have {script.form.words} words of int32, got "
            f"{words.dtype} of shape {words.shape}"
        )
    return script


def _carry_shape(carry: Any, leaves: int) -> tuple[int, int]:
    """The shape that all leaves of the carry must have: that of its state, the last one."""
    arrays = jax.tree.leaves(carry)
    shape: tuple[int, ...] = getattr(arrays[-1], "shape", ()) if arrays else ()
    return leaves, shape[-1] if len(shape) == 2 else 0


def _of_kinds(
    operation: str, cell: Any, weights: Any, bias: Any, kinds: int
) -> tuple[list[Any], ...]:
    """Cells, weights and biases, one for each kind of rows."""
    if not isinstance(cell, tuple | list):
        given: list[list[Any]] = [[cell], [weights], [bias]]
    else:
        given = [list(cell)]
        for name, x in ("weights", weights), ("bias", [None] * len(cell) if bias is None else bias):
            if not isinstance(x, tuple | list) or len(x) != len(cell):
                got = f"{len(x)}" if isinstance(x, tuple | list) else type(x).__name__
                raise ValueError(
                    f"{operation}: of {len(cell)} cells, {name} must be a tuple of as many, "
                    f"got {got}"
                )
            given.append(list(x))
    for c in given[0]:
        if not isinstance(c, Cell):
            raise TypeError(
                f"{operation}: cell must be made by dynamic.cell or dynamic.chain, got "
                f"{type(c).__name__}"
            )
    if len(given[0]) != kinds:
        raise ValueError(
            f"{operation}: the script has {kinds} kinds of rows, got {len(given[0])} cells"
        )
    return tuple(given)


def _weights(operation: str, name: str, weights: Any, cell: Cell, h: int) -> tuple[Any, int]:
    """Weights (K h, P h), and P."""
    expected = (
        f"(K h, P h), K = {cell.children} and h = {h}, or a CSR matrix (P h, K h), or None for a "
        "cell without products"
    )
    if isinstance(weights, CSR):
        dense = jnp.swapaxes(as_weights(operation, name, weights).todense(), 0, 1)
    else:
        dense = as_array_of_rank(operation, name, weights, 2)
    check_floating(operation, weights=dense)
    rows, columns = dense.shape
    if rows != cell.children * h or columns == 0 or columns % h:
        raise ValueError(f"{operation}: {name} must be {expected}, got shape {weights.shape}")
    return dense, columns // h


def stacked_weights(kinds: Sequence[Kind], slots: int, h: int, dtype: Any) -> Any:
    """The weights of all kinds: (kinds, K h, P h), zeros where a kind has fewer rows or columns.

    They are of ``dtype`` if none has any.
    """
    dtypes = [k.weights.dtype for k in kinds if k.weights is not None]
    dtype = promoted(*dtypes) if dtypes else dtype
    products = max(k.products for k in kinds)

    def padded(w: Any) -> Any:
        w = jnp.zeros((0, 0), dtype) if w is None else w
        rows, columns = w.shape
        return jnp.pad(w.astype(dtype), [(0, slots * h - rows), (0, products * h - columns)])

    return jnp.stack([padded(k.weights) for k in kinds])
