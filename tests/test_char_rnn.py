"""Tests of examples/char_rnn at a tiny size: options, text, model, forms, whole runs, resuming."""

from __future__ import annotations

import shutil
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from char_rnn_problems import (
    MISTAKES,
    STEPS,
    TINY,
    assert_same_states,
    interrupt,
    make_problem,
    reported,
    write_book,
)
from flax import nnx
from program_runs import assert_stops, metrics_of, printed_by, saved_state

from examples.char_rnn.__main__ import main, parse_args
from examples.char_rnn.model import CharRNN, Hidden, gather, sample, scatter
from examples.char_rnn.options import load_corpus, parse_hidden, training_options
from examples.char_rnn.windows import SCORING_LENGTH, SCORING_STREAMS, Passage, Windows
from examples.common import text
from examples.common.errors import UserError

RUN = [*TINY, "--hidden=16:0.25"]


pytestmark = pytest.mark.usefixtures("compiled_fast")


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short text."""
    return write_book(tmp_path_factory.mktemp("data") / "book.txt")


@pytest.fixture(scope="module")
def unbroken(book: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The output of a run that nothing interrupted, and what it printed."""
    output = tmp_path_factory.mktemp("unbroken")
    return output, printed_by(main, [*RUN, "--data", str(book), "--output", str(output)])


