"""The nine models of the paper's table IV, with random weights, and what is published of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from ..common.errors import UserError, one_line
from .model import MobileNet, prune_by_magnitude
from .throughput import Candidate, Row, check_row

# Table IV of the paper: width, top-1 accuracy on ImageNet in %, frames/s of a V100 at batch 1.
PAPER: dict[str, tuple[tuple[float, float, int], ...]] = {
    "dense": ((1.0, 72.7, 2518), (1.2, 73.8, 2046), (1.4, 74.8, 1729)),
    "sparse": (
        (1.3, 72.9, 2874),
        (1.4, 73.3, 2706),
        (1.5, 73.8, 2537),
        (1.6, 74.1, 2366),
        (1.7, 74.4, 2226),
        (1.8, 74.9, 2095),
    ),
}
RESOLUTION, CLASSES, SPARSITY = 224, 1000, 0.9

# The sparse model that is as accurate as each dense one; they are measured in turns.
EQUAL = {"dense 1": "sparse 1.3", "dense 1.2": "sparse 1.5", "dense 1.4": "sparse 1.8"}

# Which forms are compared, by what the ratio is called.
RATIOS = {
    "float32": ("sparse float32", "dense float32"),
    "float32 over TF32": ("sparse float32", "dense TF32"),
    "bfloat16": ("sparse bfloat16", "dense bfloat16"),
}

# What rows of one file must have in common.
SHARED = ("device", "versions")
SHARED_OPTIONS = ("resolution", "seconds")


def figures() -> dict[str, tuple[float, int]]:
    """The paper's accuracy and frames/s, by the name of the model."""
    return {
        f"{kind} {width:g}": (accuracy, frames)
        for kind, rows in PAPER.items()
        for width, accuracy, frames in rows
    }


def groups(widths: Sequence[float] | None, resolution: int) -> list[list[Candidate]]:
    """The models of some widths (None: all), those of equal accuracy together and first.

    Raises:
        UserError: for a width that the paper has no model of.
    """
    known = sorted({width for rows in PAPER.values() for width, *_ in rows})
    if unknown := [width for width in widths or [] if width not in known]:
        texts = [", ".join(f"{width:g}" for width in each) for each in (known, unknown)]
        raise UserError(
            f"--widths: expected widths of the paper's models, {texts[0]}, got {texts[1]}"
        )
    candidates = {
        f"{kind} {width:g}": Candidate(
            f"{kind} {width:g}",
            kind == "sparse",
            functools.partial(random_model, width, resolution, sparse=kind == "sparse"),
        )
        for kind, rows in PAPER.items()
        for width, *_ in rows
        if widths is None or width in widths
    }
    result = [
        [candidates.pop(name) for name in pair if name in candidates] for pair in EQUAL.items()
    ]
    return [group for group in result if group] + [[each] for each in candidates.values()]


def random_model(width: float, resolution: int, *, sparse: bool) -> MobileNet:
    """A model with random weights, drawn by NumPy: JAX compiles its draws for each shape anew."""
    rng = np.random.default_rng(0)
    abstract = nnx.eval_shape(lambda: MobileNet(width, resolution, 3, CLASSES, seed=0))
    graph, params, statistics = nnx.split(abstract, nnx.Param, ...)
    params = jax.tree.map(
        lambda x: jax.device_put(0.1 * rng.standard_normal(x.shape, np.float32)), params
    )
    statistics = jax.tree.map(lambda x: jax.device_put(np.ones(x.shape, x.dtype)), statistics)
    model: MobileNet = nnx.merge(graph, params, statistics)
    if sparse:
        prune_by_magnitude(model, SPARSITY)
    return model


def ratios(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Frames/s of sparse models over those of dense ones of equal accuracy, as far as measured."""
    speed = {
        (row["platform"], row["batch"], row["model"], row["form"]): row["frames_per_second"]
        for row in rows
    }
    published = figures()
    result = []
    for platform, batch in dict.fromkeys(place[:2] for place in speed):
        for dense, sparse in EQUAL.items():
            found = {
                name: speed[platform, batch, sparse, over] / speed[platform, batch, dense, under]
                for name, (over, under) in RATIOS.items()
                if (platform, batch, sparse, over) in speed
                and (platform, batch, dense, under) in speed
            }
            if found:
                about = {"sparse": sparse, "dense": dense, "platform": platform, "batch": batch}
                paper = published[sparse][1] / published[dense][1]
                result.append(about | {"ratios": found, "paper": paper})
    return result


def check_start(path: Path) -> None:
    """Raises a UserError if a new run would replace the rows of one that was stopped."""
    try:
        saved = json.loads(path.read_text())
        count = 0 if "ratios" in saved else len(saved["frames"])  # Ratios are written at the end.
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--output: expected figures in {path}, got: {one_line(error)}") from error
    if count:
        raise UserError(
            f"--output: expected no unfinished run, got {count} rows of one in {path}; --resume "
            f"continues it, or delete that file"
        )


def measured_before(path: Path, about: dict[str, Any]) -> list[Row]:
    """The rows in the file of a run that was stopped.

    Raises:
        UserError: if there is none, or it was measured otherwise or by another version.
    """
    try:
        saved = json.loads(path.read_text())
        rows: list[Row] = saved["frames"]
        for row in rows:
            check_row(row)
        if unknown := {row["model"] for row in rows} - figures().keys():
            raise ValueError(f"a row of {min(unknown)}, which is no model of the paper")
        before, now = (
            {name: x[name] for name in SHARED}
            | {name: x["options"][name] for name in SHARED_OPTIONS}
            for x in (saved, about)
        )
    except FileNotFoundError as error:
        raise UserError(f"--resume: expected {path}, got no such file") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--resume: expected figures in {path}, got: {one_line(error)}") from error
    if changed := [name for name in before if before[name] != now[name]]:
        texts = [", ".join(f"{name} {each[name]}" for name in changed) for each in (before, now)]
        raise UserError(f"--resume: expected {texts[0]} as in {path}, got {texts[1]}")
    return rows
