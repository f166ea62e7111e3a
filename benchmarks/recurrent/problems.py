"""Layers to scan, in named suites: data until their arrays are asked for.

A problem is one direction of one recurrent layer, the recurrent part alone: the input side is a
vector for every step, which goes to all gates alike.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.problems import uniform
from jaxsparse.topology import Topology

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
LENGTH = 256


@dataclass(frozen=True)
class Problem:
    """One direction of one recurrent layer.

    Args:
        suite: the suite's name.
        cell: a key of ``GATES``; the RNN's activation is tanh.
        hidden: units.
        density: the share of the weights that is stored, or None for a dense matrix.
        state_dtype: that of xs, of what the product takes, and of ys.
        weight_dtype: that of the weights, the same by default.
        equal_rows: a sparse matrix whose rows are of one length, instead of random lengths.
        gradient: whether the gradient is measured where nothing else is asked for.
    """

    suite: str
    cell: str
    hidden: int
    density: float | None = None
    batch: int = 4
    length: int = LENGTH
    state_dtype: str = "bfloat16"
    weight_dtype: str = ""
    equal_rows: bool = False
    gradient: bool = False

    def __post_init__(self) -> None:
        if not self.weight_dtype:
            object.__setattr__(self, "weight_dtype", self.state_dtype)

    @property
    def name(self) -> str:
        """Says all that tells it from others."""
        density = "dense" if self.density is None else f"d{self.density:g}"
        rows = "_equal_rows" if self.equal_rows else ""
        weights = "" if self.weight_dtype == self.state_dtype else f"_{self.weight_dtype}_weights"
        return (
            f"{self.cell}_{self.hidden}_{density}{rows}_b{self.batch}_t{self.length}_"
            f"{self.state_dtype}{weights}"
        )

    @property
    def gates(self) -> int:
        """Of the cell."""
        return GATES[self.cell]

    @property
    def nnz(self) -> int:
        """Weights that are stored."""
        topology = self.topology()
        return self.gates * self.hidden**2 if topology is None else topology.nnz

    def prepare(self) -> None:
        """Makes the pattern."""
        self.topology()

    def topology(self) -> Topology | None:
        """The pattern, (gates * hidden, hidden); None of a dense matrix."""
        if self.density is None:
            return None
        return _pattern(self.gates * self.hidden, self.hidden, self.density, self.equal_rows)

    def with_dense_weights(self) -> Problem:
        """The same layer for those who can't use a pattern; by whatever name, in one suite."""
        return replace(
            self, suite="", density=None, equal_rows=False, weight_dtype="", gradient=False
        )

    def operands(self) -> dict[str, np.ndarray]:
        """Float32 arrays that bfloat16 holds exactly, as do float16 and float32.

        ``weights (hidden, gates * hidden)``, or the values of the pattern; ``x (length, batch,
        hidden)``; the carry, ``c`` for an LSTM and ``h``; ``cotangent``, that of ys. A sum over a
        row of weights has a standard deviation of about 1 for a state of ones, so states neither
        die nor repeat themselves, and rounding errors fade.
        """
        return _drawn(replace(self, suite="", gradient=False))


@functools.lru_cache(maxsize=2)
def _pattern(m: int, k: int, density: float, equal_rows: bool) -> Topology:
    if not equal_rows:
        return uniform(m, k, 1 - density)
    rng, count = np.random.default_rng(0), max(1, round(density * k))
    columns = [np.sort(rng.choice(k, count, replace=False)) for _ in range(m)]
    return Topology(np.arange(0, (m + 1) * count, count), np.concatenate(columns), (m, k))


@functools.lru_cache(maxsize=2)  # a sparse layer, and the same with dense weights
def _drawn(problem: Problem) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    topology = problem.topology()
    h, t, b = problem.hidden, problem.length, problem.batch
    gain = 1 / np.sqrt(h * (problem.density or 1))

    def draw(*shape: int, scale: float = 1.0) -> np.ndarray:
        x = np.float32(scale) * rng.standard_normal(shape, dtype=np.float32)
        return x.astype(jnp.bfloat16).astype(np.float32)

    shape = (h, problem.gates * h) if topology is None else (topology.nse,)
    return {
        "weights": draw(*shape, scale=gain),
        "x": draw(t, b, h),
        **({"c": draw(b, h)} if problem.cell == "LSTM" else {}),
        "h": draw(b, h, scale=0.5),
        "cotangent": draw(t, b, h),
    }


# ---- suites ----


def _sweep(suite: str, field: str, values: Sequence[Any], **layer: Any) -> tuple[Problem, ...]:
    return tuple(Problem(suite, **{**layer, field: value}) for value in values)


# The layer that the figures of Zhu et al. 2018, "Sparse Persistent RNNs", vary.
_PRUNED: dict[str, Any] = {"cell": "RNN", "hidden": 1792, "density": 0.1}

