"""Training: the optimizer, the compiled step over one or several devices, and a run as a whole."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxsparse.nn import SparseAttention

from ..common.checkpoint import Checkpoints
from ..common.errors import UserError
from ..common.training import train
from .data import DRAWING, SCORING, TRAINING, Dataset, crops
from .drawing import complete_and_generate, draw, padded_rows
from .model import Transformer, dense_attention, make_topology

NAME = "sparse_transformer"
EVAL_BATCHES = 8
MEMORY_OPTIONS = "--batch, --size, --hidden, --layers or --samples"

# What decides the parameters and the loss curve: a resumed run must agree in these. The number of
# devices is left out, as it changes no more than rounding.
TRAINING_OPTIONS = (
    "data", "attention", "size", "layers", "heads", "hidden", "filter", "band", "sparsity", "batch",
    "steps", "learning_rate", "dtype", "eval_every", "seed",
)  # fmt: skip


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


class ImageTask:
    """What the trainer trains: a model of images, by data parallelism.

    Parameters and mask are on all devices, the batch is cut up. Both programs are compiled once,
    ahead of time: compiled programs tell how much memory they take, and the times of steps hold
    no compilation.
    """

    unit = "bits/dim"

    def __init__(
        self,
        model: Transformer,
        optimizer: optax.GradientTransformation,
        batch: Callable[[int], np.ndarray],
        held_out: list[np.ndarray],
        devices: list[jax.Device],
    ):
        """Takes the batch of a step by its index, and the batches to score by."""
        self.batch, self.held_out = batch, held_out
        self.tokens = held_out[0].size
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
        tokens = self.place(held_out[0])
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
        self.next_batch: Array | None = None

    def place(self, tokens: np.ndarray) -> Array:
        """Puts a batch on the devices."""
        return jax.device_put(tokens, self.batch_sharding)

    def step_on(self, tokens: Array) -> Array:
        """Updates the state; returns the loss before, in bits per dimension."""
        self.state, loss = self.step_program(self.state, self.constants, tokens)
        return loss

    def score_on(self, tokens: Array) -> Array:
        """The loss in bits per dimension."""
        return self.score_program(self.state.params, self.constants, tokens)

    def step(self, index: int) -> Array:
        """Makes the step of an index, the one after the last; returns the loss before."""
        ready = self.place(self.batch(index)) if self.next_batch is None else self.next_batch
        loss = self.step_on(ready)
        # While the device works: the step above is only enqueued.
        self.next_batch = self.place(self.batch(index + 1))
        return loss

    def score(self) -> float:
        """The mean loss on what is held out."""
        return float(np.mean([self.score_on(self.place(tokens)) for tokens in self.held_out]))

    @property
    def saved_state(self) -> State:
        """What a checkpoint has."""
        return self.state

    def restore(self, saved: State) -> None:
        """Goes on from a saved state."""
        self.state = saved


def print_setup(dataset: Dataset, devices: list[jax.Device]) -> None:
    """Tells what a run works on."""
    count = jax.local_device_count()
    print(f"device: {devices[0].device_kind}, {len(devices)} of {count} used")
    print(f"data: {dataset.description}", flush=True)


def checkpoints_of(args: argparse.Namespace) -> Checkpoints:
    """The checkpoints of a run, which only one with the same training may resume."""
    options = {name: getattr(args, name) for name in TRAINING_OPTIONS}
    options["data"] = str(args.data.resolve()) if args.data else None
    return Checkpoints(NAME, args.output / "checkpoints", options)


def train_and_draw(
    args: argparse.Namespace,
    dataset: Dataset,
    devices: list[jax.Device],
    checkpoints: Checkpoints,
) -> tuple[dict[str, Any], ImageTask]:
    """Trains one model and draws its picture; returns its metrics, and what was trained."""
    topology = None
    if args.attention == "sparse":
        topology = make_topology(args.size, args.band, args.sparsity, args.seed)
    model = Transformer(
        dense_attention if topology is None else SparseAttention(topology),
        size=args.size,
        layers=args.layers,
        heads=args.heads,
        hidden=args.hidden,
        mlp=args.filter,
        dtype=jnp.dtype(args.dtype),
        seed=args.seed,
    )
    if not args.quiet:
        parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
        print(f"model: {parameters:,} parameters on sequences of {3 * args.size**2:,} bytes")
        print(f"mask: {topology or 'dense, causal'}", flush=True)

    def batch(index: int) -> np.ndarray:
        seed = (args.seed, TRAINING, index)
        return crops(dataset.train, args.size, args.batch, dataset.scales, seed)

    def held_out(stream: int, index: int, count: int) -> np.ndarray:
        seed = (args.seed, stream, index)
        return crops(dataset.held_out, args.size, count, dataset.scales, seed)

    scoring = [held_out(SCORING, index, args.batch) for index in range(EVAL_BATCHES)]
    optimizer = make_optimizer(args.learning_rate, args.steps)
    task = ImageTask(model, optimizer, batch, scoring, devices)
    progress, speed = train(task, checkpoints, args)

    nnx.update(model, jax.device_put(task.state.params, devices[0]))
    rows = None if topology is None else padded_rows(topology)
    originals = held_out(DRAWING, 0, args.samples)
    images = complete_and_generate(model, originals, rows, args.seed)
    picture = args.output / f"{args.attention}_transformer.png"
    draw(picture, images, args.size, topology, progress.curve)
    before, after = (progress.curve[i]["held_out"] for i in (0, -1))
    pace = "" if speed is None else f", {speed:,.0f} tokens/s"
    print(
        f"{args.attention}, held out: {before:.3f} -> {after:.3f} bits/dim in {progress.step} "
        f"steps{pace}; picture: {picture}"
    )
    result = {"steps": progress.step, "curve": progress.curve}
    if speed is not None:  # None where a finished run was resumed: no step was timed.
        result["tokens_per_second"] = speed
    return result, task
