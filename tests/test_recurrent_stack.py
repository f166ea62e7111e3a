"""Recurrent stacks against loops over layers and steps: values, gradients, edges, errors."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from checks import EPSILON
from covering import pairwise
from recurrent_problems import compiled, compiled_with_triton
from stack_problems import close, leaves, options_of, stack, total

import jaxsparse
from jaxsparse import recurrent
from jaxsparse.recurrent.plan import NoPlan


@pairwise(
    "cells, weights, layers, skip, norm, affine, between, dropout, lengths, resets, reverse, "
    "differ, T, B, recompute",
    [("LSTM", "three_leaves"), ("GRU",), ("SLSTM", "RNN"), ("RNN", "LSTM", "GRU")],
    ["dense", "csr", "heads"],
    [1, 2, 3],
    [None, 1, 2, "input"],
    [None, "layer", "rms"],
    [False, True],
    [False, True],
    [None, "steps", "rows"],
    [None, "ragged", "beyond"],
    [False, True],
    [False, True],
    [False, True],
    [1, 2, 7],
    [1, 3],
    [False, True],
)
def test_values_and_gradients(
    cells,
    weights,
    layers,
    skip,
    norm,
    affine,
    between,
    dropout,
    lengths,
    resets,
    reverse,
    differ,
    T,
    B,
    recompute,
):
    with jax.enable_x64(True):
        p = stack(
            cells,
            layers=layers,
            weights=weights,
            skip=skip,
            norm=norm,
            affine=affine,
            between=between,
            dropout=dropout,
            differ=differ and skip is None,
            T=T,
            B=B,
            h=6,
            padding=np.nan,
            dtype=jnp.float64,
        )
        options = options_of(lengths, resets, reverse, layers, T, B)

        def value_and_gradient(function, **more):
            def loss(floating):
                results = function(*p.of(floating), **options, **more)
                return total(results), results

            return compiled(jax.value_and_grad(loss, has_aux=True))(p.floating)

        got = value_and_gradient(recurrent.stack_scan, recompute=recompute)
        expected = value_and_gradient(reference.stack_scan)
        close(got, expected, 1e-9, 1e-9)
        if norm is not None:  # which is another program without a gradient
            forward = compiled(lambda x: recurrent.stack_scan(*p.of(x), **options))(p.floating)
            close(forward, expected[0][1], 1e-9, 1e-9)


@pytest.mark.parametrize("T, B", [(0, 3), (4, 0), (0, 0)])
def test_nothing_to_scan(T, B):
    p = stack(["LSTM", "GRU"], T=T, B=B)
    carries, ys = recurrent.stack_scan(p.layers, tuple(p.carries), p.xs, return_all=True)
    assert isinstance(carries, tuple) and [y.shape for y in ys] == [(T, B, 5)] * 2
    assert {y.dtype for y in ys} == {p.xs.dtype}
    jax.tree.map(np.testing.assert_array_equal, list(carries), p.carries)
    pulled = jax.grad(lambda x: total(recurrent.stack_scan(*p.of(x))))(p.floating)
    assert all(np.isfinite(x).all() for x in pulled)
    swapped = [dataclasses.replace(x, cell=recurrent.GRU) for x in p.layers]
    with pytest.raises(ValueError, match="layer 0: the cell GRU fails with 4 gates"):
        recurrent.stack_scan(swapped, p.carries, p.xs)


@pytest.mark.parametrize("norm, dtype", [(None, "float16"), ("layer", "bfloat16")])
def test_16_bits(norm, dtype, unrolled):
    """Within some units of the last place: sums between layers are rounded, the oracle's not."""
    p = stack(["LSTM", "GRU"], skip=1, norm=norm, T=7, dtype=dtype)
    carries, ys = compiled_with_triton(recurrent.stack_scan)(*p)
    assert ys.dtype == dtype and {x.dtype for x in leaves(carries)} == {jnp.dtype(dtype)}
    with jax.enable_x64(True):
        expected = reference.stack_scan(*p)
    close((carries, ys), expected, 4 * EPSILON[dtype], 4 * EPSILON[dtype])


def test_what_stands_in_the_padding_reaches_nothing(unrolled):
    lengths = jnp.array([0, 5, 3])
    counts = jnp.arange(5)[:, None] < lengths
    p = stack(["three_leaves", "LSTM", "GRU"], layers=3, skip=1, dropout="steps")

    @compiled_with_triton
    def value_and_gradient(operands):
        def loss(operands):
            results = recurrent.stack_scan(*operands, seq_lengths=lengths)
            return total(results), results

        return jax.value_and_grad(loss, has_aux=True)(operands)

    def padded(bad):
        masks = [jnp.where(counts[..., None], x.mask, bad) for x in p.layers]
        layers = [dataclasses.replace(x, mask=m) for x, m in zip(p.layers, masks, strict=True)]
        return p._replace(layers=layers, xs=jnp.where(counts[..., None], p.xs, bad))

    clean = value_and_gradient(padded(0))
    assert all(np.isfinite(x).all() for x in leaves(clean))
    jax.tree.map(np.testing.assert_array_equal, value_and_gradient(padded(np.nan)), clean)
    assert not np.any(clean[0][1][1][~counts])
    # Nor does a carry of a row of no steps.
    carries = jax.tree.map(lambda x: x.at[0].set(np.nan), p.carries)
    gradient = value_and_gradient(padded(0)._replace(carries=carries))[1]
    jax.tree.map(np.testing.assert_array_equal, gradient.layers, clean[1].layers)


