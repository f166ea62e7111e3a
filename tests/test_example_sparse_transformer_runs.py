"""Tests of examples/sparse_transformer over whole runs: resuming, comparing, several devices."""

from __future__ import annotations

import errno
import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsparse import Topology, masks

pytest.importorskip("PIL")
pytest.importorskip("flax")
pytest.importorskip("matplotlib")
pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("skimage")
pytest.importorskip("tqdm")
sys.path.append(str(Path(__file__).parent.parent))

import optax
import orbax.checkpoint as ocp
from PIL import Image

from examples.common.checkpoint import Checkpoints, Progress
from examples.common.errors import OutOfMemoryError, UserError
from examples.common.interruption import Interrupted, stop_request
from examples.common.transformer import dense_attention
from examples.sparse_transformer import training
from examples.sparse_transformer.__main__ import (
    is_papers_model,
    main,
    open_checkpoints,
    parse_args,
    runs_of,
)
from examples.sparse_transformer.drawing import table
from examples.sparse_transformer.model import Transformer
from examples.sparse_transformer.training import ImageTrainer, State, choose_devices, peak_bytes
from experiments import sparse_transformer as study
from jaxsparse.nn import SparseAttention

ROOT = Path(__file__).parent.parent
TINY = ["--size=4", "--layers=1", "--heads=2", "--hidden=16", "--batch=4", "--samples=2"]
STEPS = 60
RUN = [*TINY, "--devices=1", "--quiet", f"--steps={STEPS}", "--eval-every=7"]


