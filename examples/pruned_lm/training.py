"""Training: batches of a text, the optimizer that prunes, the step, the score, and the loop."""

from __future__ import annotations

import argparse
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from jaxsparse.pruning import bits_to_masks, masks_to_bits, polynomial, prune

from ..common.checkpoint import Checkpoints
from ..common.resumable import Loop, resumable
from ..common.text import Corpus
from .model import GPT, PRUNED

WARM_UP = 0.05  # Of all steps.
SCORED = 16  # Windows at a time.


def pruning_steps(args: argparse.Namespace) -> tuple[int, int]:
    """The first and the last step that prunes."""
    first = max(round(args.prune_from * args.steps), 1)
    return first, max(round(args.prune_to * args.steps), first + 1)


def make_optimizer(sparsity: float, args: argparse.Namespace) -> optax.GradientTransformation:
    """AdamW on clipped gradients, with a warm-up and a cosine decay; it prunes from step to step.

    The schedule is that of Zhu and Gupta 2017, "To prune, or not to prune": fast at first, while
    the network has weights to spare.
    """
    rate = optax.warmup_cosine_decay_schedule(
        0.0, args.learning_rate, math.ceil(WARM_UP * args.steps), args.steps
    )
    adamw = optax.adamw(rate, b2=0.98, weight_decay=0.1)
    inner = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    if not sparsity:
        return inner
    begin, end = pruning_steps(args)
    schedule = polynomial(1 - sparsity, begin=begin, end=end, frequency=args.prune_every)
    return prune(inner, schedule, PRUNED, seed=args.seed)


class State(NamedTuple):
    """What a training step changes."""

    params: nnx.State
    optimizer: Any


class Windows(NamedTuple):
    """A text in overlapping windows, in which each token is predicted once.

    But for those of the first window, a token has half a window of text before it at least.
    """

    inputs: np.ndarray  # (windows, length)
    targets: np.ndarray
    counted: np.ndarray  # Which targets are no repetitions, and no padding.

    @classmethod
    def of(cls, before: np.ndarray, tokens: np.ndarray, length: int) -> Windows:
        """Of a text and the token before it."""
        half = max(length // 2, 1)
        count = 1 + max(0, -(-(len(tokens) - length) // half))
        padded = np.pad(np.concatenate([before, tokens]), (0, (count - 1) * half + length))
        starts = half * np.arange(count)[:, None]
        at = starts + np.arange(length)
        is_first_time = (at >= length - half + starts) | (starts == 0)
        return cls(padded[at], padded[at + 1], is_first_time & (at < len(tokens)))


@functools.partial(jax.jit, static_argnums=0)
def nats(graph: nnx.GraphDef, params: Any, inputs: Array, targets: Array, counted: Array) -> Array:
    """The loss added up over the targets that count."""
    logits = nnx.merge(graph, params)(inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(jnp.where(counted, losses, 0))


def score(graph: nnx.GraphDef, params: Any, windows: Windows) -> float:
    """The mean loss in nats on a text."""
    whole = -len(windows.inputs) % SCORED
    padded = [np.pad(x, ((0, whole), (0, 0))) for x in windows]
    batches = zip(*(x.reshape(-1, SCORED, x.shape[1]) for x in padded), strict=True)
    total = sum(float(nats(graph, params, *batch)) for batch in batches)
    return total / int(windows.counted.sum())


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_on_batch(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    state: State,
    inputs: Array,
    targets: Array,
) -> tuple[State, Array]:
    """Makes a training step; the loss, by token, is that before."""

    def loss(params: Any) -> Array:
        logits = nnx.merge(graph, params)(inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    updates, moments = optimizer.update(grads, state.optimizer, state.params)
    return State(optax.apply_updates(state.params, updates), moments), value


class Trainer:
    """A model in training, pruned to a sparsity while it trains; with 0 it stays dense."""

    def __init__(self, sparsity: float, vocabulary: int, args: argparse.Namespace):
        self.model = GPT(
            vocabulary,
            context=args.context,
            layers=args.layers,
            heads=args.heads,
            hidden=args.hidden,
            dtype=jnp.dtype(args.dtype),
            seed=args.seed,
        )
        self.optimizer = make_optimizer(sparsity, args)
        self.graph, params = nnx.split(self.model)
        # A copy, since a step gives the memory of its state to the next one. Committed to the
        # device, as restored states are: else a program is compiled for each.
        params = jax.tree.map(jnp.copy, params)
        state = State(params, self.optimizer.init(params))
        self.state = jax.device_put(state, jax.local_devices()[0])

    def step(self, batch: tuple[np.ndarray, np.ndarray]) -> Array:
        """Updates the state; returns the loss before, in nats per token."""
        self.state, loss = train_on_batch(self.graph, self.optimizer, self.state, *batch)
        return loss

    def score(self, windows: Windows) -> float:
        """The loss on a text, in nats per token."""
        return score(self.graph, self.state.params, windows)

    @property
    def trained(self) -> GPT:
        """The model with its parameters of now."""
        return nnx.merge(self.graph, jax.tree.map(jnp.copy, self.state.params))


def batch_of(corpus: Corpus, args: argparse.Namespace, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Passages from anywhere in the text, which the step decides, and the token after each token.

    So all models see the same ones, and a resumed run goes on with those to come.
    """
    rng = np.random.default_rng((args.seed, step))
    starts = rng.integers(0, len(corpus.train) - args.context, (args.batch, 1))
    at = starts + np.arange(args.context)
    return corpus.train[at], corpus.train[at + 1]


def train(
    sparsity: float,
    title: str,
    corpus: Corpus,
    windows: Windows,
    checkpoints: Checkpoints,
    args: argparse.Namespace,
) -> tuple[GPT, Loop]:
    """Trains a model up to its last step; returns it, and the loop with its learning curve."""
    trainer = Trainer(sparsity, len(corpus.vocabulary), args)
    # What is saved has a bit for each element of a mask.
    run = resumable(
        masks_to_bits(trainer.state),
        checkpoints,
        args,
        unit="nats/token",
        tokens=args.batch * args.context,
        title=title,
    )
    with run as (saved, loop):
        trainer.state = bits_to_masks(saved, trainer.state)
        if loop.score_is_due:  # That of a new run, before its first step.
            loop.record_score(trainer.score(windows))
        for step in loop.steps():
            loop.record_loss(trainer.step(batch_of(corpus, args, step)))
            if loop.score_is_due:
                loop.record_score(trainer.score(windows))
            if loop.saving_is_due:
                loop.save(masks_to_bits(trainer.state))
    return trainer.trained, loop
