"""Kernels on an emulated GPU, with sanitizers: their results where there is no GPU."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

FFI = pathlib.Path(__file__).parent.parent / "ffi"


@pytest.mark.parametrize("operation", ["spmm", "sddmm", "sparse_softmax"])
def test_kernels(operation, tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    program = tmp_path / "test"
    build = subprocess.run(
        [
            compiler,
            "-std=c++20",
            "-O1",
            "-g1",
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover=all",
            "-Wno-unknown-pragmas",
            f"-I{FFI / 'tests' / 'emulated'}",  # in front of the headers that it replaces
            f"-I{FFI / 'tests'}",
            f"-I{FFI}",
            str(FFI / "tests" / "device" / f"{operation}_test.cc"),
            "-o",
            str(program),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr[-4000:]
    run = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=600)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    assert "all results agree" in run.stdout
