"""CPU kernels, with the shortest and the longest vectors, handlers, the packer, with sanitizers."""

from __future__ import annotations

import jax
import jaxlib
import pytest
import sanitized
from covering import ALL

from jaxsparse import _ffi

KERNELS = [
    sanitized.FFI / op / f"{op}_cpu.cc"
    for op in ("spmm", "sddmm", "sparse_softmax", "reduce_rows", "attention", "depthwise")
]

# As in CMakeLists.txt; each set implies those before it.
FLAGS = {"portable": [], "avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4"]}
AVAILABLE = list(FLAGS)[: list(FLAGS).index(_ffi.cpu_isa()) + 1]
# What AVX2 has is in AVX-512, too, which only has longer vectors: the longest, unless all are asked
# for.
VECTORS = AVAILABLE[1:] if ALL else AVAILABLE[1:][-1:]
OPTIONS = [
    "-O0",  # compiles in a third of the time, runs in three times it
    # What is inlined where it is called is compiled as often. A program has one instruction set, so
    # that there is no other copy that the linker could take.
    "-Dalways_inline=unused",
    "-fno-trapping-math",
    "-Wno-psabi",
]
# Without JAXSPARSE_X86: of all instruction sets, handlers find this one alone.
PORTABLE = [*OPTIONS, "-DJAXSPARSE_ISA=portable"]


@pytest.fixture(scope="module")
def portable_kernels(tmp_path_factory):
    """Compiled once for both programs that they are part of, which takes most of the time."""
    return sanitized.objects_of(KERNELS, PORTABLE, tmp_path_factory.mktemp("portable_kernels"))


def test_portable_kernels(portable_kernels, tmp_path):
    sources = [*portable_kernels, sanitized.FFI / "tests" / "kernels_test.cc"]
    assert "patterns passed" in sanitized.output_of(sources, PORTABLE, tmp_path)


@pytest.mark.skipif(
    not jaxlib.__version__.startswith("0.10."),
    reason="calls handlers as jaxlib 0.10 does, with whose headers the extension is built",
)
def test_handlers(portable_kernels, tmp_path):
    """With calls that are not as declared; those for a GPU need none."""
    handlers = sorted(sanitized.FFI.glob("*/*_ffi.cc"))
    choices = [path.with_name(path.name.replace("cpu", "cuda")) for path in KERNELS]
    choices.append(sanitized.FFI / "packed" / "packed_cuda.cc")
    hosts = [path for choice in choices for path in choice.parent.glob("kernels/*.cc")]
    common = [
        sanitized.FFI / f"{name}.cc"
        for name in (
            *("host/call_parser", "host/ffi", "cpu/isa", "cpu/workers"),
            *("persistent/densify", "persistent/fill", "dynamic/graph_call"),
            "recurrent/scan_call",
        )
    ]
    options = [
        *PORTABLE,
        f"-I{sanitized.FFI / 'tests' / 'handlers'}",  # in front of CUDA's own headers
        f"-I{sanitized.FFI / 'tests'}",
        f"-isystem{jax.ffi.include_dir()}",
    ]
    test = sanitized.FFI / "tests" / "handlers_test.cc"
    sources = [*handlers, *choices, *hosts, *portable_kernels, *common, test]
    assert "calls were refused" in sanitized.output_of(sources, options, tmp_path)


def test_packer(tmp_path):
    parts = "brackets", "graphs", "packer", "schedule"
    dynamic = [sanitized.FFI / "dynamic" / f"{part}.cc" for part in parts]
    test = sanitized.FFI / "tests" / "packer_test.cc"
    output = sanitized.output_of([*dynamic, test], ["-O0", f"-I{test.parent}"], tmp_path)
    assert "graphs were refused" in output


@pytest.mark.parametrize("isa", VECTORS)
def test_kernels(isa, tmp_path):
    options = [*OPTIONS, f"-DJAXSPARSE_ISA={isa}", "-DJAXSPARSE_X86", *FLAGS[isa]]
    sources = [*KERNELS, sanitized.FFI / "tests" / "kernels_test.cc"]
    assert "patterns passed" in sanitized.output_of(sources, options, tmp_path)
