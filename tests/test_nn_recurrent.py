"""The recurrent layers against Flax's, and under everything that Flax does with a layer."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")
ocp = pytest.importorskip("orbax.checkpoint")

from nn_recurrent_problems import (  # noqa: E402
    BIAS,
    IN,
    LENGTHS,
    B,
    H,
    T,
    close,
    compiled,
    dense_twin,
    inputs,
    leaves,
)

from jaxsparse import Topology, masks, recurrent  # noqa: E402
from jaxsparse.nn import (  # noqa: E402
    RNN,
    Bidirectional,
    GRUCell,
    LSTMCell,
    RecurrentCell,
    RecurrentStack,
    SimpleCell,
    SparseLinear,
    cell_functions,
    pack,
    unpack,
    verify,
)

CELLS = {
    "simple": (SimpleCell, nnx.SimpleCell, {"kernel_init": nnx.initializers.lecun_normal()}),
    "relu": (SimpleCell, nnx.SimpleCell, {"activation_fn": nnx.relu}),
    "residual": (SimpleCell, nnx.SimpleCell, {"residual": True}),
    "gru": (GRUCell, nnx.GRUCell, {}),
    "gru, other functions": (
        GRUCell,
        nnx.GRUCell,
        {"gate_fn": nnx.hard_sigmoid, "activation_fn": jax.nn.soft_sign},
    ),
    "lstm": (LSTMCell, nnx.OptimizedLSTMCell, {}),
    "lstm, other functions": (
        LSTMCell,
        nnx.OptimizedLSTMCell,
        {"gate_fn": nnx.hard_sigmoid, "activation_fn": nnx.gelu},
    ),
}
OURS = {"simple": SimpleCell, "gru": GRUCell, "lstm": LSTMCell}


def random_carry(cell, *batch, seed=5):
    stream = nnx.RngStream(seed, tag="carry")
    return cell.initialize_carry((*batch, IN), stream, nnx.initializers.normal(1.0))


def pair(name, *, features=IN, seed=0, **options):
    """Our cell and Flax's, made from one seed."""
    ours, theirs, functions = CELLS[name]
    options = BIAS | functions | options
    return (cls(features, H, **options, rngs=nnx.Rngs(seed)) for cls in (ours, theirs))


def flax_pair(name, **options):
    ours, theirs = pair(name)
    return RNN(ours, **options), nnx.RNN(theirs, **options)


def parameters(module):
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def jitted_gradient(loss):
    return compiled(nnx.grad(loss, argnums=(0, 1)))


def check_against_flax(ours, theirs, x, valid, **call):
    """Outputs, carries and gradients, of steps and rows that count (B, T)."""
    rows, valid = valid.any(1)[:, None], valid[..., None]

    def loss(layer, x):
        carry, y = layer(x, **call, return_carry=True)
        # Flax makes outputs past the end, too, and no carry of a row without steps.
        carry = jax.tree.map(lambda c: jnp.where(rows, c, 0), carry)
        results = carry, jnp.where(valid, y, 0)
        parts = [jnp.sum(jnp.sin((i + 1) * a)) for i, a in enumerate(leaves(results))]
        return sum(parts), results

    run = compiled(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, got), (ours_, x_) = run(ours, x)
    (_, expected), (theirs_, of_x) = run(theirs, x)
    close(got, expected)
    close(x_, of_x, atol=5e-6)
    close(nnx.to_pure_dict(ours_), nnx.to_pure_dict(theirs_), rtol=1e-5, atol=2e-5)


# ---- The numbers of nnx.RNN ----


@pytest.mark.parametrize("name", CELLS)
def test_one_seed_makes_the_parameters_of_flax(name):
    ours, theirs = pair(name)
    assert set(parameters(ours)) == set(parameters(theirs))
    jax.tree.map(np.testing.assert_array_equal, parameters(ours), parameters(theirs))


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "lengths"])
@pytest.mark.parametrize("name", CELLS)
def test_outputs_carries_and_gradients_are_those_of_flax(name, lengths):
    ours, theirs = flax_pair(name)
    x = inputs(B, T, IN)
    start = random_carry(ours.cell, B)
    steps = jnp.full(B, T) if lengths is None else lengths
    valid = jnp.arange(T) < steps[:, None]
    check_against_flax(ours, theirs, x, valid, initial_carry=start, seq_lengths=lengths)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "lengths"])
