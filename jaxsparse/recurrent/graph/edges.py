"""Edges of a graph: what leads from the states of one node to the products of another."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.ops.arguments import PATTERN
from jaxsparse.precision import accumulator_dtype, promoted
from jaxsparse.recurrent.layer_step import Norm
from jaxsparse.recurrent.plan import SparseForm
from jaxsparse.recurrent.products import parts_of, product, products_of_steps

# Kinds of edges whose products are equal for all units.
MEANS = ("mean", "mean_square")


@dataclasses.dataclass(frozen=True)
class Edge:
    """A linear map from some states of a node to some products of a node.

    =========== ======================================= ==========================
    kind        what it computes of the states x        weights
    =========== ======================================= ==========================
    dense       x W                                     ``(k, m)``
    heads       x W, the units of a head by its own W   ``(heads, k / heads, m / heads)``
    csr         x W^T                                   CSR ``(m, k)``
    identity    x
    mean        the mean over units, for every unit
    mean_square that of the squares, in float32
    scaled      x W / (the norm's root of x)            ``(k, m)``
    =========== ======================================= ==========================

    Here k is the number of states times the source's units, m that of products times the target's;
    an edge of another kind has as many states as products. Transposed, it leads from the products'
    cotangents to the states'. Edges of kind mean_square and scaled are not linear: they stand in
    waves for the mean of a state that is the square of another, and for a product that a
    `LayerStep` takes scaled.
    """

    source: int  # nodes
    target: int
    states: tuple[int, ...]  # of the source
    products: tuple[int, ...]  # of the target
    # 1: states of the step before, from a node to itself. 0: of the same step, to a later node.
    delay: int
    kind: str = "dense"
    forms: tuple[SparseForm, ...] = ()  # of a sparse matrix that is laid out for kernels of scans
    not_laid_out: str = ""  # why it is not, if that is known
    # Of kind scaled: what the product is divided by. Of other kinds: what the source is
    # normalised by before it is multiplied (`norm_ahead.of_normalised`).
    norm: Norm | None = None

    @property
    def operands(self) -> tuple[tuple[str, str], ...]:
        """Names and core dimensions of its weights."""
        if self.kind in ("dense", "scaled"):
            return (("weights", "k m"),)
        if self.kind == "heads":
            return (("weights", "heads k m"),)
        if self.kind != "csr":
            return ()
        layouts = zip(("layout", "transposed layout"), self.forms, strict=False)
        words = ((name, f"{form.words}") for name, form in layouts)
        return (("weights", "e"), *PATTERN, *words)

    def moved(self, places: dict[int, int]) -> Edge:
        """The edge between nodes that have new places."""
        source, target = places[self.source], places[self.target]
        return dataclasses.replace(self, source=source, target=target)

    def turned(self, nodes: int) -> Edge:
        """The edge in the transposed graph, whose nodes have the opposite order."""
        return dataclasses.replace(
            self,
            source=nodes - 1 - self.target,
            target=nodes - 1 - self.source,
            states=self.products,
            products=self.states,
        )


def edges_into(nodes: range, edges: Sequence[Edge]) -> dict[int, list[tuple[int, Edge]]]:
    """The edges that lead to each of some nodes, and their places."""
    into: dict[int, list[tuple[int, Edge]]] = {n: [] for n in nodes}
    for e, edge in enumerate(edges):
        if edge.target in into:
            into[edge.target].append((e, edge))
    return into


def edge_products(
    edge: Edge,
    weights: Sequence[Any],
    states: Any,
    units: int,
    dtype: Any,
    *,
    transposed: bool,
    precision: Any,
    implementation: str | None,
    local: bool = False,
) -> Any:
    """What an edge gives its target at every step: (t, b, products, h).

    Args:
        edge: the edge.
        weights: its operands.
        states: all states of its source, (t, b, S, h).
        units: of the target.
        dtype: of the result.
        transposed: whether the graph is.
        precision: of products in float32.
        implementation: of sparse products.
        local: whether operands are one device's, in a lowering.
    """
    x = parts_of(states, edge.states)
    if edge.kind == "identity":
        return x.astype(dtype)
    if edge.kind in MEANS:
        count = units if transposed else x.shape[-1]
        wide = x.astype(accumulator_dtype(x.dtype))
        total = jnp.sum(wide if edge.kind == "mean" else wide * wide, -1, keepdims=True)
        return jnp.broadcast_to((total / count).astype(dtype), (*x.shape[:-1], units))
    if edge.kind == "scaled":
        assert edge.norm is not None
        wide, of_norm = accumulator_dtype(dtype), {"transposed": transposed, "precision": precision}
        plain = dataclasses.replace(edge, kind="dense", norm=None)
        z = edge_products(
            plain, weights, states, units, wide, **of_norm, implementation=implementation
        )
        factor = edge.norm.factor(*means_of(x, edge.norm))
        return (z * factor).astype(dtype)
    options = {"precision": precision, "implementation": implementation}
    if edge.kind == "heads":
        return _of_heads(weights[0], x, len(edge.products), dtype, transposed, precision)
    options |= {"sparse": edge.kind == "csr", "transposed": transposed}
    if not local:
        one = [jnp.expand_dims(w, 0) for w in weights[: 1 + len(PATTERN)]]
        return products_of_steps(one, x[None], len(edge.products), dtype, options)[0]
    t, b, parts, h = x.shape
    z = product(weights, x.reshape(t * b, parts * h), out_dtype=dtype, local=True, **options)
    return z.reshape(t, b, len(edge.products), units)


def means_of(x: Any, norm: Norm) -> list[Any]:
    """The means that a norm takes of features (t, b, 1, h): (t, b, 1, 1) each."""
    wide = x.astype(accumulator_dtype(x.dtype))
    return [jnp.mean(a, -1, keepdims=True) for a in (wide, wide * wide)][-norm.statistics :]


def _of_heads(
    weights: Any, x: Any, products: int, dtype: Any, transposed: bool, precision: Any
) -> Any:
    """The products of x (t, b, parts, h), each head's units by its own weights."""
    t, b, parts, h = x.shape
    heads = weights.shape[0]
    parts_of_k, parts_of_m = (products, parts) if transposed else (parts, products)
    w = weights.reshape(
        heads,
        parts_of_k,
        weights.shape[1] // parts_of_k,
        parts_of_m,
        weights.shape[2] // parts_of_m,
    )
    both = promoted(x.dtype, w.dtype)
    z = jnp.einsum(
        "tbqne,npdqe->tbpnd" if transposed else "tbpnd,npdqe->tbqne",
        x.reshape(t, b, parts, heads, h // heads).astype(both),
        w.astype(both),
        precision=jax.lax.Precision.HIGHEST if precision is None else precision,
        preferred_element_type=both if both == dtype else accumulator_dtype(both),
    )
    return z.astype(dtype).reshape(t, b, products, z.shape[-1] * heads)


def added_up(
    terms: Sequence[tuple[Edge, Callable[[Any], Any]]],
    products: Sequence[int],
    dtype: Any,
    *,
    rounded: bool,
) -> Any:
    """What several edges give some products of their target, added up in float32.

    Args:
        terms: an edge, and what makes of a dtype what it gives in that: (..., products, h).
        products: which of the target's to return, (..., products, h); 0 where no edge leads to.
        dtype: of the result.
        rounded: whether each term is rounded to that, too; its cotangent is then of that dtype.
    """
    products = tuple(products)
    terms = [(edge, made) for edge, made in terms if {*edge.products} & {*products}]
    if len(terms) == 1 and terms[0][0].products == products:
        return terms[0][1](dtype)
    wide = accumulator_dtype(dtype)
    every = [(edge.products, made(dtype if rounded else wide).astype(wide)) for edge, made in terms]
    if all(of_edge == products for of_edge, _ in every):
        return functools.reduce(jnp.add, [z for _, z in every]).astype(dtype)
    fed = [i for i, p in enumerate(products) if any(p in of_edge for of_edge, _ in every)]
    parts = []
    for i, end in zip(fed, [*fed[1:], len(products)], strict=True):
        p = products[i]
        own = [z[..., of_edge.index(p), :] for of_edge, z in every if p in of_edge]
        # Zeros, where no edge leads to, as padding: a gradient keeps no array of them.
        around = (i if i == fed[0] else 0, end - i - 1)
        total = functools.reduce(jnp.add, own)[..., None, :]
        padding = [*[(0, 0)] * (total.ndim - 2), around, (0, 0)]
        parts.append(jnp.pad(total, padding) if any(around) else total)
    return jnp.concatenate(parts, -2).astype(dtype)