def test_what_is_behind_a_reset_reaches_nothing(unrolled):
    p = stack(["GRU", "LSTM"], skip=1)
    resets = jnp.zeros((5, 3), bool).at[2].set(True)

    @compiled_with_triton
    def value_and_gradient(xs):
        def of(xs):
            ys = recurrent.stack_scan(p.layers, p.carries, xs, resets=resets)[1]
            return total(ys[2:]), ys

        return jax.value_and_grad(of, has_aux=True)(xs)

    (_, ys), gradient = value_and_gradient(p.xs)
    (_, bad), bad_gradient = value_and_gradient(p.xs.at[0, 1].set(jnp.nan))
    np.testing.assert_array_equal(ys[2:], bad[2:])
    np.testing.assert_array_equal(gradient[2:], bad_gradient[2:])
    assert not np.any(gradient[:2]) and np.isnan(bad[1, 1]).all()


def test_a_bad_row_stays_in_its_row(unrolled):
    p = stack(["GRU", "LSTM"], skip=1)

    @compiled_with_triton
    def run(xs):
        return jax.vjp(lambda x: recurrent.stack_scan(p.layers, p.carries, x), xs)

    (_, ys), pull = run(p.xs)
    (_, bad), bad_pull = run(p.xs.at[2, 1, 0].set(jnp.nan))
    others = np.array([0, 2])
    np.testing.assert_array_equal(ys[:, others], bad[:, others])
    assert np.isnan(bad[2:, 1]).any(-1).all() and not np.isnan(bad[:2]).any()
    ones = (jax.tree.map(jnp.ones_like, p.carries), jnp.ones_like(ys))
    np.testing.assert_array_equal(pull(ones)[0][:, others], bad_pull(ones)[0][:, others])


def test_parameters_of_each_unit():
    def peephole(x, r, carry, parameters):
        c, _ = carry
        keep, new, give = (a + b for a, b in zip(x, r, strict=True))
        keep = jax.nn.sigmoid(keep + parameters["keep"] * c)
        c = keep * c + (1 - keep) * jnp.tanh(new)
        h = jax.nn.sigmoid(give + parameters["give"] * c) * c
        return (c, h), h

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        draw = lambda *shape: jnp.asarray(rng.standard_normal(shape)) / 2  # noqa: E731
        layers = [
            recurrent.Layer(
                peephole,
                recurrent=draw(4, 12),
                input=draw(4, 12),
                parameters={"keep": draw(4), "give": draw(4)},
            )
            for _ in range(2)
        ]
        operands = layers, [(draw(3, 4), draw(3, 4))] * 2, draw(5, 3, 4)
        got, expected = (
            compiled(jax.value_and_grad(lambda x, f=f: total(f(*x))))(operands)
            for f in (recurrent.stack_scan, reference.stack_scan)
        )
        close(got, expected, 1e-10, 1e-10)


def test_explained():
    """A layer that is too large for a GPU beside one that is not, and their gradient."""
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)  # noqa: E731
    layers = [
        recurrent.Layer(recurrent.elman(), recurrent=shape(h, h), input=shape(k, h))
        for k, h in ((64, 512), (512, 8192))
    ]
    operands = layers, [shape(4, 512), shape(4, 8192)], shape(100, 4, 64)

    def loss(*operands):
        return recurrent.stack_scan(*operands)[1].astype(jnp.float32).sum()

    (forward,) = jaxsparse.explain(loss, *operands, device=jaxsparse.H200)
    assert forward.operation == "recurrent_graph"
    assert [form.hidden for form, _ in forward.scans] == [512, 8192]
    (_, small), (_, large) = forward.scans
    assert small.variant == "dense_tensor_cores" and isinstance(large, NoPlan)
    text = str(forward)
    assert text.startswith("2 layers, nodes 1 to 2, of 8192 or 512 units, bfloat16 state, batch 4")
    assert "a layer of dense bfloat16 weights (1 x 512, 1 x 512)" in text
    _, backward = jaxsparse.explain(jax.grad(loss), *operands, device=jaxsparse.H200)
    assert "transposed" in backward.problem
    assert [form.hidden for form, _ in backward.scans] == [8192, 512]


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_scans_write_no_squares_for_norms(norm):
    """Layer by layer, a norm's squares are made where they are added up."""
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)  # noqa: E731
    weights = {"recurrent": shape(512, 512), "input": shape(512, 512)}
    layers = [recurrent.Layer(recurrent.elman(), **weights, norm=norm) for _ in range(3)]
    operands = layers, [shape(64, 512)] * 3, shape(100, 64, 512)
    (explained,) = jaxsparse.explain(recurrent.stack_scan, *operands, device=jaxsparse.H200)
    assert [form.outputs for form, _ in explained.scans] == [0, 0, 0]


