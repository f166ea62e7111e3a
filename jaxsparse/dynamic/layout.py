"""How scripts are cut for what runs them: rows of a tile, and groups side by side."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxsparse.device import Device, present_device
from jaxsparse.dynamic.plan import TILE_ROWS, NoPlan, ScanForm, make_plan
from jaxsparse.integers import integer

# Rows of a tile on a CPU. Its product binds from there on, and wider tiles are more padding.
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
        TypeError, ValueError: unless all are integers >= 1.
    """

    width: int = 8
    groups: int = 1
    slots: int = 2

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            integer("dynamic.Layout", field.name, getattr(self, field.name), 1, 2**20)

    @classmethod
    def plain(cls, batch: int, slots: int = 2) -> Layout:
        """The layout for a scan without a kernel, as on a CPU, of so many graphs at a time.

        >>> Layout.plain(1).width, Layout.plain(20).width, Layout.plain(256).width
        (8, 32, 32)
        """
        batch = integer("Layout.plain", "batch", batch, 0)
        fitting = 1 << max(0, batch - 1).bit_length()  # the power of 2 that holds the batch
        return cls(min(max(_NARROWEST, fitting), _WIDEST), 1, slots)

    @classmethod
    def teams(
        cls, weights: Any, rows: int, slots: int = 2, *, device: Device | None = None
    ) -> Layout:
        """The layout for a scan by kernels: a group for each team of blocks that a GPU has.

        Args:
            weights: of the scan, (K h, P h): an array, or a ``jax.ShapeDtypeStruct``.
            rows: about how many computed rows a batch has.
            slots: K, children that a row of the cell takes.
            device: the GPU; by default this machine's, or an H200 where there is none.

        Raises:
            TypeError: unless rows and slots are integers.
            ValueError: if no kernel takes such weights, and why, or they are not (K h, P h).

        >>> import jax, jaxsparse
        >>> weights = jax.ShapeDtypeStruct((512, 1280), "bfloat16")
        >>> Layout.teams(weights, 1200, device=jaxsparse.H200)
        Layout(width=8, groups=8, slots=2)
        """
        rows = integer("Layout.teams", "rows", rows, 0)
        slots = integer("Layout.teams", "slots", slots, 1, 2**20)
        height, columns = weights.shape if len(weights.shape) == 2 else (0, 0)
        hidden = height // slots
        if hidden == 0 or height % slots or columns == 0 or columns % hidden:
            raise ValueError(
                f"Layout.teams: weights must be (K h, P h) with K = {slots}, got {weights.shape}"
            )
        width = TILE_ROWS
        plan = make_plan(
            ScanForm(
                products=columns // hidden,
                slots=slots,
                hidden=hidden,
                tiles=-(-rows // width),
                groups=0,  # as many as are best
                state_dtype=jnp.dtype(weights.dtype).name,
                weight_dtype=jnp.dtype(weights.dtype).name,
            ),
            device or present_device(),
        )
        if isinstance(plan, NoPlan):
            raise ValueError(f"Layout.teams: no kernel takes these weights: {plan.reason}")
        return cls(width, plan.teams, slots)
