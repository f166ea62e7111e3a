"""The form that nodes of a graph have as a wave: layers of one kernel."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

from jaxsparse.recurrent.engine import printed_step
from jaxsparse.recurrent.graph.operands import Operands, dtype_of
from jaxsparse.recurrent.plan import WaveForm
from jaxsparse.recurrent.step import Keeping, Step
from jaxsparse.recurrent.step_derivatives import Adjoint


class Alike(NamedTuple):
    """Steps of one form."""

    step: Step  # the same for each
    inputs: tuple[tuple[int | None, ...], ...]  # of each, its own inputs; None stands for zeros


@functools.lru_cache(maxsize=1024)
def alike(steps: tuple[Step, ...]) -> Alike | None:
    """The steps as one, if they are the same program, or may be with more inputs of zeros.

    What reaches a stack's last layer from outside makes its adjoint another step than those of the
    layers below, which reach the loss through it alone.
    """
    adjoints = [_adjoint(step) for step in steps]
    whole = list(steps)
    inputs: list[tuple[int | None, ...]] = [tuple(range(len(step.inputs))) for step in steps]
    if None not in adjoints:
        given = [adjoint for adjoint in adjoints if adjoint is not None]
        of_states = any(step.states_used for step in given)
        used = tuple(sorted({i for step in given for i in step.used}))
        if any(len(step.step.outputs) <= i for step in given for i in used):
            return None
        whole = [_taking(step, of_states, used) for step in steps]
        inputs = [_taken(step, of_states, used) for step in given]
    try:
        if len({(_sizes(step), printed_step(step)) for step in whole}) > 1:
            return None
    except ValueError:  # it can't be printed
        return None
    return Alike(whole[0], tuple(inputs))


def _adjoint(step: Step) -> Adjoint | None:
    """The adjoint that a step is, less some outputs."""
    if isinstance(step, Keeping):
        return _adjoint(step.step)
    return step if isinstance(step, Adjoint) else None


def _taking(step: Step, of_states: bool, used: tuple[int, ...]) -> Step:
    """An adjoint that takes cotangents of the states, or not, and of some outputs."""
    if isinstance(step, Keeping):
        return dataclasses.replace(step, step=_taking(step.step, of_states, used))
    assert isinstance(step, Adjoint)
    return dataclasses.replace(step, states_used=of_states, used=used)


def _taken(step: Adjoint, of_states: bool, used: tuple[int, ...]) -> tuple[int | None, ...]:
    """An adjoint's own inputs in the place of those of `_taking`."""
    own = iter(range(len(step.inputs)))
    has = [True] * len(step.fixed) + [step.states_used] * of_states
    has += [i in step.used for i in used]
    return tuple(next(own) if taken else None for taken in has)


def _sizes(step: Step) -> tuple[Any, ...]:
    return step.products, step.states, step.carries, step.inputs, step.outputs, step.wide_outputs


def form_of_run(first: int, last: int, params: dict[str, Any], x: Operands) -> WaveForm | str:
    """The form of nodes ``first`` to ``last`` as a wave, or why they can't be one."""
    nodes, edges = params["nodes"], params["edges"]
    run = range(first, last + 1)
    found = alike(tuple(nodes[n] for n in run))
    if found is None:
        return "their steps differ"
    if len({params["units"][n] for n in run}) > 1:
        return "they differ in size"
    own: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    below: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    ahead: set[int] = set()
    dtypes: set[tuple[str | None, ...]] = set()
    weight_dtypes: set[str] = set()
    for n in run:
        into = [e for e, edge in enumerate(edges) if edge.target == n]
        inside = [e for e in into if not edges[e].delay and edges[e].source >= first]
        loops = [e for e in into if edges[e].delay]
        if len(loops) != 1:
            return "a node has no edge to itself"
        if [edges[e].source for e in inside] != [n - 1] * (n > first):
            return "a node takes what one further below has"
        for e, group in [*((e, own) for e in loops), *((e, below) for e in inside)]:
            if edges[e].kind != "dense":
                return f"an edge is of kind {edges[e].kind}"
            group.add((edges[e].products, edges[e].states))
            weight_dtypes.add(x.weights[e][0].dtype.name)
        outside = [edges[e] for e in into if not edges[e].delay and e not in inside]
        if any(edge.kind == "mean" for edge in outside):
            return "an edge is of kind mean"
        ahead |= {p for edge in outside for p in edge.products}
        has = found.inputs[n - first]
        dtypes.add(tuple(None if i is None else x.nodes[n].inputs[i].dtype.name for i in has))
    if len(own) != 1 or len(below) > 1:
        return "their edges differ"
    (own_ends,) = own
    below_ends = below.pop() if below else own_ends
    if any(list(part) != sorted(set(part)) for ends in (own_ends, below_ends) for part in ends):
        return "an edge's products or states are out of order"
    state = dtype_of(x)
    of_inputs: list[str] = []
    for names in zip(*dtypes, strict=True):
        kinds = {name for name in names if name is not None} or {state.name}
        if len(kinds) > 1:
            return "their inputs differ in dtype"
        of_inputs += kinds
    if len(weight_dtypes) > 1:
        return "their weights differ in dtype"
    step = found.step
    has_ahead = bool(ahead)
    first_state = x.nodes[first].state
    return WaveForm(
        products=step.products,
        states=step.states,
        inputs=sum(step.inputs) + len(ahead),
        outputs=sum(step.outputs),
        arrays=max(step.carries, len(step.inputs) + has_ahead, len(step.outputs)),
        hidden=params["units"][first],
        batch=first_state.shape[-3],
        length=params["length"],
        state_dtype=state.name,
        weight_dtype=weight_dtypes.pop(),
        sparse=False,
        input_dtypes=(*of_inputs, *(state.name,) * has_ahead),
        output_dtypes=tuple("float32" if wide else state.name for wide in step.wide_outputs),
        layers=len(run),
        own_products=own_ends[0],
        own_states=own_ends[1],
        below_products=below_ends[0],
        below_states=below_ends[1],
    )
