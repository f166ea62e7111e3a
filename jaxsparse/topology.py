"""Where the nonzeros of a sparse matrix are."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import display, masks
from jaxsparse.masks.positions import TracedMaskError
from jaxsparse.pattern import (
    NO_STARTS,
    Pattern,
    checked,
    checks_enabled,
    derive_on_host,
    derive_traced,
    row_indices,
    tile_starts,
)

INT32_MAX = 2**31 - 1


class Topology:
    """The stored positions of an (m, k) sparse matrix: compressed sparse rows without values.

    A pytree of integer arrays with static ``shape``. It is separate from the values so that a new
    pattern with as many entries needs no new compilation, and so that what is derived from a
    pattern is made once: the rows by falling length, the transposed pattern with the permutation
    that carries values over, 16-bit indices, and where the entries of each tile begin that tensor
    cores multiply by. The constructor makes these, on the host for concrete arrays and in the
    program for traced ones; no operation or gradient ever sorts. Leading dimensions, the same for
    both arrays, are a batch of patterns with equal numbers of stored entries.

    Args:
        row_offsets: integers ``(..., m + 1)``, starting at 0 and not falling.
        column_indices: integers ``(..., nse)``; within a row they rise. Entries from
            ``row_offsets[..., m]`` on are padding: every operation ignores them.
        shape: ``(m, k)``.

    Raises:
        ValueError: if the structure is bad, naming the row and the values. Under ``jax.jit`` the
            values are not known: they are clamped into range, so that nothing reads out of bounds,
            or reported when the program runs if ``JAXSPARSE_CHECK=1`` is set (by a
            JaxRuntimeError; by a ValueError where the runtime notices while it dispatches).

    >>> topology = Topology([0, 2, 2, 3], [0, 2, 1], (3, 4))
    >>> topology.nnz, topology.sparsity
    (3, 0.75)
    >>> print(topology)
    Topology of shape (3, 4), 3 stored, 75.0 % sparse
    ┌────┐
    │█ █ │
    │    │
    │ █  │
    └────┘
    """

    pattern: Pattern
    transposed_pattern: Pattern
    permutation: jax.Array  # entry e of the transposed pattern is entry permutation[e] of this one
    tile_starts: jax.Array  # of pattern.tile_starts, or (..., 1)
    shape: tuple[int, int]
    scan_layout: Any  # what recurrent.pack makes of the pattern, or None

    __slots__ = (
        "pattern",
        "permutation",
        "scan_layout",
        "shape",
        "tile_starts",
        "transposed_pattern",
    )

    def __init__(self, row_offsets: Any, column_indices: Any, shape: Sequence[int]):
        self.shape = _check_shape(shape)
        row_offsets = _check_indices("row_offsets", row_offsets)
        column_indices = _check_indices("column_indices", column_indices)
        m = self.shape[0]
        if row_offsets.ndim < 1 or row_offsets.shape[-1] != m + 1:
            raise ValueError(
                f"Topology: row_offsets must have shape (..., {m + 1}) for {m} rows, "
                f"got {row_offsets.shape}"
            )
        if column_indices.ndim < 1 or column_indices.shape[:-1] != row_offsets.shape[:-1]:
            raise ValueError(
                f"Topology: column_indices must have shape (..., nse) with the batch dimensions of "
                f"row_offsets {row_offsets.shape[:-1]}, got {column_indices.shape}"
            )
        traced = isinstance(row_offsets, jax.core.Tracer) or isinstance(
            column_indices, jax.core.Tracer
        )
        derive = derive_traced if traced else derive_on_host
        derived = derive(row_offsets, column_indices, self.shape)
        self.pattern, self.transposed_pattern, self.permutation, self.tile_starts = derived
        self.scan_layout = None

    @classmethod
    def _from_parts(
        cls,
        pattern: Any,
        transposed_pattern: Any,
        permutation: Any,
        tile_starts: Any,
        scan_layout: Any,
        shape: tuple[int, int],
    ) -> Topology:
        topology = object.__new__(cls)
        topology.pattern = pattern
        topology.transposed_pattern = transposed_pattern
        topology.permutation = permutation
        topology.tile_starts = tile_starts
        topology.scan_layout = scan_layout
        topology.shape = shape
        return topology

    @classmethod
    def from_mask(
        cls,
        mask: Callable[[Any, Any], Any] | Any,
        shape: Sequence[int] | None = None,
        nse: int | None = None,
    ) -> Topology:
        """The stored positions of a mask.

        Args:
            mask: a mask function (``jaxsparse.masks``), or an array ``(..., m, k)`` of bool, or of
                0 and 1 in any dtype. A traced array must be of bool or integers, of which 1 is
                stored.
            shape: ``(m, k)``; may be left out for an array.
            nse: room for so many entries, padding included. Needed where the mask is traced, or
                depends on traced arrays; there, what does not fit is left out, or reported when the
                program runs if ``JAXSPARSE_CHECK=1`` is set. So are other integers than 0 and 1.

        Raises:
            ValueError: if a concrete mask stores more than ``nse`` positions, or ``nse`` is missing
                for a traced one; for other values than 0 and 1, as of additive masks, whose 0 is
                what is seen.

        >>> from jaxsparse import masks
        >>> Topology.from_mask(masks.band(2) & masks.causal(), (4, 4)).nnz
        7
        """
        if callable(mask):
            if shape is None:
                raise ValueError("Topology.from_mask: a mask function needs a shape (m, k)")
            shape = _check_shape(shape)
            try:
                return cls(*_pad(*masks.nonzero(mask, shape), nse), shape)
            except TracedMaskError:
                size = _needed(nse)
            return cls(*masks.nonzero_traced(mask, shape, size), shape)
        mask = mask if isinstance(mask, jax.Array) else np.asarray(mask)
        if mask.ndim < 2:
            raise ValueError(f"Topology.from_mask: needs an array (..., m, k), got {mask.shape}")
        shape = _check_shape(mask.shape[-2:] if shape is None else shape)
        if tuple(mask.shape[-2:]) != shape:
            raise ValueError(f"Topology.from_mask: mask {mask.shape} does not have shape {shape}")
        if isinstance(mask, jax.core.Tracer):
            return cls(*_compress_traced(mask, shape, _needed(nse)), shape)
        dense = _as_bool(np.asarray(mask))
        batch = dense.shape[:-2]
        offsets = np.zeros((*batch, shape[0] + 1), np.int64)
        np.cumsum(dense.sum(-1), -1, out=offsets[..., 1:])
        most = int(offsets[..., -1].max(initial=0))
        columns = np.zeros((*batch, most), np.int32)
        for entry in np.ndindex(batch):
            columns[entry][: offsets[entry][-1]] = np.nonzero(dense[entry])[1]
        return cls(*_pad(offsets, columns, nse), shape)

    @property
    def row_offsets(self) -> jax.Array:
        """int32 ``(..., m + 1)``."""
        return self.pattern.row_offsets

    @property
    def column_indices(self) -> jax.Array:
        """int32 ``(..., nse)``."""
        return self.pattern.column_indices

    @property
    def nse(self) -> int:
        """Stored entries of each pattern, padding included: static."""
        return self.pattern.column_indices.shape[-1]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Leading dimensions of a batch of patterns; () for one."""
        return self.pattern.column_indices.shape[:-1]

    @property
    def nnz(self) -> Any:
        """Stored entries, padding not counted: an int, an array for a batch, traced under jit."""
        if isinstance(self.row_offsets, jax.core.Tracer):
            return self.row_offsets[..., -1]
        nnz = np.asarray(self.row_offsets)[..., -1]  # on the host: a constant of a traced function
        return nnz if nnz.ndim else int(nnz)

    @property
    def sparsity(self) -> Any:
        """Share of positions that are not stored; 0 for an empty shape."""
        size = self.shape[0] * self.shape[1]
        return 1 - self.nnz / size if size else 0.0

    @property
    def T(self) -> Topology:
        """The transposed topology: what is derived changes places, nothing is sorted."""
        iota = jnp.broadcast_to(jnp.arange(self.nse, dtype=jnp.int32), self.permutation.shape)
        inverse = jnp.put_along_axis(
            jnp.zeros_like(self.permutation), self.permutation, iota, axis=-1, inplace=False
        )
        m, k = self.shape
        t = self.transposed_pattern
        starts = tile_starts(t.row_offsets, t.column_indices, (k, m))
        return Topology._from_parts(t, self.pattern, inverse, starts, None, (k, m))

    def with_scan_layout(self, layout: Any) -> Topology:
        """The same topology, carrying what `jaxsparse.recurrent.pack` made of it."""
        return Topology._from_parts(
            self.pattern,
            self.transposed_pattern,
            self.permutation,
            self.tile_starts,
            layout,
            self.shape,
        )

    def reshape_batch(self, *sizes: int) -> Topology:
        """The same patterns, with batch dimensions of other sizes; nothing is copied or derived.

        Raises:
            ValueError: if that is another number of patterns.

        >>> import numpy as np
        >>> patterns = Topology.from_mask(np.ones((6, 4, 5), bool))
        >>> patterns.reshape_batch(2, 3).batch_shape
        (2, 3)
        """
        old = self.batch_shape
        if math.prod(sizes) != math.prod(old):
            raise ValueError(
                f"Topology.reshape_batch: sizes must be those of {math.prod(old)} patterns, batch "
                f"{old}, got {sizes}"
            )
        return jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[len(old) :]), self)

    def row_indices(self) -> jax.Array:
        """The row of every stored entry, int32 ``(..., nse)``; m for padding."""
        return row_indices(self.row_offsets, self.nse)

    def operands(self) -> tuple[jax.Array, ...]:
        """What an operation's primitive takes: both patterns' three arrays and what joins them.

        That is the permutation, and the starts of tiles. They are checked first if
        ``JAXSPARSE_CHECK=1``, but for starts, which kernels find out for themselves then.
        """
        m, k = self.shape
        rows, transposed = self.pattern.operands(), self.transposed_pattern.operands()
        starts = self.tile_starts
        if checks_enabled():
            rows = (checked(*rows, columns=k), *rows[1:])
            transposed = (
                checked(*transposed, self.permutation, columns=m),
                *transposed[1:],
            )
            starts = jnp.zeros_like(starts, shape=(*starts.shape[:-1], *NO_STARTS))
        return (*rows, *transposed, self.permutation, starts)

    def verify(self) -> Topology:
        """Checks a concrete topology and what is derived from it; returns it.

        The constructor checks what it is given. This is for arrays that came past it, from a file
        for instance: kernels rely on them. Linear work, on the host.

        Raises:
            ValueError: if the pattern is bad, naming the row, or the derived arrays don't belong to
                it.

        >>> Topology([0, 1], [3], (1, 4)).verify().nnz
        1
        """
        leaves = jax.tree.leaves(self.with_scan_layout(None))
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            raise ValueError("Topology.verify: needs a concrete topology, got a traced one")
        derived = jax.tree.leaves(Topology(self.row_offsets, self.column_indices, self.shape))
        if len(leaves) != len(derived) or not all(map(np.array_equal, leaves, derived)):
            raise ValueError(
                f"Topology.verify: the arrays derived from the pattern (row order, transposed "
                f"pattern, permutation, starts of tiles) of {self!r} are not those of its offsets "
                f"and columns"
            )
        if self.scan_layout is not None:
            try:
                self.scan_layout.verify(self)
            except ValueError as error:
                raise ValueError(f"Topology.verify: {error}") from None
        return self

    def plot(self, *, ax: Any = None, title: str | None = None) -> Any:
        """Draws the pattern's density with matplotlib and returns the axes."""
        return display.plot(*self._arrays("plot"), self.shape, ax=ax, title=title)

    def _arrays(self, purpose: str) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(self.row_offsets, jax.core.Tracer) or self.batch_shape:
            raise ValueError(f"Topology.{purpose}: needs one concrete pattern")
        return np.asarray(self.row_offsets), np.asarray(self.column_indices)

    def __str__(self) -> str:
        if not isinstance(self.row_offsets, jax.Array) or isinstance(
            self.row_offsets, jax.core.Tracer
        ):
            return repr(self)
        if self.batch_shape:
            return f"Topology of shape {self.shape}, batch {self.batch_shape}, nse {self.nse}"
        padding = f", {self.nse - self.nnz} padding" if self.nse != self.nnz else ""
        head = (
            f"Topology of shape {self.shape}, {self.nnz} stored{padding}, "
            f"{100 * self.sparsity:.1f} % sparse"
        )
        return f"{head}\n{display.grid(*self._arrays('__str__'), self.shape)}"

    def __repr__(self) -> str:
        leaf = self.pattern.column_indices if isinstance(self.pattern, Pattern) else None
        return f"Topology(shape={self.shape}, column_indices={getattr(leaf, 'shape', leaf)})"


