"""Recurrent stacks whose layers lie on several devices, against all of them on one."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from recurrent_problems import compiled
from stack_problems import Stack, smoothed, stack

from jaxsparse import recurrent

DEVICES = jax.devices("cpu")
pytestmark = pytest.mark.skipif(len(DEVICES) < 8, reason="needs 8 CPU devices (tests/conftest.py)")

leaves = jax.tree.leaves


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(DEVICES[0]):
        yield


def total(results):
    """A number that depends on every result, and not linearly."""
    return sum(jnp.sum(jnp.sin(x)) for x in leaves(results))


def close(got, expected, rtol=2e-5, atol=2e-5):
    for a, b in zip(leaves(got), leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def mesh_of(n, data=1, kind=AxisType.Auto):
    """Parts of the batch, and n runs of layers."""
    return jax.make_mesh((data, n), ("data", "stage"), (kind,) * 2, devices=DEVICES[: data * n])


class Piped(NamedTuple):
    """A stack, on one device and with its layers in runs on several ones."""

    whole: Stack
    runs: Stack  # its layers and carries have an axis of runs in front
    n: int

    def in_runs(self, layers):
        """What there is for each layer, as that of a run."""
        count = len(layers) // self.n
        parts = [layers[i * count : (i + 1) * count] for i in range(self.n)]
        return jax.tree.map(lambda *x: jnp.stack(x), *parts)

    def expected(self, results):
        """Last carries and outputs of the whole stack, or gradients in a stack."""
        *of_layers, xs = results
        return leaves(([self.in_runs(x) for x in of_layers], xs))


def piped(n, cells, *, T=7, B=4, **fields):
    """n runs of the layers of a random stack, which has other numbers in each of them."""
    one = stack(cells, T=T, B=B, **fields)

    def turned(tree, i):
        floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
        return jax.tree.map(lambda x: jnp.roll(x, i, -1) if floating(x) else x, tree)

    parts = [(turned(one.layers, i), turned(one.carries, i)) for i in range(n)]
    layers, carries = (
        [x for part in of_runs for x in part] for of_runs in zip(*parts, strict=True)
    )
    made = Piped(Stack(layers, carries, one.xs), one, n)
    return made._replace(runs=Stack(made.in_runs(layers), made.in_runs(carries), one.xs))


def specs_of(p):
    """How the operands of runs lie on a mesh."""

    def of_layer(layer):
        specs = jax.tree.map(lambda _: P("stage"), layer)
        if layer.mask is None:
            return specs
        return dataclasses.replace(specs, mask=P("stage", None, "data"))

    carries = jax.tree.map(lambda _: P("stage", "data"), p.carries)
    return Stack([of_layer(x) for x in p.layers], carries, P(None, "data"))


def mesh_of(n, data=1, kind=AxisType.Auto):
    """Parts of the batch, and runs of layers."""
    return jax.make_mesh((data, n), ("data", "stage"), (kind,) * 2, devices=DEVICES[: data * n])


def put(mesh, tree, specs):
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)


OF_STEPS = {"seq_lengths": P("data"), "resets": P(None, "data")}


def programs(mesh, p, given, **options):
    """Of the stack in runs: its results, a loss, and the gradient of that, taken on the devices."""
    specs, of_given = specs_of(p), {name: OF_STEPS[name] for name in given}
    pairs = zip(leaves(specs), leaves(p), strict=True)
    of_floating = [spec for spec, x in pairs if jnp.issubdtype(x.dtype, jnp.floating)]

    def run(p, given):
        return recurrent.pipelined_stack_scan(*p, axis_name="stage", **given, **options)

    def loss(p, given):
        carries, ys = run(p, given)
        return jax.lax.psum(total(carries), ("data", "stage")) + jax.lax.psum(total(ys), "data")

    def gradient(p, given):
        return jax.grad(lambda floating: loss(p.of(floating), given))(p.floating)

    return [
        jax.shard_map(function, mesh=mesh, in_specs=(specs, of_given), out_specs=out_specs)
        for function, out_specs in (
            (run, (specs.carries, specs.xs)),
            (loss, P()),
            (gradient, of_floating),
        )
    ]


LENGTHS = jnp.array([0, 7, 3, 9])  # of T = 7
RESETS = jnp.asarray(np.random.default_rng(0).random((7, 4)) < 0.3)

# Devices, the layers of each, what these are scanned with. T is no multiple of all chunks.
CASES = {
    "lengths": (
        piped(2, ["LSTM", "GRU"], skip=2, norm="layer", dropout="steps"),
        {"seq_lengths": LENGTHS, "resets": RESETS},
        {"chunk": 3, "reverse": True},
    ),
    "sparse": (
        piped(4, ["RNN"], layers=1, skip=1, norm="rms", weights="csr"),
        {"seq_lengths": LENGTHS},
        {"chunk": 2, "recompute": True},
    ),
    "heads": (
        piped(2, ["SLSTM", "three_leaves"], h=6, dropout="rows", weights="heads"),
        {"resets": RESETS},
        {"chunk": 7},
    ),
    "no start": (piped(2, ["GRU"], layers=1), {}, {"chunk": 1}),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_one_device(name, kind):
    """The batch is cut in two, the gradient taken on each device and outside of all."""
    p, given, options = CASES[name]
    of_one = {key: x for key, x in options.items() if key != "chunk"}

    def value(floating):
        results = recurrent.stack_scan(*p.whole.of(floating), **given, **of_one)
        return total(results), results

    @compiled
    def on_one_device(floating):
        gradient, results = jax.grad(value, has_aux=True)(floating)
        return gradient, results

    gradient, results = on_one_device(p.whole.floating)
    expected = p.expected(results), p.expected(p.whole.of(gradient))
    mesh = mesh_of(p.n, 2, kind)
    with jax.set_mesh(mesh):
        runs = put(mesh, p.runs, specs_of(p.runs))
        given = {key: put(mesh, x, OF_STEPS[key]) for key, x in given.items()}
        run, loss, inside = programs(mesh, p.runs, given, **options)

        @compiled
        def on_all_devices(runs, given):
            outside = jax.grad(lambda floating: loss(runs.of(floating), given))
            return run(runs, given), inside(runs, given), outside(runs.floating)

        results, *gradients = on_all_devices(runs, given)
    close(results, expected[0])
    for got in gradients:
        close(got, [x for x in expected[1] if jnp.issubdtype(x.dtype, jnp.floating)])
