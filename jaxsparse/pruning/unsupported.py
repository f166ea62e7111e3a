"""Pruned parameters of a model that no sparse layer can hold, so that nobody expects a gain."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxsparse.pruning.measure import paths_of
from jaxsparse.pruning.table import LayerReport, imbalance
from jaxsparse.pruning.targets import Target, is_floating, join


def unsupported(
    model: nnx.Module,
    layers: Iterable[nnx.Module],
    kinds: Iterable[type[nnx.Module]],
    where: Iterable[str],
) -> list[LayerReport]:
    """A report of each module that holds pruned matrices itself and is of no type in ``kinds``.

    Args:
        model: with all its parameters.
        layers: those of types in ``kinds``, whose parts are not looked at.
        kinds: the types that can be sparse.
        where: patterns of the modules' names.
    """
    supported = {
        id(node)
        for layer in layers
        for _, node in nnx.iter_graph(layer)
        if isinstance(node, nnx.Module | nnx.Variable)
    }
    paths = paths_of(model)
    pruned: dict[tuple[Any, ...], list[np.ndarray]] = {}
    for path, node in nnx.iter_graph(model):
        if not isinstance(node, nnx.Param) or id(node) in supported:
            continue
        owner = next(path[:depth] for depth in range(len(path), -1, -1) if path[:depth] in paths)
        name = join(owner)
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in where):
            continue
        if matrices := _pruned_matrices(join(path), node.get_value()):
            pruned.setdefault(owner, []).extend(matrices)
    return [_report(join(path), paths[path], pruned[path], kinds) for path in pruned]


def _pruned_matrices(name: str, value: Any) -> list[np.ndarray]:
    """The matrices of a parameter, if `prune` would mean it, that have zeros and others."""
    if not (isinstance(value, jax.Array | np.ndarray) and is_floating(value)):
        return []
    if not Target("*").means(name, value.ndim):
        return []
    matrices = (matrix for (matrix,) in np.asarray(Target("*").matrices(jnp.asarray(value))))
    return [matrix for matrix in matrices if 0 < np.count_nonzero(matrix) < matrix.size]


def _report(
    name: str, module: nnx.Module, matrices: list[np.ndarray], kinds: Iterable[type[nnx.Module]]
) -> LayerReport:
    cls = type(module)
    base = next((kind for kind in kinds if issubclass(cls, kind)), None)
    reason = f"{cls.__name__} has no sparse form"
    if base is cls:
        reason = f"such a {reason}"  # others of its type have one
    elif base is not None:
        reason += f", and that of {base.__name__} would not run its code: see kinds"
    size = sum(matrix.size for matrix in matrices)
    return LayerReport(
        path=name,
        layer=cls.__name__,
        shapes=tuple((matrix.shape[0], matrix.shape[1]) for matrix in matrices),
        density=sum(int(np.count_nonzero(matrix)) for matrix in matrices) / size,
        imbalance=max(map(imbalance, matrices)),
        dense_bytes=sum(matrix.nbytes for matrix in matrices),
        sparse_bytes=None,
        dense_seconds=None,
        sparse_seconds=None,
        kept_dense=reason,
    )
