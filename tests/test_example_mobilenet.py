"""Tests of examples/mobilenet at a tiny size: data, the model's forms, runs, resuming."""

from __future__ import annotations

import json
import pickle
import threading
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
pytest.importorskip("PIL")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

from flax import nnx
from PIL import Image
from program_runs import interrupt, metrics_of, printed_by
from tqdm import tqdm

from examples.common.program import write_json
from examples.mobilenet import data, throughput, trainer
from examples.mobilenet import model as model_file
from examples.mobilenet.__main__ import main, parse_args, runs_of
from examples.mobilenet.model import (
    MobileNet,
    for_inference,
    prune_by_magnitude,
    strides_of,
)
from examples.mobilenet.trainer import Trainer
from jaxsparse.nn import SparseConv1x1

pytestmark = pytest.mark.usefixtures("compiled_fast")

SIDE = 32
COUNT, TESTED = 24, 8
RUN = ["--widths=0.05", "--seeds=1", "--epochs=2", "--batch=8", "--frames=2", "--seconds=0.001"]
STEPS = 6  # Of each of two models.


BLOCKS = model_file.BLOCKS


@pytest.fixture(scope="module", autouse=True)
def few_blocks() -> Iterator[None]:
    """Models of 3 blocks, as compiling 13 takes a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_file, "BLOCKS", BLOCKS[1:4])
        yield


def random_part(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Planes as CIFAR-10 has them, and labels."""
    planes = rng.integers(0, 256, (count, 3 * SIDE * SIDE), np.uint8)
    return planes, rng.integers(0, data.CLASSES, count)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One data set in the three forms in which it is published."""
    rng = np.random.default_rng(0)
    parts = {"data_batch_1": random_part(rng, COUNT), "test_batch": random_part(rng, TESTED)}
    result = {form: tmp_path_factory.mktemp(form) for form in ("binary", "python", "sheets")}
    for name, (planes, labels) in parts.items():
        records = np.concatenate([labels[:, None].astype(np.uint8), planes], 1)
        records.tofile(result["binary"] / f"{name}.bin")
        batch = {b"data": planes, b"labels": labels.tolist()}
        (result["python"] / name).write_bytes(pickle.dumps(batch))
        sheet = planes.reshape(-1, 3, SIDE * SIDE).swapaxes(1, 2)
        Image.fromarray(sheet).save(result["sheets"] / f"{name}.png")
        file = data.SHEET_LABELS[name.partition("_")[0]]
        (result["sheets"] / file).write_text(json.dumps(labels.tolist()))
    return result


def test_forms_of_cifar_are_equal(folders: dict[str, Path]) -> None:
    sets = [data.load(folder, None) for folder in folders.values()]
    assert len({each.digest for each in sets}) == 1
    assert sets[0].train.images.shape == (COUNT, SIDE, SIDE, 3)
    assert "24 images of 32 x 32 x 3 to learn from, 8 to test" in sets[0].description


def test_digits_and_batches() -> None:
    dataset = data.load(None, 16)
    assert dataset.train.images.shape == (1437, 16, 16, 1) and len(dataset.test.labels) == 360
    small = data.load(None, None)
    # Interpolation keeps the mean of an image, but for its border.
    means = [x.train.images.mean((1, 2, 3)) for x in (dataset, small)]
    np.testing.assert_allclose(*means, atol=6)
    held = dataset.held()
    normal = held.normalised(held.train.images)
    assert abs(normal.mean()) < 1e-3 and abs(normal.std() - 1) < 1e-3
    every = data.batches(dataset, 100, 3, 0)
    first = [next(every) for _ in range(16)]
    resumed = next(data.batches(dataset, 100, 3, 15))
    jax.tree.map(np.testing.assert_array_equal, resumed, first[15])
    assert (first[0].chosen != first[14].chosen).any()  # Another order in the second epoch.
    assert len(set(np.concatenate([each.chosen for each in first[:14]]))) == 1400
    assert not first[0].mirrored.any()  # Of digits it changes the class.


def test_moved_images_are_parts_of_the_padded_ones() -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(1, 256, (40, 8, 8, 1), np.uint8)
    dataset = data.Dataset(
        *[data.Part(images, np.zeros(40))] * 2, np.zeros(1), np.ones(1), True, "random", ""
    )
    batch = next(data.batches(dataset, 40, 0, 0))
    mirrored = 0
    for at, moved in zip(batch.chosen, np.asarray(data.moved(images, batch)), strict=True):
        padded = np.pad(images[at], [(1, 1), (1, 1), (0, 0)])
        windows = [padded[i : i + 8, j : j + 8] for i in range(3) for j in range(3)]
        plain = any((moved == window).all() for window in windows)
        flipped = any((moved[:, ::-1] == window).all() for window in windows)
        assert plain or flipped
        mirrored += flipped
    assert 5 < mirrored < 35
    assert len({tuple(corner) for corner in batch.corners.tolist()}) > 3


@pytest.mark.parametrize("sparse", [False, True])
def test_forms_for_inference_compute_the_same(sparse: bool) -> None:
    model = MobileNet(0.1, 32, 3, 10, seed=0)
    prune_by_magnitude(model, 0.9)
    keys = iter(jax.random.split(jax.random.key(0), 200))
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.BatchNorm):
            shape = module.mean[...].shape
            module.mean[...] = 0.3 * jax.random.normal(next(keys), shape)
            module.var[...] = jax.random.uniform(next(keys), shape, minval=0.2, maxval=0.7)
            module.bias[...] = 0.3 * jax.random.normal(next(keys), shape)
    images = jax.random.normal(next(keys), (2, 32, 32, 3))
    model.eval()
    expected = model(images)
    folded = for_inference(model, images, sparse=sparse)
    kinds = {type(module) for _, module in nnx.iter_modules(folded)}
    assert nnx.BatchNorm not in kinds and (SparseConv1x1 in kinds) == sparse
    scale = float(jnp.abs(expected).max())
    assert scale > 1e-3
    np.testing.assert_allclose(folded(images), expected, atol=1e-4 * scale)


def test_score_takes_images_in_parts(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight images by three, so that the last part has less than the others."""
    monkeypatch.setattr(trainer, "SCORED", 3)
    dataset = data.load(folders["binary"], None)
    held = dataset.held()
    model = MobileNet(0.1, SIDE, 3, data.CLASSES, seed=0)
    found = trainer.score(model, dataset, held)
    trainer.logits_of.clear_cache()  # Other tests are to score eight at a time.
    model.eval()
    logits = np.asarray(model(held.normalised(held.test.images)), np.float64)
    labels = dataset.test.labels
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(TESTED), labels]
    assert found["held_out"] == pytest.approx(losses.mean(), rel=1e-5)
    assert found["accuracy"] == (logits.argmax(1) == labels).mean()


