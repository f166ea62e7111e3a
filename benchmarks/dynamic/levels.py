"""Scans over graphs in plain JAX, as a user would write them: a loop over tiles of rows.

`level_scan` has its derivative written by hand: a loop backwards, and one product for the gradient
of the weights. `looped_scan` leaves it to JAX. Both take scripts, whose tiles may be cut by levels.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import dynamic


class _Tiles(NamedTuple):
    """The arrays of a script that loops read; sources behind all rows where there is none."""

    sources: Any  # (tiles, width, K)
    kinds: Any  # (tiles,)
    is_row: Any  # (tiles, width, 1)
    used: Any


class _Loop(NamedTuple):
    """What is static."""

    cell: dynamic.Cell
    leaves: int
    tiles: int
    width: int
    unroll: int  # tiles of a step; 0 for a loop that ends with the last tile in use

    def run(self, tiles: _Tiles, body: Any, buffers: Any, backwards: bool = False) -> Any:
        def at(i: Any, buffers: Any) -> Any:
            return body(count - 1 - i if backwards else i, buffers)

        count = self.tiles if self.unroll else jnp.minimum(tiles.used, self.tiles)
        return jax.lax.fori_loop(0, count, at, buffers, unroll=self.unroll or None)

    def z(self, weights: Any, bias: Any, tiles: _Tiles, t: Any, state: Any) -> Any:
        """The products of a tile, (width, P h), of the states of children (width, K, h)."""
        kind = tiles.kinds[t]
        joined = state.reshape(self.width, -1)
        made = jnp.dot(joined, weights[kind], preferred_element_type=jnp.float32)
        return made + bias[kind].astype(jnp.float32)

    def apply(self, z: Any, x: Any, children: Any) -> Any:
        """The carry of rows, of products, inputs and the carries of children in float32."""
        h = jax.tree.leaves(children)[-1].shape[-1]
        wide = jax.tree.map(lambda a: a.astype(jnp.float32), children)
        of_children = tuple(
            jax.tree.map(lambda a, k=k: a[:, k], wide) for k in range(self.cell.children)
        )

        def split(a: Any) -> tuple[Any, ...]:
            return tuple(jnp.split(a.astype(jnp.float32), a.shape[-1] // h, -1))

        return self.cell(() if x is None else split(x), split(z), of_children)


def _rows(x: Any, t: Any, width: int, first: int = 0) -> Any:
    return jax.lax.dynamic_slice_in_dim(x, first + t * width, width)


def _put(x: Any, rows: Any, t: Any, first: int = 0) -> Any:
    width = rows.shape[0]
    return jax.lax.dynamic_update_slice_in_dim(x, rows.astype(x.dtype), first + t * width, 0)


def _forward(
    loop: _Loop, weights: Any, bias: Any, carry: Any, x: Any, tiles: _Tiles, *, keep: bool
) -> tuple[Any, Any]:
    """Carries of all rows and a row of zeros behind them; products, if they are kept."""
    room = loop.tiles * loop.width
    rows = jax.tree.map(lambda a: jnp.pad(a, [(0, room + 1), (0, 0)]), carry)
    kept = jnp.zeros((room, weights.shape[-1]), weights.dtype) if keep else None

    def body(t: Any, buffers: Any) -> Any:
        rows, kept = buffers
        children = jax.tree.map(lambda a: a[tiles.sources[t]], rows)
        z = loop.z(weights, bias, tiles, t, jax.tree.leaves(children)[-1])
        own = None if x is None else _rows(x, t, loop.width)
        new = jax.tree.map(lambda a: jnp.where(tiles.is_row[t], a, 0), loop.apply(z, own, children))
        rows = jax.tree.map(lambda a, y: _put(a, y, t, loop.leaves), rows, new)
        return rows, None if kept is None else _put(kept, z, t)

    return loop.run(tiles, body, (rows, kept))  # type: ignore[no-any-return]


def _computed(loop: _Loop, rows: Any) -> Any:
    return jax.tree.map(lambda a: a[loop.leaves : -1], rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _levels(loop: _Loop, weights: Any, bias: Any, carry: Any, x: Any, tiles: _Tiles) -> Any:
    return _computed(loop, _forward(loop, weights, bias, carry, x, tiles, keep=False)[0])


def _levels_forward(
    loop: _Loop, weights: Any, bias: Any, carry: Any, x: Any, tiles: _Tiles
) -> tuple[Any, Any]:
    rows, kept = _forward(loop, weights, bias, carry, x, tiles, keep=True)
    return _computed(loop, rows), (weights, bias, x, tiles, rows, kept)


def _levels_backward(loop: _Loop, saved: Any, d: Any) -> Any:
    weights, bias, x, tiles, rows, kept = saved
    sums = jax.tree.map(lambda a: jnp.pad(a.astype(jnp.float32), [(loop.leaves, 1), (0, 0)]), d)

    def body(t: Any, buffers: Any) -> Any:
        sums, dz_rows = buffers
        sources = tiles.sources[t]
        children = jax.tree.map(lambda a: a[sources], rows)
        own = None if x is None else _rows(x, t, loop.width)
        z = _rows(kept, t, loop.width).astype(jnp.float32)
        wide = jax.tree.map(lambda a: a.astype(jnp.float32), children)
        _, pull = jax.vjp(lambda z, children: loop.apply(z, own, children), z, wide)
        given = jax.tree.map(
            lambda a: jnp.where(tiles.is_row[t], _rows(a, t, loop.width, loop.leaves), 0), sums
        )
        dz, of_children = pull(given)
        dz = dz.astype(weights.dtype)
        back = jnp.dot(dz, weights[tiles.kinds[t]].T, preferred_element_type=jnp.float32)
        *others, state = jax.tree.leaves(of_children)
        state = state + back.reshape(state.shape)
        parts = jax.tree.unflatten(jax.tree.structure(sums), [*others, state])
        sums = jax.tree.map(lambda a, part: a.at[sources].add(part), sums, parts)
        return sums, _put(dz_rows, dz, t)

    sums, dz = loop.run(tiles, body, (sums, jnp.zeros_like(kept)), backwards=True)
    kinds = jnp.repeat(tiles.kinds, loop.width)
    state = jax.tree.leaves(rows)[-1]
    taken = state[tiles.sources.reshape(len(kinds), -1)].reshape(len(kinds), -1)
    of_kind = [jnp.where((kinds == k)[:, None], dz, 0) for k in range(len(weights))]
    if len(weights) == 1:
        of_kind = [dz]
    d_weights = jnp.stack(
        [jnp.dot(taken.T, own, preferred_element_type=jnp.float32) for own in of_kind]
    )
    d_bias = jnp.stack([own.astype(jnp.float32).sum(0) for own in of_kind])
    d_carry = jax.tree.map(lambda a, like: a[: loop.leaves].astype(like.dtype), sums, rows)
    return (
        d_weights.astype(weights.dtype),
        d_bias.astype(bias.dtype),
        d_carry,
        None if x is None else dz.astype(x.dtype),  # inputs are added to products
        None,
    )


_levels.defvjp(_levels_forward, _levels_backward)


def _prepared(
    cell: Any, weights: Any, carry: Any, script: Any, xs: Any, bias: Any, unroll: int
) -> tuple[Any, ...]:
    form = script.form
    sources = script.sources
    tiles = _Tiles(
        jnp.where(sources < 0, form.rows, sources),
        script.kinds,
        (sources >= 0).any(-1)[..., None],
        script.used_tiles,
    )
    if isinstance(cell, tuple):  # of one form: kinds differ in their weights alone
        cell, weights, bias = cell[0], jnp.stack(weights), jnp.stack(bias)
    else:
        weights, bias = weights[None], bias[None]
    x = None
    if xs is not None:
        rows = script.x_rows.reshape(form.computed)
        rows = jnp.where(rows < 0, form.inputs, rows)
        x = xs.at[rows].get(mode="fill", fill_value=0)
    loop = _Loop(cell, form.leaves, form.tiles, form.width, unroll)
    return loop, weights, bias, carry, x, tiles


def level_scan(
    cell: Any, weights: Any, carry: Any, script: Any, xs: Any = None, *, bias: Any, unroll: int
) -> Any:
    """As `dynamic.scan`, of cells that add their inputs to their products."""
    return _levels(*_prepared(cell, weights, carry, script, xs, bias, unroll))


def looped_scan(
    cell: Any, weights: Any, carry: Any, script: Any, xs: Any = None, *, bias: Any, unroll: int
) -> Any:
    """The same, differentiated by JAX: every step's gradient of a gather is as large as all rows.

    Its loop takes all tiles that there is room for, since JAX differentiates no other.
    """
    loop, *operands = _prepared(cell, weights, carry, script, xs, bias, max(unroll, 1))
    rows, _ = _forward(loop, *operands, keep=False)
    return _computed(loop, rows)
