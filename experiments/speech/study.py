"""The models of the study, and what comes out of one run of one of them."""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from flax import nnx

from examples.common.checkpoint import Checkpoints
from examples.common.errors import DivergedError
from examples.common.program import number
from examples.speech.data import Corpus
from examples.speech.options import training_options
from examples.speech.training import train

from ..runs import Run, open_runs


class Model(NamedTuple):
    """How deep a stack is, and over how many layers its skips lead."""

    layers: int
    skip: int = 0  # 0 for none.

    @property
    def name(self) -> str:
        """As --models has it."""
        return f"{self.layers}:{self.skip}" if self.skip else f"{self.layers}"


def parse_model(word: str) -> Model:
    """Reads ``layers`` or ``layers:skip``."""
    layers, *skip = word.split(":")
    try:
        model = Model(number(int, 1, 2**20)(layers), *map(number(int, 0, 2**20), skip))
    except (TypeError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"expected layers or layers:skip, got {word}") from None
    return model


@dataclass
class ModelRun:
    """A model with a seed, and its training."""

    model: Model
    args: argparse.Namespace  # Those of the example, for this run.
    run: Run


def open_models(program: str, corpus: Corpus, args: argparse.Namespace) -> list[ModelRun]:
    """The runs of all models, which may be resumed or started, as the options say."""
    runs = []
    for seed in args.seeds:  # All models have a result early, and then another one.
        for model in args.models:
            own = copy.copy(args)
            own.layers, own.skip, own.seed = *model, seed
            folder = args.output / model.name.replace(":", "_") / f"seed_{seed}"
            options = training_options(own, corpus)
            checkpoints = Checkpoints(program, folder / "checkpoints", options)
            name = f"{model.name} of seed {seed}"
            runs.append(ModelRun(model, own, Run(name, folder, options, checkpoints)))
    open_runs([each.run for each in runs], args.output, args.resume)
    return runs


def result_of(each: ModelRun, corpus: Corpus) -> dict[str, Any]:
    """Trains a model, unless that was done, and returns what is told of it."""
    if (result := each.run.saved_result()) is not None:
        return result
    result = {"name": each.model.name, **each.model._asdict(), "seed": each.args.seed}
    try:
        trainer, loop = train(corpus, each.run.checkpoints, each.args, title=each.run.name)
    except DivergedError:
        result |= {"diverged": True, "cer": 1.0, "wer": 1.0, "curve": []}
    else:
        last = loop.curve[-1]
        params = jax.tree.leaves(nnx.state(trainer.model, nnx.Param))
        result |= {
            "diverged": False,
            "cer": last["cer"],
            "wer": last["wer"],
            "curve": loop.curve,
            "parameters": sum(x.size for x in params),
            "utterances_per_second": loop.tokens_per_second,
        }
    each.run.save_result(result)
    return result
