"""Waves of recurrent stacks: which layers they hold, and by which kernel."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import pairwise
from graph_forms import with_graphs_as
from wave_problems import SCATTER, STATIONARY, WAVE, WGMMA, graphs, held, loss_of, stack, wave

from jaxsparse import H200, Device, explain, recurrent
from jaxsparse.primitive import UnavailableError
from jaxsparse.recurrent.graph.choice import STACK_VARIANTS, choose
from jaxsparse.recurrent.graph.operands import split
from jaxsparse.recurrent.graph.runs import in_runs
from jaxsparse.recurrent.graph.wave_form import form_of_run
from jaxsparse.recurrent.graph.waves import Wave, choose_waves, run_wave
from jaxsparse.recurrent.plan import NoPlan, make_wave_plan

leaves = jax.tree.leaves


@pytest.mark.parametrize(
    "skip, norm", [(2, "layer"), (None, "layer"), (2, "rms"), (2, None), ("input", "rms")]
)
def test_where_a_stack_is_cut_into_waves_changes_nothing(skip, norm):
    """Two waves, each computed by the plain path: what the second one takes of the first one."""
    p = stack(["RNN"], layers=4, T=6, B=4, h=16, skip=skip, norm=norm)
    gradient = jax.grad(loss_of(p), has_aux=True)
    first, cut, last = 1, 3, 5  # nodes, of which the first one is the stack's input
    for params, avals in graphs(gradient, p.floating):
        if params["transposed"]:
            nodes = len(params["nodes"])
            first, cut, last = nodes - last, nodes - cut, nodes - first
        keys = jax.random.split(jax.random.key(0), len(avals))
        # No negative numbers: some are variances and what states are divided by.
        operands = [
            (0.3 * jnp.abs(jax.random.normal(key, a.shape))).astype(a.dtype)
            for key, a in zip(keys, avals, strict=True)
        ]
        runs = {}
        for begin, end in ((first, cut), (cut, last)):
            form = form_of_run(begin, end - 1, params, split(avals, params))
            plan = make_wave_plan(form, H200, WAVE)
            runs[begin] = functools.partial(run_wave, Wave(begin, end - 1, form, plan))
        together = jax.jit(functools.partial(in_runs, runs, **params))(*operands)
        one_by_one = jax.jit(functools.partial(in_runs, {}, **params))(*operands)
        for a, b in zip(together, one_by_one, strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            assert np.linalg.norm(a - b) <= 0.03 * np.linalg.norm(b)


@pytest.mark.parametrize("cell", ["RNN", "GRU", "LSTM", "three_leaves"])
@pytest.mark.parametrize("return_all", [False, True])
def test_layers_of_one_form_are_a_wave_and_so_are_their_adjoints(cell, return_all):
    p = stack([cell], layers=4, T=64, B=4, h=64)
    gradient = jax.grad(loss_of(p, return_all=return_all), has_aux=True)
    forward, backward = (choose_waves(*graph, H200) for graph in graphs(gradient, p.floating))
    assert held(forward) == [(1, 4)], forward
    assert held(backward) == [(0, 3)], backward
    for choice in (forward, backward):
        taken, alone = map(int, re.findall(r"about (\d+) us, and (\d+) would", choice.reason)[0])
        assert taken < 0.95 * alone
    explained = explain(gradient, p.floating, device=H200)
    assert ["as a wave by wave_mma" in str(graph) for graph in explained] == [True, True]


@pairwise(
    "cell, skip, norm, lengths, biased, dropout, return_all, resetting",
    ["RNN", "GRU", "LSTM", "three_leaves"],
    [None, 1, 2, "input"],
    [None, "layer", "rms"],
    [False, True],
    [False, True],
    [None, "steps"],
    [False, True],
    [False, True],
)
def test_what_layers_may_have(cell, skip, norm, lengths, biased, dropout, return_all, resetting):
    p = stack(
        [cell], layers=4, T=64, B=4, h=64, skip=skip, norm=norm, biased=biased, dropout=dropout
    )
    options = {
        "seq_lengths": jnp.array([1, 0, 64, 5]) if lengths else None,
        "resets": jnp.zeros((64, 4), bool) if resetting else None,
        "return_all": return_all,
    }
    gradient = jax.grad(loss_of(p, **options), has_aux=True)
    forward, backward = (choose_waves(*graph, H200) for graph in graphs(gradient, p.floating))
    assert held(forward) == [(1, 4)], forward
    assert held(backward) == [(0, 3)], backward


def test_where_a_wave_ends():
    def first(p, **options):
        (graph, *_) = graphs(loss_of(p, **options), p.floating)
        return choose_waves(*graph, H200)

    sizes = {"T": 64, "B": 4, "h": 64}
    two = stack(["LSTM", "LSTM", "RNN", "RNN"], layers=4, **sizes)
    assert held(first(two)) == [(1, 2), (3, 4)]
    differ = first(stack(["RNN"], layers=3, differ=True, **sizes))
    assert differ.compute is None and "they differ in size" in differ.reason
    single = stack(["RNN"], layers=1, **sizes)
    (graph,) = graphs(loss_of(single), single.floating)
    assert choose(*graph, H200).reason == "it has fewer than two layers"
    wide = first(stack(["RNN"], layers=3, dtype=jnp.float32, **sizes))
    assert wide.compute is None and "16-bit" in wide.reason
    many = {**sizes, "B": 20}
    for dtype, why in ((jnp.bfloat16, "no multiple of 32"), (jnp.float32, "16-bit")):
        choice = first(stack(["RNN"], layers=3, dtype=dtype, **many))
        assert choice.compute is None and why in choice.reason
    assert held(first(stack(["RNN"], layers=3, **many), variant=WAVE)) == [(1, 3)]
    sparse = first(stack(["RNN"], layers=3, weights="csr", **sizes))
    assert sparse.compute is None and "an edge is of kind csr" in sparse.reason
    # Each layer by a kernel of scans.
    by_scans = first(stack(["RNN"], layers=3, **sizes), variant="dense_tensor_cores")
    assert by_scans.compute is None
    with pytest.raises(UnavailableError, match=r"wave_mma was asked for, but .*16-bit"):
        first(stack(["RNN"], layers=3, dtype=jnp.float32, **sizes), variant=WAVE)
    small = Device("small", 90, 8, 100_000)
    large = stack(["LSTM"], layers=4, **{**sizes, "h": 512})
    (graph, *_) = graphs(loss_of(large), large.floating)
    assert choose_waves(*graph, small).compute is None


def by_waves(function, *operands):
    """The results of a function with its graphs in waves, and the nodes of these.

    What goes into waves and comes out of them, each by its plain form.
    """
    got, chosen = with_graphs_as(choose_waves, function, *operands)
    return got, [wave for choice in chosen for wave in held(choice)]


def assert_close(got, wanted):
    for a, b in zip(leaves(got), leaves(wanted), strict=True):
        a, b = np.float32(a), np.float32(b)
        np.testing.assert_allclose(a, b, rtol=0.02, atol=0.01 * max(1, np.abs(b).max()))


LENGTHS = jnp.array([40, 3, 17])


@pytest.mark.parametrize(
    "cells, sizes, options, nodes",
    [
        (("LSTM",), {}, {}, [(1, 3), (0, 2)]),
        (("GRU",), {}, {"reverse": True, "return_all": True}, [(1, 3), (0, 2)]),
        (("three_leaves", "three_leaves", "RNN"), {}, {}, [(1, 2), (1, 2)]),
        # A skip in some layers only; over an end of a wave, as the one from the input is.
        (("RNN",), {"layers": 5, "skip": 2}, {}, [(1, 5), (0, 4)]),
        (("GRU",), {"layers": 4, "skip": "input"}, {"seq_lengths": LENGTHS}, [(1, 4), (0, 3)]),
        (("LSTM",), {"skip": 1, "dropout": "steps"}, {"return_all": True}, [(1, 3), (0, 2)]),
        (("RNN",), {"layers": 4, "norm": "layer", "skip": 2}, {}, [(1, 4), (0, 3)]),
        (("GRU",), {"norm": "rms"}, {"seq_lengths": LENGTHS, "reverse": True}, [(1, 3), (0, 2)]),
    ],
)
def test_a_graph_in_waves_is_the_graph(cells, sizes, options, nodes):
    p = stack(cells, **{"layers": 3, "T": 40, "B": 3, "h": 16, **sizes})
    got, waves = by_waves(jax.value_and_grad(loss_of(p, **options), has_aux=True), p.floating)
    assert waves == nodes
    plain = jax.value_and_grad(loss_of(p, implementation="xla", **options), has_aux=True)
    assert_close(got, jax.jit(plain)(p.floating))


@pytest.mark.parametrize(
    "cell, more", [("GRU", {"skip": 2}), ("RNN", {"norm": "layer", "skip": 1})]
)
def test_tangents_are_waves(cell, more):
    p = stack([cell], layers=3, T=40, B=3, h=16, **more)

    def tangents(xs, **options):
        run = lambda xs: recurrent.stack_scan(p.layers, p.carries, xs, **options)  # noqa: E731
        return jax.jvp(run, (xs,), (xs,))

    got, waves = by_waves(tangents, p.xs)
    assert waves == [(1, 3), (1, 3)]
    assert_close(got, jax.jit(lambda xs: tangents(xs, implementation="xla"))(p.xs))


@pytest.mark.parametrize(
    "cell, norm, options",
    [
        ("RNN", "layer", {"return_all": True}),
        ("GRU", "layer", {"seq_lengths": LENGTHS}),
        ("LSTM", "rms", {}),
    ],
)
def test_without_a_gradient_products_are_scaled(cell, norm, options):
    p = stack([cell], layers=3, T=40, B=3, h=16, norm=norm, skip=2)
    (graph, *_) = graphs(loss_of(p, **options), p.floating)
    params, avals = graph
    form = form_of_run(1, 3, params, split(avals, params))
    gates = {"RNN": 1, "GRU": 4, "LSTM": 4}[cell]
    assert form.scales and {*form.own_products, *form.below_products} == {*range(gates)}
    got, waves = by_waves(loss_of(p, **options), p.floating)
    assert waves == [(1, 3)]
    assert_close(got, jax.jit(loss_of(p, implementation="xla", **options))(p.floating))


@pytest.mark.parametrize("variant", [WGMMA, f"{WGMMA}_barrier", STATIONARY])
def test_warpgroups_make_forward_passes(variant):
    p = stack(["LSTM"], layers=3, T=8, B=32, h=64)
    gradient = jax.grad(loss_of(p, variant=variant), has_aux=True)
    forward, backward = (choose_waves(*graph, H200) for graph in graphs(gradient, p.floating))
    assert held(forward) == [(1, 3)] and variant in forward.called
    assert backward.called == "node by node" and "forward passes" in backward.reason
    # As many layers as fit make a wave, and the others the next one.
    large = stack(["LSTM"], layers=8, T=2, B=64, h=512)
    (graph, *_) = graphs(loss_of(large, variant=variant), large.floating)
    assert held(choose_waves(*graph, H200)) == [(1, 4), (5, 8)]


@pytest.mark.parametrize("rows", [4, 32])
def test_sums_are_exchanged_by_adjoints(rows):
    p = stack(["GRU"], layers=3, T=8, B=rows, h=64)
    gradient = jax.grad(loss_of(p, variant=SCATTER), has_aux=True)
    forward, backward = (choose_waves(*graph, H200) for graph in graphs(gradient, p.floating))
    assert held(backward) == [(0, 2)] and SCATTER in backward.called
    # As without a variant, up to what it is called.
    (plain, _) = (
        choose_waves(*g, H200) for g in graphs(jax.grad(loss_of(p), has_aux=True), p.floating)
    )
    assert held(forward) == held(plain) and forward.reason == plain.reason
    assert SCATTER not in forward.called and forward.compute is not None


@pytest.mark.parametrize(
    "cell, rows, more, variant",
    [
        ("LSTM", 4, {}, WAVE),
        ("LSTM", 16, {}, SCATTER),
        ("LSTM", 16, {"skip": 1}, WAVE),
        ("LSTM", 64, {}, SCATTER),
        ("LSTM", 64, {"norm": "layer"}, None),
        ("LSTM", 128, {}, None),
        ("GRU", 16, {}, WAVE),
        ("GRU", 64, {}, SCATTER),
        ("RNN", 64, {}, None),
    ],
)
def test_adjoints_by_default(cell, rows, more, variant):
    p = stack([cell], layers=4, T=64, B=rows, h=512, **more)
    (_, graph) = graphs(jax.grad(loss_of(p), has_aux=True), p.floating)
    choice = choose_waves(*graph, H200)
    if variant is None:
        assert choice.compute is None and "only adjoints that exchange sums" in choice.reason
    else:
        assert held(choice) == [(0, 3)] and f"a wave by {variant}, " in choice.called


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"skip": 1}, "blocks send sums of matrices, and no skips or norms"),
        ({"norm": "layer"}, "blocks send sums of matrices, and no skips or norms"),
        ({"dtype": jnp.float32}, "needs 16-bit state and weights"),
    ],
)
def test_why_sums_are_not_exchanged(changes, reason):
    p = stack(["RNN"], layers=3, T=8, B=4, h=64, **changes)
    gradient = jax.grad(loss_of(p, variant=SCATTER), has_aux=True)
    _, backward = graphs(gradient, p.floating)
    with pytest.raises(UnavailableError, match=f"wave_scatter was asked for, but {reason}"):
        choose_waves(*backward, H200)
    plan = make_wave_plan(wave(4), H200, SCATTER)
    assert isinstance(plan, NoPlan) and "one product, and a step has 4" in plan.reason


def test_forward_passes_of_many_rows_are_waves_by_default():
    p = stack(["LSTM"], layers=3, T=256, B=64, h=256)
    gradient = jax.grad(loss_of(p), has_aux=True)
    forward, backward = (choose_waves(*graph, H200) for graph in graphs(gradient, p.floating))
    assert held(forward) == [(1, 3)] and STATIONARY in forward.called
    assert held(backward) == [(0, 2)] and SCATTER in backward.called
    gru = stack(["GRU"], layers=3, T=256, B=64, h=256)
    (graph, *_) = graphs(loss_of(gru), gru.floating)
    assert "some gates take only one of the two matrices" in choose_waves(*graph, H200).reason


@pytest.mark.parametrize("variant", STACK_VARIANTS)
def test_a_derivative_of_one_layer_runs_alone(variant):
    p = stack(["LSTM"], layers=3, T=8, B=16 if variant == SCATTER else 32, h=5)

    def of_lowest(xs):
        _, ys = recurrent.stack_scan(p.layers, p.carries, xs, return_all=True, variant=variant)
        return jnp.sum(ys[0].astype(jnp.float32))

    forward, backward = explain(jax.grad(of_lowest), p.xs, device=H200)
    called = {"wavefront": "a wavefront of 3 layers", SCATTER: f"a wave by {WAVE}"}
    as_asked = called.get(variant, f"a wave by {variant}")
    assert forward.choice.startswith(f"nodes 1 to 3 as {as_asked}")
    assert backward.choice == "node by node, because it has fewer than two layers"
    assert len(backward.scans) == 1
