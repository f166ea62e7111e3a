"""A layer's step whose norm is taken ahead: of all steps at once, before the product."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxsparse.precision import accumulator_dtype
from jaxsparse.recurrent.graph.alike import Given, ends_of, parts_of_inputs
from jaxsparse.recurrent.graph.edges import MEANS, Edge
from jaxsparse.recurrent.layer_step import LayerStep, Norm
from jaxsparse.recurrent.products import parts_of
from jaxsparse.recurrent.step import Step


class NormAhead(NamedTuple):
    """A step without its norm, and what it takes of the layer's own operands."""

    step: LayerStep
    norm: Norm
    inputs: tuple[Given, ...]
    products: tuple[int, ...]  # its places of the layer's own ones, but means

    def edge(self, edge: Edge) -> Edge | None:
        """One that leads to the layer as it leads to this step; None in place of a mean."""
        if edge.kind in MEANS:
            return None
        is_normalised = not edge.delay and edge.kind != "identity"
        products = tuple(self.products[p] for p in edge.products)
        return dataclasses.replace(
            edge, products=products, norm=self.norm if is_normalised else None
        )


@functools.lru_cache(maxsize=1024)
def norm_ahead(step: Step) -> NormAhead | None:
    """The step with its norm ahead; None of one without a norm, or that keeps arrays of its own.

    What a gradient keeps are the products before they are scaled.
    """
    if not isinstance(step, LayerStep) or step.norm is None:
        return None
    after = step.after_norm()
    parts = parts_of_inputs(step, after)
    own = range(len(step.inputs) - len(after.inputs), len(step.inputs))  # behind the mean's factor
    return NormAhead(
        after,
        step.norm,
        tuple(Given(i, parts["input", i]) for i in own),
        tuple(product.place for product in ends_of(step, after, 0).products),
    )


def of_normalised(
    into: Sequence[tuple[Edge, Any]], states: Sequence[Any]
) -> tuple[list[tuple[Edge, Any]], list[Any]]:
    """Edges, those with a norm as edges from what it makes of their sources, and all sources."""
    terms, sources = [], list(states)
    for edge, w in into:
        if edge.norm is not None:
            x = parts_of(states[edge.source], edge.states)
            normalised = edge.norm.of(x.astype(accumulator_dtype(x.dtype))).astype(x.dtype)
            edge = dataclasses.replace(edge, source=len(sources), states=(0,), norm=None)
            sources.append(normalised)
        terms.append((edge, w))
    return terms, sources
