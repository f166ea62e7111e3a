"""What a recurrent scan runs as on a GPU: which weights lie where, and in which kernel.

Planning is host code and needs no GPU: a plan follows from the scan's form and a description of the
device. A kernel is specialised for its plan, because weights can only stay in registers if all
sizes are known when it is compiled. The rules for the constants, and the model of the time of a
step, come from measurements on an H200 (docs/performance.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxsparse import _ffi
from jaxsparse.device import Device

_OLDEST = 90  # the kernels use instructions of this compute capability

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WARP = 32
_STATIC_SHARED = 32  # bytes that the sparse kernel has beside its dynamic ones
_TILE_ROWS = 16  # of a tensor core's stationary operand
_TILE_BATCH = 8
_CACHE_LINE = 128  # bytes
_RESERVED_SHARED = 1024  # bytes of a multiprocessor's shared memory that each block costs
_L2_MEGABYTES = 50
_STAYS_IN_CACHE = 4 << 20  # bytes of an exchange buffer, beside what a scan reads and writes
_BATCH_GROUPS = (1, 2, 4)  # the parts of a batch: a scan each, side by side or one after another
_START = 15.0  # microseconds for which a launch clears its buffers and loads weights
_WRITE_OUT = 1.2e-6  # microseconds for each byte of a sparse matrix in dense form


@dataclasses.dataclass(frozen=True)
class SparseForm:
    """The sizes of a layout that a kernel is compiled for; ffi/recurrent/sparse_record.h."""

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

    @property
    def columns(self) -> int:
        """Columns of the state, padding included."""
        return self.state_parts * self.blocks * self.units

    @property
    def words(self) -> int:
        """32-bit words of all blocks' records."""
        groups = self.lanes * self.threads // self.group
        slots = self.lanes * self.entries * self.threads
        return self.blocks * (self.units * (1 + self.products) + 1 + groups + 2 * slots)


