"""Where the nonzeros of a sparse matrix are."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import display, masks
from jaxsparse.masks import arrays
from jaxsparse.masks.arguments import INT32_MAX, integer
from jaxsparse.masks.positions import TracedMaskError
from jaxsparse.pattern import (
    NO_STARTS,
    Pattern,
    checked,
    checks_enabled,
    derive_on_host,
    derive_traced,
    row_indices,
    transpose_on_host,
    transpose_traced,
)


class Topology:
    """The stored positions of an (m, k) sparse matrix: compressed sparse rows without values.

    A pytree of integer arrays with static ``shape``. It is separate from the values so that a new
    pattern with as many entries needs no new compilation, and so that what is derived from a
    pattern is made once: the rows by falling length, the transposed pattern with the permutation
    that carries values over, 16-bit indices, and where the entries of each tile begin that tensor
    cores multiply by. The constructor makes these, on the host for concrete arrays and in the
    program for traced ones; no operation or gradient ever sorts. Leading dimensions, the same for
    both arrays, are a batch of patterns with equal numbers of stored entries.

    A topology is *static* or *dynamic*, which says how a :class:`jaxsparse.CSR` carries it through
    a program. A static one is a part of the matrix's type, as its shape is: the only leaf of the
    matrix is its values, so that gradients, optimizers and ``jax.tree.map`` see nothing else, and a
    program is compiled for the pattern. A dynamic one is data: its arrays are leaves beside the
    values, and another pattern of as many entries needs no new compilation. What is made from
    concrete arrays is static; traced patterns, batches of patterns and patterns with room for more
    entries (``nse=``) are dynamic. :meth:`as_static` and :meth:`as_dynamic` change that.

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
    kind: Literal["static", "dynamic", "tangent"]  # a tangent's leaves are of type float0

    __slots__ = (
        "_key",  # these three are made when first asked for
        "_row_indices",
        "_transposed",
        "kind",
        "pattern",
        "permutation",
        "scan_layout",
        "shape",
        "tile_starts",
        "transposed_pattern",
    )

    def __init__(self, row_offsets: Any, column_indices: Any, shape: Sequence[int]):
        self.shape = check_shape(shape)
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
        exact = not traced and column_indices.ndim == 1
        exact = exact and row_offsets[-1] == column_indices.size
        self._set_kind("static" if exact else "dynamic")

    @classmethod
    def _from_parts(
        cls,
        pattern: Any,
        transposed_pattern: Any,
        permutation: Any,
        tile_starts: Any,
        scan_layout: Any,
        shape: tuple[int, int],
        kind: Literal["static", "dynamic", "tangent"] = "dynamic",
    ) -> Topology:
        topology = object.__new__(cls)
        topology.pattern = pattern
        topology.transposed_pattern = transposed_pattern
        topology.permutation = permutation
        topology.tile_starts = tile_starts
        topology.scan_layout = scan_layout
        topology.shape = shape
        topology._set_kind(kind)
        return topology

    def _set_kind(self, kind: Literal["static", "dynamic", "tangent"]) -> None:
        self.kind = kind
        self._key: TopologyKey | None = None
        self._row_indices: jax.Array | None = None
        self._transposed: Topology | None = None

    def _of_kind(self, kind: Literal["static", "dynamic", "tangent"]) -> Topology:
        if kind == self.kind:
            return self
        return Topology._from_parts(
            self.pattern,
            self.transposed_pattern,
            self.permutation,
            self.tile_starts,
            self.scan_layout,
            self.shape,
            kind,
        )

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
            nse: room for so many entries, padding included; makes the topology dynamic. Needed
                where the mask is traced, or depends on traced arrays; there, what does not fit is
                left out, or reported when the program runs if ``JAXSPARSE_CHECK=1`` is set. So are
                other integers than 0 and 1.

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
            shape = check_shape(shape)
            try:
                return cls.with_room(*masks.nonzero(mask, shape), shape, nse)
            except TracedMaskError:
                size = _needed(nse)
            return cls(*masks.nonzero_traced(mask, shape, size), shape)
        mask = mask if isinstance(mask, jax.Array) else np.asarray(mask)
        if mask.ndim < 2:
            raise ValueError(f"Topology.from_mask: needs an array (..., m, k), got {mask.shape}")
        shape = check_shape(mask.shape[-2:] if shape is None else shape)
        if tuple(mask.shape[-2:]) != shape:
            raise ValueError(f"Topology.from_mask: mask {mask.shape} does not have shape {shape}")
        if isinstance(mask, jax.core.Tracer):
            return cls(*arrays.compress_traced(mask, _needed(nse)), shape)
        return cls.with_room(*arrays.compress_on_host(np.asarray(mask)), shape, nse)

    @classmethod
    def with_room(
        cls, offsets: np.ndarray, columns: np.ndarray, shape: tuple[int, int], nse: int | None
    ) -> Topology:
        """Of concrete arrays, with padding up to ``nse`` if it is given, which makes it dynamic."""
        if nse is None:
            return cls(offsets, columns, shape)
        return cls(offsets, _pad(offsets, columns, nse), shape).as_dynamic()

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
        self.check_positions()
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
    def static(self) -> bool:
        """Whether a CSR carries this pattern as a part of its type, rather than as leaves."""
        return self.kind == "static"

    def as_static(self) -> Topology:
        """The same pattern, static; see the class. Checks it, as `verify` does.

        Raises:
            ValueError: if the pattern is traced, a batch of patterns or damaged.

        >>> Topology([0, 1], [3], (1, 4)).as_dynamic().as_static().static
        True
        """
        if not is_concrete(self.row_offsets, self.column_indices) or self.batch_shape:
            what = f"a batch {self.batch_shape}" if self.batch_shape else "a traced or abstract one"
            raise ValueError(f"Topology.as_static: needs one concrete pattern, got {what}")
        return self if self.static else self.verify()._of_kind("static")

    def as_dynamic(self) -> Topology:
        """The same pattern, dynamic; see the class.

        >>> import jax
        >>> topology = Topology([0, 1], [3], (1, 4))
        >>> len(jax.tree.leaves(topology.as_dynamic())) == len(jax.tree.leaves(topology))
        True
        """
        return self._of_kind("dynamic")

    def as_tangent(self) -> Topology:
        """The pattern of a derivative: static like this one, or with leaves of JAX's type float0.

        JAX gives integers derivatives of type float0, which no arithmetic takes: what an optimizer
        or ``jax.tree.map`` computes with the leaves of a matrix stops there instead of changing
        the pattern.
        """
        return self if self.static else self._of_kind("tangent")

    @property
    def has_positions(self) -> bool:
        """False for a derivative's pattern whose arrays became float0 on the way out of a program.

        See `as_tangent`.
        """
        return not (self.kind == "tangent" and self.permutation.dtype == _FLOAT0)

    def check_positions(self) -> None:
        """Raises ValueError where `has_positions` is False."""
        if not self.has_positions:
            raise ValueError(
                f"{self!r} came out of a program as the pattern of a derivative, without its "
                "positions: use a.with_values(gradient.values), a being what was differentiated"
            )

    @property
    def key(self) -> TopologyKey:
        """What stands for a static topology in a tree structure: equal where patterns are equal."""
        if self._key is None:
            self._key = TopologyKey(self)
        return self._key

    @property
    def T(self) -> Topology:
        """The transposed topology: what is derived changes places, nothing is sorted."""
        self.check_positions()
        if self._transposed is not None:
            return self._transposed
        m, k = self.shape
        t = self.transposed_pattern
        transpose = transpose_on_host if is_concrete(*t[:2], self.permutation) else transpose_traced
        inverse, starts = transpose(t, self.permutation, (k, m))
        result = Topology._from_parts(t, self.pattern, inverse, starts, None, (k, m), self.kind)
        if self.static:
            self._transposed = result
        return result

    def with_scan_layout(self, layout: Any) -> Topology:
        """The same topology, carrying what `jaxsparse.recurrent.pack` made of it, as data.

        A layout is not found again by its positions, so a topology with one is dynamic.
        """
        return Topology._from_parts(
            self.pattern,
            self.transposed_pattern,
            self.permutation,
            self.tile_starts,
            layout,
            self.shape,
            self.kind if layout is None else "dynamic",
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
        self.check_positions()
        # The tree of a derivative's pattern has no positions; as a dynamic one it has them.
        arrays = self if self.static else self.as_dynamic()
        reshaped: Topology = jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[len(old) :]), arrays)
        return reshaped

    @property
    def row_indices(self) -> jax.Array:
        """The row of every stored entry, int32 ``(..., nse)``; m for padding."""
        self.check_positions()
        if not self.static:
            return _row_indices(self.row_offsets, self.nse)
        if self._row_indices is None:
            rows = np.repeat(
                np.arange(self.shape[0] + 1, dtype=np.int32),
                np.diff(np.asarray(self.row_offsets), append=self.nse),
            )
            with jax.ensure_compile_time_eval():
                self._row_indices = jnp.asarray(rows)
        return self._row_indices

    def operands(self) -> tuple[jax.Array, ...]:
        """What an operation's primitive takes: both patterns' three arrays and what joins them.

        That is the permutation, and the starts of tiles. They are checked first if
        ``JAXSPARSE_CHECK=1``, but for starts, which kernels find out for themselves then.
        """
        self.check_positions()
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
        self.check_positions()
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
        return display.plot(*self.concrete_arrays("Topology.plot"), self.shape, ax=ax, title=title)

    def concrete_arrays(self, purpose: str) -> tuple[np.ndarray, np.ndarray]:
        """Offsets and columns of one pattern as NumPy arrays, or ValueError."""
        self.check_positions()
        if not is_concrete(self.row_offsets, self.column_indices) or self.batch_shape:
            raise ValueError(f"{purpose}: needs one concrete pattern")
        return np.asarray(self.row_offsets), np.asarray(self.column_indices)

    def __str__(self) -> str:
        if not self.has_positions or not is_concrete(self.row_offsets, self.column_indices):
            return repr(self)
        if self.batch_shape:
            return f"Topology of shape {self.shape}, batch {self.batch_shape}, nse {self.nse}"
        padding = f", {self.nse - self.nnz} padding" if self.nse != self.nnz else ""
        head = (
            f"Topology of shape {self.shape}, {self.nnz} stored{padding}, "
            f"{display.percent(self.sparsity)} sparse"
        )
        return f"{head}\n{display.grid(*self.concrete_arrays('str'), self.shape)}"

    def __repr__(self) -> str:
        leaf = self.pattern.column_indices if isinstance(self.pattern, Pattern) else None
        return f"Topology(shape={self.shape}, column_indices={getattr(leaf, 'shape', leaf)})"


