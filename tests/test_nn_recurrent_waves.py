"""Runs of layers of a stack that are one scan, against the layers one by one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

nnx = pytest.importorskip("flax.nnx")

from nn_recurrent_problems import BIAS, MGU, close, compiled, inputs, leaves  # noqa: E402

import jaxsparse.nn.stack  # noqa: E402
from jaxsparse.nn import (  # noqa: E402
    RNN,
    Bidirectional,
    GRUCell,
    HeadwiseLinear,
    LSTMCell,
    RecurrentCell,
    RecurrentStack,
    SimpleCell,
    verify,
)
from jaxsparse.nn.waves import Wave  # noqa: E402
from jaxsparse.primitive import equations  # noqa: E402
from jaxsparse.pruning import sparsify  # noqa: E402

H, T, B, DEPTH = 6, 5, 4, 5
LENGTHS = jnp.array([3, 0, 5, 1])
RESETS = jnp.array([[0, 0, 1, 0, 0], [1, 0, 0, 1, 0], [0, 1, 1, 0, 1], [0, 0, 0, 1, 0]], bool)
VALID = jnp.arange(T) < LENGTHS[:, None]


@pytest.fixture
def one_by_one(monkeypatch):
    """What runs a program whose stacks call their layers one after the other."""

    def run(program, *arguments):
        with monkeypatch.context() as patch:
            alone = lambda blocks, *_: Wave((blocks[0],), (None,), {})  # noqa: E731
            patch.setattr(jaxsparse.nn.stack, "wave_of", alone)
            return program(*arguments)

    return run


# ---- Values ----


def cells(kind, **options):
    options = BIAS | {"rngs": nnx.Rngs(0)} | options
    for i in range(DEPTH):
        if kind == "relu":
            yield SimpleCell(H, H, activation_fn=nnx.relu, **options)
        elif kind == "gru":
            yield GRUCell(H, H, use_recurrent_bias=i % 2 == 0, **options)
        elif kind == "lstm" or i % 2:
            yield LSTMCell(H, H, use_bias=i % 2 == 0, **options)
        else:
            yield RecurrentCell(H, H, MGU, gates=2, **options)


def running(i):
    """A batch norm whose averages are no identity."""
    norm = nnx.BatchNorm(H, use_running_average=True, rngs=nnx.Rngs(i))
    norm.mean[...], norm.var[...] = inputs(H, seed=i), 0.5 + inputs(H, seed=i + 9) ** 2
    norm.scale[...], norm.bias[...] = 1 + inputs(H, seed=i + 18) / 3, inputs(H, seed=i + 27)
    return norm


SPARSE = {"recurrent_sparsity": 0.5, "input_sparsity": 0.4}
NORMAL = nnx.initializers.normal(1.0)


def many_widths():
    sizes = [(3, 7), (7, 4), (4, 4), (4, 9)]
    return RecurrentStack([RNN(LSTMCell(*n, rngs=nnx.Rngs(0))) for n in sizes], return_carry=True)


def dropped_and_skipping():
    return RecurrentStack(
        [RNN(cell) for cell in cells("lstm")],
        skip=2,
        dropouts=0.4,
        return_carry=True,
        rngs=nnx.Rngs(1),
    )


def folded():
    norms = [running(i) for i in range(DEPTH)]
    norms[3].scale, norms[4].bias = nnx.data(None), nnx.data(None)
    layers = [RNN(cell, time_major=True) for cell in cells("gru", **SPARSE)]
    return RecurrentStack(layers, norms=norms, skip=3)


def reversed_and_checkpointed():
    layers = [RNN(cell, reverse=True, keep_order=True) for cell in cells("relu")]
    norms = with_norm(0, jnp.tanh)  # behind the start of a skip, which is not in the scan then
    return RecurrentStack(layers, norms=norms, skip=1, checkpoint_every=3)


def drawn_and_normalised():
    norms = [jnp.tanh, None, random_norm(nnx.LayerNorm), random_norm(nnx.RMSNorm), running(0)]
    per_row = nnx.Dropout(0.3, broadcast_dims=(1,), rngs=nnx.Rngs(1))
    return RecurrentStack(
        [RNN(cell, rngs=nnx.Rngs(2)) for cell in cells("mixed", carry_init=NORMAL)],
        norms=norms,
        dropouts=[per_row, None, 0.2, None, 0.2],
        rngs=nnx.Rngs(3),
    )


def both_ways_in_the_middle():
    rnns = [RNN(cell) for cell in cells("lstm", recurrent_sparsity=0.5)]
    both = Bidirectional(rnns[1], rnns[2], merge_fn=jnp.add)
    return RecurrentStack([rnns[0], rnns[3], both, rnns[4], rnns[0]])  # the last one is the first


def random_norm(cls, **options):
    norm = cls(H, rngs=nnx.Rngs(0), **options)
    norm.scale[...] = inputs(H, seed=1)
    if cls is nnx.LayerNorm:
        norm.bias[...] = inputs(H, seed=2)
    return norm


def all_normalised():
    norms = [
        random_norm(nnx.LayerNorm),
        nnx.RMSNorm(H, use_scale=False, epsilon=0.1, rngs=nnx.Rngs(0)),
        random_norm(nnx.RMSNorm),
        nnx.LayerNorm(H, use_bias=False, rngs=nnx.Rngs(0)),
        random_norm(nnx.LayerNorm, epsilon=0.1),
    ]
    layers = [RNN(cell) for cell in cells("gru", input_sparsity=0.4)]
    return RecurrentStack(layers, norms=norms, skip=2, dropouts=0.3, rngs=nnx.Rngs(0))


def in_heads():
    made = list(cells("lstm", heads=3))
    made[1].dense_i = HeadwiseLinear(H, 4 * H, heads=2, gates=4, rngs=nnx.Rngs(1))
    made[4].dense_i = HeadwiseLinear(H, 4 * H, heads=2, gates=2, rngs=nnx.Rngs(1))
    norms = [None, running(0), None, None, None]
    return RecurrentStack([RNN(cell) for cell in made], norms=norms)


STACKS = {
    "heads": (in_heads, (B, T, H), {}),
    "many widths": (many_widths, (2, 2, T, 3), {}),
    "no batch": (many_widths, (T, 3), {}),
    "dropout and skips": (dropped_and_skipping, (B, T, H), {"seq_lengths": LENGTHS}),
    "folded norms": (
        folded,
        (T, B, H),
        {"seq_lengths": LENGTHS, "resets": RESETS.T},
    ),
    "reversed, checkpointed": (
        reversed_and_checkpointed,
        (B, T, H),
        {"seq_lengths": LENGTHS, "resets": RESETS},
    ),
    "drawn carries, norms": (drawn_and_normalised, (B, T, H), {}),
    "norms of each step": (all_normalised, (B, T, H), {"seq_lengths": LENGTHS}),
    "both ways": (both_ways_in_the_middle, (B, T, H), {"resets": RESETS}),
}


@pytest.mark.parametrize("name", STACKS)
def test_waves_compute_what_layers_do(name, one_by_one):
    make, shape, call = STACKS[name]

    def run(stack, x):
        def loss(stack, x):
            results = stack(x, **call)
            return sum(jnp.sum(jnp.sin(a)) for a in leaves(results)), results

        results = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(stack, x)
        return leaves((results, nnx.state(stack, nnx.RngCount)))

    x = inputs(*shape)
    if "seq_lengths" in call:
        valid = VALID.T if shape[0] == T else VALID
        x = jnp.where(valid[..., None], x, jnp.nan)
    assert max(waves(make(), x, **call)) > 1
    got = compiled(run)(make(), x)
    expected = one_by_one(compiled(run), make(), x)
    close(got, expected, rtol=2e-5, atol=2e-5)
    assert all(np.isfinite(a).all() for a in got)


def test_half_precision_and_given_carries(one_by_one):
    norms = [random_norm(nnx.RMSNorm, dtype=jnp.bfloat16) for _ in range(DEPTH)]
    layers = [RNN(cell) for cell in cells("lstm", dtype=jnp.bfloat16)]
    stack = RecurrentStack(
        layers, norms=norms, skip=DEPTH, dropouts=0.3, return_carry=True, rngs=nnx.Rngs(1)
    )
    x = inputs(B, T, H, dtype=jnp.bfloat16)
    start = [(inputs(B, H, seed=i), inputs(B, H, seed=i + 9)) for i in range(DEPTH)]

    def run(stack, x):
        return stack(x, initial_carry=start)

    assert waves(stack, x) == [DEPTH]
    got, expected = compiled(run)(stack, x), one_by_one(compiled(run), stack, x)
    assert [a.dtype for a in leaves(got)] == [a.dtype for a in leaves(expected)]
    close(*(jax.tree.map(jnp.float32, a) for a in (got, expected)), rtol=0.05, atol=0.05)


HARD_TO_NORMALISE = {
    "squares overflow": (jnp.float16, 300 * inputs(B, T, H, dtype=jnp.float16)),
    "differences are rounded away": (jnp.bfloat16, 100 + inputs(B, T, H)),
}


@pytest.mark.parametrize("what", HARD_TO_NORMALISE)
def test_norms_of_what_16_bits_do_not_hold(what, one_by_one):
    """Flax normalises what comes in before it is rounded, in float32."""
    dtype, x = HARD_TO_NORMALISE[what]
    norms = [random_norm(nnx.LayerNorm, dtype=dtype) for _ in range(DEPTH)]
    stack = RecurrentStack([RNN(cell) for cell in cells("lstm", dtype=dtype)], norms=norms)
    assert waves(stack, x) == [1] * DEPTH
    run = compiled(lambda stack, x: jnp.float32(stack(x)))
    close(run(stack, x), one_by_one(run, stack, x), rtol=0.05, atol=0.02)


def sparse_stack(rngs, count=3):
    cells = [LSTMCell(H, H, **SPARSE, rngs=rngs) for _ in range(count)]
    return RecurrentStack([RNN(cell) for cell in cells], skip=2)


def test_an_ensemble_is_one_scan_of_each_member():
    @nnx.jit
    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def make(rngs):
        return sparse_stack(rngs)

    stacks, x = make(nnx.Rngs(0)), inputs(2, B, T, H)
    y = compiled(nnx.vmap(lambda stack, x: stack(x, seq_lengths=LENGTHS)))(stacks, x)
    for i in range(2):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], nnx.state(stacks))
        alone = nnx.merge(nnx.graphdef(stacks), verify(one))
        close(y[i], alone(x[i], seq_lengths=LENGTHS), rtol=1e-5, atol=1e-6)


@pytest.mark.several_devices(2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_sharded_batch_stays_sharded(kind):
    stack, x, lengths = sparse_stack(nnx.Rngs(0)), inputs(8, T, H), jnp.arange(8)
    expected = stack(x, seq_lengths=lengths)
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(kind,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        shards = jax.device_put(x, NamedSharding(mesh, PartitionSpec("batch")))
        y = nnx.jit(lambda stack, x, lengths: stack(x, seq_lengths=lengths))(stack, shards, lengths)
    assert y.sharding.spec[0] == "batch"
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


# ---- What ends a wave ----


def waves(stack, x, **call):
    """How many layers each scan of a stack runs."""
    sizes = []
    graphdef, state = nnx.split(stack)
    program = jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x, **call))(state, x)
    for equation in equations(program.jaxpr):
        if equation.primitive.name == "jaxsparse_recurrent_graph":
            sizes.append(sum(edge.delay for edge in equation.params["edges"]))
        elif equation.primitive.name == "jaxsparse_recurrent_scan":
            sizes.append(1)
    return sizes


def rnns(count=DEPTH, **options):
    return [RNN(SimpleCell(H, H, rngs=nnx.Rngs(i)), **options) for i in range(count)]


def batch_norms(**options):
    return [nnx.BatchNorm(H, **options, rngs=nnx.Rngs(0)) for _ in range(DEPTH)]


def with_norm(place, norm):
    return [norm if i == place else None for i in range(DEPTH)]


def with_layer(place, layer):
    return [layer if i == place else one for i, one in enumerate(rnns())]


class OtherRNN(RNN):
    def __call__(self, inputs, **options):
        carry, y = super().__call__(inputs, **options)
        return carry, 2 * y


class OtherDropout(nnx.Dropout):
    def __call__(self, inputs, **options):
        return 2 * inputs


def adapted():
    """A layer whose input's weights have a call of their own."""
    (layer,) = rnns(1)
    layer.cell.dense_i = nnx.LoRALinear(H, H, lora_rank=2, rngs=nnx.Rngs(0))
    return layer


