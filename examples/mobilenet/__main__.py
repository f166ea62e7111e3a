r"""Train MobileNets dense and 90 % sparse; draw their accuracy against frames per second.

It is section VII-D of Gale et al. 2020, "Sparse GPU Kernels for Deep Learning": MobileNetV1 of
several widths (Howard et al. 2017), whose convolutions of 1 x 1 are pruned by magnitude while they
are trained. Batch normalisation becomes part of the layers, and so does ReLU; then the sparse
models store the weights alone that are not 0.

    python -m examples.mobilenet                                # digits; half an hour on two cores
    python -m examples.mobilenet --data cifar-10-batches-bin --widths 0.5 0.75 1 1.3
    python -m examples.mobilenet --paper                        # speed of the paper's nine models
    python -m examples.mobilenet --paper --widths 1 1.3         # of two of them

Sparse is meant to beat dense in float32 alone: where TF32 or bfloat16 will do, dense models are
expected to be faster on a GPU at large batches. So each dense model is measured in all three.

Without --data it learns the handwritten digits inside the scikit-learn package, 1,797 images of
8 x 8 pixels. --data takes CIFAR-10: the folder of its binary version, of its Python version, or of
sheets data_batch_*.png, test_batch.png with an image in each row, and train_lables.json,
test_lables.json. --paper trains nothing: weights are random, since speed does not depend on their
values. Models that are to be compared are compiled and timed together; then their rows are printed
and written.

While models are trained, Ctrl-C, SIGTERM and a closed terminal (unless under nohup) save the state
after the step in flight, and a signal more than a second later quits at once. With --paper the
groups that were measured are in paper.json. --resume goes on from there: models that are trained
already are not trained again, and with --paper a group whose rows are all there is not timed again.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from ..common.checkpoint import Checkpoints, open_all
from ..common.errors import memory_errors
from ..common.program import (
    Parser,
    describe,
    number,
    replacing,
    run_program,
    to_json,
    write_json,
)
from ..common.resumable import progress_bar
from . import data, report, throughput
from .model import MobileNet
from .trainer import compile_ahead, train

NAME = "mobilenet"
MEMORY_OPTIONS = "--batch, --frames, --widths or --resolution"

DIGITS = {
    "resolution": 16,
    "widths": [0.25, 0.5],
    "epochs": 20,
    "batch": 32,
    "learning_rate": 5e-3,
}
CIFAR = {
    "resolution": 32,
    "widths": [0.5, 0.75, 1.0, 1.3],
    "epochs": 40,
    "batch": 128,
    "learning_rate": 2e-3,
}

# What decides the parameters and the loss curve: a resumed run must agree in these.
TRAINING_OPTIONS = (
    "width", "sparsity", "seed", "resolution", "epochs", "batch", "learning_rate", "steps",
)  # fmt: skip


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parses the options; the defaults of some depend on the data."""
    parser = Parser("python -m examples.mobilenet", __doc__)
    add, count = parser.add_argument, number(int, 1, 2**31)

    def of_both(name: str) -> str:
        both = (DIGITS[name], CIFAR[name])
        texts = [" ".join(map(str, x)) if isinstance(x, list) else str(x) for x in both]
        return f"({texts[0]}; with --data {texts[1]})"

    add("--data", type=Path, help="folder of CIFAR-10 (digits of scikit-learn)")
    add("--output", type=Path, default=f"{NAME}_out", help="folder to write to (%(default)s)")
    width = number(float, 1e-3, 100)
    add("--widths", type=width, nargs="+", help=f"of all layers {of_both('widths')}")
    add("--sparsity", type=number(float, 0, 1), default=0.9, help="of sparse models (%(default)s)")
    add("--seeds", type=count, default=3, help="how often each is trained (%(default)s)")
    add("--resolution", type=count, help=f"side of the images {of_both('resolution')}")
    add("--epochs", type=count, help=of_both("epochs"))
    add("--batch", type=count, help=f"images in a step {of_both('batch')}")
    add("--learning-rate", type=number(float, 0), help=f"the highest {of_both('learning_rate')}")
    add("--frames", type=count, nargs="+", default=[1, 64], help="batches to time (1 64)")
    add("--seconds", type=number(float, 0), default=0.5, help="of each timing (%(default)s)")
    forms = list(throughput.FORMS)
    add("--forms", choices=forms, nargs="+", default=forms, help="what to time (all)")
    add("--paper", action="store_true", help="time the paper's nine models, and train none")
    add("--resume", action="store_true", help="go on with what is in --output")
    add("--quiet", action="store_true", help="print only the result")
    args = parser.parse_args(argv)
    parser.set_defaults(**(DIGITS if args.data is None else CIFAR))
    if args.paper:
        parser.set_defaults(resolution=throughput.PAPER_RESOLUTION, widths=None)
    return parser.parse_args(argv)


def runs_of(args: argparse.Namespace, dataset: data.Dataset) -> list[argparse.Namespace]:
    """The options of each model, dense and sparse, all seeds of it one behind the other."""
    runs = []
    for kind, sparsity in (("dense", 0.0), ("sparse", args.sparsity)):
        for width in args.widths:
            for seed in range(args.seeds):
                each = copy.copy(args)
                each.name, each.title = f"{kind} {width:g}", f"{kind} {width:g}, seed {seed}"
                each.width, each.sparsity, each.seed = width, sparsity, seed
                each.eval_every = data.steps_of_epoch(dataset, args.batch)
                each.checkpoint_every = 5 * each.eval_every
                each.steps = args.epochs * each.eval_every
                runs.append(each)
    return runs


