"""Derivatives of a product with a fused epilogue, y = activation(product + bias)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad

from jaxsparse.ops.plain_products import ACTIVATIONS
from jaxsparse.precision import unrounded
from jaxsparse.primitive import bind


def multiplied(params: dict[str, Any]) -> dict[str, Any]:
    """As `unrounded`, of a product that is then multiplied by more than ones and zeros.

    So is its cotangent, which may leave float16's range and is not rounded to that.
    """
    wide = unrounded(params)
    return {**wide, "cotangent_dtype": None} if params["out_dtype"] == jnp.float16 else wide


def define_epilogue_jvp(
    primitive: Primitive,
    product: Primitive,
    linear: Callable[..., tuple[int, ...]],
    bias_axis: Callable[..., int],
) -> None:
    """The JVP of a primitive that is `product` with a bias, the last operand, and an activation.

    ``linear(**params)`` are the positions of the operands that the product is linear in, and
    ``bias_axis(**params)`` is the negative axis of the result that the bias stands along. The
    primitive's params are the product's and ``has_bias, activation, with_preactivation``.
    """

    def jvp(
        primals: Any,
        tangents: Any,
        *,
        has_bias: bool,
        activation: str | None,
        with_preactivation: bool,
        **params: Any,
    ) -> Any:
        # With z = A x + b, y = f(z):  dz = A(dv) x + A dx + db,  dy = f'(z) dz. The tangent is the
        # plain product.
        of_sums = multiplied(params) if activation == "gelu" else unrounded(params)
        of_epilogue = functools.partial(bind, primitive, *primals, has_bias=has_bias)
        if activation is None and not with_preactivation:
            z = y = of_epilogue(activation=None, with_preactivation=False, **params)[0]
        elif of_sums is params:
            y, z = of_epilogue(activation=activation, with_preactivation=True, **params)
        else:
            # A kernel would round z to 16 bits, and f'(z) needs its float32 sums.
            z = of_epilogue(activation=None, with_preactivation=False, **of_sums)[0]
            y = ACTIVATIONS[activation](z).astype(params["out_dtype"])
        bias = len(primals) - has_bias
        varying = [i for i in linear(**params) if type(tangents[i]) is not ad.Zero]
        bias_varies = has_bias and type(tangents[bias]) is not ad.Zero
        of_term = params if activation is None and len(varying) + bias_varies == 1 else of_sums
        of_term = {**of_term, "variant": None}
        terms = [
            bind(product, *primals[:i], tangents[i], *primals[i + 1 : bias], **of_term)[0]
            for i in varying
        ]
        if varying or bias_varies:
            dy, dz = _tangents(
                z,
                terms,
                tangents[bias] if bias_varies else None,
                activation=activation,
                bias_axis=bias_axis(**params),
                dtype=of_term["out_dtype"],
                out_dtype=y.dtype,
            )
        else:
            dy = dz = ad.Zero(jax.typeof(y).to_tangent_aval())
        return ([y, z.astype(y.dtype)], [dy, dz]) if with_preactivation else ([y], [dy])

    ad.primitive_jvps[primitive] = jvp


@functools.partial(jax.jit, static_argnames=("activation", "bias_axis", "dtype", "out_dtype"))
def _tangents(
    z: jax.Array,
    terms: list[jax.Array],
    bias: jax.Array | None,
    *,
    activation: str | None,
    bias_axis: int,
    dtype: Any,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """The tangents dy and dz, of terms of dz: one program where nothing is compiled around it."""
    if bias is not None:
        column = jnp.expand_dims(bias.astype(dtype), tuple(range(bias_axis + 1, 0)))
        column = jnp.expand_dims(column, tuple(range(z.ndim - column.ndim)))
        terms = [*terms, column + jnp.zeros_like(z, dtype)]
    dz = functools.reduce(jnp.add, terms)
    dy = jax.jvp(ACTIVATIONS[activation], (z.astype(dtype),), (dz,))[1]
    return dy.astype(out_dtype), dz.astype(out_dtype)
