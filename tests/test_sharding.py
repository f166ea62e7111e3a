"""Operations over several devices of one process: jit with sharded operands, shard_map."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxsparse import (
    CSR,
    BlockMask,
    Topology,
    linear,
    masks,
    sddmm,
    sparse_attention,
    sparse_softmax,
    spmm,
)

DEVICES = jax.devices("cpu")
pytestmark = pytest.mark.skipif(len(DEVICES) < 8, reason="needs 8 CPU devices (tests/conftest.py)")


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("data", "model"), (kind, kind), devices=DEVICES[:8])


KINDS = pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(DEVICES[0]):
        yield


def operands(batch=8, m=6, k=7, n=4):
    rng = np.random.default_rng(0)
    topology = Topology.from_mask(rng.random((m, k)) < 0.5, nse=60)
    values = jnp.asarray(rng.standard_normal(topology.nse), jnp.float32)
    x = jnp.asarray(rng.standard_normal((batch, k, n)), jnp.float32)
    return values, topology, x


def loss(values, topology, x):
    """All three operations, with a batch of dense operands and one pattern."""
    y = jnp.tanh(spmm(CSR(values, topology), x))
    scores = sparse_softmax(sddmm(y, x, topology))
    return jnp.sum(spmm(scores, x) ** 2)


def place(mesh, topology, values, x, spec):
    replicated = NamedSharding(mesh, P())
    topology = jax.tree.map(lambda leaf: jax.device_put(leaf, replicated), topology)
    return (
        jax.device_put(values, replicated),
        topology,
        jax.device_put(x, NamedSharding(mesh, spec)),
    )


@KINDS
@pytest.mark.parametrize(
    "spec", [P("data"), P(("data", "model")), P(None, None, "model"), P("data", None, "model")]
)
def test_sharded_operands_stay_sharded(kind, spec):
    mesh = mesh_of(kind)
    values, topology, x = operands()
    expected = spmm(CSR(values, topology), x)
    with jax.set_mesh(mesh):
        v, t, sharded = place(mesh, topology, values, x, spec)
        forward = jax.jit(lambda v, t, x: spmm(CSR(v, t), x))
        out = forward(v, t, sharded)
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec), out.ndim)
        text = forward.lower(v, t, sharded).compile().as_text()
    assert "all-gather" not in text and "all-reduce" not in text
    np.testing.assert_allclose(out, expected, rtol=1e-6)


@KINDS
def test_gradient_needs_one_reduction(kind):
    mesh = mesh_of(kind)
    values, topology, x = operands()
    expected = jax.grad(loss, (0, 2))(values, topology, x)
    with jax.set_mesh(mesh):
        v, t, sharded = place(mesh, topology, values, x, P("data"))
        gradient = jax.jit(jax.grad(loss, (0, 2)))
        dv, dx = gradient(v, t, sharded)
        text = gradient.lower(v, t, sharded).compile().as_text()
    assert "all-gather" not in text and "all-reduce" in text
    assert dx.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), dx.ndim)
    np.testing.assert_allclose(dv, expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dx, expected[1], rtol=1e-4, atol=1e-5)


@KINDS
@pytest.mark.smoke
def test_shard_map_gradient_inside_and_outside(kind):
    mesh = mesh_of(kind)
    values, topology, x = operands()
    expected = jax.grad(loss, (0, 2))(values, topology, x)
    specs = (P(), P(), P(("data", "model")))

    def total(v, t, x):
        return jax.lax.psum(loss(v, t, x), ("data", "model"))

    with jax.set_mesh(mesh):
        v, t, sharded = place(mesh, topology, values, x, P(("data", "model")))
        outside = jax.jit(
            jax.grad(
                lambda v, t, x: jax.shard_map(total, mesh=mesh, in_specs=specs, out_specs=P())(
                    v, t, x
                ),
                (0, 2),
            )
        )(v, t, sharded)
        inside = jax.jit(
            jax.shard_map(
                jax.grad(total, (0, 2)),
                mesh=mesh,
                in_specs=specs,
                out_specs=(P(), P(("data", "model"))),
            )
        )(v, t, sharded)
    for got in (outside, inside):
        np.testing.assert_allclose(got[0], expected[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got[1], expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_shard_map_second_derivative(implementation):
    mesh = mesh_of(AxisType.Auto)
    values, topology, x = operands()

    def local(v, t, x):
        y = spmm(CSR(v, t), x, activation="gelu", implementation=implementation)
        return jax.lax.psum(jnp.sum(y**2), ("data", "model"))

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P(), P(("data", "model"))), out_specs=P()
    )

    def curvature(function, v):
        slope = lambda v: jax.jvp(lambda v: function(v, topology, x), (v,), (jnp.ones_like(v),))[1]  # noqa: E731
        return jax.grad(slope)(v)

    plain = lambda v, t, x: jnp.sum(spmm(CSR(v, t), x, activation="gelu") ** 2)  # noqa: E731
    got = jax.jit(lambda v: curvature(mapped, v))(values)
    np.testing.assert_allclose(got, curvature(plain, values), rtol=1e-3, atol=1e-4)


@KINDS
@pytest.mark.parametrize("cell", [0, 1])
def test_packed_weights_of_8_bits(kind, cell):
    """Products stay sharded; scales are of rows of the matrix, which each device has."""
    rng = np.random.default_rng(0)
    a = CSR.fromdense(jnp.asarray(rng.standard_normal((40, 300)), jnp.bfloat16))
    packed = a.pack(jnp.int8, cell=cell)
    x = jnp.asarray(rng.standard_normal((16, 300)), jnp.bfloat16)
    product = jax.jit(linear)
    with jax.set_mesh(mesh := mesh_of(kind)):
        placed = jax.device_put(packed, NamedSharding(mesh, P()))
        sharded = jax.device_put(x, NamedSharding(mesh, P("data", None)))
        y = product(sharded, placed)
    assert y.sharding.is_equivalent_to(sharded.sharding, 2)
    np.testing.assert_allclose(
        *(np.asarray(z, np.float32) for z in (y, product(x, packed))), rtol=1e-2, atol=1e-2
    )


@KINDS
@pytest.mark.parametrize("spec, cell", [(P("data"), 0), (P("data"), 1), (P(("data", "model")), 1)])
def test_packed_weights_of_sharded_rows(kind, spec, cell):
    """Products stay sharded, and so do gradients of what they multiply; others sum over devices."""
    rng = np.random.default_rng(0)
    a = CSR.fromdense(jnp.asarray(rng.standard_normal((40, 300)), jnp.bfloat16))
    packed = a.pack(cell=cell, trainable=True)
    x = jnp.asarray(rng.standard_normal((16, 300)), jnp.bfloat16)

    def loss(x, values, packed):
        packed = packed.repack(values)
        y = linear(x, packed, activation="gelu", preferred_element_type=jnp.float32)
        return jnp.sum(y**2) / 100, y

    compute = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, expected), (expected_gradient, of_values_expected) = compute(x, a.values, packed)
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        values, placed = jax.device_put((a.values, packed), NamedSharding(mesh, P()))
        sharded = jax.device_put(x, NamedSharding(mesh, P(*spec, None)))
        (_, y), (gradient, of_values) = compute(sharded, values, placed)
    assert of_values.sharding.is_fully_replicated
    np.testing.assert_allclose(
        *(np.asarray(z, np.float32) for z in (of_values, of_values_expected)), rtol=1e-2, atol=2e-2
    )
    for actual, wanted in (y, expected), (gradient, expected_gradient):
        assert actual.sharding.is_equivalent_to(sharded.sharding, 2)
        np.testing.assert_allclose(
            *(np.asarray(z, np.float32) for z in (actual, wanted)), rtol=1e-2, atol=1e-2
        )


@KINDS
@pytest.mark.parametrize("spec", [P("data"), P(None, None, "model"), P("data", None, "model")])
def test_gradients_with_bias_and_activation(kind, spec):
    mesh = mesh_of(kind)
    values, topology, x = operands()
    bias = jnp.linspace(-1, 1, 6)

    def loss(v, t, x, b):
        return jnp.sum(spmm(CSR(v, t), x, bias=b, activation="gelu") ** 2)

    expected = jax.grad(loss, (0, 2, 3))(values, topology, x, bias)
    with jax.set_mesh(mesh):
        v, t, sharded = place(mesh, topology, values, x, spec)
        b = jax.device_put(bias, NamedSharding(mesh, P()))
        gradient = jax.jit(jax.grad(loss, (0, 2, 3)))(v, t, sharded, b)
    for got, wanted in zip(gradient, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("axis", ["data", "model"])
@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_shard_map_over_some_axes(axis, implementation):
    """Manual over one axis, the other left to the compiler; gradients inside."""
    mesh = mesh_of(AxisType.Auto)
    values, topology, x = operands()

    def local(v, t, x):
        return jnp.sum(spmm(CSR(v, t), x, activation="gelu", implementation=implementation) ** 2)

    def total(v, t, x):
        return jax.lax.psum(local(v, t, x), axis)

    expected = jax.grad(local, (0, 2))(values, topology, x)
    mapped = jax.shard_map(
        jax.grad(total, (0, 2)),
        mesh=mesh,
        in_specs=(P(), P(), P(axis)),
        out_specs=(P(), P(axis)),
        axis_names={axis},
    )
    got = jax.jit(mapped)(values, topology, x)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("how", "check_vma"), [("closed_over", True), ("an_argument", False)])
@pytest.mark.smoke
def test_shard_map_takes_no_operand_without_elements(how, check_vma):
    """XLA of jaxlib 0.11 crashes where it does, as of a matrix of no entries."""
    matrix = CSR.fromdense(jnp.zeros((3, 5)))
    assert matrix.values.size == 0
    x = jnp.ones((8, 5, 2))

    def value(matrix, x):
        return jnp.sum(spmm(matrix, x), (1, 2)) + jnp.sum(x, (1, 2))

    options = {"mesh": mesh_of(AxisType.Auto), "out_specs": P("data"), "check_vma": check_vma}
    if how == "closed_over":
        mapped = jax.shard_map(lambda x: value(matrix, x), in_specs=P("data"), **options)
    else:
        both = jax.shard_map(value, in_specs=(P(), P("data")), **options)
        mapped = lambda x: both(matrix, x)  # noqa: E731
    lowered = jax.jit(jax.value_and_grad(lambda x: jnp.sum(mapped(x) ** 2))).lower(x)
    found = re.findall(r"sdy.manual_computation\(.*\((.*)\) \{", lowered.as_text())
    assert found and not any("tensor<0x" in operands for operands in found)
    loss, gradient = lowered.compile()(x)
    assert loss == 800
    np.testing.assert_array_equal(gradient, jnp.full_like(x, 20))


def test_a_call_of_constants_alone():
    matrix = CSR.fromdense(jnp.arange(6.0).reshape(2, 3))
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(spmm(matrix, x))))(jnp.ones((3, 4)))
    np.testing.assert_array_equal(
        gradient, jnp.broadcast_to(matrix.todense().sum(0)[:, None], (3, 4))
    )


def test_attention_sharded_over_heads_and_batch():
    mesh = mesh_of(AxisType.Auto)
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.standard_normal((4, 6, 2, 3)), jnp.float32) for _ in range(3))
    topology = Topology.from_mask(np.tril(np.ones((6, 6), bool)))
    expected = sparse_attention(q, k, v, topology)
    sharding = NamedSharding(mesh, P("data", None, "model"))
    sharded = [jax.device_put(x, sharding) for x in (q, k, v)]
    attend = jax.jit(sparse_attention, out_shardings=sharding)
    replicated = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P())), topology)
    out = attend(*sharded, replicated)
    assert "all-gather" not in attend.lower(*sharded, replicated).compile().as_text()
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_explicit_axes_refuse_what_cannot_be():
    mesh = mesh_of(AxisType.Explicit)
    values, topology, x = operands(m=8, k=8)
    with jax.set_mesh(mesh):
        v, t, sharded = place(mesh, topology, values, x, P(None, "data"))
        with pytest.raises(ValueError, match="spmm: x is sharded along k over 'data'"):
            jax.jit(lambda v, t, x: spmm(CSR(v, t), x))(v, t, sharded)


def test_masks_of_sequences_under_explicit_axes():
    """Block masks made in a program of arrays that are cut by sequences, and attention by them."""
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Explicit,), devices=DEVICES[:4])
    ids = np.arange(300, dtype=np.int32) // np.array([[100], [50], [77], [300]], np.int32)
    q = np.random.default_rng(0).standard_normal((4, 300, 2, 8)).astype(np.float32)

    def masks_of(ids):
        return jax.vmap(
            lambda ids: BlockMask.from_mask(
                (masks.documents(ids) | masks.from_function(lambda i, j: ids[j] == 1))
                & masks.padding(ids[0] + 290),
                (300, 300),
            )
        )(ids)

    def attend(q, ids):
        made = masks_of(ids)
        return sparse_attention(q, q, q, made.reshape_batch(4, 1)), made

    expected, wanted = jax.jit(attend)(q, ids)
    with jax.set_mesh(mesh):
        out, made = jax.jit(attend)(*(jax.device_put(x, P("data")) for x in (q, ids)))
    assert out.sharding.spec[0] == "data"
    assert {x.sharding.spec[0] for x in jax.tree.leaves(made)} == {"data"}
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, made.verify(), wanted)


@pytest.mark.parametrize("stride", [6, 7])
def test_regrouped_masks_under_explicit_axes(stride):
    """Sequences that are cut over devices, of a length that the stride divides or does not."""
    devices = jax.make_mesh((4,), ("data",), (AxisType.Explicit,), devices=DEVICES[:4])
    q = np.random.default_rng(0).standard_normal((4, 150, 2, 8)).astype(np.float32)

    @jax.jit
    def loss(q, mask):
        return jnp.sum(jnp.sin(sparse_attention(q, q, q, mask)))

    mask = masks.strided(stride) & masks.causal()
    expected = jax.value_and_grad(loss)(q, BlockMask.from_mask(mask, (150, 150)))
    with jax.set_mesh(devices):
        regrouped = BlockMask.from_mask(mask, (150, 150), regroup=stride)
        actual = jax.value_and_grad(loss)(jax.device_put(q, P("data")), regrouped)
    assert actual[1].sharding.spec[0] == "data"
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_heads_under_explicit_axes():
    q, k = (jnp.ones((1, 130, heads, 8)) for heads in (4, 2))
    by_heads = P(None, None, "model")
    for parts in 2, 4:  # a mask that was made for one mesh is made again for another
        mesh = jax.make_mesh((parts,), ("model",), (AxisType.Explicit,), devices=DEVICES[:parts])
        with jax.set_mesh(mesh):
            attend = jax.jit(lambda q, k: sparse_attention(q, k, k, masks.causal()))
            q, k = jax.device_put(q, by_heads), jax.device_put(k, P())
            if parts == 2:
                assert attend(q, k).sharding.spec[2] == "model"
                continue
            message = (
                "sparse_attention: 4 query heads are cut over 'model' into 4 parts, which 2 key "
                "heads can't be: reshard the query, repeat the key heads, or use automatic axes"
            )
            with pytest.raises(ValueError, match=re.escape(message)):
                attend(q, k)
            with pytest.raises(ValueError, match=re.escape(message)):
                sparse_attention(q, k, k, pages=jnp.zeros((1, 1), jnp.int32))
            attend(q, jnp.concatenate([k, k], axis=2))


def test_sums_over_devices_are_rounded_once():
    """Features of sddmm cut over devices: their sums meet in float32."""
    mesh = mesh_of(AxisType.Auto)
    rng = np.random.default_rng(3)
    topology = Topology.from_mask(rng.random((6, 7)) < 0.5)
    x, y = (jnp.asarray(rng.standard_normal((n, 64)), jnp.bfloat16) for n in (6, 7))
    cut = NamedSharding(mesh, P(None, ("data", "model")))
    sampled = jax.jit(lambda x, y: sddmm(x, y, topology).values)
    operands = jax.device_put(x, cut), jax.device_put(y, cut)
    assert "all-reduce" in sampled.lower(*operands).compile().as_text()
    exact = sddmm(x, y, topology, preferred_element_type=jnp.float32).values
    np.testing.assert_allclose(
        sampled(*operands).astype(jnp.float32), exact, rtol=2**-8 * 1.001, atol=1e-5
    )
