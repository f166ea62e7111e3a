"""What reaches the layers of a model, and how long they take for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxsparse import timing
from jaxsparse.nn.calls import calls_through
from jaxsparse.pruning.targets import join

Run = Callable[[Any], Any]  # calls a model on the example inputs

_REPEATS = 15  # of each measurement, of which the median counts
_MARGIN = 0.05  # by which a layer must be faster to be so
_TAG = "sparsify_path"  # the attribute by which a layer knows its name in the model


@dataclass(frozen=True, eq=False)
class _Tag:
    """A name for one run alone: no trace of an earlier run, of an equal layer, is found again."""

    name: str


@dataclass
class Call:
    """Calls of a layer that are alike: same structure, shapes and dtypes.

    Args:
        leaves: of the first call's arguments; a `jax.ShapeDtypeStruct` where they were traced.
        treedef: the structure of (positional arguments, keyword arguments).
        count: how many there were.
        batched: whether any was made under `jax.vmap`, so that its shapes lack a dimension.
    """

    leaves: list[Any]
    treedef: Any
    count: int = 0
    batched: bool = False

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of such a call: random numbers and zeros for what was traced."""
        args, options = jax.tree.unflatten(self.treedef, list(map(_concrete, self.leaves)))
        return args, options


def record_calls(
    model: nnx.Module, layers: Mapping[str, nnx.Module], run: Run
) -> dict[str, list[Call]]:
    """The calls of each layer in one run of the model, those that are alike once.

    A function under `jax.checkpoint` is traced once, so that its repetitions don't count.
    """
    try:
        calls = _record(model, layers, run, abstract=True)
    except Exception:
        # Values decide what the model does, which a trace can't follow. If the model itself is
        # wrong, it says so again.
        return _record(model, layers, run, abstract=False)
    traced = [
        leaf
        for recorded in calls.values()
        for call in recorded
        for leaf in call.leaves
        if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    # How long a layer takes may depend on lengths and indices, but not on other numbers.
    if all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in traced):
        return calls
    return _record(model, layers, run, abstract=False)


