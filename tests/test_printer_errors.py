"""Functions that can't be printed: what is refused, and why."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from printer_cases import body, f32, i32, traced

from jaxsparse.codegen.check import check_pointwise
from jaxsparse.recurrent.printer import print_step

KEY = jax.random.key(0)


def test_unsupported_primitives_are_named():
    def function(x):
        return lax.lgamma(x) + jax.jit(lambda y: lax.digamma(y) + lax.lgamma(y))(x)

    with pytest.raises(ValueError) as caught:
        check_pointwise(traced(function), "recurrent.scan")
    message = str(caught.value)
    assert message.startswith(
        "recurrent.scan: the cell uses 'digamma' and 'lgamma', which can't run inside the kernel; "
        "supported are abs, acos, "
    )
    assert " tanh, " in message and "pjit" not in message

    with pytest.raises(ValueError, match="uses 'bessel_i0e', 'digamma' and 'lgamma', which"):
        check_pointwise(traced(lambda x: function(x) + lax.bessel_i0e(x)), "f")


@pytest.mark.parametrize(
    "function, message",
    [
        (
            lambda x: jnp.sum(jnp.stack([x, x, x])),
            r"shape \(3,\), where all must be scalars, in .*'reduce_sum'",
        ),
        (lambda x: x * np.ones(2, np.float32).sum() + jnp.arange(4.0)[2], "shape"),
        (lambda x: jnp.ones(5) * x, r"result 0 of the cell has shape \(5,\), expected \(\)"),
        (lambda x: x.astype(i32), "result 0 of the cell is int32, expected float32"),
        (lambda x: x.astype(jnp.int8).astype(f32), "dtype int8, .* in 'convert_element_type'"),
        (lambda x: lax.integer_pow(x.astype(i32), 3).astype(f32), "of int32, .*'integer_pow'"),
        (lambda x: lax.bitcast_convert_type(x, i32).astype(jnp.complex64).real, "complex64"),
        (lambda x: lax.cond(x > 0, lambda: lax.lgamma(x), lambda: x), "uses 'lgamma'"),
        (
            lambda x: lax.cond(x > 0, lambda: jnp.sum(jnp.stack([x, x])), lambda: x),
            r"shape \(2,\), .*'reduce_sum'",
        ),
        (lambda x: lax.while_loop(lambda y: y < 3, lambda y: y + 1, x), "uses 'while'"),
        (lambda x: jax.random.uniform(KEY) * x, "a random key"),
        (lambda x: (jax.debug.callback(print, x), x)[1], "uses 'debug_callback'"),
    ],
)
def test_refused(function, message):
    jaxpr = traced(function)
    for call in (check_pointwise, lambda j, n: body(j, products=1, states=1)):
        with pytest.raises(ValueError, match=message):
            call(jaxpr, "recurrent.scan")


def test_arguments_are_checked():
    with pytest.raises(ValueError, match=r"input 1 of the cell has shape \(2,\)"):
        check_pointwise(traced(lambda x, y: x, f32(0), jnp.ones(2)), "f")
    with pytest.raises(ValueError, match="input 0 of the cell is bfloat16, expected float32"):
        check_pointwise(traced(lambda x: x.astype(f32), jnp.bfloat16(0)), "f")
    with pytest.raises(ValueError, match="takes 1 values and returns 1, expected 2 and 1"):
        body(traced(jnp.sin), products=2, states=1)
    with pytest.raises(ValueError, match="a C\\+\\+ identifier, got 'a b'"):
        print_step(
            traced(jnp.sin), name="a b", products=1, states=1, carries=0, inputs=0, outputs=0
        )


def test_closing_over_a_traced_value_is_refused():
    def outer(y):
        jaxpr = jax.make_jaxpr(lambda x: x * y)(f32(0))
        check_pointwise(jaxpr, "recurrent.scan")
        return y

    with pytest.raises(ValueError, match=r"recurrent\.scan: the cell closes over a traced value"):
        jax.jit(outer)(f32(1))
