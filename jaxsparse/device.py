"""A GPU as the choice of a kernel sees it: this machine's, or one that is described."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jax.core import ShapedArray

from jaxsparse import _ffi, backend


@dataclasses.dataclass(frozen=True)
class Device:
    """What the choice of a kernel wants to know of a GPU."""

    name: str
    compute_capability: int  # 90 for 9.0
    multiprocessors: int
    shared_bytes: int  # that a block can have

    def choose_variant(
        self,
        target: str,
        operands: Sequence[ShapedArray],
        results: Sequence[ShapedArray],
        attributes: dict[str, Any],
    ) -> tuple[tuple[str, float], ...]:
        """Variants of an operation's kernel that fit a call, and their predicted microseconds.

        First the chosen one, the others by rising cost; infinity is for those that are only taken
        by their name. Raises ValueError where none fits.
        """
        name, fitting = _ffi.choose_variant(
            target,
            [(a.dtype.name, a.shape) for a in operands],
            [(a.dtype.name, a.shape) for a in results],
            attributes,
            compute_capability=self.compute_capability,
            multiprocessors=self.multiprocessors,
            shared_bytes=self.shared_bytes,
        )
        return tuple(sorted(fitting, key=lambda pair: (pair[0] != name, pair[1])))


H200 = Device("NVIDIA H200", 90, 132, 232448)


@functools.cache
def present_device() -> Device:
    """The first GPU of this machine; where there is none, an H200."""
    return Device(*_ffi.cuda_devices()[0]) if has_gpu() else H200


@functools.cache
def has_gpu() -> bool:
    """Whether this machine has a GPU that can run the kernels."""
    return not backend.cuda_problems()
