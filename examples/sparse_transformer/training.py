"""Training: the optimizer, the batches, and the score."""

from __future__ import annotations

import argparse

import numpy as np
import optax
from jax import Array

from ..common import training as loop
from ..common.checkpoint import Checkpoints
from ..common.progress import Progress
from .data import SCORING, TRAINING, Dataset, crops
from .trainer import Trainer

EVAL_BATCHES = 8


def make_optimizer(peak: float, steps: int) -> optax.GradientTransformation:
    """AdamW on clipped gradients, with a warm-up and a cosine decay over all the steps."""
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, min(1000, steps // 10), steps)
    adamw = optax.adamw(rate, b2=0.98, weight_decay=0.01)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def train(
    trainer: Trainer,
    dataset: Dataset,
    progress: Progress,
    checkpoints: Checkpoints,
    args: argparse.Namespace,
) -> float | None:
    """Trains up to ``args.steps``; returns the median of tokens per second, None without a step.

    Raises Interrupted if a signal asks to stop.
    """

    def batch(index: int) -> np.ndarray:
        seed = (args.seed, TRAINING, index)
        return crops(dataset.train, args.size, args.batch, dataset.scales, seed)

    held_out = [
        crops(dataset.held_out, args.size, args.batch, dataset.scales, (args.seed, SCORING, i))
        for i in range(EVAL_BATCHES)
    ]

    def score() -> float:
        return float(np.mean([trainer.score(trainer.place(tokens)) for tokens in held_out]))

    ready = trainer.place(batch(progress.step))

    def step(index: int) -> Array:
        nonlocal ready
        loss = trainer.step(ready)
        # While the device works: the step above is only enqueued.
        ready = trainer.place(batch(index + 1))
        return loss

    return loop.train(
        progress,
        steps=args.steps,
        step=step,
        score=score,
        save=lambda: checkpoints.save(progress, trainer.state),
        resumed=args.resume,
        tokens=ready.size,
        unit="bits/dim",
        eval_every=args.eval_every,
        checkpoint_every=args.checkpoint_every,
        quiet=args.quiet,
    )
