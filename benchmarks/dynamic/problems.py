"""Nets and batches in named suites: data until their arrays are asked for."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.dynamic.models import MODELS, Model, Sizes, circuit_model, example_ids
from jaxsparse import dynamic

TRAINED = ("forward", "gradient", "training")
"""Passes on the device."""

COMPUTED = (*TRAINED, "end_to_end")
"""Passes that give a result."""

PASSES = (*COMPUTED, "pack", "copy", "dispatch")
"""With these, a whole step by parts."""

STEPS = {"cpu": 4}
"""By platform, how many steps a program has at most; 48 on others."""


@dataclass(frozen=True)
class Problem:
    """A net, and batches of graphs that it is run on.

    Args:
        suite: the suite's name.
        model: a key of ``MODELS``, or a circuit and its bits, as "adder_128".
        batch: examples of a step.
        hidden: units.
        embedding: features of embeddings; as many as units by default.
        steps: of a program, at most.
        passes: that are measured where nothing else is asked for.
    """

    suite: str
    model: str
    batch: int
    hidden: int
    embedding: int = 0
    steps: int = 48
    passes: tuple[str, ...] = COMPUTED

    def __post_init__(self) -> None:
        if not self.embedding:
            object.__setattr__(self, "embedding", self.hidden)

    @property
    def name(self) -> str:
        """Says all that tells it from others."""
        embedded = f"_e{self.embedding}" if self.embedding != self.hidden else ""
        return f"{self.model}_h{self.hidden}{embedded}_b{self.batch}"

    @property
    def rounds(self) -> int:
        """How often a run from the host takes all steps, so that its start matters little."""
        return 1 if self.steps <= min(STEPS.values()) else max(4, 64 // self.batch)

    @property
    def net(self) -> Model:
        """The net itself."""
        return _net(self.model)

    @property
    def graphs(self) -> dynamic.Graphs:
        """The set that batches are drawn of."""
        return _graphs(self.model)[1]

    @property
    def source(self) -> str:
        """Whence the set is: the name of a data set, or "generated"."""
        return _graphs(self.model)[0]

    @property
    def examples(self) -> int:
        """How many the set has."""
        return len(self.graphs) // self.net.directions

    @property
    def sizes(self) -> Sizes:
        """Of the parameters."""
        words = None if self.net.words is None else self.graphs.channel(self.net.words[1])
        vocabulary = 0 if words is None else 1 + int(words.max())
        return Sizes(self.hidden, self.embedding, vocabulary)

    def prepare(self) -> None:
        """Reads or makes the set."""
        _graphs(self.model)

    def ids(self, step: Sequence[int] | np.ndarray) -> np.ndarray:
        """The graphs of a batch of examples."""
        chosen: np.ndarray = example_ids(self.net, self.graphs, step)
        return chosen

    def groups(self) -> list[list[np.ndarray]]:
        """The examples of each step, in groups of steps that are about as deep.

        A program has a loop over steps for each group, whose scripts have one form. So that small
        batches, which differ most, need not be as large as the largest one.
        """
        return _groups(self.model, self.batch, self.steps)

    @property
    def level_rows(self) -> float:
        """Computed rows of a level of a batch, in the mean."""
        rows, levels = _rows_and_levels(self.model, self.batch, self.steps)
        return rows / max(1, levels)

    @property
    def batch_rows(self) -> float:
        """Computed rows of a batch, in the mean."""
        rows, _ = _rows_and_levels(self.model, self.batch, self.steps)
        return rows / sum(map(len, self.groups()))

    def rows_of(self, step: np.ndarray) -> int:
        """How many rows of logits a batch has."""
        ids = self.ids(step)
        if self.net.rows == "graph":
            return len(ids)
        return int(self.graphs[ids].has_input.sum()) // self.net.directions


@functools.lru_cache(maxsize=8)
def _net(model: str) -> Model:
    if model in MODELS:
        return MODELS[model]
    kind, _, bits = model.partition("_")
    return circuit_model(kind, int(bits))


@functools.lru_cache(maxsize=8)
def _graphs(model: str) -> tuple[str, dynamic.Graphs]:
    return _net(model).graphs()


@functools.lru_cache(maxsize=8)
def _groups(model: str, batch: int, steps: int) -> list[list[np.ndarray]]:
    _, graphs = _graphs(model)
    examples = len(graphs) // _net(model).directions
    rng = np.random.default_rng(0)
    needed = -(-steps * batch // examples)
    drawn = np.concatenate([rng.permutation(examples) for _ in range(needed)])
    chosen = drawn[: steps * batch].reshape(steps, batch)
    highest = np.maximum.reduceat(graphs.levels, graphs.offsets[:-1])[:examples]
    in_order = chosen[np.argsort(highest[chosen].max(1), kind="stable")]
    parts = min(steps, examples, 4 if batch < 16 else 2 if batch < 64 else 1)
    return [list(group) for group in np.array_split(in_order, parts)]


@functools.lru_cache(maxsize=64)
def _rows_and_levels(model: str, batch: int, steps: int) -> tuple[int, int]:
    """Of all steps together."""
    net, (_, graphs) = _net(model), _graphs(model)
    rows = levels = 0
    for step in itertools.chain.from_iterable(_groups(model, batch, steps)):
        own = graphs[example_ids(net, graphs, step)].levels
        rows, levels = rows + int((own > 0).sum()), levels + int(own.max(initial=0))
    return rows, levels


# ---- suites ----


@dataclass(frozen=True)
class Suite:
    """A suite.

    Args:
        problems: its nets and batches; those of a GPU too large for a CPU apart.
        about: for the list.
        on_gpu: what a GPU has besides.
        unit: what is counted: "trees", "sentences", "circuits".
        varies: the field that a plot has on its horizontal axis.
    """

    problems: tuple[Problem, ...]
    about: str
    on_gpu: tuple[Problem, ...] = ()
    unit: str = "graphs"
    varies: str | None = "batch"


def _batches(suite: str, model: str, batches: Sequence[int], **more: object) -> tuple[Problem, ...]:
    fields = {"hidden": 256, **more}
    return tuple(Problem(suite, model, batch, **fields) for batch in batches)  # type: ignore[arg-type]


_OTHERS = {"bilstm": 256, "bilstm_letters": 256, "td_rnn": 512, "td_lstm": 256, "rvnn": 512}
_SIX = {"tree_lstm": 256, **_OTHERS}


def _circuits(names: Sequence[str]) -> tuple[Problem, ...]:
    return tuple(Problem("circuits", name, 1, 64, steps=8, passes=TRAINED) for name in names)


SUITES: dict[str, Suite] = {
    "tree_lstm": Suite(
        _batches("tree_lstm", "tree_lstm", (1, 8, 16, 64, 128, 256)),
        "Tree-LSTM of 256 units over parse trees, batch 1 to 256",
        unit="trees",
    ),
    "packed": Suite(
        _batches("packed", "lstm", (1, 16, 64, 128), passes=TRAINED),
        "LSTM of 256 units over sentences without padding, beside padded ones",
        unit="sentences",
    ),
    "models": Suite(
        tuple(
            problem
            for model, hidden in _OTHERS.items()
            for problem in _batches(
                "models", model, (1, 16, 64, 128), hidden=hidden, passes=("training", "end_to_end")
            )
        ),
        "BiLSTM, the same with words by letters, TD-RNN, TD-LSTM and RvNN, batch 1 to 128",
        unit="sentences",
        varies=None,
    ),
    "circuits": Suite(
        _circuits(("adder_128", "multiplier_16", "shifter_64")),
        "adders, multipliers and shifters of and gates, one circuit at a time",
        _circuits(("adder_512", "multiplier_64", "multiplier_96", "shifter_1024")),
        unit="circuits",
        varies=None,
    ),
    "compile": Suite(
        tuple(
            Problem("compile", model, 64, hidden, steps=1, passes=("training",))
            for model, hidden in _SIX.items()
        ),
        "six nets: seconds until a program is compiled",
        unit="graphs",
        varies=None,
    ),
    "hidden": Suite(
        tuple(
            Problem("hidden", "tree_lstm", batch, hidden, 128, passes=("training",))
            for batch in (8, 64)
            for hidden in (128, 256, 384, 512)
        ),
        "Tree-LSTM against units, embedding 128",
        tuple(
            Problem("hidden", "tree_lstm", batch, 1024, 128, passes=("training",))
            for batch in (8, 64)
        ),
        unit="trees",
        varies="hidden",
    ),
    "breakdown": Suite(
        _batches("breakdown", "tree_lstm", (1, 4, 16, 64, 128), passes=PASSES),
        "what packing, copy, dispatch, forward, backward and update of a step take",
        unit="trees",
    ),
    "weight_loads": Suite(
        # Nothing is timed but the packer: loads are counted from the scripts of all steps.
        _batches("weight_loads", "tree_lstm", (1, 2, 4, 8, 16, 32, 64, 128), passes=("pack",)),
        "bytes of weights that a step reads, counted",
        unit="trees",
    ),
    "ablation": Suite(
        _batches("ablation", "tree_lstm", (1, 64, 256), passes=("gradient", "pack")),
        "widths of tiles, groups, and the packers in C++ and NumPy",
        unit="trees",
    ),
}


def problems(suite: str, platform: str, steps: int | None = None) -> tuple[Problem, ...]:
    """Those of a suite, with so many steps of a program, or as many as a platform takes."""
    chosen = SUITES[suite]
    every = chosen.problems + (() if platform == "cpu" else chosen.on_gpu)
    most = STEPS.get(platform, 48)
    return tuple(replace(p, steps=steps or min(p.steps, most)) for p in every)
