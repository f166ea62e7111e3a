"""Printed steps: numbers against JAX on the host, and compilation for GPUs."""

from __future__ import annotations

import ctypes
import pathlib
import shutil
import subprocess

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from printer_cases import CASES, LEAST_NORMAL, Case
from printer_cells import CELLS, Cell

from jaxsparse import backend
from jaxsparse.codegen.operations import PRIMITIVES
from jaxsparse.primitive import equations
from jaxsparse.recurrent.printer import print_step

FFI = pathlib.Path(__file__).parent.parent / "ffi"
HEADERS = ("cuda/pointwise.cuh", "cuda/arithmetic_instructions.cuh", "types.h")
STEPS = [*CASES, *CELLS]


def printed(step: Case | Cell) -> str:
    return print_step(step.jaxpr, name=f"step_{step.name}", **step.counts)


def translation_unit(runner: str) -> str:
    """All steps and, for each, a function or kernel that applies it."""
    texts = ['#include "cuda/pointwise.cuh"', *map(printed, STEPS)]
    return "\n".join(texts + [runner.replace("NAME", step.name) for step in STEPS])


# On the host.

RUN = """
extern "C" void run_NAME(int n, const float* product, float* carry, const float* input,
                         float* state, float* output) {
  using S = step_NAME;
  for (int i = 0; i < n; ++i) {
    S::Apply(product + i * S::kProducts, carry + i * S::kCarries, input + i * S::kInputs,
             state + i * S::kStates, output + i * S::kOutputs);
  }
}"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("printed")
    (folder / "steps.cc").write_text("#include <cmath>\n" + translation_unit(RUN))
    # Unused variables are errors: nothing is printed that is not needed.
    build = subprocess.run(
        [
            compiler,
            "-std=c++20",
            "-O1",
            "-shared",
            "-fPIC",
            "-ffp-contract=off",
            "-Wall",
            "-Werror=unused-variable",
            f"-I{FFI / 'tests' / 'emulated'}",  # in front of the headers that it replaces
            f"-I{FFI / 'tests'}",
            f"-I{FFI}",
            str(folder / "steps.cc"),
            "-o",
            str(folder / "steps.so"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr[-4000:]
    assert not build.stderr, build.stderr[-4000:]
    return ctypes.CDLL(str(folder / "steps.so"))


def run(library: ctypes.CDLL, step: Case | Cell, values: np.ndarray) -> np.ndarray:
    """Applies a step to rows of arguments; the results are rows too."""
    counts, n = step.counts, len(values)
    ends = np.cumsum([counts["products"], counts["carries"]])
    product, carry, given = (
        np.ascontiguousarray(part, np.float32) for part in np.split(values, ends, axis=1)
    )
    state = np.full((n, counts["states"]), 77, np.float32)
    output = np.full((n, counts["outputs"]), 77, np.float32)
    arrays = (product, carry, given, state, output)
    getattr(library, f"run_{step.name}")(n, *(ctypes.c_void_p(a.ctypes.data) for a in arrays))
    return np.concatenate([state, carry, output], axis=1)


MAXIMUM = float(np.finfo(np.float32).max)
SPECIAL = np.float32(
    [
        *(0, 1e-45, 1e-40, 1.1e-38, LEAST_NORMAL, 2e-38, 1e-20, 6e-8, 1e-5, 1e-3, 0.25, 0.3, 0.5),
        *(0.7, 1 - 2**-24, 1, 1 + 2**-23, 1.5, 2, 2.5, 3, np.pi, 9, 20, 31, 32, 60, 87.5, 88.8),
        *(90, 103.9, 127.5, 128, 150, 1e4, 65519, 65520, 8388607.5, 1e9, 2**31, 3e9, 5e9),
        *(1e20, 1e38, 1.7e38, MAXIMUM, np.inf, np.nan),
    ]
)
SPECIAL = np.concatenate([SPECIAL, -SPECIAL])


def operands(arity: int, count: int = 4000) -> np.ndarray:
    """Special values in all combinations, and random ones: any bits, common sizes, all sizes."""
    rng = np.random.default_rng(arity)
    special = SPECIAL if arity < 3 else SPECIAL[::5]
    grid = np.stack(np.meshgrid(*[special] * arity), axis=-1).reshape(-1, arity)
    shape = (count, arity)
    bits = rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)
    common = rng.normal(size=shape) * 4
    sizes = np.exp2(rng.uniform(-30, 8, shape)) * rng.choice([-1, 1], shape)
    with np.errstate(invalid="ignore"):  # among the bits are signalling NaNs
        return np.concatenate([grid, bits, common, sizes, np.round(common)]).astype(np.float32)


def ulps(result: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Distances in units in the last place of the truth; infinity lies one beyond the maximum."""
    limit = 2.0**128
    x, t = np.clip(result.astype(np.float64), -limit, limit), np.clip(truth, -limit, limit)
    exponent = np.clip(np.frexp(t)[1] - 1, -126, 127)
    return np.abs(x - t) / np.exp2(exponent - 23.0)


