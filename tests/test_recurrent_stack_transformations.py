"""Recurrent stacks under the transformations of JAX."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from recurrent_problems import compiled
from stack_problems import EVERY, Stack, leaves, loss, run, single, stack, total

from jaxsparse import EXPORT_DISABLED_CHECKS, recurrent
from jaxsparse.recurrent.engine import printed_step
from jaxsparse.recurrent.graph import recurrent_graph_p
from jaxsparse.recurrent.step import _traced


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
