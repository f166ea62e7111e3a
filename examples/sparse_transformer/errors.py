"""Errors that the user can mend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax


class UserError(Exception):
    """A wrong option or unusable data, told in one line."""


class OutOfMemoryError(UserError):
    """The options ask for more memory than the device, or the host, has."""


@contextlib.contextmanager
def memory_errors(operation: str) -> Iterator[None]:
    """Turns the errors of an exhausted memory into one line that says what to lower."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        exhausted, text = "RESOURCE_EXHAUSTED", str(error)
        if isinstance(error, jax.errors.JaxRuntimeError) and exhausted not in text:
            raise
        reason = text.partition("\n")[0].removeprefix(f"{exhausted}: ").rstrip(".")
        raise OutOfMemoryError(
            f"{operation}: expected it to fit into memory, got: {reason}; "
            f"lower --batch, --size, --hidden, --layers or --samples"
        ) from error
