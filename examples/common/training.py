"""The training loop: losses, scores, checkpoints, the progress bar, and signals."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import UserError
from .interruption import Interrupted, stop_request
from .progress import Progress, progress_bar


def train(
    progress: Progress,
    *,
    steps: int,
    step: Callable[[int], Any],
    score: Callable[[], float],
    save: Callable[[], None],
    resumed: bool,
    tokens: int,
    unit: str,
    eval_every: int,
    checkpoint_every: int,
    quiet: bool,
    title: str = "",
) -> float | None:
    """Trains up to ``steps``; returns the median of tokens per second, None without a step.

    Args:
        progress: what was done, which is kept up to date.
        steps: how many there are in all.
        step: of an index from 0: makes it, and returns the loss before, a scalar array.
        score: the loss on what is held out.
        save: makes a checkpoint.
        resumed: whether the state comes from a checkpoint.
        tokens: how many there are in a step.
        unit: of the loss.
        eval_every: steps between scores.
        checkpoint_every: steps between checkpoints.
        quiet: shows no bar.
        title: what the bar begins with.

    Raises:
        Interrupted: if a signal asks to stop; the state is saved then.
        UserError: if the loss is not finite.
    """
    seconds: list[float] = []
    with (
        stop_request() as stop,
        progress_bar(progress.step, steps, quiet, title) as bar,
    ):
        if not progress.curve:
            progress.curve.append({"step": 0, "train": None, "held_out": score()})
        saved = progress.step if resumed else None
        while progress.step < steps and not stop.number:
            start = time.perf_counter()
            loss = float(step(progress.step))
            seconds.append(time.perf_counter() - start)
            progress.step += 1
            if not math.isfinite(loss):
                raise UserError(
                    f"training: expected a finite loss, got {loss} at step {progress.step}; "
                    f"lower --learning-rate"
                )
            progress.losses.append(loss)
            last = progress.step == steps
            if last or progress.step % eval_every == 0:
                mean = float(np.mean(progress.losses))
                progress.curve.append({"step": progress.step, "train": mean, "held_out": score()})
                progress.losses.clear()
            if last or progress.step % checkpoint_every == 0:
                save()
                saved = progress.step
            bar.set_postfix_str(
                f"{loss:.2f} {unit}, held out {progress.curve[-1]['held_out']:.2f}, "
                f"{tokens / np.mean(seconds[-20:]):,.0f} tokens/s",
                refresh=False,
            )
            bar.update()
        if stop.number and saved != progress.step:
            save()
    if stop.number:
        raise Interrupted(
            stop.number,
            f"stopped by {signal.Signals(stop.number).name} after step {progress.step} of "
            f"{steps}{f' of {title}' if title else ''}, which is saved; the same command with "
            f"--resume goes on",
        )
    timed = seconds[1:] or seconds  # The first one loads the kernels.
    return float(tokens / np.median(timed)) if timed else None
