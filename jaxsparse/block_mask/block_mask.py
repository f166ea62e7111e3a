"""Which scores of attention are seen: a mask as kernels take it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxsparse.batching import over_batch
from jaxsparse.block_mask.dense import written_out
from jaxsparse.block_mask.from_dense import of_dense
from jaxsparse.block_mask.from_mask import of_mask
from jaxsparse.block_mask.from_topology import of_topology
from jaxsparse.block_mask.tiles import TileLists
from jaxsparse.masks.expression import as_mask

if TYPE_CHECKING:
    from jaxsparse.topology import Topology


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """The positions that a mask stores, by tiles of 128 x 128 and cells of 64 x 64.

    Attributes:
        rows: the tiles by rows of tiles.
        columns: the tiles of the transposed mask.
        shape: ``(T, S)``.

    >>> import numpy as np
    >>> BlockMask.from_dense(np.tri(200, dtype=bool)).to_dense().sum()
    Array(20100, dtype=int32)
    """

    rows: TileLists
    columns: TileLists
    shape: tuple[int, int]

    @classmethod
    def from_mask(
        cls,
        mask: Callable[[Any, Any], Any],
        shape: Sequence[int],
        *,
        max_tiles: int | None = None,
        max_cells: int | None = None,
    ) -> BlockMask:
        """The positions of a mask, or of a mask function."""
        T, S = shape
        shape = T, S
        return cls(
            *of_mask("BlockMask.from_mask", as_mask(mask), shape, max_tiles, max_cells), shape
        )

    @classmethod
    def from_topology(
        cls,
        topology: Topology,
        *,
        max_tiles: int | None = None,
        max_cells: int | None = None,
    ) -> BlockMask:
        """The positions that a topology stores."""
        return cls(*of_topology(topology, max_tiles, max_cells), topology.shape)

    @classmethod
    def from_dense(
        cls, mask: Any, *, max_tiles: int | None = None, max_cells: int | None = None
    ) -> BlockMask:
        """The True ones of a boolean array ``(..., T, S)``."""
        mask = mask if isinstance(mask, jax.Array) else np.asarray(mask)
        T, S = mask.shape[-2:]
        return cls(*of_dense(mask, max_tiles, max_cells), (T, S))

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Leading dimensions of a batch of masks; () for one."""
        return self.rows.offsets.shape[:-1]

    @property
    def T(self) -> BlockMask:
        """The transposed mask."""
        return BlockMask(self.columns, self.rows, self.shape[::-1])

    def to_dense(self) -> jax.Array:
        """The mask as an array, bool ``(..., T, S)``."""

        def one(*lists: jax.Array) -> jax.Array:
            return written_out(TileLists(*lists), self.shape)

        return over_batch(one, len(self.batch_shape), *self.rows)

    def reshape_batch(self, *sizes: int) -> BlockMask:
        """The same masks, with batch dimensions of other sizes; nothing is copied or made anew.

        Raises:
            ValueError: if that is another number of masks.
        """
        old = self.batch_shape
        if math.prod(sizes) != math.prod(old):
            raise ValueError(
                f"BlockMask.reshape_batch: sizes must be those of {math.prod(old)} masks, batch "
                f"{old}, got {sizes}"
            )
        reshaped: BlockMask = jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[len(old) :]), self)
        return reshaped


jax.tree_util.register_dataclass(BlockMask, data_fields=["rows", "columns"], meta_fields=["shape"])
