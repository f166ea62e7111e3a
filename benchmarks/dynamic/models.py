"""The nets: parameters, and a loss as a function of what scans graphs.

A loss takes a scan like `jaxsparse.dynamic.scan`, so that all implementations, the reference in
float64 too, compute the same. Products before and after the scan are part of it. The table of
embeddings is apart: a loss takes the rows of a batch's words, so that a gradient has as many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.dynamic import circuits, datasets
from jaxsparse import dynamic, recurrent

Params = dict[str, Any]
Scan = Callable[..., Any]
"""(cell, weights, carry, script, xs, bias) to the carries of computed rows."""


class Sizes(NamedTuple):
    """Units, features of embeddings, and words that there are."""

    hidden: int
    embedding: int
    vocabulary: int


@dynamic.cell(children=2)
def tanh_cell(x: Any, r: Any, children: Any) -> Any:
    """One product; the carry is the state."""
    return jnp.tanh(r[0])


@dynamic.cell(children=2)
def gated_cell(x: Any, r: Any, children: Any) -> Any:
    """A gate between the children's mean and a new state."""
    keep, new = (a + b for a, b in zip(x, r, strict=True))
    keep = jax.nn.sigmoid(keep)
    return keep * (children[0] + children[1]) / 2 + (1 - keep) * jnp.tanh(new)


TREE_LSTM = dynamic.tree_lstm(2)
LSTM = dynamic.chain(recurrent.LSTM)


class Batch(NamedTuple):
    """What a step takes: scripts, or arrays of another form that an implementation makes."""

    script: Any
    letters: Any = None  # the script of rare words


def dense(x: Any, weights: Any, bias: Any = None) -> Any:
    """A product with sums in float32, or in float64."""
    wide = jnp.promote_types(weights.dtype, jnp.float32)
    y = jnp.dot(x.astype(weights.dtype), weights, preferred_element_type=wide)
    return y if bias is None else y + bias.astype(wide)


@jax.custom_vjp
def _of_one_cotangent(x: Any) -> Any:
    """An array whose cotangent XLA makes once, as one array.

    Of several gates it would make that of each, and put them together in all products that take it.
    """
    return x


_of_one_cotangent.defvjp(lambda x: (x, None), lambda _, ct: (jax.lax.optimization_barrier(ct),))


def rounded_dense(x: Any, weights: Any, bias: Any = None) -> Any:
    """The same in the dtype of the weights, as layers in 16 bits have it.

    Its cotangents are as narrow, so that the products of gradients run on tensor cores, too.
    """
    dtype = weights.dtype
    y = jnp.dot(x.astype(dtype), weights)
    if bias is not None:
        y = (y + bias.astype(jnp.promote_types(dtype, jnp.float32))).astype(dtype)
    return _of_one_cotangent(y)


def losses(logits: Any, labels: Any) -> Any:
    """Cross entropy of each row; of a label of -1 whatever."""
    # Chosen by a mask, whose gradient is no scatter.
    ones = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(ones * logits, axis=-1)


@dataclass(frozen=True)
class Model:
    """A net.

    Args:
        cell: of computed rows.
        products: P, of the cell.
        shapes: of parameters by name, but for ``table``; their first size is what is summed over.
        graphs: makes the set of graphs, and says whence it is; of sentences in two directions, each
            of them is two graphs, half of the set apart.
        loss: (scan, parameters, embedded words, batch) to the loss and logits to compare.
        words: what of a script is embedded: a place and a channel; None if nothing is.
        directions: graphs of an example.
        rows: what logits have a row for: "graph" or "input".
    """

    cell: dynamic.Cell
    products: int
    shapes: Callable[[Sizes], dict[str, tuple[int, ...]]]
    graphs: Callable[[], tuple[str, dynamic.Graphs]]
    loss: Callable[[Scan, Params, Any, Batch], tuple[Any, Any]]
    words: tuple[str, str] | None = ("leaf", "word")
    directions: int = 1
    rows: str = "graph"

    @property
    def slots(self) -> int:
        """K."""
        return self.cell.children

    def word_ids(self, batch: Batch) -> Any:
        """Words of a batch; -1 is padding."""
        if self.words is None:
            return None
        place, channel = self.words
        return getattr(batch.script, place)(channel)

    def parameters(self, sizes: Sizes, seed: int = 0) -> dict[str, np.ndarray]:
        """Float32 arrays that bfloat16 holds exactly, of about the size that keeps states at 1."""
        rng = np.random.default_rng(seed)

        def draw(shape: tuple[int, ...], scale: float) -> np.ndarray:
            x = np.float32(scale) * rng.standard_normal(shape, dtype=np.float32)
            return x.astype(jnp.bfloat16).astype(np.float32)

        made = {
            name: draw(shape, 0.1 if len(shape) == 1 else shape[0] ** -0.5)
            for name, shape in self.shapes(sizes).items()
        }
        if self.words is not None:
            made["table"] = draw((sizes.vocabulary, sizes.embedding), 1.0)
        return made


