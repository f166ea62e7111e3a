"""What a recurrent scan runs as on a GPU: in which kernel, or why in none.

Plans are made in C++ (ffi/recurrent/plan.h), by the same functions that give the kernels their
sizes. Planning needs no GPU: a plan follows from the scan's form and a description of the device.
"""

from __future__ import annotations

import dataclasses
import functools

from jaxsparse import _ffi
from jaxsparse.device import Device

COMPUTE_CAPABILITY = 90  # the kernels use instructions of it
PLAIN = "jax.lax.scan"  # what a scan is without a kernel


@dataclasses.dataclass(frozen=True)
class SparseForm:
    """The sizes of a layout that a kernel is compiled for; kernels/sparse_record.h."""

    products: int
    state_parts: int
    blocks: int
    cluster: int
    units: int
    threads: int
    lanes: int
    entries: int
    group: int
    partial_sums: int
    row_sums: int
    piece_bytes: int

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """What follows from these: where the parts of a block's record begin, and columns."""
        return _ffi.sizes_of_layout(dataclasses.asdict(self))

    @property
    def columns(self) -> int:
        """Columns of the state, padding included."""
        return self.sizes["columns"]

    @property
    def words(self) -> int:
        """32-bit words of all blocks' records."""
        return self.blocks * self.sizes["words"]


@dataclasses.dataclass(frozen=True)
class ScanForm:
    """The form of a scan, on one device."""

    products: int
    states: int
    inputs: int  # arrays of h units in all, of outputs too
    outputs: int
    arrays: int  # most arrays of one kind that a launch has to take
    hidden: int
    batch: int
    length: int
    state_dtype: str
    weight_dtype: str
    sparse: bool
    input_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...] = ()
    layout_form: SparseForm | None = None  # of a sparse matrix
    not_laid_out: str = ""  # why it has none, if that is known
    directions: int = 1  # scans by weights of their own: of a layer's directions, of its heads
    loops: int = 1  # of the plain path, which scans dense directions of one order in time at once

    def __str__(self) -> str:
        kind = "sparse" if self.sparse else "dense"
        matrices = f", {self.directions} matrices" if self.directions > self.loops else ""
        both = ", both directions" if self.loops > 1 else ""
        return (
            f"{kind} {self.weight_dtype} weights ({self.products} x {self.hidden}, "
            f"{self.states} x {self.hidden}), {self.state_dtype} state, batch {self.batch}, "
            f"{self.length} steps{matrices}{both}"
        )


@dataclasses.dataclass(frozen=True)
class WaveForm(ScanForm):
    """The form of layers in one launch; ``products`` and so on are those of each of them.

    Args:
        layers: how many.
        own_products: those that a layer's recurrent matrix leads to, in ascending order.
        own_states: those that it takes.
        below_products: the same of the matrix for the layer below.
        below_states: the same.
        skip: a state of a lower layer that is added to a product, and the product.
        means: states of the layer below whose means over units are added to products: each with
            whether it is the mean of the squares, and the product.
        scales: whether the products of the layer below are scaled by what these means say.
    """

    layers: int = 1
    own_products: tuple[int, ...] = (0,)
    own_states: tuple[int, ...] = (0,)
    below_products: tuple[int, ...] = (0,)
    below_states: tuple[int, ...] = (0,)
    skip: tuple[int, int] | None = None
    means: tuple[tuple[int, bool, int], ...] = ()
    scales: bool = False

    def __str__(self) -> str:
        return f"{self.layers} layers, each {super().__str__()}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A kernel for a scan, and its launch."""

    variant: str
    file: str  # of the kernel, below the folder of device sources
    constants: str  # members of the kernel's Plan that are not types, in C++
    blocks: int  # of a scan
    threads: int
    shared_bytes: int
    exchange_bytes: int
    poll_delay: int  # clock cycles from a product to the first poll for the next state
    poll_delay_increase: int  # after a poll in vain
    poll_delay_decrease: int  # after a poll in time
    microseconds: float  # predicted, for a step of all scans
    total_microseconds: float  # predicted, for all steps and what comes before them
    in_registers: float  # share of the weights; the rest lies in shared memory
    cluster: int = 1
    groups: int = 1  # parts of the batch, a scan each
    scans: int = 1  # side by side in a launch: parts of the batch, directions
    layers: int = 1  # of a wave, each with so many scans
    launches: int = 1  # of a batch entry of the call, one after another
    resident: int = 1  # blocks on a multiprocessor
    dense_bytes: int = 0  # of a direction's sparse matrix in dense form
    workspace_bytes: int = 0

    def __str__(self) -> str:
        kept = f"{100 * self.in_registers:.0f} % of the weights in registers"
        if self.in_registers < 1:
            kept += ", the rest in shared memory"
        several = f"{self.layers} layers of " if self.layers > 1 else ""
        several += f"{self.scans} scans of " if self.scans > 1 else ""
        blocks = "1 block" if self.blocks == 1 else f"{self.blocks} blocks"
        return (
            f"{self.variant}, {several}{blocks} of {self.threads} threads, {kept}, "
            f"{self.shared_bytes / 1024:.0f} KiB of shared memory a block, about "
            f"{self.microseconds:.1f} us a step"
        )


