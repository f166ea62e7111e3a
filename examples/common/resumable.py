"""Training that a signal may stop and ``--resume`` goes on with, and that shows how far it is.

A loop of one's own has the same steps with ``for step in range(steps)``, and nothing of this.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import math
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from tqdm import tqdm

from .checkpoint import Checkpoints, Progress, State
from .errors import DivergedError
from .interruption import Interrupted, StopRequest, stop_request


@contextlib.contextmanager
def resumable(
    state: State,
    checkpoints: Checkpoints,
    args: argparse.Namespace,
    *,
    unit: str,
    tokens: int,
    counted: str = "tokens",
    title: str = "",
) -> Iterator[tuple[State, Loop]]:
    """Gives the state to begin with, which is the saved one if the run is resumed, and the loop.

    Args:
        state: that of a new run, a NamedTuple of trees of arrays.
        checkpoints: where the state is saved, and whether it comes from there.
        args: the options ``steps``, ``eval_every``, ``checkpoint_every`` and ``quiet``.
        unit: of the loss.
        tokens: in a step.
        counted: what these are.
        title: what the progress bar begins with.
    """
    progress = Progress()
    if checkpoints.resume:
        progress, state = checkpoints.restore(state)
    with (
        stop_request() as stop,
        progress_bar(progress.step, args.steps, args.quiet, title) as bar,
    ):
        saved_step = progress.step if checkpoints.resume else None
        yield (
            state,
            Loop(progress, checkpoints, args, unit, tokens, counted, title, stop, bar, saved_step),
        )


@dataclasses.dataclass
class Loop:
    """The steps that are left, with the losses and scores of all."""

    progress: Progress
    checkpoints: Checkpoints
    args: argparse.Namespace
    unit: str
    tokens: int
    counted: str
    title: str
    stop: StopRequest
    bar: tqdm
    saved_step: int | None  # The last one that is in a checkpoint.
    start: float = 0.0  # Of the step in flight, in seconds.
    seconds: list[float] = dataclasses.field(default_factory=list)  # Of each step.
    loss: float = math.nan  # Of the last step.

    @property
    def step(self) -> int:
        """How many steps are done, and the index of the next one."""
        return self.progress.step

    @property
    def curve(self) -> list[dict[str, Any]]:
        """The scores so far: points of step, train, held_out and what else was recorded."""
        return self.progress.curve

    def steps(self) -> Iterator[int]:
        """The index of each step to make.

        Raises:
            Interrupted: if a signal asks to stop; the state is saved then.
        """
        # When stopped before anything is saved, one more step is made: its state is.
        while not (self.stop.number and self.saved_step == self.step):
            if self.step == self.args.steps or self.progress.ended:
                return
            self.start = time.perf_counter()
            yield self.step
            self.bar.set_postfix_str(
                f"{self.loss:.2f} {self.unit}, held out "
                f"{self.curve[-1]['held_out']:.2f}, "
                f"{self.tokens / np.mean(self.seconds[-20:]):,.0f} {self.counted}/s",
                refresh=False,
            )
            self.bar.update()
        raise Interrupted(
            self.stop.number,
            f"stopped by {signal.Signals(self.stop.number).name} after step {self.step} of "
            f"{self.args.steps}{f' of {self.title}' if self.title else ''}, which is saved; the "
            f"same command with --resume goes on",
        )

    def record_loss(self, loss: Any) -> None:
        """Takes the loss of the step, once the device has it.

        Raises:
            DivergedError: if it is not finite.
        """
        self.loss = float(loss)
        self.seconds.append(time.perf_counter() - self.start)
        self.progress.step += 1
        if not math.isfinite(self.loss):
            raise DivergedError(
                f"training: expected a finite loss, got {self.loss} at step {self.step}; "
                f"lower --learning-rate"
            )
        self.progress.losses.append(self.loss)

    @property
    def score_is_due(self) -> bool:
        """Whether a score is to be recorded now: at the start, every so often, and at the end."""
        if self.curve and self.curve[-1]["step"] == self.step:
            return False
        return self._is_due(self.args.eval_every)

    def record_score(self, held_out: float, **others: float) -> None:
        """Takes the loss on what is held out, and other scores by their names."""
        losses = self.progress.losses
        mean = float(np.mean(losses)) if losses else None
        self.curve.append({"step": self.step, "train": mean, "held_out": held_out, **others})
        losses.clear()

    def end(self) -> None:
        """Makes this step the last one, for early stopping."""
        self.progress.ended = True

    @property
    def saving_is_due(self) -> bool:
        """Whether the state is to be saved now: every so often, at the end, and when stopped."""
        ends = bool(self.stop.number) or self.progress.ended
        return ends or self._is_due(self.args.checkpoint_every)

    def save(self, state: State) -> None:
        """Writes a checkpoint of the state after the steps so far."""
        self.checkpoints.save(self.progress, state)
        self.saved_step = self.step

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.args.steps

    @property
    def tokens_per_second(self) -> float | None:
        """The median over the steps of this program; None if none was left to make."""
        timed = self.seconds[1:] or self.seconds  # The first one loads the kernels.
        return float(self.tokens / np.median(timed)) if timed else None


class LineWriter(io.TextIOBase):
    """Makes lines of the redraws of a progress bar, for a stderr that is not a terminal."""

    def write(self, text: str) -> int:
        """Writes what is not blank."""
        if line := text.strip():
            print(line, file=sys.stderr, flush=True)
        return len(text)


def progress_bar(done: int, steps: int, quiet: bool, title: str) -> tqdm:
    """A bar on a terminal, else a line every ten seconds."""
    file, interval = (sys.stderr, 0.1) if sys.stderr.isatty() else (LineWriter(), 10)
    return tqdm(
        desc=title or None,
        initial=done,
        total=steps,
        disable=quiet,
        file=file,
        mininterval=interval,
        miniters=1,
    )
