"""Recurrent stacks under the transformations of JAX, and what a gradient keeps."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from recurrent_problems import CELLS, compiled
from stack_problems import NAMES, Stack, stack

from jaxsparse import EXPORT_DISABLED_CHECKS, recurrent
from jaxsparse.recurrent import layer_step, stack_graph
from jaxsparse.recurrent.engine import printed_step
from jaxsparse.recurrent.graph import recurrent_graph_p
from jaxsparse.recurrent.step import _traced

LENGTHS = jnp.array([0, 5, 3])  # of T = 5
RESETS = jnp.asarray(np.random.default_rng(0).random((5, 3)) < 0.3)
EVERY = {"reverse": True, "seq_lengths": LENGTHS, "resets": RESETS}

leaves = jax.tree.leaves


def total(results):
    """A number that depends on every result, and not linearly."""
    return sum(jnp.sum(jnp.sin(x)) for x in leaves(results))


def like(tree, seed=0):
    """Random numbers in the form of a tree."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), tree)


def close(got, expected, rtol, atol):
    for a, b in zip(leaves(got), leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


exact = functools.partial(close, rtol=1e-10, atol=1e-11)
single = functools.partial(close, rtol=2e-5, atol=2e-5)


def run(p, function=recurrent.stack_scan, **options):
    """A scan of a stack as a function of what it is differentiable in."""
    return lambda floating: function(*p.of(floating), **options)


def loss(p, function=recurrent.stack_scan, **options):
    return lambda floating: total(run(p, function, **options)(floating))


# ---- Derivatives ----


@pytest.mark.parametrize("recompute", [False, True])
def test_second_derivatives(recompute):
    """Forward over reverse, reverse over reverse, reverse over forward; jvp."""
    with jax.enable_x64(True):
        # The statistics of the first layer's output are inputs of the second one's tangent.
        names = ["GRU", "RNN"] if recompute else ["three_leaves", "RNN"]
        p = stack(
            names,
            skip=1,
            norm="rms" if recompute else "layer",
            weights="csr" if recompute else "dense",
            dtype=jnp.float64,
        )
        along = like(p.floating)

        def derivatives(loss):
            slope = lambda x: jax.jvp(loss, (x,), (along,))[1]  # noqa: E731
            gradient = jax.grad(loss)
            dot = lambda x: sum(map(jnp.vdot, gradient(x), along))  # noqa: E731
            return jax.jvp(gradient, (p.floating,), (along,))[1], jax.grad(dot), jax.grad(slope)

        @compiled
        def ours(floating):
            forward, *rest = derivatives(loss(p, recompute=recompute, **EVERY))
            return [forward, *(f(floating) for f in rest)]

        @compiled
        def oracle(floating):
            of_reference = run(p, reference.stack_scan, **EVERY)
            gradient = jax.grad(loss(p, reference.stack_scan, **EVERY))
            return (
                jax.jvp(of_reference, (floating,), (along,)),
                jax.jvp(gradient, (floating,), (along,))[1],
            )

        tangents, expected = oracle(p.floating)
        scan = run(p, recompute=recompute, **EVERY)
        exact(compiled(lambda x: jax.jvp(scan, (x,), (along,)))(p.floating), tangents)
        for got in ours(p.floating):
            exact(got, expected)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_second_derivatives_through_the_input_alone(norm):
    """Of a linear cell, whose products of the state no derivative reads."""
    with jax.enable_x64(True):
        p = stack(["RNN"], layers=1, norm=norm, dtype=jnp.float64)
        linear = dataclasses.replace(p.layers[0], cell=recurrent.elman("identity"))
        p = p._replace(layers=[linear])

        def second(function, **options):
            def value(w, xs):
                layer = dataclasses.replace(linear, input=w)
                return jnp.sum(function([layer], p.carries, xs, **options)[1])

            steepness = lambda *both: jnp.sum(jax.grad(value)(*both) ** 2)  # noqa: E731
            of_many = jax.vmap(jax.grad(steepness, (0, 1)), (None, 0))
            return compiled(of_many)(linear.input, jnp.stack([p.xs, jnp.sin(p.xs)]))

        exact(second(recurrent.stack_scan, recompute=True), second(reference.stack_scan))


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_norms_without_an_epsilon_and_padding(norm, both_ways):
    """What has no norm, the zeros of the padding, reaches no gradient."""
    p = stack(["RNN"], layers=1, norm=norm)
    p = p._replace(layers=[dataclasses.replace(x, norm_epsilon=0.0) for x in p.layers])

    def gradient(xs, **options):
        def value(layers):
            if both_ways:
                pairs = [(x, x) for x in layers], [(x, x) for x in p.carries]
                return total(recurrent.bidirectional_stack_scan(*pairs, xs, **options))
            return total(recurrent.stack_scan(layers, p.carries, xs, **options))

        return compiled(jax.grad(value))(p.layers)

    single(gradient(p.xs, seq_lengths=jnp.array([3, 3, 3])), gradient(p.xs[:3]))


def test_derivatives_by_differences():
    """First ones: with these, the oracle's are right, and it has all others."""
    with jax.enable_x64(True):
        p = stack(["GRU", "RNN"], T=3, B=2, h=2, skip=1, dtype=jnp.float64)
        options = {"seq_lengths": jnp.array([2, 3]), "resets": jnp.eye(3, 2, -1, bool)}
        check_grads(jax.jit(run(p, **options)), (p.floating,), 1, modes=("fwd", "rev"), eps=1e-4)


def test_derivatives_of_some_operands():
    """Nodes that do not move have no tangent; those that no cotangent reaches, no adjoint."""
    p = stack(["GRU", "RNN"], skip=1)
    value = loss(p, return_all=True)
    every = compiled(jax.grad(value))(p.floating)

    @compiled
    def alone(floating):
        return [
            jax.grad(lambda x, i=i: value([*floating[:i], x, *floating[i + 1 :]]))(x)
            for i, x in enumerate(floating)
        ]

    single(alone(p.floating), every)

    def of_lowest(floating):
        return jnp.sum(run(p, return_all=True)(floating)[1][0] ** 2)

    gradient = p.of(compiled(jax.grad(of_lowest))(p.floating))
    assert np.any(gradient.layers[0].input) and not any(map(np.any, leaves(gradient.layers[1:])))
    one = Stack(p.layers[:1], p.carries[:1], p.xs)
    expected = compiled(jax.grad(lambda x: jnp.sum(run(one)(x)[1] ** 2)))(one.floating)
    single(leaves((gradient.layers[0], gradient.carries[0], gradient.xs)), expected)


def test_linear_transpose():
    p = stack(["RNN", "RNN"], biased=False)
    layers = [
        recurrent.Layer(recurrent.elman("identity"), recurrent=x.recurrent, input=x.input)
        for x in p.layers
    ]
    zeros = jax.tree.map(jnp.zeros_like, p.carries)
    function = lambda xs: recurrent.stack_scan(layers, zeros, xs)[1]  # noqa: E731
    ct = like(function(p.xs))
    single(jax.linear_transpose(function, p.xs)(ct)[0], jax.vjp(function, p.xs)[1](ct)[0])
    with pytest.raises(ValueError, match="it is not linear in its weights"):

        def of_weights(w):
            layer = recurrent.Layer(layers[0].cell, recurrent=layers[0].recurrent, input=w)
            return recurrent.stack_scan([layer], zeros[:1], p.xs)[1]

        jax.linear_transpose(of_weights, layers[0].input)(ct)


def test_gradients_repeat_bitwise():
    p = stack(NAMES, layers=3, T=9, B=16, h=17)
    gradient = compiled(jax.grad(loss(p, seq_lengths=jnp.arange(16) % 10)))
    first = gradient(p.floating)
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, gradient(p.floating), first)


