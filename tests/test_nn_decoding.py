"""Decoding with a cache against the whole pass, row by row, and against Flax's own."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import combinations

nnx = pytest.importorskip("flax.nnx")

from jaxsparse import BlockMask, Topology, masks  # noqa: E402
from jaxsparse.nn import SparseAttention, SparseMultiHeadAttention, decoding  # noqa: E402

HEADS, FEATURES, LENGTH = 4, 16, 24
MASK = (masks.band(4) | masks.random(0.8, LENGTH, band_width=4, seed=1)) & masks.causal()
LONG = 800  # so that the keys of a window are few of the cache
WINDOW = (masks.sliding_window(9) | masks.global_tokens([0, 5])) & masks.causal()
RANDOM = np.random.default_rng(0)
PER_HEAD = np.tril(RANDOM.random((HEADS, LENGTH, LENGTH)) < 0.3)
# A kernel takes one query on a CPU, plain JAX elsewhere.
IMPLEMENTATIONS = [None, "xla"]
TABLE = np.tri(LENGTH, dtype=bool)


def inputs(*leading, length=LENGTH, seed=0):
    return jax.random.normal(jax.random.key(seed), (*leading, length, FEATURES))


def layer_on(pattern, heads=HEADS, **options):
    return SparseMultiHeadAttention(heads, FEATURES, pattern=pattern, **options, rngs=nnx.Rngs(0))


@nnx.jit
def step(layer, x, mask=None):
    return layer(x, decode=True, mask=mask)


def decoded(layer, x, prompt=0, dtype=jnp.float32):
    """What steps give one by one, perhaps behind a prompt."""
    layer.init_cache(x.shape, dtype)
    outputs = [step(layer, x[..., :prompt, :])] if prompt else []
    for i in range(prompt, x.shape[-2]):
        outputs.append(step(layer, x[..., i : i + 1, :]))
    return jnp.concatenate(outputs, -2)


def assert_near(actual, expected, tolerance=1e-5):
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(
        np.float32(actual), np.float32(expected), rtol=tolerance, atol=tolerance
    )


def numpy_function(rows, columns):
    return TABLE[np.asarray(rows), np.asarray(columns)]


PATTERNS = {
    "mask": MASK,
    "topology": Topology.from_mask(MASK, (LENGTH, LENGTH)),
    "function": lambda rows, columns: (columns <= rows) & (columns % 3 != 1),
    "numpy function": numpy_function,
    "without transpose": Topology.from_mask(MASK, (LENGTH, LENGTH), transpose=False),
    "heads": Topology.from_mask(PER_HEAD),
    "sequences": Topology.from_mask(PER_HEAD[:2, None]),
    "sequences and heads": Topology.from_mask(np.stack([PER_HEAD, PER_HEAD[::-1]])),
    "strictly past": masks.causal() & ~masks.band(1),  # the first query sees nothing
    "nothing": Topology.from_mask(np.zeros((LENGTH, LENGTH), bool)),
}


@combinations("pattern, prompt, implementation", PATTERNS, [0, 7], IMPLEMENTATIONS)
def test_steps_give_the_rows_of_the_whole_pass(pattern, prompt, implementation):
    layer, x = layer_on(PATTERNS[pattern], implementation=implementation), inputs(2)
    assert_near(decoded(layer, x, prompt), layer(x))
    assert layer.cache_index[...] == LENGTH


@combinations(
    "kind, prompt, key_heads, implementation",
    ["mask", "topology", "heads", "sequences"],
    [0, 100],
    [HEADS, 2],
    IMPLEMENTATIONS,
)
def test_a_window_of_a_long_cache(kind, prompt, key_heads, implementation):
    topology = Topology.from_mask(WINDOW, (LONG, LONG))
    bands = [masks.band(3 + i) & masks.causal() for i in range(HEADS)]
    several = np.stack([band(*np.ogrid[:LONG, :LONG]) for band in bands])
    pattern = {
        "mask": WINDOW,
        "topology": topology,
        "heads": Topology.from_mask(several),
        "sequences": Topology.from_mask(several[:2, None]),
    }[kind]
    layer = layer_on(pattern, num_kv_heads=key_heads, implementation=implementation)
    x = inputs(2, length=LONG)
    layer.init_cache(x.shape)
    assert layer.longest_row == (192 if kind == "mask" else 64)
    graph, state = nnx.split(layer)

    @jax.jit
    def generate(state, x):
        layer = nnx.merge(graph, state)
        first = [layer(x[:, :prompt], decode=True)] if prompt else []

        def body(carry, position):
            layer = nnx.merge(graph, carry)
            y = layer(position[:, None], decode=True)
            return nnx.state(layer), y[:, 0]

        _, ys = jax.lax.scan(body, nnx.state(layer), x[:, prompt:].swapaxes(0, 1))
        return jnp.concatenate([*first, ys.swapaxes(0, 1)], 1)

    assert_near(generate(state, x), layer(x, decode=False))
    text = str(jax.make_jaxpr(generate)(state, x))
    gathered = HEADS if kind == "heads" else key_heads
    assert f"[2,{layer.longest_row},{gathered}," in text  # so many keys are read in plain JAX


LEADING = {"none": (), "1": (1,), "3": (3,), "2, 3": (2, 3)}


@combinations(
    "leading, heads, implementation",
    LEADING,
    ["one", "each", "both"],
    IMPLEMENTATIONS,
)
def test_batches(leading, heads, implementation):
    leading = LEADING[leading]
    ones = (1,) * len(leading)
    batch = {"one": (), "each": (*ones, HEADS), "both": (*leading, HEADS)}[heads]
    mask = np.tril(RANDOM.random((*batch, LENGTH, LENGTH)) < 0.4)
    layer = layer_on(Topology.from_mask(mask), implementation=implementation)
    x = inputs(*leading)
    assert_near(decoded(layer, x, prompt=3), layer(x))


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_heads": 2},
        {"num_kv_heads": 1, "normalize_qk": True},
        {"qkv_features": 32, "out_features": 8, "use_bias": False},
        {"dropout_rate": 0.5, "deterministic": True},
        {"dtype": jnp.bfloat16},
        {"decode": True},
        {"implementation": "xla"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options(options):
    layer, x = layer_on(MASK, **options), inputs(2)
    tolerance = 3e-2 if "dtype" in options else 1e-5
    assert_near(decoded(layer, x, prompt=5), layer(x, decode=False), tolerance)


def test_a_cache_of_another_dtype():
    layer, x = layer_on(MASK), inputs(2)
    assert_near(decoded(layer, x, prompt=5, dtype=jnp.bfloat16), layer(x), 3e-2)
    assert layer.cached_key[...].dtype == jnp.bfloat16


@pytest.mark.smoke
def test_steps_are_those_of_flax():
    dense = nnx.MultiHeadAttention(HEADS, FEATURES, decode=True, rngs=nnx.Rngs(0))
    layer = SparseMultiHeadAttention.from_dense(dense, masks.causal())
    assert layer.decode and layer.cached_key is None
    x = inputs(2, length=LENGTH + 4)  # behind the end, each takes the place of the last one
    for each in (dense, layer):
        each.init_cache((2, LENGTH, FEATURES))
    for i in range(LENGTH + 4):
        assert_near(step(layer, x[:, i : i + 1]), step(dense, x[:, i : i + 1]))
    for name in ("cached_key", "cached_value", "cache_index"):
        mine, theirs = getattr(layer, name), getattr(dense, name)
        assert type(mine) is type(theirs) is nnx.Cache
        np.testing.assert_allclose(mine[...], theirs[...], rtol=1e-6)
    layer.init_cache((2, LENGTH, FEATURES))
    assert layer.cache_index[...] == 0 and not layer.cached_key[...].any()


def test_one_program_for_all_positions():
    for pattern in (WINDOW, Topology.from_mask(WINDOW, (LONG, LONG))):
        layer, x, traced = layer_on(pattern), inputs(1, length=1), []
        layer.init_cache((1, LONG, FEATURES))

        @nnx.jit
        def run(layer, x, traced=traced):
            traced.append(None)
            return layer(x, decode=True)

        for _ in range(5):
            run(layer, x)
        assert len(traced) == 1 and layer.cache_index[...] == 5


def test_nnx_scan_over_steps():
    layer, x = layer_on(MASK, decode=True), inputs(2)
    layer.init_cache(x.shape)

    @nnx.jit
    @nnx.scan(in_axes=(nnx.Carry, 1), out_axes=(nnx.Carry, 1))
    def scan(layer, x):
        return layer, layer(x[:, None])[:, 0]

    layer, ys = scan(layer, x)
    assert_near(ys, layer(x, decode=False))
    assert layer.cache_index[...] == LENGTH


def test_without_jit():
    for pattern in (MASK, PATTERNS["topology"], WINDOW):
        layer, x = layer_on(pattern), inputs(2)
        layer.init_cache(x.shape)
        parts = jnp.split(x, (3, 4, 10, 11), 1)
        y = jnp.concatenate([layer(part, decode=True) for part in parts], 1)
        assert_near(y, layer(x))


def test_a_topology_that_changes():
    """Its rows may be longer than those that the program was made for."""
    short = Topology.from_mask(masks.band(4) & masks.causal(), (LONG, LONG))
    room = int(Topology.from_mask(masks.causal(), (LONG, LONG)).nnz)
    layer, x = layer_on(short.padded(room), implementation="xla"), inputs(1, length=LONG)
    layer.init_cache(x.shape)
    assert layer.longest_row == 64
    layer.attention_fn.pattern[...] = Topology.from_mask(masks.causal(), (LONG, LONG), nse=room)

    @nnx.jit
    @nnx.scan(in_axes=(nnx.Carry, 1), out_axes=(nnx.Carry, 1))
    def scan(layer, x):
        return layer, layer(x[:, None], decode=True)[:, 0]

    _, ys = scan(layer, x)
    assert_near(ys, layer(x))


def test_keys_that_are_not_written_are_not_seen():
    """A prefix sees itself where it is one prompt; a window sees no keys ahead."""
    x = inputs(2)
    prefix = masks.causal() | masks.padding(7)
    assert_near(decoded(layer_on(prefix), x, prompt=7), layer_on(prefix)(x))
    both_sides = masks.band(5)
    expected = layer_on(both_sides & masks.causal())(x)
    assert_near(decoded(layer_on(both_sides), x), expected)
    topology = Topology.from_mask(both_sides, (LENGTH, LENGTH))
    assert_near(decoded(layer_on(topology), x), expected)
    layer = layer_on(both_sides)
    layer.init_cache(x.shape)
    for cache in (layer.cached_key, layer.cached_value):
        cache[...] = jnp.full_like(cache[...], 1e4)  # what another sequence left
    y = [step(layer, part) for part in jnp.split(x, (1, 2), 1)[:2]]
    assert_near(jnp.concatenate(y, 1), expected[:, :2])


BATCHES = {"one": (), "heads": (HEADS,), "sequences": (2, 1), "1": (1, 1), "all": (2, HEADS)}


@combinations(
    "kind, batch, implementation",
    [BlockMask.from_dense, Topology.from_mask, jnp.asarray],
    BATCHES,
    IMPLEMENTATIONS,
)
def test_masks_of_calls(kind, batch, implementation):
    batch = BATCHES[batch]
    mask = np.tril(RANDOM.random((*batch, LENGTH, LENGTH)) < 0.4)
    layer, x = layer_on(None, implementation=implementation), inputs(2)
    layer.init_cache(x.shape)
    outputs, begin = [], 0
    for end in (11, 12, 23, LENGTH):  # of two lengths, each of which is compiled
        rows = kind(mask[..., begin:end, :])
        outputs.append(layer(x[:, begin:end], decode=True, mask=rows))
        begin = end
    assert_near(jnp.concatenate(outputs, 1), layer(x, mask=kind(mask)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_model_with_a_cache_of_its_own(implementation):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, LONG, HEADS, 8))
    topology = Topology.from_mask(WINDOW, (LONG, LONG))
    attend = SparseAttention(topology, implementation=implementation)
    expected, longest = attend(q, k, v), attend.longest_row(LONG)
    assert longest == 64
    in_program = nnx.jit(lambda attend, *x: attend.decode(*x, longest_row=longest))
    for run in (attend.decode, functools.partial(in_program, attend)):
        for i in (0, 3, 300, LONG - 1):
            assert_near(run(q[:, i : i + 1], k, v, i), expected[:, i : i + 1])
        assert_near(run(q[:, 40:90], k, v, 40), expected[:, 40:90])
    not_known = nnx.jit(lambda attend, *x: attend.decode(*x))
    assert_near(not_known(attend, q[:, 9:10], k, v, 9), expected[:, 9:10])


def test_the_longest_row():
    cases = {
        masks.sliding_window(100): 192,  # 101 keys, in up to three cells
        masks.band(100): 192,
        masks.causal(): 832,
        masks.sliding_window(9) | masks.global_tokens([0, 300]): 320,  # row 300 sees 301
        masks.block(64): 64,
    }
    for mask, expected in cases.items():
        assert decoding.longest_row(mask, LONG) == expected
        assert (mask & masks.causal())(*np.ogrid[:LONG, :LONG]).sum(1).max() <= expected
    assert decoding.longest_row(numpy_function, LENGTH) == 64
    assert decoding.longest_row(masks.random(0.99, LONG), LONG) <= 832


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_in_a_key_that_is_not_seen(implementation):
    layer = layer_on(WINDOW, implementation=implementation)
    x = inputs(1, length=LONG).at[:, 20].set(jnp.nan)
    expected = layer(x)[:, :40]
    layer.init_cache(x.shape)
    y = jnp.concatenate([step(layer, x[:, i : i + 1]) for i in range(40)], 1)
    assert 0 < np.isnan(expected).sum() < expected.size
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))


def test_errors():
    layer, x = layer_on(MASK, dropout_rate=0.5), inputs(2)
    with pytest.raises(ValueError, match="cache not initialized, call ``init_cache`` first"):
        layer(x[:, :1], decode=True, deterministic=True)
    layer.init_cache(x.shape)
    with pytest.raises(ValueError, match="no dropout while decoding"):
        layer(x[:, :1], decode=True, deterministic=False)
    layer = layer_on(MASK)
    layer.init_cache(x.shape)
    for wrong in (x[:1, :1], jnp.ones((2, LENGTH + 1, FEATURES)), x[:, :0]):
        with pytest.raises(ValueError, match=r"cache shape error, expected key shape \(2, "):
            layer(wrong, decode=True)
    with pytest.raises(ValueError, match="cache shape error"):
        layer(x[:, :1], x[:, :2], decode=True)
    with pytest.raises(ValueError, match="or the call a mask, got both"):
        layer(x[:, :1], decode=True, mask=np.ones((1, LENGTH), bool))
    with pytest.raises(ValueError, match="is_causal can't be had"):
        layer(x[:, :1], decode=True, is_causal=True)
    assert layer.cache_index[...] == 0  # none of them was written
    layer = layer_on(PATTERNS["topology"])
    with pytest.raises(ValueError, match=r"shape \(30, 30\) for a cache of 30 positions, got \(24"):
        layer.init_cache((2, 30, FEATURES))
    layer = layer_on(None)
    layer.init_cache(x.shape)
    with pytest.raises(ValueError, match="or the call a mask, got neither"):
        layer(x[:, :1], decode=True)
    with pytest.raises(ValueError, match=r"mask must have shape \(1, 24\) for 1 queries and a"):
        layer(x[:, :1], decode=True, mask=np.ones((2, LENGTH), bool))
    with pytest.raises(ValueError, match=r"a batch of patterns must be \(4,\), one for each head"):
        layer(x[:, :1], decode=True, mask=np.ones((3, 1, 1, LENGTH), bool))
    q, cache = jnp.ones((2, 1, 4, 8)), jnp.ones((2, LENGTH, 3, 8))
    with pytest.raises(ValueError, match="3 key heads must divide 4"):
        SparseAttention(MASK).decode(q, cache, cache, 0)
    with pytest.raises(ValueError, match=r"key and value \(\.\.\., S, K, H\) with S >= T, got"):
        SparseAttention(MASK).decode(q, cache[:1], cache[:1], 0)
