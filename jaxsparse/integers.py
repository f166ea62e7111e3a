"""Integers that users give, and the largest that an index can be."""

from __future__ import annotations

import operator
from typing import Any

INT32_MAX = 2**31 - 1


def integer(operation: str, name: str, value: Any, minimum: int, limit: int = 2**31) -> int:
    """The value as a Python int in [minimum, limit)."""
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{operation}: {name} must be an integer, got {value!r}") from None
    if value < minimum:
        raise ValueError(f"{operation}: {name} must be >= {minimum}, got {value}")
    if value >= limit:
        raise ValueError(f"{operation}: {name} must be < {limit}, got {value}")
    return int(value)
