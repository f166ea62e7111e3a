"""Tokens per second of a model: with the layers of Flax, with dense and with sparse ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.char_rnn.model import CharRNN, packed
from examples.char_rnn.training import State, TextTrainer, placed, score_window, train_on_window
from examples.char_rnn.windows import Windows
from examples.common.timing import median_seconds
from jaxsparse.nn import to_flax

TIMED_CALLS = 5
FORMS = ("jax.lax.scan", "dense", "sparse")
PROGRAMS = ("inference", "training")


def measure(trainer: TextTrainer, batch: int, tokens: Any) -> dict[str, dict[str, float]]:
    """Tokens per second of inference and training of all forms that a trained model has."""
    windows = Windows(tokens, batch, trainer.length)
    forms: dict[str, CharRNN] = {
        "jax.lax.scan": with_flax_layers(trainer.model),
        "dense": trainer.model,
    }
    if trainer.sparse_model is not None:
        forms["sparse"] = packed(trainer.sparse_model, batch)
    speeds: dict[str, dict[str, float]] = {name: {} for name in PROGRAMS}
    for form, model in forms.items():
        for program, seconds in _seconds(trainer, model, windows, batch).items():
            speeds[program][form] = batch * trainer.length / seconds
    return speeds


def _seconds(
    trainer: TextTrainer, model: CharRNN, windows: Windows, batch: int
) -> dict[str, float]:
    graph, params, constants = nnx.split(model, nnx.Param, ...)
    # Converted layers have no random numbers to make carries from.
    params, carries = placed((params, trainer.model.initialize_carries(batch)))
    window = windows[0]
    # A copy, since a step gives the memory of its state to the next one.
    copies = jax.tree.map(jnp.copy, (params, carries))
    state = placed(State(copies[0], trainer.inner.init(params), copies[1]))

    def infer() -> Any:
        return score_window(graph, params, constants, carries, window)

    def train() -> Any:
        nonlocal state
        state, loss = train_on_window(graph, trainer.inner, state, constants, window)
        return loss

    return {
        name: median_seconds(call, TIMED_CALLS)
        for name, call in zip(PROGRAMS, (infer, train), strict=True)
    }


def with_flax_layers(model: CharRNN) -> CharRNN:
    """A copy of a model whose recurrent layers are those of Flax, which are a jax.lax.scan."""
    copy = nnx.clone(model)
    copy.stack.layers = nnx.List([to_flax(layer) for layer in copy.stack.layers])
    return copy
