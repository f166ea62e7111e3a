"""Scans of several recurrent layers over several devices: each one runs some of the layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import backend
from jaxsparse.integers import integer
from jaxsparse.ops.arguments import check_floating
from jaxsparse.precision import accumulator_dtype
from jaxsparse.recurrent.arguments import (
    as_array_of_rank,
    check_precision,
    steps_and_resets,
)
from jaxsparse.recurrent.graph import recurrent_graph_p
from jaxsparse.recurrent.layers import Layer
from jaxsparse.recurrent.stack import check_layers, checked_layers, run_layers

_STEPS_OF_A_START = 16
"""As many steps take about the time that it takes to begin with a chunk."""


def pipelined_stack_scan(
    layers: Sequence[Layer],
    carries: Any,
    xs: Any,
    *,
    axis_name: str,
    chunk: int | None = None,
    seq_lengths: Any = None,
    resets: Any = None,
    reverse: bool = False,
    precision: Any = None,
    recompute: bool = False,
    implementation: str | None = None,
    variant: str | None = None,
) -> tuple[Any, jax.Array]:
    r"""Runs the layers of ``stack_scan`` on several devices at once, inside ``jax.shard_map``.

    Each of the n devices along ``axis_name`` holds a *run* of neighbouring layers, the first device
    the lowest ones. Time is cut into chunks of s steps. Device i runs chunk q beside chunk q - 1 on
    device i + 1, and hands its outputs on by ``jax.lax.ppermute``. All are done after
    ceil(T / s) + n - 1 rounds, of which each device works in ceil(T / s). The results are those of
    one ``stack_scan`` of all n runs.

    All devices run one program, so all runs have one form: as many layers, with the same cells,
    sizes and options. Their arrays have an axis in front, of n runs, as
    ``jax.tree.map(lambda *x: jnp.stack(x), *runs)`` makes it. It is sharded over ``axis_name``:
    ``P(axis_name)`` in the ``in_specs`` and, for the carries, in the ``out_specs``. The batch may
    be sharded over other axes of the mesh.

    It is differentiable by JAX, inside ``shard_map`` and outside. Each device keeps what a gradient
    needs of its own layers. The gradients of weights are summed over chunks in float32.

    Args:
        layers: the layers of a run, the lowest first, each array ``(1, ...)`` here, on one device.
            All need `Layer.input`. A skip begins within a run or at its input; there are no
            functions `Layer.between`, which would read all steps.
        carries: the initial carry of each layer: a list or a tuple, each array ``(1, B, h)``.
        xs: the input ``(T, B, k)`` of the lowest run, the same on all devices; k is the number of
            units of a run's last layer.
        axis_name: the axis of the mesh whose devices have the runs.
        chunk: s. By default T is cut into sqrt(T (n - 1)) / 4 chunks, rounded: that is best where
            the start of a chunk takes as long as 16 steps. T need be no multiple of it.
        seq_lengths, resets, reverse: as those of ``stack_scan``, the same on all devices.
        precision, recompute, implementation, variant: as those of ``stack_scan``.

    Returns:
        The last carries, as the first ones are, and the outputs ``(T, B, h)`` of the highest run's
        last layer, the same on all devices.

    Raises:
        TypeError: for operands that are no arrays or not of the dtypes of ``stack_scan``.
        ValueError: for an axis that there is not, a chunk that is no positive number, and as
            ``stack_scan``. Errors count the layers of a run from 0.

    Method: layers that overlap in time, as in Appleyard et al. 2016, "Optimizing Performance of
    Recurrent Neural Networks on GPUs", on several devices, by chunks.

    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import PartitionSpec as P
    >>> from jaxsparse.recurrent import Layer, elman, pipelined_stack_scan
    >>> n = jax.device_count()
    >>> layer = Layer(elman("relu"), recurrent=jnp.eye(2), input=jnp.eye(2))
    >>> layers = jax.tree.map(lambda *x: jnp.stack(x), *[[layer]] * n)
    >>> mesh = jax.make_mesh((n,), ("stage",), (jax.sharding.AxisType.Auto,))
    >>> @jax.jit
    ... @jax.shard_map(mesh=mesh, in_specs=(P("stage"), P("stage"), P()),
    ...                out_specs=(P("stage"), P()))
    ... def run(layers, carries, xs):
    ...     return pipelined_stack_scan(layers, carries, xs, axis_name="stage")
    >>> _, ys = run(layers, [jnp.zeros((n, 1, 2))], jnp.ones((3, 1, 2)))
    >>> bool((ys[1] == 1 + n).all())  # the second step adds n sums of ones
    True
    """
    operation = "recurrent.pipelined_stack_scan"
    backend.check_implementation(operation, implementation)
    precision = check_precision(operation, precision)
    n = _devices(operation, axis_name)
    check_layers(operation, layers, carries)
    layers = _own(operation, "layers", layers, axis_name, n)
    carries = _own(operation, "carries", carries, axis_name, n)
    xs = as_array_of_rank(operation, "xs", xs, 3)
    check_floating(operation, xs=xs)
    length, b, _ = xs.shape
    mask, resets = steps_and_resets(operation, seq_lengths, resets, length, b)
    _check_run(operation, layers, carries, xs)
    steps = _steps_of_a_chunk(operation, chunk, length, n)
    if length == 0 or b == 0:
        return _map(lambda x: x[None], carries), xs  # which is as wide as the outputs
    if mask is None and length % steps:
        mask = jnp.ones((length, b), bool)  # steps that fill up a chunk do not count
    rounds = _Rounds(axis_name, n, length, steps, bool(reverse))
    factors = [None if x.mask is None or x.mask.shape[0] == 1 else x.mask for x in layers]
    kinds, of_carries = (_map(lambda x: x.dtype, tree) for tree in (layers, carries))
    # Where operands vary over fewer axes of the mesh than others, JAX would sum their gradients in
    # each round anew. And it would sum them in 16 bits, if that is the weights' dtype.
    weights, carries, xs, given = _varying_alike(
        axis_name,
        _map(_wide, layers),
        _map(_wide, carries),  # rounded once, not in each round
        rounds.of_lowest(xs),
        tuple(rounds.of_each(x) for x in (mask, resets, factors)),
    )
    place = jax.lax.axis_index(axis_name)
    upward = [(i, i + 1) for i in range(n - 1)]

    def one_chunk(carries: Any, x: jax.Array, given: Any) -> Any:
        mask, resets, factors = given
        narrow = jax.tree.map(lambda x, kind: x.astype(kind), weights, kinds)
        own = [
            layer if m is None else dataclasses.replace(layer, mask=m)
            for layer, m in zip(narrow, factors, strict=True)
        ]
        return run_layers(
            operation,
            own,
            carries,
            x,
            mask,
            resets,
            reverse=reverse,
            precision=precision,
            recompute=recompute,
            return_all=False,
            implementation=implementation,
            variant=variant,
        )

    def one_round(state: Any, at: Any) -> Any:
        carries, below = state
        x, is_own, given = at
        x = jnp.where(place == 0, x, below)
        # A round that is not the device's computes nothing: so its steps need no mask, which all
        # steps of all scans would read, and have no derivatives.
        carries, y = (
            jax.lax.cond(is_own, one_chunk, lambda carries, x, _: (carries, x), carries, x, given)
            if n > 1
            else one_chunk(carries, x, given)
        )
        return (carries, jax.lax.ppermute(y, axis_name, upward)), y

    # A gradient would keep the weights of each round, as operands of the condition, narrow and
    # scaled: it makes them again, and keeps what scans give.
    of_scans = jax.checkpoint(
        one_round,
        prevent_cse=False,
        policy=lambda primitive, *_, **__: primitive is recurrent_graph_p,
    )
    (carries, _), ys = jax.lax.scan(
        of_scans, (carries, jnp.zeros_like(xs[0])), (xs, rounds.own, given)
    )
    ys = rounds.joined(ys[n - 1 :])
    is_highest = place == n - 1
    carries = jax.tree.map(lambda x, kind: x.astype(kind)[None], carries, of_carries)
    return carries, jax.lax.psum(jnp.where(is_highest, ys, 0), axis_name)


class _Rounds(NamedTuple):
    """Which chunk of time runs when on n devices: on the i-th one chunk q in round q + i."""

    axis_name: str
    n: int
    length: int
    steps: int
    reverse: bool

    @property
    def chunks(self) -> int:
        """How many there are."""
        return -(-self.length // self.steps)

    @property
    def own(self) -> jax.Array:
        """Whether each round is this device's, (rounds,)."""
        q = jnp.arange(self.chunks + self.n - 1) - jax.lax.axis_index(self.axis_name)
        return (q >= 0) & (q < self.chunks)

    def _chunks(self, x: jax.Array) -> jax.Array:
        """An array (T, ...) as (chunks, steps, ...), in the order in which they run."""
        x = _padded(x, 0, self.chunks * self.steps - self.length)
        x = x.reshape(self.chunks, self.steps, *x.shape[1:])
        return x[::-1] if self.reverse else x

    def joined(self, x: jax.Array) -> jax.Array:
        """An array (T, ...) of its chunks."""
        x = x[::-1] if self.reverse else x
        return x.reshape(-1, *x.shape[2:])[: self.length]

    def of_lowest(self, x: jax.Array) -> jax.Array:
        """What the lowest device takes of an array (T, ...), (rounds, steps, ...)."""
        return _padded(self._chunks(x), 0, self.n - 1)

    def of_each(self, tree: Any) -> Any:
        """What this device takes of each array (T, ...), (rounds, steps, ...)."""
        idle, place = self.n - 1, jax.lax.axis_index(self.axis_name)

        def aligned(x: jax.Array) -> jax.Array:
            x = _padded(self._chunks(x), idle, idle)
            return jax.lax.dynamic_slice_in_dim(x, idle - place, x.shape[0] - idle)

        return _map(aligned, tree)


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    return jax.tree.map(function, tree)


