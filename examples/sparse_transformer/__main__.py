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
import copy
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsparse.nn import SparseAttention

from ..common.checkpoint import Checkpoints, open_all
from ..common.errors import OutOfMemoryError, UserError, memory_errors
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
from ..common.transformer import dense_attention
from . import data
from .drawing import PAPER, complete_and_generate, draw, table
from .model import PAPER_SIZES, Transformer, make_topology
from .training import ImageTrainer, choose_devices, make_optimizer, measure, train, training_batch

NAME = "sparse_transformer"
MEMORY_OPTIONS = "--batch, --size, --hidden, --layers or --samples"

# What decides the parameters and the loss curve: a resumed run must agree in these. The number of
# devices is left out, as it changes no more than rounding.
TRAINING_OPTIONS = (
    "data", "attention", "size", "layers", "heads", "hidden", "filter", "band", "sparsity", "batch",
    "steps", "learning_rate", "dtype", "eval_every", "seed",
)  # fmt: skip

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
    parser = Parser("python -m examples.sparse_transformer", __doc__)
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


def runs_of(args: argparse.Namespace) -> list[argparse.Namespace]:
    """The options of the one run, or of the two to compare, which have folders of their own."""
    if not args.compare:
        return [args]
    runs = [copy.copy(args), copy.copy(args)]
    for each, attention in zip(runs, ("sparse", "dense"), strict=True):
        each.attention, each.output = attention, args.output / attention
    return runs


def open_checkpoints(runs: list[argparse.Namespace]) -> list[Checkpoints]:
    """Checks, before any work, that all runs may be resumed or started, as the options say.

    Deletes the checkpoints of finished runs that are to be started anew.
    """
    checkpoints = []
    for each in runs:
        options = {name: getattr(each, name) for name in TRAINING_OPTIONS}
        options["data"] = str(each.data.resolve()) if each.data else None
        checkpoints.append(Checkpoints(NAME, each.output / "checkpoints", options))
    open_all(checkpoints, runs[0].resume)
    return checkpoints


def train_and_draw(
    args: argparse.Namespace,
    dataset: data.Dataset,
    devices: list[jax.Device],
    checkpoints: Checkpoints,
) -> dict[str, Any]:
    """Trains one model and draws its picture; returns its metrics."""
    topology = None
    if args.attention == "sparse":
        topology = make_topology(args.size, args.band, args.sparsity, args.seed)
    model = Transformer(
        dense_attention if topology is None else SparseAttention(topology),
        size=args.size,
        layers=args.layers,
        heads=args.heads,
        hidden=args.hidden,
        mlp=args.filter,
        dtype=jnp.dtype(args.dtype),
        seed=args.seed,
    )
    if not args.quiet:
        parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
        print(f"model: {parameters:,} parameters on sequences of {3 * args.size**2:,} bytes")
        print(f"mask: {topology or 'dense, causal'}", flush=True)
    optimizer = make_optimizer(args.learning_rate, args.steps)
    trainer = ImageTrainer(model, optimizer, args.batch, devices)
    loop = train(trainer, dataset, checkpoints, args)

    nnx.update(model, jax.device_put(trainer.state.params, devices[0]))
    seed = (args.seed, data.DRAWING, 0)
    originals = data.crops(dataset.held_out, args.size, args.samples, dataset.scales, seed)
    images = complete_and_generate(model, originals, args.seed)
    picture = args.output / f"{args.attention}_transformer.png"
    with replacing(picture) as aside:
        draw(images, args.size, topology, loop.curve).savefig(aside, dpi=120)
    before, after = (loop.curve[i]["held_out"] for i in (0, -1))
    speed = loop.tokens_per_second
    pace = "" if speed is None else f", {speed:,.0f} tokens/s"
    print(
        f"{args.attention}, held out: {before:.3f} -> {after:.3f} bits/dim in {loop.step} "
        f"steps{pace}; picture: {picture}"
    )
    result = {"steps": loop.step, "curve": loop.curve}
    if speed is not None:  # None where a finished run was resumed: no step was timed.
        result["tokens_per_second"] = speed
    if args.compare:
        result |= measure(trainer, training_batch(dataset, args, loop.step))
    return result


def is_papers_model(args: argparse.Namespace) -> bool:
    """Whether the options give the model, and the size of its images, of the paper.

    Only with equal ones do the paper's figures compare.
    """
    return all(getattr(args, name) == value for name, value in PAPER_SIZES.items())


def run(args: argparse.Namespace) -> None:
    """Trains a model, or both kinds to compare them, and writes what came out."""
    dataset = data.load(args.data, args.size)
    devices = choose_devices(args.batch, args.devices)
    runs = runs_of(args)
    checkpoints = open_checkpoints(runs)
    if not args.quiet:
        print(
            f"device: {devices[0].device_kind}, {len(devices)} of {jax.local_device_count()} used"
        )
        print(f"data: {dataset.description}", flush=True)
    about = describe(to_json(args), devices)
    results: dict[str, dict[str, Any] | None] = {}
    for each, saved in zip(runs, checkpoints, strict=True):
        try:
            with memory_errors(f"training with {each.attention} attention", MEMORY_OPTIONS):
                results[each.attention] = train_and_draw(each, dataset, devices, saved)
        except OutOfMemoryError as error:
            if not args.compare:
                raise
            results[each.attention] = None  # As dense attention in a column of the paper's table.
            print(f"{NAME}: {error}", file=sys.stderr)
    if not args.compare:
        write_json(args.output / "metrics.json", about | results[args.attention])
        return
    with_paper = is_papers_model(args)
    paper = {"paper": PAPER} if with_paper else {}
    write_json(args.output / "comparison.json", about | results | paper)
    print(table(results, with_paper))


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    return run_program(NAME, lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
