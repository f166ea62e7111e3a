"""Memory of the device, which several frameworks share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import jax


def memory_limit() -> int:
    """Bytes that one implementation may take: half of what the device has."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return int((device.memory_stats() or {}).get("bytes_limit", 2**34)) // 2
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def release_memory() -> None:
    """Gives back what earlier programs left in the frameworks' pools: they share one GPU."""
    gc.collect()
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.empty_cache()
    if "cupy" in sys.modules and jax.default_backend() == "gpu":
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()


def planned_bytes(compiled: Any) -> int | None:
    """Of a program that XLA compiled, operands and results included, as far as XLA knows.

    What kernels allocate themselves is not counted. None if there is no plan.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    sizes = (getattr(analysis, f"{name}_size_in_bytes") for name in ("argument", "output", "temp"))
    return int(sum(sizes)) - int(analysis.alias_size_in_bytes)


def most_bytes(call: Callable[[], Any]) -> int | None:
    """What PyTorch allocates at most while it is called, beside what is there already.

    None without a GPU.
    """
    torch = sys.modules["torch"]
    if not torch.cuda.is_available():
        return None
    before: int = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    most: int = torch.cuda.max_memory_allocated()
    return most - before