@pytest.mark.parametrize(
    "reverse, keep_order, time_major", list(itertools.product([False, True], repeat=3))
)
def test_orders(reverse, keep_order, time_major, lengths):
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


@pytest.mark.parametrize("kind", ["rnn", "bidirectional", "stack"])
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint8", "int16", "uint16"])
def test_lengths_of_a_dtype_that_has_no_number_for_all_steps(dtype, kind):
    longest = int(jnp.iinfo(dtype).max)
    rnn = RNN(SimpleCell(1, 1, bias_init=nnx.initializers.ones, rngs=nnx.Rngs(0)))
    made = {
        "bidirectional": lambda: Bidirectional(rnn, rnn),
        "stack": lambda: RecurrentStack([rnn]),
    }
    layer = made.get(kind, lambda: rnn)()
    x = jnp.ones((3, longest + 20, 1))
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
    got, expected = (jitted_gradient(loss)(layer, a) for a in (padded, x))
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


@pytest.mark.parametrize(
    "dtype, param_dtype, x_dtype, y_dtype",
    [
        (None, "float32", "float32", "float32"),
        (None, "float32", "bfloat16", "float32"),
        (None, "bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32", "bfloat16"),
        ("float32", "bfloat16", "bfloat16", "float32"),
    ],
)
@pytest.mark.parametrize(
    "sparse", [{}, {"recurrent_sparsity": 0.5, "input_sparsity": 0.5}], ids=len
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


# ---- Cells ----


def MGU(x, r, h):
    (x_f, x_n), (r_f, r_n) = x, r
    f = jax.nn.sigmoid(x_f + r_f)
    h = h + f * (jnp.tanh(x_n + f * r_n) - h)
    return h, h


def leaky(x, r, carry):
    (x,), (r,) = x, r
    membrane = 0.9 * carry["membrane"] + 0.1 * (x + r)
    return {"membrane": membrane, "state": jax.nn.relu(membrane)}, membrane


@pytest.mark.parametrize("sparse", [{}, {"recurrent_sparsity": 0.4}], ids=len)
@pytest.mark.parametrize(
    "function, gates, carry_like", [(MGU, 2, 0), (leaky, 1, {"membrane": 0, "state": 0})]
)
def test_a_cell_of_ones_own(function, gates, carry_like, sparse):
    cell = RecurrentCell(
        IN,
        H,
        function,
        gates=gates,
        carry_like=carry_like,
        use_recurrent_bias=True,
        **BIAS,
        **sparse,
        rngs=nnx.Rngs(0),
    )
    x, start = inputs(B, T, IN), random_carry(cell, B)
    layer = cell.dense_h
    kernel = layer.weight.todense().T if sparse else layer.kernel[...]
    carry, ys = start, []
    for t in range(T):
        state = leaves(carry)[-1]
        r = jnp.split(state @ kernel + layer.bias[...], gates, -1)
        carry, y = function(jnp.split(cell.dense_i(x[:, t]), gates, -1), r, carry)
        ys.append(y)
    got = RNN(cell, return_carry=True)(x, initial_carry=start)
    close(got, (carry, jnp.stack(ys, 1)))


def test_a_cell_makes_one_step_and_runs_in_flax():
    cell = LSTMCell(IN, H, recurrent_sparsity=0.5, **BIAS, rngs=nnx.Rngs(0))
    x, start = inputs(2, B, T, IN), random_carry(cell, 2, B)
    expected = RNN(cell, return_carry=True)(x, initial_carry=start)
    close(nnx.RNN(cell, return_carry=True)(x, initial_carry=start), expected)
    carry, y = cell(start, x[:, :, 0])
    close(y, expected[1][:, :, 0])
    assert jax.tree.map(jnp.shape, carry) == ((2, B, H), (2, B, H))


def test_the_same_functions_make_the_same_cell():
    make = lambda **o: LSTMCell(IN, H, **o, rngs=nnx.Rngs(0)).function  # noqa: E731
    assert make() is recurrent.LSTM
    assert make(gate_fn=nnx.hard_sigmoid) is make(gate_fn=nnx.hard_sigmoid)
    assert GRUCell(IN, H, rngs=nnx.Rngs(0)).function is recurrent.GRU
    assert SimpleCell(IN, H, rngs=nnx.Rngs(0)).function is recurrent.RNN("tanh")


# ---- Sparse weights ----


UNEVEN = np.random.default_rng(0).random((3 * H, H)) < np.linspace(0, 1, 3 * H)[:, None]


@pytest.mark.smoke
@pytest.mark.parametrize(
    "cls, options",
    [
        (SimpleCell, {"recurrent_sparsity": 0.6}),
        (GRUCell, {"recurrent_topology": Topology.from_mask(UNEVEN), "input_sparsity": 0.4}),
        (LSTMCell, {"recurrent_sparsity": 0.6, "input_sparsity": 0.4}),
        (LSTMCell, {"input_sparsity": 0.4}),
    ],
)
def test_sparse_weights_are_masked_dense_ones(cls, options):
    cell = cls(IN, H, **options, **BIAS, rngs=nnx.Rngs(0))
    twin, stored = dense_twin(cell)
    assert len(stored) == len(options)
    x = inputs(B, T, IN)
    run = {"seq_lengths": LENGTHS, "return_carry": True}
    close(RNN(cell)(x, **run), RNN(twin)(x, **run))

    def loss(cell, x):
        return jnp.sum(jnp.sin(RNN(cell)(x, seq_lengths=LENGTHS)))

    (got, of_x), (expected, of_x_expected) = (jitted_gradient(loss)(c, x) for c in (cell, twin))
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


def primitives(function, x):
    """The names of all that a function does, but of what is inside of our own operations."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            yield equation.primitive.name
            if not equation.primitive.name.startswith("jaxsparse"):
                for p in equation.params.values():
                    if isinstance(p, jax.extend.core.ClosedJaxpr):
                        yield from walk(p.jaxpr)

    return list(walk(jax.make_jaxpr(function)(x).jaxpr))


def scans(names):
    return sum(name.startswith("jaxsparse_recurrent_scan") for name in names)


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


# ---- Options that are set afterwards ----


@pytest.mark.parametrize(
    "cls, option, value",
    [
        (SimpleCell, "activation_fn", nnx.relu),
        (SimpleCell, "residual", True),
        (GRUCell, "gate_fn", nnx.hard_sigmoid),
        (GRUCell, "activation_fn", nnx.gelu),
        (LSTMCell, "gate_fn", nnx.hard_sigmoid),
        (LSTMCell, "activation_fn", nnx.relu),
    ],
)
def test_options_that_are_set_afterwards_count(cls, option, value):
    cell = cls(IN, H, rngs=nnx.Rngs(0))
    layer, x = RNN(cell), inputs(B, T, IN)
    before = layer(x)
    setattr(cell, option, value)
    made = cls(IN, H, **{option: value}, rngs=nnx.Rngs(0))
    expected = RNN(made)(x)
    assert not np.allclose(before, expected, atol=1e-3)
    run = nnx.jit(lambda layer, x: layer(x))
    for y in (layer(x), run(layer, x), nnx.clone(layer)(x)):
        close(y, expected)
    carry = random_carry(cell, B)
    close(cell(carry, x[:, 0]), made(carry, x[:, 0]))
    assert nnx.graphdef(cell) == nnx.graphdef(made)


def test_wrong_options_that_are_set_afterwards_are_named():
    cell = GRUCell(IN, H, rngs=nnx.Rngs(0))
    cell.gate_fn = PRELU.__call__
    with pytest.raises(TypeError, match=r"GRUCell: gate_fn must be a function without parameters"):
        RNN(cell)(inputs(B, T, IN))
    cell.gate_fn = nnx.softmax
    with pytest.raises(ValueError, match=r"GRU\(softmax, tanh\)"):
        RNN(cell)(inputs(B, T, IN))
    with pytest.raises(AttributeError, match="function"):
        cell.function = MGU  # it follows from the options


def test_a_function_of_ones_own_may_be_set_afterwards():
    cell, other = (
        RecurrentCell(IN, H, recurrent.RNN(f), rngs=nnx.Rngs(0)) for f in ("tanh", "relu")
    )
    cell.function = recurrent.RNN("relu")
    close(RNN(cell)(inputs(B, T, IN)), RNN(other)(inputs(B, T, IN)))


# ---- Code of a subclass ----


class Doubled(GRUCell):
    """Its call is not what a scan of its function computes."""

    def __call__(self, carry, inputs):
        carry, y = super().__call__(carry, inputs)
        return carry, 2 * y


class Shifted(GRUCell):
    """What a scan asks for, it may define anew."""

    @property
    def function(self):
        return cell_functions.gru(nnx.hard_sigmoid, self.activation_fn)

    def initialize_carry(self, *args, **options):
        return super().initialize_carry(*args, **options) + 1


def test_a_cell_with_a_call_of_its_own_is_refused_by_name():
    cell, x = Doubled(IN, H, rngs=nnx.Rngs(0)), inputs(B, T, IN)
    with pytest.raises(TypeError, match=r"RNN: cell must have the call of RecurrentCell, got Doub"):
        RNN(cell)
    plain = GRUCell(IN, H, rngs=nnx.Rngs(0))
    for layer in (RNN(plain), Bidirectional(RNN(plain), RNN(plain))):
        (layer if isinstance(layer, RNN) else layer.backward_rnn).cell = cell
        with pytest.raises(TypeError, match=r"got Doubled with one of its own.*nnx.RNN runs it"):
            layer(x)
    close(nnx.RNN(cell)(x), 2 * RNN(plain)(x))


def test_a_subclass_that_leaves_the_call_alone_is_honoured():
    cell, x = Shifted(IN, H, rngs=nnx.Rngs(0)), inputs(B, T, IN)
    plain = RNN(GRUCell(IN, H, gate_fn=nnx.hard_sigmoid, rngs=nnx.Rngs(0)))
    close(RNN(cell)(x), plain(x, initial_carry=jnp.ones((B, H))))


class Adapted(SparseLinear):
    def __call__(self, inputs, out_sharding=None):
        return 2 * super().__call__(inputs, out_sharding)


@pytest.mark.parametrize(
    "make",
    [
        lambda *sizes: nnx.LoRALinear(*sizes, lora_rank=2, rngs=nnx.Rngs(0)),
        lambda *sizes: Adapted(*sizes, sparsity=0.5, rngs=nnx.Rngs(0)),
    ],
    ids=["lora", "sparse"],
)
def test_layers_of_subclasses(make):
    """The call of dense_i is a cell's own; that of dense_h is the scan's."""
    cell, x = GRUCell(IN, H, rngs=nnx.Rngs(0)), inputs(B, T, IN)
    cell.dense_i = layer = make(IN, 3 * H)
    if isinstance(layer, nnx.LoRALinear):
        layer.lora.lora_b[...] = jnp.ones_like(layer.lora.lora_b[...])
    carry, ys = jnp.zeros((B, H)), []
    for step in jnp.swapaxes(x, 0, 1):
        carry, y = recurrent.GRU(
            jnp.split(layer(step), 3, -1), jnp.split(cell.dense_h(carry), 3, -1), carry
        )
        ys.append(y)
    np.testing.assert_allclose(RNN(cell)(x), jnp.stack(ys, 1), rtol=1e-5, atol=1e-5)
    cell.dense_h = make(H, 3 * H)
    name = type(layer).__name__
    with pytest.raises(
        TypeError, match=rf"dense_h must be .* got {name}, a subclass, whose own call"
    ):
        RNN(cell)(x)


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


# ---- Both directions ----


def both(first, second, **options):
    """Bidirectional layers of ours and of Flax's."""
    (a, x), (b, y) = first, second
    return (
        Bidirectional(RNN(a), RNN(b), **options),
        nnx.Bidirectional(nnx.RNN(x), nnx.RNN(y), **options),
    )


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "lengths"])
@pytest.mark.parametrize("second", ["lstm", "gru"])
def test_bidirectional_is_that_of_flax(second, lengths):
    ours, theirs = both(pair("lstm"), pair(second, seed=9))
    x = inputs(B, T, IN)
    start = tuple(random_carry(rnn.cell, B) for rnn in (ours.forward_rnn, ours.backward_rnn))
    steps = jnp.full(B, T) if lengths is None else lengths
    valid = jnp.arange(T) < steps[:, None]
    check_against_flax(ours, theirs, x, valid, initial_carry=start, seq_lengths=lengths)
    names = primitives(ours, x)
    assert scans(names) == (1 if second == "lstm" else 2)


