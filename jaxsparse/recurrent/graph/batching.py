"""Batching: more sequences make a larger batch; more weights, one run each."""

from __future__ import annotations

import itertools
from typing import Any

from jaxsparse.primitive import batch, bind
from jaxsparse.recurrent.graph.declaration import recurrent_graph_p
from jaxsparse.recurrent.graph.operands import OfNode, Operands, has_states, split, with_batch
from jaxsparse.recurrent.primitive.batching import Rows, mapped_spans


def batching_rule(operands: Any, dims: Any, **params: Any) -> Any:
    """The rule of ``vmap``: the mapped axis joins the batch, unless weights are mapped."""
    axes = split(dims, params)
    if any(axis is not None for axis in itertools.chain(*axes.weights)):
        return batch(recurrent_graph_p, operands, dims, **params)
    values = split(operands, params)
    one, axis = (with_batch(values.nodes, x.nodes) for x in (values, axes))
    rows = Rows.of(operands, dims, one, axis)
    nodes = []
    for x, a, spans in zip(values.nodes, axes.nodes, params["spans"], strict=True):
        nodes.append(
            OfNode(
                None if x.state is None else rows.folded(x.state, a.state, 3),
                tuple(
                    rows.folded(c, axis, 2) for c, axis in zip(x.carries, a.carries, strict=True)
                ),
                tuple(
                    rows.folded(i, axis, 3, repeats="b" not in own)
                    for i, axis, own in zip(x.inputs, a.inputs, spans, strict=True)
                ),
            )
        )
    spans = tuple(
        mapped_spans(own, a.inputs) for own, a in zip(params["spans"], axes.nodes, strict=True)
    )
    results = bind(
        recurrent_graph_p,
        *Operands(values.weights, tuple(nodes)).flat,
        **{**params, "spans": spans},
    )
    places = []
    for step in params["nodes"]:
        places += [3] * has_states(step) + [2] * step.carries + [3] * len(step.outputs)
    pairs = [rows.unfolded(x, place) for x, place in zip(results, places, strict=True)]
    return [list(part) for part in zip(*pairs, strict=True)]
