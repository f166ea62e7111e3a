"""Scans over graphs, against a loop over rows."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import PLATFORM
from dynamic_problems import CELLS, finite, of_no_product, problem, script_of
from jax.test_util import check_grads
from recurrent_problems import compiled

from jaxsparse import CSR, dynamic, recurrent
from jaxsparse.dynamic import reference
from jaxsparse.dynamic.primitive.binding import scan_bind
from jaxsparse.dynamic.primitive.plain import plain_scan
from jaxsparse.dynamic.primitive.row_products import sum_of_rows

leaves = jax.tree.leaves


def close(got, expected, rtol=1e-10, atol=1e-11):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, expected)


def dot(a, b):
    return sum(jnp.vdot(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


def like(tree, seed=0):
    """Random numbers in the form of a tree."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), tree)


def derivatives(function, second_order, operands, direction, weigh):
    """Value, gradient and tangent, and derivatives of second order in each order of modes."""

    def loss(operands):
        return dot(jax.tree.map(jnp.sin, function(*operands)), weigh)

    def along(operands):
        return jax.jvp(lambda x: function(*x), (operands,), (direction,))[1]

    gradient = jax.grad(loss)
    first = {
        "value": function(*operands),
        "gradient": gradient(operands),
        "tangent": along(operands),
    }
    if not second_order:
        return first
    return first | {
        "forward over reverse": jax.jvp(gradient, (operands,), (direction,))[1],
        "reverse over reverse": jax.grad(lambda x: dot(gradient(x), direction))(operands),
        "reverse over forward": jax.grad(lambda x: dot(along(x), weigh))(operands),
    }


# Each of both, of one cell and of two, which have the one of "every_child" among them.
RECOMPUTED = {"every_child", "two_cells"}
OF_SECOND_ORDER = {"tree_lstm_with_x", "two_cells"}


@pytest.mark.parametrize("name", CELLS)
def test_every_derivative(name):
    """Of a random graph, with missing children, one child twice, several parents, and padding."""
    with jax.enable_x64(True):
        p = problem(name)
        operands = finite(p.operands)
        arguments = (operands, like(operands), like(jax.eval_shape(p.scan, *operands), 1))
        scan = functools.partial(p.scan, recompute=name in RECOMPUTED)
        expected, got = (
            compiled(functools.partial(derivatives, f, name in OF_SECOND_ORDER))(*arguments)
            for f in (p.loop, scan)
        )
        close(got, expected)
        assert all(float(jnp.abs(x).max()) > 1e-3 for x in leaves(got))


def test_the_plain_path_of_a_gpu_computes_the_same(monkeypatch, unrolled):
    """It has all tiles in its loop, several at a time, and no switch between kinds."""
    p = problem("two_cells", tiles=3, dtype=jnp.float32)
    called = {}

    def record(bound, *operands, **params):
        if not any(isinstance(x, jax.core.Tracer) for x in operands):
            called[params["emits"]] = operands, params
        return bind(bound, *operands, **params)

    bind = scan_bind.__kwdefaults__["binder"]
    monkeypatch.setitem(scan_bind.__kwdefaults__, "binder", record)
    made, adjoint = jax.vjp(p.scan, *finite(p.operands))
    adjoint(like(made))
    assert set(called) == {False, True}
    for operands, params in called.values():
        expected, got = (
            compiled(functools.partial(plain_scan, on_gpu=on, **params))(*operands)
            for on in (False, True)
        )
        close(got, expected, 2e-5, 2e-6)


def test_third_derivatives():
    """A gradient's derivative along a direction, which has one more, by finite differences."""
    with jax.enable_x64(True):
        p = problem("tree_lstm_with_x", tiles=2, width=2, h=2)
        operands = finite(p.operands)
        direction = like(operands, 2)
        gradient = jax.grad(lambda x: sum(jnp.sum(jnp.sin(y)) for y in leaves(p.scan(*x))))
        along = jax.jit(lambda x: jax.jvp(gradient, (x,), (direction,))[1])
        check_grads(along, (operands,), order=1, modes=["rev"])


def test_padding_reaches_nothing():
    """NaN in leaves and inputs that no row reads, and what the cell makes of zeros."""
    for name in ("every_child", "two_cells"):
        p = problem(name, dtype=jnp.float32)
        assert any(np.isnan(x).any() for x in leaves(p.operands))
        is_row = np.asarray(p.script.row_mask)[p.script.form.leaves :]
        assert not is_row.all()

        def run(operands, p=p):
            made = p.scan(*operands)
            return sum(jnp.sum(jnp.sin(y)) for y in leaves(made)), made

        gradient, made = compiled(jax.grad(run, has_aux=True))(p.operands)
        assert all(np.isfinite(x).all() for x in leaves((gradient, made)))
        assert all((np.asarray(x)[~is_row] == 0).all() for x in leaves(made))
        _, carry, xs, _ = gradient
        assert all((np.asarray(x)[-1] == 0).all() for x in leaves((carry, xs)))


