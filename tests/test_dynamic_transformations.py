"""Scans over graphs under the transformations of JAX: vmap, sharding, export, recomputation."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dynamic_problems import finite, problem
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from recurrent_problems import compiled

from jaxsparse import EXPORT_DISABLED_CHECKS, H200, dynamic, explain
from jaxsparse.dynamic.explained import ScriptSummary
from jaxsparse.dynamic.primitive import dynamic_scan_p
from jaxsparse.dynamic.primitive.plain import plain_scan
from jaxsparse.primitive import equations

leaves = jax.tree.leaves


def close(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


def shorter(script, tiles):
    """A script of the same form without its last tiles."""
    words = script.words.copy()
    words[2] = script.used_tiles - tiles
    cut = dynamic.Script(words, script.form)
    cut.sources[-tiles:] = -1
    cut.x_rows[-tiles:] = -1
    return dynamic.Script(words, script.form)


def value_and_gradient(p, operands, script):
    def loss(operands):
        made = p.scan(*operands, script=script)
        return sum(jnp.sum(jnp.sin(x)) for x in leaves(made)), made

    return jax.value_and_grad(loss, has_aux=True)(operands)


@functools.cache
def scripts_and_operands(count=2):
    """Problems of one form and one cell; every script ends with another tile."""
    p = problem("every_child", dtype=jnp.float32)
    several = [finite(problem("every_child", dtype=jnp.float32, seed=s).operands) for s in range(9)]
    same = [x for x in several if x[2].shape == p.xs.shape][:1] * count
    scaled = [jax.tree.map(lambda x, i=i: x * (1 + i / 4), x) for i, x in enumerate(same)]
    scripts = [p.script, *(shorter(p.script, 1 + i % 3) for i in range(count - 1))]
    return p, scaled, scripts


def test_a_shorter_script_is_one():
    p, _, scripts = scripts_and_operands()
    assert (np.asarray(scripts[1].sources[-1]) == -1).all()
    assert not (np.asarray(p.script.sources[-1]) == -1).all()


def test_vmap_over_each_operand():
    p, operands, scripts = scripts_and_operands()
    one = compiled(functools.partial(value_and_gradient, p))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *operands)
    names = ("weights", "carry", "xs", "bias", "script")
    cases = [{name} for name in names] + [set(names), {"carry", "xs"}]

    def mapped(case):
        axes = tuple(0 if name in case else None for name in names)
        given = [
            s if name in case else x
            for name, s, x in zip(names, stacked, operands[0], strict=False)
        ]
        script = dynamic.stack(scripts) if "script" in case else scripts[0]
        run = functools.partial(value_and_gradient, p)
        return jax.vmap(run, (axes[:4], axes[4]))(tuple(given), script)

    got = compiled(lambda: [mapped(case) for case in cases])()
    for case, results in zip(cases, got, strict=True):
        for i in range(2):
            own = tuple(operands[i if name in case else 0][k] for k, name in enumerate(names[:4]))
            expected = one(own, scripts[i if "script" in case else 0])
            close(jax.tree.map(lambda x, i=i: x[i], results), expected)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_data_parallel_gradients(kind):
    """Scripts on several devices; weights are on all, and their gradient is the sum."""
    devices = jax.devices("cpu")
    if len(devices) < 4:
        pytest.skip("needs 4 CPU devices (tests/conftest.py)")
    mesh = jax.make_mesh((4,), ("data",), (kind,), devices=devices[:4])
    put = lambda tree: jax.device_put(tree, NamedSharding(mesh, P("data")))  # noqa: E731
    p, operands, scripts = scripts_and_operands(4)
    one = compiled(functools.partial(value_and_gradient, p))
    weights, _, _, bias = operands[0]
    stacked = [jax.tree.map(lambda *x: jnp.stack(x), *(o[i] for o in operands)) for i in (1, 2)]
    carry, xs, every_script = map(put, (*stacked, dynamic.stack(scripts)))
    expected = [one((weights, o[1], o[2], bias), s) for o, s in zip(operands, scripts, strict=True)]

    def local(weights, bias, carry, xs, script):
        (carry, xs, script) = jax.tree.map(lambda x: x[0], (carry, xs, script))
        made = p.scan(weights, carry, xs, bias, script=script)
        return jax.lax.psum(sum(jnp.sum(jnp.sin(x)) for x in leaves(made)), "data")

    specs = (P(), P(), P("data"), P("data"), P("data"))
    total = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
    gradient = compiled(jax.grad(total, (0, 1, 2, 3)))(weights, bias, carry, xs, every_script)
    parts = [g for _, g in expected]
    close(gradient[0], sum(g[0] for g in parts))
    close(gradient[1], sum(g[3] for g in parts))
    close(gradient[2], jax.tree.map(lambda *x: jnp.stack(x), *(g[1] for g in parts)))
    close(gradient[3], jnp.stack([g[2] for g in parts]))

    # The same where the compiler cuts the program: each device has its scripts.
    run = jax.vmap(lambda c, x, s: p.scan(weights, c, x, bias, script=s))
    made = compiled(run)(carry, xs, every_script)
    close(made, jax.tree.map(lambda *x: jnp.stack(x), *(v[1] for v, _ in expected)))
    for x in leaves(made):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), x.ndim)


def test_steps_over_stacked_scripts():
    """Many batches in one dispatch: a loop of XLA over scripts."""
    p, operands, scripts = scripts_and_operands()
    one = compiled(functools.partial(value_and_gradient, p))

    def step(total, script):
        (value, _), gradient = value_and_gradient(p, operands[0], script)
        return jax.tree.map(jnp.add, total, (value, gradient)), None

    zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), operands[0]))
    total, _ = compiled(lambda s: jax.lax.scan(step, zeros, s))(dynamic.stack(scripts))
    expected = [one(operands[0], script) for script in scripts]
    close(total, jax.tree.map(jnp.add, *((v, g) for (v, _), g in expected)))


def test_an_exported_gradient_takes_other_scripts():
    p, operands, scripts = scripts_and_operands()
    one = compiled(functools.partial(value_and_gradient, p))
    exported = jax.export.export(one, disabled_checks=EXPORT_DISABLED_CHECKS)(
        operands[0], scripts[0]
    )
    again = jax.export.deserialize(exported.serialize())
    for script in scripts:
        close(again.call(operands[0], script), one(operands[0], script))


def test_recomputation_keeps_no_products():
    p, operands, _ = scripts_and_operands()
    rows, h = p.script.form.computed, p.weights.shape[1] // 3

    def kept(**options):
        _, pullback = jax.vjp(lambda *x: p.scan(*x, **options), *operands[0])
        return [x.shape for x in leaves(pullback)]

    assert (rows, 3, h) in kept() and (rows, 3, h) not in kept(recompute=True)


def test_loops_on_a_gpu():
    """They have all tiles, and weights of a kind without a switch; they lower for a GPU, too."""
    p = problem("two_directions", dtype=jnp.float32)
    script = shorter(p.script, 1)
    run = functools.partial(value_and_gradient, p)
    operands = finite(p.operands)
    jaxpr = jax.make_jaxpr(run)(operands, script)
    scans = [eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive is dynamic_scan_p]
    assert [eqn.params["emits"] for eqn in scans] == [False, True]
    kinds = jnp.repeat(jnp.asarray(script.kinds, jnp.float32), script.form.width)
    rng = np.random.default_rng(0)
    for eqn in scans:
        avals = [v.aval for v in eqn.invars]
        values = [jnp.asarray(rng.standard_normal(a.shape), a.dtype) for a in avals]
        values[1] = jnp.asarray(script.words)
        values = [kinds.reshape(x.shape) if x.shape[1:] == (1, 1) else x for x in values]
        here, there = (
            compiled(functools.partial(plain_scan, on_gpu=on_gpu, **eqn.params))(*values)
            for on_gpu in (False, True)
        )
        close(here, there)
    lowered = jax.jit(run).trace(operands, script).lower(lowering_platforms=("cuda",))
    assert "stablehlo.dot_general" in lowered.as_text()


def test_explain():
    p, operands, scripts = scripts_and_operands()
    found = explain(functools.partial(value_and_gradient, p), operands[0], scripts[1], device=H200)
    forward, backward = found
    assert forward.operation == backward.operation == "dynamic_scan"
    text = str(forward)
    assert "the cell of_every_child: 3 products of 3 units, float32 state, 3 children" in text
    assert "5 leaves and 4 tiles of 3 rows" in text and "loop of XLA" in text
    (summary,) = forward.scripts
    used = scripts[1].sources[:3]
    rows = int((used >= 0).any(-1).sum())
    assert (summary.rows, summary.tiles, summary.fill) == (rows, 3, rows / 9)
    assert "from the roots" in str(backward)


def test_what_a_script_holds():
    """Levels are those of the deepest graph, though tiles of its group come behind others."""
    sequences = dynamic.Graphs.from_sequences([4, 3, 0])
    layout = dynamic.Layout(width=2, groups=2, slots=1)
    summary = ScriptSummary.of(dynamic.pack(sequences, [1, 0, 2], layout))
    assert dataclasses.astuple(summary) == (3, 3, 7, 4, 7, 0.5)
