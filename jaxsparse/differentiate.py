"""Gradients with respect to sparse matrices."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxsparse.csr import CSR


def _is_csr(x: Any) -> bool:
    return isinstance(x, CSR)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **kwargs: Any,
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad` for functions of CSR matrices, at any depth of their arguments' pytrees.

    A matrix is differentiated with respect to its values; its gradient is a CSR matrix on the same
    topology. Other leaves behave as in `jax.value_and_grad`, and for matrices on static patterns
    (see `Topology`) it does all that this function does. A gradient on a dynamic pattern has leaves
    of JAX's type float0 in place of the pattern's arrays, which no optimizer can change; a jitted
    function returns it without positions: ``a.with_values(gradient.values)`` has them.

    Args:
        fun: a function with a scalar result, or a pair of it and auxiliary data if ``has_aux``.
        argnums: the positions of the arguments to differentiate.
        has_aux: whether ``fun`` returns auxiliary data too.
        **kwargs: passed on to `jax.value_and_grad`.

    Returns:
        A function of the same arguments that returns (value, gradient).

    Raises:
        TypeError: if ``fun`` is called with too few arguments by position.

    >>> import jax.numpy as jnp
    >>> a = CSR.fromdense(jnp.array([[1.0, 0.0], [2.0, 3.0]]))
    >>> value, gradient = value_and_grad(lambda a: (a @ jnp.ones(2)).sum())(a)
    >>> value, gradient.values
    (Array(6., dtype=float32), Array([1., 1., 1.], dtype=float32))
    """
    single = hasattr(argnums, "__index__")
    positions = (operator.index(argnums),) if single else tuple(map(operator.index, argnums))  # type: ignore

    @functools.wraps(fun)
    def wrapped(*args: Any, **keywords: Any) -> tuple[Any, Any]:
        if any(not -len(args) <= i < len(args) for i in positions):
            raise TypeError(
                f"grad: argnums={argnums} needs arguments that are passed by position, got "
                f"{len(args)} of them" + (f" and {', '.join(keywords)} by name" if keywords else "")
            )
        chosen = tuple(args[i] for i in positions)
        leaves, treedef = jax.tree.flatten(chosen, is_leaf=_is_csr)
        values = [x.values if _is_csr(x) else x for x in leaves]

        def rebuild(values: Sequence[Any], *, derivative: bool = False) -> Any:
            return jax.tree.unflatten(
                treedef,
                [
                    CSR(v, x.topology.as_tangent() if derivative else x.topology)
                    if _is_csr(x)
                    else v
                    for v, x in zip(values, leaves, strict=True)
                ],
            )

        def of_values(values: Sequence[Any]) -> Any:
            full = list(args)
            for i, argument in zip(positions, rebuild(values), strict=True):
                full[i] = argument
            return fun(*full, **keywords)

        value, gradients = jax.value_and_grad(of_values, has_aux=has_aux, **kwargs)(values)
        gradient = rebuild(gradients, derivative=True)
        return value, gradient[0] if single else gradient

    return wrapped


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **kwargs: Any,
) -> Callable[..., Any]:
    """`jax.grad` for functions of CSR matrices; see `value_and_grad`.

    >>> import jax.numpy as jnp
    >>> a = CSR.fromdense(jnp.array([[1.0, 0.0], [2.0, 3.0]]))
    >>> grad(lambda a: (a @ jnp.ones(2)).sum())(a).todense()
    Array([[1., 0.],
           [1., 1.]], dtype=float32)
    """
    both = value_and_grad(fun, argnums, has_aux, **kwargs)

    @functools.wraps(fun)
    def wrapped(*args: Any, **keywords: Any) -> Any:
        value, gradient = both(*args, **keywords)
        return (gradient, value[1]) if has_aux else gradient

    return wrapped
