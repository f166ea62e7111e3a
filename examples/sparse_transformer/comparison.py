"""Sparse beside dense attention: throughput, memory, and the table of both."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..common.timing import median_seconds
from .options import PRESETS
from .trainer import Trainer

TIMED_CALLS = 10
# Only with equal ones do the paper's figures compare.
MODEL_OPTIONS = ("size", "layers", "heads", "hidden", "filter", "band", "sparsity")

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


def is_papers_model(args: argparse.Namespace) -> bool:
    """Whether the options give the model, and the size of its images, of the paper."""
    return all(getattr(args, name) == PRESETS["paper"][name] for name in MODEL_OPTIONS)


def measure(trainer: Trainer, tokens: np.ndarray) -> dict[str, Any]:
    """Throughput and memory of both programs of a trainer, which it trains on by some steps."""
    batch = trainer.place(tokens)
    programs = {
        "forward": (trainer.score_program, lambda: trainer.score(batch)),
        "training": (trainer.step_program, lambda: trainer.step(batch)),
    }
    return {
        name: {
            "tokens_per_second": tokens.size / median_seconds(call, TIMED_CALLS),
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
        gpu, preset = PAPER["sparse"]["GTX 1080"], PRESETS["paper"]
        footnote = (
            f"paper: Gale et al. 2020, Table III, {preset['steps']:,} steps of {preset['batch']} "
            "images of ImageNet, speed and memory on a V100 in float32. On a GTX 1080: sparse "
            f"{gpu['tokens_per_second']:,} tokens/s in {gpu['gigabytes']} GB, dense out of memory"
        )
    return "\n".join([*lines, footnote])
