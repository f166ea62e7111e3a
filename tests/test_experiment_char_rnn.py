"""Tests of experiments/char_rnn at a tiny size: presets, models, tables, forms, resuming."""

from __future__ import annotations

import shutil
from pathlib import Path

import char_rnn_problems as problems
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from char_rnn_problems import (
    MISTAKES,
    STEPS,
    assert_same_states,
    interrupt,
    make_problem,
    reported,
    write_book,
)
from flax import nnx
from program_runs import assert_stops, metrics_of, printed_by

from examples.char_rnn.model import CELLS, CharRNN, Hidden
from examples.char_rnn.options import schedule_options
from experiments.char_rnn.__main__ import PRESETS, main, parse_args
from experiments.char_rnn.study import effective_units, rows_of, scans_of
from experiments.char_rnn.throughput import FORMS, PROGRAMS, with_flax_layers
from jaxsparse.pruning import half_epochs

TINY = [*problems.TINY, "--speed-batches=4"]
MODELS = ["--hidden", "8", "16:0.25"]


pytestmark = pytest.mark.usefixtures("compiled_fast", "compiled_once")


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short text."""
    return write_book(tmp_path_factory.mktemp("data") / "book.txt")


@pytest.fixture(scope="module")
def unbroken(book: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The output of a comparison that nothing interrupted, and what it printed."""
    output = tmp_path_factory.mktemp("unbroken")
    return output, printed_by(main, [*TINY, *MODELS, "--data", str(book), "--output", str(output)])