def _flatten(topology: Topology) -> Any:
    names = ("pattern", "transposed_pattern", "permutation", "tile_starts", "scan_layout")
    children = [(jax.tree_util.GetAttrKey(n), getattr(topology, n)) for n in names]
    return children, topology.shape


jax.tree_util.register_pytree_with_keys(
    Topology,
    _flatten,
    lambda shape, parts: Topology._from_parts(*parts, shape),  # type: ignore
)
# So that exported programs may take and return topologies.
jax.export.register_namedtuple_serialization(Pattern, serialized_name="jaxsparse.Pattern")
jax.export.register_pytree_node_serialization(
    Topology,
    serialized_name="jaxsparse.Topology",
    serialize_auxdata=lambda shape: f"{shape[0]} {shape[1]}".encode(),
    deserialize_auxdata=lambda data: tuple(map(int, data.split())),
)


def same_pattern(a: Topology, b: Topology) -> bool:
    """Whether two topologies are known to store the same positions."""
    if a is b:
        return True
    if a.shape != b.shape or a.nse != b.nse or a.batch_shape != b.batch_shape:
        return False
    pairs = ((a.row_offsets, b.row_offsets), (a.column_indices, b.column_indices))
    if all(x is y for x, y in pairs):
        return True
    if any(isinstance(x, jax.core.Tracer) for pair in pairs for x in pair):
        raise ValueError(
            "whether two patterns that come as separate arguments of a traced function are equal "
            "is not known: use CSR(a.values + b.values, a.topology)"
        )
    return all(np.array_equal(x, y) for x, y in pairs)


