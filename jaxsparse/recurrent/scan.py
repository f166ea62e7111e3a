"""Recurrent scans: the public functions."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxsparse import backend
from jaxsparse.codegen import printer
from jaxsparse.csr import CSR
from jaxsparse.device import has_gpu, present_device
from jaxsparse.ops import arguments
from jaxsparse.precision import accumulator_dtype, promoted
from jaxsparse.recurrent.cells import Cell, name_of
from jaxsparse.recurrent.layout import (
    ScanLayout,
    ScanLayouts,
    can_be_laid_out,
    lay_out,
    lay_out_side_by_side,
    of_one_form,
    suits,
)
from jaxsparse.recurrent.plan import SparseForm
from jaxsparse.recurrent.primitive import Operands, scan_bind
from jaxsparse.recurrent.step import CellStep
from jaxsparse.topology import Topology

_PRECISIONS = {
    None: None,
    "highest": jax.lax.Precision.HIGHEST,
    "float32": jax.lax.Precision.HIGHEST,
    "high": jax.lax.Precision.HIGH,
    "default": jax.lax.Precision.DEFAULT,
    "tensorfloat32": jax.lax.Precision.DEFAULT,
}


def scan(
    cell: Cell,
    recurrent: Any,
    carry: Any,
    xs: Any,
    *,
    recurrent_bias: Any = None,
    parameters: Any = None,
    reverse: bool = False,
    seq_lengths: Any = None,
    precision: Any = None,
    recompute: bool = False,
    implementation: str | None = None,
    variant: str | None = None,
) -> tuple[Any, Any]:
    r"""Runs a recurrent cell over time: ``jax.lax.scan`` with the recurrent product in its hands.

    .. math:: (c_t, y_t) = \operatorname{cell}(x_t,\; h_{t-1} W + b,\; c_{t-1})

    where :math:`h_t`, the state that the product takes, is the last leaf of the carry
    :math:`c_t`. Sums, products, carries and the cell are computed in float32 (in float64 for
    float64 ``xs``); what the product takes and ``ys`` are rounded to the dtype of ``xs``.

    Differentiable to any order, forward and in reverse: the tangent of a scan is a scan by the
    same weights, its transpose one by the transposed weights. A gradient keeps, for every step,
    the recurrent products and the carries that the cell's derivative reads, in the dtype of
    ``xs``, beside ``xs`` and the states: one array (T, B, gates * h) and at most one (T, B, h) for
    each leaf of the carry. The gradient of the weights is one product over all steps after the
    scan, for a sparse matrix a sampled one.

    Args:
        cell: a function ``(x, r, carry) -> (carry, y)``, pointwise over h, of tuples ``x`` and
            ``r`` of one array for each gate: ``RNN()``, ``GRU``, ``LSTM`` or your own. Its y may be
            None. Pass the same function object each time: another one is compiled anew.
        recurrent: the weights: ``(h, gates * h)``, or a CSR matrix ``(gates * h, h)``. Their dtype
            may be wider than that of ``xs``. On a GPU a sparse matrix may be kept in dense form:
            there a NaN or infinity in a row's state reaches all units of the next one.
        carry: initial carry, a pytree of arrays ``(B, h)``; its leaves keep their dtypes outside.
        xs: pre-activations of the input ``(T, B, gates * h)``, the input's bias included: float32,
            float64, bfloat16 or float16. For a cell that takes it so, ``x`` may have other gates
            than ``r``: what else a step needs, as a mask of its own.
        recurrent_bias: ``(gates * h,)``, added to the recurrent product.
        parameters: what the cell learns for each unit, a pytree of arrays ``(h,)``: the cell is
            called ``cell(x, r, carry, parameters)``.
        reverse: runs from the last step to the first; ``ys`` stays in the order of ``xs``.
        seq_lengths: integers ``(B,)``: only the first so many steps of a row count. Past them
            ``ys`` is 0, the carry stays what it was, and nothing has a gradient.
        precision: of float32 products: None or HIGHEST for exact multiply-adds; DEFAULT, HIGH or
            "tensorfloat32" allow tensor cores with shorter factors.
        recompute: saves memory in a gradient: the recurrent products are not kept but computed
            again, all steps in one product.
        implementation: None (the platform's own), "cpu", "cuda" or "xla".
        variant: the name of a kernel variant to force.

    Returns:
        The last carry, and ``ys (T, B, h)``, or None if the cell's y is.

    Raises:
        TypeError: for operands that are no arrays or not of these dtypes.
        ValueError: for shapes that don't fit, options that don't exist, and cells that are not
            pointwise or use what can't run in a kernel, naming it.

    Method: Diamos et al. 2016, "Persistent RNNs"; Zhu et al. 2018, "Sparse Persistent RNNs".

    >>> import jax.numpy as jnp
    >>> from jaxsparse.recurrent import RNN
    >>> xs = jnp.ones((3, 1, 2))
    >>> carry, ys = scan(RNN("relu"), jnp.eye(2), jnp.zeros((1, 2)), xs)
    >>> ys[:, 0, 0]
    Array([1., 2., 3.], dtype=float32)
    """
    operation = "recurrent.scan"
    direction = _Direction(operation, "", cell, recurrent, carry, xs, recurrent_bias, parameters)
    (result,) = _run(
        operation,
        [direction],
        (bool(reverse),),
        seq_lengths,
        precision,
        recompute,
        implementation,
        variant,
    )
    return result


def bidirectional_scan(
    cell: Cell,
    recurrent: Any,
    carry: Any,
    xs: Any,
    *,
    recurrent_bias: Any = None,
    parameters: Any = None,
    seq_lengths: Any = None,
    precision: Any = None,
    recompute: bool = False,
    implementation: str | None = None,
    variant: str | None = None,
) -> tuple[tuple[Any, Any], tuple[jax.Array, jax.Array]]:
    """Two scans at once, one forward and one backward in time.

    As ``scan``, but ``recurrent``, ``carry``, ``xs``, ``recurrent_bias`` and ``parameters`` are
    pairs (forward, backward) of equal shapes and dtypes; two sparse matrices may store different
    positions.

    Returns:
        The pair of last carries (the backward one is that before the first step), and the pair of
        ``ys``, both in the order of time.

    Raises:
        TypeError, ValueError: as ``scan``, and if the two directions differ in form.

    >>> import jax.numpy as jnp
    >>> from jaxsparse.recurrent import RNN
    >>> xs = jnp.ones((3, 1, 2))
    >>> w, h = jnp.eye(2), jnp.zeros((1, 2))
    >>> _, (forward, backward) = bidirectional_scan(RNN("relu"), (w, w), (h, h), (xs, xs))
    >>> backward[:, 0, 0]
    Array([3., 2., 1.], dtype=float32)
    """
    operation = "recurrent.bidirectional_scan"
    bias = (None, None) if recurrent_bias is None else recurrent_bias
    own = (None, None) if parameters is None else parameters
    pairs = {
        "recurrent": recurrent,
        "carry": carry,
        "xs": xs,
        "recurrent_bias": bias,
        "parameters": own,
    }
    for name, pair in pairs.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(
                f"{operation}: {name} must be a pair (forward, backward), got {type(pair).__name__}"
            )
    directions = [
        _Direction(operation, f"{side} ", cell, *parts)
        for side, *parts in zip(("forward", "backward"), *pairs.values(), strict=True)
    ]
    first, second = (d.form for d in directions)
    if first != second:
        raise ValueError(
            f"{operation}: both directions must have one form, got {first} and {second}"
        )
    results = _run(
        operation,
        directions,
        (False, True),
        seq_lengths,
        precision,
        recompute,
        implementation,
        variant,
    )
    carries, ys = zip(*results, strict=True)
    return carries, ys


class _Direction:
    """The checked operands of one direction."""

    def __init__(
        self,
        operation: str,
        side: str,
        cell: Cell,
        recurrent: Any,
        carry: Any,
        xs: Any,
        bias: Any,
        parameters: Any,
    ):
        if not callable(cell):
            raise TypeError(f"{operation}: cell must be a function, got {type(cell).__name__}")
        try:
            hash(cell)
        except TypeError:
            raise TypeError(
                f"{operation}: cell must be hashable, {type(cell).__name__} is not"
            ) from None
        self.xs = _array(operation, f"{side}xs", xs, 3)
        self.length, b, width = self.xs.shape
        self.sparse = isinstance(recurrent, CSR)
        if self.sparse:
            recurrent.topology.check_transpose(f"{operation}: {side}recurrent")
            self.recurrent = recurrent
            rows, h = recurrent.shape
            if recurrent.topology.batch_shape or recurrent.values.ndim != 1:
                raise ValueError(
                    f"{operation}: {side}recurrent must be one matrix, got values of shape "
                    f"{recurrent.values.shape}: use jax.vmap"
                )
            expected = "a CSR matrix (gates * h, h)"
        else:
            self.recurrent = _array(operation, f"{side}recurrent", recurrent, 2)
            h, rows = self.recurrent.shape
            expected = "(h, gates * h), or a CSR matrix (gates * h, h)"
        if h == 0 or rows == 0 or rows % h:
            raise ValueError(
                f"{operation}: {side}recurrent must be {expected}, got shape "
                f"{tuple(self.recurrent.shape)}"
            )
        if width == 0 or width % h:
            raise ValueError(
                f"{operation}: the last dimension of {side}xs must be gates * h, for recurrent "
                f"weights of shape {tuple(self.recurrent.shape)} a multiple of {h}, got {width}"
            )
        self.h, self.gates, self.dtype = h, rows // h, self.xs.dtype
        self.input_gates = width // h
        leaves, self.tree = jax.tree.flatten(carry)
        if not leaves:
            raise ValueError(f"{operation}: {side}carry must have a leaf: the state, its last one")
        self.carry = [_array(operation, f"{side}carry", x, 2) for x in leaves]
        for x in self.carry:
            if x.shape != (b, h):
                raise ValueError(
                    f"{operation}: the leaves of {side}carry must have shape (B, h) = {(b, h)}, "
                    f"got {x.shape}"
                )
        values = self.recurrent.values if self.sparse else self.recurrent
        arguments.check_floating(operation, recurrent=values)
        arguments.check_floating(operation, xs=self.xs)
        for i, x in enumerate(self.carry):
            arguments.check_floating(operation, **{f"carry {i}": x})
        self.bias: Any = None
        if bias is not None:
            self.bias = _array(operation, f"{side}recurrent_bias", bias, 1)
            arguments.check_floating(operation, recurrent_bias=self.bias)
            if self.bias.shape != (rows,):
                raise ValueError(
                    f"{operation}: {side}recurrent_bias must have shape {(rows,)}, "
                    f"got {self.bias.shape}"
                )
        own, self.parameter_tree = jax.tree.flatten(parameters)
        self.parameters = [_array(operation, f"{side}parameters", x, 1) for x in own]
        for x in self.parameters:
            arguments.check_floating(operation, parameters=x)
            if x.shape != (h,):
                raise ValueError(
                    f"{operation}: the leaves of {side}parameters must have shape (h,) = {(h,)}, "
                    f"got {x.shape}"
                )
        self.cell = cell

    @property
    def form(self) -> Any:
        """What the two directions of one scan must share."""
        carries = [x.dtype.name for x in self.carry]
        values = self.recurrent.values if self.sparse else self.recurrent
        return (
            self.xs.shape,
            self.h,
            self.gates,
            self.dtype.name,
            str(self.tree),
            carries,
            "CSR" if self.sparse else "dense",
            values.dtype.name,
            self.bias is not None,
            str(self.parameter_tree),
        )


def _array(operation: str, name: str, x: Any, rank: int) -> jax.Array:
    array = arguments.as_array(operation, name, x, rank)
    if array.ndim != rank:
        raise ValueError(
            f"{operation}: {name} must have {rank} dimensions, got shape {array.shape}: "
            "use jax.vmap"
        )
    return array


def _check_precision(operation: str, precision: Any) -> Any:
    if isinstance(precision, jax.lax.Precision):
        return precision
    if not isinstance(precision, str | None) or precision not in _PRECISIONS:
        raise ValueError(
            f"{operation}: precision must be a jax.lax.Precision or one of {list(_PRECISIONS)}, "
            f"got {precision!r}"
        )
    return _PRECISIONS[precision]


_POINTWISE = (
    "A cell is pointwise: it is traced with scalars, and later called with arrays of one shape; "
    "each element of what it returns is computed from the elements at its own place. What mixes "
    "units (a product, a mean, a normalisation) can be done before the scan, to xs, or in a "
    "jax.lax.scan; arrays that a cell learns are its parameters="
)


@functools.lru_cache(maxsize=1024)
def _checked_step(
    operation: str,
    cell: Cell,
    gates: tuple[int, int],
    tree: Any,
    parameters: Any,
    biased: bool,
    masked: bool,
) -> CellStep:
    """The step of a cell that can run in a kernel, or TypeError or ValueError.

    Args:
        operation: what errors name.
        cell: the cell.
        gates: those of x and of r.
        tree: the structure of the carry.
        parameters: that of the parameters, or None.
        biased: whether there is a recurrent bias.
        masked: whether rows have lengths.
    """
    name = f"{operation}: the cell {name_of(cell)}"
    try:
        has_y = _check_scalars(name, cell, gates, tree, parameters)
        step = CellStep(cell, *gates, tree, parameters, biased, masked, has_y)
        printer.check_pointwise(step.jaxpr, operation)
        _check_arrays(name, cell, gates, tree, parameters)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{error}. {_POINTWISE}") from error.__cause__
    return step


def _arguments(gates: tuple[int, int], tree: Any, parameters: Any, shape: tuple[int, ...]) -> Any:
    """What a cell is called with, of one shape."""
    array = jax.ShapeDtypeStruct(shape, jnp.float32)
    trees = [tree] if parameters is None else [tree, parameters]
    return [
        *((array,) * count for count in gates),
        *(jax.tree.unflatten(t, [array] * t.num_leaves) for t in trees),
    ]


def _check_scalars(
    name: str, cell: Cell, gates: tuple[int, int], tree: Any, parameters: Any
) -> bool:
    """Raises TypeError or ValueError unless a cell can be called with scalars; whether it has y."""
    of_x, of_r = gates
    try:
        results = jax.eval_shape(cell, *_arguments(gates, tree, parameters, ()))
    except Exception as error:
        count = f"{of_x} gates" if of_x == of_r else f"{of_x} gates of x and {of_r} of r"
        own = "" if parameters is None else f", parameters {parameters}"
        raise ValueError(
            f"{name} fails with {count} (the last dimension of xs over h) and a carry "
            f"{tree}{own}: {error}"
        ) from error
    if not isinstance(results, tuple) or len(results) != 2:
        raise TypeError(f"{name} must return (carry, y), got {type(results).__name__}")
    if jax.tree.structure(results[0]) != tree:
        raise TypeError(
            f"{name} must return a carry like the one it takes, {tree}, "
            f"got {jax.tree.structure(results[0])}"
        )
    has_y = results[1] is not None
    if has_y and not jax.tree_util.treedef_is_leaf(jax.tree.structure(results[1])):
        raise TypeError(
            f"{name} must return one array as y, or None, got {jax.tree.structure(results[1])}"
        )
    for x in jax.tree.leaves(results):
        if x.shape != () or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} must be pointwise: of scalars it made {x}")
    return has_y


def _check_arrays(
    name: str, cell: Cell, gates: tuple[int, int], tree: Any, parameters: Any
) -> None:
    """Raises ValueError for a cell that does more to arrays than to each of their elements.

    Of a scalar alone a mean, say, can't be told from what it is taken of.
    """
    shape = (2, 3)
    try:
        jaxpr = jax.make_jaxpr(cell)(*_arguments(gates, tree, parameters, shape))
    except Exception as error:
        raise ValueError(
            f"{name} must be pointwise: it takes scalars, but with arrays it fails: {error}"
        ) from error

    def check(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            inner = [p for p in equation.params.values() if isinstance(p, ClosedJaxpr | Jaxpr)]
            for p in inner:
                check(p.jaxpr if isinstance(p, ClosedJaxpr) else p)
            taken, made = ({v.aval.shape for v in vs} for vs in (equation.invars, equation.outvars))
            if not inner and shape in taken and made != {shape}:
                raise ValueError(
                    f"{name} must be pointwise, but it uses {equation.primitive.name!r}, which "
                    "mixes the elements of an array"
                )

    check(jaxpr.jaxpr)


def _stacked(parts: list[Any]) -> Any:
    """Arrays of every direction, (directions, ...)."""
    return jnp.expand_dims(parts[0], 0) if len(parts) == 1 else jnp.stack(parts)


def _stacked_patterns(topologies: list[Topology]) -> list[Any]:
    """The operands of several patterns of one shape, padded to as many entries."""
    nse = max(t.nse for t in topologies)
    operands = [t.padded(nse).operands() for t in topologies]
    return [_stacked(list(arrays)) for arrays in zip(*operands, strict=True)]


def _run(
    operation: str,
    directions: list[_Direction],
    reversed: tuple[bool, ...],
    seq_lengths: Any,
    precision: Any,
    recompute: bool,
    implementation: str | None,
    variant: str | None,
) -> list[tuple[Any, jax.Array | None]]:
    backend.check_implementation(operation, implementation)
    precision = _check_precision(operation, precision)
    one = directions[0]
    length, b, _ = one.xs.shape
    h, gates = one.h, one.gates
    mask = _mask(operation, seq_lengths, length, b)
    step = _checked_step(
        operation,
        one.cell,
        (one.input_gates, gates),
        one.tree,
        one.parameter_tree if one.parameters else None,
        one.bias is not None,
        mask is not None,
    )
    if length == 0 or b == 0:
        return [
            (jax.tree.unflatten(d.tree, d.carry), d.xs[:, :, :h] if step.has_y else None)
            for d in directions
        ]

    layouts: list[ScanLayout | None] = [None] * len(directions)
    if one.sparse and implementation in (None, "cuda"):
        layouts = _layouts([d.recurrent for d in directions], gates, b, one.dtype, variant)
        if len({x and x.forms for x in layouts}) > 1:
            # Kernels of different forms: each direction is a scan of its own.
            return [
                result
                for d, backwards in zip(directions, reversed, strict=True)
                for result in _run(
                    operation,
                    [d],
                    (backwards,),
                    seq_lengths,
                    precision,
                    recompute,
                    implementation,
                    variant,
                )
            ]
    accumulator = accumulator_dtype(one.dtype)
    inputs = [_stacked([d.xs.reshape(length, b, one.input_gates, h) for d in directions])]
    spans = ["tbh"]
    if one.bias is not None:
        # The kernels take the dtype of xs and float32.
        wide = promoted(one.bias.dtype, one.dtype)
        inputs.append(_stacked([d.bias.astype(wide).reshape(1, 1, gates, h) for d in directions]))
        spans.append("h")
    if one.parameters:
        wide = promoted(*(x.dtype for x in one.parameters), one.dtype)
        every = [jnp.stack([x.astype(wide) for x in d.parameters]) for d in directions]
        inputs.append(_stacked([jnp.expand_dims(x, (0, 1)) for x in every]))
        spans.append("h")
    if mask is not None:
        inputs.append(_stacked([mask.astype(one.dtype).reshape(length, b, 1, 1)] * len(directions)))
        spans.append("tb")
    forms: tuple[SparseForm, ...] = ()
    if one.sparse:
        topologies = [d.recurrent.topology for d in directions]
        weights = (
            _stacked(_padded_values([d.recurrent for d in directions])),
            *_stacked_patterns(topologies),
        )
        made = [x for x in layouts if x is not None]
        if made:
            forms = made[0].forms
            weights = (
                *weights,
                _stacked([x.words for x in made]),
                _stacked([x.transposed_words for x in made]),
            )
    else:
        weights = (_stacked([d.recurrent for d in directions]),)
    carries = tuple(
        _stacked([x.astype(accumulator) for x in leaves])
        for leaves in zip(*(d.carry for d in directions), strict=True)
    )
    state = _stacked([d.carry[-1].astype(one.dtype) for d in directions])
    _, last, ys = scan_bind(
        Operands(weights, jnp.expand_dims(state, -2), carries, tuple(inputs)),
        step=step,
        sparse=one.sparse,
        forms=forms,
        transposed=False,
        reversed=reversed,
        length=length,
        spans=tuple(spans),
        precision=precision,
        recompute=bool(recompute),
        implementation=implementation,
        variant=variant,
    )
    return [
        (
            jax.tree.unflatten(
                d.tree, [c[i].astype(x.dtype) for c, x in zip(last, d.carry, strict=True)]
            ),
            ys[0][i, :, :, 0] if step.has_y else None,
        )
        for i, d in enumerate(directions)
    ]


def _layouts(
    matrices: list[CSR], gates: int, batch: int, dtype: Any, variant: str | None
) -> list[ScanLayout | None]:
    """Where matrices lie on chip, if that is known or can be; side by side if they fit so."""
    topologies, weight_dtype = [m.topology for m in matrices], matrices[0].dtype
    given: list[Any] = [t.layouts.get(ScanLayouts.name) for t in topologies]
    if has_gpu() and isinstance(batch, int) and all(map(can_be_laid_out, topologies)):
        # One that was made for another batch is made anew, unless it is asked for.
        given = [x if x and (variant or suits(x, batch, dtype)) else None for x in given]
        device = present_device()
        if len(matrices) > 1 and not any(given):
            made = lay_out_side_by_side(topologies, gates, batch, dtype, weight_dtype, device)
            if made is not None:
                return list(made)
        for i, t in enumerate(topologies):
            layout = given[i] or lay_out(t, gates, batch, dtype, device)
            given[i] = layout if isinstance(layout, ScanLayout) else None
    if len(matrices) > 1 and all(given):
        return list(of_one_form(given) or given)
    return given


def _padded_values(matrices: list[CSR]) -> list[jax.Array]:
    nse = max(m.nse for m in matrices)
    return [jnp.pad(m.values, (0, nse - m.nse)) for m in matrices]


def _mask(operation: str, seq_lengths: Any, length: int, b: int) -> Any:
    """Which steps count, (T, B), or None if all do."""
    if seq_lengths is None:
        return None
    lengths = _array(operation, "seq_lengths", seq_lengths, 1)
    if lengths.shape != (b,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"{operation}: seq_lengths must be {b} integers, got {lengths.dtype} of shape "
            f"{lengths.shape}"
        )
    # Of any width: neither may T wrap in their dtype, nor they in int32.
    longest = min(jnp.iinfo(lengths.dtype).max, jnp.iinfo(jnp.int32).max)
    lengths = jnp.clip(lengths, 0, int(longest)).astype(jnp.int32)
    return jnp.arange(length, dtype=jnp.int32)[:, None] < lengths[None]
