"""The command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jaxsparse.pruning import STRUCTURES

from ..common import options
from ..common.errors import UserError
from ..common.options import Parser, number, parse_with_presets
from . import __doc__ as description
from .model import CELLS
from .recipe import DEFAULT_STRUCTURE, PRUNED, Entry, parse_entry
from .text import TOKENS, Corpus

PRESETS: dict[str, dict[str, Any]] = {
    # Three sparse models with as many recurrent weights as the smallest dense one.
    "quick": {
        "hidden": [
            *map(Entry, (64, 128, 256)),
            Entry(128, 0.25),
            Entry(256, 0.0625),
            Entry(256, 0.0625, "unstructured"),
        ],
        "layers": 1,
        "embedding": 64,
        "batch": 8,
        "length": 64,
        "steps_per_epoch": 48,
        "eval_every": 96,
        "checkpoint_every": 192,
        "learning_rate": 1e-2,
        "dtype": "float32",
        "speed_batches": [8],
    },
    # The sizes and densities of the paper's table 2, in the layers of its network.
    "h200": {
        "hidden": [
            *map(Entry, (256, 362, 512, 768, 1024, 1448)),
            Entry(256, 0.125),
            Entry(512, 0.0625),
            Entry(768, 0.0417),
            Entry(1024, 0.047),
            Entry(1024, 0.125),
            Entry(1448, 0.047),
            Entry(1024, 0.047, "unstructured"),
        ],
        "layers": 2,
        "embedding": 512,
        "batch": 64,
        "length": 128,
        "eval_every": 50,
        "checkpoint_every": 200,
        "learning_rate": 2e-3,
        "dtype": "bfloat16",
        "speed_batches": [1, 8, 64],
    },
}

# What decides the parameters and the loss curve: a resumed run must agree in these.
TRAINING_OPTIONS = (
    "tokens",
    "held_out",
    "cell",
    "layers",
    "embedding",
    "batch",
    "length",
    "epochs",
    "fixed_epochs",
    "sparse_epochs",
    "steps_per_epoch",
    "steps",
    "pruned",
    "learning_rate",
    "dtype",
    "eval_every",
    "seed",
)
# What a result has besides: another one is measured and drawn anew.
RESULT_OPTIONS = ("speed_batches", "prompt", "temperature", "sample_length")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parses and checks the options."""
    parser = Parser(
        "python -m examples.char_rnn",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, count, zero_or_more = parser.add_argument, number(int, 1, 2**31), number(int, 0, 2**31)
    quick = PRESETS["quick"]
    models = " ".join(entry.name for entry in quick["hidden"])
    add("--preset", choices=PRESETS, default="quick", help="others override it (quick)")
    add("--data", type=Path, help="a text file (the help texts of Python)")
    add("--tokens", choices=TOKENS, default="characters", help="what is predicted (characters)")
    add("--held-out", type=number(float, 0, 1), default=0.05, help="share at the end (0.05)")
    add("--output", type=Path, default="char_rnn_out", help="folder to write to")
    add("--cell", choices=CELLS, default="lstm", help="of the recurrent layers (lstm)")
    add(
        "--hidden",
        type=parse_entry,
        nargs="+",
        metavar="UNITS[:DENSITY[:STRUCTURE]]",
        help=f"one model each ({models})",
    )
    add("--layers", type=count, help=f"recurrent layers ({quick['layers']})")
    add("--embedding", type=count, help=f"features of a token ({quick['embedding']})")
    add("--batch", type=count, help=f"streams of text side by side ({quick['batch']})")
    add("--length", type=count, help=f"steps of truncated backpropagation ({quick['length']})")
    add("--epochs", type=count, default=13, help="of the recipe (13)")
    add("--fixed-epochs", type=zero_or_more, default=2, help="the last ones: fixed masks (2)")
    add("--sparse-epochs", type=zero_or_more, default=1, help="of those: in sparse form (1)")
    add(
        "--steps-per-epoch",
        type=number(int, 2, 2**31),
        help=f"({quick['steps_per_epoch']}; with --preset h200 a pass over the text)",
    )
    add(
        "--structure",
        choices=STRUCTURES,
        default=DEFAULT_STRUCTURE,
        help=f"of masks where --hidden names none ({DEFAULT_STRUCTURE})",
    )
    add("--pruned", choices=PRUNED, default="all", help="weights of recurrent layers (all)")
    add(
        "--learning-rate",
        type=number(float, 0),
        help=f"the highest ({quick['learning_rate']:g})",
    )
    add("--dtype", choices=("float32", "bfloat16"), help="of activations (float32)")
    add("--eval-every", type=count, help=f"steps between scores ({quick['eval_every']})")
    add(
        "--checkpoint-every",
        type=count,
        help=f"steps between checkpoints ({quick['checkpoint_every']})",
    )
    add("--resume", action="store_true", help="continue what is in --output")
    add(
        "--speed-batches",
        type=count,
        nargs="+",
        help=f"batches at which speed is measured ({quick['speed_batches'][0]})",
    )
    add("--prompt", help="what a sample begins with (the first token held out)")
    add("--temperature", type=number(float, 0), default=0.7, help="of samples (0.7)")
    add("--sample-length", type=count, default=400, help="tokens of a sample (400)")
    add("--seed", type=number(int, 0, 2**32), default=0, help="of parameters and samples (0)")
    add("--quiet", action="store_true", help="print only the result")
    args = parse_with_presets(parser, argv, PRESETS)
    names = [entry.name for entry in args.hidden]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--hidden: expected each model once, got {repeated[0]} twice")
    # With --structure unstructured two models of a preset are the same: it is trained once.
    args.hidden = list(dict.fromkeys(_with_structure(x, args.structure) for x in args.hidden))
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
    return args


def _with_structure(entry: Entry, default: str) -> Entry:
    return entry if entry.density == 1 else entry._replace(structure=entry.structure or default)


def to_json(args: argparse.Namespace) -> dict[str, Any]:
    """The options as JSON values."""
    return options.to_json(args) | {"hidden": [entry.name for entry in args.hidden]}


def training_options(args: argparse.Namespace, entry: Entry, corpus: Corpus) -> dict[str, Any]:
    """The options in which a resumed run of a model must agree, as JSON values."""
    agreeing = {name: getattr(args, name) for name in TRAINING_OPTIONS}
    # A file may have been replaced, and the help texts change with the version of Python.
    size = len(corpus.vocabulary)
    data = f"{corpus.source} (SHA-256 {corpus.digest}, {size} different {args.tokens})"
    return agreeing | {"data": data, "hidden": entry.name}
