"""Interval arithmetic on masks: sound for every function, and exact where it can be."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from block_masks import FLAGS, IDS, KINDS, TABLE, assert_stores, cell_states, stored
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsparse import BlockMask, masks
from jaxsparse.masks.expression import as_mask
from jaxsparse.masks.function_intervals import truth_of_function
from jaxsparse.masks.intervals import Interval


def test_intervals_decide_what_they_should():
    """Every cell but those in which both values occur, of masks whose cells are like that."""
    shape = (1000, 1000)
    exact = [
        *(masks.causal(), masks.band(70), masks.sliding_window(64, 64), masks.strided(190)),
        *(masks.block(64), masks.block(100), masks.documents(IDS), masks.padding(130)),
        *(masks.global_tokens(range(64, 130)), masks.random(1.0, 1000), KINDS[15]),
        masks.causal() & masks.documents(IDS) & ~masks.band(300),
        as_mask(lambda rows, columns: (rows - 300 >> 6 == columns // 64) & (columns < 500)),
        as_mask(lambda rows, columns: jnp.maximum(rows, columns) - jnp.minimum(rows, 9) > 3),
        as_mask(lambda rows, columns: jnp.sign(rows * 2 - columns) + rows % 64 < 70),
    ]
    for mask in exact:
        expected = np.pad(stored(mask, *shape), ((0, 24), (0, 24)), mode="edge")
        cells = expected.reshape(16, 64, 16, 64)
        partial = cells.any((1, 3)) & ~cells.all((1, 3))
        partial[-1] |= cells.any((1, 3))[-1]
        partial[:, -1] |= cells.any((1, 3))[:, -1]
        undecided = cell_states(np, mask, shape) == 1
        # Documents may share an end, and then a cell has two.
        assert (undecided & ~partial).sum() <= 2 * ("documents" in repr(mask)), mask


@jax.jit
def floor_divide(x, y):
    """Not what JAX calls so."""
    return x // y + 1


SPIKE = jnp.zeros(1000, jnp.int32).at[300:401].set(1)
FUNCTIONS = [
    lambda x, y: x + y < 7,
    lambda x, y: x - y >= -3,
    lambda x, y: x * y != 12,
    lambda x, y: (-x < y) ^ (abs(x) > 5),
    lambda x, y: x // 7 == y // 7,
    lambda x, y: x % 7 == y % 7,
    lambda x, y: jax.lax.div(x, np.int32(7)) > jax.lax.rem(y, np.int32(5)),
    lambda x, y: jnp.clip(x, -3, 60) >= jnp.sign(y) * 8,
    lambda x, y: (x >> 3 <= y << 2) | (x**2 < jnp.square(y)),
    lambda x, y: jnp.where(x > y, jnp.minimum(x, 9), jnp.maximum(y, 4)) == 9,
    lambda x, y: (x > 0) == (y > 0),
    lambda x, y: jnp.where(x > 2, y > 3, x + y == 2),
    lambda x, y: (x > 3).astype(int) + (y > 5) != 1,
    lambda x, y: jnp.bool_(x) | ~jnp.logical_xor(y > 1, x != y),
    lambda x, y: (x.astype(jnp.float32) < 1.5) & (jnp.uint32(y) > 3),
    lambda x, y: jax.lax.div(x, np.int32(90)) == jax.lax.div(y, np.int32(80)),
    lambda x, y: floor_divide(x, 90) == 1,
    lambda x, y: TABLE[x] == 6,
    lambda x, y: SPIKE[abs(x) % 8 * 100] > 0,
    lambda x, y: FLAGS[y] & (x < 5),
    lambda x, y: jnp.squeeze(x[None] > y[None], 0),
    lambda x, y: jax.jit(lambda y, x: x // y, static_argnums=())(jnp.abs(x) + 1, y) > 2,
]
near = st.integers(-90, 90) | st.integers(-(2**31), 2**31 - 64)
near |= st.sampled_from([-(2**31), 2**31 - 64, -(2**30) - 3, 2**30 - 3])


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(FUNCTIONS), near, near, st.integers(0, 4), st.integers(0, 4))
def test_intervals_of_functions_are_sound(function, row, column, height, width):
    rows = np.arange(row, row + 5)[: height + 1].astype(np.int32)
    columns = np.arange(column, column + 5)[: width + 1].astype(np.int32)
    with np.errstate(over="ignore"):
        truth = truth_of_function(
            function, *(Interval(np, x[:1, None], x[-1:, None]) for x in (rows, columns))
        )
    # Of one size always, so that JAX compiles once.
    down, across = np.resize(rows, 5), np.resize(columns, 5)
    values = np.asarray(function(jnp.asarray(down)[:, None], jnp.asarray(across)[None]))
    assert np.all(truth.may) or not values.any()
    assert not np.any(truth.must) or values.all()


def test_functions_that_cannot_be_traced_are_evaluated():
    calls = []

    def mask(rows, columns):
        calls.append(np.shape(rows))
        return np.asarray(rows) >= np.asarray(columns)

    assert_stores(BlockMask.from_mask(mask, (200, 100)), np.tri(200, 100, dtype=bool))
    assert calls.pop(0) == (1, 1) and all(shape[1:] == (64, 1) for shape in calls)
    truth = truth_of_function(mask, *(Interval(np, *np.zeros((2, 1), np.int32)),) * 2)
    assert truth.may and not truth.must


def test_states_of_jax_are_those_of_numpy():
    def everything():
        return [cell_states(jnp, mask, (600, 1000)) for mask in KINDS]

    for mask, states in zip(KINDS, jax.jit(everything)(), strict=True):
        np.testing.assert_array_equal(states, cell_states(np, mask, (600, 1000)), err_msg=str(mask))
