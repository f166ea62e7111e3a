"""Tests of examples/pruned_lm at a tiny size: windows, decoding, forms, runs, resuming, shapes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from pydoc_data.topics import topics

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

from examples.pruned_lm import shapes
from examples.pruned_lm.__main__ import main, parse_args
from examples.pruned_lm.model import FORMS, GPT, fastest, in_16_bits, write
from examples.pruned_lm.report import table
from examples.pruned_lm.training import Trainer, Windows, score
from jaxsparse.nn import PackedLinear, SparseLinear

pytestmark = pytest.mark.usefixtures("compiled_fast")

TINY = ["--hidden=16", "--heads=2", "--layers=1", "--context=8", "--batch=4", "--steps=12"]
TINY += ["--eval-every=5", "--checkpoint-every=5", "--prune-every=2", "--held-out=0.1", "--quiet"]
STEPS = 12
SPARSITY = 0.75
MEASURED = {"dense": {"perplexity": 2.0, "tokens_per_second": 1.0, "bytes": 1}}
RUN = [*TINY, "--sparsities", "0", str(SPARSITY)]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short text."""
    path = tmp_path_factory.mktemp("data") / "book.txt"
    path.write_text(topics["class"])
    return path


@pytest.fixture(scope="module")
def unbroken(book: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The output of a run that nothing interrupted, and what it printed."""
    output = tmp_path_factory.mktemp("unbroken")
    return output, printed_by(main, [*RUN, "--data", str(book), "--output", str(output)])


@pytest.fixture(scope="module")
def pruned() -> GPT:
    """A model of which only large weights are left."""
    model = GPT(50, context=24, layers=1, heads=2, hidden=32, dtype=jnp.float32)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if path[-1] == "kernel":
            kernel = variable[...]
            variable[...] = jnp.where(jnp.abs(kernel) > jnp.median(jnp.abs(kernel)), kernel, 0)
    return model


# ---- Windows and scores ----


@pytest.mark.parametrize(("size", "length"), [(1, 8), (8, 8), (9, 8), (100, 8), (50, 7), (20, 2)])
def test_windows_have_each_token_as_a_target_once(size: int, length: int) -> None:
    tokens = np.arange(1, size + 1)
    windows = Windows.of(np.array([0]), tokens, length)
    np.testing.assert_array_equal(windows.targets[windows.counted], tokens)
    np.testing.assert_array_equal(windows.inputs[windows.counted], tokens - 1)
    seen = np.broadcast_to(np.arange(length), windows.counted.shape)[1:]
    assert (seen[windows.counted[1:]] >= length - max(length // 2, 1)).all()


def test_score_is_the_mean_over_the_text(pruned: GPT) -> None:
    tokens = np.random.default_rng(0).integers(0, 50, 200)
    windows = Windows.of(tokens[:1], tokens[1:], 24)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        nnx.jit(lambda model, x: model(x))(pruned, windows.inputs), windows.targets
    )
    expected = np.asarray(losses)[windows.counted].mean()
    assert score(*nnx.split(pruned), windows) == pytest.approx(float(expected), rel=1e-5)


def test_training_prunes_to_the_sparsity(unbroken: tuple[Path, str]) -> None:
    state = saved_state(unbroken[0] / "75_percent", STEPS)
    kernels = {
        name: np.asarray(layer["kernel"]["value"])
        for name, layer in state["params"]["blocks"]["0"].items()
        if "kernel" in layer
    }
    assert set(kernels) == {"qkv", "merge", "expand", "contract"}
    for kernel in kernels.values():
        assert np.count_nonzero(kernel) == round((1 - SPARSITY) * kernel.size)
    masks = jax.tree.leaves(state["optimizer"]["masks"])
    assert {x.dtype for x in masks} == {np.dtype(np.uint8)} and len(masks) == 4


# ---- Decoding and forms ----


def test_cache_decodes_what_the_whole_pass_predicts(pruned: GPT) -> None:
    """The likeliest tokens one by one are those of the whole pass over what was written."""
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 50, (3, 24)))
    known, coldest = jnp.arange(24) < 5, jnp.float32(1e-3)
    written = write(*nnx.split(pruned), tokens, known, coldest, jax.random.key(0))
    np.testing.assert_array_equal(written[:, :5], tokens[:, :5])
    likeliest = jnp.argmax(nnx.jit(lambda model, x: model(x))(pruned, written), -1)
    # Rounding may turn two tokens of nearly the same probability around.
    assert (np.asarray(likeliest[:, 4:-1] == written[:, 5:])).mean() > 0.95


def test_forms_are_one_model(pruned: GPT) -> None:
    model = in_16_bits(pruned, jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.bfloat16)}
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 50, (2, 24)))
    predict = nnx.jit(lambda model, tokens: model(tokens))
    expected = predict(pruned, tokens)
    types = {"dense": nnx.Linear, "CSR": SparseLinear, "packed": PackedLinear}
    for name, make in FORMS.items():
        form = make(model, 2)
        assert type(form.blocks[0].expand) is types[name]
        np.testing.assert_allclose(predict(form, tokens), expected, atol=0.05)
    assert type(model.blocks[0].expand) is nnx.Linear  # It is left as it was.
    chosen, layers = fastest(model, 2)
    assert len(layers) == 4 and all(row["packed_seconds"] for row in layers.rows)
    np.testing.assert_allclose(predict(chosen, tokens), expected, atol=0.05)


# ---- Runs ----


def test_writes_metrics_a_picture_and_a_table(unbroken: tuple[Path, str]) -> None:
    output, printed = unbroken
    metrics = metrics_of(output)
    assert {"options", "device", "versions", "date", "text", "models"} < set(metrics)
    dense, sparse = metrics["models"]
    assert (dense["sparsity"], sparse["sparsity"]) == (0, SPARSITY)
    assert list(dense["forms"]) == ["dense"]
    assert list(sparse["forms"]) == ["dense", "CSR", "packed", "fastest"]
    assert len(sparse["forms"]["fastest"]["layers"]) == 4
    for model in metrics["models"]:
        assert [x["step"] for x in model["curve"]] == [0, 5, 10, STEPS]
        assert len(model["sample"]) == 8
        for form in model["forms"].values():
            # In 16 bits as in training, up to rounding.
            assert form["nats"] == pytest.approx(model["curve"][-1]["held_out"], abs=0.02)
            assert form["perplexity"] == math.exp(form["nats"])
            assert f"{form['perplexity']:.3f}" in printed
            assert form["tokens_per_second"] > 0 and form["bytes"] > 0
    assert (output / "pruned_lm.png").read_bytes().startswith(b"\x89PNG")
    assert {x.name for x in output.iterdir()} == {
        "75_percent", "dense", "metrics.json", "pruned_lm.png",
    }  # fmt: skip


def test_interrupted_run_resumes(
    book: Path,
    unbroken: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the second model, while masks change: the first one is restored, not trained again."""
    argv = [*RUN, "--data", str(book), "--output", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr("examples.pruned_lm.__main__.measure_forms", lambda *_: {})
        interrupt(patch, Trainer, STEPS + 6)
        assert_stops(main, argv, tmp_path, f"step 7 of {STEPS}", capsys, " of 75_percent")
    assert main([*argv, "--resume", "--learning-rate=1"]) == 2
    assert "expected --learning-rate 0.003 as in" in capsys.readouterr().err
    monkeypatch.setattr("examples.pruned_lm.__main__.measure_forms", lambda *_: MEASURED)
    assert main([*argv, "--resume"]) == 0
    one, other = (metrics_of(x)["models"] for x in (tmp_path, unbroken[0]))
    if jax.default_backend() == "cpu":
        for a, b in zip(one, other, strict=True):
            assert (a["curve"], a["sample"]) == (b["curve"], b["sample"])
        for name in ("dense", "75_percent"):
            states = [saved_state(x / name, STEPS) for x in (tmp_path, unbroken[0])]
            jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--data nowhere", "--data nowhere: expected a text file, got:"),
        ("--hidden 10 --heads 4", "--hidden: expected a multiple of --heads 4, got 10"),
        ("--prune-from 0.8", "--prune-to: expected more than --prune-from 0.8, got 0.75"),
        ("--sparsities 0.5 0.50", "--sparsities: expected each once, got that of 50_percent twice"),
        ("--sparsities 1", "argument --sparsities: expected float in [0, 1), got 1"),
        ("--prompt=", "--prompt: expected a character at least, got none"),
        ("--prompt \u2603", "--prompt: expected characters of the data, got '\u2603'"),
        ("--temperature 0", "argument --temperature: expected float in [0.001, inf), got 0"),
        ("--context 500000", "; lower --context"),
        ("--resume", "--resume: expected a checkpoint in pruned_lm_out/dense, got none"),
        ("--shapes gpt", "argument --shapes: invalid choice: 'gpt'"),
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
    assert main([*TINY, *argv.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("pruned_lm: error: ") and err.count("\n") == 1
    assert message in err


# ---- Shapes of known decoders ----


def test_shapes_are_those_of_the_model() -> None:
    decoder = shapes.SHAPES["llama-7b"]
    assert decoder.products == 128
    # Of 6,738,415,616 parameters, embeddings, the last layer and norms take the rest.
    assert decoder.weights == 6_738_415_616 - 2 * 32000 * 4096 - 65 * 4096
    assert parse_args(["--shapes=llama-7b"]).sparsities == [0, 0.5, 0.7, 0.9]


def decoded_in_float64(matrices: dict[str, np.ndarray], x: np.ndarray, layers: int) -> np.ndarray:
    """One step as equations have it: norms in front of products, a sum in place of attention."""

    def normalised(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True))

    for _ in range(layers):
        heads = np.split(normalised(x) @ matrices["query_key_value"].T, 3, axis=-1)
        x = x + sum(heads) @ matrices["merge"].T
        gate, up = np.split(normalised(x) @ matrices["gate_up"].T, 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ matrices["down"].T
    return normalised(x)


def test_forms_of_shapes_compute_a_decoder() -> None:
    decoder = shapes.Decoder(layers=2, hidden=48, filter=80)
    matrices = enumerate(decoder.matrices.items())
    csr = {name: shapes.random_csr(shape, 0.6, i) for i, (name, shape) in matrices}
    x = jnp.asarray(3 * np.random.default_rng(3).standard_normal((2, 48)), jnp.bfloat16)
    dense = {name: np.asarray(a.todense(), np.float64) for name, a in csr.items()}
    expected = decoded_in_float64(dense, np.asarray(x, np.float64), 2)
    forms = (
        csr,
        {name: a.pack() for name, a in csr.items()},
        {name: a.pack(columns=2) for name, a in csr.items()},
        {name: a.todense().T for name, a in csr.items()},
    )
    for form in forms:
        result = np.asarray(shapes.decode([form] * 2, x, 1), np.float64)
        np.testing.assert_allclose(result, expected, atol=0.04)


def test_measures_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(shapes.SHAPES, "llama-7b", shapes.Decoder(9, 48, 80))
    argv = ["--shapes=llama-7b", "--decoder-layers=2", "--decode-steps=2", "--quiet"]
    assert main([*argv, "--sparsities", "0.9", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("llama-7b: 8 products with 0.00 billion random weights in bfloat16")
    assert "nothing of the quality" in printed
    metrics = json.loads((tmp_path / "shapes.json").read_text())
    rows = metrics["rows"]
    assert [(x["sparsity"], x["form"]) for x in rows] == [
        (0, "dense"), (0.9, "CSR"), (0.9, "packed"),
    ]  # fmt: skip
    weights = 2 * (4 * 48 * 48 + 3 * 48 * 80)
    assert rows[0]["bytes"] == 2 * weights and rows[0]["weights"] == weights
    # Patterns count, and each layer has its own.
    assert rows[2]["packed_by"] == "gaps" and "packed by" in printed
    assert rows[1]["bytes"] > (2 + 4) * 0.09 * weights
    assert table(rows) in printed
    assert (tmp_path / "shapes.png").read_bytes().startswith(b"\x89PNG")
