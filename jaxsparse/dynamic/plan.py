"""What a scan over graphs runs as on a GPU: in which kernel, or why in none.

Plans are made in C++ (ffi/dynamic/team_plan.h), by the same functions that give the kernels their
sizes. Planning needs no GPU: a plan follows from the scan's form and a description of the device.
"""

from __future__ import annotations

import dataclasses
import functools

from jaxsparse import _ffi
from jaxsparse.device import Device
from jaxsparse.recurrent.plan import COMPUTE_CAPABILITY

TILE_ROWS: int = _ffi.TEAM_TILE_ROWS  # the rows of a tile that kernels take
PLAIN = "a loop of XLA over tiles"  # what a scan is without a kernel
PLAIN_LOSS = "two scans, and the heads between them"  # what a loss and its gradient are without one
NO_PRODUCTS = "there is no kernel yet for cells without products"
# Microseconds of a tile in such a loop, in which a GPU waits for the start of several kernels, by
# whether the scan emits; tiles of more than 8 rows take longer. Measured on an H200.
_LOOP_TILE = {False: 4.5, True: 8.5}


@dataclasses.dataclass(frozen=True)
class ScanForm:
    """The form of a scan over graphs, on one device."""

    products: int  # of a cell; where the scan emits, states
    slots: int
    hidden: int
    tiles: int
    groups: int  # of the script; 0: as many as teams are best
    state_dtype: str
    weight_dtype: str
    emits: bool = False
    carries: int = 1  # of a row
    arrays: int = 16  # what the step reads and writes for a unit beside products
    most_arrays: int = 0  # of one kind that a launch has to take
    width: int = TILE_ROWS
    kinds: int = 1
    input_dtypes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
    """A kernel for a scan over graphs, and its launch."""

    variant: str
    constants: str  # members of the kernel's Plan that are not types, in C++
    teams: int
    blocks: int  # of a team
    threads: int
    shared_bytes: int
    window: int  # tiles of a group whose sums need no memory, where the scan emits
    poll_delay: int  # clock cycles from a product to the second look at the next states
    poll_delay_increase: int  # after a look in vain
    poll_delay_decrease: int  # after one in time
    tile_microseconds: float  # predicted, of a tile that waits for the one before it
    beside_microseconds: float  # of one that does not
    total_microseconds: float  # of all tiles, and what comes before them
    in_registers: float  # share of the weights; the rest lies in shared memory

    def __str__(self) -> str:
        kept = f"{100 * self.in_registers:.0f} % of the weights in registers"
        if self.in_registers < 1:
            kept += ", the rest in shared memory"
        teams = "1 team" if self.teams == 1 else f"{self.teams} teams"
        blocks = "1 block" if self.blocks == 1 else f"{self.blocks} blocks"
        return (
            f"{self.variant}, {teams} of {blocks} of {self.threads} threads, {kept}, "
            f"{self.shared_bytes / 1024:.0f} KiB of shared memory a block, about "
            f"{self.tile_microseconds:.1f} us a tile that waits for the one before it, "
            f"about {self.beside_microseconds:.1f} us one that does not"
        )


@dataclasses.dataclass(frozen=True)
class NoPlan:
    """Why no kernel runs a scan over graphs; ``reason`` is what follows "because"."""

    reason: str
    refused: bool = False  # a kernel was asked for, so that there is an error in its place
    instead: str = PLAIN  # what runs without a kernel

    def __str__(self) -> str:
        return f"{'refused' if self.refused else self.instead}, because {self.reason}"


def make_plan(form: ScanForm, device: Device, variant: str | None = None) -> Plan | NoPlan:
    """The plan of least predicted time, or why there is none.

    Args:
        form: the scan.
        device: the GPU.
        variant: the only one to consider.
    """
    if reason := refusal(form, device):
        return NoPlan(reason)
    return _made_plan(form, device, variant)


def loop_microseconds(form: ScanForm) -> float:
    """What a loop of XLA over the tiles takes at least."""
    return form.tiles * _LOOP_TILE[form.emits]


def refusal(form: ScanForm, device: Device) -> str:
    """Why no kernel takes operands of a form, whatever its sizes; empty if some may."""
    if lacks := device.lacks_for(COMPUTE_CAPABILITY):
        return lacks
    if form.products == 0:
        return NO_PRODUCTS
    if form.width != TILE_ROWS:
        return f"kernels take tiles of {TILE_ROWS} rows, and the script's have {form.width}"
    if form.state_dtype != form.weight_dtype or form.state_dtype not in _ffi.SCAN_DTYPES:
        return (
            "the kernels take states and weights of one dtype of "
            f"{list(_ffi.SCAN_DTYPES)}, got {form.state_dtype} and {form.weight_dtype}"
        )
    if max(form.products, form.slots) > _ffi.TEAM_MOST_ARRAYS:
        most = _ffi.TEAM_MOST_ARRAYS
        return (
            f"kernels take up to {most} products and {most} children of a row, got {form.products} "
            f"and {form.slots}"
        )
    others = {*form.input_dtypes} - {form.state_dtype, "float32"}
    if others:
        return f"inputs of {sorted(others)} beside a state of {form.state_dtype}"
    if form.most_arrays > _ffi.TEAM_MOST_ARRAYS:
        return (
            f"{form.most_arrays} arrays of one kind are more than the {_ffi.TEAM_MOST_ARRAYS} "
            "it takes"
        )
    return ""


@functools.lru_cache(maxsize=1024)
def _made_plan(form: ScanForm, device: Device, variant: str | None) -> Plan | NoPlan:
    made, reason = _ffi.plan_teams(
        variant or "",
        emits=form.emits,
        products=form.products,
        slots=form.slots,
        kinds=form.kinds,
        carries=form.carries,
        arrays=form.arrays,
        hidden=form.hidden,
        tiles=form.tiles,
        groups=form.groups,
        dtype=form.state_dtype,
        multiprocessors=device.multiprocessors,
        shared_bytes=device.shared_bytes,
    )
    return NoPlan(reason) if made is None else Plan(**made)
