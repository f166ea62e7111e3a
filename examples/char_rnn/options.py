"""The options, which the study of several models has too, and the text and the steps they name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax

from jaxsparse.pruning import STRUCTURES, half_epochs

from ..common import text
from ..common.errors import UserError
from ..common.program import number
from .model import CELLS, DEFAULT_STRUCTURE, Hidden

NAME = "char_rnn"
MEMORY_OPTIONS = "--batch, --length, --hidden or --layers"

# The recurrent and the input weights of all layers, as in the paper, or the recurrent ones alone.
PRUNED = {
    "all": ("*/cell/dense_i/kernel", "*/cell/dense_h/kernel"),
    "recurrent": ("*/cell/dense_h/kernel",),
}

# What decides the parameters and the loss curve: a resumed run must agree in these.
TRAINING_OPTIONS = (
    "tokens", "held_out", "cell", "layers", "embedding", "batch", "length", "epochs",
    "fixed_epochs", "sparse_epochs", "steps_per_epoch", "steps", "pruned", "learning_rate", "dtype",
    "eval_every", "seed",
)  # fmt: skip


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
    least = args.batch * args.length + 1
    corpus = text.load(args.data, args.tokens, args.held_out, least, "--batch or --length")
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


def schedule_options(args: argparse.Namespace) -> dict[str, int]:
    """What `half_epochs` takes of the options: when masks are made."""
    return {name: getattr(args, name) for name in ("steps_per_epoch", "epochs", "fixed_epochs")}


def sparse_from(args: argparse.Namespace) -> int:
    """The step after which a pruned model trains in sparse form."""
    return (args.epochs - args.sparse_epochs) * args.steps_per_epoch


def parts_of(args: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """The first and the last step of the parts of the training of a pruned model."""
    schedule = half_epochs(1.0, **schedule_options(args))
    return {
        "masks change": (schedule.begin, schedule.end),
        "sparse form": (sparse_from(args), args.steps),
    }


def print_setup(args: argparse.Namespace, corpus: text.Corpus) -> None:
    """Tells what a run works on."""
    print(f"device: {jax.local_devices()[0].device_kind}")
    print(f"data: {corpus.description}")
    print(f"recipe: {args.epochs} epochs of {args.steps_per_epoch} steps", flush=True)
