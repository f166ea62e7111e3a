"""The operation that docs/adding_an_op.md adds: its files are built, and its own tests run."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

import jax
import pytest

from jaxsparse import _ffi, backend

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "adding_an_op.md").read_text()
FILES = dict(re.findall(r"`([\w/.]+)`\n\n```(?:cpp|python)\n(.*?)```", PAGE, re.DOTALL))

LINES = re.DOTALL | re.MULTILINE
SHARED = ("host/call_parser", "host/ffi", "cpu/isa", "cpu/workers")

# The rest of an extension module that has the page's operation alone. The list of operations is the
# patched one of module.cc, and nothing is launched on a GPU.
LIBRARY = """
#include "host/registry.h"

namespace jaxsparse {
const void* GetKernel(const KernelSource&, int, std::string*) { return nullptr; }
std::string LaunchKernel(const void*, const LaunchShape&, void*, int, void*) { return ""; }
Gpu GpuOf(int) { return {}; }
%(others)s
%(list)s
}  // namespace jaxsparse

extern "C" XLA_FFI_Error* RowSumsOnCpu(XLA_FFI_CallFrame* frame) {
  for (const auto& entry : jaxsparse::Entries()) {
    if (entry.name == "row_sums") return entry.cpu(frame);
  }
  return nullptr;
}
"""

# A plugin of pytest that makes the operation a part of the package.
PLUGIN = """
import ctypes
import importlib.util
import pathlib

import jax

import jaxsparse
from jaxsparse import backend

folder = pathlib.Path(__file__).parent
handler = jax.ffi.pycapsule(ctypes.CDLL(str(folder / "row_sums.so")).RowSumsOnCpu)
backend.TARGETS["row_sums"] = {"variants": {"cpu": ["rows"]}, "targets": {"cpu": handler}}
jax.ffi.register_ffi_target(backend.target_name("row_sums"), handler, platform="cpu")
spec = importlib.util.spec_from_file_location(
    "jaxsparse.ops.row_sums", folder / "jaxsparse" / "ops" / "row_sums.py"
)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
jaxsparse.row_sums = module.row_sums
"""


def patches():
    """(file, what is there, what the page makes of it), for every patch of the page."""
    found = []
    for patch in re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL):
        _, *parts = re.split(r"^--- (\S+)\n", patch, flags=re.MULTILINE)
        for name, text in zip(parts[::2], parts[1::2], strict=True):
            lines = text.splitlines()
            sides = ["".join(x[1:] + "\n" for x in lines if x[:1] != other) for other in "+-"]
            found.append((name, *sides))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page's files, those that it patches, and what of the tests its own tests use."""
    folder = tmp_path_factory.mktemp("tutorial")
    texts = dict(FILES)
    for name, before, after in patches():
        text = (ROOT / name).read_text()
        assert before.strip() and text.count(before) == 1, f"{name} has not these lines:\n{before}"
        texts[name] = text.replace(before, after)
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    oracle = folder / "tests" / "reference.py"
    oracle.write_text((ROOT / "tests" / "reference.py").read_text() + "\n\n" + oracle.read_text())
    for name in ("checks", "edge_cases"):
        shutil.copy(ROOT / "tests" / f"{name}.py", folder / "tests")
    (folder / "library.cc").write_text(LIBRARY % library_parts(folder))
    (folder / "plugin.py").write_text(PLUGIN)
    return folder


def library_parts(folder):
    """The list of operations as module.cc has it, and nothing for all but the page's."""
    header, module = (folder / "ffi" / name for name in ("host/registry.h", "module.cc"))
    declared = re.findall(r"^OperationEntry (\w+)\(\);$", header.read_text(), flags=re.MULTILINE)
    assert "RowSumsEntry" in declared
    others = [name for name in declared if name != "RowSumsEntry"]
    (listed,) = re.findall(
        r"^const std::vector<OperationEntry>& Entries.*?^}", module.read_text(), LINES
    )
    assert "RowSumsEntry()" in listed
    return {
        "others": "\n".join(f"OperationEntry {x}() {{ return {{}}; }}" for x in others),
        "list": listed,
    }


