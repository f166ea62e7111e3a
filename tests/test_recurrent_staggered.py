"""Layers of stacks side by side, as wavefronts and in chunks: which ones, and their results."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from checks import PLATFORM
from covering import pairwise
from graph_forms import with_graphs_as
from recurrent_problems import compiled
from stack_problems import NAMES, Stack, stack
from test_recurrent_stack import assert_close, lengths_of, resets_of, total

import jaxsparse
from jaxsparse import CSR, H200, recurrent
from jaxsparse.primitive import Fallback, UnavailableError
from jaxsparse.recurrent.graph import chunked, wavefront
from jaxsparse.recurrent.graph.choice import choose, without_waves
from jaxsparse.recurrent.graph.chunked import Chunks, run_chunked, steps_of_chunk
from jaxsparse.recurrent.graph.operands import split
from jaxsparse.recurrent.graph.runs import in_runs
from jaxsparse.recurrent.graph.staggered_form import staggered
from jaxsparse.recurrent.plan import Plan

A100 = dataclasses.replace(H200, name="A100", compute_capability=80)
leaves = jax.tree.leaves


def of_xla(params, avals, device):
    asked = Fallback("it is tested")
    return without_waves({**params, "implementation": "xla"}, avals, device, asked)


@pytest.fixture
def few_steps_at_once(monkeypatch):
    for module in (wavefront, chunked):
        monkeypatch.setattr(module, "_UNROLLED", 1)  # which compiles faster


def in_form(run, kinds=("dense",)):
    """Computes runs of layers of one form by a function, of every graph."""

    def choose(params, avals, device):
        found, reason = staggered(params, split(avals, params), kinds)
        runs = {form.first: functools.partial(run, form) for form in found}
        held = " and ".join(f"{form.layers} layers" for form in found)
        return Fallback(reason, functools.partial(in_runs, runs), held)

    return choose


def in_chunks(form, *call, written_out=False):
    return run_chunked(form, Chunks(2, written_out), *call)


@pytest.mark.usefixtures("few_steps_at_once")
@pairwise(
    "run, cell, layers, skip, norm, dropout, lengths, resets, reverse, extra, T, B",
    [wavefront.run_wavefront, in_chunks],
    NAMES,
    [2, 3, 4],
    [None, 1, 2, "input"],
    [None, "layer"],
    [None, "steps"],
    [None, "ragged"],
    [False, True],
    [False, True],
    [0, 2],
    [4, 5],
    [1, 3],
)
def test_values_and_gradients(
    run, cell, layers, skip, norm, dropout, lengths, resets, reverse, extra, T, B
):
    with jax.enable_x64(True):
        p = stack(
            [cell],
            layers=layers,
            skip=skip,
            norm=norm,
            dropout=dropout,
            features=6 + extra * (skip is None),
            T=T,
            B=B,
            h=6,
            dtype=jnp.float64,
        )
        options = {
            "seq_lengths": lengths_of(lengths, B, T),
            "resets": resets_of(resets, B, T),
            "reverse": reverse,
            "return_all": layers == 2,
        }

        def loss(floating, function):
            results = function(*p.of(floating), **options)
            return total(results), results

        gradient = jax.value_and_grad(
            functools.partial(loss, function=recurrent.stack_scan), has_aux=True
        )
        got, chosen = with_graphs_as(in_form(run), gradient, p.floating)
        own = functools.partial(loss, function=reference.stack_scan)
        expected = compiled(jax.value_and_grad(own, has_aux=True))(p.floating)
        assert_close(got, leaves(expected), 1e-9)
        # A layer whose output is normalised hands on its square; the first one may end no skip.
        whole = layers - (norm is not None) - (skip == 2)
        for choice in chosen:
            held = choice.called == f"{whole} layers"
            assert held or (whole <= 1 and choice.reason == "their steps differ"), choice


@pytest.mark.usefixtures("few_steps_at_once")
def test_a_bad_row_stays_in_its_row_and_a_bad_step_behind_it():
    p = stack(["GRU"], layers=3, T=5)

    def of(xs):
        def run(xs):
            return recurrent.stack_scan(p.layers, p.carries, xs, return_all=True)

        return with_graphs_as(of_xla, run, xs)[0]

    others = np.array([0, 2])
    clean, bad = of(p.xs), of(p.xs.at[2, 1, 0].set(jnp.nan))
    for a, b in zip(clean[:3], bad[:3], strict=True):  # carries
        np.testing.assert_array_equal(a[others], b[others])
    for a, b in zip(clean[3:], bad[3:], strict=True):
        np.testing.assert_array_equal(a[:, others], b[:, others])
        np.testing.assert_array_equal(a[:2], b[:2])
        assert np.isnan(b[2:, 1]).all()


def test_16_bits_are_no_less_exact_than_layer_by_layer():
    p = stack(["LSTM"], layers=3, T=9, h=16, dtype=jnp.bfloat16)
    run = lambda xs: recurrent.stack_scan(p.layers, p.carries, xs)  # noqa: E731
    got, _ = with_graphs_as(of_xla, run, p.xs)
    plain = leaves(compiled(run)(p.xs))
    with jax.enable_x64(True):
        exact = leaves(reference.stack_scan(*p))
    for a, b, c in zip(got, plain, exact, strict=True):
        a, b, c = (np.asarray(x, np.float64) for x in (a, b, c))
        assert a.shape == c.shape and np.linalg.norm(a - c) <= 1.2 * np.linalg.norm(b - c)


@pytest.mark.usefixtures("few_steps_at_once")
def test_derivatives_of_second_order_and_mapped_weights():
    p = stack(["LSTM"], layers=2, T=3, h=3)

    def of(floating):
        ys = recurrent.stack_scan(*p.of(floating))[1]
        return jnp.sum(jnp.sin(ys))

    def second(floating):
        slope = jax.grad(of)
        return jax.jvp(slope, (floating,), (floating,))[1]

    got, chosen = with_graphs_as(of_xla, second, p.floating)
    assert sum("wavefront" in choice.called for choice in chosen) >= 2
    assert_close(got, leaves(compiled(second)(p.floating)), 1e-4)
    several = [jnp.stack([x, x / 2]) for x in p.floating]
    got, _ = with_graphs_as(of_xla, jax.vmap(of), several)
    assert_close(got, [compiled(jax.vmap(of))(several)], 1e-4)


def sparse(layers, **sizes):
    """A stack with sparse recurrent weights, of as many entries as it happens, and dense inputs."""
    p = stack(["GRU"], layers=layers, weights="csr", **sizes)
    dense = [dataclasses.replace(x, input=x.input.todense().T) for x in p.layers]
    return p._replace(layers=dense)


@pytest.mark.usefixtures("few_steps_at_once")
@pytest.mark.parametrize("written_out", [False, True])
def test_sparse_weights_in_chunks(written_out):
    p = sparse(3, T=5)
    assert len({x.recurrent.topology.nse for x in p.layers}) > 1

    def loss(floating, **options):
        results = recurrent.stack_scan(*p.of(floating), **options)
        return total(results), results

    gradient = jax.value_and_grad(functools.partial(loss, variant="chunked"), has_aux=True)
    run = functools.partial(in_chunks, written_out=written_out)
    got, chosen = with_graphs_as(in_form(run, ("dense", "csr")), gradient, p.floating)
    assert [choice.called for choice in chosen] == ["3 layers"] * 2
    expected = compiled(jax.value_and_grad(loss, has_aux=True))(p.floating)
    assert_close(got, leaves(expected), 1e-5)


@pytest.mark.parametrize(
    "layers, length, step", [(4, 1000, 1.8), (2, 17, 3.0), (8, 256, 0.9), (4, 1, 2)]
)
def test_chunks_take_least_time(layers, length, step):
    def cost(steps):
        return (-(-length // steps) + layers - 1) * (steps * step + 25)

    chosen = steps_of_chunk(length, layers, step)
    of_few = range(-(-length // 64), length + 1)
    assert chosen in of_few and cost(chosen) <= min(map(cost, of_few)) * 1.001


def choices(p, choose, device=H200, **options):
    """What a stack is computed as, its forward pass."""
    chosen = with_graphs_as(
        lambda *call: choose(*call[:2], device),
        lambda x: recurrent.stack_scan(*p.of(x), **options),
        p.floating,
    )[1]
    (choice,) = chosen
    return choice


def test_where_a_wavefront_ends():
    def of(*cells, **sizes):
        return choices(stack(cells, **{"T": 8, **sizes}), of_xla)

    assert of("LSTM", "LSTM", "RNN", "RNN", layers=4).called == (
        "nodes 1 to 2 as a wavefront of 2 layers and nodes 3 to 4 as a wavefront of 2 layers"
    )
    # A first layer that takes pre-activations is another step.
    assert "nodes 1 to 2 as" in of("RNN", layers=3, pre_activations=True).called
    for differ, reason in (
        ({"differ": True}, "they differ in size"),
        ({"weights": "csr"}, "an edge is of kind csr"),
        ({"weights": "heads", "h": 6}, "an edge is of kind heads"),
        ({"T": 1}, "there are fewer steps than layers"),
    ):
        choice = of("RNN", layers=3, **differ)
        assert choice.compute is None and reason in choice.reason
    single = of("RNN", layers=1)
    assert single.compute is None and single.reason == "it is tested"
    with pytest.raises(UnavailableError, match="wavefront was asked for, but they differ in size"):
        choices(stack(["RNN"], layers=3, differ=True), choose, variant="wavefront")


def test_explained():
    def explained(p, device, **options):
        run = lambda x: recurrent.stack_scan(*p.of(x), **options)  # noqa: E731
        (made,) = jaxsparse.explain(run, p.floating, device=device)
        return made

    small = stack(["LSTM"], layers=3, T=64, h=64, B=4, dtype=jnp.bfloat16)
    assert explained(small, H200).choice.startswith("node by node, because waves run where")
    assert len(explained(small, H200).scans) == 3
    held = "nodes 1 to 3 as a wavefront of 3 layers, because "
    asked = explained(small, H200, implementation="xla")
    assert asked.choice == f"{held}implementation='xla' asks for it" and not asked.scans
    assert explained(small, A100).choice.startswith(f"{held}A100 has compute capability 8.0")
    chunks = explained(small, H200, variant="chunked")
    assert re.match(r"nodes 1 to 3 side by side, each a chunk of \d+ steps behind", chunks.choice)
    ((form, plan),) = chunks.scans
    assert form.directions == 3 and isinstance(plan, Plan) and plan.launches == 1
    rng = np.random.default_rng(0)
    few = [CSR.fromdense(jnp.float32(rng.random((512, 512)) < 0.03)) for _ in range(2)]
    pairs = [recurrent.Layer(recurrent.elman("relu"), x, jnp.eye(512)) for x in few]
    pairs = Stack(pairs, [jnp.zeros((1, 512))] * 2, jnp.zeros((64, 1, 512)))
    ((form, plan),) = explained(pairs, H200, variant="chunked").scans
    assert (form.directions, plan.variant, plan.launches) == (2, "sparse_pairs", 1)
    # So many rows are no kernel's.
    many = stack(["LSTM"], layers=3, T=4, h=64, B=2000)
    assert re.match(f"{held}.*a batch of 2000 is more than", explained(many, H200).choice)
    assert explained(many, H200, variant="chunked").choice.startswith("refused, because ")
    odd = explained(stack(["RNN"], layers=3, differ=True), H200, implementation="xla")
    assert odd.choice == (
        "node by node, because implementation='xla' asks for it, and as no wavefront, because they "
        "differ in size"
    )


@pytest.mark.skipif(PLATFORM != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("variant", ["wavefront", "chunked"])
@pytest.mark.parametrize(
    "weights, dtype", [("dense", "float32"), ("dense", "bfloat16"), ("csr", "float32")]
)
def test_on_a_gpu(variant, weights, dtype):
    sizes = {"T": 40, "B": 16, "h": 128}
    p = sparse(4, **sizes) if weights == "csr" else stack(["GRU"], layers=4, dtype=dtype, **sizes)
    if (variant, weights) == ("wavefront", "csr"):
        pytest.skip("wavefronts are of dense weights")

    def gradient(**options):
        def loss(floating):
            results = recurrent.stack_scan(*p.of(floating), **options)
            return total(results), results

        return leaves(jax.jit(jax.value_and_grad(loss, has_aux=True))(p.floating))

    got, again = gradient(variant=variant), gradient(variant=variant)
    for a, b, c in zip(got, gradient(), again, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(c))
        a, b = np.float64(a), np.float64(b)
        limit = 2e-2 if dtype == "bfloat16" else 1e-4
        assert np.linalg.norm(a - b) <= limit * (np.linalg.norm(b) + 1e-3 * np.sqrt(b.size))
    recurrent.check()
