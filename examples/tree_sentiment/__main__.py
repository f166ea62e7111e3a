r"""Train a Tree-LSTM on trees whose every row has a label, and draw a tree with its predictions.

It is the constituency Tree-LSTM of Tai et al. 2015, "Improved Semantic Representations From
Tree-Structured Long Short-Term Memory Networks", for the sentiment of sentences and of all their
phrases. Trees of a batch have shapes of their own; they are packed into a script while the step
before is computed (jaxsparse.dynamic).

    python -m examples.tree_sentiment                             # about a minute of processor time
    python -m examples.tree_sentiment --data trees                # the Stanford Sentiment Treebank
    python -m examples.tree_sentiment --data trees --vectors glove.840B.300d.txt

Without --data it learns to compute: generated expressions of up to 12 digits in nested brackets,
with + - and *, modulo 10. Every part of an expression has its answer as its label. --data takes a
folder with train.txt, dev.txt and test.txt, a tree a line in brackets: (3 (2 It) (4 works)), with
labels from 0, very negative, to 4, very positive. The parts may be any trees with up to two
children a row. --vectors takes a text file with a word and its numbers a line, as GloVe's; other
words, and all without --vectors, begin with random ones. The words are those of train.txt, and
those of the other files that have a vector; all others share one vector.

The scores are the shares of rows, and of roots, whose likeliest class is right. Of sentiments also
the binary one: of sentences that are not neutral, the share for which the two positive classes
together are likelier than the two negative ones exactly if the sentence is positive. It comes from
the one model of five classes. The dev set decides which epoch counts, and training ends when
--patience epochs brought no better one. The picture shows a tree of the test set, or that of
--draw, which --resume draws at once where a run is finished.

Ctrl-C, SIGTERM and a closed terminal (unless under nohup) save the state after the step in flight,
and a signal more than a second later quits at once. --resume goes on from there, and the result is
that of an unbroken run, to the last bit on a CPU. A GPU adds the gradients of vectors up in no
fixed order. The data must be the same.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax

from jaxsparse import dynamic

from ..common.checkpoint import Checkpoints
from ..common.errors import UserError, memory_errors
from ..common.program import (
    Parser,
    describe,
    number,
    replacing,
    run_program,
    to_json,
    write_json,
)
from ..common.resumable import Loop
from .data import Dataset, load, parse, root_labels
from .drawing import draw, typical
from .training import OPTIMIZERS, TreeTrainer, best_epoch, steps_of_epoch, train

NAME = "tree_sentiment"
MEMORY_OPTIONS = "--batch, --hidden or --features"

# Those of sentiments are those of the program of Tai et al.
SENTIMENT = {
    "features": 300,
    "hidden": 150,
    "dropout": 0.5,
    "optimizer": "adagrad",
    "learning_rate": 0.05,
}
ARITHMETIC = {
    "features": 32,
    "hidden": 64,
    "dropout": 0.0,
    "optimizer": "adam",
    "learning_rate": 3e-3,
}

# What decides the parameters and the loss curve: a resumed run must agree in these.
TRAINING_OPTIONS = (
    *SENTIMENT, "batch", "l2", "table_learning_rate", "epochs", "patience", "seed", "steps",
)  # fmt: skip


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parses the options; the defaults of some depend on what is learned."""
    parser = Parser("python -m examples.tree_sentiment", __doc__)
    add, count, rate = parser.add_argument, number(int, 1, 2**31), number(float, 0)

    def of_both(name: str) -> str:
        return f"({ARITHMETIC[name]:g}; with --data {SENTIMENT[name]:g})"

    add("--data", type=Path, help="folder of train.txt, dev.txt, test.txt (arithmetic)")
    add("--vectors", type=Path, help="text file of word vectors, for --data (random ones)")
    add("--output", type=Path, default=f"{NAME}_out", help="folder to write to (%(default)s)")
    add("--features", type=count, help=f"in a vector, without --vectors {of_both('features')}")
    add("--hidden", type=count, help=f"units of the Tree-LSTM {of_both('hidden')}")
    add("--batch", type=count, default=25, help="trees in a step, at most (%(default)s)")
    add("--dropout", type=number(float, 0, 1), help=f"of states {of_both('dropout')}")
    add("--optimizer", choices=OPTIMIZERS, help="(adam; with --data adagrad)")
    add("--learning-rate", type=rate, help=of_both("learning_rate"))
    add("--l2", type=rate, default=1e-4, help="penalty on all but vectors (%(default)s)")
    add("--table-learning-rate", type=rate, default=0.1, help="of vectors, by SGD (%(default)s)")
    add("--epochs", type=count, default=12, help="at most (%(default)s)")
    add("--patience", type=count, default=4, help="epochs without a better one (%(default)s)")
    add("--draw", help="a tree in brackets to draw, for --data (one of the test set)")
    add("--resume", action="store_true", help="continue from the newest checkpoint in --output")
    add("--seed", type=number(int, 0, 2**32), default=0, help="of data, model and order (0)")
    add("--quiet", action="store_true", help="print only the result")
    args = parser.parse_args(argv)
    parser.set_defaults(**(ARITHMETIC if args.data is None else SENTIMENT))
    return parser.parse_args(argv)


