"""Binds a graph: without outputs that repeat, its batch cut alike in all operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxsparse.primitive import bind
from jaxsparse.recurrent.graph.declaration import recurrent_graph_p
from jaxsparse.recurrent.graph.operands import (
    OfNode,
    Operands,
    Results,
    given_states,
    split_results,
)
from jaxsparse.recurrent.primitive.binding import cut_alike
from jaxsparse.recurrent.step import without_repeats


def graph_bind(operands: Operands, **params: Any) -> list[Results]:
    """Binds the primitive; returns each node's results, all states among them."""
    operands = _with_batch_cut_alike(operands, params["spans"])
    steps, places = zip(*map(without_repeats, params["nodes"]), strict=True)
    params = {**params, "nodes": steps}
    results = split_results(bind(recurrent_graph_p, *operands.flat, **params), params)
    every = []
    for step, place, node, (states, carries, outputs) in zip(
        steps, places, operands.nodes, results, strict=True
    ):
        given = given_states(step)
        if given is not None:
            states = node.inputs[given]
        every.append(Results(states, carries, [states if p is None else outputs[p] for p in place]))
    return every


def _with_batch_cut_alike(operands: Operands, spans: Sequence[Sequence[str]]) -> Operands:
    arrays: list[Any] = []
    axes: list[int | None] = []
    for (state, carries, inputs), own in zip(operands.nodes, spans, strict=True):
        arrays += [*([] if state is None else [state]), *carries, *inputs]
        axes += [-3] * (state is not None) + [-2] * len(carries)
        axes += [-3 if "b" in span else None for span in own]
    rest = iter(cut_alike(arrays, axes))
    nodes = tuple(
        OfNode(
            None if state is None else next(rest),
            tuple(next(rest) for _ in carries),
            tuple(next(rest) for _ in inputs),
        )
        for state, carries, inputs in operands.nodes
    )
    return Operands(operands.weights, nodes)
