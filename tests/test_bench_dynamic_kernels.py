"""Which implementations of dynamic networks run by kernels, and what these take to compile."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from checks import PLATFORM
from test_bench_dynamic import made_data, small  # noqa: F401

from benchmarks.dynamic import kernels, models
from benchmarks.dynamic.batches import Scripts
from benchmarks.dynamic.implementations import IMPLEMENTATIONS
from jaxsparse import H200, dynamic, explain
from jaxsparse.dynamic.plan import Plan


@pytest.mark.parametrize("name", ["jaxsparse", "width-8", "groups-8"])
def test_rows_without_kernels_have_none(name):
    """Although kernels would take their tiles, which have 8 rows."""
    problem = replace(small("tree_lstm", 4), hidden=32)
    (way,) = IMPLEMENTATIONS[name].build.args
    (step,), batches = problem.groups()[0], way.batches
    batch = batches.one(problem, step, batches.room(problem, [step]))
    assert batch.script.form.width == 8
    params = {k: jnp.float32(x) for k, x in problem.net.parameters(problem.sizes).items()}
    rows = params.pop("table")[jnp.maximum(problem.net.word_ids(batch), 0)]
    loss = way.loss(problem, "float32")
    found = explain(lambda params: loss(params, rows, batch)[0], params, device=H200)
    assert [str(e.plan).partition(",")[0] for e in found] == ["a loop of XLA over tiles"]


def test_kernels_take_both_directions():
    """Each scan of a net of words and letters, and its gradient, is one launch."""
    problem = replace(small("bilstm_letters"), hidden=32)
    (step,), batches = problem.groups()[0], Scripts(teams="bfloat16")
    batch = batches.one(problem, step, batches.room(problem, [step]))
    params = {k: jnp.bfloat16(x) for k, x in problem.net.parameters(problem.sizes).items()}
    rows = params.pop("table")[batch.script.input("word")]
    loss = functools.partial(
        problem.net.loss, functools.partial(dynamic.scan, implementation="cuda")
    )
    gradient = jax.grad(lambda params: loss(params, rows, batch)[0])
    found = [e for e in explain(gradient, params, device=H200) if e.operation == "dynamic_scan"]
    assert len(found) == 4
    assert all(isinstance(e.plan, Plan) and "2 kinds" in e.problem for e in found)


def test_kernels_of_a_program():
    """Found in its text, each once; without them, and without a GPU, there is nothing to load."""
    problem = replace(small("tree_lstm"), hidden=64, embedding=64)
    net = problem.net
    weights = net.parameters(problem.sizes)
    (step,) = problem.groups()[0]
    layout = Scripts(teams="bfloat16").layout(problem)
    script = dynamic.pack(problem.graphs, step, layout)

    def text(implementation):
        def twice(weights, carry):
            def scan():
                given = {"bias": jnp.zeros(320), "implementation": implementation}
                return dynamic.scan(net.cell, weights, carry, script, **given)

            return scan(), scan()

        carry = models.zero_carry(script.form.leaves, 64, jnp.bfloat16)
        traced = jax.jit(twice).trace(jnp.asarray(weights["weights"], jnp.bfloat16), carry)
        return traced.lower(lowering_platforms=("cuda",))

    (kernel,) = kernels.kernels_of(text("cuda"))
    assert kernel.file == "dynamic_scan_team_tensor_cores.cu" and "GraphGather" in kernel.expression
    assert "struct PrintedStep" in kernel.text and kernels.kernels_of(text("xla")) == []
    if PLATFORM == "cuda":
        compiled, cached = kernels.loading_seconds([kernel])
        assert 0 < cached < compiled
