"""Frames per second of models in the forms in which they can run."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from jaxsparse import timing

from ..common.errors import UserError
from .model import MobileNet, for_inference, megabytes, with_dtype

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
