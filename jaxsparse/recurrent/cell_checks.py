"""Whether a cell is pointwise, and can run in a kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxsparse.codegen.check import check_pointwise
from jaxsparse.recurrent.cells import Cell, name_of
from jaxsparse.recurrent.step import CellStep

_POINTWISE = (
    "A cell is pointwise: it is traced with scalars, and later called with arrays of one shape; "
    "each element of what it returns is computed from the elements at its own place. What mixes "
    "units (a product, a mean, a normalisation) can be done before the scan, to xs, or in a "
    "jax.lax.scan; arrays that a cell learns are its parameters="
)


@functools.lru_cache(maxsize=1024)
def checked_step(
    operation: str,
    cell: Cell,
    gates: tuple[int, int],
    tree: Any,
    parameters: Any,
    biased: bool,
    masked: bool,
    wide_carries: tuple[bool, ...],
) -> CellStep:
    """The step of a cell that can run in a kernel, or TypeError or ValueError.

    Args:
        operation: what errors name.
        cell: the cell.
        gates: those of x and of r.
        tree: the structure of the carry.
        parameters: that of the parameters, or None.
        biased: whether there is a recurrent bias.
        masked: whether rows have lengths.
        wide_carries: as of a step.
    """
    name = f"{operation}: the cell {name_of(cell)}"
    try:
        has_y = _check_scalars(name, cell, gates, tree, parameters)
        step = CellStep(cell, *gates, tree, parameters, biased, masked, has_y, wide_carries)
        check_pointwise(step.jaxpr, operation)
        check_mixes_nothing(name, cell, functools.partial(_arguments, gates, tree, parameters))
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{error}. {_POINTWISE}") from error.__cause__
    return step


def _arguments(gates: tuple[int, int], tree: Any, parameters: Any, shape: tuple[int, ...]) -> Any:
    """What a cell is called with, of one shape."""
    array = jax.ShapeDtypeStruct(shape, jnp.float32)
    trees = [tree] if parameters is None else [tree, parameters]
    return [
        *((array,) * count for count in gates),
        *(jax.tree.unflatten(t, [array] * t.num_leaves) for t in trees),
    ]


def _check_scalars(
    name: str, cell: Cell, gates: tuple[int, int], tree: Any, parameters: Any
) -> bool:
    """Raises TypeError or ValueError unless a cell can be called with scalars; whether it has y."""
    of_x, of_r = gates
    try:
        results = jax.eval_shape(cell, *_arguments(gates, tree, parameters, ()))
    except Exception as error:
        count = f"{of_x} gates" if of_x == of_r else f"{of_x} gates of x and {of_r} of r"
        own = "" if parameters is None else f", parameters {parameters}"
        raise ValueError(
            f"{name} fails with {count} (the last dimension of xs over h) and a carry "
            f"{tree}{own}: {error}"
        ) from error
    if not isinstance(results, tuple) or len(results) != 2:
        raise TypeError(f"{name} must return (carry, y), got {type(results).__name__}")
    if jax.tree.structure(results[0]) != tree:
        raise TypeError(
            f"{name} must return a carry like the one it takes, {tree}, "
            f"got {jax.tree.structure(results[0])}"
        )
    has_y = results[1] is not None
    if has_y and not jax.tree_util.treedef_is_leaf(jax.tree.structure(results[1])):
        raise TypeError(
            f"{name} must return one array as y, or None, got {jax.tree.structure(results[1])}"
        )
    for x in jax.tree.leaves(results):
        if x.shape != () or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} must be pointwise: of scalars it made {x}")
    return has_y


def check_mixes_nothing(name: str, cell: Any, arguments: Callable[[tuple[int, ...]], Any]) -> None:
    """Raises ValueError for a cell that does more to arrays than to each of their elements.

    Of a scalar alone a mean, say, can't be told from what it is taken of.

    Args:
        name: what errors call the cell.
        cell: a function.
        arguments: what it is called with, of a shape.
    """
    shape = (2, 3)
    try:
        jaxpr = jax.make_jaxpr(cell)(*arguments(shape))
    except Exception as error:
        raise ValueError(
            f"{name} must be pointwise: it takes scalars, but with arrays it fails: {error}"
        ) from error

    def check(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            inner = [p for p in equation.params.values() if isinstance(p, ClosedJaxpr | Jaxpr)]
            for p in inner:
                check(p.jaxpr if isinstance(p, ClosedJaxpr) else p)
            taken, made = ({v.aval.shape for v in vs} for vs in (equation.invars, equation.outvars))
            if not inner and shape in taken and made != {shape}:
                raise ValueError(
                    f"{name} must be pointwise, but it uses {equation.primitive.name!r}, which "
                    "mixes the elements of an array"
                )

    check(jaxpr.jaxpr)
