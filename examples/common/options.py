"""Command lines whose mistakes are told in one line."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from .errors import UserError


def number(kind: type, low: float, high: float = math.inf) -> Callable[[str], Any]:
    """Returns a parser of an int or float from ``low`` up to, but not including, ``high``."""

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if low <= (value := kind(text)) < high:
                return value
        raise argparse.ArgumentTypeError(
            f"expected {kind.__name__} in [{low:g}, {high:g}), got {text}"
        )

    return parse


class Parser(argparse.ArgumentParser):
    """Leaves out the usage text when an option is wrong."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse_with_presets(
    parser: argparse.ArgumentParser, argv: list[str] | None, presets: dict[str, dict[str, Any]]
) -> argparse.Namespace:
    """Parses a command line; the values of ``--preset`` are defaults that others override."""
    args = parser.parse_args(argv)
    if args.preset:
        parser.set_defaults(**presets[args.preset])
        args = parser.parse_args(argv)
    return args


def to_json(args: argparse.Namespace) -> dict[str, Any]:
    """The options as JSON values."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
