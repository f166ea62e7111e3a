"""Plans of waves of recurrent layers: what each kernel has room for, and why not."""

from __future__ import annotations

import dataclasses
import re

import pytest
from wave_problems import SCATTER, STATIONARY, WAVE, WGMMA, wave

from jaxsparse import H200
from jaxsparse.recurrent.plan import NoPlan, Plan, make_wave_plan

FITTING = {
    "lstm 512": wave(4),
    "adjoint of lstm 512": wave(1, 4),
    "lstm 1024": wave(4, layers=2, hidden=1024, batch=4),
    "adjoint of lstm 1024": wave(1, 4, layers=2, hidden=1024, batch=4),
    "adjoint of lstm 512, 64 rows": wave(1, 4, layers=2, batch=64),
    "gru 512": wave(4, own_products=(0, 1, 2), below_products=(0, 1, 3)),
    "rnn 1152": wave(layers=7, hidden=1152, batch=4),
    "odd": wave(3, layers=3, hidden=331, batch=5),
    "16 layers": wave(layers=16, hidden=64, batch=4),
}
FITTING_WGMMA = {
    "lstm 512, 32 rows": wave(4, batch=32),
    "lstm 512, 64 rows": wave(4, batch=64),
    "lstm 512, 256 rows": wave(4, layers=2, batch=256, outputs=6),
    "gru 512, 64 rows": wave(
        4, batch=64, own_products=(0, 1, 2), below_products=(0, 1, 3), outputs=5
    ),
    "odd, 40 rows": wave(3, layers=3, hidden=331, batch=40),
    "tangent of lstm 256": wave(5, 2, hidden=256, batch=64),
    "16 layers, 64 rows": wave(layers=16, hidden=64, batch=64),
}
FITTING_SCATTER = {
    "adjoint of lstm 512": wave(1, 4, outputs=5),
    "adjoint of lstm 512, 64 rows": wave(1, 4, batch=64, outputs=5),
    "adjoint of lstm 1024, 64 rows": wave(1, 4, layers=2, hidden=1024, batch=64, outputs=5),
    "adjoint of gru 512": wave(1, 4, own_states=(0, 1, 2), below_states=(0, 1, 3), outputs=6),
    "adjoint of rnn 1152": wave(layers=7, hidden=1152, batch=4),
    "odd": wave(1, 3, layers=3, hidden=331, batch=5),
    "few tiles of units": wave(1, 4, layers=5, hidden=40, batch=64, outputs=5),
    "16 layers": wave(1, 4, layers=16, hidden=64, batch=4),
}
FITTING_STATIONARY = {
    "lstm 512, 64 rows": wave(4, batch=64),
    "lstm 512, 128 rows": wave(4, layers=2, batch=128, outputs=6),
    "lstm 512, 256 rows, a part after another": wave(4, batch=256),
    "rnn 331, 64 rows": wave(layers=3, hidden=331, batch=64),
    "lstm 256, 64 rows": wave(4, layers=8, hidden=256, batch=64),
}
FITTING_BY_VARIANT = {
    WAVE: FITTING,
    WGMMA: FITTING_WGMMA,
    STATIONARY: FITTING_STATIONARY,
    SCATTER: FITTING_SCATTER,
}


