"""The layouts that a topology carries beside its arrays: what adds them, and what replaces them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self, cast

import jax

from jaxsparse.layouts import KINDS, LayoutKind, check_kinds, derived_layouts
from jaxsparse.pattern import is_concrete
from jaxsparse.topology_parts import TopologyParts

if TYPE_CHECKING:
    from jaxsparse.topology import Topology


class TopologyLayouts(TopologyParts):
    """A `jaxsparse.Topology` as far as its layouts go."""

    __slots__ = ()

    def with_layout(self, name: str, **options: Any) -> Self:
        """The same topology with one more layout, of a kind in `jaxsparse.layouts.KINDS`.

        Args:
            name: of the kind.
            **options: what the kind's `make` takes; the kind says which.

        Raises:
            ValueError: if there is no such kind, or the pattern can't be laid out so.
        """
        check_kinds("Topology.with_layout", name)
        kind, known = KINDS[name], is_concrete(*jax.tree.leaves(self))
        make = kind.make if known else kind.make_traced
        layout = make(cast("Topology", self), **options)
        if layout is None:
            raise ValueError(f"Topology.with_layout: {name!r} is not for a pattern as {self!r}")
        return self.with_layouts({**self.layouts, name: layout})

    def with_layouts(self, layouts: Mapping[str, Any]) -> Self:
        """The same topology with these layouts instead of its own; they are not checked.

        Layouts beyond those that every topology has (``tile_starts``) are not found again by its
        positions, so a topology with such a one is dynamic. Those that every topology has belong
        among them: operations take them.

        Raises:
            ValueError: if there is no kind of such a name.
        """
        check_kinds("Topology.with_layouts", *layouts)
        derived = all(KINDS[name].derived for name in layouts)
        return self._with(layouts=layouts, kind=self.kind if derived else "dynamic")

    def with_derived_layouts(self) -> Self:
        """The same topology with the layouts that its constructor makes, where it lacks them.

        A file of an earlier version has those that there were then: pickles and `jaxsparse.nn` add
        the others as they read it.

        >>> from jaxsparse import Topology
        >>> topology = Topology([0, 1], [300], (1, 400))
        >>> older = topology.with_layouts({"tile_starts": topology.layouts["tile_starts"]})
        >>> list(older.layouts), list(older.with_derived_layouts().layouts)
        (['tile_starts'], ['tile_starts', 'row_cuts'])
        """
        leaves = jax.tree.leaves((self.pattern, self.transposed_pattern))
        if not (self.has_positions and all(map(_can_be_read, leaves))):
            return self  # shapes, or what else trees are made of
        made = derived_layouts(cast("Topology", self), self.layouts)
        return self._with(layouts={**self.layouts, **made}) if made else self

    def _each_layout(self, follow: Callable[[LayoutKind, Any], Any]) -> dict[str, Any]:
        """What becomes of the layouts of another pattern, by their kinds, where that is one."""
        followed = {name: follow(KINDS[name], x) for name, x in self.layouts.items()}
        return {name: layout for name, layout in followed.items() if layout is not None}

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.layouts = self.with_derived_layouts().layouts


def _can_be_read(x: Any) -> bool:
    """Whether this is an array, and in a program or by this process alone one that is known."""
    is_array = isinstance(x, jax.Array)
    return is_array and (not is_concrete(x) or x.is_fully_addressable)
