"""Printed steps: their text, and which of their operands they use."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.interpreters import partial_eval
from printer_cases import body, f32, traced
from printer_cells import CELLS

from jaxsparse.codegen.flatten import same_variable, uses
from jaxsparse.recurrent.printer import print_step


def test_text():
    text = print_step(
        traced(lambda p, c, x, m: (p * x + 0.5, jnp.where(m, c, p), c > x), 0.0, 0.0, 0.0, False),
        name="Step",
        products=1,
        states=1,
        carries=1,
        inputs=2,
        outputs=1,
    )
    assert (
        text
        == """\
struct Step {
  static constexpr int kProducts = 1, kStates = 1, kCarries = 1, kInputs = 2, kOutputs = 1;

  __device__ __forceinline__ static void Apply(const float* product, float* carry,
                                               const float* input, float* state, float* output) {
    namespace ops = jaxsparse::pointwise;
    const float p0 = product[0];
    const float c0 = carry[0];
    const float i0 = input[0];
    const bool i1 = input[1] != 0.0f;
    const float v0 = p0 * i0;
    const float v1 = v0 + 0.5f;
    const float v2 = i1 ? c0 : p0;
    const bool v3 = c0 > i0;
    state[0] = v1;
    carry[0] = v2;
    output[0] = v3 ? 1.0f : 0.0f;
  }
};
"""
    )


def test_text_in_two_parts():
    """What needs inputs alone comes first; integers are made where they are read."""

    def function(p, c, x, y):
        unit = jnp.tanh(x)
        steps = jnp.int32(p) + jnp.int32(y)
        return p * unit * (1 - unit), jnp.where(x > y, c, p) + steps, y * y

    text = print_step(
        traced(function, *[f32(0)] * 4),
        name="Step",
        products=1,
        states=1,
        carries=1,
        inputs=2,
        outputs=1,
        prepares=True,
    )
    assert (
        text
        == """\
struct Step {
  static constexpr int kProducts = 1, kStates = 1, kCarries = 1, kInputs = 2, kOutputs = 1,
                       kPrepared = 5;

  __device__ __forceinline__ static void Prepare(const float* input, float* prepared) {
    namespace ops = jaxsparse::pointwise;
    const float i0 = input[0];
    const float i1 = input[1];
    const float v0 = ops::Tanh(i0);
    const float v1 = 1.0f - v0;
    const bool v2 = i0 > i1;
    const float v3 = i1 * i1;
    prepared[0] = i1;
    prepared[1] = v0;
    prepared[2] = v1;
    prepared[3] = v2 ? 1.0f : 0.0f;
    prepared[4] = v3;
  }