@pytest.mark.parametrize(
    "variant, name", [(v, name) for v, forms in FITTING_BY_VARIANT.items() for name in forms]
)
def test_what_fits(variant, name):
    form = FITTING_BY_VARIANT[variant][name]
    plan = make_wave_plan(form, H200, variant)
    assert isinstance(plan, Plan), plan
    assert plan.variant == variant
    assert plan.layers == form.layers and plan.scans * plan.launches == plan.groups
    assert plan.launches == 1 or variant == STATIONARY
    assert plan.layers * plan.scans * plan.blocks <= H200.multiprocessors
    assert plan.threads <= 1024 and plan.shared_bytes <= H200.shared_bytes
    units = int(re.search(r"\.units = (\d+)", plan.constants)[1])
    assert plan.blocks * units >= form.hidden
    # All weights are somewhere: registers hold 64 K words, and some are needed for the rest.
    weights = form.hidden**2 * sum(
        len(products) * len(states)
        for products, states in (
            (form.own_products, form.own_states),
            (form.below_products, form.below_states),
        )
    )
    if variant != WAVE:
        # Pointwise threads can give registers up, not take more than an equal share.
        given = int(re.search(r"\.pointwise_registers = (\d+)", plan.constants)[1])
        assert given <= 65536 // plan.threads // 8 * 8
        # Only whole warpgroups can.
        warps, taken = (
            int(re.search(rf"\.{name} = (\d+)", plan.constants)[1])
            for name in ("warps", "product_registers")
        )
        assert taken == 0 or warps % 4 == 0
    registers = 65536 * 4 if variant != WGMMA else 0
    assert plan.blocks * (registers + plan.shared_bytes) > weights * 2
    # The states before all steps, and after the last one, of the parts of the batch in a launch.
    rows = form.batch // plan.launches
    slots = (form.length + 1) * rows * form.states * form.hidden * 2
    if variant == SCATTER:  # sums of a few steps from each block
        slots = 6 * plan.blocks * form.batch * form.hidden * 2
    assert plan.workspace_bytes > form.layers * slots
    assert f"{form.layers} layers of " in str(plan)


def test_states_that_registers_do_not_hold_come_a_few_at_a_time():
    def constants(rows):
        return make_wave_plan(wave(1, 4, layers=2, batch=rows), H200, WAVE).constants

    assert ".loads_ahead = 0" in constants(16) and ".loads_ahead = 4" in constants(64)


def test_more_steps_and_rows_take_longer():
    def microseconds(**changes):
        return make_wave_plan(wave(4, **changes), H200).total_microseconds

    by_batch = [microseconds(batch=b) for b in (1, 4, 8, 16, 32)]
    assert by_batch == sorted(by_batch)
    assert microseconds(length=100) < microseconds(length=200)


@pytest.mark.parametrize(
    "form, reason",
    [
        (wave(4, layers=4, hidden=1024), "4 layers of 4 x 1 x 1024 x 1024 weights in bfloat16 and"),
        (wave(4, batch=132), "a batch of 132 is no multiple of 32"),
        (wave(layers=17), "17 layers are more than the 16 of a launch"),
        (wave(weight_dtype="float32"), "needs 16-bit state and weights of one dtype"),
        (wave(state_dtype="float64"), "the dtype of the state is float64"),
        (wave(input_dtypes=("float16",)), "inputs of ['float16'] beside a state of bfloat16"),
        (wave(arrays=99), "99 arrays of one kind are more than"),
    ],
)
def test_why_not(form, reason):
    plan = make_wave_plan(form, H200)
    assert isinstance(plan, NoPlan) and reason in plan.reason
    old = dataclasses.replace(H200, name="old", compute_capability=80)
    assert "old has compute capability 8.0" in make_wave_plan(form, old).reason


def test_gpus_after_hopper_have_no_products_of_warpgroups():
    form = wave(4, batch=64)
    newer = dataclasses.replace(H200, name="newer", compute_capability=100)
    for variant in (None, WGMMA, STATIONARY):
        plan = make_wave_plan(form, newer, variant)
        assert isinstance(plan, NoPlan) and "compute capability 9.0 alone" in plan.reason
        assert isinstance(make_wave_plan(form, H200, variant), Plan)
    assert make_wave_plan(wave(4, batch=16), newer).variant == WAVE


def test_what_is_only_chosen_on_demand():
    assert make_wave_plan(wave(4, batch=16), H200).variant == WAVE
    assert make_wave_plan(wave(4, batch=32), H200).variant == STATIONARY
    assert "kBarrier = false" in make_wave_plan(wave(), H200).constants
    for variant in (WAVE, WGMMA, STATIONARY):
        form = wave(batch=64)
        assert "kBarrier = false" in make_wave_plan(form, H200, variant).constants
        assert "kBarrier = true" in make_wave_plan(form, H200, f"{variant}_barrier").constants


def test_stationary_weights_take_products_of_both_matrices():
    form = wave(4, batch=64, own_products=(0, 1, 2), below_products=(0, 1, 3))
    plan = make_wave_plan(form, H200, STATIONARY)
    assert (
        isinstance(plan, NoPlan) and "some gates take only one of the two matrices" in plan.reason
    )
