"""The block mask of a pattern, which fused attention takes."""

from __future__ import annotations

import operator
import weakref
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxsparse.block_mask import BlockMask
from jaxsparse.block_mask.reading import in_order, masks_of, read
from jaxsparse.layouts.kind import LayoutKind, register
from jaxsparse.pattern import is_concrete

if TYPE_CHECKING:
    from jaxsparse.topology import Topology


@register
class BlockMasks(LayoutKind):
    """The positions of a pattern as a `jaxsparse.BlockMask`, with the options of its making."""

    name = "block_mask"
    inherited = True

    def make(self, topology: Topology, **options: Any) -> BlockMask:
        return BlockMask.from_topology(topology, **options)

    def make_traced(self, topology: Topology, **options: Any) -> BlockMask:
        return BlockMask.from_topology(topology, **options)

    def transpose(self, layout: BlockMask, transposed: Topology) -> BlockMask:
        return layout.T

    def verify(self, layout: BlockMask, topology: Topology) -> None:
        from jaxsparse.topology import Topology

        layout.verify()
        same = (layout.shape, layout.batch_shape) == (topology.shape, topology.batch_shape)
        for entry in np.ndindex(topology.batch_shape) if same else ():
            one = jax.tree.map(operator.itemgetter(entry), layout)
            pattern = topology.row_offsets[entry], topology.column_indices[entry]
            expected = BlockMask.from_topology(
                Topology(*pattern, topology.shape, transpose=False),
                row_order=one.row_order,
                column_order=one.column_order,
            )
            cells = (in_order(read(of)) for x in (one, expected) for _, of in masks_of(x.rows))
            same = same and all(map(np.array_equal, *cells))
        if not same:
            raise ValueError(f"the block mask of {topology!r} is not that of its positions")


# {arrays of a pattern, mesh: (a reference that ends with the pattern, its offsets, its block mask)}
_made: dict[tuple[int, int, Any], tuple[Any, Any, BlockMask]] = {}


def block_mask_of(topology: Topology) -> BlockMask:
    """The block mask of a topology: that which it carries, or one made now.

    That of a concrete pattern is made once while the pattern lives, of a traced one in the program.

    Raises:
        ValueError: if a traced pattern may have so many tiles that their number must be given; then
            ``topology.with_layout("block_mask", max_tiles=..., max_cells=...)`` does.
    """
    carried = topology.layouts.get(BlockMasks.name)
    if carried is not None:
        mask: BlockMask = carried
        return mask
    offsets, columns = topology.row_offsets, topology.column_indices
    if not is_concrete(offsets, columns):
        return BlockMask.from_topology(topology)
    # A mesh of explicit axes is a part of the arrays' types.
    key = id(offsets), id(columns), jax.sharding.get_abstract_mesh()
    if key not in _made:
        reference = weakref.ref(columns, lambda _: _made.pop(key, None))
        _made[key] = (reference, offsets, BlockMask.from_topology(topology))
    return _made[key][2]
