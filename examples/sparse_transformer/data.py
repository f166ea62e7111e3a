"""Photographs to learn from: which are held out, and random crops of the others."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..common.errors import UserError
from ..common.images import Images, load_images

FEW_IMAGES = 10  # Of fewer, parts are held out rather than whole images.
MAX_DOWNSCALE = 8
TRAINING, SCORING, DRAWING = range(3)  # Streams of random numbers.


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