def test_the_papers_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """3.1 M weights in convolutions of 1 x 1; 13 blocks; images of 7 x 7 at the end."""
    monkeypatch.setattr(model_file, "BLOCKS", BLOCKS)
    model = MobileNet(1.0, 224, 3, 1000, seed=0)
    kernels = [block.mix.layer.kernel[...].size for block in model.blocks]
    assert sum(kernels) == 3_139_584
    assert np.prod(strides_of(224)) == 32 and np.prod(strides_of(32)) == 16
    assert strides_of(2) == [1] * 14
    folded = for_inference(model, jax.ShapeDtypeStruct((1, 224, 224, 3), np.float32), sparse=False)
    out = jax.eval_shape(folded, jax.ShapeDtypeStruct((1, 224, 224, 3), np.float32))
    assert out.shape == (1, 1000)


def test_steps_are_compiled_once(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of two widths share an optimizer: had each thread its own, steps would be new ones."""
    dataset = data.load(folders["binary"], None)
    held = dataset.held()
    argv = [*RUN, "--data", str(folders["binary"]), "--widths", "0.05", "0.1"]
    runs = [each for each in runs_of(parse_args(argv), dataset) if each.sparsity == 0]
    makers = []
    adamw = trainer.optax.adamw

    def noted(*args: Any, **options: Any) -> Any:
        makers.append(threading.current_thread())
        return adamw(*args, **options)

    monkeypatch.setattr(trainer.optax, "adamw", noted)
    trainer.make_optimizer.cache_clear()
    trainer.compile_ahead(runs, dataset, held, tqdm(disable=True))
    assert makers == [threading.current_thread()]
    made = trainer.make_step.cache_info().misses
    for each in runs:
        batch = next(data.batches(dataset, each.batch, each.seed, 0))
        again = Trainer(held, each)
        again.step(batch)
        assert again.train._cache_size() == 1
    assert trainer.make_step.cache_info().misses == made


@pytest.fixture(scope="module")
def unbroken(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The metrics of a run that nothing stopped."""
    output = tmp_path_factory.mktemp("unbroken")
    printed = printed_by(main, [*RUN, "--data", str(folders["binary"]), "--output", str(output)])
    assert "dense 0.05" in printed and "sparse 0.05" in printed
    assert (output / "mobilenet.png").stat().st_size > 1000
    return metrics_of(output)


def test_run(unbroken: dict[str, Any]) -> None:
    trained = unbroken["trained"]
    assert [x["model"] for x in trained] == ["dense 0.05", "sparse 0.05"]
    assert [len(x["curve"]) for x in trained] == [3, 3]
    forms = [
        name
        for sparse in (False, True)
        for device in throughput.devices()
        for name in throughput.forms_on(device, sparse=sparse)
    ]
    assert sorted(x["form"] for x in unbroken["frames"]) == sorted(forms)
    sizes = {x["form"]: x["megabytes"] for x in unbroken["frames"]}
    assert all(x["frames_per_second"] > 0 for x in unbroken["frames"])
    assert sizes["sparse float32"] != sizes["dense float32"]


def test_interrupted_run_resumes(
    folders: dict[str, Path],
    unbroken: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the second model, which goes on; the first one is not trained again."""
    argv = [*RUN, "--quiet", "--data", str(folders["binary"]), "--output", str(tmp_path)]
    with monkeypatch.context() as patch:
        interrupt(patch, Trainer, STEPS + 2)
        assert main(argv) == 130
    assert "step 3 of 6 of sparse 0.05, seed 0, which is saved" in capsys.readouterr().err
    assert main(argv) == 2
    assert main([*argv, "--resume", "--learning-rate=1"]) == 2
    assert "expected --learning-rate 0.002 as in the checkpoint" in capsys.readouterr().err
    assert main([*argv, "--resume"]) == 0
    if jax.default_backend() == "cpu":
        assert metrics_of(tmp_path)["trained"] == unbroken["trained"]


def test_paper(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one form, then in all: interrupted after the first group, and resumed."""
    models = {"dense": ((0.05, 72.7, 2518), (0.1, 73.8, 2046)), "sparse": ((0.1, 72.9, 2874),)}
    monkeypatch.setattr(throughput, "PAPER", models)
    monkeypatch.setattr(throughput, "EQUAL", {"dense 0.05": "sparse 0.1"})
    argv = ["--paper", "--resolution=32", "--frames=1", "--seconds=0.001", "--output"]
    argv.append(str(tmp_path))
    assert main([*argv, "--resume"]) == 2
    assert main([*argv, "--widths=0.3"]) == 2
    message = capsys.readouterr().err
    assert "paper.json, got no such file" in message
    assert "expected widths of the paper's models, 0.05, 0.1, got 0.3" in message
    assert main([*argv, "--widths=0.05", "--forms", "sparse float32"]) == 2
    assert "expected one that a model here can run (dense float32" in capsys.readouterr().err
    measure, prepare = throughput.measure, throughput.prepare
    prepared = []

    def noted(candidate: Any, *args: Any) -> Any:
        prepared.append(candidate.name)
        return prepare(candidate, *args)

    def interrupted(forms: Any, *args: Any) -> Any:
        if forms[0].model == "dense 0.1":
            raise KeyboardInterrupt
        return measure(forms, *args)

    def written() -> dict[str, Any]:
        return json.loads((tmp_path / "paper.json").read_text())

    def places() -> set[tuple[Any, ...]]:
        found = [throughput.place_of(row) for row in written()["frames"]]
        assert len(set(found)) == len(found)
        return set(found)

    with monkeypatch.context() as patch:
        patch.setattr(throughput, "prepare", noted)
        assert main([*argv, "--quiet", "--forms", "sparse float32"]) == 0
    assert prepared == ["sparse 0.1"]
    alone = places()
    with monkeypatch.context() as patch:
        patch.setattr(throughput, "measure", interrupted)
        assert main([*argv, "--resume"]) == 130
    first = written()["frames"]
    assert alone < places() and {row["model"] for row in first} == {"dense 0.05", "sparse 0.1"}
    capsys.readouterr()
    assert main(argv) == 2
    assert f"got {len(first)} rows of one in" in capsys.readouterr().err
    assert main([*argv, "--resume", "--seconds=0.002"]) == 2
    assert "expected seconds 0.001 as in" in capsys.readouterr().err
    saved = written()
    for row, problem in (
        ({name: x for name, x in first[0].items() if name != "by_the_clock"}, "no by_the_clock"),
        (first[0] | {"quartiles": [1.0]}, "a row with quartiles [1.0]"),
        (first[0] | {"model": "dense 7"}, "a row of dense 7"),
    ):
        write_json(tmp_path / "paper.json", saved | {"frames": [row]})
        assert main([*argv, "--resume"]) == 2
        assert problem in capsys.readouterr().err
    write_json(tmp_path / "paper.json", saved)
    printed = printed_by(main, [*argv, "--resume"])
    assert "V100 frames/s (paper)" in printed and "2,518" in printed
    assert places() > {throughput.place_of(row) for row in first}
    frames, (ratio,) = written()["frames"], written()["ratios"][:1]
    # Of two devices the second one had rows of one form alone, and its group was timed anew.
    kept = [row for row in first if row["platform"] == first[-1]["platform"]]
    assert frames[: len(kept)] == kept and frames[-1]["model"] == "dense 0.1"
    speeds = {(row["model"], row["form"]): row["frames_per_second"] for row in first}
    assert ratio["ratios"]["float32"] == pytest.approx(
        speeds["sparse 0.1", "sparse float32"] / speeds["dense 0.05", "dense float32"]
    )
    assert "sparse 0.1 over dense 0.05" in printed and f"{2874 / 2518:.2f}" in printed


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU can run all forms")
def test_nothing_is_trained_that_can_not_be_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN, "--output", str(tmp_path), "--forms", "dense TF32"]) == 2
    assert "can run (dense float32, sparse float32), got dense TF32" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "argv", "message"),
    [
        (lambda folder: (folder / "test_batch.bin").unlink(), "", "got 1 of the first and 0 of"),
        (lambda folder: folder.joinpath("test_batch.bin").write_bytes(b"x"), "", "got 1 bytes"),
        (lambda folder: None, "--resolution=16", "--resolution: expected at least 32"),
        (lambda folder: [x.unlink() for x in folder.iterdir()], "", "got none of its files"),
    ],
)
def test_data_errors(
    folders: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Any,
    argv: str,
    message: str,
) -> None:
    for file in folders["binary"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change(tmp_path)
    output = str(tmp_path / "out")
    assert main([*RUN, "--data", str(tmp_path), "--output", output, *argv.split()]) == 2
    assert message in capsys.readouterr().err
