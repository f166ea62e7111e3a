"""Training: the optimizer, the step and the score on one or several devices, and the loop."""

from __future__ import annotations

import argparse
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ..common.checkpoint import Checkpoints
from ..common.errors import UserError
from ..common.resumable import Loop, resumable
from ..common.timing import median_seconds
from .data import SCORING, TRAINING, Dataset, crops
from .model import Transformer

EVAL_BATCHES = 8
TIMED_CALLS = 10


def make_optimizer(peak: float, steps: int) -> optax.GradientTransformation:
    """AdamW on clipped gradients, with a warm-up and a cosine decay over all the steps."""
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, min(1000, steps // 10), steps)
    adamw = optax.adamw(rate, b2=0.98, weight_decay=0.01)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def choose_devices(batch: int, limit: int | None) -> list[jax.Device]:
    """As many devices as divide the batch, up to a limit."""
    available = jax.local_devices()
    if limit is not None and limit > len(available):
        raise UserError(f"--devices: expected at most {len(available)} here, got {limit}")
    most = min(batch, limit or len(available))
    return available[: next(n for n in range(most, 0, -1) if batch % n == 0)]


class State(NamedTuple):
    """What a training step changes."""

    params: nnx.State
    optimizer: optax.OptState


class ImageTrainer:
    """A model of images in training, by data parallelism.

    Parameters and mask are on all devices, batches are cut up. Both programs are compiled once,
    ahead of time: compiled programs tell how much memory they take, and the times of steps hold
    no compilation.
    """

    def __init__(
        self,
        model: Transformer,
        optimizer: optax.GradientTransformation,
        batch: int,
        devices: list[jax.Device],
    ):
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
        self.tokens = batch * 3 * model.size**2  # In a step.
        shape = (batch, 3 * model.size**2)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding)
        self.step_program = (
            jax.jit(step, donate_argnums=0, out_shardings=everywhere)
            .lower(self.state, self.constants, tokens)
            .compile()
        )
        self.score_program = (
            jax.jit(bits_per_dim, out_shardings=everywhere)
            .lower(self.state.params, self.constants, tokens)
            .compile()
        )

    def place(self, tokens: np.ndarray) -> Array:
        """Puts a batch on the devices."""
        return jax.device_put(tokens, self.batch_sharding)

    def step(self, tokens: Array) -> Array:
        """Updates the state; returns the loss before, in bits per dimension."""
        self.state, loss = self.step_program(self.state, self.constants, tokens)
        return loss

    def score(self, tokens: Array) -> Array:
        """The loss in bits per dimension."""
        return self.score_program(self.state.params, self.constants, tokens)


def training_batch(dataset: Dataset, args: argparse.Namespace, index: int) -> np.ndarray:
    """The crops of a step, which its index decides: a resumed run goes on with those to come."""
    seed = (args.seed, TRAINING, index)
    return crops(dataset.train, args.size, args.batch, dataset.scales, seed)


def train(
    trainer: ImageTrainer, dataset: Dataset, checkpoints: Checkpoints, args: argparse.Namespace
) -> Loop:
    """Trains up to the last step; returns the loop, which has the learning curve."""
    held_out = [
        crops(dataset.held_out, args.size, args.batch, dataset.scales, (args.seed, SCORING, index))
        for index in range(EVAL_BATCHES)
    ]

    def score() -> float:
        return float(np.mean([trainer.score(trainer.place(tokens)) for tokens in held_out]))

    run = resumable(trainer.state, checkpoints, args, unit="bits/dim", tokens=trainer.tokens)
    with run as (trainer.state, loop):
        if loop.score_is_due:  # That of a new run, before its first step.
            loop.record_score(score())
        tokens = trainer.place(training_batch(dataset, args, loop.step))
        for step in loop.steps():
            loss = trainer.step(tokens)
            # While the device works: the step above is only enqueued.
            tokens = trainer.place(training_batch(dataset, args, step + 1))
            loop.record_loss(loss)
            if loop.score_is_due:
                loop.record_score(score())
            if loop.saving_is_due:
                loop.save(trainer.state)
    return loop


def measure(trainer: ImageTrainer, batch: np.ndarray) -> dict[str, Any]:
    """Throughput and memory of both programs; some more steps are made.

    The batch is to be a real one: on equal tokens the gradient of their embedding adds up in one
    place.
    """
    tokens = trainer.place(batch)
    programs = {
        "forward": (trainer.score_program, lambda: trainer.score(tokens)),
        "training": (trainer.step_program, lambda: trainer.step(tokens)),
    }
    return {
        name: {
            "tokens_per_second": trainer.tokens / median_seconds(call, TIMED_CALLS),
            "peak_bytes": peak_bytes(program),
        }
        for name, (program, call) in programs.items()
    }


def peak_bytes(program: jax.stages.Compiled) -> int:
    """What a compiled program holds at most on one device, its arguments and results included."""
    memory = program.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
