"""sparse_attention against dense attention."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import PLATFORM
from reference import attention

from jaxsparse import CSR, Topology, masks, sparse_attention
from jaxsparse.layouts.block_mask import block_mask_of


def operands(b, t, s, n, groups, h, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(b, t, n, h), (b, s, groups, h), (b, s, groups, h)]
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


@functools.partial(jax.jit, static_argnums=0)
def gradients_and_result(attend, *operands):
    """By the last three operands."""

    def loss(*operands):
        out = attend(*operands)
        return jnp.sum(jnp.sin(out)), out

    by = tuple(range(len(operands)))[-3:]
    return jax.grad(loss, by, has_aux=True)(*operands)


@pytest.mark.parametrize("implementation", ["xla", PLATFORM])
@pytest.mark.parametrize(
    "b, t, s, n, groups, h", [(2, 9, 9, 4, 4, 8), (1, 7, 13, 6, 2, 5), (3, 4, 5, 3, 1, 1)]
)
def test_against_dense(b, t, s, n, groups, h, implementation):
    q, k, v = operands(b, t, s, n, groups, h)
    mask = np.random.default_rng(1).random((t, s)) < 0.5
    mask[1] = False  # a query that sees nothing
    topology = Topology.from_mask(mask)
    out = jax.jit(
        lambda q, k, v: sparse_attention(q, k, v, topology, implementation=implementation)
    )(q, k, v)
    np.testing.assert_allclose(out, attention(q, k, v, mask), rtol=2e-5, atol=2e-6)
    assert np.all(out[:, 1] == 0)


@pytest.mark.smoke
def test_against_jax_and_its_gradient():
    q, k, v = operands(2, 11, 11, 4, 2, 8)
    mask = masks.causal() & (masks.band(3) | masks.strided(4))
    topology = Topology.from_mask(mask, (11, 11))
    dense_mask = jnp.asarray(mask(*np.ogrid[:11, :11]))

    def dense(q, k, v):
        with jax.default_matmul_precision("highest"):
            return jax.nn.dot_product_attention(q, k, v, mask=dense_mask)

    def sparse(q, k, v):
        return sparse_attention(q, k, v, topology)

    with jax.default_matmul_precision("highest"):
        (*gradients,), (*results,) = zip(
            *(gradients_and_result(f, q, k, v) for f in (sparse, dense)), strict=True
        )
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_pattern_per_head():
    q, k, v = operands(2, 6, 8, 4, 2, 3)
    mask = np.random.default_rng(2).random((4, 6, 8)) < 0.5
    topology = Topology.from_mask(mask)
    out = sparse_attention(q, k, v, topology)
    np.testing.assert_allclose(out, attention(q, k, v, mask), rtol=2e-5, atol=2e-6)


def dense(mask, q, k, v):
    """With a mask for each sequence and head."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") / np.sqrt(q.shape[3])
    p = jnp.where(mask, jnp.exp(jnp.where(mask, scores, 0)), 0)
    p = p / jnp.maximum(jnp.sum(p, -1, keepdims=True), 1e-30)
    return jnp.einsum("bnts,bsnh->btnh", p, v, precision="highest")


@pytest.mark.parametrize("b, n, groups", [(4, 4, 2), (2, 3, 1)])
@pytest.mark.parametrize("axes", ["n", "1 n", "b 1", "b n", "1 1", "1"])
def test_axes_of_a_batch_of_patterns(axes, b, n, groups):
    q, k, v = operands(b, 6, 8, n, groups, 3)
    sizes = {"b": b, "n": n, "1": 1}
    mask = np.random.default_rng(3).random((*(sizes[axis] for axis in axes.split()), 6, 8)) < 0.5
    topology = Topology.from_mask(mask)

    def sparse(q, k, v):
        return sparse_attention(q, k, v, topology)

    if axes == "n" and b == n > 1:
        with pytest.raises(ValueError, match=r"ambiguous.*reshape_batch\(1, 4\) for one for each"):
            sparse(q, k, v)
        return
    gradients, out = gradients_and_result(sparse, q, k, v)
    every_mask = np.broadcast_to(mask, (b, n, 6, 8))
    expected_gradients, expected = gradients_and_result(dense, every_mask, q, k, v)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6)
    for actual, gradient in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(actual, gradient, rtol=1e-4, atol=1e-5)