def _scanned(scan: Scan, cell: Any, params: Params, carry: Any, script: Any, xs: Any = None) -> Any:
    return scan(cell, params["weights"], carry, script, xs, bias=params["bias"])


# ---- Trees, and other graphs whose leaves are words ----


def _leaves(cell: dynamic.Cell, params: Params, rows: Any) -> Any:
    """Carries of leaves, and of them the states, in the dtype of the weights."""
    dtype = params["weights"].dtype
    made = rounded_dense(rows, params["leaf"], params["leaf_bias"])
    made = made.astype(jnp.promote_types(dtype, jnp.float32))
    if cell is tanh_cell:
        return jnp.tanh(made).astype(dtype)
    i, o, u = jnp.split(made, 3, axis=-1)
    c = jax.nn.sigmoid(i) * jnp.tanh(u)
    return c, (jax.nn.sigmoid(o) * jnp.tanh(c)).astype(dtype)


def _of_words(cell: dynamic.Cell, labelled: str) -> Callable[..., tuple[Any, Any]]:
    """The loss of graphs whose leaves are words, by the labels of rows or of graphs."""

    def loss(scan: Scan, params: Params, rows: Any, batch: Batch) -> tuple[Any, Any]:
        script = batch.script
        carry = _leaves(cell, params, rows)
        states = [
            jax.tree.leaves(x)[-1] for x in (carry, _scanned(scan, cell, params, carry, script))
        ]
        roots = script.roots(*(x.astype(states[0].dtype) for x in states))
        of_roots = dense(roots, params["head"], params["head_bias"])
        if labelled == "graph":
            labels = script.graph("label")
            return script.mean(losses(of_roots, labels), "label"), of_roots
        logits = dense(jnp.concatenate(states), params["head"], params["head_bias"])
        return script.mean(losses(logits, script.row("label")), "label"), of_roots

    return loss


def loss_of_words(
    loss: Callable[..., Any], cell: dynamic.Cell, params: Params, rows: Any, batch: Batch
) -> tuple[Any, None]:
    """The same by a loss like `jaxsparse.dynamic.loss`, which gives no logits."""
    head = dynamic.SoftmaxHead(params["head"], params["head_bias"])
    carry, script = _leaves(cell, params, rows), batch.script
    value = loss(cell, params["weights"], carry, script, bias=params["bias"], head=head)
    return value, None


def _word_shapes(cell: dynamic.Cell, products: int) -> Callable[[Sizes], dict[str, Any]]:
    of_leaf = 1 if cell is tanh_cell else 3

    def shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
        h, e = sizes.hidden, sizes.embedding
        return {
            "leaf": (e, of_leaf * h),
            "leaf_bias": (of_leaf * h,),
            "weights": (2 * h, products * h),
            "bias": (products * h,),
            "head": (h, datasets.LABELS),
            "head_bias": (datasets.LABELS,),
        }

    return shapes


def _graphs_of_trees() -> tuple[str, dynamic.Graphs]:
    trees = datasets.trees()
    return trees.source, trees.graphs


