"""Tests of examples/sparse_transformer at a tiny size: options, data, model, pictures."""

from __future__ import annotations

import ast
import json
import math
import os
import pickle
import sys
from collections.abc import Callable
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

from flax import nnx
from PIL import Image

from examples.common.errors import UserError
from examples.common.transformer import dense_attention
from examples.sparse_transformer import data
from examples.sparse_transformer.__main__ import main, parse_args
from examples.sparse_transformer.model import Transformer, sample
from jaxsparse.nn import SparseAttention

ROOT = Path(__file__).parent.parent
TINY = ["--size=4", "--layers=1", "--heads=2", "--hidden=16", "--batch=4", "--samples=2"]
TINY += ["--devices=1"]
SIZES = {"size": 4, "layers": 2, "heads": 2, "hidden": 16, "mlp": 32}


def test_examples_are_few_files_that_import_no_experiment() -> None:
    for name in (
        "char_rnn",
        "mobilenet",
        "pruned_lm",
        "sparse_transformer",
        "speech",
        "tree_sentiment",
    ):
        assert len(list((ROOT / "examples" / name).glob("*.py"))) <= 6
    for path in (ROOT / "examples").rglob("*.py"):
        tree = ast.parse(path.read_text())
        imports = [x for x in ast.walk(tree) if isinstance(x, ast.Import | ast.ImportFrom)]
        assert all(x in tree.body for x in imports), path  # None inside functions.
        assert not any("experiments" in ast.unparse(x) for x in imports), path


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs the program, which must succeed, and returns its metrics."""

    def run(*argv: object) -> dict[str, Any]:
        output = tmp_path / "output"
        assert main([*TINY, "--output", str(output), *map(str, argv)]) == 0
        metrics = json.loads((output / "metrics.json").read_text())
        picture = output / f"{metrics['options']['attention']}_transformer.png"
        with Image.open(picture) as image:
            assert min(image.size) > 500
        return metrics

    return run


def images(count: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), np.uint8)


def test_learns_the_default_photographs(
    run: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = run("--steps", 60, "--eval-every", 25, "--learning-rate", 0.02)
    out, err = capsys.readouterr()
    curve = metrics["curve"]
    assert [point["step"] for point in curve] == [0, 25, 50, 60]
    assert curve[0]["held_out"] == pytest.approx(8, abs=1e-3)  # A uniform guess.
    assert curve[-1]["train"] < curve[1]["train"] < 8
    assert curve[-1]["held_out"] < 7.5
    assert metrics["steps"] == metrics["options"]["steps"] == 60
    assert metrics["tokens_per_second"] > 0
    assert {"jax", "jaxlib", "flax", "jaxsparse"} < set(metrics["versions"])
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
    assert out.startswith("sparse, held out: 8.000 -> ") and out.count("\n") == 1
    assert err == ""
    assert metrics["curve"][-1]["held_out"] < 8.5


def test_paper_preset() -> None:
    args = parse_args(["--preset", "paper", "--steps", "100", "--hidden", "512"])
    assert (args.size, args.layers, args.heads, args.filter) == (64, 3, 8, 4096)
    assert (args.batch, args.band, args.sparsity) == (8, 256, 0.95)
    assert (args.dtype, args.learning_rate) == ("bfloat16", 3e-4)
    assert (args.steps, args.hidden) == (100, 512)
    assert parse_args(["--preset", "paper"]).steps == 140_000


@pytest.mark.parametrize("kind", ["folder", "npz"])
def test_reads_photographs(kind: str, run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "data"
    if kind == "folder":
        (path / "inner").mkdir(parents=True)
        Image.fromarray(images(1, 9, 12)[0]).save(path / "inner" / "colour.PNG")
        Image.fromarray(images(1, 20, 8)[0, :, :, 0]).save(path / "grey.jpg")
        (path / "notes.txt").write_text("not an image")
    else:
        path = tmp_path / "data.npz"
        np.savez(path, labels=np.arange(12), images=images(12, 5, 4))
    metrics = run("--steps", 2, "--data", path)
    assert metrics["options"]["data"] == str(path)
    assert math.isfinite(metrics["curve"][-1]["held_out"])
    assert metrics["curve"][-1]["held_out"] < 8.5


def python_2_batch(planes: np.ndarray) -> bytes:
    """A batch as the published files have it: pickled by Python 2, strings as bytes."""
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K" + bytes([len(planes)]) + b"M\x00\x0c\x86"  # Version 1, shape (N, 3072).
        b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + planes.size.to_bytes(4, "little") + planes.tobytes() + b"tb"
    )
    labels = b"U\x06labels](K\x03K\x07e"
    return b"\x80\x02}(U\x04data" + array + labels + b"u."


def write_cifar(folder: Path, kind: str, train: np.ndarray, test: np.ndarray) -> None:
    """Writes two batches of one image to train on each, and one to test on."""
    folder.mkdir()
    for name, batch in (
        ("data_batch_1", train[:1]),
        ("data_batch_2", train[1:]),
        ("test_batch", test),
    ):
        planes = batch.transpose(0, 3, 1, 2).reshape(len(batch), -1)
        if kind == "binary":
            labels = np.full((len(batch), 1), 9, np.uint8)
            (folder / f"{name}.bin").write_bytes(np.hstack([labels, planes]).tobytes())
        elif kind == "python":
            (folder / name).write_bytes(python_2_batch(planes))
        else:
            Image.fromarray(batch.reshape(len(batch), 1024, 3)).save(folder / f"{name}.png")


@pytest.mark.parametrize("kind", ["binary", "python", "sheets"])
def test_reads_cifar(kind: str, tmp_path: Path) -> None:
    pictures = images(5, 32, 32)
    write_cifar(tmp_path / "cifar", kind, pictures[:2], pictures[2:])
    dataset = data.load(tmp_path / "cifar", 32)
    np.testing.assert_array_equal(dataset.train, pictures[:2])
    np.testing.assert_array_equal(dataset.held_out, pictures[2:])
    assert dataset.scales == 1
    assert "2 photographs" in dataset.description


class Malicious:
    """Unpickled without care, it runs a program."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch proof",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"data": Malicious()}), "a reference to posix.system, which is not allowed"),
        (b"cnumpy\nsave\n.", "a reference to numpy.save, which is not allowed"),
        (pickle.dumps({"labels": [1]}), "expected data uint8(N, 3072), got no array"),
        (b"no pickle", "expected a pickled CIFAR batch"),
    ],
)
def test_refuses_a_pickle(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("data_batch_1", "test_batch"):
        Path(name).write_bytes(content)
    with pytest.raises(UserError) as info:
        data.load(tmp_path, 4)
    assert message in str(info.value)
    assert not Path("proof").exists()


def test_reads_published_downsampled_imagenet(tmp_path: Path) -> None:
    pictures, path = images(12, 8, 8), tmp_path / "val_data.npz"
    planes = pictures.transpose(0, 3, 1, 2).reshape(12, -1)
    np.savez(path, mean=np.zeros(192), labels=np.ones((12, 12), np.uint8), data=planes)
    dataset = data.load(path, 4)
    np.testing.assert_array_equal(dataset.held_out, pictures[::10])
    np.testing.assert_array_equal(dataset.train, np.delete(pictures, [0, 10], 0))


def damage_png(path: Path, part: bytes, offset: int, value: bytes) -> None:
    """Writes a PNG image, of which some bytes after the name of a chunk are overwritten."""
    Image.fromarray(images(1, 64, 64)[0]).save(path)
    content = bytearray(path.read_bytes())
    at = content.index(part) + offset
    content[at : at + len(value)] = value
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("part", "offset", "value"),
    [
        (b"IHDR", 4, b"\x00\x00\x10"),  # SyntaxError: a wrong checksum.
        (b"IHDR", -4, b"\x00\x00\x00\x00"),  # ValueError: a header cut short.
        (b"IDAT", 40, b"\xff\x00\xff\x00"),
        (b"IEND", -900, b"\x00" * 900),
    ],
)
@pytest.mark.parametrize("name", ["image.png", "data_batch_1.png"])
def test_damaged_image_is_reported(
    name: str, part: bytes, offset: int, value: bytes, tmp_path: Path
) -> None:
    for file in {name, "test_batch.png"} if "batch" in name else {name}:
        damage_png(tmp_path / file, part, offset, value)
    with pytest.raises(UserError, match=r"expected a PNG or JPEG image, got: \w+"):
        data.load(tmp_path, 4)


