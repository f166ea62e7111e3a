"""Tests of examples/tree_sentiment at a tiny size: data, the step, scores, runs, resuming."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("matplotlib")
pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("tqdm")

import optax
from flax import nnx
from program_runs import assert_stops, interrupt, metrics_of, printed_by, saved_state

from examples.tree_sentiment import data, expressions
from examples.tree_sentiment.__main__ import main, parse_args
from examples.tree_sentiment.drawing import positions, typical, word_of_rows
from examples.tree_sentiment.model import words_of
from examples.tree_sentiment.training import TreeTrainer, best_epoch, predict
from jaxsparse import dynamic

pytestmark = pytest.mark.usefixtures("compiled_fast")

# 20 trees to train on, so 3 steps an epoch.
TINY = ["--hidden=8", "--features=6", "--batch=8", "--epochs=3", "--quiet"]
STEPS = 9
PLAIN = ["--dropout=0", "--l2=0.01", "--table-learning-rate=0.3"]
WORDS = {"dull": -2, "slow": -1, "a": 0, "film": 0, "fine": 1, "superb": 2}


def random_tree(rng: np.random.Generator, leaves: int) -> tuple[str, int]:
    """A tree in brackets, and its label: the sum of what its words are worth, within 0 and 4.

    Every row has a leaf to its left or right, so that equal numbers of trees have equal forms.
    """
    word = str(rng.choice(list(WORDS)))
    tree, worth = f"({WORDS[word] + 2} {word})", WORDS[word]
    if leaves > 1:
        other, of_other = random_tree(rng, leaves - 1)
        worth = min(max(worth + of_other, -2), 2)
        inside = [tree, other] if rng.random() < 0.5 else [other, tree]
        tree = f"({worth + 2} {' '.join(inside)})"
    return tree, worth


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small treebank."""
    path, rng = tmp_path_factory.mktemp("trees"), np.random.default_rng(0)
    for part, count in (("train", 20), ("dev", 7), ("test", 7)):
        trees = [random_tree(rng, 1 if i == 4 else 6)[0] for i in range(count)]
        (path / f"{part}.txt").write_text("\n".join(trees))
    return path


def make_trainer(folder: Path | None, *argv: str) -> TreeTrainer:
    args = parse_args([*TINY, *([] if folder is None else ["--data", str(folder)]), *argv])
    return TreeTrainer(data.load(args.data, None, args.features, args.seed), args)


# ---- Data ----


def text_of(tree: dynamic.Graphs, row: int) -> str:
    left, right = tree.children[row]
    word = word_of_rows(tree)[row]
    return word if left < 0 else f"({text_of(tree, left)} {word} {text_of(tree, right)})"


def test_answers_of_expressions_are_right() -> None:
    parts = expressions.generate((40, 9, 1), seed=3, most_numbers=7)
    assert [len(x) for x in parts] == [40, 9, 1]
    trees = [part[[i]] for part in parts for i in range(len(part))]
    texts = [text_of(tree, tree.roots[0]) for tree in trees]
    assert len(set(texts)) == 50  # What is tested is not trained on.
    assert set("+-*") < set("".join(texts))
    assert {len(tree.children) for tree in trees} == set(range(3, 14, 2))
    for tree in trees:
        for row, label in enumerate(tree.channel("label")):
            assert label == eval(text_of(tree, row)) % 10
    again = expressions.generate((40, 9, 1), seed=3, most_numbers=7)
    np.testing.assert_array_equal(again[0].children, parts[0].children)


def test_words_of_other_parts_are_known_by_their_vectors_alone(tmp_path: Path) -> None:
    for part, text in (
        ("train", "(3 (2 It) (4 works))"),
        ("dev", "(1 (2 It) (1 (1 fails) (2 \\/)))"),
        ("test", "(2 (2 -LRB-) (2 Nobody))"),
    ):
        (tmp_path / f"{part}.txt").write_text(text)
    vectors = tmp_path / "vectors.txt"
    vectors.write_text("it 1 2\nIt 3 4\n. . . 5 6\nother 0 0\n/ 7 8\n( 9 10\nnobody 11 12\n")
    alone = data.load(tmp_path, None, 2, 0)
    assert alone.vectors.shape == (3, 2)  # It, works, and what is not known.
    assert alone.dev.channel("word").tolist() == [0, 2, 2, -1, -1]
    given = data.load(tmp_path, vectors, 300, 0)
    vocabulary = given.train.vocabulary
    assert vocabulary == ("It", "works", "-LRB-", "Nobody", "\\/")
    assert given.vectors.shape == (6, 2)
    np.testing.assert_array_equal(given.vectors[[0, 2, 3, 4]], [[3, 4], [9, 10], [11, 12], [7, 8]])
    assert np.abs(given.vectors[[1, 5]]).max() <= 0.05
    assert given.dev.channel("word").tolist() == [0, 5, 4, -1, -1]
    assert word_of_rows(given.dev) == ["It", "?", "\\/", "", ""]
    assert alone.digest != given.digest