def test_nan_stays_in_its_graph():
    """Two graphs side by side in the same tiles; one has a NaN in a leaf and in an input."""
    sources = [[[0, 1], [2, 3], [-1, -1]], [[4, 1], [5, -1], [2, 5]]]
    first = [[True, False, False], [True, False, False]]
    script = script_of(sources, x_rows=[[0, 1, -1], [2, 3, 4]], leaves=4, inputs=5)
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    cell, weights, c, h, xs = dynamic.tree_lstm(2), draw(6, 15), draw(4, 3), draw(4, 3), draw(5, 12)

    def loss(carry, xs):
        made = dynamic.scan(cell, weights, carry, script, xs)
        return sum(jnp.sum(jnp.sin(y)) for y in leaves(made)), made

    run = compiled(jax.grad(loss, (0, 1), has_aux=True))
    clean = run((c, h), xs)
    ((dc, dh), dx), made = run((c, h.at[0, 1].set(jnp.nan)), xs.at[2, 0].set(jnp.nan))
    assert np.isnan(made[1]).any() and np.isnan(dh).any() and np.isnan(dx).any()
    own = np.asarray(first).reshape(-1)
    for got, expected in zip(made, clean[1], strict=True):
        np.testing.assert_array_equal(got[~own], expected[~own])
    ((dc0, dh0), dx0), _ = clean
    for got, expected, other in ((dc, dc0, [2, 3]), (dh, dh0, [2, 3]), (dx, dx0, [1, 3, 4])):
        np.testing.assert_array_equal(got[jnp.array(other)], expected[jnp.array(other)])


@pytest.mark.skipif(PLATFORM == "cuda", reason="a GPU runs all tiles of a form")
def test_tiles_that_are_not_used_are_not_computed():
    sources = [[[0, 1]], [[2, 0]], [[3, 3]]]
    scripts = [script_of(sources, leaves=2, used_tiles=n) for n in range(4)]
    weights, carry = jnp.ones((2, 5)), (jnp.ones((2, 1)), jnp.ones((2, 1)))
    traced = []

    @compiled
    def run(script):
        traced.append(script.form)
        return dynamic.scan(dynamic.tree_lstm(2), weights, carry, script)

    for used, script in enumerate(scripts):
        _, h = run(script)
        assert ((np.asarray(h)[:, 0] != 0) == (np.arange(3) < used)).all()
    assert traced == [scripts[0].form]


def test_no_rows():
    form = dynamic.Form(leaves=2, tiles=0, width=8, slots=2, groups=1, graphs=1)
    script = dynamic.Script(np.zeros(form.words, np.int32), form)
    carry = (jnp.ones((2, 3)), jnp.ones((2, 3), jnp.bfloat16))
    c, h = dynamic.scan(dynamic.tree_lstm(2), jnp.ones((6, 15)), carry, script)
    assert (c.shape, c.dtype, h.shape, h.dtype) == ((0, 3), jnp.float32, (0, 3), jnp.bfloat16)


