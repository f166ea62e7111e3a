"""Random graphs, cells and operands for the tests of scans over graphs, and a loop over rows."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import dynamic, recurrent
from jaxsparse.dynamic import form as forms


def script_of(sources, kinds=None, x_rows=None, *, leaves, used_tiles=None, inputs=0, kind_count=1):
    """The script of rows that are given by their children, (tiles, width, slots).

    It is written word by word, as docs/dynamic.md says, not by the packers.
    """
    sources = np.asarray(sources, np.int32)
    tiles, width, slots = sources.shape
    form = dynamic.Form(leaves, tiles, width, slots, 1, 1, inputs, kind_count)
    used_tiles = tiles if used_tiles is None else used_tiles
    words = np.full(form.words, -1, np.int32)
    used = {"leaves": leaves, "tiles": used_tiles, "graphs": 0, "inputs": inputs}
    words[: forms.SECTION] = 0
    words[0] = forms.VERSION
    words[1:5] = [used[name] for name in forms.USED]
    words[5:14] = [getattr(form, name) for name in forms.SIZES]
    words[form.group_tiles_offset : form.records_offset] = 0
    words[form.group_tiles_offset + 1] = used_tiles
    records = words[form.records_offset : form.roots_offset].reshape(tiles, form.record_words)
    records[:, 0] = 0 if kinds is None else kinds
    records[:, 2 : 2 + width * slots] = sources.reshape(tiles, -1)
    if x_rows is not None:
        records[:, 2 + width * slots :][:, :width] = x_rows
    return dynamic.Script(words, form)


def random_sources(rng, *, leaves, first, tiles, width, slots):
    """The children of random rows of tiles: any rows of earlier tiles, from ``first``, or leaves.

    Some lanes are padding, some children are missing, one row has one child in all slots, and one
    leaf has several parents.
    """
    sources = np.full((tiles, width, slots), -1, np.int32)
    rows = list(range(leaves))
    for t in range(tiles):
        lanes = rng.permutation(width)[: width if t == 0 else rng.integers(1, width + 1)]
        for lane in lanes:
            children = rng.choice(rows, slots)
            there = rng.random(slots) < 0.8
            there[rng.integers(slots)] = True
            sources[t, lane] = np.where(there, children, -1)
        if t == 0:
            sources[0, 0], sources[0, 1, 0] = 1, 1
        rows += [first + t * width + lane for lane in lanes]
    return sources


def of_every_child(x, r, children):
    """A cell that reads all of its children's carries, state included; three products, one x.

    Of zeros it makes NaN, and so does its derivative.
    """
    (x,), (keep, new, gate) = x, r
    slow = sum(child["slow"] for child in children) / len(children)
    state = sum(child["state"] * (k + 1) for k, child in enumerate(children)) / len(children)
    new = jnp.tanh(new + x) + new / jnp.sqrt(new * new + gate * gate + x * x)
    slow = 0.5 * slow + jax.nn.sigmoid(keep) * new
    return {"slow": slow, "state": jnp.tanh(slow + 0.3 * state * gate)}


def of_first_child(x, r, children):
    """A cell of one child beside others of more; one product."""
    (child,) = children
    slow = child["slow"] * 0.7 + x[0]
    return {"slow": slow, "state": jnp.tanh(r[0] + slow)}


def of_no_product(x, r, children):
    """A cell that reads the carries of its two children and nothing else of them."""
    first, second = children
    slow = x[0] + first["slow"] - 0.5 * second["slow"] * second["state"]
    return {"slow": slow, "state": jnp.sin(slow + first["state"])}


_EVERY = {"slow": 0, "state": 0}
_THREE = dynamic.cell(children=3)(of_every_child)
# name -> (cells, products of each, gates of x, a carry's form)
CELLS = {
    "tree_lstm": (dynamic.tree_lstm(2), 5, 0, (0, 0)),
    "tree_lstm_with_x": (dynamic.tree_lstm(3), 6, 4, (0, 0)),
    "every_child": (_THREE, 3, 1, _EVERY),
    "chain": (dynamic.chain(recurrent.GRU), 3, 3, 0),
    "two_cells": ((_THREE, dynamic.cell(children=1)(of_first_child)), (3, 1), 1, _EVERY),
    "without_products": (dynamic.cell(children=2)(of_no_product), 0, 1, _EVERY),
    "one_without_products": (
        (dynamic.cell(children=2)(of_no_product), dynamic.cell(children=1)(of_first_child)),
        (0, 1),
        1,
        _EVERY,
    ),
    "two_directions": ((dynamic.chain(recurrent.LSTM),) * 2, (4, 4), 4, (0, 0)),
}


class Problem(NamedTuple):
    """The operands of a scan."""

    cell: Any
    script: Any
    weights: Any
    carry: Any
    xs: Any
    bias: Any

    @property
    def operands(self):
        """What a scan is differentiable in."""
        return self.weights, self.carry, self.xs, self.bias

    def scan(self, weights, carry, xs, bias, script=None, **options):
        """`dynamic.scan` as a function of what it is differentiable in."""
        script = self.script if script is None else script
        return dynamic.scan(self.cell, weights, carry, script, xs, bias=bias, **options)

    def loop(self, weights, carry, xs, bias):
        """The same by a loop over rows, one after the other, which JAX differentiates."""
        cells, weights, biases = (
            x if isinstance(self.cell, tuple) else (x,) for x in (self.cell, weights, bias)
        )
        script, form = self.script, self.script.form
        leaves, tree = jax.tree.flatten(carry)
        h = leaves[0].shape[1]
        rows = [jnp.zeros((form.rows + 1, h), x.dtype).at[: form.leaves].set(x) for x in leaves]
        xs = None if xs is None else jnp.append(xs, jnp.zeros_like(xs[:1]), 0)

        def of_kind(cell, w, b, children, x):
            r = () if w is None else children[-1][: cell.children].reshape(-1) @ w + b
            carry = cell(
                () if x is None else tuple(x.reshape(-1, h)),
                () if w is None else tuple(r.reshape(-1, h)),
                tuple(
                    jax.tree.unflatten(tree, [c[k] for c in children]) for k in range(cell.children)
                ),
            )
            return jax.tree.leaves(carry)

        def body(rows, row):
            kind, place, sources, x_row = row
            children = [x[sources] for x in rows]
            x = None if xs is None else xs[x_row]
            branches = [
                functools.partial(of_kind, *parts)
                for parts in zip(cells, weights, biases, strict=True)
            ]
            made = jax.lax.switch(kind, branches, children, x)
            return [x.at[place].set(y) for x, y in zip(rows, made, strict=True)], None

        used = np.flatnonzero((script.sources >= 0).any(-1).reshape(-1))
        sources = np.where(script.sources < 0, form.rows, script.sources)
        row = (
            np.repeat(script.kinds, form.width)[used],
            form.leaves + used,
            sources.reshape(form.computed, form.slots)[used],
            script.x_rows.reshape(-1)[used],
        )
        rows, _ = jax.lax.scan(body, rows, jax.tree.map(jnp.asarray, row))
        return jax.tree.unflatten(tree, [x[form.leaves : form.rows] for x in rows])


def problem(name, *, leaves=4, tiles=4, width=3, h=3, dtype=jnp.float64, seed=0):
    """Random operands. What no row reads is NaN: leaves and inputs of padding."""
    cells, products, gates, form = CELLS[name]
    several = isinstance(cells, tuple)
    every = cells if several else (cells,)
    counts = products if several else (products,)
    rng = np.random.default_rng(seed)
    slots = max(c.children for c in every)
    sizes = {"leaves": leaves, "first": leaves + 1, "tiles": tiles, "width": width}
    sources = random_sources(rng, **sizes, slots=slots)
    kinds = rng.permutation(np.arange(tiles) % len(every))
    if several:  # a row whose cell takes fewer children has no more
        for t, kind in enumerate(kinds):
            lanes = (sources[t] >= 0).any(-1)
            sources[t, :, every[kind].children :] = -1
            sources[t, lanes & (sources[t] < 0).all(-1), 0] = 0
    is_row = (sources >= 0).any(-1)
    # Some rows have inputs, in another order than they are computed in.
    with_x = np.flatnonzero(is_row.reshape(-1))
    with_x = rng.permutation(with_x)[: len(with_x) - 2]
    x_rows = np.full(tiles * width, -1)
    x_rows[with_x] = np.arange(len(with_x))
    inputs = len(with_x) + 1 if gates else 0
    script = script_of(
        sources,
        kinds,
        x_rows.reshape(tiles, width) if gates else None,
        leaves=leaves + 1,
        inputs=inputs,
        kind_count=len(every),
    )

    def draw(*shape):
        return rng.standard_normal(shape)

    def cast(tree):
        return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)

    weights = [
        draw(c.children * h, p * h) * (0.5 / np.sqrt(h)) if p else None
        for c, p in zip(every, counts, strict=True)
    ]
    bias = [draw(p * h) / 2 if p else None for p in counts]
    carry = jax.tree.map(lambda _: np.append(draw(leaves, h), np.full((1, h), np.nan), 0), form)
    xs = (
        np.append(draw(inputs - 1, gates * h), np.full((1, gates * h), np.nan), 0)
        if gates
        else None
    )
    weights, bias = (tuple(x) if several else x[0] for x in (weights, bias))
    return Problem(cells, script, *cast((weights, carry)), cast(xs), cast(bias))


def finite(tree):
    """What a loop may multiply by 0."""
    return jax.tree.map(jnp.nan_to_num, tree)
