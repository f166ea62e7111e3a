"""Recurrent stacks whose layers lie on several devices, against all of them on one."""

from __future__ import annotations

import dataclasses
import re
from typing import NamedTuple

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
    """Runs of the layers of a random stack, with other numbers in each of them."""
    one = stack(cells, T=T, B=B, **fields)

    def turned(tree, i):
        floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
        return jax.tree.map(lambda x: jnp.roll(x, i, -1) if floating(x) else x, tree)

    parts = [(turned(one.layers, i), turned(one.carries, i)) for i in range(n)]
    layers, carries = (
        [x for part in of_runs for x in part] for of_runs in zip(*parts, strict=True)
    )
    # Zeros have no norm then: where a run idles, they would make NaN of all that they reach.
    layers = [dataclasses.replace(x, norm_epsilon=0.0) for x in layers]
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

# Devices, the layers of each, what these are scanned with. T is no multiple of all chunks. Tests
# make them, not each worker that collects tests.
CASES = {
    "lengths": lambda: (
        piped(2, ["LSTM", "GRU"], skip=2, norm="layer", dropout="steps"),
        {"seq_lengths": LENGTHS, "resets": RESETS},
        {"chunk": 3, "reverse": True},
    ),
    "sparse": lambda: (
        piped(4, ["RNN"], layers=1, skip=1, norm="rms", weights="csr"),
        {"seq_lengths": LENGTHS},
        {"chunk": 2, "recompute": True},
    ),
    "heads": lambda: (
        piped(2, ["SLSTM", "three_leaves"], h=6, dropout="rows", weights="heads"),
        {"resets": RESETS},
        {"chunk": 7},
    ),
    "bubbles": lambda: (piped(2, ["GRU"], layers=1, norm="rms"), {}, {"chunk": 1}),
}


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.mark.parametrize(
    "name, kind",
    [("lengths", AUTO), ("sparse", EXPLICIT), ("heads", AUTO), ("bubbles", EXPLICIT)],
    ids=str,
)
def test_results_and_gradients_are_those_of_one_device(name, kind):
    """The batch is cut in two; the gradient is taken on each device, and outside of all."""
    p, given, options = CASES[name]()
    of_one = {key: x for key, x in options.items() if key != "chunk"}

    def value(floating):
        results = recurrent.stack_scan(*p.whole.of(floating), **given, **of_one)
        return total(results), results

    gradient, results = compiled(jax.grad(value, has_aux=True))(p.whole.floating)
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


def value_of(mesh, p, **options):
    """The results of a stack in runs as a function of its floating arrays."""
    run, _, _ = programs(mesh, p.runs, {}, **options)
    return lambda floating: run(p.runs.of(floating), {})


@pytest.mark.smoke  # XLA of jaxlib 0.11 crashed
def test_derivatives_by_differences():
    with jax.enable_x64(True):
        p = piped(2, ["RNN"], layers=1, T=3, B=1, h=2, skip=1, dtype=jnp.float64)
        value = jax.jit(value_of(mesh_of(2), p, chunk=2))
        check_grads(value, (p.runs.floating,), 2, modes=("fwd", "rev"), eps=1e-4)


def test_one_device_has_all_layers():
    """Bit for bit, where T is a multiple of the chunk as it is by default."""
    p = piped(1, ["LSTM", "RNN"], skip=1)
    got = compiled(value_of(mesh_of(1), p))(p.runs.floating)
    expected = compiled(lambda p: recurrent.stack_scan(*p))(p.whole)
    jax.tree.map(np.testing.assert_array_equal, leaves(got), p.expected(expected))


def test_nothing_to_scan():
    p = piped(2, ["GRU"], layers=1, T=0)
    (h,), ys = value_of(mesh_of(2), p)(p.runs.floating)
    assert ys.shape == (0, 4, 5)
    np.testing.assert_array_equal(h, p.runs.carries[0])
    p = piped(2, ["GRU"], layers=1, B=0)
    assert jax.eval_shape(value_of(mesh_of(2), p), p.runs.floating)[1].shape == (7, 0, 5)


def test_gradients_of_weights_are_summed_in_float32():
    """As many ones as steps: in bfloat16 a sum of ones ends at 256."""

    def linear(x, r, carry):
        return x[0] + r[0], x[0]

    T = 600
    one, zero = jnp.ones((2, 1, 1), jnp.bfloat16), jnp.zeros((2, 1, 1), jnp.bfloat16)
    layer = recurrent.Layer(linear, recurrent=zero, input=one)
    p = Stack([layer], [zero.astype(jnp.float32)], jnp.ones((T, 1, 1), jnp.bfloat16))

    @compiled
    def gradient(floating):
        value = value_of(mesh_of(2), Piped(p, p, 2), chunk=1)
        return jax.grad(lambda x: jnp.sum(value(x)[1].astype(jnp.float32)))(floating)

    of_input = p.of(gradient(p.floating)).layers[0].input
    assert of_input.dtype == jnp.bfloat16
    np.testing.assert_array_equal(of_input, jnp.full((2, 1, 1), T, jnp.bfloat16))


def test_what_devices_tell_each_other():
    """Outputs in each round, to the next run; gradients once, after all rounds."""
    p, given, options = CASES["lengths"]()
    mesh = mesh_of(2, 2)
    runs = put(mesh, p.runs, specs_of(p.runs))
    _, _, gradient = programs(mesh, p.runs, given, **options)
    text = jax.jit(gradient).lower(runs, given).compile().as_text()
    loops, entry = text.split("ENTRY")
    assert "all-reduce" in entry and "all-reduce" not in loops
    assert "collective-permute" in loops
    assert "all-gather" not in text and "all-to-all" not in text


