"""States of sparse models through every route that Flax has for them, and files of our own."""

import functools
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
import flax
import orbax.checkpoint as ocp
import sparsify_problems
from flax import nnx

from jaxsparse import CSR, Topology, pruning
from jaxsparse.nn import (
    RNN,
    GRUCell,
    SparseLinear,
    SparseMultiHeadAttention,
    TopologyVariable,
    drop_transposes,
    verify,
)
from jaxsparse.nn.variables import topology_of
from jaxsparse.pruning import saving

IN, OUT = 12, 8
KEY = jax.random.key(0)


def linear(seed):
    rngs = seed if isinstance(seed, nnx.Rngs) else nnx.Rngs(seed)
    return SparseLinear(IN, OUT, sparsity=0.75, rngs=rngs)


def attention(seed):
    mask = np.random.default_rng(seed).random((6, 6)) < 0.4
    pattern = Topology.from_mask(mask | np.eye(6, dtype=bool), nse=36)
    return SparseMultiHeadAttention(2, IN, pattern=pattern, rngs=nnx.Rngs(seed))


def recurrent(seed):
    return RNN(GRUCell(IN, OUT, recurrent_sparsity=0.5, rngs=nnx.Rngs(seed)))


class Network(nnx.Module):
    """Of lists and shared layers, one of them a projection of several dimensions."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(IN, IN, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)])
        self.shared = self.layers[0]
        self.heads = nnx.LinearGeneral(IN, (2, 3), rngs=rngs)
        self.plain = nnx.Linear(IN, IN, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = x if isinstance(layer, nnx.Dropout) else nnx.relu(layer(x))
        return self.heads(self.shared(self.plain(x)))


def dense_network(seed=0):
    return Network(nnx.Rngs(seed))


def sparsified(seed):
    model = dense_network(seed)
    kept = jax.random.permutation(jax.random.key(seed), IN * IN).reshape(IN, IN) < 40
    model.shared.kernel[...] = model.shared.kernel[...] * kept
    heads = jax.random.permutation(jax.random.key(seed), IN * 6).reshape(IN, 2, 3) < 20
    model.heads.kernel[...] = model.heads.kernel[...] * heads
    return sparsify_problems.sparsified(model, jnp.ones((3, IN)))[0]


MODELS = {
    "linear": (linear, (5, IN)),
    "attention": (attention, (2, 6, IN)),
    "recurrent": (recurrent, (2, 4, IN)),
    "sparsified": (sparsified, (3, IN)),
}


@functools.cache
def made(kind):
    """Two models with patterns of their own, an input, and what the first one makes of it."""
    make, shape = MODELS[kind]
    model, x = make(1), jax.random.normal(KEY, shape)
    return model, make(2), x, model(x)


@pytest.fixture(params=MODELS)
def problem(request):
    model, other, x, expected = made(request.param)
    return model, nnx.clone(other), x, expected


# ---- Routes: from one model to another one, whose pattern is not the same ----


def with_orbax(saved, folder, target=None):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", saved)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "checkpoint", target)


def pure(model):
    """Without random keys, which msgpack can't hold."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState)))


def by_state(model, other, folder):
    nnx.update(other, nnx.state(model))
    return other


def by_pure_dict(model, other, folder):
    nnx.update(other, nnx.to_pure_dict(nnx.state(model)))
    return other


def by_tree_of_arrays(model, other, folder):
    nnx.update(other, nnx.as_pure(nnx.state(model)))
    return other


def by_merge(model, other, folder):
    return nnx.merge(nnx.graphdef(other), nnx.to_pure_dict(nnx.state(model)))


def by_orbax(model, other, folder):
    nnx.update(other, with_orbax(nnx.state(model), folder, nnx.state(other)))
    return other


def by_orbax_without_a_target(model, other, folder):
    graphdef, state = nnx.split(other)
    restored = with_orbax(pure(model), folder)
    nnx.replace_by_pure_dict(state, nnx.restore_int_paths(restored))
    return nnx.merge(graphdef, state)


