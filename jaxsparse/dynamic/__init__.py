"""Dynamic networks: a cell runs over graphs that differ for each example."""

from jaxsparse.dynamic.cells import Cell, cell, chain, tree_lstm
from jaxsparse.dynamic.form import Channel, Form
from jaxsparse.dynamic.graph_builder import GraphBuilder
from jaxsparse.dynamic.graphs import Graphs
from jaxsparse.dynamic.heads import SoftmaxHead
from jaxsparse.dynamic.layout import Layout
from jaxsparse.dynamic.loss import loss
from jaxsparse.dynamic.packing import pack
from jaxsparse.dynamic.prefetch import Prefetch, prefetch
from jaxsparse.dynamic.scan import scan
from jaxsparse.dynamic.script import Script, stack

__all__ = [
    "Cell",
    "Channel",
    "Form",
    "GraphBuilder",
    "Graphs",
    "Layout",
    "Prefetch",
    "Script",
    "SoftmaxHead",
    "cell",
    "chain",
    "loss",
    "pack",
    "prefetch",
    "scan",
    "stack",
    "tree_lstm",
]
