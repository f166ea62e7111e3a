"""Steps that are the same program: those of layers that run at once, each behind the one below."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

from jaxsparse.recurrent.engine import printed_step
from jaxsparse.recurrent.step import Keeping, Step
from jaxsparse.recurrent.step_derivatives import Adjoint


class Same(NamedTuple):
    """Steps that are the same program."""

    step: Step  # the same for each
    inputs: tuple[tuple[int | None, ...], ...]  # of each, its own inputs; None stands for zeros


@functools.lru_cache(maxsize=1024)
def same(steps: tuple[Step, ...]) -> Same | None:
    """The steps as one, if they are the same program, or may be with more inputs of zeros.

    What reaches a stack's last layer from outside makes its adjoint another step than those of the
    layers below, which reach the loss through it alone.
    """
    adjoints = [_adjoint(step) for step in steps]
    whole = list(steps)
    inputs: list[tuple[int | None, ...]] = [tuple(range(len(step.inputs))) for step in steps]
    if None not in adjoints:
        given = [adjoint for adjoint in adjoints if adjoint is not None]
        of_states = any(step.states_used for step in given)
        used = tuple(sorted({i for step in given for i in step.used}))
        if any(len(step.step.outputs) <= i for step in given for i in used):
            return None
        whole = [_taking(step, of_states, used) for step in steps]
        inputs = [_taken(step, of_states, used) for step in given]
    try:
        if len({(_sizes(step), printed_step(step)) for step in whole}) > 1:
            return None
    except ValueError:  # it can't be printed
        return None
    return Same(whole[0], tuple(inputs))


def _adjoint(step: Step) -> Adjoint | None:
    """The adjoint that a step is, less some outputs."""
    if isinstance(step, Keeping):
        return _adjoint(step.step)
    return step if isinstance(step, Adjoint) else None


def _taking(step: Step, of_states: bool, used: tuple[int, ...]) -> Step:
    """An adjoint that takes cotangents of the states, or not, and of some outputs."""
    if isinstance(step, Keeping):
        return dataclasses.replace(step, step=_taking(step.step, of_states, used))
    assert isinstance(step, Adjoint)
    return dataclasses.replace(step, states_used=of_states, used=used)


def _taken(step: Adjoint, of_states: bool, used: tuple[int, ...]) -> tuple[int | None, ...]:
    """An adjoint's own inputs in the place of those of `_taking`."""
    own = iter(range(len(step.inputs)))
    has = [True] * len(step.fixed) + [step.states_used] * of_states
    has += [i in step.used for i in used]
    return tuple(next(own) if taken else None for taken in has)


def _sizes(step: Step) -> tuple[Any, ...]:
    return step.products, step.states, step.carries, step.inputs, step.outputs, step.wide_outputs
