"""The program: trains, samples, draws, and with --compare does so twice."""

from __future__ import annotations

import argparse
import copy
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxsparse import Topology, masks
from jaxsparse.nn import SparseAttention

from ..common.checkpoint import Checkpoints
from ..common.errors import OutOfMemoryError, memory_errors
from ..common.files import write_json
from ..common.options import to_json
from ..common.program import describe, run_program
from ..common.progress import Progress
from . import data
from .comparison import PAPER, is_papers_model, measure, table
from .drawing import draw
from .model import Transformer, dense_attention
from .options import parse_args, training_options
from .sampling import padded_rows, sample
from .trainer import Trainer, choose_devices
from .training import make_optimizer, train

NAME = "sparse_transformer"
MEMORY_OPTIONS = "--batch, --size, --hidden, --layers or --samples"


def run(args: argparse.Namespace) -> None:
    """Trains one model, or both kinds to compare them, and writes what came out."""
    dataset = data.load(args.data, args.size)
    devices = choose_devices(args.batch, args.devices)
    runs = runs_of(args)
    checkpoints = open_checkpoints(runs)
    if not args.quiet:
        count = jax.local_device_count()
        print(f"device: {devices[0].device_kind}, {len(devices)} of {count} used")
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
    if args.compare:
        with_paper = is_papers_model(args)
        paper = {"paper": PAPER} if with_paper else {}
        write_json(args.output / "comparison.json", {**about, **results, **paper})
        print(table(results, with_paper))
    else:
        write_json(args.output / "metrics.json", {**about, **results[args.attention]})


def runs_of(args: argparse.Namespace) -> list[argparse.Namespace]:
    """The options of one run, or of the two to compare."""
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
    checkpoints = [Checkpoints(NAME, x.output / "checkpoints", training_options(x)) for x in runs]
    # Of two runs to compare, the second may not have begun when the program was stopped.
    begun = [x for x in checkpoints if x.newest() is not None] or checkpoints
    for each, saved in zip(runs, checkpoints, strict=True):
        each.resume = each.resume and saved in begun
        if each.resume:
            saved.check_resume()
        else:
            saved.check_start()
    # All at once: what an older comparison left of the second run is not to look begun when the
    # program is stopped in the first.
    for each, saved in zip(runs, checkpoints, strict=True):
        if not each.resume:
            saved.clear()
    return checkpoints


def train_and_draw(
    args: argparse.Namespace,
    dataset: data.Dataset,
    devices: list[jax.Device],
    checkpoints: Checkpoints,
) -> dict[str, Any]:
    """Trains one model, draws its picture, and returns its metrics."""
    length = 3 * args.size**2
    topology = make_topology(args, length) if args.attention == "sparse" else None
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
        print(f"model: {parameters:,} parameters on sequences of {length:,} bytes")
        print(f"mask: {topology or 'dense, causal'}", flush=True)
    optimizer = make_optimizer(args.learning_rate, args.steps)
    tokens = np.zeros((args.batch, length), np.int32)
    trainer = Trainer(model, optimizer, tokens, devices)
    progress = Progress()
    if args.resume:
        progress, trainer.state = checkpoints.restore(trainer.state)
    speed = train(trainer, dataset, progress, checkpoints, args)

    nnx.update(model, jax.device_put(trainer.state.params, devices[0]))
    rows = None if topology is None else padded_rows(topology)
    images = sample_images(model, rows, dataset, args)
    picture = args.output / f"{args.attention}_transformer.png"
    draw(picture, images, args.size, topology, progress.curve)
    before, after = (progress.curve[i]["held_out"] for i in (0, -1))
    pace = "" if speed is None else f", {speed:,.0f} tokens/s"
    print(
        f"{args.attention}, held out: {before:.3f} -> {after:.3f} bits/dim in {progress.step} "
        f"steps{pace}; picture: {picture}"
    )
    result = {"steps": progress.step, "curve": progress.curve}
    if speed is not None:  # None where a finished run was resumed: no step was timed.
        result["tokens_per_second"] = speed
    if not args.compare:
        return result
    # A real batch: on equal tokens the gradient of their embedding adds up in one place.
    seed = (args.seed, data.TRAINING, progress.step)
    return result | measure(
        trainer, data.crops(dataset.train, args.size, args.batch, dataset.scales, seed)
    )


def make_topology(args: argparse.Namespace, length: int) -> Topology:
    """The paper's mask: a band, and older positions that are the likelier the nearer."""
    older = masks.random(args.sparsity, length, band_width=args.band, seed=args.seed)
    mask = (masks.band(args.band) | older) & masks.causal()
    return Topology.from_mask(mask, (length, length))


def sample_images(
    model: Transformer, rows: Any, dataset: data.Dataset, args: argparse.Namespace
) -> dict[str, jax.Array]:
    """Rows of images, as tokens: held out, their lower halves drawn, and drawn altogether."""
    originals = data.crops(
        dataset.held_out, args.size, args.samples, dataset.scales, (args.seed, data.DRAWING, 0)
    )
    known = np.zeros((2 * args.samples, originals.shape[1]), bool)
    known[: args.samples, : args.size // 2 * args.size * 3] = True
    drawn = sample(model, np.tile(originals, (2, 1)), known, rows, jax.random.key(args.seed))
    completed, generated = jnp.split(drawn, 2)
    titles = ("held out", "lower half\ngenerated", "all\ngenerated")
    return dict(zip(titles, (originals, completed, generated), strict=True))


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    return run_program(NAME, lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
