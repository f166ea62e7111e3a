"""The kernel behind a loss and its gradient: its source, and the call of its FFI target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.core import ShapedArray

from jaxsparse.device import AnyDevice
from jaxsparse.primitive import Fallback, FfiCall


def ffi_call(
    params: dict[str, Any], avals: Sequence[ShapedArray], names: Sequence[str], device: AnyDevice
) -> FfiCall | Fallback:
    """How the target is called for operands of these types on a GPU, or why the plain path runs."""
    return Fallback("there is no kernel yet")
