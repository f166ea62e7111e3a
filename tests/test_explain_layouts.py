"""explain traces a program for the GPU that it describes, and lays patterns out for that one."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsparse import CSR, H200, Device, explain, recurrent
from jaxsparse import device as devices
from jaxsparse.primitive import equations, lowering
from jaxsparse.recurrent.plan import NoPlan

SMALL = dataclasses.replace(H200, name="small", multiprocessors=40)
TINY = Device("tiny", 90, 4, 50_000)
UNITS, STEPS = 1024, 64
XS = jnp.zeros((STEPS, 4, UNITS))


def matrix(density=0.05, rows=UNITS, units=UNITS, seed=0):
    mask = np.random.default_rng(seed).random((rows, units)) < density
    return CSR.fromdense(jnp.asarray(mask, jnp.float32) / units)


WEIGHTS = matrix()


def scan(xs, weights=WEIGHTS, **options):
    carry = jnp.zeros(xs.shape[1:])
    return recurrent.scan(recurrent.elman(), weights, carry, xs, **options)[1]


def blocks(function, *arguments):
    """Of the layouts in the program of a function as it runs here, scan by scan."""
    program = jax.make_jaxpr(function)(*arguments)
    forms = [eqn.params["forms"] for eqn in equations(program.jaxpr) if "forms" in eqn.params]
    return [form[0].blocks if form else None for form in forms]


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(devices, "has_gpu", lambda: False)


@pytest.fixture
def small_gpu(monkeypatch):
    """A machine with a GPU, as far as is known before a program runs."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(devices, "present_device", lambda: SMALL)


def jitted():
    return jax.jit(lambda xs: scan(xs))


def jit_in_jit():
    inner = jitted()
    return jax.jit(lambda xs: 2 * inner(xs))


def in_a_loop():
    inner = jitted()
    return lambda xs: jax.lax.scan(lambda total, _: (total + inner(xs), None), xs, None, 2)[0]


def in_a_condition():
    inner = jitted()
    return lambda xs: jax.lax.cond(xs[0, 0, 0] > 0, inner, lambda xs: xs, xs)


def rematerialized():
    return jax.checkpoint(jitted())


def vmapped():
    inner = jax.vmap(jitted())
    return lambda xs: inner(xs[None])[0]


@pytest.mark.parametrize("explained_first", [True, False])
@pytest.mark.parametrize(
    "make", [jitted, jit_in_jit, in_a_loop, in_a_condition, rematerialized, vmapped]
)
def test_traces_for_one_device_are_not_found_for_another(make, explained_first, no_gpu):
    """Those of functions within, which JAX keeps, are none the less traced anew."""
    function = make()
    if not explained_first:
        assert blocks(function, XS) == [None]
    for device in (H200, SMALL, H200):
        (call,) = explain(function, XS, device=device)
        assert call.plan.variant == "sparse_pairs"
        at_most = device.multiprocessors
        assert at_most / 2 < call.problem.layout_form.blocks <= at_most
    assert blocks(function, XS) == [None]


@pytest.mark.parametrize("explained_first", [True, False])
def test_a_function_runs_as_if_it_was_not_explained(explained_first, no_gpu):
    xs = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 64)), jnp.float32)
    weights = matrix(0.3, 64, 64)
    function = jax.jit(lambda xs: scan(xs, weights))
    if explained_first:
        explain(function, xs, device=H200)
    results = function(xs)
    (call,) = explain(function, xs, device=H200)
    assert call.problem.layout_form is not None
    np.testing.assert_array_equal(function(xs), results)
    assert function._cache_size() == 1
    np.testing.assert_allclose(results, scan(xs, weights.todense().T), rtol=1e-5, atol=1e-6)


def test_explained_while_another_program_is_traced(no_gpu):
    """Neither of them is traced for the other's device."""
    function, said = jitted(), []

    @jax.jit
    def program(xs):
        said.append(explain(function, xs, device=H200))
        return function(xs)

    assert blocks(program, XS) == [None]
    ((call,),) = said
    assert call.plan.variant == "sparse_pairs"


