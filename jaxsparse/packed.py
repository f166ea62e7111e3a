"""Sparse weights packed for products with few columns."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import _ffi
from jaxsparse.entrywise import is_dense
from jaxsparse.ops.multiply_packed import multiply_packed
from jaxsparse.ops.packed_places import numbers_of_row, strip_rows, taken, unpacked
from jaxsparse.ops.packed_streams import LANES, PANEL_COLUMNS, masks_of_panel
from jaxsparse.ops.packed_unpack import written_out
from jaxsparse.packed_checks import check_arrays, check_shapes
from jaxsparse.packed_form import DTYPES, form_for, parts_for, range_of_parts
from jaxsparse.pattern import is_concrete
from jaxsparse.quantization import LARGEST, quantized
from jaxsparse.topology import Topology

_ARRAYS = ("values", "masks", "starts", "panels", "rows")
_LEAVES = (*_ARRAYS, "scales", "sources", "topology")


class Packed:
    """A sparse matrix of 16 or 8-bit numbers, laid out for products with few columns on a GPU.

    Weights that are 50 to 95 % sparse take 62 to 13 % of the bytes that dense ones take, and each
    lane of a GPU finds its own among them without asking others. ``packed @ x``, `jaxsparse.spmm`
    and `jaxsparse.linear` take one. Make it by :meth:`CSR.pack`, on the host, from a pattern that
    is known; it is for inference, and for weights that are used several times before they change.
    Products are differentiable to any order, in x and in the numbers. Gradients of the numbers of a
    trainable matrix are computed at its pattern alone (`jaxsparse.sddmm`); those of others take a
    dense matrix (m, k) and are not 0 beside a pair's stored number, or where a 0 bridges a gap, so
    train with ``trainable=True``.

    Numbers of 8 bits, int8 or float8_e4m3fn, are multiplied by the scale of their row, which makes
    the largest of each row the largest that the dtype has: see `CSR.pack`. They have no gradients,
    and x is bfloat16 or float16, in which they are exact. They save memory; in cells, on an H200,
    products take as long as by numbers of 16 bits at 50 % sparse, and a tenth longer at 70 %, since
    they take more instructions to decode. With cell 0 a number that is rounded to 0 counts as none.
    A row that had a number that is not finite has scale NaN, and its products are NaN. Sums are
    taken in float32 before they are scaled, and must fit it: of a row with a single stored number
    up to x of 2.6e36 (int8) or 7.5e35 (float8_e4m3fn), of a row with r of them up to an r-th of
    that at worst.

    A pytree: the arrays below are its leaves, so it goes through ``jax.jit``, checkpoints and
    ``jax.export``. On a CPU, and on a GPU for many columns, it is written out and multiplied by
    XLA.

    Attributes:
        values: ``(w, 64)``, bfloat16 or float16: rows of two numbers for each lane. ``(w, 128)``,
            int8 or float8_e4m3fn: rows of four. With cell 0 ``(w, 256)`` of any of these: rows of
            eight. No number of float8_e4m3fn is NaN, as `verify` checks; kernels read it as
            480 or as NaN, as a GPU has an instruction for it.
        masks: uint32 ``(p, s, 32)``: which places of each of p pieces are stored. With cell 0
            ``(w, 32)``: how far each number is behind the one before.
        starts: int32 ``(p + 1,)``: the rows of ``values`` in front of each piece.
        panels: int32 ``(p, t, 2)``: which rows a piece reads for each 128 columns; with cell 0 for
            all of them, t = 1.
        rows: int32 ``(m,)``: the order of the rows, 16 of which make a strip, or 8 with cell 0.
        scales: float32 ``(m,)`` of numbers of 8 bits, else None.
        sources: int32, as ``values``: the stored entry of each number, or ``nse`` for none; only of
            a trainable or repackable one, else None.
        topology: the pattern; only of such a one, else None.
        shape: (m, k).
        cell: how many neighbours in a row are stored together: 1 or 2; 0 where numbers have gaps.
        parts: into how many the columns are cut, which warps and blocks of a GPU share.

    >>> import jax.numpy as jnp
    >>> from jaxsparse import CSR
    >>> packed = CSR.fromdense(jnp.array([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]])).pack(jnp.bfloat16)
    >>> packed @ jnp.ones(3, jnp.bfloat16)
    Array([3, 0], dtype=bfloat16)
    """

    values: jax.Array
    masks: jax.Array
    starts: jax.Array
    panels: jax.Array
    rows: jax.Array
    scales: jax.Array | None
    sources: jax.Array | None
    topology: Topology | None
    shape: tuple[int, int]
    cell: int
    parts: int

    ARRAYS = _ARRAYS
    __slots__ = (*_LEAVES, "cell", "parts", "shape")
    __array_ufunc__ = None  # NumPy arrays leave `x @ packed` to this class

    def __init__(self, *leaves: Any, shape: tuple[int, int], cell: int, parts: int):
        """Only stores what it gets; `CSR.pack` makes one."""
        for name, leaf in zip(_LEAVES, leaves, strict=True):
            setattr(self, name, leaf)
        self.shape, self.cell, self.parts = shape, cell, parts

    @classmethod
    def of(
        cls,
        values: jax.Array,
        topology: Topology,
        *,
        dtype: Any,
        cell: int | None,
        parts: int | None,
        columns: int | None,
        trainable: bool,
        repackable: bool,
    ) -> Packed:
        """What `CSR.pack` returns."""
        dtype = jax.dtypes.canonicalize_dtype(values.dtype if dtype is None else dtype)
        if dtype not in DTYPES:
            raise ValueError(
                f"CSR.pack: dtype must be {', '.join(map(str, DTYPES[:-1]))} or {DTYPES[-1]}, got "
                f"{dtype}: values that are wider are rounded only where it is asked for"
            )
        if not jnp.issubdtype(values.dtype, jnp.floating) or values.dtype.itemsize < 2:
            raise ValueError(
                f"CSR.pack: values must be floating and of 16 bits at least, got {values.dtype}"
            )
        if values.ndim != 1 or topology.batch_shape:
            raise ValueError(
                f"CSR.pack: needs one matrix, got values of shape {values.shape} on patterns of "
                f"batch {topology.batch_shape}"
            )
        if cell is not None and (isinstance(cell, bool | float) or cell not in (0, 1, 2)):
            raise ValueError(f"CSR.pack: cell must be None, 0, 1 or 2, got {cell!r}")
        if columns is not None and not (isinstance(columns, int) and columns >= 1):
            raise ValueError(
                f"CSR.pack: columns must be None or a positive number of columns of x, got "
                f"{columns!r}"
            )
        quantize = dtype in LARGEST
        if quantize and trainable:
            raise ValueError(
                f"CSR.pack: {dtype} is not trainable, as numbers of 8 bits have no gradients: "
                "repackable=True takes other values"
            )
        if quantize and cell == 2:
            raise ValueError(f"CSR.pack: cell must be None, 0 or 1 for {dtype}, got 2")
        pattern = [np.asarray(x, np.int32) for x in topology.concrete_arrays("CSR.pack")]
        pattern.append(np.asarray(topology.pattern.row_order, np.int32))
        if cell is None:
            cell = form_for(*pattern, shape=topology.shape, n=columns, dtype=dtype)
        m, k = topology.shape
        least, most = range_of_parts(k, cell)
        if parts is not None and not (isinstance(parts, int) and least <= parts <= most):
            raise ValueError(
                f"CSR.pack: parts must be None or {least} to {most} for {k} columns, got {parts!r}"
            )
        parts = parts_for(m, k, cell, columns) if parts is None else parts
        try:
            if cell == 0:
                pattern[-1] = _ffi.order_for_gaps(*pattern, columns=k, parts=parts)
            masks, starts, panels, sources = _laid_out(
                pattern, columns=k, cell=cell, parts=parts, bits=8 * dtype.itemsize
            )
        except ValueError as error:
            raise ValueError(f"CSR.pack: {error}") from None
        sources = np.where(sources < 0, topology.nse, sources)
        numbers, scales = _numbers_of(values, topology, dtype)
        keeps_entries = trainable or repackable
        return cls(
            taken(numbers, sources),
            jnp.asarray(masks),
            jnp.asarray(starts),
            jnp.asarray(panels),
            jnp.asarray(pattern[-1]),
            scales,
            jnp.asarray(sources) if keeps_entries else None,
            topology.with_transpose() if keeps_entries else None,  # as gradients read it
            shape=topology.shape,
            cell=cell,
            parts=parts,
        )

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], shape: tuple[int, int]) -> Packed:
        """Puts arrays together that were one, as a checkpoint library gives them back.

        Args:
            arrays: ``values``, ``masks``, ``starts``, ``panels`` and ``rows`` by their names, of
                the host or of a device. They may be abstract (`jax.ShapeDtypeStruct`), as the
                metadata of a file tell: then so is the matrix, for a target to restore to. Those of
                values of 8 bits have ``scales``, too. With
                ``sources`` and ``topology``, a `Topology`, it is trainable. Other names are left
                out.
            shape: (m, k).

        Raises:
            TypeError: if one is missing.
            ValueError: if they do not belong together, or to a matrix of that shape.

        >>> import jax.numpy as jnp
        >>> from jaxsparse import CSR
        >>> packed = CSR.fromdense(jnp.eye(3, dtype=jnp.bfloat16)).pack()
        >>> Packed.from_arrays(packed.arrays, (3, 3)).shape
        (3, 3)
        """
        if missing := [name for name in _ARRAYS if arrays.get(name) is None]:
            raise TypeError(
                f"Packed.from_arrays: needs {', '.join(_ARRAYS)}, got none of {', '.join(missing)}"
            )
        if len(shape) != 2 or min(shape) < 0:
            raise ValueError(f"Packed.from_arrays: shape must be (m, k), got {shape}")
        leaves = [arrays[name] for name in _ARRAYS]
        scales = arrays.get("scales")
        abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
        if not abstract:
            leaves = [jnp.asarray(leaf) for leaf in leaves]
            scales = None if scales is None else jnp.asarray(scales)
        _, masks, _, panels, _ = leaves
        # Of the form of a matrix that fits; what does not is found by the checks.
        steps = masks.shape[1] if masks.ndim == 3 else 0
        pieces, count = panels.shape[:2] if panels.ndim == 3 else (0, 0)
        cell = 2 if steps and steps == count * masks_of_panel(2) else int(masks.ndim != 2)
        strips = math.ceil(shape[0] / strip_rows(cell))
        entries: Any = (arrays.get("sources"), arrays.get("topology"))
        if any(x is None for x in entries):
            entries = (None, None)
        elif not abstract:
            entries = (jnp.asarray(entries[0]), entries[1].with_transpose())
        packed = cls(
            *leaves,
            scales,
            *entries,
            shape=(int(shape[0]), int(shape[1])),
            cell=cell,
            parts=max(pieces // strips, 1) if strips else 1,
        )
        check_shapes("Packed.from_arrays", packed)
        return packed if abstract or not is_concrete(*leaves) else packed.verify()

    # ---- What it is ----

    @property
    def dtype(self) -> Any:
        """That of the values: bfloat16, float16, int8 or float8_e4m3fn."""
        return self.values.dtype

    @property
    def quantized(self) -> bool:
        """Whether values have 8 bits, and rows scales."""
        return self.dtype in LARGEST

    @property
    def arrays(self) -> dict[str, jax.Array]:
        """What it is saved as: its arrays by their names, without those of a trainable one."""
        names = (*_ARRAYS, "scales") if self.quantized else _ARRAYS
        return {name: getattr(self, name) for name in names}

    @property
    def ndim(self) -> int:
        """2."""
        return 2

    @property
    def size(self) -> int:
        """Positions, stored or not: m k."""
        return self.shape[0] * self.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; of the same matrix written out in 16 bits they are 2 m k."""
        return sum(x.nbytes for x in jax.tree.leaves(self))

    def block_until_ready(self) -> Packed:
        """Waits for the arrays; returns the matrix."""
        ready: Packed = jax.block_until_ready(self)
        return ready

    def __repr__(self) -> str:
        m, k = self.shape
        text = f"Packed of shape ({m}, {k})"
        if all(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(self)):
            share = f", {100 * self.nbytes / (2 * m * k):.0f} % of dense" if m * k else ""
            share += " in 16 bits" * (self.quantized and bool(share))
            text += f", {self.dtype}, {self.nbytes} bytes{share}"
        return f"{text}, cell {self.cell}, {self.parts} part{'s' * (self.parts > 1)}"

    # ---- To something else ----

    def todense(self) -> jax.Array:
        """The dense matrix (m, k): in its dtype and differentiable, or of 8 bits in float32."""
        matrix = [getattr(self, name) for name in _ARRAYS]
        return written_out(matrix, self.scales, **self._form)

    @property
    def _form(self) -> dict[str, Any]:
        return {"columns": self.shape[1], "cell": self.cell, "parts": self.parts}

    def stored(self) -> jax.Array:
        """Which places are stored, bool (m, k); with cells of 0 or 2 none that hold 0 are."""
        stored: jax.Array
        _, stored = unpacked(self.values, self.masks, self.starts, self.rows, **self._form)
        return stored

    def repack(self, values: jax.Array) -> Packed:
        """The same with other values on the pattern that it was packed from: one gather.

        Args:
            values: ``(nse,)``, one for each stored entry; cast to the matrix's dtype, or rounded
                with scales of their own.

        Raises:
            ValueError: if it was packed neither with ``trainable=True`` nor ``repackable=True``, or
                values don't fit.

        >>> import jax.numpy as jnp
        >>> from jaxsparse import CSR
        >>> a = CSR.fromdense(jnp.eye(2, dtype=jnp.bfloat16))
        >>> a.pack(trainable=True).repack(jnp.array([2.0, 3.0])).todense()
        Array([[2, 0],
               [0, 3]], dtype=bfloat16)
        """
        if self.sources is None or self.topology is None:
            raise ValueError(
                "Packed.repack: needs a matrix that was packed with trainable=True or "
                "repackable=True, which keep the entry of each number"
            )
        if values.shape != (self.topology.nse,):
            raise ValueError(
                f"Packed.repack: values must have shape ({self.topology.nse},), one for each "
                f"stored entry, got {values.shape}"
            )
        numbers, scales = _numbers_of(values, self.topology, self.dtype)
        changed = {"values": taken(numbers, self.sources), "scales": scales}
        leaves = [changed.get(name, getattr(self, name)) for name in _LEAVES]
        return Packed(*leaves, shape=self.shape, cell=self.cell, parts=self.parts)

    def verify(self) -> Packed:
        """Checks what a damaged file could have changed; returns the matrix.

        Products of a damaged one are of no use, though nothing is read out of bounds.

        Raises:
            ValueError: if the arrays do not belong together, or they are traced.
        """
        arrays = [getattr(self, name) for name in _ARRAYS]
        if not is_concrete(*arrays, *([] if self.scales is None else [self.scales])):
            raise ValueError("Packed.verify: needs concrete arrays, got traced ones")
        check_shapes("Packed.verify", self)
        check_arrays("Packed.verify", self)
        return self

    # ---- Products ----

    def __matmul__(self, x: Any) -> Any:
        if not is_dense(x):
            return NotImplemented
        if x.ndim == 0:
            raise ValueError("matmul: a scalar is no operand of @")
        y = multiply_packed("matmul", self, x[:, None] if x.ndim == 1 else x, x_on_left=False)
        return y.squeeze(-1) if x.ndim == 1 else y

    def __rmatmul__(self, x: Any) -> Any:
        raise TypeError(
            "matmul: x @ packed would be a product by the transposed matrix, which is not packed: "
            "write linear(x, packed) for x times the transpose, or x @ packed.todense()"
        )


