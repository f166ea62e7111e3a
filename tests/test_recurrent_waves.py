"""Waves of recurrent stacks: which layers they hold, their kernels, and their results on a GPU."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stack_problems
from checks import PLATFORM
from covering import pairwise
from graph_forms import with_graphs_as
from test_recurrent_plan import kernels

from jaxsparse import H200, Device, _ffi, explain, recurrent
from jaxsparse.primitive import UnavailableError
from jaxsparse.recurrent.graph import recurrent_graph_p
from jaxsparse.recurrent.graph.choice import STACK_VARIANTS, choose
from jaxsparse.recurrent.graph.operands import split
from jaxsparse.recurrent.graph.runs import in_runs
from jaxsparse.recurrent.graph.wave_form import form_of_run
from jaxsparse.recurrent.graph.waves import Wave, choose_waves, run_wave
from jaxsparse.recurrent.plan import NoPlan, Plan, WaveForm, make_wave_plan

WAVE = "wave_mma"
WGMMA = "wave_wgmma"  # for forward passes, as the next one
STATIONARY = "wave_stationary"
SCATTER = "wave_scatter"  # for adjoints
leaves = jax.tree.leaves


def wave(products=1, states=1, layers=4, hidden=512, batch=16, length=256, **changes):
    form = WaveForm(
        products=products,
        states=states,
        inputs=2 * products,
        outputs=0,
        arrays=2,
        hidden=hidden,
        batch=batch,
        length=length,
        state_dtype="bfloat16",
        weight_dtype="bfloat16",
        sparse=False,
        input_dtypes=("bfloat16",),
        layers=layers,
        own_products=tuple(range(products)),
        own_states=tuple(range(states)),
        below_products=tuple(range(products)),
        below_states=tuple(range(states)),
    )
    return dataclasses.replace(form, **changes)


FITTING = {
    "lstm 512": wave(4),
    "adjoint of lstm 512": wave(1, 4),
    "lstm 1024": wave(4, layers=2, hidden=1024, batch=4),
    "adjoint of lstm 1024": wave(1, 4, layers=2, hidden=1024, batch=4),
    "adjoint of lstm 512, 64 rows": wave(1, 4, layers=2, batch=64),
    "gru 512": wave(4, own_products=(0, 1, 2), below_products=(0, 1, 3)),
    "rnn 1152": wave(layers=7, hidden=1152, batch=4),
    "odd": wave(3, layers=3, hidden=331, batch=5),
    "16 layers": wave(layers=16, hidden=64, batch=4),
}
FITTING_WGMMA = {
    "lstm 512, 32 rows": wave(4, batch=32),
    "lstm 512, 64 rows": wave(4, batch=64),
    "lstm 512, 256 rows": wave(4, layers=2, batch=256, outputs=6),
    "gru 512, 64 rows": wave(
        4, batch=64, own_products=(0, 1, 2), below_products=(0, 1, 3), outputs=5
    ),
    "odd, 40 rows": wave(3, layers=3, hidden=331, batch=40),
    "tangent of lstm 256": wave(5, 2, hidden=256, batch=64),
    "16 layers, 64 rows": wave(layers=16, hidden=64, batch=64),
}
FITTING_SCATTER = {
    "adjoint of lstm 512": wave(1, 4, outputs=5),
    "adjoint of lstm 512, 64 rows": wave(1, 4, batch=64, outputs=5),
    "adjoint of lstm 1024, 64 rows": wave(1, 4, layers=2, hidden=1024, batch=64, outputs=5),
    "adjoint of gru 512": wave(1, 4, own_states=(0, 1, 2), below_states=(0, 1, 3), outputs=6),
    "adjoint of rnn 1152": wave(layers=7, hidden=1152, batch=4),
    "odd": wave(1, 3, layers=3, hidden=331, batch=5),
    "few tiles of units": wave(1, 4, layers=5, hidden=40, batch=64, outputs=5),
    "16 layers": wave(1, 4, layers=16, hidden=64, batch=4),
}
FITTING_STATIONARY = {
    "lstm 512, 64 rows": wave(4, batch=64),
    "lstm 512, 128 rows": wave(4, layers=2, batch=128, outputs=6),
    "lstm 512, 256 rows, a part after another": wave(4, batch=256),
    "rnn 331, 64 rows": wave(layers=3, hidden=331, batch=64),
    "lstm 256, 64 rows": wave(4, layers=8, hidden=256, batch=64),
}
FITTING_BY_VARIANT = {
    WAVE: FITTING,
    WGMMA: FITTING_WGMMA,
    STATIONARY: FITTING_STATIONARY,
    SCATTER: FITTING_SCATTER,
}


@pytest.mark.parametrize(
    "variant, name", [(v, name) for v, forms in FITTING_BY_VARIANT.items() for name in forms]
)
def test_what_fits(variant, name):
    form = FITTING_BY_VARIANT[variant][name]
    plan = make_wave_plan(form, H200, variant)
    assert isinstance(plan, Plan), plan
    assert plan.variant == variant
    assert plan.layers == form.layers and plan.scans * plan.launches == plan.groups
    assert plan.launches == 1 or variant == STATIONARY
    assert plan.layers * plan.scans * plan.blocks <= H200.multiprocessors
    assert plan.threads <= 1024 and plan.shared_bytes <= H200.shared_bytes
    units = int(re.search(r"\.units = (\d+)", plan.constants)[1])
    assert plan.blocks * units >= form.hidden
    # All weights are somewhere: registers hold 64 K words, and some are needed for the rest.
    weights = form.hidden**2 * sum(
        len(products) * len(states)
        for products, states in (
            (form.own_products, form.own_states),
            (form.below_products, form.below_states),
        )
    )
    if variant != WAVE:
        # Pointwise threads can give registers up, not take more than an equal share.
        given = int(re.search(r"\.pointwise_registers = (\d+)", plan.constants)[1])
        assert given <= 65536 // plan.threads // 8 * 8
        # Only whole warpgroups can.
        warps, taken = (
            int(re.search(rf"\.{name} = (\d+)", plan.constants)[1])
            for name in ("warps", "product_registers")
        )
        assert taken == 0 or warps % 4 == 0
    registers = 65536 * 4 if variant != WGMMA else 0
    assert plan.blocks * (registers + plan.shared_bytes) > weights * 2
    # The states before all steps, and after the last one, of the parts of the batch in a launch.
    rows = form.batch // plan.launches
    slots = (form.length + 1) * rows * form.states * form.hidden * 2
    if variant == SCATTER:  # sums of a few steps from each block
        slots = 6 * plan.blocks * form.batch * form.hidden * 2
    assert plan.workspace_bytes > form.layers * slots
    assert f"{form.layers} layers of " in str(plan)


def test_states_that_registers_do_not_hold_come_a_few_at_a_time():
    def constants(rows):
        return make_wave_plan(wave(1, 4, layers=2, batch=rows), H200, WAVE).constants

    assert ".loads_ahead = 0" in constants(16) and ".loads_ahead = 4" in constants(64)


def test_more_steps_and_rows_take_longer():
    def microseconds(**changes):
        return make_wave_plan(wave(4, **changes), H200).total_microseconds

    by_batch = [microseconds(batch=b) for b in (1, 4, 8, 16, 32)]
    assert by_batch == sorted(by_batch)
    assert microseconds(length=100) < microseconds(length=200)


@pytest.mark.parametrize(
    "form, reason",
    [
        (wave(4, layers=4, hidden=1024), "4 layers of 4 x 1 x 1024 x 1024 weights in bfloat16 and"),
        (wave(4, batch=132), "a batch of 132 is no multiple of 32"),
        (wave(layers=17), "17 layers are more than the 16 of a launch"),
        (wave(weight_dtype="float32"), "needs 16-bit state and weights of one dtype"),
        (wave(state_dtype="float64"), "the dtype of the state is float64"),
        (wave(input_dtypes=("float16",)), "inputs of ['float16'] beside a state of bfloat16"),
        (wave(arrays=99), "99 arrays of one kind are more than"),
    ],
)
def test_why_not(form, reason):
    plan = make_wave_plan(form, H200)
    assert isinstance(plan, NoPlan) and reason in plan.reason
    old = dataclasses.replace(H200, name="old", compute_capability=80)
    assert "old has compute capability 8.0" in make_wave_plan(form, old).reason


def test_gpus_after_hopper_have_no_products_of_warpgroups():
    form = wave(4, batch=64)
    newer = dataclasses.replace(H200, name="newer", compute_capability=100)
    for variant in (None, WGMMA, STATIONARY):
        plan = make_wave_plan(form, newer, variant)
        assert isinstance(plan, NoPlan) and "compute capability 9.0 alone" in plan.reason
        assert isinstance(make_wave_plan(form, H200, variant), Plan)
    assert make_wave_plan(wave(4, batch=16), newer).variant == WAVE


def test_what_is_only_chosen_on_demand():
    assert make_wave_plan(wave(4, batch=16), H200).variant == WAVE
    assert make_wave_plan(wave(4, batch=32), H200).variant == STATIONARY
    assert "kBarrier = false" in make_wave_plan(wave(), H200).constants
    for variant in (WAVE, WGMMA, STATIONARY):
        form = wave(batch=64)
        assert "kBarrier = false" in make_wave_plan(form, H200, variant).constants
        assert "kBarrier = true" in make_wave_plan(form, H200, f"{variant}_barrier").constants


def stack(cells, dtype=jnp.bfloat16, **sizes):
    """Random operands, all floating-point arrays but the carries in one dtype."""
    p = stack_problems.stack(cells, dtype=dtype, **sizes)
    cast = jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, p
    )
    return cast._replace(carries=jax.tree.map(lambda x: x.astype(jnp.float32), p.carries))


def graphs(function, *operands):
    """The graphs of a function, their params and the types of their operands."""
    equations = jax.make_jaxpr(function)(*operands).eqns
    return [
        (eqn.params, [v.aval for v in eqn.invars])
        for eqn in equations
        if eqn.primitive is recurrent_graph_p
    ]


def total(results):
    return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in leaves(results))


def loss_of(p, **options):
    """The loss of a stack by its arrays."""

    def loss(floating):
        results = recurrent.stack_scan(*p.of(floating), **options)
        return total(results), results

    return loss


def held(choice):
    """The nodes of each wave, as it is said."""
    return [tuple(map(int, x)) for x in re.findall(r"(?:nodes|,) (\d+) to (\d+)", choice.called)]


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


def test_stationary_weights_take_products_of_both_matrices():
    form = wave(4, batch=64, own_products=(0, 1, 2), below_products=(0, 1, 3))
    plan = make_wave_plan(form, H200, STATIONARY)
    assert (
        isinstance(plan, NoPlan) and "some gates take only one of the two matrices" in plan.reason
    )


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


def sources(function, *operands):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
    return [s for s in kernels(function, *shapes) if "RecurrentWave" in s[1] or "wave" in s[0]]


@pytest.mark.parametrize(
    "cell, sizes, options, variant, count",
    [
        ("LSTM", {"skip": 1}, {}, f"{WAVE}_barrier", 2),
        ("GRU", {"norm": "layer"}, {"seq_lengths": jnp.array([1, 5, 6])}, WAVE, 2),
        ("three_leaves", {}, {"reverse": True}, WAVE, 2),
        ("GRU", {"skip": 1}, {"reverse": True}, WGMMA, 1),
        ("three_leaves", {}, {}, f"{WGMMA}_barrier", 1),
        ("LSTM", {"skip": 1, "B": 32}, {}, STATIONARY, 1),
        ("GRU", {}, {"seq_lengths": jnp.array([1, 5, 6])}, SCATTER, 1),
        ("LSTM", {}, {"reverse": True}, SCATTER, 1),
    ],
)
def test_kernels_compile(cell, sizes, options, variant, count, monkeypatch):
    monkeypatch.setenv("JAXSPARSE_CACHE_DIR", "")
    try:
        _ffi.nvrtc_version()
    except RuntimeError as error:
        pytest.skip(f"needs NVRTC: {error}")
    if cell == "three_leaves":
        monkeypatch.setenv("JAXSPARSE_SCAN_DELAY", "1000")
    p = stack([cell], **{"layers": 2, "T": 6, "B": 3, "h": 40, **sizes})
    found = sources(jax.grad(loss_of(p, variant=variant, **options), has_aux=True), p.floating)
    if variant == SCATTER:  # a forward pass by another variant comes before
        found = [(file, source) for file, source in found if SCATTER in file]
    assert len(found) == count
    if "norm" in sizes:  # which is another kernel without a gradient
        found += sources(loss_of(p, variant=variant, **options), p.floating)
    for file, source in found:
        assert file == f"recurrent_{variant}.cu"
        expression = "jaxsparse::RecurrentWaveScan<PrintedStep, PrintedPlan>"
        assert _ffi.compile_kernel(file, expression, "sm_90a", source).startswith(b"\x7fELF")


# ---- On a GPU ----

on_gpu = pytest.mark.skipif(
    PLATFORM != "cuda" or jax.devices()[0].compute_capability < "9.0", reason="needs a GPU"
)


def agrees(p, variant=WAVE, resets=None, **options):
    """A wave's results and gradients with those of the plain path, in float32."""

    def of(p, **more):
        gradient = jax.value_and_grad(loss_of(p, **options, **more), has_aux=True)
        return jax.jit(gradient)(p.floating)

    (_, got), slopes = of(p, variant=variant)
    wide = jax.tree.map(
        lambda x: x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x, p
    )
    (_, exact), exact_slopes = of(wide, implementation="xla")
    (_, rounded), rounded_slopes = of(p, variant="dense_tensor_cores")
    every = [leaves(x) for x in ((got, slopes), (exact, exact_slopes), (rounded, rounded_slopes))]
    for a, b, c in zip(*every, strict=True):
        a, b, c = (np.asarray(x, np.float64) for x in (a, b, c))
        norm = np.linalg.norm(b) + 1e-3 * np.sqrt(b.size)
        # No further from the truth than layer by layer, which rounds more often; but parts of sums
        # are rounded, too.
        times = 2.0 if variant == SCATTER else 1.5
        assert np.linalg.norm(a - b) <= times * np.linalg.norm(c - b) + 0.004 * norm
    recurrent.check()
    return got, slopes


