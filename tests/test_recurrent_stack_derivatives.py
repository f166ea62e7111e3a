"""Derivatives of recurrent stacks, and what a gradient keeps."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.test_util import check_grads
from recurrent_problems import CELLS, compiled
from stack_problems import (
    EVERY,
    LENGTHS,
    NAMES,
    Stack,
    close,
    exact,
    leaves,
    like,
    loss,
    run,
    single,
    stack,
    total,
)

from jaxsparse import recurrent
from jaxsparse.recurrent import layer_step, stack_graph

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
