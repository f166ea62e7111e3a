"""Calls of a model's layers, seen from outside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def calls_through(
    classes: set[Any], wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Calls of instances of these classes go through a wrapper of their ``__call__``."""
    own: dict[Any, Any] = {cls: vars(cls).get("__call__") for cls in classes}
    # All are looked up before any is changed, as one may be the base of another.
    wrapped = {cls: wrapper(cls.__call__) for cls in classes}
    try:
        for cls, call in wrapped.items():
            cls.__call__ = call
        yield
    finally:
        for cls, call in own.items():
            if call is None:  # it is a base's
                del cls.__call__
            else:
                cls.__call__ = call
