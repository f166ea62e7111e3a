"""A scan over graphs as a loop of XLA over tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse.batching import over_batch
from jaxsparse.dynamic.form import Form
from jaxsparse.dynamic.primitive.operands import Operands, Results, joined_results, split
from jaxsparse.dynamic.primitive.row_products import child_rows
from jaxsparse.dynamic.script import Script
from jaxsparse.precision import accumulator_dtype
from jaxsparse.recurrent import products
from jaxsparse.recurrent.step import Step

_UNROLLED = 8  # tiles of a loop on a GPU, where it waits for the start of kernels

Buffers = list[Any]


def plain_scan(*operands: Any, on_gpu: bool = False, **params: Any) -> list[Any]:
    """The scan, for each entry of batch dimensions.

    On a CPU the loop ends with the last tile that a script uses. All entries take as many as the
    longest one: with a number of its own each would, in every step of the others' loop, choose
    between old and new rows. On a GPU, where a loop of unknown length waits for the host in every
    step, it has all tiles.
    """
    words, form = operands[1], params["form"]
    tiles = form.tiles
    if not on_gpu:
        used = jnp.max(Script(words, form).used_tiles, initial=0)
        tiles = jnp.minimum(used, form.tiles).astype(int)  # a damaged script may say more
    compute = functools.partial(_scan, tiles=tiles, on_gpu=on_gpu, **params)
    return over_batch(compute, words.ndim - 1, *operands)


def _scan(*operands: Any, **params: Any) -> list[Any]:
    x = split(operands, params)
    return joined_results((_emit if params["emits"] else _gather)(x, _Loop.of(x, **params)))


class _Loop(NamedTuple):
    """The tiles of a script, and what each of them takes and gives."""

    step: Step
    form: Form
    h: int
    dtypes: list[Any]  # of states and outputs
    wide: Any  # the dtype of sums
    sources: Any  # (tiles * width, K), behind all rows where there is none
    is_row: Any  # (tiles * width, 1)
    kinds: Any  # (tiles,)
    inputs: list[tuple[Any, int, str]]  # (rows, parts * h), parts, span
    weights: Any
    product: Callable[..., Any]
    tiles: Any
    on_gpu: bool

    @classmethod
    def of(
        cls,
        x: Operands,
        *,
        step: Step,
        form: Form,
        dtype: str,
        spans: Sequence[str],
        precision: Any,
        tiles: Any,
        on_gpu: bool,
        **_: Any,
    ) -> _Loop:
        script = Script(x.words, form)
        narrow, wide = jnp.dtype(dtype), accumulator_dtype(jnp.dtype(dtype))
        parts = zip(x.inputs, step.inputs, spans, strict=True)
        return cls(
            step=step,
            form=form,
            h=x.weights.shape[1] // form.slots,
            dtypes=[narrow, *(wide if w else narrow for w in step.wide_outputs)],
            wide=wide,
            sources=child_rows(script),
            is_row=(script.sources >= 0).any(-1).reshape(form.computed, 1),
            kinds=script.kinds,
            inputs=[(a.reshape(a.shape[0], -1), count, span) for a, count, span in parts],
            weights=x.weights,
            product=functools.partial(
                products.product,
                sparse=False,
                precision=precision,
                implementation=None,
                out_dtype=wide,
            ),
            tiles=tiles,
            on_gpu=on_gpu,
        )

    def run(self, body: Callable[[Any, Buffers], Buffers], buffers: Buffers) -> Buffers:
        """The buffers after all tiles; the body makes them of tile t and the buffers before it."""

        def apart(t: Any, buffers: Buffers) -> Buffers:
            # Of few tiles XLA knows where all their rows lie. It would make those of one tile again
            # in each that reads them, and theirs in turn: what takes minutes to compile.
            made: Buffers = jax.lax.optimization_barrier(body(t, buffers))
            return made

        if not self.on_gpu:
            return list(jax.lax.fori_loop(0, self.tiles, body, buffers))
        return list(jax.lax.fori_loop(0, self.tiles, apart, buffers, unroll=_UNROLLED))

    def rows_of(self, x: Any, t: Any) -> Any:
        """The rows of a tile, of an array of all computed rows."""
        width = self.form.width
        return jax.lax.dynamic_slice_in_dim(x, t * width, width, allow_negative_indices=False)

    def products(self, x: Any, t: Any, transposed: bool) -> Any:
        """The product of a tile's rows (n, k) by the weights of its kind."""
        by = functools.partial(self.product, x=x, transposed=transposed)
        kinds = self.weights.shape[0]
        if kinds == 1:
            return by((self.weights[0],))
        if self.on_gpu:  # where a switch waits for the host
            return by((self.weights[self.kinds[t]],))
        return jax.lax.switch(self.kinds[t], [lambda w=w: by((w,)) for w in self.weights])

    def apply(self, t: Any, arrays: Sequence[Any], carries: Sequence[Any]) -> Any:
        """The step of a tile: states and outputs (n, parts h), and carries (n, h).

        All are 0 where there is no row.
        """
        is_row = self.rows_of(self.is_row, t)
        states, new, outputs = self.step(arrays, carries, [self._input(*x, t) for x in self.inputs])
        joined = [
            jnp.where(is_row, self.joined(xs), 0).astype(dtype)
            for xs, dtype in zip((states, *outputs), self.dtypes, strict=True)
        ]
        return joined, [jnp.where(is_row, c, 0).astype(self.wide) for c in new]

    def joined(self, xs: Sequence[Any]) -> Any:
        """Arrays (n, h) side by side; there may be none, of a cell without products."""
        return jnp.concatenate(xs, 1) if xs else jnp.zeros((self.form.width, 0), self.wide)

    def _input(self, x: Any, count: int, span: str, t: Any) -> list[Any]:
        """The arrays of an input at a tile, (n, h) each.

        Each is cut out at once: on a CPU XLA does not vectorise what reads a slice of a slice.
        """
        width, units = self.form.width, x.shape[1] // count
        size = (width if "r" in span else 1, units)
        at = t * width if "r" in span else 0
        cut = functools.partial(
            jax.lax.dynamic_slice, x, slice_sizes=size, allow_negative_indices=False
        )
        arrays = [cut(start_indices=(at, j * units)) for j in range(count)]
        return [jnp.broadcast_to(a.astype(self.wide), (width, self.h)) for a in arrays]

    def results(self) -> Buffers:
        """Room for states and outputs of all computed rows."""
        sizes = (self.step.states, *self.step.outputs)
        return [
            jnp.zeros((self.form.computed, n * self.h), dtype)
            for n, dtype in zip(sizes, self.dtypes, strict=True)
        ]

    def unjoined(self, x: Any) -> Any:
        """(rows, parts h) as (rows, parts, h)."""
        return x.reshape(x.shape[0], -1, self.h)


