"""The state of training and the two compiled programs on it, over one or several devices."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ..common.errors import UserError
from .model import Transformer


class State(NamedTuple):
    """What a training step changes."""

    params: nnx.State
    optimizer: optax.OptState


def choose_devices(batch: int, limit: int | None) -> list[jax.Device]:
    """As many devices as divide the batch, up to a limit."""
    available = jax.local_devices()
    if limit is not None and limit > len(available):
        raise UserError(f"--devices: expected at most {len(available)} here, got {limit}")
    most = min(batch, limit or len(available))
    return available[: next(n for n in range(most, 0, -1) if batch % n == 0)]


class Trainer:
    """Trains a model by data parallelism: parameters and mask on all devices, the batch cut up.

    Both programs are compiled once, ahead of time: compiled programs tell how much memory they
    take, and the times of steps hold no compilation.
    """

    def __init__(
        self,
        model: Transformer,
        optimizer: optax.GradientTransformation,
        tokens: np.ndarray,
        devices: list[jax.Device],
    ):
        self.devices = devices
        mesh = jax.sharding.Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
        everywhere = NamedSharding(mesh, P())
        self.batch_sharding = NamedSharding(mesh, P("data"))
        graph, params, constants = nnx.split(model, nnx.Param, ...)

        def bits_per_dim(params: nnx.State, constants: nnx.State, tokens: Array) -> Array:
            logits = nnx.merge(graph, params, constants)(tokens)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
            return losses.mean() / math.log(2)

        def step(state: State, constants: nnx.State, tokens: Array) -> tuple[State, Array]:
            loss, grads = jax.value_and_grad(bits_per_dim)(state.params, constants, tokens)
            updates, moments = optimizer.update(grads, state.optimizer, state.params)
            return State(optax.apply_updates(state.params, updates), moments), loss

        # A copy, since a step gives the memory of its state to the next one.
        params = jax.tree.map(jnp.copy, params)
        self.state = jax.device_put(State(params, optimizer.init(params)), everywhere)
        self.constants = jax.device_put(constants, everywhere)
        batch = self.place(tokens)
        self.step_program = (
            jax.jit(step, donate_argnums=0, out_shardings=everywhere)
            .lower(self.state, self.constants, batch)
            .compile()
        )
        self.score_program = (
            jax.jit(bits_per_dim, out_shardings=everywhere)
            .lower(self.state.params, self.constants, batch)
            .compile()
        )

    def place(self, tokens: np.ndarray) -> Array:
        """Puts a batch on the devices."""
        return jax.device_put(tokens, self.batch_sharding)

    def step(self, batch: Array) -> Array:
        """Updates the state; returns the loss before, in bits per dimension."""
        self.state, loss = self.step_program(self.state, self.constants, batch)
        return loss

    def score(self, batch: Array) -> Array:
        """The loss in bits per dimension."""
        return self.score_program(self.state.params, self.constants, batch)
