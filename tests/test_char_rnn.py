"""Tests of examples/char_rnn at a tiny size: options, text, model, forms, whole runs, resuming."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import signal
from collections.abc import Iterator
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

from pydoc_data.topics import topics

import orbax.checkpoint as ocp
from flax import nnx

from examples.char_rnn import options, text
from examples.char_rnn.__main__ import load_corpus, main
from examples.char_rnn.entries import rows_of
from examples.char_rnn.model import CELLS, CharRNN, with_flax_layers
from examples.char_rnn.recipe import Entry, make_schedule, parse_entry, schedule_options
from examples.char_rnn.sampling import sample
from examples.char_rnn.sparse_form import gather, scans_of, scatter
from examples.char_rnn.throughput import FORMS, PROGRAMS
from examples.char_rnn.trainer import Trainer
from examples.common.checkpoint import Checkpoints
from examples.common.errors import UserError

TINY = ["--embedding=8", "--batch=4", "--length=8", "--speed-batches=4", "--sample-length=20"]
TINY += ["--epochs=4", "--steps-per-epoch=6", "--eval-every=7", "--checkpoint-every=10"]
TINY += ["--held-out=0.1", "--quiet"]
MODELS = ["--hidden", "8", "16:0.25"]
STEPS = 24


@pytest.fixture(scope="module", autouse=True)
def compiled_fast() -> Iterator[None]:
    """Programs run a few times here: optimizing them takes longer."""
    name = "jax_disable_most_optimizations"
    previous = jax.config.values[name]
    jax.config.update(name, True)
    yield
    jax.config.update(name, previous)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short text."""
    path = tmp_path_factory.mktemp("data") / "book.txt"
    path.write_text(topics["class"] + "é")
    return path


