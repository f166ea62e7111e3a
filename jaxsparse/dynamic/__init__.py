"""Dynamic networks: one cell over any graph, every graph its own."""

from jaxsparse.dynamic.form import Channel, Form
from jaxsparse.dynamic.script import Script, stack

__all__ = ["Channel", "Form", "Script", "stack"]
