"""One model of the study after the other: which are done, which go on, and their results."""

from __future__ import annotations

import argparse
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from examples.char_rnn.model import CharRNN, Hidden, packed, sample
from examples.char_rnn.options import training_options
from examples.char_rnn.training import TextTrainer, train
from examples.common.checkpoint import Checkpoints
from examples.common.text import Corpus
from jaxsparse import explain

from ..runs import Run, open_runs
from .throughput import measure

# What a result has besides that of training: another one is measured and drawn anew.
RESULT_OPTIONS = ("speed_batches", "prompt", "temperature", "sample_length")


def open_models(program: str, corpus: Corpus, args: argparse.Namespace) -> list[Run]:
    """The training of each model, which may be resumed or started, as the options say."""
    runs = []
    for hidden in args.hidden:
        folder = args.output / hidden.name.replace(":", "_")
        options = training_options(args, hidden, corpus)
        runs.append(
            Run(
                hidden.name,
                folder,
                options | {name: getattr(args, name) for name in RESULT_OPTIONS},
                Checkpoints(program, folder / "checkpoints", options),
            )
        )
    open_runs(runs, args.output, args.resume)
    return runs


def result_of(
    run: Run, hidden: Hidden, corpus: Corpus, prompt: np.ndarray, args: argparse.Namespace
) -> dict[str, Any]:
    """Trains a model, unless that was done, and returns what is told of it."""
    if (result := run.saved_result()) is not None:
        return result
    trainer, loop = train(hidden, corpus, run.checkpoints, args, title=hidden.name)
    scans = None
    if trainer.sparse_model is not None and jax.local_devices()[0].platform == "gpu":
        scans = scans_of(packed(trainer.sparse_model, trainer.batch), trainer.batch, trainer.length)
        if not args.quiet:
            print(f"{hidden.name}, recurrent scans of the forward pass:\n{scans}\n")
    model = trainer.sparse_model or trainer.model
    drawn = sample(
        model, prompt, length=args.sample_length, temperature=args.temperature, seed=args.seed
    )
    result = {
        "name": hidden.name,
        "hidden": hidden.units,
        "density": hidden.density,
        "structure": hidden.structure,
        "effective_units": effective_units(hidden),
        **count_weights(trainer.model),
        "bits_per_character": loop.curve[-1]["held_out"],
        "curve": loop.curve,
        "rows": rows_of(trainer),
        "layers": trainer.layers,
        "scans": scans,
        "tokens_per_second": {
            str(batch): measure(trainer, batch, corpus.train) for batch in args.speed_batches
        },
        "sample": corpus.decode(np.concatenate([prompt, drawn])),
    }
    run.save_result(result)
    return result


def effective_units(hidden: Hidden) -> float:
    """Units of a dense layer with as many recurrent weights."""
    return hidden.units * math.sqrt(hidden.density)


def scans_of(model: CharRNN, batch: int, length: int) -> str:
    """How the recurrent scans of a model's forward pass run on a GPU."""
    graph, state = nnx.split(model)

    def apply(state: Any, tokens: Array, carries: Any) -> Any:
        return nnx.merge(graph, state)(tokens, carries)

    tokens = jnp.zeros((batch, length), jnp.int32)
    explanation = explain(apply, state, tokens, model.initialize_carries(batch))
    return "\n".join(str(call) for call in explanation if call.operation == "recurrent_scan")


def count_weights(model: nnx.Module) -> dict[str, int]:
    """Weights that are not 0, of the recurrent products and of the whole model."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    counts = {path: int(np.count_nonzero(x.get_value())) for path, x in flat}
    recurrent = sum(count for path, count in counts.items() if path[-2:] == ("dense_h", "kernel"))
    return {
        "recurrent_nonzeros": recurrent,
        "nonzeros": sum(counts.values()),
        "parameters": sum(x.get_value().size for _, x in flat),
    }


def rows_of(trainer: TextTrainer) -> dict[str, dict[str, Any]]:
    """Of each sparse matrix its shape, its density, and the stored weights in a row."""
    if trainer.sparse_model is None:
        return {}
    described = {}
    for path, topology in trainer.topologies.items():
        lengths = np.diff(jax.device_get(topology.row_offsets))
        described["/".join(map(str, path))] = {
            "shape": list(topology.shape),
            "density": topology.nnz / np.prod(topology.shape),
            "shortest": int(lengths.min()),
            "longest": int(lengths.max()),
        }
    return described
