"""SparseLinear against its dense twin, and under everything that Flax does with a layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")
ocp = pytest.importorskip("orbax.checkpoint")

from jaxsparse import Topology, masks  # noqa: E402
from jaxsparse.nn import (  # noqa: E402
    GRUCell,
    SparseLinear,
    TopologyVariable,
    drop_transposes,
    verify,
)

IN, OUT = 24, 16


def inputs(*leading, features=IN, seed=0):
    return jax.random.normal(jax.random.key(seed), (*leading, features))


def dense_twin(layer):
    """An nnx.Linear that computes the same, and the mask of what it may have."""
    twin = nnx.Linear(
        layer.in_features, layer.out_features, use_bias=layer.use_bias, rngs=nnx.Rngs(1)
    )
    twin.kernel[...] = layer.weight.todense().T
    if layer.use_bias:
        twin.bias[...] = layer.bias[...]
    topology = layer.topology[...]
    mask = np.zeros(topology.shape, bool)
    rows = np.repeat(np.arange(topology.shape[0]), np.diff(topology.row_offsets))
    mask[rows, topology.column_indices[: topology.nnz]] = True
    return twin, mask.T


@pytest.fixture
def layer():
    return SparseLinear(IN, OUT, sparsity=0.75, rngs=nnx.Rngs(0))


@pytest.mark.smoke
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("leading", [(), (5,), (2, 3)], ids=str)
def test_values_and_gradients_are_those_of_the_dense_layer(leading, use_bias):
    layer = SparseLinear(IN, OUT, sparsity=0.75, use_bias=use_bias, rngs=nnx.Rngs(0))
    if use_bias:
        layer.bias[...] = jnp.linspace(-1, 1, OUT)
    twin, mask = dense_twin(layer)

    def loss(layer, x):
        y = layer(x)
        return jnp.sum(jnp.sin(y)), y

    @nnx.jit
    def run(layers, x):
        gradient = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        return [gradient(layer, x) for layer in layers]

    ours, theirs = run((layer, twin), inputs(*leading))
    ((_, y), (gradients, of_x)), ((_, y_expected), (expected, of_x_expected)) = ours, theirs
    np.testing.assert_allclose(y, y_expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_x, of_x_expected, rtol=1e-5, atol=1e-6)
    assert set(gradients) == ({"values", "bias"} if use_bias else {"values"})
    # Row-major order of the matrix (out, in) is the order of its stored entries.
    of_kernel = expected["kernel"][...].T[mask.T]
    np.testing.assert_allclose(gradients["values"][...], of_kernel, rtol=1e-5, atol=1e-6)
    if use_bias:
        np.testing.assert_allclose(gradients["bias"][...], expected["bias"][...], rtol=1e-5)


def test_training_steps_are_those_of_the_masked_dense_layer(layer):
    twin, mask = dense_twin(layer)
    x, target = inputs(32), inputs(32, features=OUT, seed=1)

    def loss(layer, x):
        return jnp.mean((layer(x) - target) ** 2)

    @nnx.jit
    def step(layer, optimizer, mask):
        value, gradients = nnx.value_and_grad(loss)(layer, x)
        if mask is not None:
            gradients["kernel"][...] *= mask
        optimizer.update(layer, gradients)
        return value

    optimizers = [nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param) for m in (layer, twin)]
    first = None
    for _ in range(10):
        losses = [
            step(layer, optimizers[0], None),
            step(twin, optimizers[1], jnp.asarray(mask)),
        ]
        first = first if first is not None else losses[0]
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    assert losses[0] < 0.9 * first
    np.testing.assert_allclose(layer.weight.todense().T, twin.kernel[...], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_activation_is_fused(activation):
    layer = SparseLinear(IN, OUT, sparsity=0.5, activation=activation, rngs=nnx.Rngs(0))
    twin, _ = dense_twin(layer)
    expected = getattr(jax.nn, activation)(twin(inputs(7)))
    np.testing.assert_allclose(layer(inputs(7)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "sparsity, length", [(0.0, IN), (0.5, 12), (0.74, 6), (0.99, 1), (0.9999, 1)]
)
def test_random_pattern_is_balanced(sparsity, length):
    layer = SparseLinear(IN, OUT, sparsity=sparsity, rngs=nnx.Rngs(0))
    topology = layer.topology[...].verify()
    assert np.diff(topology.row_offsets).tolist() == [length] * OUT
    if 1 < length < IN:
        other = SparseLinear(IN, OUT, sparsity=sparsity, rngs=nnx.Rngs(1))
        columns = other.topology[...].column_indices
        assert not np.array_equal(topology.column_indices, columns)


def test_initial_variance_counts_the_weights_that_are_there():
    rng = np.random.default_rng(0)
    uneven = Topology.from_mask(
        rng.random((400, 300)) < np.where(np.arange(400) < 200, 0.02, 0.9)[:, None]
    )
    layer = SparseLinear(300, 400, topology=uneven, rngs=nnx.Rngs(0))
    used = np.diff(uneven.row_offsets) > 0
    y = layer(inputs(500, features=300))[:, used]
    sparse = used[:200].sum()
    np.testing.assert_allclose([y[:, :sparse].std(), y[:, sparse:].std()], 1, rtol=0.1)


def test_kernel_init_is_that_of_the_dense_layer():
    topology = Topology.from_mask(masks.band(5), (OUT, IN))
    initializer = nnx.initializers.orthogonal()
    seen = []

    def kernel_init(key, shape, dtype):
        seen.append(initializer(key, shape, dtype))
        return seen[-1]

    layer = SparseLinear(IN, OUT, topology=topology, kernel_init=kernel_init, rngs=nnx.Rngs(0))
    mask = np.abs(np.arange(OUT)[:, None] - np.arange(IN)) < 5
    assert seen[0].shape == (IN, OUT)
    np.testing.assert_array_equal(layer.weight.todense(), np.where(mask, seen[0].T, 0))


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes_follow_the_dense_layer(dtype, param_dtype):
    options = {"dtype": dtype, "param_dtype": param_dtype}
    layer = SparseLinear(IN, OUT, sparsity=0.5, **options, rngs=nnx.Rngs(0))
    dense = nnx.Linear(IN, OUT, **options, rngs=nnx.Rngs(0))
    assert layer.values.dtype == layer.bias.dtype == param_dtype
    for x in (inputs(3), inputs(3).astype(jnp.bfloat16)):
        assert layer(x).dtype == dense(x).dtype


class TestFromDense:
    def dense(self, **options):
        layer = nnx.Linear(IN, OUT, **options, rngs=nnx.Rngs(0))
        if layer.use_bias:
            layer.bias[...] = jnp.arange(OUT, dtype=layer.bias.dtype)
        return layer

    @pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.9, 0.995])
    def test_keeps_the_largest_weights(self, sparsity):
        dense = self.dense()
        layer = SparseLinear.from_dense(dense, sparsity=sparsity)
        kernel = np.asarray(dense.kernel[...])
        kept = kernel.size - round(sparsity * kernel.size)
        smallest = np.sort(np.abs(kernel).ravel())[::-1][kept - 1]
        expected = np.where(np.abs(kernel) >= smallest, kernel, 0)
        assert layer.values.shape == (kept,)
        np.testing.assert_array_equal(layer.weight.todense().T, expected)
        np.testing.assert_allclose(
            layer(inputs(4)), inputs(4) @ expected + dense.bias[...], rtol=1e-5, atol=1e-5
        )

    def test_ties_and_nan(self):
        dense = self.dense()
        dense.kernel[...] = jnp.ones((IN, OUT)).at[0, 0].set(jnp.nan)
        layer = SparseLinear.from_dense(dense, sparsity=0.5)
        stored = layer.weight.todense()
        assert np.isnan(stored[0, 0])  # a layer that has diverged must not look sound
        assert np.count_nonzero(stored) == IN * OUT / 2
        assert stored[0, 1:].all() and not stored[-1].any()

    def test_at_least_one_weight_is_kept(self):
        assert SparseLinear.from_dense(self.dense(), sparsity=0.9999).values.shape == (1,)

    def test_donating_one_layer_leaves_the_other(self):
        dense = self.dense()
        layer = SparseLinear.from_dense(dense, sparsity=0.5)
        nnx.jit(lambda layer: None, donate_argnums=0)(layer)
        jax.tree.map(lambda x: x.delete(), nnx.state(layer))
        assert np.isfinite(dense(inputs(3))).all()

    def test_keeps_a_topology(self):
        topology = Topology.from_mask(masks.band(3), (OUT, IN))
        layer = SparseLinear.from_dense(self.dense(), topology=topology, activation="relu")
        assert layer.activation == "relu"
        jax.tree.map(np.testing.assert_array_equal, layer.topology[...], topology)

    def test_keeps_what_is_pruned_already(self):
        dense = self.dense()
        dense.kernel[...] = jnp.where(jnp.abs(dense.kernel[...]) > 0.2, dense.kernel[...], 0)
        layer = SparseLinear.from_dense(dense)
        assert 0 < layer.values.size < IN * OUT
        np.testing.assert_allclose(layer(inputs(4)), dense(inputs(4)), rtol=1e-5, atol=1e-5)

    def test_keeps_the_options_and_leaves_the_dense_layer_alone(self):
        dense = self.dense(use_bias=False, dtype=jnp.bfloat16, precision=jax.lax.Precision.HIGHEST)
        before = dense.kernel[...]
        layer = SparseLinear.from_dense(dense, sparsity=0.5)
        assert layer.dtype == jnp.bfloat16 and layer.bias is None
        assert layer.precision == jax.lax.Precision.HIGHEST
        layer.values[...] = jnp.zeros_like(layer.values[...])
        np.testing.assert_array_equal(dense.kernel[...], before)

    @pytest.mark.parametrize("dtype", [None, "bfloat16", "float64"])
    @pytest.mark.parametrize("preferred", ["float16", "bfloat16", "float32", "float64"])
    def test_preferred_element_types(self, dtype, preferred):
        """What is made has the results of the dense layer; what can't have them is not made."""
        with jax.enable_x64(True):
            options = {"dtype": dtype, "preferred_element_type": preferred}
            dense, x = self.dense(use_bias=dtype is None, **options), inputs(3).astype("float32")
            operands = jnp.dtype(dtype or "float32")
            if preferred != operands and jnp.dtype(preferred).itemsize <= operands.itemsize:
                with pytest.raises(ValueError, match=rf"must be {operands}, .* got {preferred}"):
                    SparseLinear.from_dense(dense, sparsity=0)
                return
            y, expected = SparseLinear.from_dense(dense, sparsity=0)(x), dense(x)
            assert y.dtype == expected.dtype
            rounding = 1e-2 if preferred == "bfloat16" else 1e-5
            np.testing.assert_allclose(y, expected, rtol=rounding, atol=rounding)

    def test_a_preferred_element_type_that_jax_does_not_have(self):
        dense = self.dense(preferred_element_type=jnp.float64)
        assert SparseLinear.from_dense(dense, sparsity=0.5)(inputs(3)).dtype == jnp.float32

    def test_under_jit(self):
        dense = self.dense()
        expected = SparseLinear.from_dense(dense, sparsity=0.7)
        layer = nnx.jit(lambda dense: SparseLinear.from_dense(dense, sparsity=0.7))(dense)
        layer.topology[...].verify()
        np.testing.assert_array_equal(layer.weight.todense(), expected.weight.todense())

    @pytest.mark.parametrize(
        "options, message",
        [
            ({"sparsity": 1.0}, r"sparsity must be in \[0, 1\), got 1.0"),
            ({"sparsity": 0.5, "topology": Topology.from_mask(masks.band(3), (OUT, IN))}, "both"),
            ({"topology": Topology.from_mask(masks.band(3), (IN, OUT))}, "topology must be one"),
        ],
    )
    def test_errors(self, options, message):
        with pytest.raises(ValueError, match=message):
            SparseLinear.from_dense(self.dense(), **options)

    def test_other_layers_are_refused(self):
        with pytest.raises(TypeError, match=r"layer must be an nnx.Linear, got Embed"):
            SparseLinear.from_dense(nnx.Embed(3, 4, rngs=nnx.Rngs(0)))
        dense = self.dense(dot_general=lambda *args, **kwargs: jax.lax.dot_general(*args, **kwargs))
        with pytest.raises(ValueError, match="dot_general"):
            SparseLinear.from_dense(dense, sparsity=0.5)
        dense = self.dense(precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32)
        with pytest.raises(ValueError, match=r"SparseLinear.from_dense: precision must be"):
            SparseLinear.from_dense(dense, sparsity=0.5)

    def test_subclasses_are_refused_by_name(self):
        class Doubled(nnx.Linear):
            def __call__(self, x, out_sharding=None):
                return 2 * super().__call__(x)

        options = {"in_features": IN, "out_features": OUT, "rngs": nnx.Rngs(0)}
        for dense in (Doubled(**options), nnx.LoRALinear(lora_rank=2, **options)):
            message = f"must be an nnx.Linear, got {type(dense).__name__}, a subclass"
            with pytest.raises(TypeError, match=message):
                SparseLinear.from_dense(dense, sparsity=0.5)

    def test_a_subclass_that_leaves_the_call_alone_is_taken(self):
        class Named(nnx.Linear):
            @property
            def promote_dtype(self):
                return lambda arrays, dtype: jax.tree.map(lambda x: x.astype("bfloat16"), arrays)

            @promote_dtype.setter
            def promote_dtype(self, _):
                pass

        dense = Named(IN, OUT, rngs=nnx.Rngs(0))
        layer = SparseLinear.from_dense(dense, sparsity=0)
        assert layer(inputs(3)).dtype == dense(inputs(3)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "either sparsity or topology"),
        ({"sparsity": 0.5, "topology": Topology.from_mask(masks.causal(), (OUT, IN))}, "either"),
        ({"sparsity": -0.1}, r"sparsity must be in \[0, 1\), got -0.1"),
        ({"sparsity": 1}, r"sparsity must be in \[0, 1\), got 1"),
        ({"topology": Topology.from_mask(masks.causal(), (IN, OUT))}, r"shape \(24, 16\)"),
        ({"sparsity": 0.5, "precision": "nonsense"}, "SparseLinear: precision must be .* 'nonsen"),
        ({"sparsity": 0.5, "dot_general": jnp.dot}, "SparseLinear: dot_general must be jax.lax"),
        (
            {"sparsity": 0.5, "dtype": "float16", "preferred_element_type": "bfloat16"},
            "SparseLinear: preferred_element_type must be float16, .* got bfloat16",
        ),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        SparseLinear(IN, OUT, **options, rngs=nnx.Rngs(0))


