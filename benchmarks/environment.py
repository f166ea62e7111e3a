"""What figures hold for: hardware, versions, commit."""

from __future__ import annotations

import os
import pathlib
import platform
import re
import subprocess
import sys
import time
from typing import Any

import jax
import jaxlib
import numpy as np
import scipy

import jaxsparse
from jaxsparse import _ffi


def environment(commit: str | None = None) -> dict[str, Any]:
    """Hardware and versions by name; PyTorch with its cuDNN, and CuPy, if they are imported.

    Args:
        commit: of jaxsparse, where it is known better than a checkout could tell.
    """
    return {
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "driver": _driver(),
        "processor": _first_line("/proc/cpuinfo", "model name"),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "isa": _ffi.cpu_isa(),
        "nvrtc": _nvrtc(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "torch": _if_imported("torch"),
        "cupy": _if_imported("cupy"),
        "cudnn": _cudnn(),
        "jaxsparse": jaxsparse.__version__,
        "commit": commit or _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _nvrtc() -> str | None:
    try:
        return _ffi.nvrtc_version()
    except RuntimeError:
        return None


def _cudnn() -> str | None:
    """The version of cuDNN that PyTorch brings, if that is imported."""
    torch = sys.modules.get("torch")
    version = None if torch is None else torch.backends.cudnn.version()
    if version is None:
        return None
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _driver() -> str | None:
    """The version of NVIDIA's driver, out of a line that tells how it was built as well."""
    found = re.search(r"\d+(\.\d+)+", _first_line("/proc/driver/nvidia/version", "NVRM") or "")
    return found.group() if found else None


def _if_imported(module: str) -> str | None:
    version = getattr(sys.modules.get(module), "__version__", None)
    return None if version is None else str(version)


def _first_line(path: str, start: str) -> str | None:
    """The first line of a file that starts so, without the start; None if there is none."""
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except OSError:
        return None
    found = (line[len(start) :].strip(" \t:") for line in lines if line.startswith(start))
    return next(found, None)


def _commit() -> str | None:
    """Of the checkout that this file is tracked in, "-dirty" if it is changed; None outside."""
    file = pathlib.Path(__file__).resolve()
    commands = (
        ["ls-files", "--error-unmatch", file.name],
        ["rev-parse", "--short", "HEAD"],
        ["--no-optional-locks", "status", "--porcelain", "-uno"],
    )
    outputs = []
    for command in commands:
        try:
            ran = subprocess.run(
                ["git", *command], cwd=file.parent, capture_output=True, text=True, check=False
            )
        except OSError:  # no git
            return None
        if ran.returncode:
            return None
        outputs.append(ran.stdout.strip())
    _tracked, commit, changes = outputs
    return f"{commit}-dirty" if changes else commit