def in_bfloat16():
    return RNN(SimpleCell(H, H, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))


ENDS = {
    "nothing": (lambda: RecurrentStack(rnns(), skip=2, dropouts=0.1, rngs=nnx.Rngs(0)), [5]),
    "norms of each step": (
        lambda: RecurrentStack(rnns(), norms=[random_norm(nnx.LayerNorm)] * DEPTH, skip=5),
        [5],
    ),
    "another norm": (lambda: RecurrentStack(rnns(), norms=with_norm(2, jnp.tanh)), [2, 3]),
    "a norm's option": (
        lambda: RecurrentStack(
            rnns(), norms=with_norm(2, random_norm(nnx.LayerNorm, use_fast_variance=False))
        ),
        [2, 3],
    ),
    "batch norms in training": (lambda: RecurrentStack(rnns(), norms=batch_norms()), [1] * 5),
    "running averages": (
        lambda: RecurrentStack(rnns(), norms=batch_norms(use_running_average=True), skip=5),
        [5],
    ),
    "another layer": (
        lambda: RecurrentStack(with_layer(2, Bidirectional(*rnns(2), merge_fn=jnp.add))),
        [2, 1, 2],
    ),
    "a subclass": (lambda: RecurrentStack(with_layer(2, OtherRNN(rnns(1)[0].cell))), [2, 1, 2]),
    "a call of its own": (lambda: RecurrentStack(with_layer(2, adapted())), [2, 1, 2]),
    "another dtype": (lambda: RecurrentStack(with_layer(4, in_bfloat16())), [4, 1]),
    "another option": (lambda: RecurrentStack(with_layer(2, *rnns(1, recompute=True))), [2, 1, 2]),
    "another direction": (
        lambda: RecurrentStack(with_layer(2, *rnns(1, reverse=True, keep_order=True))),
        [2, 1, 2],
    ),
    "another order": (lambda: RecurrentStack(rnns(reverse=True)), [1] * 5),
    "all reversed": (lambda: RecurrentStack(rnns(reverse=True, keep_order=True)), [5]),
    "another dropout": (
        lambda: RecurrentStack(rnns(), dropouts=with_norm(1, OtherDropout(0.1))),
        [1, 1, 3],
    ),
    # The skip over layers 2 and 3 starts behind layer 1, which is returned, and ends in layer 3.
    "a norm within a skip": (
        lambda: RecurrentStack(rnns(), skip=2, norms=with_norm(3, jnp.tanh)),
        [2, 1, 1, 1],
    ),
    "checkpoints within skips": (
        lambda: RecurrentStack(rnns(), skip=2, checkpoint_every=3),
        [2, 1, 1, 1],
    ),
    "checkpoints at skips": (lambda: RecurrentStack(rnns(), skip=2, checkpoint_every=4), [4, 1]),
    "the last skip": (
        lambda: RecurrentStack(rnns(), skip=2, norms=with_norm(4, jnp.tanh)),
        [4, 1],
    ),
}


