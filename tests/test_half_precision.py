"""16-bit results and derivatives are float32's, rounded once: held against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import PLATFORM

from jaxsparse import CSR, Topology, sddmm, sparse_attention, sparse_softmax, spmm
from jaxsparse.ops.multiply import multiply

M, K, N, BATCH = 9, 11, 5, 3
MASK = np.random.default_rng(0).random((M, K)) < 0.5
MASK[4] = False
TOPOLOGY = Topology.from_mask(MASK)
ROWS, COLUMNS = np.nonzero(MASK)
NSE = len(ROWS)


def dense(values):
    return jnp.zeros((M, K), values.dtype).at[ROWS, COLUMNS].set(values)


def operand(dtype, z):
    """The argument, whose cotangent is rounded to a dtype if given, as an operand of products."""
    return z if dtype is None else with_rounded_cotangent(dtype, z)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_rounded_cotangent(dtype, z):
    return z


def rounded_to(dtype, x):
    """Rounds to a dtype's numbers. XLA may drop a conversion and its reverse, but not this."""
    return jax.lax.reduce_precision(x, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)


with_rounded_cotangent.defvjp(
    lambda dtype, z: (z, None),
    lambda dtype, _, ct: (rounded_to(dtype, ct),),
)


def dense_softmax(values, scale, narrow):
    z = jnp.where(MASK, dense(values) * scale, -1e300 if values.dtype == jnp.float64 else -1e30)
    return jax.nn.softmax(z, axis=-1)[ROWS, COLUMNS]


# name -> (the operation, the same of dense matrices, shapes of the operands). `narrow` is what
# cotangents that are operands of products are rounded to, or None.
OPERATIONS = {
    "gelu": (
        lambda v, x, b, **options: spmm(CSR(v, TOPOLOGY), x, bias=b, activation="gelu", **options),
        lambda v, x, b, narrow: jax.nn.gelu(operand(narrow, dense(v) @ x) + b[:, None]),
        [(NSE,), (K, N), (M,)],
    ),
    "relu, left": (
        lambda v, x, b, **options: multiply(
            "spmm",
            CSR(v, TOPOLOGY),
            x,
            transpose=False,
            dense_on_left=True,
            bias=b,
            activation="relu",
            **options,
        ),
        lambda v, x, b, narrow: jax.nn.relu(x @ dense(v).T + b),
        [(NSE,), (N, K), (M,)],
    ),
    "batch of x": (
        lambda v, x, **options: spmm(CSR(v, TOPOLOGY), x, **options),
        lambda v, x, narrow: dense(v) @ x,
        [(NSE,), (BATCH, K, N)],
    ),
    "scaled sddmm, batch of x": (
        lambda x, y, s, **options: sddmm(x, y, TOPOLOGY, scale_by=s, **options).values,
        lambda x, y, s, narrow: operand(narrow, (x @ y.T)[:, ROWS, COLUMNS]) * s,
        [(BATCH, M, N), (K, N), (NSE,)],
    ),
    "softmax": (
        lambda v, s, **options: sparse_softmax(CSR(v, TOPOLOGY), scale=s, **options).values,
        dense_softmax,
        [(NSE,), ()],
    ),
}


def derivatives(function, differentiated, operands, tangents, cotangent):
    """What is computed, its tangent, its gradients, and their tangents.

    `differentiated` is the function as its gradient sees it.
    """
    gradient = lambda *xs: jax.vjp(differentiated, *xs)[1](cotangent)  # noqa: E731
    out, tangent = jax.jvp(function, operands, tangents)
    first, second = jax.jvp(gradient, operands, tangents)
    return {
        "result": out,
        "tangent": tangent,
        **{f"gradient {i}": x for i, x in enumerate(first)},
        **{f"second derivative {i}": x for i, x in enumerate(second)},
    }


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_rounded_once(name, dtype):
    operation, of_dense, shapes = OPERATIONS[name]
    rng = np.random.default_rng(1)

    def draw(shape, most):
        """Of either sign, and sizes from 0.01 to the most."""
        size = np.exp(rng.uniform(np.log(0.01), np.log(most), shape))
        return jnp.asarray(size * rng.choice([-1, 1], shape), dtype)

    # float16's range is too small for products of its numbers: there these stay float32.
    narrow = dtype if dtype == jnp.bfloat16 else None
    plain, rounding = (functools.partial(of_dense, narrow=n) for n in (None, narrow))
    implementations = {
        name: functools.partial(operation, implementation=name) for name in ("xla", PLATFORM)
    }
    with jax.enable_x64(True):
        compiled = {
            name: jax.jit(functools.partial(derivatives, function, function))
            for name, function in implementations.items()
        }
        unrounded = jax.jit(functools.partial(derivatives, plain, plain))
        of_oracle = unrounded
        if narrow is not None:
            of_oracle = jax.jit(functools.partial(derivatives, plain, rounding))
        for most in (3, 1e3):
            operands, tangents = (tuple(draw(s, most) for s in shapes) for _ in range(2))
            cotangent = draw(jax.eval_shape(implementations["xla"], *operands).shape, 3)
            every = (operands, tangents, cotangent)
            exact, single = (
                of_oracle(*jax.tree.map(lambda x, to=to: x.astype(to), every))
                for to in (jnp.float64, jnp.float32)
            )
            # XLA leaves out the rounding of an operand where it is made a float32 again at once.
            wide = unrounded(*jax.tree.map(lambda x: x.astype(jnp.float64), every))
            for implementation, function in compiled.items():
                for kind, got in function(*every).items():
                    assert got.dtype == dtype
                    nearer = jnp.abs(wide[kind] - got) < jnp.abs(exact[kind] - got)
                    oracle = jnp.where(nearer, wide[kind], exact[kind])
                    where = f"{implementation}, {kind}, up to {most}"
                    check(where, got, oracle, off_in_float32(dtype, single[kind], exact[kind]))


