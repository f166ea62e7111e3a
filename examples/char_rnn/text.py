"""Text: where it comes from, its tokens, and the windows in which a model reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np

from ..common.errors import UserError


class Corpus(NamedTuple):
    """Tokens to train on and tokens held out, as indices into a vocabulary."""

    train: np.ndarray
    held_out: np.ndarray
    vocabulary: list[str] | list[bytes]
    description: str

    def decode(self, tokens: np.ndarray) -> str:
        """The text of some tokens."""
        parts = [self.vocabulary[int(token)] for token in tokens]
        if isinstance(parts[0], bytes):
            return b"".join(parts).decode(errors="replace")
        return "".join(parts)

    def encode(self, text: str) -> np.ndarray:
        """The tokens of a text."""
        symbols = split_like(self.vocabulary[0], text)
        places = {symbol: i for i, symbol in enumerate(self.vocabulary)}
        if missing := [symbol for symbol in symbols if symbol not in places]:
            raise UserError(f"--prompt: expected characters of the data, got {missing[0]!r}")
        return np.array([places[symbol] for symbol in symbols], np.int32)


def split_like(symbol: str | bytes, text: str) -> list[str] | list[bytes]:
    """A text in symbols of the kind of one."""
    return as_bytes(text.encode()) if isinstance(symbol, bytes) else list(text)


def as_bytes(content: bytes) -> list[bytes]:
    """The bytes of a content, one by one."""
    return [bytes([value]) for value in content]


def as_characters(content: bytes) -> list[str]:
    """The characters of a content in UTF-8."""
    try:
        return list(content.decode())
    except UnicodeDecodeError as error:
        raise UserError(
            f"--data: expected text in UTF-8, got byte {content[error.start]:#04x} at offset "
            f"{error.start}; --tokens bytes takes any file"
        ) from error


TOKENS: dict[str, Callable[[bytes], list[str] | list[bytes]]] = {
    "characters": as_characters,
    "bytes": as_bytes,
}


def load(path: Path | None, tokens: str, held_out: float, least: int) -> Corpus:
    """Reads a text, or (None) that of pydoc, and holds out its end.

    Args:
        path: the file.
        tokens: a name in `TOKENS`.
        held_out: the share that is held out.
        least: the tokens that each part must have.
    """
    if path is None:
        content = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"--data {path}: expected a text file, got: {error}") from error
    symbols = TOKENS[tokens](content)
    vocabulary = sorted(set(symbols))
    places = {symbol: i for i, symbol in enumerate(vocabulary)}
    indices = np.array([places[symbol] for symbol in symbols], np.int32)
    cut = len(indices) - round(held_out * len(indices))
    train, end = indices[:cut], indices[cut:]
    for name, part in (("to train on", train), ("held out", end)):
        if len(part) < least:
            raise UserError(
                f"--data: expected at least {least:,} {tokens} {name}, got {len(part):,}; lower "
                f"--batch or --length"
            )
    description = (
        f"{path or 'the help texts of Python'}, {len(train):,} {tokens} to train on, the last "
        f"{len(end):,} held out, {len(vocabulary)} different ones"
    )
    return Corpus(train, end, vocabulary, description)


class Windows:
    """A text cut into equal streams, one for each row of a batch, that are read window by window.

    The end of a window leads to the next one of the same streams, so that a state may be carried
    over: backpropagation through time is truncated at windows, memory is not.
    """

    def __init__(self, tokens: np.ndarray, batch: int, length: int):
        per_stream = (len(tokens) - 1) // batch
        self.length, self.count = length, per_stream // length
        self.inputs = tokens[: batch * per_stream].reshape(batch, per_stream)
        self.targets = tokens[1 : batch * per_stream + 1].reshape(batch, per_stream)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """The window of an index from 0; past the end of the streams they begin again."""
        place = index % self.count
        columns = slice(place * self.length, (place + 1) * self.length)
        return {
            "inputs": self.inputs[:, columns],
            "targets": self.targets[:, columns],
            "fresh": np.array(place == 0),
        }


def printable(text: str) -> str:
    """A text without what would steer a terminal."""
    return "".join(x if x.isprintable() or x == "\n" else " " for x in text)
