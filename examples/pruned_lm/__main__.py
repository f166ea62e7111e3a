r"""Train a small GPT, prune it while it trains, and decode with dense, sparse and packed weights.

The model predicts a text token by token, as GPT-2 does. For each sparsity one is trained from the
same start, on the same batches: dense at first, then pruned along the polynomial of Zhu and Gupta
2017, "To prune, or not to prune", and at the end with a fixed pattern. Then every form of it
predicts the held-out text and decodes a whole context, one token after the other, with a cache of
keys and values; the table has perplexity, tokens per second and bytes.

    python -m examples.pruned_lm                                  # several minutes on two cores
    python -m examples.pruned_lm --data wiki.train.tokens --preset gpu
    python -m examples.pruned_lm --shapes llama-7b                # speed alone, no training

The forms, all in bfloat16: dense; CSR (jaxsparse.nn.SparseLinear); packed for as many columns as
texts are decoded at once (jaxsparse.nn.PackedLinear): by gaps for up to 16 if that is predicted
to be faster, else in cells; and the fastest of the three for each layer, as
jaxsparse.pruning.sparsify finds it. Only GPUs have a kernel for packed weights: on a CPU they are
written out for each product, so that its speed says nothing of them.

Without --data it learns from the help texts that come with Python (pydoc_data.topics). --data takes
any text file, in UTF-8 or, with --tokens bytes, of any kind. Perplexity is that of a token, which
is a character or a byte.

--shapes measures the products of one step of a known decoder, with random weights: for Llama-2-7B
128 products with 6.5 billion weights. It says how fast such a pruned model would decode, and
nothing of how well.

Ctrl-C, SIGTERM and a closed terminal (unless under nohup) save the state after the step in flight,
and a signal more than a second later quits at once. --resume goes on from there, and the result is
that of an unbroken run, to the last bit on a CPU, except for speeds. The text must be the same.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..common import text
from ..common.checkpoint import Checkpoints, open_all
from ..common.errors import UserError, memory_errors
from ..common.program import (
    Parser,
    describe,
    number,
    parse_with_presets,
    replacing,
    run_program,
    to_json,
    write_json,
)
from .measuring import measure_forms, passage
from .report import draw, draw_shapes, percent, rows_of, table
from .shapes import SHAPES, measure_shapes
from .training import Windows, pruning_steps, train

NAME = "pruned_lm"
MEMORY_OPTIONS = "--batch, --context, --hidden or --layers"

# What decides the parameters and the loss curve: a resumed run must agree in these.
TRAINING_OPTIONS = (
    "tokens", "held_out", "layers", "heads", "hidden", "context", "batch", "steps", "prune_from",
    "prune_to", "prune_every", "learning_rate", "dtype", "eval_every", "seed",
)  # fmt: skip

PRESETS: dict[str, dict[str, Any]] = {
    # Matrices of one to four million weights.
    "gpu": {
        "hidden": 1024,
        "layers": 8,
        "heads": 16,
        "context": 512,
        "batch": 32,
        "steps": 4000,
        "learning_rate": 5e-4,
        "dtype": "bfloat16",
        "eval_every": 200,
        "checkpoint_every": 400,
    },
}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parses and checks the options."""
    parser = Parser("python -m examples.pruned_lm", __doc__)
    add, count, share = parser.add_argument, number(int, 1, 2**31), number(float, 0, 1)
    add("--preset", choices=PRESETS, help="a larger model; other options override it")
    add("--data", type=Path, help="a text file (the help texts of Python)")
    add("--tokens", choices=text.TOKENS, default="characters", help="of the text (characters)")
    add("--held-out", type=share, default=0.05, help="share of the text at its end (0.05)")
    add("--output", type=Path, default=f"{NAME}_out", help="folder to write to (%(default)s)")
    add("--sparsities", type=share, nargs="+", default=[0.0, 0.5, 0.7, 0.9],
        help="a model for each; 0 is dense (0 0.5 0.7 0.9)")  # fmt: skip
    add("--hidden", type=count, default=128, help="features (%(default)s)")
    add("--layers", type=count, default=2, help="blocks (%(default)s)")
    add("--heads", type=count, default=4, help="attention heads (%(default)s)")
    add("--context", type=number(int, 2, 2**31), default=64, help="tokens it sees (%(default)s)")
    add("--batch", type=count, default=16, help="passages in a step (%(default)s)")
    add("--steps", type=number(int, 2, 2**31), default=600, help="training steps (%(default)s)")
    add("--prune-from", type=share, default=0.2, help="share of the steps before pruning (0.2)")
    add("--prune-to", type=share, default=0.75, help="share after which masks stay (0.75)")
    add("--prune-every", type=count, default=10, help="steps between new masks (%(default)s)")
    add("--learning-rate", type=number(float, 0), default=3e-3, help="the highest (0.003)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of training")
    add("--eval-every", type=count, default=100, help="steps between scores (%(default)s)")
    add("--checkpoint-every", type=count, default=200, help="steps between checkpoints (200)")
    add("--resume", action="store_true", help="continue what is in --output")
    add("--decode-batch", type=count, default=1, help="texts that are decoded at once (1)")
    add("--prompt", help="what the sample begins with (the beginning of what is held out)")
    add("--temperature", type=number(float, 1e-3), default=0.7, help="of the sample (0.7)")
    add("--shapes", choices=SHAPES, help="measure products of these shapes, and train nothing")
    add("--decoder-layers", type=count, help="of --shapes (as many as that model has)")
    add("--decode-steps", type=count, default=64, help="of --shapes, at a time (%(default)s)")
    add("--seed", type=number(int, 0, 2**32), default=0, help="of model, batches and sample (0)")
    add("--quiet", action="store_true", help="print only the result")
    args = parse_with_presets(parser, argv, PRESETS)
    if args.hidden % args.heads:
        raise UserError(f"--hidden: expected a multiple of --heads {args.heads}, got {args.hidden}")
    if args.prune_to <= args.prune_from:
        raise UserError(
            f"--prune-to: expected more than --prune-from {args.prune_from:g}, got "
            f"{args.prune_to:g}"
        )
    names = [name_of(sparsity) for sparsity in args.sparsities]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--sparsities: expected each once, got that of {repeated[0]} twice")
    if args.prompt == "":
        raise UserError("--prompt: expected a character at least, got none")
    args.sparsities = sorted(args.sparsities)
    return args


