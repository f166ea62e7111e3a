"""Layers of stacks in one loop, as wavefronts: which ones, and their results."""

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
from stack_problems import close, leaves, options_of, stack, total

import jaxsparse
from jaxsparse import H200, recurrent
from jaxsparse.primitive import Fallback, UnavailableError
from jaxsparse.recurrent.graph import choice as choice_of_graph
from jaxsparse.recurrent.graph import wavefront
from jaxsparse.recurrent.graph.choice import choose, without_waves

A100 = dataclasses.replace(H200, name="A100", compute_capability=80)


def of_xla(params, avals, device):
    asked = Fallback("it is tested")
    return without_waves({**params, "implementation": "xla"}, avals, device, asked)


@pytest.fixture
def few_steps_at_once(monkeypatch):
    monkeypatch.setattr(wavefront, "_UNROLLED", 1)  # which compiles faster


@pytest.mark.usefixtures("few_steps_at_once")
@pairwise(
    "cell, layers, skip, norm, dropout, lengths, resets, reverse, extra, T, B",
    ["GRU", "SLSTM", "three_leaves"],
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
    cell, layers, skip, norm, dropout, lengths, resets, reverse, extra, T, B
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
        options = options_of(lengths, resets, reverse, layers, T, B)

        def loss(floating, function):
            results = function(*p.of(floating), **options)
            return total(results), results

        gradient = jax.value_and_grad(
            functools.partial(loss, function=recurrent.stack_scan), has_aux=True
        )
        got, chosen = with_graphs_as(of_xla, gradient, p.floating)
        own = functools.partial(loss, function=reference.stack_scan)
        expected = compiled(jax.value_and_grad(own, has_aux=True))(p.floating)
        close(got, leaves(expected), 1e-9, 1e-9)
        # A layer whose output is normalised hands on its square; the first one may end no skip.
        whole = layers - (norm is not None) - (skip == 2)
        for choice in chosen:
            held = choice.called.endswith(f"as a wavefront of {whole} layers")
            assert held or (whole <= 1 and "because their steps differ" in choice.reason), choice


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
    close(got, leaves(compiled(second)(p.floating)), 1e-4, 1e-4)
    several = [jnp.stack([x, x / 2]) for x in p.floating]
    got, _ = with_graphs_as(of_xla, jax.vmap(of), several)
    close(got, [compiled(jax.vmap(of))(several)], 1e-4, 1e-4)


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


def test_a_wavefront_reads_no_more_weights_than_a_cache_has(monkeypatch):
    p = stack(["LSTM"], layers=3, h=64, T=8, dtype=jnp.float32)
    matrix = 64 * 4 * 64 * 4  # bytes; all inputs of the first layer are multiplied ahead
    for matrices, called in (
        (5, "nodes 1 to 3 as a wavefront of 3 layers"),
        (4, "nodes 1 to 2 as a wavefront of 2 layers"),
    ):
        monkeypatch.setattr(choice_of_graph, "_CACHED_BYTES", matrices * matrix)
        assert choices(p, of_xla).called == called
    monkeypatch.setattr(choice_of_graph, "_CACHED_BYTES", 2 * matrix)
    choice = choices(p, of_xla)
    assert choice.compute is None
    assert "as no wavefront, because a step would read more than 0.125 MiB" in choice.reason
    assert choices(p, choose, variant="wavefront").called.endswith("wavefront of 3 layers")


def test_explained():
    def explained(p, device, **options):
        run = lambda x: recurrent.stack_scan(*p.of(x), **options)  # noqa: E731
        (made,) = jaxsparse.explain(run, p.floating, device=device)
        return made

    small = stack(["LSTM"], layers=3, T=64, h=64, B=4, dtype=jnp.bfloat16)
    assert explained(small, H200).choice.startswith("node by node, because needs 16-bit state")
    assert len(explained(small, H200).scans) == 3
    held = "nodes 1 to 3 as a wavefront of 3 layers, because "
    asked = explained(small, H200, implementation="xla")
    assert asked.choice == f"{held}implementation='xla' asks for it" and not asked.scans
    assert explained(small, A100).choice.startswith(f"{held}A100 has compute capability 8.0")
    # So many rows are no kernel's.
    many = stack(["LSTM"], layers=3, T=4, h=64, B=2000)
    assert re.match(f"{held}.*a batch of 2000 is more than", explained(many, H200).choice)
    odd = explained(stack(["RNN"], layers=3, differ=True), H200, implementation="xla")
    assert odd.choice == (
        "node by node, because implementation='xla' asks for it, and as no wavefront, because they "
        "differ in size"
    )


@pytest.mark.skipif(PLATFORM != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu(dtype):
    p = stack(["GRU"], layers=4, dtype=dtype, T=40, B=16, h=128)

    def gradient(**options):
        def loss(floating):
            results = recurrent.stack_scan(*p.of(floating), **options)
            return total(results), results

        return leaves(jax.jit(jax.value_and_grad(loss, has_aux=True))(p.floating))

    got, again = gradient(variant="wavefront"), gradient(variant="wavefront")
    for a, b, c in zip(got, gradient(), again, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(c))
        a, b = np.float64(a), np.float64(b)
        limit = 2e-2 if dtype == "bfloat16" else 1e-4
        assert np.linalg.norm(a - b) <= limit * (np.linalg.norm(b) + 1e-3 * np.sqrt(b.size))
    recurrent.check()
