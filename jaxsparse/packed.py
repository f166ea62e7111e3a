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
from jaxsparse.ops.packed_places import (
    LANES,
    PANEL_COLUMNS,
    STRIP_ROWS,
    masks_of_panel,
    panels_of,
    taken,
    unpacked,
)
from jaxsparse.ops.packed_unpack import written_out
from jaxsparse.pattern import is_concrete
from jaxsparse.topology import Topology

_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_ARRAYS = ("values", "masks", "starts", "panels", "rows")
_LEAVES = (*_ARRAYS, "sources", "topology")
MOST_PARTS = 8


class Packed:
    """A sparse matrix of 16-bit numbers, laid out for products with few columns on a GPU.

    Weights that are 50 to 95 % sparse take 60 to 13 % of the bytes that dense ones take, and each
    lane of a GPU finds its own among them without asking others. ``packed @ x``, `jaxsparse.spmm`
    and `jaxsparse.linear` take one. Make it by :meth:`CSR.pack`, on the host, from a pattern that
    is known; it is for inference, and for weights that are used several times before they change.
    Products are differentiable to any order, in x and in the numbers. Gradients of the numbers of a
    trainable matrix are computed at its pattern alone (`jaxsparse.sddmm`); those of others take a
    dense matrix (m, k) and are not 0 beside a pair's stored number, so train with
    ``trainable=True``.

    A pytree: the arrays below are its leaves, so it goes through ``jax.jit``, checkpoints and
    ``jax.export``. On a CPU, and on a GPU for many columns, it is written out and multiplied by
    XLA.

    Attributes:
        values: ``(w, 64)``, bfloat16 or float16: rows of two numbers for each lane.
        masks: uint32 ``(p, s, 32)``: which places of each of p pieces are stored.
        starts: int32 ``(p + 1,)``: the rows of ``values`` in front of each piece.
        panels: int32 ``(p, t, 2)``: which rows a piece reads for each 128 columns.
        rows: int32 ``(m,)``: the order of the rows, 16 of which make a strip.
        sources: int32 ``(w, 64)``: the stored entry of each number, or ``nse`` for none; only of a
            trainable one, else None.
        topology: the pattern; only of a trainable one, else None.
        shape: (m, k).
        cell: how many neighbours in a row are stored together: 1 or 2.
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
        trainable: bool,
    ) -> Packed:
        """What `CSR.pack` returns."""
        dtype = jax.dtypes.canonicalize_dtype(values.dtype if dtype is None else dtype)
        if dtype not in _DTYPES:
            raise ValueError(
                f"CSR.pack: dtype must be bfloat16 or float16, got {dtype}: values that are wider "
                "are rounded only where it is asked for"
            )
        if values.ndim != 1 or topology.batch_shape:
            raise ValueError(
                f"CSR.pack: needs one matrix, got values of shape {values.shape} on patterns of "
                f"batch {topology.batch_shape}"
            )
        if cell not in (None, 1, 2):
            raise ValueError(f"CSR.pack: cell must be None, 1 or 2, got {cell!r}")
        m, k = topology.shape
        most = min(MOST_PARTS, max(math.ceil(k / PANEL_COLUMNS), 1))
        if parts is not None and not (isinstance(parts, int) and 1 <= parts <= most):
            raise ValueError(
                f"CSR.pack: parts must be None or 1 to {most} for {k} columns, got {parts!r}"
            )
        offsets, columns = topology.concrete_arrays("CSR.pack")
        density = float(offsets[-1]) / (m * k) if m * k else 0.0
        cell = _cell_for(density) if cell is None else cell
        parts = _parts_for(m, k, most) if parts is None else parts
        try:
            masks, starts, reads, sources = _ffi.pack_streams(
                np.asarray(offsets, np.int32),
                np.asarray(columns, np.int32),
                np.asarray(topology.pattern.row_order, np.int32),
                columns=k,
                cell=cell,
                parts=parts,
            )
        except ValueError as error:
            raise ValueError(f"CSR.pack: {error}") from None
        pieces, panels = starts.size - 1, math.ceil(k / (PANEL_COLUMNS * parts))
        sources = np.where(sources < 0, topology.nse, sources).reshape(-1, 2 * LANES)
        return cls(
            taken(values.astype(dtype), sources),
            jnp.asarray(masks.reshape(pieces, panels * masks_of_panel(cell), LANES)),
            jnp.asarray(starts),
            jnp.asarray(reads.reshape(pieces, panels, 2)),
            jnp.asarray(topology.pattern.row_order),
            jnp.asarray(sources) if trainable else None,
            topology.with_transpose() if trainable else None,  # as gradients read it
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
                metadata of a file tell: then so is the matrix, for a target to restore to. With
                ``sources`` and ``topology``, a `Topology`, it is trainable. Other names are left
                out.
            shape: (m, k).

        Raises:
            TypeError: if one is missing.
            ValueError: if they do not belong together, or to a matrix of that shape.

        >>> import jax.numpy as jnp
        >>> from jaxsparse import CSR
        >>> packed = CSR.fromdense(jnp.eye(3, dtype=jnp.bfloat16)).pack()
        >>> saved = {name: getattr(packed, name) for name in packed.ARRAYS}
        >>> Packed.from_arrays(saved, (3, 3)).shape
        (3, 3)
        """
        if missing := [name for name in _ARRAYS if arrays.get(name) is None]:
            raise TypeError(
                f"Packed.from_arrays: needs {', '.join(_ARRAYS)}, got none of {', '.join(missing)}"
            )
        if len(shape) != 2 or min(shape) < 0:
            raise ValueError(f"Packed.from_arrays: shape must be (m, k), got {shape}")
        leaves = [arrays[name] for name in _ARRAYS]
        abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
        if not abstract:
            leaves = [jnp.asarray(leaf) for leaf in leaves]
        _, masks, _, panels, _ = leaves
        # Of the form of a matrix that fits; what does not is found by the checks.
        steps = masks.shape[1] if masks.ndim == 3 else 0
        count = panels.shape[1] if panels.ndim == 3 else 0
        strips = math.ceil(shape[0] / STRIP_ROWS)
        entries: Any = (arrays.get("sources"), arrays.get("topology"))
        if any(x is None for x in entries):
            entries = (None, None)
        elif not abstract:
            entries = (jnp.asarray(entries[0]), entries[1].with_transpose())
        packed = cls(
            *leaves,
            *entries,
            shape=(int(shape[0]), int(shape[1])),
            cell=2 if steps and steps == count * masks_of_panel(2) else 1,
            parts=max(masks.shape[0] // strips, 1) if strips and masks.ndim == 3 else 1,
        )
        check_shapes("Packed.from_arrays", packed)
        return packed if abstract or not is_concrete(*leaves) else packed.verify()

    # ---- What it is ----

    @property
    def dtype(self) -> Any:
        """That of the values: bfloat16 or float16."""
        return self.values.dtype

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
        """Bytes of all arrays; of the same matrix written out they are 2 m k."""
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
            text += f", {self.dtype}, {self.nbytes} bytes{share}"
        return f"{text}, cell {self.cell}, {self.parts} part{'s' * (self.parts > 1)}"

    # ---- To something else ----

    def todense(self) -> jax.Array:
        """The dense matrix (m, k). Differentiable."""
        return written_out([getattr(self, name) for name in _ARRAYS], **self._form)

    @property
    def _form(self) -> dict[str, Any]:
        return {"columns": self.shape[1], "cell": self.cell, "parts": self.parts}

    def stored(self) -> jax.Array:
        """Which places are stored, bool (m, k); with cells of 2 none that hold 0 are."""
        stored: jax.Array
        _, stored = unpacked(self.values, self.masks, self.starts, self.rows, **self._form)
        return stored

    def repack(self, values: jax.Array) -> Packed:
        """The same with other values on the pattern that it was packed from: one gather.

        Args:
            values: ``(nse,)``, one for each stored entry; cast to the matrix's dtype.

        Raises:
            ValueError: if it was not packed with ``trainable=True``, or values don't fit.

        >>> import jax.numpy as jnp
        >>> from jaxsparse import CSR
        >>> a = CSR.fromdense(jnp.eye(2, dtype=jnp.bfloat16))
        >>> a.pack(trainable=True).repack(jnp.array([2.0, 3.0])).todense()
        Array([[2, 0],
               [0, 3]], dtype=bfloat16)
        """
        if self.sources is None or self.topology is None:
            raise ValueError(
                "Packed.repack: needs a matrix that was packed with trainable=True, which keeps "
                "the entry of each number"
            )
        if values.shape != (self.topology.nse,):
            raise ValueError(
                f"Packed.repack: values must have shape ({self.topology.nse},), one for each "
                f"stored entry, got {values.shape}"
            )
        leaves = [getattr(self, name) for name in _LEAVES[1:]]
        values = taken(values.astype(self.dtype), self.sources)
        return Packed(values, *leaves, shape=self.shape, cell=self.cell, parts=self.parts)

    def verify(self) -> Packed:
        """Checks what a damaged file could have changed; returns the matrix.

        Products of a damaged one are of no use, though nothing is read out of bounds.

        Raises:
            ValueError: if the arrays do not belong together, or they are traced.
        """
        arrays = [getattr(self, name) for name in _ARRAYS]
        if not is_concrete(*arrays):
            raise ValueError("Packed.verify: needs concrete arrays, got traced ones")
        check_shapes("Packed.verify", self)
        values, masks, starts, panels, rows = map(np.asarray, arrays)
        m = self.shape[0]
        if values.shape[0] != starts[-1]:
            raise ValueError(
                f"Packed.verify: values must have {starts[-1]} rows, as starts say, got "
                f"{values.shape[0]}"
            )
        if not np.array_equal(np.sort(rows), np.arange(m)):
            raise ValueError("Packed.verify: rows must name each row once")
        expected_panels, words = panels_of(jnp.asarray(masks), cell=self.cell)
        if starts[0] != 0 or not np.array_equal(np.diff(starts), words):
            raise ValueError("Packed.verify: starts are not where the masks' words begin")
        if not np.array_equal(panels, expected_panels):
            raise ValueError("Packed.verify: panels are not what the masks read")
        if self.sources is not None and self.topology is not None:
            found = np.sort(np.asarray(self.sources), axis=None)
            nnz, nse = int(self.topology.row_offsets[-1]), self.topology.nse
            if not np.array_equal(found[:nnz], np.arange(nnz)) or (found[nnz:] != nse).any():
                raise ValueError(
                    f"Packed.verify: sources must name each of {nnz} entries once, and {nse} else"
                )
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


def _cell_for(density: float) -> int:
    """Pairs take fewer instructions, and of few entries hardly more bytes."""
    return 2 if density < 0.18 else 1


def _parts_for(m: int, k: int, most: int) -> int:
    """The number of parts by which the blocks of an H200 are done first."""

    def clocks(parts: int) -> float:
        # A block of sixteen warps has up to four parts, and others those that are left: a cluster.
        ranges = math.gcd(parts, 4)
        blocks = parts // ranges
        # More than two are in one of eight groups of multiprocessors, of which some are smaller.
        at_once = 132 if blocks <= 2 else (8 * (16 // blocks) - 2) * blocks
        waves = math.ceil(math.ceil(m * ranges / (16 * STRIP_ROWS)) * blocks / at_once)
        panels = math.ceil(k / (PANEL_COLUMNS * parts))
        # A panel has 128 fragments of sixteen warps; they take longer if one warp copies for many.
        # Each doubling pads streams by 3 to 10 %.
        fragments = panels * 128 * {1: 26, 2: 19, 4: 14}[ranges]
        return waves * (fragments + 1000) * (1 + 0.05 * math.log2(parts)) + 700 * blocks

    return min(range(1, most + 1), key=clocks)


def check_shapes(operation: str, packed: Packed) -> None:
    """Raises a ValueError, naming the array, unless all are of a matrix of the shape; any array."""
    m, k = packed.shape
    pieces = math.ceil(m / STRIP_ROWS) * packed.parts
    count = math.ceil(k / (PANEL_COLUMNS * packed.parts))
    integers = np.dtype(np.int32)
    expected: dict[str, tuple[tuple[int | None, ...], tuple[Any, ...]]] = {
        "rows": ((m,), (integers,)),  # first, as it tells most
        "values": ((None, 2 * LANES), _DTYPES),
        "masks": ((pieces, count * masks_of_panel(packed.cell), LANES), (np.dtype(np.uint32),)),
        "starts": ((pieces + 1,), (integers,)),
        "panels": ((pieces, count, 2), (integers,)),
    }
    if packed.sources is not None and packed.topology is not None:
        expected["sources"] = (packed.values.shape, (integers,))
        if packed.topology.shape != packed.shape:
            raise ValueError(
                f"{operation}: topology of a packed matrix {packed.shape} must have that shape, "
                f"got {packed.topology.shape}"
            )
    for name, (shape, dtypes) in expected.items():
        array = getattr(packed, name)
        got = array.shape
        if len(got) != len(shape) or any(
            b not in (None, a) for a, b in zip(got, shape, strict=True)
        ):
            wanted = str(shape).replace("None", "w")
            raise ValueError(
                f"{operation}: {name} of a packed matrix {packed.shape} with cells of "
                f"{packed.cell} in {packed.parts} parts must have shape {wanted}, got {got}"
            )
        if array.dtype not in dtypes:
            raise ValueError(
                f"{operation}: {name} of a packed matrix must be {' or '.join(map(str, dtypes))}, "
                f"got {array.dtype}"
            )


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
