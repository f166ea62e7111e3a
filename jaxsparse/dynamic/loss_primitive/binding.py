"""Binds the losses of rows."""

from __future__ import annotations

from typing import Any

from jaxsparse.dynamic.loss_primitive.declaration import dynamic_loss_p
from jaxsparse.dynamic.loss_primitive.operands import Operands, Results, joined, split_results
from jaxsparse.primitive import bind


def loss_bind(operands: Operands, **params: Any) -> Results:
    """The results of the primitive by their roles."""
    return split_results(bind(dynamic_loss_p, *joined(operands), **params), params)
