"""Wavefronts of recurrent stacks: which layers they hold, and their results."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import reference
from covering import pairwise
from graph_forms import with_graphs_as
from recurrent_problems import compiled
from stack_problems import NAMES, stack
from test_recurrent_stack import assert_close, lengths_of, resets_of, total

from jaxsparse import recurrent
from jaxsparse.primitive import Fallback
from jaxsparse.recurrent.graph.choice import without_waves

plainly = functools.partial(without_waves, fallback=Fallback("it is tested"))


def of_xla(params, avals, device):
    return plainly({**params, "implementation": "xla"}, avals, device)


@pairwise(
    "cell, layers, skip, norm, dropout, lengths, resets, reverse, extra, T, B, recompute",
    NAMES,
    [2, 3, 4],
    [None, 1, 2, "input"],
    [None, None, "layer", "rms"],
    [None, "steps", "rows"],
    [None, "ragged", "beyond"],
    [False, True],
    [False, True],
    [0, 2],
    [4, 7],
    [1, 3],
    [False, True],
)
def test_values_and_gradients(
    cell, layers, skip, norm, dropout, lengths, resets, reverse, extra, T, B, recompute
):
    with jax.enable_x64(True):
        p = stack(
            [cell],
            layers=layers,
            skip=skip,
            norm=norm,
            dropout=dropout,
            features=6 + extra * (skip is None),
            T=T,
            B=B,
            h=6,
            dtype=jnp.float64,
        )
        options = {
            "seq_lengths": lengths_of(lengths, B, T),
            "resets": resets_of(resets, B, T),
            "reverse": reverse,
            "return_all": layers == 2,
        }

        def loss(floating, function, **more):
            results = function(*p.of(floating), **options, **more)
            return total(results), results

        scan = functools.partial(loss, function=recurrent.stack_scan, recompute=recompute)
        gradient = jax.value_and_grad(scan, has_aux=True)
        got, chosen = with_graphs_as(of_xla, gradient, p.floating)
        own = functools.partial(loss, function=reference.stack_scan)
        expected = compiled(jax.value_and_grad(own, has_aux=True))(p.floating)
        assert_close(got, jax.tree.leaves(expected), 1e-9)
        print([c.called or c.reason for c in chosen])
