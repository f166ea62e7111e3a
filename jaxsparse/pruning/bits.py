"""Masks in checkpoints: eight booleans to a byte."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxsparse.pruning.masks import explicit_sharding


def _is_mask(leaf: Any) -> bool:
    return bool(getattr(leaf, "dtype", None) == jnp.bool_ and leaf.ndim > 0)


def masks_to_bits(tree: Any) -> Any:
    """Turns every boolean array of a tree into bits, along its last dimension.

    For a checkpoint of a model and its optimizer, a Flax state or any other pytree; whatever is not
    boolean stays as it is. Works under jit and ``jax.eval_shape``.

    Args:
        tree: a pytree of arrays.

    Returns:
        The same tree, with uint8 ``(..., ceil(n / 8))`` for bool ``(..., n)``; the first of eight
        is the highest bit, and missing ones are 0.

    >>> masks_to_bits({"mask": jnp.array([True, False, True]), "weight": jnp.ones(3)})["mask"]
    Array([160], dtype=uint8)
    """
    return jax.tree.map(lambda x: _bits_of(x) if _is_mask(x) else x, tree)


def _shape_of_bits(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], -(-shape[-1] // 8))


def _sharding_of_bits(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """How the bits of a mask are sharded: as the mask, but whole where its bytes don't divide."""
    shape_of_bits = _shape_of_bits(shape)
    try:
        sharding.shard_shape(shape_of_bits)
    except ValueError:
        # Only the last dimension is another than that of the mask.
        spec = P(*sharding.spec[: len(shape) - 1])
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return sharding


def _bits_of(mask: jax.Array) -> jax.Array:
    sharding = explicit_sharding(mask)
    if sharding is not None:
        mask = jax.sharding.reshard(mask, _sharding_of_bits(sharding, mask.shape))
    return jnp.packbits(mask, axis=-1)


def bits_like(state: Any) -> Any:
    """What `masks_to_bits` would return for a state, abstract: shapes, dtypes and shardings.

    For a checkpoint library to restore a state with bits as this one is placed, on however many
    devices the one that was saved had been.

    Args:
        state: a pytree of arrays, concrete or abstract.

    Returns:
        The same tree with a jax.ShapeDtypeStruct for each array. Its sharding is that of the array;
        the bits of a mask are whole on every device along the last dimension if its bytes don't
        divide evenly. Arrays that are not committed to a device, such as a fresh step counter, are
        replicated over the mesh of the others, if one has a mesh.

    >>> bits_like({"mask": jnp.ones((3, 9), bool)})["mask"].shape
    (3, 2)
    """
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state)]
    meshes = [x.mesh for x in shardings if isinstance(x, NamedSharding)]
    mesh = meshes[0] if meshes else None

    def placed(leaf: Any, bits: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if mesh is not None and not _is_committed(leaf):
            sharding = NamedSharding(mesh, P())
        elif _is_mask(leaf) and isinstance(sharding, NamedSharding):
            sharding = _sharding_of_bits(sharding, leaf.shape)
        return jax.ShapeDtypeStruct(bits.shape, bits.dtype, sharding=sharding)

    return jax.tree.map(placed, state, jax.eval_shape(masks_to_bits, state))


def _is_committed(leaf: Any) -> bool:
    """Whether a leaf says where it belongs: one that is not committed may go anywhere."""
    return getattr(leaf, "sharding", None) is not None and getattr(leaf, "committed", True)


def bits_to_masks(bits: Any, like: Any) -> Any:
    """The inverse of `masks_to_bits`.

    Args:
        bits: what `masks_to_bits` returned, or a checkpoint of it.
        like: the tree of the masks, or one of the same structure, shapes and dtypes, abstract or
            not. All arrays, masks and others, get the shardings of its leaves, if they have one;
            where a leaf is not committed to a device, they stay where they are.

    Raises:
        ValueError: if a leaf is not that of the bits of a mask of the shape in ``like``.

    >>> mask = jnp.array([True, False, True])
    >>> bits_to_masks(masks_to_bits(mask), mask)
    Array([ True, False,  True], dtype=bool)
    """

    def mask_of(target: Any, leaf: Any) -> Any:
        value = _mask_of(leaf, target) if _is_mask(target) else leaf
        known = _is_committed(target) and not isinstance(value, jax.core.Tracer)
        return jax.device_put(value, target.sharding) if known else value

    return jax.tree.map(mask_of, like, bits)


def _mask_of(bits: Any, mask: Any) -> Any:
    """The booleans in the bits, of the shape of a mask."""
    expected = _shape_of_bits(mask.shape)
    if bits.shape != expected or bits.dtype != jnp.uint8:
        raise ValueError(
            f"bits_to_masks: the mask of shape {mask.shape} must be bits in uint8 "
            f"{expected}, got {bits.dtype} {bits.shape}"
        )
    # jnp.unpackbits fails on arrays without elements.
    flags = bits[..., None] >> jnp.arange(7, -1, -1, dtype=jnp.uint8) & 1
    flat = flags.reshape(*bits.shape[:-1], 8 * bits.shape[-1])
    # An index would be a gather, which explicit sharding refuses.
    return jax.lax.slice_in_dim(flat, 0, mask.shape[-1], axis=-1).astype(bool)