def by_orbax_onto_a_mesh(model, other, folder):
    graphdef, state = nnx.split(other)
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    graphdef, state = nnx.get_abstract_model(lambda: nnx.merge(graphdef, state), mesh)
    return nnx.merge(graphdef, verify(with_orbax(nnx.state(model), folder, state)))


def by_msgpack(model, other, folder):
    saved = flax.serialization.to_bytes(pure(model))
    nnx.update(other, flax.serialization.from_bytes(pure(other), saved))
    return other


def by_msgpack_without_a_target(model, other, folder):
    saved = flax.serialization.to_bytes(pure(model))
    state = nnx.state(other)
    nnx.replace_by_pure_dict(state, flax.serialization.msgpack_restore(saved))
    nnx.update(other, state)
    return other


def by_msgpack_of_topologies(model, other, folder):
    saved, target = (
        nnx.to_pure_dict(nnx.state(m, nnx.Not(nnx.RngState)), lambda x: x.get_raw_value())
        for m in (model, other)
    )
    saved = flax.serialization.to_bytes(saved)
    nnx.update(other, flax.serialization.from_bytes(target, saved))
    return other


def by_average(model, other, folder):
    average = nnx.EMA(model, decay=0.5, only=nnx.Not(nnx.RngState))
    nnx.jit(lambda average, model: average.update(model))(average, model)
    return average.apply_to(other)


def by_variables_of_another_kind(model, other, folder):
    return nnx.with_vars(model, ref=True, only=nnx.Not(nnx.RngState), allow_duplicates=True)


ROUTES = {name: value for name, value in globals().items() if name.startswith("by_")}


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_outputs_survive(route, problem, tmp_path):
    model, other, x, expected = problem
    assert (np.asarray(other(x)) != np.asarray(expected)).any()
    restored = route(model, other, tmp_path)
    verify(restored)
    np.testing.assert_allclose(restored(x), expected, rtol=1e-6, atol=1e-7)
    assert all(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(pure(restored)))


def test_pure_dict_as_an_argument(problem):
    model, _, x, expected = problem
    graphdef, state = nnx.split(model)
    run = jax.jit(lambda tree, x: nnx.merge(graphdef, tree)(x))
    np.testing.assert_allclose(run(nnx.to_pure_dict(state), x), expected, rtol=1e-5, atol=1e-6)


def test_variables_of_hijax(problem):
    model, _, x, expected = problem
    model = nnx.with_vars(
        model, hijax=True, only=nnx.Any(nnx.Param, TopologyVariable), allow_duplicates=True
    )
    np.testing.assert_allclose(model(x), expected, rtol=1e-6, atol=1e-7)


def test_ensembles():
    @nnx.jit
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def ensemble(rngs):
        return linear(rngs)

    run, x = nnx.vmap(lambda layer, x: layer(x)), jax.random.normal(KEY, (3, 5, IN))
    layers, others = ensemble(nnx.Rngs(0)), ensemble(nnx.Rngs(1))
    nnx.update(others, nnx.to_pure_dict(nnx.state(layers)))
    np.testing.assert_array_equal(run(others, x), run(layers, x))


@pytest.mark.parametrize("under_jit", [False, True])
def test_bridges(under_jit):
    x = jax.random.normal(KEY, (5, IN))
    compiled = jax.jit if under_jit else lambda function: function

    class Bridge(nnx.bridge.Module):
        @nnx.bridge.compact
        def __call__(self, x):
            return nnx.bridge.nnx_in_bridge_mdl(
                lambda rngs: SparseLinear(IN, OUT, sparsity=0.75, rngs=rngs)
            )(x)

    for module in (Bridge(), nnx.bridge.to_linen(SparseLinear, IN, OUT, sparsity=0.75)):
        variables, apply = compiled(module.init)(KEY, x), compiled(module.apply)
        expected = apply(variables, x)
        saved = flax.serialization.to_bytes(variables)
        zeros = jax.tree.map(jnp.zeros_like, variables)
        restored = flax.serialization.from_bytes(zeros, saved)
        np.testing.assert_array_equal(apply(restored, x), expected)
        place = ("SparseLinear_0",) if isinstance(module, Bridge) else ()
        parts = {name: variables[name] for name in ("params", "topology")}
        for name in place:
            parts = {key: value[name] for key, value in parts.items()}
        layer = linear(3)
        nnx.update(layer, {**parts["params"], **parts["topology"]})
        np.testing.assert_allclose(layer(x), expected, rtol=1e-6, atol=1e-7)

        def total(params, module=module, variables=variables):
            return module.apply({**variables, "params": params}, x).sum()

        gradient = compiled(jax.grad(total))(variables["params"])
        assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient))