_LAYERS = (
    Problem("layers", "RNN", 1792, 0.1, weight_dtype="float32", gradient=True),
    Problem("layers", "RNN", 1792, 0.1, state_dtype="float32"),
    Problem("layers", "RNN", 1792, 0.01),
    Problem("layers", "RNN", 2304, 0.3),
    Problem("layers", "RNN", 5760, 0.01),
    Problem("layers", "RNN", 11520, 0.01),
    Problem("layers", "RNN", 1152, state_dtype="float32"),
    Problem("layers", "RNN", 1152),
    Problem("layers", "LSTM", 1024, gradient=True),
    Problem("layers", "LSTM", 1024, batch=16),
    Problem("layers", "GRU", 1024, gradient=True),
    Problem("layers", "LSTM", 1792),
    Problem("layers", "LSTM", 1024, 0.125),
    Problem("layers", "LSTM", 1448, 0.047),
)

_SMALL = tuple(
    Problem("small", cell, h, density, length=64, state_dtype="float32", gradient=True)
    for cell, h in (("RNN", 256), ("RNN", 1024), ("GRU", 256), ("LSTM", 256), ("LSTM", 512))
    for density in (None, 0.1)
)

# Table 2 there: units and density of LSTM layers pruned to rows of equal lengths.
_TRANSLATION = (
    *((h, None) for h in (256, 362, 512, 768, 1024, 1448)),
    *((256, 0.125), (512, 0.0625), (768, 0.0417), (1024, 0.047), (1024, 0.125), (1448, 0.047)),
)

# Table 3 there.
_SPEECH = (*((h, None) for h in (704, 1760, 2560)), *((h, 0.12) for h in (1760, 2560, 3072)))

# Figure 4 there: 1.32 million weights.
_FIXED = ((2304, 0.25), (3584, 0.103), (5760, 0.04), (7168, 0.026), (11520, 0.01))


@dataclass(frozen=True)
class Suite:
    """A suite.

    Args:
        problems: its layers.
        about: for the list.
        varies: the field that they differ in, which a plot has on its horizontal axis.
        throughput: whether a plot shows TFLOP/s instead of time.
    """

    problems: tuple[Problem, ...]
    about: str
    varies: str | None = None
    throughput: bool = False


SUITES: dict[str, Suite] = {
    "layers": Suite(_LAYERS, "dense and sparse layers of the usual sizes"),
    "small": Suite(_SMALL, "small layers, 64 steps, for a CPU"),
    "density": Suite(
        _sweep("density", "density", (0.01, 0.02, 0.05, 0.1, 0.2, 0.3), **_PRUNED),
        "1792 units against density",
        "density",
    ),
    "density_2304": Suite(
        _sweep(
            "density_2304", "density", (0.01, 0.05, 0.1, 0.2, 0.3), **{**_PRUNED, "hidden": 2304}
        ),
        "2304 units against density",
        "density",
    ),
    "density_5760": Suite(
        _sweep("density_5760", "density", (0.01, 0.02, 0.05), **{**_PRUNED, "hidden": 5760}),
        "5760 units against density",
        "density",
    ),
    "size": Suite(
        _sweep("size", "hidden", (512, 1024, 1152, 1792, 2304, 3072, 4096, 5632), **_PRUNED),
        "units, 10 % stored",
        "hidden",
    ),
    "fixed_nonzeros": Suite(
        tuple(Problem("fixed_nonzeros", "RNN", h, density) for h, density in _FIXED),
        "units, 1.32 million weights stored",
        "hidden",
    ),
    "batch": Suite(
        _sweep("batch", "batch", (1, 2, 4, 8, 16, 32, 64), **_PRUNED),
        "batch, 1792 units, 10 % stored",
        "batch",
    ),
    "dense_batch": Suite(
        _sweep("dense_batch", "batch", (1, 2, 4, 8, 16, 32, 64), cell="RNN", hidden=1152),
        "batch, 1152 units, dense",
        "batch",
        throughput=True,
    ),
    "length": Suite(
        _sweep("length", "length", (16, 64, 256, 1024, 2048), **_PRUNED),
        "steps, 1792 units, 10 % stored",
        "length",
    ),
    "ablation": Suite(
        tuple(
            Problem("ablation", "RNN", h, 0.1, state_dtype=dtype)
            for h in (1152, 1792)
            for dtype in ("float32", "bfloat16")
        ),
        "what each part of a sparse kernel brings",
    ),
    "equal_rows": Suite(
        _sweep("equal_rows", "equal_rows", (False, True), cell="RNN", hidden=2304, density=0.25),
        "rows of random and of equal lengths",
    ),
    "translation": Suite(
        tuple(
            Problem("translation", "LSTM", h, density, equal_rows=density is not None)
            for h, density in _TRANSLATION
        ),
        "LSTM layers of a translation network, dense and pruned",
    ),
    "speech": Suite(
        tuple(Problem("speech", "RNN", h, density, batch=1) for h, density in _SPEECH),
        "layers of Deep Speech 2, dense and pruned, batch 1",
    ),
}
