"""The CPU kernels under AddressSanitizer and UBSanitizer, for every instruction set there is."""

from __future__ import annotations

import platform

import pytest
import sanitized

from jaxsparse import _ffi

KERNELS = [sanitized.FFI / op / f"{op}_cpu.cc" for op in ("spmm", "sddmm", "sparse_softmax")]

# As in CMakeLists.txt; each set implies those before it.
FLAGS = {"portable": [], "avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4"]}
AVAILABLE = list(FLAGS)[: list(FLAGS).index(_ffi.cpu_isa()) + 1]


@pytest.mark.parametrize("isa", AVAILABLE)
def test_kernels(isa, tmp_path):
    options = [
        "-O0",  # compiles in a third of the time, runs in three times it
        "-fno-trapping-math",
        "-Wno-psabi",
        f"-DJAXSPARSE_ISA={isa}",
        *(["-DJAXSPARSE_X86"] if platform.machine() in ("x86_64", "AMD64") else []),
        *FLAGS[isa],
    ]
    sources = [*KERNELS, sanitized.FFI / "tests" / "kernels_test.cc"]
    assert "patterns passed" in sanitized.output_of(sources, options, tmp_path)
