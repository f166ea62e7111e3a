"""How a sparse matrix lies in registers and shared memory for the length of a scan.

A layout assigns a pattern's units to thread blocks and its entries to threads, and orders them so
that threads that are served together read different banks of shared memory (the bank-aware layout
of Zhu et al. 2018, "Sparse Persistent RNNs"). It is made once for a pattern, on the host, and
carries along where each value lies, so that values may change while the pattern stays.
"""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import _ffi
from jaxsparse.csr import CSR
from jaxsparse.device import Device, present_device, traced_for
from jaxsparse.layouts import LayoutKind, register
from jaxsparse.pattern import Pattern, is_concrete
from jaxsparse.recurrent.plan import (
    NoPlan,
    Plan,
    ScanForm,
    SparseForm,
    make_plan,
)
from jaxsparse.topology import Topology


@dataclasses.dataclass(frozen=True)
class ScanLayout:
    """The layouts of a pattern and of its transpose, for one batch size and state dtype."""

    words: jax.Array  # uint32
    transposed_words: jax.Array
    forms: tuple[SparseForm, SparseForm]


jax.tree_util.register_dataclass(
    ScanLayout, data_fields=["words", "transposed_words"], meta_fields=["forms"]
)
# So that exported programs may take and return matrices that are laid out.
jax.export.register_pytree_node_serialization(
    ScanLayout,
    serialized_name="jaxsparse.ScanLayout",
    serialize_auxdata=lambda meta: json.dumps([dataclasses.astuple(f) for f in meta[0]]).encode(),
    deserialize_auxdata=lambda data: (tuple(SparseForm(*f) for f in json.loads(data)),),
)


@register
class ScanLayouts(LayoutKind):
    """Layouts for persistent scans, which only concrete patterns have."""

    name = "scan_layout"

    def make(self, topology: Topology, **options: Any) -> ScanLayout:
        """As `lay_out`, whose options it takes."""
        if topology.batch_shape:
            return self.make_traced(topology)
        topology.check_transpose("a layout for scans")
        layout = lay_out(topology, **options)
        if isinstance(layout, str):
            raise ValueError(layout)
        return layout

    def make_traced(self, topology: Topology, **options: Any) -> ScanLayout:
        raise ValueError("needs one concrete pattern: call it outside of jax.jit")

    def transpose(self, layout: ScanLayout, transposed: Topology) -> None:
        """Scans multiply by a matrix and its transpose, and those by the latter are laid out anew.

        A form says which of the two products has the gates.
        """

    def verify(self, layout: ScanLayout, topology: Topology) -> None:
        for words, form in zip((layout.words, layout.transposed_words), layout.forms, strict=True):
            array = np.asarray(words).view(np.int32)
            if array.shape != (*topology.batch_shape, form.words):
                raise ValueError("the layout for scans is not of this pattern's size")
            for one in array.reshape(-1, form.words):
                _verify(one, form, topology)


def pack(
    matrix: CSR,
    *,
    batch: int,
    dtype: Any,
    device: Device | None = None,
    piece_bytes: int | None = None,
    bank_aware: bool = True,
) -> CSR:
    """Lays a recurrent matrix out for persistent scans, once for its pattern.

    ``recurrent.scan`` does this by itself where it sees the pattern. Inside ``jax.jit`` a dynamic
    one that is an argument is not seen: pack the matrix before, or it is kept in dense form, if
    that fits.

    Args:
        matrix: ``(gates * h, h)``, with a concrete pattern.
        batch: B, the rows of the scans' carry, on one device.
        dtype: that of ``xs``: float32, bfloat16 or float16.
        device: a description of the GPU; this machine's first one, or else an H200. Within what
            `jaxsparse.explain` traces, the one that is explained.
        piece_bytes: 4, 8 or 16 bytes of the state's batch that an entry loads at once; as many as
            there are by default. Fewer are slower, and there to measure by.
        bank_aware: orders entries by banks of shared memory; without, there to measure by, a row's
            entries stay in their order.

    Returns:
        The same matrix; its topology carries the layout, through jit and pytree functions too.

    Raises:
        ValueError: if the pattern is not concrete, or does not fit the GPU, saying why.

    >>> import jax.numpy as jnp
    >>> w = pack(CSR.fromdense(jnp.eye(64)), batch=4, dtype=jnp.bfloat16)
    >>> w.topology.layouts["scan_layout"].forms[0].products
    1
    """
    rows, h = matrix.shape
    if h == 0 or rows % h:
        raise ValueError(f"recurrent.pack: matrix must be (gates * h, h), got {matrix.shape}")
    device = device or traced_for() or present_device()
    widest = _ffi.widest_piece(batch, jnp.dtype(dtype).itemsize)
    if piece_bytes is not None and (piece_bytes not in (4, 8, 16) or piece_bytes > widest):
        raise ValueError(
            f"recurrent.pack: piece_bytes must be 4, 8 or 16, and no more than the {widest} bytes "
            f"of the batch, got {piece_bytes}"
        )
    try:
        topology = matrix.topology.with_layout(
            ScanLayouts.name,
            gates=rows // h,
            batch=batch,
            dtype=jnp.dtype(dtype),
            device=device,
            piece_bytes=piece_bytes or widest,
            bank_aware=bank_aware,
        )
    except ValueError as error:
        raise ValueError(f"recurrent.pack: {error}") from None
    for form in topology.layouts[ScanLayouts.name].forms:
        plan = _plan(form, h, batch, jnp.dtype(dtype).name, matrix.dtype.name, device)
        if isinstance(plan, NoPlan):
            raise ValueError(f"recurrent.pack: {plan.reason}")
    return CSR(matrix.values, topology)


