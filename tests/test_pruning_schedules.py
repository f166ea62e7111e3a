"""Schedules against their formulas, and what they refuse."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")
pytest.importorskip("hypothesis")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from jaxsparse.pruning import (  # noqa: E402
    PruningSchedule,
    half_epochs,
    one_shot,
    polynomial,
)

CONSTANT = optax.constant_schedule(0.5)


def pruning_steps(schedule, until):
    return np.flatnonzero(jax.jit(schedule.prunes)(jnp.arange(until))).tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(0, 40), st.integers(1, 50))
def test_pruning_steps(begin, length, frequency):
    schedule = PruningSchedule(CONSTANT, begin, begin + length, frequency)
    expected = {*range(begin, begin + length + 1, frequency), begin + length}
    assert pruning_steps(schedule, 80) == sorted(expected)


@pytest.mark.parametrize("power", [1, 3])
@pytest.mark.parametrize("initial", [1.0, 0.8])
def test_density_falls_along_the_polynomial(power, initial):
    schedule = polynomial(0.2, begin=10, end=50, frequency=7, initial_density=initial, power=power)
    steps = np.arange(10, 51)
    expected = 0.2 + (initial - 0.2) * (1 - (steps - 10) / 40) ** power
    density = jax.jit(schedule.density)(jnp.asarray(steps))
    np.testing.assert_allclose(density, expected, rtol=1e-6)
    assert schedule.density(50) == np.float32(0.2)
    assert pruning_steps(schedule, 60) == [10, 17, 24, 31, 38, 45, 50]


def test_one_shot():
    schedule = one_shot(0.3, step=4)
    assert pruning_steps(schedule, 10) == [4] and schedule.density(4) == 0.3


@pytest.mark.parametrize("steps_per_epoch", [2, 10, 11])
def test_half_epochs_prune_21_times_in_13_epochs(steps_per_epoch):
    schedule = half_epochs(0.1, steps_per_epoch=steps_per_epoch)
    half = steps_per_epoch // 2
    steps = pruning_steps(schedule, 13 * steps_per_epoch + 1)
    assert steps == [half * k for k in range(1, 22)]
    assert steps[-1] <= 11 * steps_per_epoch  # two epochs train a fixed pattern
    assert all(schedule.density(step) == 0.1 for step in steps)


def test_half_epochs_without_a_fixed_stretch():
    assert pruning_steps(half_epochs(0.1, steps_per_epoch=4, epochs=2, fixed_epochs=0), 9) == [
        2,
        4,
        6,
    ]


def at_step(odd, value):
    """A density of ``value`` at one step of three."""
    return PruningSchedule(lambda step: jnp.where(step == odd, value, 0.5), 1, 3, 1)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: one_shot(0.0, step=1), r"density must be in \(0, 1\], got 0.0"),
        (lambda: one_shot(1.1, step=1), r"density must be in \(0, 1\], got 1.1"),
        (lambda: one_shot(0.5, step=0), "begin must be >= 1, got 0"),
        (lambda: PruningSchedule(CONSTANT, 5, 4, 1), "end must be >= begin = 5, got 4"),
        (lambda: PruningSchedule(CONSTANT, 1, 4, 0), "frequency must be >= 1, got 0"),
        (lambda: at_step(2, -3.0), r"at step 2: density must be in \(0, 1\], got -3.0"),
        (lambda: at_step(2, math.nan), r"at step 2: density must be in \(0, 1\], got nan"),
        (lambda: at_step(1, 0.0), r"at step 1: density must be in \(0, 1\], got 0.0"),
        (lambda: at_step(3, 1.5), r"at step 3: density must be in \(0, 1\], got 1.5"),
        (lambda: jax.jit(lambda: at_step(2, -3.0).begin)(), "at step 2: density must be in"),
        (
            lambda: polynomial(-0.1, begin=1, end=5, frequency=1),
            r"polynomial: density must be in \(0, 1\], got -0.1",
        ),
        (
            lambda: polynomial(0.1, begin=1, end=5, frequency=1, initial_density=1.2),
            r"polynomial: initial_density must be in \(0, 1\], got 1.2",
        ),
        (
            lambda: polynomial(0.1, begin=5, end=5, frequency=1),
            "end must be after begin = 5, got 5",
        ),
        (lambda: half_epochs(0.1, steps_per_epoch=1), "steps_per_epoch must be >= 2, got 1"),
        (
            lambda: half_epochs(0.1, steps_per_epoch=9, epochs=2, fixed_epochs=2),
            r"fixed_epochs must be in \[0, 2\), less than all epochs, got 2",
        ),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_step_must_be_an_integer():
    with pytest.raises(TypeError, match=r"frequency must be an integer, got 0\.5"):
        PruningSchedule(CONSTANT, 1, 4, 0.5)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: PruningSchedule(0.5, 1, 4, 1), "density must be a function of the step, got 0.5"),
        (lambda: one_shot("0.5", step=1), "at step 1: density must be a number, got '0.5'"),
        (
            lambda: half_epochs(None, steps_per_epoch=2),
            "at step 1: density must be a number, got None",
        ),
        (
            lambda: polynomial("0.5", begin=1, end=5, frequency=1),
            "polynomial: density must be a number, got '0.5'",
        ),
        (
            lambda: PruningSchedule(lambda step: jnp.ones(2) * step, 1, 4, 1),
            "at step 1: density must be a number, got Array",
        ),
        (
            lambda: PruningSchedule(lambda step: 0.5 if step < 3 else 0.25, 1, 4, 1),
            "density must be a function of a traced step",
        ),
    ],
)
def test_a_density_must_be_a_function_to_numbers(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_only_pruning_steps_are_checked():
    schedule = PruningSchedule(lambda step: jnp.where(step % 3 == 1, 0.5, 2.0), 1, 10, 3)
    assert pruning_steps(schedule, 12) == [1, 4, 7, 10]


def test_many_pruning_steps_are_checked_in_one_call():
    calls = []

    def density(step):
        calls.append(step)
        return jnp.where(step == 100_001, -1.0, 0.5)

    with pytest.raises(ValueError, match="at step 100001: density must be in"):
        PruningSchedule(density, 2, 200_000, 1)
    assert len(calls) == 2  # the first step alone, for its type
    assert PruningSchedule(CONSTANT, 1, 2**31 - 1, 1).end == 2**31 - 1


def test_a_traced_density_is_not_known_in_advance():
    def densities(density):
        schedule = polynomial(density, begin=1, end=5, frequency=2)
        return schedule.density(5) + one_shot(density, step=3).density(3)

    assert jax.jit(densities)(0.25) == 0.5
    assert jax.vmap(densities)(jnp.array([0.25, 0.5])).tolist() == [0.5, 1.0]