def _gather(x: Operands, loop: _Loop) -> Results:
    form, h = loop.form, loop.h
    # The row behind all stays 0: what is taken of a child that is not there.
    behind = [(0, form.computed + 1), (0, 0)]
    rows = [jnp.pad(a.reshape(form.leaves, h), behind) for a in (x.state, *x.carries)]
    first = len(rows)

    def body(t: Any, buffers: Buffers) -> Buffers:
        rows, results = buffers[:first], buffers[first:]
        sources, at = loop.rows_of(loop.sources, t), t * form.width
        state, *carries = (a.at[sources].get(mode="promise_in_bounds") for a in rows)
        z = loop.products(state.reshape(form.width, -1), t, transposed=False)
        products = [z[:, p * h : (p + 1) * h] for p in range(loop.step.products)]
        of_children = [c[:, k] for k in range(form.slots) for c in carries]
        (state, *outputs), new = loop.apply(t, products, of_children)
        made = zip(rows, (state, *new), strict=True)
        return [
            *(_put(a, y, form.leaves + at) for a, y in made),
            *(_put(a, y, at) for a, y in zip(results, outputs, strict=True)),
        ]

    _, *outputs = loop.results()
    state, *done = loop.run(body, [*rows, *outputs])
    computed = slice(form.leaves, form.rows)
    return Results(
        loop.unjoined(state[computed]),
        None,
        [c[computed] for c in done[: first - 1]],
        [loop.unjoined(y) for y in done[first - 1 :]],
    )


def _emit(x: Operands, loop: _Loop) -> Results:
    form, h = loop.form, loop.h
    count = 1 + loop.step.carries
    sums = [jnp.zeros((form.rows, h), loop.wide) for _ in range(count)]

    def body(i: Any, buffers: Buffers) -> Buffers:
        sums, results = buffers[:count], buffers[count:]
        t = loop.tiles - 1 - i
        sources, at = loop.rows_of(loop.sources, t), t * form.width
        own, *carries = (
            jax.lax.dynamic_slice_in_dim(
                a, form.leaves + at, form.width, allow_negative_indices=False
            )
            for a in sums
        )
        (states, *outputs), new = loop.apply(t, [own], carries)
        back = loop.products(states, t, transposed=True).reshape(form.width, form.slots, h)
        by_leaf = (new[i :: loop.step.carries] for i in range(loop.step.carries))
        given = (back, *(jnp.stack(slots, 1) for slots in by_leaf))
        made = zip(results, (states, *outputs), strict=True)
        return [
            # What goes to no child is behind all rows, and dropped.
            *(a.at[sources].add(y, mode="drop") for a, y in zip(sums, given, strict=True)),
            *(_put(a, y, at) for a, y in made),
        ]

    done = loop.run(body, [*sums, *loop.results()])
    reached, *carries = (a[: form.leaves] for a in done[:count])
    states, *outputs = (loop.unjoined(y) for y in done[count:])
    return Results(states, loop.unjoined(reached), carries, outputs)


def _put(x: Any, rows: Any, at: Any) -> Any:
    """An array with some of its rows replaced."""
    return jax.lax.dynamic_update_slice(x, rows, (at, 0), allow_negative_indices=False)
