"""Depthwise layers of MobileNetV1, at batch 1 and 256."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import jax

SUITE = "mobilenet"
ABOUT = "depthwise layers of MobileNetV1, width 1.0, 224 x 224, at batch 1 and 256 (8 on a CPU)"


@dataclass(frozen=True)
class Problem:
    """One layer.

    Args:
        channels: each with a kernel of 3 x 3.
        size: of an image, along both axes.
        stride: 1 or 2; padding is "SAME".
        images: of the batch.
    """

    channels: int
    size: int
    stride: int
    images: int

    suite = SUITE

    @property
    def name(self) -> str:
        """Unique in the suite."""
        return f"{self.channels}x{self.size}_stride{self.stride}_batch{self.images}"

    @property
    def out(self) -> int:
        """Rows and columns of the result."""
        return -(-self.size // self.stride)

    def bytes(self, itemsize: int) -> int:
        """Of the images and of the result, each once."""
        return self.channels * self.images * (self.size**2 + self.out**2) * itemsize

    def prepare(self) -> None:
        """Nothing is made before."""

    def operands(self, dtype: str) -> dict[str, jax.Array]:
        """Standard normal, by name: images and cotangent (c, n, h, w), kernel, bias."""
        keys = jax.random.split(jax.random.key(0), 4)
        planes = (self.channels, self.images)
        shapes = {
            "x": (*planes, self.size, self.size),
            "kernel": (self.channels, 3, 3),
            "bias": (self.channels,),
            "cotangent": (*planes, self.out, self.out),
        }
        draw = jax.jit(functools.partial(jax.random.normal, dtype=dtype), static_argnames="shape")
        return {
            name: draw(key, shape=shape)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }


_LAYERS = [
    (32, 112, 1),
    (64, 112, 2),
    (128, 56, 1),
    (128, 56, 2),
    (256, 28, 1),
    (256, 28, 2),
    (512, 14, 1),
    (512, 14, 2),
    (1024, 7, 1),
]


def problems(platform: str) -> Iterator[Problem]:
    """Its different layers; (512, 14, 1) is there five times."""
    for images in (1, 8) if platform == "cpu" else (1, 256):
        for layer in _LAYERS:
            yield Problem(*layer, images)
