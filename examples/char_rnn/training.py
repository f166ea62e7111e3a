"""Training by the recipe of Zhu et al. 2018: dense, pruned while it trains, and at last sparse."""

from __future__ import annotations

import argparse
import functools
import math
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from jaxsparse.pruning import SparsityTable, bits_to_masks, half_epochs, masks_to_bits, prune

from ..common.checkpoint import Checkpoints
from ..common.resumable import Loop, resumable
from ..common.text import Corpus
from .model import CharRNN, Hidden, gather, packed, scatter, to_sparse, topologies_of
from .options import PRUNED, schedule_options, sparse_from
from .windows import SCORING_STREAMS, Passage, Windows

WARM_UP = 0.05  # Of all steps.

T = TypeVar("T")


@functools.cache  # Models of equal sizes share what is compiled for an optimizer.
def make_optimizer(rate: float, steps: int) -> optax.GradientTransformation:
    """Adam on clipped gradients, with a warm-up and a cosine decay over all the steps."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, math.ceil(WARM_UP * steps), steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))


@functools.cache
def make_pruner(
    inner: optax.GradientTransformation, hidden: Hidden, pruned: str, seed: int, **schedule: int
) -> optax.GradientTransformation:
    """The optimizer of all but the sparse part of training."""
    when = half_epochs(hidden.density, **schedule)
    return prune(inner, when, PRUNED[pruned], structure=hidden.structure, seed=seed)


class State(NamedTuple):
    """What a training step changes."""

    params: nnx.State
    optimizer: Any
    carries: Any


def bits_of_characters(
    graph: nnx.GraphDef, params: Any, constants: Any, carries: Any, window: dict[str, Array]
) -> tuple[Array, Any]:
    """The loss on each target of a window, and the state after it."""
    carries = jax.tree.map(lambda x: jnp.where(window["fresh"], 0, x), carries)
    carries, logits = nnx.merge(graph, params, constants)(window["inputs"], carries)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, window["targets"])
    return losses / math.log(2), carries


# Both are compiled once for all models of the same sizes: what differs is their arrays.
score_window = jax.jit(bits_of_characters, static_argnums=0)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_on_window(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    state: State,
    constants: Any,
    window: dict[str, Array],
) -> tuple[State, Array]:
    """Makes a training step; the loss is that before."""

    def loss(params: Any) -> tuple[Array, Any]:
        bits, carries = bits_of_characters(graph, params, constants, state.carries, window)
        return bits.mean(), carries

    # Truncated: no gradient flows into the state from the window before.
    (value, carries), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    updates, moments = optimizer.update(grads, state.optimizer, state.params)
    return State(optax.apply_updates(state.params, updates), moments, carries), value


def placed(tree: T) -> T:
    """A tree committed to its device, as results and restored states are.

    A program is compiled once for committed and once for other arguments.
    """
    return jax.device_put(tree, jax.local_devices()[0])


class TextTrainer:
    """A model in training, in dense form and then, if it is pruned, in sparse form.

    A checkpoint has the dense form always, so there is one kind of them.
    """

    def __init__(self, hidden: Hidden, vocabulary: int, args: argparse.Namespace):
        self.model = CharRNN(
            vocabulary,
            cell=args.cell,
            hidden=hidden.units,
            layers=args.layers,
            embedding=args.embedding,
            dtype=jnp.dtype(args.dtype),
            seed=args.seed,
        )
        self.sparse_model: CharRNN | None = None
        self.table: SparsityTable | None = None  # What becoming sparse did to each layer.
        self.batch, self.length = args.batch, args.length
        self.inner = make_optimizer(args.learning_rate, args.steps)
        self.optimizer = self.inner
        if hidden.density < 1:
            schedule = schedule_options(args)
            self.optimizer = make_pruner(self.inner, hidden, args.pruned, args.seed, **schedule)
        self.graph, params, self.constants = nnx.split(self.model, nnx.Param, ...)
        self.scoring = (self.graph, self.constants)
        # A copy, since a step gives the memory of its state to the next one.
        params = jax.tree.map(jnp.copy, params)
        carries = self.model.initialize_carries(args.batch)
        self.state = placed(State(params, self.optimizer.init(params), carries))

    def step(self, window: dict[str, np.ndarray]) -> Array:
        """Updates the state; returns the loss before, in bits per character."""
        self.state, loss = train_on_window(
            self.graph, self.optimizer, self.state, self.constants, window
        )
        return loss

    def score(self, passage: Passage) -> float:
        """The loss on all of a text."""
        graph, constants = self.scoring
        carries = placed(self.model.initialize_carries(SCORING_STREAMS))
        losses = []
        for index in range(passage.windows.count):
            window = passage.windows[index]
            loss, carries = score_window(graph, self.state.params, constants, carries, window)
            losses.append(loss)
        return passage.mean(jax.device_get(losses))

    def become_sparse(self) -> None:
        """Goes on with the sparse model, which has parameters for stored weights alone."""
        params, pruning, carries = self.state
        nnx.update(self.model, jax.tree.map(jnp.copy, params))
        self.sparse_model, self.table = to_sparse(self.model, self.batch, self.length)
        self.topologies = topologies_of(self.sparse_model)
        self.pruning = pruning._replace(inner_state=None)
        params, moments = gather((params, pruning.inner_state), self.topologies)
        model = packed(self.sparse_model, self.batch)
        self.graph, _, self.constants = nnx.split(model, nnx.Param, ...)
        # The layout for a GPU is made for one batch size.
        model = packed(self.sparse_model, SCORING_STREAMS)
        graph, _, constants = nnx.split(model, nnx.Param, ...)
        self.scoring = (graph, constants)
        self.optimizer = self.inner
        self.state = placed(State(params, moments, carries))

    @property
    def dense_state(self) -> State:
        """The state in dense form."""
        if self.sparse_model is None:
            return self.state
        params, moments = scatter((self.state.params, self.state.optimizer), self.topologies)
        return State(params, self.pruning._replace(inner_state=moments), self.state.carries)

    def update_models(self) -> None:
        """Brings the trained parameters into the models of both forms."""
        nnx.update(self.model, jax.tree.map(jnp.copy, self.dense_state.params))
        if self.sparse_model is not None:
            nnx.update(self.sparse_model, jax.tree.map(jnp.copy, self.state.params))

    @property
    def layers(self) -> list[dict[str, Any]]:
        """What becoming sparse did to each layer, as JSON values."""
        return [] if self.table is None else self.table.rows


def train(
    hidden: Hidden,
    corpus: Corpus,
    checkpoints: Checkpoints,
    args: argparse.Namespace,
    title: str = "",
) -> tuple[TextTrainer, Loop]:
    """Trains a model up to its last step; returns it, and the loop with its learning curve."""
    trainer = TextTrainer(hidden, len(corpus.vocabulary), args)
    windows = Windows(corpus.train, args.batch, args.length)
    held_out = Passage(corpus.train[-1:], corpus.held_out)
    # What is saved has a bit for each element of a mask.
    run = resumable(
        masks_to_bits(trainer.state),
        checkpoints,
        args,
        unit="bits/char",
        tokens=args.batch * args.length,
        title=title,
    )
    with run as (saved, loop):
        trainer.state = bits_to_masks(saved, trainer.state)
        if loop.score_is_due:  # That of a new run, before its first step.
            loop.record_score(trainer.score(held_out))
        for step in loop.steps():
            if hidden.density < 1 and step >= sparse_from(args) and trainer.sparse_model is None:
                trainer.become_sparse()
            loop.record_loss(trainer.step(windows[step]))
            if loop.score_is_due:
                loop.record_score(trainer.score(held_out))
            if loop.saving_is_due:
                loop.save(masks_to_bits(trainer.dense_state))
    if hidden.density < 1 and trainer.sparse_model is None:  # Without a sparse part, or resumed.
        trainer.become_sparse()
    trainer.update_models()
    if trainer.table is not None and not args.quiet:
        print(f"{hidden.name}, recurrent layers in sparse form:\n{trainer.table}\n")
    return trainer, loop
