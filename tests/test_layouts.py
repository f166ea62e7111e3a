"""Layouts that topologies carry: kinds, how they follow a pattern, and padding."""

from __future__ import annotations

import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patterns import PATTERNS, TOPOLOGY, assert_same_topology, leaves, normal

from jaxsparse import CSR, H200, Topology, recurrent, sparse_softmax
from jaxsparse.layouts import KINDS, LayoutKind, register
from jaxsparse.recurrent.layout import ScanLayout


class RowLengths(LayoutKind):
    """A kind as others may be: with an option, and made under a trace, too."""

    name = "row_lengths"

    def make(self, topology, *, scale=1):
        return jnp.asarray(scale * np.diff(np.asarray(topology.row_offsets)))

    def make_traced(self, topology, *, scale=1):
        return scale * jnp.diff(topology.row_offsets)

    def transpose(self, layout, transposed):
        return jnp.diff(transposed.row_offsets)

    def verify(self, layout, topology):
        if not np.array_equal(layout, self.make(topology)):
            raise ValueError("these are not the lengths of rows")


@pytest.fixture
def row_lengths(monkeypatch):
    for name, kind in KINDS.items():  # so that the registry is as it was after the test
        monkeypatch.setitem(KINDS, name, kind)
    yield register(RowLengths)
    del KINDS["row_lengths"]


# ---- Kinds ----


def test_every_topology_has_the_derived_kinds():
    assert list(KINDS) == ["tile_starts", "scan_layout", "block_mask", "row_cuts"]
    for topology in TOPOLOGY, TOPOLOGY.T, TOPOLOGY.without_transpose(), TOPOLOGY.padded(99):
        assert list(topology.layouts) == ["tile_starts"]
        starts = topology.operands()[7 if topology.has_transpose else 3]
        assert topology.layouts["tile_starts"] is starts


def test_layouts_are_immutable():
    with pytest.raises(TypeError):
        TOPOLOGY.layouts["tile_starts"] = jnp.zeros(1, jnp.int32)


def test_a_name_is_that_of_one_kind(row_lengths):
    with pytest.raises(ValueError, match=r"register: there is a kind named 'row_lengths' already"):
        register(row_lengths)


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("with_layout", lambda t: t.with_layout("tiles")),
        ("with_layouts", lambda t: t.with_layouts({"tiles": 1})),
    ],
)
def test_unknown_kinds(operation, call):
    kinds = "tile_starts, scan_layout, block_mask, row_cuts"
    expected = f"Topology.{operation}: the kind of a layout must be one of {kinds}, got 'tiles'"
    with pytest.raises(ValueError, match=re.escape(expected)):
        call(TOPOLOGY)


def test_a_layout_goes_with_its_topology(row_lengths):
    static = Topology.from_mask(np.tri(5, 4))
    topology = static.with_layout("row_lengths")
    assert static.static and not topology.static  # it is not found again by its positions
    assert list(topology.layouts) == ["tile_starts", "row_lengths"]
    lengths = [1, 2, 3, 4, 4]
    patterns = jax.tree.map(lambda x: jnp.stack([x, x]), topology)
    assert topology.with_layouts(static.layouts).layouts.keys() == static.layouts.keys()
    for carrying in (
        topology,
        topology.as_static(),
        topology.as_static().as_dynamic(),
        topology.without_transpose(),
        topology.without_transpose().with_transpose(),
        topology.padded(30),
        topology.T.T,
        pickle.loads(pickle.dumps(topology)),
        jax.jit(lambda t: t)(topology),
        jax.jit(lambda t: t.padded(30))(topology),
        topology.verify(),
        jax.tree.map(lambda x: x[0, 1], patterns.reshape_batch(1, 2)),
        CSR(jnp.ones(14), topology).astype(jnp.bfloat16).topology,
    ):
        np.testing.assert_array_equal(carrying.layouts["row_lengths"], lengths)
        carrying.verify()
    np.testing.assert_array_equal(topology.T.layouts["row_lengths"], [5, 4, 3, 2])
    assert leaves(topology)[".row_lengths"] is topology.layouts["row_lengths"]
    tangent = jax.tree.map(lambda x: x, topology.as_tangent())
    assert tangent.layouts["row_lengths"].dtype == jax.dtypes.float0
    with pytest.raises(ValueError, match=r"Topology\.verify: these are not the lengths"):
        topology.with_layout("row_lengths", scale=2).verify()


