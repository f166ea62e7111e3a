"""Training by connectionist temporal classification (CTC), and error rates of what is decoded."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from ..common.checkpoint import Checkpoints
from ..common.resumable import Loop, resumable
from .data import BLANK, Batches, Corpus
from .model import Recogniser, decode

WARM_UP = 0.1  # Of all steps.


@functools.cache  # Models of equal sizes share what is compiled for an optimizer.
def make_optimizer(rate: float, steps: int) -> optax.GradientTransformation:
    """Adam on clipped gradients, with a warm-up and a cosine decay over all the steps."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, math.ceil(WARM_UP * steps), steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))


class State(NamedTuple):
    """What a training step changes."""

    params: nnx.State
    statistics: nnx.State  # The running averages of batch norms.
    optimizer: Any


def ctc_loss(logits: Array, steps: Array, batch: dict[str, Array]) -> Array:
    """The negative logarithm of the probability of the transcripts, by character of them."""
    behind = jnp.arange(logits.shape[1]) >= steps[:, None]
    no_label = jnp.arange(batch["labels"].shape[1]) >= batch["label_lengths"][:, None]
    losses = optax.ctc_loss(
        logits, behind.astype(float), batch["labels"], no_label.astype(float), blank_id=BLANK
    )
    is_utterance = batch["label_lengths"] > 0  # Batches of held-out ones may have empty rows.
    return jnp.where(is_utterance, losses, 0).sum() / batch["label_lengths"].sum()


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_on_batch(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    state: State,
    constants: Any,
    batch: dict[str, Array],
) -> tuple[State, Array]:
    """Makes a training step; the loss is that before."""

    def loss(params: Any) -> tuple[Array, Any]:
        # A copy, as batch norms write their averages into variables of this trace.
        model = nnx.merge(graph, params, state.statistics, constants, copy=True)
        value = ctc_loss(*model(batch["frames"], batch["lengths"]), batch)
        return value, nnx.state(model, nnx.BatchStat)

    (value, statistics), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    updates, moments = optimizer.update(grads, state.optimizer, state.params)
    return State(optax.apply_updates(state.params, updates), statistics, moments), value


@functools.partial(jax.jit, static_argnums=0)
def recognise(
    graph: nnx.GraphDef, params: Any, statistics: Any, constants: Any, batch: dict[str, Array]
) -> tuple[Array, Array, Array]:
    """The logarithms of probabilities, how many steps of each row count, and the loss."""
    logits, steps = nnx.merge(graph, params, statistics, constants)(
        batch["frames"], batch["lengths"]
    )
    return jax.nn.log_softmax(logits), steps, ctc_loss(logits, steps, batch)


def shapes(args: argparse.Namespace) -> dict[str, int]:
    """The options that decide the shapes of batches."""
    return {name: getattr(args, name) for name in ("batch", "stride", "buckets")}