def test_gradients_have_the_dtypes_of_their_operands():
    p = stack(["LSTM", "GRU"], biased=False)
    p = p._replace(xs=p.xs.astype(jnp.bfloat16))
    got = compiled(jax.grad(loss(p)))(p.floating)
    assert [g.dtype for g in got] == [x.dtype for x in p.floating]
    with jax.enable_x64(True):
        wide = p._replace(xs=p.xs.astype(jnp.float64))
        expected = compiled(jax.grad(loss(wide, reference.stack_scan)))(wide.floating)
    for a, b in zip(got, expected, strict=True):
        a, b = np.float64(a), np.float64(b)
        assert np.linalg.norm(a - b) < 2**-6 * np.linalg.norm(b)


# ---- What a gradient keeps, and joined gates ----


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name, joined, read", [("RNN", 1, 0), ("LSTM", 4, 1), ("GRU", 2, 1)])
def test_residuals(name, joined, read, recompute):
    """A layer keeps its joined products, its states, and the carries that are read."""
    p = stack([name], layers=3, T=13, dtype=jnp.bfloat16, biased=False)
    pull = jax.eval_shape(
        lambda floating: jax.vjp(run(p, recompute=recompute), floating)[1], p.floating
    )
    kept = [x for x in leaves(pull) if x.shape[:1] == (13,)]
    assert {x.dtype for x in kept} == {jnp.dtype(jnp.bfloat16)}
    gates = CELLS[name][1]
    products = 0 if recompute else 2 * gates - joined
    of_input = p.xs.size
    assert sum(x.size for x in kept) - of_input == 3 * (products + 1 + read) * 13 * 3 * 5
    if name == "LSTM" and not recompute:
        assert products + 1 + read == 6