def _graphs_of_triangles() -> tuple[str, dynamic.Graphs]:
    source = datasets.trees().source
    return source, datasets.triangles(source)


def _of_leaves(cell: dynamic.Cell, products: int, labelled: str) -> Model:
    graphs = _graphs_of_trees if labelled == "row" else _graphs_of_triangles
    return Model(cell, products, _word_shapes(cell, products), graphs, _of_words(cell, labelled))


# ---- Sequences ----


def zero_carry(count: int, h: int, dtype: Any) -> tuple[Any, Any]:
    """Of an LSTM, before sequences."""
    wide = jnp.promote_types(dtype, jnp.float32)
    return jnp.zeros((count, h), wide), jnp.zeros((count, h), dtype)


def _first(params: Params, script: Any) -> tuple[Any, Any]:
    weights = jax.tree.leaves(params["weights"])[0]
    return zero_carry(script.form.leaves, weights.shape[0], weights.dtype)


def gates(params: Params, x: Any, name: str = "input") -> Any:
    """Pre-activations of a recurrent layer, in the dtype of its weights."""
    return rounded_dense(x, params[name])


def _last_state(scan: Scan, params: Params, rows: Any, batch: Batch) -> tuple[Any, Any]:
    """A label for each sequence, by its last state."""
    script, carry = batch.script, _first(params, batch.script)
    _, h = _scanned(scan, LSTM, params, carry, script, gates(params, rows))
    logits = dense(script.roots(carry[1], h), params["head"], params["head_bias"])
    return script.mean(losses(logits, script.graph("label")), "label"), logits


def _last_state_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    h, e = sizes.hidden, sizes.embedding
    return {
        "input": (e, 4 * h),
        "weights": (h, 4 * h),
        "bias": (4 * h,),
        "head": (h, datasets.LABELS),
        "head_bias": (datasets.LABELS,),
    }


def _both_directions(
    scan: Scan, params: Params, script: Any, first: Any, second: Any, prefix: str = ""
) -> Any:
    """Carries of sequences of kind 0 and, reversed, of kind 1; xs of each direction given."""
    names = [f"{prefix}{name}" for name in ("weights", "bias")]
    weights, bias = ((params[n], params[f"{n}_reverse"]) for n in names)
    half = script.used_inputs // 2
    xs = jnp.where(jnp.arange(script.form.inputs)[:, None] < half, first, second)
    own = {"weights": weights, "bias": bias}
    return _scanned(scan, (LSTM, LSTM), own, _first(own, script), script, xs)


def _tags(scan: Scan, params: Params, rows: Any, batch: Batch) -> tuple[Any, Any]:
    """A tag for each word, by the states of both directions."""
    script = batch.script
    first, second = (gates(params, rows, name) for name in ("input", "input_reverse"))
    _, h = _both_directions(scan, params, script, first, second)
    h = script.in_input_order(h)
    behind = jnp.arange(script.form.inputs) + script.used_inputs // 2
    both = jnp.concatenate([h, h.at[behind].get(mode="fill", fill_value=0)], axis=-1)
    logits = dense(both, params["head"], params["head_bias"])
    return script.mean(losses(logits, script.input("tag")), "tag"), logits


def _spelled_tags(scan: Scan, params: Params, rows: Any, batch: Batch) -> tuple[Any, Any]:
    """The same; rare words are embedded by the last states of their letters' scans."""
    script, letters = batch.script, batch.letters
    of_letters = params["letters"].at[letters.input("letter")].get(mode="fill", fill_value=0)
    first, second = (
        gates(params, of_letters, name) for name in ("letter_input", "letter_input_reverse")
    )
    carry = _both_directions(scan, params, letters, first, second, "letter_")
    h = carry[1]
    ends = letters.roots(jnp.zeros((letters.form.leaves, h.shape[1]), h.dtype), h)
    rare = script.input("rare") == 1
    half = letters.used_graphs // 2
    # Rare words come in the order of the letters' graphs, in each direction.
    place = (jnp.cumsum(rare) - 1) % jnp.maximum(half, 1)
    spelled = jnp.concatenate([ends[place], ends[place + half]], axis=-1)
    spelled = rounded_dense(spelled, params["spelled"]).astype(rows.dtype)
    return _tags(scan, params, jnp.where(rare[:, None], spelled, rows), batch)