def _plan(
    form: SparseForm, h: int, batch: int, dtype: str, weight_dtype: str, device: Device
) -> Plan | NoPlan:
    """Whether a layout fits a device, whatever the cell."""
    scan = ScanForm(
        products=form.products,
        states=form.state_parts,
        inputs=form.products,
        outputs=0,
        arrays=1,
        hidden=h,
        batch=batch,
        length=1,
        state_dtype=dtype,
        weight_dtype=weight_dtype,
        sparse=True,
        input_dtypes=(),
        layout_form=form,
    )
    return make_plan(scan, device, "sparse_pairs", forced=True)


def can_be_laid_out(topology: Topology) -> bool:
    """Whether the pattern is one, and known now."""
    return not topology.batch_shape and is_concrete(*jax.tree.leaves(topology))


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """What a pattern is laid out for."""

    gates: int
    batch: int
    dtype: str
    device: Device
    piece_bytes: int
    bank_aware: bool
    nnz: int  # entries to have room for
    fewest_threads: tuple[int, int] = (0, 0)  # of the pattern, of its transpose


# {(pattern, what for): (a reference that ends with the pattern, layout)}
_made: dict[tuple[int, _Wanted], tuple[Any, ScanLayout | str]] = {}


def lay_out(
    topology: Topology,
    gates: int,
    batch: int,
    dtype: Any,
    device: Device,
    piece_bytes: int | None = None,
    bank_aware: bool = True,
) -> ScanLayout | str:
    """The layout of a concrete pattern, made once while the pattern lives; or why there is none."""
    piece = piece_bytes or _ffi.widest_piece(batch, dtype.itemsize)
    wanted = _Wanted(gates, batch, dtype.name, device, piece, bank_aware, topology.nnz)
    return _laid_out(topology, wanted)