PRECISIONS = (
    *(None, "default", "fastest", "bfloat16", "high", "bfloat16_3x", "tensorfloat32"),
    *("highest", "float32", *jax.lax.Precision, ("high", "default"), [jax.lax.Precision.HIGH] * 2),
)


def test_every_precision_of_jax_is_honoured(layer):
    exact = np.float64(inputs(5)) @ np.float64(layer.weight.todense()).T
    topology, kernel = layer.topology[...], layer.weight.todense().T
    for precision in PRECISIONS:
        options = {"precision": precision, "rngs": nnx.Rngs(0)}
        made = SparseLinear(IN, OUT, topology=topology, kernel_init=lambda *_: kernel, **options)
        dense = nnx.Linear(IN, OUT, kernel_init=lambda *_: kernel, **options)
        for one in (made, SparseLinear.from_dense(dense)):
            assert one.precision == precision
            np.testing.assert_allclose(one(inputs(5)), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("pattern", ["sparsity", "topology"])
def test_layers_that_follow_are_those_of_a_dense_model(use_bias, pattern):
    """One seed draws as many keys, and the same kernel of one initializer."""
    mask = {"sparsity": 0.75, "topology": Topology.from_mask(masks.band(5), (OUT, IN))}
    init = nnx.initializers.lecun_normal()
    options = {"use_bias": use_bias, "kernel_init": init, "bias_init": nnx.initializers.normal(1)}
    sparse, dense = nnx.Rngs(3), nnx.Rngs(3)
    layer = SparseLinear(IN, OUT, **{pattern: mask[pattern]}, **options, rngs=sparse)
    twin = nnx.Linear(IN, OUT, **options, rngs=dense)
    weight = layer.weight.todense()
    np.testing.assert_array_equal(weight, np.where(weight != 0, twin.kernel[...].T, 0))
    if use_bias:
        np.testing.assert_array_equal(layer.bias[...], twin.bias[...])
    assert sparse.params() == dense.params()


def test_a_pattern_tells_nothing_of_the_values():
    """They are of one key."""
    layer = SparseLinear(256, 256, sparsity=0.5, rngs=nnx.Rngs(0))
    columns = layer.topology[...].column_indices
    assert abs(np.corrcoef(columns, layer.values[...])[0, 1]) < 0.02

    def kernel_init(key, shape, dtype):
        return jax.random.uniform(key, shape, dtype)

    stored = SparseLinear(256, 256, sparsity=0.5, kernel_init=kernel_init, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(np.mean(stored.values[...]), 0.5, atol=0.01)


DEVICES = jax.devices("cpu")
needs_devices = pytest.mark.skipif(
    len(DEVICES) < 4, reason="needs 4 CPU devices (tests/conftest.py)"
)


@needs_devices
def test_out_sharding_is_that_of_the_dense_layer(layer):
    twin, _ = dense_twin(layer)
    explicit = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((2, 2), ("data", "model"), (explicit,) * 2, devices=DEVICES[:4])
    spec = jax.sharding.PartitionSpec
    with jax.set_mesh(mesh):
        x = jax.device_put(inputs(8), jax.NamedSharding(mesh, spec("data")))
        for out in (spec("data", "model"), spec(), jax.NamedSharding(mesh, spec(None, "model"))):

            def loss(x, layer, out=out):
                y = layer(x, out_sharding=out)
                return jnp.sum(y**2), y

            run = jax.value_and_grad(loss, has_aux=True)
            ((_, y), gradient), ((_, expected), of_twin) = (run(x, m) for m in (layer, twin))
            assert y.sharding == expected.sharding
            np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(gradient, of_twin, rtol=1e-4, atol=1e-5)


def with_metadata(initializer):
    return nnx.with_metadata(initializer, note="values")


def partitioned(initializer):
    return nnx.with_partitioning(initializer, ("in", "out"), note="values")


@pytest.mark.parametrize("wrapper", [with_metadata, partitioned])
@pytest.mark.parametrize("kind", [SparseLinear, GRUCell], ids=["linear", "cell"])
def test_initializers_with_metadata(kind, wrapper):
    init = nnx.initializers.lecun_normal()
    sparse = "sparsity" if kind is SparseLinear else "input_sparsity"

    def make(wrapper):
        layer = kind(IN, OUT, **{sparse: 0.5}, kernel_init=wrapper(init), rngs=nnx.Rngs(0))
        return layer if kind is SparseLinear else layer.dense_i

    with jax.set_mesh(jax.make_mesh((1, 1), ("in", "out"), (jax.sharding.AxisType.Auto,) * 2)):
        layer = make(wrapper)
    np.testing.assert_array_equal(layer.values[...], make(lambda init: init).values[...])
    assert layer.values.note == "values" and layer.values.ndim == 1
    specs = nnx.get_partition_spec(nnx.state(layer, nnx.Param))
    assert specs["values"].get_value() == jax.sharding.PartitionSpec()
    assert np.isfinite(nnx.grad(lambda layer: layer(inputs(3)).sum())(layer)["values"][...]).all()


@needs_devices
def test_shardings_of_values_and_of_a_bias():
    """A kernel's two names say nothing of the values; one name is theirs."""
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=DEVICES[:2])
    spec = jax.sharding.PartitionSpec
    options = {"sparsity": 0.5, "rngs": nnx.Rngs(0)}
    with jax.set_mesh(mesh):
        layer = SparseLinear(
            IN,
            OUT,
            kernel_metadata={"out_sharding": (None, "data")},
            bias_init=nnx.with_partitioning(nnx.initializers.zeros, ("data",)),
            **options,
        )
        along = SparseLinear(IN, OUT, kernel_metadata={"out_sharding": ("data",)}, **options)
    assert layer.values[...].sharding.is_fully_replicated
    assert layer.bias[...].sharding.spec == spec("data")
    assert along.values[...].sharding.spec == spec("data")


def test_metadata_and_types():
    layer = SparseLinear(
        IN,
        OUT,
        sparsity=0.5,
        kernel_metadata={"note": "values"},
        bias_metadata={"note": "bias"},
        rngs=nnx.Rngs(0),
    )
    assert (layer.values.note, layer.bias.note) == ("values", "bias")
    with pytest.raises(TypeError, match="SparseLinear: topology must be a Topology, got str"):
        SparseLinear(IN, OUT, topology="x", rngs=nnx.Rngs(0))


def test_wrong_input_names_the_sizes(layer):
    with pytest.raises(ValueError, match=r"linear: x of shape \(5, 7\) must have 24 columns"):
        layer(jnp.ones((5, 7)))


# ---- What Flax does with layers ----


def test_jit_takes_the_pattern_as_an_argument(layer):
    traces, x = [], inputs(5)

    @nnx.jit
    def compiled(layer, x):
        traces.append(1)
        return layer(x)

    compiled(layer, x)
    other = SparseLinear(IN, OUT, sparsity=0.75, rngs=nnx.Rngs(7))
    np.testing.assert_allclose(compiled(other, x), other(x), rtol=1e-6)
    assert len(traces) == 1
    graphdef, state = nnx.split(layer)
    assert not jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))(state, x).consts
    assert jax.make_jaxpr(layer)(x).consts  # what it looks like where the pattern is a constant


