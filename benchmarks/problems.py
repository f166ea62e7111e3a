"""Named problems in named suites: data until their arrays are asked for.

A suite is a function of what was asked for to problems. Sizes depend on the platform, so that a run
takes a reasonable time on two cores and fills a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.stats

from benchmarks import files
from benchmarks.networks import NETWORKS, Network, layer_of
from benchmarks.operations import MEASURED
from jaxsparse import masks
from jaxsparse.topology import Topology

BAND_WIDTH = 256
"""Of the attention mask, as in the paper."""


@dataclass(frozen=True)
class Problem:
    """One pattern with the size of the dense operands.

    Args:
        suite: the suite's name.
        name: unique in the suite.
        operation: a key of ``MEASURED``.
        pattern: makes the topology; shared by problems on one pattern.
        n: columns of x for spmm, features of sddmm and attention, None where there is no such size.
        heads: attention heads, all on one pattern.
    """

    suite: str
    name: str
    operation: str
    pattern: Callable[[], Topology]
    n: int | None
    heads: int = 1

    def topology(self) -> Topology:
        """The pattern."""
        return _latest(self.pattern)

    def prepare(self) -> None:
        """Makes the pattern; ValueError or MemoryError if it can't be had."""
        self.topology()

    def operands(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Dense operands and values by name: float32, standard normal, so never zero nor one."""
        return _drawn(self, seed)


# The latest of each is kept: implementations follow each other on one problem, problems on one
# pattern.
@functools.lru_cache(maxsize=1)
def _latest(pattern: Callable[[], Topology]) -> Topology:
    return pattern()


@functools.lru_cache(maxsize=1)
def _drawn(problem: Problem, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = MEASURED[problem.operation].shapes(problem.topology(), problem.n, problem.heads)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


@dataclass(frozen=True)
class Request:
    """What a suite makes its problems of; None leaves a choice to the suite."""

    operation: str
    platform: str = "cpu"
    n: tuple[int, ...] | None = None
    sparsity: tuple[float, ...] | None = None

    def sizes(self, default: Sequence[int]) -> Sequence[int | None]:
        """What n is of the problems on each pattern."""
        return (self.n or default) if MEASURED[self.operation].has_n else (None,)


def uniform(m: int, k: int, sparsity: float, seed: int = 0) -> Topology:
    """Every position is stored with probability 1 - sparsity, independently."""
    rng, block = np.random.default_rng(seed), max(1, 2**24 // max(1, k))
    offsets, columns = np.zeros(m + 1, np.int64), []
    for start in range(0, m, block):  # bounds the memory taken
        stored = rng.random((min(block, m - start), k), dtype=np.float32) >= sparsity
        offsets[start + 1 : start + 1 + len(stored)] = stored.sum(1)
        columns.append(np.nonzero(stored)[1].astype(np.int32))
    return Topology(np.cumsum(offsets), np.concatenate(columns), (m, k))


def _most_variation(sparsity: float) -> float:
    """Of the lengths of rows that are full or empty."""
    return float(np.sqrt(sparsity / (1 - sparsity)))


def uneven(m: int, k: int, sparsity: float, variation: float, seed: int = 0) -> Topology:
    """Rows whose lengths have a coefficient of variation, in random order, at random columns.

    Lengths follow a gamma distribution, cut off at the width; its parameters are such that mean and
    variation are right behind the cut.

    Raises:
        ValueError: if the variation is next to that of full and empty rows, or above it.
    """
    if variation > 0.9 * _most_variation(sparsity):
        raise ValueError(
            f"uneven: rows of a matrix {sparsity:.1%} sparse can't vary by {variation}: at most by "
            f"{0.9 * _most_variation(sparsity):.2f}"
        )
    rng, mean = np.random.default_rng(seed), (1 - sparsity) * k
    lengths = np.full(m, mean)
    if variation > 0:
        drawn, wide, scale = rng.random(m), variation, 1.0
        for _ in range(50):
            lengths = scale * mean * scipy.stats.gamma.ppf(drawn, wide**-2, scale=wide**2)
            lengths = np.minimum(lengths, k)
            scale *= mean / lengths.mean()
            wide *= np.clip(variation * lengths.mean() / lengths.std(), 0.8, 1.25)
    counts = np.diff(np.round(np.concatenate([[0], np.cumsum(lengths)]))).astype(np.int64)
    columns = [np.sort(rng.choice(k, min(n, k), replace=False)) for n in counts]
    offsets = np.concatenate([[0], np.cumsum([len(c) for c in columns])])
    return Topology(offsets, np.concatenate(columns), (m, k))


def attention_mask(length: int, sparsity: float) -> Topology:
    """A band and random positions, causal: the mask of Gale et al. 2020, section VII-C."""
    scattered = masks.random(sparsity, length, band_width=BAND_WIDTH)
    return Topology.from_mask(
        (masks.band(BAND_WIDTH) | scattered) & masks.causal(), (length, length)
    )


def _sparsity(sparsity: float) -> str:
    """All digits that it has, so that no two are called alike."""
    return f"_s{float(sparsity)!r}"


def _named(
    suite: str,
    request: Request,
    shapes: Sequence[tuple[int, int]],
    n: Sequence[int],
    default: tuple[float, ...],
) -> Iterator[Problem]:
    for m, k in shapes:
        for sparsity in request.sparsity or default:
            pattern = functools.partial(uniform, m, k, sparsity)
            for size in request.sizes(n):
                name = f"{m}x{k}" + (f"_n{size}" if size is not None else "") + _sparsity(sparsity)
                yield Problem(suite, name, request.operation, pattern, size)


def _square(request: Request) -> Iterator[Problem]:
    yield from _named("square", request, [(1024, 1024)], (1, 4, 128), (0.7, 0.9))


CROSSOVER = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)


def _crossover(request: Request) -> Iterator[Problem]:
    size = 2048 if request.platform == "cpu" else 4096
    yield from _named("crossover", request, [(size, size)], (128,), CROSSOVER)


def _rnn(request: Request) -> Iterator[Problem]:
    """Weights of RNN, GRU and LSTM cells: 1, 3 and 4 times as many rows as the state has."""
    states = (1024, 2048) if request.platform == "cpu" else (1024, 2048, 4096, 8192)
    shapes = [(gates * state, state) for state in states for gates in (1, 3, 4)]
    yield from _named("rnn", request, shapes, (32, 128), (0.7, 0.8, 0.9))


def _llm(request: Request) -> Iterator[Problem]:
    """Weights of language models, for one sequence and for some at once."""
    shapes = [(512, 1024)]
    if request.platform != "cpu":
        shapes = [
            *((4096, 4096), (11008, 4096), (4096, 11008), (14336, 4096)),
            *((8192, 8192), (28672, 8192), (8192, 28672)),
        ]
    columns = (1, 8) if request.platform == "cpu" else (1, 2, 4, 8, 16, 32, 64, 128)
    yield from _named("llm", request, shapes, columns, (0.5, 0.6, 0.7, 0.8, 0.9, 0.95))


VARIATIONS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)


def _imbalance(request: Request) -> Iterator[Problem]:
    """Rows of ever more uneven lengths: Gale et al. 2020, figure 7, and a sparser matrix."""
    m, k = (2048, 512) if request.platform == "cpu" else (8192, 2048)
    for sparsity in (0.75, 0.9):
        possible = 0.9 * _most_variation(sparsity)
        for variation in (v for v in VARIATIONS if v <= possible):
            pattern = functools.partial(uneven, m, k, sparsity, variation)
            for n in request.sizes((128,)):
                size = f"_n{n}" if n is not None else ""
                name = f"{m}x{k}{size}{_sparsity(sparsity)}_v{variation!r}"
                yield Problem("imbalance", name, request.operation, pattern, n)


def _attention(request: Request) -> Iterator[Problem]:
    length = 1024 if request.platform == "cpu" else 12288
    heads = 8 if request.operation == "sparse_attention" else 1
    for sparsity in request.sparsity or (0.95,):
        pattern = functools.partial(attention_mask, length, sparsity)
        for n in request.sizes((128,)):
            name = f"{length}" + (f"_n{n}" if n is not None else "") + _sparsity(sparsity)
            yield Problem("attention", name, request.operation, pattern, n, heads)


def graph(nodes: int, edges: int, exponent: float, seed: int = 0) -> Topology:
    """Edges between nodes drawn by a power law of their ranks, each edge once; 0 is uniform."""
    rng = np.random.default_rng(seed)
    shares = np.arange(1, nodes + 1) ** -exponent
    cumulative = np.cumsum(shares / shares.sum())

    def drawn() -> np.ndarray:
        ranks = np.searchsorted(cumulative, rng.random(2 * edges))
        return rng.permutation(nodes)[np.minimum(ranks, nodes - 1)].astype(np.int64)

    keys = np.sort(drawn() * nodes + drawn())
    keys = keys[np.diff(keys, prepend=-1) > 0]  # np.unique takes ten times as long
    keys = np.sort(rng.choice(keys, min(edges, keys.size), replace=False))
    offsets = np.searchsorted(keys, nodes * np.arange(nodes + 1, dtype=np.int64))
    return Topology(offsets, keys % nodes, (nodes, nodes))


def star(nodes: int) -> Topology:
    """Edges between the first node and each other one, both ways, and of each to itself."""
    others = np.arange(1, nodes)
    columns = np.concatenate([np.arange(nodes), np.stack([0 * others, others], -1).ravel()])
    offsets = np.concatenate([[0], nodes + 2 * np.arange(nodes)])
    return Topology(offsets, columns, (nodes, nodes))


def _graphs(request: Request) -> Iterator[Problem]:
    """Nodes with degrees about alike, with a few that have thousands of edges, and with one hub."""
    on_cpu, attends = request.platform == "cpu", request.operation == "sparse_attention"
    nodes, edges, leaves = (1000, 20_000, 1000) if on_cpu else (100_000, 2_000_000, 1_000_000)
    patterns = {
        f"uniform_{nodes}": functools.partial(graph, nodes, edges, 0.0),
        f"powerlaw_{nodes}": functools.partial(graph, nodes, edges, 0.8),
    }
    if not on_cpu:  # as many nodes, edges and neighbours of the hub as ca-CondMat of SNAP has
        patterns["coauthors_23133"] = functools.partial(graph, 23_133, 186_936, 0.4)
    if not attends:
        patterns[f"star_{leaves}"] = functools.partial(star, leaves)
    if not (attends or on_cpu):
        patterns["powerlaw_1000000"] = functools.partial(graph, 1_000_000, 10_000_000, 0.8)
    sizes = (64,) if attends or on_cpu else (16, 32, 64, 128, 256)
    for name, pattern in patterns.items():
        for n in request.sizes(sizes):
            full = f"{name}_n{n}" if n is not None else name
            heads = 8 if attends else 1
            yield Problem("graphs", full, request.operation, pattern, n, heads)


def _files(request: Request) -> Iterator[Problem]:
    folder = files.data_folder()
    for path in files.matrix_files(folder):
        pattern = functools.partial(files.read_topology, path)
        for n in request.sizes((128,)):
            name = str(path.relative_to(folder)) + (f"_n{n}" if n is not None else "")
            yield Problem("files", name, request.operation, pattern, n)


def _of_network(
    request: Request, network: Network, positions: int
) -> Iterator[tuple[str, int | None]]:
    """What problems on a layer are called first, and their n: by batches, or as it was asked for.

    On a CPU for inference only.
    """
    if request.n is not None:
        yield from ((network.name, n) for n in request.n)
        return
    for batch in network.batches[: 1 if request.platform == "cpu" else None]:
        yield f"{network.name}_b{batch}", network.columns(batch, positions)


def _networks(request: Request) -> Iterator[Problem]:
    """Random patterns of the layers' sizes."""
    for network in NETWORKS:
        for m, k, positions in network.layers:
            for sparsity in request.sparsity or (0.7, 0.9):
                pattern = functools.partial(uniform, m, k, sparsity)
                for group, n in _of_network(request, network, positions):
                    name = f"{group}/{m}x{k}_n{n}{_sparsity(sparsity)}"
                    yield Problem("networks", name, request.operation, pattern, n)


def _collection(request: Request) -> Iterator[Problem]:
    """The layers themselves, as far as their files are there."""
    folder, found = files.data_folder(), False
    for path in files.matrix_files(folder):
        layer = layer_of(path.relative_to(folder))
        if layer is None:
            continue
        found, (network, below) = True, layer
        pattern = functools.partial(files.read_topology, path)
        for group, n in _of_network(request, network, network.positions(path.name)):
            yield Problem("dlmc", f"{group}/{below}_n{n}", request.operation, pattern, n)
    if not found:
        names = " or ".join(network.name for network in NETWORKS)
        raise ValueError(f"finds no matrix in a folder {names} below {folder}")


def _dispatch(request: Request) -> Iterator[Problem]:
    """A product too small to matter: what is left is what a call costs."""
    eye = functools.partial(Topology.from_mask, np.eye(8, dtype=bool))
    yield Problem("dispatch", "8x8_n8", request.operation, eye, 8)


@dataclass(frozen=True)
class Suite:
    """A suite: its problems, the operations it is for, and whether its sparsity can be chosen."""

    problems: Callable[[Request], Iterator[Problem]]
    operations: tuple[str, ...]
    about: str
    has_sparsity: bool = True


_PRODUCTS = ("spmm", "spmm_bias_relu", "spmm_pullback", "sddmm")
ON_MATRICES = (*_PRODUCTS, "sparse_softmax", "reduce_rows")
"""Operations on any matrix."""

SUITES: dict[str, Suite] = {
    "crossover": Suite(_crossover, ON_MATRICES, "one shape, time against sparsity"),
    "square": Suite(_square, ON_MATRICES, "1024 x 1024 by few and many columns"),
    "rnn": Suite(_rnn, ON_MATRICES, "weights of RNN, GRU and LSTM cells"),
    "llm": Suite(_llm, _PRODUCTS, "weights of language models, few columns"),
    "imbalance": Suite(
        _imbalance, ON_MATRICES, "rows of ever more uneven lengths", has_sparsity=False
    ),
    "attention": Suite(
        _attention,
        ("sddmm", "sparse_softmax", "sparse_attention"),
        f"a band of {BAND_WIDTH} and random positions, causal",
    ),
    "graphs": Suite(
        _graphs,
        ("sparse_attention", *ON_MATRICES),
        "random graphs, along whose edges nodes attend or add up",
        has_sparsity=False,
    ),
    "files": Suite(
        _files,
        ON_MATRICES,
        f"every {', '.join(files.READERS)} below ${files.FOLDER_VARIABLE}",
        has_sparsity=False,
    ),
    "networks": Suite(
        _networks, _PRODUCTS, "layers of a Transformer and of ResNet-50, random patterns"
    ),
    "dlmc": Suite(
        _collection,
        _PRODUCTS,
        f"the same layers, pruned: those of the collection below ${files.FOLDER_VARIABLE}",
        has_sparsity=False,
    ),
    "dispatch": Suite(
        _dispatch, ("dispatch",), "what a call costs, eager and jitted", has_sparsity=False
    ),
}


def suites_of(operation: str) -> list[str]:
    """The suites that have problems for an operation; the first is its default."""
    return [name for name, suite in SUITES.items() if operation in suite.operations]