def lay_out_side_by_side(
    topologies: list[Topology],
    gates: int,
    batch: int,
    dtype: Any,
    weight_dtype: Any,
    device: Device,
) -> list[ScanLayout] | None:
    """Layouts of one form, for scans that share the device; None if they can't."""
    share = dataclasses.replace(device, multiprocessors=device.multiprocessors // len(topologies))
    piece = _ffi.widest_piece(batch, dtype.itemsize)
    nnz = max(t.nnz for t in topologies)
    wanted = _Wanted(gates, batch, dtype.name, share, piece, True, nnz)
    threads = [0, 0]
    for topology in topologies:
        layout = _laid_out(topology, wanted)
        if isinstance(layout, str):
            return None
        threads = [max(t, f.threads) for t, f in zip(threads, layout.forms, strict=True)]
    wanted = dataclasses.replace(wanted, fewest_threads=(threads[0], threads[1]))
    layouts = [x for t in topologies if isinstance(x := _laid_out(t, wanted), ScanLayout)]
    alike = of_one_form(layouts)
    if len(layouts) < len(topologies) or alike is None:
        return None
    h = topologies[0].shape[1]
    for form in alike[0].forms:
        plan = _plan(form, h, batch, dtype.name, weight_dtype.name, device)
        if isinstance(plan, NoPlan) or form.blocks > share.multiprocessors:
            return None
    return alike


def of_one_form(layouts: Sequence[ScanLayout]) -> list[ScanLayout] | None:
    """The layouts with one form, if theirs differ in nothing but the room for sums."""
    forward, backward = (_roomiest(tuple(x.forms[i] for x in layouts)) for i in (0, 1))
    if forward is None or backward is None:
        return None
    return [dataclasses.replace(x, forms=(forward, backward)) for x in layouts]


def suits(layout: ScanLayout, batch: int, dtype: Any) -> bool:
    """Whether a layout loads all that a scan's batch has at once."""
    widest = _ffi.widest_piece(batch, dtype.itemsize)
    return all(form.piece_bytes == widest for form in layout.forms)


def _roomiest(forms: tuple[SparseForm, ...]) -> SparseForm | None:
    """The form that holds all of these, if they differ in nothing but the room for sums."""
    sums = {name: max(getattr(f, name) for f in forms) for name in ("partial_sums", "row_sums")}
    roomy = {dataclasses.replace(f, **sums) for f in forms}
    return roomy.pop() if len(roomy) == 1 else None


def _laid_out(topology: Topology, wanted: _Wanted) -> ScanLayout | str:
    columns = topology.pattern.column_indices
    key = (id(columns), wanted)
    if key not in _made:
        reference = weakref.ref(columns, lambda _: _made.pop(key, None))
        _made[key] = (reference, _lay_out(topology, wanted))
    return _made[key][1]


def _lay_out(topology: Topology, wanted: _Wanted) -> ScanLayout | str:
    forward, backward = wanted.fewest_threads
    both = (
        (topology.pattern, None, wanted.gates, 1, forward),
        (topology.transposed_pattern, topology.permutation, 1, wanted.gates, backward),
    )
    words, forms = [], []
    for pattern, permutation, products, parts, threads in both:
        made = _one(pattern, permutation, products, parts, threads, topology.shape[1], wanted)
        if isinstance(made, str):
            return made
        with jax.ensure_compile_time_eval():  # not a tracer of the program that asks first
            words.append(jnp.asarray(made[0]))
        forms.append(made[1])
    return ScanLayout(words[0], words[1], (forms[0], forms[1]))


def _one(
    pattern: Pattern,
    permutation: Any,
    products: int,
    parts: int,
    fewest_threads: int,
    h: int,
    wanted: _Wanted,
) -> tuple[np.ndarray, SparseForm] | str:
    batch, item = wanted.batch, jnp.dtype(wanted.dtype).itemsize
    if item > 4 or batch > _ffi.most_pairs_batch(item):
        return f"a batch of {batch} in {wanted.dtype} is more than the kernel of pairs takes"
    planned = _ffi.plan_sparse_layout(
        products=products,
        state_parts=parts,
        hidden=h,
        nnz=wanted.nnz,
        batch=batch,
        state_bytes=item,
        multiprocessors=wanted.device.multiprocessors,
    )
    planned["fewest_threads"] = max(planned["fewest_threads"], fewest_threads)
    try:
        made = _ffi.lay_out_sparse(
            np.asarray(pattern.row_offsets),
            np.asarray(pattern.column_indices),
            np.zeros(0, np.int32) if permutation is None else np.asarray(permutation),
            hidden=h,
            piece_bytes=wanted.piece_bytes,
            bank_aware=wanted.bank_aware,
            **planned,
        )
    except ValueError as error:
        return str(error)
    return np.frombuffer(made["words"], np.uint32), SparseForm(**made["form"])


def _verify(words: np.ndarray, f: SparseForm, topology: Topology) -> None:
    """What ffi/recurrent/kernels/sparse_record.h says of each block's record."""
    if f.products * f.state_parts * topology.shape[1] != max(topology.shape):
        raise ValueError("the layout for scans is not of this pattern's size")
    records = words.reshape(f.blocks, -1)
    begins = [f.sizes[f"{part}_at"] for part in ("rows", "groups", "columns", "values")]
    units, sums, places, columns, values = np.split(records, begins, axis=1)
    rank, place = places >> 16, places & 0xFFFF

    def within(x: np.ndarray, low: int, high: int) -> bool:
        return bool(((x >= low) & (x < high)).all())

    if not (
        within(units, -1, topology.shape[1])
        and (sums[:, 0] == 0).all()
        and (np.diff(sums) >= 0).all()
        and within(np.diff(sums), 0, f.row_sums + 1)
        and within(sums, 0, f.partial_sums + 1)
        and ((places == -1) | (rank >= 0) & (rank < f.cluster) & (place < f.partial_sums)).all()
        and within(columns, 0, f.sizes["shared_columns"])
        and within(values, -1, topology.nse)
    ):
        raise ValueError("the layout for scans leads out of bounds")
