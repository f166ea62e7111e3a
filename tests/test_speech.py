"""Tests of examples/speech at a tiny size: decoding, error rates, loss, model, runs, resuming."""

from __future__ import annotations

import argparse
import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from program_runs import assert_stops, interrupt, metrics_of, printed_by, saved_state
from speech_problems import STEPS, TINY, write_corpus

from examples.speech.__main__ import main, parse_args
from examples.speech.model import Lookahead, Recogniser, decode, future_ms
from examples.speech.options import load_corpus
from examples.speech.training import SpeechTrainer, ctc_loss, edits, error_rates

pytestmark = pytest.mark.usefixtures("compiled_fast")


@pytest.mark.parametrize(
    ("symbols", "text"),
    [
        ([], ""),
        ([0, 0, 0], ""),
        ([1, 1, 1], "A"),
        ([0, 1, 1, 0, 2, 2, 0], "AB"),
        ([1, 0, 1, 1], "AA"),  # A blank parts equal ones,
        ([1, 1, 2, 2, 1], "ABA"),  # as another character does.
        ([3, 2, 0, 0, 3], "CBC"),
    ],
)
def test_decoding(symbols: list[int], text: str) -> None:
    assert decode(np.array(symbols, int), "ABC") == text


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [
        ("", "", 0),
        ("", "abc", 3),
        ("abc", "", 3),
        ("kitten", "sitting", 3),
        ("saturday", "sunday", 3),
        ("abcd", "bcda", 2),
        ("aaaa", "aa", 2),
    ],
)
def test_edits(one: str, other: str, count: int) -> None:
    assert edits(one, other) == edits(other, one) == count
    assert edits(one.split(), one.split()) == 0


def test_error_rates_are_of_all_characters_and_words() -> None:
    # One substitution and a word with a space too much; then nothing where two letters were.
    rates = error_rates(["ONE TWO", "GO"], ["ONE TOO X", ""])
    assert rates == {"cer": (1 + 2 + 2) / 9, "wer": (2 + 1) / 3}
    assert error_rates(["A"], ["ABCD"]) == {"cer": 3.0, "wer": 1.0}


def collapsed(path: tuple[int, ...]) -> list[int]:
    return [symbol for symbol, _ in itertools.groupby(path) if symbol != 0]


def test_loss_is_the_sum_over_all_paths() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 5, 3)).astype(np.float32)
    steps, transcripts = np.array([5, 3, 4, 0]), [[1, 2], [2, 2], [1], []]
    labels = np.zeros((4, 3), np.int32)
    for row, symbols in enumerate(transcripts):
        labels[row, : len(symbols)] = symbols
    batch = {"labels": labels, "label_lengths": np.array([len(x) for x in transcripts])}
    total = 0.0
    for row in range(3):  # The last row is empty.
        log_probabilities = np.asarray(jax.nn.log_softmax(logits[row]), np.float64)
        paths = itertools.product(range(3), repeat=int(steps[row]))
        total -= math.log(
            sum(
                math.exp(sum(log_probabilities[t, symbol] for t, symbol in enumerate(path)))
                for path in paths
                if collapsed(path) == transcripts[row]
            )
        )
    np.testing.assert_allclose(ctc_loss(logits, steps, batch), total / 5, rtol=1e-5)
    # What stands behind the end of a row is no matter.
    logits[1, 3:] = 100
    logits[3] = np.nan
    np.testing.assert_allclose(ctc_loss(logits, steps, batch), total / 5, rtol=1e-5)


def make_model(**options: Any) -> Recogniser:
    sizes = {"cell": "gru", "hidden": 8, "layers": 2, "skip": 1, "norm": "layer", "lookahead": 2}
    sizes |= {"direction": "forward", "stride": 2, "recurrent_sparsity": 0.0, "seed": 0}
    return Recogniser(5, 4, **(sizes | {"dtype": jnp.float32} | options))


def logits_of(model: Recogniser, frames: np.ndarray, lengths: Any) -> np.ndarray:
    graph, state = nnx.split(model)
    apply = jax.jit(lambda state, *inputs: nnx.merge(graph, state)(*inputs)[0])
    return np.asarray(apply(state, frames, np.asarray(lengths)))


