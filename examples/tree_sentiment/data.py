"""Trees with a label at every row: the Stanford Sentiment Treebank, or generated arithmetic."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxsparse import dynamic

from ..common.errors import UserError
from . import expressions
from .model import initial_table

PARTS = ("train", "dev", "test")
GENERATED = (20_000, 500, 1000)  # Expressions in each.
SENTIMENTS = ("very negative", "negative", "neutral", "positive", "very positive")
ESCAPES = {"\\/": "/", "\\*": "*", "-LRB-": "(", "-RRB-": ")"}  # Of treebanks.


class Dataset(NamedTuple):
    """What to train on, what decides when to stop, and what is tested at the end."""

    train: dynamic.Graphs
    dev: dynamic.Graphs
    test: dynamic.Graphs
    classes: tuple[str, ...]  # What the labels mean.
    vectors: np.ndarray  # (words + 1, features): what words begin with; the last one is unknown.
    source: str
    digest: str  # SHA-256 of the content.

    @property
    def description(self) -> str:
        """What there is, in a line."""
        words, features = self.vectors.shape
        return (
            f"{self.source}, {len(self.train):,} trees to train on, {len(self.dev):,} held out, "
            f"{len(self.test):,} to test; {words - 1:,} words of {features} features"
        )

    @property
    def neutral(self) -> int | None:
        """The class between negative and positive ones, if these are sentiments."""
        return SENTIMENTS.index("neutral") if self.classes == SENTIMENTS else None


def root_labels(graphs: dynamic.Graphs) -> np.ndarray:
    """The label of each tree's root."""
    return graphs.channel("label")[graphs.offsets[:-1] + graphs.roots]


def load(folder: Path | None, vectors: Path | None, features: int, seed: int) -> Dataset:
    """Reads the treebank in a folder, or (None) generates expressions.

    Args:
        folder: of train.txt, dev.txt and test.txt.
        vectors: a file of word vectors, as GloVe has them.
        features: numbers in the vector of a word, without such a file.
        seed: of expressions and random vectors.
    """
    if folder is None:
        if vectors is not None:
            raise UserError("--vectors: expected --data, since arithmetic has no words")
        parts = expressions.generate(GENERATED, seed)
        classes = tuple(map(str, range(expressions.MODULUS)))
        source, vocabulary = f"generated arithmetic of seed {seed}", expressions.VOCABULARY
        table = initial_table(len(vocabulary) + 1, features, seed)
    else:
        texts = [read_text(folder, f"{part}.txt") for part in PARTS]
        known = {} if vectors is None else read_vectors(vectors, words_in(folder, texts))
        if known:
            features = len(next(iter(known.values())))
        parts = read_trees(folder, texts, known)
        classes, source, vocabulary = SENTIMENTS, str(folder.resolve()), parts[0].vocabulary or ()
        table = initial_table(len(vocabulary) + 1, features, seed)
        for i, word in enumerate(vocabulary):
            table[i] = known.get(word, table[i])
    return Dataset(*parts, classes, table, source, digest_of(parts, table))


def digest_of(parts: list[dynamic.Graphs], table: np.ndarray) -> str:
    """What tells a data set from others, which may have its name."""
    digest = hashlib.sha256(table.astype("<f4"))
    for graphs in parts:
        numbers = [graphs.channel(c.name) for c in graphs.channels]
        for array in (graphs.offsets, graphs.children, *numbers):
            digest.update(np.ascontiguousarray(array))
    digest.update("\n".join(parts[0].vocabulary or ()).encode())
    return digest.hexdigest()


def read_text(folder: Path, name: str) -> str:
    """The text of a file of trees."""
    try:
        return (folder / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--data {folder}: expected {', '.join(f'{part}.txt' for part in PARTS)}, got: {error}"
        ) from error


def parse(what: str, text: str, **options: Any) -> dynamic.Graphs:
    """The trees of a text; errors say what it is."""
    try:
        graphs = dynamic.Graphs.from_brackets(text, **options)
    except ValueError as error:
        reason = str(error).removeprefix("Graphs.from_brackets: ")
        raise UserError(f"{what}: expected trees in brackets, got: {reason}") from error
    if not len(graphs):
        raise UserError(f"{what}: expected trees in brackets, got none")
    labels = graphs.channel("label")
    if (wrong := labels >= len(SENTIMENTS)).any():
        row = int(np.argmax(wrong))
        tree = int(np.searchsorted(graphs.offsets, row, side="right"))
        raise UserError(
            f"{what}: expected labels from 0 to {len(SENTIMENTS) - 1}, got {labels[row]} "
            f"in tree {tree}"
        )
    return graphs


def read_trees(
    folder: Path, texts: list[str], known: dict[str, np.ndarray]
) -> list[dynamic.Graphs]:
    """The trees of all parts, with the vocabulary of the first one and of known vectors."""
    files = [f"reading {folder / part}.txt" for part in PARTS]
    words = parse(files[0], texts[0]).vocabulary or ()
    vocabulary = [*words, *sorted(set(known) - set(words))]
    return [parse(*each, vocabulary=vocabulary) for each in zip(files, texts, strict=True)]


def words_in(folder: Path, texts: list[str]) -> set[str]:
    """All words of all parts."""
    return {
        word
        for part, text in zip(PARTS, texts, strict=True)
        for word in parse(f"reading {folder / part}.txt", text).vocabulary or ()
    }


def spellings(word: str) -> list[str]:
    """As what a word of a treebank may stand in a list of vectors, the likeliest first."""
    plain = word
    for escaped, meant in ESCAPES.items():
        plain = plain.replace(escaped, meant)
    return [word, plain, plain.lower()]


def read_vectors(path: Path, words: set[str]) -> dict[str, np.ndarray]:
    """The vectors of those words that have one: a line each, the word and its numbers."""
    wanted = {spelling for word in words for spelling in spellings(word)}
    found: dict[str, np.ndarray] = {}
    features = None
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if features is None:
                    features = len(line.split()) - 1
                word, *numbers = line.rstrip().rsplit(" ", features)
                if word in wanted:
                    if len(numbers) != features or not features:
                        raise ValueError(f"{len(numbers)} numbers in line {number}")
                    found[word] = np.array(numbers, np.float32)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--vectors {path}: expected a word and {features or 'its'} numbers a line, got: "
            f"{error}"
        ) from error
    chosen = {
        word: next(found[x] for x in spellings(word) if x in found)
        for word in words
        if any(x in found for x in spellings(word))
    }
    if not chosen:
        raise UserError(f"--vectors {path}: expected vectors of words in --data, got none")
    return chosen