def test_gradients_keep_no_weights_of_each_round():
    p, given, options = CASES["lengths"]()
    _, _, gradient = programs(mesh_of(2), p.runs, given, **options)
    program = str(jax.make_jaxpr(gradient)(p.runs, given))
    rounds = -(-p.runs.xs.shape[0] // options["chunk"]) + 1
    assert f"length={rounds}" in program
    for layer in p.runs.layers:
        for _, *shape in (layer.input.shape, layer.recurrent.shape):
            assert ",".join(map(str, shape)) + "]" in program
            assert ",".join(map(str, (rounds, *shape))) + "]" not in program


def test_carries_are_rounded_once():
    p = piped(2, ["GRU"], layers=1, T=7, B=2)
    runs = p.runs._replace(carries=jax.tree.map(lambda x: x.astype(jnp.bfloat16), p.runs.carries))
    whole = p.whole._replace(
        carries=jax.tree.map(lambda x: x.astype(jnp.bfloat16), p.whole.carries)
    )
    run, _, _ = programs(mesh_of(2), runs, {}, chunk=1)
    carries, ys = jax.jit(run)(runs, {})
    expected = jax.jit(recurrent.stack_scan)(*whole)
    close(ys, expected[1])
    close(
        [x.astype(jnp.float32) for x in leaves(carries)],
        [x.astype(jnp.float32) for x in leaves(p.in_runs(expected[0]))],
        rtol=2**-8,
    )


def test_operands_of_devices_have_elements():
    """XLA of jaxlib 0.11 crashes where `shard_map` takes a constant of none."""
    p = piped(2, ["RNN"], layers=1)
    text = jax.jit(value_of(mesh_of(2), p)).lower(p.runs.floating).as_text()
    (operands,) = re.findall(r"sdy.manual_computation\(.*\((.*)\) \{", text)
    assert "tensor<0x" not in operands


@pytest.mark.parametrize(
    "n, T, chunk, rounds, steps",
    [
        (1, 1000, None, 1, 1000),
        (2, 1000, None, 8 + 1, 125),
        (4, 1000, None, 14 + 3, 72),
        (2, 3, None, 1 + 1, 3),
        (3, 10, 4, 3 + 2, 4),
        (2, 3, 9, 1 + 1, 3),
    ],
)
def test_rounds(n, T, chunk, rounds, steps):
    """About sqrt(T (n - 1)) / 4 chunks, and a round more for each device behind the first one."""
    p = piped(n, ["RNN"], layers=1, T=T)
    program = str(jax.make_jaxpr(value_of(mesh_of(n), p, chunk=chunk))(p.runs.floating))
    assert {*re.findall(r"\blength=(\d+)", program)} == {str(rounds), str(steps)}


def replaced(p, **changes):
    return p._replace(layers=[dataclasses.replace(p.layers[0], **changes), *p.layers[1:]])


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        (None, {"axis_name": "model"}, ValueError, "axis_name must be an axis .* got 'model'"),
        (None, {"chunk": 0}, ValueError, "chunk must be >= 1, got 0"),
        (None, {"chunk": 1.5}, TypeError, "chunk must be an integer, got 1.5"),
        (
            lambda p: replaced(p, bias=jnp.zeros((4, 5))),
            {},
            ValueError,
            r"arrays of layers must have an axis in front, of 2 runs, sharded over 'stage': here, "
            r"on one device, \(1, ...\), got shape \(2, 5\)",
        ),
        (
            lambda p: replaced(p, skip=2),
            {},
            ValueError,
            "layer 0: skip=2 leads to another device: .* at most 1 layers below",
        ),
        (lambda p: replaced(p, between=smoothed), {}, ValueError, "layer 0: between is a function"),
        (lambda p: replaced(p, input=None), {}, ValueError, "layer 0: input is None: a run takes"),
        (
            lambda p: p._replace(xs=p.xs[..., :4]),
            {},
            ValueError,
            "layer 0: input must be .* of k = 4 features",
        ),
        (
            lambda p: replaced(p._replace(xs=p.xs[..., :4]), input=jnp.zeros((2, 4, 5))),
            {},
            ValueError,
            "xs must have as many features as a run's last layer has units, 5, .* got 4",
        ),
        (lambda p: p._replace(carries=[]), {}, ValueError, "a carry for each, got 2 and 0 carries"),
    ],
)
def test_errors(change, options, error, message):
    p = piped(2, ["RNN"]).runs
    p = p if change is None else change(p)
    options = {"axis_name": "stage", **options}
    run = jax.shard_map(
        lambda p: recurrent.pipelined_stack_scan(*p, **options),
        mesh=mesh_of(2),
        in_specs=(Stack(P("stage"), P("stage"), P()),),
        out_specs=(P("stage"), P()),
    )
    with pytest.raises(error, match=f"^recurrent.pipelined_stack_scan: .*{message}"):
        jax.eval_shape(run, p)


def test_errors_outside_of_devices():
    p = piped(1, ["RNN"]).runs
    with pytest.raises(ValueError, match="axis_name must be an axis of the mesh"):
        recurrent.pipelined_stack_scan(*p, axis_name="stage")
