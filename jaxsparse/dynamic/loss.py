"""The loss of a net over graphs: the public function, and its derivative."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxsparse import backend
from jaxsparse.dynamic.arguments import checked_arguments
from jaxsparse.dynamic.heads import (
    checked_head,
    exact_unless,
    labels_of_rows,
    labels_offset,
    logits_of,
    losses_of,
    mean_of,
)
from jaxsparse.dynamic.loss_primitive import Operands, Results, loss_bind
from jaxsparse.dynamic.loss_primitive.plain import labelled_rows, states_by_scan
from jaxsparse.dynamic.loss_primitive.steps import steps_of
from jaxsparse.dynamic.primitive.operands import FULL
from jaxsparse.dynamic.primitive.row_products import (
    bias_of_products,
    products_of_rows,
    sum_of_rows,
)
from jaxsparse.dynamic.scan import prepared
from jaxsparse.dynamic.script import Script
from jaxsparse.precision import accumulator_dtype, promoted
from jaxsparse.recurrent.arguments import check_precision

OPERATION = "dynamic.loss"


def loss(
    cell: Any,
    weights: Any,
    carry: Any,
    script: Script,
    xs: Any = None,
    *,
    head: Any,
    bias: Any = None,
    precision: Any = None,
    implementation: str | None = None,
    variant: str | None = None,
) -> jax.Array:
    r"""The mean cross entropy of labelled rows, whose states `scan` makes.

    .. math:: \frac1{|L|} \sum_{v \in L} -\log \operatorname{softmax}(h_v V + c)_{\text{label}_v}

    where :math:`h_v` is the state of row v, a leaf or a computed row, rounded as `scan` rounds what
    products take, V and c are the head's weights and bias, and L are the rows that have labels:
    all those whose label is not -1, or the roots, where the labels are of graphs.

    The value is a scan, and a product over all of its rows. Its gradient is what this function is
    for: under ``jax.grad`` or ``jax.value_and_grad`` value and gradient can be one launch on a GPU,
    which makes heads as soon as there are states, and begins its way back at the roots as soon as
    these have heads. Behind it are products over all rows, for the gradients of both weights.

    Sums, products, carries, logits and losses are computed in float32 (in float64 for float64
    states). Differentiable to any order, forward and in reverse. A first derivative is the inner
    product of the gradient and a tangent; to derive it again is to derive two scans.

    Args:
        cell: as in `scan`.
        weights: ``(K h, P h)``, as in `scan`.
        carry: carries of the leaves, a pytree of arrays ``(leaves, h)``.
        script: one batch of graphs.
        xs: pre-activations of rows that have inputs, or None.
        head: a `SoftmaxHead`.
        bias: ``(P h,)``, added to the products.
        precision: of float32 products, as in `scan`.
        implementation: "xla", two loops of XLA over tiles and products; "cuda", one launch for
            value and gradient on a GPU of compute capability 9.0, of what team kernels take, of one
            kind of rows and a head whose weights have the states' dtype; where they don't take it,
            that is an error. None: what is predicted to be faster, the launch or two scans, each
            as `scan` runs it.
        variant: the name of a kernel variant to force.

    Returns:
        A number: float32, or float64 for float64 states. 0 if no row has a label, NaN if a label is
        no class.

    Raises:
        TypeError: as `scan`; for a head that is none, or labels that are no integers.
        ValueError: as `scan`; for weights of a head that are not (h, C) with C up to 64.
        KeyError: if the script has no such channel of rows or graphs.

    Method: Khorasani et al. 2018, "In-Register Parameter Caching for Dynamic Neural Nets with
    Virtual Persistent Processor Specialization", where they are one launch, too.

    >>> from jaxsparse import dynamic
    >>> @dynamic.cell(children=2)
    ... def add(x, r, children):
    ...     return jnp.tanh(r[0])
    >>> trees = dynamic.Graphs.from_brackets("(2 (0 a) (1 (0 b) (1 c))) (0 (0 b) (2 b))")
    >>> script = dynamic.pack(trees, [0, 1], dynamic.Layout())
    >>> words = jnp.ones((3, 4))[script.leaf("word")]
    >>> head = dynamic.SoftmaxHead(jnp.zeros((4, 3)))
    >>> value, gradient = jax.value_and_grad(
    ...     lambda head: loss(add, jnp.ones((8, 4)), words, script, head=head)
    ... )(head)
    >>> value, gradient.weights.shape
    (Array(1.0986123, dtype=float32), (4, 3))
    """
    backend.check_implementation(OPERATION, implementation)
    precision = check_precision(OPERATION, precision)
    given = checked_arguments(OPERATION, cell, weights, carry, script, xs, bias)
    head_weights, head_bias = checked_head(OPERATION, head, script, given.h)
    of_scan, params = prepared(OPERATION, given, script)
    wide = accumulator_dtype(given.dtype)
    options = {"precision": precision, "implementation": implementation, "variant": variant}
    params["labels_offset"] = labels_offset(script, head.label)
    operands = Operands(
        of_scan.weights,
        of_scan.words,
        labels_of_rows(script, head.label),
        head_weights,
        # In the states' dtype the kernel reads it as it is.
        head_bias if head_bias.dtype == given.dtype else head_bias.astype(wide),
        of_scan.state,
        of_scan.carries,
        of_scan.inputs,
    )
    if script.form.computed == 0:
        return _of_rows(labelled_rows(operands, of_scan.state[:0]), operands, precision)
    value: jax.Array = _mean({**params, **options}, operands)
    return value


def _of_rows(rows: Any, x: Operands, precision: Any) -> jax.Array:
    logits = logits_of(rows, x.head_weights, x.head_bias, precision)
    value: jax.Array = mean_of(losses_of(logits, x.labels), x.labels)
    return value


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _mean(params: dict[str, Any], x: Operands) -> jax.Array:
    """The loss by a scan, and a product over all of its rows."""
    return _of_rows(labelled_rows(x, states_by_scan(x, params)), x, params["precision"])


@functools.partial(_mean.defjvp, symbolic_zeros=True)
def _derivative(
    params: dict[str, Any], primals: tuple[Operands], tangents: tuple[Operands]
) -> tuple[Any, Any]:
    """The loss, and the inner product of its gradient and the tangents."""
    (x,), (dx,) = primals, tangents
    if not any(map(_moves, (dx.weights, dx.state, *dx.carries, *dx.inputs))):
        return _of_head(params, x, dx)
    active = tuple(i for i, t in enumerate(dx.inputs) if _moves(t))
    dtype = jnp.dtype(params["dtype"])
    params = {
        **params,
        "active": active,
        "wide": tuple(params["spans"][i] == FULL and x.inputs[i].dtype != dtype for i in active),
    }
    made = loss_bind(x, **params)
    terms = _inner_products(params, x, dx, made)
    total, count = made.totals[0], jnp.maximum(made.totals[1], 1)
    return total / count, functools.reduce(jnp.add, terms) / count


def _inner_products(
    params: dict[str, Any], x: Operands, dx: Operands, made: Results
) -> Iterator[jax.Array]:
    """Of the gradient of the sum of losses by each operand that moves, and the tangent of that."""
    steps = steps_of(params["step"], params["active"], params["wide"])
    wide = made.totals.dtype

    def inner(gradient: Any, tangent: Any) -> jax.Array:
        # A tangent repeats where its operand does.
        return jnp.sum(gradient.astype(wide) * tangent.astype(wide))

    by_products: dict[int, Any] = {}  # gradients of inputs that come with that of the weights
    if _moves(dx.weights):
        of_gather = {**params, "emits": False}
        bias = bias_of_products(x.inputs, params["active"], of_gather)
        moving = (x.weights,) if bias is None else (x.weights, x.inputs[bias])

        def products(weights: Any, bias: Any = None) -> Any:
            made_of, _ = products_of_rows(weights, x.words, made.states, x.state, of_gather, bias)
            return made_of

        gradient, *of_bias = jax.linear_transpose(products, *moving)(made.products)
        yield inner(gradient, dx.weights)
        if bias is not None:
            (by_products[bias],) = of_bias
    if _moves(dx.head_weights):
        yield inner(_of_head_weights(params, x, made), dx.head_weights)
    if _moves(dx.head_bias):
        yield inner(made.bias, dx.head_bias)
    if _moves(dx.state):
        yield inner(made.leaves + made.reached, dx.state)
    for gradient, tangent in zip(made.carries, dx.carries, strict=True):
        if _moves(tangent):
            yield inner(gradient, tangent)
    for i, place in zip(params["active"], steps.places, strict=True):
        gradient = made.products if place is None else made.outputs[place]
        if i in by_products:
            gradient = by_products[i]
        elif params["implementation"] != "xla" and "r" not in params["spans"][i]:
            gradient = sum_of_rows(gradient)
        yield inner(gradient, dx.inputs[i])


def _of_head_weights(params: dict[str, Any], x: Operands, made: Results) -> jax.Array:
    """The gradient of the sum of losses by the head's weights."""
    rows, dtype = labelled_rows(x, made.states), promoted(made.states.dtype, x.head_weights.dtype)
    # Gradients by logits are in float32. Where states have 16 bits, shorter factors do, which XLA
    # makes in the product's kernel; to round to 16 bits would be a kernel of its own.
    precision = exact_unless(params["precision"]) if dtype.itemsize > 2 else None
    return jnp.einsum(
        "nh,nc->hc",
        rows.astype(made.logits.dtype),
        made.logits,
        precision=precision,
        preferred_element_type=made.logits.dtype,
    )


def _of_head(params: dict[str, Any], x: Operands, dx: Operands) -> tuple[Any, Any]:
    """Where only the head moves, no gradient runs from the roots to the leaves."""
    rows = labelled_rows(x, states_by_scan(x, params))

    def value(weights: Any, bias: Any) -> jax.Array:
        moved = x._replace(head_weights=weights, head_bias=bias)
        return _of_rows(rows, moved, params["precision"])

    return jax.jvp(
        value,
        (x.head_weights, x.head_bias),
        tuple(
            t if _moves(t) else jnp.zeros(t.shape, t.dtype) for t in (dx.head_weights, dx.head_bias)
        ),
    )


def _moves(tangent: Any) -> bool:
    return not isinstance(tangent, SymbolicZero)