def _check_shape(shape: Sequence[int]) -> tuple[int, int]:
    try:
        m, k = (operator.index(size) for size in shape)
    except (TypeError, ValueError) as error:
        raise ValueError(f"Topology: shape must be two integers (m, k), got {shape!r}") from error
    if not (0 <= m < INT32_MAX and 0 <= k < INT32_MAX):
        raise ValueError(f"Topology: sizes must be in [0, {INT32_MAX}), got {(m, k)}")
    return m, k


def _check_indices(name: str, array: Any) -> Any:
    """An int32 array, of NumPy unless it is traced; int64 is range-checked and cast."""
    if isinstance(array, jax.core.Tracer):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"Topology: {name} must be integers, got {array.dtype}")
        limits = jnp.iinfo(array.dtype)  # a bound that its own dtype can't hold would wrap around
        low, high = max(limits.min, -1), min(limits.max, INT32_MAX)
        return jnp.clip(array, low, high).astype(jnp.int32)
    array = np.asarray(array)
    if array.size == 0 and not np.issubdtype(array.dtype, np.integer):
        array = array.astype(np.int32)  # NumPy makes an empty list floating
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"Topology: {name} must be integers, got {array.dtype}")
    if array.size and (array.max() > INT32_MAX or array.min() < -INT32_MAX):
        raise ValueError(
            f"Topology: {name} must fit int32, got values from {array.min()} to {array.max()}"
        )
    return array.astype(np.int32)


