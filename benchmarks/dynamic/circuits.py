"""Circuits as graphs of and gates whose inputs may be inverted: adders, multipliers, shifters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from jaxsparse import dynamic


class _Circuit:
    """Gates that are added one after another.

    A literal is twice a row, plus 1 if it is inverted. Each gate has 64 values, those of 64 random
    inputs, so that the share of ones is an estimate of its probability.
    """

    def __init__(self, seed: int):
        self._rng = np.random.default_rng(seed)
        self.gates: list[tuple[int, int]] = []
        self.values: list[int] = []

    def inputs(self, count: int) -> list[int]:
        rows = range(len(self.values), len(self.values) + count)
        self.gates += [(-1, -1)] * count
        self.values += [int(x) for x in self._rng.integers(0, 2**64, count, np.uint64)]
        return [2 * row for row in rows]

    def _value(self, literal: int) -> int:
        return self.values[literal >> 1] ^ (2**64 - 1) * (literal & 1)

    def both(self, a: int, b: int) -> int:
        self.gates.append((a, b))
        self.values.append(self._value(a) & self._value(b))
        return 2 * (len(self.gates) - 1)

    def either(self, a: int, b: int) -> int:
        return self.both(a ^ 1, b ^ 1) ^ 1

    def differ(self, a: int, b: int) -> int:
        return self.both(self.both(a, b) ^ 1, self.either(a, b))

    def choose(self, first: int, a: int, b: int) -> int:
        return self.either(self.both(first, a), self.both(first ^ 1, b))

    def add_bits(self, *bits: int | None) -> tuple[int, int | None]:
        """The sum of up to three bits, some of which may be none, and the carry."""
        a, *others = (bit for bit in bits if bit is not None)
        if not others:
            return a, None
        b, *rest = others
        differ, both = self.differ(a, b), self.both(a, b)
        if not rest:
            return differ, both
        return self.differ(differ, rest[0]), self.either(both, self.both(differ, rest[0]))

    def add(self, a: Sequence[int], b: Sequence[int]) -> list[int]:
        """The sum of two numbers, carries from bit to bit."""
        carry: int | None = None
        bits = []
        for pair in itertools.zip_longest(a, b):
            bit, carry = self.add_bits(*pair, carry)
            bits.append(bit)
        return bits if carry is None else [*bits, carry]


def _adder(circuit: _Circuit, bits: int) -> None:
    circuit.add(circuit.inputs(bits), circuit.inputs(bits))


def _multiplier(circuit: _Circuit, bits: int) -> None:
    """Row after row of partial products is added."""
    a, b = circuit.inputs(bits), circuit.inputs(bits)
    total = [circuit.both(x, b[0]) for x in a]
    for i, factor in enumerate(b[1:], 1):
        row = [circuit.both(x, factor) for x in a]
        total = [*total[:i], *circuit.add(total[i:], row)]


def _shifter(circuit: _Circuit, bits: int) -> None:
    """Turns a number by as many places as another one says."""
    number = circuit.inputs(bits)
    for i, place in enumerate(circuit.inputs(max(1, (bits - 1).bit_length()))):
        moved = [number[j - 2**i] for j in range(bits)]
        number = [circuit.choose(place, x, y) for x, y in zip(moved, number, strict=True)]


KINDS: dict[str, Callable[[_Circuit, int], None]] = {
    "adder": _adder,
    "multiplier": _multiplier,
    "shifter": _shifter,
}


def circuit(kind: str, bits: int, seed: int = 0) -> dynamic.Graphs:
    """One graph: leaves are the circuit's inputs, the other rows its gates.

    Channels: ``inverted`` of gates, which of the two inputs are inverted, and ``probability`` of
    gates, the share of random inputs for which a gate's value is 1.
    """
    made = _Circuit(seed)
    KINDS[kind](made, bits)
    gates, rows = np.array(made.gates, np.int64), len(made.gates)
    ones = np.array([value.bit_count() for value in made.values]) / 64
    return dynamic.Graphs.from_arrays(
        [0, rows],
        np.where(gates < 0, -1, gates >> 1),
        input={"inverted": (gates & 1) @ [1, 2], "probability": ones.astype(np.float32)},
    )