def test_patterns_of_sequences_of_traced_lengths():
    """As many as there are heads: what was read as one for each head."""
    q, k, v = operands(4, 6, 6, 4, 2, 3)
    lengths = jnp.array([6, 2, 0, 5])

    @jax.jit
    def attend(q, k, v, lengths):
        def pattern(length):
            mask = masks.causal() & masks.padding(length)
            return Topology.from_mask(mask, (6, 6), nse=21)

        return sparse_attention(q, k, v, jax.vmap(pattern)(lengths).reshape_batch(4, 1))

    mask = np.tri(6, dtype=bool) & (np.arange(6) < np.asarray(lengths)[:, None, None, None])
    expected = attention(q, k, v, mask)
    np.testing.assert_allclose(attend(q, k, v, lengths), expected, rtol=2e-5, atol=2e-6)


def test_traced_dropout_rate():
    q, k, v = operands(2, 6, 6, 4, 2, 3)
    topology, key = Topology.from_mask(masks.causal(), (6, 6)), jax.random.key(0)

    def attend(rate, dropout_key=key):
        return sparse_attention(q, k, v, topology, dropout_rate=rate, dropout_key=dropout_key)

    for rate in 0.0, 0.4:
        np.testing.assert_allclose(jax.jit(attend)(rate), attend(rate), rtol=1e-6, atol=1e-7)
    assert not np.allclose(attend(0.4), attend(0.0))
    without_key = jax.jit(lambda rate: attend(rate, None))(0.4)
    np.testing.assert_allclose(without_key, attend(0.0), rtol=1e-6, atol=1e-7)


def test_dropout_that_is_the_same_for_all_heads():
    q, k, v = (jnp.tile(x, (2, 1, 4, 1)) for x in operands(1, 6, 6, 1, 1, 3))
    topology, key = Topology.from_mask(masks.causal(), (6, 6)), jax.random.key(0)
    for groups in (1, 2, 4):

        def attend(broadcast, k=k[:, :, :groups], v=v[:, :, :groups]):
            options = {"dropout_rate": 0.4, "dropout_key": key, "broadcast_dropout": broadcast}
            return np.asarray(sparse_attention(q, k, v, topology, **options))

        # Heads may differ in the last place: vectors begin at other places of memory.
        first = np.broadcast_to(attend(True)[:1, :, :1], q.shape)
        np.testing.assert_allclose(attend(True), first, rtol=1e-6)
        assert np.unique(attend(False)[:, 5, :, 0]).size > 1


def test_unbatched_scale_and_dtype():
    q, k, v = operands(1, 6, 6, 2, 2, 4, jnp.bfloat16)
    topology = Topology.from_mask(masks.causal(), (6, 6))
    out = sparse_attention(q[0], k[0], v[0], topology, scale=0.1)
    assert out.shape == (6, 2, 4) and out.dtype == jnp.bfloat16
    expected = attention(q, k, v, np.tril(np.ones((6, 6), bool)), scale=0.1)[0]
    np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=2**-6, atol=2**-7)