def test_writes_metrics_a_picture_and_a_sample(unbroken: tuple[Path, str]) -> None:
    output, printed = unbroken
    metrics = metrics_of(output)
    assert {"options", "device", "devices", "versions", "date", "text"} < set(metrics)
    assert metrics["options"]["hidden"] == "16:0.25"
    assert metrics["steps"] == metrics["options"]["steps"] == STEPS
    curve = metrics["curve"]
    assert [x["step"] for x in curve] == [0, 7, 14, 21, STEPS]
    assert (
        f"16:0.25, held out: {curve[0]['held_out']:.3f} -> {curve[-1]['held_out']:.3f}" in printed
    )
    assert f"{metrics['tokens_per_second']:,.0f} tokens/s" in printed
    assert [x["imbalance"] for x in metrics["layers"]] == [1.0]
    assert len(metrics["sample"]) == 21
    assert printed.endswith(f"temperature 0.7:\n\n{text.printable(metrics['sample'])}\n")
    picture = (output / "char_rnn.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    # Nothing half-written is left.
    assert {x.name for x in output.iterdir()} == {"checkpoints", "char_rnn.png", "metrics.json"}


def test_dense_model(book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*TINY, "--hidden=8", "--cell=gru", "--prompt=class ", "--data", str(book)]
    assert main([*argv, "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("8, held out: ")
    metrics = metrics_of(tmp_path)
    assert metrics["layers"] == []
    assert metrics["sample"].startswith("class ")


def test_checkpoints_have_packed_masks(unbroken: tuple[Path, str]) -> None:
    state = saved_state(unbroken[0] / "checkpoints", STEPS)
    masks = jax.tree.leaves(state["optimizer"]["masks"])
    assert [x.dtype for x in masks] == [np.uint8, np.uint8]
    assert sorted(x.shape for x in masks) == [(8, 8), (16, 8)]  # Of 64 outputs.
    assert sum(int(np.bitwise_count(np.asarray(x)).sum()) for x in masks) == 64 * (8 + 16) // 4


@pytest.mark.parametrize(
    "stop",
    [
        3,  # Before the model is pruned for the last time.
        18,  # In the step that is the first in sparse form.
        21,
    ],
)
def test_interrupted_run_resumes(
    stop: int,
    book: Path,
    unbroken: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = [*RUN, "--data", str(book), "--output", str(tmp_path)]
    with monkeypatch.context() as patch:
        interrupt(patch, stop, pruned=True)
        assert_stops(main, argv, tmp_path, f"step {stop + 1} of {STEPS}", capsys)
    assert main([*argv, "--resume", "--learning-rate=1", "--cell=gru"]) == 2
    assert "expected --cell lstm --learning-rate 0.01 as in" in capsys.readouterr().err
    assert main([*argv, "--resume"]) == 0
    one, other = metrics_of(tmp_path), metrics_of(unbroken[0])
    if jax.default_backend() == "cpu":
        assert one["curve"] == other["curve"]
        assert one["sample"] == other["sample"]
    assert_same_states(tmp_path / "checkpoints", unbroken[0] / "checkpoints")


def test_another_sample_of_a_finished_run(
    book: Path, unbroken: tuple[Path, str], tmp_path: Path
) -> None:
    output = tmp_path / "output"
    shutil.copytree(unbroken[0], output)
    argv = [*RUN, "--data", str(book), "--output", str(output), "--resume"]
    assert main([*argv, "--sample-length=5"]) == 0
    metrics = metrics_of(output)
    assert metrics["curve"] == metrics_of(unbroken[0])["curve"]
    assert metrics["sample"] == metrics_of(unbroken[0])["sample"][:6]
    assert "tokens_per_second" not in metrics


@pytest.mark.parametrize("change", ["same characters", "another character"])
def test_resume_expects_the_same_text(
    change: str,
    book: Path,
    unbroken: tuple[Path, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "output"
    shutil.copytree(unbroken[0], output)
    content = book.read_text()
    try:
        book.write_text(content[::-1] if change == "same characters" else content + "\u2603")
        argv = [*RUN, "--data", str(book), "--output", str(output), "--resume"]
        assert main(argv) == 2
    finally:
        book.write_text(content)
    err = capsys.readouterr().err
    assert err.startswith("char_rnn: error: --resume: expected --data ") and err.count("\n") == 1
    assert err.count(f"--data {book} (SHA-256 ") == 2 and " as in the checkpoint in " in err
    size = len(set(content))
    assert f"{size} different characters) as in" in err
    assert f"{size + (change == 'another character')} different characters)\n" in err


def test_help_texts_of_another_python_are_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def described() -> str:
        args = parse_args([])
        return training_options(args, Hidden(8), load_corpus(args))["data"]

    before = described()
    assert before == described()
    monkeypatch.setitem(topics, "class", topics["class"][::-1])
    after = described()
    assert before != after
    assert all(x.startswith("the help texts of Python (SHA-256 ") for x in (before, after))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        *MISTAKES,
        ("--resume", "--resume: expected a checkpoint in char_rnn_out/checkpoints, got none"),
        ("--hidden 8 16", "unrecognized arguments: 16"),
    ],
)
def test_reports_a_mistake_in_one_line(
    argv: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in reported(main, [*TINY, *argv.split()], capsys)


def test_diverging_training_is_reported(
    book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*TINY, "--hidden=8", "--learning-rate=1e38", "--data", str(book)]
    assert main([*argv, "--output", str(tmp_path)]) == 2
    assert "expected a finite loss, got " in capsys.readouterr().err


def test_models_are_named_by_units_and_density() -> None:
    assert parse_hidden("128") == parse_hidden("128:1") == Hidden(128, 1.0)
    assert parse_hidden("512:0.0625").name == "512:0.0625"


def test_models_may_name_a_structure() -> None:
    hidden = parse_hidden("512:0.0625:unstructured")
    assert hidden == Hidden(512, 0.0625, "unstructured")
    assert hidden.name == "512:0.0625:unstructured"
    assert parse_hidden("512:0.0625:row_balanced").name == "512:0.0625"
    assert parse_hidden("512:1:unstructured") == Hidden(512)  # No masks.


def test_default_structure_is_that_of_a_model_without_one() -> None:
    def structure(*argv: str) -> str | None:
        return parse_args([*argv]).hidden.structure

    assert structure("--hidden=8") is None
    assert structure("--hidden=8:0.5") == "row_balanced"
    assert structure("--hidden=8:0.5", "--structure=unstructured") == "unstructured"
    assert structure("--hidden=8:0.5:row_balanced", "--structure=refilled") == "row_balanced"
    assert parse_args([]).hidden == Hidden(256, 0.0625, "row_balanced")


@pytest.mark.parametrize("tokens", text.TOKENS)
def test_text_is_split_by_position(tokens: str, book: Path) -> None:
    content = book.read_text()
    corpus = text.load(book, tokens, 0.25, 1, "--batch")
    assert corpus.decode(np.concatenate([corpus.train, corpus.held_out])) == content
    size = len(content.encode()) if tokens == "bytes" else len(content)
    assert len(corpus.train) + len(corpus.held_out) == size
    assert len(corpus.held_out) == round(0.25 * size)
    assert corpus.decode(corpus.encode("class é")) == "class é"
    assert ("bytes" in corpus.description) == (tokens == "bytes")


def test_default_text_is_english() -> None:
    corpus = load_corpus(parse_args([]))
    assert len(corpus.train) > 300_000
    assert " the " in corpus.decode(corpus.train[:5000])


def test_windows_follow_each_other() -> None:
    tokens = np.arange(50)
    windows = Windows(tokens, batch=3, length=5)
    assert windows.count == 3
    for index in range(5):
        window = windows[index]
        assert window["fresh"] == (index % 3 == 0)
        start = 16 * np.arange(3)[:, None] + 5 * (index % 3)
        np.testing.assert_array_equal(window["inputs"], start + np.arange(5))
        np.testing.assert_array_equal(window["targets"], window["inputs"] + 1)
    assert Windows(np.arange(3 * 5 + 1), batch=3, length=5).count == 1


@pytest.mark.parametrize("size", [1, 511, 512, 513, 2000])
def test_passage_has_each_token_as_a_target_once(size: int) -> None:
    tokens = np.arange(1, size + 1)
    passage = Passage(np.array([7]), tokens)
    windows = [passage.windows[i] for i in range(passage.windows.count)]
    targets = [x["targets"] for x in windows]
    np.testing.assert_array_equal(np.concatenate(targets, 1).ravel()[:size], tokens)
    inputs = np.concatenate([x["inputs"] for x in windows], 1).ravel()[:size]
    np.testing.assert_array_equal(inputs, [7, *tokens[:-1]])
    assert passage.mean(targets) == tokens.mean()
    assert {x.shape for x in targets} == {(SCORING_STREAMS, SCORING_LENGTH)}


def test_score_is_of_the_same_text_for_any_batch_and_length(book: Path) -> None:
    one, other = (
        make_problem(book, 1, *sizes)
        for sizes in (["--batch=4", "--length=8"], ["--batch=3", "--length=50"])
    )
    assert one.score() == other.score()


def test_sparse_form_continues_the_dense_one(book: Path) -> None:
    problem = make_problem(book)
    trainer = problem.trainer
    for index in range(18):
        problem.step(index)
    dense, score = jax.tree.map(jnp.copy, trainer.dense_state), problem.score()
    trainer.become_sparse()  # As the next step would.
    assert problem.score() == pytest.approx(score, rel=1e-5)
    # There and back nothing changes, but for the moments of weights that are gone for good.
    back = trainer.dense_state
    jax.tree.map(np.testing.assert_array_equal, dense.params, back.params)
    jax.tree.map(np.testing.assert_array_equal, dense.optimizer.masks, back.optimizer.masks)
    trees = (back.params, back.optimizer.inner_state)
    again = scatter(gather(trees, trainer.topologies), trainer.topologies)
    jax.tree.map(np.testing.assert_array_equal, trees, again)

    problem.step(18)
    after = trainer.dense_state
    masks = jax.tree.leaves(after.optimizer.masks)
    kernels = [
        x.get_value()
        for path, x in nnx.to_flat_state(after.params)
        if path[-1] == "kernel" and "cell" in path
    ]
    assert len(kernels) == len(masks) == 2
    for kernel, mask in zip(kernels, masks, strict=True):
        np.testing.assert_array_equal(kernel != 0, mask)
    old = [x.get_value() for path, x in nnx.to_flat_state(dense.params) if path[-1] == "kernel"]
    new = [x.get_value() for path, x in nnx.to_flat_state(after.params) if path[-1] == "kernel"]
    assert all((a != b).any() for a, b in zip(old, new, strict=True))


def test_state_is_carried_over_and_begins_anew(book: Path) -> None:
    problem = make_problem(book, density=1)
    trainer = problem.trainer
    problem.step(0)
    carried = jax.tree.map(jnp.copy, trainer.state.carries)
    assert all((x != 0).any() for x in jax.tree.leaves(carried))
    # Two windows one after the other are one long window.
    graph, state = nnx.split(trainer.model)
    model = nnx.merge(graph, state)
    first, second = (problem.windows[i]["inputs"] for i in (0, 1))
    carries, one = model(first, model.initialize_carries(4))
    _, two = model(second, carries)
    _, both = model(np.concatenate([first, second], 1), model.initialize_carries(4))
    np.testing.assert_allclose(np.concatenate([one, two], 1), both, rtol=1e-5, atol=1e-5)
    begin = problem.windows.count
    assert problem.windows[begin]["fresh"] and not problem.windows[begin + 1]["fresh"]


def test_embedding_is_that_of_each_token() -> None:
    model = CharRNN(11, cell="gru", hidden=12, layers=1, embedding=5, dtype=jnp.float32, seed=3)
    tokens = np.arange(18).reshape(2, 9) % 11
    np.testing.assert_array_equal(model.embedded(tokens), model.embed(tokens))


def test_sample_at_zero_temperature_is_the_likeliest() -> None:
    model = CharRNN(11, cell="gru", hidden=12, layers=2, embedding=5, dtype=jnp.float32, seed=3)
    prompt = np.array([4, 7, 1], np.int32)
    drawn = sample(model, prompt, length=6, temperature=0.0, seed=0)
    whole = np.concatenate([prompt, drawn])
    _, logits = model(whole[None], model.initialize_carries(1))
    np.testing.assert_array_equal(logits[0].argmax(-1)[len(prompt) - 1 : -1], drawn)
    first, again, other = (
        sample(model, prompt, length=50, temperature=1.0, seed=seed) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_unprintable_characters_are_blanked() -> None:
    assert text.printable("a\x1b[2J\r\tb\ne") == "a [2J  b\ne"


def test_missing_character_is_reported(book: Path) -> None:
    with pytest.raises(UserError, match="expected characters of the data, got '☃'"):
        text.load(book, "characters", 0.1, 1, "--batch").encode("☃")
