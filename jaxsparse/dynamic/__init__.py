"""Dynamic networks: one cell over any graph, every graph its own."""

from jaxsparse.dynamic.form import Channel, Form
from jaxsparse.dynamic.graph_builder import GraphBuilder
from jaxsparse.dynamic.graphs import Graphs
from jaxsparse.dynamic.layout import Layout
from jaxsparse.dynamic.packing import pack
from jaxsparse.dynamic.prefetch import Prefetch, prefetch
from jaxsparse.dynamic.script import Script, stack

__all__ = [
    "Channel",
    "Form",
    "GraphBuilder",
    "Graphs",
    "Layout",
    "Prefetch",
    "Script",
    "pack",
    "prefetch",
    "stack",
]
