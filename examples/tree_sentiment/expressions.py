"""Generated arithmetic with digits, modulo 10: trees whose every row has an exact answer."""

from __future__ import annotations

import operator

import numpy as np

from jaxsparse import dynamic

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MODULUS = 10
VOCABULARY = (*map(str, range(MODULUS)), *OPERATORS)
MOST_NUMBERS = 12  # In an expression.

Row = tuple[int, int, int, int, int]  # Children, digit, operator (-1 for none), and answer.


def generate(
    counts: tuple[int, ...], seed: int, most_numbers: int = MOST_NUMBERS
) -> list[dynamic.Graphs]:
    """Sets of so many expressions, all of them different.

    A leaf is a digit, its channel ``word``; the operator of an inner row, such as ``*``, is its
    input, the channel ``operator``. Both are numbers of words in `VOCABULARY`. The channel
    ``label`` of a row is what it comes to, from 0 to 9.
    """
    rng = np.random.default_rng(seed)
    seen: set[tuple[Row, ...]] = set()
    return [_generate(count, rng, seen, most_numbers) for count in counts]


def _generate(
    count: int, rng: np.random.Generator, seen: set[tuple[Row, ...]], most_numbers: int
) -> dynamic.Graphs:
    expressions = []
    while len(expressions) < count:
        rows: list[Row] = []
        _grow(rng, int(rng.integers(2, most_numbers + 1)), rows)
        if tuple(rows) not in seen:
            seen.add(tuple(rows))
            expressions.append(rows)
    left, right, word, operators, label = np.concatenate([np.array(x) for x in expressions]).T
    return dynamic.Graphs.from_arrays(
        np.cumsum([0, *map(len, expressions)]),
        np.stack([left, right], 1),
        leaf={"word": word},
        input={"operator": operators},
        row={"label": label},
        vocabulary=VOCABULARY,
    )


def _grow(rng: np.random.Generator, numbers: int, rows: list[Row]) -> int:
    """Adds the rows of an expression of so many numbers, the last one its root; returns that."""
    if numbers == 1:
        digit = int(rng.integers(MODULUS))
        rows.append((-1, -1, digit, -1, digit))
    else:
        of_left = int(rng.integers(1, numbers))
        left, right = (_grow(rng, n, rows) for n in (of_left, numbers - of_left))
        name = list(OPERATORS)[rng.integers(len(OPERATORS))]
        answer = OPERATORS[name](rows[left][-1], rows[right][-1]) % MODULUS
        rows.append((left, right, -1, VOCABULARY.index(name), answer))
    return len(rows) - 1
