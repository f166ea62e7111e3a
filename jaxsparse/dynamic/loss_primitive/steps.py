"""The steps of both passes, which differentiation makes of a cell's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxsparse.dynamic.primitive.operands import FULL
from jaxsparse.recurrent.step import Keeping, Step, without_repeats
from jaxsparse.recurrent.step_derivatives import Adjoint, Saving, Tangent


class Steps(NamedTuple):
    """What rows do in the pass from leaves to roots, and on the way back."""

    saving: Step  # its outputs are what the adjoint reads
    adjoint: Step  # its inputs: these, the step's inputs ``read``, the gradient of the state
    read: tuple[int, ...]
    places: tuple[int | None, ...]  # of the gradient of each active input: an output, or None for
    # the gradients of products

    def spans(self, spans: Sequence[str]) -> tuple[str, ...]:
        """The dimensions that each input of the adjoint does not repeat along."""
        return (*(FULL,) * len(self.saving.outputs), *(spans[i] for i in self.read), FULL)

    def inputs(self, saved: Sequence[Any], inputs: Sequence[Any], states: Any) -> list[Any]:
        """The adjoint's inputs, of the saved ones, the step's and the gradient of states."""
        return [*saved, *(inputs[i] for i in self.read), states]


@functools.lru_cache(maxsize=256)
def steps_of(step: Step, active: tuple[int, ...], wide: tuple[bool, ...]) -> Steps:
    """The steps for gradients by some inputs, of which some are wider than states."""
    step = Keeping(step, ())  # a loss reads states alone
    tangent = Tangent(step, active, False)
    first = len(tangent.inputs) - len(active)
    linear = tuple(range(first, len(tangent.inputs)))
    adjoint, places = without_repeats(Adjoint(tangent, linear, True, (), wide))
    return Steps(Saving(step, tangent.saved), adjoint, tangent.read, places)
