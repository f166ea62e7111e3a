"""Recurrent layers on top of one another as a JAX primitive, closed under differentiation.

A graph has nodes, which are steps (`recurrent.step`), and edges, which are linear maps from some
states of a node to some products of a node. For t = 0, ..., T - 1, or the other way round, and for
each node in order,

    products_t = sum of the edges, of states_t of nodes before it and of its own states_{t-1}
    states_t, carries_t, outputs_t = step(products_t, carries_{t-1}, inputs_t)

Nodes may differ in size. A graph of one node and one edge is a scan (`recurrent.primitive`), and
derivatives are as there: in the tangent nodes become tangents, in the transpose adjoints, and edges
turn round.
"""

from jax.interpreters.ad import primitive_jvps, primitive_transposes
from jax.interpreters.batching import primitive_batchers

from jaxsparse.recurrent.graph.batching import batching_rule
from jaxsparse.recurrent.graph.binding import graph_bind
from jaxsparse.recurrent.graph.declaration import recurrent_graph_p
from jaxsparse.recurrent.graph.derivatives import jvp, transpose
from jaxsparse.recurrent.graph.edges import Edge, edge_products
from jaxsparse.recurrent.graph.operands import OfNode, Operands, Results

__all__ = [
    "Edge",
    "OfNode",
    "Operands",
    "Results",
    "edge_products",
    "graph_bind",
    "recurrent_graph_p",
]

primitive_batchers[recurrent_graph_p] = batching_rule
primitive_jvps[recurrent_graph_p] = jvp
primitive_transposes[recurrent_graph_p] = transpose
