"""Layers of the networks whose pruned weights Gale et al. 2020 measure, and their columns of x.

The Deep Learning Matrix Collection names its folders after them; a file is the weights of a layer.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """A network with the batches of inference and of training.

    Args:
        name: of its folder.
        batches: examples at a time, in inference and in training.
        layers: (m, k, columns of x for an example) of its weights.
        positions: from the name of a file to columns of x for an example.
    """

    name: str
    batches: tuple[int, int]
    layers: tuple[tuple[int, int, int], ...]
    positions: Callable[[str], int]

    def columns(self, batch: int, positions: int) -> int:
        """Of x: padded to a multiple of four, as in the paper."""
        return -(-batch * positions // 4) * 4


_WORDS = 256
"""Positions of a sequence."""


def _pixels(group: int) -> int:
    """Of an image behind a group of residual blocks, 1 to 4."""
    return (112 >> group) ** 2


def _positions(name: str) -> int:
    groups = re.findall(r"group(\d)", name)
    if groups:
        return _pixels(int(groups[-1]))
    return _pixels(0) if "initial" in name else 1  # the dense layer at the end


def _bottlenecks() -> tuple[tuple[int, int, int], ...]:
    """1 x 1 and 3 x 3 convolutions as products, and the projections between groups."""
    layers = []
    for group in 1, 2, 3, 4:
        c, pixels = 32 << group, _pixels(group)
        layers += [(c, 4 * c, pixels), (c, 9 * c, pixels), (4 * c, c, pixels)]
        layers += [(4 * c, 2 * c, pixels)] if group > 1 else []
    return tuple(layers)


NETWORKS: tuple[Network, ...] = (
    Network(
        "transformer",
        (1, 8),
        tuple((m, k, _WORDS) for m, k in ((512, 512), (2048, 512), (512, 2048))),
        lambda name: _WORDS,
    ),
    Network("rn50", (1, 256), _bottlenecks(), _positions),
)


def layer_of(path: pathlib.PurePath) -> tuple[Network, str] | None:
    """Whose weights a file of the collection holds, and its path below that network's folder."""
    for network in NETWORKS:
        if network.name in path.parts[:-1]:
            below = path.parts[path.parts.index(network.name) + 1 :]
            return network, "/".join(below)
    return None
