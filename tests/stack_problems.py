"""Random recurrent stacks for tests, and how their results are compared."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from recurrent_problems import CELLS, carry_like, pattern

from jaxsparse import CSR, recurrent

NAMES = list(CELLS)
LENGTHS = jnp.array([0, 5, 3])  # of T = 5
RESETS = jnp.asarray(np.random.default_rng(0).random((5, 3)) < 0.3)
EVERY = {"reverse": True, "seq_lengths": LENGTHS, "resets": RESETS}

leaves = jax.tree.leaves


def smoothed(x, counts):
    """A function between layers that mixes steps."""
    x = x if counts is None else jnp.where(counts[..., None], x, 0)
    return x.at[1:].add(x[:-1]) / 2


class Stack(NamedTuple):
    """The operands of `recurrent.stack_scan`."""

    layers: list[recurrent.Layer]
    carries: list[Any]
    xs: Any

    @property
    def floating(self):
        """What it is differentiable in: all arrays but those of patterns."""
        return [x for x in jax.tree.leaves(self) if jnp.issubdtype(x.dtype, jnp.floating)]

    def of(self, floating):
        """The stack with other values in the place of `floating`."""
        leaves, tree = jax.tree.flatten(self)
        values = iter(floating)
        return jax.tree.unflatten(
            tree,
            [next(values) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in leaves],
        )


def stack(
    cells,
    *,
    layers=2,
    weights="dense",
    T=5,
    B=3,
    h=5,
    differ=False,
    skip=None,
    dropout=None,
    norm=None,
    affine=True,
    between=False,
    biased=True,
    pre_activations=False,
    features=None,
    padding=0.0,
    dtype=jnp.float32,
    seed=0,
):
    """Random operands: layers of the cells named, over and over.

    Args:
        cells: names of CELLS.
        layers: how many.
        weights: "dense", "csr" or "heads"; with heads, which are two, widths are even.
        T: steps.
        B: rows.
        h: units of each layer, fewer from layer to layer where they `differ`.
        differ: whether widths do.
        skip: as `Layer.skip`, where a layer has so many below; "input" for each one's number.
        dropout: None, "steps" for a mask of every step, "rows" for one of all steps.
        norm: as `Layer.norm`.
        affine: whether a norm has a scale and a shift.
        between: whether every other layer takes what a function makes of the output below.
        biased: whether layers have biases.
        pre_activations: whether xs are those of the first layer.
        features: of the input, if not as many as units.
        padding: what stands behind the entries of sparse weights.
        dtype: of all.
        seed: of all.
    """
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731

    def matrix(k, m):
        scale = 0.5 / np.sqrt(k)
        if weights == "heads":
            return draw(2, k // 2, m // 2) * scale
        if weights == "dense":
            return draw(k, m) * scale
        topology = pattern(m, k, seed=int(rng.integers(99)))
        return CSR((draw(topology.nse) * scale).at[topology.nnz :].set(padding), topology)

    of_layers = [cells[i % len(cells)] for i in range(layers)]
    even = 2 if weights == "heads" else 1
    widths = [even * (h // even - i % 3 * differ) for i in range(layers)]
    features = widths[0] + 2 * differ if features is None else features
    if pre_activations:
        features = CELLS[of_layers[0]][1] * h
    below, built, carries = features, [], []
    for i, (name, width) in enumerate(zip(of_layers, widths, strict=True)):
        cell, gates, form = CELLS[name]
        n = i + 1 if skip == "input" else skip
        mask = None
        if dropout is not None:
            mask = draw(T if dropout == "steps" else 1, B, width)
        built.append(
            recurrent.Layer(
                cell,
                recurrent=matrix(width, gates * width),
                input=None if pre_activations and i == 0 else matrix(below, gates * width),
                bias=draw(gates * width) / 2 if biased else None,
                recurrent_bias=draw(gates * width) / 2 if biased else None,
                skip=n if n is not None and n <= i + 1 else None,
                norm=norm if i or not pre_activations else None,
                norm_scale=draw(below) if norm and affine else None,
                norm_shift=draw(below) if norm and affine else None,
                between=smoothed if between and i % 2 else None,
                mask=mask,
            )
        )
        carry = carry_like(form, lambda *shape: np.asarray(draw(*shape)), B, width)
        carries.append(jax.tree.map(lambda x: jnp.asarray(x, dtype), carry))
        below = width
    return Stack(built, carries, draw(T, B, features))


def options_of(lengths, resets, reverse, layers, T, B):
    """The options of a scan, by their kinds.

    Args:
        lengths: of rows: None, "ragged" ones with 0 among them, or "beyond" the end.
        resets: whether there are some.
        reverse: as that of a scan.
        layers: how many; of two the outputs of both are results.
        T: steps.
        B: rows.
    """
    ragged = np.random.default_rng(B).permuted(np.arange(B) % (T + 1))
    of_rows = {None: None, "ragged": ragged, "beyond": np.full(B, T + 3)}[lengths]
    return {
        "seq_lengths": None if of_rows is None else jnp.asarray(of_rows, jnp.int32),
        "resets": jnp.asarray(np.random.default_rng(T).random((T, B)) < 0.4) if resets else None,
        "reverse": reverse,
        "return_all": layers == 2,
    }


def total(results):
    """A number that depends on every result, and not linearly."""
    return sum(jnp.sum(jnp.sin(x.astype(jnp.result_type(float)))) for x in leaves(results))


def like(tree, seed=0):
    """Random numbers in the form of a tree."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), tree)


def close(got, expected, rtol, atol):
    for a, b in zip(leaves(got), leaves(expected), strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=rtol, atol=atol)


exact = functools.partial(close, rtol=1e-10, atol=1e-11)
single = functools.partial(close, rtol=2e-5, atol=2e-5)


def run(p, function=recurrent.stack_scan, **options):
    """A scan of a stack as a function of what it is differentiable in."""
    return lambda floating: function(*p.of(floating), **options)


def loss(p, function=recurrent.stack_scan, **options):
    return lambda floating: total(run(p, function, **options)(floating))