def test_gradients_are_explained_alike(no_gpu):
    loss = jax.jit(lambda xs: jnp.sum(scan(xs) ** 2))
    for call in explain(jax.grad(loss), XS, device=H200):
        assert call.plan.variant == "sparse_pairs"


def test_a_machine_with_another_gpu(small_gpu):
    """What runs there is laid out for it, and what is described for what is described."""
    function = jitted()
    (alone,) = explain(function, XS)
    (both,) = explain(function, XS, device=H200)
    assert alone.here == "" and both.here == f"small: {alone.plan}"
    assert alone.problem.layout_form.blocks <= 40 < both.problem.layout_form.blocks
    assert blocks(function, XS) == [alone.problem.layout_form.blocks]


def test_a_machine_whose_program_has_other_scans(monkeypatch, small_gpu):
    """Two directions are one scan only where there is room for layouts of one form."""
    few = Device("few", 90, 8, H200.shared_bytes)
    monkeypatch.setattr(devices, "present_device", lambda: few)
    pair = matrix(0.1, 256, 256), matrix(0.5, 256, 256, seed=1)
    xs, carry = jnp.zeros((STEPS, 4, 256)), jnp.zeros((4, 256))

    def both(xs):
        return recurrent.bidirectional_scan(recurrent.elman(), pair, (carry,) * 2, (xs,) * 2)

    assert len(explain(both, xs)) == 2
    (call,) = explain(both, xs, device=H200)
    assert call.here == "few: other scans, which are explained where no device is named"


def test_packed_within_a_program_that_is_explained(no_gpu):
    def program(xs):
        return scan(xs, recurrent.pack(WEIGHTS, batch=4, dtype=jnp.float32))

    for device in (H200, SMALL):
        (call,) = explain(program, XS, device=device)
        assert device.multiprocessors / 2 < call.problem.layout_form.blocks
        assert call.problem.layout_form.blocks <= device.multiprocessors


def missed(function, *arguments, device=TINY):
    (call,) = explain(function, *arguments, device=device)
    assert isinstance(call.plan, NoPlan)
    return call.plan.reason


def test_why_a_pattern_is_not_laid_out(monkeypatch, small_gpu):
    """The reason of the layout reaches what is explained, refused and warned of."""
    batch = jnp.zeros((STEPS, 16, UNITS))
    with pytest.raises(ValueError) as refused:
        recurrent.pack(WEIGHTS, batch=16, dtype=jnp.float32)
    reason = str(refused.value).partition(": ")[2]
    assert reason == "a batch of 16 in float32 is more than the kernel of pairs takes"
    assert missed(lambda xs: scan(xs), batch).endswith(f"; sparse_pairs: {reason}")
    by_name = missed(lambda xs: scan(xs, variant="sparse_pairs"), batch)
    assert by_name == f"sparse_pairs: {reason}"
    dynamic = CSR(WEIGHTS.values, WEIGHTS.topology.as_dynamic())
    traced = missed(lambda a, xs: scan(xs, a), dynamic, XS)
    assert traced.endswith(
        "; sparse_pairs: its pattern is traced: recurrent.pack lays it out before"
    )

    monkeypatch.setattr(devices, "present_device", lambda: TINY)
    lowering._warned.clear()

    def lower():
        traced = jax.jit(lambda xs: scan(xs)).trace(batch)
        return traced.lower(lowering_platforms=("cuda",))

    told = rf"the cell elman\(tanh\) runs on tiny as jax.lax.scan, because .*sparse_pairs: {reason}"
    with pytest.warns(UserWarning, match=told):
        lower()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lower()


def test_programs_for_a_gpu_elsewhere(no_gpu):
    """Nothing is laid out where there is no GPU to lay it out for."""

    def lower(variant=None):
        traced = jax.jit(lambda xs: scan(xs, variant=variant)).trace(XS)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    if devices.lowered_for("cuda").lacks:
        pytest.skip("has a GPU without kernels")
    with pytest.raises(ValueError, match="no GPU is here to lay it out for"):
        lower("sparse_pairs")
