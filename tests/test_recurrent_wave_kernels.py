"""Kernels of waves of recurrent layers: they compile, and their results on a GPU."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import PLATFORM
from covering import pairwise
from recurrent_problems import kernels
from wave_problems import SCATTER, STATIONARY, WAVE, WGMMA, loss_of, stack

from jaxsparse import _ffi, recurrent
from jaxsparse.primitive import UnavailableError

leaves = jax.tree.leaves


def sources(function, *operands):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
    return [s for s in kernels(function, *shapes) if "RecurrentWave" in s[1] or "wave" in s[0]]


@pytest.mark.parametrize(
    "cell, sizes, options, variant, count",
    [
        ("LSTM", {"skip": 1}, {}, f"{WAVE}_barrier", 2),
        ("GRU", {"norm": "layer"}, {"seq_lengths": jnp.array([1, 5, 6])}, WAVE, 2),
        ("three_leaves", {}, {"reverse": True}, WAVE, 2),
        ("GRU", {"skip": 1}, {"reverse": True}, WGMMA, 1),
        ("three_leaves", {}, {}, f"{WGMMA}_barrier", 1),
        ("LSTM", {"skip": 1, "B": 32}, {}, STATIONARY, 1),
        ("GRU", {}, {"seq_lengths": jnp.array([1, 5, 6])}, SCATTER, 1),
        ("LSTM", {}, {"reverse": True}, SCATTER, 1),
    ],
)
def test_kernels_compile(cell, sizes, options, variant, count, monkeypatch):
    monkeypatch.setenv("JAXSPARSE_CACHE_DIR", "")
    try:
        _ffi.nvrtc_version()
    except RuntimeError as error:
        pytest.skip(f"needs NVRTC: {error}")
    if cell == "three_leaves":
        monkeypatch.setenv("JAXSPARSE_SCAN_DELAY", "1000")
    p = stack([cell], **{"layers": 2, "T": 6, "B": 3, "h": 40, **sizes})
    found = sources(jax.grad(loss_of(p, variant=variant, **options), has_aux=True), p.floating)
    if variant == SCATTER:  # a forward pass by another variant comes before
        found = [(file, source) for file, source in found if SCATTER in file]
    assert len(found) == count
    if "norm" in sizes:  # which is another kernel without a gradient
        found += sources(loss_of(p, variant=variant, **options), p.floating)
    for file, source in found:
        assert file == f"recurrent_{variant}.cu"
        expression = "jaxsparse::RecurrentWaveScan<PrintedStep, PrintedPlan>"
        assert _ffi.compile_kernel(file, expression, "sm_90a", source).startswith(b"\x7fELF")


# ---- On a GPU ----

on_gpu = pytest.mark.skipif(
    PLATFORM != "cuda" or jax.devices()[0].compute_capability < "9.0", reason="needs a GPU"
)


def agrees(p, variant=WAVE, resets=None, **options):
    """A wave's results and gradients with those of the plain path, in float32."""

    def of(p, **more):
        gradient = jax.value_and_grad(loss_of(p, **options, **more), has_aux=True)
        return jax.jit(gradient)(p.floating)

    (_, got), slopes = of(p, variant=variant)
    wide = jax.tree.map(
        lambda x: x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x, p
    )
    (_, exact), exact_slopes = of(wide, implementation="xla")
    (_, rounded), rounded_slopes = of(p, variant="dense_tensor_cores")
    every = [leaves(x) for x in ((got, slopes), (exact, exact_slopes), (rounded, rounded_slopes))]
    for a, b, c in zip(*every, strict=True):
        a, b, c = (np.asarray(x, np.float64) for x in (a, b, c))
        norm = np.linalg.norm(b) + 1e-3 * np.sqrt(b.size)
        # No further from the truth than layer by layer, which rounds more often; but parts of sums
        # are rounded, too.
        times = 2.0 if variant == SCATTER else 1.5
        assert np.linalg.norm(a - b) <= times * np.linalg.norm(c - b) + 0.004 * norm
    recurrent.check()
    return got, slopes


