"""Which scores of attention are seen: a mask as kernels take it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxsparse.block_mask import picture, reading
from jaxsparse.block_mask.dense import written_out
from jaxsparse.block_mask.from_blocks import check_blocks, check_covers, of_blocks
from jaxsparse.block_mask.from_dense import of_dense
from jaxsparse.block_mask.from_lengths import check_lengths, of_lengths
from jaxsparse.block_mask.from_mask import of_mask
from jaxsparse.block_mask.from_topology import of_topology, stride_of_topology
from jaxsparse.block_mask.orders import Order, reordered, with_batch
from jaxsparse.block_mask.regroup import check_orders, stride_of_dense, stride_of_mask
from jaxsparse.block_mask.room import check_rooms, check_shape
from jaxsparse.block_mask.tiles import TileLists
from jaxsparse.masks.expression import as_mask
from jaxsparse.pattern import is_concrete

if TYPE_CHECKING:
    from jaxsparse.topology import Topology


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """The positions of scores ``(T, S)`` that attention sees, as its kernels want them.

    Tiles of 128 x 128 positions are listed by rows of tiles, those without stored positions are
    left out. Each tile has four cells of 64 x 64, which are empty, partial or full; a partial cell
    has 512 bytes of bits, in the order in which tensor cores give a product to threads. The same
    lists of the transposed mask serve the gradients of keys and values.

    It is data: a pytree of arrays with static ``shape``, which is made once of a mask
    (`from_mask`), chosen blocks (`from_blocks`), a topology (`from_topology`) or an array
    (`from_dense`), and then passed to programs. A mask with as many tiles and partial cells, or
    with room for as many, needs no new compilation. Leading dimensions, the same for all arrays,
    are a batch of masks.

    Made of concrete arrays it has room for no more than it stores, and cells that are empty or full
    are known to be so. Made in a program, of traced arrays, its lists have static room, and a cell
    counts as partial unless interval arithmetic can tell that it is empty or full. What there is no
    room for is left out, in the order of rows of tiles, or reported when the program runs if
    ``JAXSPARSE_CHECK=1`` is set, as an offset beyond the ``nse`` that there is room for.

    Its rows and columns may be in other orders than those of the scores, so that positions that
    see the same become neighbours and share tiles: in a strided mask those of one remainder.
    Attention then brings queries, keys and values into these orders, and results back.

    Attributes:
        rows: the tiles by rows of tiles.
        columns: the tiles of the transposed mask, by its rows of tiles, which are of keys.
        shape: ``(T, S)``, rows and columns of scores: queries and keys.
        row_order: None, `jaxsparse.block_mask.Residues`, or int32 ``(..., T)``: the row at each
            place of the lists.
        column_order: the same of columns, ``(..., S)``.

    >>> from jaxsparse import masks
    >>> mask = BlockMask.from_mask(masks.sliding_window(100), (600, 500))
    >>> mask
    BlockMask(shape=(600, 500), tiles: 12 empty, 8 partial, 0 full, 24.2 KB)
    >>> print(mask)
    BlockMask of shape (600, 500), 50500 stored, 83.2 % sparse
    tiles of 128 x 128: 12 empty, 8 partial, 0 full
    ┌────────┐
    │▒       │
    │▒▒      │
    │▒▒▒     │
    │ ▒▒▒    │
    │  ▒▒▒   │
    │   ▒▒▒  │
    │    ▒▒▒ │
    │     ▒▒▒│
    │      ▒▒│
    │       ▒│
    └────────┘
    """

    rows: TileLists
    columns: TileLists
    shape: tuple[int, int]
    row_order: Order | None = None
    column_order: Order | None = None

    @classmethod
    def from_mask(
        cls,
        mask: Callable[[Any, Any], Any],
        shape: Sequence[int],
        *,
        max_tiles: int | None = None,
        max_cells: int | None = None,
        regroup: int | bool | None = None,
        row_order: Any = None,
        column_order: Any = None,
    ) -> BlockMask:
        """The positions that a mask stores; no array of all positions is made.

        Interval arithmetic decides which cells are empty and which are full: by a rule for each
        kind of mask, and for functions by what JAX traces of them, where they consist of
        comparisons, logic, sums, products, quotients by constants, ``jnp.where`` and entries of
        vectors (``ids[rows] == ids[columns]``). The others are evaluated, some at a time.

        A mask of concrete arrays is made so on the host, also under ``jax.jit``; one that depends
        on traced arrays in the program.

        Args:
            mask: a mask of ``jaxsparse.masks``, or a function of int32 ``rows`` and ``columns``,
                arrays that broadcast, to bool.
            shape: ``(T, S)``.
            max_tiles: room for so many tiles that are not empty.
            max_cells: room for so many partial cells. A traced mask has by default room for all
                tiles and cells that can be stored, whatever the traced arrays hold.
            regroup: a stride n: rows and columns are listed by their remainders modulo n, which
                makes few full tiles of a strided mask. True takes, of the strides in the mask, or
                else of the powers of 2, that with the fewest tiles, if these are fewer.
            row_order: int32 ``(T,)``, a permutation: the row at each place of the lists. In one
                that is traced the numbers are not checked.
            column_order: the same of columns, ``(S,)``.

        Raises:
            TypeError, ValueError: if the mask is no function, or returns another shape or dtype;
                if ``shape`` is not two integers in [0, 2**31 - 128); if a concrete mask stores more
                than there is room for; if a traced mask takes over 64 MB and no room is given; if
                an order is no permutation, or given beside ``regroup``.
            IndexError: if the mask has a table that ends before the shape.

        >>> from jaxsparse import masks
        >>> mask = BlockMask.from_mask(masks.causal() & masks.band(2), (300, 300))
        >>> mask.density * 300 * 300
        599.0
        >>> strided = masks.strided(64) & masks.causal()
        >>> BlockMask.from_mask(strided, (4096, 4096))
        BlockMask(shape=(4096, 4096), tiles: 496 empty, 528 partial, 0 full, 2.0 MB)
        >>> BlockMask.from_mask(strided, (4096, 4096), regroup=64)
        BlockMask(shape=(4096, 4096), regrouped, tiles: 992 empty, 32 partial, 0 full, 65.0 KB)
        """
        name = "BlockMask.from_mask"
        if not callable(mask):
            raise TypeError(
                f"{name}: mask must be a mask or a function, got {type(mask).__name__}: "
                "BlockMask.from_dense takes arrays, BlockMask.from_topology topologies"
            )
        shape = check_shape(name, shape)
        rooms = check_rooms(name, max_tiles, max_cells)
        mask = as_mask(mask)
        orders = check_orders(
            name, regroup, (row_order, column_order), shape, lambda: stride_of_mask(mask, shape)
        )
        lists = of_mask(name, reordered(mask, *orders, shape), shape, *rooms)
        return cls(*lists, shape, *with_batch(orders, ()))

    @classmethod
    def from_blocks(
        cls,
        chosen: Any,
        block: Sequence[int],
        *,
        within: Callable[[Any, Any], Any] | None = None,
        shape: Sequence[int] | None = None,
        max_tiles: int | None = None,
        max_cells: int | None = None,
    ) -> BlockMask:
        """The positions (t, s) of which ``chosen[t // block[0], s // block[1]]`` is not 0.

        For attention that selects blocks of keys by what it computes: under ``jax.jit`` the array
        may be traced. Blocks of whole cells make no cell partial, and take no bits.

        Args:
            chosen: bool or integers ``(..., blocks down, blocks across)``.
            block: rows and columns of a block, each a multiple of 64 or a divisor of it.
            within: a mask or mask function, of which the positions outside of it are left out:
                ``masks.causal()``.
            shape: ``(T, S)``; by default that of all blocks.
            max_tiles: as in `from_mask`.
            max_cells: as in `from_mask`.

        Raises:
            TypeError, ValueError: if ``chosen`` is no such array, or is not of as many blocks as
                cover the shape; otherwise as `from_mask`.

        >>> from jaxsparse import masks
        >>> chosen = np.eye(4, dtype=bool)
        >>> chosen[:, 0] = True
        >>> print(BlockMask.from_blocks(chosen, (64, 64), within=masks.causal()))
        BlockMask of shape (256, 256), 20608 stored, 68.6 % sparse
        tiles of 128 x 128: 1 empty, 3 partial, 0 full
        ┌────┐
        │▒   │
        │█▒  │
        │█ ▒ │
        │█  ▒│
        └────┘
        """
        name = "BlockMask.from_blocks"
        chosen, sizes, shape = check_blocks(chosen, block, shape)
        shape = check_shape(name, shape)
        check_covers(chosen, sizes, shape)
        if within is not None and not callable(within):
            raise TypeError(f"{name}: within must be a mask or a function, got {within!r}")
        rooms = check_rooms(name, max_tiles, max_cells)
        return cls(*of_blocks(chosen, sizes, within, shape, *rooms), shape)

    @classmethod
    def from_lengths(
        cls, lengths: Any, shape: Sequence[int], *, causal: bool = False, window: int | None = None
    ) -> BlockMask:
        r"""The first keys of each sequence, for a few queries of it, as in decoding.

        .. math::

            \text{stored} = \{(t, s): e_t - w \le s < e_t\}, \qquad
            e_t = n \text{ or, if causal, } n - (T - 1 - t)

        A few operations for each tile of 128 keys: a program that makes a token can make it, too.

        Args:
            lengths: n, integers ``(...)`` for a batch of masks; they may be traced, and are clipped
                to [0, S].
            shape: ``(T, S)``, with T at most 64.
            causal: the last query sees n keys, each one before it one less.
            window: how many keys w each query sees at most, the last ones; None for all.

        Raises:
            TypeError, ValueError: if lengths are no integers, the shape is another one, or
                ``window`` is not an integer >= 1.

        >>> BlockMask.from_lengths([3, 1], (1, 4)).to_dense()[:, 0]
        Array([[ True,  True,  True, False],
               [ True, False, False, False]], dtype=bool)
        """
        shape = check_shape("BlockMask.from_lengths", shape)
        lengths = check_lengths(lengths, shape, window)
        return cls(*of_lengths(lengths, shape, causal=bool(causal), window=window), shape)

    @classmethod
    def from_topology(
        cls,
        topology: Topology,
        *,
        max_tiles: int | None = None,
        max_cells: int | None = None,
        regroup: int | bool | None = None,
        row_order: Any = None,
        column_order: Any = None,
    ) -> BlockMask:
        """The positions that a topology stores, on the host or for a traced one in the program.

        A batch of patterns becomes a batch of masks. Patterns of few entries in each cell take much
        memory so: each cell with an entry takes 1 KB.

        Args:
            topology: whose padding is not stored.
            max_tiles: as in `from_mask`; of a traced topology by default all tiles, or ``nse``.
            max_cells: as in `from_mask`; likewise.
            regroup: as in `from_mask`, the same for a batch. True is for concrete topologies alone,
                and also tries the greatest stride of which neighbours in a row are multiples apart.
            row_order: as in `from_mask`, the same for a batch.
            column_order: as in `from_mask`; likewise.

        Raises:
            TypeError, ValueError: as `from_mask`.

        >>> from jaxsparse import Topology
        >>> BlockMask.from_topology(Topology([0, 2, 3], [0, 2, 1], (2, 3))).to_dense()
        Array([[ True, False,  True],
               [False,  True, False]], dtype=bool)
        """
        name, shape = "BlockMask.from_topology", topology.shape
        rooms = check_rooms(name, max_tiles, max_cells)
        topology.check_positions()
        orders = check_orders(
            name, regroup, (row_order, column_order), shape, lambda: stride_of_topology(topology)
        )
        lists = of_topology(topology, orders, *rooms)
        return cls(*lists, shape, *with_batch(orders, topology.batch_shape))

    @classmethod
    def from_dense(
        cls,
        mask: Any,
        *,
        max_tiles: int | None = None,
        max_cells: int | None = None,
        regroup: int | bool | None = None,
        row_order: Any = None,
        column_order: Any = None,
    ) -> BlockMask:
        """The positions at which a boolean array ``(..., T, S)`` is True; it may be traced.

        Args:
            mask: the array; leading dimensions are a batch of masks.
            max_tiles: as in `from_mask`.
            max_cells: as in `from_mask`.
            regroup: as in `from_topology`.
            row_order: as in `from_topology`.
            column_order: as in `from_topology`.

        Raises:
            TypeError, ValueError: if the array is not bool or has less than two dimensions;
                otherwise as `from_mask`.

        >>> BlockMask.from_dense(np.tri(200, dtype=bool)).to_dense().sum()
        Array(20100, dtype=int32)
        """
        name = "BlockMask.from_dense"
        mask = mask if isinstance(mask, jax.Array) else np.asarray(mask)
        if mask.ndim < 2 or mask.dtype != np.bool_:
            raise ValueError(
                f"{name}: mask must be bool (..., T, S), got {mask.dtype} {mask.shape}"
            )
        shape = check_shape(name, mask.shape[-2:])
        rooms = check_rooms(name, max_tiles, max_cells)
        orders = check_orders(
            name, regroup, (row_order, column_order), shape, lambda: stride_of_dense(mask)
        )
        lists = of_dense(mask, orders, *rooms)
        return cls(*lists, shape, *with_batch(orders, mask.shape[:-2]))

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Leading dimensions of a batch of masks; () for one."""
        return self.rows.offsets.shape[:-1]

    @property
    def T(self) -> BlockMask:
        """The transposed mask: the lists change places, nothing is computed."""
        return BlockMask(
            self.columns, self.rows, self.shape[::-1], self.column_order, self.row_order
        )

    @property
    def is_regrouped(self) -> bool:
        """Whether its rows or its columns are in an order of their own."""
        return not (self.row_order is None and self.column_order is None)

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))

    @property
    def density(self) -> Any:
        """Share of positions that are stored, of a concrete mask: a float, an array for a batch.

        It is 0 for an empty shape.
        """
        self._check_concrete("density")
        size = max(1, self.shape[0] * self.shape[1])
        counts = [reading.stored_positions(reading.read(x)) for _, x in reading.masks_of(self.rows)]
        density = np.array(counts, np.float64).reshape(self.batch_shape) / size
        return density if density.ndim else float(density)

    @property
    def sparsity(self) -> Any:
        """Share of positions that are not stored, of a concrete mask; 0 for an empty shape."""
        return 1 - self.density if 0 not in self.shape else 0 * self.density

    def to_dense(self) -> jax.Array:
        """The mask as an array, bool ``(..., T, S)``: for small masks, and to look at.

        Rows and columns are where they are in the scores, regrouped or not.
        """
        return written_out(self.rows, (self.row_order, self.column_order), self.shape)

    def reshape_batch(self, *sizes: int) -> BlockMask:
        """The same masks, with batch dimensions of other sizes; nothing is copied or made anew.

        Raises:
            ValueError: if that is another number of masks.

        >>> masks = BlockMask.from_dense(np.ones((6, 4, 5), bool))
        >>> masks.reshape_batch(2, 3).batch_shape
        (2, 3)
        """
        old = self.batch_shape
        if math.prod(sizes) != math.prod(old):
            raise ValueError(
                f"BlockMask.reshape_batch: sizes must be those of {math.prod(old)} masks, batch "
                f"{old}, got {sizes}"
            )
        reshaped: BlockMask = jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[len(old) :]), self)
        return reshaped

    def verify(self) -> BlockMask:
        """Checks a concrete mask, as from a file; returns it. On the host, in linear time.

        Tiles must rise and be in range, states be those of cells, words be there for the partial
        cells and store nothing outside of the shape, the transposed lists store the same, and
        orders have each position once.

        Raises:
            ValueError: if that is not so, naming the row of tiles and the tile.

        >>> BlockMask.from_dense(np.ones((2, 3), bool)).verify().shape
        (2, 3)
        """
        reading.verify(self.rows, self.columns, self.shape, (self.row_order, self.column_order))
        return self

    def plot(self, *, ax: Any = None, title: str | None = None) -> Any:
        """Draws the density of a concrete mask's cells with matplotlib and returns the axes.

        Rows and columns are in the order of the lists, and called regrouped if that is their own.
        """
        axes = picture.plot(self._one("plot"), self.shape, ax=ax, title=title)
        for name, order in ("row", self.row_order), ("column", self.column_order):
            if order is not None:
                axes.set(**{f"{'x' if name == 'column' else 'y'}label": f"{name}, regrouped"})
        return axes

    def _check_concrete(self, purpose: str) -> None:
        if not is_concrete(*jax.tree.leaves(self)):
            raise ValueError(f"BlockMask.{purpose}: needs a concrete mask, got a traced one")

    def _one(self, purpose: str) -> TileLists:
        """The lists of one concrete mask, or ValueError."""
        self._check_concrete(purpose)
        if self.batch_shape:
            raise ValueError(f"BlockMask.{purpose}: needs one mask, got a batch {self.batch_shape}")
        return next(reading.masks_of(self.rows))[1]

    def __repr__(self) -> str:
        return picture.line(self)

    def __str__(self) -> str:
        leaves = jax.tree.leaves(self)
        if not picture.is_whole(self) or self.batch_shape or not is_concrete(*leaves):
            return repr(self)
        return picture.text(self, self._one("__str__"))


jax.tree_util.register_dataclass(
    BlockMask, data_fields=["rows", "columns", "row_order", "column_order"], meta_fields=["shape"]
)
# So that exported programs may take and return block masks.
jax.export.register_pytree_node_serialization(
    BlockMask,
    serialized_name="jaxsparse.BlockMask",
    serialize_auxdata=lambda meta: json.dumps(meta[0]).encode(),
    deserialize_auxdata=lambda data: (tuple(json.loads(data)),),
)