def check(case: Case, values: np.ndarray, result: np.ndarray) -> None:
    truth = case.truth(values)
    wrong = np.isnan(result) != np.isnan(truth)
    assert not wrong.any(), (values[wrong][:5], result[wrong][:5], truth[wrong][:5])
    there = ~np.isnan(truth)
    values, result, truth = values[there], result[there], truth[there]
    error = ulps(result, truth)
    error[(np.abs(truth) < case.least) & (np.abs(result) <= case.least)] = 0
    wrong = error > case.bound + 1e-6
    assert not wrong.any(), (
        f"up to {error.max()} ulp: {values[wrong][:5]}: {result[wrong][:5]} "
        f"instead of {truth[wrong][:5]}"
    )
    zeros = (truth == 0) & (result == 0)
    wrong = zeros & (np.signbit(truth) != np.signbit(result))
    assert not wrong.any(), (values[wrong][:5], result[wrong][:5])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_primitive(library, case):
    values = operands(case.arity)
    check(case, values, run(library, case, values)[:, 0])


@pytest.mark.parametrize("name", ["tanh", "logistic", "exp", "erf"])
def test_accuracy(library, name):
    """Many more values, where the bounds are part of what the functions promise."""
    (case,) = [case for case in CASES if case.name == name]
    values = np.linspace(-20, 20, 2_000_001, dtype=np.float32)[:, None]
    check(case, values, run(library, case, values)[:, 0])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32), min_size=3, max_size=3))
def test_any_floats(library, values):
    row = np.float32([values])
    for case in CASES:
        part = row[:, : case.arity]
        if case.name in ("tanh", "logistic", "max", "min", "clamp", "sign"):
            check(case, part, run(library, case, part)[:, 0])


def test_every_primitive_is_tested():
    tested = {e.primitive.name for case in CASES for e in equations(case.jaxpr.jaxpr)}
    assert set(PRIMITIVES) - tested == set()
    assert len({step.name for step in STEPS}) == len(STEPS)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_cell(library, cell):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(500, cell.arity)).astype(np.float32)
    if cell.name in ("tanh_rnn", "lstm", "gru", "masked_gru"):  # derivatives would be 0 there
        values[::7] *= 30
    columns = list(values.T)
    if cell.bools:
        values[:, -cell.bools :] = rng.integers(0, 2, (500, cell.bools))
        columns = [*values.T[: -cell.bools], *values.T[-cell.bools :].astype(bool)]
    result = run(library, cell, values).T

    def reference(columns: list[np.ndarray]) -> np.ndarray:
        return np.stack(jax.jit(jax.vmap(cell.function))(*columns))

    with jax.enable_x64(True):
        truth = reference([c if c.dtype == bool else c.astype(np.float64) for c in columns])
    # A few roundings of what goes in, each as large as the largest in its row.
    scale = np.maximum(np.abs(values).max(axis=1), 1)
    scale = np.maximum(scale, np.abs(truth).max(axis=0))
    assert (np.abs(result - truth) <= 16 * 2.0**-24 * scale).all()
    assert (np.abs(result - reference(columns)) <= 64 * 2.0**-24 * scale).all()


# For GPUs.

KERNEL = """
__global__ void KernelNAME(const float* product, float* carry, const float* input, float* state,
                           float* output) {
  step_NAME::Apply(product, carry, input, state, output);
}"""


@pytest.fixture(scope="module")
def nvrtc():
    reasons = []
    for path in backend.nvrtc_candidates():
        try:
            # The builtins lie beside it, and the loader would not find them there.
            for builtins in pathlib.Path(path).parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))
            return ctypes.CDLL(path)
        except OSError as error:
            reasons.append(str(error))
    pytest.skip(f"needs NVRTC: {reasons}")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_every_step_compiles_for_gpus(nvrtc, architecture):
    program = ctypes.c_void_p()
    names = (ctypes.c_char_p * 3)(*[name.encode() for name in HEADERS])
    texts = (ctypes.c_char_p * 3)(*[(FFI / name).read_bytes() for name in HEADERS])
    source = translation_unit(KERNEL).encode()
    assert not nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"steps.cu", 3, texts, names)
    try:
        options = [f"--gpu-architecture={architecture}", "--std=c++20"]
        options.append("--device-as-default-execution-space")
        array = (ctypes.c_char_p * 3)(*[option.encode() for option in options])
        status = nvrtc.nvrtcCompileProgram(program, 3, array)
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        assert status == 0 and not log.value, log.value.decode()[:4000]
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
        assert code.raw.startswith(b"\x7fELF")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