@on_gpu
@pairwise(
    "variant, cell, layers, B, h, T, dtype, reverse, lengths, biased, dropout, skip, norm",
    [WAVE, WGMMA],
    ["RNN", "GRU", "LSTM", "three_leaves"],
    [2, 3, 5],
    [1, 3, 16, 40],
    [40, 72, 256],
    [1, 2, 17],
    ["bfloat16", "float16"],
    [False, True],
    [False, True],
    [False, True],
    [None, "steps"],
    [None, 1, 2, "input"],
    [None, "layer", "rms"],
)
def test_waves_agree(
    variant, cell, layers, B, h, T, dtype, reverse, lengths, biased, dropout, skip, norm
):
    sizes = {"layers": layers, "T": T, "B": B, "h": h, "dtype": jnp.dtype(dtype)}
    p = stack([cell], **sizes, biased=biased, dropout=dropout, skip=skip, norm=norm)
    seq_lengths = jnp.arange(B, dtype=jnp.int32) % (T + 1) if lengths else None
    if variant == WGMMA and norm is not None:
        with pytest.raises(UnavailableError, match="which norms take"):
            agrees(p, variant, reverse=reverse, seq_lengths=seq_lengths)
        return
    agrees(p, variant, reverse=reverse, seq_lengths=seq_lengths)


