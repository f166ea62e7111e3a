"""Patterns and operands that tests of products draw."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from edge_cases import EDGE_CASES as PROBLEMS

from jaxsparse import Topology


def draw(rng, shape, dtype):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def values_for(topology, dtype, rng, batch=()):
    """Random values; padding is NaN, which must never be read."""
    values = rng.standard_normal((*batch, topology.nse))
    values[..., topology.nnz :] = np.nan
    with jax.debug_nans(False):
        return jnp.asarray(values, dtype)


@functools.cache
def problem(name):
    return PROBLEMS[name]()


def batch_of_patterns():
    """Three of one size, values, and the matrices they make."""
    rng = np.random.default_rng(9)
    masks = rng.random((3, 12, 15)) < 0.3
    topology = Topology.from_mask(masks)
    values = jnp.asarray(rng.standard_normal((3, topology.nse)), jnp.float32)
    each = [Topology.from_mask(mask, nse=topology.nse) for mask in masks]
    return rng, topology, values, each
