"""What an operation declares of itself, of which its primitive is made.

It declares the core dimensions of its operands and results by name ("k n"), how it is computed in
plain jnp, and what its FFI target wants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray

from jaxsparse.backend import MINIMUM_COMPUTE_CAPABILITY
from jaxsparse.device import AnyDevice


class Signature(NamedTuple):
    """Names and core dimensions of operands and results, e.g. ``("x", "k n")``.

    A dimension "m+1" is one longer than "m", and "3" is of size 3.
    """

    operands: tuple[tuple[str, str], ...]
    results: tuple[tuple[str, str], ...]


class Fallback(NamedTuple):
    """What is computed in jnp in place of a kernel."""

    reason: str  # what follows "because"
    # Of the operands with all their batch dimensions, and the operation's own params; it may bind
    # primitives by `bind_local`. None: the operation's plain form.
    compute: Callable[..., list[jax.Array]] | None = None
    called: str = ""  # what that is called; empty: as the plain form is
    # Said where a call is lowered that misses a kernel, once for a subject and a reason.
    warning: str = ""
    subject: str = ""


class FfiCall(NamedTuple):
    """A call of an operation's FFI target."""

    operands: tuple[str, ...]  # which, in the target's order
    attributes: dict[str, Any]
    # Bytes of one more result, which only the kernel uses. None: as many as the target's CUDA
    # variants may want; the target gets the number as its attribute "workspace".
    workspace: int | None = 0
    # Whether those do not depend on sizes that are still open, in a program for any of them.
    workspace_is_fixed: bool = False
    # Operands and results whose last two dimensions the target has in the other order.
    swapped: tuple[str, ...] = ()
    # A core dimension that the target gets with zeros behind it, and its size then. Results that
    # have the dimension are cut.
    padded: tuple[str, int] | None = None
    remark: str = ""  # for `explain`
    plan: Any = None  # for `explain`, of a kernel that is made for the call
    # What is computed where none of the target's variants fits; None: one of them always does.
    fallback: Fallback | None = None
    # (variant, call): where that variant is chosen, `call` is lowered instead, without the operands
    # that the variant does not take, so that the program does not make them.
    narrower: tuple[str, FfiCall] | None = None


@dataclasses.dataclass(frozen=True)
class Operation:
    """What makes an operation."""

    name: str  # of the primitive
    target: str  # of its FFI target, without the prefix
    params: tuple[str, ...]  # static, beside implementation and variant
    signature: Callable[[dict[str, Any]], Signature]
    result_dtypes: Callable[[Sequence[ShapedArray], dict[str, Any]], Sequence[Any]]
    shardable: tuple[str, ...]  # core dimensions along which it is computed independently
    xla: Callable[..., list[jax.Array]]  # one batch entry in plain jnp
    # How its FFI target is called for operands of these types on a device that its kernels run on,
    # or what is computed instead.
    ffi: Callable[[dict[str, Any], Sequence[ShapedArray], AnyDevice], FfiCall | Fallback]
    # As `xla`, for a GPU: what is fastest there without a kernel.
    xla_on_gpu: Callable[..., list[jax.Array]] | None = None
    # Whether `xla` and `xla_on_gpu` take operands with all their batch dimensions, not one entry.
    plain_takes_batch: bool = False
    # What is computed on a GPU without a kernel: the fallback that is given, or one in its place.
    # None: the operation's plain form.
    without_kernel: (
        Callable[[dict[str, Any], Sequence[ShapedArray], AnyDevice, Fallback], Fallback] | None
    ) = None
    plain: str = "plain XLA"  # what its jnp form is called
    # What is computed on a CPU, of an operation that has no kernel there; None: it has one.
    on_cpu: Fallback | None = None
    compute_capability: int = MINIMUM_COMPUTE_CAPABILITY  # the least that its CUDA kernels need
    # Of its params and operands by name: what is stored, in words, and the shape of that; None: a
    # matrix on a pattern. For `explain`.
    stored: Callable[[dict[str, Any], dict[str, Any]], tuple[str, tuple[int, int]]] | None = None
    called: str | None = None  # by users, as errors say it; None: as its target
    summed: tuple[str, ...] = ()  # core dimensions along which parts of the results add up
    # Params and dtypes of operands for the kernels, of a call whose own they may not take; its
    # results are cast to what they should be.
    cast: Callable[[dict[str, Any], Sequence[ShapedArray]], tuple[dict[str, Any], list[Any]]] = (
        lambda params, avals: (params, [a.dtype for a in avals])
    )


def core_dims(spec: str) -> list[str]:
    """The names of the core dimensions of an operand or result."""
    return spec.split()