@on_gpu
@pairwise(
    "cell, layers, B, h, T, dtype, reverse, lengths",
    ["RNN", "GRU", "LSTM"],
    [2, 5],
    [1, 8, 19, 64],
    [40, 75, 256],
    [1, 2, 17],
    ["bfloat16", "float16"],
    [False, True],
    [False, True],
)
def test_adjoints_that_exchange_sums_agree(cell, layers, B, h, T, dtype, reverse, lengths):
    p = stack([cell], layers=layers, T=T, B=B, h=h, dtype=jnp.dtype(dtype))
    seq_lengths = jnp.arange(B, dtype=jnp.int32) % (T + 1) if lengths else None
    agrees(p, SCATTER, reverse=reverse, seq_lengths=seq_lengths)


@on_gpu
@pairwise(
    "cell, layers, B, h, T, dtype, reverse, lengths, skip",
    ["RNN", "LSTM"],
    [2, 3, 5],
    [32, 64, 96],
    [40, 72, 256],
    [1, 2, 17],
    ["bfloat16", "float16"],
    [False, True],
    [False, True],
    [None, 1, "input"],
)
def test_waves_of_stationary_weights_agree(cell, layers, B, h, T, dtype, reverse, lengths, skip):
    p = stack([cell], layers=layers, T=T, B=B, h=h, dtype=jnp.dtype(dtype), skip=skip)
    seq_lengths = jnp.arange(B, dtype=jnp.int32) % (T + 1) if lengths else None
    agrees(p, STATIONARY, reverse=reverse, seq_lengths=seq_lengths)


