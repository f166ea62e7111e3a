"""Training: the step, which updates the vectors of its words alone, scores, and early stopping."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from jaxsparse import dynamic

from ..common.checkpoint import Checkpoints
from ..common.resumable import Loop, resumable
from .data import Dataset, root_labels
from .model import Classifier, words_of

SCORED = 64  # Trees at a time.
OPTIMIZERS = {
    "adagrad": functools.partial(optax.adagrad, initial_accumulator_value=0.0),
    "adam": optax.adam,
}


@functools.cache  # Models of equal sizes share what is compiled for an optimizer.
def make_optimizer(name: str, rate: float, l2: float) -> optax.GradientTransformation:
    """One of `OPTIMIZERS`, for the loss and half of ``l2`` times the squares of the parameters."""
    return optax.chain(optax.add_decayed_weights(l2), OPTIMIZERS[name](rate))


class State(NamedTuple):
    """What training changes."""

    steps: Array  # How many were made.
    params: nnx.State
    table: Array  # (words, features)
    optimizer: Any
    best: dict[str, Any]  # The parameters and the table of the best epoch.


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_on_batch(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    state: State,
    script: dynamic.Script,
    table_rate: float,
    seed: Array,
) -> tuple[State, Array]:
    """Makes a training step; the loss, by labelled row, is that before."""
    words, labels = words_of(script), script.row("label")
    key = jax.random.fold_in(jax.random.key(seed), state.steps)

    def loss(params: Any, vectors: Array) -> tuple[Array, Array]:
        logits = nnx.merge(graph, params)(script, vectors, key)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
        mean = script.mean(losses, "label")
        rows_of_a_tree = (labels >= 0).sum() / script.used_graphs
        return mean * rows_of_a_tree, mean  # All phrases of a sentence count.

    # By the vectors that are read: a gradient by the table would be as large as the table.
    differentiate = jax.value_and_grad(loss, (0, 1), has_aux=True)
    (_, mean), (grads, of_vectors) = differentiate(state.params, state.table[words])
    updates, moments = optimizer.update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    # A word that comes twice gets both updates; padding, which is word -1, has a gradient of 0.
    table = state.table.at[words].add(-table_rate * of_vectors)
    return State(state.steps + 1, params, table, moments, state.best), mean


@functools.partial(jax.jit, static_argnums=0)
def predict(graph: nnx.GraphDef, params: Any, table: Array, script: dynamic.Script) -> Array:
    """The logarithms of the probabilities of classes, (rows, classes)."""
    return jax.nn.log_softmax(nnx.merge(graph, params)(script, table[words_of(script)]))


class TreeTrainer:
    """A classifier of trees in training."""

    def __init__(self, dataset: Dataset, args: argparse.Namespace):
        self.dataset, self.args = dataset, args
        model = Classifier(
            dataset.vectors.shape[1],
            args.hidden,
            len(dataset.classes),
            dropout=args.dropout,
            seed=args.seed,
        )
        self.graph, params = nnx.split(model)
        self.optimizer = make_optimizer(args.optimizer, args.learning_rate, args.l2)
        self.state = State(
            jnp.zeros((), int),
            params,
            jnp.asarray(dataset.vectors),
            self.optimizer.init(params),
            best={},
        )
        self.keep_best()
        # Committed to the device, as restored states are: else a program is compiled for each.
        self.state = jax.device_put(self.state, jax.local_devices()[0])
        rows = args.batch * int((dataset.train.levels > 0).sum()) // len(dataset.train)
        self.layout = dynamic.Layout.choose(model.tree.dense_h.kernel[...], args.batch, rows)

    def keep_best(self) -> None:
        """Takes the parameters and the table as the best so far."""
        # Copies, since a step gives the memory of its state to the next one.
        best = {"params": self.state.params, "table": self.state.table}
        self.state = self.state._replace(best=jax.tree.map(jnp.copy, best))

    def scripts(
        self, graphs: dynamic.Graphs, batches: Sequence[np.ndarray], first: int = 0
    ) -> dynamic.Prefetch:
        """The scripts of batches from the first one on; one form has room for all of them.

        So there is one program. Packing all of them twice takes milliseconds.
        """
        forms = [dynamic.pack(graphs, ids, self.layout).form for ids in batches]
        form = dynamic.Form.covering(forms)
        return dynamic.prefetch(graphs, batches[first:], self.layout, form=form)

    def training_scripts(self, step: int) -> Iterator[dynamic.Script]:
        """The scripts of a step and of all after it: in an epoch every tree once."""
        graphs, steps = self.dataset.train, steps_of_epoch(self.dataset, self.args.batch)
        epoch, first = divmod(step, steps)
        for each in itertools.count(epoch):
            order = np.random.default_rng((self.args.seed, each)).permutation(len(graphs))
            with self.scripts(graphs, np.array_split(order, steps), first) as scripts:
                yield from scripts
            first = 0

    def step(self, script: dynamic.Script) -> Array:
        """Updates the state; returns the loss before, in nats per labelled row."""
        rate, seed = self.args.table_learning_rate, np.uint32(self.args.seed)
        self.state, loss = train_on_batch(
            self.graph, self.optimizer, self.state, script, rate, seed
        )
        return loss

    def score(self, graphs: dynamic.Graphs) -> dict[str, float]:
        """The loss, and shares of rows and roots whose likeliest class is right.

        Of sentiments also that of roots whose sign is right, where it is not neutral: whether
        positive classes together are likelier than negative ones.
        """
        batches = np.array_split(np.arange(len(graphs)), -(-len(graphs) // SCORED))
        of_rows, labels, of_roots = [], [], []
        for script in self.scripts(graphs, batches):
            results = predict(self.graph, self.state.params, self.state.table, script)
            found, script = jax.device_get((results, script))
            labelled = script.row("label") >= 0
            of_rows.append(found[labelled])
            labels.append(script.row("label")[labelled])
            of_roots.append(found[script.root_rows[: script.used_graphs]])
        rows, row_labels, roots = map(np.concatenate, (of_rows, labels, of_roots))
        expected = root_labels(graphs)
        scores = {
            "held_out": -rows[np.arange(len(rows)), row_labels].mean(dtype=float),
            "rows": (rows.argmax(1) == row_labels).mean(),
            "roots": (roots.argmax(1) == expected).mean(),
        }
        neutral = self.dataset.neutral
        if neutral is not None and (expected != neutral).any():
            negative, _, positive = np.split(np.exp(roots), [neutral, neutral + 1], axis=1)
            right = (positive.sum(1) > negative.sum(1)) == (expected > neutral)
            scores["binary"] = right[expected != neutral].mean()
        return {name: float(value) for name, value in scores.items()}

    def classify(self, tree: dynamic.Graphs) -> np.ndarray:
        """The likeliest class of each row of one tree."""
        numbered = tree.with_channel("number", "row", np.arange(len(tree.children)))
        script = dynamic.pack(numbered, [0], self.layout)
        found = predict(self.graph, self.state.params, self.state.table, script)
        number = script.row("number")
        classes = np.empty(len(tree.children), int)
        classes[number[script.row_mask]] = np.asarray(found).argmax(1)[script.row_mask]
        return classes

    def restore_best(self) -> None:
        """Brings back the parameters and the table of the best epoch."""
        self.state = self.state._replace(**jax.tree.map(jnp.copy, self.state.best))


def steps_of_epoch(dataset: Dataset, batch: int) -> int:
    """How many steps see each tree once."""
    return -(-len(dataset.train) // batch)


def best_epoch(curve: list[dict[str, Any]]) -> int:
    """The epoch whose roots were most often right; of equals the one with the least loss."""
    return max(range(len(curve)), key=lambda i: (curve[i]["roots"], -curve[i]["held_out"]))


def train(
    dataset: Dataset, checkpoints: Checkpoints, args: argparse.Namespace
) -> tuple[TreeTrainer, Loop]:
    """Trains until nothing gets better; returns the trainer at its best epoch, and the loop."""
    trainer = TreeTrainer(dataset, args)
    run = resumable(
        trainer.state, checkpoints, args, unit="nats/row", counted="trees", tokens=args.batch
    )
    with (
        run as (trainer.state, loop),
        contextlib.closing(trainer.training_scripts(loop.step)) as scripts,
    ):
        if loop.score_is_due:  # That of a new run, before its first step.
            loop.record_score(**trainer.score(dataset.dev))
        for _ in loop.steps():
            loop.record_loss(trainer.step(next(scripts)))
            if loop.score_is_due:  # After each epoch.
                loop.record_score(**trainer.score(dataset.dev))
                epochs_since = len(loop.curve) - 1 - best_epoch(loop.curve)
                if epochs_since == 0:
                    trainer.keep_best()
                elif epochs_since >= args.patience:
                    loop.end()
            if loop.saving_is_due:
                loop.save(trainer.state)
    trainer.restore_best()
    return trainer, loop