def test_layouts_of_traced_patterns(row_lengths):
    topology = Topology.from_mask(np.tri(5, 4), nse=20)

    @jax.jit
    def make(t):
        return t.with_layout("row_lengths", scale=3)

    np.testing.assert_array_equal(make(topology).layouts["row_lengths"], [3, 6, 9, 12, 12])
    many = jax.tree.map(lambda x: jnp.stack([x, x]), topology)
    assert jax.vmap(make)(many).layouts["row_lengths"].shape == (2, 5)
    assert jax.jit(lambda t: t.T.T)(make(topology)).layouts["row_lengths"].tolist() == (
        [1, 2, 3, 4, 4]  # without the option: its transpose does not know it
    )


def test_a_kind_that_is_registered_later_leaves_older_trees_alone():
    flat, tree = jax.tree.flatten(TOPOLOGY)
    KINDS["row_lengths"] = RowLengths()
    try:
        assert_same_topology(
            jax.tree.unflatten(tree, flat).with_layouts({}), TOPOLOGY.with_layouts({})
        )
    finally:
        del KINDS["row_lengths"]


# ---- Starts of tiles, and layouts for scans ----


def test_verify_finds_starts_of_tiles_that_are_wrong_or_missing():
    topology = Topology.from_mask(np.random.default_rng(0).random((70, 70)) < 0.5)
    starts = topology.layouts["tile_starts"]
    assert starts.size > 1
    for bad in starts.at[3].add(1), starts[:-1], jnp.zeros(1, jnp.int32):
        with pytest.raises(ValueError, match=r"Topology\.verify: the starts of tiles of Topology"):
            topology.with_layouts({"tile_starts": bad}).verify()
    with pytest.raises(ValueError, match="lacks the layout 'tile_starts'"):
        topology.with_layouts({}).verify()


def test_layouts_for_scans():
    topology = Topology.from_mask(np.eye(64, dtype=bool))
    options = {"gates": 1, "batch": 4, "dtype": jnp.dtype(jnp.bfloat16), "device": H200}
    laid_out = topology.with_layout("scan_layout", **options)
    matrix = CSR(jnp.ones(64), topology)
    packed = recurrent.pack(matrix, batch=4, dtype=jnp.bfloat16, device=H200)
    assert_same_topology(laid_out, packed.topology)
    assert isinstance(laid_out.layouts["scan_layout"], ScanLayout)
    assert "scan_layout" not in laid_out.T.layouts
    laid_out.without_transpose().verify()
    for bad in (
        jax.jit(lambda t: t.with_layout("scan_layout", **options)),
        jax.vmap(lambda t: t.with_layout("scan_layout", **options)),
    ):
        with pytest.raises(ValueError, match="needs one concrete pattern: call it outside of jax"):
            bad(jax.tree.map(lambda x: x[None], topology))
    with pytest.raises(ValueError, match="needs one concrete pattern"):
        jax.tree.map(lambda x: x[None], topology).with_layout("scan_layout", **options)


