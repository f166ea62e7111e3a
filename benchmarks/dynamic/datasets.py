"""Sets of graphs: of files, where there are some, or made, with sizes that are distributed alike.

Files are in the folder that JAXSPARSE_DATA names: ``sst/train.txt``, trees in brackets, and
``wikiner/train.txt``, a sentence a line of words and tags, ``word|tag``.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections import Counter
from typing import NamedTuple

import numpy as np

from benchmarks.files import FOLDER_VARIABLE, data_folder
from jaxsparse import dynamic

TREES, SENTENCES = 2048, 4096  # that are made, where there is no file
VOCABULARY, TAGS, LABELS, LETTERS = 18_280, 9, 5, 64
RARE = 5  # a word that comes less often has no vector of its own, but is spelled


class Trees(NamedTuple):
    """Binary trees: words of leaves, labels of rows."""

    source: str
    graphs: dynamic.Graphs

    @property
    def vocabulary(self) -> int:
        """How many words there are."""
        return 1 + int(self.graphs.channel("word").max())


class Sentences(NamedTuple):
    """Sequences of words with tags, one after another; and how words are spelled.

    ``spelling`` has the letters of each word, which begin at ``begins``.
    """

    source: str
    lengths: np.ndarray
    words: np.ndarray
    tags: np.ndarray
    begins: np.ndarray
    spelling: np.ndarray

    @property
    def vocabulary(self) -> int:
        """How many words there are."""
        return len(self.begins) - 1


def _file(*names: str) -> pathlib.Path | None:
    """A file below the folder of data; None if no folder is named, or it has no such file."""
    if not os.environ.get(FOLDER_VARIABLE):
        return None
    path = data_folder().joinpath(*names)
    return path if path.is_file() else None


def trees() -> Trees:
    """The training set of the Stanford Sentiment Treebank, or trees that are made."""
    return _trees(_file("sst", "train.txt"))


@functools.lru_cache(maxsize=2)
def _trees(path: pathlib.Path | None) -> Trees:
    if path is None:
        return Trees("generated", made_trees(TREES))
    return Trees("SST", dynamic.Graphs.from_brackets(path.read_text("utf-8")))


def made_trees(count: int, seed: int = 0) -> dynamic.Graphs:
    """Random binary trees, as large and as deep as those of the Stanford Sentiment Treebank.

    There, trees have 19.1 leaves and are 9.83 deep in the mean, of 2 to 52 leaves, with a standard
    deviation of 9.3. A row splits one word off, or, in 46 % of the rows, anywhere.
    """
    rng = np.random.default_rng(seed)
    sizes = np.clip(np.rint(rng.gamma(4.2, 19.1 / 4.2, count)), 2, 56).astype(int)
    children: list[tuple[int, int]] = []

    def grow(leaves: int) -> int:
        """Rows of a tree, children first; the row of its root."""
        if leaves == 1:
            children.append((-1, -1))
        else:
            left = 1 if rng.random() < 0.54 else int(rng.integers(1, leaves))
            children.append((grow(left), grow(leaves - left)))
        return len(children) - 1 - first

    offsets = [0]
    for leaves in sizes:
        first = offsets[-1]
        grow(int(leaves))
        offsets.append(len(children))
    rows = len(children)
    words = np.where(np.array(children)[:, 0] < 0, _words(rng, rows, VOCABULARY), -1)
    return dynamic.Graphs.from_arrays(
        offsets, children, leaf={"word": words}, row={"label": rng.integers(0, LABELS, rows)}
    )


def _words(rng: np.random.Generator, count: int, vocabulary: int) -> np.ndarray:
    """Words by Zipf's law: one is as likely as its rank is small."""
    return np.minimum(vocabulary ** rng.random(count), vocabulary - 1).astype(np.int32)


def sentences() -> Sentences:
    """The training set of WikiNER, or sentences that are made."""
    return _sentences(_file("wikiner", "train.txt"))


@functools.lru_cache(maxsize=2)
def _sentences(path: pathlib.Path | None) -> Sentences:
    return made_sentences(SENTENCES) if path is None else _read_sentences(path)


