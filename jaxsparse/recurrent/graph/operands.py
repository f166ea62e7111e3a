"""The operands and results of a graph: their roles, core dimensions and dtypes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxsparse.precision import accumulator_dtype
from jaxsparse.primitive import Signature
from jaxsparse.recurrent.primitive.operands import FULL
from jaxsparse.recurrent.step import Step


class OfNode(NamedTuple):
    """The operands of a node."""

    state: Any  # (b, S, h) before the first step; None of a node without an edge of delay 1
    carries: tuple[Any, ...]  # (b, h) each
    inputs: tuple[Any, ...]  # (t, b, parts, h) each, t, b or h being 1 where it repeats


class Operands(NamedTuple):
    """The operands of a graph."""

    weights: tuple[tuple[Any, ...], ...]  # of each edge, in the order of ``Edge.operands``
    nodes: tuple[OfNode, ...]

    @property
    def flat(self) -> list[Any]:
        """As the primitive takes them."""
        weights = [w for of_edge in self.weights for w in of_edge]
        for state, carries, inputs in self.nodes:
            weights += [*([] if state is None else [state]), *carries, *inputs]
        return weights


class Results(NamedTuple):
    """The results of a node."""

    states: Any  # (t, b, S, h); None where it has none of its own
    carries: list[Any]  # (b, h) each, the last ones
    outputs: list[Any]  # (t, b, parts, h) each


def recurrent_nodes(edges: Sequence[Any]) -> frozenset[int]:
    """The nodes with an edge to themselves."""
    return frozenset(edge.target for edge in edges if edge.delay)


@functools.lru_cache(maxsize=1024)
def given_states(step: Step) -> int | None:
    """The input that a step's states are, unchanged, or None."""
    if step.products or step.carries or not step.states:
        return None
    first = 0
    for i, size in enumerate(step.inputs):
        if size == step.states and all(
            _is_input(step, state, first + state) for state in range(size)
        ):
            return i
        first += size
    return None


def _is_input(step: Step, state: int, variable: int) -> bool:
    jaxpr = step.jaxpr.jaxpr
    return jaxpr.outvars[state] is jaxpr.invars[variable]


def has_states(step: Step) -> bool:
    """Whether a node has states that are no input of its own: these are a result."""
    return step.states > 0 and given_states(step) is None


def split(operands: Sequence[Any], params: dict[str, Any]) -> Operands:
    """The primitive's operands, or what stands for them, by their roles."""
    rest = iter(operands)

    def taken(count: int) -> tuple[Any, ...]:
        return tuple(next(rest) for _ in range(count))

    weights = tuple(taken(len(edge.operands)) for edge in params["edges"])
    recurrent = recurrent_nodes(params["edges"])
    nodes = tuple(
        OfNode(next(rest) if n in recurrent else None, taken(step.carries), taken(len(step.inputs)))
        for n, step in enumerate(params["nodes"])
    )
    return Operands(weights, nodes)


def split_results(results: Sequence[Any], params: dict[str, Any]) -> list[Results]:
    """The primitive's results, or what stands for them, by their roles."""
    rest = iter(results)
    return [
        Results(
            next(rest) if has_states(step) else None,
            [next(rest) for _ in range(step.carries)],
            [next(rest) for _ in step.outputs],
        )
        for step in params["nodes"]
    ]


def flat_results(nodes: Sequence[Step], results: Sequence[Results | None]) -> list[Any]:
    """Results as the primitive returns them, None for those of a node that has none."""
    flat: list[Any] = []
    for step, r in zip(nodes, results, strict=True):
        if r is None:
            flat += [None] * (has_states(step) + step.carries + len(step.outputs))
        else:
            flat += [*([r.states] * has_states(step)), *r.carries, *r.outputs]
    return flat


def signature(params: dict[str, Any]) -> Signature:
    """What the primitive declares: names and core dimensions of its operands and results."""
    t, edges, units = params["length"], params["edges"], params["units"]
    recurrent = recurrent_nodes(edges)
    operands, results = [], []
    for e, edge in enumerate(edges):
        for name, spec in edge.operands:
            dims = (dim if dim.isdigit() else _of_edge(dim, e) for dim in spec.split())
            operands.append((f"{name} of edge {e}", " ".join(dims)))
    for n, (step, spans, h) in enumerate(zip(params["nodes"], params["spans"], units, strict=True)):
        sizes = {"t": t, "b": "b", "h": h}
        if n in recurrent:
            operands.append((f"state of node {n}", f"b {step.states} {h}"))
        carries = [(f"carry {i} of node {n}", f"b {h}") for i in range(step.carries)]
        operands += carries
        for i, (parts, span) in enumerate(zip(step.inputs, spans, strict=True)):
            time, rows, units = (sizes[dim] if dim in span else 1 for dim in FULL)
            operands.append((f"input {i} of node {n}", f"{time} {rows} {parts} {units}"))
        if has_states(step):
            results.append((f"states of node {n}", f"{t} b {step.states} {h}"))
        results += carries
        for i, parts in enumerate(step.outputs):
            results.append((f"output {i} of node {n}", f"{t} b {parts} {h}"))
    return Signature(tuple(operands), tuple(results))


def _of_edge(dim: str, edge: int) -> str:
    """A dimension of an edge's weights, "m" or "m+1", under a name of this edge's own."""
    name, plus, one = dim.partition("+")
    return f"{name}{edge}{plus}{one}"


def with_batch(nodes: Sequence[OfNode], counterparts: Sequence[OfNode]) -> Any:
    """The counterpart of an array (..., b, parts, h) of a graph's dtype and whole batch.

    That is the first state; or the first input, where no node has an edge to itself: in derivatives
    of the stack's input alone.
    """
    pairs = list(zip(nodes, counterparts, strict=True))
    states = (other.state for node, other in pairs if node.state is not None)
    inputs = (x for _, other in pairs for x in other.inputs)
    return next(itertools.chain(states, inputs))


def dtype_of(operands: Operands) -> Any:
    """The dtype of states and outputs."""
    return with_batch(operands.nodes, operands.nodes).dtype


def batch_of(operands: Operands) -> Any:
    """The size of the batch, of one batch entry."""
    return with_batch(operands.nodes, operands.nodes).shape[-3]


def result_dtypes(avals: Any, params: dict[str, Any]) -> list[Any]:
    """States and outputs are rounded to one dtype but for wide ones, carries keep theirs."""
    operands = split(avals, params)
    narrow = dtype_of(operands)
    dtypes = []
    for step, node in zip(params["nodes"], operands.nodes, strict=True):
        dtypes += [narrow] * has_states(step)
        dtypes += [x.dtype for x in node.carries]
        dtypes += [accumulator_dtype(narrow) if wide else narrow for wide in step.wide_outputs]
    return dtypes
