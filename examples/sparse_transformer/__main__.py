r"""Train an autoregressive image Transformer with sparse attention, then draw samples from it.

The model predicts a photograph byte by byte (red, green, blue, in raster order), as in section
VII-C of Gale et al. 2020, "Sparse GPU Kernels for Deep Learning". Every position attends to a dense
band of the latest bytes and to random older ones, the likelier the nearer; all heads and layers
share this mask. The score is bits per dimension, of which a uniform guess takes 8.

    python -m examples.sparse_transformer                     # about two minutes on two cores
    python -m examples.sparse_transformer --compare           # and its dense twin beside it
    python -m examples.sparse_transformer --data cifar-10-batches-bin --size 32 --steps 5000
    python -m examples.sparse_transformer --preset paper --data train_data_batch_1.npz

Without --data it learns from the colour photographs inside the scikit-image package. --data takes
a folder of photographs, an .npz file with a uint8 array (N, height, width, 3), an .npz file of
downsampled ImageNet as it is published (a uint8 array named data, (N, 3 * side * side), planes of
red, green and blue), or CIFAR-10: the folder of its binary version, of its Python version, or of
sheets data_batch_*.png, test_batch.png with an image of 32 x 32 pixels in each row.

Ctrl-C, SIGTERM and a closed terminal (unless under nohup) save the state after the step in flight,
and a signal more than a second later quits at once; --resume goes on from there, and the
result is that of an unbroken run, to the last bit on a CPU. A GPU adds up the gradients of the
embeddings in no fixed order, unless XLA_FLAGS=--xla_gpu_deterministic_ops=true.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..common.errors import UserError, memory_errors
from ..common.program import (
    Parser,
    describe,
    number,
    parse_with_presets,
    run_program,
    to_json,
    write_json,
)
from . import data
from .model import PAPER_SIZES
from .training import (
    MEMORY_OPTIONS,
    NAME,
    checkpoints_of,
    choose_devices,
    print_setup,
    train_and_draw,
)

# The paper leaves open the optimizer, its learning rate and the dtype.
PAPER_TRAINING = {
    "batch": 8,
    "steps": 140_000,
    "learning_rate": 3e-4,
    "dtype": "bfloat16",
    "eval_every": 1000,
    "checkpoint_every": 1000,
}
PRESETS = {"paper": PAPER_SIZES | PAPER_TRAINING}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parses and checks the options, and derives the defaults that depend on others."""
    parser = Parser(
        "python -m examples.sparse_transformer",
        description=__doc__,
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


def run(args: argparse.Namespace) -> None:
    """Trains a model, and writes what came out."""
    if args.compare:
        from experiments.sparse_transformer import compare  # The paper's study needs more code.

        return compare(args)
    dataset = data.load(args.data, args.size)
    devices = choose_devices(args.batch, args.devices)
    checkpoints = checkpoints_of(args)
    checkpoints.check(args.resume)
    checkpoints.begin()
    if not args.quiet:
        print_setup(dataset, devices)
    about = describe(to_json(args), devices)
    with memory_errors(f"training with {args.attention} attention", MEMORY_OPTIONS):
        result, _ = train_and_draw(args, dataset, devices, checkpoints)
    write_json(args.output / "metrics.json", about | result)


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    return run_program(NAME, lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
