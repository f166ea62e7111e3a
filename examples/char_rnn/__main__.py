r"""Train a recurrent language model, prune it while it trains, and draw text from it.

The model predicts a text character by character with an LSTM or GRU. It trains by the recipe of
Zhu et al. 2018, "Sparse Persistent RNNs: Squeezing Large Recurrent Networks On-Chip", appendix B:
dense at first, then pruned to its density every half epoch, and at the end with a fixed pattern;
the last epoch of it on the sparse model, where only stored weights have gradients. The score is
bits per character on held-out text.

    python -m examples.char_rnn                                  # about a minute on two cores
    python -m examples.char_rnn --hidden 256:0.0625:unstructured
    python -m examples.char_rnn --data book.txt --hidden 512:0.0625 --cell gru

--hidden has the units, after a colon the density to prune to, and after another one the structure
of the masks, where it is not that of --structure; without a density the model stays dense. Without
--data it learns from the help texts that come with Python (pydoc_data.topics). --data takes any
text file, in UTF-8 or, with --tokens bytes, of any kind.

Ctrl-C, SIGTERM and a closed terminal (unless under nohup) save the state after the step in flight,
and a signal more than a second later quits at once. --resume goes on from there, and the result is
that of an unbroken run, to the last bit on a CPU. The text must be the same.

The study that compares several models is python -m experiments.char_rnn.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxsparse.pruning import STRUCTURES

from ..common.checkpoint import Checkpoints
from ..common.errors import UserError, memory_errors
from ..common.program import Parser, describe, number, run_program, to_json, write_json
from . import text
from .drawing import draw, sample
from .model import CELLS, DEFAULT_STRUCTURE, Hidden
from .training import PRUNED, parts_of, train_model

NAME = "char_rnn"
MEMORY_OPTIONS = "--batch, --length, --hidden or --layers"

# What decides the parameters and the loss curve: a resumed run must agree in these.
TRAINING_OPTIONS = (
    "tokens", "held_out", "cell", "layers", "embedding", "batch", "length", "epochs",
    "fixed_epochs", "sparse_epochs", "steps_per_epoch", "steps", "pruned", "learning_rate", "dtype",
    "eval_every", "seed",
)  # fmt: skip


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parses and checks the options."""
    parser = Parser(
        "python -m examples.char_rnn",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--hidden",
        type=parse_hidden,
        default=Hidden(256, 0.0625),
        metavar="UNITS[:DENSITY[:STRUCTURE]]",
        help="of the recurrent layers (256:0.0625)",
    )
    add_options(parser)
    args = parser.parse_args(argv)
    check_options(args)
    args.hidden = args.hidden.with_structure(args.structure)
    return args


