"""Layers of one form side by side in launches of the kernels of scans, each a chunk behind.

Layer l scans a chunk of time beside layer l + 1, which scans the chunk before. So C chunks of L
layers take C + L - 1 rounds, and a round is one `recurrent_scan` of L scans side by side, each by
its own weights. Between two rounds one product, batched over the layers, multiplies what each layer
had in the last one by the weights of the layer above.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse.precision import accumulator_dtype
from jaxsparse.primitive import bind_local
from jaxsparse.recurrent.graph.alone import Alone, alone, in_order
from jaxsparse.recurrent.graph.operands import Operands, Results, dtype_of
from jaxsparse.recurrent.graph.staggered import (
    Given,
    Times,
    below_of,
    entering_of,
    given,
    pointwise,
    weights_of,
)
from jaxsparse.recurrent.graph.staggered_form import Staggered
from jaxsparse.recurrent.primitive.declaration import recurrent_scan_p
from jaxsparse.recurrent.primitive.operands import FULL
from jaxsparse.recurrent.products import product, written_out
from jaxsparse.recurrent.step import Arrays, OfAnother, Step
from jaxsparse.recurrent.step import Results as OfStep

_ROUND = 25.0  # microseconds that a round takes beside its steps
_MOST_CHUNKS = 64
# All rounds are written out: in a loop XLA launched the kernel twice for each on an H200, and all
# layers took longer than one after the other.
_UNROLLED: bool | int = True


def steps_of_chunk(length: int, layers: int, microseconds: float) -> int:
    """The length of chunks by which all layers take least time, of at most 64 chunks.

    Args:
        length: steps of time.
        layers: how many.
        microseconds: of a step of all layers at once.
    """

    def cost(chunks: int) -> float:
        return (chunks + layers - 1) * (-(-length // chunks) * microseconds + _ROUND)

    return -(-length // min(range(1, min(length, _MOST_CHUNKS) + 1), key=cost))


@dataclasses.dataclass(frozen=True)
class Counting(OfAnother):
    """A step whose carries stay what they are where one more input, its last, is 0."""

    step: Step

    @functools.cached_property
    def inputs(self) -> tuple[int, ...]:  # type: ignore[override]
        return (*self.step.inputs, 1)

    def __call__(self, products: Arrays, carries: Arrays, inputs: Sequence[Arrays]) -> OfStep:
        *own, (counts,) = inputs
        made = self.step(products, carries, own)
        kept = [jnp.where(counts != 0, a, b) for a, b in zip(made.carries, carries, strict=True)]
        return made._replace(carries=kept)


class Chunks(NamedTuple):
    """How layers are scanned in chunks."""

    steps: int  # of a chunk
    written_out: bool  # whether a sparse matrix is a dense one for all launches


def run_chunked(
    form: Staggered, chunks: Chunks, x: Operands, states: Sequence[Any], params: dict[str, Any]
) -> list[Results]:
    """The results of nodes in chunks, of the states of the nodes before them."""
    chunk = chunks.steps
    count, reverse, dtype = form.layers, params["reverse"], dtype_of(x)
    nodes = x.nodes[form.first : form.last + 1]
    times = Times(count, params["length"], reverse, chunk)
    outside = given(form, x, states, params, times)
    inputs = [*outside.inputs, *outside.added]
    one, step = _steps(form, outside, padded=times.parts * chunk > times.length)
    weights, from_below = weights_of(form, x, params)
    (loop,) = (e for e in params["edges"] if e.delay and e.target == form.first)
    sparse = loop.kind == "csr" and not chunks.written_out
    if loop.kind == "csr" and not sparse:
        weights = [jax.vmap(lambda *own: written_out(own))(*weights)]
    counts = jnp.ones((times.length, 1, 1, 1), dtype)
    counts = jnp.stack([times.skewed(counts, layer) for layer in range(count)], 1)

    def body(before: Any, at: Any) -> Any:
        history, state, carries = before
        now, streams, entering, counted = at
        arrays = [
            x.of_layers(stream, count) if stream is not None else x.of_layers(None, count)[:, None]
            for x, stream in zip(inputs, streams, strict=True)
        ]
        own, added = arrays[: len(outside.inputs)], arrays[len(outside.inputs) :]
        more = _added(form, one, outside, added, history, entering, from_below, params, dtype)
        arrays = [*own, *more, *([counted] if step is not one else [])]
        shape = (chunk, *history[0].shape[2:3], history[0].shape[-1])
        made, *rest = bind_local(
            recurrent_scan_p,
            *weights,
            state,
            *carries,
            *arrays,
            step=step,
            sparse=sparse,
            forms=loop.forms if sparse else (),
            not_laid_out=loop.not_laid_out,
            transposed=params["transposed"],
            reversed=(reverse,) * count,
            length=chunk,
            spans=tuple(_span(array, shape) for array in arrays),
            precision=params["precision"],
            recompute=False,
            implementation=params["implementation"],
            variant=None,
        )
        # A layer that has not begun, or has ended, stays what it is, whatever it computes.
        runs = times.runs(now)
        end = made[:, 0 if reverse else -1]
        state, *carries = (
            jnp.where(runs.reshape(-1, *[1] * (new.ndim - 1)), new, old)
            for new, old in zip((end, *rest[: len(carries)]), (state, *carries), strict=True)
        )
        outputs = rest[len(carries) :]
        if isinstance(one, Alone) and one.others:
            *outputs, others = outputs
            made = in_order(one, made, others)
        return ([made, *history[:-1]], state, carries), (made, *outputs)

    first = jnp.stack([node.state for node in nodes])
    of_chunk = jnp.zeros((count, chunk, *first.shape[1:]), dtype)
    carries = [jnp.stack(leaves) for leaves in zip(*(node.carries for node in nodes), strict=True)]
    own_states = jnp.stack([first[:, :, i] for i in form.own[0]], 2)
    (_, _, last), every = jax.lax.scan(
        body,
        ([of_chunk] * form.history, own_states, carries),
        (
            jnp.arange(times.steps),
            [x.stream for x in inputs],
            entering_of(form, states, params, times),
            counts,
        ),
        reverse=reverse,
        unroll=_UNROLLED,
    )

    def of_layer(layer: int) -> Results:
        states, *outputs = (times.straight(array, layer) for array in every)
        return Results(states, [leaf[layer] for leaf in last], outputs)

    return [of_layer(layer) for layer in range(count)]


def _steps(form: Staggered, outside: Given, *, padded: bool) -> tuple[Step, Step]:
    """The common step as that of a scan of its own, and as it is for chunks that are padded."""
    ahead, means = {*outside.ahead}, {*outside.means}
    if form.below is not None:
        ahead |= {*form.below[1]}
    for term in form.terms:
        (means if term.kind == "mean" else ahead).update(term.ends[1])
    step = alone(form.alike.step, *form.own, tuple(sorted(ahead)), tuple(sorted(means)))
    return step, Counting(step) if padded else step


def _added(
    form: Staggered,
    step: Step,
    outside: Given,
    added: Sequence[Any],
    history: Sequence[Any],
    entering: Any,
    weights: Any,
    params: dict[str, Any],
    dtype: Any,
) -> list[Any]:
    """What is added to the products of all layers in a round, and to their means."""
    if not isinstance(step, Alone):
        return []
    wide = accumulator_dtype(dtype)
    h = history[0].shape[-1]
    from_outside = iter(added)
    results = []
    for kind, wanted, given_to, of_type in (
        ("identity", step.ahead, outside.ahead, dtype),
        ("mean", step.added_means, outside.means, wide),
    ):
        if not wanted:
            continue
        terms = list(pointwise(form, kind, history, wide).items())
        if kind == "identity" and form.below is not None:
            below = below_of(form, history[0], entering)
            z = product(
                [weights],
                below.reshape(below.shape[0], -1, below.shape[-1]),
                sparse=False,
                transposed=params["transposed"],
                precision=params["precision"],
                implementation=None,
                out_dtype=wide if terms or given_to else dtype,
                local=True,
            ).reshape(*below.shape[:-1], -1, h)
            if not terms and not given_to and wanted == form.below[1]:
                results.append(z)
                continue
            terms += [(p, z[..., i, :]) for i, p in enumerate(form.below[1])]
        if given_to:
            array = next(from_outside)
            terms += [(p, array[..., i, :]) for i, p in enumerate(given_to)]
        sums = [
            functools.reduce(jnp.add, [value.astype(wide) for q, value in terms if q == p])
            for p in wanted
        ]
        shape = jnp.broadcast_shapes(*(value.shape for value in sums))
        total = jnp.stack([jnp.broadcast_to(value, shape) for value in sums], -2).astype(of_type)
        results.append(total[..., :1] if kind == "mean" else total)
    return results


def _span(x: Any, shape: tuple[Any, ...]) -> str:
    """The dimensions that an input (layers, t, b, parts, h) does not repeat along."""
    sizes = x.shape[1], x.shape[2], x.shape[4]
    return "".join(d for d, n, whole in zip(FULL, sizes, shape, strict=True) if n == whole)