def _record(
    model: nnx.Module, layers: Mapping[str, nnx.Module], run: Run, *, abstract: bool
) -> dict[str, list[Call]]:
    calls: dict[str, dict[Hashable, Call]] = {name: {} for name in layers}

    def recording(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            # A transformation such as nnx.jit calls a copy, which has the tag, too.
            if (tag := getattr(self, _TAG, None)) is None:
                return original(self, *args, **options)
            signature, recorded = _describe(args, options)
            recorded = calls[tag.name].setdefault(signature, recorded)
            recorded.count += 1
            _tell_vmap(recorded, (args, options))
            with jax.disable_jit(False):  # nothing within is recorded, so it may be fast
                return original(self, *args, **options)

        return call

    # Without jit every step of a scan, and each call of a compiled function, is a call.
    with calls_through({type(layer) for layer in layers.values()}, recording), jax.disable_jit():
        _run(model, {name: name for name in layers}.get, run, abstract)
    return {name: list(recorded.values()) for name, recorded in calls.items()}


def check_runs(model: nnx.Module, layers: Iterable[str], run: Run) -> None:
    """Runs a model with sparse layers once.

    Raises:
        ValueError: if it fails, naming the layer if it lacks an attribute that the model uses.
    """
    names = sorted(layers)

    def owner_of(path: str) -> str | None:
        return next((n for n in names if not n or f"{path}/".startswith(f"{n}/")), None)

    try:
        _run(model, owner_of, run, abstract=True)
        return
    except Exception:
        pass  # as in record_calls: a trace may not be able to follow
    try:
        with jax.disable_jit():  # a compiled function could donate arrays that are not ours
            _run(model, owner_of, run, abstract=False)
    except Exception as error:
        owner = getattr(error, "obj", None)
        tag = getattr(owner, _TAG, None)
        if isinstance(error, AttributeError) and tag is not None:
            raise ValueError(
                "sparsify: a layer that becomes sparse must be used by calls alone, but the model "
                f"uses {error.name!r} of {tag.name or '(model)'!r}, which {type(owner).__name__} "
                "doesn't have: name the layer in keep_dense"
            ) from error
        raise ValueError(
            "sparsify: the model must run on example_inputs when these layers are sparse: "
            f"{', '.join(map(repr, names))}, got {type(error).__name__}: {error}"
        ) from error


def _run(model: nnx.Module, name_of: Callable[[str], str | None], run: Run, abstract: bool) -> None:
    """Runs a copy of a model in which modules are tagged with a name, by their path."""

    def go() -> None:
        copy = nnx.clone(model)  # a run may change its state
        tags: dict[str, _Tag] = {}
        for path, module in paths_of(copy).items():
            if (name := name_of(join(path))) is not None:
                setattr(module, _TAG, tags.setdefault(name, _Tag(name)))
        run(copy)

    if abstract:
        jax.eval_shape(go)
    else:
        go()


def size_of(layer: nnx.Module) -> int:
    """Bytes of a layer's parameters and patterns."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(layer)))


@dataclass(frozen=True)
class Time:
    """Seconds that all calls of a layer take: the median of repeats, first and third quartile."""

    seconds: float
    low: float
    high: float

    def is_clearly_less_than(self, other: Time) -> bool:
        """By a margin, and by more than both vary."""
        return self.seconds < (1 - _MARGIN) * other.seconds and self.high < other.low


def times_of(layers: Sequence[nnx.Module], calls: list[Call], seconds: float) -> list[Time]:
    """The time of all calls for each layer, measured in turns; calls alike are measured once."""
    totals = np.zeros((len(layers), 3))
    for call in calls:
        timings = timing.measure_in_turns(
            [_program(layer, call) for layer in layers],
            seconds=seconds / len(calls),
            repeats=_REPEATS,
            on_device=jax.default_backend() == "gpu",
        )
        figures = np.array([(timing.us, *timing.us_quartiles) for timing in timings])
        totals += call.count * 1e-6 * figures
    return [Time(*map(float, total)) for total in totals]


def _program(layer: nnx.Module, call: Call) -> timing.Program:
    graphdef, state = nnx.split(layer)
    leaves, treedef = jax.tree.flatten(call.arguments())
    arrays = {i: jnp.asarray(x) for i, x in enumerate(leaves) if _is_array(x)}

    @jax.jit
    def run(state: Any, arrays: dict[int, jax.Array]) -> Any:
        # What is no array, a flag for instance, is a constant of the program.
        whole = [arrays.get(i, x) for i, x in enumerate(leaves)]
        args, options = jax.tree.unflatten(treedef, whole)
        return nnx.merge(graphdef, state)(*args, **options)

    return timing.Program(
        function=run,
        operands=lambda: jax.tree.map(jnp.copy, (state, arrays)),
        bytes_read=size_of(layer) + sum(x.nbytes for x in arrays.values()),
        wait=jax.block_until_ready,
        results=lambda _: (),
    )


def paths_of(model: nnx.Module) -> dict[tuple[Any, ...], nnx.Module]:
    """Every path of every module: one that is shared has several."""
    paths = {tuple(path): module for path, module in nnx.iter_modules(model)}

    def walk(path: tuple[Any, ...], module: nnx.Module, above: tuple[nnx.Module, ...]) -> None:
        paths[path] = module
        for key, child in nnx.iter_children(module):
            cycle = any(child is parent for parent in above)
            if isinstance(child, nnx.Module) and not cycle:
                walk((*path, key), child, (*above, child))

    walk((), model, (model,))
    return paths


# ---- Arguments of a call ----


def _describe(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Hashable, Call]:
    """What calls that are alike have in common, and one of them."""
    leaves, treedef = jax.tree.flatten((args, options))
    signature = (treedef, *(str(jax.typeof(x) if _is_array(x) else x) for x in leaves))
    kept = [
        # A tracer must not outlive its trace.
        jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.core.Tracer) else x
        for x in leaves
    ]
    return signature, Call(kept, treedef)


def _tell_vmap(call: Call, arguments: Any) -> None:
    """Sets ``batched`` once one of the transformations around the arguments is `jax.vmap`."""

    @jax.custom_batching.custom_vmap
    def identity(traced: list[jax.Array]) -> list[jax.Array]:
        return traced

    @identity.def_vmap
    def rule(axis_size: int, in_batched: list[Any], traced: list[jax.Array]) -> tuple[Any, Any]:
        call.batched = True
        return traced, in_batched[0]

    traced = [x for x in jax.tree.leaves(arguments) if isinstance(x, jax.core.Tracer)]
    identity(jax.lax.stop_gradient(traced))  # which has no rule for reverse mode


def _concrete(leaf: Any) -> Any:
    """Random numbers, or zeros for integers, in place of what was traced."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    key = jax.random.key(0)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(key, leaf.shape)
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        # In a wide dtype: JAX draws no 8-bit numbers.
        is_complex = jnp.issubdtype(leaf.dtype, jnp.complexfloating)
        wide = jnp.complex64 if is_complex else jnp.float32
        return jax.random.normal(key, leaf.shape, wide).astype(leaf.dtype)
    return jnp.zeros(leaf.shape, leaf.dtype)  # an index that is in any range


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray)