@pytest.mark.parametrize("time_major", [False, True])
def test_bidirectional_options(time_major):
    merge = {"merge_fn": lambda a, b: a - 2 * b}
    ours, theirs = both(pair("gru"), pair("gru", seed=9), **merge, time_major=time_major)
    x = inputs(*((T, 2, 3) if time_major else (2, 3, T)), IN)
    close(ours(x, return_carry=True), theirs(x, return_carry=True))
    # The layers' own order does not count.
    ours.forward_rnn.reverse = ours.backward_rnn.time_major = True
    close(ours(x), theirs(x))


def test_bidirectional_of_two_patterns():
    cells = [
        GRUCell(IN, H, recurrent_topology=Topology.from_mask(mask), rngs=nnx.Rngs(i))
        for i, mask in enumerate([UNEVEN, UNEVEN[::-1] & UNEVEN])
    ]
    x = inputs(B, T, IN)
    forward, backward = (RNN(cell) for cell in cells)
    layer = Bidirectional(forward, backward)
    y = layer(x, seq_lengths=LENGTHS)
    expected = [
        forward(x, seq_lengths=LENGTHS),
        backward(x, seq_lengths=LENGTHS, reverse=True, keep_order=True),
    ]
    close(y, jnp.concatenate(expected, -1))
    assert scans(primitives(layer, x)) == 1
    mixed = Bidirectional(forward, RNN(dense_twin(cells[1])[0]))
    close(mixed(x, seq_lengths=LENGTHS), y)


