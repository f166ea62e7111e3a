"""A graph node by node: the products of all steps between nodes, then each node's own scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxsparse.precision import accumulator_dtype
from jaxsparse.primitive import bind_local
from jaxsparse.recurrent.graph.alike import parts_as, squared_states
from jaxsparse.recurrent.graph.alone import Alone, alone, in_order
from jaxsparse.recurrent.graph.edges import MEANS, Edge, added_up, edge_products
from jaxsparse.recurrent.graph.norm_ahead import norm_ahead, of_normalised
from jaxsparse.recurrent.graph.operands import (
    OfNode,
    Operands,
    Results,
    batch_of,
    dtype_of,
    given_states,
    has_states,
    split,
)
from jaxsparse.recurrent.primitive.declaration import recurrent_scan_p
from jaxsparse.recurrent.primitive.operands import FULL
from jaxsparse.recurrent.products import parts_of
from jaxsparse.recurrent.stacking import joined_heads, stacked, stacked_heads
from jaxsparse.recurrent.step import Step

PLAIN = "node by node"  # what a graph is without a kernel of its own
ON_CPU = "on a CPU only its sparse products have kernels, those of spmm"


def plain_graph(*operands: Any, **params: Any) -> list[Any]:
    """The graph node by node, of one batch entry."""
    x = split(operands, params)
    states: list[Any] = []
    flat: list[Any] = []
    for n, step in enumerate(params["nodes"]):
        results = node_alone(n, x, states, params)
        given = given_states(step)
        states.append(results.states if given is None else x.nodes[n].inputs[given])
        flat += [*([results.states] * has_states(step)), *results.carries, *results.outputs]
    return flat


class Added(NamedTuple):
    """What the states of other nodes add to some products at every step."""

    products: tuple[int, ...]
    values: Any  # (t, b, products, h)
    span: str


def node_alone(n: int, x: Operands, states: Sequence[Any], params: dict[str, Any]) -> Results:
    """The results of a node, of the states of those before it."""
    step, node, spans, dtype = params["nodes"][n], x.nodes[n], params["spans"][n], dtype_of(x)
    incoming = [
        (edge, w) for edge, w in zip(params["edges"], x.weights, strict=True) if edge.target == n
    ]
    ahead = norm_ahead(step)
    if ahead is not None:
        # The scan then reads one sum in each step, in place of products, means and what the means
        # are multiplied by.
        step = ahead.step
        node = node._replace(inputs=tuple(parts_as(node.inputs[i.place], i) for i in ahead.inputs))
        spans = tuple(spans[i.place] for i in ahead.inputs)
        led = [(ahead.edge(edge), w) for edge, w in incoming]
        incoming, states = of_normalised([(e, w) for e, w in led if e is not None], states)
    between = [(edge, w) for edge, w in incoming if not edge.delay]
    units = params["units"][n]
    added = added_ahead(
        [(e, w) for e, w in between if e.kind not in MEANS], states, units, dtype, params
    )
    # Means are the same for all units; variances come of their differences.
    wide = accumulator_dtype(dtype)
    means = added_ahead(
        [(e, w) for e, w in between if e.kind in MEANS], states, units, wide, params
    )
    own = [(edge, w) for edge, w in incoming if edge.delay]
    if own:
        ((edge, weights),) = own
        return _scanned(step, edge, weights, node, added, means, spans, params)
    return _pointwise(step, node, [added, means], (params["length"], batch_of(x), units), dtype)


def added_ahead(
    incoming: Sequence[tuple[Edge, Any]],
    states: Sequence[Any],
    units: int,
    dtype: Any,
    params: dict[str, Any],
    products: tuple[int, ...] | None = None,
) -> Added:
    """What edges from other nodes add, in a dtype: all of them means, or none.

    To the products that they lead to, or to those that are given.
    """
    options = {name: params[name] for name in ("transposed", "precision", "implementation")}
    if products is None:
        products = tuple(sorted({p for edge, _ in incoming for p in edge.products}))
    if not incoming:
        return Added((), None, "")

    def made(edge: Edge, weights: Sequence[Any]) -> Callable[[Any], Any]:
        source = states[edge.source]
        return lambda dtype: edge_products(
            edge, weights, source, units, dtype, local=True, **options
        )

    terms = [(edge, made(edge, w)) for edge, w in incoming]
    values = added_up(terms, products, dtype, rounded=False)
    if incoming[0][0].kind in MEANS:
        return Added(products, values[..., :1], "tb")
    return Added(products, values, FULL)


def _scanned(
    step: Step,
    edge: Edge,
    weights: Sequence[Any],
    node: OfNode,
    added: Added,
    means: Added,
    spans: tuple[str, ...],
    params: dict[str, Any],
) -> Results:
    """A node with an edge to itself: a scan, or one for each head side by side."""
    read, fed = edge.states, edge.products
    # What XLA computes where it adds it up is not written in every step.
    squares = squared_states(step)
    one = alone(step, read, fed, added.products, means.products, squares=squares)
    more = [x for x in (added, means) if x.products]
    spans = (*spans, *(x.span for x in more))
    heads = weights[0].shape[0] if edge.kind == "heads" else 1
    states, *rest = bind_local(
        recurrent_scan_p,
        *(weights if edge.kind == "heads" else [jnp.expand_dims(w, 0) for w in weights]),
        *(stacked_heads([x], heads) for x in (parts_of(node.state, edge.states), *node.carries)),
        *(
            stacked_heads([x], heads) if "h" in span else stacked([x] * heads)
            for x, span in zip((*node.inputs, *(x.values for x in more)), spans, strict=True)
        ),
        step=one,
        sparse=edge.kind == "csr",
        forms=edge.forms,
        not_laid_out=edge.not_laid_out,
        transposed=params["transposed"],
        reversed=(params["reverse"],) * heads,
        length=params["length"],
        spans=spans,
        precision=params["precision"],
        recompute=False,
        implementation=params["implementation"],
        variant=params["variant"],
    )
    states, *rest = map(joined_heads, (states, *rest))
    carries, outputs = rest[: step.carries], rest[step.carries :]
    if isinstance(one, Alone) and (one.others or one.squares):
        count = len(step.outputs)
        states = in_order(one, states, outputs[count:])
        outputs = outputs[:count]
    return Results(states, carries, outputs)


def _pointwise(
    step: Step,
    node: OfNode,
    added: Sequence[Added],
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

    products = [jnp.zeros(shape, accumulator)] * step.products
    for own in added:
        for p, x in zip(own.products, arrays(own.values) if own.products else (), strict=True):
            products[p] = products[p] + x
    states, _, outputs = step(products, [], [arrays(x) for x in node.inputs])
    return Results(
        joined(states) if states else None,
        [],
        [joined(*pair) for pair in zip(outputs, step.wide_outputs, strict=True)],
    )
