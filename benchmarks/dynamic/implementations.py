"""The table of implementations: what a net is run by, in which dtypes, and where."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from benchmarks.dynamic import levels, models, padded, programs, torch_programs
from benchmarks.dynamic.batches import Packer, Scripts, pack_levels
from benchmarks.dynamic.problems import COMPUTED, PASSES, TRAINED, Problem
from benchmarks.dynamic.programs import Built, Way
from benchmarks.peer_programs import needs_gpu, needs_torch
from benchmarks.recurrent.table import always
from jaxsparse import dynamic
from jaxsparse.dynamic.packing import pack_numpy

DTYPES = ("float32", "tf32", "bfloat16")
USUAL = {"cpu": ("float32",)}
"""By platform, the dtypes where none is asked for; on a GPU JAX's default, TF32, and 16 bits."""

KERNEL_DTYPES = ("float32", "bfloat16")
"""Kernels multiply float32 exactly."""


_UNROLLED = {"cpu": 0}
"""By platform, tiles of a step of the peers' loops; 0 is a loop that ends with the last tile in
use. A GPU waits for the start of kernels in every step of a loop, and for the host in one of
unknown length."""


@dataclass(frozen=True)
class Implementation:
    """One way to run a net.

    Args:
        name: what tables and the option ``--implementation`` call it.
        way: which of a few ways it is; tables show the fastest of each.
        build: (problem, dtype, pass) to a program.
        available: None, or why it is left out here.
        dtypes: what it computes in.
        passes: those it has.
        takes: whether it can run a problem, and is measured on it.
        sums_weights: when it adds up the gradient of the weights: a key of
            ``cases.GRADIENT_TOLERANCE``.
        usual: whether it is measured without being asked for.
        ablation: whether it is measured in the suite `ablation`, and there alone.
    """

    name: str
    way: str
    build: Callable[[Problem, str, str], Built]
    available: Callable[[], str | None] = always
    dtypes: tuple[str, ...] = DTYPES
    passes: tuple[str, ...] = PASSES
    takes: Callable[[Problem], bool] = lambda problem: True
    sums_weights: str = "at once"
    usual: bool = True
    ablation: bool = False


def _precision(dtype: str) -> Any:
    return jax.lax.Precision.DEFAULT if dtype == "tf32" else None


# ---- jaxsparse ----


def _our_loss(problem: Problem, dtype: str, **options: Any) -> Any:
    scan = functools.partial(dynamic.scan, precision=_precision(dtype), **options)
    return functools.partial(problem.net.loss, scan)


def _ours(
    name: str,
    way: str,
    width: int | None = None,
    groups: int = 1,
    packer: Packer = dynamic.pack,
    implementation: str = "xla",
    **row: Any,
) -> Implementation:
    loss = functools.partial(_our_loss, implementation=implementation)
    made = Way(Scripts(width, groups, packer), loss, explained=True)
    return Implementation(name, way, functools.partial(_build, made), **row)


def _build(way: Way, problem: Problem, dtype: str, passed: str) -> Built:
    return programs.build(problem, dtype, passed, way)


def _teams(problem: Problem, dtype: str, passed: str) -> Built:
    """By kernels, with a group of tiles for each team of blocks."""
    loss = functools.partial(_our_loss, implementation="cuda")
    return programs.build(problem, dtype, passed, Way(Scripts(teams=dtype), loss, explained=True))


def _one_launch(problem: Problem, dtype: str, passed: str) -> Built:
    """The same, value and gradient of all losses of rows in one launch."""

    def loss(problem: Problem, dtype: str) -> Any:
        asked = functools.partial(dynamic.loss, precision=_precision(dtype), implementation="cuda")
        return functools.partial(models.loss_of_words, asked, problem.net.cell)

    return programs.build(problem, dtype, passed, Way(Scripts(teams=dtype), loss, explained=True))


def _groups(count: int) -> str:
    return "1 group" if count == 1 else f"{count} groups"


def _variations() -> list[Implementation]:
    """In the suite `ablation`: tiles of several widths, groups, teams, and the packer in NumPy."""
    rows = [
        _ours(f"width-{width}", f"width {width}", width, ablation=True, passes=COMPUTED)
        for width in (4, 8, 16, 32, 64)
    ]
    rows += [
        _ours(f"groups-{groups}", _groups(groups), 8, groups, ablation=True) for groups in (1, 8)
    ]
    rows += [
        _ours(
            f"teams-{groups}",
            f"kernels, {_groups(groups)}",
            8,
            groups,
            implementation="cuda",
            ablation=True,
            available=needs_gpu,
            dtypes=KERNEL_DTYPES,
            passes=COMPUTED,
        )
        for groups in (1, 4, 8, 16)
    ]
    by_numpy = _ours(
        "groups-8-numpy",
        "8 groups, packed by NumPy",
        8,
        8,
        pack_numpy,
        ablation=True,
        passes=("pack",),
    )
    return [*rows, by_numpy]


