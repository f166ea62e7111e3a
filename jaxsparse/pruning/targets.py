"""Which parameters are pruned, by name, and how their dimensions are read as a sparse matrix."""

from __future__ import annotations

import fnmatch
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxsparse.csr import CSR
from jaxsparse.topology import Topology

# What Flax layers call parameters that are no matrices, however many dimensions they have: the bias
# of an attention's projection has two, that of a stack of layers one more.
_VECTORS = ("bias", "scale")

# Where the outputs stand among the dimensions of a matrix, after those of a stack.
LAYOUTS = ("inputs_first", "outputs_first")


@dataclass(frozen=True)
class Target:
    """Parameters by name, and how they are read as matrices with a row for each output unit.

    A parameter is called by the keys that lead to it, joined by ``/``: ``encoder/0/kernel``. Its
    dimensions are those of a Flax kernel, inputs first: ``(inputs..., outputs...)``, after those of
    a stack, if it is one. A row of the sparse matrix is an output unit, that is a column of a
    kernel (in, out), or a row of a weight (out, in) with ``layout="outputs_first"``.

    Args:
        pattern: a name, or a pattern of names with ``*``, ``?`` and ``[...]`` as in a shell; ``*``
            stands for any characters, ``/`` too. Never meant are parameters that have no more
            than ``batch_dims + output_dims`` dimensions, arrays that are not floating, and what
            belongs to a `jaxsparse.CSR` or `jaxsparse.Topology`. Those that are called ``bias`` or
            ``scale`` are meant only by a pattern that ends in this very name: ``*/scale``.
        output_dims: how many dimensions are outputs: 1 for a linear or convolution kernel, 2 for
            the query, key and value kernels (in, heads, features) of nnx.MultiHeadAttention.
        gates: into how many equal blocks the outputs fall, as the kernel (in, gates * h) of a
            recurrent cell.
        only: prune these gates alone, the others stay dense; by default all.
        batch_dims: how many of the first dimensions are a stack of matrices, each of them pruned by
            itself: 1 for a kernel (layers, in, out) of layers that ``nnx.vmap`` made. By default
            none: a stack would count among the inputs, as the window of a convolution does.
        layout: ``"inputs_first"``, as in Flax, or ``"outputs_first"``, as in PyTorch, where a
            linear weight is (out, in) and that of a convolution (out, in, window...). The shape
            does not tell which it is.

    Raises:
        TypeError: if ``only`` does not hold integers.
        ValueError: if ``output_dims`` or ``gates`` is less than 1, ``batch_dims`` is negative,
            ``only`` does not hold distinct gates, or the layout is not known.

    >>> Target("*/dense_h/kernel", gates=4, only=(1,)).pattern
    '*/dense_h/kernel'
    """

    pattern: str
    output_dims: int = 1
    gates: int = 1
    only: Sequence[int] | None = None
    batch_dims: int = 0
    layout: str = "inputs_first"

    def __post_init__(self) -> None:
        for name, least in (("output_dims", 1), ("gates", 1), ("batch_dims", 0)):
            if operator.index(getattr(self, name)) < least:
                raise ValueError(f"Target: {name} must be >= {least}, got {getattr(self, name)}")
        if self.layout not in LAYOUTS:
            raise ValueError(
                f"Target: layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}"
            )
        if self.only is None:
            return
        try:
            only = tuple(map(operator.index, self.only))
        except TypeError:
            raise TypeError(f"Target: only must hold integers, got {self.only!r}") from None
        if not only or len(set(only)) != len(only) or set(only) - set(range(self.gates)):
            raise ValueError(
                f"Target: only must hold distinct gates of 0 to {self.gates - 1}, got {only}"
            )
        # A target is looked up in sets, so it holds nothing that changes.
        object.__setattr__(self, "only", only)

    @property
    def pruned_gates(self) -> tuple[int, ...]:
        """The gates that are pruned."""
        return tuple(range(self.gates) if self.only is None else self.only)

    @property
    def least_dims(self) -> int:
        """The fewest dimensions of a parameter that it means: one of inputs, with the others."""
        return self.batch_dims + 1 + self.output_dims

    def means(self, name: str, dims: int) -> bool:
        """Whether it means a parameter of this name, with so many dimensions."""
        last, of_pattern = name.rpartition("/")[2], self.pattern.rpartition("/")[2]
        return (
            dims >= self.least_dims
            and fnmatch.fnmatchcase(name, self.pattern)
            and (last not in _VECTORS or last == of_pattern)
        )

    def outputs(self, shape: tuple[int, ...]) -> int:
        """How many output units a parameter of this shape has."""
        return math.prod(self._split(shape)[1])

    def matrices(self, x: jax.Array) -> jax.Array:
        """A parameter as matrices (stack, gates, output units of a gate, inputs)."""
        stack, outputs, inputs = map(math.prod, self._split(x.shape))
        if self.layout == "inputs_first":
            x = x.reshape(stack, inputs, outputs).mT
        return x.reshape(stack, self.gates, outputs // self.gates, inputs)

    def parameter(self, matrices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The inverse of :meth:`matrices`."""
        stack, gates, outputs, inputs = matrices.shape
        rows = matrices.reshape(stack, gates * outputs, inputs)
        return (rows.mT if self.layout == "inputs_first" else rows).reshape(shape)

    def _split(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The dimensions of the stack, the outputs and the inputs."""
        stack, matrix = shape[: self.batch_dims], shape[self.batch_dims :]
        if self.layout == "inputs_first":
            return stack, matrix[-self.output_dims :], matrix[: -self.output_dims]
        return stack, matrix[: self.output_dims], matrix[self.output_dims :]


Where = str | Target | Sequence[str | Target]


def join(path: Iterable[Any]) -> str:
    """The name of what a path of keys leads to."""
    return "/".join(str(part) for part in path)


def _part(key: Any) -> Any:
    """What stands in a key of a pytree's path, whatever its type."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key


def is_floating(leaf: Any) -> bool:
    """Whether a leaf is made of real or complex numbers, which alone can be trained."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _is_sparse(node: Any) -> bool:
    return isinstance(node, CSR | Topology)


def _leaves_of(params: Any) -> Iterator[tuple[str, Any, bool]]:
    """Name, leaf, and whether it may be a matrix, in the order of ``jax.tree.leaves``.

    Names are the same whether the tree holds Flax variables, as an optimizer's ``init`` sees it, or
    their values, as its ``update`` does.
    """
    nodes = jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda node: isinstance(node, nnx.Variable) or _is_sparse(node)
    )
    for path, node in nodes:
        name = join(map(_part, path))
        for part in jax.tree.leaves(node, is_leaf=_is_sparse):
            for leaf in jax.tree.leaves(part):
                yield name, leaf, is_floating(leaf) and not _is_sparse(part)


def names_of(params: Any) -> list[str]:
    """The name of every leaf, in the order of ``jax.tree.leaves``."""
    return [name for name, _, _ in _leaves_of(params)]


def targets_of(operation: str, params: Any, where: Where) -> list[Target | None]:
    """For every leaf the first target that means it, or None.

    Raises:
        ValueError: if a target means no parameter, or its gates don't divide the outputs of one.
            A tree without leaves is no error: it is what `optax.masked` and `optax.partition`
            leave of one. Nor is a tree without matrices for ``"*"``, which means all there are.
    """
    given = [where] if isinstance(where, str | Target) else list(where)
    targets = [Target(target) if isinstance(target, str) else target for target in given]
    if not targets:
        raise ValueError(f"{operation}: where must name a parameter, got {where!r}")
    used: set[Target] = {Target("*")}
    found: list[Target | None] = []
    names = []
    for name, leaf, is_matrix in _leaves_of(params):
        matching = [t for t in targets if is_matrix and t.means(name, np.ndim(leaf))]
        used.update(matching)
        found.append(matching[0] if matching else None)
        names.append(name)
        outputs = matching[0].outputs(leaf.shape) if matching else 0
        if matching and outputs % matching[0].gates:
            raise ValueError(
                f"{operation}: the outputs of {name} must be a multiple of "
                f"{matching[0].gates} gates, got {outputs}"
            )
    for target in targets:
        if names and target not in used:
            raise ValueError(
                f"{operation}: where must name floating parameters of at least "
                f"{target.least_dims} dimensions, got {target.pattern!r}, which matches none of "
                f"{', '.join(dict.fromkeys(names))}"
            )
    return found