def describe_scores(scores: dict[str, float], dataset: Dataset) -> str:
    """The scores of the test set in words."""
    labels = root_labels(dataset.test)
    text = (
        f"test: {scores['roots']:.2%} of {len(labels):,} roots right in "
        f"{len(dataset.classes)} classes, {scores['rows']:.2%} of all rows"
    )
    if "binary" not in scores:
        return text
    count = int((labels != dataset.neutral).sum())
    return (
        f"{text}; binary {scores['binary']:.2%} of the {count:,} roots that are not neutral, by "
        f"the probabilities of the {len(dataset.classes)} classes"
    )


def tree_to_draw(text: str | None, dataset: Dataset) -> dynamic.Graphs:
    """The tree of --draw, by default one of the test set."""
    if text is None:
        return dataset.test[[typical(dataset.test)]]
    if dataset.neutral is None:
        raise UserError("--draw: expected --data, since arithmetic has no words")
    return parse("--draw", text, vocabulary=dataset.test.vocabulary)[[0]]


def write_results(
    args: argparse.Namespace,
    about: dict[str, Any],
    trainer: TreeTrainer,
    loop: Loop,
    tree: dynamic.Graphs,
) -> None:
    """Writes metrics and the picture, and prints the result."""
    dataset, best = trainer.dataset, best_epoch(loop.curve)
    scores = trainer.score(dataset.test)
    result = {"steps": loop.step, "curve": loop.curve, "best_epoch": best, "test": scores}
    speed = loop.tokens_per_second
    if speed is not None:  # None where a finished run was resumed: no step was timed.
        result["trees_per_second"] = speed
    write_json(args.output / "metrics.json", about | result)
    picture = args.output / f"{NAME}.png"
    title = f"Tree-LSTM of {args.hidden} units"
    with replacing(picture) as aside:
        draw(title, loop.curve, best, dataset, tree, trainer.classify(tree)).savefig(
            aside, dpi=85, pil_kwargs={"optimize": True}
        )
    pace = "" if speed is None else f", {speed:,.0f} trees/s"
    print(
        f"{describe_scores(scores, dataset)}; epoch {best} of {len(loop.curve) - 1}{pace}; "
        f"picture: {picture}"
    )


def run(args: argparse.Namespace) -> None:
    """Trains the model, and writes what came out."""
    dataset = load(args.data, args.vectors, args.features, args.seed)
    tree = tree_to_draw(args.draw, dataset)
    args.features = dataset.vectors.shape[1]
    args.eval_every = args.checkpoint_every = steps_of_epoch(dataset, args.batch)
    args.steps = args.epochs * args.eval_every
    options = {name: getattr(args, name) for name in TRAINING_OPTIONS}
    # Files may have been replaced, and random numbers change with the version of NumPy.
    options["data"] = f"{dataset.source} (SHA-256 {dataset.digest})"
    checkpoints = Checkpoints(NAME, args.output / "checkpoints", options)
    checkpoints.check(args.resume)
    checkpoints.begin()
    device = jax.local_devices()[0]
    if not args.quiet:
        print(f"device: {device.device_kind}")
        print(f"data: {dataset.description}", flush=True)
    about = describe(to_json(args), [device])
    about["data"] = {"source": dataset.source, "sha256": dataset.digest}
    with memory_errors("training", MEMORY_OPTIONS):
        trainer, loop = train(dataset, checkpoints, args)
        write_results(args, about, trainer, loop, tree)


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    return run_program(NAME, lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