@on_gpu
@pairwise(
    "variant, cell, layers, B, h, T, dtype, reverse, lengths, biased, dropout, skip, norm",
    [WAVE, WGMMA],
    ["RNN", "GRU", "LSTM", "three_leaves"],
    [2, 3, 5],
    [1, 3, 16, 40],
    [40, 72, 256],
    [1, 2, 17],
    ["bfloat16", "float16"],
    [False, True],
    [False, True],
    [False, True],
    [None, "steps"],
    [None, 1, 2, "input"],
    [None, "layer", "rms"],
)
def test_waves_agree(
    variant, cell, layers, B, h, T, dtype, reverse, lengths, biased, dropout, skip, norm
):
    sizes = {"layers": layers, "T": T, "B": B, "h": h, "dtype": jnp.dtype(dtype)}
    p = stack([cell], **sizes, biased=biased, dropout=dropout, skip=skip, norm=norm)
    seq_lengths = jnp.arange(B, dtype=jnp.int32) % (T + 1) if lengths else None
    if variant == WGMMA and norm is not None:
        with pytest.raises(UnavailableError, match="which norms take"):
            agrees(p, variant, reverse=reverse, seq_lengths=seq_lengths)
        return
    agrees(p, variant, reverse=reverse, seq_lengths=seq_lengths)


@on_gpu
@pairwise(
    "cell, layers, B, h, T, dtype, reverse, lengths",
    ["RNN", "GRU", "LSTM"],
    [2, 5],
    [1, 8, 19, 64],
    [40, 75, 256],
    [1, 2, 17],
    ["bfloat16", "float16"],
    [False, True],
    [False, True],
)
def test_adjoints_that_exchange_sums_agree(cell, layers, B, h, T, dtype, reverse, lengths):
    p = stack([cell], layers=layers, T=T, B=B, h=h, dtype=jnp.dtype(dtype))
    seq_lengths = jnp.arange(B, dtype=jnp.int32) % (T + 1) if lengths else None
    agrees(p, SCATTER, reverse=reverse, seq_lengths=seq_lengths)


@on_gpu
@pairwise(
    "cell, layers, B, h, T, dtype, reverse, lengths, skip",
    ["RNN", "LSTM"],
    [2, 3, 5],
    [32, 64, 96],
    [40, 72, 256],
    [1, 2, 17],
    ["bfloat16", "float16"],
    [False, True],
    [False, True],
    [None, 1, "input"],
)
def test_waves_of_stationary_weights_agree(cell, layers, B, h, T, dtype, reverse, lengths, skip):
    p = stack([cell], layers=layers, T=T, B=B, h=h, dtype=jnp.dtype(dtype), skip=skip)
    seq_lengths = jnp.arange(B, dtype=jnp.int32) % (T + 1) if lengths else None
    agrees(p, STATIONARY, reverse=reverse, seq_lengths=seq_lengths)


@on_gpu
@pytest.mark.parametrize(
    "variant, cell, layers, B, h, more",
    [
        (WAVE, "LSTM", 4, 16, 512, {}),
        (WAVE, "LSTM", 4, 4, 1024, {}),
        (WAVE, "RNN", 8, 4, 1152, {"skip": 4, "norm": "layer"}),
        (WAVE, "GRU", 4, 16, 512, {"skip": 1}),
        (WAVE, "LSTM", 2, 64, 512, {}),  # states a few at a time
        (WGMMA, "LSTM", 8, 64, 512, {}),  # two waves
        (WGMMA, "GRU", 4, 64, 512, {"skip": 2}),
        (WGMMA, "LSTM", 2, 256, 512, {}),  # states a few at a time, two tiles of rows
        (STATIONARY, "LSTM", 4, 64, 512, {"skip": 1}),
        (STATIONARY, "LSTM", 8, 64, 512, {}),  # two waves
        (STATIONARY, "LSTM", 4, 256, 512, {}),  # parts of the batch one after another
        (SCATTER, "LSTM", 4, 16, 512, {}),
        (SCATTER, "LSTM", 4, 64, 512, {}),
        (SCATTER, "GRU", 4, 64, 512, {}),
        (SCATTER, "LSTM", 4, 4, 1024, {}),  # two waves
    ],
)
def test_large_waves_agree_and_repeat(variant, cell, layers, B, h, more):
    p = stack([cell], layers=layers, T=40, B=B, h=h, **more)
    first, again = agrees(p, variant), agrees(p, variant)
    for a, b in zip(leaves(first), leaves(again), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("variant", [pytest.param(WAVE, marks=on_gpu), None])
def test_norms_of_outputs_far_from_zero(variant, norm):
    """Each layer alone, in float32, from what the one below handed on."""
    p = stack(["RNN"], layers=4, T=30, B=4, h=128, dtype=jnp.float16, skip="input", norm=norm)
    p = p._replace(xs=p.xs + 30)
    _, ys = jax.jit(lambda p: recurrent.stack_scan(*p, return_all=True, variant=variant))(p)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), p)
    for i in range(1, 4):
        below = ys[i - 1].astype(jnp.float32)
        layer = dataclasses.replace(wide.layers[i], skip=None)
        _, y = recurrent.stack_scan([layer], [wide.carries[i]], below, implementation="xla")
        # Float16 has numbers 1 / 64 apart there.
        np.testing.assert_allclose(np.float32(ys[i]), y + wide.xs, rtol=0, atol=0.016)