@pytest.mark.parametrize(
    ("files", "argv", "message"),
    [
        ({"dev": None}, "", "expected train.txt, dev.txt, test.txt, got: "),
        ({"test": "(2 (2 a) (2 b)"}, "", "test.txt: expected trees in brackets, got: tree 0, line"),
        ({"dev": "\n \n"}, "", "dev.txt: expected trees in brackets, got none"),
        ({"train": "(2 a)(2 (2 a) (5 b))"}, "", "expected labels from 0 to 4, got 5 in tree 2"),
        ({"train": "(2 (2 a) (2 b) (2 c))"}, "", "train.txt: expected trees in brackets, got: "),
        ({}, "--vectors nowhere", "--vectors nowhere: expected a word and its numbers a line, got"),
        ({}, "--vectors bad.txt", "expected a word and 3 numbers a line, got: could not convert"),
        ({}, "--vectors few.txt", "expected a word and 3 numbers a line, got: 2 numbers in line 2"),
        ({}, "--vectors others.txt", "expected vectors of words in --data, got none"),
        ({}, "--draw=(2", "--draw: expected trees in brackets, got: tree 0, line 1"),
        ({}, "--data none", "--data none: expected train.txt, dev.txt, test.txt, got: "),
        ({}, "--resume", "--resume: expected a checkpoint in tree_sentiment_out/checkpoints, got"),
        ({}, "--dropout 1", "argument --dropout: expected float in [0, 1), got 1"),
        ({}, "--optimizer sgd", "argument --optimizer: invalid choice"),
        ({}, "--epochs 0", "argument --epochs: expected int in [1, "),
    ],
)
def test_reports_a_mistake_in_one_line(
    files: dict[str, str | None],
    argv: str,
    message: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    trees = tmp_path / "trees"
    shutil.copytree(folder, trees)
    for part, text in files.items():
        (trees / f"{part}.txt").unlink()
        if text is not None:
            (trees / f"{part}.txt").write_text(text)
    Path("bad.txt").write_text("a 1 2 3\nfilm 1 x 3\n")
    Path("few.txt").write_text("a 1 2 3\nfilm 1 2\n")
    Path("others.txt").write_text("b 1 2 3\n")
    assert main([*TINY, "--data=trees", *argv.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("tree_sentiment: error: ")
    assert message in err


@pytest.mark.parametrize("option", ["--vectors", "--draw"])
def test_arithmetic_has_no_words(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "GENERATED", (1, 1, 1))
    assert main([*TINY, option, "(2 a)"]) == 2
    assert f"{option}: expected --data" in capsys.readouterr().err


# ---- Training ----


def test_a_step_is_that_of_the_gradient_by_the_whole_table(folder: Path) -> None:
    trainer = make_trainer(folder, *PLAIN)
    state, script = jax.tree.map(jnp.copy, trainer.state), next(trainer.training_scripts(0))
    labels = np.asarray(script.row("label"))
    rows, trees = np.flatnonzero(labels >= 0), int(script.used_graphs)

    @jax.jit
    def loss_and_grads(params: Any, table: Any) -> Any:
        def loss(params: Any, table: Any) -> Any:
            found = jax.nn.log_softmax(nnx.merge(trainer.graph, params)(script, table[words]))
            return -found[rows, labels[rows]].sum() / trees

        words = words_of(script)
        return jax.value_and_grad(loss, (0, 1))(params, table)

    total, (grads, of_table) = loss_and_grads(state.params, state.table)
    mean = trainer.step(script)
    np.testing.assert_allclose(mean, total * trees / len(rows), rtol=1e-5)
    table = state.table - 0.3 * of_table
    np.testing.assert_allclose(trainer.state.table, table, rtol=1e-5, atol=1e-6)
    read = np.unique(script.leaf("word"))
    read = read[read >= 0]
    assert len(read) < script.used_leaves  # Some word comes twice.
    unread = np.setdiff1d(np.arange(len(table)), read)
    np.testing.assert_array_equal(trainer.state.table[unread], state.table[unread])
    assert (trainer.state.table[read] != state.table[read]).any()
    penalised = jax.tree.map(lambda g, p: g + 0.01 * p, grads, state.params)
    adagrad = optax.adagrad(0.05, initial_accumulator_value=0.0)
    updates, _ = adagrad.update(penalised, adagrad.init(state.params))
    # Adagrad's first step has the gradient's sign alone, which rounding decides near 0.
    for new, old, update, grad in zip(
        *map(jax.tree.leaves, (trainer.state.params, state.params, updates, penalised)), strict=True
    ):
        sure = np.abs(grad) > 1e-4
        assert sure.any()
        np.testing.assert_allclose((new - old)[sure], update[sure], rtol=1e-2, atol=1e-6)


def test_scores_are_those_of_trees_one_by_one(folder: Path) -> None:
    trainer = make_trainer(folder, *PLAIN)
    for script, _ in zip(trainer.training_scripts(0), range(30), strict=False):
        trainer.step(script)
    graphs, state, layout = trainer.dataset.dev, trainer.state, trainer.layout
    form = dynamic.pack(graphs, range(len(graphs)), layout).form
    losses, rows, roots, binary = [], [], [], []
    for i in range(len(graphs)):
        script = dynamic.pack(graphs, [i], layout, form=form)
        results = np.asarray(predict(trainer.graph, state.params, state.table, script), float)
        labels, found = script.row("label"), results.argmax(1)
        losses += [-results[row, x] for row, x in enumerate(labels) if x >= 0]
        rows += (found == labels)[labels >= 0].tolist()
        root = script.root_rows[0]
        roots.append(found[root] == labels[root])
        p = np.exp(results[root])
        np.testing.assert_allclose(p.sum(), 1, rtol=1e-5)
        if labels[root] != 2:
            binary.append((p[3] + p[4] > p[0] + p[1]) == (labels[root] > 2))
    tree = graphs[[0]]
    classes = trainer.classify(tree)
    wrong = (classes != tree.channel("label")).sum()
    assert wrong == np.size(rows[: len(classes)]) - np.sum(rows[: len(classes)])
    assert (classes[tree.roots[0]] == tree.channel("label")[-1]) == roots[0]
    scores = trainer.score(graphs)
    expected = {"held_out": losses, "rows": rows, "roots": roots, "binary": binary}
    assert scores.keys() == expected.keys() and 0 < len(binary) < len(roots)
    for name, values in expected.items():
        np.testing.assert_allclose(scores[name], np.mean(values), rtol=1e-5)
    # It has learned: nothing but the neutral class would be right less often.
    assert scores["rows"] > np.mean(graphs.channel("label") == 2) + 0.1


def test_an_epoch_has_every_tree_once_in_an_order_of_its_own(folder: Path) -> None:
    trainer = make_trainer(folder)
    counted = trainer.dataset.train.with_channel("tree", "graph", np.arange(20))
    trainer.dataset = trainer.dataset._replace(train=counted)
    order = []
    for script, _ in zip(trainer.training_scripts(0), range(6), strict=False):
        order.append(script.graph("tree")[: script.used_graphs].tolist())
    assert [len(x) for x in order] == [7, 7, 6] * 2
    epochs = [[*order[i], *order[i + 1], *order[i + 2]] for i in (0, 3)]
    assert epochs[0] != epochs[1] and all(sorted(x) == list(range(20)) for x in epochs)
    later = next(trainer.training_scripts(4))
    assert later.graph("tree")[: later.used_graphs].tolist() == order[4]


def test_ties_go_to_the_lower_loss() -> None:
    curve = [{"roots": r, "held_out": x} for r, x in ((0.5, 2), (0.7, 3), (0.7, 1), (0.7, 1))]
    assert best_epoch(curve) == 2


# ---- Runs ----


@pytest.fixture(scope="module")
def unbroken(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The output of a run that nothing interrupted, and what it printed."""
    output = tmp_path_factory.mktemp("unbroken")
    return output, printed_by(main, [*TINY, "--data", str(folder), "--output", str(output)])


def test_writes_metrics_and_a_picture(unbroken: tuple[Path, str]) -> None:
    output, printed = unbroken
    metrics = metrics_of(output)
    assert {"options", "device", "versions", "date", "data", "steps", "best_epoch"} < set(metrics)
    assert [x["step"] for x in metrics["curve"]] == [0, 3, 6, STEPS]
    assert metrics["options"]["optimizer"] == "adagrad"
    assert set(metrics["test"]) == {"held_out", "rows", "roots", "binary"}
    assert f"test: {metrics['test']['roots']:.2%} of 7 roots right in 5 classes" in printed
    assert f"binary {metrics['test']['binary']:.2%} of the " in printed
    picture = (output / "tree_sentiment.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    names = {"checkpoints", "tree_sentiment.png", "metrics.json"}
    assert {x.name for x in output.iterdir()} == names  # Nothing half-written is left.


@pytest.mark.parametrize("stop", [1, 5])  # In an epoch, and at the end of one.
def test_interrupted_run_resumes(
    stop: int,
    folder: Path,
    unbroken: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = [*TINY, "--data", str(folder), "--output", str(tmp_path)]
    with monkeypatch.context() as patch:
        interrupt(patch, TreeTrainer, stop)
        assert_stops(main, argv, tmp_path, f"step {stop + 1} of {STEPS}", capsys)
    assert main([*argv, "--resume", "--l2=1", "--patience=9"]) == 2
    assert "expected --l2 0.0001 --patience 4 as in" in capsys.readouterr().err
    assert main([*argv, "--resume"]) == 0
    if jax.default_backend() == "cpu":
        one, other = metrics_of(tmp_path), metrics_of(unbroken[0])
        assert (one["curve"], one["test"]) == (other["curve"], other["test"])
        states = [saved_state(x / "checkpoints", STEPS) for x in (tmp_path, unbroken[0])]
        assert len(jax.tree.leaves(states[0])) > 15
        jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.parametrize(("roots", "best"), [([0.2, 0.5, 0.4, 0.5], 1), ([0.3, 0.3, 0.3], 0)])
def test_training_ends_when_nothing_gets_better(
    roots: list[float],
    best: int,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tables, tested, score = [], [], TreeTrainer.score

    def scripted_score(trainer: TreeTrainer, graphs: dynamic.Graphs) -> dict[str, float]:
        found, table = score(trainer, graphs), np.array(trainer.state.table)
        if graphs is trainer.dataset.test:
            tested.append(table)
            return found
        tables.append(table)
        return found | {"roots": roots[len(tables) - 1], "held_out": 1.0}

    argv = [*TINY, "--data", str(folder), "--output", str(tmp_path), "--epochs=9", "--patience=2"]
    with monkeypatch.context() as patch:
        patch.setattr(TreeTrainer, "score", scripted_score)
        assert main(argv) == 0
    metrics = metrics_of(tmp_path)
    assert metrics["steps"] == 3 * (best + 2) and metrics["best_epoch"] == best
    # What is tested is the best one, which the later epochs were not.
    np.testing.assert_array_equal(tested[0], tables[best])
    assert (tables[best] != tables[-1]).any()
    # It is a finished run: drawn anew, or replaced.
    picture = (tmp_path / "tree_sentiment.png").read_bytes()
    assert main([*argv, "--resume", "--draw", "(4 (4 superb) (2 unknown))"]) == 0
    assert (tmp_path / "tree_sentiment.png").read_bytes() != picture
    again = metrics_of(tmp_path)
    assert (again["curve"], again["test"]) == (metrics["curve"], metrics["test"])
    assert "trees_per_second" not in again
    if best == 0:
        assert main(argv) == 0
    assert capsys.readouterr().err == ""


def test_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "GENERATED", (64, 16, 8))
    argv = ["--hidden=16", "--features=8", "--batch=64", "--epochs=30", "--learning-rate=0.05"]
    argv += ["--table-learning-rate=1", "--seed=4294967295", "--quiet", "--output", str(tmp_path)]
    assert main(argv) == 0
    metrics = metrics_of(tmp_path)
    assert metrics["options"]["optimizer"] == "adam"
    assert "of 8 roots right in 10 classes" in capsys.readouterr().out
    curve = metrics["curve"]
    assert curve[-1]["train"] < 0.85 * curve[1]["train"]
    assert (tmp_path / "tree_sentiment.png").exists()


def test_operators_reach_their_rows_and_those_above(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "GENERATED", (1, 1, 1))
    trainer = make_trainer(None)
    tree = trainer.dataset.test[[0]]
    script = dynamic.pack(tree, [0], trainer.layout)
    operators = tree.channel("operator")
    inner = np.flatnonzero(operators >= 0)
    changed = np.where(np.arange(len(operators)) == inner[0], 10 + (operators + 1) % 3, operators)
    other = dynamic.pack(tree.with_channel("operator", "input", changed), [0], trainer.layout)
    assert script.form.inputs and other.form == script.form
    assert (words_of(other) != words_of(script)).sum() == 1

    def found(script: dynamic.Script) -> np.ndarray:
        state = trainer.state
        return np.asarray(predict(trainer.graph, state.params, state.table, script))

    differ = (found(script) != found(other)).any(1)
    assert differ[script.root_rows[0]] and not differ[: script.form.leaves].any()


def test_drawn_trees_have_their_leaves_in_order() -> None:
    trees = dynamic.Graphs.from_brackets("(3 (2 (2 a) (2 b)) (2 c))(2 d)")
    assert typical(trees) == 0
    tree = trees[[0]]
    places = positions(tree)
    by_word = dict(zip(word_of_rows(tree), places.tolist(), strict=True))
    assert [by_word[x] for x in "abc"] == [[0, 0], [1, 0], [2, 0]]
    assert places[tree.roots[0]].tolist() == [1.25, 2]


def test_defaults_depend_on_the_data() -> None:
    def options(*argv: str) -> argparse.Namespace:
        return parse_args(list(argv))

    assert (options().hidden, options("--data=x").hidden) == (64, 150)
    assert options("--data=x", "--hidden=7", "--l2=0").l2 == 0
