"""Steps of one form: those of the layers of a wave, which share a kernel's code."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxsparse.precision import accumulator_dtype
from jaxsparse.recurrent.engine import printed_step
from jaxsparse.recurrent.layer_step import LayerStep, Norm
from jaxsparse.recurrent.step import Keeping, Step
from jaxsparse.recurrent.step_derivatives import Adjoint, Saving, Tangent

Parts = tuple[tuple[int, ...], ...]  # sums of an array's parts, as the parts of another one
Name = str | tuple[str, int]  # of an input or output


class Given(NamedTuple):
    """An array that stands for another one: its place, and its parts for each part of that."""

    place: int
    parts: Parts


class StateOf(NamedTuple):
    """A state as one of the common step's, or as the square of one."""

    place: int
    squared: bool = False


class Ends(NamedTuple):
    """Of a step's own products and states, those of the common step."""

    products: tuple[StateOf, ...]  # a transpose has states for products, so these look alike
    states: tuple[StateOf, ...]


class Placed(NamedTuple):
    """A step by the places that the common step has for its own."""

    inputs: tuple[Given | None, ...]  # its own, for those of the common step; or None for zeros
    outputs: tuple[Given, ...]  # those of the common step, for its own
    # By an edge's delay. Where the output is a state of its own in some layers, edges to other
    # nodes lead from it in all.
    ends: tuple[Ends, Ends]

    @property
    def states(self) -> tuple[StateOf, ...]:
        """The step's own states among those of the common step."""
        return self.ends[1].states


class Alike(NamedTuple):
    """Steps of one form."""

    step: Step  # the same for each
    placed: tuple[Placed, ...]
    norm: Norm | None  # by which products of what comes in are to be scaled

    @property
    def inputs(self) -> tuple[tuple[int | None, ...], ...]:
        """The places of each one's own inputs; None stands for zeros."""
        return tuple(
            tuple(None if given is None else given.place for given in placed.inputs)
            for placed in self.placed
        )


@functools.lru_cache(maxsize=1024)
def alike(steps: tuple[Step, ...]) -> Alike | None:
    """The steps as one, if they are the same program, or may be with more of what is 0.

    Of a stack's layers some end a skip, or have a layer with a norm above them, and others have
    not. What reaches a stack's last layer from outside makes its adjoint another step than those of
    the layers below, which reach the loss through it alone.
    """
    return _placed(steps, _with_one_layer(steps))


@functools.lru_cache(maxsize=1024)
def alike_as_they_are(steps: tuple[Step, ...]) -> Alike | None:
    """The steps as one, if they are the same program, or adjoints that lack cotangents.

    Their products, states and outputs are those of the common step.
    """
    found = _placed(steps, steps)
    if found is None or any(step.outputs != found.step.outputs for step in steps):
        return None
    return found


def _placed(steps: Sequence[Step], wide: Sequence[Step]) -> Alike | None:
    """The steps as one, by what was made of them so that they may be."""
    adjoints = [step for step in map(_bare, steps) if isinstance(step, Adjoint)]
    whole = [_bare(step) for step in wide]
    if len(adjoints) == len(steps):
        of_states = any(step.states_used for step in adjoints)
        used = tuple(sorted({i for step in adjoints for i in step.used}))
        if any(len(step.step.outputs) <= i for step in adjoints for i in used):
            return None
        whole = [
            dataclasses.replace(step, states_used=of_states, used=used)
            for step in whole
            if isinstance(step, Adjoint)
        ]
    names = _names_of_outputs(whole[0])
    kept = [[_names_of_outputs(_bare(step))[i] for i in _kept(step)] for step in steps]
    every = tuple(i for i, name in enumerate(names) if any(name in own for own in kept))
    of_every = [names[i] for i in every]
    if any({*own} - {*of_every} for own in kept):
        return None
    if len(every) < len(names):
        whole = [Keeping(step, every) for step in whole]
    try:
        if len({(_sizes(step), printed_step(step)) for step in whole}) > 1:
            return None
    except (ValueError, IndexError):  # it can't be printed, or has not these outputs
        return None
    placed = []
    for before, after, own in zip(map(_bare, steps), map(_bare, wide), kept, strict=True):
        parts = parts_of_inputs(before, after)
        places = {name: i for i, name in enumerate(_names_of_inputs(before))}
        inputs = tuple(
            Given(places[name], parts[name]) if name in places else None
            for name in _names_of_inputs(_bare(whole[0]))
        )
        sizes = zip(inputs, whole[0].inputs, strict=True)
        if any(given is not None and len(given.parts) != size for given, size in sizes):
            return None
        parts = _parts_of_outputs(before, after)
        outputs = tuple(Given(of_every.index(name), parts[name]) for name in own)
        placed.append(
            Placed(inputs, outputs, (ends_of(before, after, 0), ends_of(before, after, 1)))
        )
    layer = _layer(whole[0])
    return Alike(whole[0], tuple(placed), layer.norm if layer and layer.scaled else None)


