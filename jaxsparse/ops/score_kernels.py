"""Which kernels take functions of scores and dropout, and what their targets are told of them."""

from __future__ import annotations

from typing import Any

from jaxsparse.ops.score_printer import print_score
from jaxsparse.ops.scores import Scores


def lacking(scores: Scores, dtypes: tuple[str, ...], per_group: int | None) -> str:
    """Why no kernel takes these scores, where one takes the call but for them; empty if one may.

    Args:
        scores: of the call.
        dtypes: of its operands.
        per_group: heads of a group, where cotangents of operands are wanted.
    """
    if per_group is not None and not all(
        _is_summed_by_rows(scores.varied_axes(i), per_group) for i in scores.varied
    ):
        return "no kernel sums cotangents of scores by columns or distances, or over heads"
    try:
        attributes(scores, dtypes)
    except ValueError as error:
        return f"no kernel takes the function of scores: {error}"
    return ""


def _is_summed_by_rows(axes: str, per_group: int) -> bool:
    """Whether the kernel of rows has the cotangents of an operand: sums, or one of each score."""
    return axes == "nt" or ({"t", "s"} <= {*axes} and ("n" in axes or per_group == 1))


def attributes(scores: Scores, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """Those of targets; ValueError where a function can't be printed."""
    text, words = "", ""
    if scores.function is not None:
        text = print_score(scores.function, scores.axes, dtypes, scores.varied)
        words = " ".join(f"{a}:{d}" for a, d in zip(scores.axes, dtypes, strict=True))
    return {
        "score": text,
        "score_operands": words,
        "score_gradients": " ".join("ts" if "s" in scores.axes[i] else "t" for i in scores.varied),
        "score_offsets": scores.has_offsets,
        "dropout": scores.dropout,
    }
