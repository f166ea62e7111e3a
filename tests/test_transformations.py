"""Every operation under every transformation of JAX."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import PLATFORM
from jax.experimental import jet
from jax.test_util import check_grads

from jaxsparse import (
    CSR,
    Topology,
    depthwise_conv,
    reduce_rows,
    sddmm,
    sparse_attention,
    sparse_softmax,
    spmm,
)
from jaxsparse.ops.multiply import multiply

IMPLEMENTATIONS = ["xla", PLATFORM]


def pattern(m, k, density=0.4, seed=0, padding=2):
    mask = np.random.default_rng(seed).random((m, k)) < density
    mask[m // 2] = False
    return Topology.from_mask(mask, nse=int(mask.sum()) + padding)


TOPOLOGY = pattern(5, 6)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


# name -> (function of floating operands, their shapes). Each is differentiated in all of them.
def functions(implementation):
    def product(left, transpose, values, x, **options):
        return multiply(
            "spmm",
            CSR(values, TOPOLOGY),
            x,
            transpose=transpose,
            dense_on_left=left,
            implementation=implementation,
            **options,
        )

    nse, (m, k) = TOPOLOGY.nse, TOPOLOGY.shape
    return {
        "spmm": (functools.partial(product, False, False), [(nse,), (k, 3)]),
        "spmm_transposed": (functools.partial(product, False, True), [(nse,), (m, 3)]),
        "dense_on_left": (functools.partial(product, True, True), [(nse,), (3, m)]),
        "dense_on_left_transposed": (functools.partial(product, True, False), [(nse,), (3, k)]),
        "bias": (lambda v, x, b: product(False, False, v, x, bias=b), [(nse,), (k, 3), (m,)]),
        "gelu": (
            lambda v, x, b: product(False, False, v, x, bias=b, activation="gelu"),
            [(nse,), (k, 3), (m,)],
        ),
        "left_gelu": (
            lambda v, x, b: product(True, True, v, x, bias=b, activation="gelu"),
            [(nse,), (3, m), (k,)],
        ),
        "sddmm": (
            lambda x, y: sddmm(x, y, TOPOLOGY, implementation=implementation).values,
            [(m, 3), (k, 3)],
        ),
        "sddmm_scaled": (
            lambda x, y, s: sddmm(x, y, TOPOLOGY, scale_by=s, implementation=implementation).values,
            [(m, 3), (k, 3), (nse,)],
        ),
        "sparse_softmax": (
            lambda v: (
                sparse_softmax(CSR(v, TOPOLOGY), scale=0.7, implementation=implementation).values
            ),
            [(nse,)],
        ),
        "reduce_rows": (
            lambda v: jnp.stack(
                [
                    jnp.nan_to_num(reduce_rows(v, TOPOLOGY, by, implementation=implementation))
                    for by in ("max", "logsumexp")
                ]
            ),
            [(nse,)],
        ),
        "sparse_attention": (
            lambda q, k, v: sparse_attention(q, k, v, TOPOLOGY, implementation=implementation),
            [(1, m, 2, 3), (1, k, 1, 3), (1, k, 1, 3)],
        ),
        "depthwise_conv": (
            lambda x, w, b: depthwise_conv(
                x, w, bias=b, activation="gelu", stride=2, implementation=implementation
            ),
            [(2, 1, 3, 4), (2, 3, 3), (2,)],
        ),
    }


NAMES = list(functions("xla"))


def case(name, implementation=PLATFORM, dtype=jnp.float32):
    function, shapes = functions(implementation)[name]
    return function, [normal(i, *shape).astype(dtype) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_derivatives(name, implementation):
    # Derivatives bind primitives of the same implementation, so the first one meets all that plain
    # jnp has. Order 3 for one function of each kind, in the mode that differentiates and transposes
    # by turns: all orders of modes would be eight programs more. Three times forward is test_jet.
    with jax.enable_x64(True):
        function, operands = case(name, implementation, jnp.float64)
        function = jax.jit(function)
        order = 1 if implementation == "xla" else 2
        check_grads(function, operands, order, modes=("fwd", "rev"), eps=1e-4)
        if implementation != "xla" and name in ("spmm", "gelu", "sparse_softmax"):
            check_grads(function, operands, 3, modes=("rev",), eps=1e-4)


@pytest.mark.parametrize("name", ["spmm", "gelu", "sddmm_scaled", "sparse_softmax"])
def test_jacobians_agree(name):
    function, operands = case(name)
    every = tuple(range(len(operands)))
    forward = jax.jit(jax.jacfwd(function, every))(*operands)
    reverse = jax.jit(jax.jacrev(function, every))(*operands)
    for a, b in zip(forward, reverse, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    scalar = lambda *xs: jnp.sum(function(*xs) ** 2)  # noqa: E731
    hessian = jax.jit(jax.hessian(scalar))(*operands)
    np.testing.assert_allclose(
        hessian, jax.jit(jax.jacrev(jax.grad(scalar)))(*operands), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("name", NAMES)
def test_linearize_and_transpose(name):
    function, operands = case(name)
    tangents = [normal(10 + i, *x.shape).astype(x.dtype) for i, x in enumerate(operands)]
    out = jax.eval_shape(function, *operands)
    ct = normal(20, *out.shape).astype(out.dtype)

    @jax.jit
    def run(operands, tangents, ct):
        out, linear = jax.linearize(function, *operands)
        pulled = jax.linear_transpose(linear, *tangents)(ct)
        return out, linear(*tangents), pulled, jax.jvp(function, operands, tangents)

    out, along, pulled, (expected, tangent) = run(tuple(operands), tuple(tangents), ct)
    np.testing.assert_allclose(out, expected, rtol=1e-5)
    np.testing.assert_allclose(along, tangent, rtol=1e-4, atol=1e-5)
    # <ct, J t> = <J^T ct, t>
    left = np.vdot(ct, tangent)
    right = sum(np.vdot(p, t) for p, t in zip(pulled, tangents, strict=True))
    np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_of_padding_is_zero(name):
    function, operands = case(name)
    gradients = jax.grad(lambda *xs: jnp.sum(jnp.sin(function(*xs))), tuple(range(len(operands))))(
        *operands
    )
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        if gradient.shape == (TOPOLOGY.nse,):
            assert np.all(gradient[TOPOLOGY.nnz :] == 0) and np.any(gradient != 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_vmap(name, implementation):
    function, operands = case(name, implementation)
    operands, scales = [*map(np.asarray, operands)], (1, 2, -1)

    @jax.jit
    def mapped(operands, stacked):
        """The results where one operand has a batch, for each of them."""
        results = []
        for i, xs in enumerate(stacked):
            axes = [(0, -1)[i % 2] if j == i else None for j in range(len(operands))]
            results.append(
                jax.vmap(function, axes, out_axes=1)(*operands[:i], xs, *operands[i + 1 :])
            )
        return results

    one = jax.jit(function)
    stacked = [
        np.stack([scale * x for scale in scales], (0, -1)[i % 2]) for i, x in enumerate(operands)
    ]
    for i, out in enumerate(mapped(operands, stacked)):
        for j, scale in enumerate(scales):
            expected = one(*operands[:i], scale * operands[i], *operands[i + 1 :])
            np.testing.assert_allclose(out[:, j], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.smoke
def test_nested_vmap_with_patterns():
    """Two levels: patterns vary along one, dense operands along the other; gradients too."""
    rng = np.random.default_rng(0)
    masks = rng.random((3, 5, 6)) < 0.4
    topologies = Topology.from_mask(masks)
    values = jnp.asarray(rng.standard_normal((3, topologies.nse)), jnp.float32)
    x = jnp.asarray(rng.standard_normal((2, 6, 4)), jnp.float32)

    def loss(v, topology, x):
        scores = sparse_softmax(CSR(v, topology))
        return jnp.sum(jnp.tanh(spmm(scores, x))) + jnp.sum(
            sddmm(spmm(scores, x), x, topology).values ** 2
        )

    gradient = jax.grad(loss, (0, 2))
    inner = jax.vmap(gradient, (None, None, 0))
    dv, dx = jax.jit(jax.vmap(inner, (0, 0, None)))(values, topologies, x)
    for i, j in np.ndindex(3, 2):
        one = Topology.from_mask(masks[i], nse=topologies.nse)
        expected = gradient(values[i], one, x[j])
        np.testing.assert_allclose(dv[i, j], expected[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(dx[i, j], expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_jit_checkpoint_and_no_jit(name):
    function, operands = case(name)
    expected = function(*operands)
    np.testing.assert_allclose(jax.jit(function)(*operands), expected, rtol=1e-6)
    with jax.disable_jit():
        np.testing.assert_allclose(function(*operands), expected, rtol=1e-6)
    loss = lambda f, xs: jnp.sum(jnp.sin(f(*xs)))  # noqa: E731
    plain = jax.grad(lambda xs: loss(function, xs))(operands)
    saved = jax.jit(jax.grad(lambda xs: loss(jax.checkpoint(function), xs)))(operands)
    for a, b in zip(plain, saved, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_no_implicit_promotion(name, implementation):
    """Nothing promotes dtypes or ranks, up to second derivatives and a batch of them."""
    function, operands = case(name, implementation, jnp.bfloat16)
    every = tuple(range(len(operands)))

    def curvature(*operands):
        slope = lambda *xs: jnp.sum(jax.jvp(function, xs, xs)[1].astype(jnp.float32))  # noqa: E731
        return jax.grad(slope, every)(*operands)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jax.jit(jax.vmap(curvature, (0, *[None] * len(every[1:])))).lower(
            jnp.stack([operands[0]] * 2), *operands[1:]
        )


@pytest.mark.parametrize("name", ["bias", "gelu", "sddmm_scaled", "sparse_softmax"])
def test_jet(name):
    """Taylor series of operands to those of results, as derivatives along the curve give them."""
    with jax.enable_x64(True):
        function, operands = case(name, dtype=jnp.float64)
        series = [[normal(10 * i + j, *x.shape) for j in range(3)] for i, x in enumerate(operands)]
        out, terms = jax.jit(lambda xs, cs: jet.jet(function, xs, cs))(operands, series)

        def along(t):
            return function(
                *(
                    x + t * (c + t / 2 * (d + t / 3 * e))
                    for x, (c, d, e) in zip(operands, series, strict=True)
                )
            )

        @jax.jit
        def derivatives(t):
            orders = [along]
            for _ in terms:
                orders.append(jax.jacfwd(orders[-1]))
            return [function(t) for function in orders]

        for got, expected in zip((out, *terms), derivatives(0.0), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


def test_control_flow():
    square = pattern(6, 6, padding=0)
    a = CSR(normal(0, square.nse).astype(jnp.float32) / 4, square)
    x = normal(1, 6, 2).astype(jnp.float32)

    def scanned(a, x):
        return jax.lax.scan(lambda c, _: (jnp.tanh(a @ c), c), x, None, length=4)[0]

    def looped(a, x):
        return jax.lax.fori_loop(0, 4, lambda _, c: jnp.tanh(a @ c), x)

    def branched(a, x):
        return jax.lax.cond(x[0, 0] > 100, lambda: x, lambda: scanned(a, x))

    expected = x
    for _ in range(4):
        expected = jnp.tanh(a @ expected)
    for function in (scanned, looped, branched):
        np.testing.assert_allclose(jax.jit(function)(a, x), expected, rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda v, x: scanned(CSR(v, square), x).sum(), (0, 1)))(a.values, x)

    def unrolled(v, x):
        for _ in range(4):
            x = jnp.tanh(CSR(v, square) @ x)
        return x.sum()

    for g, e in zip(gradient, jax.grad(unrolled, (0, 1))(a.values, x), strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-6)


def test_a_loop_that_stacks_and_reads_a_result_has_one_kernel():
    square = pattern(64, 64, padding=0)
    values, x = normal(0, 3, square.nse).astype(jnp.float32), normal(1, 64, 32).astype(jnp.float32)

    def layer(x, values):
        y = CSR(values, square) @ x
        return jnp.tanh(y), y

    program = jax.jit(lambda x, values: jax.lax.scan(layer, x, values)).lower(x, values).compile()
    assert program.as_text().count('custom_call_target="jaxsparse_spmm') == 1


def test_integer_leaves_get_float0():
    a = CSR(jnp.ones(TOPOLOGY.nse), TOPOLOGY)
    gradient = jax.grad(lambda a: jnp.sum(a @ jnp.ones((6, 2))), allow_int=True)(a)
    assert gradient.topology.row_offsets.dtype == jax.dtypes.float0
    np.testing.assert_array_equal(gradient.values[: TOPOLOGY.nnz], 2)


def test_topology_built_in_the_program():
    """A pattern that depends on traced data, differentiated through."""
    dense = normal(3, 5, 6).astype(jnp.float32)

    @jax.jit
    def loss(dense, x):
        topology = Topology.from_mask(jnp.abs(dense) > 0.5, nse=30)
        return jnp.sum(
            jnp.sin(CSR.fromdense(dense, jnp.abs(dense) > 0.5, nse=30) @ x)
        ), topology.nnz

    def reference(dense, x):
        return jnp.sum(jnp.sin(jnp.where(jnp.abs(dense) > 0.5, dense, 0) @ x))

    x = normal(4, 6, 3).astype(jnp.float32)
    (value, nnz), gradient = jax.value_and_grad(loss, has_aux=True)(dense, x)
    assert nnz == np.sum(np.abs(dense) > 0.5)
    np.testing.assert_allclose(value, reference(dense, x), rtol=1e-5)
    np.testing.assert_allclose(gradient, jax.grad(reference)(dense, x), rtol=1e-4, atol=1e-6)


def test_mixed_precision_gradients():
    """bfloat16 operands with a float32 result: gradients have the operands' dtype, float32 sums."""
    v, x = normal(5, TOPOLOGY.nse).astype(jnp.bfloat16), normal(6, 6, 40).astype(jnp.bfloat16)

    def loss(v, x):
        out = spmm(CSR(v, TOPOLOGY), x, preferred_element_type=jnp.float32)
        return jnp.sum(out**2)

    dv, dx = jax.jit(jax.grad(loss, (0, 1)))(v, x)
    assert dv.dtype == dx.dtype == jnp.bfloat16
    ev, ex = jax.grad(loss, (0, 1))(v.astype(jnp.float32), x.astype(jnp.float32))
    np.testing.assert_allclose(dv.astype(jnp.float32), ev, rtol=2**-8, atol=1e-4)
    np.testing.assert_allclose(dx.astype(jnp.float32), ex, rtol=2**-8, atol=1e-4)
