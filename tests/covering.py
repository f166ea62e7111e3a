"""Which combinations of parameters a test meets: every pair of values, or on a GPU all.

Faults that depend on more than two parameters at once are mostly those of one kernel's code, of
which a GPU has many for each operation.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from checks import PLATFORM

ALL = PLATFORM == "cuda" or bool(os.environ.get("JAXSPARSE_TEST_ALL"))


def combinations(names: str, *axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by values of several axes.

    Args:
        names: of the parameters, as `pytest.mark.parametrize` takes them.
        *axes: values of one parameter, or tuples of values of neighbouring ones. Each such tuple
            is met, and with any two parameters every pair of values that some tuples have.
    """
    wholes = list(itertools.product(*axes))
    rows = [
        tuple(itertools.chain(*(x if isinstance(x, tuple) else (x,) for x in whole)))
        for whole in wholes
    ]
    if not ALL:
        rows = covering(rows, [set(enumerate(map(repr, whole))) for whole in wholes])
    return pytest.mark.parametrize(names, rows)


def covering(rows: Sequence[Sequence[Any]], wanted: Sequence[set[Any]]) -> list[Sequence[Any]]:
    """Rows that have all pairs of values which any has, and all else that any is wanted for.

    Greedy: those that add most first. The choice depends on the arguments alone.
    """
    has = [
        {(i, j, repr(row[i]), repr(row[j])) for i, j in itertools.combinations(range(len(row)), 2)}
        | of_row
        for row, of_row in zip(rows, wanted, strict=True)
    ]
    order = list(range(len(rows)))
    random.Random(0).shuffle(order)
    missing, chosen = set().union(*has), []
    for least in range(max(map(len, has), default=0), 0, -1):
        for i in order:
            if len(has[i] & missing) >= least:
                missing -= has[i]
                chosen.append(i)
    return [rows[i] for i in sorted(chosen)]