class TopologyKey:
    """A static topology as a part of a tree structure: compared and hashed by its positions.

    Programs that were compiled for one pattern are found again for an equal one, and trees of
    matrices on different patterns do not match.
    """

    __slots__ = ("digest", "topology")

    def __init__(self, topology: Topology):
        self.topology = topology
        positions = hashlib.blake2b(digest_size=16)
        positions.update(repr((topology.shape, topology.nse)).encode())
        for array in (topology.row_offsets, topology.column_indices):
            positions.update(np.ascontiguousarray(array).data)
        self.digest = positions.digest()

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, TopologyKey) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"{self.topology!r}, positions {self.digest.hex()[:8]}"


# Jitted, so that an eager call compiles one program.
_row_indices: Callable[[jax.Array, int], jax.Array] = jax.jit(row_indices, static_argnums=1)

_PARTS = ("pattern", "transposed_pattern", "permutation", "tile_starts", "scan_layout")
_FLOAT0 = jax.dtypes.float0


def _flatten(topology: Topology) -> Any:
    parts = [getattr(topology, name) for name in _PARTS]
    if topology.kind == "tangent":
        parts = jax.tree.map(lambda x: np.zeros(np.shape(x), _FLOAT0), parts)
    keys = map(jax.tree_util.GetAttrKey, _PARTS)
    return list(zip(keys, parts, strict=True)), topology.shape


