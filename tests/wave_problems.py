"""Forms of waves, and stacks of layers that are waves, for tests of their choice and of kernels."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import stack_problems

from jaxsparse import recurrent
from jaxsparse.recurrent.graph import recurrent_graph_p
from jaxsparse.recurrent.plan import WaveForm

WAVE = "wave_mma"
WGMMA = "wave_wgmma"  # for forward passes, as the next one
STATIONARY = "wave_stationary"
SCATTER = "wave_scatter"  # for adjoints


def wave(products=1, states=1, layers=4, hidden=512, batch=16, length=256, **changes):
    form = WaveForm(
        products=products,
        states=states,
        inputs=2 * products,
        outputs=0,
        arrays=2,
        hidden=hidden,
        batch=batch,
        length=length,
        state_dtype="bfloat16",
        weight_dtype="bfloat16",
        sparse=False,
        input_dtypes=("bfloat16",),
        layers=layers,
        own_products=tuple(range(products)),
        own_states=tuple(range(states)),
        below_products=tuple(range(products)),
        below_states=tuple(range(states)),
    )
    return dataclasses.replace(form, **changes)


def stack(cells, dtype=jnp.bfloat16, **sizes):
    """Random operands, all floating-point arrays but the carries in one dtype."""
    p = stack_problems.stack(cells, dtype=dtype, **sizes)
    cast = jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, p
    )
    return cast._replace(carries=jax.tree.map(lambda x: x.astype(jnp.float32), p.carries))


def graphs(function, *operands):
    """The graphs of a function, their params and the types of their operands."""
    equations = jax.make_jaxpr(function)(*operands).eqns
    return [
        (eqn.params, [v.aval for v in eqn.invars])
        for eqn in equations
        if eqn.primitive is recurrent_graph_p
    ]


def total(results):
    return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(results))


def loss_of(p, **options):
    """The loss of a stack by its arrays."""

    def loss(floating):
        results = recurrent.stack_scan(*p.of(floating), **options)
        return total(results), results

    return loss


def held(choice):
    """The nodes of each wave, as it is said."""
    return [tuple(map(int, x)) for x in re.findall(r"(?:nodes|,) (\d+) to (\d+)", choice.called)]
