"""What reaches the layers of a model, and how long they take for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxsparse.bench import timing
from jaxsparse.pruning.targets import join

Call = tuple[tuple[Any, ...], dict[str, Any]]

_REPEATS = 7  # of each measurement, of which the median counts
_TAG = "sparsify_path"  # the attribute by which a recorded layer knows its name


def record_calls(
    model: nnx.Module, layers: Mapping[str, nnx.Module], inputs: tuple[Any, ...]
) -> dict[str, list[Call]]:
    """The arguments of every call of each layer, in one call of the model."""
    model = nnx.clone(model)  # it is called, which may change its state
    calls: dict[str, list[Call]] = {name: [] for name in layers}
    for path, module in nnx.iter_modules(model):
        if join(path) in layers:
            setattr(module, _TAG, join(path))

    def recording(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            # A transformation such as nnx.jit calls a copy, which has the tag, too.
            if (name := getattr(self, _TAG, None)) is None:
                return original(self, *args, **options)
            calls[name].append((args, options))
            with jax.disable_jit(False):  # nothing within is recorded, so it may be fast
                return original(self, *args, **options)

        return call

    # jit and scan would give the layers tracers.
    with jax.disable_jit():
        patches = [
            mock.patch.object(cls, "__call__", recording(cls.__call__))
            for cls in {type(layer) for layer in layers.values()}
        ]
        for patch in patches:
            patch.start()
        try:
            model(*inputs)  # type: ignore[operator]
        finally:
            for patch in patches:
                patch.stop()
    return calls


def size_of(layer: nnx.Module) -> int:
    """Bytes of a layer's parameters and patterns."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(layer)))


def time_of(layer: nnx.Module, calls: list[Call], seconds: float) -> float:
    """Seconds that all calls take: calls alike are measured once, on the first one's arrays."""
    first: dict[Any, Call] = {}
    counts: Counter[Any] = Counter()
    for call in calls:
        leaves, treedef = jax.tree.flatten(call)
        kinds = (jax.typeof(x) if _is_array(x) else x for x in leaves)
        signature = (treedef, *map(str, kinds))
        first.setdefault(signature, call)
        counts[signature] += 1
    return sum(
        count * _time_one(layer, first[signature], seconds / len(counts))
        for signature, count in counts.items()
    )


def _time_one(layer: nnx.Module, call: Call, seconds: float) -> float:
    graphdef, state = nnx.split(layer)
    leaves, treedef = jax.tree.flatten(call)
    arrays = {i: jnp.asarray(x) for i, x in enumerate(leaves) if _is_array(x)}

    @jax.jit
    def run(state: Any, arrays: dict[int, jax.Array]) -> Any:
        # What is no array, a flag for instance, is a constant of the program.
        whole = [arrays.get(i, x) for i, x in enumerate(leaves)]
        args, options = jax.tree.unflatten(treedef, whole)
        return nnx.merge(graphdef, state)(*args, **options)

    program = timing.Program(
        function=run,
        operands=lambda: jax.tree.map(jnp.copy, (state, arrays)),
        bytes_read=size_of(layer) + sum(x.nbytes for x in arrays.values()),
        wait=jax.block_until_ready,
        results=lambda _: (),
    )
    on_device = jax.default_backend() == "gpu"
    return timing.measure(program, seconds=seconds, repeats=_REPEATS, on_device=on_device).us * 1e-6


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray)
