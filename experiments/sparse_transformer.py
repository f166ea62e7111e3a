"""Table III of Gale et al. 2020: the Transformer with sparse and with dense attention.

    python -m experiments.sparse_transformer --preset paper --data train_data_batch_1.npz

The options are those of ``python -m examples.sparse_transformer``, whose ``--compare`` is the same.
Throughput and memory are measured after training. The result is ``comparison.json``, pictures and
checkpoints are in the folders ``sparse`` and ``dense``.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from typing import Any

import jax

from examples.common.checkpoint import Checkpoints
from examples.common.errors import OutOfMemoryError, memory_errors
from examples.common.program import describe, run_program, to_json, write_json
from examples.sparse_transformer import data
from examples.sparse_transformer.model import PAPER_SIZES
from examples.sparse_transformer.training import (
    MEMORY_OPTIONS,
    NAME,
    ImageTask,
    checkpoints_of,
    choose_devices,
    print_setup,
    train_and_draw,
)

from .timing import median_seconds

TIMED_CALLS = 10

# Table III of the paper, whose memory and throughput are those of the forward pass in float32. None
# is out of memory.
PAPER: dict[str, dict[str, Any]] = {
    "sparse": {
        "held_out": 3.77,
        "V100": {"tokens_per_second": 67_857, "gigabytes": 0.77},
        "GTX 1080": {"tokens_per_second": 32_039, "gigabytes": 0.88},
    },
    "dense": {
        "held_out": 3.76,
        "V100": {"tokens_per_second": 32_477, "gigabytes": 9.88},
        "GTX 1080": None,
    },
}


def compare(args: argparse.Namespace) -> None:
    """Trains both kinds of attention, and writes and prints a table."""
    dataset = data.load(args.data, args.size)
    devices = choose_devices(args.batch, args.devices)
    runs = runs_of(args)
    checkpoints = open_checkpoints(runs)
    if not args.quiet:
        print_setup(dataset, devices)
    about = describe(to_json(args), devices)
    results: dict[str, dict[str, Any] | None] = {}
    for each, saved in zip(runs, checkpoints, strict=True):
        try:
            with memory_errors(f"training with {each.attention} attention", MEMORY_OPTIONS):
                result, task = train_and_draw(each, dataset, devices, saved)
                results[each.attention] = result | measure(task, result["steps"])
        except OutOfMemoryError as error:
            results[each.attention] = None  # As dense attention in a column of the paper's table.
            print(f"{NAME}: {error}", file=sys.stderr)
    with_paper = is_papers_model(args)
    paper = {"paper": PAPER} if with_paper else {}
    write_json(args.output / "comparison.json", {**about, **results, **paper})
    print(table(results, with_paper))


def runs_of(args: argparse.Namespace) -> list[argparse.Namespace]:
    """The options of the two runs to compare."""
    runs = [copy.copy(args), copy.copy(args)]
    for each, attention in zip(runs, ("sparse", "dense"), strict=True):
        each.attention, each.output = attention, args.output / attention
    return runs


def open_checkpoints(runs: list[argparse.Namespace]) -> list[Checkpoints]:
    """Checks, before any work, that both runs may be resumed or started, as the options say.

    Deletes the checkpoints of finished runs that are to be started anew.
    """
    checkpoints = [checkpoints_of(each) for each in runs]
    # The second run may not have begun when the program was stopped.
    begun = [x for x in checkpoints if x.newest() is not None] or checkpoints
    for each, saved in zip(runs, checkpoints, strict=True):
        saved.check(each.resume and saved in begun)
    # All at once: what an older comparison left of the second run is not to look begun when the
    # program is stopped in the first.
    for saved in checkpoints:
        saved.begin()
    return checkpoints


def is_papers_model(args: argparse.Namespace) -> bool:
    """Whether the options give the model, and the size of its images, of the paper.

    Only with equal ones do the paper's figures compare.
    """
    return all(getattr(args, name) == value for name, value in PAPER_SIZES.items())


def measure(task: ImageTask, index: int) -> dict[str, Any]:
    """Throughput and memory of both programs of a task, on the batch of an index.

    A real batch: on equal tokens the gradient of their embedding adds up in one place. Some more
    steps are made.
    """
    batch = task.place(task.batch(index))
    programs = {
        "forward": (task.score_program, lambda: task.score_on(batch)),
        "training": (task.step_program, lambda: task.step_on(batch)),
    }
    return {
        name: {
            "tokens_per_second": task.tokens / median_seconds(call, TIMED_CALLS),
            "peak_bytes": peak_bytes(program),
        }
        for name, (program, call) in programs.items()
    }


def peak_bytes(program: jax.stages.Compiled) -> int:
    """What a compiled program holds at most on one device, its arguments and results included."""
    memory = program.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def table(results: dict[str, dict[str, Any] | None], with_paper: bool) -> str:
    """The results of sparse and dense attention, None out of memory, and the paper's."""
    columns = results if with_paper else ()

    def row(title: str, form: str, get: Callable[[dict[str, Any]], float], text: str) -> list[str]:
        ours = (format(get(x), form) if x else "out of memory" for x in results.values())
        theirs = (text.format(**PAPER[x], **PAPER[x]["V100"]) for x in columns)
        return [title, *ours, *theirs]

    rows = [
        ["", *results, *(f"paper, {x}" for x in columns)],
        row("held out, bits/dim", ".3f", lambda x: x["curve"][-1]["held_out"], "{held_out}"),
    ]
    for name, speed, memory in (
        ("forward", "{tokens_per_second:,}", "{gigabytes}"),
        ("training", "", ""),
    ):
        rows += [
            row(f"{name}, tokens/s", ",.0f", lambda x, n=name: x[n]["tokens_per_second"], speed),
            row(f"{name}, peak GB", ".3f", lambda x, n=name: x[n]["peak_bytes"] / 1e9, memory),
        ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join([x[0].ljust(widths[0]), *map(str.rjust, x[1:], widths[1:])]).rstrip()
        for x in rows
    )
    if not with_paper:
        footnote = "the paper's figures are for another model: --preset paper"
    else:
        gpu = PAPER["sparse"]["GTX 1080"]
        footnote = (
            "paper: Gale et al. 2020, Table III, 140,000 steps of 8 images of ImageNet, speed and "
            "memory on a V100 in float32. On a GTX 1080: sparse "
            f"{gpu['tokens_per_second']:,} tokens/s in {gpu['gigabytes']} GB, dense out of memory"
        )
    return "\n".join([*lines, footnote])


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    # The example imports this module, but only for --compare.
    from examples.sparse_transformer.__main__ import parse_args

    words = sys.argv[1:] if argv is None else argv
    return run_program(NAME, lambda: compare(parse_args(["--compare", *words])))


if __name__ == "__main__":
    sys.exit(main())
