"""Saving and resuming a run."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from .errors import UserError
from .progress import Progress
from .trainer import State

KEEP = 2  # The newest, and one in case that its files are damaged.


class Checkpoints:
    """The checkpoints of one run: its state, its progress, and the options that decide both.

    Orbax writes each aside and renames it, so that a killed program leaves no half of one.
    """

    def __init__(self, folder: Path, options: dict[str, Any]):
        self.folder, self.options = folder, options
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output: expected a writable folder, got: {error}") from error
        self.manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        # Saved while training waits: the next step overwrites the state in place.
        settings = ocp.CheckpointManagerOptions(
            max_to_keep=KEEP, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        return ocp.CheckpointManager(self.folder.resolve(), options=settings)

    def newest(self) -> dict[str, Any] | None:
        """The options and the progress of the newest checkpoint."""
        step = self.manager.latest_step()
        if step is None:
            return None
        return self.manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore())).run

    def check_resume(self) -> None:
        """Raises a UserError unless there is a checkpoint made with the same options."""
        if (newest := self.newest()) is None:
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

    def check_start(self) -> None:
        """Raises a UserError if a new run would discard an unfinished one."""
        newest = self.newest()
        if newest is not None and newest["progress"]["step"] < newest["options"]["steps"]:
            raise UserError(
                f"--output: expected no unfinished run, got one after step "
                f"{newest['progress']['step']} of {newest['options']['steps']} in {self.folder}; "
                f"--resume continues it, or delete that folder"
            )

    def clear(self) -> None:
        """Deletes the checkpoints of a finished run."""
        self.manager.close()
        shutil.rmtree(self.folder)
        self.manager = self._open()

    def save(self, progress: Progress, state: State) -> None:
        """Saves what :meth:`restore` needs."""
        run = {"options": self.options, "progress": dataclasses.asdict(progress)}
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state._asdict()), run=ocp.args.JsonSave(run)
        )
        self.manager.save(progress.step, args=args)

    def restore(self, state: State) -> tuple[Progress, State]:
        """The newest progress and state, placed on the devices of ``state``, of like shapes."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state._asdict())
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract), run=ocp.args.JsonRestore()
        )
        restored = self.manager.restore(self.manager.latest_step(), args=args)
        return Progress(**restored.run["progress"]), State(**restored.state)
