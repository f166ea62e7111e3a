"""The state of training, in dense and in sparse form, and the compiled programs on it."""

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

from jaxsparse.pruning import PruneState, SparsityTable, pack_masks, unpack_masks

from .model import CharRNN
from .recipe import Entry, make_optimizer, make_pruner, schedule_options, sparse_from
from .sparse_form import gather, packed, scans_of, scatter, to_sparse, topologies_of
from .text import SCORING_STREAMS, Corpus, Passage, Windows

T = TypeVar("T")


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


class Trainer:
    """Trains one model through all parts of the recipe.

    The state has the dense form until the model becomes sparse. A checkpoint has it always, so
    there is one kind of them.
    """

    def __init__(self, entry: Entry, corpus: Corpus, args: argparse.Namespace):
        self.model = CharRNN(
            len(corpus.vocabulary),
            cell=args.cell,
            hidden=entry.hidden,
            layers=args.layers,
            embedding=args.embedding,
            dtype=jnp.dtype(args.dtype),
            seed=args.seed,
        )
        self.batch, self.length = args.batch, args.length
        self.train = Windows(corpus.train, args.batch, args.length)
        self.held_out = Passage(corpus.train[-1:], corpus.held_out)
        self.is_pruned = entry.density < 1
        self.sparse_from = sparse_from(args)
        self.sparse_model: CharRNN | None = None
        self.table: SparsityTable | None = None  # What becoming sparse did to each layer.
        self.scans: str | None = None  # How the sparse layers run on a GPU.
        self.inner = make_optimizer(args.learning_rate, args.steps)
        self.optimizer = self.inner
        if self.is_pruned:
            self.optimizer = make_pruner(
                self.inner,
                entry.density,
                pruned=args.pruned,
                structure=entry.structure,
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
        if jax.local_devices()[0].platform == "gpu":
            self.scans = scans_of(model, self.batch, self.length)
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
