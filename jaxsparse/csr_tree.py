"""A CSR matrix as a pytree, also in exported programs, which save the pattern of a static one."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxsparse.topology import Topology
from jaxsparse.topology_key import TopologyKey

if TYPE_CHECKING:
    from jaxsparse.csr import CSR

_VALUES, _TOPOLOGY = jax.tree_util.GetAttrKey("values"), jax.tree_util.GetAttrKey("topology")


def register(cls: type[CSR]) -> None:
    """Tells JAX how the matrices of the class are taken apart, put together and exported."""

    def unflatten(key: TopologyKey | None, children: Any) -> CSR:
        values, topology = children if key is None else (*children, key.topology)
        return cls._from_parts(values, topology)

    jax.tree_util.register_pytree_with_keys(cls, _flatten, unflatten)
    jax.export.register_pytree_node_serialization(
        cls,
        serialized_name="jaxsparse.CSR",
        serialize_auxdata=_serialize,
        deserialize_auxdata=_deserialize,
    )


def _flatten(matrix: CSR) -> Any:
    values, topology = (_VALUES, matrix.values), matrix.topology
    if isinstance(topology, Topology) and topology.static:
        return (values,), topology.key
    return (values, (_TOPOLOGY, topology)), None


def _serialize(key: TopologyKey | None) -> bytes:
    if key is None:
        return b""
    topology, file = key.topology, io.BytesIO()
    np.savez(
        file,
        row_offsets=topology.row_offsets,
        column_indices=topology.column_indices,
        shape=topology.shape,
        has_transpose=topology.has_transpose,
    )
    return file.getvalue()


def _deserialize(data: bytes) -> TopologyKey | None:
    if not data:
        return None
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        shape = tuple(arrays["shape"].tolist())
        rows = (arrays["row_offsets"], arrays["column_indices"])
        transpose = bool(arrays.get("has_transpose", True))  # older programs do not say
        return Topology(*rows, shape, transpose=transpose).as_static().key
