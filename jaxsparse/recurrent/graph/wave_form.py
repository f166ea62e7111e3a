"""The form that nodes of a graph have as a wave: layers of one kernel."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jaxsparse import _ffi
from jaxsparse.precision import accumulator_dtype
from jaxsparse.recurrent.graph.alike import Alike, Ends, alike, squared_states
from jaxsparse.recurrent.graph.edges import MEANS, Edge, edges_into
from jaxsparse.recurrent.graph.operands import Operands, dtype_of
from jaxsparse.recurrent.plan import WaveForm


class Run(NamedTuple):
    """Nodes in a row as a wave would have them.

    Nodes are counted from the first one. Edges have the states of the common step, and those of its
    products that come from within, which are counted in their order.
    """

    found: Alike
    fed: tuple[int, ...]  # products of the common step that edges within lead to
    inside: tuple[tuple[int, Edge], ...]  # each with the graph's edge that it stands for
    # Of each node, edges from nodes below, with the common step's products. One with a norm leads
    # from what is normalised.
    outside: tuple[tuple[tuple[int, Edge], ...], ...]

    def ahead(self, *, means: bool) -> tuple[int, ...]:
        """The products to which edges from below lead, of kind mean or of other kinds."""
        every = (edge for of_node in self.outside for _, edge in of_node)
        return tuple(sorted({p for e in every if (e.kind in MEANS) == means for p in e.products}))


def run_of(first: int, last: int, params: dict[str, Any]) -> Run | str:
    """Nodes ``first`` to ``last`` as a wave would have them, or why they can't be one."""
    nodes = params["nodes"]
    found = alike(tuple(nodes[first : last + 1]))
    if found is None:
        return "their steps differ"
    if len({params["units"][n] for n in range(first, last + 1)}) > 1:
        return "they differ in size"
    inside: list[tuple[int, Edge]] = []
    outside: list[tuple[tuple[int, Edge], ...]] = []
    for n, into in edges_into(range(first, last + 1), params["edges"]).items():
        ends = [found.placed[n - first].ends[edge.delay] for _, edge in into]
        from_below = []
        for (e, edge), of_target in zip(into, ends, strict=True):
            if edge.source < first and found.norm is not None and edge.kind != "identity":
                if edge.kind not in MEANS:
                    normed = dataclasses.replace(edge, norm=found.norm)
                    from_below.append((e, _led_to(normed, edge.states, of_target)))
                continue
            if edge.source < first:
                squares = squared_states(nodes[edge.source])
                split = _by_squares(edge, edge.states, [s in squares for s in edge.states])
                for one in split:
                    states = tuple(squares.get(s, s) for s in one.states)
                    from_below.append((e, _led_to(one, states, of_target)))
                continue
            of_source = found.placed[edge.source - first].ends[edge.delay].states
            places = [of_source[s] for s in edge.states]
            split = _by_squares(edge, tuple(s.place for s in places), [s.squared for s in places])
            for one in split:
                moved = dataclasses.replace(one, source=edge.source - first, target=n - first)
                if found.norm is not None and not edge.delay and edge.kind == "dense":
                    moved = dataclasses.replace(moved, kind="scaled", norm=found.norm)
                inside.append((e, _led_to(moved, one.states, of_target)))
        outside.append(tuple(from_below))
        reason = _reason_against([edge for _, edge in inside if edge.target == n - first])
        if reason:
            return reason
    fed = tuple(sorted({p for _, edge in inside for p in edge.products}))
    counted = tuple(
        (e, dataclasses.replace(edge, products=tuple(map(fed.index, edge.products))))
        for e, edge in inside
    )
    return Run(found, fed, counted, tuple(outside))


def _by_squares(edge: Edge, states: tuple[int, ...], squared: list[bool]) -> list[Edge]:
    """An edge from states, or one from those that are no squares and one from the squares."""
    assert edge.kind == "mean" or not any(squared)  # what norms take
    if not any(squared):
        return [dataclasses.replace(edge, states=states)]
    split = []
    for kind, wanted in ((edge.kind, False), ("mean_square", True)):
        own = [i for i, is_square in enumerate(squared) if is_square == wanted]
        some, products = (tuple(every[i] for i in own) for every in (states, edge.products))
        if own:
            split.append(dataclasses.replace(edge, kind=kind, states=some, products=products))
    return split


