"""Frames per second of a model in the forms in which it can run."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxsparse import timing

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


def measure(
    models: dict[str, MobileNet],
    images: np.ndarray,
    sparse: dict[str, bool],
    device: jax.Device,
    seconds: float,
) -> list[dict[str, Any]]:
    """Measures models in all their forms on one batch of images, in turns.

    Args:
        models: by their names, with batch normalisation of its own.
        images: one batch, float32.
        sparse: which of them are pruned.
        device: where to run.
        seconds: how long each measurement takes.

    Returns:
        For each a dict of ``model``, ``form``, ``batch``, ``platform``, ``frames_per_second``, its
        quartiles, and ``megabytes``.
    """
    cases, programs = [], []
    for name, model in models.items():
        # By a CPU, which compiles what each shape of weights takes soonest.
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            folded = for_inference(model, images, sparse=sparse[name])
            forms = {
                form: with_dtype(folded, FORMS[form].dtype)
                for form in forms_on(device, sparse=sparse[name])
            }
        for form, ready in forms.items():
            programs.append(program(ready, images, FORMS[form], device))
            cases.append((name, form, megabytes(ready)))
    with jax.default_device(device):
        timings = timing.measure_in_turns(
            programs, seconds=seconds, repeats=REPEATS, on_device=device.platform != "cpu"
        )
    return [
        {
            "model": name,
            "form": form,
            "batch": len(images),
            "platform": device.platform,
            "frames_per_second": 1e6 * len(images) / found.us,
            "quartiles": [1e6 * len(images) / us for us in reversed(found.us_quartiles)],
            "megabytes": size,
        }
        for (name, form, size), found in zip(cases, timings, strict=True)
    ]


def program(model: MobileNet, images: np.ndarray, form: Form, device: jax.Device) -> timing.Program:
    """What is timed: a call of the model."""
    graph, state = nnx.split(model)
    operands = jax.device_get((state, jnp.asarray(images, form.dtype)))

    @jax.jit
    def run(state: Any, batch: jax.Array) -> jax.Array:
        with jax.default_matmul_precision(form.precision):
            return nnx.merge(graph, state)(batch)

    return timing.Program(
        function=run,
        operands=lambda: jax.device_put(operands, device),
        bytes_read=sum(x.nbytes for x in jax.tree.leaves(operands)),
        wait=jax.block_until_ready,
        results=lambda _: (),
    )


def random_model(width: float, resolution: int, classes: int) -> MobileNet:
    """A model with random weights, drawn by NumPy: JAX compiles its draws for each shape anew."""
    rng = np.random.default_rng(0)
    abstract = nnx.eval_shape(lambda: MobileNet(width, resolution, 3, classes, seed=0))
    graph, params, statistics = nnx.split(abstract, nnx.Param, ...)
    params = jax.tree.map(
        lambda x: jnp.asarray(0.1 * rng.standard_normal(x.shape, np.float32)), params
    )
    statistics = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), statistics)
    model: MobileNet = nnx.merge(graph, params, statistics)
    return model


def papers_models(
    resolution: int, classes: int
) -> tuple[dict[str, MobileNet], dict[str, bool], dict[str, tuple[float, int]]]:
    """The nine models of table IV with random weights, which are sparse, and the paper's figures.

    How fast they run does not depend on what their weights are.
    """
    models, sparse, figures = {}, {}, {}
    for kind, rows in PAPER.items():
        for width, accuracy, frames in rows:
            name = f"{kind} {width:g}"
            model = random_model(width, resolution, classes)
            if kind == "sparse":
                prune_by_magnitude(model, PAPER_SPARSITY)
            models[name], sparse[name] = model, kind == "sparse"
            figures[name] = accuracy, frames
    return models, sparse, figures