# ---- peers ----


def _level_loss(problem: Problem, dtype: str, *, scan: Callable[..., Any], unroll: int) -> Any:
    return functools.partial(problem.net.loss, functools.partial(scan, unroll=unroll))


def _unroll(unroll: int | None) -> int:
    return _UNROLLED.get(jax.default_backend(), 8) if unroll is None else unroll


def _peer_way(
    scan: Callable[..., Any], width: int, unroll: int | None, packer: Packer = pack_levels
) -> Way:
    def loss(problem: Problem, dtype: str) -> Any:
        return _level_loss(problem, dtype, scan=scan, unroll=_unroll(unroll))

    return Way(Scripts(width, packer=packer), loss)


def _fits(width: int) -> Callable[[Problem], bool]:
    """Whether tiles are about as wide as levels: others take longer, and are not measured."""

    def takes(problem: Problem) -> bool:
        rows = problem.level_rows
        return rows / 4 <= width <= max(32, 4 * rows)

    return takes


def _levels(width: int, unroll: int | None = None) -> Implementation:
    name = f"levels-{width}" + ("" if unroll is None else f"-unroll{unroll}")
    way = _peer_way(levels.level_scan, width, unroll)
    build = functools.partial(_build, way)
    return Implementation(
        name,
        "levels by hand",
        build,
        passes=tuple(passed for passed in PASSES if passed != "end_to_end"),
        takes=_fits(width),
        usual=unroll is None,
    )


def _tiles(width: int) -> Implementation:
    """The loop of `_levels` over the tiles of `dynamic.pack`, which plain JAX has not."""
    way = _peer_way(levels.level_scan, width, None, dynamic.pack)
    return Implementation(
        f"tiles-{width}", "our tiles by hand", functools.partial(_build, way), takes=_fits(width)
    )


def _loop(width: int) -> Implementation:
    way = _peer_way(levels.looped_scan, width, None)
    return Implementation(
        f"loop-{width}",
        "loop, JAX's gradient",
        functools.partial(_build, way),
        passes=TRAINED,
        takes=_fits(width),
        sums_weights="step by step",
    )


def _padded_loss(problem: Problem, dtype: str, *, ours: bool) -> Any:
    scan = padded.lax_scan
    if ours:
        scan = functools.partial(padded.our_scan, precision=_precision(dtype))
    return functools.partial(padded.LOSSES[problem.model], scan)


def _padded(name: str, way: str, *, ours: bool) -> Implementation:
    made = Way(
        padded.Padded(),
        functools.partial(_padded_loss, ours=ours),
        lambda problem, batch: padded.word_ids(batch),
    )
    return Implementation(
        name,
        way,
        functools.partial(_build, made),
        passes=COMPUTED,
        takes=lambda problem: problem.model in padded.LOSSES,
        sums_weights="at once" if ours else "step by step",
    )


def _has_trees(problem: Problem) -> bool:
    return problem.net.cell in (models.TREE_LSTM, models.tanh_cell)


IMPLEMENTATIONS: dict[str, Implementation] = {
    i.name: i
    for i in (
        _ours("jaxsparse", "jaxsparse"),
        Implementation(
            "jaxsparse-teams", "jaxsparse, kernels", _teams, needs_gpu, dtypes=KERNEL_DTYPES
        ),
        Implementation(
            "jaxsparse-loss",
            "jaxsparse, one launch",
            _one_launch,
            needs_gpu,
            dtypes=KERNEL_DTYPES,
            passes=("gradient", "training", "end_to_end"),
            takes=_has_trees,
        ),
        *_variations(),
        *map(_levels, (8, 32, 64, 128, 256)),
        *map(_tiles, (8, 32, 64, 128, 256)),
        *(_levels(width, 1) for width in (8, 64)),
        *map(_loop, (8, 64)),
        _padded("padded", "padded, jax.lax.scan", ours=False),
        _padded("padded-jaxsparse", "padded, jaxsparse", ours=True),
        Implementation(
            "torch",
            "PyTorch by levels",
            torch_programs.build,
            available=needs_torch,
            passes=("forward", "gradient", "training"),
            takes=_has_trees,
        ),
    )
}
