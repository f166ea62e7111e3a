"""Text drawn from a model, token by token, and the picture of its learning curve."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from matplotlib.figure import Figure

from ..common.program import replacing
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


def draw(
    path: Path, title: str, curve: list[dict[str, Any]], parts: dict[str, tuple[int, int]]
) -> None:
    """Draws a learning curve, and the first and the last step of the parts of training."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    ax = figure.subplots()
    for name in ("train", "held_out"):
        label = name.replace("_", " ")
        ax.plot([x["step"] for x in curve], [x[name] for x in curve], "o-", label=label)
    for i, (name, steps) in enumerate(parts.items()):
        ax.axvspan(*steps, alpha=0.15, color=f"C{i + 2}", linewidth=0, label=name)
    ax.set(xlabel="step", title=f"{title}: bits per character")
    ax.grid(alpha=0.3)
    ax.legend()
    with replacing(path) as aside:
        figure.savefig(aside, dpi=120)
