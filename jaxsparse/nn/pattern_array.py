"""A pattern as one array of integers: what pure dicts, Linen variables and files hold of it.

Flax takes a state apart into paths and arrays, and puts it together by those paths: a variable that
holds a tree has no place there. The array is ``[m, k, row offsets, column indices]``. Whatever else
a topology has is derived from these when it is read, so that a file does not depend on how kernels
want a pattern laid out.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxsparse.topology import Topology

_SIZES = 2  # m and k, in front


def is_array(x: Any) -> bool:
    """Whether something is an array, concrete, traced or abstract."""
    return isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def to_array(topology: Topology) -> Any:
    """The array of a topology: int32 ``(..., 2 + m + 1 + nse)``, abstract for an abstract one.

    >>> to_array(Topology([0, 1, 2], [3, 0], (2, 4)))
    Array([2, 4, 0, 1, 2, 3, 0], dtype=int32)
    """
    parts = (topology.row_offsets, topology.column_indices)

    def join(offsets: Any, columns: Any) -> jax.Array:
        sizes = jnp.broadcast_to(
            jnp.array(topology.shape, jnp.int32), (*offsets.shape[:-1], _SIZES)
        )
        return jnp.concatenate([sizes, offsets, columns], axis=-1)

    if any(isinstance(x, jax.ShapeDtypeStruct) for x in parts):
        joined = jax.eval_shape(join, *parts)
        sharding = getattr(parts[0], "sharding", None)
        return jax.ShapeDtypeStruct(joined.shape, joined.dtype, sharding=sharding)
    return join(*parts)


def to_topology(saved: Any, shape: tuple[int, int] | None = None) -> Topology:
    """The inverse of :func:`to_array`; also takes the named arrays of a topology, as a file may.

    Args:
        saved: the array, or a mapping of the arrays that a topology holds, as a checkpoint library
            restores one without being told its type.
        shape: ``(m, k)``. It may be left out, unless the array is traced or abstract.

    Raises:
        TypeError: if ``saved`` is neither.
        ValueError: if it is the pattern of a matrix of another shape, or a bad one, naming the row.

    >>> to_topology(np.array([2, 4, 0, 1, 2, 3, 0])).shape
    (2, 4)
    """
    if isinstance(saved, Mapping):
        return _of_named_arrays(saved, shape)
    if not is_array(saved):
        raise TypeError(
            "a pattern must be a Topology or its array of integers (m, k, row offsets, column "
            f"indices), got {type(saved).__name__}"
        )
    if not jnp.issubdtype(saved.dtype, jnp.integer) or saved.ndim < 1:
        raise ValueError(
            "a pattern must be an array of integers (..., m, k, row offsets, column indices), "
            f"got {saved.dtype} {saved.shape}"
        )
    if isinstance(saved, jax.ShapeDtypeStruct):
        topology = jax.eval_shape(functools.partial(_split, shape=_known(shape)), saved)
        return _placed_as(topology, saved)
    if isinstance(saved, jax.core.Tracer):
        return _split(saved, _known(shape))
    if isinstance(saved, jax.Array) and not saved.is_fully_addressable:  # by several processes
        split: Topology = jax.jit(functools.partial(_split, shape=_known(shape)))(saved)
        return split
    array = np.asarray(saved)
    sizes = array.reshape(-1, array.shape[-1])[:, :_SIZES].tolist()
    if array.shape[-1] < _SIZES or not sizes or any(s != sizes[0] for s in sizes):
        raise ValueError(f"a pattern's array must start with its shape (m, k), got {sizes}")
    _check_shape(tuple(sizes[0]), shape)
    return _placed_as(_split(array, (sizes[0][0], sizes[0][1])), saved)


def _known(shape: tuple[int, int] | None) -> tuple[int, int]:
    if shape is None:
        raise ValueError(
            "the shape of a traced pattern is not known from its array: give its model the state "
            "by nnx.update, or make its topology outside of the program"
        )
    return shape


def _check_shape(actual: tuple[int, ...], expected: tuple[int, int] | None) -> None:
    if expected is not None and actual != expected:
        raise ValueError(f"the pattern must have shape {expected}, got {actual}")


def _split(array: Any, shape: tuple[int, int]) -> Topology:
    end = _SIZES + shape[0] + 1
    if not 0 <= shape[0] < array.shape[-1] - _SIZES:
        raise ValueError(
            f"the array of a pattern of shape {shape} must have at least {end} numbers, "
            f"got {array.shape[-1]}"
        )
    return Topology(array[..., _SIZES:end], array[..., end:], shape)


def _placed_as(topology: Topology, array: Any) -> Topology:
    """Its arrays on every device of the array that it came in."""
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return topology
    everywhere = NamedSharding(sharding.mesh, P(), memory_kind=sharding.memory_kind)
    placed: Topology
    if isinstance(array, jax.ShapeDtypeStruct):
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), topology
        )
    else:
        placed = jax.device_put(topology, everywhere)
    return placed


def _of_named_arrays(saved: Mapping[str, Any], shape: tuple[int, int] | None) -> Topology:
    """From ``pattern`` and ``transposed_pattern``, of which the sizes are those of the offsets."""
    try:
        pattern, transposed = saved["pattern"], saved["transposed_pattern"]
        offsets, columns = pattern["row_offsets"], pattern["column_indices"]
        sizes = (offsets.shape[-1] - 1, transposed["row_offsets"].shape[-1] - 1)
    except (KeyError, TypeError, AttributeError):
        raise TypeError(
            "a pattern must be a Topology, its array of integers or all of a topology's arrays by "
            f"name, got a mapping of {', '.join(map(str, saved))}"
        ) from None
    _check_shape(sizes, shape)
    return Topology(offsets, columns, sizes)


serialization.register_serialization_state(
    Topology,
    to_array,
    lambda topology, saved: to_topology(saved, topology.shape),
)
