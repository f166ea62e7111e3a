"""The recurrent scans under the transformations of JAX: derivatives, vmap, sharding, export."""

from __future__ import annotations

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from recurrent_problems import CELLS, compiled, problem

from jaxsparse import CSR, EXPORT_DISABLED_CHECKS, Topology, recurrent
from jaxsparse.primitive import equations
from jaxsparse.recurrent import LSTM, elman, products

LENGTHS = jnp.array([0, 5, 3])  # of T = 5
EVERY = {"reverse": True, "seq_lengths": LENGTHS}
DEVICES = jax.devices("cpu")
WEIGHTS = pytest.mark.parametrize("sparse", [False, True], ids=["dense", "csr"])
KINDS = pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)

leaves = jax.tree.leaves


def total(results):
    """A number that depends on every result, and not linearly."""
    return sum(jnp.sum(jnp.sin(x)) for x in leaves(results))


def loss_of(function, **options):
    return lambda operands: total(function(*operands, **options))


def dot(a, b):
    return sum(jnp.vdot(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


def like(tree, seed=0):
    """Random numbers in the form of a tree."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), tree)


def finite(p):
    """The problem with padding that a reference may read."""
    return p._replace(weights=jnp.nan_to_num(p.weights))


def close(got, expected, rtol, atol):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, expected)


# In float64 sums of some hundred numbers about 1, in another order than the oracle's.
exact = functools.partial(close, rtol=1e-11, atol=1e-12)
# The same in float32.
single = functools.partial(close, rtol=1e-5, atol=1e-5)


# ---- Derivatives ----


@WEIGHTS
@pytest.mark.parametrize("name", CELLS)
def test_gradients(name, sparse):
    """With products that are kept or recomputed: the LSTM by both, and each other cell."""
    of_cell = sparse == (name in ("GRU", "three_leaves"))
    forms = {False, True} if name == "LSTM" or (of_cell and not sparse) else {of_cell}
    with jax.enable_x64(True):
        p = finite(problem(name, sparse, dtype=jnp.float64))
        expected = compiled(jax.grad(loss_of(p.reference, **EVERY)))(p.operands)
        for recompute in forms:
            got = compiled(jax.grad(loss_of(p.scan, recompute=recompute, **EVERY)))(p.operands)
            exact(got, expected)


@pytest.mark.parametrize(
    "name, sparse, options",
    [
        ("LSTM", True, {"recompute": True, **EVERY}),
        ("three_leaves", False, EVERY),
    ],
)
def test_second_derivatives(name, sparse, options):
    """Forward over reverse, reverse over reverse, reverse over forward."""
    with jax.enable_x64(True):
        p = finite(problem(name, sparse, T=4, dtype=jnp.float64))
        if "seq_lengths" in options:
            options = {**options, "seq_lengths": jnp.array([0, 4, 3])}
        direction = like(p.operands)

        @compiled
        def ours(operands):
            loss = loss_of(p.scan, **options)
            gradient = jax.grad(loss)
            slope = lambda operands: jax.jvp(loss, (operands,), (direction,))[1]  # noqa: E731
            return (
                jax.jvp(gradient, (operands,), (direction,))[1],
                jax.grad(lambda operands: dot(gradient(operands), direction))(operands),
                jax.grad(slope)(operands),
            )

        @compiled
        def oracle(operands):
            plain = {k: v for k, v in options.items() if k != "recompute"}
            gradient = jax.grad(loss_of(p.reference, **plain))
            return jax.jvp(gradient, (operands,), (direction,))[1]

        expected = oracle(p.operands)
        for got in ours(p.operands):
            exact(got, expected)


def test_derivatives_by_differences():
    # An oracle without JAX's derivatives. All operands, order 2, both modes.
    with jax.enable_x64(True):
        p = finite(problem("RNN", True, T=3, B=2, h=3, dtype=jnp.float64))
        options = {"seq_lengths": jnp.array([2, 3]), "recompute": True}
        function = jax.jit(functools.partial(p.scan, **options))
        check_grads(function, p.operands, 2, modes=("fwd", "rev"), eps=1e-4)


def test_the_fourth_derivative_recomputes():
    with jax.enable_x64(True):
        p = problem("RNN", T=3, B=1, h=2, dtype=jnp.float64)

        def line(function, **options):
            along = lambda s: function(s * p.weights, p.carry, s * p.xs, **options)  # noqa: E731
            value = lambda s: total(along(s))  # noqa: E731
            forward = lambda f: lambda s: jax.jvp(f, (s,), (1.0,))[1]  # noqa: E731
            return compiled(forward(jax.grad(forward(jax.grad(value)))))(1.0)

        exact(line(p.scan, recompute=True), line(p.reference))


def test_high_orders_take_no_time_to_trace():
    # A step's form was once asked of the one beneath it again and again: minutes for this one.
    p = problem("GRU", T=2, B=1, h=2)
    function = lambda x: total(p.scan(p.weights, x, p.xs))  # noqa: E731
    for _ in range(4):
        gradient = jax.grad(function)
        function = lambda x, gradient=gradient: total(gradient(x))  # noqa: E731
    jaxpr = jax.make_jaxpr(function)(p.carry)
    assert 8 <= sum("step" in e.params for e in jaxpr.eqns) <= 40


@WEIGHTS
def test_jacobians(sparse):
    p = problem("GRU", sparse, T=3, B=2, h=2)
    function = lambda carry, xs: p.scan(p.weights, carry, xs)[1]  # noqa: E731
    forward, backward = (
        compiled(jacobian(function, (0, 1)))(p.carry, p.xs) for jacobian in (jax.jacfwd, jax.jacrev)
    )
    single(forward, backward)
    # A step depends on its own input and those before it.
    _, by_xs = forward
    for t, s, b, c in itertools.product(range(3), range(3), range(2), range(2)):
        assert np.any(by_xs[t, b, :, s, c]) == (s <= t and b == c)


@pytest.mark.parametrize("sparse, recompute", [(False, False), (True, True)])
def test_linearize_and_transpose(sparse, recompute):
    p = finite(problem("three_leaves", sparse))
    function = functools.partial(p.scan, recompute=recompute, **EVERY)
    out = jax.eval_shape(function, *p.operands)
    tangents, cotangents = like(p.operands, 1), like(out, 2)

    @compiled
    def by_linearization(operands, tangents, cotangents):
        out, linear = jax.linearize(function, *operands)
        pulled = jax.linear_transpose(linear, *tangents)(cotangents)
        jvp = jax.jvp(function, operands, tangents)
        vjp = jax.vjp(function, *operands)[1](cotangents)
        return (out, linear(*tangents), pulled), (*jvp, vjp)

    got, expectations = by_linearization(p.operands, tangents, cotangents)
    (out, along, pulled), (expected, tangent, expected_pulled) = got, expectations
    single(out, expected)
    single(along, tangent)
    np.testing.assert_allclose(dot(cotangents, tangent), dot(pulled, tangents), rtol=1e-4)
    single(pulled, expected_pulled)


def test_a_linear_scan_transposes():
    p = problem("RNN")
    zero = jnp.zeros_like(p.carry)
    function = lambda xs: recurrent.scan(elman("identity"), p.weights, zero, xs)[1]  # noqa: E731
    ct = like(p.xs)
    (got,) = jax.linear_transpose(function, p.xs)(ct)
    single(got, jax.vjp(function, p.xs)[1](ct)[0])


@WEIGHTS
def test_it_is_not_linear_in_its_weights(sparse):
    p = problem("RNN", sparse)
    with pytest.raises(ValueError, match="it is not linear in its weights"):
        jax.linear_transpose(lambda w: p.scan(w, p.carry, p.xs)[1], p.weights)(p.xs)


def test_only_what_is_asked_for():
    """The derivative in each operand alone is that in all of them."""
    p = problem("LSTM")

    @compiled
    def gradients(operands):
        loss = lambda *operands: total(p.scan(*operands))  # noqa: E731
        every = jax.grad(loss, (0, 1, 2, 3))(*operands)
        return every, tuple(jax.grad(loss, i)(*operands) for i in range(4))

    every, alone = gradients(p.operands)
    single(alone, every)
    # A tangent of the state alone, and none.
    c, h = p.carry
    run = lambda h: p.scan(p.weights, (c, h), p.xs)  # noqa: E731
    tangents = compiled(lambda h, dh: jax.jvp(run, (h,), (dh,))[1])
    assert all(np.any(x) for x in leaves(tangents(h, jnp.ones_like(h))))
    assert not any(np.any(x) for x in leaves(tangents(h, jnp.zeros_like(h))))


def test_checkpoint_and_control_flow():
    p = problem("GRU", True)
    plain = lambda carry, xs: p.scan(p.weights, carry, xs, p.bias)  # noqa: E731

    def looped(carry, xs):
        """One step at a time, in a loop of JAX."""
        return jax.lax.scan(lambda c, x: (plain(c, x[None])[0],) * 2, carry, xs)

    def branched(carry, xs):
        return jax.lax.cond(
            xs[0, 0, 0] > 100, lambda: (carry, xs[..., :5]), lambda: plain(carry, xs)
        )

    def value_and_gradient(function):
        run = jax.value_and_grad(lambda *operands: total(function(*operands)), (0, 1))
        return compiled(run)(p.carry, p.xs)

    expected = value_and_gradient(plain)
    for function in (jax.checkpoint(plain), looped, branched):
        single(value_and_gradient(function), expected)
    with jax.disable_jit():
        single(plain(p.carry, p.xs), jax.jit(plain)(p.carry, p.xs))


@WEIGHTS
def test_gradients_repeat_bitwise(sparse):
    p = problem("LSTM", sparse, T=9, B=16, h=17)
    gradient = compiled(jax.grad(loss_of(p.scan, seq_lengths=jnp.arange(16) % 10)))
    first = gradient(p.operands)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, gradient(p.operands), first)


def test_gradients_have_the_dtypes_of_their_operands():
    p = problem("LSTM")
    c, h = p.carry
    p = p._replace(
        xs=p.xs.astype(jnp.bfloat16),
        carry=(c, h.astype(jnp.bfloat16)),
        bias=p.bias.astype(jnp.float16),
    )
    got = compiled(jax.grad(loss_of(p.scan)))(p.operands)
    assert [g.dtype for g in leaves(got)] == [x.dtype for x in leaves(p.operands)]
    with jax.enable_x64(True):
        wide = p._replace(xs=p.xs.astype(jnp.float64))
        expected = compiled(jax.grad(loss_of(wide.reference)))(wide.operands)
    # What is kept is of bfloat16; each number is a sum of a dozen or so products of it.
    for a, b in zip(leaves(got), leaves(expected), strict=True):
        a, b = np.float64(a), np.float64(b)
        assert np.linalg.norm(a - b) < 2**-7 * np.linalg.norm(b)


# ---- What a gradient keeps ----

# Leaves that the derivative reads.
READ = {"RNN": 0, "GRU": 1, "LSTM": 1, "SLSTM": 3, "three_leaves": 3}


@pytest.mark.parametrize("recompute", [False, True])
@WEIGHTS
@pytest.mark.parametrize("name", CELLS)
def test_residuals(name, sparse, recompute):
    """The states before each step, xs, the carries that are read, and perhaps the products."""
    p = problem(name, sparse, T=13, dtype=jnp.bfloat16)
    scan = functools.partial(p.scan, recompute=recompute)
    pull = jax.eval_shape(lambda *operands: jax.vjp(scan, *operands)[1], *p.operands)
    kept = [x for x in leaves(pull) if 13 in x.shape or 39 in x.shape]
    assert {x.dtype for x in kept} == {jnp.dtype(jnp.bfloat16)}
    one, gates = 13 * 3 * 5, CELLS[name][1] * 13 * 3 * 5
    expected = [one, gates, *[one] * READ[name], *[gates] * (not recompute)]
    assert sorted(x.size for x in kept) == sorted(expected)


@pytest.mark.parametrize("directions", [1, 2])
def test_gradient_of_dense_weights_on_one_cpu(directions, monkeypatch):
    """Steps and batch are one dimension of the product there, of which XLA transposes nothing."""
    p = problem("LSTM")

    def loss(weights):
        if directions == 1:
            return jnp.sum(p.scan(weights, *p.operands[1:])[1] ** 2)
        pairs = ((weights, weights / 2), (p.carry, p.carry), (p.xs, p.xs))
        forward, backward = recurrent.bidirectional_scan(p.cell, *pairs)[1]
        return jnp.sum(forward**2) + jnp.sum(backward**3)

    def gradient(on_one_cpu):
        monkeypatch.setattr(products, "_on_one_cpu", lambda: on_one_cpu)
        jaxpr = jax.make_jaxpr(jax.grad(lambda weights: loss(weights)))(p.weights)
        dots = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
        most = max(len(e.params["dimension_numbers"][0][0]) for e in dots)
        return most, compiled(jaxpr_as_fun(jaxpr))(p.weights)

    (several, expected), (one, got) = gradient(False), gradient(True)
    assert (several, one) == (2, 1)
    single(got, expected)


# ---- vmap ----


AXES = {"weights": 0, "carry": 1, "xs": 2, "bias": 1, "lengths": 0}


def mapped(p, names, size=2):
    """The operands with those named mapped along AXES, and the axes."""
    operands = {**dict(zip(AXES, p.operands, strict=False)), "lengths": LENGTHS}

    def stack(name, tree):
        if name not in names:
            return tree
        if name == "lengths":
            return jnp.stack([tree, tree[::-1]])
        scale = 1 + jnp.arange(size) / 4
        return jax.tree.map(lambda x: jnp.stack([s * x for s in scale], AXES[name]), tree)

    axes = tuple(AXES[name] if name in names else None for name in AXES)
    return [stack(*item) for item in operands.items()], axes


@pytest.mark.parametrize(
    "sparse, names",
    [
        *((False, (name,)) for name in AXES),
        (True, ("weights",)),
        (True, ("carry", "xs")),
        (True, ("weights", "lengths")),
        (False, tuple(AXES)),
    ],
)
def test_vmap(sparse, names):
    p = finite(problem("three_leaves", sparse))
    operands, axes = mapped(p, names)

    def value_and_gradient(weights, carry, xs, bias, lengths):
        operands = (weights, carry, xs, bias)
        return jax.value_and_grad(loss_of(p.scan, seq_lengths=lengths))(operands), p.scan(
            *operands, seq_lengths=lengths
        )

    got = compiled(jax.vmap(value_and_gradient, axes))(*operands)

    def taken(i, x, axis):
        return x if axis is None else jax.tree.map(lambda x: jnp.take(x, i, axis), x)

    for i in range(2):
        one = map(functools.partial(taken, i), operands, axes)
        single(taken(i, got, 0), _unmapped(sparse, *one))


@functools.partial(compiled, static_argnums=0)
def _unmapped(sparse, weights, carry, xs, bias, lengths):
    p = problem("three_leaves", sparse)
    operands = (weights, carry, xs, bias)
    return jax.value_and_grad(loss_of(p.scan, seq_lengths=lengths))(operands), p.scan(
        *operands, seq_lengths=lengths
    )


@WEIGHTS
def test_sequences_fold_into_the_batch(sparse):
    p = problem("LSTM", sparse)
    xs = jnp.stack([p.xs, 2 * p.xs, -p.xs], 2)  # (T, B, 3, ...)
    xs = jnp.stack([xs, xs / 2])

    def gradient(carry, xs):
        return jax.grad(loss_of(lambda *o: p.scan(*o)[1]))((p.weights, carry, xs))

    inner = jax.vmap(gradient, (None, 2), (0, 1, 2))
    both = jax.vmap(lambda carry, xs: inner(carry, xs), (None, 0))
    jaxpr = jax.make_jaxpr(both)(p.carry, xs).jaxpr
    for equation in (found := [e for e in equations(jaxpr) if "step" in e.params]):
        assert equation.invars[0].aval.shape == (1, *p.weights.shape)
        assert equation.outvars[0].aval.shape[:3] == (1, 5, 3 * 3 * 2)
    assert len(found) == 2
    dweights, _, dxs = compiled(both)(p.carry, xs)
    one = compiled(gradient)
    for i, j in np.ndindex(2, 3):
        expected, _, expected_dxs = one(p.carry, xs[i, :, :, j])
        single(dweights[i, j], expected)
        single(dxs[i, :, :, j], expected_dxs)


def test_vmap_over_weights_and_sequences():
    """One level each, in both orders, with axes that are not the first."""
    p = problem("GRU", True)
    weights, xs = jnp.stack([p.weights, -p.weights], 1), jnp.stack([p.xs, p.xs / 2, -p.xs], 1)
    run = lambda w, x: p.scan(w, p.carry, x)[1]  # noqa: E731
    weights, xs = np.asarray(weights), np.asarray(xs)
    outer_weights, outer_xs = compiled(
        lambda *operands: (
            jax.vmap(jax.vmap(run, (None, 1), 1), (1, None), 2)(*operands),
            jax.vmap(jax.vmap(run, (1, None), 1), (None, 1), 2)(*operands),
        )
    )(weights, xs)
    for i, j in np.ndindex(2, 3):
        expected = run(weights[:, i], xs[:, j])
        single(outer_weights[:, j, i], expected)
        single(outer_xs[:, i, j], expected)


def test_vmap_over_patterns():
    a, b = (problem("RNN", True, seed=seed) for seed in (0, 0))
    flipped = CSR.fromdense(a.dense.T[::-1].astype(jnp.float32), nse=a.topology.nse)
    matrices = jax.tree.map(lambda *x: jnp.stack(x), CSR(a.weights, a.topology), flipped)
    run = lambda m: recurrent.scan(elman(), m, a.carry, a.xs)[1]  # noqa: E731
    got = compiled(jax.vmap(run))(matrices)
    single(got[0], b.scan(*b.operands[:3])[1])
    single(got[1], run(flipped))


# ---- Devices ----


def mesh_of(kind):
    if len(DEVICES) < 8:
        pytest.skip("needs 8 CPU devices (tests/conftest.py)")
    return jax.make_mesh((4, 2), ("data", "model"), (kind, kind), devices=DEVICES[:8])


def placed(mesh, p, lengths):
    """A problem whose batch is cut in four."""
    put = lambda tree, *spec: jax.tree.map(  # noqa: E731
        lambda x: jax.device_put(x, NamedSharding(mesh, P(*spec))), tree
    )
    operands = put(p.weights), put(p.carry, "data"), put(p.xs, None, "data"), put(p.bias)
    p = p._replace(topology=None if p.topology is None else put(p.topology))
    return p, operands, put(lengths, "data")


def sharded_along(x, mesh, *spec):
    return x.sharding.is_equivalent_to(NamedSharding(mesh, P(*spec)), x.ndim)


@functools.cache
def on_one_device(name, sparse):
    """A problem, lengths of its sequences, its results and the gradient, without a mesh."""
    with jax.default_device(DEVICES[0]):
        p, lengths = finite(problem(name, sparse, B=8)), jnp.arange(8) % 6

        @compiled
        def run(operands):
            scanned, pull = jax.vjp(lambda o: p.scan(*o, seq_lengths=lengths), operands)
            return scanned, pull(jax.grad(total)(scanned))[0]

        return p, lengths, *run(p.operands)


@KINDS
@WEIGHTS
def test_a_sharded_batch_stays_sharded(sparse, kind):
    mesh = mesh_of(kind)
    p, lengths, expected, expected_gradient = on_one_device("LSTM", sparse)
    with jax.set_mesh(mesh):
        q, operands, cut = placed(mesh, p, lengths)
        forward = compiled(lambda operands, lengths: q.scan(*operands, seq_lengths=lengths))
        forward = forward.lower(operands, cut).compile()
        text = forward.as_text()
        assert not any(c in text for c in ("all-gather", "all-reduce", "all-to-all", "permute("))
        (c, h), ys = forward(operands, cut)
        assert sharded_along(ys, mesh, None, "data") and sharded_along(c, mesh, "data")
        gradient = compiled(
            lambda operands, lengths: jax.grad(loss_of(q.scan, seq_lengths=lengths))(operands)
        )
        gradient = gradient.lower(operands, cut).compile()
        text = gradient.as_text()
        assert "all-reduce" in text
        if not sparse or kind == AxisType.Auto:  # explicit axes: sddmm gathers what it sums over
            assert "all-gather" not in text
        got = gradient(operands, cut)
        assert sharded_along(got[2], mesh, None, "data")
    single(((c, h), ys), expected)
    single(got, expected_gradient)


@KINDS
@pytest.mark.parametrize("recompute", [False, True])
def test_shard_map(recompute, kind):
    mesh = mesh_of(kind)
    sparse = recompute
    p, lengths, _, expected = on_one_device("GRU", sparse)
    specs = (P(), P("data"), P(None, "data"), P())

    def local(operands, lengths, topology):
        results = p._replace(topology=topology).scan(
            *operands, seq_lengths=lengths, recompute=recompute
        )
        return jax.lax.psum(total(results), "data")

    with jax.set_mesh(mesh):
        q, *operands = placed(mesh, p, lengths)
        operands.append(q.topology)
        options = {"mesh": mesh, "in_specs": (specs, P("data"), P())}
        inside = jax.shard_map(jax.grad(local), out_specs=specs, **options)
        summed = jax.shard_map(local, out_specs=P(), **options)
        got = compiled(lambda *o: (inside(*o), jax.grad(summed)(*o)))(*operands)
    for gradient in got:
        single(gradient, expected)


def test_explicit_axes_refuse_sharded_units():
    mesh = mesh_of(AxisType.Explicit)
    p = problem("RNN", h=4)
    with jax.set_mesh(mesh):
        weights = jax.device_put(p.weights, NamedSharding(mesh, P(None, "model")))
        with pytest.raises(ValueError, match="recurrent_scan: recurrent is sharded along m"):
            jax.jit(p.scan)(weights, p.carry, p.xs)


# ---- Export ----


@WEIGHTS
def test_export(sparse):
    p = problem("LSTM", sparse)
    (b,) = jax.export.symbolic_shape("b")
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in (p.weights.shape, (b, 5), (b, 5), (5, b, 20))
    ]

    def run(weights, c, h, xs):
        return p.scan(weights, (c, h), xs)[1]

    exported = jax.export.export(compiled(run), disabled_checks=EXPORT_DISABLED_CHECKS)(*shapes)
    c, h = p.carry
    for batch in (1, 3):
        operands = p.weights, c[:batch], h[:batch], p.xs[:, :batch]
        single(exported.call(*operands), run(*operands))


def test_an_exported_gradient():
    p = problem("GRU")
    gradient = compiled(jax.grad(loss_of(p.scan)))
    exported = jax.export.export(gradient, disabled_checks=EXPORT_DISABLED_CHECKS)(p.operands)
    single(exported.call(p.operands), gradient(p.operands))


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_an_exported_gradient_of_an_open_batch(platform):
    h, T = 64, 9
    topology = Topology.from_mask(np.random.default_rng(0).random((h, h)) < 0.5)
    (b,) = jax.export.symbolic_shape("b")
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((topology.nse,), (b, h), (T, b, h))
    ]

    def loss(values, carry, xs):
        return total(recurrent.scan(elman(), CSR(values, topology), carry, xs))

    exported = jax.export.export(
        compiled(jax.grad(loss)), platforms=[platform], disabled_checks=EXPORT_DISABLED_CHECKS
    )(*shapes)
    assert exported.out_avals[0].shape == (topology.nse,)


def test_a_bidirectional_scan_maps_and_differentiates():
    p = problem("LSTM")
    both = functools.partial(recurrent.bidirectional_scan, LSTM)

    def gradient(xs):
        pairs = ((p.weights, -p.weights), (p.carry, p.carry))
        return jax.grad(lambda x: total(both(*pairs, (x, x[::-1]))[1]))(xs)

    xs = jnp.stack([p.xs, p.xs / 2], 1)
    got = compiled(jax.vmap(gradient, 1, 1))(xs)
    for i in range(2):
        single(got[:, i], compiled(gradient)(xs[:, i]))


def test_a_tangent_of_weights_passes_by_an_infinite_derivative_of_inputs():
    def cell(x, r, h):
        h = jnp.tanh(r[0]) + jnp.sqrt(x[0])
        return h, h

    w, h, xs = jnp.eye(4) / 2, jnp.ones((2, 4)), jnp.zeros((3, 2, 4))
    run = lambda w: recurrent.scan(cell, w, h, xs)[1]  # noqa: E731
    _, tangent = compiled(lambda w: jax.jvp(run, (w,), (w,)))(w)
    assert np.isfinite(tangent).all() and np.abs(tangent).max() > 0


@pytest.mark.several_devices(8)
def test_vmap_keeps_a_sharded_batch_sharded():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(None, None, "d")
    xs = jax.device_put(jnp.ones((3, 5, 8, 4)), jax.sharding.NamedSharding(mesh, spec))

    def scan(xs):
        return recurrent.scan(recurrent.elman(), jnp.eye(4), jnp.zeros((8, 4)), xs)[1]

    compiled = jax.jit(jax.vmap(scan)).lower(xs).compile()
    assert "all-gather" not in compiled.as_text()


# ---- What runs ----


@pytest.mark.parametrize(
    ("weights", "h"),
    [
        ("dense bfloat16", 64),
        ("sparse bfloat16", 256),
        ("sparse float32", 256),
        ("sparse bfloat16", 64),
        ("sparse float32", 64),
    ],
)
def test_weight_gradients_meet_16_bit_operands(weights, h):
    """One product after the scan in 16 bits, whatever dtype the weights have.

    It is dense, on tensor cores, but for small sparse weights, whose entries are sooner computed.
    """
    kind, dtype = weights.split()
    gates, B, T = 4, 2, 256
    topology = Topology.from_mask(np.random.default_rng(0).random((gates * h, h)) < 0.5)
    size = (h, gates * h) if kind == "dense" else (topology.nse,)
    shapes = ((size, dtype), ((B, h), "bfloat16"), ((T, B, gates * h), "bfloat16"))

    def loss(w, carry, xs):
        matrix = w if kind == "dense" else CSR(w, topology)
        _, ys = recurrent.scan(recurrent.LSTM, matrix, (carry, carry), xs)
        return ys.astype(jnp.float32).sum()

    operands = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    traced = jax.jit(jax.grad(loss)).trace(*operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    dense = re.findall(r"stablehlo.dot_general.*: \((.*)\) ->", text)
    sampled = re.findall(r"@jaxsparse_sddmm\(.*: \((.*)\) ->", text)
    (product,) = [*dense, *sampled]
    assert product.count("xbf16>") == 2
    assert len(sampled) == (kind == "sparse" and h == 64)
    assert traced.jaxpr.out_avals[0].dtype == dtype