def made_sentences(count: int, seed: int = 0) -> Sentences:
    """Sentences of log-normal lengths, 24.8 words in the mean as in WikiNER."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.rint(24.8 * rng.lognormal(-0.5 * 0.45**2, 0.45, count)), 1, 100)
    tokens = int(lengths.sum())
    of_words = rng.integers(2, 14, VOCABULARY)
    return Sentences(
        "generated",
        lengths.astype(np.int64),
        _words(rng, tokens, VOCABULARY),
        rng.integers(0, TAGS, tokens).astype(np.int32),
        np.append(0, np.cumsum(of_words)),
        rng.integers(0, LETTERS, int(of_words.sum())).astype(np.int32),
    )


def _read_sentences(path: pathlib.Path) -> Sentences:
    lines = [line.split() for line in path.read_text("utf-8").splitlines() if line.strip()]
    pairs = [token.rpartition("|") for line in lines for token in line]
    words = list(dict.fromkeys(word for word, _, _ in pairs))
    tags = list(dict.fromkeys(tag for _, _, tag in pairs))
    if len(tags) > TAGS:
        raise ValueError(f"{path}: more than {TAGS} tags, the first are {', '.join(tags[:12])}")
    of_word, of_tag = ({name: i for i, name in enumerate(names)} for names in (words, tags))
    return Sentences(
        "WikiNER",
        np.array([len(line) for line in lines]),
        np.array([of_word[word] for word, _, _ in pairs], np.int32),
        np.array([of_tag[tag] for _, _, tag in pairs], np.int32),
        np.append(0, np.cumsum([max(1, len(word)) for word in words])),
        np.array([ord(c) % LETTERS for word in words for c in word or " "], np.int32),
    )


@functools.lru_cache(maxsize=4)
def two_directions(data_source: str, which: str) -> dynamic.Graphs:
    """Sentences, kind 0, and behind all of them the same from their ends, kind 1.

    Their entries are words (``which`` "words"), with their tags in the first direction alone, or
    the letters of rare words ("letters"), one sequence for each time that such a word comes.
    """
    data = sentences()
    if which == "letters":
        lengths, letters = _letters(data)
        entries = [{"letter": letters}] * 2
    else:
        lengths, tags = data.lengths, data.tags
        shared = {"word": data.words, "rare": is_rare(data).astype(np.int32)}
        entries = [{**shared, "tag": tags}, {**shared, "tag": np.full_like(tags, -1)}]
    return dynamic.Graphs.concatenate(
        [
            dynamic.Graphs.from_sequences(lengths, reverse=bool(kind), kind=kind, input=own)
            for kind, own in enumerate(entries)
        ]
    )


def is_rare(data: Sentences) -> np.ndarray:
    """Which entries are words that come less often than ``RARE``."""
    counts = Counter(data.words.tolist())
    rare: np.ndarray = np.array([counts[w] < RARE for w in range(data.vocabulary)])[data.words]
    return rare


class Rare(NamedTuple):
    """Which entries are rare words, the number of each among them, and where sentences end."""

    is_rare: np.ndarray
    number: np.ndarray
    ends: np.ndarray

    def of(self, sentence: int) -> np.ndarray:
        """The numbers of a sentence's rare words, counted through the text."""
        begin, end = self.ends[sentence - 1] if sentence else 0, self.ends[sentence]
        chosen: np.ndarray = self.number[begin:end][self.is_rare[begin:end]]
        return chosen


@functools.lru_cache(maxsize=2)
def rare_words(data_source: str) -> Rare:
    """Of the sentences."""
    data = sentences()
    rare = is_rare(data)
    return Rare(rare, np.cumsum(rare) - 1, np.cumsum(data.lengths))


def _letters(data: Sentences) -> tuple[np.ndarray, np.ndarray]:
    """Of every rare word, in the order of the text: how many letters, and these."""
    words = data.words[is_rare(data)]
    lengths = np.diff(data.begins)[words]
    starts = data.begins[words] - np.append(0, np.cumsum(lengths)[:-1])
    letters = data.spelling[np.arange(int(lengths.sum())) + np.repeat(starts, lengths)]
    return lengths, letters


@functools.lru_cache(maxsize=2)
def sequences(data_source: str) -> dynamic.Graphs:
    """Sentences in one direction: words of entries, and a label of each."""
    data = sentences()
    labels = np.random.default_rng(0).integers(0, LABELS, len(data.lengths))
    return dynamic.Graphs.from_sequences(
        data.lengths, input={"word": data.words}, graph={"label": labels}
    )


@functools.lru_cache(maxsize=2)
def triangles(data_source: str, count: int = 1024) -> dynamic.Graphs:
    """For each sentence of a set of trees all of its parts, and the label of the whole.

    The row of the words i to j has two children, the rows of i to j - 1 and of i + 1 to j, so that
    all but those at the edges have two parents.
    """
    graphs = trees().graphs[:count]
    offsets, children, words = [0], [], []
    for begin, end in zip(graphs.offsets, graphs.offsets[1:], strict=False):
        own = graphs.channel("word")[begin:end][graphs.levels[begin:end] == 0]
        n = len(own)
        table, above = np.full((n * (n + 1) // 2, 2), -1), 0
        for size in range(n - 1, 0, -1):  # rows of a size, each level behind the one below it
            below, above = above, above + size + 1
            table[above : above + size] = below + np.arange(size)[:, None] + [0, 1]
        children.append(table)
        words.append(np.append(own, np.full(len(table) - n, -1)))
        offsets.append(offsets[-1] + len(table))
    return dynamic.Graphs.from_arrays(
        offsets,
        np.concatenate(children),
        leaf={"word": np.concatenate(words)},
        graph={"label": graphs.channel("label")[graphs.offsets[:-1] + graphs.roots]},
    )
