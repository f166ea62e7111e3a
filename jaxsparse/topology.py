"""Where the nonzeros of a sparse matrix are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import display, masks
from jaxsparse.integers import integer
from jaxsparse.layouts import KINDS, derived_layouts
from jaxsparse.masks import arrays
from jaxsparse.masks.positions import TracedMaskError
from jaxsparse.pattern import (
    Pattern,
    checked,
    checks_enabled,
    derive_on_host,
    derive_traced,
    inverse_on_host,
    inverse_traced,
    is_concrete,
    padded_permutation,
    row_indices,
    to_device,
)
from jaxsparse.topology_arguments import check_arrays, check_shape, needed_room, pad_columns
from jaxsparse.topology_key import TopologyKey
from jaxsparse.topology_layouts import TopologyLayouts
from jaxsparse.topology_verify import verify


@jax.tree_util.register_pytree_with_keys_class
class Topology(TopologyLayouts):
    """The stored positions of an (m, k) sparse matrix: compressed sparse rows without values.

    A pytree of integer arrays with static ``shape``. It is separate from the values so that a new
    pattern with as many entries needs no new compilation, and so that what is derived from a
    pattern is made once: the rows by falling length, the transposed pattern with the permutation
    that carries values over, 16-bit indices, and `layouts` for certain kernels. The constructor
    makes these, on the host for concrete arrays and in the program for traced ones; no operation or
    gradient ever sorts. Leading dimensions, the same for both arrays, are a batch of patterns with
    equal numbers of stored entries.

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
        transpose: whether to make the transposed pattern. Without it a topology takes less than
            half of the memory, and serves products, softmaxes and attention. What needs it raises:
            ``.T``, products by the transposed matrix, and gradients that are one, which are those
            with respect to x of `spmm` and to y of `sddmm`.

    Attributes:
        pattern: the pattern by rows.
        transposed_pattern: the transposed one, or None.
        permutation: entry e of the transposed pattern is entry ``permutation[e]``; or None.
        layouts: what kernels want of the pattern, by the names in `jaxsparse.layouts.KINDS`.
        shape: (m, k).
        kind: of a pattern in a program; the leaves of a tangent are of type float0.

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

    __slots__ = ()

    def __init__(
        self,
        row_offsets: Any,
        column_indices: Any,
        shape: Sequence[int],
        *,
        transpose: bool = True,
    ):
        self.shape = check_shape(shape)
        offsets, columns = check_arrays(row_offsets, column_indices, self.shape)
        known = is_concrete(offsets, columns)
        derive = derive_on_host if known else derive_traced
        orientations = derive(offsets, columns, self.shape, transpose)
        # Layouts are made before the arrays leave the host.
        self.pattern, self.transposed_pattern, self.permutation = orientations
        made = derived_layouts(self)
        if known:
            orientations = to_device(orientations)
        exact = known and columns.ndim == 1 and offsets[-1] == columns.size
        self._set(*orientations, made, self.shape, "static" if exact else "dynamic")

    @classmethod
    def from_mask(
        cls,
        mask: Callable[[Any, Any], Any] | Any,
        shape: Sequence[int] | None = None,
        nse: int | None = None,
        *,
        transpose: bool = True,
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
            transpose: whether to make the transposed pattern, as in the constructor.

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
                return cls.with_room(*masks.nonzero(mask, shape), shape, nse, transpose=transpose)
            except TracedMaskError:
                size = needed_room(nse)
            return cls(*masks.nonzero_traced(mask, shape, size), shape, transpose=transpose)
        mask = mask if isinstance(mask, jax.Array) else np.asarray(mask)
        if mask.ndim < 2:
            raise ValueError(f"Topology.from_mask: needs an array (..., m, k), got {mask.shape}")
        shape = check_shape(mask.shape[-2:] if shape is None else shape)
        if tuple(mask.shape[-2:]) != shape:
            raise ValueError(f"Topology.from_mask: mask {mask.shape} does not have shape {shape}")
        if isinstance(mask, jax.core.Tracer):
            traced = arrays.compress_traced(mask, needed_room(nse))
            return cls(*traced, shape, transpose=transpose)
        rows = arrays.compress_on_host(np.asarray(mask))
        return cls.with_room(*rows, shape, nse, transpose=transpose)

    @classmethod
    def with_room(
        cls,
        offsets: np.ndarray,
        columns: np.ndarray,
        shape: tuple[int, int],
        nse: int | None,
        *,
        transpose: bool = True,
    ) -> Topology:
        """Of concrete arrays, with padding up to ``nse`` if it is given, which makes it dynamic."""
        if nse is None:
            return cls(offsets, columns, shape, transpose=transpose)
        padded = pad_columns(offsets, columns, nse)
        return cls(offsets, padded, shape, transpose=transpose).as_dynamic()

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

    @property
    def key(self) -> TopologyKey:
        """What stands for a static topology in a tree structure: equal where patterns are equal."""
        if self._key is None:
            self._key = TopologyKey(self)
        return self._key

    @property
    def T(self) -> Topology:
        """The transposed topology: what is derived changes places, nothing is sorted.

        Raises:
            ValueError: if it was made without its transpose.
        """
        self.check_positions()
        self.check_transpose("Topology.T")
        if self._transposed is not None:
            transposed: Topology = self._transposed
            return transposed
        t, permutation = self.transposed_pattern, self.permutation
        inverse = inverse_on_host if is_concrete(*t[:2], permutation) else inverse_traced
        m, k = self.shape
        bare = Topology._from_parts(t, self.pattern, inverse(permutation), {}, (k, m), self.kind)
        result = bare._with(layouts=self._each_layout(lambda kind, x: kind.transpose(x, bare)))
        if self.static:
            self._transposed = result
        return result

    def with_transpose(self) -> Topology:
        """The same topology with its transposed pattern; itself if it has that already.

        It is made on the host for a concrete pattern, and by a sort in the program for a traced
        one.

        >>> Topology([0, 1], [3], (1, 4), transpose=False).with_transpose().T.shape
        (4, 1)
        """
        if self.has_transpose:
            return self
        self.check_positions()
        offsets, columns = self.row_offsets, self.column_indices
        if is_concrete(offsets, columns):
            derived = derive_on_host(np.asarray(offsets), np.asarray(columns), self.shape, True)
            derived = to_device(derived)
        else:
            derived = derive_traced(offsets, columns, self.shape, True)
        result = self._with(transposed_pattern=derived[1], permutation=derived[2])
        layouts = self._each_layout(lambda kind, x: kind.with_transpose(x, result))
        return result._with(layouts=layouts).with_derived_layouts()

    def without_transpose(self) -> Topology:
        """The same topology without its transposed pattern, for what is only used forward.

        >>> Topology([0, 1], [3], (1, 4)).without_transpose().has_transpose
        False
        """
        layouts = self._each_layout(lambda kind, x: kind.without_transpose(x))
        return self._with(transposed_pattern=None, permutation=None, layouts=layouts)

    def padded(self, nse: int) -> Topology:
        """The same pattern with room for ``nse`` entries, padding included; it is dynamic.

        Padding stands behind the stored entries, in the transposed pattern too, and moves none of
        them: the values of a matrix on it get as many zeros at their end. Patterns of one shape
        that have room for as many entries fit one program, and stack to a batch.

        Raises:
            TypeError: if ``nse`` is no integer.
            ValueError: if it is less than the entries that there are, padding included.

        >>> topology = Topology([0, 1], [3], (1, 4)).padded(6)
        >>> topology.nse, topology.nnz
        (6, 1)
        """
        self.check_positions()
        room = integer("Topology.padded", "nse", nse, 0) - self.nse
        if room < 0:
            raise ValueError(f"Topology.padded: nse={nse} is less than the {self.nse} entries")
        if not room:
            return self.as_dynamic()
        t, permutation = self.transposed_pattern, self.permutation
        bare = self._with(
            pattern=self.pattern.padded(room),
            transposed_pattern=None if t is None else t.padded(room),
            permutation=None if permutation is None else padded_permutation(permutation, room),
            kind="dynamic",
        )
        layouts = self._each_layout(lambda kind, x: kind.pad(x, bare))
        return bare._with(layouts=layouts).with_derived_layouts()  # padding may bring some

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
        """What an operation's primitive takes: `ops.arguments.operands_of_pattern` names it.

        Those are the arrays of both patterns and the permutation, or of the one that there is, and
        what each kind of layout gives. If ``JAXSPARSE_CHECK=1`` the arrays are checked first, and
        no layouts are given, without which kernels do.
        """
        self.check_positions()
        m, k = self.shape
        rows, transposed = self.pattern.operands(), ()
        if self.has_transpose:
            transposed = (*self.transposed_pattern.operands(), self.permutation)
        if checks_enabled():
            rows = (checked(*rows, columns=k), *rows[1:])
            transposed = transposed and (checked(*transposed, columns=m), *transposed[1:])
        given = not checks_enabled()
        layouts = (x for kind in KINDS.values() for x in kind.operands(self, given=given))
        return (*rows, *transposed, *layouts)

    def verify(self) -> Topology:
        """Checks a concrete topology and what is derived from it; returns it.

        The constructor checks what it is given. This is for arrays that came past it, from a file
        for instance: kernels rely on them. Linear work, on the host.

        Raises:
            ValueError: if the pattern is bad, naming the row, or the derived arrays and layouts
                don't belong to it.

        >>> Topology([0, 1], [3], (1, 4)).verify().nnz
        1
        """
        self.check_positions()
        verify(self)
        return self

    def plot(self, *, ax: Any = None, title: str | None = None) -> Any:
        """Draws the pattern's density with matplotlib and returns the axes."""
        return display.plot(*self.concrete_arrays("Topology.plot"), self.shape, ax=ax, title=title)

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


# Jitted, so that an eager call compiles one program.
_row_indices: Callable[[jax.Array, int], jax.Array] = jax.jit(row_indices, static_argnums=1)

# So that exported programs may take and return topologies.
jax.export.register_namedtuple_serialization(Pattern, serialized_name="jaxsparse.Pattern")
jax.export.register_pytree_node_serialization(
    Topology,
    serialized_name="jaxsparse.Topology",
    serialize_auxdata=lambda shape: f"{shape[0]} {shape[1]}".encode(),
    deserialize_auxdata=lambda data: tuple(map(int, data.split())),
)
