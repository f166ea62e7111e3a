"""Labelled images: CIFAR-10 from a folder, or the handwritten digits inside scikit-learn."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from sklearn.datasets import load_digits

from ..common.errors import UserError, one_line
from ..common.images import CIFAR_RECORD, find_cifar, load_cifar, read_pickled

CLASSES = 10
SHEET_LABELS = {"data": "train_lables.json", "test": "test_lables.json"}  # As they are published.
CROP = 4  # Pixels by which an image of 32 is moved at most, of others in proportion.


class Part(NamedTuple):
    """Images uint8 (N, side, side, channels), and a class for each."""

    images: Any  # An array of NumPy, or of a device.
    labels: Any


class Held(NamedTuple):
    """What a device holds of a data set, so that a step takes its images from there."""

    train: Part
    test: Part
    mean: Array  # Of each channel.
    deviation: Array

    def normalised(self, images: Array) -> Array:
        """As the model takes them, float32."""
        return (images - self.mean) / self.deviation


class Dataset(NamedTuple):
    """What to learn from, and what is tested; with what normalises the images."""

    train: Part
    test: Part
    mean: np.ndarray  # Of each channel.
    deviation: np.ndarray
    mirrored: bool  # Whether an image and its mirror image are of one class.
    source: str
    digest: str  # SHA-256 of the content.

    @property
    def description(self) -> str:
        """What there is, in a line."""
        side, channels = self.train.images.shape[2:]
        return (
            f"{self.source}: {len(self.train.labels):,} images of {side} x {side} x {channels} to "
            f"learn from, {len(self.test.labels):,} to test"
        )

    def held(self) -> Held:
        """Copies it to the device."""
        mean, deviation = (x.astype(np.float32) for x in (self.mean, self.deviation))
        held: Held = jax.device_put(
            Held(self.train, self.test, mean, deviation), jax.local_devices()[0]
        )
        return held


def load(folder: Path | None, resolution: int | None) -> Dataset:
    """Reads CIFAR-10, or (None) the digits.

    Args:
        folder: of the data set's binary version, its Python version, or sheets of images.
        resolution: the side of images, to which they are enlarged; None as they are.
    """
    if folder is None:
        train, test = read_digits()
        source = "digits of scikit-learn"
    else:
        train, test = read_cifar(folder)
        source = f"CIFAR-10 in {folder.resolve()}"
    digest = hashlib.sha256()
    for array in (*train, *test):
        digest.update(np.ascontiguousarray(array))
    train, test = enlarged(train, resolution), enlarged(test, resolution)
    pixels = train.images.reshape(-1, train.images.shape[-1]).astype(float)
    mean, deviation = pixels.mean(0), pixels.std(0) + 1e-3
    mirrored = folder is not None  # Of digits it is none.
    return Dataset(train, test, mean, deviation, mirrored, source, digest.hexdigest())


def read_digits() -> tuple[Part, Part]:
    """The 1,797 digits of 8 x 8 pixels: every fifth one is for testing."""
    digits = load_digits()
    images = (digits.images * (255 / 16)).round().astype(np.uint8)[..., None]
    whole, tested = Part(images, digits.target), np.arange(len(images)) % 5 == 0
    return Part(*(x[~tested] for x in whole)), Part(*(x[tested] for x in whole))


def read_cifar(folder: Path) -> tuple[Part, Part]:
    """CIFAR-10 in any of its three forms, with labels."""
    suffix = find_cifar(folder) if folder.is_dir() else None
    if suffix is None:
        raise UserError(f"--data {folder}: expected a folder of CIFAR-10, got none of its files")
    try:
        images = load_cifar(folder, suffix)
        batches = sorted(x for x in folder.glob("data_batch_[0-9]*") if x.suffix == suffix)
        labels = [
            np.concatenate([labels_of(file) for file in files])
            for files in (batches, [folder / f"test_batch{suffix}"])
        ]
    except OSError as error:
        raise UserError(f"--data {folder}: expected CIFAR-10, got: {error}") from error
    parts = []
    for pixels, classes in zip(images, labels, strict=True):
        used = classes[: len(pixels)]
        if len(used) < len(pixels) or not np.isin(used, range(CLASSES)).all():
            raise UserError(
                f"--data {folder}: expected a label of 0 to {CLASSES - 1} for each of "
                f"{len(pixels)} images, got {len(classes)} labels, "
                f"{min(classes, default=0)} to {max(classes, default=0)}"
            )
        parts.append(Part(pixels, classes[: len(pixels)]))
    return parts[0], parts[1]


def labels_of(batch: Path) -> np.ndarray:
    """The classes of a file's images."""
    if batch.suffix == ".bin":
        return np.fromfile(batch, np.uint8).reshape(-1, CIFAR_RECORD)[:, 0].astype(int)
    if batch.suffix == "":
        return np.asarray(read_pickled(batch, "labels"), int).reshape(-1)
    file = batch.with_name(SHEET_LABELS[batch.stem.partition("_")[0]])
    try:
        labels = np.asarray(json.loads(file.read_text()), int).reshape(-1)
    except ValueError as error:
        raise UserError(f"reading {file}: expected labels, got: {one_line(error)}") from error
    # All of the training set are in one file: those of batch 1 come first.
    first = 10_000 * (int(batch.stem.rpartition("_")[2]) - 1) if batch.stem[:4] == "data" else 0
    return labels[first : first + 10_000]