def off_in_float32(dtype, single, exact):
    """How far off a dense program in float32 is at most, where the dtype has the result."""
    representable = np.isfinite(np.asarray(exact.astype(dtype), np.float64))
    single, exact = (np.asarray(x, np.float64)[representable] for x in (single, exact))
    return np.max(np.abs(single - exact))


def check(kind, got, exact, off):
    """Compares with the exact result, rounded once. `off`: of a dense program in float32."""
    rounded = np.asarray(exact.astype(got.dtype), np.float64)
    got, exact = (np.asarray(x, np.float64) for x in (got, exact))
    representable = np.isfinite(rounded)
    assert representable.any(), kind
    rounded, got, exact = (x[representable] for x in (rounded, got, exact))
    slack = 4 * off + 2e-6 * np.max(np.abs(exact))
    limit = 1.1 * np.abs(rounded - exact) + slack
    assert np.all(np.abs(got - exact) <= limit), (
        f"{kind}: {np.max(np.abs(got - exact) - limit):.2e} beyond what rounding once gives"
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_gradient_of_attention(dtype):
    """The softmax's derivative takes differences of like numbers: of these only out is rounded."""
    rng = np.random.default_rng(2)
    q, k, v, ct = (
        jnp.asarray(rng.standard_normal((1, n, 2, 8)) + offset, dtype)
        for n, offset in ((M, 0), (K, 0), (K, 30), (M, 0))
    )

    @jax.jit
    def of_dense(q, k, v, ct):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 8**-0.5
        weights = jax.nn.softmax(jnp.where(MASK, scores, -1e30), axis=-1)
        weights = jnp.where(MASK, weights, 0)
        out = rounded_to(dtype, jnp.einsum("bnts,bsnh->btnh", weights, v))
        sums = jnp.einsum("btnh,btnh->bnt", out, ct)[..., None]
        dp = weights * (jnp.einsum("btnh,bsnh->bnts", ct, v) - sums) * 8**-0.5
        return jnp.einsum("bnts,bsnh->btnh", dp, k), jnp.einsum("bnts,btnh->bsnh", dp, q)

    @jax.jit
    def gradient(q, k, v, ct):
        return jax.vjp(lambda q, k, v: sparse_attention(q, k, v, TOPOLOGY), q, k, v)[1](ct)[:2]

    with jax.enable_x64(True):
        got = gradient(q, k, v, ct)
        exact, single = (
            of_dense(*(x.astype(to) for x in (q, k, v, ct))) for to in (jnp.float64, jnp.float32)
        )
    for name, g, e, s in zip("qk", got, exact, single, strict=True):
        check(name, g, e, off_in_float32(dtype, s, e))


def test_gelu_far_out():
    """Powers of an argument that its formula holds overflow in float32, too."""
    z = jnp.array([-1e30, -1e9, -40, 0, 40, 1e9, 1e30], jnp.float32)
    identity = CSR.fromdense(np.eye(7, dtype=np.float32))
    gelu = lambda z: spmm(identity, z[:, None], activation="gelu")[:, 0]  # noqa: E731
    slope = lambda z: jax.jvp(gelu, (z,), (jnp.ones_like(z),))[1]  # noqa: E731
    curvature = jax.jvp(slope, (z,), (jnp.ones_like(z),))[1]
    np.testing.assert_array_equal(slope(z), [0, 0, 0, 0.5, 1, 1, 1])
    np.testing.assert_allclose(curvature, [0, 0, 0, np.sqrt(8 / np.pi) / 2, 0, 0, 0], rtol=1e-6)
