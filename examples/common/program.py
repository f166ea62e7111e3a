"""What a command line program needs: options, exit codes, and files that are whole or not there."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import jax

from .errors import UserError
from .interruption import Interrupted

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "jaxsparse")


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
    """Shows its description as it is written, and no usage text when an option is wrong."""

    def __init__(self, program: str, description: str | None):
        super().__init__(
            program,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

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


def run_program(name: str, run: Callable[[], None]) -> int:
    """Runs a program; returns its exit code."""

    def report(message: str) -> None:
        # Unless its terminal was closed.
        with contextlib.suppress(OSError):
            print(f"{name}: {message}", file=sys.stderr, flush=True)

    try:
        run()
    except UserError as error:
        report(f"error: {error}")
        return 2
    except Interrupted as interruption:
        report(str(interruption))
        return interruption.exit_code
    except KeyboardInterrupt:
        report("interrupted")
        return 130
    return 0


def describe(options: dict[str, Any], devices: list[jax.Device]) -> dict[str, Any]:
    """What a result comes from."""
    return {
        "options": options,
        "device": devices[0].device_kind,
        "devices": len(devices),
        "versions": {name: version(name) for name in PACKAGES},
        "date": datetime.date.today().isoformat(),
    }


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a path to write to, which replaces ``path`` once that is done without an error."""
    aside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file."""
    with replacing(path) as aside:
        aside.write_text(json.dumps(content, indent=2) + "\n")
