"""Programs in which graphs of layers are computed as a GPU's choice computes them."""

from __future__ import annotations

import jax
from recurrent_problems import compiled

from jaxsparse import H200
from jaxsparse.recurrent.graph import recurrent_graph_p


def with_graphs_as(choose, function, *operands):
    """The results of a function, as leaves, and what each graph in it was computed as.

    Args:
        choose: of a graph's params, the types of its operands and a GPU, the fallback for it.
        function: of the operands.
        *operands: of it.
    """
    closed, chosen = jax.make_jaxpr(function)(*operands), []

    def computed(*flat):
        values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        values |= dict(zip(closed.jaxpr.invars, flat, strict=True))

        def read(v):
            return v.val if hasattr(v, "val") else values[v]

        for eqn in closed.eqns:
            given = [read(v) for v in eqn.invars]
            if eqn.primitive is recurrent_graph_p:
                choice = choose(eqn.params, [v.aval for v in eqn.invars], H200)
                chosen.append(choice)
                compute = choice.compute or eqn.primitive.bind
                results = compute(*given, **eqn.params)
            else:
                results = eqn.primitive.bind(*given, **eqn.params)
                results = results if eqn.primitive.multiple_results else [results]
            values |= dict(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in closed.jaxpr.outvars]

    return compiled(computed)(*jax.tree.leaves(operands)), chosen