def _unflatten(shape: tuple[int, int], parts: Any) -> Topology:
    pattern, transposed_pattern, permutation, starts, layout = parts
    topology = Topology._from_parts(pattern, transposed_pattern, permutation, starts, layout, shape)
    if isinstance(permutation, np.ndarray) and permutation.dtype == _FLOAT0:
        topology.kind = "tangent"
    return topology


jax.tree_util.register_pytree_with_keys(Topology, _flatten, _unflatten)
# So that exported programs may take and return topologies.
jax.export.register_namedtuple_serialization(Pattern, serialized_name="jaxsparse.Pattern")
jax.export.register_pytree_node_serialization(
    Topology,
    serialized_name="jaxsparse.Topology",
    serialize_auxdata=lambda shape: f"{shape[0]} {shape[1]}".encode(),
    deserialize_auxdata=lambda data: tuple(map(int, data.split())),
)


def is_concrete(*arrays: Any) -> bool:
    """Whether these are arrays whose numbers are known: neither traced nor abstract."""
    return all(
        isinstance(x, jax.Array | np.ndarray) and not isinstance(x, jax.core.Tracer) for x in arrays
    )


def same_pattern(a: Topology, b: Topology) -> bool:
    """Whether two topologies are known to store the same positions."""
    if a is b:
        return True
    if a.shape != b.shape or a.nse != b.nse or a.batch_shape != b.batch_shape:
        return False
    if a.static and b.static:
        return a.key.digest == b.key.digest
    if not (a.has_positions and b.has_positions):
        return True  # a derivative is on the pattern of what was differentiated
    pairs = ((a.row_offsets, b.row_offsets), (a.column_indices, b.column_indices))
    if all(x is y for x, y in pairs):
        return True
    if any(isinstance(x, jax.core.Tracer) for pair in pairs for x in pair):
        raise ValueError(
            "whether two dynamic patterns that come as separate arguments of a traced function are "
            "equal is not known: use a.with_values(a.values + b.values)"
        )
    return all(np.array_equal(x, y) for x, y in pairs)


def check_shape(shape: Sequence[int]) -> tuple[int, int]:
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
    return integer("Topology", "nse", nse, 0)


def _pad(offsets: np.ndarray, columns: np.ndarray, nse: int) -> np.ndarray:
    """The columns with padding entries up to nse."""
    size = integer("Topology", "nse", nse, 0)
    most = int(offsets[..., -1].max(initial=0))
    if size < most:
        raise ValueError(f"Topology: nse={size} is less than the {most} entries to store")
    padded = np.zeros((*columns.shape[:-1], size), columns.dtype)
    padded[..., :most] = columns[..., :most]
    return padded