def parse_hidden(word: str) -> Hidden:
    """Reads ``units``, ``units:density`` or ``units:density:structure``."""
    units, *others = word.split(":")
    try:
        hidden = Hidden(number(int, 1, 2**20)(units), *map(float, others[:1]), *others[1:2])
    except (ValueError, argparse.ArgumentTypeError):
        hidden = None
    if hidden is None or not 0 < hidden.density <= 1 or len(others) > 2:
        raise argparse.ArgumentTypeError(
            f"expected units, units:density or units:density:structure with a density in (0, 1], "
            f"got {word}"
        )
    if hidden.structure not in (None, *STRUCTURES):
        raise argparse.ArgumentTypeError(
            f"expected a structure of {', '.join(STRUCTURES)}, got {hidden.structure} in {word}"
        )
    return hidden if hidden.density < 1 else Hidden(hidden.units)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds all options but --hidden, which the study of several models has too."""
    add, count, zero_or_more = parser.add_argument, number(int, 1, 2**31), number(int, 0, 2**31)
    add("--data", type=Path, help="a text file (the help texts of Python)")
    add(
        "--tokens", choices=text.TOKENS, default="characters", help="what is predicted (characters)"
    )
    add("--held-out", type=number(float, 0, 1), default=0.05, help="share at the end (0.05)")
    add("--output", type=Path, default=f"{NAME}_out", help="folder to write to (%(default)s)")
    add("--cell", choices=CELLS, default="lstm", help="of the recurrent layers (lstm)")
    add("--layers", type=count, default=1, help="recurrent layers (%(default)s)")
    add("--embedding", type=count, default=64, help="features of a token (%(default)s)")
    add("--batch", type=count, default=8, help="streams of text side by side (%(default)s)")
    add("--length", type=count, default=64, help="steps of truncated backpropagation (%(default)s)")
    add("--epochs", type=count, default=13, help="of the recipe (13)")
    add("--fixed-epochs", type=zero_or_more, default=2, help="the last ones: fixed masks (2)")
    add("--sparse-epochs", type=zero_or_more, default=1, help="of those: in sparse form (1)")
    add("--steps-per-epoch", type=number(int, 2, 2**31), default=48, help="steps of one (48)")
    add(
        "--structure",
        choices=STRUCTURES,
        default=DEFAULT_STRUCTURE,
        help=f"of masks where --hidden names none ({DEFAULT_STRUCTURE})",
    )
    add("--pruned", choices=PRUNED, default="all", help="weights of recurrent layers (all)")
    add("--learning-rate", type=number(float, 0), default=1e-2, help="the highest (0.01)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of activations")
    add("--eval-every", type=count, default=96, help="steps between scores (96)")
    add("--checkpoint-every", type=count, default=192, help="steps between checkpoints (192)")
    add("--resume", action="store_true", help="continue what is in --output")
    add("--prompt", help="what a sample begins with (the first token held out)")
    add("--temperature", type=number(float, 0), default=0.7, help="of samples (0.7)")
    add("--sample-length", type=count, default=400, help="tokens of a sample (400)")
    add("--seed", type=number(int, 0, 2**32), default=0, help="of parameters and samples (0)")
    add("--quiet", action="store_true", help="print only the result")


def check_options(args: argparse.Namespace) -> None:
    """Raises a UserError for options that do not fit each other."""
    if args.fixed_epochs >= args.epochs:
        raise UserError(
            f"--fixed-epochs: expected less than --epochs {args.epochs}, got {args.fixed_epochs}"
        )
    if args.sparse_epochs > args.fixed_epochs:
        raise UserError(
            f"--sparse-epochs: expected at most --fixed-epochs {args.fixed_epochs}, got "
            f"{args.sparse_epochs}"
        )
    if args.prompt == "":
        raise UserError("--prompt: expected a character at least, got none")


def load_corpus(args: argparse.Namespace) -> text.Corpus:
    """Reads the text; an epoch is a pass over it where ``steps_per_epoch`` is None."""
    corpus = text.load(args.data, args.tokens, args.held_out, args.batch * args.length + 1)
    if args.steps_per_epoch is None:
        args.steps_per_epoch = max(2, len(corpus.train) // (args.batch * args.length))
    args.steps = args.epochs * args.steps_per_epoch
    return corpus


def training_options(
    args: argparse.Namespace, hidden: Hidden, corpus: text.Corpus
) -> dict[str, Any]:
    """The options in which a resumed run of a model must agree, as JSON values."""
    agreeing = {name: getattr(args, name) for name in TRAINING_OPTIONS}
    # A file may have been replaced, and the help texts change with the version of Python.
    size = len(corpus.vocabulary)
    data = f"{corpus.source} (SHA-256 {corpus.digest}, {size} different {args.tokens})"
    return agreeing | {"data": data, "hidden": hidden.name}


def print_setup(args: argparse.Namespace, corpus: text.Corpus) -> None:
    """Tells what a run works on."""
    print(f"device: {jax.local_devices()[0].device_kind}")
    print(f"data: {corpus.description}")
    print(f"recipe: {args.epochs} epochs of {args.steps_per_epoch} steps", flush=True)


def run(args: argparse.Namespace) -> None:
    """Trains the model, draws a text and a picture, and writes what came out."""
    corpus = load_corpus(args)
    prompt = corpus.held_out[:1] if args.prompt is None else corpus.encode(args.prompt)
    options = training_options(args, args.hidden, corpus)
    checkpoints = Checkpoints(NAME, args.output / "checkpoints", options)
    checkpoints.check(args.resume)
    checkpoints.begin()
    if not args.quiet:
        print_setup(args, corpus)
    name = args.hidden.name
    about = describe(to_json(args) | {"hidden": name}, jax.local_devices()[:1])
    with memory_errors(f"training with {name} units", MEMORY_OPTIONS):
        task, progress, speed = train_model(args.hidden, corpus, checkpoints, args)
        model = task.sparse_model or task.model
        drawn = sample(
            model, prompt, length=args.sample_length, temperature=args.temperature, seed=args.seed
        )
    passage = corpus.decode(np.concatenate([prompt, drawn]))
    result = {"steps": progress.step, "curve": progress.curve, "layers": task.layers}
    if speed is not None:  # None where a finished run was resumed: no step was timed.
        result["tokens_per_second"] = speed
    about |= {"text": corpus.identity}
    write_json(args.output / "metrics.json", about | result | {"sample": passage})
    picture = args.output / "char_rnn.png"
    parts = parts_of(args) if args.hidden.density < 1 else {}
    draw(picture, f"{name} units", progress.curve, parts)
    before, after = (progress.curve[i]["held_out"] for i in (0, -1))
    pace = "" if speed is None else f", {speed:,.0f} tokens/s"
    print(
        f"{name}, held out: {before:.3f} -> {after:.3f} bits/char in {progress.step} steps{pace}; "
        f"picture: {picture}"
    )
    print(f"drawn at temperature {args.temperature:g}:\n\n{text.printable(passage)}")


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    return run_program(NAME, lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