def test_parameters_and_pattern_are_told_apart(layer):
    graphdef, parameters, patterns = nnx.split(layer, nnx.Param, TopologyVariable)
    assert set(parameters) == {"values", "bias"} and set(patterns) == {"topology"}
    merged = nnx.merge(graphdef, parameters, patterns)
    np.testing.assert_array_equal(merged(inputs(5)), layer(inputs(5)))


def test_vmap_makes_and_runs_an_ensemble():
    @nnx.jit
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs):
        return SparseLinear(IN, OUT, sparsity=0.75, rngs=rngs)

    layers = make(nnx.Rngs(0))
    assert layers.values.shape == (3, OUT * IN // 4)
    x = inputs(3, 5)
    y = nnx.vmap(lambda layer, x: layer(x))(layers, x)
    for i in range(3):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], nnx.state(layers))
        alone = nnx.merge(nnx.graphdef(layers), verify(one))
        np.testing.assert_allclose(y[i], alone(x[i]), rtol=1e-5, atol=1e-6)


def test_scan_over_layers_with_remat():
    @nnx.jit
    @nnx.split_rngs(splits=4)
    @nnx.vmap
    def make(rngs):
        options = {"sparsity": 0.75, "activation": "gelu", "param_dtype": jnp.float64}
        return SparseLinear(IN, IN, **options, rngs=rngs)

    def call(layer, x):
        return layer(x)

    def run(call, layers, x):
        def loss(layers, x):
            run = nnx.scan(call, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            return jnp.sum(run(layers, x) ** 2)

        return nnx.jit(nnx.value_and_grad(loss))(layers, x)

    # Sums that nearly cancel differ in float32 where one program rounds in other places.
    with jax.enable_x64(True):
        layers, x = make(nnx.Rngs(0)), inputs(5)
        (value, plain), (_, remat) = (run(c, layers, x) for c in (call, nnx.remat(call)))
        np.testing.assert_allclose(plain["values"][...], remat["values"][...], rtol=1e-10)
        expected = x
        for i in range(4):
            one = jax.tree.map(lambda leaf, i=i: leaf[i], nnx.state(layers))
            expected = nnx.merge(nnx.graphdef(layers), one)(expected)
        np.testing.assert_allclose(value, jnp.sum(expected**2), rtol=1e-12)


def test_donated_training_step(layer):
    optimizer = nnx.Optimizer(layer, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit(donate_argnames=("layer", "optimizer"))
    def step(layer, optimizer, x):
        optimizer.update(layer, nnx.grad(lambda layer: jnp.sum(layer(x) ** 2))(layer))

    for _ in range(3):
        step(layer, optimizer, inputs(5))
    verify(layer)
    assert np.isfinite(layer(inputs(5))).all()


@pytest.mark.parametrize("cached", [False, True])
def test_calls_of_transformations_verify_nothing(layer, cached, monkeypatch):
    """They set the patterns of their arguments at every call: of the full form or the shorter."""
    optimizer = nnx.Optimizer(layer, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(layer, optimizer, x):
        optimizer.update(layer, nnx.grad(lambda layer: jnp.sum(layer(x) ** 2))(layer))

    def call():
        if cached:
            nnx.cached_partial(step, layer, optimizer)(inputs(5))
        else:
            step(layer, optimizer, inputs(5))

    def refuse(topology):
        raise AssertionError("it is verified")

    monkeypatch.setattr(Topology, "verify", refuse)
    before = layer.topology[...].column_indices
    call()
    assert layer.topology[...].column_indices is not before  # it was set
    drop_transposes(layer)
    call()
    assert layer.topology.get_raw_value().permutation is None
    with pytest.raises(AssertionError, match="it is verified"):
        nnx.update(layer, jax.tree.map(jnp.copy, nnx.state(layer)))


def test_states_that_a_program_takes_are_verified_by_name(layer):
    @nnx.jit
    def load(layer, state):
        nnx.update(layer, state)

    damaged = corrupted(nnx.state(layer))
    load(layer, damaged)
    with pytest.raises(ValueError, match="column"):
        verify(layer)
    with pytest.raises(ValueError, match="column"):
        nnx.update(layer, jax.tree.map(jnp.copy, damaged))


def with_leaf(state, path, change):
    """A state with a change in one of its arrays, past all checks."""

    def change_at(keys, leaf):
        return change(leaf) if jax.tree_util.keystr(keys) == path else leaf

    return jax.tree.map_with_path(change_at, state)


def corrupted(state):
    """A state whose pattern has a column out of range."""
    path = "['topology'].value.pattern.column_indices"
    return with_leaf(state, path, lambda columns: columns.at[3].set(10_000))


class TestCheckpoint:
    def saved(self, folder, state):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "checkpoint", state)

    def restored(self, folder):
        abstract = nnx.eval_shape(lambda: SparseLinear(IN, OUT, sparsity=0.75, rngs=nnx.Rngs(0)))
        graphdef, state = nnx.split(abstract)
        with ocp.StandardCheckpointer() as checkpointer:
            return graphdef, checkpointer.restore(folder / "checkpoint", state)

    def test_comes_back_bitwise(self, layer, tmp_path):
        self.saved(tmp_path, nnx.state(layer))
        graphdef, state = self.restored(tmp_path)
        merged = nnx.merge(graphdef, verify(state))
        np.testing.assert_array_equal(merged(inputs(5)), layer(inputs(5)))
        other = SparseLinear(IN, OUT, sparsity=0.75, rngs=nnx.Rngs(9))
        nnx.update(other, state)
        np.testing.assert_array_equal(other(inputs(5)), layer(inputs(5)))

    def test_corrupted_pattern_raises(self, layer, tmp_path):
        self.saved(tmp_path, corrupted(nnx.state(layer)))
        _, state = self.restored(tmp_path)
        before = layer(inputs(5))
        with pytest.raises(ValueError, match="column 10000, out of range for 24 columns"):
            nnx.update(layer, state)
        with pytest.raises(ValueError, match=r"verify: at \['topology'\].*column 10000"):
            verify(state)
        np.testing.assert_array_equal(layer(inputs(5)), before)

    def test_pattern_of_another_shape_raises(self, layer):
        other = SparseLinear(OUT, IN, sparsity=0.75, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match=r"must have shape \(16, 24\), got \(24, 16\)"):
            nnx.update(layer, nnx.state(other))

    def test_corrupted_derived_arrays_raise(self, layer):
        paths = [
            jax.tree_util.keystr(keys) for keys, _ in jax.tree.leaves_with_path(nnx.state(layer))
        ]
        of_pattern = [path for path in paths if "topology" in path]
        assert len(of_pattern) == 10
        for path in of_pattern:
            with pytest.raises(ValueError, match="Topology"):
                verify(with_leaf(nnx.state(layer), path, lambda leaf: leaf.at[-1].add(1)))


def test_linen_bridge():
    linen = nnx.bridge.to_linen(SparseLinear, IN, OUT, sparsity=0.75)
    variables = linen.init(jax.random.key(0), inputs(5))
    assert set(variables) == {"params", "topology"}
    y = linen.apply(variables, inputs(5))
    topology = TopologyVariable(variables["topology"]["topology"])[...]
    direct = SparseLinear(IN, OUT, topology=topology.verify(), rngs=nnx.Rngs(0))
    direct.values[...] = variables["params"]["values"]
    np.testing.assert_allclose(y, direct(inputs(5)), rtol=1e-6)
    gradient = jax.grad(
        lambda params: jnp.sum(linen.apply({**variables, "params": params}, inputs(5)) ** 2)
    )(variables["params"])
    assert gradient["values"].shape == (OUT * IN // 4,)
