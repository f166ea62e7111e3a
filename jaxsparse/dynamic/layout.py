"""How scripts are cut for what runs them: rows of a tile, and groups side by side."""

from __future__ import annotations

import dataclasses

from jaxsparse.integers import integer

# Rows of a tile on a CPU. From 32 on a tile takes the time of its product: wider ones save nothing,
# and have more padding.
_NARROWEST, _WIDEST = 8, 32


@dataclasses.dataclass(frozen=True)
class Layout:
    """The part of a form that does not depend on the graphs.

    Attributes:
        width: rows of a tile, which are computed together.
        groups: lists of tiles that share no rows but leaves. A plain scan runs them one after the
            other; more than one are for kernels.
        slots: K, children that a row of the cell takes.

    Raises:
        TypeError: unless all are integers.
        ValueError: unless all are at least 1 and below 2**20.
    """

    width: int = 8
    groups: int = 1
    slots: int = 2

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = integer("dynamic.Layout", field.name, getattr(self, field.name), 1, 2**20)
            object.__setattr__(self, field.name, size)  # an int, which forms can write as JSON

    @classmethod
    def plain(cls, batch: int, slots: int = 2) -> Layout:
        """The layout for a scan without a kernel, as on a CPU, of so many graphs at a time.

        >>> Layout.plain(1).width, Layout.plain(20).width, Layout.plain(256).width
        (8, 32, 32)
        """
        batch = integer("Layout.plain", "batch", batch, 0)
        fitting = 1 << max(0, batch - 1).bit_length()  # the power of 2 that holds the batch
        return cls(min(max(_NARROWEST, fitting), _WIDEST), 1, slots)
