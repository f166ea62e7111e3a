"""A graph node by node: the products of all steps between nodes, then each node's own scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxsparse.precision import accumulator_dtype
from jaxsparse.primitive import bind_local
from jaxsparse.recurrent.graph.alone import Alone, alone
from jaxsparse.recurrent.graph.edges import Edge, added_up, edge_products
from jaxsparse.recurrent.graph.operands import (
    OfNode,
    Operands,
    Results,
    dtype_of,
    given_states,
    has_states,
    split,
)
from jaxsparse.recurrent.primitive.declaration import recurrent_scan_p
from jaxsparse.recurrent.primitive.operands import FULL
from jaxsparse.recurrent.products import parts_of
from jaxsparse.recurrent.step import Step


def plain_graph(*operands: Any, on_gpu: bool = False, **params: Any) -> list[Any]:
    """The graph node by node, of one batch entry."""
    del on_gpu  # the scans of nodes know it when they are lowered
    x = split(operands, params)
    states: list[Any] = []
    flat: list[Any] = []
    for n, step in enumerate(params["nodes"]):
        results = _node(n, x, states, params)
        given = given_states(step)
        states.append(results.states if given is None else x.nodes[n].inputs[given])
        flat += [*([results.states] * has_states(step)), *results.carries, *results.outputs]
    return flat


def _node(n: int, x: Operands, states: Sequence[Any], params: dict[str, Any]) -> Results:
    """The results of a node, of the states of those before it."""
    step, node, units, dtype = params["nodes"][n], x.nodes[n], params["units"][n], dtype_of(x)
    incoming = [
        (edge, w) for edge, w in zip(params["edges"], x.weights, strict=True) if edge.target == n
    ]
    options = {name: params[name] for name in ("transposed", "precision", "implementation")}

    def made(edge: Edge, weights: Sequence[Any]) -> Callable[[Any], Any]:
        source = states[edge.source]
        return lambda dtype: edge_products(
            edge, weights, source, units, dtype, local=True, **options
        )

    between = [(edge, made(edge, w)) for edge, w in incoming if not edge.delay]
    ahead = tuple(sorted({p for edge, _ in between for p in edge.products}))
    sums = added_up(between, ahead, dtype, rounded=False) if between else None
    own = [(edge, w) for edge, w in incoming if edge.delay]
    if own:
        ((edge, weights),) = own
        return _scanned(step, edge, weights, node, ahead, sums, params["spans"][n], params)
    batch = next(node.state.shape[0] for node in x.nodes if node.state is not None)
    return _pointwise(step, node, ahead, sums, (params["length"], batch, units), dtype)


def _scanned(
    step: Step,
    edge: Edge,
    weights: Sequence[Any],
    node: OfNode,
    ahead: tuple[int, ...],
    sums: Any,
    spans: tuple[str, ...],
    params: dict[str, Any],
) -> Results:
    """A node with an edge to itself: a scan."""
    one = alone(step, edge.states, edge.products, ahead)
    first = (parts_of(node.state, edge.states), *node.carries)
    operands = (*weights, *first, *node.inputs, *([] if sums is None else [sums]))
    states, *rest = bind_local(
        recurrent_scan_p,
        *(jnp.expand_dims(x, 0) for x in operands),
        step=one,
        sparse=edge.kind == "csr",
        forms=edge.forms,
        not_laid_out=edge.not_laid_out,
        transposed=params["transposed"],
        reversed=(params["reverse"],),
        length=params["length"],
        spans=(*spans, *(FULL,) * bool(ahead)),
        precision=params["precision"],
        recompute=False,
        implementation=params["implementation"],
        variant=params["variant"],
    )
    states, *rest = (x[0] for x in (states, *rest))
    carries, outputs = rest[: step.carries], rest[step.carries :]
    if isinstance(one, Alone) and one.others:
        *outputs, others = outputs
        states = _in_order(one, states, others)
    return Results(states, carries, outputs)


def _in_order(step: Alone, read: Any, others: Any) -> Any:
    """All states of a step, of those that its edge reads and the others."""
    places = (*step.read, *step.others)
    return parts_of(
        jnp.concatenate([read, others], -2), [places.index(i) for i in range(len(places))]
    )


def _pointwise(
    step: Step,
    node: OfNode,
    ahead: tuple[int, ...],
    sums: Any,
    shape: tuple[int, int, int],
    dtype: Any,
) -> Results:
    """A node whose steps do not depend on one another: whole arrays at once."""
    accumulator = accumulator_dtype(dtype)

    def arrays(x: Any) -> list[Any]:
        parts = range(x.shape[2])
        return [jnp.broadcast_to(x[:, :, p].astype(accumulator), shape) for p in parts]

    def joined(xs: Sequence[Any], wide: bool = False) -> Any:
        return jnp.stack(xs, 2).astype(accumulator if wide else dtype)

    given = dict(zip(ahead, [] if sums is None else arrays(sums), strict=True))
    zero = jnp.zeros(shape, accumulator)
    states, _, outputs = step(
        [given.get(p, zero) for p in range(step.products)], [], [arrays(x) for x in node.inputs]
    )
    return Results(
        joined(states) if states else None,
        [],
        [joined(*pair) for pair in zip(outputs, step.wide_outputs, strict=True)],
    )
