"""The NNX variable that holds a pattern, and the check of what a checkpoint brings back."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import MISSING
from jax.sharding import PartitionSpec, Sharding

from jaxsparse.layouts import KINDS
from jaxsparse.nn.pattern_array import is_array, to_array, to_topology
from jaxsparse.pattern import is_concrete
from jaxsparse.topology import Topology

T = TypeVar("T")


def verify(tree: T) -> T:
    """Checks every topology in a model, a state or any other pytree; returns the tree.

    For what comes from a checkpoint: what a corrupted pattern computes is of no use.
    ``nnx.update(model, state)`` and ``nnx.replace_by_pure_dict`` do it by themselves;
    ``nnx.merge(graphdef, state)`` does not, nor does a jitted function that takes the state.

    Raises:
        ValueError: if a topology is corrupted, naming where it is and what is wrong.

    >>> from jaxsparse.nn import SparseLinear
    >>> model = SparseLinear(8, 4, sparsity=0.5, rngs=nnx.Rngs(0))
    >>> graphdef, state = nnx.split(model)
    >>> model = nnx.merge(graphdef, verify(state))
    """
    leaves = jax.tree_util.tree_leaves_with_path(
        nnx.state(tree) if isinstance(tree, nnx.Module) else tree,
        is_leaf=lambda node: isinstance(node, Topology),
    )
    for path, leaf in leaves:
        if isinstance(leaf, Topology):
            try:
                leaf.verify()
            except ValueError as error:
                raise ValueError(f"verify: at {jax.tree_util.keystr(path)}: {error}") from error
    return tree


@nnx.register_variable_name("topology")
class TopologyVariable(nnx.Variable[Topology]):
    """Holds a layer's `jaxsparse.Topology`: an argument of jitted programs, and no parameter.

    ``variable[...]`` is the topology. ``variable.get_value()``, of which Flax makes pure dicts and
    Linen variables, is one array of integers ``(2 + m + 1 + nse)``: the shape (m, k), the row
    offsets and the column indices. Either form, or a mapping of a topology's arrays by name, may be
    assigned, updated with, or replace the value in a state; what is derived from a pattern is made
    anew where it does not come along.

    What comes in is verified, unless it comes out of a program that took the old pattern, is traced
    or is spread over several processes. ``nnx.merge`` of a state that holds topologies verifies
    nothing: see :func:`verify`.

    Arithmetic leaves a pattern as it is, so that an average of models (`nnx.EMA`) has theirs. It is
    never written to in place, and so no Ref.

    Raises:
        TypeError: on such a change, if the new value is no pattern.
        ValueError: if it is corrupted or of another shape.

    >>> variable = TopologyVariable(Topology([0, 1, 2], [3, 0], (2, 4)))
    >>> variable[...].nnz, variable.get_value()
    (2, Array([2, 4, 0, 1, 2, 3, 0], dtype=int32))
    """

    def __init__(self, value: Any, **metadata: Any):
        super().__init__(_read(value, None), **metadata | {"ref": False})

    @classmethod
    def from_metadata(cls, value: Any, attributes: dict[str, Any]) -> nnx.Variable[Topology]:
        if is_array(value) or isinstance(value, Mapping):
            value = _read(value, None)
        return super().from_metadata(value, attributes)

    @property
    def dtype(self) -> Any:
        """That of the array form: int32."""
        return jnp.dtype(jnp.int32)

    def get_value(self, *, index: Any = MISSING) -> Any:
        if index is not MISSING:
            _check_whole(index)
            return topology_of(self, None)
        topology = self.get_raw_value()
        if not isinstance(topology, Topology):
            return topology
        parts = (topology.row_offsets, topology.column_indices)
        # A tree function may have put anything in the place of the arrays.
        return to_array(topology) if all(map(is_array, parts)) else topology

    def set_value(self, value: Any, *, index: Any = ...) -> None:
        _check_whole(index)
        self.set_raw_value(value)

    def set_raw_value(self, value: Any, *, _unsafe_bypass_check: bool = False) -> None:
        super().set_raw_value(self._checked(value), _unsafe_bypass_check=_unsafe_bypass_check)

    def update_from_state(self, variable_state: nnx.Variable[Topology]) -> None:
        value = self._checked(variable_state.get_raw_value())
        super().update_from_state(variable_state)
        super().set_raw_value(value, _unsafe_bypass_check=True)

    def copy(self, value: Any = MISSING, **updates: Any) -> Any:
        value = updates.pop("value", value)
        if isinstance(value, PartitionSpec | Sharding):  # of each of its arrays
            updates["value"] = jax.tree.map(lambda _: value, self.get_raw_value())
        elif value is not MISSING:
            updates["value"] = self._checked(value)
        return super().copy(**updates | {"ref": False})

    replace = to_state = copy

    def _checked(self, new: Any) -> Any:
        """What a new value is, in the place of the old one."""
        old = self.get_raw_value()
        if isinstance(new, TopologyVariable):
            new = new.get_raw_value()
        read = _read(new, old.shape if isinstance(old, Topology) else None)
        if isinstance(read, Topology) and _is_foreign(old, read):
            expected, actual = (_sizes(x) if isinstance(x, Topology) else None for x in (old, read))
            if expected not in (None, actual):
                raise ValueError(
                    f"TopologyVariable: the pattern must have shape {expected}, got {actual}"
                )
            if read is new:  # else it was just made and checked
                read.verify()
            read = read.with_derived_layouts()  # a file of an earlier version may lack some
        return _with_layouts_of(old, read) if isinstance(read, Topology) else read

    def _itself(self, *_: Any) -> Any:
        return self

    __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = _itself


def _with_layouts_of(old: Any, new: Topology) -> Topology:
    """A pattern with layouts that the one before it had, as an array form has none."""
    had = old.layouts if isinstance(old, Topology) else {}
    if any(KINDS[name].derived and name not in new.layouts for name in had):
        new = new.with_derived_layouts()
    missing = [name for name in had if KINDS[name].inherited and name not in new.layouts]
    columns = new.column_indices
    for name in missing:
        if isinstance(columns, jax.Array):
            new = new.with_layout(name)
        elif isinstance(columns, jax.ShapeDtypeStruct):  # of a pattern with as many entries
            layout = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=columns.sharding),
                had[name],
            )
            new = new.with_layouts({**new.layouts, name: layout})
    return new


def _read(value: Any, shape: tuple[int, int] | None) -> Any:
    """The topology in a value. Flax's own marks, which stand for one, are left as they are.

    So is a traced array whose shape is not known.
    """
    if isinstance(value, bool | int | float | complex | str | bytes | list | tuple | None):
        raise TypeError(
            "TopologyVariable: a pattern must be a Topology or its array of integers, "
            f"got {type(value).__name__}"
        )
    if isinstance(value, jax.core.Tracer) and shape is None:
        return value
    if not is_array(value) and not isinstance(value, Mapping):
        return value
    try:
        return to_topology(value, shape)
    except (TypeError, ValueError) as error:
        raise type(error)(f"TopologyVariable: {error}") from error


def _check_whole(index: Any) -> None:
    if index is not ...:
        raise TypeError(f"TopologyVariable: a pattern is read and set as [...], got [{index!r}]")


def _sizes(topology: Topology) -> tuple[Any, ...]:
    batch = topology.batch_shape if is_array(topology.column_indices) else ()
    return (*batch, *topology.shape)


def topology_of(variable: Any, shape: tuple[int, int] | None) -> Topology:
    """The topology in a variable of any kind, where a program may have been given its array."""
    value = variable.get_raw_value()
    topology = value if isinstance(value, Topology) else to_topology(value, shape)
    # A program that does not use the transpose drops what makes it.
    return topology.with_transpose() if is_array(topology.column_indices) else topology


def drop_transposes(model: nnx.Module) -> None:
    """Makes a model smaller for inference, in place: patterns without their transposes.

    Those are more than half of what a pattern holds, and only gradients and transposed products
    read them. The model still has its gradients: a program that asks for them sorts the pattern
    each time that it runs. Run such a model under ``nnx.jit`` or ``jax.jit``; elsewhere it sorts at
    every call.

    >>> from jaxsparse.nn import SparseLinear
    >>> layer = SparseLinear(64, 32, sparsity=0.9, rngs=nnx.Rngs(0))
    >>> drop_transposes(layer)
    >>> layer.topology.get_raw_value().has_transpose
    False
    """
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, TopologyVariable):
            shorter = variable.get_raw_value().without_transpose()
            nnx.Variable.set_raw_value(variable, shorter)  # nothing of it is new: no check


def own_topology(topology: Topology) -> TopologyVariable:
    """A variable with arrays of its own: a donated layer must not delete its user's pattern.

    Nor may two layers on one pattern donate the same arrays.
    """
    return TopologyVariable(jax.tree.map(jnp.copy, topology))


def _is_foreign(old: Any, new: Any) -> bool:
    """Whether a concrete pattern comes from elsewhere than a program that took the old one.

    A program passes a pattern on as the same arrays or, where they were donated, as new ones. What
    ``nnx.jit`` sets in the objects that it was called with, at every call, are new ones always.
    """
    if _transformation_returns():
        return False
    before, after = jax.tree.leaves(old), jax.tree.leaves(new)
    if len(before) == len(after) and all(map(operator.is_, before, after)):
        return False
    here = is_concrete(*after) and all(
        x.is_fully_addressable for x in after if isinstance(x, jax.Array)
    )
    return here and not any(
        is_concrete(x) and x.is_deleted() for x in before if isinstance(x, jax.Array)
    )


def _transformation_returns() -> bool:
    """Whether Flax sets variables to what a transformation made of them. There is no public name.

    Without the names below, patterns are verified at every call: right, and slow.
    """
    context = getattr(getattr(nnx, "graphlib", None), "GRAPH_CONTEXT", None)
    return bool(getattr(context, "index_ref_stack", ()))