# ---- What must not come in ----


def other_columns(topology):
    return Topology._from_parts(
        topology.pattern._replace(column_indices=topology.column_indices + 10**6),
        topology.transposed_pattern,
        topology.permutation,
        topology.layouts,
        topology.shape,
    )


def array_with(place, change):
    def changed(topology):
        array = np.array(TopologyVariable(topology).get_value())
        array[place] = change(array[place])
        return array

    return changed


FIRST_COLUMN = 2 + OUT + 1
CORRUPTIONS = {
    "columns of a topology": (other_columns, ValueError),
    "columns of its array": (
        array_with(slice(FIRST_COLUMN, None), lambda x: x + 10**6),
        ValueError,
    ),
    "negative column": (array_with(FIRST_COLUMN, lambda x: -1), ValueError),
    "order of columns": (array_with(slice(FIRST_COLUMN, None), lambda x: x[::-1]), ValueError),
    "offsets": (array_with(4, lambda x: 10**6), ValueError),
    "number of columns": (array_with(1, lambda x: x + 1), ValueError),
    "number of rows": (array_with(0, lambda x: x - 1), ValueError),
    "end of the array": (lambda t: np.array(TopologyVariable(t).get_value())[:5], ValueError),
    "empty array": (lambda t: np.zeros(0, np.int32), ValueError),
    "dtype": (lambda t: np.array(TopologyVariable(t).get_value(), np.float32), ValueError),
    "another shape": (lambda t: t.T, ValueError),
    "several patterns": (lambda t: np.array([TopologyVariable(t).get_value()] * 2), ValueError),
    "plain dict": (lambda t: {"row_offsets": t.row_offsets}, TypeError),
    "number": (lambda t: 3.0, TypeError),
    "nothing": (lambda t: None, TypeError),
    "values": (lambda t: jnp.ones(t.nse), ValueError),
}


def replaced(state, bad):
    changed = nnx.to_pure_dict(state)
    changed["topology"] = bad
    return changed


def put_into_state(layer, bad):
    nnx.replace_by_pure_dict(nnx.state(layer), replaced(nnx.state(layer), bad))


def update(layer, bad):
    nnx.update(layer, replaced(nnx.state(layer), bad))


def update_state(layer, bad):
    state = nnx.state(linear(2))
    nnx.Variable.set_raw_value(state["topology"], bad)
    nnx.update(layer, state)


def assign(layer, bad):
    layer.topology[...] = bad


def set_value(layer, bad):
    layer.topology.set_value(bad)


DOORS = (update, update_state, put_into_state, assign, set_value)


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_corrupted_patterns_raise_at_every_door(corruption):
    corrupt, error = CORRUPTIONS[corruption]
    layer, x = linear(1), jnp.ones((2, IN))
    expected = layer(x)
    bad = corrupt(layer.topology[...])
    for door in DOORS:
        if corruption == "plain dict" and door is put_into_state:
            continue  # Flax itself says that there is no such path
        with pytest.raises(error, match=r"Topology|pattern"):
            door(layer, bad)
        np.testing.assert_array_equal(layer(x), expected)


def test_index_of_a_pattern_is_refused():
    with pytest.raises(TypeError, match=r"as \[\.\.\.\], got \[0\]"):
        linear(0).topology[0]
    with pytest.raises(TypeError, match=r"as \[\.\.\.\], got \[0\]"):
        linear(0).topology[0] = 1