def _led_to(edge: Edge, states: tuple[int, ...], target: Ends) -> Edge:
    products = tuple(target.products[p].place for p in edge.products)
    return dataclasses.replace(edge, states=states, products=products)


def _reason_against(into: list[Edge]) -> str:
    """Why a wave's kernel has not these edges, all that come to a node from within."""
    if sum(edge.delay for edge in into) != 1:
        return "a node has no edge to itself"
    skips = [edge for edge in into if edge.kind == "identity"]
    below = [edge for edge in into if not edge.delay and edge not in skips]
    (n,) = {edge.target for edge in into}
    if any(edge.source != n - 1 for edge in below):
        return "a node takes what one further below has"
    if len(skips) > 1 or any(len(edge.states) > 1 for edge in skips):
        return "a node ends several skips"
    products = [edge for edge in into if edge.delay or (edge in below and edge.kind not in MEANS)]
    if len(products) != 1 + (n > 0):
        return "a node takes no product, or several, of the one below"
    kinds = [edge.kind for edge in products if edge.kind not in ("dense", "scaled")]
    return f"an edge is of kind {kinds[0]}" if kinds else ""


def form_of_run(first: int, last: int, params: dict[str, Any], x: Operands) -> WaveForm | str:
    """The form of nodes ``first`` to ``last`` as a wave, or why they can't be one."""
    run = run_of(first, last, params)
    if isinstance(run, str):
        return run
    own: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    below: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    skips: set[tuple[int, int]] = set()
    means: dict[int, list[tuple[int, bool, int]]] = {n: [] for n in range(1, last - first + 1)}
    weight_dtypes: set[str] = set()
    for e, edge in run.inside:
        if edge.kind in ("dense", "scaled"):
            (own if edge.delay else below).add((edge.products, edge.states))
            weight_dtypes.add(x.weights[e][0].dtype.name)
        elif edge.kind == "identity":
            skips.add((edge.states[0], edge.products[0]))
        else:
            squared = edge.kind == "mean_square"
            ends = zip(edge.states, edge.products, strict=True)
            means[edge.target] += [(state, squared, product) for state, product in ends]
    several = len(below) > 1 or len(skips) > 1 or len(set(map(tuple, means.values()))) > 1
    if len(own) != 1 or several:
        return "their edges differ"
    (own_ends,) = own
    below_ends = below.pop() if below else own_ends
    of_matrices = {*own_ends[0], *below_ends[0]}
    if any(
        list(part) != sorted(set(part)) for ends in (own_ends, below_ends) for part in ends
    ) or of_matrices != {*range(len(of_matrices))}:
        return "an edge's products or states are out of order"
    of_means = tuple(means.get(1, ()))
    if len(of_means) > _ffi.WAVE_MOST_MEANS:
        return f"a node takes {len(of_means)} means"
    found = run.found
    dtypes = {
        tuple(
            None if given is None else x.nodes[n].inputs[given.place].dtype.name
            for given in placed.inputs
        )
        for n, placed in enumerate(found.placed, first)
    }
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
    added = [(run.ahead(means=False), state), (run.ahead(means=True), accumulator_dtype(state))]
    added = [(products, dtype) for products, dtype in added if products]
    return WaveForm(
        products=len(run.fed),
        states=step.states,
        inputs=sum(step.inputs) + sum(len(products) for products, _ in added),
        outputs=sum(step.outputs),
        arrays=max(step.carries, len(step.inputs) + len(added), len(step.outputs)),
        hidden=params["units"][first],
        batch=x.nodes[first].state.shape[-3],
        length=params["length"],
        state_dtype=state.name,
        weight_dtype=weight_dtypes.pop(),
        sparse=False,
        input_dtypes=(*of_inputs, *(dtype.name for _, dtype in added)),
        output_dtypes=tuple("float32" if wide else state.name for wide in step.wide_outputs),
        layers=last - first + 1,
        own_products=own_ends[0],
        own_states=own_ends[1],
        below_products=below_ends[0],
        below_states=below_ends[1],
        skip=skips.pop() if skips else None,
        means=of_means,
        scales=any(edge.kind == "scaled" for _, edge in run.inside),
    )
