"""The program: trains every model, compares them, draws a picture and a sample of text."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax

from ..common.errors import UserError, memory_errors
from ..common.files import write_json
from ..common.program import describe, run_program
from . import text
from .drawing import draw
from .entries import open_runs, result_of
from .options import parse_args, to_json
from .recipe import make_schedule, schedule_options
from .report import table

NAME = "char_rnn"
MEMORY_OPTIONS = "--batch, --length, --hidden or --layers"


def run(args: argparse.Namespace) -> None:
    """Trains the models, one after the other, and writes what came out."""
    corpus = load_corpus(args)
    prompt = corpus.held_out[:1] if args.prompt is None else corpus.encode(args.prompt)
    runs = open_runs(NAME, corpus, args)
    device = jax.local_devices()[0]
    if not args.quiet:
        print(f"device: {device.device_kind}")
        print(f"data: {corpus.description}")
        print(f"recipe: {args.epochs} epochs of {args.steps_per_epoch} steps", flush=True)
    results = []
    for each in runs:
        with memory_errors(f"training with {each.entry.name} units", MEMORY_OPTIONS):
            results.append(result_of(each, corpus, prompt, args))
    best = best_of(results)
    data = {"source": corpus.source, "sha256": corpus.digest, "vocabulary": len(corpus.vocabulary)}
    about = {**describe(to_json(args), [device]), "text": data}
    picture = args.output / "char_rnn.png"
    schedule = make_schedule(1.0, **schedule_options(args))
    draw(picture, results, (schedule.begin, schedule.end))
    write_json(args.output / "metrics.json", {**about, "best": best["name"], "models": results})
    print(table(results))
    print(f"\npicture: {picture}")
    print(f"drawn from {best['name']} at temperature {args.temperature:g}:\n")
    print(text.printable(best["sample"]))


def load_corpus(args: argparse.Namespace) -> text.Corpus:
    """Reads the text, of which an epoch is a pass unless the options say otherwise."""
    corpus = text.load(args.data, args.tokens, args.held_out, args.batch * args.length + 1)
    most = (len(corpus.train) - 1) // args.length
    if max(args.speed_batches) > most:
        raise UserError(
            f"--speed-batches: expected at most {most}, for which there is text, got "
            f"{max(args.speed_batches)}"
        )
    if args.steps_per_epoch is None:
        args.steps_per_epoch = max(2, len(corpus.train) // (args.batch * args.length))
    args.steps = args.epochs * args.steps_per_epoch
    return corpus


def best_of(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The best sparse model, or the best one if all are dense."""
    sparse = [result for result in results if result["density"] < 1]
    return min(sparse or results, key=lambda result: result["bits_per_character"])


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    return run_program(NAME, lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
