"""C++ test programs, built with AddressSanitizer and UBSanitizer."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

FFI = pathlib.Path(__file__).parent.parent / "ffi"


def compile_with_sanitizers(*arguments):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    command = [
        compiler,
        "-std=c++20",
        "-g1",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        *arguments,
        f"-I{FFI}",
    ]
    build = subprocess.run(command, capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stderr[-4000:]


def objects_of(sources, options, folder):
    """Object files, which several programs may have as sources; fails where one can't be built."""
    objects = [folder / f"{source.stem}.o" for source in sources]
    for source, compiled in zip(sources, objects, strict=True):
        compile_with_sanitizers(*options, "-c", str(source), "-o", str(compiled))
    return objects


def output_of(sources, options, folder):
    """What a program of these sources prints; fails where it can't be built or doesn't end well."""
    program = folder / "program"
    compile_with_sanitizers(*options, *map(str, sources), "-o", str(program), "-pthread")
    run = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=600)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    return run.stdout