def test_joined_and_unjoined_gates_agree(monkeypatch):
    with jax.enable_x64(True):
        p = stack(["GRU", "LSTM", "three_leaves"], layers=3, skip=1, dtype=jnp.float64)
        bare = {
            name: stack_graph.checked_step(
                "", CELLS[name][0], (g, g), tree, None, False, False, (False,) * tree.num_leaves
            )
            for name, (_, g, form) in CELLS.items()
            for tree in [jax.tree.structure(form)]
        }
        joined = {name: layer_step.joined_gates(step) for name, step in bare.items()}
        assert joined["RNN"] == (True,) and joined["LSTM"] == (True,) * 4
        assert joined["GRU"] == (True, True, False) and joined["three_leaves"] == (True, False)
        value = compiled(jax.value_and_grad(loss(p, **EVERY)))
        got = value(p.floating)
        monkeypatch.setattr(stack_graph, "joined_gates", lambda step: (False,) * step.gates)
        exact(got, compiled(jax.value_and_grad(loss(p, **EVERY)))(p.floating))


@pytest.mark.parametrize(
    "name, weights, lengths",
    [
        ("RNN", "csr", None),
        ("GRU", "dense", None),
        ("GRU", "dense", LENGTHS),
        ("LSTM", "heads", LENGTHS),
        ("SLSTM", "dense", LENGTHS),
    ],
    ids=str,
)
def test_one_layer_of_pre_activations_is_a_scan(name, weights, lengths):
    p = stack([name], layers=1, weights=weights, h=6, pre_activations=True)
    ((layer,), (carry,), xs), options = p, {"seq_lengths": lengths}
    bias = layer.recurrent_bias
    layer = dataclasses.replace(layer, bias=None)

    def one(carry, xs):
        (last,), ys = recurrent.stack_scan([layer], [carry], xs, **options)
        return last, ys

    def scan(carry, xs):
        return recurrent.scan(
            layer.cell, layer.recurrent, carry, xs, recurrent_bias=bias, **options
        )

    def value_and_gradient(function):
        def value(carry, xs):
            results = function(carry, xs)
            return total(results), results

        return compiled(jax.value_and_grad(value, (0, 1), has_aux=True))(carry, xs)

    (got, gradient), (expected, of_scan) = value_and_gradient(one), value_and_gradient(scan)
    if lengths is None:
        jax.tree.map(np.testing.assert_array_equal, got[1], expected[1])
    # XLA may add up in another order what is a program of another form.
    close((got, gradient), (expected, of_scan), rtol=1e-5, atol=1e-6)


# ---- Other transformations ----