@on_gpu
@pytest.mark.parametrize(
    "variant, cell, layers, B, h, more",
    [
        (WAVE, "LSTM", 4, 16, 512, {}),
        (WAVE, "LSTM", 4, 4, 1024, {}),
        (WAVE, "RNN", 8, 4, 1152, {"skip": 4, "norm": "layer"}),
        (WAVE, "GRU", 4, 16, 512, {"skip": 1}),
        (WAVE, "LSTM", 2, 64, 512, {}),  # states a few at a time
        (WGMMA, "LSTM", 8, 64, 512, {}),  # two waves
        (WGMMA, "GRU", 4, 64, 512, {"skip": 2}),
        (WGMMA, "LSTM", 2, 256, 512, {}),  # states a few at a time, two tiles of rows
        (STATIONARY, "LSTM", 4, 64, 512, {"skip": 1}),
        (STATIONARY, "LSTM", 8, 64, 512, {}),  # two waves
        (STATIONARY, "LSTM", 4, 256, 512, {}),  # parts of the batch one after another
        (SCATTER, "LSTM", 4, 16, 512, {}),
        (SCATTER, "LSTM", 4, 64, 512, {}),
        (SCATTER, "GRU", 4, 64, 512, {}),
        (SCATTER, "LSTM", 4, 4, 1024, {}),  # two waves
    ],
)
def test_large_waves_agree_and_repeat(variant, cell, layers, B, h, more):
    p = stack([cell], layers=layers, T=40, B=B, h=h, **more)
    first, again = agrees(p, variant), agrees(p, variant)
    for a, b in zip(leaves(first), leaves(again), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("variant", [pytest.param(WAVE, marks=on_gpu), None])
def test_norms_of_outputs_far_from_zero(variant, norm):
    """Each layer alone, in float32, from what the one below handed on."""
    p = stack(["RNN"], layers=4, T=30, B=4, h=128, dtype=jnp.float16, skip="input", norm=norm)
    p = p._replace(xs=p.xs + 30)
    _, ys = jax.jit(lambda p: recurrent.stack_scan(*p, return_all=True, variant=variant))(p)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), p)
    for i in range(1, 4):
        below = ys[i - 1].astype(jnp.float32)
        layer = dataclasses.replace(wide.layers[i], skip=None)
        _, y = recurrent.stack_scan([layer], [wide.carries[i]], below, implementation="xla")
        # Float16 has numbers 1 / 64 apart there.
        np.testing.assert_allclose(np.float32(ys[i]), y + wide.xs, rtol=0, atol=0.016)


