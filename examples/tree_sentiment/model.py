"""The model: word vectors at the leaves, a Tree-LSTM up to the root, a class at every row."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxsparse import dynamic
from jaxsparse.nn import TreeLSTM

INITIAL = 0.05  # Words begin uniformly between this and its negative.


class Classifier(nnx.Module):
    """Scores of the classes of every row of trees, from the vectors of their words.

    The table of vectors is no part of it: training updates only the rows of a batch's words.

    Args:
        features: numbers in the vector of a word.
        hidden: units of the Tree-LSTM.
        classes: how many labels there are.
        dropout: the rate at the states that the scores are made of.
        seed: of the parameters.
    """

    def __init__(self, features: int, hidden: int, classes: int, *, dropout: float, seed: int):
        rngs = nnx.Rngs(seed)
        self.tree = TreeLSTM(features, hidden, rngs=rngs)
        self.dropout = nnx.Dropout(dropout)
        self.head = nnx.Linear(hidden, classes, rngs=rngs)

    def __call__(self, script: dynamic.Script, vectors: Array, key: Array | None = None) -> Array:
        """Logits (rows, classes), leaves first.

        Args:
            script: a batch of trees.
            vectors: (words, features), those of `words_of`.
            key: for the dropout; None leaves it out.
        """
        leaves, inner = jnp.split(vectors, [script.form.leaves])
        states = self.tree(script, leaves, inner if script.form.inputs else None)
        if key is not None:
            states = self.dropout(states, rngs=nnx.Rngs(dropout=key))
        return self.head(states)


def words_of(script: dynamic.Script) -> Any:
    """The word of each leaf, then of each inner row that has one, as an operator; -1 is padding."""
    leaves = script.leaf("word")
    return jnp.append(leaves, script.input("operator")) if script.form.inputs else leaves


def initial_table(words: int, features: int, seed: int) -> np.ndarray:
    """Random vectors of words."""
    rng = np.random.default_rng(seed)
    return rng.uniform(-INITIAL, INITIAL, (words, features)).astype(np.float32)
