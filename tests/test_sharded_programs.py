"""Every operation and layer with a batch over several devices, by users' programs as they are."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("flax.nnx")

from programs import PROGRAMS

DEVICES = jax.devices("cpu")
pytestmark = pytest.mark.skipif(len(DEVICES) < 4, reason="needs 4 CPU devices (tests/conftest.py)")


def lowered(mesh, program, cut, entered):
    """The program for a batch that is cut in those of its arrays that `cut` names."""
    with jax.set_mesh(mesh) if entered else contextlib.nullcontext():
        batched = [
            jax.device_put(x, NamedSharding(mesh, P(*[None] * axis, "data"))) if i in cut else x
            for i, (x, axis) in enumerate(zip(program.batched, program.axes, strict=True))
        ]
        # Parameters stay on one device where the mesh is entered: no user places them.
        run = jax.jit(lambda *operands: program.value_and_gradient(*operands))
        replicated = jax.device_put(program.parameters, NamedSharding(mesh, P()))
        operands = program.parameters if entered else replicated, *batched
        return run.lower(*operands), operands


@functools.cache
def on_one_device(name):
    """A program, its value and the gradient."""
    p = PROGRAMS[name](jnp.float32)
    return p, jax.jit(p.value_and_gradient)(p.parameters, *p.batched)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_over_several_devices(name, kind):
    p, expected = on_one_device(name)
    mesh = jax.make_mesh((4,), ("data",), (kind,), devices=DEVICES[:4])
    everything = range(len(p.batched))
    lowered(mesh, p, everything, entered=False)
    program, operands = lowered(mesh, p, everything, entered=True)
    got = program.compile()(*operands)
    for x, axis in zip(got[1][1:], p.axes, strict=False):
        if kind == AxisType.Explicit:
            assert x.sharding.spec[axis] == "data"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, expected)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_batch_that_explicit_axes_cut_in_one_operand_alone(name):
    p = PROGRAMS[name](jnp.float32)
    if len(p.batched) == 1:
        pytest.skip("it has one operand")
    mesh = jax.make_mesh((4,), ("data",), devices=DEVICES[:4])
    program, _ = lowered(mesh, p, (0,), entered=True)
    assert program.out_info[1][1].shape == p.batched[0].shape
