"""Readers of CIFAR-10: its binary version, its Python version, and sheets of PNG."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..common.errors import UserError, one_line
from .images import from_planes, read_image

SIDE = 32
PIXELS = SIDE * SIDE
RECORD = 1 + 3 * PIXELS  # A label, then planes of red, green and blue.


def find(folder: Path) -> str | None:
    """The suffix of the files data_batch_* and test_batch* in a folder; None if there are none."""
    for suffix in (".bin", "", ".png"):
        names = (f"data_batch_[0-9]*{suffix}", f"test_batch{suffix}")
        if any(file.suffix == suffix for name in names for file in folder.glob(name)):
            return suffix
    return None


def load(folder: Path, suffix: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads the training and the test images, each uint8 (N, 32, 32, 3)."""
    read = READERS[suffix]
    batches = (file for file in folder.glob("data_batch_[0-9]*") if file.suffix == suffix)
    train, test = sorted(batches), folder / f"test_batch{suffix}"
    if not train or not test.exists():
        raise UserError(
            f"--data {folder}: expected data_batch_*{suffix} and test_batch{suffix}, "
            f"got {len(train)} of the first and {int(test.exists())} of the second"
        )
    return np.concatenate([read(file) for file in train]), read(test)


def read_binary(path: Path) -> np.ndarray:
    """Reads records of one byte of label and 3,072 of image."""
    data = np.fromfile(path, np.uint8)
    if not data.size or data.size % RECORD:
        raise UserError(
            f"reading {path}: expected records of {RECORD} bytes, got {data.size} bytes"
        )
    return from_planes(data.reshape(-1, RECORD)[:, 1:])


def read_python(path: Path) -> np.ndarray:
    """Reads a pickled dictionary, in which ``data`` is uint8 (N, 3072)."""
    try:
        with path.open("rb") as file:
            batch = ArrayUnpickler(file, encoding="bytes").load()
    except OSError:
        raise
    except Exception as error:  # A pickle that is no pickle fails in any way.
        raise UserError(
            f"reading {path}: expected a pickled CIFAR batch, got: {one_line(error)}"
        ) from error
    data = batch.get(b"data", batch.get("data")) if isinstance(batch, dict) else None
    is_bytes = isinstance(data, np.ndarray) and data.dtype == np.uint8
    if not is_bytes or data.shape[1:] != (RECORD - 1,):
        actual = f"{data.dtype}{data.shape}" if isinstance(data, np.ndarray) else "no array"
        raise UserError(f"reading {path}: expected data uint8(N, {RECORD - 1}), got {actual}")
    return from_planes(data)


class ArrayUnpickler(pickle.Unpickler):
    """Makes NumPy arrays and plain values only: another pickle could run any program."""

    # By name, as NumPy has moved the function since these files were written.
    ALLOWED = {  # noqa: RUF012
        "_reconstruct": np.empty(0).__reduce__()[0],
        "ndarray": np.ndarray,
        "dtype": np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Refuses what is not needed for arrays."""
        if module.split(".")[0] != "numpy" or name not in self.ALLOWED:
            raise pickle.UnpicklingError(f"a reference to {module}.{name}, which is not allowed")
        return self.ALLOWED[name]


def read_sheet(path: Path) -> np.ndarray:
    """Reads a PNG image, each row of which is an image of 32 x 32 pixels."""
    sheet = read_image(path)
    if sheet.shape[1] != PIXELS:
        raise UserError(f"reading {path}: expected {PIXELS} pixels in a row, got {sheet.shape[1]}")
    return sheet.reshape(-1, SIDE, SIDE, 3)


READERS: dict[str, Callable[[Path], np.ndarray]] = {
    ".bin": read_binary,
    "": read_python,
    ".png": read_sheet,
}
