"""A GPU as the choice of a kernel sees it: this machine's, or one that is described."""

from __future__ import annotations

import dataclasses
import functools

from jaxsparse import _ffi, backend


@dataclasses.dataclass(frozen=True)
class Device:
    """What the choice of a kernel wants to know of a GPU."""

    name: str
    compute_capability: int  # 90 for 9.0
    multiprocessors: int
    shared_bytes: int  # that a block can have


H200 = Device("NVIDIA H200", 90, 132, 232448)


@functools.cache
def present_device() -> Device:
    """The first GPU of this machine; where there is none, an H200."""
    return Device(*_ffi.cuda_devices()[0]) if has_gpu() else H200


@functools.cache
def has_gpu() -> bool:
    """Whether this machine has a GPU that can run the kernels."""
    return not backend.cuda_problems()
