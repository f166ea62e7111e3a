"""The form of a script: its sizes, which are static, and where its sections are.

Sizes are rounded up, so that few forms, and so few compiled programs, serve all batches.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

VERSION = 1
SECTION = 32  # words; sections and records are multiples of it, a warp's load
# Words; scripts are multiples of it. Where a program takes one of several, as ``jax.lax.scan``
# does, XLA hands kernels that one without a copy if it begins at a multiple of 256 bytes.
ALIGNMENT = 64
# What the header says from its second word on: how much is used, and then the form's sizes.
USED = ("leaves", "tiles", "graphs", "inputs")
SIZES = (*USED, "width", "slots", "groups", "kinds", "words")
# What a channel can have a number each of (ffi/dynamic/graphs.h).
PLACES = ("leaf", "row", "input", "graph")
# Sizes below these are rounded up to them: small batches would have a form each.
LEAST = {"leaves": 8, "inputs": 8, "tiles": 1, "graphs": 1}


def bucket(size: int, least: int = 1) -> int:
    """The least of 1, 1.25, 1.5 and 1.75 times a power of 2 that has room for ``size``.

    >>> [bucket(n) for n in (0, 1, 5, 9, 17, 100, 129)]
    [1, 1, 5, 10, 20, 112, 160]
    """
    size = max(size, least)
    step = max(1, (1 << (size.bit_length() - 1)) // 4)
    return -(-size // step) * step


def padded(words: int, section: int = SECTION) -> int:
    """The size of a section that holds so many words."""
    return -(-words // section) * section


@dataclasses.dataclass(frozen=True)
class Channel:
    """Numbers that a script carries for the program that reads it: words, labels, targets.

    Attributes:
        name: how the program asks for it.
        place: what has a number each: "leaf", "row" (leaves and computed rows), "input" (computed
            rows that have inputs), or "graph".
        dtype: "int32", which is -1 where there is nothing, or "float32", which is 0 there.

    >>> from jaxsparse.dynamic import Graphs
    >>> Graphs.from_sequences([2], input={"token": [7, 8]}).channels
    (Channel(name='token', place='input', dtype='int32'),)
    """

    name: str
    place: str
    dtype: str


@dataclasses.dataclass(frozen=True)
class Form:
    """The static part of a script: its sizes. Scripts of one form share a compiled program.

    Attributes:
        leaves: room for rows without children, which come first.
        tiles: room for tiles.
        width: rows of a tile.
        slots: K, children that a row can have.
        groups: lists of tiles that share no rows but leaves, so that they may run side by side.
        graphs: room for graphs.
        inputs: room for computed rows that have inputs of their own; 0 if none has.
        kinds: how many kinds of computed rows there are.
        channels: in the order of their sections.
    """

    leaves: int
    tiles: int
    width: int
    slots: int
    groups: int
    graphs: int
    inputs: int = 0
    kinds: int = 1
    channels: tuple[Channel, ...] = ()

    @property
    def computed(self) -> int:
        """Rows that a scan computes, padding included: tiles * width."""
        return self.tiles * self.width

    @property
    def rows(self) -> int:
        """All rows: leaves, then those of tiles."""
        return self.leaves + self.computed

    def room(self, place: str) -> int:
        """How many numbers a channel of a place has."""
        sizes = (self.leaves, self.rows, self.inputs, self.graphs)
        return sizes[PLACES.index(place)]

    @property
    def record_words(self) -> int:
        """Words of the record of one tile: kind, wait, sources, rows of inputs."""
        return padded(2 + self.width * self.slots + self.width)

    @property
    def group_tiles_offset(self) -> int:
        """Where the first tile of each group is listed, behind the header."""
        return SECTION

    @property
    def records_offset(self) -> int:
        """Where the records of tiles begin."""
        return self.group_tiles_offset + padded(self.groups + 1)

    @property
    def roots_offset(self) -> int:
        """Where the roots' rows begin."""
        return self.records_offset + self.tiles * self.record_words

    @property
    def channels_offset(self) -> int:
        """Where the first channel begins."""
        return self.roots_offset + padded(self.graphs)

    def channel_offset(self, channel: Channel) -> int:
        """Where a channel begins."""
        before = self.channels[: self.channels.index(channel)]
        return self.channels_offset + sum(padded(self.room(c.place)) for c in before)

    @property
    def words(self) -> int:
        """Words of a script."""
        of_channels = sum(padded(self.room(c.place)) for c in self.channels)
        return padded(self.channels_offset + of_channels, ALIGNMENT)

    def channel(self, name: str, *places: str) -> Channel:
        """The channel of a name, in one of the places.

        Raises:
            KeyError: if there is none, naming those there are.
        """
        for channel in self.channels:
            if channel.name == name and channel.place in places:
                return channel
        there = ", ".join(f"{c.name!r} ({c.place})" for c in self.channels) or "none"
        of = " or of ".join("an input" if place == "input" else f"a {place}" for place in places)
        raise KeyError(f"Script: no channel {name!r} of {of}; there are: {there}")

    def to_json(self) -> bytes:
        """The form as text, for exported programs and files."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes | bytearray) -> Form:
        """The form of a text that `to_json` made."""
        fields = json.loads(data)
        fields["channels"] = tuple(Channel(**channel) for channel in fields["channels"])
        return cls(**fields)

    @classmethod
    def covering(cls, forms: Iterable[Form]) -> Form:
        """The least form that has room for what each of these holds.

        Raises:
            ValueError: if there is none: no forms, or forms that differ in more than in how much
                they have room for.

        >>> Form.covering([Form(8, 4, 8, 2, 1, 1), Form(10, 2, 8, 2, 1, 1)]).leaves
        10
        """
        forms = list(forms)
        if not forms:
            raise ValueError("Form.covering: needs at least one form")
        room = {name: max(getattr(f, name) for f in forms) for name in USED}
        covering = {dataclasses.replace(f, **room) for f in forms}
        if len(covering) > 1:
            first, other, *_ = covering
            raise ValueError(f"Form.covering: {difference(first, other)}")
        return covering.pop()


def difference(form: Form, other: Form) -> str:
    """What tells two forms apart, for messages."""
    fields = [f.name for f in dataclasses.fields(Form)]
    pairs = [(name, getattr(form, name), getattr(other, name)) for name in fields]
    return "forms differ in " + ", ".join(f"{n} ({a} and {b})" for n, a, b in pairs if a != b)
