"""Topologies without their transpose: what they serve, what they refuse, and how they travel."""

from __future__ import annotations

import copy
import functools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from patterns import (
    PATTERNS,
    SQUARE,
    TOPOLOGY,
    assert_same_topology,
    leaves,
    normal,
    pattern,
)

import jaxsparse
from jaxsparse import (
    CSR,
    EXPORT_DISABLED_CHECKS,
    H200,
    Topology,
    explain,
    linear,
    masks,
    recurrent,
    sddmm,
    sparse_attention,
    sparse_softmax,
    spmm,
)
from jaxsparse.primitive import equations

FORWARD = TOPOLOGY.without_transpose()
OF_TRANSPOSE = "transposed_pattern", "permutation", "row_cuts[1]"
MISSING = "needs a topology with its transposed pattern, got one that was made without: use "


def missing(purpose):
    return pytest.raises(ValueError, match=re.escape(f"{purpose} {MISSING}"))


# ---- What it holds ----


@pytest.mark.parametrize("under_jit", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_holds_all_but_the_transpose(name, under_jit):
    offsets, columns, shape = PATTERNS[name]
    make = functools.partial(Topology, shape=shape, transpose=False)
    whole = Topology(offsets, columns, shape)
    topology = (jax.jit(make) if under_jit else make)(offsets, columns)
    assert not topology.has_transpose and whole.has_transpose
    assert topology.transposed_pattern is None and topology.permutation is None
    assert_same_topology(topology, whole.without_transpose())
    assert {
        k: v for k, v in leaves(whole).items() if not k[1:].startswith(OF_TRANSPOSE)
    }.keys() == (leaves(topology).keys())
    assert under_jit or topology.static == whole.static
    topology.verify()
    assert_same_topology(topology.with_transpose(), whole)
    assert_same_topology(jax.jit(Topology.with_transpose)(topology), whole)


def test_is_itself_where_nothing_changes():
    assert TOPOLOGY.with_transpose() is TOPOLOGY
    assert_same_topology(FORWARD.without_transpose(), FORWARD)
    assert FORWARD.as_static().as_dynamic().has_transpose is False


@pytest.mark.parametrize("nse", [None, 20])
def test_from_mask(nse):
    mask = masks.band(2)
    dense = mask(np.arange(5)[:, None], np.arange(5))
    expected = Topology.from_mask(mask, (5, 5), nse).without_transpose()
    assert_same_topology(Topology.from_mask(mask, (5, 5), nse, transpose=False), expected)
    assert_same_topology(Topology.from_mask(dense, nse=nse, transpose=False), expected)
    if nse:
        make = functools.partial(Topology.from_mask, nse=nse, transpose=False)
        assert_same_topology(jax.jit(make)(dense), expected)
        assert_same_topology(
            jax.jit(lambda: make(lambda i, j: jnp.abs(i - j) < 2, (5, 5)))(), expected
        )
        traced = jax.make_jaxpr(make)(dense).jaxpr
        # Rows are ordered by length; the entries are not sorted.
        assert [e.primitive.name for e in equations(traced)].count("sort") == 1


def test_batch():
    dense = np.random.default_rng(0).random((6, 4, 5)) < 0.4
    whole = Topology.from_mask(dense)
    topology = Topology.from_mask(dense, transpose=False)
    assert_same_topology(topology, whole.without_transpose())
    assert_same_topology(topology.reshape_batch(2, 3).with_transpose(), whole.reshape_batch(2, 3))
    assert_same_topology(jax.vmap(Topology.with_transpose)(topology), whole)
    assert_same_topology(jax.jit(Topology.with_transpose)(topology), whole)


def test_takes_eight_bytes_an_entry_or_less():
    """As docs/design.md states."""
    dense = np.random.default_rng(0).random((1024, 1024))
    for stored, most in (0.1, 7), (0.05, 8):
        a = CSR.fromdense(jnp.asarray(dense < stored, jnp.float32))
        whole = (a.nbytes - a.values.nbytes) / a.nse
        b = a.with_values(a.values, a.topology.without_transpose())
        assert (b.nbytes - b.values.nbytes) / b.nse < most < 16 < whole < 20


# ---- What it serves ----

SERVED = {
    "spmm": (lambda t, v, x: spmm(CSR(v, t), x), [(12,), (5, 3)]),
    "vector": (lambda t, v, x: CSR(v, t) @ x, [(12,), (5,)]),
    "epilogue": (
        lambda t, v, x, b: spmm(CSR(v, t), x, bias=b, activation="gelu"),
        [(12,), (5, 3), (6,)],
    ),
    "linear": (lambda t, v, x: linear(x, CSR(v, t)), [(12,), (4, 5)]),
    "sddmm": (lambda t, x, y: sddmm(x, y, t).values, [(6, 3), (5, 3)]),
    "scaled": (lambda t, x, y, s: sddmm(x, y, t, scale_by=s).values, [(6, 3), (5, 3), (12,)]),
    "softmax": (lambda t, v: sparse_softmax(CSR(v, t), scale=0.5).values, [(12,)]),
    "dense": (lambda t, v: CSR(v, t).todense(), [(12,)]),
    "sum of columns": (lambda t, v: CSR(v, t).sum(0), [(12,)]),
    "scaled columns": (lambda t, v, x: (CSR(v, t) * x).values, [(12,), (5,)]),
}
NSE = TOPOLOGY.nse
# With respect to which operands a gradient is no product by the transposed matrix.
WITHOUT_TRANSPOSE = {
    "spmm": (0,),
    "vector": (0,),
    "epilogue": (0, 2),
    "linear": (0,),
    "sddmm": (0,),
    "scaled": (0, 2),
    "softmax": (0,),
    "dense": (0,),
    "sum of columns": (0,),
    "scaled columns": (0, 1),
}


def problem(name):
    function, shapes = SERVED[name]
    operands = normal([(NSE,) if shape == (12,) else shape for shape in shapes])
    return function, operands


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", SERVED)
def test_values_and_tangents_are_those_of_the_whole_topology(name, static):
    function, operands = problem(name)
    whole = Topology(TOPOLOGY.row_offsets, TOPOLOGY.column_indices[: TOPOLOGY.nnz], (6, 5))
    whole = whole if static else TOPOLOGY
    operands = [x[: whole.nse] if x.shape == (NSE,) else x for x in operands]
    forward = whole.without_transpose()
    assert forward.static is static

    def both(t):
        return jax.jvp(functools.partial(function, t), operands, operands)

    for actual, expected in zip(both(forward), both(whole), strict=True):
        np.testing.assert_array_equal(actual, expected)
    jitted = jax.jit(function) if not static else jax.jit(functools.partial(function, forward))
    np.testing.assert_allclose(
        jitted(*operands) if static else jitted(forward, *operands),
        function(whole, *operands),
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("name", WITHOUT_TRANSPOSE)
def test_gradients_that_are_no_transposed_product(name):
    function, operands = problem(name)
    arguments = tuple(i + 1 for i in WITHOUT_TRANSPOSE[name])

    def loss(t, *xs):
        return jnp.sum(function(t, *xs) ** 2)

    gradient = jax.grad(loss, arguments)
    for actual, expected in zip(
        gradient(FORWARD, *operands), gradient(TOPOLOGY, *operands), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("name", ["spmm", "sddmm", "softmax"])
def test_vmap_over_operands_and_over_patterns(name):
    function, operands = problem(name)
    whole = jax.tree.map(lambda x: jnp.stack([x, x]), TOPOLOGY)
    many = [jnp.stack([x, 2 * x]) for x in operands]
    mapped = jax.vmap(function)
    expected = mapped(whole, *many)
    np.testing.assert_array_equal(mapped(whole.without_transpose(), *many), expected)
    over_operands = jax.vmap(functools.partial(function, FORWARD))
    np.testing.assert_array_equal(over_operands(*many), expected)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_attention(implementation):
    forward = SQUARE.without_transpose()
    query, key, value = normal([(2, 5, 4, 3)] * 3)
    attend = functools.partial(sparse_attention, implementation=implementation)
    expected = attend(query, key, value, SQUARE)
    np.testing.assert_allclose(attend(query, key, value, forward), expected, rtol=1e-6, atol=1e-6)

    def loss(query, key, topology):
        return jnp.sum(attend(query, key, value, topology) ** 2)

    # A block mask has both orientations.
    for a, b in zip(
        *(jax.grad(loss, (0, 1))(query, key, t) for t in (forward, SQUARE)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_second_derivatives_of_a_softmax():
    (v,) = normal([(NSE,)])

    def loss(v, topology):
        return jnp.sum(sparse_softmax(CSR(v, topology)).values ** 2)

    of_loss = jax.jacfwd(jax.grad(loss))
    np.testing.assert_array_equal(of_loss(v, FORWARD), of_loss(v, TOPOLOGY))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 70), st.integers(0, 70), st.floats(0, 1), st.integers(0, 5), st.integers())
def test_any_pattern(m, k, density, padding, seed):
    rng = np.random.default_rng(abs(seed))
    mask = rng.random((m, k)) < density
    whole = Topology.from_mask(mask, nse=int(mask.sum()) + padding)
    forward = Topology(whole.row_offsets, whole.column_indices, (m, k), transpose=False)
    assert_same_topology(forward.with_transpose(), Topology(*whole.pattern[:2], (m, k)))
    values = jnp.asarray(rng.standard_normal(whole.nse), jnp.float32)
    x = jnp.asarray(rng.standard_normal((k, 2)), jnp.float32)
    np.testing.assert_array_equal(CSR(values, forward) @ x, CSR(values, whole) @ x)


# ---- What it refuses ----

REFUSED = {
    "Topology.T": lambda v, x, y: FORWARD.T,
    "CSR.T": lambda v, x, y: CSR(v, FORWARD).T,
    "matmul: a product by the transposed matrix": lambda v, x, y: y.T @ CSR(v, FORWARD),
    "spmm: the gradient with respect to x": jax.grad(
        lambda v, x, y: jnp.sum((CSR(v, FORWARD) @ x) ** 2), 1
    ),
    "sddmm: the gradient with respect to y": jax.grad(
        lambda v, x, y: jnp.sum(sddmm(y, x, FORWARD).values ** 2), 1
    ),
}


@pytest.mark.parametrize("under_jit", [False, True])
@pytest.mark.parametrize("purpose", REFUSED)
def test_what_needs_the_transpose_says_so(purpose, under_jit):
    v, x, y = normal([(NSE,), (5, 3), (6, 3)])
    call = REFUSED[purpose]
    with missing(purpose):
        jax.eval_shape(call, v, x, y) if under_jit else call(v, x, y)


def test_the_transpose_can_be_had_inside_a_program():
    v, x = normal([(NSE,), (5, 3)])

    @jax.jit
    @jax.grad
    def gradient(x, topology):
        return jnp.sum((CSR(v, topology.with_transpose()) @ x) ** 2)

    expected = gradient(x, TOPOLOGY)
    np.testing.assert_allclose(gradient(x, FORWARD), expected, rtol=1e-6, atol=1e-6)
    with missing("Topology.T"):
        jax.jit(lambda t: t.T)(FORWARD)


def test_scans_want_the_whole_topology():
    matrix = CSR.fromdense(jnp.eye(4))
    forward = matrix.with_values(matrix.values, matrix.topology.without_transpose())
    with missing("recurrent.scan: recurrent"):
        recurrent.scan(recurrent.elman("relu"), forward, jnp.ones((2, 4)), jnp.ones((3, 2, 4)))
    with missing("recurrent.pack: a layout for scans"):
        recurrent.pack(forward, batch=2, dtype=jnp.float32)


# ---- How it travels ----


def matrices():
    a = CSR.fromdense(jnp.asarray(np.tri(6, 5), jnp.float32))
    return a, a.with_values(2 * a.values, a.topology.without_transpose())


def test_arithmetic_stays_in_the_form():
    a, forward = matrices()
    for b in forward + forward, -forward, forward[1:4], forward.astype(jnp.bfloat16):
        assert not b.topology.has_transpose
    np.testing.assert_array_equal((a + forward).todense(), 3 * a.todense())
    other = CSR.fromdense(jnp.eye(6, 5))
    assert (a + other).topology.has_transpose
    assert not (forward + other).topology.has_transpose


def test_programs_of_the_whole_pattern_are_not_found_for_the_other():
    a, forward = matrices()
    assert a.topology.key != forward.topology.key
    assert forward.topology.key == Topology(*a.topology.pattern[:2], (6, 5), transpose=False).key
    gradient = jax.jit(jax.grad(lambda x, a: jnp.sum((a @ x) ** 2)))
    gradient(jnp.ones((5, 2)), a)
    with missing("spmm: the gradient with respect to x"):
        gradient(jnp.ones((5, 2)), forward)
    again = jax.jit(lambda a: a)
    assert [again(m).topology.has_transpose for m in (a, forward, a)] == [True, False, True]


@pytest.mark.parametrize("dynamic", [False, True])
def test_copies(dynamic):
    _, a = matrices()
    a = a.with_values(a.values, a.topology.as_dynamic()) if dynamic else a
    for b in (
        pickle.loads(pickle.dumps(a)),
        copy.deepcopy(a),
        jax.tree.unflatten(*jax.tree.flatten(a)[::-1]),
        jax.jit(lambda a: a)(a),
        jax.device_put(a),
    ):
        assert_same_topology(b.topology, a.topology)
        assert b.topology.kind == a.topology.kind
        np.testing.assert_array_equal(b.todense(), a.todense())


@pytest.mark.parametrize("dynamic", [False, True])
def test_export(dynamic):
    pytest.importorskip("flatbuffers")
    _, a = matrices()
    a = a.with_values(a.values, a.topology.as_dynamic()) if dynamic else a
    program = jax.jit(lambda a, x: (sparse_softmax(a), a @ x))
    (batch,) = jax.export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, 5, 2), jnp.float32)
    exported = jax.export.export(program, disabled_checks=EXPORT_DISABLED_CHECKS)(a, x)
    again = jax.export.deserialize(exported.serialize())
    x = jnp.ones((3, 5, 2))
    softmax, product = again.call(a, x)
    assert not softmax.topology.has_transpose
    np.testing.assert_array_equal(product, program(a, x)[1])


def test_derivatives_by_the_values():
    _, a = matrices()
    a = a.with_values(a.values, a.topology.as_dynamic())
    x = jnp.ones((5, 2))
    for gradient in (f(lambda a: jnp.sum((a @ x) ** 2)) for f in (jaxsparse.grad,)):
        for of_a in gradient(a), jax.jit(gradient)(a):
            assert not of_a.topology.has_transpose
            np.testing.assert_allclose(of_a.values, 4 * (a @ x)[a.topology.row_indices, 0])


def test_checks(monkeypatch):
    monkeypatch.setenv("JAXSPARSE_CHECK", "1")
    v, x = normal([(NSE,), (5, 3)])
    expected = CSR(v, TOPOLOGY) @ x
    np.testing.assert_array_equal(CSR(v, FORWARD) @ x, expected)
    bad = FORWARD._with(pattern=FORWARD.pattern._replace(row_order=FORWARD.pattern.row_order + 9))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="bad pattern"):
        jax.block_until_ready(jax.jit(lambda t: CSR(v, t) @ x)(bad))
    with pytest.raises(ValueError, match=r"Topology\.verify: the arrays derived from the pattern"):
        bad.verify()


