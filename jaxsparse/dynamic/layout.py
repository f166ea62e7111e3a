"""How scripts are cut for what runs them: rows of a tile, and groups side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxsparse.csr import CSR
from jaxsparse.device import AnyDevice, Device, default_device, present_device
from jaxsparse.dynamic.plan import NO_PRODUCTS, TILE_ROWS, NoPlan, Plan, ScanForm, make_plan
from jaxsparse.integers import integer
from jaxsparse.precision import promoted

# Rows of a tile, by whether a GPU runs the loop. On a CPU a tile of 32 rows takes the time of its
# product: wider ones save nothing, and have more padding. On a GPU it takes that of its kernels.
_NARROWEST = 8
_WIDEST = {False: 32, True: 128}
_FEW, _LEAST_OF_MANY = 8, 32  # on a GPU: graphs from which on tiles have 32 rows at least


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
    def choose(
        cls, weights: Any, batch: int, rows: int, slots: int = 2, *, device: Device | None = None
    ) -> Layout:
        """The layout for what will run a scan: `teams` where a GPU's kernels take it, or `plain`.

        Args:
            weights: of the scan, as in `teams`, or None for a cell without products.
            batch: graphs at a time.
            rows: about how many computed rows a batch has.
            slots: K, children that a row of the cell takes.
            device: the GPU; by default this machine's, if it has one.

        Raises:
            TypeError: unless batch, rows and slots are integers and weights have shapes and dtypes.
            ValueError: if weights are not (K h, P h), or there is no kind of rows.

        >>> import jax, jaxsparse
        >>> weights = jax.ShapeDtypeStruct((512, 1280), "bfloat16")
        >>> Layout.choose(weights, 64, 1200, device=jaxsparse.H200)
        Layout(width=8, groups=8, slots=2)
        """
        batch = integer("Layout.choose", "batch", batch, 0)
        of = device or default_device()
        plan = _plan_of_teams("Layout.choose", weights, rows, slots, of)
        if isinstance(plan, Plan):
            return cls(TILE_ROWS, plan.teams, slots)
        return cls.plain(batch, slots, device=of)

    @classmethod
    def plain(cls, batch: int, slots: int = 2, *, device: AnyDevice | None = None) -> Layout:
        """The layout for a scan without a kernel of so many graphs at a time.

        Args:
            batch: graphs at a time.
            slots: K, children that a row of the cell takes.
            device: what runs the scan; by default what JAX runs on.

        Raises:
            TypeError: unless batch and slots are integers.

        >>> import jaxsparse
        >>> [Layout.plain(batch, device=jaxsparse.H200).width for batch in (1, 20, 256)]
        [8, 32, 128]
        """
        batch = integer("Layout.plain", "batch", batch, 0)
        on_gpu = (device or default_device()).platform == "cuda"
        fitting = 1 << max(0, batch - 1).bit_length()  # the power of 2 that holds the batch
        least = _LEAST_OF_MANY if on_gpu and batch >= _FEW else _NARROWEST
        return cls(min(max(least, fitting), _WIDEST[on_gpu]), 1, slots)

    @classmethod
    def teams(
        cls, weights: Any, rows: int, slots: int = 2, *, device: Device | None = None
    ) -> Layout:
        """The layout for a scan by kernels: a group for each team of blocks that a GPU has.

        Args:
            weights: of the scan, (K h, P h): an array, or a ``jax.ShapeDtypeStruct``, or a CSR
                matrix (P h, K h); of rows of several kinds a tuple of these, one for each, None
                where a cell has no products.
            rows: about how many computed rows a batch has.
            slots: K, children that a row of the cell takes.
            device: the GPU; by default this machine's, or an H200 where there is none.

        Raises:
            TypeError: unless rows and slots are integers and weights have shapes and dtypes.
            ValueError: if no kernel takes such weights, and why, or they are not (K h, P h) of one
                h, where K is that of the kind's cell, for some kind ``slots``.

        >>> import jax, jaxsparse
        >>> weights = jax.ShapeDtypeStruct((512, 1280), "bfloat16")
        >>> Layout.teams(weights, 1200, device=jaxsparse.H200)
        Layout(width=8, groups=8, slots=2)
        >>> directions = (jax.ShapeDtypeStruct((256, 1024), "bfloat16"),) * 2
        >>> Layout.teams(directions, 1200, slots=1, device=jaxsparse.H200)
        Layout(width=8, groups=8, slots=1)
        """
        plan = _plan_of_teams("Layout.teams", weights, rows, slots, device or present_device())
        if isinstance(plan, NoPlan):
            raise ValueError(f"Layout.teams: no kernel takes these weights: {plan.reason}")
        return cls(TILE_ROWS, plan.teams, slots)


def _plan_of_teams(
    operation: str, weights: Any, rows: int, slots: int, device: AnyDevice
) -> Plan | NoPlan:
    """The plan of a scan of so many rows, with as many groups as are best."""
    rows = integer(operation, "rows", rows, 0)
    slots = integer(operation, "slots", slots, 1, 2**20)
    kinds = weights if isinstance(weights, tuple | list) else (weights,)
    if not kinds:
        raise ValueError(f"{operation}: weights must be of one kind of rows at least, got none")
    given = {i: w for i, w in enumerate(kinds) if w is not None}
    for w in given.values():
        if not (hasattr(w, "shape") and hasattr(w, "dtype")):
            raise TypeError(f"{operation}: weights must be arrays, got {type(w).__name__}")
    if not given:
        return NoPlan(NO_PRODUCTS)
    shapes = {i: w.shape[::-1] if isinstance(w, CSR) else w.shape for i, w in given.items()}
    hidden, products = _sizes(operation, shapes, slots)
    if not isinstance(device, Device):
        return NoPlan(device.lacks)
    dtype = jnp.dtype(promoted(*(w.dtype for w in given.values()))).name
    form = ScanForm(
        products=products,
        slots=slots,
        kinds=len(kinds),
        hidden=hidden,
        tiles=-(-rows // TILE_ROWS),
        groups=0,  # as many as are best
        state_dtype=dtype,
        weight_dtype=dtype,
    )
    return make_plan(form, device)


def _sizes(operation: str, shapes: Mapping[int, tuple[int, ...]], slots: int) -> tuple[int, int]:
    """Units, and the most products of a kind, of weights with these shapes; or ValueError."""
    hidden = max((shape[0] for shape in shapes.values() if len(shape) == 2), default=0) // slots
    products = []
    for i, shape in shapes.items():
        rows, columns = shape if len(shape) == 2 and hidden else (0, 0)
        if not 0 < rows <= slots * hidden or columns == 0 or rows % hidden or columns % hidden:
            of, most = (f"[{i}]", "up to ") if len(shapes) > 1 else ("", "")
            raise ValueError(
                f"{operation}: weights{of} must be (K h, P h) with K = {most}{slots}, got {shape}"
            )
        products.append(columns // hidden)
    return hidden, max(products)
