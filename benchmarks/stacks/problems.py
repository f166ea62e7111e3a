"""Stacks of recurrent layers, in named suites: data until their arrays are asked for.

Layer l reads what layer l - 1 gives, both directions of it side by side:

    a = N(o^{l-1}_t) W + b,   r = h_{t-1} U,   (carry_t, h_t) = cell(a, r, carry_{t-1})

where N is a layer norm or nothing. At the end of a skip over n layers the output is
o^l = h + o^{l-n}, otherwise h. U may be block-diagonal, in heads, and a layer alone may take its
pre-activations a as its input. Before some steps the carry may be reset to 0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.problems import uniform
from jaxsparse.topology import Topology

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4, "sLSTM": 4}
LEAVES = {"RNN": ("h",), "GRU": ("h",), "LSTM": ("c", "h"), "sLSTM": ("c", "n", "m", "h")}
"""Of a carry, the state last. What is beside it stays float32 in our own."""

# Standard deviation of a sum over a row of input weights and of recurrent ones for inputs of ones:
# with them states of all layers keep moving, and what rounding changes fades.
_GAINS = {"RNN": (1.0, 0.5), "GRU": (1.5, 0.5), "LSTM": (2.5, 0.5), "sLSTM": (1.0, 0.5)}


@dataclass(frozen=True)
class Problem:
    """A stack.

    Args:
        suite: the suite's name.
        cell: a key of ``GATES``; the RNN's activation is tanh.
        layers: how many.
        hidden: units of a layer and direction.
        features: of the stack's input; None for as many as units.
        directions: 1, or 2 for layers that run both ways.
        skip: over how many layers the stack's residual connections lead; 0 for none.
        parts: runs of as many layers, none of which a residual connection leaves.
        norm: whether what enters a layer is normalised over its features.
        density: the share of the recurrent weights that is stored; None for dense matrices.
        heads: blocks of the recurrent matrix, each of as many units.
        projected: whether inputs are multiplied; otherwise the one layer's are pre-activations.
        resets: whether carries are reset before some steps, about one in fifty.
        state_dtype: that of weights, inputs, states and outputs.
        gradient: whether the gradient is measured where nothing else is asked for.
    """

    suite: str
    cell: str
    layers: int
    hidden: int
    batch: int = 4
    length: int = 256
    features: int | None = None
    directions: int = 1
    skip: int = 0
    parts: int = 1
    norm: bool = False
    density: float | None = None
    heads: int = 1
    projected: bool = True
    resets: bool = False
    state_dtype: str = "bfloat16"
    gradient: bool = True

    @property
    def name(self) -> str:
        """Says all that tells it from others."""
        parts = [
            f"bidirectional_{self.cell}" if self.directions == 2 else self.cell,
            f"{self.layers}x{self.hidden}",
            f"in{self.features}" if self.features is not None else "",
            f"skip{self.skip}" if self.skip else "",
            f"parts{self.parts}" if self.parts > 1 else "",
            "norm" if self.norm else "",
            "" if self.density is None else f"d{self.density:g}",
            f"heads{self.heads}" if self.heads > 1 else "",
            "" if self.projected else "unprojected",
            "resets" if self.resets else "",
            f"b{self.batch}",
            f"t{self.length}",
            self.state_dtype,
        ]
        return "_".join(part for part in parts if part)

    @property
    def gates(self) -> int:
        """Of the cell."""
        return GATES[self.cell]

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names of the arrays that a carry consists of."""
        return LEAVES[self.cell]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of a layer's weights: of the input, of the state, and the bias."""
        return ("W", "U", "b") if self.projected else ("U",)

    @property
    def width(self) -> int:
        """Of a layer's output: of all directions."""
        return self.directions * self.hidden

    def inputs(self, layer: int) -> int:
        """Features that a layer reads."""
        if not self.projected:
            return self.gates * self.hidden
        return self.width if layer else self.features or self.hidden

    def ends_skip(self, layer: int) -> bool:
        """Whether the output of the layer so many below is added to this one's."""
        place = layer % (self.layers // self.parts)
        return self.skip > 0 and (place + 1) % self.skip == 0

    @property
    def is_plain(self) -> bool:
        """Whether it is what libraries call a recurrent network."""
        special = self.skip or self.norm or self.density or self.heads > 1 or self.resets
        return self.projected and self.cell != "sLSTM" and not special

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are of one form, each a dense one in one direction."""
        one_form = self.directions == 1 and self.inputs(0) == self.hidden
        special = self.skip or self.norm or self.density or self.heads > 1
        return one_form and not special

    @property
    def cells(self) -> int:
        """Layers and directions."""
        return self.layers * self.directions

    @property
    def weights(self) -> int:
        """Those of all matrices that are stored."""
        inputs = sum(self.inputs(layer) for layer in range(self.layers)) if self.projected else 0
        of_inputs = inputs * self.gates * self.hidden
        topology = self.topology()
        of_states = self.gates * self.hidden**2 // self.heads if topology is None else topology.nnz
        return self.directions * (of_inputs + self.layers * of_states)

    @property
    def sparsity(self) -> float:
        """The share of the recurrent weights that is not stored."""
        topology = self.topology()
        return 0.0 if topology is None else float(topology.sparsity)

    def operations(self, passed: str) -> int:
        """Multiplications and additions of all products of a call; a gradient has three times."""
        return 2 * self.weights * self.batch * self.length * (1 if passed == "forward" else 3)

    def prepare(self) -> None:
        """Makes the pattern."""
        self.topology()

    def topology(self) -> Topology | None:
        """The pattern of all recurrent matrices, (gates * hidden, hidden); None of dense ones."""
        if self.density is None:
            return None
        return _pattern(self.gates * self.hidden, self.hidden, self.density)

    def with_dense_weights(self) -> Problem:
        """The same stack for those who can't use a pattern."""
        return replace(self, density=None)

    def operands(self) -> dict[str, np.ndarray]:
        """Float32 arrays that bfloat16 holds exactly, as do float16 and float32.

        ``x (length, batch, features)``, ``cotangent (length, batch, width)``, that of the output,
        and for layer l and direction d, by names such as "W0.1": ``W (inputs, gates * hidden)`` and
        ``b (gates * hidden,)``, both left out where inputs are not multiplied; the leaves of the
        carry ``(batch, hidden)``, n at least 1; and U: ``(hidden, gates * hidden)``, the values of
        the pattern, or, in heads of so many units, ``(heads, units, gates * units)``. ``resets
        (length, batch)`` says before which steps of which rows the carry is 0.
        """
        return _drawn(replace(self, suite="", gradient=False))


def names(problem: Problem) -> Iterator[str]:
    """Of all operands that have a gradient, in the order in which those are compared."""
    yield "x"
    for layer in range(problem.layers):
        for direction in range(problem.directions):
            for kind in (*problem.kinds, *problem.leaves):
                yield name(kind, layer, direction)


def name(kind: str, layer: int, direction: int) -> str:
    """Of an operand."""
    return f"{kind}{layer}.{direction}"


@functools.lru_cache(maxsize=1)
def _pattern(m: int, k: int, density: float) -> Topology:
    return uniform(m, k, 1 - density)


@functools.lru_cache(maxsize=2)  # a sparse stack, and the same with dense weights
def _drawn(problem: Problem) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    h, b = problem.hidden, problem.batch

    def draw(*shape: int, scale: float = 1.0) -> np.ndarray:
        x = np.float32(scale) * rng.standard_normal(shape, dtype=np.float32)
        return x.astype(jnp.bfloat16).astype(np.float32)

    input_gain, recurrent_gain = _GAINS[problem.cell]
    drawn = {
        "x": draw(problem.length, b, problem.inputs(0)),
        "cotangent": draw(problem.length, b, problem.width),
    }
    heads, units = problem.heads, h // problem.heads
    recurrent: tuple[int, ...]
    recurrent = (heads, units, problem.gates * units) if heads > 1 else (h, problem.gates * h)
    topology, terms = problem.topology(), units * (problem.density or 1)
    if topology is not None:
        recurrent = (topology.nse,)
    for layer in range(problem.layers):
        k = problem.inputs(layer)
        for direction in range(problem.directions):
            made = {
                "W": draw(k, problem.gates * h, scale=input_gain / np.sqrt(k)),
                "U": draw(*recurrent, scale=recurrent_gain / np.sqrt(terms)),
                "b": draw(problem.gates * h, scale=0.25),
                **{leaf: draw(b, h, scale=0.5) for leaf in problem.leaves},
            }
            if "n" in made:
                made["n"] = 1 + np.abs(made["n"]).astype(jnp.float8_e4m3fn).astype(np.float32)
            kept = (*problem.kinds, *problem.leaves)
            drawn |= {name(kind, layer, direction): made[kind] for kind in kept}
    if problem.resets:
        drawn["resets"] = rng.random((problem.length, b)) < 0.02
    return drawn


# ---- suites ----


@dataclass(frozen=True)
class Suite:
    """A suite.

    Args:
        problems: its stacks.
        about: for the list.
        varies: the field that a plot has on its horizontal axis; None for a row of dots for each.
        ladder: whether the steps of the ladder are measured as well.
        devices: whether several devices are as well.
    """

    problems: tuple[Problem, ...]
    about: str
    varies: str | None = None
    ladder: bool = False
    devices: bool = False


def _grid(suite: str, cells: Sequence[str], **fields: Sequence[Any]) -> tuple[Problem, ...]:
    """All combinations, the last field varying fastest."""
    made: list[dict[str, Any]] = [{"cell": cell} for cell in cells]
    for field, values in fields.items():
        made = [{**known, field: value} for known in made for value in values]
    return tuple(Problem(suite, **known) for known in made)


_SMALL = (
    Problem("stack_small", "LSTM", 3, 64, batch=4, length=32, state_dtype="float32"),
    Problem("stack_small", "GRU", 3, 64, batch=4, length=32, state_dtype="float32"),
    Problem("stack_small", "RNN", 6, 64, 4, 32, skip=2, norm=True, state_dtype="float32"),
    Problem("stack_small", "LSTM", 2, 64, 4, 32, directions=2, state_dtype="float32"),
)

_LADDER = tuple(
    Problem("stack_ladder", "LSTM", 4, 512, 64, 100, state_dtype=dtype, gradient=False)
    for dtype in ("float32", "bfloat16")
)

_DEEP: dict[str, Any] = {"skip": 4, "norm": True, "gradient": False}

_NETWORKS = (
    Problem("stack_networks", "LSTM", 4, 512, batch=64, length=1000),
    Problem("stack_networks", "LSTM", 8, 512, batch=64),
    Problem("stack_networks", "LSTM", 4, 512, batch=16, length=1000),
    Problem("stack_networks", "LSTM", 4, 512, batch=256),
    Problem("stack_networks", "LSTM", 4, 1024, batch=4),
    Problem("stack_networks", "LSTM", 4, 1024, batch=64),
    Problem("stack_networks", "RNN", 8, 1152, batch=4),
    Problem("stack_networks", "LSTM", 2, 1024, batch=16, directions=2),
    # Luong et al. 2017, the encoder and the decoder of neural machine translation.
    *(
        Problem("stack_networks", "LSTM", 2, 1024, batch=b, density=density)
        for density in (None, 0.125)
        for b in (4, 64)
    ),
    # Amodei et al. 2016, Deep Speech 2.
    *(Problem("stack_networks", "GRU", 7, 2560, batch=16, density=d) for d in (None, 0.12)),
    # AlgoPerf's speech workload, without what stands between its layers.
    Problem("stack_networks", "LSTM", 4, 256, 32, 512, features=512, directions=2),
    # Agents of reinforcement learning: small layers, episodes that end within a sequence.
    *(
        Problem("stack_networks", "GRU", 1, h, batch=b, length=128, resets=True)
        for h, b in ((128, 1024), (256, 256), (256, 1024), (256, 4096), (512, 1024))
    ),
)

SUITES: dict[str, Suite] = {
    "stack_small": Suite(_SMALL, "small stacks, 32 steps, for a CPU"),
    "stack_ladder": Suite(
        _LADDER, "LSTM 4x512, batch 64: optimisations one upon the other", ladder=True
    ),
    "stack_sizes": Suite(
        _grid(
            "stack_sizes",
            ("LSTM",),
            layers=(4,),
            batch=(64, 256),
            hidden=(256, 512, 1024, 2048),
            length=(100,),
            gradient=(False,),
        ),
        "LSTM, 4 layers: the same over units and batches",
        "hidden",
        ladder=True,
    ),
    "stack_cells": Suite(
        _grid(
            "stack_cells",
            ("RNN", "GRU", "LSTM"),
            layers=(4,),
            batch=(64,),
            hidden=(256, 512, 1024, 2048),
            length=(100,),
        ),
        "RNN, GRU and LSTM, 4 layers, over units, forward and with gradients",
        "hidden",
    ),
    "stack_depth": Suite(
        tuple(
            Problem("stack_depth", "RNN", layers, 1152, batch=batch, **_DEEP)
            for layers in (8, 48, 108)
            for batch in (1, 4, 16, 64)
        ),
        "RNN of 1152 units, 8 to 108 layers, skips over 4: throughput and memory over the batch",
        "batch",
    ),
    "stack_devices": Suite(
        (
            *(Problem("stack_devices", "LSTM", 4, 512, b, 1000) for b in (16, 32)),
            # A skip ends each half: what follows a norm behind layers without one is ten times as
            # sensitive to rounding.
            Problem("stack_devices", "RNN", 108, 1152, 64, 1000, parts=2, **_DEEP | {"skip": 3}),
        ),
        "one GPU and two: LSTM 4x512 with twice the batch, RNN 108x1152 with half of the layers",
        devices=True,
    ),
    "heads": Suite(
        tuple(
            Problem("heads", cell, 1, 768, batch, 1024, heads=768 // units, projected=False)
            for cell in ("LSTM", "sLSTM")
            for units, batch in (
                *((units, 16) for units in (16, 64, 256, 768)),
                *((64, batch) for batch in (2, 64, 256)),
            )
        ),
        "LSTM and sLSTM of 768 units in heads of 16 to 768, the recurrent part alone",
    ),
    "stack_networks": Suite(_NETWORKS, "stacks of published networks, and of usual sizes"),
}