def _needed(nse: int | None) -> int:
    if nse is None:
        raise ValueError(
            "Topology: under jit the number of stored entries must be given as nse=...; of a mask "
            "that depends on traced arrays, a layer takes the topology made so in its place"
        )
    return operator.index(nse)


_WHAT_TO_WRITE = (
    "write mask == 0 for an additive mask (0 where seen, -inf elsewhere), and matrix != 0 for the "
    "entries of a matrix"
)


def _as_bool(mask: np.ndarray) -> np.ndarray:
    """A concrete mask of bool, or of 0 and 1 in any dtype."""
    if mask.dtype == np.bool_:
        return mask
    if not jnp.issubdtype(mask.dtype, np.number):
        raise ValueError(f"Topology.from_mask: mask must be bool, got dtype {mask.dtype}")
    stored = mask == 1
    other = mask[~(stored | (mask == 0))]
    if other.size:
        raise ValueError(
            f"Topology.from_mask: mask must be bool, or hold 0 and 1 alone, got {other[0]} "
            f"({mask.dtype}): {_WHAT_TO_WRITE}"
        )
    return stored


def _compress_traced(mask: jax.Array, shape: tuple[int, int], nse: int) -> tuple[Any, Any]:
    """Row offsets and column indices of a traced mask."""
    if not (mask.dtype == np.bool_ or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise ValueError(
            "Topology.from_mask: a traced mask must be bool, or integers 0 and 1, got "
            f"{mask.dtype}: {_WHAT_TO_WRITE}"
        )

    def one(stored: jax.Array) -> Any:
        return masks.nonzero_traced(lambda rows, columns: stored, shape, nse)

    for _ in range(mask.ndim - 2):
        one = jax.vmap(one)
    stored = mask == 1
    offsets, columns = one(stored)
    if mask.dtype != np.bool_ and checks_enabled():
        binary = jnp.all(stored | (mask == 0), axis=(-2, -1))
        offsets = offsets.at[..., 0].set(jnp.where(binary, 0, -1))  # which no pattern may have
    return offsets, columns


def _pad(offsets: np.ndarray, columns: np.ndarray, nse: int | None) -> tuple[Any, Any]:
    """Appends padding entries up to nse."""
    if nse is None:
        return offsets, columns
    size = operator.index(nse)
    most = int(offsets[..., -1].max(initial=0))
    if size < most:
        raise ValueError(f"Topology: nse={size} is less than the {most} entries to store")
    padded = np.zeros((*columns.shape[:-1], size), columns.dtype)
    padded[..., :most] = columns[..., :most]
    return offsets, padded
