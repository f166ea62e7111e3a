"""Numbers of 8 bits with a scale for each row, in place of wider ones."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}
"""The dtypes, and the largest number of each that is used: int8 has as many below 0 as above."""


NO_DERIVATIVES = (
    "Packed: numbers of 8 bits and their scales have no derivatives, only x has: train in 16 bits "
    "or more, and pack what comes of it"
)


@functools.partial(jax.jit, static_argnames=("m", "dtype"))
def quantized(
    values: jax.Array, row_indices: jax.Array, *, m: int, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    r"""Numbers q of 8 bits and scales s of rows, so that :math:`v \approx s_i\,q`.

    .. math:: s_i = \max_j |v_{ij}| / L, \qquad q_{ij} = \mathrm{round}(v_{ij} / s_i)

    L is the largest number of the dtype. Numbers are rounded to the nearest, so each is off by half
    a step at most: of int8 :math:`s_i / 2`, of float8_e4m3fn a 16th of the number, or where that is
    less :math:`2^{-10} s_i`.

    Args:
        values: ``(nse,)``.
        row_indices: ``(nse,)``, m for padding.
        m: how many rows there are.
        dtype: one of `LARGEST`.

    Returns:
        q ``(nse,)``, s ``(m,)`` in float32. A row of zeros has scale 0. One with a number that is
        not finite, or does not fit float32, has scale NaN, and none of its numbers is 0.

    Raises:
        TypeError: if a derivative in values is asked for.
    """
    made: tuple[jax.Array, jax.Array] = _rounded(values, row_indices, m, dtype)
    return made


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _rounded(
    values: jax.Array, row_indices: jax.Array, m: int, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    if m == 0:  # nothing can be gathered from no scales
        return jnp.zeros(values.shape, dtype), jnp.zeros(m, jnp.float32)
    values = values.astype(jnp.float32)
    finite = jnp.isfinite(values)
    magnitude = jnp.zeros(m, jnp.float32).at[row_indices]
    most = magnitude.max(jnp.where(finite, jnp.abs(values), 0), mode="drop")
    bad = jnp.zeros(m, bool).at[row_indices].max(~finite, mode="drop")
    # Where steps would be less than float32's least, they are that.
    least = jnp.finfo(jnp.float32).tiny
    scales = jnp.where(most > 0, jnp.maximum(most / LARGEST[dtype], least), 0)
    scales = jnp.where(bad, jnp.nan, scales)
    scale = scales.at[row_indices].get(mode="fill", fill_value=0)
    exact = jnp.where(scale > 0, values / scale, jnp.where(jnp.isnan(scale), 1, 0))
    if jnp.issubdtype(dtype, jnp.integer):
        exact = jnp.round(exact)
    return exact.astype(dtype), scales


def _refuse(m: int, dtype: Any, primals: Any, tangents: Any) -> Any:
    """Rounding has derivative 0, and scales follow one number of each row: of no use to anyone."""
    if not isinstance(tangents[0], SymbolicZero):
        raise TypeError(NO_DERIVATIVES)
    numbers, scales = _rounded(*primals, m, dtype)
    whole = jnp.issubdtype(dtype, jnp.integer)
    zeros = np.zeros(numbers.shape, jax.dtypes.float0) if whole else jnp.zeros_like(numbers)
    return (numbers, scales), (zeros, jnp.zeros_like(scales))


_rounded.defjvp(_refuse, symbolic_zeros=True)


@jax.custom_jvp
def dequantized(numbers: jax.Array, scales: jax.Array) -> jax.Array:
    """The matrix (m, k) in float32 of numbers and of scales of rows; what is 0 stays 0.

    Args:
        numbers: ``(m, k)`` of 8 bits.
        scales: float32 ``(m,)``.

    Raises:
        TypeError: if a derivative is asked for.
    """
    wide = numbers.astype(jnp.float32)
    return jnp.where(wide != 0, wide * scales[:, None], 0)


def _refuse_wide(primals: Any, tangents: Any) -> Any:
    if not all(isinstance(tangent, SymbolicZero) for tangent in tangents):
        raise TypeError(NO_DERIVATIVES)
    wide = dequantized(*primals)
    return wide, jnp.zeros_like(wide)


dequantized.defjvp(_refuse_wide, symbolic_zeros=True)
