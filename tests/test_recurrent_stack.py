"""Recurrent stacks against loops over layers and steps: values, gradients, edges, errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import reference
from covering import pairwise
from recurrent_problems import compiled
from stack_problems import NAMES, stack

from jaxsparse import recurrent

leaves = jax.tree.leaves


def total(results):
    """A number that depends on every result, and not linearly."""
    return sum(jnp.sum(jnp.sin(x.astype(jnp.result_type(float)))) for x in leaves(results))


def assert_close(got, expected, limit):
    for a, b in zip(leaves(got), leaves(expected), strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=limit, atol=limit)


def lengths_of(kind, B, T):
    """Lengths of rows: none, ragged ones with 0 among them, or beyond the end."""
    rng = np.random.default_rng(B)
    if kind == "ragged":
        return jnp.asarray(rng.permuted(np.arange(B) % (T + 1)), jnp.int32)
    return None if kind is None else jnp.full(B, T + 3, jnp.int32)


def resets_of(wanted, B, T):
    return jnp.asarray(np.random.default_rng(T).random((T, B)) < 0.4) if wanted else None


@pairwise(
    "cells, csr, layers, skip, dropout, lengths, resets, reverse, differ, T, B, recompute",
    [("RNN",), ("GRU",), ("LSTM",), ("three_leaves",), NAMES],
    [False, True],
    [1, 2, 5],
    [None, 1, 2, "input"],
    [None, "steps", "rows"],
    [None, "ragged", "beyond"],
    [False, True],
    [False, True],
    [False, True],
    [1, 2, 7],
    [1, 3],
    [False, True],
)
def test_values_and_gradients(
    cells, csr, layers, skip, dropout, lengths, resets, reverse, differ, T, B, recompute
):
    with jax.enable_x64(True):
        p = stack(
            cells,
            layers=layers,
            csr=csr,
            skip=skip,
            dropout=dropout,
            differ=differ and skip is None,
            T=T,
            B=B,
            dtype=jnp.float64,
        )
        options = {
            "seq_lengths": lengths_of(lengths, B, T),
            "resets": resets_of(resets, B, T),
            "reverse": reverse,
            "return_all": layers == 2,
        }

        def value_and_gradient(function, **more):
            def loss(floating):
                results = function(*p.of(floating), **options, **more)
                return total(results), results

            return compiled(jax.value_and_grad(loss, has_aux=True))(p.floating)

        got = value_and_gradient(recurrent.stack_scan, recompute=recompute)
        expected = value_and_gradient(reference.stack_scan)
        assert_close(got, expected, 1e-10)
