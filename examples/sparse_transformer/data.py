"""Images: where they come from, which are held out, and crops of them."""

from __future__ import annotations

import importlib.util
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..common.errors import UserError, one_line
from . import cifar
from .images import from_planes, read_image

PHOTOGRAPHS = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg")
SUFFIXES = (".png", ".jpg", ".jpeg")
FEW_IMAGES = 10  # Of fewer, parts are held out rather than whole images.
MAX_DOWNSCALE = 8
TRAINING, SCORING, DRAWING = range(3)  # Streams of random numbers.

Images = Sequence[np.ndarray]


class Dataset(NamedTuple):
    """What to train on and what is held out, both uint8 (height, width, 3)."""

    train: Images
    held_out: Images
    scales: int  # Crops are downscaled 1 to so many times.
    description: str


def load(path: Path | None, size: int) -> Dataset:
    """Reads the images at a path, or (None) those of scikit-image, for crops of a size."""
    images, test = load_images(path)
    train, held_out = split(images, size) if test is None else (images, test)
    # One range for both parts, as the loss depends on it: detail grows with the downscaling.
    smallest = min(min(height, width) for height, width in shapes(train) | shapes(held_out))
    if smallest < size:
        raise UserError(f"--size: expected at most {smallest}, the size of the images, got {size}")
    if test is not None:
        part = f"and {len(test)} for testing, which are"
    elif len(images) < FEW_IMAGES:
        part = "the right fifth of each"
    else:
        part = str(len(held_out))
    scales = min(MAX_DOWNSCALE, smallest // size)
    description = (
        f"{path or 'scikit-image'}, {len(images)} photographs, {part} held out, "
        f"downscaled 1 to {scales} times"
    )
    return Dataset(train, held_out, scales, description)


def load_images(path: Path | None) -> tuple[Images, Images | None]:
    """Reads images, and those for testing where the data set has such a part."""
    if path is None:
        package = importlib.util.find_spec("skimage")
        if package is None or package.origin is None:
            raise UserError("--data: expected a path, or scikit-image installed, got neither")
        folder = Path(package.origin).parent / "data"
        return [read_image(folder / name) for name in PHOTOGRAPHS], None
    if path.is_dir():
        if (suffix := cifar.find(path)) is not None:
            try:
                return cifar.load(path, suffix)
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


def shapes(images: Images) -> set[tuple[int, int]]:
    """The heights and widths that occur."""
    return {image.shape[:2] for image in images}


def split(images: Images, size: int) -> tuple[Images, Images]:
    """Splits images into those to train on and those held out: every tenth one.

    Of few images one alone would make a biased score, so the right fifth of each is held out.
    """
    factor = 2 if len(images) < FEW_IMAGES else 1
    for height, width in shapes(images):
        if height < size or width < factor * size:
            raise UserError(
                f"cropping {len(images)} images: expected each to be at least {factor * size} "
                f"pixels wide and {size} high, got {width} x {height}; lower --size"
            )
    if factor == 1:
        return [x for i, x in enumerate(images) if i % 10], images[::10]
    cuts = [x.shape[1] - max(size, x.shape[1] // 5) for x in images]
    pairs = list(zip(images, cuts, strict=True))
    return [x[:, :cut] for x, cut in pairs], [x[:, cut:] for x, cut in pairs]


def crops(
    images: Images, size: int, count: int, scales: int, seed: tuple[int, int, int]
) -> np.ndarray:
    """Random crops, downscaled 1 to ``scales`` times, as int32 (count, length).

    The length is 3 size**2. Half of the crops are mirrored. The seed (of the program, a stream, an
    index in it) decides them alone, so that a resumed run goes on with the batches to come.
    """
    rng = np.random.default_rng(seed)
    batch = np.empty((count, size, size, 3), np.int32)
    for crop in batch:
        image = images[int(rng.integers(len(images)))]
        scale = int(rng.integers(1, scales + 1))
        side = scale * size
        top, left = rng.integers(np.subtract(image.shape[:2], side) + 1)
        window = image[top : top + side, left : left + side]
        pixels = window.reshape(size, scale, size, scale, 3).mean((1, 3)).round()
        crop[:] = pixels[:, :: rng.choice((-1, 1))]
    return batch.reshape(count, -1)
