"""Runs of an example or a study as a user starts them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable


def printed_by(main: Callable[[list[str]], int], argv: list[str]) -> str:
    """What a program prints in a run that ends well."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(argv) == 0
    return printed.getvalue()