def _with_one_layer(steps: Sequence[Step]) -> list[Step]:
    """Steps whose layers have all that one of them has, of skips and of states for others."""
    layers = [layer for layer in map(_layer, steps) if layer is not None]
    if len(layers) < len(steps):
        return list(steps)
    skipping = any(layer.skipping for layer in layers)
    passes_output = any(layer.passes_output for layer in layers)
    # A kernel takes the mean of squares itself, but not that of their tangents.
    passes_square = _is_derivative(steps[0]) and any(layer.passes_square for layer in layers)
    # What a gradient keeps is not scaled yet.
    in_place = all(isinstance(_bare(step), LayerStep) for step in steps)

    def changed(layer: LayerStep) -> LayerStep:
        layer = dataclasses.replace(
            layer, skipping=skipping, passes_output=passes_output, passes_square=passes_square
        )
        return layer.in_place() if in_place else layer

    wide = [_with(step, changed) for step in steps]
    return [_saving(step, wide, steps) for step in wide]


def parts_as(x: Any, given: Given) -> Any:
    """An array with the parts of the one that it stands for."""
    if given.parts == _whole(x.shape[2]):
        return x
    parts = []
    for own in given.parts:
        wide = [x[:, :, p : p + 1].astype(accumulator_dtype(x.dtype)) for p in own]
        parts.append(sum(wide[1:], wide[0]).astype(x.dtype) if own else jnp.zeros_like(x[:, :, :1]))
    return jnp.concatenate(parts, 2)


def own_states(states: Any, places: Sequence[StateOf]) -> Any:
    """Those of a node, (..., S, h), of an array that has them, or what they are squares of."""
    if tuple(places) == tuple(map(StateOf, range(states.shape[-2]))):
        return states
    own = []
    for place, squared in places:
        one = states[..., place : place + 1, :]
        wide = one.astype(accumulator_dtype(one.dtype))
        own.append((wide * wide).astype(one.dtype) if squared else one)
    return jnp.concatenate(own, -2)


def squared_states(step: Step) -> dict[int, int]:
    """The states that are squares of others, if it is no derivative that has them."""
    layer = _layer(step)
    if layer is None or _is_derivative(step) or not layer.passes_square:
        return {}
    return {layer.states - 1: layer.states - 2}


def _layer(step: Step) -> LayerStep | None:
    """The layer's step that a step is made of."""
    while not isinstance(step, LayerStep):
        if not isinstance(step, Keeping | Saving | Tangent | Adjoint):
            return None
        step = step.step
    return step


def _is_derivative(step: Step) -> bool:
    while isinstance(step, Keeping | Saving):
        step = step.step
    return not isinstance(step, LayerStep)


def _with(step: Any, changed: Callable[[LayerStep], LayerStep]) -> Step:
    """A step with its layer's changed."""
    if isinstance(step, LayerStep):
        return changed(step)
    inner = _with(step.step, changed)
    if isinstance(step, Adjoint):  # what else its inner step reads comes before
        names, own = _names_of_inputs(inner), _names_of_inputs(step.step)
        linear = tuple(names.index(own[i]) for i in step.linear)
        return dataclasses.replace(step, step=inner, linear=linear)
    made: Step = dataclasses.replace(step, step=inner)
    return made


def _saving(step: Step, wide: Sequence[Step], steps: Sequence[Step]) -> Step:
    """A step that keeps, if any, all products and carries that one of the steps keeps."""
    if isinstance(step, Keeping):
        return dataclasses.replace(step, step=_saving(step.step, wide, steps))
    if not isinstance(step, Saving):
        return step
    products: set[int] = set()
    carries: set[int] = set()
    for before, after in zip(map(_bare, steps), map(_bare, wide), strict=True):
        if isinstance(before, Saving):
            of_products = ends_of(before, after, 1).products
            products |= {of_products[p].place for p in before.saved.products}
            carries |= {*before.saved.carries}
    saved = step.saved._replace(products=tuple(sorted(products)), carries=tuple(sorted(carries)))
    return dataclasses.replace(step, saved=saved)


