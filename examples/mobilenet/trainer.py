"""Training of one MobileNet: dense, or pruned on the way."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from tqdm import tqdm

from jaxsparse.pruning import polynomial, prune

from ..common.checkpoint import Checkpoints
from ..common.resumable import Loop, resumable
from .data import CLASSES, Batch, Dataset, Held, batches, moved
from .model import POINTWISE, MobileNet

SCORED = 500  # Images at a time.
# Pruned from a tenth of the steps on to 6/10 of them, at so many steps; the rest is recovery.
BEGIN, END, TIMES = 0.1, 0.6, 20


class State(NamedTuple):
    """What training changes."""

    steps: Array  # How many were made.
    params: nnx.State
    statistics: nnx.State  # Of batch normalisation.
    optimizer: Any


@functools.cache  # Models of one size share what is compiled for an optimizer.
def make_optimizer(rate: float, steps: int, sparsity: float) -> optax.GradientTransformation:
    """AdamW under a cosine, which prunes the convolutions of 1 x 1 if there is a sparsity."""
    warm_up = max(1, steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warm_up, max(steps, warm_up + 1))
    optimizer = optax.adamw(schedule, weight_decay=0.01)
    if sparsity == 0:
        return optimizer
    begin = max(1, int(BEGIN * steps))
    end = max(begin + 1, int(END * steps))
    frequency = max(1, (end - begin) // TIMES)
    pruning = polynomial(1 - sparsity, begin=begin, end=end, frequency=frequency)
    return prune(optimizer, pruning, POINTWISE)


Leaves = list[Array]
Step = Callable[[Leaves, Held, Batch], tuple[Leaves, Array]]


@functools.cache  # Models of one size share it.
def make_step(graph: Any, optimizer: optax.GradientTransformation, structure: Any) -> Step:
    """A training step, which maps the leaves of a `State` to new ones.

    The loss, in nats per image, is that before. A call flattens its arguments: of leaves that takes
    microseconds, of a state of NNX milliseconds, as long as a GPU computes.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def step(leaves: Leaves, held: Held, batch: Batch) -> tuple[Leaves, Array]:
        state: State = jax.tree.unflatten(structure, leaves)
        images = held.normalised(moved(held.train.images, batch))
        labels = held.train.labels[batch.chosen]

        def loss(params: Any) -> tuple[Array, Any]:
            # A copy, which this trace changes.
            model = nnx.merge(graph, params, state.statistics, copy=True)
            model.train()
            losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
            return losses.mean(), nnx.state(model, nnx.BatchStat)

        (mean, statistics), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        updates, moments = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        new = State(state.steps + 1, params, statistics, moments)
        return structure.flatten_up_to(new), mean

    return step


@functools.partial(jax.jit, static_argnums=0)
def logits_of(graph: Any, state: Any, held: Held, first: int) -> Array:
    """What a model says of the `SCORED` test images from one on, or of the last so many."""
    model = nnx.merge(graph, state)
    model.eval()
    count = min(SCORED, len(held.test.images))
    images = jax.lax.dynamic_slice_in_dim(held.test.images, first, count)
    return model(held.normalised(images))


def score(model: MobileNet, dataset: Dataset, held: Held) -> dict[str, float]:
    """The loss on what is tested, and the share of images whose likeliest class is right."""
    graph, state = nnx.split(model)
    labels = dataset.test.labels
    starts = range(0, len(labels), SCORED)
    parts = [logits_of(graph, state, held, first) for first in starts]
    found = np.concatenate(
        [
            part[first - len(labels) :]
            for first, part in zip(starts, jax.device_get(parts), strict=True)
        ]
    ).astype(float)
    of_class = found[np.arange(len(labels)), labels]
    losses = np.logaddexp.reduce(found, axis=1) - of_class
    right = found.argmax(1) == labels
    return {"held_out": float(losses.mean()), "accuracy": float(right.mean())}


class Trainer:
    """A MobileNet in training."""

    def __init__(self, held: Held, args: argparse.Namespace):
        self.held = held
        _, resolution, _, channels = held.train.images.shape
        model = MobileNet(args.width, resolution, channels, CLASSES, seed=args.seed)
        self.graph, params, statistics = nnx.split(model, nnx.Param, ...)
        optimizer = make_optimizer(args.learning_rate, args.steps, args.sparsity)
        state = State(jnp.zeros((), int), params, statistics, optimizer.init(params))
        # Committed to the device, as restored states are: else a program is compiled for each.
        self.leaves, self.structure = jax.tree.flatten(
            jax.device_put(state, jax.local_devices()[0])
        )
        self.train = make_step(self.graph, optimizer, self.structure)

    @property
    def state(self) -> State:
        """What training changes."""
        state: State = jax.tree.unflatten(self.structure, self.leaves)
        return state

    @state.setter
    def state(self, state: State) -> None:
        self.leaves = self.structure.flatten_up_to(state)

    @property
    def model(self) -> MobileNet:
        """The model as it is now."""
        state = self.state
        model: MobileNet = nnx.merge(
            self.graph, *jax.tree.map(jnp.copy, (state.params, state.statistics))
        )
        return model

    def step(self, batch: Batch) -> Array:
        """Updates the state; returns the loss before."""
        self.leaves, loss = self.train(self.leaves, self.held, batch)
        return loss


def compile_ahead(
    runs: Sequence[argparse.Namespace], dataset: Dataset, held: Held, bar: tqdm
) -> None:
    """Makes a first step of each size of models, and a score, by threads: they compile at once.

    Args:
        runs: those to come, no two of one size.
        dataset, held: what they learn from.
        bar: counts the sizes.
    """

    def run(args: argparse.Namespace) -> None:
        trainer = Trainer(held, args)
        trainer.train(trainer.leaves, held, next(batches(dataset, args.batch, args.seed, 0)))
        score(Trainer(held, args).model, dataset, held)

    # Two threads that make one optimizer at once get one each, as the cache has no lock, and steps
    # of another optimizer than the cached one would be compiled again.
    for each in runs:
        make_optimizer(each.learning_rate, each.steps, each.sparsity)
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        for future in as_completed([pool.submit(run, each) for each in runs]):
            future.result()
            bar.update()
    finally:
        pool.shutdown(cancel_futures=True)


def train(
    dataset: Dataset, held: Held, checkpoints: Checkpoints, args: argparse.Namespace
) -> tuple[MobileNet, Loop]:
    """Trains up to the last step; returns the model and the loop, which has the learning curve."""
    trainer = Trainer(held, args)
    run = resumable(
        trainer.state,
        checkpoints,
        args,
        unit="nats/image",
        counted="images",
        tokens=args.batch,
        title=args.title,
    )
    with run as (trainer.state, loop):
        if loop.score_is_due:  # That of a new run, before its first step.
            loop.record_score(**score(trainer.model, dataset, held))
        each = batches(dataset, args.batch, args.seed, loop.step)
        for _ in loop.steps():
            loop.record_loss(trainer.step(next(each)))
            if loop.score_is_due:
                loop.record_score(**score(trainer.model, dataset, held))
            if loop.saving_is_due:
                loop.save(trainer.state)
    return trainer.model, loop
