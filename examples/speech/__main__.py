r"""Train a speech recogniser of stacked recurrent layers, and print what it hears.

It writes characters, and is trained by connectionist temporal classification (CTC), as in Amodei et
al. 2015, "Deep Speech 2", and Diamos et al. 2016, "Persistent RNNs": recurrent layers with skips
and norms, both ways in time, or forward only with a lookahead convolution, so that an output waits
for at most 800 ms of speech. The scores are the error rates of characters (CER) and of words (WER)
on held-out utterances, by greedy decoding without a language model.

    python -m examples.speech                                    # about a minute of processor time
    python -m examples.speech --direction forward --lookahead 8
    python -m examples.speech --cell lstm --layers 8 --skip 4 --recurrent-sparsity 0.9
    python -m examples.speech --data an4.npz --hidden 256 --steps 3000

Without --data it learns from generated digits: formants that glide and hiss, with random speakers,
tempos, rooms and noise. They are made up: error rates on them say nothing about real speech. --data
takes an .npz file with arrays

    feat      floating (frames, features): the frames of all utterances, one after another
    offset    integers (utterances + 1,): utterance i is feat[offset[i]:offset[i + 1]]
    text      strings (utterances,): what each one says
    split     strings (utterances,), optional: "train" or "test"; without it every tenth is held out
    frame_ms  a number, optional: milliseconds from one frame to the next; 10 without it

Ctrl-C, SIGTERM and a closed terminal (unless under nohup) save the state after the step in flight,
and a signal more than a second later quits at once. --resume goes on from there, and the result is
that of an unbroken run, to the last bit on a CPU. The data must be the same.

The study that compares depths and skips is python -m experiments.speech.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from ..common.checkpoint import Checkpoints
from ..common.errors import memory_errors
from ..common.program import Parser, describe, number, replacing, run_program, to_json, write_json
from .options import (
    MEMORY_OPTIONS,
    NAME,
    add_options,
    check_skip,
    load_corpus,
    print_setup,
    training_options,
)
from .training import SpeechTrainer, train

SAMPLES = 5  # Utterances that are printed.


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parses and checks the options."""
    parser = Parser("python -m examples.speech", __doc__)
    add = parser.add_argument
    add("--layers", type=number(int, 1, 2**31), default=3, help="recurrent layers (%(default)s)")
    add(
        "--skip",
        type=number(int, 0, 2**31),
        default=1,
        help="a residual connection over every so many layers; 0 for none (%(default)s)",
    )
    add("--seed", type=number(int, 0, 2**32), default=0, help="of parameters and digits (0)")
    add_options(parser)
    args = parser.parse_args(argv)
    check_skip("--skip", args.layers, args.skip)
    return args


def draw(title: str, curve: list[dict[str, Any]], trainer: SpeechTrainer, index: int) -> Figure:
    """Draws loss and error rates, and a held-out utterance: features, posteriors and text."""
    figure = Figure(figsize=(11, 10), layout="constrained")
    axes = figure.subplot_mosaic([["loss", "error"], ["features"] * 2, ["posteriors"] * 2])
    figure.suptitle(title)
    for ax, names in (("loss", ("train", "held_out")), ("error", ("cer", "wer"))):
        for name in names:
            label = {"cer": "characters", "wer": "words"}.get(name, name.replace("_", " "))
            scale = 100 if ax == "error" else 1
            points = [(x["step"], scale * x[name]) for x in curve if x[name] is not None]
            axes[ax].plot(*zip(*points, strict=True), "o-", label=label)
        axes[ax].set(xlabel="step", ylim=(0, None))
        axes[ax].grid(alpha=0.3)
        axes[ax].legend()
    axes["loss"].set_title("CTC loss, nats per character")
    axes["error"].set_title("error rate on held-out utterances, %")

    corpus = trainer.corpus
    features = corpus.held_out.frames(index)
    log_probabilities, heard = trainer.hear(index)
    seconds = len(features) * corpus.frame_ms / 1000
    ax = axes["features"]
    ax.imshow(features.T, aspect="auto", origin="lower", extent=(0, seconds, 0, features.shape[1]))
    ax.set(ylabel="feature", title=f"said:  {corpus.held_out.texts[index]}")
    ax = axes["posteriors"]
    probabilities = np.exp(log_probabilities)
    end = len(probabilities) * trainer.model.stride * corpus.frame_ms / 1000
    symbols = ["blank", *("space" if x == " " else x for x in corpus.alphabet)]
    image = ax.imshow(
        probabilities.T,
        aspect="auto",
        cmap="Greys",
        vmin=0,
        vmax=1,
        extent=(0, end, len(symbols) - 0.5, -0.5),
        interpolation="nearest",
    )
    ax.set_yticks(range(len(symbols)), symbols, fontsize=8)
    ax.set(xlim=(0, seconds), xlabel="seconds", title=f"heard:  {heard}")
    figure.colorbar(image, ax=ax, label="probability")
    return figure


def run(args: argparse.Namespace) -> None:
    """Trains the recogniser, and writes what came out."""
    corpus = load_corpus(args)
    checkpoints = Checkpoints(NAME, args.output / "checkpoints", training_options(args, corpus))
    checkpoints.check(args.resume)
    checkpoints.begin()
    if not args.quiet:
        print_setup(args, corpus)
    about = describe(to_json(args), jax.local_devices()[:1]) | {"data": corpus.identity}
    with memory_errors("training", MEMORY_OPTIONS):
        trainer, loop = train(corpus, checkpoints, args)
        heard = trainer.transcripts()[0]
    said = corpus.held_out.texts
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(trainer.model, nnx.Param)))
    result = {"steps": loop.step, "parameters": parameters, "curve": loop.curve}
    speed = loop.tokens_per_second
    if speed is not None:  # None where a finished run was resumed: no step was timed.
        result["utterances_per_second"] = speed
    samples = [{"said": a, "heard": b} for a, b in zip(said, heard, strict=True)]
    write_json(args.output / "metrics.json", about | result | {"held_out": samples})
    picture = args.output / "speech.png"
    longest = int(np.argmax(corpus.held_out.lengths))
    title = f"{args.layers} {args.cell} layers of {args.hidden} units"
    with replacing(picture) as aside:
        draw(title, loop.curve, trainer, longest).savefig(
            aside, dpi=85, pil_kwargs={"optimize": True}
        )
    before, after = loop.curve[0], loop.curve[-1]
    pace = "" if speed is None else f", {speed:,.1f} utterances/s"
    print(
        f"held out: {before['held_out']:.3f} -> {after['held_out']:.3f} nats/char, characters "
        f"wrong {before['cer']:.1%} -> {after['cer']:.1%}, words {before['wer']:.1%} -> "
        f"{after['wer']:.1%} in {loop.step} steps{pace}; picture: {picture}"
    )
    for sample in samples[:SAMPLES]:
        print(f"\n  said:  {sample['said']}\n  heard: {sample['heard']}")


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    return run_program(NAME, lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
