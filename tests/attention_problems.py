"""Random masks and operands of attention."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxsparse import BlockMask, Topology

KINDS = ("block_mask", "topology", "pattern")


def stored_as(kind, mask, monkeypatch):
    """An array of bool as one of the kinds of masks; a pattern has no block mask."""
    if kind == "pattern":
        without_block_masks(monkeypatch)
    return BlockMask.from_dense(mask) if kind == "block_mask" else Topology.from_mask(mask)


def without_block_masks(monkeypatch):
    """Has topologies go without block masks, as those of graphs do."""
    monkeypatch.setattr("jaxsparse.ops.sparse_attention.block_mask", lambda mask: None)


def random_mask(shape, seed=0, density=0.3):
    """Cells of every state in every place of a tile, a query that sees nothing, an unseen key."""
    rng = np.random.default_rng(seed)
    mask = rng.random(shape) < density
    for row in range(0, shape[0], 64):
        for column in range(0, shape[1], 64):
            kind = rng.integers(4)
            if kind < 2:
                mask[row : row + 64, column : column + 64] = kind == 1
    mask[shape[0] // 3] = False
    mask[:, shape[1] // 3] = False
    return mask


def operands(b, t, s, n, groups, h, e, dtype, seed=1):
    rng = np.random.default_rng(seed)
    shapes = [(b, t, n, h), (b, s, groups, h), (b, s, groups, e)]
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
