"""The recogniser, and the text that is decoded from its outputs.

A projection of the frames, recurrent layers with skips and norms, and a softmax over characters.
The layers run both ways in time, or forward only with a lookahead convolution on top.
"""

from __future__ import annotations

import operator
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxsparse.nn import (
    RNN,
    Bidirectional,
    GRUCell,
    LSTMCell,
    RecurrentCell,
    RecurrentStack,
    SimpleCell,
)

from .data import BLANK

MOST_FUTURE_MS = 800.0  # What a recogniser that answers while one speaks may wait for.


def clipped_relu(x: Array) -> Array:
    """The activation of Deep Speech 2, which bounds the state of a plain recurrent layer."""
    return jnp.clip(x, 0, 20)


def relu_cell(*sizes: int, **options: Any) -> RecurrentCell:
    """A recurrent layer without gates, whose outputs are not negative.

    Skips add such outputs up, and their means grow faster than what changes from step to step: the
    upper layers of a deep stack read little else. Those of tanh have means near 0.
    """
    return SimpleCell(*sizes, activation_fn=clipped_relu, **options)


CELLS = {"gru": GRUCell, "lstm": LSTMCell, "rnn_tanh": SimpleCell, "rnn_relu": relu_cell}
NORMS = {
    "layer": nnx.LayerNorm,
    "rms": nnx.RMSNorm,
    "batch": lambda *args, **options: nnx.BatchNorm(*args, momentum=0.9, **options),
    "none": lambda *args, **options: None,
}


def future_ms(lookahead: int, stride: int, frame_ms: float) -> float:
    """How far an output sees beyond the first frame of its step, looking so many steps ahead."""
    return (stride * (lookahead + 1) - 1) * frame_ms


class Lookahead(nnx.Module):
    r"""The row convolution of Deep Speech 2: each feature from some later steps.

    .. math:: y_t = \sum_{j=0}^{n} w_j * x_{t+j}

    It begins as the identity: random weights would first mix steps that stand for other sounds.
    """

    def __init__(self, features: int, steps: int, *, dtype: Any):
        self.steps, self.dtype = steps, dtype
        self.kernel = nnx.Param(jnp.zeros((steps + 1, features), jnp.float32).at[0].set(1))

    def __call__(self, x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, self.steps), (0, 0)))
        kernel = self.kernel.get_value().astype(self.dtype)
        return sum(kernel[j] * padded[:, j : j + x.shape[1]] for j in range(self.steps + 1))


class Recogniser(nnx.Module):
    """Scores of the characters, and of the blank, at each step of ``stride`` frames.

    Args:
        features: numbers in a frame.
        symbols: how many characters there are, and the blank.
        cell: a name in `CELLS`.
        hidden: units of a layer, each way.
        layers: how many.
        skip: a residual connection over every so many layers; 0 for none.
        norm: a name in `NORMS`: of what each layer reads.
        direction: "both" or "forward".
        lookahead: how many later steps the convolution reads, where the direction is forward.
        stride: frames in a step.
        recurrent_sparsity: share of the recurrent weights that are left out.
        dtype: of the computation.
        seed: of the parameters, and of the pattern of sparse ones.
    """

    def __init__(
        self,
        features: int,
        symbols: int,
        *,
        cell: str,
        hidden: int,
        layers: int,
        skip: int,
        norm: str,
        direction: str,
        lookahead: int,
        stride: int,
        recurrent_sparsity: float,
        dtype: Any,
        seed: int,
    ):
        rngs = nnx.Rngs(seed)
        self.stride = stride
        sparsity = {"recurrent_sparsity": recurrent_sparsity} if recurrent_sparsity else {}

        def layer() -> RNN:
            return RNN(CELLS[cell](hidden, hidden, dtype=dtype, rngs=rngs, **sparsity))

        def both_ways() -> Bidirectional:
            # Added up, as in Deep Speech: all layers have one width.
            return Bidirectional(layer(), layer(), merge_fn=operator.add)

        self.project = nnx.Linear(stride * features, hidden, dtype=dtype, rngs=rngs)
        make = both_ways if direction == "both" else layer
        self.stack = RecurrentStack(
            [make() for _ in range(layers)],
            norms=[NORMS[norm](hidden, dtype=dtype, rngs=rngs) for _ in range(layers)],
            skip=skip or None,
        )
        forward = direction == "forward"
        self.lookahead = Lookahead(hidden, lookahead, dtype=dtype) if forward else None
        self.norm = nnx.LayerNorm(hidden, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(hidden, symbols, dtype=dtype, rngs=rngs)

    def __call__(self, frames: Array, lengths: Array) -> tuple[Array, Array]:
        """Logits (batch, steps, symbols), and how many steps of each row count.

        Args:
            frames: (batch, frames, features), where the stride divides the frames.
            lengths: (batch,), in frames. What stands behind them reaches no step that counts.
        """
        batch, count, features = frames.shape
        real = jnp.arange(count) < lengths[:, None]
        x = jnp.where(real[..., None], frames, 0)
        x = x.reshape(batch, count // self.stride, self.stride * features)
        steps = -(-lengths // self.stride)
        x = self.stack(self.project(x), seq_lengths=steps)
        if self.lookahead is not None:
            x = self.lookahead(x)
        return self.head(self.norm(x)).astype(jnp.float32), steps


def decode(symbols: np.ndarray, alphabet: str) -> str:
    """The text of the likeliest symbol of each step: repeats count once, blanks not at all."""
    symbols = np.asarray(symbols)
    begins = np.diff(symbols, prepend=BLANK) != 0
    return "".join(alphabet[i - 1] for i in symbols[begins & (symbols != BLANK)])
