"""The recurrent layers against Flax's: numbers, carries, sparse weights, options, layouts."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from covering import combinations  # noqa: E402
from nn_recurrent_problems import (  # noqa: E402
    BIAS,
    CELLS,
    IN,
    LENGTHS,
    UNEVEN,
    B,
    H,
    T,
    check_against_flax,
    close,
    compiled,
    dense_twin,
    inputs,
    jitted_gradient,
    leaves,
    pair,
    primitives,
    random_carry,
    scans,
)

from jaxsparse import H200, Topology, masks  # noqa: E402
from jaxsparse.nn import (  # noqa: E402
    RNN,
    Bidirectional,
    GRUCell,
    LSTMCell,
    RecurrentStack,
    SimpleCell,
    SparseLinear,
    pack,
    unpack,
    verify,
)


def flax_pair(name, **options):
    ours, theirs = pair(name)
    return RNN(ours, **options), nnx.RNN(theirs, **options)


def parameters(module):
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


# ---- The numbers of nnx.RNN ----


@pytest.mark.parametrize("name", CELLS)
def test_one_seed_makes_the_parameters_of_flax(name):
    ours, theirs = pair(name)
    assert set(parameters(ours)) == set(parameters(theirs))
    jax.tree.map(np.testing.assert_array_equal, parameters(ours), parameters(theirs))


@pytest.mark.parametrize("name, lengths", [*((name, LENGTHS) for name in CELLS), ("lstm", None)])
def test_outputs_carries_and_gradients_are_those_of_flax(name, lengths):
    ours, theirs = flax_pair(name)
    x = inputs(B, T, IN)
    start = random_carry(ours.cell, B)
    steps = jnp.full(B, T) if lengths is None else lengths
    valid = jnp.arange(T) < steps[:, None]
    check_against_flax(ours, theirs, x, valid, initial_carry=start, seq_lengths=lengths)


@combinations(
    "reverse, keep_order, padded, time_major",
    list(itertools.product([False, True], repeat=3)),
    [False, True],
)
def test_orders(reverse, keep_order, padded, time_major):
    lengths = LENGTHS if padded else None
    options = {"reverse": reverse, "keep_order": keep_order, "time_major": time_major}
    ours, theirs = pair("gru")
    x = inputs(*((T, B) if time_major else (B, T)), IN)
    call = {"seq_lengths": lengths, "return_carry": True}
    expected_carry, expected = nnx.RNN(theirs, **options)(x, **call)
    carry, y = RNN(ours, **options)(x, **call)
    close(RNN(ours)(x, **call, **options), (carry, y))  # the call's options, and the layer's
    if lengths is not None:
        valid = (jnp.arange(T) < lengths[:, None])[..., None]
        valid = jnp.swapaxes(valid, 0, 1) if time_major else valid
        assert not np.any(np.where(valid, 0, y))
        expected = jnp.where(valid, expected, 0)
        rows = np.asarray(lengths) > 0
        assert not np.any(carry[~rows])  # the initial one
        carry, expected_carry = carry[rows], expected_carry[rows]
    close((carry, y), (expected_carry, expected))


@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("batch", [(), (2, 1, 3)], ids=str)
def test_batch_dimensions(batch, time_major):
    ours, theirs = pair("lstm")
    x = inputs(*((T, *batch) if time_major else (*batch, T)), IN)
    options = {"time_major": time_major, "return_carry": True}
    start = random_carry(ours, *batch)
    got = RNN(ours, **options)(x, initial_carry=start)
    close(got, nnx.RNN(theirs, **options)(x, initial_carry=start))
    (c, h), y = got
    assert c.shape == h.shape == (*batch, H)
    assert y.shape == ((T, *batch, H) if time_major else (*batch, T, H))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_lengths_of_any_batch_are_those_of_shorter_sequences(batch, reverse):
    ours, theirs = pair("gru")
    options = {"reverse": reverse, "keep_order": True, "return_carry": True}
    x, start = inputs(*batch, T, IN), random_carry(ours, *batch)
    lengths = np.random.default_rng(len(batch)).integers(0, T + 2, batch)
    carry, y = RNN(ours, **options)(x, initial_carry=start, seq_lengths=jnp.asarray(lengths))
    for row in np.ndindex(batch):
        n = min(int(lengths[row]), T)
        assert not np.any(y[row][n:])
        expected, ys = start[row], np.zeros((n, H))
        for t in range(n)[:: -1 if reverse else 1]:
            expected, ys[t] = theirs(expected, x[row][t])
        close((carry[row], y[row][:n]), (expected, ys))


@pytest.mark.parametrize(
    "kind, dtype",
    [
        *(("rnn", dtype) for dtype in ("int4", "uint4", "int8", "uint8", "int16", "uint16")),
        ("bidirectional", "int4"),
        ("stack", "uint4"),
    ],
)
def test_lengths_of_a_dtype_that_has_no_number_for_all_steps(kind, dtype):
    longest = int(jnp.iinfo(dtype).max)
    steps = 275 if longest < 2**8 else 2**16 + 20  # a few shapes: each is compiled for
    rnn = RNN(SimpleCell(1, 1, bias_init=nnx.initializers.ones, rngs=nnx.Rngs(0)))
    made = {
        "bidirectional": lambda: Bidirectional(rnn, rnn),
        "stack": lambda: RecurrentStack([rnn]),
    }
    layer = made.get(kind, lambda: rnn)()
    x = jnp.ones((3, steps, 1))
    lengths = jnp.array([0, 3, longest])
    counted = jnp.sum(jnp.any(layer(x, seq_lengths=lengths.astype(dtype)) != 0, -1), -1)
    np.testing.assert_array_equal(counted, lengths)


@pytest.mark.parametrize("kind", ["rnn", "bidirectional", "stack"])
@pytest.mark.parametrize(
    "lengths",
    [
        np.array([-1, 3, 100], np.int8),
        np.array([-(2**31), 3, 2**31 - 1], np.int32),
        np.array([0, 3, 2**31 + 1], np.uint32),
        np.array([-(2**40) + 2, 3, 2**40 + 2], np.int64),
        np.array([0, 3, 2**63 + 2], np.uint64),
    ],
    ids=lambda lengths: lengths.dtype.name,
)
def test_lengths_out_of_range_are_clipped_in_their_own_dtype(lengths, kind):
    rnn = RNN(SimpleCell(1, 1, bias_init=nnx.initializers.ones, rngs=nnx.Rngs(0)))
    made = {
        "bidirectional": lambda: Bidirectional(rnn, rnn),
        "stack": lambda: RecurrentStack([rnn]),
    }
    layer = made.get(kind, lambda: rnn)()
    x = jnp.ones((3, T, 1))
    expected = layer(x, seq_lengths=jnp.array([0, 3, T]))
    np.testing.assert_array_equal(layer(x, seq_lengths=lengths), expected)
    with jax.enable_x64(True):
        wide = jnp.asarray(lengths)
        assert wide.dtype == lengths.dtype
        np.testing.assert_array_equal(layer(x, seq_lengths=wide), expected)


def test_sizes_of_a_dtype_that_their_product_exceeds():
    zeros = {f"{name}_init": nnx.initializers.zeros for name in ("kernel", "recurrent_kernel")}
    cell = LSTMCell(np.uint8(3), np.uint8(100), **zeros, rngs=nnx.Rngs(0))
    assert cell.dense_i.kernel.shape == (3, 400) and cell.dense_h.kernel.shape == (100, 400)
    layer = SparseLinear(np.int8(2), np.int8(127), sparsity=0.5, rngs=nnx.Rngs(0))
    assert layer.weight.shape == (127, 2) and layer.values.shape == (127,)


@pytest.mark.parametrize("reverse, keep_order", [(False, False), (True, False), (True, True)])
def test_padding_reaches_neither_values_nor_gradients(reverse, keep_order):
    layer = RNN(LSTMCell(IN, H, rngs=nnx.Rngs(0)), reverse=reverse, keep_order=keep_order)
    x = inputs(B, T, IN)
    padded = jnp.where((jnp.arange(T) < LENGTHS[:, None])[..., None], x, jnp.nan)

    def loss(layer, x):
        carry, y = layer(x, seq_lengths=LENGTHS, return_carry=True)
        return sum(jnp.sum(a**2) for a in leaves((carry, y)))

    np.testing.assert_array_equal(layer(padded, seq_lengths=LENGTHS), layer(x, seq_lengths=LENGTHS))
    gradient = jitted_gradient(loss)
    got, expected = (gradient(layer, a) for a in (padded, x))
    jax.tree.map(np.testing.assert_array_equal, leaves(got), leaves(expected))
    assert all(np.any(a) for a in leaves(got))


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("lengths", [None, jnp.array([1, 0])], ids=["full", "lengths"])
def test_no_step_and_one(steps, lengths):
    cell = GRUCell(IN, H, rngs=nnx.Rngs(0))
    start = random_carry(cell, 2)
    carry, y = RNN(cell, reverse=True)(
        inputs(2, steps, IN), initial_carry=start, seq_lengths=lengths, return_carry=True
    )
    assert y.shape == (2, steps, H)
    if steps == 0:
        np.testing.assert_array_equal(carry, start)
    else:
        np.testing.assert_array_equal(carry[0], y[0, 0])


@pytest.mark.parametrize("name", ["simple", "gru", "lstm"])
def test_float64(name):
    with jax.enable_x64(True):
        ours, theirs = pair(name, dtype=jnp.float64, param_dtype=jnp.float64)
        x = inputs(B, T, IN, dtype=jnp.float64)
        got, expected = (layer(x, return_carry=True) for layer in (RNN(ours), nnx.RNN(theirs)))
        assert {a.dtype for a in leaves(got)} == {np.dtype("float64")}
        close(got, expected, rtol=1e-13, atol=1e-13)


@combinations(
    "dtype, param_dtype, x_dtype, y_dtype, sparse",
    [
        (None, "float32", "float32", "float32"),
        (None, "float32", "bfloat16", "float32"),
        (None, "bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32", "bfloat16"),
        ("float32", "bfloat16", "bfloat16", "float32"),
    ],
    [{}, {"recurrent_sparsity": 0.5, "input_sparsity": 0.5}],
)
def test_dtypes(dtype, param_dtype, x_dtype, y_dtype, sparse):
    options = {"dtype": dtype and jnp.dtype(dtype), "param_dtype": jnp.dtype(param_dtype)}
    cell = LSTMCell(IN, H, **options, **sparse, rngs=nnx.Rngs(0))
    assert {x.dtype.name for x in leaves(parameters(cell))} == {param_dtype}
    layer, x = RNN(cell, return_carry=True), inputs(B, T, IN)
    carry, y = layer(x.astype(x_dtype))
    assert {c.dtype.name for c in carry} == {param_dtype} and y.dtype.name == y_dtype
    wide = LSTMCell(IN, H, **sparse, rngs=nnx.Rngs(0))
    nnx.update(wide, jax.tree.map(lambda a: a.astype(jnp.float32), nnx.state(cell, nnx.Param)))
    np.testing.assert_allclose(np.float32(y), RNN(wide)(x), atol=0.03)


def test_orthogonal_kernels_in_16_bits():
    narrow, wide = (
        GRUCell(IN, H, param_dtype=dtype, rngs=nnx.Rngs(0)).dense_h.kernel[...]
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))
    np.testing.assert_allclose(wide @ wide.T, np.eye(H), atol=1e-5)


# ---- The carry at the start ----


def test_carry_init_draws_the_keys_that_flax_draws():
    init = {"carry_init": nnx.initializers.normal(1.0)}
    ours = RNN(LSTMCell(IN, H, **init, rngs=nnx.Rngs(0)))
    with pytest.warns(UserWarning, match="carry_init"):
        theirs = nnx.RNN(nnx.OptimizedLSTMCell(IN, H, **init, rngs=nnx.Rngs(0)))
    x = inputs(B, T, IN)
    first, second = ours(x), nnx.jit(lambda layer, x: layer(x))(ours, x)
    close(first, theirs(x))
    close(second, theirs(x))
    assert not np.allclose(first, second)
    for seeds in ({"carry": 3}, {"default": 4}):
        close(ours(x, rngs=nnx.Rngs(**seeds)), theirs(x, rngs=nnx.Rngs(**seeds)))
    given = RNN(ours.cell, rngs=nnx.Rngs(7)), nnx.RNN(theirs.cell, rngs=nnx.Rngs(7))
    close(*(layer(x) for layer in given))
    with pytest.raises(ValueError, match=r"LSTMCell.initialize_carry: rngs must be given"):
        RNN(ours.cell, rngs=False)(x)


def test_a_stream_is_kept_only_where_something_draws_from_it():
    plain = RNN(GRUCell(IN, H, rngs=nnx.Rngs(0)))
    drawing = RNN(GRUCell(IN, H, carry_init=nnx.initializers.ones, rngs=nnx.Rngs(0)))
    both = Bidirectional(plain, drawing)
    kept = [len(leaves(nnx.state(m, nnx.RngState))) for m in (plain, drawing, both)]
    assert kept == [0, 2, 4]
    np.testing.assert_array_equal(drawing.cell.initialize_carry((2, IN), nnx.Rngs(0)), 1)


def test_a_cell_may_keep_a_random_stream():
    init = nnx.initializers.normal(1.0)
    with pytest.warns(UserWarning):
        theirs = nnx.LSTMCell(IN, H, carry_init=init, keep_rngs=True, rngs=nnx.Rngs(0))
    ours = LSTMCell(IN, H, carry_init=init, keep_rngs=True, rngs=nnx.Rngs(0))
    plain = GRUCell(IN, H, keep_rngs=True, rngs=nnx.Rngs(0))
    for _ in range(2):  # the stream moves on
        close(ours.initialize_carry((B, IN)), theirs.initialize_carry((B, IN)))
    close(plain.initialize_carry((B, IN)), jnp.zeros((B, H)))
    key = nnx.Rngs(0).carry.fork()()
    close(plain.initialize_carry((B, IN), None, init), init(key, (B, H), jnp.float32))
    close(
        RNN(ours, rngs=False)(inputs(B, T, IN)),
        RNN(ours)(inputs(B, T, IN), initial_carry=theirs.initialize_carry((B, IN))),
    )


# ---- Sparse weights ----


@pytest.mark.smoke
@pytest.mark.parametrize(
    "cls, options",
    [
        (SimpleCell, {"input_sparsity": 0.4}),
        (GRUCell, {"recurrent_topology": Topology.from_mask(UNEVEN)}),
        (LSTMCell, {"recurrent_sparsity": 0.6, "input_sparsity": 0.4}),
    ],
)
def test_sparse_weights_are_masked_dense_ones(cls, options):
    cell = cls(IN, H, **options, **BIAS, rngs=nnx.Rngs(0))
    twin, stored = dense_twin(cell)
    assert len(stored) == len(options)
    x = inputs(B, T, IN)
    run = {"seq_lengths": LENGTHS, "return_carry": True}

    def loss(cell, x):
        results = RNN(cell)(x, **run)
        return jnp.sum(jnp.sin(results[1])), results

    gradient = compiled(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    ((_, ours), (got, of_x)), ((_, theirs), (expected, of_x_expected)) = (
        gradient(c, x) for c in (cell, twin)
    )
    close(ours, theirs)
    np.testing.assert_allclose(of_x, of_x_expected, rtol=1e-5, atol=1e-6)
    for name in ("dense_i", "dense_h"):
        theirs = expected[name]["kernel"][...]
        if name in stored:
            # Row-major order of the matrix (out, in) is the order of its stored entries.
            ours, theirs = got[name]["values"][...], theirs.T[stored[name].T]
        else:
            ours = got[name]["kernel"][...]
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_layers_may_be_replaced_by_pruned_ones():
    cell = LSTMCell(IN, H, **BIAS, rngs=nnx.Rngs(0))
    layer, x = RNN(cell), inputs(B, T, IN)
    full = layer(x)
    cell.dense_h = SparseLinear.from_dense(cell.dense_h, sparsity=0.0)
    close(layer(x), full)
    cell.dense_h = SparseLinear.from_dense(nnx.Linear(H, 4 * H, rngs=nnx.Rngs(3)), sparsity=0.9)
    twin, stored = dense_twin(cell)
    assert stored["dense_h"].sum() == 4 * H * H - round(0.9 * 4 * H * H)
    close(layer(x), RNN(twin)(x))


def test_a_kernel_init_makes_the_dense_kernel():
    topology = Topology.from_mask(masks.band(3), (H, H))
    cell = SimpleCell(
        IN,
        H,
        recurrent_topology=topology,
        recurrent_kernel_init=nnx.initializers.constant(2.0),
        rngs=nnx.Rngs(0),
    )
    mask = np.abs(np.arange(H)[:, None] - np.arange(H)) < 3
    np.testing.assert_array_equal(cell.dense_h.weight.todense(), 2.0 * mask)


# ---- Options of the scan ----


def test_inputs_are_multiplied_at_once():
    layer = RNN(LSTMCell(IN, H, rngs=nnx.Rngs(0)))
    names = primitives(layer, inputs(B, T, IN))
    assert names.count("dot_general") == 1 and scans(names) == 1


def test_recompute_keeps_less():
    def kept(recompute):
        layer = RNN(GRUCell(IN, H, rngs=nnx.Rngs(0)), recompute=recompute)
        graphdef, state = nnx.split(layer)
        _, pull = jax.vjp(lambda s, x: nnx.merge(graphdef, s)(x), state, inputs(B, T, IN))
        return sum(a.size for a in leaves(pull))

    assert kept(True) < kept(False)


@pytest.mark.parametrize("option", ["implementation", "variant"])
def test_implementations_and_variants_are_those_of_the_scan(option):
    cell = GRUCell(IN, H, rngs=nnx.Rngs(0))
    x = inputs(B, T, IN)
    with pytest.raises(ValueError, match="nonsense"):
        RNN(cell, **{option: "nonsense"})(x)
    with pytest.raises(ValueError, match="nonsense"):
        Bidirectional(RNN(cell, **{option: "nonsense"}), RNN(cell))(x)
    close(RNN(cell, implementation="xla")(x), RNN(cell)(x))


def test_precision_is_that_of_the_layers():
    precise = GRUCell(IN, H, precision="highest", rngs=nnx.Rngs(0))
    assert precise.dense_i.precision == precise.dense_h.precision == "highest"
    for sparse in ({}, {"recurrent_sparsity": 0.5}):
        with pytest.raises(ValueError, match=r"GRUCell: precision must be .* got 'nonsense'"):
            GRUCell(IN, H, precision="nonsense", **sparse, rngs=nnx.Rngs(0))
        cell = GRUCell(IN, H, **sparse, rngs=nnx.Rngs(0))
        expected, x = RNN(cell)(inputs(B, T, IN)), inputs(B, T, IN)
        for precision in ("bfloat16", ("highest", "default"), jax.lax.Precision.HIGH):
            options = {"precision": precision, **sparse, "rngs": nnx.Rngs(0)}
            # A GPU multiplies dense matrices as coarsely as it is allowed to.
            off = {} if jax.default_backend() == "cpu" else {"rtol": 2e-2, "atol": 2e-2}
            close(RNN(GRUCell(IN, H, **options))(x), expected, **off)
        cell.dense_h.precision = "nonsense"
        with pytest.raises(ValueError, match=r"RNN: dense_h: precision .* got 'nonsense'"):
            RNN(cell)(x)


def test_a_preferred_element_type_of_the_recurrent_product():
    cell = GRUCell(IN, H, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    expected = RNN(cell)(inputs(B, T, IN))
    cell.dense_h.preferred_element_type = jnp.float32  # which its sums have anyhow
    np.testing.assert_array_equal(RNN(cell)(inputs(B, T, IN)), expected)
    cell.dense_h.preferred_element_type = jnp.float16
    with pytest.raises(ValueError, match=r"RNN: dense_h: preferred_element_type must be bfloat16"):
        RNN(cell)(inputs(B, T, IN))


# ---- Layouts for a GPU ----


def layouts(model):
    return [
        module.topology[...].layouts.get("scan_layout")
        for _, module in nnx.iter_modules(model)
        if isinstance(module, SparseLinear)
    ]


def wide_model():
    topology = Topology.from_mask(masks.band(3), (4 * 32, 32))
    cells = [
        LSTMCell(IN, 32, recurrent_topology=topology, input_sparsity=0.4, rngs=nnx.Rngs(i))
        for i in range(2)
    ]
    return Bidirectional(*map(RNN, cells))


def test_packed_models_carry_layouts_of_their_own():
    model, x = wide_model(), inputs(B, T, IN)
    run = nnx.jit(lambda model, x: model(x))
    expected = run(model, x)
    pack(model, batch=B, device=H200)
    assert sum(layout is not None for layout in layouts(model)) == 2  # the recurrent weights
    np.testing.assert_array_equal(run(model, x), expected)
    other = wide_model()
    pack(other, batch=B, device=H200)
    nnx.jit(lambda model: None, donate_argnums=0)(model)
    jax.tree.map(lambda a: a.delete(), nnx.state(model))
    np.testing.assert_array_equal(run(other, x), expected)
    pack(other, batch=B, device=H200)
    verify(other)
    unpack(other)
    assert jax.tree.structure(nnx.state(other)) == jax.tree.structure(nnx.state(wide_model()))


def test_layouts_are_for_the_dtype_of_the_computation():
    def forms(of_pack=None, **options):
        cell = GRUCell(IN, 64, recurrent_sparsity=0.5, **options, rngs=nnx.Rngs(0))
        pack(RNN(cell), batch=4, device=H200, dtype=of_pack)
        return cell.dense_h.topology[...].layouts["scan_layout"].forms

    narrow = forms(dtype=jnp.bfloat16)
    assert narrow != forms()
    assert narrow == forms(of_pack=jnp.bfloat16) == forms(param_dtype=jnp.bfloat16)
    model = wide_model()
    with pytest.raises(ValueError, match=r"pack: at \w+ward_rnn.cell: .*batch of 64 in float32"):
        pack(model, batch=64, device=H200)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU to lay out for")
def test_nothing_is_laid_out_without_a_gpu():
    model = wide_model()
    pack(model, batch=1000)
    assert layouts(model) == [None] * 4
