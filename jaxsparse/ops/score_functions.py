"""Functions of scores in attention: what users write, checked and traced to scalars."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import numbers
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxsparse.codegen.flatten import flatten, live, uses
from jaxsparse.codegen.program import Program, Value, used
from jaxsparse.ops import arguments
from jaxsparse.ops.attention_masks import OPERATION
from jaxsparse.ops.score_keys import has_rules, key_of
from jaxsparse.pattern import is_concrete

AXES = "bntsd"
"""Sequences, heads, rows (queries), columns (keys), and distances, row - column + S - 1."""

_WHAT_TO_WRITE = (
    "a score is a function of scalars: give arrays in operands=, as Indexed(array, axes), where "
    "axes say by which of b (sequence), n (head), t (row), s (column) and d (row - column + S - 1) "
    "the array is indexed"
)
_RANDOM_ACCESS = {"gather", "dynamic_slice", "scatter", "scatter-add", "take", "argsort", "sort"}


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["axes"])
@dataclasses.dataclass(frozen=True)
class Indexed:
    """An array that a score function reads, and by what each of its dimensions is indexed.

    Args:
        array: floating, integers or bool; a function gets one element. Floating ones come in the
            dtype of scores, float64 rounded to it; bool and uint32 as they are; other integers as
            int32, to which wider ones are cut.
        axes: a letter for each dimension, in their order: b the sequence, n the query head, t the
            row (query), s the column (key), d the distance row - column + S - 1 of places in
            ``query`` and ``key``. As "n" for slopes, "b t" for ids of documents.

    >>> import jax.numpy as jnp
    >>> Indexed(jnp.ones((2, 8)), "b t").axes
    'b t'
    """

    array: Any
    axes: str


# So that exported programs may take and return them.
jax.export.register_pytree_node_serialization(
    Indexed,
    serialized_name="jaxsparse.Indexed",
    serialize_auxdata=lambda meta: json.dumps(meta).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(data)),
)


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreFunction:
    """A function of scalars: the score, int32 row and column, and values of operands.

    Equal functions give equal programs: they compare by what they compute, derivatives too.
    """

    jaxpr: ClosedJaxpr

    @functools.cached_property
    def key(self) -> Hashable:
        """What makes it equal to another: its program, and derivatives that follow rules."""
        if not has_rules(self.jaxpr):
            return key_of([self.jaxpr])
        return key_of([self.jaxpr, self._all_derivatives])

    def __call__(self, *scalars: jax.Array) -> jax.Array:
        result: jax.Array
        (result,) = jax.core.eval_jaxpr(self.jaxpr.jaxpr, self.jaxpr.consts, *scalars)
        return result

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScoreFunction) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        primitives = dict.fromkeys(e.primitive for e in live(flatten(self.jaxpr)).every_equation())
        return f"<{', '.join(primitives) or 'the score itself'}>"

    @property
    def reads_positions(self) -> tuple[bool, bool]:
        """Whether it or a derivative depends on rows, and whether on columns."""
        jaxpr = self.jaxpr
        if has_rules(jaxpr):
            jaxpr = self._all_derivatives
            if has_rules(jaxpr):
                return True, True  # what rules of rules read shows in higher derivatives only
        row, column = uses(jaxpr)[1:3]
        return row, column

    def with_positions(self, reads: tuple[bool, bool]) -> ScoreFunction:
        """The function with the row, the column, or both as last operands instead."""
        if not any(reads):
            return self

        def of(s: jax.Array, row: jax.Array, column: jax.Array, *values: jax.Array) -> jax.Array:
            own, behind = values[: len(values) - sum(reads)], list(values[-sum(reads) :])
            at = [
                behind.pop(0) if read else x for x, read in zip((row, column), reads, strict=True)
            ]
            return self(s, *at, *own)

        return ScoreFunction(
            _traced(of, [a.dtype for a in self._types()] + [jnp.int32] * sum(reads))
        )

    def derivatives(self, by: Sequence[int] = ()) -> ClosedJaxpr:
        """Of the same scalars: the score, its derivative by the score, and those by operands."""

        def along(scalars: tuple[jax.Array, ...], i: int) -> tuple[jax.Array, jax.Array]:
            def of(x: jax.Array) -> jax.Array:
                return self(*scalars[:i], x, *scalars[i + 1 :])

            return jax.jvp(of, (scalars[i],), (jnp.ones_like(scalars[i]),))

        def all_of(*scalars: jax.Array) -> list[jax.Array]:
            result, derivative = along(scalars, 0)
            return [result, derivative, *(along(scalars, 3 + i)[1] for i in by)]

        return _traced(all_of, [a.dtype for a in self._types()])

    @functools.cached_property
    def _all_derivatives(self) -> ClosedJaxpr:
        types = self._types()[3:]
        return self.derivatives(
            [i for i, x in enumerate(types) if jnp.issubdtype(x.dtype, jnp.floating)]
        )

    def _types(self) -> list[Any]:
        return [v.aval for v in self.jaxpr.jaxpr.invars]


def score_function(
    soft_cap: Any,
    bias: Any,
    score: Callable[..., Any] | None,
    operands: Mapping[str, Any] | None,
    sizes: dict[str, int],
    per_group: int,
    dtype: Any,
) -> tuple[ScoreFunction | None, list[tuple[str, jax.Array]]]:
    """Soft cap, bias and function as one, and the axes and arrays of what that reads.

    ``sizes`` are those of axes; ``dtype`` is that of scores.

    Raises:
        TypeError, ValueError: for what can't be that.
    """
    named = _checked_operands(operands)
    _check_callable(score, list(named))
    read: dict[str, Indexed] = {}
    if soft_cap is not None and not isinstance(soft_cap, numbers.Real):
        array = arguments.as_array(OPERATION, "soft_cap", soft_cap, 0)
        if is_concrete(array) and array.shape == () and not jnp.iscomplexobj(array):
            _check_soft_cap(float(array))
        read["soft_cap"] = Indexed(array, "")
        soft_cap = True
    elif soft_cap is not None:
        soft_cap = float(soft_cap)
        _check_soft_cap(soft_cap)
    if bias is not None:
        read["bias"] = bias if isinstance(bias, Indexed) else _bias(bias, sizes)
    names = list(named)
    function = _in_order(soft_cap, bias is not None, score, names)
    arrays = [
        _over_heads(name, x, sizes, per_group, dtype) for name, x in (*read.items(), *named.items())
    ]
    if soft_cap is None and bias is None and score is None:
        return None, []
    return _trace(function, dtype, [x.dtype for _, x in arrays]), arrays


def _check_callable(score: Any, names: list[str]) -> None:
    if score is None:
        if names:
            raise ValueError(f"{OPERATION}: operands are those of score, which is None")
        return
    if not callable(score):
        raise TypeError(f"{OPERATION}: score must be a function, got {type(score).__name__}")
    try:
        signature = inspect.signature(score)
    except ValueError:
        return  # a built-in function that does not say what it takes
    try:
        signature.bind(None, None, None, **dict.fromkeys(names))
    except TypeError as error:
        called = ", ".join(("s", "row", "column", *(f"{name}={name}" for name in names)))
        raise TypeError(
            f"{OPERATION}: score is called as score({called}), which it can't be: {error}"
        ) from None


def _check_soft_cap(soft_cap: float) -> None:
    if not soft_cap > 0:
        raise ValueError(f"{OPERATION}: soft_cap must be greater than 0, got {soft_cap}")


def _bias(bias: Any, sizes: dict[str, int]) -> Indexed:
    """An array (N or 1, T, S) or (B or 1, N or 1, T, S), by what it is indexed."""
    array = arguments.as_array(OPERATION, "bias", bias, 0)
    t, s = sizes["t"], sizes["s"]
    leading = array.shape[:-2]
    axes = "bn"[2 - len(leading) :]
    fits = 3 <= array.ndim <= 4 and array.shape[-2:] == (t, s)
    if not fits or any(n not in (1, sizes[a]) for n, a in zip(leading, axes, strict=True)):
        raise ValueError(
            f"{OPERATION}: bias must be an Indexed or have shape ({sizes['n']} or 1, {t}, {s}) or "
            f"({sizes['b']} or 1, {sizes['n']} or 1, {t}, {s}), got {array.shape}"
        )
    kept = "".join(a for n, a in zip(leading, axes, strict=True) if n != 1)
    return Indexed(array.reshape(*(sizes[a] for a in kept), t, s), f"{kept}ts")


def _in_order(
    soft_cap: Any, bias: bool, score: Callable[..., Any] | None, names: list[str]
) -> Callable[..., Any]:
    """Cap, bias and function as one function; values of operands come behind the positions.

    ``soft_cap`` is a number, None, or True where it is the first operand, as the bias is the next.
    """

    def function(s: jax.Array, row: jax.Array, column: jax.Array, *values: jax.Array) -> Any:
        left = list(values)
        if soft_cap is not None:
            cap = left.pop(0) if soft_cap is True else soft_cap
            s = cap * jnp.tanh(s / cap)
        if bias:
            s = s + left.pop(0)
        if score is not None:
            s = score(s, row, column, **dict(zip(names, left, strict=True)))
        return s

    return function


def _trace(function: Callable[..., Any], dtype: Any, dtypes: list[Any]) -> ScoreFunction:
    """The function for scores of a dtype and operands of these.

    Raises:
        TypeError, ValueError: where it is not one of scalars, or returns no score.
    """
    wide = jnp.dtype(dtype)
    values = [wide if jnp.issubdtype(d, jnp.floating) else d for d in dtypes]

    def checked(*scalars: jax.Array) -> jax.Array:
        given = function(*scalars)
        if not isinstance(given, jax.Array | np.ndarray | np.generic | float | int):
            raise TypeError(
                f"{OPERATION}: score must return one floating number, got {type(given).__name__}"
            )
        result = jnp.asarray(given)
        if result.shape or not jnp.issubdtype(result.dtype, jnp.floating):
            raise TypeError(
                f"{OPERATION}: score must return one floating number, got {result.dtype} of shape "
                f"{result.shape}"
            )
        return result.astype(wide)

    jaxpr = _traced(checked, [wide, jnp.int32, jnp.int32, *values])
    _check(live(flatten(jaxpr)))
    return ScoreFunction(jaxpr)


def _traced(function: Callable[..., Any], dtypes: Sequence[Any]) -> ClosedJaxpr:
    """Of scalars, without a mesh: none of its equations is about sharding."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct((), d) for d in dtypes))


