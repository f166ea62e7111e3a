"""The recurrent cells: one jnp function each.

A cell is a function ``(x, r, carry) -> (carry, y)`` of the input's pre-activations ``x``, the
recurrent products ``r`` (one array for each gate, in tuples) and the carry, a pytree of arrays
whose last leaf is the state that the recurrent product takes. A cell with parameters of each unit
takes these, a pytree of arrays, too. It is pointwise: every array has the same shape, and each
element is computed from the elements at its own place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Cell = Callable[..., tuple[Any, Any]]


def name_of(cell: Cell) -> str:
    """What messages call a cell."""
    return str(getattr(cell, "__name__", type(cell).__name__))


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "identity": lambda x: x,
}
_ELMAN_CELLS: dict[Any, Cell] = {}


def elman(activation: str | Callable[[Any], Any] = "tanh") -> Cell:
    r"""The simple (Elman) cell; its carry is the state h.

    .. math:: h_t = \operatorname{activation}(x_t + r_t)

    Args:
        activation: "tanh", "relu", "sigmoid", "identity", or a pointwise jnp function. Equal
            activations give the same cell, so that nothing is compiled twice.

    >>> import jax.numpy as jnp
    >>> carry, y = elman("relu")((jnp.array([1.0, -2.0]),), (jnp.ones(2),), jnp.zeros(2))
    >>> y
    Array([2., 0.], dtype=float32)
    """
    known = isinstance(activation, str) and activation in ACTIVATIONS
    if not known and not callable(activation):
        raise ValueError(
            f"recurrent.elman: activation must be a function or one of {list(ACTIVATIONS)}, "
            f"got {activation!r}"
        )
    function = activation if callable(activation) else ACTIVATIONS[activation]
    if function in _ELMAN_CELLS:
        return _ELMAN_CELLS[function]

    def cell(x: Any, r: Any, h: Any) -> tuple[Any, Any]:
        (x,), (r,) = x, r
        h = function(x + r)
        return h, h

    cell.__name__ = f"elman({getattr(function, '__name__', activation)})"
    return _ELMAN_CELLS.setdefault(function, cell)


def GRU(x: Any, r: Any, h: Any) -> tuple[Any, Any]:
    r"""The gated recurrent unit of cuDNN and Flax; gates r z n, the reset after the product.

    .. math::
        r = \sigma(x_r + r_r), \quad z = \sigma(x_z + r_z), \quad
        n = \tanh(x_n + r\, r_n), \quad h' = n + z\,(h - n)

    Its carry is the state h. Source: Cho et al. 2014, "Learning Phrase Representations using RNN
    Encoder-Decoder", with the reset gate moved behind the product.
    """
    (x_reset, x_update, x_new), (r_reset, r_update, r_new) = x, r
    reset = jax.nn.sigmoid(x_reset + r_reset)
    update = jax.nn.sigmoid(x_update + r_update)
    new = jnp.tanh(x_new + reset * r_new)
    h = new + update * (h - new)
    return h, h


def LSTM(x: Any, r: Any, carry: Any) -> tuple[Any, Any]:
    r"""Long short-term memory; gates i f g o, the carry is (c, h).

    .. math::
        c' = \sigma(x_f + r_f)\, c + \sigma(x_i + r_i) \tanh(x_g + r_g), \quad
        h' = \sigma(x_o + r_o) \tanh(c')

    Source: Hochreiter and Schmidhuber 1997, "Long Short-Term Memory", with the forget gate of Gers
    et al. 2000.
    """
    i, f, g, o = (a + b for a, b in zip(x, r, strict=True))
    c, _ = carry
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (c, h), h


def SLSTM(x: Any, r: Any, carry: Any) -> tuple[Any, Any]:
    r"""The LSTM with an exponential input gate; gates i f z o, the carry is (c, n, m, h).

    .. math::
        \tilde\imath, \tilde f, \tilde z, \tilde o &= x + r \\
        k &= \log \sigma(\tilde f) + m, \text{ or } \tilde\imath \text{ where } n = 0 \\
        m' &= \max(\tilde\imath, k) \\
        c' &= e^{k - m'} c + e^{\tilde\imath - m'} \tanh(\tilde z), \quad
        n' = e^{k - m'} n + e^{\tilde\imath - m'} \\
        h' &= \sigma(\tilde o)\, c' / n'

    The stabiliser m keeps both exponentials at most 1, and changes nothing else: c and n are those
    of the formula without it, divided by :math:`e^m`. From a carry of zeros the first step sets
    :math:`m' = \tilde\imath` and :math:`n' = 1`, and n stays at least 1; a carry of your own should
    have such an n, or be zero in all of c, n and m. Beside ``xs`` of 16 bits c, n and m should be
    float32: a gradient keeps them so, and errors of m would grow with its size.

    Source: Beck et al. 2024, "xLSTM: Extended Long Short-Term Memory", with the sigmoid as forget
    gate; the first step as their code has it, here for each element.
    """
    i, f, z, o = (a + b for a, b in zip(x, r, strict=True))
    c, n, m, _ = carry
    kept = jnp.where(n == 0, i, jax.nn.log_sigmoid(f) + m)
    m = jnp.maximum(i, kept)
    write, keep = jnp.exp(i - m), jnp.exp(kept - m)
    c = keep * c + write * jnp.tanh(z)
    n = keep * n + write
    h = jax.nn.sigmoid(o) * c / n
    return (c, n, m, h), h