@on_gpu
@pytest.mark.parametrize(
    "variant, cell, B, more",
    [
        (WAVE, "GRU", 4, {}),
        (WAVE, "GRU", 4, {"skip": 1, "norm": "layer"}),
        (WGMMA, "GRU", 40, {}),
        (STATIONARY, "LSTM", 64, {}),
        (SCATTER, "GRU", 4, {}),
        (SCATTER, "GRU", 40, {}),
    ],
)
def test_barriers_and_delays_change_nothing(variant, cell, B, more, monkeypatch):
    p = stack([cell], layers=3, T=20, B=B, h=128, **more)
    results = []
    barrier = [("_barrier", 0)] if variant != SCATTER else []
    for suffix, delay in [("", 0), ("", 3_000), ("", 50_000), *barrier]:
        monkeypatch.setenv("JAXSPARSE_SCAN_DELAY", str(delay))
        gradient = jax.value_and_grad(loss_of(p, variant=variant + suffix), has_aux=True)
        function = jax.jit(lambda x, gradient=gradient: gradient(x))
        results.append(leaves(jax.device_get(function(p.floating))))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@on_gpu
@pytest.mark.parametrize("variant, B", [(WAVE, 4), (WGMMA, 4), (STATIONARY, 32)])
def test_nan_stays_in_its_row_and_behind_a_reset(variant, B):
    p = stack(["LSTM"], layers=3, T=8, B=B, h=64)
    p = p._replace(xs=p.xs.at[2, 1].set(jnp.nan).at[2, 3].set(jnp.nan))
    resets = jnp.zeros((8, B), bool).at[5, 3].set(True)
    _, ys = jax.jit(lambda p: recurrent.stack_scan(*p, variant=variant, resets=resets))(p)
    bad = np.isnan(np.asarray(ys, np.float32))
    assert bad[2:, 1].all() and bad[2:5, 3].all()
    others = [b for b in range(B) if b not in (1, 3)]
    assert not bad[:2].any() and not bad[:, others].any() and not bad[5:, 3].any()


@on_gpu
@pytest.mark.parametrize("variant, B", [(WAVE, 4), (WGMMA, 4), (STATIONARY, 32), (SCATTER, 4)])
def test_times_out_on_blocks_that_do_not_come(variant, B, monkeypatch):
    p = stack(["RNN"], layers=3, T=5, B=B, h=256)
    run = lambda xs: recurrent.stack_scan(p.layers, p.carries, xs, variant=variant)[1]  # noqa: E731
    operand = p.xs
    if variant == SCATTER:
        operand, run = jax.vjp(run, p.xs)
    recurrent.check()
    monkeypatch.setenv("JAXSPARSE_SCAN_DELAY", str(10**8))  # 50 ms
    monkeypatch.setenv("JAXSPARSE_SCAN_WAIT_LIMIT", "0.001")
    (result,) = leaves(jax.jit(run)(operand))
    assert np.isnan(np.asarray(result, np.float32)).any()
    with pytest.raises(RuntimeError, match=r"recurrent\.check: a scan on GPU 0 timed out"):
        recurrent.check()
    monkeypatch.setenv("JAXSPARSE_SCAN_DELAY", "0")
    monkeypatch.delenv("JAXSPARSE_SCAN_WAIT_LIMIT")
    agrees(p, variant)
