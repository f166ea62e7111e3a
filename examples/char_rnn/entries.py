"""One model of the comparison after the other: which are done, which go on, and their results."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from ..common.checkpoint import Checkpoints
from ..common.errors import UserError
from ..common.files import write_json
from ..common.progress import Progress
from ..common.training import train
from .options import RESULT_OPTIONS, training_options
from .recipe import Entry
from .sampling import sample
from .text import Corpus
from .throughput import measure
from .trainer import Trainer


@dataclass
class Run:
    """The training of one model."""

    entry: Entry
    folder: Path
    options: dict[str, Any]  # All that its result follows from.
    checkpoints: Checkpoints
    resume: bool

    @property
    def result_file(self) -> Path:
        """Where its result is, once it is there."""
        return self.folder / "result.json"

    def saved_result(self) -> dict[str, Any] | None:
        """The result of an earlier run with the same options."""
        try:
            saved = json.loads(self.result_file.read_text())
        except (OSError, ValueError):  # None yet, or not one: it can be made again.
            return None
        return saved["result"] if saved["options"] == self.options else None


def open_runs(program: str, corpus: Corpus, args: argparse.Namespace) -> list[Run]:
    """Checks, before any work, that all models may be resumed or started, as the options say.

    Deletes what an earlier comparison left of models that are to be started anew.
    """
    metrics = args.output / "metrics.json"
    runs = []
    for entry in args.hidden:
        folder = args.output / entry.folder
        options = training_options(args, entry, corpus)
        runs.append(
            Run(
                entry,
                folder,
                options | {name: getattr(args, name) for name in RESULT_OPTIONS},
                Checkpoints(program, folder / "checkpoints", options),
                args.resume,
            )
        )
    begun = [run for run in runs if run.checkpoints.newest() is not None]
    if args.resume:
        if not begun:
            raise UserError(f"--resume: expected a checkpoint in {args.output}, got none")
        for run in runs:
            run.resume = run in begun
            if run.resume:
                run.checkpoints.check_resume()
        return runs
    for run in begun:
        run.checkpoints.check_start()
    if begun and not metrics.exists():
        raise UserError(
            f"--output: expected no unfinished comparison, got one after "
            f"{', '.join(run.entry.name for run in begun)} in {args.output}; --resume continues "
            f"it, or delete that folder"
        )
    metrics.unlink(missing_ok=True)
    # All at once: what an older comparison left is not to look done when this one is stopped.
    for run in runs:
        run.result_file.unlink(missing_ok=True)
        run.checkpoints.clear()
    return runs


def result_of(
    run: Run, corpus: Corpus, prompt: np.ndarray, args: argparse.Namespace
) -> dict[str, Any]:
    """Trains a model, unless that was done, and returns what is told of it."""
    if run.resume and (result := run.saved_result()) is not None:
        return result
    entry = run.entry
    trainer = Trainer(entry, corpus, args)
    progress = Progress()
    if run.resume:
        progress, saved = run.checkpoints.restore(trainer.saved_state)
        trainer.restore(saved)
    train(
        progress,
        steps=args.steps,
        step=trainer.step,
        score=trainer.score,
        save=lambda: run.checkpoints.save(progress, trainer.saved_state),
        resumed=run.resume,
        tokens=args.batch * args.length,
        unit="bits/char",
        eval_every=args.eval_every,
        checkpoint_every=args.checkpoint_every,
        quiet=args.quiet,
        title=entry.name,
    )
    trainer.finish()
    if trainer.table is not None and not args.quiet:
        print(f"{entry.name}, recurrent layers in sparse form:\n{trainer.table}\n")
        if trainer.scans is not None:
            print(f"{entry.name}, recurrent scans of the forward pass:\n{trainer.scans}\n")
    model = trainer.sparse_model or trainer.model
    drawn = sample(
        model, prompt, length=args.sample_length, temperature=args.temperature, seed=args.seed
    )
    result = {
        "name": entry.name,
        "hidden": entry.hidden,
        "density": entry.density,
        "structure": entry.structure,
        "effective_units": entry.effective_units,
        **count_weights(trainer.model),
        "bits_per_character": progress.curve[-1]["held_out"],
        "curve": progress.curve,
        "rows": rows_of(trainer),
        "layers": [] if trainer.table is None else trainer.table.rows,
        "scans": trainer.scans,
        "tokens_per_second": {
            str(batch): measure(trainer, batch, corpus.train) for batch in args.speed_batches
        },
        "sample": corpus.decode(np.concatenate([prompt, drawn])),
    }
    write_json(run.result_file, {"options": run.options, "result": result})
    return result


def count_weights(model: nnx.Module) -> dict[str, int]:
    """Weights that are not 0, of the recurrent products and of the whole model."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    counts = {path: int(np.count_nonzero(x.get_value())) for path, x in flat}
    recurrent = sum(count for path, count in counts.items() if path[-2:] == ("dense_h", "kernel"))
    return {
        "recurrent_nonzeros": recurrent,
        "nonzeros": sum(counts.values()),
        "parameters": sum(x.get_value().size for _, x in flat),
    }


def rows_of(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Of each sparse matrix its shape, its density, and the stored weights in a row."""
    if trainer.sparse_model is None:
        return {}
    described = {}
    for path, topology in trainer.topologies.items():
        lengths = np.diff(jax.device_get(topology.row_offsets))
        described["/".join(map(str, path))] = {
            "shape": list(topology.shape),
            "density": topology.nnz / np.prod(topology.shape),
            "shortest": int(lengths.min()),
            "longest": int(lengths.max()),
        }
    return described
