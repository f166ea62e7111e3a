"""Functions of scores as such: which are the same, what explain says of them, what is refused."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_problems import operands, random_mask

from jaxsparse import (
    H200,
    BlockMask,
    Indexed,
    Topology,
    explain,
    masks,
    sparse_attention,
)
from jaxsparse.device import Device
from jaxsparse.ops import score_functions
from jaxsparse.ops.attention import attention_cotangent_p, attention_p
from jaxsparse.ops.sparse_attention import _attention
from jaxsparse.primitive import OPERATIONS, Fallback, choose, equations, typed_call

A100 = Device("NVIDIA A100", compute_capability=80, multiprocessors=108, shared_bytes=166912)


def _identity_with_slope(slope):
    """The score, whose derivative is said to be this."""

    @jax.custom_jvp
    def identity(s):
        return s

    identity.defjvp(lambda at, along: (identity(*at), slope * along[0]))
    return lambda s, row, column: identity(s)


def _identity_with_slope_backward(slope):
    @jax.custom_vjp
    def identity(s):
        return s

    identity.defvjp(lambda s: (s, None), lambda _, ct: (slope * ct,))
    return lambda s, row, column: identity(s)


def _by_inner_constant(number):
    constant = jnp.float32(number)
    inner = jax.jit(lambda s: s * constant)
    return lambda s, row, column: inner(s)


def _in_a_loop(number):
    constant = jnp.float32(number)
    return lambda s, row, column: jax.lax.fori_loop(0, 2, lambda i, s: s * constant, s)


@pytest.mark.parametrize(
    "made",
    [
        lambda number: lambda s, row, column: s * number,
        _by_inner_constant,
        _in_a_loop,
        _identity_with_slope,
        lambda number: lambda s, row, column: s * (row if number == 2 else column),
    ],
)
def test_functions_are_equal_by_what_they_compute(made):
    same, again, other = (
        score_functions._trace(made(x), jnp.float32, []) for x in (2.0, 2.0, -3.0)
    )
    assert same == again and hash(same) == hash(again)
    assert same != other


@pytest.mark.parametrize(
    "made, slope",
    [
        (_by_inner_constant, None),
        (_identity_with_slope, 1),
        (_identity_with_slope_backward, 1),
    ],
)
def test_functions_that_differ_are_not_taken_for_one_another(made, slope):
    """One after the other, each as a function of which nothing is nested."""
    q, k, v = operands(1, 20, 30, 2, 2, 8, 8, "float32")

    def gradient(score):
        return jax.grad(lambda q: jnp.sum(sparse_attention(q, k, v, score=score) ** 2))(q)

    for number in 2.0, -3.0:
        factor = number if slope is None else 1
        expected = gradient(lambda s, row, column, x=factor: x * s)
        expected *= 1 if slope is None else number
        np.testing.assert_allclose(gradient(made(number)), expected, rtol=1e-4, atol=1e-5)


def test_equal_functions_are_compiled_once():
    q, k, v = operands(1, 20, 30, 2, 2, 8, 8, "float32")

    def attend(cap):
        before = _attention._cache_size()
        sparse_attention(q, k, v, score=lambda s, row, column: cap * jnp.tanh(s / cap))
        return _attention._cache_size() - before

    assert [attend(cap) for cap in (2.25, 2.25, 3.25)] == [1, 0, 1]


def test_explain():
    x = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
    text = str(explain(functools.partial(sparse_attention, soft_cap=3.0), x, x, x, device=H200))
    assert "scores: <div, tanh, mul>" in text


def test_explain_says_what_lacks_kernels(monkeypatch):
    x = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
    topology = Topology.from_mask(random_mask((256, 256)))
    of = functools.partial(sparse_attention, mask=topology, soft_cap=3.0)
    monkeypatch.setattr("jaxsparse.ops.sparse_attention.block_mask", lambda mask: None)
    assert "kernels by rows of a pattern take no functions" in str(
        explain(of, x, x, x, device=H200)
    )


def test_variants_that_know_no_scores_refuse_them():
    """A kernel that ignored them would be wrong and silent."""
    topology = Topology.from_mask(random_mask((256, 256)))

    def gradient(q, k, v, **options):
        def loss(*xs):
            return jnp.sum(sparse_attention(*xs, topology, **options).astype(jnp.float32))

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    for dtype, expected in (jnp.bfloat16, {"tiles", "tiles_mma"}), (jnp.float32, set()):
        x = jax.ShapeDtypeStruct((1, 256, 4, 64), dtype)
        for options in {"soft_cap": 3.0}, {"dropout_key": jax.random.key(0), "dropout_rate": 0.1}:
            of = functools.partial(gradient, **options)
            calls = explain(of, x, x, x, device=H200)
            assert {call.operation for call in calls} >= {"attention", "attention_cotangent"}
            for call in calls:
                assert {name for name, _ in call.variants} == expected, call.operation


@pytest.mark.parametrize(
    "axes, by",
    [
        ("n", "tiles"),
        ("bt", "tiles"),
        ("nts", "tiles"),
        ("s", "tiles"),
        ("bns", "tiles"),
        ("d", "tiles"),
        ("bnd", "tiles"),
        ("ts", "plain"),
    ],
)
def test_which_gradients_have_kernels(axes, by):
    x, kv = (jax.ShapeDtypeStruct((1, 256, n, 64), jnp.bfloat16) for n in (4, 2))
    sizes = {"b": 1, "n": 4, "t": 256, "s": 256, "d": 511}
    array = jax.ShapeDtypeStruct([sizes[a] for a in axes], jnp.float32)

    def gradient(q, k, v, array):
        def loss(array):
            out = sparse_attention(q, k, v, bias=Indexed(array, axes))
            return jnp.sum(out.astype(jnp.float32))

        return jax.grad(loss)(array)

    text = str(explain(gradient, x, kv, kv, array, device=H200))
    assert by in text.splitlines()[-1]


def test_everything_at_once_has_kernels():
    """Operands of all kinds, offsets and dropout are told apart by their names."""
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    sizes = {"n": 4, "t": 256, "s": 256, "d": 511}
    arrays = [jax.ShapeDtypeStruct([sizes[a] for a in axes], jnp.float32) for axes in sizes]
    begin = jax.ShapeDtypeStruct((2,), jnp.int32)

    def gradient(x, begin, *arrays):
        def loss(*arrays):
            out = sparse_attention(
                x,
                x,
                x,
                masks.causal(),
                score=lambda s, row, column, n, t, s_, d: s * n + t + s_ + d + column,
                operands=dict(zip(("n", "t", "s_", "d"), map(Indexed, arrays, sizes), strict=True)),
                query_offset=begin,
                soft_cap=2.0,
                dropout_key=jax.random.key(0),
                dropout_rate=0.5,
            )
            return jnp.sum(out.astype(jnp.float32))

        return jax.grad(loss, range(4))(*arrays)

    calls = explain(gradient, x, begin, *arrays, device=H200)
    assert {(call.operation, call.variant) for call in calls} >= {
        ("attention", "tiles"),
        ("attention_cotangent", "tiles"),
    }


def _gradient_by_distance(x, table, mask):
    def loss(table):
        out = sparse_attention(x, x, x, mask, bias=Indexed(table, "nd"))
        return jnp.sum(out.astype(jnp.float32))

    return jax.grad(loss)(table)


@pytest.mark.parametrize(("length", "has_room"), [(1 << 15, True), (1 << 17, False)])
def test_sums_of_so_many_tiles_have_no_kernel(length, has_room):
    """Each of a head has 1 KB, and there are 524,800 of a causal head at the greater length."""
    x = jax.ShapeDtypeStruct((1, length, 4, 64), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((4, 2 * length - 1), jnp.float32)
    mask = BlockMask.from_mask(masks.causal(), (length, length))
    call = explain(_gradient_by_distance, x, table, mask, device=H200)[-1]
    assert call.operation == "attention_cotangent" and (call.variant == "tiles") == has_room
    assert has_room or "or sums by columns or distances: these need" in str(call)


def test_programs_for_any_batch_sum_by_distances_in_plain_jax():
    """How much a kernel needs for its sums is not known there."""
    (b,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((b, 256, 2, 64), jnp.bfloat16)
    mask = BlockMask.from_mask(masks.causal(), (256, 256))
    table = jax.ShapeDtypeStruct((2, 511), jnp.float32)
    jaxpr = jax.make_jaxpr(functools.partial(_gradient_by_distance, mask=mask))(x, table).jaxpr
    found = {eqn.primitive: eqn for eqn in equations(jaxpr)}
    made = {
        p: choose(
            typed_call(OPERATIONS[p], found[p].params, [v.aval for v in found[p].invars]), H200
        )
        for p in (attention_p, attention_cotangent_p)
    }
    assert not isinstance(made[attention_p], Fallback)
    assert isinstance(made[attention_cotangent_p], Fallback)


@pytest.mark.parametrize(
    ("device", "h", "axes", "by"),
    [
        (A100, 64, "n", "tiles_mma"),
        (A100, 64, "nts", "tiles_mma"),
        (A100, 100, "t", "padded"),
        (A100, 64, "nd", "plain"),
        (H200, 192, "n", "tiles_mma"),
        (H200, 192, "ns", "plain"),
        (H200, 264, "n", "plain"),
    ],
)
def test_which_gradients_have_kernels_by_single_warps(device, h, axes, by):
    """Those of rows and of single scores, on GPUs before Hopper and of large heads."""
    x = jax.ShapeDtypeStruct((1, 256, 4, h), jnp.float16)
    sizes = {"n": 4, "t": 256, "s": 256, "d": 511}
    array = jax.ShapeDtypeStruct([sizes[a] for a in axes], jnp.float32)

    def gradient(x, array):
        def loss(array):
            return jnp.sum(sparse_attention(x, x, x, bias=Indexed(array, axes), soft_cap=9.0))

        return jax.grad(loss)(array)

    assert by in str(explain(gradient, x, array, device=device)).splitlines()[-1]


def test_errors():
    q, k, v = operands(2, 6, 8, 4, 2, 3, 5, "float32")
    table = jnp.ones(20)
    slope = {"slope": Indexed(jnp.ones(4), "n")}

    def first(s, *others, **named):
        return s

    def check(error, message, **options):
        with pytest.raises(error, match=message):
            sparse_attention(q, k, v, **options)

    check(ValueError, "score .* Indexed", score=lambda s, row, column: s + table[row - column])
    check(ValueError, "score .* Indexed", score=lambda s, row, column: s + jnp.sum(table))
    check(TypeError, "must return one floating number", score=lambda s, row, column: row < column)
    check(TypeError, "operand 'a' must be Indexed", score=min, operands={"a": table})
    check(ValueError, "operands are those of score", operands=slope)
    check(TypeError, "operands must be a mapping .* got list", score=first, operands=[1])
    check(TypeError, "score must be a function, got int", score=3)
    check(TypeError, "must return one floating number, got NoneType", score=lambda *xs: None)
    check(TypeError, r"score\(s, row, column\), .* missing", score=lambda s, row, column, x: s)
    row = {"row": Indexed(jnp.ones(4), "n")}
    check(
        TypeError,
        r"score\(s, row, column, row=row\), .* multiple values for argument 'row'",
        score=lambda s, row, column: s,
        operands=row,
    )
    check(TypeError, "axes of bias must be a string, got int", bias=Indexed(jnp.ones(4), 3))
    for name in "soft_cap", "bias", "sinks", "query_offset", "dropout_rate":
        check(TypeError, f"{name} must be an array, got str", **{name: "x"})
    check(TypeError, "dropout_rate must be a real number, got .*(2,)", dropout_rate=jnp.ones(2))
    for name, shape in ("soft_cap", ()), ("bias", (1, 6, 8)), ("sinks", (4,)):
        array = jnp.full(shape, 5j)
        check(TypeError, f"{name} must be floating.*, got complex64", **{name: array})
    check(TypeError, "bias must be floating, integer or bool", bias=Indexed(jnp.full(4, 5j), "n"))
    check(
        ValueError,
        r"slope must have shape \(8,\) for its axes 's', got \(4,\)",
        score=lambda s, row, column, slope: s,
        operands={"slope": Indexed(jnp.ones(4), "s")},
    )
    check(
        ValueError,
        "axes of bias must be some of",
        bias=Indexed(jnp.ones((6, 13)), "td"),
    )
    check(ValueError, r"bias must be an Indexed or have shape", bias=jnp.ones((6, 8)))
    for cap in 0.0, -1, jnp.float32(-1), np.float32("nan"):
        check(ValueError, "soft_cap must be greater than 0", soft_cap=cap)
    check(TypeError, "query_offset must be integers", query_offset=1.5)
    for begin in 2**40, -(2**31) - 1, np.asarray([0, 2**31]):
        check(ValueError, "query_offset must be in the range of int32", query_offset=begin)
    check(ValueError, r"key_offset must have shape \(\) or \(2,\)", key_offset=jnp.ones(3, int))

    regrouped = BlockMask.from_mask(masks.strided(2), (6, 8), regroup=2)
    by_distance = Indexed(jnp.ones(13), "d")
    check(ValueError, "regrouped mask goes without operands", mask=regrouped, bias=by_distance)

    @jax.jit
    def closes_over(x):
        return sparse_attention(q, k, v, score=lambda s, row, column: s * x)

    with pytest.raises(ValueError, match="closes over a traced value"):
        closes_over(2.0)