@dataclasses.dataclass(frozen=True)
class NoPlan:
    """Why no kernel runs a scan.

    Args:
        reason: what follows "because".
        wanted: whether ``jax.lax.scan`` is asked for, is faster, or is all that there is for such a
            GPU or batch, so that nothing is missed.
        refused: whether a kernel was asked for, so that there is an error in its place.
    """

    reason: str
    wanted: bool = False
    refused: bool = False

    def __str__(self) -> str:
        return f"{'refused' if self.refused else PLAIN}, because {self.reason}"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A kind of kernel.

    Args:
        weights: "dense"; "masked", a sparse matrix kept in dense form; "pairs", of index and value.
        tensor_cores: or else FMA.
        barrier: the blocks meet after each step, instead of polling each other's data. Slower,
            so only by name.
    """

    weights: str
    tensor_cores: bool
    barrier: bool


VARIANTS = {
    name: Variant(weights, tensor_cores, barrier)
    for name, weights, tensor_cores, barrier in _ffi.scan_variants()
}


def _refusal(form: ScanForm, device: Device) -> NoPlan | None:
    """Why no kernel takes operands of a form, whatever its sizes."""
    if lacks := device.lacks_for(COMPUTE_CAPABILITY):
        return NoPlan(lacks, wanted=True)
    for name, dtype in (("state", form.state_dtype), ("weights", form.weight_dtype)):
        if dtype not in _ffi.SCAN_DTYPES:
            taken = list(_ffi.SCAN_DTYPES)
            return NoPlan(f"the dtype of the {name} is {dtype}; the kernels take {taken}")
    others = {*form.input_dtypes} - {form.state_dtype, "float32"}
    if others:
        return NoPlan(f"inputs of {sorted(others)} beside a state of {form.state_dtype}")
    if form.arrays > _ffi.SCAN_MOST_ARRAYS:
        return NoPlan(
            f"{form.arrays} arrays of one kind are more than the {_ffi.SCAN_MOST_ARRAYS} it takes"
        )
    return None


def make_wave_plan(form: WaveForm, device: Device, variant: str | None = None) -> Plan | NoPlan:
    """The plan of least predicted time for layers in one launch, or why there is none.

    Args:
        form: the layers.
        device: the GPU.
        variant: the only one to consider.
    """
    if refused := _refusal(form, device):
        return refused
    return _made_wave_plan(form, device, variant)


@functools.lru_cache(maxsize=1024)
def _made_wave_plan(form: WaveForm, device: Device, variant: str | None) -> Plan | NoPlan:
    def bits(places: tuple[int, ...]) -> int:
        return sum(1 << place for place in places)

    if max(form.products, form.states) > _ffi.SCAN_MOST_ARRAYS:
        return NoPlan(f"a step has more than {_ffi.SCAN_MOST_ARRAYS} products or states")
    made, reason = _ffi.plan_wave(
        variant or "",
        layers=form.layers,
        products=form.products,
        states=form.states,
        own_products=bits(form.own_products),
        own_states=bits(form.own_states),
        below_products=bits(form.below_products),
        below_states=bits(form.below_states),
        skip=form.skip,
        means=form.means,
        scales=form.scales,
        inputs=form.inputs,
        outputs=form.outputs,
        hidden=form.hidden,
        batch=form.batch,
        length=form.length,
        state_dtype=form.state_dtype,
        weight_dtype=form.weight_dtype,
        compute_capability=device.compute_capability,
        multiprocessors=device.multiprocessors,
        shared_bytes=device.shared_bytes,
    )
    return NoPlan(reason) if made is None else Plan(**made)


def make_plan(
    form: ScanForm, device: Device, variant: str | None = None, *, forced: bool = False
) -> Plan | NoPlan:
    """The plan of least predicted time, or why there is none.

    Args:
        form: the scan.
        device: the GPU.
        variant: the only one to consider.
        forced: plans even what would be slower than the plain path.
    """
    if refused := _refusal(form, device):
        return refused
    if variant is not None and variant not in VARIANTS:
        return NoPlan(f"there is no variant {variant!r}, there are {list(VARIANTS)}")
    made, reason, most_batch, loop = _ffi.plan_scan(
        variant or "",
        products=form.products,
        states=form.states,
        inputs=form.inputs,
        outputs=form.outputs,
        hidden=form.hidden,
        batch=form.batch,
        length=form.length,
        state_dtype=form.state_dtype,
        weight_dtype=form.weight_dtype,
        sparse=form.sparse,
        layout_form=None if form.layout_form is None else dataclasses.asdict(form.layout_form),
        not_laid_out=form.not_laid_out,
        directions=form.directions,
        loops=form.loops,
        multiprocessors=device.multiprocessors,
        shared_bytes=device.shared_bytes,
    )
    if made is None:
        # A batch of any size beyond what kernels take in parts is the plain path's.
        return NoPlan(reason, wanted=form.batch > most_batch)
    best = Plan(**made)
    if not forced and variant is None and loop < best.total_microseconds:
        return NoPlan(
            f"it takes about {loop:.0f} us for all steps, and {best.total_microseconds:.0f} would "
            f"be taken by {best}",
            wanted=True,
        )
    return best