class SpeechTrainer:
    """A recogniser in training, and what it makes of held-out utterances."""

    def __init__(self, corpus: Corpus, args: argparse.Namespace):
        self.corpus = corpus
        self.model = Recogniser(
            corpus.features,
            len(corpus.alphabet) + 1,
            cell=args.cell,
            hidden=args.hidden,
            layers=args.layers,
            skip=args.skip,
            norm=args.norm,
            direction=args.direction,
            lookahead=args.lookahead,
            stride=args.stride,
            recurrent_sparsity=args.recurrent_sparsity,
            dtype=jnp.dtype(args.dtype),
            seed=args.seed,
        )
        self.optimizer = make_optimizer(args.learning_rate, args.steps)
        self.model.train()  # Batch norms take the statistics of the batch,
        self.graph, params, statistics, self.constants = nnx.split(
            self.model, nnx.Param, nnx.BatchStat, ...
        )
        self.model.eval()  # or their running averages.
        self.scoring_graph = nnx.graphdef(self.model)
        # A copy, since a step gives the memory of its state to the next one.
        params, statistics = jax.tree.map(jnp.copy, (params, statistics))
        state = State(params, statistics, self.optimizer.init(params))
        # Committed to the device, as restored states are: else a program is compiled for each.
        self.state = jax.device_put(state, jax.local_devices()[0])
        self.held_out = Batches(corpus, corpus.held_out, **shapes(args))

    def step(self, batch: dict[str, np.ndarray]) -> Array:
        """Updates the state; returns the loss before, in nats per character."""
        self.state, loss = train_on_batch(
            self.graph, self.optimizer, self.state, self.constants, batch
        )
        return loss

    def recognise(self, batch: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, float]:
        """The logarithms of probabilities, the steps of each row, and the loss."""
        state = self.state
        results = recognise(
            self.scoring_graph, state.params, state.statistics, self.constants, batch
        )
        log_probabilities, steps, loss = jax.device_get(results)
        return log_probabilities, steps, float(loss)

    def transcripts(self) -> tuple[list[str], float]:
        """What is decoded of each held-out utterance, and the loss."""
        texts, total = [""] * len(self.corpus.held_out), 0.0
        for members, batch in self.held_out.all():
            log_probabilities, steps, loss = self.recognise(batch)
            total += loss * int(batch["label_lengths"].sum())
            best = log_probabilities.argmax(-1)
            for row, index in enumerate(members):
                texts[index] = decode(best[row, : steps[row]], self.corpus.alphabet)
        return texts, total / sum(map(len, self.corpus.held_out.texts))

    def hear(self, index: int) -> tuple[np.ndarray, str]:
        """The logarithms of probabilities for a held-out utterance, and what is decoded of it."""
        for members, batch in self.held_out.all():
            if index in members:
                log_probabilities, steps, _ = self.recognise(batch)
                row = members.index(index)
                mine = log_probabilities[row, : steps[row]]
                return mine, decode(mine.argmax(-1), self.corpus.alphabet)
        raise IndexError(index)

    def score(self) -> dict[str, float]:
        """The loss and the error rates on what is held out."""
        texts, loss = self.transcripts()
        return {"held_out": loss, **error_rates(self.corpus.held_out.texts, texts)}

    def update_model(self) -> None:
        """Brings the trained parameters into the model."""
        nnx.update(self.model, *jax.tree.map(jnp.copy, self.state[:2]))


def error_rates(references: list[str], texts: list[str]) -> dict[str, float]:
    """Edits that lead from texts to references, by characters and by words of the references.

    Edits are insertions, deletions and substitutions. A rate above 1 is possible: of long nonsense.
    """

    def rate(split: Any) -> float:
        pairs = [(split(a), split(b)) for a, b in zip(references, texts, strict=True)]
        return sum(edits(a, b) for a, b in pairs) / sum(len(a) for a, _ in pairs)

    return {"cer": rate(list), "wer": rate(str.split)}


def edits(one: Sequence[str], other: Sequence[str]) -> int:
    """The Levenshtein distance: how few edits lead from one sequence to the other."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            diagonal, row[j] = row[j], min(diagonal + (a != b), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def train(
    corpus: Corpus, checkpoints: Checkpoints, args: argparse.Namespace, title: str = ""
) -> tuple[SpeechTrainer, Loop]:
    """Trains a recogniser up to its last step; returns it, and the loop with the curve."""
    trainer = SpeechTrainer(corpus, args)
    batches = Batches(corpus, corpus.train, **shapes(args), noise=args.noise)
    run = resumable(
        trainer.state,
        checkpoints,
        args,
        unit="nats/char",
        counted="utterances",
        tokens=args.batch,
        title=title,
    )
    with run as (trainer.state, loop):
        if loop.score_is_due:  # That of a new run, before its first step.
            loop.record_score(**trainer.score())
        for step in loop.steps():
            loop.record_loss(trainer.step(batches.training(step, args.seed)))
            if loop.score_is_due:
                loop.record_score(**trainer.score())
            if loop.saving_is_due:
                loop.save(trainer.state)
    trainer.update_model()
    return trainer, loop
