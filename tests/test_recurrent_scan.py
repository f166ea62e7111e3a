"""The recurrent scans against a loop over time: cells, dtypes, options, edges, errors."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import DTYPES, EPSILON
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxpr_as_fun
from recurrent_problems import CELLS, compiled, compiled_with_triton, pattern, problem

from jaxsparse import CSR, Topology, recurrent
from jaxsparse.recurrent import GRU, LSTM, elman
from jaxsparse.recurrent.primitive import binding, plain, recurrent_scan_p

LENGTHS = jnp.array([0, 5, 3])  # of T = 5
EVERY = {"reverse": True, "seq_lengths": LENGTHS}
WEIGHTS = pytest.mark.parametrize("sparse", [False, True], ids=["dense", "csr"])

leaves = jax.tree.leaves


def check(got, expected, dtype):
    """Within the rounding of one result.

    The oracle rounds the state as the scan does. What remains is the rounding of a result, and that
    of a state that lay between two numbers and went to the other one: the weights, which contract,
    make less than one unit of it. All numbers are about 1.
    """
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(leaves(got), leaves(expected), strict=True):
        limit = EPSILON[jnp.dtype(dtype).name]
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=limit, atol=limit)


def check_values(p, bias=None, **options):
    with jax.enable_x64(True):
        scan = compiled(functools.partial(p.scan, **options))
        got = scan(p.weights, p.carry, p.xs, bias)
        assert {x.dtype for x in leaves(got)} == {p.xs.dtype}
        check(got, p.reference(p.weights, p.carry, p.xs, bias, **options), p.xs.dtype)
    return got


# ---- Values ----


@WEIGHTS
@pytest.mark.parametrize("name", CELLS)
def test_cells(name, sparse):
    p = problem(name, sparse)
    check_values(p, p.bias, **EVERY)


@pytest.mark.parametrize(
    "with_bias, reverse, lengths",
    [*itertools.product([False, True], [False, True], [None, LENGTHS])],
)
def test_options(with_bias, reverse, lengths):
    p = problem("RNN")
    check_values(p, p.bias if with_bias else None, reverse=reverse, seq_lengths=lengths)


@pytest.mark.parametrize(
    "name, sparse, dtype",
    [
        ("LSTM", True, "float64"),
        ("LSTM", True, "bfloat16"),
        ("three_leaves", False, "bfloat16"),
        ("three_leaves", False, "float16"),
    ],
)
def test_dtypes(name, sparse, dtype):
    with jax.enable_x64(True):
        p = problem(name, sparse, dtype=DTYPES[dtype])
    check_values(p, p.bias, **EVERY)


@pytest.mark.parametrize(
    "sparse, T, B, h",
    [
        *((False, *shape) for shape in [(1, 3, 4), (4, 1, 4), (4, 3, 1), (4, 0, 4), (0, 0, 1)]),
        *((True, *shape) for shape in [(1, 1, 1), (0, 3, 4), (2, 0, 3)]),
    ],
)
def test_edges_of_shapes(sparse, T, B, h):
    p = problem("GRU", sparse, T=T, B=B, h=h)

    def loss(*operands):
        results = p.scan(*operands)
        return sum(x.sum() for x in results), results

    run = compiled(jax.grad(loss, (0, 1, 2, 3), has_aux=True))
    gradients, (carry, ys) = run(*p.operands)
    assert carry.shape == (B, h) and ys.shape == (T, B, h)
    assert carry.dtype == ys.dtype == jnp.float32
    with jax.enable_x64(True):
        check((carry, ys), compiled(p.reference)(*p.operands), "float32")
    for g, x in zip(gradients, p.operands, strict=True):
        assert g.shape == x.shape and np.isfinite(g).all()
    if T == 0:
        np.testing.assert_array_equal(gradients[1], 1)


@pytest.mark.smoke
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(-1, 6), min_size=4, max_size=4),
    rows=st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=6, max_size=6),
    reverse=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_random_patterns_and_lengths(lengths, rows, reverse, seed):
    # In one frame, so that little is compiled. Lengths beyond T are T, negative ones 0.
    p = problem("three_leaves", T=5, B=4, h=3, seed=seed)
    mask = np.random.default_rng(seed).random((6, 3)) < np.asarray(rows)[:, None]
    topology = Topology.from_mask(mask, nse=18)
    a = CSR.fromdense(jnp.where(mask, p.weights.T, 0), topology)
    got = _scan_three_leaves(a, p.carry, p.xs, jnp.array(lengths), reverse)
    dense = jnp.where(mask.T, p.weights, 0)
    expected = _reference_three_leaves(dense, p.carry, p.xs, jnp.array(lengths), reverse)
    check(got, expected, "float32")


@functools.partial(jax.jit, static_argnums=4)
def _scan_three_leaves(a, carry, xs, lengths, reverse):
    cell = CELLS["three_leaves"][0]
    return recurrent.scan(cell, a, carry, xs, seq_lengths=lengths, reverse=reverse)


@functools.partial(jax.jit, static_argnums=4)
def _reference_three_leaves(weights, carry, xs, lengths, reverse):
    p = problem("three_leaves", T=5, B=4, h=3)
    return p.reference(weights, carry, xs, seq_lengths=lengths, reverse=reverse)


@pytest.mark.parametrize("density", [0.3, 0.0])
def test_the_plain_path_of_a_gpu_computes_the_same(density, monkeypatch, unrolled):
    """It multiplies by the dense form, unless the matrix is too sparse for that to pay."""
    h, length, b = 37, 19, 3
    rng = np.random.default_rng(0)
    mask = rng.random((4 * h, h)) < density
    mask[5, 7] = True
    topology = Topology.from_mask(mask, nse=int(mask.sum()) + 3)
    values = (
        jnp.asarray(rng.standard_normal(topology.nse), jnp.float32).at[topology.nnz :].set(np.nan)
    )
    carry = tuple(jnp.asarray(rng.standard_normal((2, b, h)), jnp.float32))
    xs = jnp.asarray(rng.standard_normal((length, b, 4 * h)), jnp.float32)
    called = {}

    def record(bound, *operands, **params):
        traced = any(isinstance(x, jax.core.Tracer) for x in operands)
        if bound is recurrent_scan_p and not traced:
            called[params["transposed"]] = operands, params
        return bind(bound, *operands, **params)

    def scanned(values, xs):
        return recurrent.scan(LSTM, CSR(values, topology), carry, xs)[1]

    bind = binding.bind
    monkeypatch.setattr(binding, "bind", record)
    jax.vjp(scanned, values, xs)[1](scanned(values, xs))
    assert set(called) == {False, True}
    for operands, params in called.values():
        options = {name: value for name, value in params.items() if name != "variant"}
        on_cpu, on_gpu = (
            jax.make_jaxpr(functools.partial(plain.plain_scan, on_gpu=on, **options))(*operands)
            for on in (False, True)
        )
        assert ("spmm" in str(on_gpu)) == (density < 0.01) and "spmm" in str(on_cpu)
        assert "unroll=8" in str(on_gpu) and "unroll=1" in str(on_cpu)
        expected, got = (compiled(jaxpr_as_fun(jaxpr))(*operands) for jaxpr in (on_cpu, on_gpu))
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), got, expected
        )


def test_y_is_zero_and_the_carry_stays_past_the_end():
    p = problem("LSTM")
    carry, ys = p.scan(*p.operands, seq_lengths=LENGTHS)
    for row, length in enumerate(LENGTHS):
        assert not np.any(ys[length:, row]) and np.all(ys[:length, row])
        short = p._replace(xs=p.xs[:length])
        for kept, expected in zip(carry, short.scan(*short.operands)[0], strict=True):
            np.testing.assert_allclose(kept[row], expected[row], rtol=2e-6, atol=2e-6)
    for kept, first in zip(carry, p.carry, strict=True):
        np.testing.assert_array_equal(kept[0], first[0])  # of length 0


def test_precision_and_implementation_change_nothing_here():
    p = problem("RNN", True)
    expected = p.scan(*p.operands)
    for options in (
        {"precision": "highest"},
        {"precision": jax.lax.Precision.DEFAULT},
        {"precision": "tensorfloat32", "implementation": "xla"},
    ):
        check(p.scan(*p.operands, **options), expected, "float32")


# ---- Dtypes ----


@WEIGHTS
def test_float32_weights_with_bfloat16_inputs(sparse):
    p = problem("LSTM", sparse)
    c, h = p.carry
    p = p._replace(xs=p.xs.astype(jnp.bfloat16), carry=(c, h.astype(jnp.bfloat16)))
    (c, h), ys = p.scan(*p.operands)
    assert (c.dtype, h.dtype, ys.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    check((c, h), p.reference(*p.operands)[0], "bfloat16")
    # One step starts from numbers of bfloat16, so weights, product, bias and c are float32's.
    p = p._replace(xs=p.xs[:1])
    (c, h), ys = p.scan(*p.operands)
    with jax.enable_x64(True):
        (expected, _), _ = p.reference(*p.operands)
    check(c, expected, "float32")
    assert np.any(c != c.astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(h, ys[0])


def test_narrow_weights_are_widened():
    p = problem("GRU")
    p = p._replace(weights=p.weights.astype(jnp.bfloat16), bias=p.bias.astype(jnp.float16))
    with jax.enable_x64(True):
        carry, ys = p.scan(*p.operands)
        assert carry.dtype == ys.dtype == jnp.float32
        check((carry, ys), p.reference(*p.operands), "float32")


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_carry_keeps_its_dtypes(dtype):
    with jax.enable_x64(True):
        p = problem("LSTM")
        given_ = jax.tree.map(lambda x: x.astype(DTYPES[dtype]), p.carry)
        for xs in (p.xs, p.xs[:0]):
            carry, ys = p.scan(p.weights, given_, xs)
            assert {x.dtype for x in carry} == {jnp.dtype(dtype)} and ys.dtype == jnp.float32


def test_the_state_is_rounded_and_the_carry_is_not():
    # Half of bfloat16's last place is kept in the carry, but not in what the product takes.
    weights, xs = jnp.eye(1), jnp.full((2, 1, 1), 2**-9, jnp.bfloat16)

    def cell(x, r, carry):
        (x,), (r,), (h,) = x, r, carry
        return (h + x,), r

    (h,), ys = recurrent.scan(cell, weights, (jnp.ones((1, 1)),), xs)
    assert h == 1 + 2**-8 and ys[0] == 1 and ys[1] == 1


# ---- What must not spread ----


def bad_padding(p, bad):
    return jnp.where((jnp.arange(5)[:, None] < LENGTHS)[..., None], p.xs, bad)


def divides(x, r, h):
    """Its derivative is NaN where the padding stands, whatever stands there."""
    (x,), (r,) = x, r
    h = jnp.tanh(r / x + jnp.sqrt(x * x))
    return h, h


@pytest.mark.parametrize(
    "name, sparse, recompute",
    [
        ("LSTM", False, False),
        ("LSTM", True, True),
        ("divides", False, True),
        ("divides", True, False),
    ],
)
def test_padding_reaches_nothing(name, sparse, recompute, unrolled):
    p = problem("LSTM" if name == "LSTM" else "RNN", sparse)
    p = p._replace(cell=divides if name == "divides" else p.cell)

    @compiled_with_triton
    def value_and_gradient(*operands):
        def loss(*operands):
            carry, ys = p.scan(*operands, seq_lengths=LENGTHS, recompute=recompute)
            return sum(jnp.sum(jnp.sin(x)) for x in leaves((carry, ys))), (carry, ys)

        return jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(*operands)

    clean = value_and_gradient(*p._replace(xs=bad_padding(p, 0)).operands)
    assert all(np.isfinite(x).all() for x in leaves(clean))
    for bad in (np.nan, np.inf, -np.inf):
        got = value_and_gradient(*p._replace(xs=bad_padding(p, bad)).operands)
        jax.tree.map(np.testing.assert_array_equal, got, clean)
    dxs = np.asarray(clean[1][2])
    counts = np.arange(5)[:, None] < LENGTHS
    assert np.all(dxs[~counts] == 0) and np.all(dxs[counts].any(-1))


@WEIGHTS
def test_a_bad_row_stays_in_its_row(sparse, unrolled):
    p = problem("GRU", sparse)

    @compiled_with_triton
    def run(xs):
        scanned, pull = jax.vjp(lambda c, x: p.scan(p.weights, c, x), p.carry, xs)
        return scanned, pull(jax.tree.map(jnp.ones_like, scanned))

    (carry, ys), (dcarry, dxs) = run(p.xs)
    (bad_carry, bad_ys), (bad_dcarry, bad_dxs) = run(p.xs.at[2, 1, 0].set(jnp.nan))
    assert np.isnan(bad_ys[2:, 1]).any(-1).all() and not np.isnan(bad_ys[:2]).any()
    others = np.array([0, 2])
    for good, bad in ((carry, bad_carry), (dcarry, bad_dcarry)):
        np.testing.assert_array_equal(good[others], bad[others])
    for good, bad in ((ys, bad_ys), (dxs, bad_dxs)):
        np.testing.assert_array_equal(good[:, others], bad[:, others])


def test_an_empty_matrix():
    p = problem("RNN")
    nothing = CSR(jnp.zeros(0), Topology.from_mask(np.zeros((5, 5), bool)))
    run = functools.partial(recurrent.scan, elman(), nothing, p.carry)
    np.testing.assert_allclose(run(p.xs)[1], jnp.tanh(p.xs), rtol=1e-6)
    np.testing.assert_allclose(
        jax.grad(lambda x: run(x)[1].sum())(p.xs), 1 - jnp.tanh(p.xs) ** 2, rtol=1e-5, atol=1e-7
    )


# ---- Two directions ----


@pytest.mark.parametrize(
    "name, case, implementation",
    [
        ("GRU", "dense", None),
        ("RNN", "csr", None),
        ("three_leaves", "csr", "xla"),
        ("GRU", "csr and empty", None),
    ],
)
def test_bidirectional_is_two_scans(name, case, implementation):
    one, other = problem(name, case != "dense"), problem(name, case != "dense", seed=1)
    if case == "csr":  # a pattern with more entries than the other one
        topology = pattern(*other.topology.shape, density=0.8, seed=1, padding=9)
        values = np.random.default_rng(1).standard_normal(topology.nse) / 5
        other = other._replace(topology=topology, weights=jnp.asarray(values, jnp.float32))
        assert other.topology.nse > one.topology.nse
    if case == "csr and empty":
        topology = Topology.from_mask(np.zeros(other.topology.shape, bool))
        other = other._replace(topology=topology, weights=jnp.zeros(0))
    options = {"seq_lengths": LENGTHS, "implementation": implementation}
    options["recompute"] = name == "GRU"

    def both(one_operands, other_operands):
        pairs = [*zip(one_operands, other_operands, strict=True)]
        if case != "dense":
            pairs[0] = tuple(map(CSR, pairs[0], (one.topology, other.topology)))
        *pairs, bias = pairs
        return recurrent.bidirectional_scan(one.cell, *pairs, recurrent_bias=bias, **options)

    def two(one_operands, other_operands):
        forward = one.scan(*one_operands, **options)
        backward = other.scan(*other_operands, reverse=True, **options)
        return tuple(zip(forward, backward, strict=True))

    def value_and_gradient(function):
        def loss(*operands):
            results = function(*operands)
            return sum(jnp.sum(jnp.sin(x)) for x in leaves(results)), results

        gradients, results = compiled(jax.grad(loss, (0, 1), has_aux=True))(
            one.operands, other.operands
        )
        return results, gradients

    (got, gradients), (expected, expected_gradients) = map(value_and_gradient, (both, two))
    check(got, expected, "float32")
    for a, b in zip(leaves(gradients), leaves(expected_gradients), strict=True):
        # Sums of a dozen or so numbers about 1, in another order.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert np.isfinite(a).all()


# ---- Flax ----


def flax_scan(layer, xs):
    """Our scan of a Flax layer: its parameters, with the gates side by side."""
    cell, hidden = layer.cell, layer.cell.hidden_features
    name = type(cell).__name__
    if name == "LSTMCell":
        kernel, recurrent_ = (
            jnp.concatenate([getattr(cell, n).kernel[...] for n in names], 1)
            for names in (("ii", "if_", "ig", "io"), ("hi", "hf", "hg", "ho"))
        )
        bias = jnp.concatenate([getattr(cell, n).bias[...] for n in ("hi", "hf", "hg", "ho")])
        x = xs @ kernel
    else:
        x, recurrent_ = cell.dense_i(xs), cell.dense_h.kernel[...]
        bias = None if cell.dense_h.bias is None else cell.dense_h.bias[...]
    h = jnp.zeros((xs.shape[1], hidden))
    ours = {"GRUCell": (GRU, h), "SimpleCell": (elman(), h)}.get(name, (LSTM, (h, h)))
    return functools.partial(recurrent.scan, ours[0], recurrent_, ours[1], x, recurrent_bias=bias)


@pytest.mark.parametrize(
    "name, reverse",
    [
        ("LSTMCell", False),
        ("OptimizedLSTMCell", True),
        ("GRUCell", True),
        ("SimpleCell", True),
    ],
)
def test_flax_computes_the_same(name, reverse):
    nnx = pytest.importorskip("flax.nnx")
    cell = getattr(nnx, name)(4, 5, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0))
    options = {"time_major": True, "return_carry": True, "reverse": reverse, "keep_order": reverse}
    layer = nnx.RNN(cell, **options, rngs=nnx.Rngs(0))
    xs = jax.random.normal(jax.random.key(0), (6, 3, 4))
    lengths = jnp.array([6, 1, 4])
    carry, ys = flax_scan(layer, xs)(reverse=reverse, seq_lengths=lengths)
    expected_carry, expected = layer(xs, seq_lengths=lengths)
    counts = (jnp.arange(6)[:, None] < lengths)[..., None]
    check(ys, jnp.where(counts, expected, 0), "float32")
    check(carry, expected_carry, "float32")


# ---- Compilations ----


def test_eager_calls_trace_once():
    p, traces = problem("RNN"), []

    def activation(x):
        traces.append(x)
        return jnp.tanh(x)

    def run():
        return recurrent.scan(elman(activation), p.weights, p.carry, p.xs)

    run()
    first = len(traces)
    assert first
    run()
    assert len(traces) == first
    recurrent.scan(elman(lambda x: activation(x)), p.weights, p.carry, p.xs)
    assert len(traces) > first


def test_equal_cells_are_one():
    assert elman("tanh") is elman() is elman(jnp.tanh) and elman("relu") is elman(jax.nn.relu)
    assert elman("tanh") is not elman("relu")


def test_equal_programs_have_equal_steps():
    def steps():
        p = problem("LSTM")
        scan = functools.partial(p.scan, seq_lengths=LENGTHS)
        loss = lambda *o: scan(*o)[1].sum()  # noqa: E731
        gradient = lambda *o: jax.grad(loss)(*o).sum()  # noqa: E731
        jaxpr = jax.make_jaxpr(jax.grad(gradient))(*p.operands)
        return [e.params["step"] for e in jaxpr.eqns if "step" in e.params]

    one, other = steps(), steps()
    assert len(one) >= 4 and len({*one}) == len({*one, *other})
    assert one == other and [*map(hash, one)] == [*map(hash, other)]


# ---- Errors ----


def call(cell=None, recurrent_=None, carry=None, xs=None, **options):
    """A scan of one gate, h = 4, T = 5, B = 3, with something else in it."""
    return recurrent.scan(
        elman() if cell is None else cell,
        jnp.ones((4, 4)) if recurrent_ is None else recurrent_,
        jnp.ones((3, 4)) if carry is None else carry,
        jnp.ones((5, 3, 4)) if xs is None else xs,
        **options,
    )


class Unhashable:
    """A cell that can't be found again."""

    __hash__ = None

    def __call__(self, x, r, h):
        """Stays where it is."""
        return h, h


