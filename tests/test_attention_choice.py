"""What masks of attention become, and what runs: block masks, kernels, compositions, errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_problems import operands
from reference import attention

from jaxsparse import (
    H200,
    BlockMask,
    Topology,
    explain,
    masks,
    merge_attention,
    sparse_attention,
)
from jaxsparse.device import lowered_for
from jaxsparse.ops.attention import (
    OF_MASKS,
    attention_cotangent_p,
    attention_p,
    attention_tangent_p,
)
from jaxsparse.primitive import OPERATIONS, Fallback, choose, equations, narrowed, typed_call


@pytest.mark.parametrize(
    ("dtype", "h", "e", "kind", "expected"),
    [
        ("bfloat16", 64, 64, "block_mask", "tiles"),
        ("float16", 128, 128, "topology", "tiles"),
        ("bfloat16", 96, 120, "block_mask", "the kernel of heads of 128, padded, because"),
        ("bfloat16", 192, 128, "block_mask", "tiles_mma"),
        ("float32", 5, 15, "topology", "the kernel of heads of 8 and 16, padded, because"),
        ("float32", 64, 64, "topology", "tiles_mma"),
        ("float32", 96, 96, "block_mask", "tiles_mma"),
        ("float32", 64, 64, "few", "sddmm, sparse_softmax and spmm, because the mask's tiles have"),
        ("float32", 64, 264, "topology", "sddmm, sparse_softmax and spmm, because no kernel takes"),
        ("bfloat16", 64, 264, "block_mask", "attention by blocks of keys in plain XLA, because"),
        ("float16", 40, 72, "graph", "csr"),
        ("float64", 64, 64, "graph", "csr"),
        ("float32", 600, 64, "graph", "because no kernel takes float32 heads of 600 and 64"),
    ],
)
def test_explain(dtype, h, e, kind, expected):
    mask = masks.causal() & masks.band(300)
    stored = BlockMask.from_mask(mask, (1000, 1000))
    if kind in ("topology", "few"):
        mask = mask & masks.random(0.9, 1000) if kind == "few" else mask
        stored = Topology.from_mask(mask, (1000, 1000))
    t = 1000
    if kind == "graph":  # few entries in each cell, of which there are many
        t = 17000
        columns = np.arange(t)[:, None] % 4000 + 4000 * np.arange(4)
        stored = Topology(4 * np.arange(t + 1), columns.reshape(-1), (t, t))
    x = [jax.ShapeDtypeStruct((1, t, 2, size), dtype) for size in (h, h, e)]

    def loss(q, k, v, mask):
        return jnp.sum(sparse_attention(q, k, v, mask))

    calls = explain(jax.grad(loss, (0, 1, 2)), *x, stored, device=H200)
    assert [call.operation for call in calls] == ["attention", "attention_cotangent"]
    for call in calls:
        assert expected in str(call) and call.shape == (t, t)
        is_variant = expected.startswith("tiles") or expected == "csr"
        assert call.variant == (expected if is_variant else None)
    if kind == "block_mask":
        assert "mask (1000, 1000) with 26 of 64 tiles, 42 of 256 cells partial" in str(calls[0])
        assert calls[0].entries is None


@pytest.mark.parametrize(
    ("scale", "expected"),
    [(0.0, "tiles_mma"), (1e-35, "tiles_mma"), (1e38, "tiles_mma"), (-0.1, "tiles")],
)
def test_scales_that_kernels_divide_by(scale, expected):
    """The kernel of keys by warpgroups divides lse by the scale."""
    stored = BlockMask.from_mask(masks.causal(), (300, 300))
    x = jax.ShapeDtypeStruct((1, 300, 2, 64), "bfloat16")

    def loss(q, k):
        return jnp.sum(sparse_attention(q, k, k, stored, scale=scale))

    *_, call = explain(jax.grad(loss), x, x, device=H200)
    assert call.operation == "attention_cotangent" and call.variant == expected


@pytest.mark.parametrize(
    ("sequences", "keys", "heads", "decode", "tiles"),
    [
        (64, 32768, 8, 2027.2, None),
        (64, 32768, 32, 2032.6, None),
        (64, 32768, 64, 2039.6, None),
        (1, 131072, 8, 154.7, 1357.4),
        (1, 131072, 64, 176.1, 1361.6),
        (8, 131072, 8, 1029.1, None),
        (8, 131072, 64, 1040.7, None),
        (1, 4096, 32, 29.0, 49.5),
        (8, 4096, 32, 51.6, 95.0),
        (64, 1024, 32, 87.1, 198.9),
    ],
)
def test_one_query_takes_the_faster_kernel(sequences, keys, heads, decode, tiles):
    """By microseconds on an H200, which are predicted; `tiles` is expected to be slower."""
    q = jax.ShapeDtypeStruct((sequences, 1, heads, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((sequences, keys, 8, 128), jnp.bfloat16)
    (call,) = explain(lambda q, k: sparse_attention(q, k, k), q, k, device=H200)
    costs = dict(call.variants)
    assert call.variant == "decode" and abs(costs["decode"] / decode - 1) < 0.09
    assert tiles is None or (decode < tiles and costs["decode"] < costs["tiles"])


def test_tangents_have_kernels():
    mask = BlockMask.from_mask(masks.causal(), (300, 300))
    x = jax.ShapeDtypeStruct((1, 300, 2, 64), jnp.bfloat16)

    def along(x):
        return jax.jvp(lambda x: sparse_attention(x, x, x, mask), (x,), (x,))[1]

    jaxpr = jax.make_jaxpr(along)(x).jaxpr
    (eqn,) = (eqn for eqn in equations(jaxpr) if eqn.primitive is attention_tangent_p)
    call = typed_call(OPERATIONS[attention_tangent_p], eqn.params, [v.aval for v in eqn.invars])
    for device in lowered_for("cpu"), H200:
        assert not isinstance(choose(call, device), Fallback)


def test_functions_are_masks_of_what_they_read_now():
    q, k, v = operands(1, 9, 9, 1, 1, 4, 4, "float32")
    ids = np.zeros(9, int)
    before = sparse_attention(q, k, v, lambda rows, columns: ids[rows] == ids[columns])
    ids = np.arange(9)
    np.testing.assert_allclose(
        sparse_attention(q, k, v, lambda rows, columns: ids[rows] == ids[columns]), v, rtol=1e-6
    )
    assert not np.allclose(before, v)

    def attend(q, k, v, ids):
        function = lambda rows, columns: ids[rows] == ids[columns]  # noqa: E731
        inside = jax.lax.map(lambda q: sparse_attention(q, k[0], v[0], function), q)
        return inside, sparse_attention(q, k, v, function)

    for a, b in zip(*jax.jit(attend)(q, k, v, jnp.arange(9) // 4), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_patterns_that_programs_make_no_block_mask_of():
    """What a block mask may take is much here: the pattern alone is used."""
    t = 16500
    topology = Topology.from_mask(masks.causal() & masks.band(5), (t, t))
    x = jax.ShapeDtypeStruct((1, t, 1, 8), jnp.float32)
    (call,) = explain(sparse_attention, x, x, x, topology, device=H200)
    assert "pattern (16500, 16500)" in str(call)
    # On the host it is known to take little.
    (call,) = explain(lambda x: sparse_attention(x, x, x, topology), x, device=H200)
    assert "mask (16500, 16500) with 257 of 16641 tiles" in str(call)


def test_programs_for_any_batch_take_the_kernel():
    (b,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((b, 256, 2, 64), jnp.bfloat16)
    mask = BlockMask.from_mask(masks.causal(), (256, 256))
    jaxpr = jax.make_jaxpr(lambda x: sparse_attention(x, x, x, mask))(x)
    (eqn,) = (eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive is attention_p)
    call = typed_call(OPERATIONS[attention_p], eqn.params, [v.aval for v in eqn.invars])
    made = choose(call, H200)
    assert not isinstance(made, Fallback) and made.attributes["workspace"] > 0


def test_long_rows_have_a_bounded_workspace():
    """Sums of their parts would take 8, 65 and 132 MB; beyond 64 MiB no row is cut."""
    t, row = 20000, 100
    columns = np.tile(t // row * np.arange(row), t)
    topology = Topology(row * np.arange(t + 1), columns, (t, t))

    def workspace(heads):
        x = jax.ShapeDtypeStruct((1, t, heads, 64), jnp.bfloat16)
        jaxpr = jax.make_jaxpr(sparse_attention)(x, x, x, topology).jaxpr
        (eqn,) = (eqn for eqn in equations(jaxpr) if eqn.primitive is attention_p)
        call = typed_call(OPERATIONS[attention_p], eqn.params, [v.aval for v in eqn.invars])
        made = choose(call, H200)
        assert not isinstance(made, Fallback)
        return made.attributes["workspace"]

    assert 8e6 < workspace(8) < 9e6
    assert 65e6 < workspace(63) < 2**26
    assert workspace(128) < 2**20


def test_a_pattern_alone_goes_to_the_variant_that_takes_no_block_mask():
    """So that a program which takes a topology as its argument does not make one at every run."""
    t = 2000
    columns = np.sort((np.arange(t)[:, None] + [0, 5, 9]) % t)
    ring = Topology(3 * np.arange(t + 1), columns.reshape(-1), (t, t))
    x = jax.ShapeDtypeStruct((1, t, 2, 64), jnp.bfloat16)

    def operands_of(variant):
        def loss(x, topology):
            return jnp.sum(sparse_attention(x, x, x, topology, variant=variant))

        for eqn in equations(jax.make_jaxpr(jax.grad(loss))(x, ring).jaxpr):
            if eqn.primitive in (attention_p, attention_cotangent_p):
                operation = OPERATIONS[eqn.primitive]
                call = typed_call(operation, eqn.params, [v.aval for v in eqn.invars])
                made = narrowed(call, choose(call, H200), H200)
                names = [name for name, _ in operation.signature(eqn.params).operands]
                yield {names[i] for i in made.positions}, made.attributes["has_mask"]

    for names, has_mask in operands_of(None):
        assert "column_indices" in names and not names & OF_MASKS and not has_mask
    (names, has_mask), *_ = operands_of("tiles")
    assert names & OF_MASKS and has_mask
    # Compiled, the program has nothing left of the block mask.
    attend = jax.jit(lambda x, topology: sparse_attention(x, x, x, topology, variant="csr"))
    x = jnp.ones((1, t, 2, 4))
    program = attend.lower(x, ring).compile().as_text()
    (call,) = (
        line for line in program.splitlines() if "custom-call" in line and "attention" in line
    )
    assert f"s32[{-(-t // 128)}]" not in program and "u32[" not in call


def test_programs_for_any_batch_keep_the_block_mask():
    """The variant is chosen where they run."""
    t = 2000
    columns = np.arange(t)[:, None] // 3 + [0, 5, 9]
    few = Topology(3 * np.arange(t + 1), columns.reshape(-1), (t, t)).with_layout("block_mask")
    for batch, expected in ((1, False), (jax.export.symbolic_shape("b")[0], True)):
        x = jax.ShapeDtypeStruct((batch, t, 2, 64), jnp.bfloat16)
        jaxpr = jax.make_jaxpr(lambda x: sparse_attention(x, x, x, few))(x).jaxpr
        (eqn,) = (eqn for eqn in equations(jaxpr) if eqn.primitive is attention_p)
        call = typed_call(OPERATIONS[attention_p], eqn.params, [v.aval for v in eqn.invars])
        assert narrowed(call, choose(call, H200), H200).attributes["has_mask"] == expected


def test_masks_of_every_form_agree():
    q, k, v = operands(1, 100, 90, 1, 1, 4, 4, "float32")
    mask = masks.causal() & masks.band(20)
    written = np.asarray(mask(*np.ogrid[:100, :90]))
    forms = [
        mask,
        lambda rows, columns: (columns <= rows) & (rows - columns < 20),
        written,
        jnp.asarray(written),
        Topology.from_mask(mask, (100, 90)),
        Topology.from_mask(mask, (100, 90)).with_layout("block_mask"),
        BlockMask.from_mask(mask, (100, 90)),
    ]
    expected = attention(q, k, v, written)
    for form in forms:
        np.testing.assert_allclose(sparse_attention(q, k, v, form), expected, rtol=1e-5, atol=1e-6)
    everything = sparse_attention(q, k, v)
    np.testing.assert_allclose(
        everything, attention(q, k, v, np.ones((100, 90), bool)), rtol=1e-5, atol=1e-6
    )


def test_errors():
    q, k, v = operands(1, 6, 8, 4, 2, 3, 5, "float32")
    with pytest.raises(ValueError, match=r"mask must have shape \(6, 8\), got \(6, 7\)"):
        sparse_attention(q, k, v, BlockMask.from_dense(np.ones((6, 7), bool)))
    with pytest.raises(TypeError, match=r"mask must be a BlockMask, a Topology, .* got int"):
        sparse_attention(q, k, v, 3)
    with pytest.raises(ValueError, match=r"sinks must have shape \(4,\), one for each head"):
        sparse_attention(q, k, v, sinks=jnp.zeros(2))
    with pytest.raises(ValueError, match="scale must have no dimensions"):
        sparse_attention(q, k, v, scale=jnp.ones(4))
    with pytest.raises(ValueError, match=r"merge_attention: every lse must have shape \(1, 4, 6\)"):
        merge_attention([q, q], [jnp.zeros((1, 6, 4))] * 2)
    with pytest.raises(ValueError, match="needs one lse for each out"):
        merge_attention([], [])
