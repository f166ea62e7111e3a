"""The CPU kernels under AddressSanitizer and UBSanitizer, for every instruction set there is."""

from __future__ import annotations

import pathlib
import platform
import shutil
import subprocess

import pytest

from jaxsparse import _ffi

FFI = pathlib.Path(__file__).parent.parent / "ffi"
KERNELS = [FFI / op / f"{op}_cpu.cc" for op in ("spmm", "sddmm", "sparse_softmax")]

# As in CMakeLists.txt; each set implies those before it.
FLAGS = {"portable": [], "avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4"]}
AVAILABLE = list(FLAGS)[: list(FLAGS).index(_ffi.cpu_isa()) + 1]


@pytest.mark.parametrize("isa", AVAILABLE)
def test_kernels(isa, tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    x86 = ["-DJAXSPARSE_X86"] if platform.machine() in ("x86_64", "AMD64") else []
    program = tmp_path / "kernels_test"
    build = subprocess.run(
        [
            compiler,
            "-std=c++20",
            "-O0",  # compiles in a third of the time, runs in three times it
            "-g1",
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover=all",
            "-fno-trapping-math",
            "-Wno-psabi",
            f"-I{FFI}",
            f"-DJAXSPARSE_ISA={isa}",
            *x86,
            *FLAGS[isa],
            *map(str, KERNELS),
            str(FFI / "tests" / "kernels_test.cc"),
            "-o",
            str(program),
            "-pthread",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr[-4000:]
    run = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=600)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    assert "patterns passed" in run.stdout
