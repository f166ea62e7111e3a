"""The products of all rows at once.

They recompute products that were not kept, and their transpose is the gradient of the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxsparse.batching import over_batch
from jaxsparse.dynamic.form import Form
from jaxsparse.dynamic.script import Script
from jaxsparse.precision import accumulator_dtype
from jaxsparse.recurrent.products import product

_ONES = 8  # as few as tensor cores take: XLA makes a sum of a product by a single one


def child_rows(script: Script) -> Any:
    """The rows of children (rows, K), behind all rows where there is none."""
    form = script.form
    sources = script.sources.reshape(form.computed, form.slots)
    return jnp.where(sources < 0, form.rows, sources)


def products_of_rows(
    weights: Any,
    words: Any,
    states: Any,
    state: Any,
    params: dict[str, Any],
    bias: Any = None,
) -> tuple[Any, Any]:
    """What the products of every computed row are, and what is emitted to the given ones.

    Args:
        weights: ``(..., kinds, K h, P h)``.
        words: of the script, ``(..., words)``.
        states: of the computed rows, ``(..., rows, parts, h)``.
        state: of the given rows, ``(..., F, 1, h)``; None where the scan emits.
        params: of the scan.
        bias: ``(..., 1, P, h)``, added to the products of all rows, or None; of rows of one kind,
            where the scan gathers.

    Returns:
        ``(..., rows, P, h)`` and None where the scan gathers; ``(..., rows, 1, h)`` and
        ``(..., F, 1, h)``, in the dtype of sums, where it emits.
    """
    form, options = params["form"], {n: params[n] for n in ("precision", "dtype")}
    if params["emits"]:
        emit = functools.partial(_emitted, form=form, **options)
        rows = over_batch(emit, words.ndim - 1, weights, words, states)
        rows = jnp.expand_dims(rows, -2)
        computed = rows[..., form.leaves :, :, :]
        return computed.astype(params["dtype"]), rows[..., : form.leaves, :, :]
    gather = functools.partial(_gathered, form=form, **options)
    added = () if bias is None else (bias,)
    return over_batch(gather, words.ndim - 1, weights, words, states, state, *added), None


def bias_of_products(
    inputs: Sequence[Any], active: Sequence[int], params: dict[str, Any]
) -> int | None:
    """The active input that `products_of_rows` should take as bias, if the weights change, or None.

    Its gradient is the sum of the products' cotangents. In 16 bits, where a product has sums in
    float32, this is a few columns more of the product for the gradient of the weights, which reads
    the cotangents anyway: on a GPU they take less time than a sum by itself.
    """
    bias = params["step"].product_bias
    if bias not in active or params["emits"] or params["implementation"] == "xla":
        return None
    dtype, h = inputs[bias].dtype, inputs[bias].shape[-1]
    narrow = dtype.itemsize == 2 and dtype == params["dtype"]
    return bias if narrow and params["form"].slots * h % _ONES == 0 else None


def sum_of_rows(x: Any) -> Any:
    """The sum of (..., rows, parts, h) over all rows, (..., 1, parts, h), for a GPU.

    Of numbers in 16 bits it is a product by rows of ones, with sums in float32: XLA shares that out
    over the whole GPU, and adds up its parts in the kernel that takes the sum, where its own sum of
    long columns takes twice the time.
    """
    if x.dtype.itemsize != 2:
        return jnp.sum(x, -3, keepdims=True)
    *lead, rows, parts, h = x.shape
    ones = jnp.ones((_ONES, rows), x.dtype)
    wide = accumulator_dtype(x.dtype)
    sums = jnp.einsum(
        "mr,...rn->...mn", ones, x.reshape(*lead, rows, -1), preferred_element_type=wide
    )
    return sums[..., :1, :].reshape(*lead, 1, parts, h)


def _gathered(
    weights: Any,
    words: Any,
    states: Any,
    state: Any,
    bias: Any = None,
    *,
    form: Form,
    precision: Any,
    dtype: str,
) -> Any:
    script, h = Script(words, form), states.shape[-1]
    # The row behind all is that of a child that is not there.
    rows = jnp.pad(jnp.concatenate([state[:, 0], states[:, 0]]), [(0, 1), (0, 0)])
    children = rows.at[child_rows(script)].get(mode="promise_in_bounds")
    x = children.reshape(form.computed, -1)
    if bias is not None:
        # The bias is one more row of the weights, whose column of the states is 1. Columns are
        # added in blocks, in which XLA reads and writes several numbers at a time.
        blocks = x.reshape(form.computed, -1, _ONES)
        x = jnp.pad(blocks, [(0, 0), (0, 1), (0, 0)], constant_values=1).reshape(len(x), -1)
        row = bias.reshape(1, 1, -1).astype(weights.dtype)
        weights = jnp.concatenate([weights, jnp.pad(row, [(0, 0), (0, _ONES - 1), (0, 0)])], 1)
    return _by_kind(weights, x, script, False, precision, dtype).reshape(form.computed, -1, h)


def _emitted(
    weights: Any, words: Any, states: Any, *, form: Form, precision: Any, dtype: str
) -> Any:
    script, h = Script(words, form), states.shape[-1]
    x = states.reshape(form.computed, -1)
    wide = accumulator_dtype(jnp.dtype(dtype))
    z = _by_kind(weights, x, script, True, precision, dtype).astype(wide)
    sums = jnp.zeros((form.rows, h), wide)
    return sums.at[child_rows(script)].add(z.reshape(form.computed, form.slots, h), mode="drop")


def _by_kind(
    weights: Any, x: Any, script: Script, transposed: bool, precision: Any, dtype: str
) -> Any:
    """The product of each row by the weights of its kind, rounded to a dtype."""
    by = functools.partial(
        product,
        sparse=False,
        transposed=transposed,
        precision=precision,
        implementation=None,
        out_dtype=jnp.dtype(dtype),
    )
    if weights.shape[0] == 1:
        return by((weights[0],), x)
    kinds = jnp.repeat(script.kinds, script.form.width)[:, None]
    total = None
    for kind, w in enumerate(weights):
        # Chosen on both sides: rows of other kinds are in no sum of the gradient, NaN or not.
        own = kinds == kind
        z = jnp.where(own, by((w,), jnp.where(own, x, 0)), 0)
        total = z if total is None else total + z
    return total
