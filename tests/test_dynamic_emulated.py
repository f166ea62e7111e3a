"""Kernels of scans over graphs as programs call them, on an emulated GPU, against the plain path.

tests/test_device_emulated.py tests the same kernels with steps that are written for it. Here steps,
plans and the order of arrays are those of `dynamic.scan` and its gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sanitized
from dynamic_loss_problems import LossCase
from test_device_emulated import OPTIONS
from test_dynamic_device import Case

from jaxsparse import H200
from jaxsparse.dynamic.loss_primitive import dynamic_loss_p
from jaxsparse.dynamic.primitive import dynamic_scan_p
from jaxsparse.primitive import OPERATIONS, choose, typed_call

GPU = dataclasses.replace(H200, name="small", multiprocessors=6)
# What differs between calls. Where blocks meet so that tools can look for races, all of one do.
PROGRAM = """\
#define EMULATED_CONCURRENT_BLOCKS
#include "emulated/concurrent_blocks.h"
{source}
#include "device/{call}.h"

int main(int, char** arguments) {{
  const int status = jaxsparse::RunCall({folder}, {expression});
  if ({is_barrier} && emulated::Block::some_met) {{
    emulated::Block::Fail("some of a block meet without the others");
  }}
  return status;
}}
"""


def planned(eqn):
    """The attributes of a call of a primitive on the small GPU."""
    avals = [v.aval for v in eqn.invars]
    return choose(typed_call(OPERATIONS[eqn.primitive], eqn.params, avals), GPU).attributes


def run_call(eqn, operands, folder, call, sizes, more):
    """The results of a call of a primitive, by the kernel that it is planned to run by.

    Args:
        eqn: the call.
        operands: its arrays.
        folder: for files; is made.
        call: the header that has it run.
        sizes: what that reads first.
        more: what it reads after the sizes of results.
    """
    folder.mkdir()
    said, results = planned(eqn), [v.aval for v in eqn.outvars]
    bytes_of = [a.size * a.dtype.itemsize for a in results]
    every = [*sizes, len(operands), len(results), *bytes_of, *more]
    (folder / "sizes").write_text(" ".join(map(str, every)))
    for i, x in enumerate(operands):
        (folder / f"operand{i}").write_bytes(np.asarray(x).tobytes())
    source = folder / "call.cc"
    text = PROGRAM.format(
        source=said["source"],
        call=call,
        folder=f'"{folder}"',
        expression=said["expression"],
        is_barrier=int("_barrier" in said["name"]),
    )
    source.write_text(text)
    assert "done" in sanitized.output_of([source], ["-O0", *OPTIONS], folder)
    return [
        jnp.asarray(np.frombuffer((folder / f"result{i}").read_bytes(), a.dtype).reshape(a.shape))
        for i, a in enumerate(results)
    ]


def launch_of(said, form):
    launch = said["scans"], said["blocks"], said["threads"], said["shared_bytes"]
    return [form.leaves, form.tiles, form.slots, form.groups, form.kinds, said["window"], *launch]


def emulated_scan(eqn, operands, folder):
    """A scan."""
    said, form = planned(eqn), eqn.params["form"]
    hidden = eqn.outvars[0].aval.shape[-1]
    sizes = [int(said["emits"]), said["products"], hidden, said["carries"], *launch_of(said, form)]
    return run_call(eqn, operands, folder, "graph_scan_call", sizes, [])


def emulated_loss(eqn, operands, folder):
    """A loss and its gradient."""
    said, form = planned(eqn), eqn.params["form"]
    hidden, classes = eqn.outvars[4].aval.shape[-1], eqn.outvars[2].aval.shape[-1]
    sizes = [said["products"], hidden, said["carries"], classes, said["labels_offset"]]
    sizes += launch_of(said, form)
    if said["labels_offset"] >= 0:
        operands = [*operands[:2], *operands[3:]]
    saved = list(zip(said["saved"].split(), said["saved_dtypes"].split(), strict=True))
    more = [len(saved)]
    for parts, dtype in saved:
        more += [int(parts), jnp.dtype(dtype).itemsize]
    more += [int("b" in text) for text in said["inputs"].split()]
    return run_call(eqn, operands, folder, "graph_loss_call", sizes, more)


EMULATED = {dynamic_scan_p: emulated_scan, dynamic_loss_p: emulated_loss}


def evaluated(jaxpr, consts, arguments, run):
    """The results of a program, those of its primitives by ``run``."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

    def read(x):
        return x.val if hasattr(x, "val") else values[x]

    for eqn in jaxpr.eqns:
        operands = [read(x) for x in eqn.invars]
        inner = eqn.params.get("jaxpr")
        if eqn.primitive in EMULATED:
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

    assert agrees(program, case.operands, tmp_path) == [dynamic_scan_p, dynamic_scan_p]


@pytest.mark.parametrize(
    "name, label, h, dtype, classes, variant, kilobytes",
    [
        ("tree_lstm_with_x", "label", 24, jnp.bfloat16, 5, None, 96),
        ("every_child", "class", 16, jnp.float32, 35, None, 80),
        ("chain", "label", 16, jnp.bfloat16, 5, "team_tensor_cores_barrier", 227),
    ],
)
def test_a_loss(name, label, h, dtype, classes, variant, kilobytes, tmp_path, monkeypatch):
    """Value and gradient in one launch, of more classes than lanes too.

    Of little shared memory, the second pass' window takes the place of the first one's ring.
    """
    gpu = dataclasses.replace(GPU, shared_bytes=kilobytes * 1024)
    monkeypatch.setattr(sys.modules[__name__], "GPU", gpu)
    case = LossCase(name, h, dtype, classes=classes, label=label, graphs=12, rows=14)

    def program(operands, implementation):
        options = {"variant": variant} if implementation == "cuda" else {}
        asked = functools.partial(case.loss, implementation=implementation, **options)
        return jax.value_and_grad(asked)(operands)

    tolerance = 2e-2 if dtype == jnp.bfloat16 else 1e-5
    assert agrees(program, case.operands, tmp_path, tolerance) == [dynamic_loss_p]


def test_a_loss_of_leaves_of_all_bits(tmp_path):
    """States of leaves are not waited for, though these NaN stand for states that are to come."""
    case = LossCase("tree_lstm_with_x", 24, jnp.bfloat16, graphs=2, rows=6)
    weights, carry, *others = case.operands

    def of_all_bits(x):
        return jnp.full(x.shape, -1, f"int{8 * x.dtype.itemsize}").view(x.dtype)

    operands = (weights, jax.tree.map(of_all_bits, carry), *others)
    program = functools.partial(case.loss, implementation="cuda")
    closed = jax.make_jaxpr(jax.value_and_grad(program))(operands)

    def run(eqn, arrays):
        return EMULATED[eqn.primitive](eqn, arrays, tmp_path / "call")

    value, *_ = evaluated(closed.jaxpr, closed.consts, jax.tree.leaves(operands), run)
    assert np.isnan(value)


def agrees(program, operands, folder, tolerance=2e-2):
    """Checks a program's results by kernels against the plain path; returns what it has called."""
    closed = jax.make_jaxpr(functools.partial(program, implementation="cuda"))(operands)
    calls = []

    def run(eqn, arrays):
        calls.append(eqn.primitive)
        return EMULATED[eqn.primitive](eqn, arrays, folder / f"call{len(calls)}")

    got = evaluated(closed.jaxpr, closed.consts, jax.tree.leaves(operands), run)
    plain = jax.jit(functools.partial(program, implementation="xla"))
    for a, b in zip(got, jax.tree.leaves(plain(operands)), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.abs(b).max() > 1e-3
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())
    return calls