  __device__ __forceinline__ static void Finish(const float* product, float* carry,
                                                const float* prepared, float* state,
                                                float* output) {
    namespace ops = jaxsparse::pointwise;
    const float p0 = product[0];
    const float c0 = carry[0];
    const float r0 = prepared[0];
    const float r1 = prepared[1];
    const float r2 = prepared[2];
    const bool r3 = prepared[3] != 0.0f;
    const float r4 = prepared[4];
    const int v0 = ops::ToInt(p0);
    const int v1 = ops::ToInt(r0);
    const int v2 = ops::Add(v0, v1);
    const float v3 = p0 * r1;
    const float v4 = v3 * r2;
    const float v5 = r3 ? c0 : p0;
    const float v6 = static_cast<float>(v2);
    const float v7 = v5 + v6;
    state[0] = v4;
    carry[0] = v7;
    output[0] = r4;
  }
};
"""
    )


def test_equal_jaxprs_give_equal_text():
    def trace(wrap):
        function = wrap(lambda x: jnp.tanh(x) * jax.nn.relu(x) - 0.1)
        return body(traced(function), products=1, states=1)

    plain = trace(lambda f: lambda x: f(x))
    assert trace(lambda f: lambda x: f(x)) == plain
    # Calls leave no trace in it.
    assert trace(jax.jit) == trace(jax.checkpoint) == plain
    assert body(traced(lambda x: jnp.tanh(x) - 0.1), products=1, states=1) != plain


def test_nothing_dead_is_printed():
    def function(p, c0, c1, x):
        lax.sort(jnp.stack([p, c0]))  # what is dead need not be supported
        unused = jax.jit(lambda y: (jnp.sin(y), jnp.cos(y)))(c0)
        return unused[1], c0, p

    lines = body(traced(function, *[f32(0)] * 4), products=1, states=1, carries=2, inputs=1)
    assert lines == [
        "const float p0 = product[0];",
        "const float c0 = carry[0];",
        "const float v0 = cosf(c0);",
        "state[0] = v0;",
        "carry[1] = p0;",
    ]


def test_carries_are_read_before_they_are_written():
    lines = body(traced(lambda a, b: (b, a), f32(0), f32(0)), carries=2)
    assert lines == [
        "const float c0 = carry[0];",
        "const float c1 = carry[1];",
        "carry[0] = c1;",
        "carry[1] = c0;",
    ]


def test_constants_of_other_types_are_converted():
    with jax.enable_x64(True):  # where Python's integers are int64
        jaxpr = traced(lambda x: jnp.clip(x, -1, 2))
    assert body(jaxpr, products=1, states=1)[1:3] == [
        "const float v0 = ops::Max((-1.0f), p0);",
        "const float v1 = ops::Min(2.0f, v0);",
    ]


def test_constant_predicates_choose():
    def function(x):
        return lax.select_n(np.int32(1), x, x * 2, x * 3), jnp.where(True, x, 1), x

    lines = body(traced(function), products=1, states=3)
    assert lines == [
        "const float p0 = product[0];",
        "const float v0 = p0 * 2.0f;",
        "state[0] = v0;",
        "state[1] = p0;",
        "state[2] = p0;",
    ]


@pytest.mark.parametrize(
    "value, text",
    [
        (0.5, "0.5f"),
        (-2, "(-2.0f)"),
        (0.1, "0x1.99999ap-4f"),
        (-1e-45, "(-0x1p-149f)"),
        (-0.0, "(-0.0f)"),
        (-np.inf, "ops::FromBits(0xff800000u)"),
    ],
)
def test_literals(value, text):
    assert f"state[0] = {text};" in body(traced(lambda x: f32(value)), products=1, states=1)


def read_literal(text: str) -> np.float32:
    text = text.strip("()")
    if text.startswith("ops::FromBits"):
        return np.uint32(int(text[len("ops::FromBits") + 1 : -1], 16)).view(np.float32)
    assert text.endswith("f") and ("." in text or "p" in text)
    text = text[:-1]
    return np.float32(float.fromhex(text) if "x" in text else float(text))


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_literals_are_exact(bits):
    value = np.uint32(bits).view(np.float32)
    jaxpr = traced(lambda x: x * value)
    (line,) = [line for line in body(jaxpr, products=1, states=1) if "*" in line]
    literal = line.removeprefix("const float v0 = p0 * ").removesuffix(";")
    assert read_literal(literal).tobytes() == value.tobytes()


# What depends on what.


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_uses(cell):
    _, expected = partial_eval.dce_jaxpr(cell.jaxpr.jaxpr, [True] * len(cell.jaxpr.jaxpr.outvars))
    assert uses(cell.jaxpr) == list(expected)


def test_uses_what_the_derivative_needs():
    x = jax.ShapeDtypeStruct((), f32)
    tangent = jax.make_jaxpr(lambda a, b, t: jax.jvp(lambda a: jnp.sin(a) + b, (a,), (t,))[1])
    assert uses(tangent(x, x, x)) == [True, False, True]
    assert uses(traced(lambda x, y: (y, 1.0), f32(0), f32(0))) == [False, True]


def test_same_variable():
    def function(x, y):
        z = jax.jit(lambda x: x + 1)(x)
        copies = jax.jit(lambda z: (jnp.copy(z), lax.reshape(z, ())))(z)
        return z, *copies, x, x + 1, y, 2.0, lax.full_like(x, 2), 0.0, -0.0

    jaxpr = traced(function, f32(0), f32(0))
    same = {
        (i, j)
        for i, j in itertools.combinations(range(len(jaxpr.jaxpr.outvars)), 2)
        if same_variable(jaxpr, i, j)
    }
    assert same == {(0, 1), (0, 2), (1, 2), (6, 7)}