def test_image_too_large_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(images(1, 64, 64)[0]).save(tmp_path / "image.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(UserError, match="expected a PNG or JPEG image, got: Image size"):
        data.load(tmp_path, 4)


@pytest.mark.parametrize("at", [0.02, 0.3, 0.5, 0.9, 0.97])
def test_damaged_npz_is_reported(at: float, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez_compressed(path, x=images(20, 8, 8) // 9)
    content = bytearray(path.read_bytes())
    start = int(at * len(content))
    content[start : start + 8] = b"\xff" * 8
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"data\.npz: expected .*, got.* \w+"):
        data.load(path, 4)


IMAGES = "JAXSPARSE_IMAGES"


@pytest.mark.skipif(
    not os.environ.get(IMAGES), reason=f"{IMAGES} names no folder or file of images"
)
def test_reads_real_data() -> None:
    dataset = data.load(Path(os.environ[IMAGES]), 8)
    for part in (dataset.train, dataset.held_out):
        assert len(part) > 0
        assert all(x.dtype == np.uint8 and x.shape[2:] == (3,) for x in part)
        assert all(min(x.shape[:2]) >= 8 for x in part)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--data nowhere", "expected a folder of images or an .npz file, got nothing"),
        ("--data notes.txt", "expected a folder of images or an .npz file, got another kind"),
        ("--data false.npz", "expected a folder of images or an .npz file, got another kind"),
        ("--data empty", "expected .png or .jpg files in the folder, got none"),
        ("--data broken", "expected a PNG or JPEG image"),
        ("--data floats.npz", "or data uint8(N, 3 S S), got x float64(2, 8, 8, 3)"),
        (
            "--data oblong.npz",
            "expected an array uint8(N, H, W, 3) or data uint8(N, 3 S S), got data",
        ),
        ("--data pickle.npz", "expected plain arrays"),
        ("--data small --size 7", "at least 14 pixels wide and 7 high, got 12 x 12"),
        ("--data untested", "expected data_batch_*.bin and test_batch.bin, got 1 of the first"),
        ("--data torn", "expected records of 3073 bytes, got 5 bytes"),
        ("--data narrow", "expected 1024 pixels in a row, got 12"),
        ("--data cifar --size 33", "--size: expected at most 32, the size of the images, got 33"),
        ("--size 10000", "at least 20000 pixels wide"),
        ("--size 0", "argument --size: expected int in [1, 2.14748e+09), got 0"),
        ("--steps many", "argument --steps: expected int"),
        ("--sparsity 1", "argument --sparsity: expected float in [0, 1), got 1"),
        ("--learning-rate nan", "argument --learning-rate: expected float in [0, inf), got nan"),
        ("--heads 3", "--hidden: expected a multiple of --heads 3, got 16"),
        ("--dtype float16", "argument --dtype: invalid choice"),
        ("--compare --attention dense", "argument --attention: not allowed with argument"),
        ("--preset huge", "argument --preset: invalid choice"),
        ("--devices 1000", "--devices: expected at most"),
        ("--unknown", "unrecognized arguments: --unknown"),
        ("--output notes.txt", "--output: expected a writable folder"),
        ("--resume", "--resume: expected a checkpoint in sparse_transformer_out/checkpoints"),
        ("--resume --compare", "--resume: expected a checkpoint in"),
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
    for folder in ("empty", "broken", "small", "untested", "torn", "narrow"):
        Path(folder).mkdir()
    Path("notes.txt").write_text("not an image")
    Path("false.npz").write_text("not an archive")
    Path("broken/image.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    Image.fromarray(images(1, 12, 12)[0]).save("small/image.png")
    np.savez("floats.npz", x=images(2, 8, 8) / 255)
    np.savez("oblong.npz", data=np.ones((2, 18), np.uint8))
    np.savez("pickle.npz", x=np.array([{}], object))
    Path("untested/data_batch_1.bin").write_bytes(bytes(3073))
    for name in ("data_batch_1", "test_batch"):
        Path(f"torn/{name}.bin").write_bytes(bytes(5))
        Image.fromarray(images(1, 12, 12)[0]).save(f"narrow/{name}.png")
    write_cifar(Path("cifar"), "binary", images(2, 32, 32), images(1, 32, 32))
    assert main([*TINY, *argv.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sparse_transformer: error: ") and err.count("\n") == 1
    assert message in err


def test_diverging_training_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*TINY, "--quiet", "--output", str(tmp_path), "--learning-rate", "1e38"]
    assert main([*argv, "--steps", "9"]) == 2
    assert "expected a finite loss, got nan" in capsys.readouterr().err


def test_exhausted_memory_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def exhaust(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nx")

    monkeypatch.setattr("examples.sparse_transformer.__main__.make_topology", exhaust)
    assert main([*TINY, "--quiet", "--output", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "got: Out of memory allocating 9 bytes; lower --batch, --size, --hidden, " in err


def test_split_holds_out() -> None:
    few = images(2, 8, 20)
    train, held_out = data.split(list(few), 4)
    np.testing.assert_array_equal(train, few[:, :, :16])
    np.testing.assert_array_equal(held_out, few[:, :, 16:])
    many = images(20, 4, 4)
    train, held_out = data.split(list(many), 4)
    np.testing.assert_array_equal(held_out, many[[0, 10]])
    assert len(train) == 18


def test_crops_are_means_of_windows() -> None:
    image = images(1, 8, 8)[0]
    crops = data.crops([image], 4, 64, 2, (0, 0, 0)).reshape(64, 4, 4, 3)
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


def test_crops_follow_from_their_seed() -> None:
    pictures = images(3, 9, 9)
    first, again = (data.crops(pictures, 4, 8, 2, (1, 2, 3)) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    for seed in ((0, 2, 3), (1, 0, 3), (1, 2, 0)):
        assert (data.crops(pictures, 4, 8, 2, seed) != first).any()


@pytest.fixture(scope="module")
def topology() -> Topology:
    mask = (masks.band(16) | masks.random(0.7, 48, band_width=16)) & masks.causal()
    return Topology.from_mask(mask, (48, 48))


def make_model(attention: Any) -> Transformer:
    model = Transformer(attention, **SIZES, dtype=jnp.float32, seed=0)
    model.norm.scale[...] = jnp.ones(16)  # As if trained: it starts at zero.
    return model


@pytest.fixture(scope="module", params=["sparse", "dense"])
def model(request: pytest.FixtureRequest, topology: Topology) -> Transformer:
    return make_model(dense_attention if request.param == "dense" else SparseAttention(topology))


def test_model_is_causal(model: Transformer) -> None:
    tokens = images(2, 4, 4).reshape(2, 48).astype(np.int32)
    apply = nnx.jit(lambda model, tokens: model(tokens))
    before = apply(model, tokens)
    for t in (0, 1, 20, 46):
        changed = tokens.copy()
        changed[:, t] = (changed[:, t] + 128) % 256
        after = apply(model, changed)
        np.testing.assert_array_equal(after[:, : t + 1], before[:, : t + 1])
        assert np.abs(after[:, t + 1] - before[:, t + 1]).max() > 1e-3


@pytest.mark.parametrize("longest_row", [12, None])  # rows that are longer are read whole
def test_samples_are_drawn_from_the_model(model: Transformer, longest_row: int | None) -> None:
    given = images(3, 4, 4).reshape(3, 48).astype(np.int32)
    known = np.zeros((3, 48), bool)
    known[0, :24] = known[1] = True
    longest = None if model.attention is dense_attention else longest_row
    drawn = np.asarray(sample(model, given, known, longest, jax.random.key(1)))
    np.testing.assert_array_equal(drawn[known], given[known])
    # The whole sequence at once, with the sparse kernels, gives what the cache gave.
    keys = jax.random.split(jax.random.key(1), 48)
    expected = jax.vmap(jax.random.categorical, (0, 1), 1)(keys, model(drawn))
    np.testing.assert_array_equal(drawn[~known], np.asarray(expected)[~known])


def test_dense_twin(topology: Topology) -> None:
    sparse, dense = make_model(SparseAttention(topology)), make_model(dense_attention)
    jax.tree.map(
        np.testing.assert_array_equal, nnx.state(sparse, nnx.Param), nnx.state(dense, nnx.Param)
    )

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) / math.sqrt(query.shape[-1])
        scores = jnp.where(jnp.tri(48, dtype=bool), scores, -jnp.inf)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), value)

    tokens = images(2, 4, 4).reshape(2, 48).astype(np.int32)
    everything = Topology.from_mask(masks.causal(), (48, 48))
    for same in (attend, SparseAttention(everything)):
        np.testing.assert_allclose(make_model(same)(tokens), dense(tokens), rtol=1e-4, atol=1e-4)
