"""What the forms of a trained model have: perplexity, speed of decoding, and bytes."""

from __future__ import annotations

import argparse
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..common.text import Corpus
from ..common.timing import median_seconds_in_turns
from .model import FORMS, GPT, fastest, in_16_bits, write
from .training import Windows, score

TIMED_ROUNDS = 5
DTYPE = jnp.bfloat16  # Of weights and activations in all forms: packed weights have 16 bits.


def bytes_of(model: nnx.Module) -> int:
    """Bytes of all arrays of a model, patterns included."""
    return sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))


def measure(forms: dict[str, GPT], windows: Windows, args: argparse.Namespace) -> dict[str, Any]:
    """Perplexity on a text, tokens per second of decoding a whole context, and bytes, of each."""
    context = next(iter(forms.values())).context
    tokens = jnp.zeros((args.decode_batch, context), jnp.int32)
    rest = (jnp.arange(context) == 0, jnp.float32(args.temperature), jax.random.key(args.seed))
    split = {name: nnx.split(model) for name, model in forms.items()}
    losses = {name: score(*parts, windows) for name, parts in split.items()}
    calls = [functools.partial(write, *parts, tokens, *rest) for parts in split.values()]
    seconds = median_seconds_in_turns(calls, TIMED_ROUNDS)
    return {
        name: {
            "nats": losses[name],
            "perplexity": math.exp(losses[name]),
            "tokens_per_second": args.decode_batch * (context - 1) / each,
            "bytes": bytes_of(forms[name]),
        }
        for name, each in zip(forms, seconds, strict=True)
    }


def measure_forms(
    trained: GPT, sparsity: float, windows: Windows, args: argparse.Namespace
) -> dict[str, Any]:
    """The same of each form of a trained model; of a dense one there is one form.

    Returns:
        By the form's name. ``fastest`` has the form of each layer that is fastest here, and its
        ``layers`` are what `jaxsparse.pruning.sparsify` measured.
    """
    model = in_16_bits(trained, DTYPE)
    if not sparsity:
        return measure({"dense": model}, windows, args)
    chosen, table = fastest(model, args.decode_batch)
    forms = {name: make(model, args.decode_batch) for name, make in FORMS.items()}
    forms["fastest"] = chosen
    results = measure(forms, windows, args)
    results["fastest"]["layers"] = table.rows
    return results


def passage(trained: GPT, corpus: Corpus, prompt: np.ndarray, args: argparse.Namespace) -> str:
    """A text of the length of the context that begins with a prompt."""
    prompt = prompt[: trained.context]
    tokens = jnp.zeros((1, trained.context), jnp.int32).at[0, : len(prompt)].set(prompt)
    known = jnp.arange(trained.context) < len(prompt)
    graph, state = nnx.split(trained)
    key = jax.random.key(args.seed)
    return corpus.decode(
        np.asarray(write(graph, state, tokens, known, jnp.float32(args.temperature), key)[0])
    )
