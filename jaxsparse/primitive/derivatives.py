"""What derivative rules are made of."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad
from jax.sharding import NamedSharding

from jaxsparse.precision import unrounded
from jaxsparse.primitive.binding import bind


def define_multilinear_jvp(primitive: Primitive, linear: Callable[..., tuple[int, ...]]) -> None:
    """The JVP of a product that is linear in each of some operands: a sum of one call each.

    ``linear(**params)`` says which, by position. Terms of 16 bits are rounded when they are added
    up, for which ``out_dtype`` must be one of the params if there may be several.
    """

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        (result,) = bind(primitive, *primals, **params)
        varying = [i for i in linear(**params) if type(tangents[i]) is not ad.Zero]
        if not varying:
            return [result], [ad.Zero(jax.typeof(result).to_tangent_aval())]
        of_term = params if len(varying) == 1 else unrounded(params)
        terms = (
            bind(primitive, *primals[:i], tangents[i], *primals[i + 1 :], **of_term)[0]
            for i in varying
        )
        return [result], [functools.reduce(ad.add_tangents, terms).astype(result.dtype)]

    ad.primitive_jvps[primitive] = jvp


def define_transpose(primitive: Primitive, rule: Callable[..., tuple[int, jax.Array]]) -> None:
    """The transpose of an operation of one result that is linear in the one undefined operand.

    ``rule(cotangent, operands, **params)`` answers that operand's position and cotangent under the
    result's batch dimensions; here it is summed to the operand's own shape and dtype.
    """

    def transpose(cotangents: Any, *operands: Any, **params: Any) -> Any:
        answers: list[Any] = [None] * len(operands)
        if type(cotangents[0]) is ad.Zero:
            return answers
        position, cotangent = rule(cotangents[0], operands, **params)
        answers[position] = summed_to(operands[position].aval, cotangent)
        return answers

    ad.primitive_transposes[primitive] = transpose


def summed_to(aval: Any, cotangent: jax.Array) -> jax.Array:
    """A cotangent as its operand is: summed over batch dimensions in which that was broadcast."""
    summed = tuple(
        d for d, (a, b) in enumerate(zip(cotangent.shape, aval.shape, strict=True)) if a != b
    )
    if summed:
        cotangent = jnp.sum(cotangent, summed, keepdims=True)
    sharding = jax.typeof(cotangent).sharding
    if sharding.spec != aval.sharding.spec:
        # Another operand's batch was cut by explicit axes, this one's was not.
        own = NamedSharding(sharding.mesh, aval.sharding.spec)
        cotangent = jax.sharding.reshard(cotangent, own)
    return cotangent.astype(aval.dtype)


def undefined(operand: Any) -> bool:
    """Whether a transpose rule has to answer for this operand."""
    return bool(ad.is_undefined_primal(operand))


def taylor(primitive: Primitive, primals: Any, series: Any, **params: Any) -> Any:
    """The rule of `jax.experimental.jet`: Taylor coefficients of results along those of operands.

    They are derivatives along the curve, by the JVP, whose number doubles with each order.
    """

    def along(t: jax.Array) -> list[jax.Array]:
        powers = [t**k for k in range(1, len(series[0]) + 1)]
        operands = [
            x + sum(c * t_k.astype(x.dtype) for c, t_k in zip(terms, powers, strict=True))
            if jnp.issubdtype(x.dtype, jnp.floating)
            else x
            for x, terms in zip(primals, series, strict=True)
        ]
        return bind(primitive, *operands, **params)

    coefficients = []
    for order in range(len(series[0]) + 1):
        scale = 1 / math.factorial(order)
        coefficients.append([(x * scale).astype(x.dtype) for x in along(jnp.zeros(()))])
        along = functools.partial(_derivative, along)
    first, *rest = coefficients
    return first, [list(terms) for terms in zip(*rest, strict=True)]


def _derivative(function: Callable[..., Any], t: jax.Array) -> Any:
    return jax.jvp(function, (t,), (jnp.ones_like(t),))[1]
