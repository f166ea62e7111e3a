"""Text drawn from a model, token by token."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from .model import CharRNN


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _sample(
    graph: nnx.GraphDef, state: Any, prompt: Array, length: int, temperature: float, key: Array
) -> Array:
    model = nnx.merge(graph, state)

    def step(carry: Any, step_key: Array) -> tuple[Any, Array]:
        carries, logits = carry
        # The limit of low temperatures is the likeliest token.
        drawn = (
            jax.random.categorical(step_key, logits / temperature)
            if temperature
            else jnp.argmax(logits, -1)
        )
        carries, after = model(drawn[:, None], carries)
        return (carries, after[:, 0]), drawn[0]

    carries, logits = model(prompt[None], model.initialize_carries(1))
    return jax.lax.scan(step, (carries, logits[:, -1]), jax.random.split(key, length))[1]


def sample(
    model: CharRNN, prompt: np.ndarray, *, length: int, temperature: float, seed: int
) -> np.ndarray:
    """Draws tokens after a prompt; lower temperatures make the likely ones likelier."""
    graph, state = nnx.split(model)
    return np.asarray(
        _sample(graph, state, jnp.asarray(prompt), length, temperature, jax.random.key(seed))
    )