@pytest.mark.parametrize(
    ("cell", "norm", "stride", "lookahead"),
    [("gru", "rms", 1, 4), ("lstm", "batch", 3, 1), ("rnn_relu", "none", 2, 0)],
)
def test_outputs_wait_for_no_more_than_the_future_context(
    cell: str, norm: str, stride: int, lookahead: int
) -> None:
    model = make_model(cell=cell, norm=norm, stride=stride, lookahead=lookahead)
    model.eval()
    frames = np.random.default_rng(1).normal(size=(1, 24, 5)).astype(np.float32)
    before = logits_of(model, frames, [24])[0]
    ahead = future_ms(lookahead, stride, 1.0)  # In frames of 1 ms.
    for changed in (9, 14, 23):
        # NaN in a frame and all after it reaches each output that reads one of them.
        other = frames.copy()
        other[:, changed:] = np.nan
        after = logits_of(model, other, [24])[0]
        reaches = stride * np.arange(24 // stride) + ahead >= changed
        assert reaches.any() and (changed < 23 or not reaches.all())
        np.testing.assert_array_equal(np.isnan(after).all(1), reaches)
        np.testing.assert_array_equal(after[~reaches], before[~reaches])


def test_both_directions_read_all() -> None:
    frames = np.random.default_rng(1).normal(size=(1, 8, 5)).astype(np.float32)
    frames[:, -1] = np.nan
    assert np.isnan(logits_of(make_model(direction="both"), frames, [8])).all()


@pytest.mark.parametrize("direction", ["both", "forward"])
@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_padding_reaches_nothing(direction: str, norm: str) -> None:
    model = make_model(direction=direction, norm=norm)  # Batch norms in training.
    rng = np.random.default_rng(2)
    frames = rng.normal(size=(2, 12, 5)).astype(np.float32)
    lengths = np.array([7, 12])
    padded = np.pad(frames, ((0, 0), (0, 4), (0, 0)), constant_values=np.nan)
    padded[0, 7:] = np.nan
    one, other = (logits_of(model, x, lengths) for x in (frames, padded))
    np.testing.assert_allclose(other[0, :4], one[0, :4], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(other[1, :6], one[1, :6], rtol=1e-5, atol=1e-5)
    if norm == "layer":
        alone = logits_of(model, padded[:1, :8], lengths[:1])
        np.testing.assert_allclose(alone[0], one[0, :4], rtol=1e-5, atol=1e-5)


def test_steps_of_a_row_cover_its_frames() -> None:
    _, steps = make_model(stride=3)(np.zeros((4, 9, 5), np.float32), np.array([0, 1, 3, 7]))
    np.testing.assert_array_equal(steps, [0, 1, 1, 3])


def test_layers_are_those_of_the_options() -> None:
    model = make_model(layers=4, skip=2, cell="lstm", recurrent_sparsity=0.75)
    assert model.stack.skip == 2 and len(model.stack.layers) == 4
    assert make_model(skip=0).stack.skip is None
    for layer in model.stack.layers:
        assert layer.cell.dense_h.values.shape == (4 * 8 * 8 // 4,)


def test_deep_stacks_of_tanh_hand_on_what_changes() -> None:
    # With a ReLU most of what the upper layers read is the same at all steps.
    frames = np.random.default_rng(1).normal(size=(4, 60, 5)).astype(np.float32)

    @nnx.jit
    def outputs(model: Recogniser) -> jax.Array:
        return model.stack(model.project(frames.reshape(4, 30, 10)))

    shares = {}
    for cell in ("rnn_tanh", "rnn_relu"):
        y = outputs(make_model(cell=cell, layers=24, skip=4, hidden=32, norm="rms"))
        shares[cell] = np.square(y.mean((0, 1))).sum() / np.square(y).mean((0, 1)).sum()
    assert shares["rnn_tanh"] < 0.1 and shares["rnn_relu"] > 0.7, shares


def test_the_lookahead_begins_as_the_identity() -> None:
    x = np.random.default_rng(1).normal(size=(2, 6, 3)).astype(np.float32)
    layer = Lookahead(3, 2, dtype=jnp.float32)
    np.testing.assert_array_equal(layer(x), x)
    layer.kernel.set_value(jnp.arange(9.0).reshape(3, 3))
    padded = np.pad(x, ((0, 0), (0, 2), (0, 0)))
    expected = sum(np.arange(3 * j, 3 * j + 3) * padded[:, j : j + 6] for j in range(3))
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus."""
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus.npz")


RUN = [*TINY, "--layers=2", "--norm=batch", "--direction=forward", "--lookahead=1", "--noise=0.1"]


@pytest.fixture(scope="module")
def unbroken(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The output of a run that nothing interrupted, and what it printed."""
    output = tmp_path_factory.mktemp("unbroken")
    return output, printed_by(main, [*RUN, "--data", str(data), "--output", str(output)])


def test_writes_metrics_a_picture_and_samples(unbroken: tuple[Path, str]) -> None:
    output, printed = unbroken
    metrics = metrics_of(output)
    assert {"options", "device", "devices", "versions", "date", "parameters"} < set(metrics)
    assert metrics["data"]["alphabet"] == " ABC"
    curve = metrics["curve"]
    assert [x["step"] for x in curve] == [0, 4, STEPS]
    assert set(curve[-1]) == {"step", "train", "held_out", "cer", "wer"}
    assert curve[-1]["held_out"] < curve[0]["held_out"]
    said, heard = ([x[name] for x in metrics["held_out"]] for name in ("said", "heard"))
    assert {k: curve[-1][k] for k in ("cer", "wer")} == error_rates(said, heard)
    errors = [f"{curve[0][x]:.1%} -> {curve[-1][x]:.1%}" for x in ("cer", "wer")]
    assert f"nats/char, characters wrong {errors[0]}, words {errors[1]} in 6 steps" in printed
    assert f"{metrics['utterances_per_second']:,.1f} utterances/s" in printed
    assert f"\n  said:  {said[0]}\n  heard: {heard[0]}\n" in printed
    picture = (output / "speech.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    # Nothing half-written is left.
    assert {x.name for x in output.iterdir()} == {"checkpoints", "speech.png", "metrics.json"}


@pytest.mark.parametrize("stop", [0, 4])
def test_interrupted_run_resumes(
    stop: int,
    data: Path,
    unbroken: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = [*RUN, "--data", str(data), "--output", str(tmp_path)]
    with monkeypatch.context() as patch:
        interrupt(patch, SpeechTrainer, stop)
        assert_stops(main, argv, tmp_path, f"step {stop + 1} of {STEPS}", capsys)
    assert main([*argv, "--resume", "--skip=2", "--cell=lstm"]) == 2
    assert "expected --cell gru --skip 1 as in" in capsys.readouterr().err
    assert main([*argv, "--resume"]) == 0
    states = [saved_state(x / "checkpoints", STEPS) for x in (tmp_path, unbroken[0])]
    assert len(jax.tree.leaves(states[0]["statistics"])) == 4  # Two norms.
    if jax.default_backend() == "cpu":
        one, other = metrics_of(tmp_path), metrics_of(unbroken[0])
        assert one["curve"] == other["curve"]
        assert one["held_out"] == other["held_out"]
        jax.tree.map(np.testing.assert_array_equal, *states)


def test_resume_expects_the_same_data(
    data: Path, unbroken: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "output"
    shutil.copytree(unbroken[0], output)
    other = write_corpus(tmp_path / "other.npz", frame_ms=np.array(10), split=None)
    argv = [*RUN, "--output", str(output), "--resume"]
    assert main([*argv, "--data", str(data)]) == 0  # A finished run: drawn anew.
    assert "utterances_per_second" not in metrics_of(output)
    assert metrics_of(output)["curve"] == metrics_of(unbroken[0])["curve"]
    assert main([*argv, "--data", str(other)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("speech: error: --resume: expected --data ") and err.count("\n") == 1


def test_a_trainer_learns_a_small_corpus(data: Path) -> None:
    args = parse_args([*TINY, "--data", str(data), "--hidden=24", "--steps=80", "--layers=1"])
    corpus = load_corpus(args)
    trainer = SpeechTrainer(corpus, args)
    before = trainer.score()
    (_, batch), *_ = trainer.held_out.all()
    for _ in range(80):
        trainer.step(batch)
    after = trainer.score()
    assert after["held_out"] < 0.1 * before["held_out"]
    assert after["cer"] < 0.1 and after["wer"] < 0.2
    log_probabilities, heard = trainer.hear(0)
    assert heard == trainer.transcripts()[0][0]
    assert len(log_probabilities) == -(-corpus.held_out.lengths[0] // 2)
    np.testing.assert_allclose(np.exp(log_probabilities).sum(-1), 1, rtol=1e-5)
    # The model has the trained parameters.
    trainer.update_model()
    logits, _ = trainer.model(batch["frames"], batch["lengths"])
    expected, steps, _ = trainer.recognise(batch)
    for row, count in enumerate(steps):
        one = jax.nn.log_softmax(logits)[row, :count]
        np.testing.assert_allclose(one, expected[row, :count], rtol=1e-4, atol=1e-4)


def test_future_context_is_at_most_800_ms(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def loaded(*argv: str) -> argparse.Namespace:
        args = parse_args([*TINY, "--data", str(data), *argv])
        load_corpus(args)
        return args

    # Frames of 20 ms in pairs.
    assert loaded("--direction=forward").lookahead == 8
    assert loaded("--direction=forward", "--lookahead=19").lookahead == 19
    assert future_ms(19, 2, 20) == 780
    assert loaded().lookahead == 0
    assert future_ms(0, 1, 20) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "--direction forward --lookahead 20",
            "--lookahead: expected at most 800 ms of future context, got 820 of 20 steps of 2 "
            "frames of 20 ms",
        ),
        ("--lookahead 1", "--lookahead: expected --direction forward, since both directions read"),
        ("--data nowhere", "--data nowhere: expected an .npz file, got: "),
        ("--stride 9", "--stride: expected at least "),
        ("--layers 2 --skip 3", "--skip: expected a skip over at most 2 layers, got 3"),
        ("--cell tree", "argument --cell: invalid choice"),
        ("--norm group", "argument --norm: invalid choice"),
        ("--recurrent-sparsity 1", "argument --recurrent-sparsity: expected float in [0, 1), got"),
        ("--resume", "--resume: expected a checkpoint in speech_out/checkpoints, got none"),
        ("--steps 0", "argument --steps: expected int in [1, "),
        ("--unknown", "unrecognized arguments: --unknown"),
    ],
)
def test_reports_a_mistake_in_one_line(
    argv: str,
    message: str,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, "--data", str(data), *argv.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("speech: error: ") and err.count("\n") == 1
    assert message in err


def test_diverging_training_is_reported(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*TINY, "--layers=1", "--learning-rate=1e38", "--norm=none", "--data", str(data)]
    assert main([*argv, "--output", str(tmp_path)]) == 2
    assert "expected a finite loss, got " in capsys.readouterr().err
