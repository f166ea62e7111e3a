"""Whether the cells of a scan over graphs are pointwise, and can run in a kernel."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.codegen.check import check_pointwise
from jaxsparse.codegen.flatten import uses
from jaxsparse.dynamic.step import CellStep, KindOfCell
from jaxsparse.recurrent.cell_checks import check_mixes_nothing

_POINTWISE = (
    "A cell is pointwise: it is traced with scalars, and later called with arrays of one shape; "
    "each element of what it returns is computed from the elements at its own place. What mixes "
    "units (a product, a mean, a normalisation) can be done before the scan, to xs"
)


@functools.lru_cache(maxsize=1024)
def checked_step(
    operation: str,
    kinds: tuple[KindOfCell, ...],
    children: int,
    tree: Any,
    wide: tuple[bool, ...],
) -> CellStep:
    """The step of cells that can run in a kernel, or TypeError or ValueError.

    Args:
        operation: what errors name.
        kinds: the cells.
        children: how many of these a row has at most.
        tree: the structure of the carry.
        wide: which leaves of it are wider than states.
    """
    read: set[int] = set()
    for kind in dict.fromkeys(kinds):
        read.update(_read_by(operation, kind, tree))
    if not read and not any(kind.products or kind.gates for kind in kinds):
        read.add(tree.num_leaves - 1)  # of what has no arguments there is no shape
    return CellStep(kinds, children, tree, tuple(sorted(read)), wide)


def _read_by(operation: str, kind: KindOfCell, tree: Any) -> set[int]:
    """Which leaves of its children's carries a cell reads, if it is one."""
    name = f"{operation}: the cell {kind.cell.__name__}"
    try:
        _check_scalars(name, kind, tree)
        leaves = tree.num_leaves
        step = CellStep((kind,), kind.cell.children, tree, tuple(range(leaves)), (False,) * leaves)
        check_pointwise(step.jaxpr, operation)
        check_mixes_nothing(name, kind.cell, functools.partial(_arguments, kind, tree))
    except (TypeError, ValueError) as error:
        cause = TypeError if isinstance(error, TypeError) else ValueError
        raise cause(f"{error}. {_POINTWISE}") from error.__cause__
    first = step.products
    of_children = uses(step.jaxpr)[first : first + step.carries_taken]
    return {i % leaves for i, used in enumerate(of_children) if used}


def _arguments(kind: KindOfCell, tree: Any, shape: tuple[int, ...]) -> Any:
    """What a cell is called with, of one shape."""
    array = jax.ShapeDtypeStruct(shape, jnp.float32)
    carry = jax.tree.unflatten(tree, [array] * tree.num_leaves)
    return (array,) * kind.gates, (array,) * kind.products, (carry,) * kind.cell.children


def _check_scalars(name: str, kind: KindOfCell, tree: Any) -> None:
    """Raises TypeError or ValueError unless a cell can be called with scalars."""
    try:
        carry = jax.eval_shape(kind.cell, *_arguments(kind, tree, ()))
    except Exception as error:
        x = f"{kind.gates} gates of x" if kind.gates else "no x (there are no xs)"
        raise ValueError(
            f"{name} fails with {x}, {kind.products} products (of weights (K h, P h)), and "
            f"{kind.cell.children} children's carries {tree}: {error}"
        ) from error
    if jax.tree.structure(carry) != tree:
        raise TypeError(
            f"{name} must return a carry like those it takes, {tree}, got "
            f"{jax.tree.structure(carry)}"
        )
    for x in jax.tree.leaves(carry):
        if x.shape != () or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} must be pointwise: of scalars it made {x}")
