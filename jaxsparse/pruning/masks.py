"""Masks of a tree of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxsparse.pruning.scores import SCORES, Score
from jaxsparse.pruning.structures import SCOPES, STRUCTURES
from jaxsparse.pruning.targets import Target, Where, targets_of

T = TypeVar("T")


def check_density(operation: str, density: Any, name: str = "density") -> None:
    """Raises a TypeError unless a density is a number, a ValueError unless it is in (0, 1].

    Of a traced one only the type is known.
    """
    array = density if hasattr(density, "dtype") else np.asarray(density)
    real = any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer))
    if not real or array.shape:
        raise TypeError(f"{operation}: {name} must be a number, got {density!r}")
    if not isinstance(density, jax.core.Tracer) and not 0 < float(density) <= 1:
        raise ValueError(f"{operation}: {name} must be in (0, 1], got {float(density)}")


def choose(operation: str, name: str, value: str, table: Mapping[str, T]) -> T:
    """The entry of a table of choices."""
    if value not in table:
        raise ValueError(f"{operation}: {name} must be one of {', '.join(table)}, got {value!r}")
    return table[value]


def make_masks(
    params: Any,
    density: Any,
    where: Where = "*",
    *,
    gradients: Any = None,
    score: str | Score = "magnitude",
    scope: str = "layer",
    structure: str = "unstructured",
    key: jax.Array | None = None,
) -> Any:
    r"""Masks of the parameters that are to be pruned: True where a weight is kept.

    Each group of N weights (``scope``) keeps
    :math:`n = \max(1, N - \mathrm{round}((1 - d) N))` of them at density d, those with the highest
    scores; NaN comes before all others, and of equal scores the earlier one in the matrix (outputs,
    inputs), row by row. Works under jit, with a traced density.

    Args:
        params: a pytree of floating-point arrays, also of Flax variables.
        density: share of the weights to keep, in (0, 1].
        where: a name, a `Target` or several: see `Target` for names and dimensions. Where two mean
            one parameter, the first counts. By default all parameters of two dimensions and more
            that are not called ``bias`` or ``scale``.
        gradients: the tree of their gradients, for scores that need it.
        score: a name in `SCORES`, or a function (weight, gradient or None, random key) -> array of
            the weight's shape.

            - ``"magnitude"``: :math:`|w|`.
            - ``"magnitude_gradient"``: :math:`|w\,g|`, how far the loss moves without the weight,
              to first order, in float32 at least. It is NaN where the weight or its gradient is,
              so such a weight is kept before all others.
            - ``"random"``: uniform random numbers.
        scope: a name in `SCOPES`: scores are compared within each ``"gate"`` of each parameter,
            each ``"layer"`` (parameter, or matrix of a stack: ``batch_dims`` of `Target`), or the
            whole ``"model"`` (all that ``where`` names).
        structure: a name in `STRUCTURES`; a row is an output unit.

            - ``"unstructured"``: the n highest scores.
            - ``"row_balanced"``: round(n / rows) in each row, halves up, at least one.
            - ``"refilled"``: the n highest scores, then rows that have fewer than the longest row
              get their next highest scores until all are as long: more weights than n, for a kernel
              that pads rows to the longest anyway.
            - ``"pairs"``: both columns 2 k and 2 k + 1 of a row or none: of P pairs the
              round(n P / N), halves up, with the highest means of two scores. `CSR.pack` stores
              pairs without zeros between. The last of an odd number of columns is a pair.
        key: random key for scores that need one; by default ``jax.random.key(0)``.

    Returns:
        The same tree with bool arrays in the place of the parameters that are pruned, and
        ``optax.MaskedNode()`` in that of all others.

    Raises:
        TypeError: for a density that is not a number.
        ValueError: for a density outside (0, 1], a name that matches nothing, gates that don't
            divide the outputs, a score, scope or structure that is not known, gradients that are
            missing, and scores of another shape than the weight or not floating.

    Source: balanced rows and refilling are from Zhu et al. 2018, "Sparse Persistent RNNs:
    Squeezing Large Recurrent Networks On-Chip", appendix B and section 6; the score
    ``"magnitude_gradient"`` is Mozer and Smolensky 1989, "Skeletonization".

    >>> params = {"kernel": jnp.array([[3.0, 1.0], [-4.0, 0.5], [2.0, 0.1]]), "bias": jnp.ones(2)}
    >>> make_masks(params, 0.5)["kernel"].astype(int)
    Array([[1, 0],
           [1, 0],
           [1, 0]], dtype=int32)
    >>> make_masks(params, 1 / 3, structure="row_balanced")["kernel"].astype(int)
    Array([[0, 1],
           [1, 0],
           [0, 0]], dtype=int32)
    """
    check_density("make_masks", density)
    function = score if callable(score) else choose("make_masks", "score", score, SCORES)
    choose("make_masks", "scope", scope, SCOPES)
    choose("make_masks", "structure", structure, STRUCTURES)
    targets = targets_of("make_masks", params, where)
    weights, treedef = jax.tree.flatten(params)
    slopes = [None] * len(weights) if gradients is None else jax.tree.leaves(gradients)
    if len(slopes) != len(weights):
        raise ValueError(
            f"make_masks: gradients must have the {len(weights)} leaves of params, "
            f"got {len(slopes)}"
        )
    key = jax.random.key(0) if key is None else key
    masks: list[Any] = [optax.MaskedNode()] * len(weights)
    chosen = {index: target for index, target in enumerate(targets) if target is not None}
    scores = {}
    for index in chosen:
        weight = weights[index]
        scores[index] = function(weight, slopes[index], jax.random.fold_in(key, index))
        got = scores[index]
        if got.shape != weight.shape or not jnp.issubdtype(got.dtype, jnp.floating):
            raise ValueError(
                f"make_masks: scores must be floating and of the shape of the weight, "
                f"{weight.shape}, got {got.dtype} {got.shape}"
            )
    for index, mask in _select(scores, chosen, density, scope, structure).items():
        masks[index] = _sharded_like(mask, weights[index])
    return jax.tree.unflatten(treedef, masks)


def _select(
    scores: Mapping[int, jax.Array],
    targets: Mapping[int, Target],
    density: Any,
    scope: str,
    structure: str,
) -> dict[int, jax.Array]:
    """Masks from scores: the groups of each parameter, their budgets, their structure."""
    matrices = {i: targets[i].matrices(_gathered(scores[i])) for i in scores}
    groups = [
        (index, gates)
        for index, target in targets.items()
        for gates in (
            [(gate,) for gate in target.pruned_gates]
            if SCOPES[scope].splits_gates
            else [target.pruned_gates]
        )
    ]
    grouped = [_rows_of(matrices[index], gates) for index, gates in groups]
    masks = {index: jnp.ones(matrix.shape, bool) for index, matrix in matrices.items()}
    budgets = SCOPES[scope].budgets(grouped, density)
    for (index, gates), group, kept in zip(groups, grouped, budgets, strict=True):
        if group.size:  # of nothing, there is nothing to rank
            mask = jax.vmap(STRUCTURES[structure])(group, kept)
            stack, _, outputs, inputs = masks[index].shape
            mask = mask.reshape(stack, len(gates), outputs, inputs)
            masks[index] = masks[index].at[:, jnp.array(gates)].set(mask)
    return {i: targets[i].parameter(mask, scores[i].shape) for i, mask in masks.items()}


def _rows_of(matrices: jax.Array, gates: tuple[int, ...]) -> jax.Array:
    """Some gates of (stack, gates, outputs, inputs), one below the other in each matrix."""
    stack, _, outputs, inputs = matrices.shape
    return matrices[:, jnp.array(gates)].reshape(stack, len(gates) * outputs, inputs)


def explicit_sharding(x: Any) -> NamedSharding | None:
    """The sharding in the type of an array, where a mesh has explicit axes."""
    sharding = jax.typeof(x).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


def _gathered(x: jax.Array) -> jax.Array:
    # Under explicit axes a ranking over sharded dimensions must be asked for.
    return x if explicit_sharding(x) is None else jax.sharding.reshard(x, P())


def _sharded_like(mask: jax.Array, weight: jax.Array) -> jax.Array:
    sharding = explicit_sharding(weight)
    if sharding is not None:
        resharded: jax.Array = jax.sharding.reshard(mask, sharding)
        return resharded
    if isinstance(weight, jax.core.Tracer):
        # The mask itself, in an operation with the weight, so that the partitioner cuts both alike.
        return mask & (mask | (weight == weight))
    if isinstance(weight, jax.Array):
        mask = jax.device_put(mask, weight.sharding)
    return mask


def apply_masks(params: T, masks: Any) -> T:
    """The parameters with 0 where a mask is False; those without a mask as they are.

    Args:
        params: a pytree of arrays, also of Flax variables.
        masks: what `make_masks` returns for it.

    >>> params = {"kernel": jnp.array([[3.0, 1.0], [-4.0, 0.5]]), "bias": jnp.ones(2)}
    >>> apply_masks(params, make_masks(params, 0.5))["kernel"]
    Array([[ 3.,  0.],
           [-4.,  0.]], dtype=float32)
    """
    masked: T = map_masked(lambda mask, x: jnp.where(mask, x, 0), lambda x: x, masks, params)
    return masked


def is_masked_node(node: Any) -> bool:
    """Whether a node stands for a parameter that is not pruned."""
    return isinstance(node, optax.MaskedNode)


def map_masked(pruned: Any, other: Any, masks: Any, tree: Any, *rest: Any) -> Any:
    """A tree of ``pruned(mask, *leaves)`` where there is a mask, and of ``other(*leaves)`` else.

    ``rest`` are trees like ``tree``, or like ``masks`` with `optax.MaskedNode` where that has it.
    """
    # A transformation further out may have put placeholders into the tree itself.
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_masked_node)
    columns = [jax.tree.leaves(x, is_leaf=is_masked_node) for x in (masks, *rest)]

    def mapped(leaf: Any, mask: Any, *others: Any) -> Any:
        if is_masked_node(leaf):
            return leaf
        return other(leaf, *others) if is_masked_node(mask) else pruned(mask, leaf, *others)

    nodes = [mapped(*parts) for parts in zip(leaves, *columns, strict=True)]
    return jax.tree.unflatten(treedef, nodes)