# ---- Errors ----


def no_output(x, r, h):
    """A cell without a y."""
    return x[0] + r[0], None


def mixes(x, r, h):
    """A cell that is not pointwise."""
    h = jnp.tanh(x[0] + r[0] - jnp.mean(r[0]))
    return h, h


ONES = jnp.ones
CELL = recurrent.elman()


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"layers": CELL}, TypeError, "layers must be a list or a tuple, got function"),
        (
            {"layers": []},
            ValueError,
            "at least one layer, and a carry for each, got 0 and 2",
        ),
        ({"carries": [ONES((3, 4))]}, ValueError, "got 2 and 1 carries"),
        ({"layers": [CELL, CELL]}, TypeError, "layer 0 must be a recurrent.Layer, got function"),
        ({"cell": "tanh"}, TypeError, "layer 1: cell must be a function, got str"),
        ({"cell": no_output}, ValueError, "layer 1: the cell no_output must return a y"),
        ({"cell": mixes}, ValueError, "layer 1: the cell mixes must be pointwise"),
        ({"recurrent": ONES(4)}, ValueError, "layer 1: recurrent must have at least 2 dimensions"),
        ({"recurrent": ONES((4, 6))}, ValueError, r"layer 1: recurrent must be \(h, gates \* h\)"),
        ({"recurrent": ONES((4, 4), int)}, TypeError, "layer 1: needs float32.*recurrent int"),
        ({"input": None}, ValueError, "layer 1: input is None, which only that of layer 0 may be"),
        (
            {"input": ONES((5, 4))},
            ValueError,
            r"layer 1: input must be .* k = 4 features .*\(5, 4\)",
        ),
        ({"input": ONES((4, 5))}, ValueError, "layer 1: input must be .* h = 4 units"),
        ({"input": ONES((4, 8))}, ValueError, "layer 1: .* fails with 2 gates of x and 1 of r"),
        ({"bias": ONES(3)}, ValueError, r"layer 1: bias must have shape \(4,\), got \(3,\)"),
        (
            {"recurrent_bias": ONES(8)},
            ValueError,
            r"layer 1: recurrent_bias must have shape \(4,\)",
        ),
        ({"parameters": [ONES(3)]}, ValueError, "layer 1: the leaves of parameters must have"),
        (
            {"norm": "rms", "norm_epsilon": -1e-6},
            ValueError,
            "layer 1: norm_epsilon must be a number that is not negative, got -1e-06",
        ),
        ({"between": 3}, TypeError, "layer 1: between must be a function or None, got int"),
        (
            {"mask": ONES((1, 3, 5))},
            ValueError,
            r"layer 1: mask must have .*\(5, 3, 4\) or \(1, B, h\)",
        ),
        ({"skip": 3}, ValueError, "layer 1: skip must be None or a number .* 1 to 2, got 3"),
        ({"skip": True}, ValueError, "layer 1: skip must be None or a number"),
        ({"skip": 2}, ValueError, "layer 1: skip=2 adds what has 6 features to an output of 4"),
        (
            {"carries": [ONES((3, 4)), ONES((3, 5))]},
            ValueError,
            "layer 1: the leaves of carry must",
        ),
        ({"xs": ONES((5, 6))}, ValueError, "xs must have at least 3 dimensions"),
        ({"seq_lengths": ONES(3)}, ValueError, "seq_lengths must be 3 integers"),
        (
            {"resets": ONES((5, 3))},
            ValueError,
            r"resets must be booleans of shape \(T, B\) = \(5, 3\)",
        ),
        ({"precision": "low"}, ValueError, "precision must be"),
        ({"implementation": "gpu"}, ValueError, "implementation"),
    ],
)
def test_errors(changes, error, message):
    """Of two layers, the second of which changes."""
    layer = recurrent.Layer(CELL, recurrent=ONES((4, 4)), input=ONES((6, 4)))
    of_layer = {k: v for k, v in changes.items() if k in recurrent.Layer.__dataclass_fields__}
    second = dataclasses.replace(layer, **{"input": ONES((4, 4)), **of_layer})
    arguments = {
        "layers": [layer, second],
        "carries": [ONES((3, 4))] * 2,
        "xs": ONES((5, 3, 6)),
        **{k: v for k, v in changes.items() if k not in of_layer},
    }
    with pytest.raises(error, match=f"recurrent.stack_scan.*{message}"):
        recurrent.stack_scan(**arguments)


def test_a_variant_that_is_not_here_is_refused():
    p = stack(["RNN"])
    with pytest.raises(ValueError, match=r"recurrent\.stack_scan: .*variant 'dense_unknown'"):
        recurrent.stack_scan(*p, variant="dense_unknown")