def test_bidirectional_may_share_a_layer():
    rnn = RNN(GRUCell(IN, H, rngs=nnx.Rngs(0)))
    layer, x = Bidirectional(rnn, rnn), inputs(B, T, IN)

    def gradient(layer, **options):
        loss = nnx.grad(lambda layer, x: jnp.sum(layer(x, **options) ** 2))
        return nnx.to_pure_dict(compiled(loss)(layer, x))

    (got,) = gradient(layer).values()  # one layer, under one of its names
    parts = [gradient(rnn, reverse=reverse) for reverse in (False, True)]
    close(got, jax.tree.map(jnp.add, *parts), rtol=1e-4, atol=1e-5)


def test_bidirectional_random_carries():
    init = {"carry_init": nnx.initializers.normal(1.0)}
    ours = Bidirectional(*(RNN(GRUCell(IN, H, **init, rngs=nnx.Rngs(i))) for i in range(2)))
    with pytest.warns(UserWarning, match="carry_init"):
        theirs = nnx.Bidirectional(
            *(nnx.RNN(nnx.GRUCell(IN, H, **init, rngs=nnx.Rngs(i))) for i in range(2))
        )
    x = inputs(B, T, IN)
    close(ours(x), theirs(x))
    close(ours(x, rngs=nnx.Rngs(8)), theirs(x, rngs=nnx.Rngs(8)))


