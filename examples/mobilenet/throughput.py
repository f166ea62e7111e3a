"""Frames per second of models in the forms in which they can run, the paper's nine among them."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from jaxsparse import timing

from ..common.errors import UserError, one_line
from .model import MobileNet, for_inference, megabytes, prune_by_magnitude, with_dtype

REPEATS = 15  # Of each measurement, in turns; the median counts.


class Form(NamedTuple):
    """How a model computes."""

    sparse: bool
    dtype: str
    precision: str  # Of dense products.
    platforms: tuple[str, ...]


FORMS = {
    "dense float32": Form(False, "float32", "highest", ("cpu", "gpu")),
    "dense TF32": Form(False, "float32", "tensorfloat32", ("gpu",)),
    "dense bfloat16": Form(False, "bfloat16", "default", ("gpu",)),
    "sparse float32": Form(True, "float32", "highest", ("cpu", "gpu")),
    "sparse bfloat16": Form(True, "bfloat16", "default", ("gpu",)),
}


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
PAPER_RESOLUTION, PAPER_CLASSES, PAPER_SPARSITY = 224, 1000, 0.9

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


class Candidate(NamedTuple):
    """A model to measure."""

    name: str
    sparse: bool  # Whether it is pruned.
    model: Callable[[], MobileNet]  # With batch normalisation of its own.


class Ready(NamedTuple):
    """A form of a model, with its parameters in the host's memory."""

    model: str
    form: str
    graph: Any
    state: Any
    megabytes: float


Row = dict[str, Any]  # What is known of a form on a device, at a batch.

# The fields of a row. All numbers are floats but the batch; there are two quartiles.
FIELDS = {
    "model": str,
    "form": str,
    "batch": int,
    "platform": str,
    "frames_per_second": float,
    "quartiles": list,
    "by_the_clock": float,
    "megabytes": float,
}


def place_of(row: Row) -> tuple[str, str, str, int]:
    """What a row tells of: there is one row for each."""
    return row["model"], row["form"], row["platform"], row["batch"]


def check_row(row: Any) -> None:
    """Raises a TypeError for what is no row, as of a file that another version wrote."""
    if not isinstance(row, dict):
        raise TypeError(f"{row} in place of a row")
    wrong = [name for name, kind in FIELDS.items() if not isinstance(row.get(name), kind)]
    if not wrong and [type(x) for x in row["quartiles"]] != [float, float]:
        wrong = ["quartiles"]
    if wrong:
        texts = (f"{name} {row[name]!r}" if name in row else f"no {name}" for name in wrong)
        raise TypeError(f"a row with {', '.join(texts)}")


def devices() -> list[jax.Device]:
    """The device that JAX computes on, and a CPU beside a GPU."""
    first = jax.local_devices()[0]
    return [first] if first.platform == "cpu" else [first, jax.local_devices(backend="cpu")[0]]


def forms_on(device: jax.Device, *, sparse: bool) -> list[str]:
    """The forms of dense models, or of sparse ones, that are measured on a device."""
    platform = "cpu" if device.platform == "cpu" else "gpu"
    return [
        name for name, form in FORMS.items() if form.sparse == sparse and platform in form.platforms
    ]


def check_forms(forms: Sequence[str], kinds: Collection[bool]) -> None:
    """Raises a UserError if there is nothing to measure.

    Args:
        forms: which of `FORMS` are wanted.
        kinds: of the models, whether they are sparse.
    """
    available = [
        name
        for name in FORMS
        if any(name in forms_on(device, sparse=kind) for device in devices() for kind in kinds)
    ]
    if not set(available) & set(forms):
        texts = [", ".join(each) for each in (available, forms)]
        raise UserError(
            f"--forms: expected one that a model here can run ({texts[0]}), got {texts[1]}"
        )


def measure_groups(
    groups: Sequence[Sequence[Candidate]],
    image_shape: tuple[int, ...],
    batches: Sequence[int],
    *,
    forms: Sequence[str],
    seconds: float,
    measured: Sequence[Row],
    bar: Callable[[int], tqdm],
    record: Callable[[list[Row]], None],
) -> None:
    """Measures models in all their forms on all devices, those of a group in turns.

    Args:
        groups: models whose speeds are to be compared.
        image_shape: of one image, (H, W, C).
        batches: how many images there are at once.
        forms: which of `FORMS` are wanted.
        seconds: how long each measurement takes.
        measured: rows that were measured before; a group that has all of its own is left out, and
            one that lacks a row is measured as a whole.
        bar: makes the progress bar for so many rows.
        record: takes the rows of a group once they are measured.
    """
    done = {place_of(row) for row in measured}
    work = []
    for device in devices():
        for batch in batches:
            for group in groups:
                wanted = {
                    (each.name, form)
                    for each in group
                    for form in forms_on(device, sparse=each.sparse)
                    if form in forms
                }
                if {(*pair, device.platform, batch) for pair in wanted} - done:
                    work.append((device, batch, group, wanted))
    needed: dict[str, set[str]] = {}  # The forms of each model.
    for *_, wanted in work:
        for name, form in wanted:
            needed.setdefault(name, set()).add(form)
    prepared: dict[str, list[Ready]] = {}
    with bar(sum(len(wanted) for *_, wanted in work)) as shown:
        for device, batch, group, wanted in work:
            images = np.random.default_rng(0).standard_normal((batch, *image_shape), np.float32)
            for each in group:
                if each.name in needed and each.name not in prepared:
                    shown.set_postfix_str(f"preparing {each.name}")
                    prepared[each.name] = prepare(each, images, needed[each.name])
            ready = [x for each in group for x in prepared.get(each.name, []) if x[:2] in wanted]
            record(measure(ready, images, device, seconds, shown.set_postfix_str))
            shown.update(len(ready))