# ---- Padding ----


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("under_jit", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_padded_is_made_with_padding(name, under_jit, transpose):
    offsets, columns, shape = PATTERNS[name]
    topology = Topology(offsets, columns, shape, transpose=transpose)
    nse = len(columns) + 70
    padded = (jax.jit(Topology.padded, static_argnums=1) if under_jit else Topology.padded)(
        topology, nse
    )
    more = np.concatenate([columns[: offsets[-1]], np.zeros(nse - offsets[-1], int)])
    assert_same_topology(padded, Topology(offsets, more, shape, transpose=transpose))
    assert (padded.nse, padded.nnz, padded.kind) == (nse, topology.nnz, "dynamic")
    padded.verify()


@settings(max_examples=10, deadline=None)  # each compiles programs of its own
@given(st.integers(1, 70), st.integers(1, 70), st.floats(0, 1), st.integers(0, 200), st.integers())
def test_products_on_padded_patterns(m, k, density, room, seed):
    rng = np.random.default_rng(abs(seed))
    topology = Topology.from_mask(rng.random((m, k)) < density)
    padded = topology.padded(topology.nse + room).verify()
    assert_same_topology(padded.T, Topology(*topology.T.pattern[:2], (k, m)).padded(padded.nse))
    values = jnp.asarray(rng.standard_normal(topology.nse), jnp.float32)
    x = jnp.asarray(rng.standard_normal((k, 2)), jnp.float32)
    a, b = CSR(values, topology), CSR(jnp.pad(values, (0, room)), padded)
    np.testing.assert_array_equal(b @ x, a @ x)
    np.testing.assert_array_equal(b.T.todense(), a.T.todense())
    # With room for more entries, a GPU's lanes add up the entries of a row in another order.
    softmax = sparse_softmax(b).values[: a.nse]
    np.testing.assert_allclose(softmax, sparse_softmax(a).values, rtol=1e-6)


def test_padded_batches_and_gradients():
    dense = np.random.default_rng(0).random((3, 6, 5)) < 0.4
    patterns = Topology.from_mask(dense)
    padded = patterns.padded(33)
    assert_same_topology(padded, Topology.from_mask(dense, nse=33))
    assert_same_topology(jax.vmap(lambda t: t.padded(33))(patterns), padded)
    # Patterns with room for as many entries stack.
    each = [Topology.from_mask(mask).padded(33) for mask in dense]
    assert_same_topology(jax.tree.map(lambda *xs: jnp.stack(xs), *each), padded)
    v, x = normal([(33,), (5, 2)])

    def loss(x, topology):
        return jnp.sum((CSR(v, topology) @ x) ** 2)

    np.testing.assert_array_equal(
        jax.vmap(jax.grad(loss), (None, 0))(x, padded),
        jnp.stack([jax.grad(loss)(x, t) for t in each]),
    )


def test_padded_keeps_what_fits():
    static = Topology.from_mask(np.tri(5, 4))
    assert static.padded(static.nse).kind == "dynamic"
    assert_same_topology(static.padded(static.nse), static)
    dynamic = static.as_dynamic()
    assert dynamic.padded(dynamic.nse) is dynamic
    made = []
    jax.jit(lambda x: made.append(static.padded(50)) or x)(1.0)
    assert_same_topology(made[0], static.padded(50))  # of a concrete pattern, it is concrete


@pytest.mark.parametrize(
    ("nse", "error", "message"),
    [
        (13, ValueError, "Topology.padded: nse=13 is less than the 14 entries"),
        (-1, ValueError, "Topology.padded: nse must be >= 0, got -1"),
        (2**31, ValueError, "Topology.padded: nse must be < 2147483648"),
        (15.0, TypeError, "Topology.padded: nse must be an integer, got 15.0"),
    ],
)
def test_padded_errors(nse, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Topology.from_mask(np.tri(5, 4)).padded(nse)


def test_pickles_of_an_older_version_load():
    """Each layout was an attribute, and Python pickled the attributes."""
    names = ("pattern", "transposed_pattern", "permutation", "shape", "kind")
    slots = {name: getattr(TOPOLOGY, name) for name in names}
    slots |= {"tile_starts": TOPOLOGY.layouts["tile_starts"], "scan_layout": None}
    slots |= {"_key": None, "_row_indices": None, "_transposed": None}
    old = object.__new__(Topology)
    old.__setstate__((None, slots))
    assert_same_topology(old, TOPOLOGY)
    assert old.kind == TOPOLOGY.kind and list(old.layouts) == ["tile_starts"]