def ends_of(before: Any, after: Any, delay: int) -> Ends:
    """Where a step has the products and states of the one that it was made of.

    Args:
        before: the one, a part of a graph.
        after: what `_with` or `norm_ahead` made of it.
        delay: of the edges that lead there.
    """
    if before == after:
        products, states = (tuple(map(StateOf, range(n))) for n in (before.products, before.states))
        return Ends(products, states)
    if isinstance(before, Adjoint):
        products, states = ends_of(before.step, after.step, delay)
        return Ends(states, products)
    if not isinstance(before, LayerStep):
        return ends_of(before.step, after.step, delay)
    gates = dict(enumerate(range(before.step.products)))
    gates |= dict(zip(before.slots, after.slots, strict=True))
    skips = [after.gates] * before.skipping
    of_gates = [gates[p] for p in range(before.gates)]
    of_products = map(StateOf, (*of_gates, *skips, *after.means))
    is_output = not delay and after.passes_output and not before.passes_output
    of_states = [StateOf(int(is_output)), *[StateOf(1)] * before.passes_output]
    if before.passes_square:
        of_states.append(StateOf(after.states - 1, squared=not after.passes_square))
    return Ends(tuple(of_products), tuple(of_states))


def _names_of_inputs(step: Any) -> list[Name]:
    """What the inputs of a step are, by which they are found in what was made of it."""
    if isinstance(step, Keeping | Saving):
        return _names_of_inputs(step.step)
    if isinstance(step, Tangent):
        return [
            *("saved products",) * bool(step.saved.products),
            *("saved means",) * bool(step.saved.means),
            *(("saved carry", i) for i in step.saved.carries),
            *(("read", i) for i in step.read),
            *("shift",) * step.shifted,
            *(("active", i) for i in step.active),
        ]
    if isinstance(step, Adjoint):
        inner = _names_of_inputs(step.step)
        used = [("used", i) for i in step.used]
        return [*(inner[i] for i in step.fixed), *("states",) * step.states_used, *used]
    return [("input", i) for i in range(len(step.inputs))]


def _names_of_outputs(step: Any) -> list[Name]:
    """The same of outputs, of a step that keeps all."""
    if isinstance(step, Saving):
        return [
            *(("output", i) for i in range(len(step.step.outputs))),
            *("saved products",) * bool(step.saved.products),
            *(("saved carry", i) for i in step.saved.carries),
        ]
    if isinstance(step, Adjoint):
        inner = _names_of_inputs(step.step)
        return [inner[i] for i in step.linear]
    return [("output", i) for i in range(len(step.outputs))]


def parts_of_inputs(before: Any, after: Any) -> dict[Name, Parts]:
    """Of each input of a step, the own parts in the order of what was made of it."""
    names = _names_of_inputs(before)
    parts = {name: _whole(size) for name, size in zip(names, before.inputs, strict=True)}
    if before == after:
        return parts
    if isinstance(before, Keeping | Saving):
        return parts_of_inputs(before.step, after.step)
    products, _ = ends_of(before, after, 1)
    if isinstance(before, LayerStep):
        if before.bias is not None:
            parts["input", before.bias] = _in_order(products[: before.gates], range(after.gates))
        return parts
    if isinstance(before, Adjoint):
        inner = parts_of_inputs(before.step, after.step)
        parts |= {name: inner[name] for name in parts if name in inner}
        return parts | {"states": _in_order(products, range(after.products))}
    for name, own, wanted in zip(_SAVED, before.saved, after.saved, strict=False):
        parts[name] = _in_order([products[p] for p in own], wanted)
    return parts | {"shift": _in_order(products, range(after.products))}


_SAVED = ("saved products", "saved means")  # the first members of `Saved`


def _parts_of_outputs(before: Any, after: Any) -> dict[Name, Parts]:
    """Of each output of a step, its parts by their places in what was made of it."""
    names = _names_of_outputs(before)
    parts = {name: _whole(size) for name, size in zip(names, before.outputs, strict=True)}
    if isinstance(before, Saving):
        products, _ = ends_of(before, after, 1)
        kept = (products[p].place for p in before.saved.products)
        parts["saved products"] = tuple((after.saved.products.index(p),) for p in kept)
    return parts


def _whole(size: int) -> Parts:
    return tuple((i,) for i in range(size))


def _in_order(places: Sequence[StateOf], wanted: Sequence[int]) -> Parts:
    """For each wanted place, which of the given ones it is."""
    return tuple(tuple(i for i, of in enumerate(places) if of.place == p) for p in wanted)


def _kept(step: Step) -> Sequence[int]:
    """The outputs of a step, among those that it has without `Keeping`."""
    return step.kept if isinstance(step, Keeping) else range(len(step.outputs))


def _bare(step: Step) -> Step:
    return step.step if isinstance(step, Keeping) else step


def _sizes(step: Step) -> tuple[Any, ...]:
    return step.products, step.states, step.carries, step.inputs, step.outputs, step.wide_outputs