def open_checkpoints(
    runs: list[argparse.Namespace], dataset: data.Dataset, args: argparse.Namespace
) -> list[Checkpoints]:
    """Checks, before any work, that all runs may be resumed or started, as the options say."""
    opened = []
    for each in runs:
        options = {name: getattr(each, name) for name in TRAINING_OPTIONS}
        options["data"] = f"{dataset.source} (SHA-256 {dataset.digest})"
        folder = args.output / "checkpoints" / each.title.replace(", ", "_").replace(" ", "_")
        opened.append(Checkpoints(NAME, folder, options))
    open_all(opened, args.resume)
    return opened


def is_left(saved: Checkpoints) -> bool:
    """Whether a run has steps to make."""
    newest = saved.newest()
    return newest is None or newest["progress"]["step"] < newest["options"]["steps"]


def time_models(
    groups: Sequence[Sequence[throughput.Candidate]],
    image_shape: tuple[int, ...],
    args: argparse.Namespace,
    result: dict[str, Any],
) -> None:
    """Adds frames/s of all models to a result, which is written after each group of them."""
    measured: list[throughput.Row] = result["frames"]

    def bar(total: int) -> tqdm:
        return progress_bar(0, total, args.quiet, "timing")

    def record(rows: list[throughput.Row]) -> None:
        new = {throughput.place_of(row) for row in rows}
        measured[:] = [row for row in measured if throughput.place_of(row) not in new] + rows
        write_result(args, result)
        if not args.quiet:
            for row in rows:
                tqdm.write(report.line_of(row), file=sys.stdout)
            sys.stdout.flush()

    throughput.measure_groups(
        groups,
        image_shape,
        args.frames,
        forms=args.forms,
        seconds=args.seconds,
        measured=tuple(measured),
        bar=bar,
        record=record,
    )


def write_result(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Writes what there is so far."""
    write_json(result_path(args), result)


def result_path(args: argparse.Namespace) -> Path:
    """The file of figures."""
    folder: Path = args.output
    return folder / ("paper.json" if args.paper else "metrics.json")


def train_all(
    dataset: data.Dataset, args: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, MobileNet]]:
    """Trains all models; returns their scores, and the models of the first seed."""
    runs = runs_of(args, dataset)
    trained: list[dict[str, Any]] = []
    models: dict[str, MobileNet] = {}
    opened = open_checkpoints(runs, dataset, args)
    held = dataset.held()
    sizes = {each.name: each for each, saved in zip(runs, opened, strict=True) if is_left(saved)}
    with progress_bar(0, len(sizes), args.quiet, "compiling") as bar:
        compile_ahead(list(sizes.values()), dataset, held, bar)
    for each, saved in zip(runs, opened, strict=True):
        model, loop = train(dataset, held, saved, each)
        found = {name: loop.curve[-1][name] for name in ("held_out", "accuracy")}
        models.setdefault(each.name, model)
        trained.append({"model": each.name, "seed": each.seed, **found, "curve": loop.curve})
        if not args.quiet:
            print(f"{each.title}: {found['accuracy']:.2%} right", flush=True)
    return trained, models


def time_paper(args: argparse.Namespace, result: dict[str, Any]) -> report.Summary:
    """Times the paper's models, adds that to a result, and says what to show of it."""
    groups = throughput.groups_of_paper(args.widths, args.resolution)
    throughput.check_forms(args.forms, {each.sparse for group in groups for each in group})
    if args.resume:
        result["frames"] = throughput.measured_before(result_path(args), result)
    else:
        throughput.check_new_run(result_path(args))
    with memory_errors("timing", MEMORY_OPTIONS):
        time_models(groups, (args.resolution, args.resolution, 3), args, result)
    figures = throughput.published()
    result["ratios"] = throughput.ratios(result["frames"])
    tables = [report.table_of_paper(result["frames"], figures)]
    if result["ratios"]:
        tables.append(report.table_of_ratios(result["ratios"]))
    return report.Summary(
        "\n\n".join(tables),
        {name: [accuracy] for name, (accuracy, _) in figures.items()},
        "MobileNetV1, random weights; accuracy on ImageNet as published",
    )


def train_and_time(args: argparse.Namespace, result: dict[str, Any]) -> report.Summary:
    """Trains and times models, adds that to a result, and says what to show of it."""
    throughput.check_forms(args.forms, {False, True})
    dataset = data.load(args.data, args.resolution)
    if not args.quiet:
        print(f"device: {result['device']}")
        print(f"data: {dataset.description}", flush=True)
    with memory_errors("training", MEMORY_OPTIONS):
        result["trained"], models = train_all(dataset, args)
        write_result(args, result)
        candidates = {
            name: throughput.Candidate(name, name.startswith("sparse"), lambda model=model: model)
            for name, model in models.items()
        }
        groups = [
            [candidates[f"{kind} {width:g}"] for kind in ("dense", "sparse")]
            for width in dict.fromkeys(args.widths)
        ]
        time_models(groups, dataset.train.images.shape[1:], args, result)
    return report.Summary(
        report.table_of_training(result["trained"], result["frames"]),
        report.accuracies_of(result["trained"]),
        f"MobileNetV1 on {dataset.source.partition(' in ')[0]}, {args.seeds} seeds",
    )


def run(args: argparse.Namespace) -> None:
    """Trains and times the models, or times those of the paper, and writes what came out."""
    args.output.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = describe(to_json(args), [jax.local_devices()[0]]) | {"frames": []}
    summary = (time_paper if args.paper else train_and_time)(args, result)
    write_result(args, result)
    picture = args.output / f"{NAME}{'_paper' if args.paper else ''}.png"
    with replacing(picture) as aside:
        report.draw(result["frames"], summary.accuracies, summary.title).savefig(aside, dpi=85)
    print(summary.text)
    print(f"picture: {picture}")


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    return run_program(NAME, lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
