"""C++ test programs, built with AddressSanitizer and UBSanitizer."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

FFI = pathlib.Path(__file__).parent.parent / "ffi"


def output_of(sources, options, folder):
    """What a program of these sources prints; fails where it can't be built or doesn't end well."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    program = folder / "program"
    command = [
        compiler,
        "-std=c++20",
        "-g1",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        *options,
        f"-I{FFI}",
        *map(str, sources),
        "-o",
        str(program),
        "-pthread",
    ]
    build = subprocess.run(command, capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stderr[-4000:]
    run = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=600)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    return run.stdout
