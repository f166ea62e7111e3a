"""What surrounds a program: its exit code, its last message, and what it says of itself."""

from __future__ import annotations

import contextlib
import datetime
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax

from .errors import UserError
from .interruption import Interrupted

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "jaxsparse")


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