@pytest.mark.parametrize("names", [("xs",), ("carries",), ("layers",), ("layers", "carries", "xs")])
def test_vmap(names):
    weights = "csr" if len(names) > 1 else "heads"
    p = stack(["LSTM", "GRU"], skip=1, norm="layer", dropout="rows", h=6, weights=weights)
    axes = Stack(*(0 if name in names else None for name in Stack._fields))
    floating = p.floating
    counts = [len(Stack(*x).floating) for x in ((p.layers, [], ()), ([], p.carries, ()))]
    mapped = [
        axes.layers if i < counts[0] else axes.carries if i < sum(counts) else axes.xs
        for i in range(len(floating))
    ]
    operands = [
        x if axis is None else jnp.stack([x, x / 2])
        for x, axis in zip(floating, mapped, strict=True)
    ]

    def value_and_gradient(floating):
        return run(p, **EVERY)(floating), jax.grad(loss(p, **EVERY))(floating)

    got = compiled(jax.vmap(value_and_gradient, (mapped,)))(operands)
    alone = compiled(value_and_gradient)
    for i in range(2):
        one = [x if axis is None else x[i] for x, axis in zip(operands, mapped, strict=True)]
        single([x[i] for x in leaves(got)], leaves(alone(one)))


def test_second_derivatives_of_a_linear_cell():
    """By the weights of the input alone, of which the gradient of xs is a product."""

    def linear(x, r, carry):
        y = x[0] + r[0]
        return y, y

    rng = np.random.default_rng(0)
    u, w, xs, ct = (jnp.asarray(rng.standard_normal(s)) for s in ((3, 3), (4, 3), (3, 2, 4), (2,)))
    zeros = jnp.zeros((2, 3))

    def ours(w, xs):
        return recurrent.stack_scan([recurrent.Layer(linear, u, w)], [zeros], xs)[1]

    def loop(w, xs):
        step = lambda state, x: (x @ w + state @ u,) * 2  # noqa: E731
        return jax.lax.scan(step, zeros, xs)[1]

    def second(function):
        of_xs = jax.grad(lambda xs, w: jnp.sum(function(w, xs) * ct[:, None]))
        return jax.grad(lambda w: total(of_xs(xs, w)))(w)

    single(second(ours), second(loop))


def test_gradients_through_vmap_over_weights():
    """Of a sum over an ensemble, which has some operands in common: those of each one, summed."""
    p = stack(["RNN", "GRU"], T=3, h=3)
    count = len(p._replace(carries=[], xs=()).floating)
    value = loss(p, recompute=True, reverse=True)

    def ensemble(mapped, common):
        return jnp.sum(jax.vmap(lambda own: value([*own, *common]))(mapped))

    mapped, common = [jnp.stack([x, x / 2]) for x in p.floating[:count]], p.floating[count:]
    got, of_common = compiled(jax.grad(ensemble, (0, 1)))(mapped, common)
    one = compiled(jax.grad(value))
    apart = [one([*(x[i] for x in mapped), *common]) for i in range(2)]
    single(got, [jnp.stack(pair) for pair in zip(*(x[:count] for x in apart), strict=True)])
    single(of_common, [a + b for a, b in zip(*(x[count:] for x in apart), strict=True)])


def test_checkpoint_and_control_flow():
    p = stack(["GRU", "LSTM"])
    plain = lambda floating: run(p)(floating)  # noqa: E731

    def chunks(floating):
        """Two runs, the carries handed on in a loop of JAX."""
        q = p.of(floating)
        step = lambda carries, xs: recurrent.stack_scan(q.layers, carries, xs)  # noqa: E731
        carries, ys = jax.lax.scan(step, q.carries, q.xs[:, None])
        return carries, ys[:, 0]

    expected = compiled(jax.value_and_grad(lambda x: total(plain(x))))(p.floating)
    for function in (jax.checkpoint(plain), chunks):
        single(
            compiled(jax.value_and_grad(lambda x, f=function: total(f(x))))(p.floating), expected
        )
    with jax.disable_jit():
        single(plain(p.floating), jax.jit(plain)(p.floating))