def _padded(x: jax.Array, before: int, behind: int) -> jax.Array:
    """With zeros along the first axis."""
    return jnp.pad(x, [(before, behind), *[(0, 0)] * (x.ndim - 1)])


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(accumulator_dtype(x.dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _varying_alike(axis_name: str, *trees: Any) -> tuple[Any, ...]:
    """Arrays that vary over all axes of the mesh over which one of them does, and this one."""
    axes = [jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(trees)]
    union = frozenset({axis_name}).union(*axes)

    def cast(x: jax.Array) -> jax.Array:
        missing = union - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return tuple(_map(cast, tree) for tree in trees)


def _devices(operation: str, axis_name: Any) -> int:
    """How many there are along an axis."""
    try:
        return int(jax.lax.axis_size(axis_name))
    except (NameError, TypeError, ValueError):
        raise ValueError(
            f"{operation}: axis_name must be an axis of the mesh of the jax.shard_map that it is "
            f"called in, got {axis_name!r}"
        ) from None


def _own(operation: str, name: str, tree: Any, axis_name: str, n: int) -> Any:
    """The arrays of this device, without the axis of runs."""

    def first(x: Any) -> Any:
        shape = jnp.shape(x)
        if shape[:1] != (1,):
            raise ValueError(
                f"{operation}: arrays of {name} must have an axis in front, of {n} runs, sharded "
                f"over {axis_name!r}: here, on one device, (1, ...), got shape {shape}"
            )
        return x[0]

    return _map(first, tree)


def _check_run(operation: str, layers: Sequence[Layer], carries: Any, xs: jax.Array) -> None:
    """Raises unless layers can be a run on xs of all steps."""
    for i, layer in enumerate(layers):
        name = f"{operation}: layer {i}"
        if layer.input is None:
            raise ValueError(f"{name}: input is None: a run takes what the one below it gives")
        if layer.between is not None:
            raise ValueError(
                f"{name}: between is a function of all steps, so no run could begin before the one "
                "below it has ended: it must be None"
            )
        if type(layer.skip) is int and layer.skip > i + 1:
            raise ValueError(
                f"{name}: skip={layer.skip} leads to another device: it must begin in the run of "
                f"its layer or at the run's input, at most {i + 1} layers below"
            )
    checked = checked_layers(operation, layers, carries, range(len(layers)), xs, {-1: xs})
    h = checked[len(layers) - 1].h
    if xs.shape[2] != h:
        raise ValueError(
            f"{operation}: xs must have as many features as a run's last layer has units, {h}, "
            f"since all runs have weights of one shape, got {xs.shape[2]}"
        )


def _steps_of_a_chunk(operation: str, chunk: int | None, length: int, n: int) -> int:
    """What is asked for, or chunks that are as long as one another."""
    if chunk is not None:
        return min(integer(operation, "chunk", chunk, 1), max(length, 1))
    chunks = max(1, round(math.sqrt(length * (n - 1) / _STEPS_OF_A_START)))
    return -(-length // chunks)
