"""Dynamic networks: one cell over any graph, every graph its own."""

from jaxsparse.dynamic.cells import Cell, cell, chain, tree_lstm
from jaxsparse.dynamic.form import Channel, Form
from jaxsparse.dynamic.scan import scan
from jaxsparse.dynamic.script import Script, stack

__all__ = ["Cell", "Channel", "Form", "Script", "cell", "chain", "scan", "stack", "tree_lstm"]
