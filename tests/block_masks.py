"""Masks of every kind, and what block masks store, decoded entry by entry."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxsparse import masks
from jaxsparse.block_mask.cell_states import states_of

IDS = np.sort(np.random.default_rng(1).integers(0, 9, 1000)) // 2 * 3
TABLE = jnp.asarray(IDS)
FLAGS = jnp.asarray(np.arange(1000) % 100 < 3)


def documents_by_a_table(rows, columns):
    return (TABLE[rows] == TABLE[columns]) & (columns <= rows)


def dilated_blocks(rows, columns):
    near = jnp.where(rows > 300, abs(rows - columns) < 70, (rows - columns) % 256 < 64)
    return near & (rows // 100 == columns // 100)


def numpy_alone(rows, columns):
    return IDS[rows] == IDS[columns]


KINDS = [
    masks.causal(),
    masks.band(70),
    masks.sliding_window(100, 3),
    masks.strided(1),
    masks.strided(190),
    masks.block(64),
    masks.block(100),
    masks.documents(IDS),
    masks.padding(130),
    masks.global_tokens([0, 700, *range(192, 300)]),
    masks.random(0.5, 1000, band_width=64),
    masks.random(0.999, 1000),
    masks.offset(masks.causal() & masks.documents(IDS), rows=0, columns=0),
    masks.offset(masks.sliding_window(5), rows=-70, columns=2**31 - 1),
    ~masks.causal() | masks.global_tokens([5]),
    masks.from_function(documents_by_a_table),
    masks.from_function(dilated_blocks),
    masks.from_function(numpy_alone),
    masks.from_function(lambda rows, columns: True),
    masks.from_function(lambda rows, columns: FLAGS[rows] | (columns < 0)),
]


def stored(mask, T, S):
    return np.asarray(mask(np.arange(T, dtype=np.int32)[:, None], np.arange(S, dtype=np.int32)))


def decoded(lists, shape):
    """What lists store, by the words of ffi/attention/problem.h, entry by entry."""
    offsets, entries, bits_at, bits, order = map(np.asarray, lists)
    down, across = (-(-size // 128) for size in shape)
    dense = np.zeros((128 * down, 128 * across), bool)
    word, i = np.meshgrid(np.arange(128), np.arange(32), indexing="ij")
    rows = 16 * (word // 32) + word % 32 // 4 + 8 * (i // 2 % 2)
    columns = 8 * (i // 4) + 2 * (word % 32 % 4) + i % 2
    cells = np.zeros(down, int)
    for row in range(down):
        for entry in range(offsets[row], offsets[row + 1]):
            column, slot = entries[entry] & 0xFFFFFF, bits_at[entry]
            for cell in range(4):
                state = entries[entry] >> (24 + 2 * cell) & 3
                cells[row] += state != 0
                at = 128 * row + cell // 2 * 64, 128 * column + cell % 2 * 64
                if state == 2:
                    dense[at[0] : at[0] + 64, at[1] : at[1] + 64] = True
                elif state == 1:
                    dense[at[0] + rows, at[1] + columns] = bits[slot][word] >> i & 1
                    slot += 1
    assert (np.diff(cells[order]) <= 0).all()
    assert not dense[shape[0] :].any() and not dense[:, shape[1] :].any()
    return dense[: shape[0], : shape[1]]


def assert_stores(mask, expected):
    np.testing.assert_array_equal(decoded(mask.rows, mask.shape), expected)
    np.testing.assert_array_equal(decoded(mask.columns, mask.shape[::-1]), expected.T)
    mask.verify()


def assert_same(actual, expected):
    """The same lists, of which the actual ones may have more room."""
    for x, y in (actual.rows, expected.rows), (actual.columns, expected.columns):
        for name in x._fields:
            a, b = np.asarray(getattr(x, name)), np.asarray(getattr(y, name))
            padded = np.zeros_like(a)
            padded[: len(b)] = b
            np.testing.assert_array_equal(a, padded, err_msg=name)
            assert a.dtype == b.dtype


def cell_states(xp, mask, shape):
    down, across = (range(2 * -(-size // 128)) for size in shape)
    return states_of(xp, mask, down, across, shape)
