"""Which combinations of parameters a test meets: every pair of values.

On a GPU its kernels meet every pair. The plain path, which meets them on the CPU, meets every value
there. All combinations where JAXSPARSE_TEST_ALL is set: faults that depend on more than two
parameters at once are mostly those of one kernel's code, and who changes that asks for them.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from checks import PLATFORM

ALL = bool(os.environ.get("JAXSPARSE_TEST_ALL"))


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
    met = [_met(row, whole) for row, whole in zip(rows, wholes, strict=True)]
    return pytest.mark.parametrize(names, covering(rows, met))


def pairwise(names: str, *axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by values of many axes, whose product is too large to look through.

    Every pair of values of any two axes is met, by rows that are the best of some random ones each,
    even where all combinations are wanted. The choice depends on the arguments alone.
    """
    draw = random.Random(0)
    missing = {
        ((i, a), (j, b))
        for (i, xs), (j, ys) in itertools.combinations(enumerate(axes), 2)
        for a in range(len(xs))
        for b in range(len(ys))
    }
    rows = []
    while missing:
        fixed = dict(draw.choice(sorted(missing)))
        candidates = [
            [fixed.get(i, draw.randrange(len(xs))) for i, xs in enumerate(axes)] for _ in range(100)
        ]
        pairs = [set(itertools.combinations(enumerate(row), 2)) for row in candidates]
        best = max(range(len(pairs)), key=lambda i: len(pairs[i] & missing))
        missing -= pairs[best]
        rows.append(tuple(xs[i] for i, xs in zip(candidates[best], axes, strict=True)))
    return pytest.mark.parametrize(names, rows)


def _met(row: Sequence[Any], whole: Sequence[Any]) -> set[Any]:
    alone = set(enumerate(map(repr, whole)))
    if PLATFORM == "cuda" and "xla" in row:
        return {("xla", value) for value in alone}
    return alone | set(itertools.combinations(enumerate(map(repr, row)), 2))


def covering(items: Sequence[Any], met: Sequence[set[Any]]) -> list[Any]:
    """Few of the items, which together meet all that any of them meets; or all items.

    Greedy: those that add most first. The choice depends on the arguments alone.
    """
    if ALL:
        return list(items)
    order = list(range(len(items)))
    random.Random(0).shuffle(order)
    missing, chosen = set().union(*met), []
    for least in range(max(map(len, met), default=0), 0, -1):
        for i in order:
            if len(met[i] & missing) >= least:
                missing -= met[i]
                chosen.append(i)
    return [items[i] for i in sorted(chosen)]
