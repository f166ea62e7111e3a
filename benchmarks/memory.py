"""Memory of the device, which several frameworks share."""

from __future__ import annotations

import gc
import os
import sys

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