@pytest.fixture(scope="module")
def unbroken(book: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The output of a comparison that nothing interrupted, and what it printed."""
    output = tmp_path_factory.mktemp("unbroken")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([*TINY, *MODELS, "--data", str(book), "--output", str(output)]) == 0
    return output, printed.getvalue()


def metrics_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "metrics.json").read_text())


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
        states = []
        for path in (output, expected):
            checkpoints = Checkpoints("test", path / folder / "checkpoints", {})
            assert checkpoints.manager.latest_step() == STEPS
            args = ocp.args.Composite(state=ocp.args.StandardRestore())
            states.append(checkpoints.manager.restore(STEPS, args=args).state)
        assert len(jax.tree.leaves(states[0])) > 10
        if exact:
            jax.tree.map(np.testing.assert_array_equal, *states)


def test_checkpoints_have_packed_masks(unbroken: tuple[Path, str]) -> None:
    checkpoints = Checkpoints("test", unbroken[0] / "16_0.25" / "checkpoints", {})
    args = ocp.args.Composite(state=ocp.args.StandardRestore())
    state = checkpoints.manager.restore(STEPS, args=args).state
    masks = jax.tree.leaves(state["optimizer"]["masks"])
    assert [x.dtype for x in masks] == [np.uint8, np.uint8]
    assert sorted(x.shape for x in masks) == [(8, 8), (16, 8)]  # Of 64 outputs.
    assert sum(int(np.bitwise_count(np.asarray(x)).sum()) for x in masks) == 64 * (8 + 16) // 4


@pytest.mark.parametrize(
    ("model", "stop"),
    [
        ("8", 5),  # In the first model: there is nothing of the second.
        ("16:0.25", 3),  # Before it is pruned for the last time.
        ("16:0.25", 18),  # In the step that is the first in sparse form.
        ("16:0.25", 21),
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
    step = Trainer.step

    def interrupted_step(self: Trainer, index: int) -> Any:
        if (self.is_pruned, index) == (":" in model, stop):
            signal.raise_signal(signal.SIGINT)
        return step(self, index)

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(Trainer, "step", interrupted_step)
    assert main(argv) == 130
    assert signal.getsignal(signal.SIGINT) == handler
    err = capsys.readouterr().err
    assert f"stopped by SIGINT after step {stop + 1} of {STEPS} of {model}, which is saved" in err
    assert not (tmp_path / "metrics.json").exists()
    monkeypatch.setattr(Trainer, "step", step)

    assert main(argv) == 2
    assert f"got one after step {stop + 1} of {STEPS}" in capsys.readouterr().err
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
    # The program was stopped between two models.
    (output / "metrics.json").unlink()
    assert main([*argv[:-1], *MODELS]) == 2
    assert "got one after 8, 16:0.25 in" in capsys.readouterr().err


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
        argv = [*TINY, *MODELS, "--data", str(book), "--output", str(output), "--resume"]
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
        args = options.parse_args([])
        return options.training_options(args, Entry(8), load_corpus(args))["data"]

    before = described()
    assert before == described()
    monkeypatch.setitem(topics, "class", topics["class"][::-1])
    after = described()
    assert before != after
    assert all(x.startswith("the help texts of Python (SHA-256 ") for x in (before, after))


def test_unstructured_masks_have_uneven_rows(book: Path) -> None:
    trainer = make_trainer(book, 0.25, "--pruned=recurrent", structure="unstructured")
    for index in range(19):
        trainer.step(index)
    (path,) = rows_of(trainer)
    described = rows_of(trainer)[path]
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


@pytest.mark.parametrize("preset", options.PRESETS)
def test_presets_are_consistent(preset: str) -> None:
    args = options.parse_args(["--preset", preset])
    table = options.PRESETS[preset]
    assert set(table) <= set(vars(args))
    assert {name: getattr(args, name) for name in set(table) - {"hidden"}} == {
        name: value for name, value in table.items() if name != "hidden"
    }
    assert [x[:2] for x in args.hidden] == [x[:2] for x in table["hidden"]]
    others = {x for other in options.PRESETS.values() for x in other}
    assert others - set(table) <= {"steps_per_epoch"}
    # All pruning is over before the last epochs, of which some are in sparse form.
    args.steps_per_epoch = args.steps_per_epoch or 50
    schedule = make_schedule(0.5, **schedule_options(args))
    fixed = (args.epochs - args.fixed_epochs) * args.steps_per_epoch
    assert schedule.begin < schedule.end < fixed
    assert sum(bool(schedule.prunes(x)) for x in range(args.epochs * args.steps_per_epoch)) == 21
    assert 0 < args.sparse_epochs < args.fixed_epochs
    # Rows keep a whole number of weights: no density is rounded away.
    for entry in args.hidden:
        assert entry.density * entry.hidden == pytest.approx(
            round(entry.density * entry.hidden), abs=0.15
        )


def test_sizes_of_the_presets() -> None:
    quick, paper = (options.PRESETS[name]["hidden"] for name in ("quick", "h200"))
    assert {x.effective_units for x in quick if x.density < 1} == {64}
    for entries in (quick, paper):  # Naive pruning beside row balanced, at one size.
        assert any(x.structure == "unstructured" and Entry(*x[:2]) in entries for x in entries)
    assert Entry(64) in quick
    assert {(x.hidden, round(x.effective_units)) for x in paper if x.density < 1} == {
        (256, 91), (512, 128), (768, 157), (1024, 222), (1024, 362), (1448, 314),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "message"),
    [
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
        ("--hidden 8 wide", "units:density:structure with a density in (0, 1], got wide"),
        ("--hidden 8:", "expected units, units:density or units:density:structure with"),
        ("--hidden 8:0.5:unstructured:2", "(0, 1], got 8:0.5:unstructured:2"),
        ("--hidden 8:0.5:blocks", "expected a structure of unstructured, row_balanced, refilled, "),
        ("--hidden 8 8:1.0", "--hidden: expected each model once, got 8 twice"),
        ("--cell rnn", "argument --cell: invalid choice"),
        ("--structure blocks", "argument --structure: invalid choice"),
        ("--fixed-epochs 4", "--fixed-epochs: expected less than --epochs 4, got 4"),
        ("--sparse-epochs 3", "--sparse-epochs: expected at most --fixed-epochs 2, got 3"),
        ("--steps-per-epoch 1", "argument --steps-per-epoch: expected int in [2, "),
        ("--speed-batches 99999", "--speed-batches: expected at most"),
        ("--prompt \u2603", "--prompt: expected characters of the data, got '\u2603'"),
        ("--prompt=", "--prompt: expected a character at least, got none"),
        ("--temperature -1", "argument --temperature: expected float in [0, inf), got -1"),
        ("--preset paper", "argument --preset: invalid choice"),
        ("--output binary", "--output: expected a writable folder"),
        ("--resume", "--resume: expected a checkpoint in char_rnn_out, got none"),
        ("--unknown", "unrecognized arguments: --unknown"),
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
    Path("binary").write_bytes(b"a\xff")
    Path("short").write_text("ten bytes.")
    assert main([*TINY, *argv.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("char_rnn: error: ") and err.count("\n") == 1
    assert message in err


def test_diverging_training_is_reported(
    book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*TINY, "--hidden=8", "--learning-rate=1e38", "--data", str(book)]
    assert main([*argv, "--output", str(tmp_path)]) == 2
    assert "expected a finite loss, got " in capsys.readouterr().err


def test_entries_are_named_by_units_and_density() -> None:
    assert parse_entry("128") == parse_entry("128:1") == Entry(128, 1.0)
    entry = parse_entry("512:0.0625")
    assert (entry.name, entry.folder) == ("512:0.0625", "512_0.0625")
    assert entry.effective_units == 128


def test_entries_may_name_a_structure() -> None:
    entry = parse_entry("512:0.0625:unstructured")
    assert entry == Entry(512, 0.0625, "unstructured")
    assert (entry.name, entry.folder) == (
        "512:0.0625:unstructured",
        "512_0.0625_unstructured",
    )
    assert parse_entry("512:0.0625:row_balanced").name == "512:0.0625"
    assert parse_entry("512:1:unstructured") == Entry(512)  # No masks.


def test_default_structure_is_that_of_entries_without_one() -> None:
    argv = ["--hidden", "8", "8:0.5", "8:0.25:row_balanced"]
    assert options.parse_args(argv).hidden == [
        Entry(8),
        Entry(8, 0.5, "row_balanced"),
        Entry(8, 0.25, "row_balanced"),
    ]
    args = options.parse_args([*argv, "--structure=unstructured"])
    assert [x.structure for x in args.hidden] == [None, "unstructured", "row_balanced"]
    # The preset's unstructured model is then the same as one that names no structure.
    args = options.parse_args(["--structure=unstructured"])
    assert [x.name for x in args.hidden][-2:] == [
        "128:0.25:unstructured",
        "256:0.0625:unstructured",
    ]


@pytest.mark.parametrize("tokens", text.TOKENS)
def test_text_is_split_by_position(tokens: str, book: Path) -> None:
    content = book.read_text()
    corpus = text.load(book, tokens, 0.25, 1)
    assert corpus.decode(np.concatenate([corpus.train, corpus.held_out])) == content
    size = len(content.encode()) if tokens == "bytes" else len(content)
    assert len(corpus.train) + len(corpus.held_out) == size
    assert len(corpus.held_out) == round(0.25 * size)
    assert corpus.decode(corpus.encode("class é")) == "class é"
    assert ("bytes" in corpus.description) == (tokens == "bytes")


def test_default_text_is_english() -> None:
    corpus = load_corpus(options.parse_args([]))
    assert len(corpus.train) > 300_000
    assert " the " in corpus.decode(corpus.train[:5000])


def test_windows_follow_each_other() -> None:
    tokens = np.arange(50)
    windows = text.Windows(tokens, batch=3, length=5)
    assert windows.count == 3
    for index in range(5):
        window = windows[index]
        assert window["fresh"] == (index % 3 == 0)
        start = 16 * np.arange(3)[:, None] + 5 * (index % 3)
        np.testing.assert_array_equal(window["inputs"], start + np.arange(5))
        np.testing.assert_array_equal(window["targets"], window["inputs"] + 1)
    assert text.Windows(np.arange(3 * 5 + 1), batch=3, length=5).count == 1


@pytest.mark.parametrize("size", [1, 511, 512, 513, 2000])
def test_passage_has_each_token_as_a_target_once(size: int) -> None:
    tokens = np.arange(1, size + 1)
    passage = text.Passage(np.array([7]), tokens)
    windows = [passage.windows[i] for i in range(passage.windows.count)]
    targets = [x["targets"] for x in windows]
    np.testing.assert_array_equal(np.concatenate(targets, 1).ravel()[:size], tokens)
    inputs = np.concatenate([x["inputs"] for x in windows], 1).ravel()[:size]
    np.testing.assert_array_equal(inputs, [7, *tokens[:-1]])
    assert passage.mean(targets) == tokens.mean()
    assert {x.shape for x in targets} == {(text.SCORING_STREAMS, text.SCORING_LENGTH)}


def test_score_is_of_the_same_text_for_any_batch_and_length(book: Path) -> None:
    one, other = (
        make_trainer(book, 1, *sizes)
        for sizes in (["--batch=4", "--length=8"], ["--batch=3", "--length=50"])
    )
    assert one.score() == other.score()


def make_trainer(
    book: Path, density: float = 0.25, *argv: str, structure: str = "row_balanced"
) -> Trainer:
    args = options.parse_args([*TINY, "--data", str(book), *argv])
    return Trainer(Entry(16, density, structure), load_corpus(args), args)


def test_sparse_form_continues_the_dense_one(book: Path) -> None:
    trainer = make_trainer(book)
    for index in range(18):
        trainer.step(index)
    dense, score = jax.tree.map(jnp.copy, trainer.dense_state), trainer.score()
    trainer.become_sparse()  # As the next step would.
    assert trainer.score() == pytest.approx(score, rel=1e-5)
    scans = scans_of(trainer.sparse_model, trainer.batch, trainer.length)
    assert scans.count(": masked_fma, ") == len(trainer.sparse_model.stack.layers)
    # There and back nothing changes, but for the moments of weights that are gone for good.
    back = trainer.dense_state
    jax.tree.map(np.testing.assert_array_equal, dense.params, back.params)
    jax.tree.map(np.testing.assert_array_equal, dense.optimizer.masks, back.optimizer.masks)
    trees = (back.params, back.optimizer.inner_state)
    again = scatter(gather(trees, trainer.topologies), trainer.topologies)
    jax.tree.map(np.testing.assert_array_equal, trees, again)

    trainer.step(18)
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
    trainer = make_trainer(book, density=1)
    trainer.step(0)
    carried = jax.tree.map(jnp.copy, trainer.state.carries)
    assert all((x != 0).any() for x in jax.tree.leaves(carried))
    # Two windows one after the other are one long window.
    graph, state = nnx.split(trainer.model)
    model = nnx.merge(graph, state)
    first, second = (trainer.train[i]["inputs"] for i in (0, 1))
    carries, one = model(first, model.initialize_carries(4))
    _, two = model(second, carries)
    _, both = model(np.concatenate([first, second], 1), model.initialize_carries(4))
    np.testing.assert_allclose(np.concatenate([one, two], 1), both, rtol=1e-5, atol=1e-5)
    begin = trainer.train.count
    assert trainer.train[begin]["fresh"] and not trainer.train[begin + 1]["fresh"]


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
        text.load(book, "characters", 0.1, 1).encode("☃")
