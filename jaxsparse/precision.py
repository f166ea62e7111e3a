"""What products are computed in, and when they are rounded.

Between the sums of a product and a result, tangent or gradient of 16 bits everything is float32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


def accumulator_dtype(*dtypes: Any) -> Any:
    """What sums of such numbers are taken in: float32, or float64 if one of them is.

    Not by `jnp.promote_types`, which ``jax.numpy_dtype_promotion("strict")`` makes raise.
    """
    wide = jnp.dtype(jnp.float64)
    return wide if wide in map(jnp.dtype, dtypes) else jnp.dtype(jnp.float32)


def promoted(*dtypes: Any) -> Any:
    """The dtype that holds all numbers of these, also where JAX is set to promote none unasked."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)


def common_dtype(a: Any, b: Any) -> Any:
    """What numbers of two dtypes are multiplied in."""
    return a if a == b else accumulator_dtype(a, b)


def unrounded(params: dict[str, Any]) -> dict[str, Any]:
    """Params of a product that is rounded only after more was added to it or done with it.

    Its cotangent is as wide as its sums; what was meant to be the result's dtype is what the
    cotangent is rounded to before it is an operand of further products.
    """
    dtype = params["out_dtype"]
    wide = accumulator_dtype(dtype)
    if wide == dtype:
        return params
    return {**params, "out_dtype": wide, "cotangent_dtype": dtype}


def cotangent_params(
    cotangent: jax.Array, operand: Any, batch_rank: int, **params: Any
) -> dict[str, Any]:
    """Params of the product that answers an undefined operand's cotangent.

    It is rounded here unless `primitive.define_transpose` sums it over batch dimensions.
    """
    params = {**params, "out_dtype": common_dtype(cotangent.dtype, operand.aval.dtype)}
    summed = operand.aval.shape[:batch_rank] != cotangent.shape[:batch_rank]
    return unrounded(params) if summed else params
