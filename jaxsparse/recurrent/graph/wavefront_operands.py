"""The operands of a wavefront: what its layers take at each step of their loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxsparse.precision import accumulator_dtype
from jaxsparse.recurrent.graph.edges import Edge
from jaxsparse.recurrent.graph.operands import Operands, dtype_of
from jaxsparse.recurrent.graph.plain import added_ahead
from jaxsparse.recurrent.graph.wavefront_form import WavefrontForm
from jaxsparse.recurrent.products import parts_of


class Times(NamedTuple):
    """When layers run: step t of layer l at step t + offset of the loop.

    Where time runs backwards the loop does, too.
    """

    layers: int
    length: int  # steps of time
    reverse: bool

    @property
    def steps(self) -> int:
        """Of the loop."""
        return self.length + self.layers - 1

    def offset(self, layer: int) -> int:
        return self.layers - 1 - layer if self.reverse else layer

    def runs(self, now: Any) -> Any:
        """Which layers run at a step of the loop: (layers,)."""
        offsets = jnp.array([self.offset(layer) for layer in range(self.layers)])
        return (now >= offsets) & (now < offsets + self.length)

    def skewed(self, x: Any, layer: int) -> Any:
        """An array (t, ...) of a layer by the loop's steps, zeros where it has none."""
        first = self.offset(layer)
        return _padded(x, first, self.layers - 1 - first)

    def straight(self, x: Any, layer: int) -> Any:
        """A layer's own steps of time, (t, ...), of an array (steps, layers, ...)."""
        first = self.offset(layer)
        return x[first : first + self.length, layer]


def _padded(x: Any, before: int, after: int) -> Any:
    return jnp.pad(x, [(before, after), *[(0, 0)] * (x.ndim - 1)]) if before or after else x


class Input(NamedTuple):
    """An input of all layers, of which neighbouring ones have one, and zeros the others."""

    first: int  # layer that has one
    fixed: Any  # (layers, b, parts, h), b or h being 1 where it repeats; None if steps differ
    stream: Any  # (steps, layers, b, parts, h), or None

    def of_layers(self, at: Any, count: int) -> Any:
        """Of all layers (L, ...), at a step of the loop that has ``at`` of the stream."""
        x = self.fixed if at is None else at
        return _padded(x, self.first, count - self.first - x.shape[0])


def _input(of_layers: Sequence[Any], times: Times) -> Input:
    """An input of all layers, of each one's own (t, b, parts, h), t, b or h being 1; or None."""
    having = [layer for layer, x in enumerate(of_layers) if x is not None]
    first, end = having[0], having[-1] + 1
    own = [of_layers[layer] for layer in having]
    shape = jnp.broadcast_shapes(*(x.shape for x in own))
    none = jnp.zeros(shape, own[0].dtype)
    arrays = [none if x is None else jnp.broadcast_to(x, shape) for x in of_layers[first:end]]
    if shape[0] == 1:
        return Input(first, jnp.stack([x[0] for x in arrays]), None)
    skewed = [times.skewed(x, first + i) for i, x in enumerate(arrays)]
    return Input(first, None, jnp.stack(skewed, 1))


class Given(NamedTuple):
    """What layers take beside what they have of each other."""

    inputs: list[Input]  # of their common step
    ahead: tuple[int, ...]  # products to which nodes outside add something, for all units or
    means: tuple[int, ...]  # one number for all of them
    added: list[Input]  # that: of the one and of the other, if there are such


