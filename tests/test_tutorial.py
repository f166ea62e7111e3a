"""The operation that docs/adding_an_op.md adds: its files are built, and its own tests run."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import pytest

from jaxsparse import _ffi, backend

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "adding_an_op.md").read_text()
FILES = dict(re.findall(r"`([\w/.]+)`\n\n```(?:cpp|python)\n(.*?)```", PAGE, re.DOTALL))

SHARED = ("host/call_parser", "host/ffi", "cpu/isa", "cpu/workers")

# In place of what step 7 does: a library of the one target, which launches nothing on a GPU.
LIBRARY = """
#include "host/registry.h"

namespace jaxsparse {
OperationEntry RowSumsEntry();
const void* GetKernel(const KernelSource&, int, std::string*) { return nullptr; }
std::string LaunchKernel(const void*, const LaunchShape&, void*, int, void*) { return ""; }
Gpu GpuOf(int) { return {}; }
}  // namespace jaxsparse

extern "C" XLA_FFI_Error* RowSumsOnCpu(XLA_FFI_CallFrame* frame) {
  static XLA_FFI_Handler* const handler = jaxsparse::RowSumsEntry().cpu;
  return handler(frame);
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page's files, and what of the tests its own tests use."""
    folder = tmp_path_factory.mktemp("tutorial")
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    oracle = folder / "tests" / "reference.py"
    oracle.write_text((ROOT / "tests" / "reference.py").read_text() + "\n\n" + oracle.read_text())
    for name in ("checks", "edge_cases"):
        shutil.copy(ROOT / "tests" / f"{name}.py", folder / "tests")
    (folder / "library.cc").write_text(LIBRARY)
    (folder / "plugin.py").write_text(PLUGIN)
    return folder


def test_changed_lines_are_there():
    """What stays and what goes, in every patch of the page."""
    hunks = [
        re.split(r"^--- (\S+)\n", patch, flags=re.MULTILINE)
        for patch in re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    ]
    patched = 0
    for _, *parts in hunks:
        for name, lines in zip(parts[::2], parts[1::2], strict=True):
            before = "".join(line[1:] + "\n" for line in lines.splitlines() if line[:1] != "+")
            assert before.strip() and before in (ROOT / name).read_text(), name
            patched += 1
    assert patched == 3


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


def test_its_own_tests_pass(folder):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    ffi = ROOT / "ffi"
    command = [
        compiler,
        "-std=c++20",
        "-shared",
        "-fPIC",
        "-fno-trapping-math",
        "-Wno-psabi",
        "-Wl,-z,defs",
        "-DJAXSPARSE_ISA=portable",
        f"-I{ffi / 'tests' / 'handlers'}",  # in front of CUDA's own headers
        f"-I{folder / 'ffi'}",
        f"-I{ffi}",
        f"-isystem{jax.ffi.include_dir()}",
        *map(str, sorted((folder / "ffi" / "row_sums").rglob("*.cc"))),
        *(str(ffi / f"{name}.cc") for name in SHARED),
        str(folder / "library.cc"),
        "-o",
        str(folder / "row_sums.so"),
        "-pthread",
    ]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-4000:]
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
