"""The pointwise part of a scan over graphs: the step of a cell, and of cells of several kinds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.dynamic.cells import Cell
from jaxsparse.recurrent.step import Arrays, Results, Step, flat_groups, grouped


@dataclasses.dataclass(frozen=True)
class KindOfCell:
    """A cell, and what it takes beside the carries of children."""

    cell: Cell
    gates: int  # of x; 0 where rows have no inputs
    products: int
    biased: bool


@dataclasses.dataclass(frozen=True)
class CellStep(Step):
    """The step of rows, each by the cell of its kind.

    Its inputs are the rows' own x, where there are such, the number of their kind, where there are
    several, and the bias of each kind that has one. Its carries are the leaves of the cells' carry
    that a parent reads; the others are outputs.

    All arrays are of rows of one kind: of several cells that one alone is computed.
    """

    kinds: tuple[KindOfCell, ...]
    children: int  # of a row, at most
    tree: Any  # of the carry
    read: tuple[int, ...]  # which of its leaves a parent reads
    wide: tuple[bool, ...]  # which of them are wider than states

    states = 1

    @property
    def cell_name(self) -> str:  # type: ignore[override]
        return " and ".join(dict.fromkeys(kind.cell.__name__ for kind in self.kinds))

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"the cell {self.cell_name}"

    @property
    def products(self) -> int:  # type: ignore[override]
        return max(kind.products for kind in self.kinds)

    @property
    def gates(self) -> int:
        """How many arrays the rows' own inputs are."""
        return max(kind.gates for kind in self.kinds)

    @property
    def carries(self) -> int:  # type: ignore[override]
        return len(self.read)

    @property
    def carry_rows(self) -> tuple[int, int]:  # type: ignore[override]
        return self.children, 1

    @property
    def kept(self) -> tuple[int, ...]:
        """Leaves of the carry that are outputs."""
        return tuple(i for i in range(self.tree.num_leaves) if i not in self.read)

    @property
    def inputs(self) -> tuple[int, ...]:  # type: ignore[override]
        biases = (kind.products for kind in self.kinds if kind.biased)
        own = (self.gates,) if self.gates else ()
        return (*own, *(1,) * (len(self.kinds) > 1), *biases)

    @property
    def product_bias(self) -> int | None:  # type: ignore[override]
        # Of several kinds each has a bias of its own, which rows of others are not to reach.
        one = len(self.kinds) == 1 and self.kinds[0].biased
        return len(self.inputs) - 1 if one else None

    @property
    def outputs(self) -> tuple[int, ...]:  # type: ignore[override]
        return (1,) * len(self.kept)

    @property
    def wide_carries(self) -> tuple[bool, ...]:  # type: ignore[override]
        return tuple(self.wide[i] for i in self.read)

    @property
    def wide_outputs(self) -> tuple[bool, ...]:  # type: ignore[override]
        return tuple(self.wide[i] for i in self.kept)

    def __call__(self, products: Arrays, carries: Arrays, inputs: Sequence[Arrays]) -> Results:
        values = iter(inputs)
        x = list(next(values)) if self.gates else []
        of_kind = next(values)[0] if len(self.kinds) > 1 else None
        biases = [next(values) if kind.biased else None for kind in self.kinds]
        children = grouped(carries, (self.carries,) * self.children)
        like = (*products, *carries, *flat_groups(inputs))[0]

        def of(kind: KindOfCell, bias: Any) -> list[Any]:
            r = list(products[: kind.products])
            if bias is not None:
                r = [a + b for a, b in zip(r, bias, strict=True)]
            return self._carry(kind, x, r, children[: kind.cell.children], like)

        if of_kind is None:
            leaves = of(self.kinds[0], biases[0])
        else:
            one = of_kind if of_kind.ndim == 0 else jnp.ravel(of_kind)[0]
            kind = jnp.clip(one.astype(jnp.int32), 0, len(self.kinds) - 1)
            first = self.kinds[0]
            if all(k == first for k in self.kinds):
                bias = None
                if first.biased:
                    bias = [jax.lax.select_n(kind, *parts) for parts in zip(*biases, strict=True)]
                leaves = of(first, bias)
            else:
                leaves = jax.lax.switch(
                    kind,
                    [lambda k=k, b=b: of(k, b) for k, b in zip(self.kinds, biases, strict=True)],
                )
        return Results(
            [leaves[-1]], [leaves[i] for i in self.read], [[leaves[i]] for i in self.kept]
        )

    def _carry(
        self, kind: KindOfCell, x: Arrays, r: Arrays, children: Sequence[Arrays], like: Any
    ) -> list[Any]:
        """The leaves of the carry of rows of a kind, arrays like one of those that are given."""
        zero = jnp.zeros_like(like)
        trees = []
        for child in children:
            given = dict(zip(self.read, child, strict=True))
            every = [given.get(i, zero) for i in range(self.tree.num_leaves)]
            trees.append(jax.tree.unflatten(self.tree, every))
        carry = kind.cell(tuple(x[: kind.gates]), tuple(r), tuple(trees))
        # A cell may return constants.
        return [
            jnp.broadcast_to(jnp.asarray(a, like.dtype), like.shape) for a in jax.tree.leaves(carry)
        ]