def _laid_out(
    pattern: list[np.ndarray], *, columns: int, cell: int, parts: int, bits: int
) -> list[np.ndarray]:
    """Masks, starts, panels and sources of a pattern's rows, columns and row order."""
    row = numbers_of_row(cell, quantized=bits == 8)
    if cell == 0:
        masks, starts, sources = _ffi.pack_gaps(*pattern, columns=columns, parts=parts)
        steps = np.diff(starts)
        panels = np.stack([np.zeros_like(steps), steps], -1)[:, None]
        return [masks.reshape(-1, LANES), starts, panels, sources.reshape(-1, row)]
    options = {"columns": columns, "cell": cell, "parts": parts, "bits": bits}
    masks, starts, panels, sources = _ffi.pack_streams(*pattern, **options)
    pieces, count = starts.size - 1, math.ceil(columns / (PANEL_COLUMNS * parts))
    masks = masks.reshape(pieces, count * masks_of_panel(cell), LANES)
    return [masks, starts, panels.reshape(pieces, count, 2), sources.reshape(-1, row)]


def _numbers_of(
    values: jax.Array, topology: Topology, dtype: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Values as numbers of the dtype, and scales of rows if it has 8 bits."""
    if dtype not in LARGEST:
        return values.astype(dtype), None
    rounded: tuple[jax.Array, jax.Array] = quantized(
        values, topology.row_indices, m=topology.shape[0], dtype=dtype
    )
    return rounded


def _flatten(packed: Packed) -> Any:
    keyed = [(jax.tree_util.GetAttrKey(name), getattr(packed, name)) for name in _LEAVES]
    return keyed, (packed.shape, packed.cell, packed.parts)


def _unflatten(form: tuple[tuple[int, int], int, int], leaves: Any) -> Packed:
    shape, cell, parts = form
    return Packed(*leaves, shape=shape, cell=cell, parts=parts)


def _deserialize(data: bytes) -> tuple[tuple[int, int], int, int]:
    (m, k), cell, parts = json.loads(data)
    return (m, k), cell, parts


jax.tree_util.register_pytree_with_keys(Packed, _flatten, _unflatten)
jax.export.register_pytree_node_serialization(
    Packed,
    serialized_name="jaxsparse.Packed",
    serialize_auxdata=lambda form: json.dumps(form).encode(),
    deserialize_auxdata=_deserialize,
)
