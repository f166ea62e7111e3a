"""Tests of examples/speech: the format of data and its errors, generated digits, batches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from speech_problems import FEATURES, make_arrays, write_corpus

from examples.common.errors import UserError
from examples.speech import data, digits


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "corpus.npz"


def test_a_file_is_read_by_its_parts(path: Path) -> None:
    arrays = make_arrays()
    corpus = data.load(write_corpus(path), seed=0)
    is_test = arrays["split"] == "test"
    assert corpus.frame_ms == 20 and corpus.features == FEATURES
    assert corpus.alphabet == " ABC"
    for part, which in ((corpus.train, ~is_test), (corpus.held_out, is_test)):
        assert part.texts == list(arrays["text"][which])
        np.testing.assert_array_equal(part.lengths, np.diff(arrays["offset"])[which])
    # Features of mean 0 and variance 1 over what is trained on, by the same numbers for all.
    everything = corpus.train.features
    np.testing.assert_allclose(everything.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(everything.std(0), 1, rtol=1e-5)
    chosen = [i for i in range(12) if not is_test[i]]
    frames = [arrays["feat"][slice(*arrays["offset"][i : i + 2])] for i in range(12)]
    train = np.concatenate([frames[i] for i in chosen])
    np.testing.assert_allclose(
        corpus.held_out.frames(1), (frames[7] - train.mean(0)) / train.std(0), rtol=1e-4, atol=1e-5
    )


def test_optional_arrays_have_defaults(path: Path) -> None:
    corpus = data.load(write_corpus(path, split=None, frame_ms=None), seed=0)
    assert corpus.frame_ms == 10
    assert corpus.held_out.texts == list(make_arrays()["text"][[0, 10]])
    assert len(corpus.train) == 10


def test_a_constant_feature_becomes_zero(path: Path) -> None:
    feat = make_arrays()["feat"]
    feat[:, 2] = 7
    assert not data.load(write_corpus(path, feat=feat), seed=0).train.features[:, 2].any()


@pytest.mark.parametrize("change", ["feat", "text", "split"])
def test_digest_tells_corpora_apart(change: str, path: Path) -> None:
    before = data.load(write_corpus(path), seed=0).digest
    assert data.load(path, seed=1).digest == before
    array = make_arrays()[change]
    array[[0, 1]] = array[[3, 2]]
    assert data.load(write_corpus(path, **{change: array}), seed=0).digest != before


def replaced(name: str, index: Any, value: Any) -> np.ndarray:
    array = make_arrays()[name].copy()
    array[index] = value
    return array


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": None}, "expected arrays feat, offset, text, got none named text, but feat, "),
        ({"feat": np.ones((3, 2), int)}, "expected feat to be floating numbers (frames, features)"),
        ({"feat": np.ones(7)}, "(frames, features), got float64 (7,)"),
        ({"feat": replaced("feat", (9, 1), np.nan)}, "to be finite, got a number that is not in"),
        ({"offset": np.arange(3.0)}, "expected offset to be integers (utterances + 1,), got float"),
        ({"offset": np.array([0])}, "expected offset to be integers (utterances + 1,), got int64 "),
        ({"offset": replaced("offset", 0, 1)}, "expected offset to be from 0 to the "),
        ({"offset": replaced("offset", -1, 9999)}, " frames of feat, got (0, 9999)"),
        ({"offset": replaced("offset", 4, 10**6)}, "to be rising, a frame at least for each utt"),
        ({"offset": replaced("offset", 4, -1)}, "to be rising, a frame at least for each utt"),
        ({"text": np.array(["A"])}, "strings (12,), as offset has 13 numbers, got <U1 (1,)"),
        ({"text": np.arange(12)}, "expected text to be strings (12,), as offset has 13 numbers"),
        ({"text": replaced("text", 5, " ")}, "transcript of each utterance, got an empty one of "),
        ({"text": np.array(["A"] * 12, object)}, "expected an .npz file of plain arrays, got: "),
        ({"split": replaced("split", 2, "dev")}, "expected split to be 'train' or 'test' (12,),"),
        ({"split": np.array(["train"] * 12)}, "and some of both, got <U5 (12,) train"),
        ({"split": np.array(["train", "test"])}, "'train' or 'test' (12,), and some of both, got"),
        ({"frame_ms": np.array(0)}, "expected frame_ms to be a positive number, got int64 () 0"),
        ({"frame_ms": np.array([10, 10])}, "expected frame_ms to be a positive number, got int64"),
        ({"frame_ms": np.array(np.nan)}, "to be a positive number, got float64 () nan"),
    ],
)
def test_a_mistake_in_a_file_is_named(changes: dict[str, Any], message: str, path: Path) -> None:
    with pytest.raises(UserError) as error:
        data.load(write_corpus(path, **changes), seed=0)
    assert str(error.value).startswith(f"--data {path}: expected ")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, b"", b"no archive", b"PK\x03\x04 damaged"])
def test_another_kind_of_file_is_reported(content: bytes | None, path: Path) -> None:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"--data .*: expected an \.npz file.*, got: "):
        data.load(path, seed=0)


def test_the_documented_program_writes_a_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parent.parent / "docs" / "speech.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    corpus = data.load(Path("corpus.npz"), seed=0)
    assert (len(corpus.train), len(corpus.held_out), corpus.features) == (18, 2, 13)


def test_an_utterance_too_short_for_its_transcript_is_reported(path: Path) -> None:
    # "ABBA" takes five steps: a blank parts the two Bs.
    arrays = {"feat": np.ones((15, 2)), "offset": np.array([0, 5, 15])}
    arrays |= {"text": np.array(["ABBA", "A"]), "split": np.array(["train", "test"])}
    corpus = data.load(write_corpus(path, **arrays), seed=0)
    data.check_lengths(corpus, 1)
    with pytest.raises(UserError, match=r"at least 5 steps for 'ABBA', got 3 of 5 frames; lower"):
        data.check_lengths(corpus, 2)


def test_generated_digits_follow_their_seed() -> None:
    frames, offsets, texts = digits.generate(20, 3)
    assert frames.shape == (offsets[-1], digits.COEFFICIENTS) and np.isfinite(frames).all()
    assert offsets[0] == 0 and len(offsets) == 21 and len(texts) == 20
    assert set(" ".join(texts).split()) <= set(digits.WORDS)
    again, other = digits.generate(20, 3), digits.generate(20, 4)
    np.testing.assert_array_equal(frames, again[0])
    assert texts == again[2] != other[2]
    # Longer texts take longer, and no two utterances of a digit are alike.
    counts = [len(text.split()) for text in texts]
    assert np.corrcoef(counts, np.diff(offsets))[0, 1] > 0.8


def test_every_phone_is_used() -> None:
    assert {"-", *" ".join(digits.WORDS.values()).split()} == set(digits.PHONES)


def test_generated_corpus_has_other_speech_to_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "GENERATED", {"train": 9, "test": 4})
    corpus = data.load(None, seed=0)
    assert (len(corpus.train), len(corpus.held_out)) == (9, 4)
    assert corpus.train.texts[:4] != corpus.held_out.texts
    assert corpus.digest == data.load(None, seed=0).digest != data.load(None, seed=1).digest


SIZES = {"batch": 4, "stride": 3, "buckets": 2}


@pytest.fixture
def corpus(path: Path) -> data.Corpus:
    return data.load(write_corpus(path), seed=0)


def rows_of(batch: dict[str, np.ndarray], corpus: data.Corpus) -> list[tuple[bytes, str]]:
    """The frames and texts of the rows that are utterances; checks that the rest is padding."""
    rows = []
    for frames, length, labels, count in zip(*batch.values(), strict=True):
        assert not frames[length:].any() and (labels[count:] == data.BLANK).all()
        text = "".join(corpus.alphabet[i - 1] for i in labels[:count])
        if count:
            rows.append((frames[:length].tobytes(), text))
    return rows


def utterances(part: data.Utterances) -> list[tuple[bytes, str]]:
    return [(part.frames(i).tobytes(), part.texts[i]) for i in range(len(part))]


@pytest.mark.parametrize("buckets", [1, 2, 50])
def test_a_pass_has_every_utterance(buckets: int, corpus: data.Corpus) -> None:
    sizes = SIZES | {"buckets": buckets}
    batches = data.Batches(corpus, corpus.train, **sizes)
    passes = [
        [batches.training(epoch * batches.per_epoch + i, 0) for i in range(batches.per_epoch)]
        for epoch in range(2)
    ]
    for epoch in passes:
        rows = [row for batch in epoch for row in rows_of(batch, corpus)]
        assert set(rows) == set(utterances(corpus.train))
        assert len(rows) == 4 * batches.per_epoch
    shapes = {x["frames"].shape for epoch in passes for x in epoch}
    assert len(shapes) <= buckets and all(shape[1] % 3 == 0 for shape in shapes)
    orders = [[rows_of(batch, corpus) for batch in epoch] for epoch in passes]
    assert orders[0] != orders[1]

    held_out = data.Batches(corpus, corpus.held_out, **sizes).all()
    rows = [pair for _, batch in held_out for pair in rows_of(batch, corpus)]
    members = [index for indices, _ in held_out for index in indices]
    assert sorted(members) == [0, 1, 2]
    assert rows == [utterances(corpus.held_out)[i] for i in members]


def test_noise_is_that_of_the_step_and_leaves_scores_alone(corpus: data.Corpus) -> None:
    plain, noisy = (data.Batches(corpus, corpus.train, **SIZES, noise=x) for x in (0.0, 0.5))
    one, again, other = (noisy.training(i, 0)["frames"] for i in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    noise = one - plain.training(0, 0)["frames"]
    assert 0.4 < noise.std() < 0.6
    if one.shape == other.shape:
        assert (noise != other - plain.training(1, 0)["frames"]).any()
    for (_, a), (_, b) in zip(plain.all(), noisy.all(), strict=True):
        np.testing.assert_array_equal(a["frames"], b["frames"])
