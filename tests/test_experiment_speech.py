"""Tests of experiments/speech at a tiny size: presets, models, tables, diverging runs, resuming."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import pytest
import speech_problems as problems
from program_runs import assert_stops, interrupt, metrics_of, printed_by
from speech_problems import STEPS, write_corpus

from examples.speech.model import MOST_FUTURE_MS, future_ms
from examples.speech.training import SpeechTrainer
from experiments.speech.__main__ import PRESETS, main, parse_args
from experiments.speech.report import PAPER, summaries, table
from experiments.speech.study import Model, parse_model

TINY = [*problems.TINY, "--models", "1", "2:2", "--seeds", "0", "5"]

pytestmark = pytest.mark.usefixtures("compiled_fast", "compiled_once")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus."""
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus.npz")


@pytest.fixture(scope="module")
def unbroken(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The output of a study that nothing interrupted, and what it printed."""
    output = tmp_path_factory.mktemp("unbroken")
    return output, printed_by(main, [*TINY, "--data", str(data), "--output", str(output)])


def test_writes_a_table_a_picture_and_metrics(unbroken: tuple[Path, str]) -> None:
    output, printed = unbroken
    metrics = metrics_of(output)
    assert metrics["options"]["models"] == ["1", "2:2"] and metrics["paper"] == PAPER
    for row, (name, layers, skip) in zip(
        metrics["models"], (("1", 1, 0), ("2:2", 2, 2)), strict=True
    ):
        assert (row["name"], row["layers"], row["skip"]) == (name, layers, skip)
        first, second = row["runs"]
        assert [run["seed"] for run in (first, second)] == [0, 5]
        assert [x["step"] for x in first["curve"]] == [0, 4, STEPS]
        assert first["curve"] != second["curve"]
        for rate in ("cer", "wer"):
            assert first[rate] == first["curve"][-1][rate]
            assert row[rate] == (first[rate] + second[rate]) / 2
        assert f"{100 * row['cer']:.1f}" in printed
    assert "diverged" not in printed and "*" not in printed
    assert (output / "speech.png").read_bytes().startswith(b"\x89PNG")
    assert {x.name for x in output.iterdir()} == {"1", "2_2", "speech.png", "metrics.json"}
    assert {x.name for x in (output / "2_2").iterdir()} == {"seed_0", "seed_5"}


def test_interrupted_study_resumes(
    data: Path,
    unbroken: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = [*TINY, "--data", str(data), "--output", str(tmp_path)]
    with monkeypatch.context() as patch:
        interrupt(patch, SpeechTrainer, STEPS + 1)  # In the second run.
        assert_stops(main, argv, tmp_path, f"step 2 of {STEPS}", capsys, of=" of 2:2 of seed 0")
    assert main([*argv, "--resume"]) == 0
    if jax.default_backend() == "cpu":
        for one, other in zip(
            *(metrics_of(x)["models"] for x in (tmp_path, unbroken[0])), strict=True
        ):
            assert one["cer"] == other["cer"]
            curves = [[run["curve"] for run in row["runs"]] for row in (one, other)]
            assert curves[0] == curves[1]


def test_finished_runs_are_kept_and_others_added(
    data: Path, unbroken: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "output"
    shutil.copytree(unbroken[0], output)
    argv = [*problems.TINY, "--data", str(data), "--output", str(output), "--resume"]
    argv += ["--models", "1", "--seeds", "0", "5", "6"]
    with monkeypatch.context() as patch:
        interrupt(patch, SpeechTrainer, STEPS)  # More steps than the new run has.
        assert main(argv) == 0
    (row,) = metrics_of(output)["models"]
    assert row["runs"][:2] == metrics_of(unbroken[0])["models"][0]["runs"]
    assert row["runs"][2]["seed"] == 6


def test_programs_side_by_side_make_one_study(
    data: Path, unbroken: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "output"  # Of another program, before it writes what it found.
    shutil.copytree(
        unbroken[0], output, ignore=shutil.ignore_patterns("checkpoints", "metrics.json")
    )
    argv = [*problems.TINY, "--data", str(data), "--output", str(output), "--models", "1"]
    assert main([*argv, "--seeds", "6"]) == 0
    with monkeypatch.context() as patch:
        interrupt(patch, SpeechTrainer, 0)
        assert main([*argv, "--seeds", "0", "5", "6", "--resume"]) == 0
    (row,) = metrics_of(output)["models"]
    assert row["runs"][:2] == metrics_of(unbroken[0])["models"][0]["runs"]
    assert [run["seed"] for run in row["runs"]] == [0, 5, 6]


def test_programs_side_by_side_begin_and_go_on_by_their_own_runs(
    data: Path,
    unbroken: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "output"
    shutil.copytree(unbroken[0], output)  # A finished study is done anew.
    one, other = (
        [*problems.TINY, "--data", str(data), "--output", str(output), "--models", *models]
        for models in (("1", "--seeds", "0", "5"), ("2:2", "--seeds", "0"))
    )
    with monkeypatch.context() as patch:
        interrupt(patch, SpeechTrainer, 2)
        assert_stops(main, one, output, f"step 3 of {STEPS}", capsys, of=" of 1 of seed 0")
    replaced = output / "2_2" / "seed_0" / "result.json"
    old = replaced.stat().st_mtime_ns
    assert main(other) == 0
    assert replaced.stat().st_mtime_ns > old
    # The other program is done. This one is in a run, and then between two.
    assert (output / "metrics.json").exists()
    assert main(one) == 2
    assert "expected no unfinished run, got one after step 3" in capsys.readouterr().err
    assert main([*one, "--resume"]) == 0
    shutil.rmtree(output / "1" / "seed_5")
    files = sorted((output / "1" / "seed_0").rglob("*"))
    assert main(one) == 2
    message = f"expected no unfinished comparison, got one after 1 of seed 0 in {output}"
    assert message in capsys.readouterr().err
    assert sorted((output / "1" / "seed_0").rglob("*")) == files
    # Whose checkpoints were deleted, too.
    shutil.rmtree(output / "1" / "seed_0" / "checkpoints")
    assert main(one) == 2
    assert message in capsys.readouterr().err


def test_a_diverging_run_counts_as_all_wrong(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*problems.TINY, "--models", "1", "--learning-rate=1e38", "--norm=none"]
    argv += ["--checkpoint-every=1"]  # Of a run without any the second start would not look.
    assert main([*argv, "--data", str(data), "--output", str(tmp_path)]) == 0
    (row,) = metrics_of(tmp_path)["models"]
    assert row["runs"][0]["diverged"] and row["cer"] == row["wer"] == 1
    assert main([*argv, "--data", str(data), "--output", str(tmp_path)]) == 0  # It is finished.
    out = capsys.readouterr().out
    assert "1*" in out and "* the loss stopped being finite with some seed" in out


def test_table_has_means_and_spreads_beside_the_paper() -> None:
    results = [
        {"name": name, "layers": 48, "skip": skip, "cer": cer, "wer": 2 * cer, "diverged": False}
        for cer in (0.1, 0.2)
        for name, skip in (("48", 0), ("48:4", 4), ("48:9", 9))
    ]
    rows = summaries(results)
    assert [len(row["runs"]) for row in rows] == [2, 2, 2]
    lines = [line.split() for line in table(rows).splitlines()]
    assert " ".join(lines[1]) == "48 48 none 15.0 10.0 to 20.0 30.0 20.0 to 40.0 100.00"
    assert lines[2][:3] == ["48:4", "48", "4"] and lines[2][-1] == "29.40"
    assert lines[3][-1] == "-"
    assert " -  " in table(summaries(results[:1])).splitlines()[1]


def test_models_are_named_by_layers_and_skip() -> None:
    assert parse_model("48") == parse_model("48:0") == Model(48)
    assert parse_model("48:4") == Model(48, 4)
    assert (Model(48).name, Model(48, 4).name) == ("48", "48:4")


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_consistent(preset: str) -> None:
    args = parse_args(["--preset", preset])
    settings = PRESETS[preset]
    assert {name: getattr(args, name) for name in settings} == settings
    assert args.direction == "forward"
    assert future_ms(args.lookahead or 0, args.stride, 10) <= MOST_FUTURE_MS


def test_the_preset_of_the_paper_has_its_models() -> None:
    assert {model.name for model in PRESETS["paper"]["models"]} == set(PAPER)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--models 4:5", "--models: expected a skip over at most 4 layers, got 5"),
        ("--models 4 4:0", "--models: expected each once, got 4 twice"),
        ("--models deep", "argument --models: expected layers or layers:skip, got deep"),
        ("--models 4:1:2", "argument --models: expected layers or layers:skip, got 4:1:2"),
        ("--models 0", "argument --models: expected layers or layers:skip, got 0"),
        ("--seeds 1 2 1", "--seeds: expected each once, got 1 twice"),
        ("--preset large", "argument --preset: invalid choice"),
        ("--layers 3", "unrecognized arguments: --layers 3"),
        ("--resume", "--resume: expected a checkpoint in speech_study_out, got none"),
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
    assert main([*problems.TINY, "--data", str(data), *argv.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("speech: error: ") and err.count("\n") == 1
    assert message in err
