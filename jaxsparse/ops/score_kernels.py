"""Which kernels take functions of scores and dropout, and what their targets are told of them."""

from __future__ import annotations

from typing import Any

from jaxsparse.ops.score_printer import print_score
from jaxsparse.ops.scores import Scores

SUMS_OVER_TILES_NEED = (
    "these need compute capability 9.0, heads of at most 128 numbers, a known batch, and at most "
    "2 GiB for the sums of tiles"
)
"""What kernels ask for where `sums_over_tiles` is true."""


def lacking(scores: Scores, dtypes: tuple[str, ...], per_group: int | None) -> str:
    """Why no kernel takes these scores, where one takes the call but for them; empty if one may.

    Args:
        scores: of the call.
        dtypes: of its operands.
        per_group: heads of a group, where cotangents of operands are wanted.
    """
    if per_group is not None and any(
        _sums(scores, i) == "ts" and "n" not in scores.axes[i] and per_group > 1
        for i in scores.varied
    ):
        return "no kernel sums cotangents of single scores over the heads of a group"
    try:
        attributes(scores, dtypes)
    except ValueError as error:
        return f"no kernel takes the function of scores: {error}"
    return ""


def sums_over_tiles(scores: Scores) -> bool:
    """Whether tiles of a mask have numbers of their own in a kernel's workspace."""
    return any(_sums(scores, i) in ("s", "d") for i in scores.varied)


def _sums(scores: Scores, i: int) -> str:
    """By what a kernel sums the cotangents of an operand; "ts": it has one of each score."""
    return scores.varied_axes(i).replace("b", "").replace("n", "")


def attributes(scores: Scores, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """Those of targets; ValueError where a function can't be printed."""
    text, words = "", ""
    if scores.function is not None:
        text = print_score(
            scores.function,
            scores.axes,
            dtypes,
            scores.varied,
            tuple(_sums(scores, i) for i in scores.varied),
        )
        words = " ".join(f"{a}:{d}" for a, d in zip(scores.axes, dtypes, strict=True))
    return {
        "score": text,
        "score_operands": words,
        "score_gradients": " ".join(_sums(scores, i) for i in scores.varied),
        "score_offsets": scores.has_offsets,
        "dropout": scores.dropout,
    }
