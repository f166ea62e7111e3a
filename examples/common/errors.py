"""Errors that the user can mend."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator

import jax

EXHAUSTED = "RESOURCE_EXHAUSTED"


class UserError(Exception):
    """A wrong option or unusable data, told in one line."""


class DivergedError(UserError):
    """A loss that is no finite number."""


class OutOfMemoryError(UserError):
    """The options ask for more memory than the device, or the host, has."""


def one_line(error: Exception) -> str:
    """What an error says first, or its kind where it says nothing."""
    line = str(error).strip().partition("\n")[0]
    return textwrap.shorten(line, 200, placeholder=" ...") or type(error).__name__


def is_exhausted(error: Exception) -> bool:
    """Whether an error is that of an exhausted memory."""
    return isinstance(error, MemoryError) or (
        isinstance(error, jax.errors.JaxRuntimeError) and EXHAUSTED in str(error)
    )


@contextlib.contextmanager
def memory_errors(operation: str, lower: str) -> Iterator[None]:
    """Turns the errors of an exhausted memory into one line that says what to lower."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not is_exhausted(error):
            raise
        reason = str(error).partition("\n")[0].removeprefix(f"{EXHAUSTED}: ").rstrip(".")
        raise OutOfMemoryError(
            f"{operation}: expected it to fit into memory, got: {reason}; lower {lower}"
        ) from error
