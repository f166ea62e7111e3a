"""The trainings of a study, one after the other: which are done, which go on, and their results."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.common.checkpoint import Checkpoints
from examples.common.errors import UserError
from examples.common.program import write_json


@dataclass
class Run:
    """One training."""

    name: str
    folder: Path
    options: dict[str, Any]  # All that its result follows from.
    checkpoints: Checkpoints

    @property
    def result_file(self) -> Path:
        """Where its result is, once it is there."""
        return self.folder / "result.json"

    def saved_result(self) -> dict[str, Any] | None:
        """The result that is there, if it is one of the same options."""
        try:
            saved = json.loads(self.result_file.read_text())
        except (OSError, ValueError):  # None yet, or not one: it can be made again.
            return None
        return saved["result"] if saved["options"] == self.options else None

    def save_result(self, result: dict[str, Any]) -> None:
        """Writes the result, which a resumed study takes from there."""
        write_json(self.result_file, {"options": self.options, "result": result})


def open_runs(runs: list[Run], output: Path, resume: bool) -> None:
    """Checks, before any work, that all runs may be resumed or started, as the options say.

    Of a run that has a result a resumed study needs no checkpoint. So several programs may train
    runs of one study at once, each some of them, and one that is resumed puts them together.
    Deletes what an earlier study left of runs that are to be started anew.

    Args:
        runs: all of the study.
        output: its folder, in which metrics.json is once it is done.
        resume: whether it goes on.
    """
    metrics = output / "metrics.json"
    begun = [run for run in runs if run.checkpoints.newest() is not None]
    if resume:
        left = [run for run in runs if run.saved_result() is None]
        if not begun and len(left) == len(runs):
            raise UserError(f"--resume: expected a checkpoint in {output}, got none")
        for run in left:
            run.checkpoints.check(resume=run in begun)
        return
    for run in runs:
        run.checkpoints.check(resume=False)
    if begun and not metrics.exists():
        raise UserError(
            f"--output: expected no unfinished comparison, got one after "
            f"{', '.join(run.name for run in begun)} in {output}; --resume continues "
            f"it, or delete that folder"
        )
    metrics.unlink(missing_ok=True)
    # All at once: what an older comparison left is not to look done when this one is stopped.
    for run in runs:
        run.result_file.unlink(missing_ok=True)
        run.checkpoints.begin()