def prepare(candidate: Candidate, images: np.ndarray, forms: Collection[str]) -> list[Ready]:
    """A model in some forms."""
    # By a CPU, which compiles what each shape of weights takes soonest.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        folded = for_inference(candidate.model(), images, sparse=candidate.sparse)
        result = []
        for name, form in FORMS.items():
            if name in forms:
                model = with_dtype(folded, form.dtype)
                graph, state = nnx.split(model)
                held = jax.device_get(state)
                result.append(Ready(candidate.name, name, graph, held, megabytes(model)))
    return result


def measure(
    forms: Sequence[Ready],
    images: np.ndarray,
    device: jax.Device,
    seconds: float,
    note: Callable[[str], None],
) -> list[Row]:
    """Measures forms of models on one batch of images, in turns.

    Args:
        forms: of one model or of several.
        images: one batch, float32.
        device: where to run.
        seconds: how long each measurement takes.
        note: is told what is going on.

    Returns:
        For each a dict of `FIELDS`; those by the clock are frames/s, too.
    """
    programs = compile_all(forms, images, device, note)
    note("measuring " + ", ".join(dict.fromkeys(each.model for each in forms)))
    with jax.default_device(device):
        timings = timing.measure_in_turns(
            programs, seconds=seconds, repeats=REPEATS, on_device=device.platform != "cpu"
        )
    return [
        {
            "model": each.model,
            "form": each.form,
            "batch": len(images),
            "platform": device.platform,
            "frames_per_second": 1e6 * len(images) / found.us,
            "quartiles": [1e6 * len(images) / us for us in reversed(found.us_quartiles)],
            "by_the_clock": 1e6 * len(images) / found.wall_us,
            "megabytes": each.megabytes,
        }
        for each, found in zip(forms, timings, strict=True)
    ]


def compile_all(
    forms: Sequence[Ready],
    images: np.ndarray,
    device: jax.Device,
    note: Callable[[str], None],
) -> list[timing.Program]:
    """What is timed, compiled by threads: a GPU's compiler tries many kernels for each product."""
    operands = [
        jax.device_get((each.state, jnp.asarray(images, FORMS[each.form].dtype))) for each in forms
    ]
    pool = ThreadPoolExecutor(min(len(forms), os.cpu_count() or 1))
    try:
        note(f"compiling {len(forms)} forms")
        waiting = {}
        for i, (each, values) in enumerate(zip(forms, operands, strict=True)):
            lowered = function_of(each).lower(*jax.device_put(values, device))
            waiting[pool.submit(lowered.compile)] = i
        compiled: list[Any] = [None] * len(forms)
        for count, future in enumerate(as_completed(waiting), 1):
            i = waiting[future]
            compiled[i] = future.result()
            kind = forms[i].form.partition(" ")[2]
            note(f"compiled {count} of {len(forms)}: {forms[i].model} in {kind}")
    finally:
        pool.shutdown(cancel_futures=True)
    return [
        timing.Program(
            function=function,
            operands=lambda values=values: jax.device_put(values, device),
            bytes_read=sum(x.nbytes for x in jax.tree.leaves(values)),
            wait=jax.block_until_ready,
            results=lambda _: (),
        )
        for function, values in zip(compiled, operands, strict=True)
    ]


def function_of(ready: Ready) -> Any:
    """A call of the model, to be compiled."""
    graph, precision = ready.graph, FORMS[ready.form].precision

    @jax.jit
    def run(state: Any, batch: jax.Array) -> jax.Array:
        with jax.default_matmul_precision(precision):
            return nnx.merge(graph, state)(batch)

    return run


def published() -> dict[str, tuple[float, int]]:
    """The paper's accuracy and frames/s, by the name of the model."""
    return {
        f"{kind} {width:g}": (accuracy, frames)
        for kind, rows in PAPER.items()
        for width, accuracy, frames in rows
    }


def groups_of_paper(widths: Sequence[float] | None, resolution: int) -> list[list[Candidate]]:
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
    abstract = nnx.eval_shape(lambda: MobileNet(width, resolution, 3, PAPER_CLASSES, seed=0))
    graph, params, statistics = nnx.split(abstract, nnx.Param, ...)
    params = jax.tree.map(
        lambda x: jax.device_put(0.1 * rng.standard_normal(x.shape, np.float32)), params
    )
    statistics = jax.tree.map(lambda x: jax.device_put(np.ones(x.shape, x.dtype)), statistics)
    model: MobileNet = nnx.merge(graph, params, statistics)
    if sparse:
        prune_by_magnitude(model, PAPER_SPARSITY)
    return model


def ratios(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Frames/s of sparse models over those of dense ones of equal accuracy, as far as measured."""
    speed = {
        (row["platform"], row["batch"], row["model"], row["form"]): row["frames_per_second"]
        for row in rows
    }
    figures = published()
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
                paper = figures[sparse][1] / figures[dense][1]
                result.append(about | {"ratios": found, "paper": paper})
    return result


def check_new_run(path: Path) -> None:
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
        if unknown := {row["model"] for row in rows} - published().keys():
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