def enlarged(part: Part, resolution: int | None) -> Part:
    """The images at another side, by linear interpolation."""
    side = part.images.shape[1]
    if resolution is None or resolution == side:
        return part
    if resolution < side:
        raise UserError(f"--resolution: expected at least {side}, that of the images")
    at = np.clip((np.arange(resolution) + 0.5) * side / resolution - 0.5, 0, side - 1)
    low = np.minimum(at.astype(int), side - 2)
    share = (at - low)[:, None]
    images = part.images.astype(np.float32)
    for axis in (1, 2):
        images = np.moveaxis(images, axis, 2)
        images = images[:, :, low] * (1 - share) + images[:, :, low + 1] * share
        images = np.moveaxis(images, 2, axis)
    return Part(images.round().astype(np.uint8), part.labels)


class Batch(NamedTuple):
    """Which images a step takes, and how each is moved."""

    chosen: np.ndarray  # Their indices, int32 (n,).
    corners: np.ndarray  # Where they begin in the padded image, int32 (n, 2).
    mirrored: np.ndarray  # bool (n,)


def batches(dataset: Dataset, size: int, seed: int, step: int) -> Iterator[Batch]:
    """Those of a step and all after it: half are mirrored where that changes no class.

    The seed and the step decide them alone, so that a resumed run goes on with those to come.
    """
    images, labels = dataset.train
    most, per_epoch = most_moved(images.shape[1]), steps_of_epoch(dataset, size)
    order, ordered = np.empty(0), -1
    while True:
        epoch, at = divmod(step, per_epoch)
        if ordered != epoch:
            order, ordered = np.random.default_rng((seed, epoch)).permutation(len(labels)), epoch
        rng = np.random.default_rng((seed, epoch, at))
        chosen = order[at * size : (at + 1) * size].astype(np.int32)
        corners = rng.integers(2 * most + 1, size=(len(chosen), 2), dtype=np.int32)
        mirrored = rng.integers(1 + dataset.mirrored, size=len(chosen)).astype(bool)
        yield Batch(chosen, corners, mirrored)
        step += 1


def steps_of_epoch(dataset: Dataset, size: int) -> int:
    """How many whole batches there are."""
    return max(1, len(dataset.train.labels) // size)


def most_moved(side: int) -> int:
    """By how many pixels images of a side are moved at most."""
    return max(1, side * CROP // 32)


def moved(images: Array, batch: Batch) -> Array:
    """The images of a batch, moved by up to an eighth of their side, zeros behind them.

    Args:
        images: all of them, (N, side, side, channels).
        batch: which, and whether they are mirrored.
    """
    _, *shape = images.shape
    most = most_moved(shape[0])
    padded = jnp.pad(images[batch.chosen], [(0, 0), (most, most), (most, most), (0, 0)])

    def part(image: Array, corner: Array) -> Array:
        return jax.lax.dynamic_slice(image, (*corner, 0), shape)

    result = jax.vmap(part)(padded, batch.corners)
    mirrored = jnp.asarray(batch.mirrored)[:, None, None, None]
    return jnp.where(mirrored, result[:, :, ::-1], result)
