"""How the sequences of a layer lie: time first or last, their lengths, and where episodes begin."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.ops import arguments


def clipped_lengths(operation: str, inputs: Any, seq_lengths: Any, time_major: bool) -> Any:
    """Lengths in [0, T], int32 (*batch,), or None for None."""
    if seq_lengths is None:
        return None
    inputs = arguments.as_array(operation, "inputs", inputs, 2)
    batch = inputs.shape[1:-1] if time_major else inputs.shape[:-2]
    lengths: Any = seq_lengths
    if not isinstance(lengths, np.ndarray | np.generic):
        lengths = arguments.as_array(operation, "seq_lengths", lengths, 0)
    if lengths.shape != batch or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"{operation}: seq_lengths must be integers of shape {batch}, the batch dimensions of "
            f"the inputs, got {lengths.dtype} of shape {lengths.shape}"
        )
    # Neither may T wrap in the dtype of the lengths, nor a length in int32. JAX would make int32 of
    # a NumPy array of 64 bits, so that one is clipped by NumPy.
    longest = min(inputs.shape[0 if time_major else -2], int(jnp.iinfo(lengths.dtype).max))
    clip: Any = jnp.clip if isinstance(lengths, jax.Array) else np.clip
    return jnp.asarray(clip(lengths, 0, longest).astype(np.int32))


def time_mask(inputs: jax.Array, lengths: jax.Array, time_major: bool) -> jax.Array:
    """Which steps count: bool (*batch, T, 1), or (T, *batch, 1) if time_major."""
    axis, batch = (0 if time_major else -1), lengths.ndim
    steps = jnp.arange(inputs.shape[0 if time_major else -2], dtype=lengths.dtype)
    steps = jnp.expand_dims(steps, range(1, batch + 1) if time_major else range(batch))
    return (steps < jnp.expand_dims(lengths, axis))[..., None]


def time_first(
    operation: str, inputs: Any, seq_lengths: Any, time_major: bool
) -> tuple[jax.Array, Any]:
    """Inputs (T, *batch, features), zero past their ends, and lengths (B,) in [0, T] or None."""
    inputs = arguments.as_array(operation, "inputs", inputs, 2)
    lengths = clipped_lengths(operation, inputs, seq_lengths, time_major)
    if lengths is not None:
        # The scan itself ignores padding, but the gradient of the input's weights is a sum over
        # all steps, in which 0 times NaN would be NaN.
        inputs = jnp.where(time_mask(inputs, lengths, time_major), inputs, 0)
        lengths = lengths.reshape(-1)
    return inputs if time_major else jnp.moveaxis(inputs, -2, 0), lengths


def check_resets(operation: str, resets: Any, shape: tuple[int, ...]) -> jax.Array:
    """Booleans of the inputs' shape without their features, or ValueError."""
    array = arguments.as_array(operation, "resets", resets, 1)
    if array.dtype != jnp.bool_ or array.shape != shape:
        raise ValueError(
            f"{operation}: resets must be booleans of shape {shape}, that of the inputs without "
            f"their features, got {array.dtype} of shape {array.shape}"
        )
    return array


def first_steps(
    operation: str, inputs: jax.Array, resets: Any, lengths: Any, time_major: bool
) -> Any:
    """Where episodes begin: bool (T, B), false past the ends of rows, or None for None.

    Args:
        operation: what errors name.
        inputs: ``(T, *batch, features)``.
        resets: as they were given.
        lengths: ``(B,)``, or None.
        time_major: whether resets are.
    """
    if resets is None:
        return None
    length, *batch, _ = inputs.shape
    shape = (length, *batch) if time_major else (*batch, length)
    resets = check_resets(operation, resets, shape)
    starts = resets if time_major else jnp.moveaxis(resets, -1, 0)
    starts = starts.reshape(length, math.prod(batch))
    if lengths is None:
        return starts
    # What stands in the padding begins no episode, so that before it none ends.
    return starts & time_mask(starts[..., None], lengths, True)[..., 0]


def last_steps(starts: Any) -> Any:
    """Where episodes that another one follows end: bool (T, B) of where they begin."""
    if starts is None:
        return None
    return jnp.concatenate([starts[1:], jnp.zeros_like(starts[:1])])


def time_restored(ys: jax.Array, batch: tuple[int, ...], time_major: bool) -> jax.Array:
    outputs = ys.reshape(ys.shape[0], *batch, ys.shape[-1])
    return outputs if time_major else jnp.moveaxis(outputs, 0, -2)
