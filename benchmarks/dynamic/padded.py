"""Sequences in padded arrays, all as long as the longest: what packed ones stand beside.

Entries behind the end of a sequence are computed, and not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.dynamic import datasets
from benchmarks.dynamic.models import LSTM, Params, dense, gates, losses, zero_carry
from benchmarks.dynamic.problems import Problem
from jaxsparse import recurrent
from jaxsparse.dynamic.form import bucket


class PaddedBatch(NamedTuple):
    """Words and tags ``(length, sequences)``, -1 behind the end of each; lengths and labels."""

    words: Any
    tags: Any
    lengths: Any
    labels: Any


def word_ids(batch: PaddedBatch) -> Any:
    """Of all entries, step by step."""
    return batch.words.reshape(-1)


@dataclass(frozen=True)
class Padded:
    """Batches in padded arrays."""

    def room(self, problem: Problem, steps: Sequence[np.ndarray]) -> tuple[int, int]:
        """The greatest length, rounded up as scripts' sizes are, and the sequences of a batch."""
        lengths = datasets.sentences().lengths
        return bucket(max(int(lengths[step].max()) for step in steps)), problem.batch

    def one(self, problem: Problem, step: np.ndarray, room: tuple[int, int]) -> PaddedBatch:
        """The arrays of a step."""
        data, (length, count) = datasets.sentences(), room
        ends = np.cumsum(data.lengths)
        words, tags = np.full((2, length, count), -1, np.int32)
        lengths, labels = np.zeros(count, np.int32), np.full(count, -1, np.int32)
        lengths[: len(step)] = data.lengths[step]
        if problem.net.rows == "graph":
            labels[: len(step)] = problem.graphs.channel("label")[step]
        for i, (end, size) in enumerate(zip(ends[step], data.lengths[step], strict=True)):
            for padded, entries in (words, data.words), (tags, data.tags):
                padded[:size, i] = entries[end - size : end]
        return PaddedBatch(words, tags, lengths, labels)

    def logits(self, problem: Problem, step: np.ndarray, logits: np.ndarray) -> np.ndarray:
        """Of sequences, or of their entries, sequence after sequence."""
        if problem.net.rows == "graph":
            return logits[: len(step)]
        lengths = datasets.sentences().lengths[step]
        parts = [logits[:size, i] for i, size in enumerate(lengths)]
        return np.concatenate([np.zeros((0, logits.shape[-1])), *parts])


PaddedScan = Callable[[Any, Any, Any, Any], Any]
"""Weights (directions, h, 4 h), bias (directions, 4 h), xs (steps, directions, batch, 4 h) and
lengths, to the states (steps, directions, batch, h)."""


def lax_scan(weights: Any, bias: Any, xs: Any, lengths: Any) -> Any:
    """One `jax.lax.scan` over steps, both directions side by side."""
    directions, h, _ = weights.shape
    carry = zero_carry(xs.shape[2], h, weights.dtype)
    carry = jax.tree.map(lambda a: jnp.broadcast_to(a, (directions, *a.shape)), carry)
    xs = jnp.stack([xs[:, 0], *(_reversed(xs[:, i], lengths) for i in range(1, directions))], 1)

    def step(carry: Any, x: Any) -> Any:
        r = jnp.einsum("dbh,dhg->dbg", carry[1], weights, preferred_element_type=jnp.float32)
        r = r + bias.astype(jnp.float32)[:, None]
        own = tuple(jnp.split(x.astype(jnp.float32), 4, -1))
        c, state = LSTM(own, tuple(jnp.split(r, 4, -1)), (carry,))
        state = state.astype(weights.dtype)
        return (c, state), state

    ys = jax.lax.scan(step, carry, xs, unroll=8)[1]
    return jnp.stack([ys[:, 0], *(_reversed(ys[:, i], lengths) for i in range(1, directions))], 1)


def our_scan(weights: Any, bias: Any, xs: Any, lengths: Any, *, precision: Any = None) -> Any:
    """`recurrent.scan`, or `recurrent.bidirectional_scan`."""
    first = zero_carry(xs.shape[2], weights.shape[1], weights.dtype)
    shared = {"seq_lengths": lengths, "precision": precision}
    if len(weights) == 1:
        own = {"recurrent_bias": bias[0], **shared}
        return recurrent.scan(recurrent.LSTM, weights[0], first, xs[:, 0], **own)[1][:, None]
    pairs = (tuple(weights), (first, first), (xs[:, 0], xs[:, 1]))
    own = {"recurrent_bias": tuple(bias), **shared}
    return jnp.stack(recurrent.bidirectional_scan(recurrent.LSTM, *pairs, **own)[1], 1)


def _reversed(x: Any, lengths: Any) -> Any:
    """Each sequence (length, batch, ...) from its end; what is behind it stays somewhere behind."""
    steps = jnp.arange(len(x))[:, None]
    places = jnp.where(steps < lengths, lengths - 1 - steps, steps)
    return jnp.take_along_axis(x, places.reshape(*places.shape, *[1] * (x.ndim - 2)), axis=0)


def last_state_loss(scan: PaddedScan, params: Params, rows: Any, batch: PaddedBatch) -> Any:
    """As `models.MODELS["lstm"]`."""
    length, count = batch.words.shape
    xs = gates(params, rows).reshape(length, 1, count, -1)
    ys = scan(params["weights"][None], params["bias"][None], xs, batch.lengths)[:, 0]
    last = ys[jnp.maximum(batch.lengths - 1, 0), jnp.arange(count)]
    last = jnp.where((batch.lengths > 0)[:, None], last, 0)
    logits = dense(last, params["head"], params["head_bias"])
    return _mean(losses(logits, batch.labels), batch.labels >= 0), logits


def tag_loss(scan: PaddedScan, params: Params, rows: Any, batch: PaddedBatch) -> Any:
    """As `models.MODELS["bilstm"]`."""
    length, count = batch.words.shape
    both = ("", "_reverse")
    first, second = (gates(params, rows, f"input{d}").reshape(length, count, -1) for d in both)
    weights, bias = (jnp.stack([params[f"{n}{d}"] for d in both]) for n in ("weights", "bias"))
    ys = scan(weights, bias, jnp.stack([first, second], 1), batch.lengths)
    states = jnp.concatenate([ys[:, 0], ys[:, 1]], -1)
    logits = dense(states, params["head"], params["head_bias"])
    flat = losses(logits.reshape(length * count, -1), batch.tags.reshape(-1))
    return _mean(flat, batch.tags.reshape(-1) >= 0), logits


def _mean(values: Any, counts: Any) -> Any:
    return jnp.where(counts, values, 0).sum() / jnp.maximum(counts.sum(), 1)


LOSSES: dict[str, Callable[..., Any]] = {"lstm": last_state_loss, "bilstm": tag_loss}
