"""What the tests of the character models share: small options, a short text, mistakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import jax
import numpy as np
import program_runs
import pytest

for package in ("flax", "matplotlib", "optax", "orbax.checkpoint", "tqdm"):
    pytest.importorskip(package)

from examples.char_rnn.__main__ import parse_args  # noqa: E402
from examples.char_rnn.model import Hidden  # noqa: E402
from examples.char_rnn.options import load_corpus  # noqa: E402
from examples.char_rnn.training import TextTrainer  # noqa: E402
from examples.char_rnn.windows import Passage, Windows  # noqa: E402

TINY = ["--embedding=8", "--batch=4", "--length=8", "--sample-length=20", "--epochs=4"]
TINY += ["--steps-per-epoch=6", "--eval-every=7", "--checkpoint-every=10", "--held-out=0.1"]
TINY += ["--quiet"]
STEPS = 24

# Words of a command line, and a part of the message. Run by `reported`.
MISTAKES = [
    ("--data nowhere", "--data nowhere: expected a text file, got:"),
    ("--data .", "--data .: expected a text file, got:"),
    ("--data binary", "--data: expected text in UTF-8, got byte 0xff at offset 1;"),
    ("--data short", "--data: expected at least 33 characters to train on, got 9"),
    (
        "--held-out 0",
        "expected at least 1 characters held out, got 0; raise --held-out",
    ),
    ("--held-out 1", "argument --held-out: expected float in [0, 1), got 1"),
    ("--tokens words", "argument --tokens: invalid choice"),
    ("--hidden 8:0", "units:density:structure with a density in (0, 1], got 8:0"),
    ("--hidden wide", "units:density:structure with a density in (0, 1], got wide"),
    ("--hidden 8:", "expected units, units:density or units:density:structure with"),
    ("--hidden 8:0.5:unstructured:2", "(0, 1], got 8:0.5:unstructured:2"),
    ("--hidden 8:0.5:blocks", "expected a structure of unstructured, row_balanced, refilled, "),
    ("--cell rnn", "argument --cell: invalid choice"),
    ("--structure blocks", "argument --structure: invalid choice"),
    ("--fixed-epochs 4", "--fixed-epochs: expected less than --epochs 4, got 4"),
    ("--sparse-epochs 3", "--sparse-epochs: expected at most --fixed-epochs 2, got 3"),
    ("--steps-per-epoch 1", "argument --steps-per-epoch: expected int in [2, "),
    ("--prompt \u2603", "--prompt: expected characters of the data, got '\u2603'"),
    ("--prompt=", "--prompt: expected a character at least, got none"),
    ("--temperature -1", "argument --temperature: expected float in [0, inf), got -1"),
    ("--output binary", "--output: expected a writable folder"),
    ("--unknown", "unrecognized arguments: --unknown"),
]


def reported(
    main: Callable[[list[str]], int], argv: list[str], capsys: pytest.CaptureFixture[str]
) -> str:
    """The line in which a program, run in an empty folder, reports a mistake, and no more."""
    Path("binary").write_bytes(b"a\xff")
    Path("short").write_text("ten bytes.")
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("char_rnn: error: ") and err.count("\n") == 1
    return err


def write_book(path: Path) -> Path:
    """Writes a short text."""
    path.write_text(topics["class"] + "é")
    return path


class Problem(NamedTuple):
    """A model in training, and the text it learns."""

    trainer: TextTrainer
    windows: Windows
    held_out: Passage

    def step(self, index: int) -> None:
        self.trainer.step(self.windows[index])

    def score(self) -> float:
        return self.trainer.score(self.held_out)


def make_problem(
    book: Path, density: float = 0.25, *argv: str, structure: str = "row_balanced"
) -> Problem:
    args = parse_args([*TINY, "--data", str(book), *argv])
    corpus = load_corpus(args)
    return Problem(
        TextTrainer(Hidden(16, density, structure), len(corpus.vocabulary), args),
        Windows(corpus.train, args.batch, args.length),
        Passage(corpus.train[-1:], corpus.held_out),
    )


def interrupt(monkeypatch: pytest.MonkeyPatch, stop: int, pruned: bool) -> None:
    """Lets Ctrl-C be pressed in the step of an index, of a pruned or of a dense model."""

    def counts(trainer: TextTrainer) -> bool:
        is_pruned = trainer.optimizer is not trainer.inner or trainer.sparse_model is not None
        return is_pruned == pruned

    program_runs.interrupt(monkeypatch, TextTrainer, stop, counts)


def assert_same_states(folder: Path, expected: Path) -> None:
    """Compares the whole state of training in two folders of checkpoints, bit by bit on a CPU."""
    states = [program_runs.saved_state(x, STEPS) for x in (folder, expected)]
    assert len(jax.tree.leaves(states[0])) > 10
    if jax.default_backend() == "cpu":
        jax.tree.map(np.testing.assert_array_equal, *states)