def test_a_step_is_the_same_program_where_jit_is_disabled():
    p = stack(["LSTM"])
    gradient = jax.grad(lambda floating: total(recurrent.stack_scan(*p.of(floating))))
    graphs = [
        equation.params["nodes"]
        for equation in jax.make_jaxpr(gradient)(p.floating).eqns
        if equation.primitive is recurrent_graph_p
    ]
    steps = [step for nodes in graphs for step in nodes]

    def printed():
        _traced.cache_clear()
        printed_step.cache_clear()
        return [printed_step(step) for step in steps]

    expected = printed()
    with jax.disable_jit():
        assert printed() == expected


def test_export_of_an_open_batch():
    p = stack(["LSTM", "GRU"], skip=1)
    (b,) = jax.export.symbolic_shape("b")

    def gradient(carries, xs):
        return jax.grad(lambda xs: total(recurrent.stack_scan(p.layers, carries, xs)))(xs)

    def open_(x, axis):
        return jax.ShapeDtypeStruct((*x.shape[:axis], b, *x.shape[axis + 1 :]), x.dtype)

    shapes = jax.tree.map(lambda x: open_(x, 0), p.carries), open_(p.xs, 1)
    exported = jax.export.export(compiled(gradient), disabled_checks=EXPORT_DISABLED_CHECKS)(
        *shapes
    )
    for batch in (1, 3):
        operands = jax.tree.map(lambda x, n=batch: x[:n], p.carries), p.xs[:, :batch]
        single(exported.call(*operands), gradient(*operands))


def reduces_once(text, weights):
    """Whether what devices tell each other is a sum about as large as all weights, in no loop."""
    loops, entry = text.split("ENTRY")
    others = ("all-gather", "all-to-all", "permute(", "reduce-scatter")
    reduced = " ".join(re.findall(r" = (.*) all-reduce\(", entry))
    shapes = re.findall(r"f32\[([\d,]+)\]", reduced)
    numbers = sum(math.prod(map(int, shape.split(","))) for shape in shapes)
    every = sum(x.size for x in leaves(weights))
    alone = "all-reduce" not in loops and not any(c in text for c in others)
    return alone and 0.9 * every < numbers < 1.1 * every


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_sharded_batches(kind):
    devices = jax.devices("cpu")
    if len(devices) < 4:
        pytest.skip("needs 4 CPU devices (tests/conftest.py)")
    mesh = jax.make_mesh((4,), ("data",), (kind,), devices=devices[:4])
    p, lengths = stack(["LSTM", "GRU"], B=8, norm="layer"), jnp.arange(8) % 6
    resets = jnp.asarray(np.random.default_rng(0).random((5, 8)) < 0.3)

    def run(layers, carries, xs, lengths, resets):
        return recurrent.stack_scan(layers, carries, xs, seq_lengths=lengths, resets=resets)

    def value(*operands):
        return total(run(*operands))

    with jax.default_device(devices[0]):
        expected = compiled(jax.grad(value, (0, 1, 2)))(*p, lengths, resets)

    def local(*operands):
        return jax.lax.psum(value(*operands), "data")

    specs = (P(), P("data"), P(None, "data"), P("data"), P(None, "data"))
    with jax.set_mesh(mesh):
        put = lambda tree, spec: jax.tree.map(  # noqa: E731
            lambda x: jax.device_put(x, NamedSharding(mesh, spec)), tree
        )
        operands = [put(x, spec) for x, spec in zip((*p, lengths, resets), specs, strict=True)]
        program = compiled(run).lower(*operands).compile()
        text = program.as_text()
        assert not any(c in text for c in ("all-gather", "all-reduce", "all-to-all", "permute("))
        ys = program(*operands)[1]
        assert ys.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "data")), 3)
        gradient = compiled(jax.grad(value, (0, 1, 2))).lower(*operands).compile()
        assert reduces_once(gradient.as_text(), p.layers)
        single(gradient(*operands), expected)
        if kind == AxisType.Explicit:
            return  # within shard_map a mesh is what it is of either kind
        inside = jax.shard_map(
            jax.grad(local, (0, 1, 2)), mesh=mesh, in_specs=specs, out_specs=specs[:3]
        )
        outside = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
        gradient = compiled(inside).lower(*operands).compile()
        assert reduces_once(gradient.as_text(), p.layers)
        single(gradient(*operands), expected)
        single(compiled(jax.grad(outside, (0, 1, 2)))(*operands), expected)
