"""What kernels take before they run: compiled by NVRTC and loaded, and loaded from the cache."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from jaxlib.mlir import ir

from jaxsparse import _ffi

_CACHE = "JAXSPARSE_CACHE_DIR"
_ATTRIBUTES = ("name", "expression", "source")  # of a call whose kernel is compiled at run time


class Kernel(NamedTuple):
    """What the compiler of kernels takes."""

    file: str
    expression: str
    text: str


def kernels_of(lowered: Any) -> list[Kernel]:
    """Those whose source a program of JAX carries, each once, in the order of their calls."""
    found: dict[Kernel, None] = {}

    def look(operation: Any) -> None:
        attributes = operation.attributes
        if "mhlo.backend_config" in attributes:
            config = attributes["mhlo.backend_config"]
            if isinstance(config, ir.DictAttr) and all(name in config for name in _ATTRIBUTES):
                texts = (ir.StringAttr(config[name]).value for name in _ATTRIBUTES)
                found[Kernel(*texts)] = None
        for region in operation.regions:
            for block in region:
                for inner in block:
                    look(inner.operation)

    look(lowered.compiler_ir("stablehlo").operation)
    return list(found)


def loading_seconds(kernels: list[Kernel]) -> tuple[float, float]:
    """To compile and load kernels one after another; and to load them from the cache on disk.

    Raises:
        RuntimeError: without NVRTC or a GPU.
    """
    with _empty_cache():
        return _seconds(kernels), _seconds(kernels)


def _seconds(kernels: list[Kernel]) -> float:
    begin = time.perf_counter()
    for kernel in kernels:
        _ffi.load_kernel(*kernel)
    return time.perf_counter() - begin


@contextmanager
def _empty_cache() -> Iterator[None]:
    before = os.environ.get(_CACHE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[_CACHE] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[_CACHE]
            else:
                os.environ[_CACHE] = before