def _check(program: Program) -> None:
    known = {*program.inputs, *(x for e in program.equations for x in e.results)}
    if any(isinstance(x, Value) and x not in known for x in used(program)):
        raise ValueError(
            f"{OPERATION}: score closes over a traced value; {_WHAT_TO_WRITE} ('' for a scalar)"
        )
    equations = list(program.every_equation())
    names = {e.primitive for e in equations} & _RANDOM_ACCESS
    shaped = any(x.shape != () for e in equations for x in (*e.operands, *e.results))
    if names or shaped:
        what = f"reads by {', '.join(sorted(names))}" if names else "computes with arrays"
        raise ValueError(f"{OPERATION}: score {what}, but {_WHAT_TO_WRITE}")


def _checked_operands(operands: Mapping[str, Any] | None) -> dict[str, Indexed]:
    """Operands by name.

    Raises:
        TypeError: if they are no mapping, or one is no `Indexed`.
    """
    if not isinstance(operands, Mapping | None):
        raise TypeError(
            f"{OPERATION}: operands must be a mapping of names to Indexed, got "
            f"{type(operands).__name__}"
        )
    named = dict(operands or {})
    for name, operand in named.items():
        if not isinstance(operand, Indexed):
            raise TypeError(
                f"{OPERATION}: operand {name!r} must be Indexed(array, axes), got "
                f"{type(operand).__name__}"
            )
    return named


