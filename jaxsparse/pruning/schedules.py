"""When masks are made anew, and how dense they are then."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxsparse.pruning.masks import check_density

# At so many pruning steps the density is checked in advance.
_CHECKED = 2**20


@dataclass(frozen=True)
class PruningSchedule:
    r"""Prunes at the steps begin, begin + frequency, ... and at end; between them masks stay.

    Steps count updates: step t is after the t-th one. So before ``begin`` a model is dense, and
    after ``end`` its pattern stays as it is while the weights that are left are trained on.

    Args:
        density: the share of weights to keep at a step, in (0, 1]: a function of the step, such as
            an optax schedule. It is called with traced steps. Its values are checked in advance,
            at every pruning step (of more than a million, at so many from ``begin`` to ``end``),
            unless it depends on traced values itself.
        begin: the first pruning step, at least 1.
        end: the last one; it prunes whether or not ``frequency`` leads to it.
        frequency: steps from one pruning step to the next.

    Raises:
        TypeError: if a step is no integer, or ``density`` is not a function from a traced step to
            a number.
        ValueError: if ``begin`` or ``frequency`` is less than 1, ``end`` is before ``begin``, or
            the density at a pruning step is outside (0, 1].

    >>> schedule = PruningSchedule(optax.constant_schedule(0.5), begin=2, end=7, frequency=3)
    >>> [step for step in range(10) if schedule.prunes(step)]
    [2, 5, 7]
    """

    density: Callable[[Any], Any]
    begin: int
    end: int
    frequency: int

    def __post_init__(self) -> None:
        for name, least in (("begin", 1), ("end", self.begin), ("frequency", 1)):
            value = getattr(self, name)
            try:
                operator.index(value)
            except TypeError:
                raise TypeError(
                    f"PruningSchedule: {name} must be an integer, got {value!r}"
                ) from None
            if value < least:
                bound = f"begin = {least}" if name == "end" else least
                raise ValueError(f"PruningSchedule: {name} must be >= {bound}, got {value}")
        if not callable(self.density):
            raise TypeError(
                f"PruningSchedule: density must be a function of the step, got {self.density!r}"
            )
        check_density(f"PruningSchedule: at step {self.begin}", self.density(self.begin))
        self._check_densities()

    def _check_densities(self) -> None:
        """Raises unless the density is in (0, 1] at all pruning steps, in one call of it."""
        due = range(self.begin, self.end + 1, self.frequency)
        due = due[:: -(-len(due) // _CHECKED)]
        steps = np.append(np.arange(due.start, due.stop, due.step), self.end).astype(np.int32)
        try:
            with jax.ensure_compile_time_eval():  # values, also where a program is being traced
                densities = jax.vmap(self.density)(steps)
        except jax.errors.JAXTypeError as error:
            raise TypeError(
                f"PruningSchedule: density must be a function of a traced step, got {self.density}"
            ) from error
        if isinstance(densities, jax.core.Tracer):
            return
        values = np.asarray(densities)
        for place in np.flatnonzero(~((values > 0) & (values <= 1)))[:1]:
            check_density(f"PruningSchedule: at step {steps[place]}", values[place])

    def prunes(self, step: Any) -> jax.Array:
        """Whether masks are made after so many updates: a boolean scalar, also of a traced step."""
        inside = (step >= self.begin) & (step <= self.end)
        due = ((step - self.begin) % self.frequency == 0) | (step == self.end)
        return jnp.asarray(inside & due)


def one_shot(density: float, *, step: int) -> PruningSchedule:
    """Prunes once.

    Args:
        density: share of weights to keep, in (0, 1].
        step: after how many updates, at least 1.

    Raises:
        TypeError, ValueError: for values that don't fit, as `PruningSchedule`.

    >>> schedule = one_shot(0.25, step=3)
    >>> [step for step in range(6) if schedule.prunes(step)]
    [3]
    """
    return PruningSchedule(optax.constant_schedule(density), step, step, 1)


def polynomial(
    density: float,
    *,
    begin: int,
    end: int,
    frequency: int,
    initial_density: float = 1.0,
    power: float = 3,
) -> PruningSchedule:
    r"""Lets the density fall along a polynomial, fast at first.

    .. math:: d_t = d + (d_0 - d) \Bigl(1 - \frac{t - t_0}{t_1 - t_0}\Bigr)^p

    for steps t from :math:`t_0` (``begin``) to :math:`t_1` (``end``): optax's
    ``polynomial_schedule``.

    Args:
        density: share of weights to keep at ``end``, in (0, 1].
        begin, end, frequency: as in `PruningSchedule`; ``end`` is after ``begin``.
        initial_density: share to keep at ``begin``.
        power: p.

    Raises:
        TypeError: if a density is not a number, and as `PruningSchedule`.
        ValueError: if ``end`` is not after ``begin``, a density is outside (0, 1], and as
            `PruningSchedule`.

    Source: with power 3, Zhu and Gupta 2017, "To prune, or not to prune: exploring the efficacy of
    pruning for model compression", https://arxiv.org/abs/1710.01878.

    >>> schedule = polynomial(0.1, begin=100, end=200, frequency=10)
    >>> [round(float(schedule.density(step)), 4) for step in (100, 150, 200)]
    [1.0, 0.2125, 0.1]
    """
    if end <= begin:
        raise ValueError(f"polynomial: end must be after begin = {begin}, got {end}")
    check_density("polynomial", density)
    check_density("polynomial", initial_density, "initial_density")
    falling = optax.polynomial_schedule(
        initial_density, density, power, transition_steps=end - begin, transition_begin=begin
    )
    return PruningSchedule(falling, begin, end, frequency)


def half_epochs(
    density: float, *, steps_per_epoch: int, epochs: int = 13, fixed_epochs: int = 2
) -> PruningSchedule:
    """Prunes to the final density after half an epoch, and anew after every further half.

    The first half epoch is dense, and the last ``fixed_epochs`` train a fixed pattern: of 13 epochs
    with 2 fixed ones, 21 pruning steps, after 0.5, 1, ..., 10.5 epochs.

    Args:
        density: share of weights to keep, in (0, 1].
        steps_per_epoch: updates in an epoch, at least 2; half of an odd number is rounded down.
        epochs: how many there are.
        fixed_epochs: how many of them, at the end, leave the pattern alone.

    Raises:
        TypeError: as `PruningSchedule`.
        ValueError: if an epoch has fewer than 2 steps or no epoch is left for pruning, and as
            `PruningSchedule`.

    Source: Zhu et al. 2018, "Sparse Persistent RNNs: Squeezing Large Recurrent Networks On-Chip",
    appendix B.

    >>> schedule = half_epochs(0.1, steps_per_epoch=100)
    >>> sum(bool(schedule.prunes(step)) for step in range(1301)), schedule.end
    (21, 1050)
    """
    if steps_per_epoch < 2:
        raise ValueError(f"half_epochs: steps_per_epoch must be >= 2, got {steps_per_epoch}")
    if not 0 <= fixed_epochs < epochs:
        raise ValueError(
            f"half_epochs: fixed_epochs must be in [0, {epochs}), less than all epochs, "
            f"got {fixed_epochs}"
        )
    half = steps_per_epoch // 2
    last = half * (2 * (epochs - fixed_epochs) - 1)
    return PruningSchedule(optax.constant_schedule(density), half, last, half)