def given(
    form: WavefrontForm, x: Operands, states: Sequence[Any], params: dict[str, Any], times: Times
) -> Given:
    """The inputs of all layers, of the states of the nodes before them."""
    run = range(form.first, form.last + 1)
    dtype = dtype_of(x)
    outside: dict[str, dict[int, list[tuple[Edge, Any]]]] = {
        kind: {n: [] for n in run} for kind in ("ahead", "means")
    }
    for e, (edge, w) in enumerate(zip(params["edges"], x.weights, strict=True)):
        if edge.target in run and edge.source < form.first and e != form.entering:
            outside["means" if edge.kind == "mean" else "ahead"][edge.target].append((edge, w))
    fed = {
        kind: tuple(sorted({p for into in of.values() for edge, _ in into for p in edge.products}))
        for kind, of in outside.items()
    }
    inputs = [
        _input(
            [
                None if (place := own[i]) is None else x.nodes[n].inputs[place]
                for n, own in zip(run, form.alike.inputs, strict=True)
            ],
            times,
        )
        for i in range(len(form.alike.step.inputs))
    ]
    # Means are the same for all units; variances come of their differences.
    added = []
    for kind, of_type in (("ahead", dtype), ("means", accumulator_dtype(dtype))):
        if fed[kind]:
            values = [
                added_ahead(into, states, params["units"][n], of_type, params, fed[kind]).values
                for n, into in outside[kind].items()
            ]
            added.append(_input(values, times))
    return Given(inputs, fed["ahead"], fed["means"], added)


def entering_of(
    form: WavefrontForm, states: Sequence[Any], params: dict[str, Any], times: Times
) -> Any:
    """What the first layer takes from outside, (steps, b, k), or None."""
    if form.entering is None:
        return None
    edge = params["edges"][form.entering]
    x = times.skewed(parts_of(states[edge.source], edge.states), 0)
    return x.reshape(*x.shape[:-2], -1)


def below_of(form: WavefrontForm, before: Any, entering: Any) -> Any:
    """What each layer multiplies of the one below: (L, b, k) of states (L, b, S, h).

    Args:
        form: of the layers, of which one has an edge to the next.
        before: all states of the loop's step before.
        entering: what the first layer takes, or None.
    """
    assert form.below is not None
    below = parts_of(before, form.below[0])
    below = below.reshape(*below.shape[:-2], -1)
    lowest = jnp.zeros_like(below[0]) if entering is None else entering.astype(below.dtype)
    return jnp.concatenate([lowest[None], below[:-1]])


def pointwise(form: WavefrontForm, history: Sequence[Any], dtype: Any) -> dict[int, Any]:
    """What layers take of those below without weights: (L, b, h) for each product.

    Args:
        form: of the layers.
        history: all states (L, b, S, h) of the loop's steps before, the last one first.
        dtype: of the results.
    """
    products: dict[int, Any] = {}
    for term, targets in form.terms.items():
        source = history[term.lag - 1]
        count = source.shape[0]
        for state, p in zip(*term.ends, strict=True):
            value = source[:, :, state].astype(dtype)
            if term.kind == "mean":
                value = jnp.broadcast_to(jnp.mean(value, -1, keepdims=True), value.shape)
            value = _padded(value[: count - term.lag], term.lag, 0)
            if targets != tuple(range(term.lag, count)):
                has = jnp.array([layer in targets for layer in range(count)])
                value = jnp.where(has[:, None, None], value, 0)
            products[p] = products[p] + value if p in products else value
    return products


def weights_of(form: WavefrontForm, x: Operands, params: dict[str, Any]) -> tuple[Any, Any]:
    """The matrices of all layers: their own, and those from below.

    Each has the layers in front: (L, k, m), transposed as those of edges are. The second is None
    where no layer has an edge to the next; a layer without one has zeros.
    """
    run = range(form.first, form.last + 1)
    found: dict[tuple[int, int], Any] = {}
    for e, (edge, w) in enumerate(zip(params["edges"], x.weights, strict=True)):
        if edge.kind == "dense" and (edge.source >= form.first or e == form.entering):
            found[edge.target, edge.delay] = w[0]
    own = jnp.stack([found[n, 1] for n in run])
    if form.below is None:
        return own, None
    none = jnp.zeros_like(next(found[n, 0] for n in run if (n, 0) in found))
    return own, jnp.stack([found.get((n, 0), none) for n in run])
