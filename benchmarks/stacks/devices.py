"""Programs of jaxsparse on several devices: the batch over them, or the layers."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.stacks import ours
from benchmarks.stacks.jax_programs import Operands, arrays, by_names, program, stored
from benchmarks.stacks.problems import Problem, name
from jaxsparse import recurrent
from jaxsparse.timing import Program

COUNT = 2
"""Devices."""


def needs_devices() -> str | None:
    """Why several devices are left out; None if they aren't."""
    return None if jax.device_count() >= COUNT else f"runs on {COUNT} devices only"


def _mesh(axis: str) -> Mesh:
    return jax.make_mesh((COUNT,), (axis,), (AxisType.Auto,), devices=jax.devices()[:COUNT])


def _placed(mesh: Mesh, operands: Operands, specs: Operands) -> Operands:
    return {key: jax.device_put(x, NamedSharding(mesh, specs[key])) for key, x in operands.items()}


# ---- the batch ----


def can_shard(problem: Problem) -> bool:
    """Whether each device gets as many rows."""
    return problem.batch % COUNT == 0


def sharded(problem: Problem, dtype: str, passed: str) -> Program:
    """`recurrent.stack_scan` with the batch sharded and the weights replicated."""
    operands = arrays(problem, stored(dtype), "float32")
    of_steps, of_carry = P(None, "data"), P("data")
    specs = dict.fromkeys(operands, P())
    specs |= {key: of_steps for key in ("x", "cotangent", "resets") if key in operands}
    for at in range(problem.layers):
        for direction in range(problem.directions):
            specs |= {name(leaf, at, direction): of_carry for leaf in problem.leaves}
    return program(
        _placed(_mesh("data"), operands, specs),
        ours.stack(problem, dtype),
        dtype,
        passed,
        functools.partial(by_names, problem),
    )


def sharded_plan(problem: Problem, passed: str) -> str | None:
    """What runs on each of the GPUs, each plan once; None without a GPU."""
    return ours.stack_plan(dataclasses.replace(problem, batch=problem.batch // COUNT), passed)


# ---- the layers ----


def can_pipeline(problem: Problem) -> bool:
    """Whether the layers of each device are of one form with those of the others."""
    uniform = problem.directions == 1 and problem.projected and problem.inputs(0) == problem.hidden
    whole = problem.layers % COUNT == 0 and (not problem.skip or problem.parts == COUNT)
    return uniform and whole and problem.density is None


def pipelined(problem: Problem, dtype: str, passed: str) -> Program:
    """`recurrent.pipelined_stack_scan`; weights and carries lie stacked beforehand."""

    def gradients(out: Operands) -> tuple[np.ndarray, ...]:
        made = {"x": out["x"]}
        for key, layers in _stacked(problem).items():
            made |= dict(zip(layers, out[key], strict=True))
        return by_names(problem, made)

    return program(*_pipeline(problem, dtype), dtype, passed, gradients)


def pipelined_plan(problem: Problem, passed: str) -> str | None:
    """What runs on each of the GPUs, each plan once; None without a GPU."""
    if jax.default_backend() != "gpu":
        return None
    operands, scan = _pipeline(problem, problem.state_dtype)
    return ours.told(scan, operands, passed)


def _run(problem: Problem) -> Problem:
    """The layers of one device."""
    return dataclasses.replace(problem, layers=problem.layers // COUNT, parts=1)


def _stacked(problem: Problem) -> dict[str, list[str]]:
    """By the name of an operand of a run, its names in the whole stack, device by device."""
    own = _run(problem)
    return {
        name(kind, at, 0): [name(kind, device * own.layers + at, 0) for device in range(COUNT)]
        for at in range(own.layers)
        for kind in (*own.kinds, *own.leaves)
    }


def _pipeline(problem: Problem, dtype: str) -> tuple[Operands, ours.Stack]:
    """Operands on their devices, and the stack of them."""
    given = arrays(problem, stored(dtype), "float32")
    stacked = _stacked(problem)
    operands: Operands = {key: given[key] for key in ("x", "cotangent", "resets") if key in given}
    operands |= {key: jnp.stack([given[x] for x in layers]) for key, layers in stacked.items()}
    specs = {key: P("stage") if key in stacked else P() for key in operands}
    mesh = _mesh("stage")
    read = {key: spec for key, spec in specs.items() if key != "cotangent"}
    scan = functools.partial(recurrent.pipelined_stack_scan, axis_name="stage")
    local = ours.stack(_run(problem), dtype, scan=scan)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(read,), out_specs=P())
    return _placed(mesh, operands, specs), lambda given: mapped({key: given[key] for key in read})