def _over_heads(
    name: str, operand: Indexed, sizes: dict[str, int], per_group: int, wide: Any
) -> tuple[str, jax.Array]:
    """Axes in the order of `AXES`, and the array (B or 1, K or 1, N / K or 1, ...).

    ``sizes`` are those of axes.

    Raises:
        TypeError, ValueError: for axes that there are not, another shape than theirs, and what
            is no array of numbers.
    """
    if not isinstance(operand.axes, str):
        raise TypeError(
            f"{OPERATION}: axes of {name} must be a string, got {type(operand.axes).__name__}"
        )
    axes = operand.axes.replace(" ", "")
    array = arguments.as_array(OPERATION, name, operand.array, 0)
    unknown = set(axes) - set(AXES)
    if unknown or len(set(axes)) < len(axes) or ("d" in axes and set(axes) & set("ts")):
        raise ValueError(
            f"{OPERATION}: axes of {name} must be some of b, n, t and s, or of b, n and d, each "
            f"once, got {operand.axes!r}"
        )
    expected = tuple(sizes[axis] for axis in axes)
    if array.shape != expected:
        raise ValueError(
            f"{OPERATION}: {name} must have shape {expected} for its axes {operand.axes!r}, got "
            f"{array.shape}"
        )
    in_order = sorted(axes, key=AXES.index)
    array = array.transpose([axes.index(axis) for axis in in_order])
    b, n = sizes["b"] if "b" in axes else 1, sizes["n"] if "n" in axes else 1
    heads = (n // per_group, per_group) if "n" in axes else (1, 1)
    array = array.reshape(b, *heads, *(sizes[axis] for axis in in_order if axis not in "bn"))
    return "".join(in_order), array.astype(_kernel_dtype(name, array.dtype, wide))


def _kernel_dtype(name: str, dtype: Any, wide: Any) -> Any:
    """The dtype that an operand keeps: that of scores for wider ones, int32 for other integers.

    Raises:
        TypeError: for one that is not floating, integer or bool.
    """
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype if jnp.dtype(dtype).itemsize < jnp.dtype(wide).itemsize else wide
    if not (jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_):
        raise TypeError(f"{OPERATION}: {name} must be floating, integer or bool, got {dtype}")
    return dtype if dtype in (jnp.bool_, jnp.uint32) else jnp.int32
