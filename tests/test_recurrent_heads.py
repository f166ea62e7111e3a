"""Recurrent scans by block-diagonal weights, against those by the same matrix with its zeros."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from checks import DTYPES, EPSILON
from covering import combinations
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from recurrent_problems import CELLS, compiled, kernels, problem

from jaxsparse import H200, _ffi, explain, recurrent
from jaxsparse.recurrent.engine import EXPRESSION
from jaxsparse.recurrent.plan import NoPlan, Plan, ScanForm, make_plan

LENGTHS = jnp.array([0, 5, 3])  # of T = 5
leaves = jax.tree.leaves


def block_diagonal(weights):
    """(heads, d, gates * d) as (h, gates * h)."""
    heads, d, width = weights.shape
    h, gates = heads * d, width // d
    blocks = weights.reshape(heads, d, gates, d)
    matrix = jnp.zeros((heads, d, gates, heads, d), weights.dtype)
    k = jnp.arange(heads)
    return matrix.at[k, :, :, k].set(blocks).reshape(h, gates * h)


def heads_problem(name, heads=3, d=5, dtype=jnp.float32, **sizes):
    """A problem of h = heads * d units whose weights are blocks: those of one, and their turns."""
    p = problem(name, h=heads * d, dtype=dtype, **sizes)
    gates = CELLS[name][1]
    values = np.random.default_rng(1).standard_normal((heads, d, gates * d)) * (0.5 / np.sqrt(d))
    return p._replace(weights=jnp.asarray(values, dtype))


def oracle(p, weights, carry, xs, bias=None, **options):
    return reference.recurrent_scan(
        p.cell, block_diagonal(weights), carry, xs, recurrent_bias=bias, **options
    )


def total(results):
    """Of every result, weighted."""
    return sum(jnp.sum(x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)) for x in leaves(results))


def check(got, expected, dtype):
    limit = EPSILON[jnp.dtype(dtype).name]
    for a, b in zip(leaves(got), leaves(expected), strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=limit, atol=limit)


@combinations(
    "name, dtype, heads, d, reverse, lengths, biased",
    ["RNN", "SLSTM", "three_leaves"],
    DTYPES,
    [(3, 5), (5, 1), (1, 4)],
    [False, True],
    [None, LENGTHS],
    [False, True],
)
def test_values(name, dtype, heads, d, reverse, lengths, biased):
    with jax.enable_x64(True):
        p = heads_problem(name, heads, d, DTYPES[dtype])
        options = {"reverse": reverse, "seq_lengths": lengths}
        operands = p.weights, p.carry, p.xs, p.bias if biased else None
        got = compiled(functools.partial(p.scan, **options))(*operands)
        check(got, oracle(p, *operands, **options), dtype)


@pytest.mark.parametrize("name, recompute", [("LSTM", False), ("three_leaves", True)])
def test_gradients(name, recompute):
    with jax.enable_x64(True):
        p = heads_problem(name, 3, 4, jnp.float64)
        options = {"seq_lengths": LENGTHS, "reverse": recompute}

        def gradient(function):
            return compiled(jax.grad(lambda o: total(function(*o))))(p.operands)

        scan = functools.partial(p.scan, recompute=recompute, **options)
        got, expected = gradient(scan), gradient(functools.partial(oracle, p, **options))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10), got, expected)


def test_derivatives_by_differences():
    with jax.enable_x64(True):
        p = heads_problem("RNN", 2, 3, jnp.float64, T=3, B=2)
        check_grads(jax.jit(p.scan), p.operands, order=2, modes=("fwd", "rev"))


def test_one_head_is_a_dense_matrix_bitwise():
    p = problem("LSTM")

    def scan(weights, carry, xs, bias):
        return p.scan(weights, carry, xs, bias, seq_lengths=LENGTHS)

    def both(weights):
        operands = weights, *p.operands[1:]
        gradient = jax.grad(lambda *o: total(scan(*o)), (0, 1, 2, 3))
        return compiled(lambda o: (scan(*o), gradient(*o)))(operands)

    dense, heads = both(p.weights), both(p.weights[None])
    assert heads[1][0].shape == (1, *p.weights.shape)
    for a, b in zip(leaves(heads), leaves(dense), strict=True):
        np.testing.assert_array_equal(a.reshape(b.shape), b)


def test_both_directions():
    with jax.enable_x64(True):
        p = heads_problem("LSTM", dtype=jnp.float64)
        pair = lambda x: (x, jax.tree.map(jnp.negative, x))  # noqa: E731
        operands = pair(p.weights), pair(p.carry), pair(p.xs)

        def both(recurrent_, carry, xs):
            return recurrent.bidirectional_scan(
                p.cell, recurrent_, carry, xs, recurrent_bias=(p.bias, p.bias), seq_lengths=LENGTHS
            )

        def one_by_one(*operands):
            results = [
                oracle(p, *own, p.bias, reverse=reverse, seq_lengths=LENGTHS)
                for *own, reverse in zip(*operands, (False, True), strict=True)
            ]
            return tuple(zip(*results, strict=True))

        got, expected = (
            compiled(jax.value_and_grad(lambda o, f=f: total(f(*o))))(operands)
            for f in (both, one_by_one)
        )
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10), got, expected)


def test_parameters_of_each_unit():
    def cell(x, r, h, slope):
        (x,), (r,) = x, r
        h = jnp.tanh(x + slope["of_state"] * r)
        return h, slope["of_y"] * h

    p = heads_problem("RNN")
    slope = {"of_state": jnp.linspace(0, 1, 15), "of_y": jnp.linspace(-1, 1, 15)}

    def gradient(weights):
        def loss(slope, weights):
            return total(recurrent.scan(cell, weights, p.carry, p.xs, parameters=slope))

        return compiled(jax.value_and_grad(loss))(slope, weights)

    check(gradient(p.weights), gradient(block_diagonal(p.weights)), "float32")


@pytest.mark.parametrize("mapped", [(1, 2), (0, 3)], ids=["sequences", "weights"])
def test_vmap(mapped):
    p = heads_problem("GRU")
    operands = list(p.operands)
    axes = [None] * 4
    for i in mapped:
        operands[i] = jnp.stack([operands[i], operands[i] / 2])
        axes[i] = 0
    got = compiled(jax.vmap(p.scan, axes))(*operands)
    for k in range(2):
        own = (x if a is None else x[k] for x, a in zip(operands, axes, strict=True))
        check(jax.tree.map(lambda x, k=k: x[k], got), compiled(p.scan)(*own), "float32")


@pytest.mark.parametrize("T, B", [(0, 3), (4, 0)])
def test_nothing_to_scan(T, B):
    p = heads_problem("LSTM", T=T, B=B)
    carry, ys = p.scan(*p.operands)
    assert ys.shape == (T, B, 15)
    jax.tree.map(np.testing.assert_array_equal, carry, p.carry)


@pytest.mark.several_devices(8)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_sharded_batch_stays_sharded(kind):
    p = heads_problem("LSTM", B=8)
    lengths = jnp.arange(8) % 6

    def gradient(*operands):
        return jax.value_and_grad(lambda *o: total(p.scan(*o, seq_lengths=lengths)), (0, 2))(
            *operands
        )

    expected = compiled(gradient)(*p.operands)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    specs = P(), (P("data"),) * 2, P(None, "data"), P()
    with jax.set_mesh(mesh):
        operands = jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), p.operands, specs
        )
        forward = compiled(lambda *o: p.scan(*o)).lower(*operands).compile()
        assert "all-gather" not in forward.as_text()
        got = compiled(gradient)(*operands)
    check(jax.device_get(got), expected, "float32")


def test_export():
    p = heads_problem("LSTM")
    (b,) = jax.export.symbolic_shape("b")
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in (p.weights.shape, (b, 15), (b, 15), (5, b, 60))
    ]

    def run(weights, c, h, xs):
        return p.scan(weights, (c, h), xs)[1]

    for platform in ("cpu", "cuda"):
        exported = jax.export.export(compiled(run), platforms=[platform])(*shapes)
        assert exported.out_avals[0].shape[2] == 15
    c, h = p.carry
    exported = jax.export.export(compiled(run))(*shapes)
    for batch in (1, 3):
        operands = p.weights, c[:batch], h[:batch], p.xs[:, :batch]
        check(exported.call(*operands), run(*operands), "float32")


def test_one_loop_on_the_plain_path():
    p = heads_problem("LSTM", T=17)  # GPUs write out up to eight steps
    gradient = jax.jit(jax.grad(lambda *o: total(p.scan(*o, implementation="xla")), (0, 1, 2)))
    assert gradient.lower(*p.operands).as_text().count("stablehlo.while") == 2


@pytest.mark.parametrize(
    "shape, message",
    [
        ((3, 5, 18), r"\(heads, d, gates \* d\), or a CSR.*got shape \(3, 5, 18\)"),
        ((0, 5, 20), r"got shape \(0, 5, 20\)"),
        ((2, 3, 5, 20), "must have 2 or 3 dimensions.*jax.vmap"),
        ((4, 5, 20), r"must have shape \(B, h\) = \(3, 20\), got \(3, 15\)"),
    ],
)
def test_errors(shape, message):
    p = heads_problem("LSTM")
    with pytest.raises(ValueError, match=f"^recurrent.scan: .*{message}"):
        p.scan(jnp.zeros(shape), p.carry, p.xs)


# ---- On a GPU: plans and kernels, which need none ----


def form(heads, d, *, loops=1, products=4, states=1, batch=16, dtype="bfloat16"):
    return ScanForm(
        products=products,
        states=states,
        inputs=4,
        outputs=0,
        arrays=2,
        hidden=d,
        batch=batch,
        length=1024,
        state_dtype=dtype,
        weight_dtype=dtype,
        sparse=False,
        input_dtypes=(dtype,),
        directions=heads,
        loops=loops,
    )


@pytest.mark.parametrize("states, products", [(1, 4), (4, 1)], ids=["scan", "adjoint"])
@pytest.mark.parametrize(
    "heads, d", [(48, 16), (24, 32), (12, 64), (6, 128), (3, 256), (128, 32), (13, 64)]
)
def test_heads_share_a_launch(heads, d, states, products):
    plan = make_plan(form(heads, d, products=products, states=states), H200)
    assert isinstance(plan, Plan), plan
    assert plan.launches == 1 and plan.scans == heads * plan.groups
    assert plan.scans * plan.blocks <= plan.resident * H200.multiprocessors
    one = make_plan(form(1, d, products=products, states=states), H200, forced=True)
    assert plan.microseconds < 3 * one.microseconds


RESIDENT = "dense_resident"


def test_one_block_scans_a_head():
    for products, states in ((4, 1), (1, 4), (3, 1), (1, 1)):
        plan = make_plan(form(12, 64, products=products, states=states), H200)
        assert plan.variant == RESIDENT and plan.blocks == 1 and not plan.exchange_bytes
        assert plan.launches == 1 and 12 <= plan.scans <= 128
    # A few blocks share what one has no room for; rows that the GPU has no room for take turns.
    large = make_plan(form(1, 256), H200, RESIDENT)
    assert large.blocks > 1 and large.exchange_bytes
    many = make_plan(form(12, 64, batch=1024), H200, RESIDENT)
    assert many.launches > 1 and many.scans * many.blocks <= many.resident * H200.multiprocessors
    odd = make_plan(form(2, 40, batch=33), H200, RESIDENT)
    assert isinstance(odd, Plan) and 33 % odd.groups == 0
    wide = make_plan(form(2, 40, dtype="float32"), H200, RESIDENT)
    assert isinstance(wide, NoPlan) and "needs 16-bit" in wide.reason
    layer = make_plan(form(1, 1024), H200, RESIDENT)
    assert isinstance(layer, NoPlan) and "no few blocks have room for" in layer.reason


def test_more_heads_than_fit_take_turns():
    plan = make_plan(form(300, 64), H200, forced=True)
    assert plan.launches == -(-300 * plan.groups // plan.scans) > 1
    assert plan.scans <= 128
    # Those of the last launch are fewer.
    large = make_plan(form(31, 800), H200, forced=True)
    scans = 31 * large.groups
    assert large.launches * large.scans > scans > (large.launches - 1) * large.scans


def test_the_plain_path_scans_heads_at_once():
    alone, together = (
        make_plan(dataclasses.replace(form(12, 256), loops=n, length=2), H200) for n in (12, 1)
    )
    assert isinstance(alone, Plan) and isinstance(together, NoPlan)
    assert "for all steps" in together.reason


@pytest.mark.parametrize("variant", ["dense_tensor_cores", RESIDENT])
def test_kernels_of_heads_compile(variant):
    try:
        _ffi.nvrtc_version()
    except RuntimeError as error:
        pytest.skip(f"needs NVRTC: {error}")
    p = heads_problem("LSTM", 12, 24, jnp.bfloat16, T=20, B=6)
    loss = lambda *o: total(p.scan(*o, variant=variant))  # noqa: E731
    (found,) = explain(lambda *o: p.scan(*o, variant=variant)[1], *p.operands, device=H200)
    assert found.problem.directions == 12 and found.plan.launches == 1
    scans = found.plan.scans
    assert scans % 12 == 0 and "12 matrices" in str(found) and f"{scans} scans of" in str(found)
    sources = kernels(jax.grad(loss, (0, 1, 2)), *p.operands)
    assert len(sources) == 2
    for file, source in sources:
        assert "kLaunches = 1" in source
        assert _ffi.compile_kernel(file, EXPRESSION, "sm_90a", source).startswith(b"\x7fELF")