# All runs share what is compiled, those in processes of their own, too.
pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def unbroken(compiled_once: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that nothing interrupted, with two checkpoints."""
    output = tmp_path_factory.mktemp("unbroken")
    assert main([*RUN, "--checkpoint-every=45", "--output", str(output)]) == 0
    return output


def assert_same_result(output: Path, expected: Path) -> None:
    """Compares the loss curves, the parameters and the state of the optimizer, bit by bit on a CPU.

    A GPU adds up the gradients of embeddings in no fixed order.
    """
    exact = jax.default_backend() == "cpu"
    same = functools.partial(np.testing.assert_allclose, rtol=0.02, atol=0.02)
    same = np.testing.assert_array_equal if exact else same
    curves = [json.loads((x / "metrics.json").read_text())["curve"] for x in (output, expected)]
    assert [x["step"] for x in curves[0]] == [x["step"] for x in curves[1]]
    for name in ("train", "held_out"):
        same(*([x[name] for x in curve[1:]] for curve in curves))
    states = []
    for path in (output, expected):
        manager = ocp.CheckpointManager(path / "checkpoints")
        assert manager.latest_step() == STEPS
        args = ocp.args.Composite(state=ocp.args.StandardRestore())
        states.append(manager.restore(STEPS, args=args).state)
    jax.tree.map(same, *states)
    assert len(jax.tree.leaves(states[0])) > 30


@pytest.fixture
def hangup() -> Iterator[None]:
    """SIGHUP as without nohup, for the programs that a test starts, too."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_run_resumes(
    number: signal.Signals, unbroken: Path, compiled_once: dict[str, str], tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"

    def newest() -> int:
        return max((int(x.name) for x in checkpoints.glob("*") if x.name.isdigit()), default=0)

    command = [sys.executable, "-m", "examples.sparse_transformer", *RUN, "--checkpoint-every=1"]
    process = subprocess.Popen(
        [*command, "--output", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | compiled_once,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while newest() < 3 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
        if number != signal.SIGKILL:  # As `timeout` does, to the child and to its group.
            process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert 3 <= newest() < STEPS
    assert not (tmp_path / "metrics.json").exists()
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        assert err.count("\n") == 1
        assert f"stopped by {number.name} after step {newest()} of {STEPS}, which is saved" in err
        assert "--resume" in err
    else:
        assert process.returncode == -number
    assert main([*RUN, "--output", str(tmp_path), "--resume"]) == 0
    assert_same_result(tmp_path, unbroken)


def stop_in_tenth_step(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """Lets a signal come twice, as `timeout` sends it, before the crops of the next step."""
    crops = training.crops

    def interrupting_crops(*args: Any) -> np.ndarray:
        if args[-1] == (0, training.TRAINING, 10):
            signal.raise_signal(number)
            signal.raise_signal(number)
        return crops(*args)

    monkeypatch.setattr(training, "crops", interrupting_crops)


@pytest.mark.usefixtures("hangup")
def test_interrupted_run_resumes(
    unbroken: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = [*RUN, "--output", str(tmp_path)]
    handlers = [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    def assert_stops(number: signal.Signals) -> None:
        with monkeypatch.context() as patch:
            stop_in_tenth_step(patch, number)
            assert main(argv) == 128 + number
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "--resume" in err
        assert f"stopped by {number.name} after step 10 of {STEPS}, which is saved" in err
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        assert [signal.getsignal(x) for x in signals] == handlers

    assert_stops(signal.SIGINT)
    assert [x.name for x in tmp_path.iterdir()] == ["checkpoints"]
    for wrong, message in (
        ([], "--output: expected no unfinished run, got one after step 10 of 60"),
        (
            ["--resume", "--heads=4", "--learning-rate=1", "--attention=dense"],
            "--resume: expected --attention sparse --heads 2 --learning-rate 0.003 as in",
        ),
    ):
        assert main([*argv, *wrong]) == 2
        assert message in capsys.readouterr().err
    assert main([*argv, "--resume", "--checkpoint-every=20", "--samples=3"]) == 0
    assert_same_result(tmp_path, unbroken)
    # A finished run is drawn again, or replaced: here by one whose terminal is closed.
    assert main([*argv, "--resume"]) == 0
    assert_same_result(tmp_path, unbroken)
    assert_stops(signal.SIGHUP)
    assert main([*argv, "--resume"]) == 0
    assert_same_result(tmp_path, unbroken)


def test_later_signal_quits_at_once() -> None:
    program = """
import signal, time
from examples.common.interruption import SAME_REQUEST, stop_request
with stop_request() as stop:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGINT)
    time.sleep(SAME_REQUEST + 0.1)
    assert stop.number == signal.SIGINT
    signal.raise_signal(signal.SIGTERM)
    time.sleep(60)
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=30)
    assert result.returncode == 128 + signal.SIGTERM


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("ignored", [False, True])
def test_closed_terminal_stops_unless_under_nohup(ignored: bool) -> None:
    handler = signal.SIG_IGN if ignored else signal.SIG_DFL
    signal.signal(signal.SIGHUP, handler)
    with stop_request() as stop:
        signal.raise_signal(signal.SIGHUP)
    assert stop.number == (0 if ignored else signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == handler


def test_message_to_a_closed_terminal_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    def stop(_: Any) -> None:
        raise Interrupted(signal.SIGHUP, "stopped")

    monkeypatch.setattr("examples.sparse_transformer.__main__.run", stop)
    monkeypatch.setattr(sys, "stderr", Closed())
    assert main([]) == 129


def halve(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.fixture
def copied(unbroken: Path, tmp_path: Path) -> tuple[Path, Path, Path]:
    """A copy of an output, and its older and newest checkpoint."""
    output = tmp_path / "output"
    shutil.copytree(unbroken, output)
    older, newest = sorted((output / "checkpoints").iterdir(), key=lambda x: int(x.name))
    return output, older, newest


@pytest.mark.parametrize(
    "damage", [lambda x: halve(x / "state" / "_METADATA"), lambda x: shutil.rmtree(x / "run")]
)
def test_damaged_checkpoint_falls_back(
    damage: Callable[[Path], None],
    copied: tuple[Path, Path, Path],
    unbroken: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output, older, newest = copied
    damage(newest)
    argv = [*RUN, "--output", str(output), "--resume"]
    assert main(argv) == 0
    err = capsys.readouterr().err
    assert f"{newest}: expected a checkpoint, got: " in err
    assert err.endswith(f"; trying that of step {older.name}\n") and err.count("\n") == 1
    assert_same_result(output, unbroken)
    # The steps since were saved anew.
    assert main(argv) == 0
    assert capsys.readouterr().err == ""

    for checkpoint in (output / "checkpoints").iterdir():
        damage(checkpoint)
    assert main(argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [x.startswith("sparse_transformer: error: ") for x in lines] == [False, True]
    assert f"{older}: expected a checkpoint, got: " in lines[1]


def test_truncated_arrays_fall_back(
    copied: tuple[Path, Path, Path], unbroken: Path, compiled_once: dict[str, str]
) -> None:
    output, older, newest = copied
    halve(max((newest / "state").rglob("*"), key=lambda x: x.is_file() and x.stat().st_size))
    # A process of its own, as Orbax leaves coroutines behind, which pytest would warn of.
    command = [sys.executable, "-m", "examples.sparse_transformer", *RUN, "--resume"]
    result = subprocess.run(
        [*command, "--output", str(output)],
        cwd=ROOT,
        env=os.environ | compiled_once,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0
    assert f"{newest}: expected a checkpoint, got: " in result.stderr
    assert f"; trying that of step {older.name}\n" in result.stderr
    assert_same_result(output, unbroken)


def test_stopped_comparison_resumes_over_a_finished_one(tmp_path: Path) -> None:
    def begin(*argv: str) -> list[Checkpoints]:
        args = parse_args([*TINY, "--compare", "--output", str(tmp_path), *argv])
        return open_checkpoints(runs_of(args))

    state = State(jnp.zeros(2), jnp.ones(2))
    for checkpoints in begin("--steps=5"):
        checkpoints.save(Progress(step=5), state)
    begin("--steps=9")[0].save(Progress(step=3), state)
    sparse, dense = begin("--steps=9", "--resume")
    assert sparse.newest()["progress"]["step"] == 3
    assert dense.newest() is None


def test_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--compare", "--output", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    report = json.loads((tmp_path / "comparison.json").read_text())
    assert {"options", "device", "devices", "versions", "date"} < set(report)
    for attention in ("sparse", "dense"):
        with Image.open(tmp_path / attention / f"{attention}_transformer.png") as picture:
            assert min(picture.size) > 500
        result = report[attention]
        assert result["curve"][-1]["step"] == STEPS
        assert f"{result['curve'][-1]['held_out']:.3f}" in out
        for program in ("forward", "training"):
            assert result[program]["tokens_per_second"] > 0
            assert f"{result[program]['tokens_per_second']:,.0f}" in out
        # The least that they hold: 11,648 parameters, and for training two moments of each.
        assert result["forward"]["peak_bytes"] > 4 * 11_648
        assert result["training"]["peak_bytes"] > 3 * 4 * 11_648
    start = [report[x]["curve"][0]["held_out"] for x in ("sparse", "dense")]
    assert start[0] == start[1]
    # This model is not the paper's.
    assert "paper" not in report
    assert out.splitlines()[-1] == "the paper's figures are for another model: --preset paper"
    assert out.count("paper") == 2


def test_comparison_with_the_paper() -> None:
    args = parse_args(["--preset=paper", "--steps=9", "--batch=2"])
    assert is_papers_model(args)
    assert not is_papers_model(parse_args(["--preset=paper", "--layers=2"]))
    words = table({"sparse": None, "dense": None}, with_paper=True)
    for figure in ("3.77", "3.76", "67,857", "32,477", "0.77", "9.88", "32,039", "140,000 steps"):
        assert figure in words


def test_study_compares(capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main(["--attention=dense"]) == 2
    assert "--attention: not allowed with argument --compare" in capsys.readouterr().err


def test_comparison_without_memory_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def exhaust(*_: Any) -> None:
        raise OutOfMemoryError("dense attention: expected it to fit")

    monkeypatch.setattr("examples.sparse_transformer.__main__.dense_attention", exhaust)
    assert main([*RUN, "--compare", "--output", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.count("out of memory") == 5  # Once in each row.
    assert "dense attention: expected it to fit" in err
    report = json.loads((tmp_path / "comparison.json").read_text())
    assert report["dense"] is None and report["sparse"] is not None


def make_trainer(attention: Callable[..., jax.Array], devices: list[jax.Device]) -> ImageTrainer:
    sizes = {"size": 4, "layers": 1, "heads": 2, "hidden": 16, "mlp": 32}
    model = Transformer(attention, **sizes, dtype=jnp.float32, seed=0)
    model.norm.scale[...] = jnp.ones(16)  # As if trained: it starts at zero.
    return ImageTrainer(model, optax.adamw(1e-2), 8, devices)


@pytest.mark.several_devices(8)
@pytest.mark.parametrize("attention", ["sparse", "dense"])
def test_training_on_eight_devices(attention: str) -> None:
    topology = Topology.from_mask(masks.band(16) & masks.causal(), (48, 48))
    attend = dense_attention if attention == "dense" else SparseAttention(topology)
    one, eight = (make_trainer(attend, jax.local_devices()[:n]) for n in (1, 8))
    rng = np.random.default_rng(0)
    for _ in range(4):
        tokens = rng.integers(0, 256, (8, 48), np.int32)
        batches = one.place(tokens), eight.place(tokens)
        assert batches[1].addressable_shards[0].data.shape == (1, 48)
        losses = one.step(batches[0]), eight.step(batches[1])
        np.testing.assert_allclose(*losses, rtol=1e-5)
        np.testing.assert_allclose(one.score(batches[0]), eight.score(batches[1]), rtol=1e-5)
    for a, b in zip(*(jax.tree.leaves(x.state.params) for x in (one, eight)), strict=True):
        assert len(b.addressable_shards) == 8 and b.is_fully_replicated
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    for program in (eight.step_program, eight.score_program):
        text = program.as_text()
        assert "all-reduce" in text
        assert not any(x in text for x in ("all-gather", "all-to-all", "collective-permute"))
    # Activations are those of an eighth of the batch.
    temporary = [x.score_program.memory_analysis().temp_size_in_bytes for x in (one, eight)]
    assert temporary[1] < temporary[0] / 4


@pytest.mark.several_devices(8)
def test_as_many_devices_as_divide_the_batch() -> None:
    assert jax.local_device_count() == 8
    counts = {(8, None): 8, (12, None): 6, (4, None): 4, (7, 4): 1, (8, 3): 2, (64, 8): 8}
    assert {case: len(choose_devices(*case)) for case in counts} == counts
    with pytest.raises(UserError, match="expected at most 8 here, got 9"):
        choose_devices(8, 9)


def test_program_on_eight_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*TINY, "--steps=5", "--batch=8", "--output", str(tmp_path)]
    assert main(argv) == 0
    count = min(8, jax.local_device_count())
    assert f", {count} of {jax.local_device_count()}" in capsys.readouterr().out
    # Any number of devices may go on.
    assert main([*argv, "--resume", "--devices=1"]) == 0


def test_peak_bytes_count_what_is_overwritten_once() -> None:
    x = jnp.zeros(1000)
    program = jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()
    assert 4000 <= peak_bytes(program) < 4100
