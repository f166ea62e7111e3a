"""Recurrent layers from the flat weights of jax.experimental.rnn, and back."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.nn.cells import LSTMCell
from jaxsparse.nn.gate_matrices import Layer, Matrices, layers_of, matrices_of
from jaxsparse.nn.linear import as_integer
from jaxsparse.ops import arguments


def from_jax_rnn(
    weights: Any,
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bidirectional: bool,
    *,
    dropout: float = 0.0,
    time_major: bool = False,
    return_carry: bool = False,
    dtype: Any = None,
    rngs: Any = None,
    **options: Any,
) -> Layer:
    r"""The layer that computes what jax.experimental.rnn.lstm computes.

    Its weights are one array in cuDNN's layout. For each layer, and for each direction of it,
    :math:`W_{ih}` (4 h, k) and :math:`W_{hh}` (4 h, h) follow each other row by row; after all of
    them come :math:`b_{ih}` and :math:`b_{hh}` likewise. The gates lie in the order i f g o.

    That function takes h_0 and c_0, stacked over layers and directions; here each layer's carry is
    (c, h), and without one it is zeros. ``seq_lengths`` means the same.

    Args:
        weights: ``(n,)``, as of jax.experimental.rnn.init_lstm_weight. It is copied.
        input_size, hidden_size, num_layers, bidirectional: as there.
        dropout: the rate between layers.
        time_major: time is the first dimension, not the last but one; there it never is.
        return_carry: calls return (carry, outputs).
        dtype: of the computation, as in `RecurrentCell`.
        rngs: random keys for dropout, as in `RecurrentStack`.
        options: of the scans: ``recompute``, ``implementation``, ``variant``.

    Returns:
        An `RNN`, or a `Bidirectional`, of an `LSTMCell`; several as a `RecurrentStack`.

    Raises:
        TypeError: for weights that are no array of a floating dtype, and sizes that are no
            integers.
        ValueError: for sizes below 1, and weights that are not as many as these sizes have.

    >>> weights = jax.random.normal(jax.random.key(0), (4 * 5 * (3 + 5) + 8 * 5,)) / 3
    >>> layer = from_jax_rnn(weights, 3, 5, 1, bidirectional=False)
    >>> layer(jnp.ones((2, 7, 3))).shape
    (2, 7, 5)
    >>> bool((to_jax_rnn(layer) == weights).all())
    True
    """
    sizes = {"input_size": input_size, "hidden_size": hidden_size, "num_layers": num_layers}
    for name, size in sizes.items():
        sizes[name] = as_integer("from_jax_rnn", name, size)
        if sizes[name] < 1:
            raise ValueError(f"from_jax_rnn: {name} must be at least 1, got {size}")
    shapes = _shapes(**sizes, bidirectional=bool(bidirectional))
    weights = arguments.as_array("from_jax_rnn", "weights", weights, 1)
    arguments.check_floating("from_jax_rnn", weights=weights)
    count = sum(math.prod(shape) for *_, shape in shapes)
    if weights.shape != (count,):
        raise ValueError(
            f"from_jax_rnn: weights must have shape ({count},) for "
            f"{', '.join(f'{name}={size}' for name, size in sizes.items())} and bidirectional="
            f"{bool(bidirectional)}, got {weights.shape}"
        )
    matrices: dict[tuple[int, bool], Matrices] = {}
    start = 0
    for key, kind, shape in shapes:
        end = start + math.prod(shape)
        matrices.setdefault(key, {})[kind] = jnp.copy(weights[start:end].reshape(shape))
        start = end
    return layers_of(
        "from_jax_rnn",
        matrices,
        dropout=dropout,
        time_major=time_major,
        return_carry=return_carry,
        dtype=dtype,
        rngs=rngs,
        options=options,
    )


def to_jax_rnn(layer: Any) -> jax.Array:
    """The weights with which jax.experimental.rnn.lstm computes what a layer computes.

    Sparse weights are written out densely, and biases that are missing are zeros.

    Args:
        layer: an `RNN` or `Bidirectional` of `LSTMCell`, or a `RecurrentStack` of such layers.

    Returns:
        ``(n,)``, in the layout that :func:`from_jax_rnn` tells. jax.experimental.rnn takes float32.

    Raises:
        TypeError, ValueError: as `to_torch`, and for cells other than `LSTMCell`.

    >>> from flax import nnx
    >>> from jaxsparse.nn import RNN
    >>> to_jax_rnn(RNN(LSTMCell(3, 5, recurrent_sparsity=0.5, rngs=nnx.Rngs(0)))).shape
    (200,)
    """
    matrices = matrices_of("to_jax_rnn", layer, (LSTMCell,), biased=True)
    return jnp.concatenate(
        [
            of_layer[kind].reshape(-1)
            for together in _ORDER
            for of_layer in matrices.values()
            for kind in together
        ]
    )


# All matrices come before all biases.
_ORDER = (("weight_ih", "weight_hh"), ("bias_ih", "bias_hh"))


def _shapes(
    input_size: int, hidden_size: int, num_layers: int, bidirectional: bool
) -> list[tuple[tuple[int, bool], str, tuple[int, ...]]]:
    """Layer and direction, kind and shape of each part of the weights, in their order."""
    sides = (False, True) if bidirectional else (False,)
    parts: list[tuple[tuple[int, bool], str, tuple[int, ...]]] = []
    rows = 4 * hidden_size
    for together in _ORDER:
        for layer, backward in itertools.product(range(num_layers), sides):
            features = input_size if layer == 0 else len(sides) * hidden_size
            shapes = {"weight_ih": (rows, features), "weight_hh": (rows, hidden_size)}
            parts += [((layer, backward), kind, shapes.get(kind, (rows,))) for kind in together]
    return parts