# ---- Files of an older version ----

OLD = Path(__file__).parent / "data" / "state_of_a_linear_layer.zip"


@pytest.fixture
def old_checkpoint(tmp_path):
    """Saved before a pattern had an array form: ``StandardCheckpointer.save(nnx.state(layer))``."""
    with zipfile.ZipFile(OLD) as file:
        file.extractall(tmp_path)
    return tmp_path


def test_old_checkpoints_load(old_checkpoint):
    layer = SparseLinear(24, 16, sparsity=0.75, rngs=nnx.Rngs(0))
    expected = np.load(old_checkpoint / "outputs.npy")
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.update(layer, checkpointer.restore(old_checkpoint / "orbax_state", nnx.state(layer)))
        if jax.default_backend() == "cpu":  # Orbax restores by name on devices of the same kind
            by_name = checkpointer.restore(old_checkpoint / "orbax_state")
            other = SparseLinear(24, 16, sparsity=0.75, rngs=nnx.Rngs(1))
            nnx.update(other, {name: variable["value"] for name, variable in by_name.items()})
            np.testing.assert_allclose(other(jnp.ones((1, 24))), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(layer(jnp.ones((1, 24))), expected, rtol=1e-6, atol=1e-6)


def test_files_from_before_cuts_of_rows_load(tmp_path):
    """Where a pattern has a layout now that it did not have then."""

    def older(tree):
        def of(leaf):
            if not isinstance(leaf, Topology):
                return leaf
            return leaf.with_layouts({"tile_starts": leaf.layouts["tile_starts"]})

        return jax.tree.map(of, tree, is_leaf=lambda x: isinstance(x, Topology))

    made, other, by_name = (
        SparseLinear(300, 400, sparsity=0.995, rngs=nnx.Rngs(seed)) for seed in range(3)
    )
    assert "row_cuts" in made.topology[...].layouts
    state, x = older(nnx.state(made)), jnp.ones((2, 300))
    restored = with_orbax(state, tmp_path / "state", older(nnx.state(other)))
    nnx.update(other, restored)
    named = with_orbax(state, tmp_path / "named")
    nnx.update(by_name, {name: variable["value"] for name, variable in named.items()})
    for loaded in other, by_name:
        assert jax.tree.structure(nnx.state(loaded)) == jax.tree.structure(nnx.state(made))
        verify(loaded)
        np.testing.assert_array_equal(loaded(x), made(x))


# ---- pruning.save and pruning.load ----

DENSE = {
    "linear": lambda: nnx.Linear(IN, OUT, rngs=nnx.Rngs(7)),
    "attention": lambda: attention(7),
    "recurrent": lambda: RNN(GRUCell(IN, OUT, rngs=nnx.Rngs(7))),
    "sparsified": lambda: dense_network(7),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_saved_models_load(kind, inference, tmp_path):
    model, _, x, expected = made(kind)
    pruning.save(tmp_path / "model", model)
    loaded = pruning.load(tmp_path / "model", DENSE[kind], inference=inference)
    verify(loaded)
    np.testing.assert_array_equal(loaded(x), expected)
    gradient = jax.grad(lambda x, model: jnp.sum(model(x) ** 2))
    np.testing.assert_allclose(gradient(x, loaded), gradient(x, model), rtol=1e-5, atol=1e-6)
    if not inference:
        assert jax.tree.structure(nnx.state(loaded)) == jax.tree.structure(nnx.state(model))
        assert kind != "sparsified" or loaded.shared is loaded.layers[0]


def test_columns_beyond_16_bits_load(tmp_path):
    features = 70_001
    model = SparseLinear(features, 2, sparsity=0.999, rngs=nnx.Rngs(0))
    pruning.save(tmp_path / "model", model)
    loaded = pruning.load(tmp_path / "model", lambda: nnx.Linear(features, 2, rngs=nnx.Rngs(1)))
    assert np.max(loaded.topology.column_indices) >= 2**16
    x = jax.random.normal(KEY, (1, features))
    np.testing.assert_array_equal(loaded(x), model(x))


def test_inference_programs_sort_nothing():
    layer, x = linear(0), jnp.ones((3, IN))
    size, expected = len(jax.tree.leaves(nnx.state(layer))), layer(x)
    drop_transposes(layer)
    assert len(jax.tree.leaves(nnx.state(layer))) == size - 5
    graphdef, state = nnx.split(layer)
    run = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    np.testing.assert_array_equal(run(state, x), expected)
    assert " sort(" not in run.lower(state, x).compile().as_text()


def test_transposes_that_a_program_makes_transpose_back():
    layer = linear(0)
    values = jnp.arange(1.0, layer.topology[...].nse + 1)
    expected = CSR(values, layer.topology[...]).T.todense()
    drop_transposes(layer)  # and a program that holds the layer knows its positions

    def transposed(values):
        return CSR(values, topology_of(layer.topology, None)).T.todense()

    np.testing.assert_array_equal(jax.jit(transposed)(values), expected)


def test_saved_models_load_in_a_new_process(tmp_path):
    dense = nnx.Linear(IN, OUT, rngs=nnx.Rngs(0))
    layer = SparseLinear.from_dense(dense, sparsity=0.5)
    pruning.save(tmp_path / "model", layer)
    program = f"""
        import jax.numpy as jnp, numpy as np
        from flax import nnx
        from jaxsparse import pruning
        make = lambda: nnx.Linear({IN}, {OUT}, rngs=nnx.Rngs(3))
        layer = pruning.load({str(tmp_path / "model")!r}, make)
        np.save({str(tmp_path / "y.npy")!r}, layer(jnp.ones((2, {IN}))))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=300)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), layer(jnp.ones((2, IN))))


def folder_size(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_sparse_files_are_smaller_than_dense_ones(tmp_path):
    dense = nnx.Linear(512, 512, rngs=nnx.Rngs(0))
    pruning.save(tmp_path / "dense", dense)
    pruning.save(tmp_path / "sparse", SparseLinear.from_dense(dense, sparsity=0.9))
    assert folder_size(tmp_path / "sparse") < 0.25 * folder_size(tmp_path / "dense")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nnx.Linear(IN, OUT + 1, rngs=nnx.Rngs(0)), "topology: .* got row_offsets|shape"),
        (lambda: nnx.Linear(IN, OUT, use_bias=False, rngs=nnx.Rngs(0)), "without bias"),
        (
            lambda: nnx.LayerNorm(IN, rngs=nnx.Rngs(0)),
            "must make a Linear or SparseLinear at the top",
        ),
        (
            lambda: nnx.Linear(IN, OUT, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)),
            "at bias: make_model must make float32",
        ),
    ],
)
def test_another_model_is_refused(make, message, tmp_path):
    pruning.save(tmp_path / "model", linear(0))
    with pytest.raises(ValueError, match=message):
        pruning.load(tmp_path / "model", make)


def test_damaged_files_are_refused(tmp_path, monkeypatch):
    pruning.save(tmp_path / "torn", linear(0))
    for file in (tmp_path / "torn" / "arrays").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match="must be a folder that save made"):
        pruning.load(tmp_path / "torn", lambda: linear(0))

    def changed(variable, saved=saving._saved):
        array = saved(variable)
        if isinstance(variable, TopologyVariable):
            array["column_indices"] = array["column_indices"] + 1000
        return array

    monkeypatch.setattr(saving, "_saved", changed)
    pruning.save(tmp_path / "changed", linear(0))
    for make in (lambda: linear(0), DENSE["linear"]):
        with pytest.raises(
            ValueError,
            match=r"^load: at topology: expected a pattern, got .*out of range for 12 columns",
        ):
            pruning.load(tmp_path / "changed", make)


def test_folders_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="must be a folder that save made"):
        pruning.load(tmp_path / "nothing", lambda: linear(0))
    with pytest.raises(ValueError, match="must be that of a new folder"):
        pruning.save(tmp_path, linear(0))
