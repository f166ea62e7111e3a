"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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
