"""The command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..common.errors import UserError
from ..common.options import Parser, number, parse_with_presets
from . import __doc__ as description

# Section VII-C of the paper, which leaves open the optimizer, its learning rate and the dtype.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "size": 64,
        "layers": 3,
        "heads": 8,
        "hidden": 1024,
        "filter": 4096,
        "band": 256,
        "sparsity": 0.95,
        "batch": 8,
        "steps": 140_000,
        "learning_rate": 3e-4,
        "dtype": "bfloat16",
        "eval_every": 1000,
        "checkpoint_every": 1000,
    }
}

# What decides the parameters and the loss curve: a resumed run must agree in these. The number of
# devices is left out, as it changes no more than rounding.
TRAINING_OPTIONS = (
    "data",
    "attention",
    "size",
    "layers",
    "heads",
    "hidden",
    "filter",
    "band",
    "sparsity",
    "batch",
    "steps",
    "learning_rate",
    "dtype",
    "eval_every",
    "seed",
)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parses and checks the options, and derives the defaults that depend on others."""
    parser = Parser(
        "python -m examples.sparse_transformer",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, count = parser.add_argument, number(int, 1, 2**31)
    add("--preset", choices=PRESETS, help="the paper's model; other options override it")
    add("--data", type=Path, help="photographs, .npz or CIFAR-10, as above")
    add("--output", type=Path, default="sparse_transformer_out", help="folder to write to")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--attention", choices=("sparse", "dense"), default="sparse", help="what to train (sparse)"
    )
    which.add_argument("--compare", action="store_true", help="train both, and print a table")
    add("--size", type=count, default=16, help="side of the crops, in pixels (16)")
    add("--layers", type=count, default=2, help="Transformer layers (2)")
    add("--heads", type=count, default=4, help="attention heads (4)")
    add("--hidden", type=count, default=128, help="hidden features (128)")
    add("--filter", type=count, help="features inside the MLP (4 x hidden)")
    add("--band", type=count, help="width of the dense band (4 x size: 1 1/3 rows of pixels)")
    add("--sparsity", type=number(float, 0, 1), default=0.95, help="outside the band (0.95)")
    add("--batch", type=count, default=4, help="crops per step (4)")
    add("--steps", type=count, default=800, help="training steps (800)")
    add("--learning-rate", type=number(float, 0), default=3e-3, help="the highest (3e-3)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of activations")
    add("--eval-every", type=count, default=100, help="steps between held-out scores (100)")
    add("--checkpoint-every", type=count, default=200, help="steps between checkpoints (200)")
    add("--resume", action="store_true", help="continue from the newest checkpoint in --output")
    add("--devices", type=count, help="how many to split the batch over at most (all)")
    add("--samples", type=count, default=8, help="images to complete, and to generate (8)")
    add("--seed", type=number(int, 0, 2**32), default=0, help="of the data, mask and model (0)")
    add("--quiet", action="store_true", help="print only the result")
    args = parse_with_presets(parser, argv, PRESETS)
    if args.hidden % args.heads:
        raise UserError(f"--hidden: expected a multiple of --heads {args.heads}, got {args.hidden}")
    args.filter = args.filter or 4 * args.hidden
    args.band = args.band or 4 * args.size
    return args


def training_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options in which a resumed run must agree, as JSON values."""
    options = {name: getattr(args, name) for name in TRAINING_OPTIONS}
    return options | {"data": str(args.data.resolve()) if args.data else None}