# ---- Layouts for a GPU ----


def layouts(model):
    return [
        module.topology[...].scan_layout
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
    pack(model, batch=B, device=recurrent.H200)
    assert sum(layout is not None for layout in layouts(model)) == 2  # the recurrent weights
    np.testing.assert_array_equal(run(model, x), expected)
    other = wide_model()
    pack(other, batch=B, device=recurrent.H200)
    nnx.jit(lambda model: None, donate_argnums=0)(model)
    jax.tree.map(lambda a: a.delete(), nnx.state(model))
    np.testing.assert_array_equal(run(other, x), expected)
    pack(other, batch=B, device=recurrent.H200)
    verify(other)
    unpack(other)
    assert jax.tree.structure(nnx.state(other)) == jax.tree.structure(nnx.state(wide_model()))


def test_layouts_are_for_the_dtype_of_the_computation():
    def forms(of_pack=None, **options):
        cell = GRUCell(IN, 64, recurrent_sparsity=0.5, **options, rngs=nnx.Rngs(0))
        pack(RNN(cell), batch=4, device=recurrent.H200, dtype=of_pack)
        return cell.dense_h.topology[...].scan_layout.forms

    narrow = forms(dtype=jnp.bfloat16)
    assert narrow != forms()
    assert narrow == forms(of_pack=jnp.bfloat16) == forms(param_dtype=jnp.bfloat16)
    model = wide_model()
    with pytest.raises(ValueError, match=r"pack: at \w+ward_rnn.cell: .*batch of 64 in float32"):
        pack(model, batch=64, device=recurrent.H200)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU to lay out for")
def test_nothing_is_laid_out_without_a_gpu():
    model = wide_model()
    pack(model, batch=1000)
    assert layouts(model) == [None] * 4


# ---- Errors ----


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda m: m(jnp.ones((B, T, 3))), ValueError, "inputs must have 5 features, .* got 3"),
        (lambda m: m(jnp.ones(IN)), ValueError, r"inputs must have at least 2 .* got shape \(5,\)"),
        (lambda m: m("x"), TypeError, "inputs must be an array, got str"),
        (lambda m: m(jnp.ones((B, T, IN), complex)), TypeError, "needs float32"),
        (
            lambda m: m(jnp.ones((B, T, IN)), seq_lengths=jnp.ones(3, int)),
            ValueError,
            r"seq_lengths must be integers of shape \(4,\), .* got int32 of shape \(3,\)",
        ),
        (
            lambda m: m(jnp.ones((B, T, IN)), seq_lengths=jnp.ones(B)),
            ValueError,
            "seq_lengths must be integers .* got float32",
        ),
        (
            lambda m: m(jnp.ones((B, T, IN)), seq_lengths="x"),
            TypeError,
            "seq_lengths must be an array, got str",
        ),
    ],
)
@pytest.mark.parametrize("name", ["RNN", "Bidirectional"])
def test_wrong_operands_are_named(name, call, error, message):
    rnn = RNN(LSTMCell(IN, H, rngs=nnx.Rngs(0)))
    layer = rnn if name == "RNN" else Bidirectional(rnn, rnn)
    with pytest.raises(error, match=message):
        call(layer)


