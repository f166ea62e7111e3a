"""Images from files: photographs, arrays, and data sets as they are published."""

from __future__ import annotations

import importlib.util
import math
import pickle
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .errors import UserError, one_line

PHOTOGRAPHS = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg")
SUFFIXES = (".png", ".jpg", ".jpeg")

CIFAR_SIDE = 32
CIFAR_PIXELS = CIFAR_SIDE * CIFAR_SIDE
CIFAR_RECORD = 1 + 3 * CIFAR_PIXELS  # A label, then planes of red, green and blue.

Images = Sequence[np.ndarray]  # Each uint8 (height, width, 3).


def load_images(path: Path | None) -> tuple[Images, Images | None]:
    """Reads images, and those for testing where the data set has such a part."""
    if path is None:
        package = importlib.util.find_spec("skimage")
        if package is None or package.origin is None:
            raise UserError("--data: expected a path, or scikit-image installed, got neither")
        folder = Path(package.origin).parent / "data"
        return [read_image(folder / name) for name in PHOTOGRAPHS], None
    if path.is_dir():
        if (suffix := find_cifar(path)) is not None:
            try:
                return load_cifar(path, suffix)
            except OSError as error:
                raise UserError(f"--data {path}: expected CIFAR-10, got: {error}") from error
        files = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in SUFFIXES]
        if not files:
            raise UserError(f"--data {path}: expected .png or .jpg files in the folder, got none")
        return [read_image(file) for file in files], None
    if path.suffix == ".npz" and zipfile.is_zipfile(path):
        return read_npz(path), None
    actual = "another kind of file" if path.exists() else "nothing at this path"
    raise UserError(f"--data {path}: expected a folder of images or an .npz file, got {actual}")


def read_image(path: Path) -> np.ndarray:
    """Reads a PNG or JPEG image as uint8 (height, width, 3)."""
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except Exception as error:  # A damaged image fails in any way.
        raise UserError(
            f"reading {path}: expected a PNG or JPEG image, got: {one_line(error)}"
        ) from error


def from_planes(data: np.ndarray) -> np.ndarray:
    """Turns rows of planes of red, green and blue into square images, uint8 (N, side, side, 3)."""
    side = math.isqrt(data.shape[1] // 3)
    return np.ascontiguousarray(data.reshape(-1, 3, side, side).transpose(0, 2, 3, 1))


def read_npz(path: Path) -> np.ndarray:
    """Reads the first array that holds images: uint8 (N, height, width, 3).

    Or the array ``data`` of uint8 (N, 3 side**2), planes as downsampled ImageNet is published.
    """
    others = []
    try:
        with np.load(path) as archive:
            for name, array in archive.items():
                if array.dtype == np.uint8 and array.size:
                    if array.shape[3:] == (3,):
                        return array
                    if name == "data" and is_square_planes(array):
                        return from_planes(array)
                others.append(f"{name} {array.dtype}{array.shape}")
    except Exception as error:  # A damaged archive fails in any way.
        raise UserError(f"reading {path}: expected plain arrays, got: {one_line(error)}") from error
    actual = ", ".join(others) or "no array"
    raise UserError(
        f"reading {path}: expected an array uint8(N, H, W, 3) or data uint8(N, 3 S S), got {actual}"
    )


def is_square_planes(array: np.ndarray) -> bool:
    """Whether rows have as many values as three planes of a square image."""
    return array.ndim == 2 and 3 * math.isqrt(array.shape[1] // 3) ** 2 == array.shape[1]


def find_cifar(folder: Path) -> str | None:
    """The suffix of the files data_batch_* and test_batch* in a folder; None if there are none."""
    for suffix in (".bin", "", ".png"):
        names = (f"data_batch_[0-9]*{suffix}", f"test_batch{suffix}")
        if any(file.suffix == suffix for name in names for file in folder.glob(name)):
            return suffix
    return None


def load_cifar(folder: Path, suffix: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads the training and the test images, each uint8 (N, 32, 32, 3)."""
    read = CIFAR_READERS[suffix]
    batches = (file for file in folder.glob("data_batch_[0-9]*") if file.suffix == suffix)
    train, test = sorted(batches), folder / f"test_batch{suffix}"
    if not train or not test.exists():
        raise UserError(
            f"--data {folder}: expected data_batch_*{suffix} and test_batch{suffix}, "
            f"got {len(train)} of the first and {int(test.exists())} of the second"
        )
    return np.concatenate([read(file) for file in train]), read(test)


def read_cifar_binary(path: Path) -> np.ndarray:
    """Reads records of one byte of label and 3,072 of image."""
    data = np.fromfile(path, np.uint8)
    if not data.size or data.size % CIFAR_RECORD:
        raise UserError(
            f"reading {path}: expected records of {CIFAR_RECORD} bytes, got {data.size} bytes"
        )
    return from_planes(data.reshape(-1, CIFAR_RECORD)[:, 1:])


def read_pickled(path: Path, name: str) -> Any:
    """Reads an entry of a pickled dictionary; None if there is none."""
    try:
        with path.open("rb") as file:
            batch = ArrayUnpickler(file, encoding="bytes").load()
    except OSError:
        raise
    except Exception as error:  # A pickle that is no pickle fails in any way.
        raise UserError(
            f"reading {path}: expected a pickled CIFAR batch, got: {one_line(error)}"
        ) from error
    return batch.get(name.encode(), batch.get(name)) if isinstance(batch, dict) else None


def read_cifar_python(path: Path) -> np.ndarray:
    """Reads a pickled dictionary, in which ``data`` is uint8 (N, 3072)."""
    data = read_pickled(path, "data")
    is_bytes = isinstance(data, np.ndarray) and data.dtype == np.uint8
    if not is_bytes or data.shape[1:] != (CIFAR_RECORD - 1,):
        actual = f"{data.dtype}{data.shape}" if isinstance(data, np.ndarray) else "no array"
        raise UserError(f"reading {path}: expected data uint8(N, {CIFAR_RECORD - 1}), got {actual}")
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


def read_cifar_sheet(path: Path) -> np.ndarray:
    """Reads a PNG image, each row of which is an image of 32 x 32 pixels."""
    sheet = read_image(path)
    if sheet.shape[1] != CIFAR_PIXELS:
        raise UserError(
            f"reading {path}: expected {CIFAR_PIXELS} pixels in a row, got {sheet.shape[1]}"
        )
    return sheet.reshape(-1, CIFAR_SIDE, CIFAR_SIDE, 3)


CIFAR_READERS: dict[str, Callable[[Path], np.ndarray]] = {
    ".bin": read_cifar_binary,
    "": read_cifar_python,
    ".png": read_cifar_sheet,
}