def test_chains_are_recurrent_scans():
    """Sequences of unequal lengths without padding, as `recurrent.scan` has them with it."""
    lengths, h = np.array([3, 1, 2]), 4
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    xs, w, carry = draw(3, 3, 4 * h), draw(h, 4 * h), (draw(3, h), draw(3, h))
    steps = [(t, b) for t in range(3) for b in range(3) if t < lengths[b]]
    place = {step: i for i, step in enumerate(steps)}
    sources = np.full((3, 3, 1), -1)
    x_rows = np.full((3, 3), -1)
    for t, b in steps:
        sources[t, b] = b if t == 0 else 3 + (t - 1) * 3 + b
        x_rows[t, b] = place[t, b]
    script = script_of(sources, x_rows=x_rows, leaves=3, inputs=len(steps))

    def packed(w, carry, xs):
        rows = jnp.stack([xs[step] for step in steps])
        _, made = dynamic.scan(dynamic.chain(recurrent.LSTM), w, carry, script, rows)
        return made.reshape(3, 3, h)

    def padded(w, carry, xs):
        return recurrent.scan(recurrent.LSTM, w, carry, xs, seq_lengths=jnp.asarray(lengths))[1]

    def both(f):
        return compiled(lambda *a: (f(*a), jax.vjp(f, *a)[1](draw_like)))(w, carry, xs)

    draw_like = draw(3, 3, h)
    close(both(packed), both(padded), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", [dynamic.Layout(2, 1, 2), dynamic.Layout(4, 3, 2)])
def test_packed_graphs(layout):
    """Graphs of any shape, as the packer lays them out, against the machine that runs scripts."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 9, 12)
    children = np.full((sizes.sum(), 2), -1)
    ends = np.cumsum(sizes)
    for first, end in zip(ends - sizes, ends, strict=True):
        for row in range(first + 1, end):
            below = rng.integers(-1, row - first, 2)
            children[row] = below if rng.random() < 0.7 else -1
    graphs = dynamic.Graphs.from_arrays(np.append(0, ends), children)
    script = dynamic.pack(graphs, np.arange(12), layout)
    form, h = script.form, 3
    assert (script.sources >= form.leaves).any()
    w, bias = rng.standard_normal((2 * h, 5 * h)), rng.standard_normal(5 * h)
    c, state = rng.standard_normal((2, form.leaves, h))

    def step(kind, children, inputs):
        (c1, h1), (c2, h2) = children
        i, o, u, f1, f2 = np.split(np.concatenate([h1, h2], 1) @ w + bias, 5, 1)
        sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
        c = sigmoid(i) * np.tanh(u) + sigmoid(f1) * c1 + sigmoid(f2) * c2
        return [c, sigmoid(o) * np.tanh(c)]

    expected = [x[form.leaves :] for x in reference.run(script, step, [c, state])]
    with jax.enable_x64(True):
        carry = (jnp.asarray(c), jnp.asarray(state))
        got = dynamic.scan(dynamic.tree_lstm(2), w, carry, script, bias=bias)
        close([np.asarray(x) for x in got], expected)


def test_sparse_weights():
    with jax.enable_x64(True):
        p = problem("tree_lstm")
        mask = np.random.default_rng(1).random(p.weights.shape) < 0.5
        matrix = CSR.fromdense(jnp.where(mask, p.weights, 0).T)
        operands = finite(p.operands)

        def sparse(values):
            return p.scan(CSR(values, matrix.topology), *operands[1:])

        def dense(values):
            return p.scan(CSR(values, matrix.topology).todense().T, *operands[1:])

        def run(f):
            return compiled(jax.value_and_grad(lambda v: jnp.sum(jnp.sin(f(v)[1]))))(matrix.values)

        close(run(sparse), run(dense))


@pytest.mark.parametrize("name", ["tree_lstm_with_x", "every_child"])
def test_sixteen_bits(name):
    """Beside a loop in float64 on the same numbers: a few roundings of 1/256 each row."""
    with jax.enable_x64(True):
        exact = problem(name, h=16, seed=3)
        rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact.operands)
        carry = jax.tree.leaves(rounded[1])
        # The state in 16 bits; what lasts, in 32.
        lasting = [x.astype(jnp.float32) for x in carry[:-1]]
        tree = jax.tree.structure(rounded[1])
        rounded = (rounded[0], jax.tree.unflatten(tree, [*lasting, carry[-1]]), *rounded[2:])

        def run(f):
            def loss(operands):
                made = f(*operands)
                return sum(jnp.sum(jnp.sin(y.astype(jnp.float64))) for y in leaves(made)), made

            return compiled(jax.grad(loss, has_aux=True))

        gradient, made = run(exact.scan)(finite(rounded))
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), finite(rounded))
        expected = jax.tree.map(np.asarray, run(exact.loop)(wide))
    assert [x.dtype for x in leaves(made)] == [jnp.float32] * len(lasting) + [jnp.bfloat16]
    assert [x.dtype for x in leaves(gradient)] == [x.dtype for x in leaves(rounded)]
    for got, x in zip(leaves((gradient, made)), leaves(expected), strict=True):
        error = np.abs(np.asarray(got, np.float64) - x)
        assert error.max() < 0.03 * max(1, np.abs(x).max())
        assert error.max() > 0


# ---- Errors ----

SCRIPT = script_of([[[0, 1]]], leaves=2)
WITH_X = script_of([[[0, 1]]], x_rows=[[0]], leaves=2, inputs=1)
H, W = jnp.ones((2, 3)), jnp.ones((6, 15))


def mean(x, r, children):
    return r[0] - r[0].mean(), r[1]


def unprintable(x, r, children):
    return r[0], jax.lax.igamma(r[1], r[2])


TREE = dynamic.tree_lstm(2)
ERRORS = {
    "no cell": (TypeError, "made by dynamic.cell", (recurrent.LSTM, W, (H, H), SCRIPT)),
    "children": (
        ValueError,
        "takes 1 children.*have 2",
        (dynamic.chain(recurrent.GRU), W, H, SCRIPT),
    ),
    "no script": (
        TypeError,
        "must be a dynamic.Script, got ndarray",
        (TREE, W, (H, H), np.ones(3)),
    ),
    "batch": (
        ValueError,
        r"got a batch \(2,\): use jax.vmap",
        (TREE, W, (H, H), dynamic.stack([SCRIPT, SCRIPT])),
    ),
    "words": (
        ValueError,
        "must have .* words of int32",
        (TREE, W, (H, H), dynamic.Script(SCRIPT.words[:-1], SCRIPT.form)),
    ),
    "kinds": (ValueError, "1 kinds of rows, got 2 cells", ((TREE, TREE), (W, W), (H, H), SCRIPT)),
    "weights of kinds": (ValueError, "tuple of as many", ((TREE, TREE), W, (H, H), SCRIPT)),
    "rows of weights": (ValueError, r"weights must be \(K h, P h\)", (TREE, W[:3], (H, H), SCRIPT)),
    "columns of weights": (ValueError, "weights must be", (TREE, W[:, :4], (H, H), SCRIPT)),
    "no columns of weights": (ValueError, "or None for", (TREE, W[:, :0], (H, H), SCRIPT)),
    "dtype": (TypeError, "weights", (TREE, W.astype(int), (H, H), SCRIPT)),
    "leaves": (ValueError, r"shape \(leaves, h\) = \(2, 3\)", (TREE, W, (H[:1], H), SCRIPT)),
    "xs without inputs": (ValueError, "no row of the script has", (TREE, W, (H, H), SCRIPT, W)),
    "xs": (ValueError, r"xs must be \(inputs, gates", (TREE, W, (H, H), WITH_X, jnp.ones((2, 12)))),
    "carry": (
        TypeError,
        "must return a carry like",
        (dynamic.cell(children=2)(mean), W, H, SCRIPT),
    ),
    "products": (ValueError, "fails with no x .*, 2 products", (TREE, W[:, :6], (H, H), SCRIPT)),
    "mean": (
        ValueError,
        "'reduce_sum'|pointwise",
        (dynamic.cell(children=2)(mean), W, (H, H), SCRIPT),
    ),
    "printing": (
        ValueError,
        "uses 'igamma'",
        (dynamic.cell(children=2)(unprintable), W, (H, H), SCRIPT),
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    error, message, arguments = ERRORS[name]
    with pytest.raises(error, match=f"(?s)dynamic.scan: .*{message}"):
        jax.eval_shape(functools.partial(dynamic.scan, *arguments))


def test_other_errors():
    operands = (TREE, W, (H, H), SCRIPT)
    for options, message in (
        ({"bias": jnp.ones(3)}, "bias must have shape (15,)"),
        ({"precision": "low"}, "precision must be"),
        ({"implementation": "tpu"}, "implementation must be"),
        *([({"implementation": "cuda"}, "it is lowered for 'cpu'")] if PLATFORM == "cpu" else []),
        ({"variant": "fast"}, "variant 'fast'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            dynamic.scan(*operands, **options)
    adding = dynamic.cell(children=2)(of_no_product)
    carry = {"slow": H, "state": H}
    with pytest.raises(ValueError, match="bias is given, but there are no products for it"):
        dynamic.scan(adding, None, carry, WITH_X, jnp.ones((1, 3)), bias=jnp.ones(0))
    for children, error in ((0, ValueError), (1.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"dynamic\.cell: children must be"):
            dynamic.cell(children=children)
    with pytest.raises(TypeError, match=r"dynamic\.chain: cell must be a function"):
        dynamic.chain(3)


def test_a_bias_beside_weights_in_sixteen_bits():
    """Its tangent and gradient are of one product with those of the weights, or by themselves."""
    p = problem("tree_lstm_with_x", h=16, dtype=jnp.float32, seed=4)
    operands = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), finite(p.operands))
    together = jax.tree.map(lambda x: jnp.stack([x, x / 2]), operands)

    def run(implementation):
        def scan(*x):
            return jax.tree.map(jnp.float32, p.scan(*x, implementation=implementation))

        def of(*x):
            tangent = jax.jvp(scan, x, like(x))[1]
            return tangent, jax.grad(lambda x: dot(scan(*x), tangent))(x)

        return compiled(jax.vmap(of)), jax.make_jaxpr(of)(*operands)

    (joined, program), (apart, other) = run(None), run("xla")
    assert "[12,56]" in str(program)  # 3 children of 16 units, and columns of ones
    assert "[12,56]" not in str(other)
    for got, x in zip(leaves(joined(*together)), leaves(apart(*together)), strict=True):
        got, x = np.asarray(got, np.float32), np.asarray(x, np.float32)
        assert np.abs(got - x).max() <= 0.02 * np.abs(x).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sums_of_rows_are_wide(dtype):
    """Each as exact as sums in float32, whatever the dtype of what they add up."""
    rows = jax.random.normal(jax.random.key(0), (2, 1000, 3, 5)).astype(dtype)
    got = jax.jit(sum_of_rows)(rows)
    exact = np.asarray(rows, np.float64).sum(1, keepdims=True)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, exact, atol=1e-6 * np.abs(np.asarray(rows, float)).sum(1).max())
