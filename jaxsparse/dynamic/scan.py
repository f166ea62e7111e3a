"""Scans over graphs: the public function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse import backend
from jaxsparse.dynamic.arguments import Arguments, checked_arguments, stacked_weights
from jaxsparse.dynamic.cell_checks import checked_step
from jaxsparse.dynamic.primitive import Operands, scan_bind
from jaxsparse.dynamic.primitive.operands import FULL
from jaxsparse.dynamic.script import Script
from jaxsparse.precision import accumulator_dtype, promoted
from jaxsparse.recurrent.arguments import check_precision
from jaxsparse.recurrent.run import wide_leaves

OPERATION = "dynamic.scan"


def scan(
    cell: Any,
    weights: Any,
    carry: Any,
    script: Script,
    xs: Any = None,
    *,
    bias: Any = None,
    precision: Any = None,
    recompute: bool = False,
    implementation: str | None = None,
    variant: str | None = None,
) -> Any:
    r"""Runs a cell over the rows of graphs, children before their parents.

    .. math:: c_v = \operatorname{cell}\bigl(x_v,\; \sum_k h_{v,k} W_k + b,\;
        (c_{v,1}, \ldots, c_{v,K})\bigr)

    where :math:`c_{v,k}` is the carry of the k-th child of row v, zeros if there is none, and
    :math:`h_{v,k}`, the state that the product takes, its last leaf. A graph is any without cycles:
    a chain, a tree, or one whose rows have several parents. It is an operand, a script that
    `dynamic.pack` makes: another batch of graphs compiles nothing anew while its form is the same.

    Sums, products, carries and the cell are computed in float32 (in float64 for float64 states);
    what the product takes is rounded to the dtype of ``xs``, or of the last leaf of ``carry`` where
    there are no ``xs``.

    Differentiable to any order, forward and in reverse: the tangent of a scan is a scan of the same
    script by the same weights, its transpose runs from the roots to the leaves by the transposed
    weights. A gradient keeps the products and the carries of children that the cell's derivative
    reads, in the dtype of the states, leaves of the carry that have a wider one in float32. The
    gradient of the weights is one product over all rows after the scan.

    Args:
        cell: made by `dynamic.cell` or `dynamic.chain`. Rows of several kinds: a tuple of one cell
            for each, which have one structure of carries; then ``weights`` and ``bias`` are tuples,
            too. A cell that takes fewer children than others takes those in the first slots.
        weights: ``(K h, P h)``: row ``k h + i`` is what unit i of child k is multiplied by, columns
            are the P products, h side by side; or a CSR matrix ``(P h, K h)``, which is kept in
            dense form. None for a cell without products, which reads no more of its children than
            their carries: r is ``()``.
        carry: carries of the leaves, a pytree of arrays ``(leaves, h)``; its leaves keep their
            dtypes outside.
        script: one batch of graphs.
        xs: pre-activations of rows that have inputs ``(inputs, G h)``, in the script's order, the
            input's bias included: float32, float64, bfloat16 or float16. Of other rows x is zeros.
        bias: ``(P h,)``, added to the products.
        precision: of float32 products: None or HIGHEST for exact multiply-adds; DEFAULT, HIGH or
            "tensorfloat32" allow tensor cores with shorter factors.
        recompute: saves memory in a gradient: products are not kept but computed again, those of
            all rows in one product.
        implementation: "xla", a loop of XLA over tiles; "cuda", one launch on a GPU of compute
            capability 9.0, of a script whose tiles have 8 rows, as `Layout.teams` cuts them; where
            its kernels don't take a scan, that is an error. None: what is predicted to be faster.
        variant: the name of a kernel variant to force.

    Returns:
        The carries of the computed rows, in the structure of ``carry``: ``(tiles * width, h)``
        each, 0 where a row is padding. `Script.roots` and `Script.in_input_order` pick from them.

    Raises:
        TypeError: for operands that are no arrays or not of these dtypes, a cell or a script that
            is none.
        ValueError: for shapes that don't fit, options that don't exist, a cell for another number
            of children or kinds than the script has, and cells that are not pointwise or use what
            can't run in a kernel, naming it.

    Method: Khorasani et al. 2018, "In-Register Parameter Caching for Dynamic Neural Nets with
    Virtual Persistent Processor Specialization", whose scripts these are; as a primitive with its
    own derivatives, `recurrent.scan` over graphs.

    The sums of trees, each row adding up its children:

    >>> from jaxsparse import dynamic
    >>> @dynamic.cell(children=2)
    ... def add(x, r, children):
    ...     return r[0]
    >>> trees = dynamic.Graphs.from_brackets("(0 (0 a) (0 (0 b) (0 c))) (0 (0 b) (0 b))")
    >>> script = dynamic.pack(trees, [0, 1], dynamic.Layout())
    >>> numbers = jnp.array([[1.0], [2.0], [3.0]])[script.leaf("word")]
    >>> sums = scan(add, jnp.ones((2, 1)), numbers, script)
    >>> script.roots(numbers, sums)[:2, 0]
    Array([6., 4.], dtype=float32)
    """
    backend.check_implementation(OPERATION, implementation)
    precision = check_precision(OPERATION, precision)
    given = checked_arguments(OPERATION, cell, weights, carry, script, xs, bias)
    operands, params = prepared(OPERATION, given, script)
    if script.form.computed == 0:
        return jax.tree.unflatten(
            given.tree, [jnp.zeros((0, given.h), x.dtype) for x in given.carry]
        )
    step = params["step"]
    results = scan_bind(
        operands,
        **params,
        emits=False,
        precision=precision,
        recompute=bool(recompute),
        implementation=implementation,
        variant=variant,
    )
    found = dict(zip(step.read, results.carries, strict=True))
    found |= {i: y[:, 0] for i, y in zip(step.kept, results.outputs, strict=True)}
    leaves = [found[i].astype(x.dtype) for i, x in enumerate(given.carry)]
    return jax.tree.unflatten(given.tree, leaves)


def prepared(operation: str, given: Arguments, script: Script) -> tuple[Operands, dict[str, Any]]:
    """The operands of a scan, and what the program is compiled for."""
    form, wide = script.form, wide_leaves(given.carry, given.dtype)
    step = checked_step(operation, given.of_cells, form.slots, given.tree, wide)
    accumulator = accumulator_dtype(given.dtype)
    inputs, spans = _inputs(given, script)
    operands = Operands(
        stacked_weights(given.kinds, form.slots, given.h, given.dtype),
        jnp.asarray(script.words),
        jnp.expand_dims(given.carry[-1].astype(given.dtype), 1),
        tuple(given.carry[i].astype(accumulator) for i in step.read),
        inputs,
    )
    return operands, {"step": step, "form": form, "dtype": given.dtype.name, "spans": spans}


def _inputs(given: Arguments, script: Script) -> tuple[tuple[jax.Array, ...], tuple[str, ...]]:
    """The inputs of the step, and the dimensions that each does not repeat along."""
    form, h = script.form, given.h
    inputs, spans = [], []
    if given.xs is not None:
        xs = given.xs.reshape(form.inputs, given.gates, h)
        rows = xs.at[script.input_places]
        inputs.append(rows.get(mode="fill", fill_value=0, unique_indices=True))
        spans.append(FULL)
    if len(given.kinds) > 1:
        kinds = jnp.repeat(jnp.asarray(script.kinds), form.width)
        # In 16 bits not all numbers are exact.
        kinds = kinds.astype(accumulator_dtype(given.dtype))
        inputs.append(kinds.reshape(form.computed, 1, 1))
        spans.append("r")
    for kind in given.kinds:
        if kind.bias is not None:
            bias = kind.bias.astype(promoted(kind.bias.dtype, given.dtype))
            inputs.append(bias.reshape(1, kind.products, h))
            spans.append("h")
    return tuple(inputs), tuple(spans)
