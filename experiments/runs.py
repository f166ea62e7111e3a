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
        saved = self._saved()
        return saved["result"] if saved and saved["options"] == self.options else None

    def is_finished(self, newest: dict[str, Any] | None) -> bool:
        """Whether a result is there, of any options, and training did not begin anew after it.

        Args:
            newest: of the newest checkpoint, whose options are among those of its result.
        """
        saved = self._saved()
        if saved is None:
            return False
        return newest is None or newest["options"].items() <= saved["options"].items()

    def _saved(self) -> dict[str, Any] | None:
        """What is in the file of the result."""
        try:
            saved: dict[str, Any] = json.loads(self.result_file.read_text())
        except (OSError, ValueError):  # None yet, or not one: it can be made again.
            return None
        return saved

    def save_result(self, result: dict[str, Any]) -> None:
        """Writes the result, which a resumed study takes from there."""
        write_json(self.result_file, {"options": self.options, "result": result})


def open_runs(runs: list[Run], output: Path, resume: bool) -> None:
    """Checks, before any work, that all runs may be resumed or started, as the options say.

    Of a run that has a result a resumed study needs no checkpoint. So several programs may train
    runs of one study at once, each some of them, and one that is resumed puts them together. What
    each may do follows from the files of its own runs: metrics.json is of whichever ended last.
    Deletes what an earlier study left of runs that are to be started anew, if it finished all.

    Args:
        runs: all of the program.
        output: the study's folder, in which metrics.json is once a program is done.
        resume: whether it goes on.
    """
    newest = [run.checkpoints.newest() for run in runs]
    begun = [run for run, x in zip(runs, newest, strict=True) if x is not None]
    if resume:
        left = [run for run in runs if run.saved_result() is None]
        if not begun and len(left) == len(runs):
            raise UserError(f"--resume: expected a checkpoint in {output}, got none")
        for run in left:
            run.checkpoints.check(resume=run in begun)
        return
    finished = [run for run, x in zip(runs, newest, strict=True) if run.is_finished(x)]
    left = [run for run in runs if run not in finished]
    for run in left:
        run.checkpoints.check(resume=False)
    if left and (found := [run.name for run in runs if run in finished or run in begun]):
        raise UserError(
            f"--output: expected no unfinished comparison, got one after {', '.join(found)} in "
            f"{output}; --resume continues it, or delete that folder"
        )
    (output / "metrics.json").unlink(missing_ok=True)
    # All at once: what an older comparison left is not to look done when this one is stopped.
    for run in runs:
        run.result_file.unlink(missing_ok=True)
        run.checkpoints.begin()