MATRIX = CSR.fromdense(jnp.ones((6, 4)))
MANY = CSR(jnp.ones((2, 16)), Topology.from_mask(np.ones((4, 4), bool)))
ONES = jnp.ones((3, 4))


@pytest.mark.smoke
@pytest.mark.parametrize(
    "arguments, error, message",
    [
        # Operands.
        ({"cell": "tanh"}, TypeError, "cell must be a function, got str"),
        ({"cell": Unhashable()}, TypeError, "cell must be hashable, Unhashable is not"),
        ({"xs": "x"}, TypeError, "xs must be an array, got str"),
        ({"xs": jnp.ones((3, 4))}, ValueError, r"xs must have at least 3 dim.*\(3, 4\)"),
        ({"xs": jnp.ones((2, 5, 3, 4))}, ValueError, r"xs must have 3 dimensions.*: use jax.vmap"),
        ({"xs": jnp.ones((5, 3, 4), int)}, TypeError, "needs float32.*, got xs int"),
        ({"recurrent_": jnp.ones(4)}, ValueError, "recurrent must have at least 2 dimensions"),
        ({"recurrent_": jnp.ones((1, 2, 4, 4))}, ValueError, "recurrent must have 2 .*jax.vmap"),
        ({"recurrent_": jnp.ones((4, 4), int)}, TypeError, "needs float32.*, got recurrent int"),
        (
            {"recurrent_": jnp.ones((4, 8))},
            ValueError,
            r"the cell elman\(tanh\) fails with 1 gates of x and 2 of r",
        ),
        (
            {"recurrent_": jnp.ones((4, 6))},
            ValueError,
            r"recurrent must be \(h, gates \* h\), .*or a CSR.*got shape \(4, 6\)",
        ),
        ({"xs": jnp.ones((5, 3, 6))}, ValueError, r"dimension of xs must be.*multiple of 4, got 6"),
        ({"parameters": {"a": ONES}}, ValueError, "parameters must have 1 dimensions"),
        ({"parameters": [jnp.ones(3)]}, ValueError, r"leaves of parameters must have.*\(4,\), got"),
        ({"parameters": jnp.ones(4, int)}, TypeError, "needs float32.*got parameters int"),
        ({"parameters": jnp.ones(4)}, ValueError, "parameters PyTreeDef.*positional argument"),
        ({"recurrent_": jnp.ones((3, 4))}, ValueError, r"got shape \(3, 4\)"),
        ({"recurrent_": jnp.ones((0, 0)), "xs": jnp.ones((5, 3, 0))}, ValueError, r"\(0, 0\)"),
        ({"recurrent_": MATRIX}, ValueError, r"must be a CSR matrix \(gates \* h, h\).*\(6, 4\)"),
        ({"recurrent_": MANY}, ValueError, r"one matrix, got values of shape \(2, 16\): use jax"),
        ({"carry": ()}, ValueError, "carry must have a leaf: the state"),
        ({"carry": "h"}, TypeError, "carry must be an array, got str"),
        ({"carry": jnp.ones(4)}, ValueError, "carry must have at least 2 dimensions"),
        (
            {"carry": jnp.ones((4, 4))},
            ValueError,
            r"leaves of carry must have shape \(B, h\) = \(3, 4\), got \(4, 4\)",
        ),
        ({"carry": jnp.ones((3, 4), int)}, TypeError, "needs float32.*, got carry 0 int"),
        (
            {"recurrent_bias": jnp.ones(3)},
            ValueError,
            r"recurrent_bias must have shape \(4,\), got \(3,\)",
        ),
        ({"recurrent_bias": jnp.ones((1, 4))}, ValueError, "recurrent_bias must have 1 dimensions"),
        ({"recurrent_bias": jnp.ones(4, int)}, TypeError, "got recurrent_bias int"),
        ({"seq_lengths": jnp.ones(2, int)}, ValueError, r"must be 3 integers, got int.*\(2,\)"),
        ({"seq_lengths": jnp.ones(3)}, ValueError, "must be 3 integers, got float"),
        ({"seq_lengths": jnp.ones((1, 3), int)}, ValueError, "seq_lengths must have 1 dim"),
        # Options.
        ({"precision": "bfloat16"}, ValueError, "precision must be a jax.lax.*got 'bfloat16'"),
        ({"precision": ["highest"]}, ValueError, r"precision must .*got \['highest'\]"),
        ({"implementation": "tpu"}, ValueError, "implementation must be.*'tpu'"),
        # Cells.
        ({"cell": LSTM}, ValueError, "the cell LSTM fails with 1 gates"),
        ({"cell": GRU}, ValueError, "the cell GRU fails with 1 gates"),
        (
            {"recurrent_": jnp.ones((4, 8)), "xs": jnp.ones((5, 3, 8))},
            ValueError,
            r"the cell elman\(tanh\) fails with 2 gates.*too many values",
        ),
        ({"cell": lambda x, r, h: h}, TypeError, r"must return \(carry, y\), got "),
        ({"cell": lambda x, r, h: [h, h]}, TypeError, r"must return \(carry, y\), got list"),
        (
            {"cell": lambda x, r, h: ((h, h), h)},
            TypeError,
            r"a carry like the one it takes, PyTreeDef\(\*\), got PyTreeDef\(\(\*, \*\)\)",
        ),
        ({"cell": lambda x, r, h: (h, h[None])}, ValueError, "pointwise: of scalars it made .*1,"),
        ({"cell": lambda x, r, h: (h, (h, h))}, TypeError, "must return one array as y"),
        ({"cell": lambda x, r, h: (h > 0, h)}, ValueError, "pointwise: of scalars .*bool"),
        ({"cell": lambda x, r, h: (h - jnp.mean(h), h)}, ValueError, "pointwise.*'reduce_sum'"),
        ({"cell": lambda x, r, h: (h, jnp.where(jnp.any(h > 0), h, 0))}, ValueError, "'reduce_or'"),
        ({"cell": lambda x, r, h: (h + h.T, h)}, ValueError, "with arrays it fails"),
        ({"cell": lambda x, r, h: (h if h > 0 else -h, h)}, ValueError, "fails with 1 gates"),
        (
            {"cell": lambda x, r, h: (jax.scipy.special.digamma(h), h)},
            ValueError,
            "the cell uses 'digamma'.*supported are.*tanh",
        ),
        (
            {"cell": lambda x, r, h: (h, jax.random.normal(jax.random.key(0)) + h)},
            ValueError,
            "the cell uses 'random",
        ),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match="(?s)^recurrent.scan: .*" + message):
        call(**arguments)


def test_a_cell_that_closes_over_a_traced_value():
    with pytest.raises(ValueError, match=r"recurrent.scan: the cell closes over a traced value"):
        jax.jit(lambda a: call(cell=lambda x, r, h: (a * h, h)))(2.0)


@pytest.mark.parametrize(
    "pairs, error, message",
    [
        ({"xs": jnp.ones((5, 3, 4))}, ValueError, "xs must be a pair .*, got ArrayImpl"),
        ({"carry": (ONES,)}, ValueError, "carry must be a pair"),
        ({"recurrent_bias": 1.0}, ValueError, "recurrent_bias must be a pair .*, got float"),
        ({"carry": (ONES, ONES[:2])}, ValueError, "leaves of backward carry must have shape"),
        ({"recurrent_bias": (jnp.ones(3), None)}, ValueError, "forward recurrent_bias must have"),
        ({"recurrent_bias": (jnp.ones(4), None)}, ValueError, "both directions must have one form"),
        (
            {"recurrent": (jnp.ones((4, 4)), CSR.fromdense(jnp.eye(4)))},
            ValueError,
            "one form, got .*dense.* and .*CSR",
        ),
        ({"carry": (ONES, ONES.astype(jnp.bfloat16))}, ValueError, "one form.*bfloat16"),
        (
            {"recurrent": (jnp.ones((4, 4)), jnp.ones((2, 4))), "carry": (ONES, jnp.ones((3, 2)))},
            ValueError,
            "one form",
        ),
    ],
)
def test_errors_of_two_directions(pairs, error, message):
    operands = {
        "recurrent": (jnp.eye(4),) * 2,
        "carry": (ONES,) * 2,
        "xs": (jnp.ones((5, 3, 4)),) * 2,
        **pairs,
    }
    with pytest.raises(error, match=f"^recurrent.bidirectional_scan: .*{message}"):
        recurrent.bidirectional_scan(elman(), **operands)


@pytest.mark.parametrize("activation", ["swish", 3, ["tanh"]])
def test_unknown_activations(activation):
    with pytest.raises(ValueError, match=r"recurrent.elman: activation must be.*'tanh', 'relu'"):
        elman(activation)


def test_patterns_of_the_problems():
    # What the tests above rely on.
    topology = pattern(6, 5)
    assert topology.nse == topology.nnz + 2 and not np.diff(topology.row_offsets)[3]
    assert jax.tree.structure(CELLS["three_leaves"][2]).num_leaves == 3


def test_every_leaf_of_the_carry_must_be_floating():
    w, xs = jnp.ones((4, 16)), jnp.ones((2, 3, 16))
    carry = (jnp.zeros((3, 4), int), jnp.zeros((3, 4)))
    with pytest.raises(TypeError, match=r"needs float32, float64, .*, got carry 0 int32"):
        recurrent.scan(recurrent.LSTM, w, carry, xs)
