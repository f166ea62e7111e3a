"""Saving and resuming a run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from .errors import UserError, is_exhausted, one_line

KEEP = 2  # The newest, and one in case that its files are damaged.

T = TypeVar("T")
State = TypeVar("State", bound=tuple[Any, ...])  # A NamedTuple.


@dataclasses.dataclass
class Progress:
    """What a checkpoint tells of training, beside the state."""

    step: int = 0  # Steps done.
    curve: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # See `Loop.curve`.
    losses: list[float] = dataclasses.field(default_factory=list)  # Since the last point of it.
    ended: bool = False  # Whether training ended before its last step, see `Loop.end`.


class Checkpoints:
    """The checkpoints of one run: its state, its progress, and the options that decide both.

    Orbax writes each aside and renames it, so that a killed program leaves no half of one.
    """

    def __init__(self, program: str, folder: Path, options: dict[str, Any]):
        self.program, self.folder, self.options = program, folder, options
        self.damaged: set[int] = set()  # Steps.
        self.resume = False  # Whether the run goes on from the newest one, see `check`.
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output: expected a writable folder, got: {error}") from error
        # Saved while training waits: the next step overwrites the state in place.
        settings = ocp.CheckpointManagerOptions(
            max_to_keep=KEEP, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self.manager = ocp.CheckpointManager(folder.resolve(), options=settings)

    def newest(self) -> dict[str, Any] | None:
        """The options and the progress of the newest readable checkpoint, None without any."""

        def read(step: int) -> dict[str, Any]:
            args = ocp.args.Composite(run=ocp.args.JsonRestore())
            run = self.manager.restore(step, args=args).run
            return {name: run[name] for name in ("options", "progress")}

        return self._read_newest(read) if self.manager.all_steps() else None

    def _read_newest(self, read: Callable[[int], T]) -> T:
        """What ``read`` makes of the newest checkpoint that is not damaged."""
        left = sorted(set(self.manager.all_steps()) - self.damaged)
        problem = f"reading {self.folder}: expected a checkpoint, got none that is readable"
        while left:
            step = left.pop()
            try:
                return read(step)
            except Exception as error:  # A damaged checkpoint fails in any way.
                if is_exhausted(error):
                    raise
                actual = one_line(error)
            self.damaged.add(step)
            problem = f"reading {self.folder / str(step)}: expected a checkpoint, got: {actual}"
            if left:
                # In one piece, the end of the line too: Orbax's threads may be writing.
                sys.stderr.write(f"{self.program}: {problem}; trying that of step {left[-1]}\n")
        raise UserError(f"{problem}; without an older one, delete {self.folder} to start anew")

    def check(self, resume: bool) -> None:
        """Raises a UserError if the run can't be resumed, or a new one started; changes no file."""
        self.resume = resume
        newest = self.newest()
        if resume:
            self._check_resume(newest)
        else:
            self._check_start(newest)

    def _check_resume(self, newest: dict[str, Any] | None) -> None:
        if newest is None:
            raise UserError(f"--resume: expected a checkpoint in {self.folder}, got none")
        saved = newest["options"]
        if changed := [name for name in self.options if saved.get(name) != self.options[name]]:
            expected, actual = (
                " ".join(f"--{name.replace('_', '-')} {options.get(name)}" for name in changed)
                for options in (saved, self.options)
            )
            raise UserError(
                f"--resume: expected {expected} as in the checkpoint in {self.folder}, got {actual}"
            )

    def _check_start(self, newest: dict[str, Any] | None) -> None:
        if newest is None or newest["progress"].get("ended"):
            return
        step, steps = newest["progress"]["step"], newest["options"]["steps"]
        if step < steps:
            raise UserError(
                f"--output: expected no unfinished run, got one after step {step} of {steps} in "
                f"{self.folder}; --resume continues it, or delete that folder"
            )

    def begin(self) -> None:
        """Deletes the checkpoints of a finished run, unless this run resumes it."""
        if self.resume:
            return
        for step in sorted(self.manager.all_steps()):  # What shows the run finished goes last.
            self.manager.delete(step)
        self.damaged.clear()

    def save(self, progress: Progress, state: State) -> None:
        """Saves what :meth:`restore` needs."""
        run = {"options": self.options, "progress": dataclasses.asdict(progress)}
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state._asdict()), run=ocp.args.JsonSave(run)
        )
        self.manager.save(progress.step, args=args)

    def restore(self, state: State) -> tuple[Progress, State]:
        """The newest progress and state, placed on the devices of ``state``, of like shapes.

        Deletes newer checkpoints that are damaged, as their steps are to be saved again.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state._asdict())
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract), run=ocp.args.JsonRestore()
        )

        def read(step: int) -> tuple[Progress, State]:
            restored = self.manager.restore(step, args=args)
            return Progress(**restored.run["progress"]), type(state)(**restored.state)

        result = self._read_newest(read)
        for step in self.damaged:
            self.manager.delete(step)
        self.damaged.clear()
        return result


def open_all(checkpoints: list[Checkpoints], resume: bool) -> None:
    """Checks, before any work, that all runs of a program may be resumed or started.

    Deletes the checkpoints of finished runs that are to be started anew.
    """
    # Later runs may not have begun when the program was stopped.
    begun = [x for x in checkpoints if x.newest() is not None] or checkpoints
    for each in checkpoints:
        each.check(resume and each in begun)
    # All at once: what an older program left of a later run is not to look begun when this one is
    # stopped in an earlier run.
    for each in checkpoints:
        each.begin()