@pytest.mark.parametrize("what", ENDS)
def test_what_ends_a_wave(what):
    make, expected = ENDS[what]
    assert waves(make(), inputs(B, T, H)) == expected


def test_evaluation_folds_norms():
    stack, x = RecurrentStack(rnns(), norms=batch_norms()), inputs(B, T, H)
    assert waves(stack, x) == [1] * DEPTH
    stack.eval()
    assert waves(stack, x) == [DEPTH]


def test_layers_whose_calls_are_recorded_are_called():
    layers = rnns(3)
    for layer in layers:
        kernel = layer.cell.dense_h.kernel
        kernel[...] = jnp.where(jnp.abs(kernel[...]) > 0.4, kernel[...], 0)
    stack, x = RecurrentStack(layers), inputs(B, T, H)
    sparse, table = sparsify(stack, x, faster_only=False, seconds=1e-3)
    assert [row["kept_dense"] for row in table.rows] == [None] * 3
    assert waves(sparse, x) == [3]
    close(sparse(x), stack(x), rtol=1e-5, atol=1e-6)


def test_errors_are_those_of_the_layers():
    layers = [*rnns(2), RNN(SimpleCell(H + 1, H, rngs=nnx.Rngs(0)))]
    with pytest.raises(ValueError, match="RNN: inputs must have 7 features"):
        RecurrentStack(layers)(inputs(B, T, H))
    wide = [*rnns(2), RNN(SimpleCell(H, H + 1, rngs=nnx.Rngs(0)))]
    with pytest.raises(ValueError, match="the skip that ends at layer 2 needs equal shapes"):
        RecurrentStack(wide, skip=3)(inputs(B, T, H))
    norms = [None, nnx.LayerNorm(H + 1, rngs=nnx.Rngs(0))]
    with pytest.raises(TypeError, match="cannot reshape array"):  # it is Flax's
        RecurrentStack(rnns(2), norms=norms)(inputs(B, T, H))
    with pytest.raises(TypeError, match="RNN: the carry of SimpleCell must have the structure"):
        RecurrentStack(rnns(2))(inputs(B, T, H), initial_carry=[None, (inputs(B, H),) * 2])
    with pytest.raises(ValueError, match="RNN: the leaves of the carry must have shape"):
        RecurrentStack(rnns(2))(inputs(B, T, H), initial_carry=[None, inputs(H)])
