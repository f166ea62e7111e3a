"""The arrays of a topology, how they travel, and what they count as in a program."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Literal, Self

import jax
import numpy as np

from jaxsparse.layouts import KINDS
from jaxsparse.pattern import Pattern, is_concrete, transpose_is_missing
from jaxsparse.topology_key import TopologyKey

_PARTS = ("pattern", "transposed_pattern", "permutation", "layouts", "shape", "kind")
_FIRST_KINDS = 2  # of layouts: tile_starts and scan_layout
_FLOAT0 = jax.dtypes.float0


class TopologyParts:
    """What a `jaxsparse.Topology` holds, without what makes it.

    Trees and pickles are rebuilt from tracers, shapes and placeholders too: nothing here computes.
    """

    pattern: Pattern
    transposed_pattern: Any  # a Pattern or None
    permutation: Any  # a jax.Array or None
    layouts: Mapping[str, Any]
    shape: tuple[int, int]
    kind: Literal["static", "dynamic", "tangent"]

    __slots__ = (
        "_key",  # these three are made when first asked for
        "_row_indices",
        "_transposed",
        "kind",
        "layouts",
        "pattern",
        "permutation",
        "shape",
        "transposed_pattern",
    )

    def _set(
        self,
        pattern: Any,
        transposed_pattern: Any,
        permutation: Any,
        layouts: Mapping[str, Any],
        shape: tuple[int, int],
        kind: Literal["static", "dynamic", "tangent"],
    ) -> None:
        self.pattern = pattern
        self.transposed_pattern = transposed_pattern
        self.permutation = permutation
        self.layouts = types.MappingProxyType(dict(layouts))
        self.shape = shape
        self.kind = kind
        self._key: TopologyKey | None = None
        self._row_indices: jax.Array | None = None
        self._transposed: Any = None

    @classmethod
    def _from_parts(
        cls,
        pattern: Any,
        transposed_pattern: Any,
        permutation: Any,
        layouts: Mapping[str, Any],
        shape: tuple[int, int],
        kind: Literal["static", "dynamic", "tangent"] = "dynamic",
    ) -> Self:
        topology = object.__new__(cls)
        topology._set(pattern, transposed_pattern, permutation, layouts, shape, kind)
        return topology

    def _with(self, **parts: Any) -> Self:
        return self._from_parts(**{name: getattr(self, name) for name in _PARTS} | parts)

    def _of_kind(self, kind: Literal["static", "dynamic", "tangent"]) -> Self:
        return self if kind == self.kind else self._with(kind=kind)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _PARTS} | {"layouts": dict(self.layouts)}

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple):  # pickled when each layout was an attribute
            slots = state[1]
            layouts = {name: slots[name] for name in KINDS if slots.get(name) is not None}
            state = {name: slots.get(name) for name in _PARTS} | {"layouts": layouts}
        self._set(**state)

    def tree_flatten_with_keys(self) -> Any:
        """A child for each kind of layout, by its name: None where there is no such layout.

        Kinds that came later have none there, at the end, so that older files fit.
        """
        layouts = [*map(self.layouts.get, KINDS)]
        while len(layouts) > _FIRST_KINDS and layouts[-1] is None:
            layouts.pop()
        parts = [self.pattern, self.transposed_pattern, self.permutation, *layouts]
        if self.kind == "tangent":
            parts = jax.tree.map(lambda x: np.zeros(np.shape(x), _FLOAT0), parts)
        keys = map(jax.tree_util.GetAttrKey, (*_PARTS[:3], *KINDS))
        return list(zip(keys, parts, strict=False)), self.shape

    @classmethod
    def tree_unflatten(cls, shape: tuple[int, int], parts: Any) -> Self:
        """Only stores what it gets, which need not be arrays."""
        pattern, transposed_pattern, permutation, *layouts = parts
        offsets = getattr(pattern, "row_offsets", None)
        return cls._from_parts(
            pattern,
            transposed_pattern,
            permutation,
            {name: x for name, x in zip(KINDS, layouts, strict=False) if x is not None},
            shape,
            "tangent" if getattr(offsets, "dtype", None) == _FLOAT0 else "dynamic",
        )

    @property
    def row_offsets(self) -> jax.Array:
        """int32 ``(..., m + 1)``."""
        return self.pattern.row_offsets

    @property
    def column_indices(self) -> jax.Array:
        """int32 ``(..., nse)``."""
        return self.pattern.column_indices

    @property
    def nse(self) -> int:
        """Stored entries of each pattern, padding included: static."""
        return self.pattern.column_indices.shape[-1]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Leading dimensions of a batch of patterns; () for one."""
        return self.pattern.column_indices.shape[:-1]

    @property
    def has_transpose(self) -> bool:
        """Whether it has the transposed pattern; see the class."""
        return self.transposed_pattern is not None

    @property
    def static(self) -> bool:
        """Whether a CSR carries this pattern as a part of its type, rather than as leaves."""
        return self.kind == "static"

    def as_dynamic(self) -> Self:
        """The same pattern, dynamic; see the class.

        >>> import jax
        >>> from jaxsparse import Topology
        >>> topology = Topology([0, 1], [3], (1, 4))
        >>> len(jax.tree.leaves(topology.as_dynamic())) == len(jax.tree.leaves(topology))
        True
        """
        return self._of_kind("dynamic")

    def as_tangent(self) -> Self:
        """The pattern of a derivative: static like this one, or with leaves of JAX's type float0.

        JAX gives integers derivatives of type float0, which no arithmetic takes: what an optimizer
        or ``jax.tree.map`` computes with the leaves of a matrix stops there instead of changing
        the pattern.
        """
        return self if self.static else self._of_kind("tangent")

    @property
    def has_positions(self) -> bool:
        """False for a derivative's pattern whose arrays became float0 on the way out of a program.

        See `as_tangent`.
        """
        return not (self.kind == "tangent" and self.row_offsets.dtype == _FLOAT0)

    def check_positions(self) -> None:
        """Raises ValueError where `has_positions` is False."""
        if not self.has_positions:
            raise ValueError(
                f"{self!r} came out of a program as the pattern of a derivative, without its "
                "positions: use a.with_values(gradient.values), a being what was differentiated"
            )

    def check_transpose(self, purpose: str) -> None:
        """Raises ValueError where `has_transpose` is False, naming what needs it."""
        if not self.has_transpose:
            raise transpose_is_missing(purpose)

    def concrete_arrays(self, purpose: str) -> tuple[np.ndarray, np.ndarray]:
        """Offsets and columns of one pattern as NumPy arrays, or ValueError."""
        self.check_positions()
        if not is_concrete(self.row_offsets, self.column_indices) or self.batch_shape:
            raise ValueError(f"{purpose}: needs one concrete pattern")
        return np.asarray(self.row_offsets), np.asarray(self.column_indices)

    def __repr__(self) -> str:
        leaf = self.pattern.column_indices if isinstance(self.pattern, Pattern) else None
        return f"Topology(shape={self.shape}, column_indices={getattr(leaf, 'shape', leaf)})"
