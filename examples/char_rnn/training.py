"""Training by the recipe of Zhu et al. 2018: dense, pruned while it trains, and at last sparse."""

from __future__ import annotations

import argparse
import functools
import math
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from jaxsparse.pruning import (
    PruneState,
    SparsityTable,
    half_epochs,
    pack_masks,
    prune,
    unpack_masks,
)

from ..common.checkpoint import Checkpoints
from ..common.progress import Progress
from ..common.training import train
from .model import CharRNN, Hidden, gather, packed, scatter, to_sparse, topologies_of
from .text import SCORING_STREAMS, Corpus, Passage, Windows

WARM_UP = 0.05  # Of all steps.

# The recurrent and the input weights of all layers, as in the paper, or the recurrent ones alone.
PRUNED = {
    "all": ("*/cell/dense_i/kernel", "*/cell/dense_h/kernel"),
    "recurrent": ("*/cell/dense_h/kernel",),
}

T = TypeVar("T")


@functools.cache  # Models of equal sizes share what is compiled for an optimizer.
def make_optimizer(rate: float, steps: int) -> optax.GradientTransformation:
    """Adam on clipped gradients, with a warm-up and a cosine decay over all the steps."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, math.ceil(WARM_UP * steps), steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))


def schedule_options(args: argparse.Namespace) -> dict[str, int]:
    """What `half_epochs` takes of the options: when masks are made."""
    return {name: getattr(args, name) for name in ("steps_per_epoch", "epochs", "fixed_epochs")}


def sparse_from(args: argparse.Namespace) -> int:
    """The step after which a pruned model trains in sparse form."""
    return (args.epochs - args.sparse_epochs) * args.steps_per_epoch


@functools.cache
def make_pruner(
    inner: optax.GradientTransformation,
    density: float,
    *,
    pruned: str,
    structure: str,
    seed: int,
    **schedule: int,
) -> optax.GradientTransformation:
    """The optimizer of all but the sparse part of training."""
    when = half_epochs(density, **schedule)
    return prune(inner, when, PRUNED[pruned], structure=structure, seed=seed)


def parts_of(args: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """The first and the last step of the parts of the training of a pruned model."""
    schedule = half_epochs(1.0, **schedule_options(args))
    return {
        "masks change": (schedule.begin, schedule.end),
        "sparse form": (sparse_from(args), args.steps),
    }


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


class TextTask:
    """What the trainer trains: one model, through all parts of the recipe.

    The state has the dense form until the model becomes sparse. A checkpoint has it always, so
    there is one kind of them.
    """

    unit = "bits/char"

    def __init__(self, hidden: Hidden, corpus: Corpus, args: argparse.Namespace):
        self.model = CharRNN(
            len(corpus.vocabulary),
            cell=args.cell,
            hidden=hidden.units,
            layers=args.layers,
            embedding=args.embedding,
            dtype=jnp.dtype(args.dtype),
            seed=args.seed,
        )
        self.batch, self.length = args.batch, args.length
        self.tokens = args.batch * args.length  # In a step.
        self.train = Windows(corpus.train, args.batch, args.length)
        self.held_out = Passage(corpus.train[-1:], corpus.held_out)
        self.is_pruned = hidden.density < 1
        self.sparse_from = sparse_from(args)
        self.sparse_model: CharRNN | None = None
        self.table: SparsityTable | None = None  # What becoming sparse did to each layer.
        self.inner = make_optimizer(args.learning_rate, args.steps)
        self.optimizer = self.inner
        if self.is_pruned:
            self.optimizer = make_pruner(
                self.inner,
                hidden.density,
                pruned=args.pruned,
                structure=hidden.structure,
                seed=args.seed,
                **schedule_options(args),
            )
        self.graph, params, self.constants = nnx.split(self.model, nnx.Param, ...)
        self.scoring = (self.graph, self.constants)
        # A copy, since a step gives the memory of its state to the next one.
        params = jax.tree.map(jnp.copy, params)
        carries = self.model.initialize_carries(args.batch)
        self.state = placed(State(params, self.optimizer.init(params), carries))

    @property
    def dense_state(self) -> State:
        """The state in dense form."""
        if self.sparse_model is None:
            return self.state
        params, moments = scatter((self.state.params, self.state.optimizer), self.topologies)
        return State(params, self.pruning._replace(inner_state=moments), self.state.carries)

    @property
    def saved_state(self) -> State:
        """What a checkpoint has: the dense form, a bit for each element of a mask."""
        return pack_masks(self.dense_state)

    def restore(self, saved: State) -> None:
        """Goes on from a saved state."""
        self.state = unpack_masks(saved, self.state)

    def become_sparse(self) -> None:
        """Goes on with the sparse model, which has parameters for stored weights alone."""
        params, pruning, carries = self.state
        nnx.update(self.model, jax.tree.map(jnp.copy, params))
        self.sparse_model, self.table = to_sparse(self.model, self.batch, self.length)
        self.topologies = topologies_of(self.sparse_model)
        assert isinstance(pruning, PruneState)
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

    def step(self, index: int) -> Array:
        """Makes the step of an index from 0; returns the loss before, in bits per character."""
        if self.is_pruned and self.sparse_model is None and index >= self.sparse_from:
            self.become_sparse()
        self.state, loss = train_on_window(
            self.graph, self.optimizer, self.state, self.constants, self.train[index]
        )
        return loss

    def score(self) -> float:
        """The loss on all of the held-out text."""
        graph, constants = self.scoring
        carries = placed(self.model.initialize_carries(SCORING_STREAMS))
        losses = []
        for index in range(self.held_out.windows.count):
            window = self.held_out.windows[index]
            loss, carries = score_window(graph, self.state.params, constants, carries, window)
            losses.append(loss)
        return self.held_out.mean(jax.device_get(losses))

    def finish(self) -> None:
        """Brings the trained parameters into the models of both forms."""
        if self.is_pruned and self.sparse_model is None:
            self.become_sparse()
        nnx.update(self.model, jax.tree.map(jnp.copy, self.dense_state.params))
        if self.sparse_model is not None:
            nnx.update(self.sparse_model, jax.tree.map(jnp.copy, self.state.params))

    @property
    def layers(self) -> list[dict[str, Any]]:
        """What becoming sparse did to each layer, as JSON values."""
        return [] if self.table is None else self.table.rows


def train_model(
    hidden: Hidden,
    corpus: Corpus,
    checkpoints: Checkpoints,
    args: argparse.Namespace,
    title: str = "",
) -> tuple[TextTask, Progress, float | None]:
    """Trains a model; returns what was trained, what was done, and tokens per second."""
    task = TextTask(hidden, corpus, args)
    progress, speed = train(task, checkpoints, args, title)
    task.finish()
    if task.table is not None and not args.quiet:
        print(f"{hidden.name}, recurrent layers in sparse form:\n{task.table}\n")
    return task, progress, speed
