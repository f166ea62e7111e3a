"""Decoding of images."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from PIL import Image

from ..common.errors import UserError, one_line


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
