"""Kernels of scans over graphs as programs call them, on an emulated GPU, against the plain path.

tests/test_device_emulated.py tests the same kernels with steps that are written for it. Here steps,
plans and the order of arrays are those of `dynamic.scan` and its gradient.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sanitized
from test_device_emulated import OPTIONS
from test_dynamic_device import Case

from jaxsparse import H200
from jaxsparse.dynamic.primitive import dynamic_scan_p
from jaxsparse.primitive import OPERATIONS, choose, typed_call

GPU = dataclasses.replace(H200, name="small", multiprocessors=6)
# What differs between calls.
PROGRAM = """\
#define EMULATED_CONCURRENT_BLOCKS
#include "emulated/concurrent_blocks.h"
{source}
#include "device/graph_scan_call.h"

int main(int, char** arguments) {{ return jaxsparse::RunCall({folder}, {expression}); }}
"""


def emulated(eqn, operands, folder):
    """The results of a call of the primitive, by the kernel that it is planned to run by."""
    folder.mkdir()
    avals = [v.aval for v in eqn.invars]
    call = choose(typed_call(OPERATIONS[dynamic_scan_p], eqn.params, avals), GPU)
    said, step, form = call.attributes, eqn.params["step"], eqn.params["form"]
    results = [v.aval for v in eqn.outvars]
    hidden = results[0].shape[-1]
    launch = said["scans"], said["blocks"], said["threads"], said["shared_bytes"]
    sizes = [
        *(int(said["emits"]), said["products"], hidden, said["carries"]),
        *(form.leaves, form.tiles, form.slots, form.groups, form.kinds, said["window"], *launch),
        *(len(operands), len(results)),
        *(a.size * a.dtype.itemsize for a in results),
    ]
    for parts, span in zip(step.inputs, eqn.params["spans"], strict=True):
        units = hidden if "h" in span else 1
        sizes += [parts * units * ("r" in span), units, int("h" in span)]
    (folder / "sizes").write_text(" ".join(map(str, sizes)))
    for i, x in enumerate(operands):
        (folder / f"operand{i}").write_bytes(np.asarray(x).tobytes())
    source = folder / "call.cc"
    text = PROGRAM.format(
        source=said["source"], folder=f'"{folder}"', expression=said["expression"]
    )
    source.write_text(text)
    assert "done" in sanitized.output_of([source], ["-O0", *OPTIONS], folder)
    return [
        jnp.asarray(np.frombuffer((folder / f"result{i}").read_bytes(), a.dtype).reshape(a.shape))
        for i, a in enumerate(results)
    ]


def evaluated(jaxpr, consts, arguments, run):
    """The results of a program, those of the primitive by ``run``."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

    def read(x):
        return x.val if hasattr(x, "val") else values[x]

    for eqn in jaxpr.eqns:
        operands = [read(x) for x in eqn.invars]
        inner = eqn.params.get("jaxpr")
        if eqn.primitive is dynamic_scan_p:
            made = run(eqn, operands)
        elif inner is not None:
            closed = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, [])
            made = evaluated(*closed, operands, run)
        else:
            made = eqn.primitive.bind(*operands, **eqn.params)
            made = made if eqn.primitive.multiple_results else [made]
        values.update(zip(eqn.outvars, made, strict=True))
    return [read(x) for x in jaxpr.outvars]


@pytest.mark.parametrize(
    "name, dtype",
    [
        # Three children of a row, which reads two carries of each, and inputs.
        ("every_child", "bfloat16"),
        # Beside these rows whose cell takes one child and one product: of their zeros the first
        # cell would make NaN.
        ("two_cells", "bfloat16"),
        ("two_directions", "float32"),
    ],
)
def test_a_program(name, dtype, tmp_path):
    """States, and gradients of all operands."""
    case = Case(name, 24, jnp.dtype(dtype), graphs=6, rows=14)
    if name == "every_child":  # whose bias has 16 bits, while those of others have 32
        case.bias = case.bias.astype(dtype)
    kinds = {int(kind) for kind in case.script.kinds[: int(case.script.used_tiles)]}
    assert len(kinds) == case.script.form.kinds

    def program(operands, implementation):
        def loss(operands):
            made = case.scan(operands, implementation=implementation)
            leaves = jax.tree.leaves(made)
            return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in leaves), made

        return jax.grad(loss, has_aux=True)(operands)

    closed = jax.make_jaxpr(functools.partial(program, implementation="cuda"))(case.operands)
    calls = []

    def run(eqn, operands):
        calls.append(eqn.params["emits"])
        return emulated(eqn, operands, tmp_path / f"call{len(calls)}")

    got = evaluated(closed.jaxpr, closed.consts, jax.tree.leaves(case.operands), run)
    assert calls == [False, True]
    expected = jax.tree.leaves(
        jax.jit(functools.partial(program, implementation="xla"))(case.operands)
    )
    for a, b in zip(got, expected, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.abs(b).max() > 0.1
        tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())