def command_line(folder, *arguments):
    """Of the compiler, for files of the page and of the project."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    return [
        compiler,
        "-std=c++20",
        "-fno-trapping-math",
        "-Wno-psabi",
        "-DJAXSPARSE_ISA=portable",
        f"-I{ROOT / 'ffi' / 'tests' / 'handlers'}",  # in front of CUDA's own headers
        f"-I{folder / 'ffi'}",
        f"-I{ROOT / 'ffi'}",
        f"-isystem{jax.ffi.include_dir()}",
        *map(str, arguments),
    ]


def assert_runs(command):
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]


def test_patched_files():
    assert [name for name, *_ in patches()] == [
        "ffi/host/registry.h",
        "ffi/module.cc",
        "CMakeLists.txt",
        "ffi/spmm/spmm_cpu.cc",
    ]


def test_module_with_the_operation_compiles(folder):
    """The whole of module.cc; what it lists is compiled with the page's own tests, too."""
    nanobind = importlib.util.find_spec("nanobind")
    if nanobind is None:
        pytest.skip("needs nanobind's headers")
    includes = pathlib.Path(nanobind.origin).parent / "include", sysconfig.get_path("include")
    module = folder / "ffi" / "module.cc"
    flags = [f"-isystem{include}" for include in includes]
    assert_runs(command_line(folder, "-fsyntax-only", *flags, module))


def test_variant_of_a_cpu_kernel_compiles(folder, tmp_path):
    """The row that the page adds to a table, with its launch declared."""
    path = folder / "ffi" / "spmm" / "spmm_cpu.cc"
    table = "constexpr CpuVariant<SpmmProblem> kVariants[]"
    text = path.read_text()
    assert text.count(table) == 1
    changed = tmp_path / path.name
    changed.write_text(
        text.replace(table, f"void LaunchColumn(const SpmmProblem&, Workers&) {{}}\n{table}")
    )
    assert_runs(command_line(folder, "-fsyntax-only", changed))


def test_device_code_compiles(folder, monkeypatch):
    try:
        _ffi.nvrtc_version()
    except RuntimeError as error:
        pytest.skip(f"needs NVRTC: {error}")
    monkeypatch.setenv("JAXSPARSE_CACHE_DIR", "")
    shutil.copytree(ROOT / "ffi" / "cuda", folder / "ffi" / "cuda")
    shutil.copy(ROOT / "ffi" / "types.h", folder / "ffi")
    _ffi.configure_compiler(str(folder / "ffi"), backend.nvrtc_candidates())
    try:
        for dtype in ("float", "double", "jaxsparse::bfloat16", "jaxsparse::float16"):
            expression = f"jaxsparse::RowSumsWarps<{dtype}>"
            assert _ffi.compile_kernel("row_sums/kernels/generic.cu", expression, "sm_90a")
    finally:
        _ffi.configure_compiler(str(backend.device_source_folder()), backend.nvrtc_candidates())


def sources(folder):
    """Of the operation, as the patched CMakeLists.txt finds them."""
    text = (folder / "CMakeLists.txt").read_text()
    assert "row_sums" in re.findall(r"^jaxsparse_op\((\w+)\)$", text, flags=re.MULTILINE)
    (function,) = re.findall(r"^function\(jaxsparse_op name\).*?^endfunction", text, LINES)
    patterns = set(re.findall(r"ffi/\$\{name\}/\S+?\.cc", function))
    assert len(patterns) == 4
    found = [sorted(folder.glob(pattern.replace("${name}", "row_sums"))) for pattern in patterns]
    assert all(found)
    return [path for paths in found for path in paths]


def test_its_own_tests_pass(folder):
    shared = [ROOT / "ffi" / f"{name}.cc" for name in SHARED]
    built = ["-shared", "-fPIC", "-Wl,-z,defs", "-o", folder / "row_sums.so", "-pthread"]
    assert_runs(command_line(folder, *built, *sources(folder), *shared, folder / "library.cc"))
    # Of the patterns a few: each takes a compilation.
    chosen = "padding or many_columns or test_derivatives or test_vmap or test_bad or test_errors"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "plugin", "-k", chosen, "-rN", "tests"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path[1:]])}
        | {"JAX_PLATFORMS": "cpu", "PYTEST_ADDOPTS": "-p no:cacheprovider -o testpaths=tests"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    assert int(re.findall(r"(\d+) passed", ran.stdout)[0]) > 40
