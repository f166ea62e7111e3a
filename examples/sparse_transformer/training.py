"""The training loop."""

from __future__ import annotations

import argparse
import math
import signal
import time

import numpy as np
import optax

from .checkpoint import Checkpoints
from .data import SCORING, TRAINING, Dataset, crops
from .errors import UserError
from .interruption import Interrupted, stop_request
from .progress import Progress, progress_bar
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

    seconds: list[float] = []
    with (
        stop_request() as stop,
        progress_bar(progress.step, args.steps, args.quiet) as bar,
    ):
        if not progress.curve:
            progress.curve.append({"step": 0, "train": None, "held_out": score()})
        tokens = trainer.place(batch(progress.step))
        saved = progress.step if args.resume else None
        while progress.step < args.steps and not stop.number:
            start = time.perf_counter()
            result = trainer.step(tokens)
            # While the device works: the step above is only enqueued.
            tokens = trainer.place(batch(progress.step + 1))
            loss = float(result)
            seconds.append(time.perf_counter() - start)
            progress.step += 1
            if not math.isfinite(loss):
                raise UserError(
                    f"training: expected a finite loss, got {loss} at step {progress.step}; "
                    f"lower --learning-rate"
                )
            progress.losses.append(loss)
            last = progress.step == args.steps
            if last or progress.step % args.eval_every == 0:
                mean = float(np.mean(progress.losses))
                progress.curve.append({"step": progress.step, "train": mean, "held_out": score()})
                progress.losses.clear()
            if last or progress.step % args.checkpoint_every == 0:
                checkpoints.save(progress, trainer.state)
                saved = progress.step
            bar.set_postfix_str(
                f"{loss:.2f} bits/dim, held out {progress.curve[-1]['held_out']:.2f}, "
                f"{tokens.size / np.mean(seconds[-20:]):,.0f} tokens/s",
                refresh=False,
            )
            bar.update()
        if stop.number and saved != progress.step:
            checkpoints.save(progress, trainer.state)
    if stop.number:
        raise Interrupted(
            stop.number,
            f"stopped by {signal.Signals(stop.number).name} after step {progress.step} of "
            f"{args.steps}, which is saved; the same command with --resume goes on",
        )
    timed = seconds[1:] or seconds  # The first one loads the kernels.
    return float(tokens.size / np.median(timed)) if timed else None
