"""The form that nodes of a graph have as a wavefront: layers in one loop of XLA."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxsparse.recurrent.graph.alike import Alike, alike_as_they_are
from jaxsparse.recurrent.graph.edges import Edge, edges_into
from jaxsparse.recurrent.graph.operands import Operands

Ends = tuple[tuple[int, ...], tuple[int, ...]]  # states of an edge's source, products of its target


class Term(NamedTuple):
    """What nodes take pointwise of nodes below them: edges of kind identity or mean."""

    kind: str
    lag: int  # how many nodes below
    ends: Ends


class WavefrontForm(NamedTuple):
    """Nodes ``first`` to ``last``, both among them, of one form."""

    first: int
    last: int
    alike: Alike
    own: Ends  # of the edges from nodes to themselves
    below: Ends | None  # of those from the node before, if there are such
    entering: int | None  # the edge to the first node that is multiplied as those from below are
    terms: dict[Term, tuple[int, ...]]  # the nodes, counted from the first, that have each

    @property
    def layers(self) -> int:
        return self.last - self.first + 1

    @property
    def fed(self) -> tuple[int, ...]:
        """The products that matrices lead to."""
        ends = [self.own, *([self.below] if self.below else [])]
        return tuple(sorted({p for _, products in ends for p in products}))

    @property
    def history(self) -> int:
        """Of how many nodes below one needs states."""
        return max((1, *(term.lag for term in self.terms)))

    def weight_bytes(self, edges: Sequence[Edge], x: Operands) -> int:
        """Of all matrices that a step multiplies by."""
        nodes = range(self.first, self.last + 1)
        inside = (
            of_edge
            for edge, of_edge in zip(edges, x.weights, strict=True)
            if edge.source in nodes and edge.target in nodes
        )
        arrays = [w for of_edge in inside for w in of_edge]
        return sum(w.size * w.dtype.itemsize for w in arrays)


def wavefront_forms(
    params: dict[str, Any], x: Operands, most_bytes: float = math.inf
) -> tuple[list[WavefrontForm], str]:
    """The runs of nodes of one form, each as long as can be, or why several layers have none.

    Args:
        params: of the graph.
        x: its operands, or their types.
        most_bytes: of weights in a run.
    """
    found: list[WavefrontForm] = []
    reasons: list[str] = []
    edges = params["edges"]
    loops = {edge.target for edge in edges if edge.delay}
    first, count = 0, len(params["nodes"])
    while first < count:
        longest, last = None, first + 1
        while last < count and {first, last} <= loops:
            made = _of_run(first, last, params, x)
            if not isinstance(made, str) and made.weight_bytes(edges, x) > most_bytes:
                made = f"a step would read more than {most_bytes / 2**20:g} MiB of weights"
            if isinstance(made, str):
                reasons.append(made)
                break
            longest, last = made, last + 1
        if longest is not None:
            found.append(longest)
        first = last if longest is not None else first + 1
    return found, "" if found else next(iter(reasons), "")


def _of_run(first: int, last: int, params: dict[str, Any], x: Operands) -> WavefrontForm | str:
    """Nodes ``first`` to ``last``, or why they differ in form."""
    nodes, edges, units = params["nodes"], params["edges"], params["units"]
    run = range(first, last + 1)
    if params["length"] < len(run):
        return "there are fewer steps than layers"
    if len({units[n] for n in run}) > 1:
        return "they differ in size"
    found = alike_as_they_are(tuple(nodes[n] for n in run))
    if found is None:
        return "their steps differ"
    into = {n: [e for e, _ in own] for n, own in edges_into(run, edges).items()}
    loops = {n: [e for e in own if edges[e].delay] for n, own in into.items()}
    if any(len(own) != 1 for own in loops.values()):
        return "a node has no edge to itself"
    own = [e for (e,) in loops.values()]
    inside = [e for es in into.values() for e in es if first <= edges[e].source < edges[e].target]
    below = [e for e in inside if edges[e].kind not in ("identity", "mean")]
    for e in (*own, *below):
        if edges[e].kind != "dense":
            return f"an edge is of kind {edges[e].kind}"
    if any(edges[e].target - edges[e].source > 1 for e in below):
        return "a node multiplies what one further below has"
    if any(len({_ends(edges[e]) for e in group}) > 1 for group in (own, below)):
        return "their edges differ"
    if len({x.weights[e][0].dtype for e in (*own, *below)}) > 1:
        return "their weights differ in dtype"
    for group in zip(*(_dtypes(x.nodes[n].inputs, found, n - first) for n in run), strict=True):
        if len({*group} - {None}) > 1:
            return "their inputs differ in dtype"
    terms: dict[Term, list[int]] = {}
    for e in inside:
        if e not in below:
            edge = edges[e]
            term = Term(edge.kind, edge.target - edge.source, _ends(edge))
            terms.setdefault(term, []).append(edge.target - first)
    ends = _ends(edges[below[0]]) if below else None
    outside = (e for e in into[first] if not edges[e].delay)
    entering = (e for e in outside if below and _enters(e, below[0], params, x))
    return WavefrontForm(
        first,
        last,
        found,
        _ends(edges[own[0]]),
        ends,
        next(entering, None),
        {term: tuple(targets) for term, targets in terms.items()},
    )


def _ends(edge: Edge) -> Ends:
    return edge.states, edge.products


def _dtypes(inputs: Any, found: Alike, layer: int) -> list[Any]:
    """Of each input of the common step, the dtype of a node's own."""
    return [None if i is None else inputs[i].dtype for i in found.inputs[layer]]


def _enters(e: int, below: int, params: dict[str, Any], x: Operands) -> bool:
    """Whether an edge from outside is multiplied as one between layers is."""
    edges, units = params["edges"], params["units"]
    edge, like = edges[e], edges[below]
    return bool(
        edge.kind == "dense"
        and edge.products == like.products
        and len(edge.states) * units[edge.source] == len(like.states) * units[like.source]
        and x.weights[e][0].dtype == x.weights[below][0].dtype
    )
