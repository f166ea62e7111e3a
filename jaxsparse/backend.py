"""FFI targets and their variants, and why CUDA can or can't be used on this machine."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import pathlib
from typing import Any

import jax

from jaxsparse import _ffi

IMPLEMENTATIONS = ("xla", "cpu", "cuda")
_XLA_NAMES = {"cpu": "cpu", "cuda": "CUDA"}
MINIMUM_COMPUTE_CAPABILITY = 80

# {target's name without the prefix: what _ffi.operations() says of it}
TARGETS: dict[str, dict[str, Any]] = {entry["name"]: entry for entry in _ffi.operations()}


def target_name(operation: str) -> str:
    """The name of an operation's FFI target, the same on every platform."""
    return f"jaxsparse_{operation}"


EXPORT_DISABLED_CHECKS = tuple(
    jax.export.DisabledSafetyCheck.custom_call(target_name(name)) for name in TARGETS
)
"""Pass to ``jax.export.export(..., disabled_checks=...)``: export otherwise refuses custom calls
whose stability it can't vouch for.

>>> import jax
>>> exported = jax.export.export(jax.jit(lambda x: x + 1), disabled_checks=EXPORT_DISABLED_CHECKS)
"""


def register_targets() -> None:
    """Registers every FFI target. It starts no backend: "CUDA" needs no plugin to be named."""
    for name, entry in TARGETS.items():
        for platform, stages in entry["targets"].items():
            jax.ffi.register_ffi_target(target_name(name), stages, platform=_XLA_NAMES[platform])
    _ffi.configure_compiler(str(device_source_folder()), nvrtc_candidates())


def device_source_folder() -> pathlib.Path:
    """Where the device sources lie: beside the extension module, also in an editable install."""
    return pathlib.Path(_ffi.__file__).parent / "device"


def nvrtc_candidates() -> list[str]:
    """Places to look for libnvrtc: the packages that jax[cuda13] brings, then the loader's path."""
    folders = []
    for package in ("nvidia.cu13", "nvidia.cuda_nvrtc"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        if spec is not None and spec.submodule_search_locations:
            folders += [pathlib.Path(p) / "lib" for p in spec.submodule_search_locations]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            folders.append(pathlib.Path(os.environ[variable]) / "lib64")
    folders.append(pathlib.Path("/usr/local/cuda/lib64"))
    found = [str(library) for folder in folders for library in sorted(folder.glob("libnvrtc.so.*"))]
    return [*found, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]


@functools.cache
def cuda_problems() -> tuple[str, ...]:
    """Why ``implementation="cuda"`` can't be had here, each with what mends it; empty if it can."""
    problems = []
    install = "pip install 'jax[cuda13]'"
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        problems.append(f"jax's CUDA plugin is not installed: {install}")
    try:
        _ffi.nvrtc_version()
    except RuntimeError as error:
        problems.append(f"{error}\n  mend it by: {install}")
    if not has_driver():
        problems.append("there is no NVIDIA driver (libcuda.so.1): install one, see nvidia-smi")
        return tuple(problems)
    try:
        devices = _ffi.cuda_devices()
    except RuntimeError as error:
        return (*problems, f"the NVIDIA driver shows no GPU: {error}; see nvidia-smi")
    for name, capability, *_ in devices:
        if capability < MINIMUM_COMPUTE_CAPABILITY:
            problems.append(
                f"{name} is sm_{capability}, the kernels need sm_{MINIMUM_COMPUTE_CAPABILITY} or "
                "later: hide it by CUDA_VISIBLE_DEVICES or use implementation='xla'"
            )
    return tuple(problems)


@functools.cache
def has_driver() -> bool:
    """Whether this machine has NVIDIA's driver, with a GPU or without."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def check_implementation(operation: str, implementation: str | None) -> None:
    """Raises ValueError if there is no implementation of that name."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{operation}: implementation must be None or one of {IMPLEMENTATIONS}, "
            f"got {implementation!r}"
        )