def test_over_several_devices():
    devices = jax.devices("cpu")[:4]
    if len(devices) < 4:
        pytest.skip("needs 4 CPU devices (tests/conftest.py)")
    mesh = jax.make_mesh((4,), ("data",), devices=devices)
    v, x = normal([(NSE,), (4, 5, 3)])

    def product(v, x, t):
        return sparse_softmax(sddmm(CSR(v, t) @ x, x, t)).values

    with jax.default_device(devices[0]):
        expected = product(v, x, FORWARD)
    local = jax.shard_map(product, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P("data"))
    for function in jax.jit(local), jax.jit(product):
        sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("data")))
        v_, t = jax.device_put((v, FORWARD), jax.sharding.NamedSharding(mesh, P()))
        actual = function(v_, sharded, t)
        assert actual.sharding.spec[0] == "data"
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", [16, 2048])  # of few columns by a kernel, of many by a dense product
def test_runs_on_a_gpu_as_the_whole_topology_does(n):
    offsets, columns, shape = pattern(1024, 512, density=0.3)
    whole = Topology(offsets, columns, shape)
    values, x = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((whole.nse,), (512, n)))
    y = jax.ShapeDtypeStruct((1024, n), jnp.bfloat16)

    def everything(t, values, x, y):
        a = CSR(values, t)
        return a @ x, spmm(a, x, activation="gelu"), sparse_softmax(sddmm(y, x, t)).values

    def runs(topology):
        return [str(call) for call in explain(everything, topology, values, x, y, device=H200)]

    assert runs(whole.without_transpose().as_dynamic()) == runs(whole.as_dynamic())
    traced = jax.jit(everything).trace(whole.without_transpose().as_dynamic(), values, x, y)
    assert "jaxsparse_sparse_softmax" in traced.lower(lowering_platforms=("cuda",)).as_text()
