"""The trainer: losses, scores, checkpoints, the progress bar, and signals."""

from __future__ import annotations

import argparse
import math
import signal
import time
from typing import Any, Protocol

import numpy as np

from .checkpoint import Checkpoints
from .errors import UserError
from .interruption import Interrupted, stop_request
from .progress import Progress, progress_bar


class Task(Protocol):
    """What is trained: a model, its optimizer, and what they learn from."""

    unit: str  # Of the loss.
    tokens: int  # In a step.

    def step(self, index: int) -> Any:
        """Makes the step of an index from 0; returns the loss before, a scalar array."""

    def score(self) -> float:
        """The loss on what is held out."""

    @property
    def saved_state(self) -> Any:
        """What a checkpoint has of the state: a NamedTuple of trees of arrays."""

    def restore(self, saved: Any) -> None:
        """Goes on from a saved state."""


def train(
    task: Task, checkpoints: Checkpoints, args: argparse.Namespace, title: str = ""
) -> tuple[Progress, float | None]:
    """Trains a task up to its last step, from the newest checkpoint on if the run is resumed.

    Args:
        task: what is trained.
        checkpoints: where its state is saved, and whether it comes from there.
        args: the options ``steps``, ``eval_every``, ``checkpoint_every`` and ``quiet``.
        title: what the progress bar begins with.

    Returns:
        What was done, and the median of tokens per second, None if no step was left to do.

    Raises:
        Interrupted: if a signal asks to stop; the state is saved then.
        UserError: if the loss is not finite.
    """
    progress = Progress()
    if checkpoints.resume:
        progress, saved_state = checkpoints.restore(task.saved_state)
        task.restore(saved_state)
    saved_step = progress.step if checkpoints.resume else None
    seconds: list[float] = []
    with (
        stop_request() as stop,
        progress_bar(progress.step, args.steps, args.quiet, title) as bar,
    ):
        if not progress.curve:
            progress.curve.append({"step": 0, "train": None, "held_out": task.score()})
        while progress.step < args.steps and not stop.number:
            start = time.perf_counter()
            loss = float(task.step(progress.step))
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
                mean, held_out = float(np.mean(progress.losses)), task.score()
                progress.curve.append({"step": progress.step, "train": mean, "held_out": held_out})
                progress.losses.clear()
            if last or progress.step % args.checkpoint_every == 0:
                checkpoints.save(progress, task.saved_state)
                saved_step = progress.step
            bar.set_postfix_str(
                f"{loss:.2f} {task.unit}, held out {progress.curve[-1]['held_out']:.2f}, "
                f"{task.tokens / np.mean(seconds[-20:]):,.0f} tokens/s",
                refresh=False,
            )
            bar.update()
        if stop.number and saved_step != progress.step:
            checkpoints.save(progress, task.saved_state)
    if stop.number:
        raise Interrupted(
            stop.number,
            f"stopped by {signal.Signals(stop.number).name} after step {progress.step} of "
            f"{args.steps}{f' of {title}' if title else ''}, which is saved; the same command with "
            f"--resume goes on",
        )
    timed = seconds[1:] or seconds  # The first one loads the kernels.
    return progress, float(task.tokens / np.median(timed)) if timed else None
