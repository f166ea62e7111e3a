"""How far training is: its record, and the bar that shows it."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm


@dataclass
class Progress:
    """What a checkpoint tells of training, beside the state."""

    step: int = 0  # Steps done.
    curve: list[dict[str, Any]] = field(default_factory=list)  # Points of step, train, held_out.
    losses: list[float] = field(default_factory=list)  # Of the steps since the last point.


class LineWriter(io.TextIOBase):
    """Makes lines of the redraws of a progress bar, for a stderr that is not a terminal."""

    def write(self, text: str) -> int:
        """Writes what is not blank."""
        if line := text.strip():
            print(line, file=sys.stderr, flush=True)
        return len(text)


def progress_bar(done: int, steps: int, quiet: bool, title: str = "") -> tqdm:
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
