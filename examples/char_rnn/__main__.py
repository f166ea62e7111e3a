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
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from ..common import text
from ..common.checkpoint import Checkpoints
from ..common.errors import memory_errors
from ..common.program import Parser, describe, replacing, run_program, to_json, write_json
from .model import Hidden, sample
from .options import (
    MEMORY_OPTIONS,
    NAME,
    add_options,
    check_options,
    load_corpus,
    parse_hidden,
    parts_of,
    print_setup,
    training_options,
)
from .training import train


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parses and checks the options."""
    parser = Parser("python -m examples.char_rnn", __doc__)
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


def draw(title: str, curve: list[dict[str, Any]], parts: dict[str, tuple[int, int]]) -> Figure:
    """Draws a learning curve, and the first and the last step of the parts of training."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    ax = figure.subplots()
    for name in ("train", "held_out"):
        label = name.replace("_", " ")
        ax.plot([x["step"] for x in curve], [x[name] for x in curve], "o-", label=label)
    for i, (name, steps) in enumerate(parts.items()):
        ax.axvspan(*steps, alpha=0.15, color=f"C{i + 2}", linewidth=0, label=name)
    ax.set(xlabel="step", title=f"{title}: bits per character")
    ax.grid(alpha=0.3)
    ax.legend()
    return figure


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
        trainer, loop = train(args.hidden, corpus, checkpoints, args)
        model = trainer.sparse_model or trainer.model
        drawn = sample(
            model, prompt, length=args.sample_length, temperature=args.temperature, seed=args.seed
        )
    passage = corpus.decode(np.concatenate([prompt, drawn]))
    speed = loop.tokens_per_second
    result = {"steps": loop.step, "curve": loop.curve, "layers": trainer.layers}
    if speed is not None:  # None where a finished run was resumed: no step was timed.
        result["tokens_per_second"] = speed
    about |= {"text": corpus.identity}
    write_json(args.output / "metrics.json", about | result | {"sample": passage})
    picture = args.output / "char_rnn.png"
    parts = parts_of(args) if args.hidden.density < 1 else {}
    with replacing(picture) as aside:
        draw(f"{name} units", loop.curve, parts).savefig(aside, dpi=120)
    before, after = (loop.curve[i]["held_out"] for i in (0, -1))
    pace = "" if speed is None else f", {speed:,.0f} tokens/s"
    print(
        f"{name}, held out: {before:.3f} -> {after:.3f} bits/char in {loop.step} steps{pace}; "
        f"picture: {picture}"
    )
    print(f"drawn at temperature {args.temperature:g}:\n\n{text.printable(passage)}")


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    return run_program(NAME, lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