def padded_batch(batch: int, item_size: int) -> int:
    """The batch entries that a kernel has room for: a power of 2, whole words of a state."""
    return max(1 << (batch - 1).bit_length(), 4 // item_size)


def widest_piece(batch: int, item_size: int) -> int:
    """Bytes of a column of the state that an entry loads at once: the whole batch, up to 16."""
    return min(16, padded_batch(batch, item_size) * item_size)


@dataclasses.dataclass(frozen=True)
class Problem:
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
    form: SparseForm | None = None  # of the sparse matrix's layout
    directions: int = 1

    def __str__(self) -> str:
        kind = "sparse" if self.sparse else "dense"
        return (
            f"{kind} {self.weight_dtype} weights ({self.products} x {self.hidden}, "
            f"{self.states} x {self.hidden}), {self.state_dtype} state, batch {self.batch}, "
            f"{self.length} steps{', both directions' if self.directions > 1 else ''}"
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """A kernel for a problem, and its launch."""

    variant: str
    file: str  # of the kernel, below the folder of device sources
    constants: tuple[tuple[str, int | bool], ...]  # of the kernel's Plan
    blocks: int  # of a scan
    threads: int
    shared_bytes: int
    exchange_bytes: int
    poll_delay: int  # clock cycles from a product to the first look for the next state
    poll_delay_increase: int  # after a look in vain
    poll_delay_decrease: int  # after a look in time
    microseconds: float  # predicted, for a step of all scans
    in_registers: float  # share of the weights; the rest lies in shared memory
    cluster: int = 1
    groups: int = 1  # parts of the batch, a scan each
    scans: int = 1  # side by side in a launch: parts of the batch, directions
    resident: int = 1  # blocks on a multiprocessor
    dense_bytes: int = 0  # of a direction's sparse matrix in dense form

    def __str__(self) -> str:
        kept = f"{100 * self.in_registers:.0f} % of the weights in registers"
        if self.in_registers < 1:
            kept += ", the rest in shared memory"
        several = f"{self.scans} scans of " if self.scans > 1 else ""
        return (
            f"{self.variant}, {several}{self.blocks} blocks of {self.threads} threads, {kept}, "
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
        return f"{'refused' if self.refused else 'jax.lax.scan'}, because {self.reason}"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A kind of kernel.

    Args:
        weights: "dense"; "masked", a sparse matrix kept in dense form; "pairs", of index and value.
        tensor_cores: or else FMA.
        barrier: the blocks meet after each step, instead of looking for each other's data. Slower,
            so only on demand.
    """

    weights: str
    tensor_cores: bool
    barrier: bool


_KINDS = {
    "dense_tensor_cores": ("dense", True),
    "dense_fma": ("dense", False),
    "masked_tensor_cores": ("masked", True),
    "masked_fma": ("masked", False),
    "sparse_pairs": ("pairs", False),
}
VARIANTS = {
    name + suffix: Variant(weights, tensor_cores, barrier)
    for name, (weights, tensor_cores) in _KINDS.items()
    for suffix, barrier in (("", False), ("_barrier", True))
}

_MOST_ARRAYS = _ffi.SCAN_MOST_ARRAYS
_MOST_SCANS = _ffi.SCANS_OF_LAUNCH
_MOST_BATCH = {True: 32, False: 16}  # with tensor cores or FMA; more would spill registers


def make_plan(
    problem: Problem, device: Device, variant: str | None = None, *, forced: bool = False
) -> Plan | NoPlan:
    """The plan of least predicted time, or why there is none.

    Args:
        problem: the scan.
        device: the GPU.
        variant: the only one to consider.
        forced: plans even what would be slower than the plain path.
    """
    p = problem
    if device.compute_capability < _OLDEST:
        return NoPlan(
            f"{device.name} has compute capability {device.compute_capability / 10}, and the "
            f"kernels need {_OLDEST / 10}",
            wanted=True,
        )
    for name, dtype in (("state", p.state_dtype), ("weights", p.weight_dtype)):
        if dtype not in _BYTES:
            return NoPlan(f"the dtype of the {name} is {dtype}; the kernels take {list(_BYTES)}")
    others = {*p.input_dtypes} - {p.state_dtype, "float32"}
    if others:
        return NoPlan(f"inputs of {sorted(others)} beside a state of {p.state_dtype}")
    if p.arrays > _MOST_ARRAYS:
        return NoPlan(f"{p.arrays} arrays of one kind are more than the {_MOST_ARRAYS} it takes")
    if variant is not None and variant not in VARIANTS:
        return NoPlan(f"there is no variant {variant!r}, there are {list(VARIANTS)}")
    default = [
        name for name, v in VARIANTS.items() if not v.barrier and p.sparse == (v.weights != "dense")
    ]
    wanted = default if variant is None else [variant]
    reasons = []
    plans: list[Plan] = []
    for name in wanted:
        reason = _unfit(VARIANTS[name], p)
        if reason is None and VARIANTS[name].weights == "pairs":
            plan = _sparse_plan(name, p, device, forced=variant is not None)
            plans += [plan] if plan else []
            if plan is None:
                reason = (
                    "its matrix is laid out for another batch, dtype or GPU, or does not fit: "
                    "recurrent.pack it for what one device gets"
                )
        elif reason is None:
            found = list(_dense_plans(name, p, device))
            plans += found
            if not found:
                reason = (
                    f"{p.products} x {p.states} x {p.hidden} x {p.hidden} weights in "
                    f"{p.weight_dtype} and a batch of {p.batch} don't fit the registers and shared "
                    f"memory of {device.multiprocessors} multiprocessors"
                )
        if reason is not None:
            reasons.append(f"{name}: {reason}")
    if not plans:
        # A batch of any size beyond what kernels take in parts is the plain path's.
        most = _MOST_BATCH[_BYTES[p.state_dtype] == 2] * _BATCH_GROUPS[-1]
        return NoPlan("; ".join(reasons), wanted=p.batch > most)
    best = min(plans, key=lambda plan: _whole_microseconds(plan, p))
    loop, whole = _loop_microseconds(p), _whole_microseconds(best, p)
    if not forced and variant is None and loop < whole:
        return NoPlan(
            f"it takes about {loop:.0f} us for all steps, and {whole:.0f} would be taken by {best}",
            wanted=True,
        )
    return best


def _whole_microseconds(plan: Plan, p: Problem) -> float:
    """Predicted for all steps."""
    launches = p.directions * plan.groups // plan.scans
    before = launches * _START + p.directions * plan.dense_bytes * _WRITE_OUT
    return p.length * plan.microseconds + before


def _loop_microseconds(p: Problem) -> float:
    """Predicted for all steps of XLA's loop by dense weights, fitted to measurements on an H200."""
    wide = "float32" in (p.state_dtype, p.weight_dtype)
    size = p.products * p.states * p.hidden**2 * (4 if wide else 2)
    megabytes = size / 1e6
    start, per_megabyte = (5.3, 0.2) if wide else (3.6, 0.11)
    cached = start + per_megabyte * megabytes + (0.03 + 0.005 * megabytes) * p.batch
    from_memory = megabytes / 4 if megabytes > _L2_MEGABYTES else 0.0
    before = size * _WRITE_OUT if p.sparse else 0.0
    return p.directions * (p.length * max(cached, from_memory) + before)


def _unfit(variant: Variant, p: Problem) -> str | None:
    """Why a variant can't run a problem on any device, or None."""
    if p.sparse != (variant.weights != "dense"):
        return f"the weights are {'sparse' if p.sparse else 'dense'}"
    if variant.weights == "pairs":
        if p.form is None:
            return (
                "the pattern is traced or does not fit: recurrent.pack tells, and lays it out "
                "beforehand"
            )
        most = 8 if p.state_dtype == "float32" else 16
        return f"a batch of {p.batch} is more than {most}" if p.batch > most else None
    most = _MOST_BATCH[variant.tensor_cores]
    if all(p.batch % groups or p.batch // groups > most for groups in _BATCH_GROUPS):
        parts = " or ".join(map(str, _BATCH_GROUPS[1:]))
        return f"a batch of {p.batch} is more than {most}, and not {parts} parts of at most that"
    narrow = p.state_dtype == p.weight_dtype and _BYTES[p.state_dtype] == 2
    if variant.tensor_cores and not narrow:
        return (
            f"needs 16-bit state and weights of one dtype, got {p.state_dtype} and {p.weight_dtype}"
        )
    if not variant.tensor_cores and narrow:
        return "16-bit products run on tensor cores"
    return None


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _up(a: int, multiple: int) -> int:
    return _ceil(a, multiple) * multiple


def _sparse_plan(variant: str, p: Problem, device: Device, *, forced: bool) -> Plan | None:
    """The plan of a matrix that is laid out; as ffi/recurrent/recurrent_scan_sparse.cu has it."""
    f = p.form
    assert f is not None
    scans = p.directions if p.directions * f.blocks <= device.multiprocessors else 1
    size = _BYTES[p.state_dtype]
    batch = padded_batch(p.batch, size)
    if (f.products, f.state_parts) != (p.products, p.states):
        return None
    widest = widest_piece(p.batch, size)
    if f.piece_bytes > widest or f.blocks > device.multiprocessors:
        return None
    if f.piece_bytes < widest and not forced:
        return None  # for another batch; it would do, but slowly
    cells = f.units * batch
    cell_threads = max(_WARP, min(_up(cells, _WARP), 1024 - f.threads, 256))
    threads = f.threads + cell_threads
    # A register holds an index, another one its value; what has no room lies in shared memory.
    packed = _BYTES[p.weight_dtype] == 2 and f.columns // f.cluster + 64 <= 1 << 16
    packed = packed and p.weight_dtype == p.state_dtype
    registers = min(65536 // _up(threads, 4 * _WARP) // 8 * 8, 248)
    room = max(0, registers - 44 - batch) // (1 if packed else 2) // f.lanes
    in_shared = max(0, f.entries - room)
    pieces = batch * size // f.piece_bytes
    sums = _up(f.partial_sums * batch * 4, 16)
    plane = f.columns // f.cluster * f.piece_bytes
    shared = pieces * (plane + 128) + in_shared * f.lanes * f.threads * 8 + 2 * sums
    if shared + _STATIC_SHARED > device.shared_bytes:
        return None
    slot = pieces * f.columns * f.piece_bytes
    exchange = _up(p.length * slot, _CACHE_LINE)
    # Fitted to measurements of 17 layers on an H200, to within 4 % on average.
    received = pieces * plane / 1e3
    per_entry = 5 if size == 4 else 9
    issued = f.lanes * f.entries * f.threads / _WARP * per_entry * batch / 4 / 4 / 1.9e3
    from_shared = in_shared * f.lanes * f.threads * 8 / 128 / 1.9e3
    microseconds = (
        0.81
        + 0.0216 * received
        + 1.87 * issued
        + 2.16 * from_shared
        + 0.72 * (f.cluster > 1)
        + 0.05 * (p.products - 1)
    )
    return Plan(
        variant=variant,
        file="recurrent/recurrent_scan_sparse.cu",
        constants=(
            ("kScans", scans),
            ("kBlocks", f.blocks),
            ("kBarrier", VARIANTS[variant].barrier),
            ("kPrefetch", exchange > _STAYS_IN_CACHE),
            ("kBatch", batch),
            ("kPieceBytes", f.piece_bytes),
            ("kSharedEntries", in_shared),
            ("kPartialSums", f.partial_sums),
            ("kRowSums", f.row_sums),
            ("kCellThreads", cell_threads),
            ("kPacked", packed),
            ("kLaunchSharedBytes", shared),
            ("kLaunchSlot", slot),
        ),
        blocks=f.blocks,
        threads=threads,
        shared_bytes=shared,
        exchange_bytes=exchange,
        poll_delay=900,
        poll_delay_increase=64,
        poll_delay_decrease=2,
        microseconds=microseconds * (p.directions // scans),
        in_registers=1 - in_shared / f.entries,
        cluster=f.cluster,
        scans=scans,
    )


def _dense_plans(variant: str, p: Problem, device: Device) -> Iterator[Plan]:
    """Plans for each way to share the GPU among scans, or to let them follow each other."""
    most = _MOST_BATCH[VARIANTS[variant].tensor_cores]
    for groups in _BATCH_GROUPS:
        if p.batch % groups or p.batch // groups > most:
            continue
        part = dataclasses.replace(p, batch=p.batch // groups)
        # More than two of a direction side by side have not been measured.
        for scans in range(1, min(2 * p.directions, _MOST_SCANS) + 1):
            launches, rest = divmod(p.directions * groups, scans)
            for resident in (1, 2):
                multiprocessors = device.multiprocessors * resident // scans
                if rest or resident > scans or multiprocessors == 0:
                    continue
                share = dataclasses.replace(
                    device,
                    multiprocessors=multiprocessors,
                    shared_bytes=(device.shared_bytes + _RESERVED_SHARED) // resident
                    - _RESERVED_SHARED,
                )
                for plan in _dense_plans_of_scan(variant, part, share, scans, resident):
                    yield dataclasses.replace(
                        plan,
                        constants=(("kScans", scans), *plan.constants),
                        groups=groups,
                        scans=scans,
                        resident=resident,
                        microseconds=plan.microseconds * launches,
                    )


def _dense_plans_of_scan(
    variant: str, p: Problem, device: Device, scans: int, resident: int
) -> Iterator[Plan]:
    """Plans of one of so many scans side by side, on its share of the device."""
    tensor_cores = VARIANTS[variant].tensor_cores
    size = _BYTES[p.state_dtype]
    per_load = 16 // size
    part = _up(p.hidden, per_load)
    unit_multiple = 8 if tensor_cores else 4
    first = _up(_ceil(part, device.multiprocessors), unit_multiple)
    for units in range(first, first + 4 * unit_multiple, unit_multiple):
        if tensor_cores and p.products * units < _TILE_ROWS and units < part:
            continue  # a tensor core would multiply by rows of zeros
        plans = [
            _dense_plan(variant, p, device, units, warps, scans, resident) for warps in range(1, 17)
        ]
        found = [plan for plan in plans if plan is not None]
        yield from found
        if found:
            return  # more, smaller blocks do better, as far as there are multiprocessors


def _dense_plan(
    variant: str, p: Problem, device: Device, units: int, warps: int, scans: int, resident: int
) -> Plan | None:
    """A plan with so many units and product warps; as ffi/recurrent/dense_shape.cuh has it."""
    tensor_cores = VARIANTS[variant].tensor_cores
    size = _BYTES[p.state_dtype]
    per_load = 16 // size
    part = _up(p.hidden, per_load)
    columns = p.states * part
    blocks = _ceil(part, units)
    rows = p.products * units
    tile_batch = 8 if p.batch > 8 else max(1 << (p.batch - 1).bit_length(), 2)
    batch_tiles = _ceil(p.batch, _TILE_BATCH)
    batch_slots = batch_tiles * tile_batch
    exchange_batch = p.batch
    if tensor_cores:
        whole = (b for b in range(p.batch, batch_slots + 1) if units * b * size % 32 == 0)
        exchange_batch = next(whole, p.batch)
    slot = exchange_batch * columns

    gate_slots = 4 if p.products == 3 else p.products
    row_slots = _ceil(units, 8) * 32 if gate_slots == 4 else _up(units * gate_slots, 16) + 4
    partials = warps * batch_slots * row_slots
    weights_at = _up(2 * partials * 4 + 4, 16)

    cell_warps = _ceil(units * batch_slots, _WARP)
    pointwise_warps = min(cell_warps, 4)  # twice and four times as many were not faster
    threads = _WARP * (warps + pointwise_warps)
    share = min(512 // (resident * _ceil(warps + pointwise_warps, 4)) // 8 * 8, 248)

    row_groups = 4
    batch_tile = min(4, p.batch)
    group_lanes = _WARP // row_groups
    chunk = 32 if tensor_cores else group_lanes * per_load
    chunks = _ceil(columns, chunk)
    loads = _ceil(chunks, warps)
    if chunks <= (warps - 1) * loads:
        return None  # a warp without columns
    if tensor_cores:
        tiles = _ceil(rows, _TILE_ROWS)
        chains = 1 if tiles * batch_tiles >= 4 else 2
        of_chunk = tiles * 8
        other = 20 + loads * 4 * batch_tiles + 4 * tiles * batch_tiles * chains
    else:
        lane_rows = _ceil(rows, row_groups)
        vectors = _ceil(lane_rows * per_load, 4)
        of_chunk = vectors * 4
        other = 40 + lane_rows * batch_tile + of_chunk

    product_registers = pointwise_registers = 0
    in_registers = min(loads, max(0, (share - other) // of_chunk))
    light = p.inputs + p.outputs + p.products <= 10 and units * batch_slots <= 128
    if in_registers < loads and warps % 4 == 0 and light:
        # Pointwise threads need few registers: the product's get theirs.
        equal = 512 // (resident * _ceil(warps + 4, 4)) // 8 * 8
        few = 56 if tensor_cores else 72
        many = min((equal * (warps + 4) - 4 * few) // warps // 8 * 8, 248)
        dealt = min(loads, max(0, (many - other) // of_chunk))
        if few <= equal <= many and dealt > in_registers:
            pointwise_warps, threads = 4, _WARP * (warps + 4)
            product_registers, pointwise_registers = many, few
            in_registers = dealt

    shared = weights_at
    if tensor_cores:
        shared += (loads - in_registers) * tiles * 2 * warps * _WARP * 16
    else:
        state_words = loads * group_lanes * (exchange_batch | 1)
        shared += (loads - in_registers) * vectors * warps * _WARP * 16 + warps * state_words * 16
    if blocks > device.multiprocessors or shared > device.shared_bytes:
        return None

    exchange = _up(p.length * slot * size, _CACHE_LINE)
    # Fitted to measurements of some 100 plans on an H200, to within 7 % on average.
    received = slot * size / 1e3  # KB that every block receives in a step
    from_shared = resident * (shared - weights_at) / 128 / 1.9e3
    spilled = resident * max(0, other - share)  # registers
    if tensor_cores:
        products = loads * 2 * tiles * batch_tiles * warps / 1.9e3  # on one tensor core of four
        microseconds = (
            0.45
            + 0.014 * received
            + 0.39 * scans * blocks * received / 5.5e3  # what the L2 cache sends
            + 1.5 * resident * products
            + 0.52 * from_shared
            + 0.064 * loads
            + (0.0045 + 0.0092 * (p.products - 1)) * warps
            + 0.12 * (scans > 1)
            + 0.074 * (p.states - 1)
            + 0.24 * p.products * max(0.0, cell_warps / pointwise_warps - 2)
            + 0.1 * spilled
        )
    else:
        microseconds = (
            0.25
            + 0.03 * received
            + resident * rows * columns * p.batch / 128 / 1.9e3
            + 0.53 * from_shared
            + 0.032 * loads
            + 0.02 * warps
            + 0.3 * (scans > 1)
            + 0.1 * spilled
        )
    look = 700 if tensor_cores and p.products == 1 and p.states == 1 else 800
    look = 600 if not tensor_cores else look
    look = 900 if p.batch > 4 or p.states > 1 or product_registers else look
    look = 1200 if p.batch > 8 else look
    return Plan(
        variant=variant,
        file="recurrent/recurrent_scan_dense.cu",
        constants=(
            ("kHidden", p.hidden),
            ("kBatch", p.batch),
            ("kUnits", units),
            ("kWarps", warps),
            ("kPointwiseWarps", pointwise_warps),
            ("kTensorCores", tensor_cores),
            ("kRegisterChunks", in_registers),
            ("kProductRegisters", product_registers),
            ("kPointwiseRegisters", pointwise_registers),
            ("kRowGroups", row_groups),
            ("kBatchTile", batch_tile),
            ("kBlocks", blocks),
            ("kResident", resident),
            ("kBarrier", VARIANTS[variant].barrier),
            ("kPrefetch", exchange > _STAYS_IN_CACHE),
            ("kLaunchSharedBytes", shared),
            ("kLaunchSlot", slot),
        ),
        blocks=blocks,
        threads=threads,
        shared_bytes=shared,
        exchange_bytes=exchange,
        poll_delay=look,
        poll_delay_increase=8 if tensor_cores else 0,
        poll_delay_decrease=2 if tensor_cores else 0,
        microseconds=microseconds,
        in_registers=in_registers / loads,
        dense_bytes=p.products * p.states * p.hidden**2 * _BYTES[p.weight_dtype] if p.sparse else 0,
    )
