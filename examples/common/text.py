"""Text for language models: where it comes from, and its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import numpy as np

from .errors import UserError


class Corpus(NamedTuple):
    """Tokens to train on and tokens held out, as indices into a vocabulary."""

    train: np.ndarray
    held_out: np.ndarray
    vocabulary: list[str] | list[bytes]
    source: str  # Names the text.
    digest: str  # SHA-256 of the content.
    description: str

    @property
    def identity(self) -> dict[str, Any]:
        """What tells the text from others, as JSON values."""
        size = len(self.vocabulary)
        return {"source": self.source, "sha256": self.digest, "vocabulary": size}

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


def load(path: Path | None, tokens: str, held_out: float, least: int, options: str) -> Corpus:
    """Reads a text, or (None) that of pydoc, and holds out its end.

    Args:
        path: the file.
        tokens: a name in `TOKENS`.
        held_out: the share that is held out.
        least: how many tokens to train on there must be.
        options: names those that lower this number.
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
    for name, part, fewest, remedy in (
        ("to train on", train, least, f"lower {options}"),
        ("held out", end, 1, "raise --held-out"),
    ):
        if len(part) < fewest:
            raise UserError(
                f"--data: expected at least {fewest:,} {tokens} {name}, got {len(part):,}; {remedy}"
            )
    source = str(path.resolve()) if path else "the help texts of Python"
    description = (
        f"{path or source}, {len(train):,} {tokens} to train on, the last {len(end):,} held out, "
        f"{len(vocabulary)} different ones"
    )
    digest = hashlib.sha256(content).hexdigest()
    return Corpus(train, end, vocabulary, source, digest, description)


def printable(text: str) -> str:
    """A text without what would steer a terminal."""
    return "".join(x if x.isprintable() or x == "\n" else " " for x in text)
