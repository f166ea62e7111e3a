"""The recipe: which models there are, how they are optimized, and when they are pruned."""

from __future__ import annotations

import argparse
import functools
import math
from typing import NamedTuple

import optax

from jaxsparse.pruning import STRUCTURES, PruningSchedule, half_epochs, prune

from ..common.options import number

WARM_UP = 0.05  # Of all steps.

# The recurrent and the input weights of all layers, as in the paper, or the recurrent ones alone.
PRUNED = {
    "all": ("*/cell/dense_i/kernel", "*/cell/dense_h/kernel"),
    "recurrent": ("*/cell/dense_h/kernel",),
}


DEFAULT_STRUCTURE = "row_balanced"


class Entry(NamedTuple):
    """One model of the comparison."""

    hidden: int
    density: float = 1.0
    structure: str | None = None  # Of the masks; None until the options name one, and if dense.

    @property
    def name(self) -> str:
        """As --hidden has it, without the default structure."""
        parts = [f"{self.hidden}"]
        if self.density < 1:
            parts.append(f"{self.density:g}")
        if self.structure not in (None, DEFAULT_STRUCTURE):
            parts.append(self.structure)
        return ":".join(parts)

    @property
    def folder(self) -> str:
        """Where its files are."""
        return self.name.replace(":", "_")

    @property
    def effective_units(self) -> float:
        """Units of a dense layer with as many recurrent weights."""
        return self.hidden * math.sqrt(self.density)


def parse_entry(text: str) -> Entry:
    """Reads ``units``, ``units:density`` or ``units:density:structure``."""
    hidden, *others = text.split(":")
    try:
        entry = Entry(number(int, 1, 2**20)(hidden), *map(float, others[:1]), *others[1:2])
    except (ValueError, argparse.ArgumentTypeError):
        entry = None
    if entry is None or not 0 < entry.density <= 1 or len(others) > 2:
        raise argparse.ArgumentTypeError(
            f"expected units, units:density or units:density:structure with a density in (0, 1], "
            f"got {text}"
        )
    if entry.structure not in (None, *STRUCTURES):
        raise argparse.ArgumentTypeError(
            f"expected a structure of {', '.join(STRUCTURES)}, got {entry.structure} in {text}"
        )
    return entry if entry.density < 1 else Entry(entry.hidden)


def sparse_from(args: argparse.Namespace) -> int:
    """The step after which a pruned model trains in sparse form."""
    return (args.epochs - args.sparse_epochs) * args.steps_per_epoch


@functools.cache  # Models of equal sizes share what is compiled for an optimizer.
def make_optimizer(rate: float, steps: int) -> optax.GradientTransformation:
    """Adam on clipped gradients, with a warm-up and a cosine decay over all the steps."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, math.ceil(WARM_UP * steps), steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))


def make_schedule(
    density: float, *, steps_per_epoch: int, epochs: int, fixed_epochs: int
) -> PruningSchedule:
    """When masks are made: every half epoch but the first and the fixed ones."""
    return half_epochs(
        density, steps_per_epoch=steps_per_epoch, epochs=epochs, fixed_epochs=fixed_epochs
    )


def schedule_options(args: argparse.Namespace) -> dict[str, int]:
    """What :func:`make_schedule` takes of the options."""
    return {name: getattr(args, name) for name in ("steps_per_epoch", "epochs", "fixed_epochs")}


@functools.cache
def make_pruner(
    inner: optax.GradientTransformation,
    density: float,
    *,
    pruned: str,
    structure: str,
    seed: int,
    **schedule: int,
) -> optax.GradientTransformation:
    """The optimizer of all but the sparse part of training."""
    return prune(
        inner, make_schedule(density, **schedule), PRUNED[pruned], structure=structure, seed=seed
    )
