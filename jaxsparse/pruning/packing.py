"""Masks in checkpoints: eight booleans to a byte."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def _is_mask(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) == jnp.bool_ and leaf.ndim > 0


def pack_masks(tree: Any) -> Any:
    """Packs every boolean array of a tree into bits, along its last dimension.

    For a checkpoint of a model and its optimizer, a Flax state or any other pytree; whatever is not
    boolean stays as it is. Works under jit and ``jax.eval_shape``.

    Args:
        tree: a pytree of arrays.

    Returns:
        The same tree, with uint8 ``(..., ceil(n / 8))`` for bool ``(..., n)``; the first of eight
        is the highest bit, and missing ones are 0.

    >>> pack_masks({"mask": jnp.array([True, False, True]), "weight": jnp.ones(3)})["mask"]
    Array([160], dtype=uint8)
    """
    return jax.tree.map(lambda x: jnp.packbits(x, axis=-1) if _is_mask(x) else x, tree)


def unpack_masks(packed: Any, like: Any) -> Any:
    """The inverse of `pack_masks`.

    Args:
        packed: what `pack_masks` returned, or a checkpoint of it.
        like: the tree that was packed, or one of the same structure, shapes and dtypes, abstract or
            not. Masks get the shardings of its leaves, if they have one.

    Raises:
        ValueError: if a leaf is not that of a packed mask of the shape in ``like``.

    >>> mask = jnp.array([True, False, True])
    >>> unpack_masks(pack_masks(mask), mask)
    Array([ True, False,  True], dtype=bool)
    """

    def unpack(target: Any, bits: Any) -> Any:
        if not _is_mask(target):
            return bits
        expected = (*target.shape[:-1], -(-target.shape[-1] // 8))
        if bits.shape != expected or bits.dtype != jnp.uint8:
            raise ValueError(
                f"unpack_masks: the mask of shape {target.shape} must be packed as uint8 "
                f"{expected}, got {bits.dtype} {bits.shape}"
            )
        # jnp.unpackbits fails on arrays without elements.
        flags = bits[..., None] >> jnp.arange(7, -1, -1, dtype=jnp.uint8) & 1
        flat = flags.reshape(*bits.shape[:-1], 8 * bits.shape[-1])
        mask = flat[..., : target.shape[-1]].astype(bool)
        sharding = getattr(target, "sharding", None)
        concrete = sharding is not None and not isinstance(mask, jax.core.Tracer)
        return jax.device_put(mask, sharding) if concrete else mask

    return jax.tree.map(unpack, like, packed)
