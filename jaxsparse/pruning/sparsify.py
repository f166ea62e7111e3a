"""A pruned model with sparse layers, and back."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxsparse.pruning.kinds import KINDS, Kind
from jaxsparse.pruning.measure import Call, record_calls, size_of, time_of
from jaxsparse.pruning.table import LayerReport, SparsityTable
from jaxsparse.pruning.targets import join

M = TypeVar("M", bound=nnx.Module)
Patterns = str | Sequence[str]
Kinds = Mapping[type[nnx.Module], Kind]


def sparsify(
    model: M,
    example_inputs: Any,
    *,
    where: Patterns = "*",
    keep_dense: Patterns = (),
    faster_only: bool = True,
    seconds: float = 0.1,
    kinds: Kinds = KINDS,
) -> tuple[M, SparsityTable]:
    r"""Replaces pruned layers by sparse ones that store the weights that are not 0.

    Every layer is run on this device, dense and sparse, on the arrays that reach it when the model
    is called with ``example_inputs``; it becomes sparse if that is faster. Results of the model are
    the same up to rounding.

    Args:
        model: left as it is. Layers that are shared stay shared.
        example_inputs: a tuple of positional arguments, or the only one.
        where: names of the layers in question (``encoder/0``), or patterns as of a shell, where
            ``*`` stands for any characters, ``/`` too. A layer that is shared has several names, of
            which the table shows one.
        keep_dense: names or patterns of layers to leave as they are.
        faster_only: leave a layer dense that would be slower; else every pruned one becomes sparse.
        seconds: about how long each measurement takes.
        kinds: the types that can be sparse, `KINDS` by default. A layer within such a layer is not
            looked at, nor are subclasses: their code may do something else. Recurrent layers come
            back laid out for the batch size of ``example_inputs``, see `jaxsparse.nn.pack`.

    Returns:
        The new model, and a `SparsityTable` with a row for each layer.

    Raises:
        TypeError: if a pattern means layers, but none of a type that can be sparse.
        ValueError: if a pattern means no layer.

    >>> model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    >>> model.kernel[...] = jnp.where(jnp.abs(model.kernel[...]) > 0.2, model.kernel[...], 0)
    >>> sparse, table = sparsify(model, jnp.ones((8, 64)), faster_only=False)
    >>> type(sparse).__name__, round(table.rows[0]["density"], 2)
    ('SparseLinear', 0.12)
    """
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    names = _names(model)
    found = _outermost(model, kinds)
    chosen = _matching("sparsify", "where", where, names, found, kinds)
    unwanted = _matching("sparsify", "keep_dense", keep_dense, names, found, kinds)
    considered = {name: found[name] for name in found if name in chosen}
    calls = record_calls(model, considered, inputs)
    replacements: dict[str, nnx.Module] = {}
    reports = []
    for name, layer in considered.items():
        kind = kinds[type(layer)]
        report, sparse = _judge(
            name, layer, kind, calls[name], name in unwanted, faster_only, seconds
        )
        reports.append(report)
        if report.kept_dense is None and sparse is not None:
            replacements[name] = sparse
    return _replaced(model, replacements), SparsityTable(reports)


def densify(model: M, *, where: Patterns = "*", kinds: Kinds = KINDS) -> M:
    """Replaces sparse layers by dense ones with the same weights, zeros in place.

    Args:
        model: left as it is.
        where: names or patterns of the layers, as in `sparsify`.
        kinds: the types that can be sparse.

    Returns:
        The new model.

    Raises:
        TypeError: if a pattern means layers, but none of a sparse type.
        ValueError: if a pattern means no layer, and for a layer with a fused activation.

    >>> from jaxsparse.nn import SparseLinear
    >>> type(densify(SparseLinear(8, 4, sparsity=0.5, rngs=nnx.Rngs(0)))).__name__
    'Linear'
    """
    back: Kinds = {kind.sparse: kind for kind in kinds.values()}
    found = _outermost(model, back)
    chosen = _matching("densify", "where", where, _names(model), found, back)
    layers = {name: layer for name, layer in found.items() if name in chosen}
    return _replaced(model, {n: back[type(x)].to_dense(x) for n, x in layers.items()})


# ---- Finding layers and putting others in their place ----


def _names(model: nnx.Module) -> dict[str, nnx.Module]:
    """Every name of every module: one that is shared has several."""
    names = {join(path): module for path, module in nnx.iter_modules(model)}

    def walk(path: tuple[Any, ...], module: nnx.Module, above: tuple[nnx.Module, ...]) -> None:
        names[join(path)] = module
        for key, child in nnx.iter_children(module):
            cycle = any(child is parent for parent in above)
            if isinstance(child, nnx.Module) and not cycle:
                walk((*path, key), child, (*above, child))

    walk((), model, (model,))
    return names


def _outermost(model: nnx.Module, kinds: Kinds) -> dict[str, nnx.Module]:
    """Layers of these types by name, without those that are parts of another one."""
    modules = sorted(nnx.iter_modules(model), key=lambda item: len(item[0]))
    found: dict[tuple[Any, ...], nnx.Module] = {}
    for path, module in modules:
        inside = any(path[:depth] in found for depth in range(len(path)))
        if type(module) in kinds and not inside:
            found[path] = module
    return {
        join(path): found[path] for path in sorted(found, key=lambda path: list(map(str, path)))
    }


def _matching(
    operation: str,
    argument: str,
    patterns: Patterns,
    names: Mapping[str, nnx.Module],
    found: Mapping[str, nnx.Module],
    kinds: Kinds,
) -> set[str]:
    """The found layers that patterns mean."""
    chosen: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        every = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not every:
            raise ValueError(
                f"{operation}: {argument} must name layers of the model, got {pattern!r}, which "
                f"matches none of {', '.join(map(repr, names))}"
            )
        meant = {id(names[name]) for name in every}
        layers = [name for name, layer in found.items() if id(layer) in meant]
        if not layers:
            got = sorted({type(names[name]).__name__ for name in every})
            raise TypeError(
                f"{operation}: {argument} must name layers of type "
                f"{', '.join(cls.__name__ for cls in kinds)}, that are no part of another such "
                f"layer, got {pattern!r}, which matches {', '.join(got)}"
            )
        chosen.update(layers)
    return chosen


def _replaced(model: M, replacements: Mapping[str, nnx.Module]) -> M:
    """A copy of a model with other layers at some names."""

    def replace(path: tuple[Any, ...], node: Any) -> Any:
        if isinstance(node, nnx.Module):
            return replacements.get(join(path), node)
        return node

    graphdef, state = nnx.split(nnx.recursive_map(replace, nnx.clone(model)))
    # A step that donates one model's arrays must not delete the other's.
    result: M = nnx.merge(graphdef, jax.tree.map(jnp.copy, state))
    return result


# ---- Whether a layer becomes sparse ----


def _judge(
    name: str,
    layer: nnx.Module,
    kind: Kind,
    calls: list[Call],
    unwanted: bool,
    faster_only: bool,
    seconds: float,
) -> tuple[LayerReport, nnx.Module | None]:
    """What is to be said of a layer, and its sparse twin if it can have one."""
    obstacle = kind.obstacle(layer)
    matrices = [] if obstacle else kind.weights(layer)
    size = sum(matrix.size for matrix in matrices)
    stored = sum(int(np.count_nonzero(matrix)) for matrix in matrices)
    reasons = (
        ("asked for", unwanted),
        (obstacle, obstacle is not None),
        ("it is not pruned", stored == size),
        ("example_inputs don't reach it", not calls),
    )
    reason = next((text for text, holds in reasons if holds), None)
    sparse = kind.to_sparse(layer) if reason is None else None
    before = after = None
    if sparse is not None and kind.prepare is not None:
        args, options = calls[0]
        kind.prepare(sparse, *args, **options)
    if calls:
        before = time_of(layer, calls, seconds)
        after = None if sparse is None else time_of(sparse, calls, seconds)
    if faster_only and before is not None and after is not None and after >= before:
        reason = "it would be slower"
    report = LayerReport(
        path=name,
        layer=type(layer).__name__,
        shapes=tuple((matrix.shape[0], matrix.shape[1]) for matrix in matrices),
        density=stored / size if size else None,
        imbalance=max(map(_imbalance, matrices), default=None),
        dense_bytes=size_of(layer),
        sparse_bytes=None if sparse is None else size_of(sparse),
        dense_seconds=before,
        sparse_seconds=after,
        kept_dense=reason,
    )
    return report, sparse


def _imbalance(matrix: np.ndarray) -> float:
    lengths = np.count_nonzero(matrix, axis=1)
    return float(lengths.max() / lengths.mean()) if lengths.any() else 1.0
