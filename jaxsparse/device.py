"""What the choice of a kernel sees of a device: this machine's, or a GPU that is described."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
from jax.core import ShapedArray

from jaxsparse import _ffi, backend


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU, as the choice of a kernel sees it. `H200` is one; describe others for `explain`.

    Args:
        name: what `explain` calls it.
        compute_capability: 90 for 9.0.
        multiprocessors: how many there are.
        shared_bytes: of shared memory that a block can have.

    >>> import jaxsparse
    >>> Device("NVIDIA H100 PCIe", 90, 114, 232448).lacks
    ''
    >>> import dataclasses
    >>> dataclasses.replace(jaxsparse.H200, name="half of it", multiprocessors=66).multiprocessors
    66
    """

    platform: ClassVar[str] = "cuda"
    name: str
    compute_capability: int
    multiprocessors: int
    shared_bytes: int

    @property
    def lacks(self) -> str:
        """Why no kernel can run on it; empty if some can."""
        return self.lacks_for(backend.MINIMUM_COMPUTE_CAPABILITY)

    def lacks_for(self, needs: int) -> str:
        """Why kernels of a compute capability can't run on it; empty if they can."""
        has = self.compute_capability
        if has >= needs:
            return ""
        return f"{self.name} has compute capability {has / 10}, and the kernels need {needs / 10}"

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
        chosen = _ffi.choose_cuda_variant(
            target,
            _types(operands),
            _types(results),
            attributes,
            compute_capability=self.compute_capability,
            multiprocessors=self.multiprocessors,
            shared_bytes=self.shared_bytes,
        )
        return _chosen_first(*chosen)


@dataclasses.dataclass(frozen=True)
class OtherDevice:
    """A CPU, or what no kernel runs on: a GPU that lacks something, another platform."""

    platform: str
    name: str
    lacks: str  # as of a `Device`

    def lacks_for(self, needs: int) -> str:
        """As of a `Device`: what it lacks, it lacks for all kernels."""
        return self.lacks

    def choose_variant(
        self,
        target: str,
        operands: Sequence[ShapedArray],
        results: Sequence[ShapedArray],
        attributes: dict[str, Any],
    ) -> tuple[tuple[str, float], ...]:
        """As `Device.choose_variant`, but the numbers are no times: they only put an order."""
        return _chosen_first(
            *_ffi.choose_cpu_variant(target, _types(operands), _types(results), attributes)
        )


AnyDevice = Device | OtherDevice


def workspace_bytes(
    target: str,
    operands: Sequence[ShapedArray],
    results: Sequence[ShapedArray],
    attributes: dict[str, Any],
) -> int:
    """The most memory that a call's CUDA variants want beside its results, on any GPU.

    XLA has to know it when it compiles a program, before a variant is chosen. Where a size is not a
    number yet, as in a program that is exported for any, it is 0, so that only variants that need
    none can be chosen.

    Raises:
        ValueError: if the target does not take a call of these types and attributes.
    """
    if not all(isinstance(size, int) for a in (*operands, *results) for size in a.shape):
        return 0
    return _ffi.workspace_bytes(target, _types(operands), _types(results), attributes)


def _types(arrays: Sequence[ShapedArray]) -> list[tuple[str, tuple[int, ...]]]:
    return [(a.dtype.name, a.shape) for a in arrays]


def _chosen_first(name: str, fitting: Sequence[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(fitting, key=lambda pair: (pair[0] != name, pair[1])))


H200 = Device("NVIDIA H200", 90, 132, 232448)
# GPUs that are described here, by the names that the command line takes.
DESCRIBED = {"H200": H200}


@functools.cache
def present_device() -> Device:
    """The first GPU of this machine; where there is none, an H200."""
    return Device(*_ffi.cuda_devices()[0]) if has_gpu() else H200


@functools.cache
def has_gpu() -> bool:
    """Whether this machine has a GPU that can run the kernels."""
    return not backend.cuda_problems()


def default_device() -> AnyDevice:
    """Where JAX runs a program on this machine if it is told nothing."""
    platform = jax.default_backend()
    if platform != "gpu":
        return _without_gpu(platform)
    if has_gpu():
        return present_device()
    return OtherDevice("cuda", "GPU", "it can't run the kernels, see python -m jaxsparse info")


def lowered_for(platform: str) -> AnyDevice:
    """What a program is lowered for that is lowered for a platform ("cpu", "cuda", "tpu", ...).

    Without a driver that is a GPU elsewhere, which may well have what is missing here.
    """
    if platform != "cuda":
        return _without_gpu(platform)
    problems = backend.cuda_problems() if backend.has_driver() else ()
    return OtherDevice(platform, "GPU", "\n  ".join(problems)) if problems else present_device()


def _without_gpu(platform: str) -> OtherDevice:
    if platform == "cpu":
        return OtherDevice(platform, f"CPU ({_ffi.cpu_isa()})", "")
    return OtherDevice(platform, platform.upper(), "there are no kernels for it")


# The GPU that `explain` traces a program for. Being a context of JAX it is part of the keys of all
# caches of traces: what an inner jit was traced to for one GPU is not found for another.
tracing_for = jax.make_user_context(default_value=None)


def traced_for() -> Device | None:
    """The GPU that patterns are prepared for while a program is traced; None where there is none.

    It is this machine's, or the one that `explain` describes.
    """
    described: Device | None = tracing_for.value
    if described is not None:
        return described
    return present_device() if has_gpu() else None


def explained_devices(asked: Device | None) -> tuple[AnyDevice | None, Device]:
    """Where JAX runs here, or None where that is the other one; and the GPU that is described.

    What is named is described apart from this machine, even if it is the same GPU.
    """
    here = default_device()
    if asked is not None:
        return here, asked
    return (None, here) if isinstance(here, Device) else (here, present_device())


def by_device(here: str, device: str, choice: str) -> tuple[str, ...]:
    """Lines on what runs here, if that is not the GPU, and on the GPU of that name."""
    if not here:
        return (f"on this machine's {device}: {choice}",)
    return f"on this machine's {here}", f"on {device}: {choice}"