def test_writes_a_table_a_picture_and_metrics(unbroken: tuple[Path, str]) -> None:
    output, printed = unbroken
    metrics = metrics_of(output)
    dense, sparse = metrics["models"]
    assert [x["name"] for x in (dense, sparse)] == ["8", "16:0.25"]
    assert {"options", "device", "devices", "versions", "date", "best"} < set(metrics)
    assert metrics["options"]["hidden"] == ["8", "16:0.25"]
    assert metrics["options"]["steps"] == STEPS
    for model in (dense, sparse):
        assert [x["step"] for x in model["curve"]] == [0, 7, 14, 21, STEPS]
        assert model["bits_per_character"] == model["curve"][-1]["held_out"]
        assert model["bits_per_character"] < model["curve"][0]["held_out"]
        assert f"{model['bits_per_character']:.3f}" in printed
        assert len(model["sample"]) == 21
    forms = {dense["name"]: FORMS[:2], sparse["name"]: FORMS}
    for model in (dense, sparse):
        for program in PROGRAMS:
            speeds = model["tokens_per_second"]["4"][program]
            assert tuple(speeds) == forms[model["name"]]
            assert all(f"{speed:,.0f}" in printed for speed in speeds.values())
    assert "drawn from 16:0.25 at temperature 0.7" in printed
    picture = (output / "char_rnn.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    # Nothing half-written is left.
    assert {x.name for x in output.iterdir()} == {"8", "16_0.25", "char_rnn.png", "metrics.json"}


def test_densities_are_reached_in_balanced_rows(unbroken: tuple[Path, str]) -> None:
    dense, sparse = metrics_of(unbroken[0])["models"]
    assert dense["rows"] == {} and dense["layers"] == []
    rows = sparse["rows"]
    assert sorted(x.rsplit("/", 1)[1] for x in rows) == ["dense_h", "dense_i"]
    for described, columns in zip((rows[name] for name in sorted(rows)), (16, 8), strict=True):
        assert described["shape"] == [64, columns]
        assert described["density"] == 0.25
        assert described["shortest"] == described["longest"] == columns // 4
    assert [x["imbalance"] for x in sparse["layers"]] == [1.0]
    # The same number of recurrent weights as the dense model has.
    assert sparse["recurrent_nonzeros"] == dense["recurrent_nonzeros"] == 4 * 8 * 8
    assert sparse["effective_units"] == dense["effective_units"] == 8
    assert sparse["parameters"] > sparse["nonzeros"]
    assert dense["parameters"] == dense["nonzeros"]


def assert_same_result(output: Path, expected: Path) -> None:
    """Compares learning curves, samples and the whole state of training, bit by bit on a CPU."""
    exact = jax.default_backend() == "cpu"
    for one, other in zip(*(metrics_of(x)["models"] for x in (output, expected)), strict=True):
        assert one["name"] == other["name"]
        assert one["rows"] == other["rows"]
        if exact:
            assert one["curve"] == other["curve"]
            assert one["sample"] == other["sample"]
    for folder in ("8", "16_0.25"):
        assert_same_states(*(x / folder / "checkpoints" for x in (output, expected)))


@pytest.mark.parametrize(
    ("model", "stop"),
    [
        ("8", 5),  # In the first model: there is nothing of the second.
        ("16:0.25", 18),  # In the step that is the first in sparse form.
    ],
)
def test_interrupted_comparison_resumes(
    model: str,
    stop: int,
    book: Path,
    unbroken: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = [*TINY, *MODELS, "--data", str(book), "--output", str(tmp_path)]
    with monkeypatch.context() as patch:
        interrupt(patch, stop, pruned=":" in model)
        step = f"step {stop + 1} of {STEPS}"
        assert_stops(main, argv, tmp_path, step, capsys, of=f" of {model}")
    assert main([*argv, "--resume", "--learning-rate=1", "--cell=gru"]) == 2
    assert "expected --cell lstm --learning-rate 0.01 as in" in capsys.readouterr().err
    assert main([*argv, "--resume"]) == 0
    assert_same_result(tmp_path, unbroken[0])


def test_finished_models_are_kept_and_others_added(
    book: Path, unbroken: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "output"
    shutil.copytree(unbroken[0], output)
    argv = [*TINY, "--data", str(book), "--output", str(output), "--resume"]
    assert main([*argv, *MODELS, "16:0.25:unstructured"]) == 0
    before, after = metrics_of(unbroken[0])["models"], metrics_of(output)["models"]
    assert after[:2] == before
    # The same size in another structure is a model of its own.
    balanced, uneven = after[1:]
    assert uneven["name"] == "16:0.25:unstructured"
    assert [x["structure"] for x in after] == [None, "row_balanced", "unstructured"]
    assert (output / "16_0.25_unstructured" / "result.json").exists()
    assert uneven["recurrent_nonzeros"] == balanced["recurrent_nonzeros"]
    for described in uneven["rows"].values():
        assert described["shortest"] < described["longest"]
    assert uneven["curve"][0] == balanced["curve"][0]
    assert uneven["bits_per_character"] != balanced["bits_per_character"]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["16:0.25:unstructured", "unstructured", "8"] in [line[:3] for line in lines]
    # A sample of another length is drawn from what was trained.
    assert main([*argv, *MODELS, "--sample-length=5"]) == 0
    assert [len(x["sample"]) for x in metrics_of(output)["models"]] == [6, 6]
    assert [x["curve"] for x in metrics_of(output)["models"]] == [x["curve"] for x in before]
    # A program was stopped between two models, and before it wrote the result of a trained one.
    shutil.rmtree(output / "16_0.25")
    assert main([*argv[:-1], *MODELS]) == 2
    assert "got one after 8 in" in capsys.readouterr().err
    (output / "8" / "result.json").unlink()
    assert main([*argv[:-1], *MODELS]) == 2
    assert "got one after 8 in" in capsys.readouterr().err


def test_resume_expects_the_same_text(
    book: Path, unbroken: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "output"
    shutil.copytree(unbroken[0], output)
    other = tmp_path / "other.txt"
    other.write_text(book.read_text()[::-1])
    argv = [*TINY, *MODELS, "--data", str(other), "--output", str(output), "--resume"]
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("char_rnn: error: --resume: expected --data ") and err.count("\n") == 1


def test_unstructured_masks_have_uneven_rows(book: Path) -> None:
    problem = make_problem(book, 0.25, "--pruned=recurrent", structure="unstructured")
    for index in range(18):
        problem.step(index)
    problem.trainer.become_sparse()
    problem.step(18)
    ((path, described),) = rows_of(problem.trainer).items()
    assert path == "stack/layers/0/cell/dense_h"
    assert described["density"] == 0.25
    assert described["shortest"] < 4 < described["longest"]


def test_h200_preset_runs_at_a_tiny_size(tmp_path: Path) -> None:
    argv = [*TINY, "--preset=h200", "--hidden", "16:0.25", "--batch=2", "--speed-batches=2"]
    argv += ["--held-out=0.001", "--tokens=bytes", "--cell=gru", "--prompt=def "]
    assert main([*argv, "--output", str(tmp_path)]) == 0
    metrics = metrics_of(tmp_path)
    assert (metrics["options"]["dtype"], metrics["options"]["layers"]) == ("bfloat16", 2)
    (model,) = metrics["models"]
    assert list(model["tokens_per_second"]) == ["2"]
    assert len(model["layers"]) == 2 and len(model["rows"]) == 4
    assert {x["density"] for x in model["rows"].values()} == {0.25}
    assert model["bits_per_character"] < 8
    assert model["sample"].startswith("def ")


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_consistent(preset: str) -> None:
    args = parse_args(["--preset", preset])
    table = PRESETS[preset]
    assert set(table) <= set(vars(args))
    assert {name: getattr(args, name) for name in set(table) - {"hidden"}} == {
        name: value for name, value in table.items() if name != "hidden"
    }
    assert [x[:2] for x in args.hidden] == [x[:2] for x in table["hidden"]]
    # Another preset may leave out what the example has a default for.
    others = {x for other in PRESETS.values() for x in other} - {"steps_per_epoch"}
    assert all(getattr(args, name) is not None for name in others)
    # All pruning is over before the last epochs, of which some are in sparse form.
    args.steps_per_epoch = args.steps_per_epoch or 50
    schedule = half_epochs(0.5, **schedule_options(args))
    fixed = (args.epochs - args.fixed_epochs) * args.steps_per_epoch
    assert schedule.begin < schedule.end < fixed
    assert sum(bool(schedule.prunes(x)) for x in range(args.epochs * args.steps_per_epoch)) == 21
    assert 0 < args.sparse_epochs < args.fixed_epochs
    # Rows keep a whole number of weights: no density is rounded away.
    for hidden in args.hidden:
        assert hidden.density * hidden.units == pytest.approx(
            round(hidden.density * hidden.units), abs=0.15
        )


def test_sizes_of_the_presets() -> None:
    quick, paper = (PRESETS[name]["hidden"] for name in ("quick", "h200"))
    assert {effective_units(x) for x in quick if x.density < 1} == {64}
    for entries in (quick, paper):  # Naive pruning beside row balanced, at one size.
        assert any(x.structure == "unstructured" and Hidden(*x[:2]) in entries for x in entries)
    assert Hidden(64) in quick
    assert {(x.units, round(effective_units(x))) for x in paper if x.density < 1} == {
        (256, 91), (512, 128), (768, 157), (1024, 222), (1024, 362), (1448, 314),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        *MISTAKES,
        ("--hidden 8 8:1.0", "--hidden: expected each model once, got 8 twice"),
        ("--speed-batches 99999", "--speed-batches: expected at most"),
        ("--preset paper", "argument --preset: invalid choice"),
        ("--resume", "--resume: expected a checkpoint in char_rnn_study_out, got none"),
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


def test_default_structure_is_that_of_entries_without_one() -> None:
    argv = ["--hidden", "8", "8:0.5", "8:0.25:row_balanced"]
    assert parse_args(argv).hidden == [
        Hidden(8),
        Hidden(8, 0.5, "row_balanced"),
        Hidden(8, 0.25, "row_balanced"),
    ]
    args = parse_args([*argv, "--structure=unstructured"])
    assert [x.structure for x in args.hidden] == [None, "unstructured", "row_balanced"]
    # The preset's unstructured model is then the same as one that names no structure.
    args = parse_args(["--structure=unstructured"])
    assert [x.name for x in args.hidden][-2:] == [
        "128:0.25:unstructured",
        "256:0.0625:unstructured",
    ]


def test_scans_of_a_sparse_model(book: Path) -> None:
    problem = make_problem(book)
    for index in range(18):
        problem.step(index)
    trainer = problem.trainer
    trainer.become_sparse()
    scans = scans_of(trainer.sparse_model, trainer.batch, trainer.length)
    assert scans.count(": masked_fma, ") == len(trainer.sparse_model.stack.layers)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_flax_layers_compute_the_same(cell: str, dtype: str, tolerance: float) -> None:
    sizes = {"hidden": 12, "layers": 2, "embedding": 5, "dtype": jnp.dtype(dtype), "seed": 3}
    model = CharRNN(11, cell=cell, **sizes)
    carries = model.initialize_carries(2)
    flax = with_flax_layers(model)
    assert [type(x) for x in flax.stack.layers] == [nnx.RNN, nnx.RNN]
    assert not any(isinstance(x, nnx.RNN) for x in model.stack.layers)
    tokens = np.arange(18).reshape(2, 9) % 11
    one, other = (x(tokens, carries) for x in (model, flax))
    for x, y in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_allclose(
            x.astype("float32"), y.astype("float32"), rtol=tolerance, atol=tolerance
        )
