"""Tests of examples/sparse_transformer.py, at a tiny size."""

from __future__ import annotations

import importlib.util
import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsparse import Topology, masks

Image = pytest.importorskip("PIL.Image")
for name in ("flax", "matplotlib", "optax", "skimage", "tqdm"):
    pytest.importorskip(name)

SOURCE = Path(__file__).parent.parent / "examples" / "sparse_transformer.py"
TINY = ["--size=4", "--layers=1", "--heads=2", "--hidden=16", "--batch=4", "--samples=2"]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sparse_transformer", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(example: ModuleType, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs the program, which must succeed, and returns its metrics."""

    def run(*argv: object) -> dict[str, Any]:
        output = tmp_path / "output"
        assert example.main([*TINY, "--output", str(output), *map(str, argv)]) == 0
        with Image.open(output / "sparse_transformer.png") as picture:
            assert min(picture.size) > 500
        return json.loads((output / "metrics.json").read_text())

    return run


def images(count: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), np.uint8)


def test_learns_the_default_photographs(
    run: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = run("--steps", 60, "--eval-every", 25, "--batch", 8, "--hidden", 32)
    out, err = capsys.readouterr()
    curve = metrics["curve"]
    assert [point["step"] for point in curve] == [0, 25, 50, 60]
    assert curve[0]["held_out"] == pytest.approx(8, abs=1e-3)  # A uniform guess.
    assert curve[-1]["train"] < curve[1]["train"] < 8
    assert curve[-1]["held_out"] < 7.5
    assert metrics["steps"] == metrics["options"]["steps"] == 60
    assert metrics["tokens_per_second"] > 0
    assert set(metrics["versions"]) == {"jax", "flax", "optax", "jaxsparse"}
    for words in ("device: ", "5 photographs", "parameters", f"-> {curve[-1]['held_out']:.3f}"):
        assert words in out
    # A progress line every ten seconds, as this stderr is no terminal; at least first and last.
    lines = err.splitlines()
    assert len(lines) >= 2 and "\r" not in err
    assert "60/60" in lines[-1] and "tokens/s" in lines[-1]


def test_quiet_prints_one_line(
    run: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = run("--steps", 1, "--quiet", "--dtype", "bfloat16")
    out, err = capsys.readouterr()
    assert out.startswith("held out: 8.000 -> ") and out.count("\n") == 1
    assert err == ""
    assert metrics["curve"][-1]["held_out"] < 8.5


def test_interrupt_ends_training_early(
    run: Callable[..., dict[str, Any]], example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_step = example.train_step

    def interrupted_step(*args: Any) -> jax.Array:
        signal.raise_signal(signal.SIGINT)
        return train_step(*args)

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(example, "train_step", interrupted_step)
    metrics = run("--steps", 1000)
    assert metrics["steps"] == 1
    assert [point["step"] for point in metrics["curve"]] == [0, 1]
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("kind", ["folder", "npz"])
def test_reads_data(kind: str, run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    data = tmp_path / "data"
    if kind == "folder":
        (data / "inner").mkdir(parents=True)
        Image.fromarray(images(1, 9, 12)[0]).save(data / "inner" / "colour.PNG")
        Image.fromarray(images(1, 20, 8)[0, :, :, 0]).save(data / "grey.jpg")
        (data / "notes.txt").write_text("not an image")
    else:
        data = tmp_path / "data.npz"
        np.savez(data, labels=np.arange(12), images=images(12, 5, 4))
    metrics = run("--steps", 2, "--data", data)
    assert metrics["options"]["data"] == str(data)
    assert math.isfinite(metrics["curve"][-1]["held_out"])
    assert metrics["curve"][-1]["held_out"] < 8.5


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--data nowhere", "expected a folder of images or an .npz file, got nothing"),
        ("--data notes.txt", "expected a folder of images or an .npz file, got another kind"),
        ("--data false.npz", "expected a folder of images or an .npz file, got another kind"),
        ("--data empty", "expected .png or .jpg files in the folder, got none"),
        ("--data broken", "expected a PNG or JPEG image"),
        ("--data floats.npz", "expected an array uint8(N, H, W, 3), got x float64(2, 8, 8, 3)"),
        ("--data pickle.npz", "expected plain arrays"),
        ("--data small --size 7", "at least 14 pixels wide and 7 high, got 12 x 12"),
        ("--size 10000", "at least 20000 pixels wide"),
        ("--size 0", "argument --size: expected int in [1, 2.14748e+09), got 0"),
        ("--steps many", "argument --steps: expected int"),
        ("--sparsity 1", "argument --sparsity: expected float in [0, 1), got 1"),
        ("--learning-rate nan", "argument --learning-rate: expected float in [0, inf), got nan"),
        ("--heads 3", "--hidden: expected a multiple of --heads 3, got 16"),
        ("--dtype float16", "argument --dtype: invalid choice"),
        ("--unknown", "unrecognized arguments: --unknown"),
        ("--output notes.txt", "--output notes.txt: expected a folder"),
    ],
)
def test_reports_a_mistake_in_one_line(
    argv: str,
    message: str,
    example: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "broken", "small"):
        Path(folder).mkdir()
    Path("notes.txt").write_text("not an image")
    Path("false.npz").write_text("not an archive")
    Path("broken/image.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    Image.fromarray(images(1, 12, 12)[0]).save("small/image.png")
    np.savez("floats.npz", x=images(2, 8, 8) / 255)
    np.savez("pickle.npz", x=np.array([{}], object))
    assert example.main([*TINY, *argv.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sparse_transformer: error: ") and err.count("\n") == 1
    assert message in err


def test_diverging_training_is_reported(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*TINY, "--quiet", "--output", str(tmp_path), "--learning-rate", "1e38"]
    assert example.main([*argv, "--steps", "9"]) == 2
    assert "expected a finite loss, got nan" in capsys.readouterr().err


def test_split_holds_out(example: ModuleType) -> None:
    few = images(2, 8, 20)
    train, held_out = example.split(list(few), 4)
    np.testing.assert_array_equal(train, few[:, :, :16])
    np.testing.assert_array_equal(held_out, few[:, :, 16:])
    many = images(20, 4, 4)
    train, held_out = example.split(list(many), 4)
    np.testing.assert_array_equal(held_out, many[[0, 10]])
    assert len(train) == 18


def test_crops_are_means_of_windows(example: ModuleType) -> None:
    image = images(1, 8, 8)[0]
    batches = example.crops([image], 4, 64, 2, np.random.default_rng(0))
    crops = next(batches).reshape(64, 4, 4, 3)
    assert crops.dtype == np.int32
    whole = image.reshape(4, 2, 4, 2, 3).mean((1, 3)).round()
    windows = {image[i : i + 4, j : j + 4].tobytes() for i in range(5) for j in range(5)}
    found = set()
    for crop in crops:
        for mirrored, pixels in enumerate((crop, crop[:, ::-1])):
            if np.array_equal(pixels, whole):
                found.add((2, mirrored))
            elif pixels.astype(np.uint8).tobytes() in windows:
                found.add((1, mirrored))
    assert found == {(1, 0), (1, 1), (2, 0), (2, 1)}


@pytest.fixture(scope="module")
def model(example: ModuleType) -> Any:
    sizes = {"size": 4, "layers": 2, "heads": 2, "hidden": 16, "mlp": 32}
    model = example.Transformer(**sizes, dtype=jnp.float32, seed=0)
    model.norm.scale[...] = jnp.ones(16)  # As if trained: it starts at zero.
    return model


@pytest.fixture(scope="module")
def topology() -> Topology:
    mask = (masks.band(16) | masks.random(0.7, 48, band_width=16)) & masks.causal()
    return Topology.from_mask(mask, (48, 48))


def test_model_is_causal(example: ModuleType, model: Any, topology: Topology) -> None:
    tokens = images(2, 4, 4).reshape(2, 48).astype(np.int32)
    before = model(tokens, topology)
    for t in (0, 1, 20, 46):
        changed = tokens.copy()
        changed[:, t] = (changed[:, t] + 128) % 256
        after = model(changed, topology)
        np.testing.assert_array_equal(after[:, : t + 1], before[:, : t + 1])
        assert np.abs(after[:, t + 1] - before[:, t + 1]).max() > 1e-3


def test_samples_are_drawn_from_the_model(
    example: ModuleType, model: Any, topology: Topology
) -> None:
    given = images(3, 4, 4).reshape(3, 48).astype(np.int32)
    known = np.zeros((3, 48), bool)
    known[0, :24] = known[1] = True
    key, rows = jax.random.key(1), example.padded_rows(topology)
    drawn = np.asarray(example.sample(model, given, known, rows, key))
    np.testing.assert_array_equal(drawn[known], given[known])
    # The whole sequence at once, with the sparse kernels, gives what the cache gave.
    logits = model(drawn, topology)
    keys = jax.random.split(key, 48)
    expected = jax.vmap(jax.random.categorical, (0, 1), 1)(keys, logits)
    np.testing.assert_array_equal(drawn[~known], np.asarray(expected)[~known])