def test_wrong_carries_are_named():
    layer, x = RNN(LSTMCell(IN, H, rngs=nnx.Rngs(0))), jnp.ones((B, T, IN))
    good = jnp.ones((B, H))
    with pytest.raises(TypeError, match=r"RNN: the carry of LSTMCell .* structure .*\(\*, \*\)"):
        layer(x, initial_carry=good)
    with pytest.raises(ValueError, match=r"RNN: .* shape \(4, 7\), .* got \(4, 5\)"):
        layer(x, initial_carry=(good, good[:, :5]))
    with pytest.raises(TypeError, match=r"RNN: carry must be an array, got str"):
        layer(x, initial_carry=(good, "x"))
    with pytest.raises(TypeError, match=r"needs float32.* got carry 1 int32"):
        layer(x, initial_carry=(good, good.astype(int)))
    with pytest.raises(TypeError, match=r"initial_carry must be a pair \(forward, backward\)"):
        Bidirectional(layer, layer)(x, initial_carry=good)
    with pytest.raises(ValueError, match=r"LSTMCell: inputs must have 5 features"):
        layer.cell((good, good), jnp.ones((B, 3)))


def test_unknown_cells_are_refused():
    with pytest.raises(TypeError, match=r"RNN: cell must be .*RecurrentCell, got str"):
        RNN("lstm")
    with pytest.raises(TypeError, match=r"got GRUCell: convert it by from_flax"):
        RNN(nnx.GRUCell(IN, H, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"Bidirectional: backward_rnn must be .* got GRUCell"):
        cell = GRUCell(IN, H, rngs=nnx.Rngs(0))
        Bidirectional(RNN(cell), cell)
    with pytest.raises(TypeError, match=r"RNN: rngs must be nnx.Rngs, a stream or a bool, got int"):
        RNN(GRUCell(IN, H, rngs=nnx.Rngs(0)), rngs=3)


def centred(x):
    return x - jnp.mean(x)


PRELU = nnx.PReLU()
SLOPE = PRELU.negative_slope
VECTOR = jnp.ones(1)


class Calling:
    """A function that is no module, but has one."""

    def __init__(self):
        self.function = PRELU

    def __call__(self, x):
        return self.function(x)


def in_closure(function):
    return lambda x: function(x)


@pytest.mark.parametrize(
    "function, held",
    [
        (PRELU.__call__, "PReLU"),
        (functools.partial(nnx.PReLU.__call__, PRELU), "PReLU"),
        (functools.partial(lambda x, slope: x * slope, slope=SLOPE), "Param"),
        (functools.partial(lambda x, slopes: x * slopes["a"][0], slopes={"a": [SLOPE]}), "Param"),
        (lambda x: PRELU(x), "PReLU"),
        (lambda x, function=PRELU: function(x), "PReLU"),
        (in_closure(PRELU), "PReLU"),
        (in_closure(in_closure(PRELU.__call__)), "PReLU"),
        (jax.jit(in_closure(PRELU)), "PReLU"),
        (nnx.jit(in_closure(PRELU)), "PReLU"),
        (Calling(), "PReLU"),
        (Calling().__call__, "PReLU"),
    ],
    ids=lambda x: x if isinstance(x, str) else getattr(x, "__name__", type(x).__name__),
)
def test_functions_with_parameters_are_refused(function, held):
    message = rf"must be a function without parameters, got .*, which refers to a {held}"
    with pytest.raises(TypeError, match=f"GRUCell: activation_fn {message}"):
        GRUCell(IN, H, activation_fn=function, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=f"RecurrentCell: function {message}"):
        RecurrentCell(IN, H, functools.partial(applied, function), rngs=nnx.Rngs(0))


def applied(function, x, r, h):
    h = function(x[0] + r[0])
    return h, h


@pytest.mark.parametrize("function", [lambda x: x * VECTOR[0], lambda x: x + jnp.sum(VECTOR)])
def test_functions_of_other_arrays_are_refused(function):
    message = r"must be a function of its .*, which uses a constant array of shape \(1,\)"
    with pytest.raises(ValueError, match=rf"LSTMCell: gate_fn {message}"):
        LSTMCell(IN, H, gate_fn=function, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=rf"RecurrentCell: function {message}"):
        RecurrentCell(IN, H, functools.partial(applied, function), rngs=nnx.Rngs(0))


def test_functions_of_traced_values_are_refused():
    def make(slope):
        SimpleCell(IN, H, activation_fn=lambda x: x * slope, rngs=nnx.Rngs(0))

    with pytest.raises(ValueError, match=r"SimpleCell: activation_fn .* uses a traced array"):
        jax.jit(make)(1.0)


def test_functions_of_constant_scalars_are_taken():
    slope = jnp.float32(0.5)
    for function in (lambda x: x * slope, functools.partial(jnp.multiply, np.float32(0.5))):
        layer = RNN(SimpleCell(IN, H, activation_fn=function, rngs=nnx.Rngs(0)))
        half = RNN(SimpleCell(IN, H, activation_fn=lambda x: 0.5 * x, rngs=nnx.Rngs(0)))
        close(layer(inputs(B, T, IN)), half(inputs(B, T, IN)))


@pytest.mark.parametrize("make", ["residual_rnn", "gru", "lstm"])
def test_functions_that_nothing_uses_are_not_kept(make):
    make = getattr(cell_functions, make)

    def made():
        function = lambda x: x  # noqa: E731
        make(*(function,) * (1 if make is cell_functions.residual_rnn else 2))
        return weakref.ref(function)

    first, *_ = [made() for _ in range(2000)]
    gc.collect()
    assert first() is None


class Unhashable:
    __hash__ = None

    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"gate_fn": "sigmoid"}, TypeError, "GRUCell: gate_fn must be a function .* got str"),
        ({"activation_fn": nnx.PReLU()}, TypeError, "activation_fn must be .* got PReLU"),
        ({"gate_fn": Unhashable()}, TypeError, "gate_fn must be hashable, Unhashable is not"),
        ({"gate_fn": nnx.softmax}, ValueError, r"the cell GRU\(softmax, tanh\) fails"),
        ({"activation_fn": centred}, ValueError, r"GRU\(sigmoid, centred\) must be pointwise"),
        ({"activation_fn": jax.scipy.special.digamma}, ValueError, "digamma.* can't run inside"),
        ({"recurrent_sparsity": 1.5}, ValueError, r"sparsity must be in \[0, 1\), got 1.5"),
        (
            {"recurrent_topology": Topology.from_mask(masks.causal(), (H, H))},
            ValueError,
            r"topology must be one pattern of shape \(21, 7\)",
        ),
    ],
)
def test_wrong_options_of_cells_are_named(options, error, message):
    with pytest.raises(error, match=message):
        GRUCell(IN, H, **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "function, options, error, message",
    [
        (MGU, {"gates": 3}, ValueError, "the cell MGU fails with 3 gates"),
        (MGU, {"gates": 2, "carry_like": (0, 0)}, ValueError, "the cell MGU fails with 2 gates"),
        (lambda x, r, h: h, {}, TypeError, r"must return \(carry, y\)"),
        ("tanh", {}, TypeError, "cell must be a function, got str"),
        (MGU, {"gates": 2, "carry_like": ()}, ValueError, "carry must have a leaf"),
        (MGU, {"gates": 2.0}, TypeError, r"RecurrentCell: gates must be an integer, got 2\.0"),
    ],
)
def test_wrong_cells_show_when_they_are_made(function, options, error, message):
    with pytest.raises(error, match=message):
        RecurrentCell(IN, H, function, **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "layer, error, message",
    [
        (nnx.Embed(H, 3 * H, rngs=nnx.Rngs(0)), TypeError, "dense_h must be .* got Embed"),
        (
            nnx.Linear(H, 2 * H, rngs=nnx.Rngs(0)),
            ValueError,
            "dense_h must map 7 to 21 features, got 7 to 14",
        ),
        (
            SparseLinear(H, 3 * H, sparsity=0.5, activation="relu", rngs=nnx.Rngs(0)),
            ValueError,
            "dense_h must be the product and a bias alone",
        ),
        (
            nnx.Linear(H, 3 * H, dot_general=lambda *a, **k: None, rngs=nnx.Rngs(0)),
            ValueError,
            "dense_h must be the product and a bias alone",
        ),
    ],
)
def test_wrong_layers_in_a_cell_are_named(layer, error, message):
    cell = GRUCell(IN, H, rngs=nnx.Rngs(0))
    cell.dense_h = layer
    with pytest.raises(error, match=message):
        RNN(cell)(inputs(B, T, IN))
