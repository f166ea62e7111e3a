"""The options, which the study of several models has too, and the corpus that they name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax

from ..common.errors import UserError
from ..common.program import number
from . import data
from .model import CELLS, MOST_FUTURE_MS, NORMS, future_ms

NAME = "speech"
MEMORY_OPTIONS = "--batch, --hidden or --layers"
LOOKAHEAD = 8  # Steps, by default.

# What decides the parameters and the loss curve: a resumed run must agree in these.
TRAINING_OPTIONS = (
    "cell", "hidden", "layers", "skip", "norm", "direction", "lookahead", "stride",
    "recurrent_sparsity", "batch", "buckets", "noise", "steps", "learning_rate", "dtype",
    "eval_every", "seed",
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds all options but --layers, --skip and --seed, of which the study has several."""
    add, count = parser.add_argument, number(int, 1, 2**31)
    add("--data", type=Path, help="an .npz file of features, as below (generated digits)")
    add("--output", type=Path, default=f"{NAME}_out", help="folder to write to (%(default)s)")
    add("--cell", choices=CELLS, default="gru", help="of the recurrent layers (%(default)s)")
    add("--hidden", type=count, default=96, help="units of a layer, each way (%(default)s)")
    add("--norm", choices=NORMS, default="layer", help="of what a layer reads (%(default)s)")
    add(
        "--direction",
        choices=("both", "forward"),
        default="both",
        help="of the layers in time; forward has a lookahead convolution on top (%(default)s)",
    )
    add(
        "--lookahead",
        type=number(int, 0, 2**31),
        help=f"later steps that the convolution reads ({LOOKAHEAD}); at most 800 ms in all",
    )
    add("--stride", type=count, default=3, help="frames that make one step (%(default)s)")
    add(
        "--recurrent-sparsity",
        type=number(float, 0, 1),
        default=0.0,
        help="share of the recurrent weights that are left out (0)",
    )
    add("--batch", type=count, default=16, help="utterances in a step (%(default)s)")
    add("--buckets", type=count, default=2, help="lengths that batches have (%(default)s)")
    add("--noise", type=number(float, 0), default=0.5, help="added to features in training (0.5)")
    add("--steps", type=count, default=800, help="training steps (%(default)s)")
    add("--learning-rate", type=number(float, 0), default=4e-3, help="the highest (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of activations")
    add("--eval-every", type=count, default=100, help="steps between scores (%(default)s)")
    add("--checkpoint-every", type=count, default=200, help="steps between checkpoints (200)")
    add("--resume", action="store_true", help="continue what is in --output")
    add("--quiet", action="store_true", help="print only the result")


def check_skip(option: str, layers: int, skip: int) -> None:
    """Raises a UserError for a skip over more layers than there are."""
    if skip > layers:
        raise UserError(f"{option}: expected a skip over at most {layers} layers, got {skip}")


def load_corpus(args: argparse.Namespace) -> data.Corpus:
    """Reads the corpus, and checks and completes the options that depend on it."""
    corpus = data.load(args.data, args.seed)
    data.check_lengths(corpus, args.stride)
    if args.direction == "both":
        if args.lookahead:
            raise UserError(
                f"--lookahead: expected --direction forward, since both directions read whole "
                f"utterances, got {args.lookahead}"
            )
        args.lookahead = 0
        return corpus
    if args.lookahead is None:
        args.lookahead = LOOKAHEAD
    future = future_ms(args.lookahead, args.stride, corpus.frame_ms)
    if future > MOST_FUTURE_MS:
        raise UserError(
            f"--lookahead: expected at most {MOST_FUTURE_MS:g} ms of future context, got "
            f"{future:g} of {args.lookahead} steps of {args.stride} frames of "
            f"{corpus.frame_ms:g} ms"
        )
    return corpus


def training_options(args: argparse.Namespace, corpus: data.Corpus) -> dict[str, Any]:
    """The options in which a resumed run must agree, as JSON values."""
    agreeing = {name: getattr(args, name) for name in TRAINING_OPTIONS}
    # A file may have been replaced, and random numbers change with the version of NumPy.
    return agreeing | {"data": f"{corpus.source} (SHA-256 {corpus.digest})"}


def print_setup(args: argparse.Namespace, corpus: data.Corpus) -> None:
    """Tells what a run works on."""
    print(f"device: {jax.local_devices()[0].device_kind}")
    print(f"data: {corpus.description}")
    if args.direction == "forward":
        future = future_ms(args.lookahead, args.stride, corpus.frame_ms)
        print(f"future context: {future:g} ms", flush=True)
    else:
        print("future context: the whole utterance", flush=True)