def name_of(sparsity: float) -> str:
    """The folder of a model."""
    return f"{100 * sparsity:g}_percent" if sparsity else "dense"


def result_of(
    sparsity: float,
    corpus: text.Corpus,
    windows: Windows,
    prompt: np.ndarray,
    checkpoints: Checkpoints,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Trains a model and measures its forms."""
    trained, loop = train(sparsity, name_of(sparsity), corpus, windows, checkpoints, args)
    result = {"sparsity": sparsity, "steps": loop.step, "curve": loop.curve}
    if loop.tokens_per_second is not None:  # None where a finished run was resumed.
        result["training_tokens_per_second"] = loop.tokens_per_second
    forms = measure_forms(trained, sparsity, windows, args)
    return result | {"forms": forms, "sample": passage(trained, corpus, prompt, args)}


def run_training(args: argparse.Namespace) -> None:
    """Trains the models, one after the other, and writes what came out."""
    corpus = text.load(args.data, args.tokens, args.held_out, args.context + 1, "--context")
    windows = Windows.of(corpus.train[-1:], corpus.held_out, args.context)
    prompt = corpus.encode(args.prompt) if args.prompt else corpus.held_out[: args.context // 4 + 1]
    agreeing = {name: getattr(args, name) for name in TRAINING_OPTIONS}
    # A file may have been replaced, and the help texts change with the version of Python.
    agreeing["data"] = f"{corpus.source} (SHA-256 {corpus.digest})"
    checkpoints = [
        Checkpoints(NAME, args.output / name_of(sparsity), agreeing | {"sparsity": sparsity})
        for sparsity in args.sparsities
    ]
    open_all(checkpoints, args.resume)
    device = jax.local_devices()[0]
    if not args.quiet:
        print(f"device: {device.device_kind}\ndata: {corpus.description}", flush=True)
    models = []
    for sparsity, saved in zip(args.sparsities, checkpoints, strict=True):
        with memory_errors(f"a model of sparsity {sparsity:g}", MEMORY_OPTIONS):
            models.append(result_of(sparsity, corpus, windows, prompt, saved, args))
    about = describe(to_json(args), [device]) | {"text": corpus.identity}
    write_json(args.output / "metrics.json", about | {"models": models})
    picture = args.output / f"{NAME}.png"
    with replacing(picture) as aside:
        draw(models, pruning_steps(args)).savefig(aside, dpi=100)
    print(f"{table(rows_of(models))}\n")
    if device.platform == "cpu":
        print(
            "On a CPU packed weights are written out for each product: it has no kernel for them."
        )
    print(f"picture: {picture}")
    last = models[-1]
    how = f"written by the model of sparsity {percent(last['sparsity'])}"
    print(f"{how} at temperature {args.temperature:g}:\n\n{text.printable(last['sample'])}")


def run_shapes(args: argparse.Namespace) -> None:
    """Measures the products of a known decoder, and writes what came out."""
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output: expected a writable folder, got: {error}") from error
    device = jax.local_devices()[0]
    rows = measure_shapes(args)
    title = (
        f"{args.shapes}: {rows[0]['products']} products with {rows[0]['weights'] / 1e9:.2f} "
        f"billion random weights in bfloat16, batch {args.decode_batch}"
    )
    about = describe(to_json(args), [device])
    write_json(args.output / "shapes.json", about | {"shapes": args.shapes, "rows": rows})
    picture = args.output / "shapes.png"
    with replacing(picture) as aside:
        draw_shapes(f"{title}, on {device.device_kind}", rows).savefig(aside, dpi=100)
    print(f"{title}:\n\n{table(rows)}\n")
    print("Random weights show how fast such products are, and nothing of the quality of a model.")
    print(f"picture: {picture}")


def run(args: argparse.Namespace) -> None:
    """Trains and measures, or only measures."""
    if args.shapes is not None:
        run_shapes(args)
    else:
        run_training(args)


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    return run_program(NAME, lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
