"""A pruned model with sparse layers, and back."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen, nnx

from jaxsparse.nn import SparseLinear
from jaxsparse.packed_form import DTYPES
from jaxsparse.pruning.judge import judge
from jaxsparse.pruning.kinds import KINDS, Kind
from jaxsparse.pruning.measure import check_runs, paths_of, record_calls
from jaxsparse.pruning.table import SparsityTable
from jaxsparse.pruning.targets import join
from jaxsparse.pruning.unsupported import unsupported

M = TypeVar("M", bound=nnx.Module)
Patterns = str | Sequence[str]
Kinds = Mapping[type[nnx.Module], Kind]


def sparsify(
    model: M,
    example_inputs: Any,
    *,
    where: Patterns = "*",
    keep_dense: Patterns = (),
    call: Callable[..., Any] | None = None,
    faster_only: bool = True,
    seconds: float = 0.1,
    packed: bool = False,
    dtype: Any = None,
    kinds: Kinds | None = None,
) -> tuple[M, SparsityTable]:
    r"""Replaces pruned layers by sparse ones that store the weights that are not 0.

    Every layer is run on this device, dense and sparse, on arrays of the shapes and dtypes that
    reach it when the model is called with ``example_inputs``; it becomes sparse if that is faster,
    by 5 % and by more than the times vary, which are measured in turns. Results of the model are
    the same up to rounding.

    The call is traced, not computed, if it can be: then both branches of a condition count, and
    layers are timed on random numbers. Where integers reach a layer, lengths for instance, the
    model is run to know them; what a transformation within the model (``jax.grad``, ``nnx.remat``)
    hides of them is taken to be 0.

    Args:
        model: left as it is. Layers and cells that are shared stay shared. Layers that share single
            parameters stay dense.
        example_inputs: a tuple of positional arguments, or the only one.
        where: names of the layers in question (``encoder/0``), or patterns as of a shell, where
            ``*`` stands for any characters, ``/`` too. A layer that is shared has several names, of
            which the table shows one.
        keep_dense: names or patterns of layers to leave as they are.
        call: ``(model, *example_inputs)`` runs the model, by default ``model(*example_inputs)``:
            for keyword arguments and other methods, as
            ``lambda model, x: model.encode(x, deterministic=True)``.
        faster_only: leave a layer dense that would not be clearly faster, or that can't be timed
            because it runs under ``jax.vmap``, where the batch is not seen; else every pruned one
            becomes sparse.
        seconds: about how long each measurement takes.
        packed: whether to try linear layers that compute in 16 bits with packed weights, too
            (`jaxsparse.nn.PackedLinear`), for inference with few rows of inputs; with up to 16 rows
            those by gaps, too (``cell=0`` of `jaxsparse.CSR.pack`). The fastest of dense, sparse
            and packed is kept for the shapes of ``example_inputs``; the table says which, and why a
            layer is not packed. A CPU has no kernel for them, and times show it.
        dtype: of packed weights, as in `jaxsparse.CSR.pack`: by default that in which a layer
            computes. With int8 or float8_e4m3fn they are rounded to 8 bits, which changes results.
            That saves memory, and time by gaps with one row of inputs alone.
        kinds: the types that can be sparse, `KINDS` by default. A layer within such a layer is not
            looked at, nor are subclasses: their code may do something else. Recurrent layers come
            back laid out for the batch size of ``example_inputs``, see `jaxsparse.nn.pack`.

    Returns:
        The new model, and a `SparsityTable` with a row for each layer. Last come pruned layers of
        types that have no sparse form, convolutions for instance.

    Raises:
        TypeError: if ``model`` is no Flax NNX module, or a pattern means layers, but none of a type
            that can be sparse.
        ValueError: if a pattern means no layer, or the model does not run with its sparse layers,
            because it uses the ``kernel`` of one itself for instance; for a dtype that packed
            weights can't have, or without ``packed``.

    >>> model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    >>> model.kernel[...] = jnp.where(jnp.abs(model.kernel[...]) > 0.2, model.kernel[...], 0)
    >>> sparse, table = sparsify(model, jnp.ones((8, 64)), faster_only=False)
    >>> type(sparse).__name__, round(table.rows[0]["density"], 2)
    ('SparseLinear', 0.12)
    """
    _check_model("sparsify", model)
    if dtype is not None:
        dtype = jnp.dtype(dtype)
        if not packed or dtype not in DTYPES:
            raise ValueError(
                f"sparsify: dtype is that of packed weights, {', '.join(map(str, DTYPES))}: got "
                f"{dtype} with packed={packed}"
            )
    kinds = KINDS if kinds is None else kinds
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)

    def run(model: Any) -> None:
        if call is None:
            model(*inputs)
        else:
            call(model, *inputs)

    names = _names(model)
    found = _outermost(model, kinds)
    chosen = _matching("sparsify", "where", where, names, found, kinds)
    unwanted = _matching("sparsify", "keep_dense", keep_dense, names, found, kinds)
    considered = {name: found[name] for name in found if name in chosen}
    obstacles = {name: kinds[type(x)].obstacle(x) for name, x in considered.items()}
    for name, wrapper in _normalised(names, considered).items():
        obstacles[name] = obstacles[name] or f"its kernel is what {wrapper} makes of it"
    modules, sharing = _shared(model, names, considered)
    for name, other in sharing.items():
        obstacles[name] = obstacles[name] or f"its weights are shared with {other or '(model)'}"
    free = {name: layer for name, layer in considered.items() if obstacles[name] is None}
    calls = record_calls(model, free, run)
    # A cell that only layers run becomes what it is in them.
    parts = {
        name
        for places in modules
        for name, within in places
        if not within and not calls.get(name) and name not in unwanted
    }
    replacements: dict[str, nnx.Module] = {}
    reports = {}
    for name, layer in considered.items():
        if name in parts:
            continue
        reports[name], sparse = judge(
            name,
            layer,
            kinds[type(layer)],
            obstacles[name],
            calls.get(name, []),
            name in unwanted,
            faster_only,
            seconds,
            packed,
            dtype,
        )
        if sparse is not None:
            replacements[name] = sparse
    for name, other in _tied(replacements, modules, parts).items():
        reason = f"its weights are shared with {other or '(model)'}, which stays dense"
        reports[name] = replace(reports[name], kept_dense=reason)
    result = _replaced(model, names, replacements)
    if replacements:
        check_runs(result, replacements, run)
    patterns = [where] if isinstance(where, str) else where
    others = unsupported(model, found.values(), kinds, patterns)
    return result, SparsityTable([*reports.values(), *others])


def densify(model: M, *, where: Patterns = "*", kinds: Kinds | None = None) -> M:
    """Replaces sparse and packed layers by dense ones with the same weights, zeros in place.

    Args:
        model: left as it is. Layers and cells that are shared stay shared.
        where: names or patterns of the layers, as in `sparsify`.
        kinds: the types that can be sparse, `KINDS` by default.

    Returns:
        The new model.

    Raises:
        TypeError: if ``model`` is no Flax NNX module, or a pattern means layers, but none of a
            sparse type.
        ValueError: if a pattern means no layer, and for a layer with a fused activation, or with
            weights that it shares with a part of the model that is not replaced.

    >>> from jaxsparse.nn import SparseLinear
    >>> type(densify(SparseLinear(8, 4, sparsity=0.5, rngs=nnx.Rngs(0)))).__name__
    'Linear'
    """
    _check_model("densify", model)
    kinds = KINDS if kinds is None else kinds
    back: Kinds = {
        form: kind for kind in kinds.values() for form in (kind.sparse, kind.packed) if form
    }
    found = _outermost(model, back)
    names = _names(model)
    chosen = _matching("densify", "where", where, names, found, back)
    layers = {
        name: layer
        for name, layer in found.items()
        if name in chosen and not (type(layer) in kinds and _is_dense(layer))
    }
    modules, sharing = _shared(model, names, layers)
    replacements = {n: back[type(x)].to_dense(x) for n, x in layers.items()}
    for name, other in (sharing | _tied(replacements, modules, set())).items():
        raise ValueError(
            f"densify: a layer must not share weights with what stays as it is, but {name!r} "
            f"shares some with {other or '(model)'!r}"
        )
    return _replaced(model, names, replacements)


def _check_model(operation: str, model: Any) -> None:
    if isinstance(model, nnx.Module):
        return
    hint = ": write its layers with flax.nnx" if isinstance(model, linen.Module) else ""
    raise TypeError(
        f"{operation}: model must be a Flax NNX module, an nnx.Module, got "
        f"{type(model).__module__}.{type(model).__name__}{hint}"
    )


def _is_dense(layer: nnx.Module) -> bool:
    """Whether a layer of a type that is dense or sparse, such as RNN, is dense."""
    return not any(isinstance(part, SparseLinear) for _, part in nnx.iter_modules(layer))


# ---- Finding layers and putting others in their place ----


def _names(model: nnx.Module) -> dict[str, nnx.Module]:
    """Every name of every module: one that is shared has several."""
    return {join(path): module for path, module in paths_of(model).items()}


def _outermost(model: nnx.Module, kinds: Kinds) -> dict[str, nnx.Module]:
    """Layers of these types by name, without those that are only parts of another one."""
    paths = paths_of(model)
    found: dict[tuple[Any, ...], nnx.Module] = {}
    known: set[int] = set()
    for path, module in sorted(paths.items(), key=lambda item: len(item[0])):
        # A child within a plain container has a longer path than its parent by more than one.
        above = (paths.get(path[:depth]) for depth in range(len(path)))
        inside = any(id(parent) in known for parent in above)
        kind = kinds.get(type(module))
        is_meant = kind is not None and kind.has(module)
        if is_meant and not inside and id(module) not in known:
            found[path] = module
            known.add(id(module))
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


# They replace every variable that is named kernel while they call what they hold.
_NORMALISERS = (nnx.WeightNorm, nnx.SpectralNorm)


def _normalised(
    names: Mapping[str, nnx.Module], layers: Mapping[str, nnx.Module]
) -> dict[str, str]:
    """Layers within a module that gives them another kernel, and the type of that module."""
    wrapper_of = {
        id(part): type(module).__name__
        for module in names.values()
        if isinstance(module, _NORMALISERS)
        for _, part in nnx.iter_modules(module)
    }
    return {name: wrapper_of[id(x)] for name, x in layers.items() if id(x) in wrapper_of}


# A place of a module that several layers hold: the layer's name, and the path within the layer.
Place = tuple[str, tuple[Any, ...]]


def _shared(
    model: nnx.Module, names: Mapping[str, nnx.Module], layers: Mapping[str, nnx.Module]
) -> tuple[list[list[Place]], dict[str, str]]:
    """What layers share: modules, with their places, and otherwise with which part of the model.

    Layers that share a module can share its replacement. A single parameter, or a module that is
    also used elsewhere, can't be replaced.
    """
    name_of = {id(layer): name for name, layer in layers.items()}

    def place_of(path: tuple[Any, ...]) -> Place | None:
        for depth in range(len(path) + 1):
            name = name_of.get(id(names.get(join(path[:depth]))))
            if name is not None:
                return name, path[depth:]
        return None

    def is_meant(_: Any, x: Any) -> bool:  # layers may draw from one random stream
        return isinstance(x, nnx.Module | nnx.Variable) and not isinstance(x, nnx.RngState)

    modules: list[list[Place]] = []
    sharing: dict[str, str] = {}
    for paths in nnx.find_duplicates(model, only=is_meant):
        places = [place_of(path) for path in paths]
        known = [place for place in places if place is not None]
        is_module = join(paths[0]) in names
        if is_module and len(known) == len(places):
            if any(within for _, within in known):  # else it is a layer of several names
                modules.append(known)
            continue
        holders = [join(path if is_module else path[:-1]) for path in paths]
        for i, place in enumerate(places):
            if place is not None:
                sharing.setdefault(place[0], holders[i - 1])
    return modules, sharing


def _tied(
    replacements: dict[str, nnx.Module], modules: list[list[Place]], parts: set[str]
) -> dict[str, str]:
    """Lets replacements share what the layers share, in place, or takes them away.

    Args:
        replacements: by the name of the layer.
        modules: the places of each shared module.
        parts: shared modules that are replaced if the layers that hold them are.

    Returns:
        For each replacement that is taken away, the name of a layer that has none.
    """

    def holds(place: Place) -> bool:
        name, within = place
        return name in parts or (
            name in replacements and join(within) in _names(replacements[name])
        )

    untied: dict[str, str] = {}
    changed = True
    while changed:  # a layer may share one module with one layer, and another with another
        changed = False
        for places in modules:
            missing = next((place[0] for place in places if not holds(place)), None)
            for name, _ in places:
                if missing is not None and name in replacements:
                    del replacements[name]
                    untied[name] = missing
                    changed = True
    for places in modules:
        owners = [place for place in places if place[0] in replacements]
        if not owners:
            continue
        first, within = owners[0]
        module = _names(replacements[first])[join(within)]
        for name, path in places:
            if path:
                setattr(_names(replacements[name])[join(path[:-1])], path[-1], module)
            else:
                replacements[name] = module
    return untied


def _replaced(
    model: M, names: Mapping[str, nnx.Module], replacements: Mapping[str, nnx.Module]
) -> M:
    """A copy of a model with other layers at some names."""
    graphdef, state = nnx.split(with_layers(nnx.clone(model), names, replacements))
    # A step that donates one model's arrays must not delete the other's.
    result: M = nnx.merge(graphdef, jax.tree.map(jnp.copy, state))
    return result


def with_layers(
    model: M, names: Mapping[str, nnx.Module], replacements: Mapping[str, nnx.Module]
) -> M:
    """A model with other layers at some names, of all the ``names`` of its modules."""
    new = {id(names[name]): layer for name, layer in replacements.items()}

    def replace_at(path: tuple[Any, ...], node: Any) -> Any:
        # A shared module is met under one of its names, of which any may be meant.
        return new.get(id(names.get(join(path))), node) if isinstance(node, nnx.Module) else node

    result: M = nnx.recursive_map(replace_at, model)
    return result
