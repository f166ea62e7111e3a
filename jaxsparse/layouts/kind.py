"""Kinds of layouts: what a topology has to know of one that it carries."""

from __future__ import annotations

import abc
from collections.abc import Container
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from jaxsparse.pattern import is_concrete

if TYPE_CHECKING:
    from jaxsparse.topology import Topology


class LayoutKind(abc.ABC):
    """A way to lay a pattern out for kernels, and how such a layout follows its pattern.

    A layout is a pytree of arrays, with the batch dimensions of the pattern in front, that is made
    of a pattern alone. `Topology.layouts` maps the name of each kind to it. It is data of the
    topology, as the column indices are, and goes with it through jit, vmap and files.
    """

    name: ClassVar[str]
    """The key in `Topology.layouts`, and in the paths of the arrays in trees and files."""

    derived: ClassVar[bool] = False
    """Whether constructors make one, without options, where `make` does not return None."""

    needed: ClassVar[bool] = False
    """Whether operations need it of every topology."""

    inherited: ClassVar[bool] = False
    """Whether a new pattern in the place of one that has such a layout gets one, too.

    Then `make` needs no options.
    """

    @abc.abstractmethod
    def make(self, topology: Topology, **options: Any) -> Any:
        """The layout of a concrete pattern, made on the host.

        Raises:
            ValueError: if the pattern can't be laid out so, saying why.
        """

    @abc.abstractmethod
    def make_traced(self, topology: Topology, **options: Any) -> Any:
        """The layout of a traced pattern, made in the program.

        Raises:
            ValueError: if only a concrete pattern can be laid out so.
        """

    @abc.abstractmethod
    def transpose(self, layout: Any, transposed: Topology) -> Any:
        """The layout of the transposed topology, or None if it has none.

        The transposed topology has all of its arrays but layouts. Its numbers may be out of range:
        it is not for a transpose to report a damaged pattern.
        """

    @abc.abstractmethod
    def verify(self, layout: Any, topology: Topology) -> None:
        """Checks a concrete layout, as from a file.

        Raises:
            ValueError: if it does not belong to the topology, or would lead a kernel out of bounds.
        """

    def operands(self, topology: Topology, *, given: bool) -> tuple[Any, ...]:
        """What the primitives of operations take of it, behind the arrays of the pattern.

        Topologies with and without a layout give as many arrays. Unless ``given``, what stands for
        no layout, with which kernels do without.
        """
        return ()

    def with_transpose(self, layout: Any, topology: Topology) -> Any:
        """The layout of the topology, which got its transpose, or None if it has none."""
        return layout

    def without_transpose(self, layout: Any) -> Any:
        """The layout of the topology without its transpose, or None if it has none."""
        return layout

    def pad(self, layout: Any, padded: Topology) -> Any:
        """The layout of a topology that got padding behind its entries, which moves none.

        None if it has none.
        """
        return layout


KINDS: dict[str, LayoutKind] = {}
"""The kinds by name. They are registered while the package is imported.

A topology's leaves are in this order, so that a new kind goes behind the others.
"""


def derived_layouts(topology: Topology, there: Container[str] = ()) -> dict[str, Any]:
    """The layouts that constructors make of a pattern, but those that are there."""
    known = is_concrete(topology.row_offsets, topology.column_indices)
    wanted = [kind for name, kind in KINDS.items() if kind.derived and name not in there]
    made = {x.name: x.make(topology) if known else x.make_traced(topology) for x in wanted}
    return {name: layout for name, layout in made.items() if layout is not None}


K = TypeVar("K", bound=type[LayoutKind])


def register(kind: K) -> K:
    """Adds a kind, by its class; for use as a decorator.

    Raises:
        ValueError: if there is a kind of that name.
    """
    if kind.name in KINDS:
        raise ValueError(f"layouts.register: there is a kind named {kind.name!r} already")
    KINDS[kind.name] = kind()
    return kind


def check_kinds(operation: str, *names: str) -> None:
    """Raises ValueError unless there are kinds of these names."""
    for name in names:
        if name not in KINDS:
            raise ValueError(
                f"{operation}: the kind of a layout must be one of {', '.join(KINDS)}, got {name!r}"
            )
