"""Stacks that run in both directions against loops over layers and steps."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from covering import pairwise
from recurrent_problems import compiled
from stack_problems import Stack, stack

from jaxsparse import recurrent
from jaxsparse.recurrent import products

leaves = jax.tree.leaves


def total(results):
    """A number that depends on every result, and not linearly."""
    return sum(jnp.sum(jnp.sin(x)) for x in leaves(results))


def pairs(cell, merge, **options):
    """A stack of pairs, (layers, carries, xs)."""
    one, two = (stack([cell], seed=seed, layers=1, **options) for seed in (0, 1))
    width = one.carries[0] if merge == "sum" else jnp.concatenate(leaves(one.carries)[-1:] * 2, 1)
    width = leaves(width)[-1].shape[1]
    upper = [stack([cell], seed=seed, layers=1, features=width, **options) for seed in (2, 3)]
    layers = [(a.layers[0], b.layers[0]) for a, b in ((one, two), upper)]
    carries = [(a.carries[0], b.carries[0]) for a, b in ((one, two), upper)]
    return Stack(layers, carries, one.xs)


def loops(layers, carries, xs, *, merge, resets=None, seq_lengths=None, return_all=False):
    """The oracle: each layer of each direction alone."""
    outputs, last = [xs], []
    for i, (pair, carry) in enumerate(zip(layers, carries, strict=True)):
        both = []
        for d, (layer, first) in enumerate(zip(pair, carry, strict=True)):
            (new,), y = reference.stack_scan(
                [dataclasses.replace(layer, skip=None)],
                [first],
                outputs[-1],
                reverse=bool(d),
                seq_lengths=seq_lengths,
                resets=None if resets is None else resets[d],
            )
            both.append((new, y))
        news, ys = zip(*both, strict=True)
        y = jnp.concatenate(ys, -1) if merge == "concat" else ys[0] + ys[1]
        skip = pair[0].skip
        outputs.append(y if skip is None else y + outputs[i + 1 - skip])
        last.append(news)
    return last, (outputs[1:] if return_all else outputs[-1])


@pairwise(
    "cell, weights, merge, norm, skip, dropout, ragged, resets, recompute",
    ["RNN", "LSTM"],
    ["dense", "csr", "heads"],
    ["concat", "sum"],
    [None, "layer", "rms"],
    [False, True],
    [None, "steps"],
    [False, True],
    [False, True],
    [False, True],
)
def test_values_and_gradients(cell, weights, merge, norm, skip, dropout, ragged, resets, recompute):
    with jax.enable_x64(True):
        p = pairs(cell, merge, weights=weights, norm=norm, dropout=dropout, h=4, dtype=jnp.float64)
        if skip:
            second = [dataclasses.replace(x, skip=1) for x in p.layers[1]]
            p = p._replace(layers=[p.layers[0], tuple(second)])
        starts = np.random.default_rng(0).random((2, 5, 3)) < 0.3
        options = {
            "merge": merge,
            "seq_lengths": jnp.array([0, 5, 3]) if ragged else None,
            "resets": tuple(jnp.asarray(starts)) if resets else None,
            "return_all": skip,
        }

        def value_and_gradient(function, **more):
            def loss(floating):
                results = function(*p.of(floating), **options, **more)
                return total(results), results

            return compiled(jax.value_and_grad(loss, has_aux=True))(p.floating)

        got = value_and_gradient(recurrent.bidirectional_stack_scan, recompute=recompute)
        for a, b in zip(leaves(got), leaves(value_and_gradient(loops)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("one_cpu", [False, True])
def test_nothing_to_scan(one_cpu, monkeypatch):
    monkeypatch.setattr(products, "_on_one_cpu", lambda: one_cpu)
    p = pairs("LSTM", "concat", T=0)
    carries, ys = recurrent.bidirectional_stack_scan(*p, return_all=True)
    assert [y.shape for y in ys] == [(0, 3, 10)] * 2
    jax.tree.map(np.testing.assert_array_equal, carries, p.carries)


LAYER = recurrent.Layer(recurrent.elman(), recurrent=jnp.ones((4, 4)), input=jnp.ones((6, 4)))
TALLER = recurrent.Layer(recurrent.elman(), recurrent=jnp.ones((5, 5)), input=jnp.ones((6, 5)))


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"merge": "mean"}, ValueError, r"merge must be one of \['concat', 'sum'\], got 'mean'"),
        ({"layers": []}, ValueError, "at least one pair of layers, .* got 0 and 1"),
        ({"layers": [LAYER]}, ValueError, "layer 0 must be a pair .*, got Layer"),
        ({"layers": [(LAYER, 1)]}, TypeError, "layer 0 must be a pair of recurrent.Layer, got int"),
        (
            {"layers": [(LAYER, dataclasses.replace(LAYER, norm="rms"))]},
            ValueError,
            "layer 0: both directions must have the same norm, got None and 'rms'",
        ),
        (
            {"layers": [(LAYER, dataclasses.replace(LAYER, recurrent_bias=jnp.ones(4)))]},
            ValueError,
            "layer 0: both directions must have one form",
        ),
        ({"layers": [(LAYER, TALLER)]}, ValueError, "backward layer 0: the leaves of carry must"),
        (
            {"layers": [(dataclasses.replace(LAYER, skip=1),) * 2]},
            ValueError,
            "layer 0: skip=1 adds what has 6 features to an output of 8",
        ),
        (
            {"layers": [(dataclasses.replace(LAYER, cell=recurrent.GRU),) * 2]},
            ValueError,
            "layer 0: the cell GRU fails with 1 gates",
        ),
        (
            {"layers": [(LAYER, dataclasses.replace(LAYER, parameters=jnp.ones(4)))]},
            ValueError,
            "layer 0: both directions must have one form",
        ),
        ({"carries": [jnp.ones((3, 4))]}, ValueError, "the carry of layer 0 must be a pair"),
        ({"resets": jnp.ones((5, 3), bool)}, ValueError, "resets must be a pair"),
    ],
)
def test_errors(changes, error, message):
    arguments = {
        "layers": [(LAYER, LAYER)],
        "carries": [(jnp.ones((3, 4)),) * 2],
        "xs": jnp.ones((5, 3, 6)),
        **changes,
    }
    with pytest.raises(error, match=f"recurrent.bidirectional_stack_scan: .*{message}"):
        recurrent.bidirectional_stack_scan(**arguments)