def test_memory_grows_with_stored_positions():
    """No array of T * T elements in the program, backward pass included."""
    t, h = 256, 4
    topology = Topology.from_mask(masks.band(3), (t, t))
    q, k, v = operands(1, t, t, 1, 1, h)
    loss = lambda q, k, v: jnp.sum(sparse_attention(q, k, v, topology) ** 2)  # noqa: E731
    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, k, v)
    largest = max(np.prod(var.aval.shape, dtype=int) for eqn in jaxpr.eqns for var in eqn.outvars)
    assert largest < t * t // 8


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"mask": Topology.from_mask(np.ones((6, 7), bool))},
            r"mask must have shape \(6, 8\)",
        ),
        ({"mask": Topology.from_mask(np.ones((3, 6, 8), bool))}, "a batch of 4"),
        (
            {"mask": Topology.from_mask(np.ones((2, 6, 8), bool))},
            r"write mask.reshape_batch\(2",
        ),
        ({"mask": Topology.from_mask(np.ones((4, 2, 6, 8), bool))}, r"got batch \(4, 2\)"),
        ({"mask": Topology.from_mask(np.ones((1, 2, 4, 6, 8), bool))}, "one for each sequence"),
        ({"key": jnp.ones((2, 8, 3, 5))}, "key and value must have shape"),
        (
            {"key": jnp.ones((2, 8, 3, 3)), "value": jnp.ones((2, 8, 3, 3))},
            "3 key heads must divide 4",
        ),
        ({"query": jnp.ones((6, 4, 3))}, "must all have shape"),
    ],
)
def test_errors(change, message):
    q, k, v = operands(2, 6, 8, 4, 2, 3)
    arguments = {
        "query": q,
        "key": k,
        "value": v,
        "mask": Topology.from_mask(np.ones((6, 8), bool)),
    }
    with pytest.raises(ValueError, match=message):
        sparse_attention(**{**arguments, **change})


@pytest.mark.parametrize(
    ("batch", "patterns", "options"),
    [
        ((2,), (), {}),
        ((), (3,), {}),
        ((2,), (2, 1), {"scale": np.float32(0.5), "dropout_rate": 0.25}),
    ],
)
def test_an_eager_call_compiles_one_program(batch, patterns, options, caplog):
    q = jnp.ones((*batch, 11, 3, 2), jnp.bfloat16)
    k = jnp.ones((*batch, 11, 1, 2))
    topology = Topology.from_mask(np.ones((*patterns, 11, 11), bool))
    key = jax.random.key(0)
    block_mask_of(topology)  # which is made once, on the host
    with jax.log_compiles():
        out = sparse_attention(q, k, k, topology, dropout_key=key, **options)
    assert out.shape == q.shape
    compiled = [m for r in caplog.records if (m := r.getMessage()).startswith("Compiling")]
    # JAX has a program that puts a number on a device, and compiles it once in a process.
    assert sum("jit(stage)" not in message for message in compiled) == 1


def test_dtypes():
    q, k, v = operands(1, 2, 2, 1, 1, 2)
    with pytest.raises(TypeError, match="an array for a mask must be bool, got float64"):
        sparse_attention(q, k, v, np.ones((2, 2)))
    out = sparse_attention(q.astype(int), k, v, Topology.from_mask(np.eye(2)))
    assert out.dtype == jnp.float32 and np.any(out != 0)  # they promote as in any product
    with jax.enable_x64(True):
        mixed = sparse_attention(q, k.astype(jnp.float64), v, Topology.from_mask(np.eye(2)))
        assert mixed.dtype == jnp.float64
    with pytest.raises(TypeError, match="needs float32"):
        sparse_attention(q.astype(int), k.astype(int), v.astype(int), Topology.from_mask(np.eye(2)))


@pytest.mark.parametrize(
    "scale, message",
    [
        (np.complex64(1j), "scale must be a real number or array, got complex64"),
        ("a", "scale must be an array, got str"),
    ],
)
def test_scales_that_are_none(scale, message):
    q, k, v = operands(1, 3, 3, 2, 2, 4)
    with pytest.raises(TypeError, match=f"sparse_attention: {message}"):
        sparse_attention(q, k, v, Topology.from_mask(np.eye(3, dtype=bool)), scale=scale)


def test_patterns_of_derivatives():
    """One that has its positions serves as it is; one that came out of a program does not."""
    q, k, v = operands(1, 3, 3, 2, 2, 4)
    a = CSR.fromdense(jnp.eye(3), nse=5)
    expected = sparse_attention(q, k, v, a.topology)
    np.testing.assert_array_equal(sparse_attention(q, k, v, a.topology.as_tangent()), expected)
    gradient = jax.jit(jax.grad(lambda a: jnp.sum(a.values**2), allow_int=True))(a)
    with pytest.raises(ValueError, match="out of a program as the pattern of a derivative"):
        sparse_attention(q, k, v, gradient.topology)