def _tag_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    h, e = sizes.hidden, sizes.embedding
    own = {"input": (e, 4 * h), "weights": (h, 4 * h), "bias": (4 * h,)}
    return {
        **own,
        **{f"{name}_reverse": shape for name, shape in own.items()},
        "head": (2 * h, datasets.TAGS),
        "head_bias": (datasets.TAGS,),
    }


def letter_units(hidden: int) -> int:
    """Units of the scan over letters."""
    return hidden // 4


def _spelled_tag_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    h = e = letter_units(sizes.hidden)
    own = {"letter_input": (e, 4 * h), "letter_weights": (h, 4 * h), "letter_bias": (4 * h,)}
    return {
        **_tag_shapes(sizes),
        **own,
        **{f"{name}_reverse": shape for name, shape in own.items()},
        "letters": (datasets.LETTERS, e),
        "spelled": (2 * h, sizes.embedding),
    }


def _graphs_of_sentences() -> tuple[str, dynamic.Graphs]:
    source = datasets.sentences().source
    return source, datasets.two_directions(source, "words")


def _graphs_of_sequences() -> tuple[str, dynamic.Graphs]:
    source = datasets.sentences().source
    return source, datasets.sequences(source)


# ---- Circuits ----


def _gate_outputs(scan: Scan, params: Params, rows: Any, batch: Batch) -> tuple[Any, Any]:
    """How likely each gate gives 1."""
    script, weights = batch.script, params["weights"]
    form, dtype = script.form, weights.dtype
    first = jnp.broadcast_to(jnp.tanh(params["leaf"]), (form.leaves, weights.shape[1] // 2))
    kinds = jax.nn.one_hot(script.input("inverted"), 4, dtype=dtype)
    h = _scanned(scan, gated_cell, params, first, script, gates(params, kinds, "gate"))
    logits = dense(script.in_input_order(h), params["head"], params["head_bias"])
    error = jax.nn.sigmoid(logits[:, 0]) - script.input("probability")
    return script.mean(error**2, "probability"), logits


def _circuit_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    h = sizes.hidden
    return {
        "leaf": (h,),
        "gate": (4, 2 * h),
        "weights": (2 * h, 2 * h),
        "bias": (2 * h,),
        "head": (h, 1),
        "head_bias": (1,),
    }


def circuit_model(kind: str, bits: int) -> Model:
    """A net over one circuit."""
    return Model(
        gated_cell,
        2,
        _circuit_shapes,
        lambda: ("generated", circuits.circuit(kind, bits)),
        _gate_outputs,
        words=None,
        rows="input",
    )


MODELS: dict[str, Model] = {
    "tree_lstm": _of_leaves(TREE_LSTM, 5, "row"),
    "rvnn": _of_leaves(tanh_cell, 1, "row"),
    "td_rnn": _of_leaves(tanh_cell, 1, "graph"),
    "td_lstm": _of_leaves(TREE_LSTM, 5, "graph"),
    "lstm": Model(
        LSTM, 4, _last_state_shapes, _graphs_of_sequences, _last_state, ("input", "word")
    ),
    "bilstm": Model(
        LSTM, 4, _tag_shapes, _graphs_of_sentences, _tags, ("input", "word"), 2, "input"
    ),
    "bilstm_letters": Model(
        LSTM, 4, _spelled_tag_shapes, _graphs_of_sentences, _spelled_tags, ("input", "word"), 2,
        "input",
    ),
}  # fmt: skip


def example_ids(model: Model, graphs: dynamic.Graphs, chosen: Sequence[int] | np.ndarray) -> Any:
    """The graphs of examples: all in their first direction, then all in their second."""
    ids, half = np.asarray(chosen, np.int64), len(graphs) // model.directions
    return np.concatenate([ids + half * i for i in range(model.directions)])