@on_gpu
@pytest.mark.parametrize(
    "variant, cell, B, more",
    [
        (WAVE, "GRU", 4, {}),
        (WAVE, "GRU", 4, {"skip": 1, "norm": "layer"}),
        (WGMMA, "GRU", 40, {}),
        (STATIONARY, "LSTM", 64, {}),
        (SCATTER, "GRU", 4, {}),
        (SCATTER, "GRU", 40, {}),
    ],
)
def test_barriers_and_delays_change_nothing(variant, cell, B, more, monkeypatch):
    p = stack([cell], layers=3, T=20, B=B, h=128, **more)
    results = []
    barrier = [("_barrier", 0)] if variant != SCATTER else []
    for suffix, delay in [("", 0), ("", 3_000), ("", 50_000), *barrier]:
        monkeypatch.setenv("JAXSPARSE_SCAN_DELAY", str(delay))
        gradient = jax.value_and_grad(loss_of(p, variant=variant + suffix), has_aux=True)
        function = jax.jit(lambda x, gradient=gradient: gradient(x))
        results.append(leaves(jax.device_get(function(p.floating))))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@on_gpu
@pytest.mark.parametrize("variant, B", [(WAVE, 4), (WGMMA, 4), (STATIONARY, 32)])
def test_nan_stays_in_its_row_and_behind_a_reset(variant, B):
    p = stack(["LSTM"], layers=3, T=8, B=B, h=64)
    p = p._replace(xs=p.xs.at[2, 1].set(jnp.nan).at[2, 3].set(jnp.nan))
    resets = jnp.zeros((8, B), bool).at[5, 3].set(True)
    _, ys = jax.jit(lambda p: recurrent.stack_scan(*p, variant=variant, resets=resets))(p)
    bad = np.isnan(np.asarray(ys, np.float32))
    assert bad[2:, 1].all() and bad[2:5, 3].all()
    others = [b for b in range(B) if b not in (1, 3)]
    assert not bad[:2].any() and not bad[:, others].any() and not bad[5:, 3].any()


@on_gpu
@pytest.mark.parametrize("variant, B", [(WAVE, 4), (WGMMA, 4), (STATIONARY, 32), (SCATTER, 4)])
def test_times_out_on_blocks_that_do_not_come(variant, B, monkeypatch):
    p = stack(["RNN"], layers=3, T=5, B=B, h=256)
    run = lambda xs: recurrent.stack_scan(p.layers, p.carries, xs, variant=variant)[1]  # noqa: E731
    operand = p.xs
    if variant == SCATTER:
        operand, run = jax.vjp(run, p.xs)
    recurrent.check()
    monkeypatch.setenv("JAXSPARSE_SCAN_DELAY", str(10**8))  # 50 ms
    monkeypatch.setenv("JAXSPARSE_SCAN_WAIT_LIMIT", "0.001")
    (result,) = leaves(jax.jit(run)(operand))
    assert np.isnan(np.asarray(result, np.float32)).any()
    with pytest.raises(RuntimeError, match=r"recurrent\.check: a scan on GPU 0 timed out"):
        recurrent.check()
    monkeypatch.setenv("JAXSPARSE_SCAN_DELAY", "0")
    monkeypatch.delenv("JAXSPARSE_SCAN_WAIT_LIMIT")
    agrees(p, variant)
