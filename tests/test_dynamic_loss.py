"""The loss of a net over graphs: values, derivatives, transformations, errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import PLATFORM
from dynamic_loss_problems import LossCase
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from random_graphs import random_arrays
from test_dynamic_device import needs_gpu

from jaxsparse import EXPORT_DISABLED_CHECKS, H200, _ffi, dynamic, explain
from jaxsparse.dynamic.loss_primitive import dynamic_loss_p
from jaxsparse.primitive import OPERATIONS, choose, equations, typed_call
from jaxsparse.recurrent.failures import check


def close(got, expected, tolerance=1e-9):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "name, label, classes",
    [("tree_lstm_with_x", "label", 5), ("every_child", "class", 9), ("chain", "label", 64)],
)
def test_value_and_gradient_are_those_of_the_composition(name, label, classes):
    case = LossCase(name, 8, jnp.float32, classes=classes, label=label, graphs=9, rows=9)
    with jax.enable_x64(True):
        operands = case.wide()
        got = jax.jit(jax.value_and_grad(case.loss))(operands)
        expected = jax.jit(jax.value_and_grad(case.composed))(operands)
        assert all(float(jnp.abs(x).max()) > 1e-3 for x in jax.tree.leaves(expected))
        close(got, expected)
        close(jax.jit(case.loss)(operands), expected[0])


def test_derivatives():
    """Of both orders, forward and in reverse, by single operands too."""
    case = LossCase("tree_lstm", 2, jnp.float32, graphs=3, rows=5)
    with jax.enable_x64(True):
        operands = case.wide()
        check_grads(jax.jit(case.loss), (operands,), order=2, modes=("fwd", "rev"), eps=1e-4)
        everything = jax.jit(jax.grad(case.composed))(operands)
        for i in range(len(operands)):
            if operands[i] is None:
                continue

            def of_one(x, i=i):
                return case.loss((*operands[:i], x, *operands[i + 1 :]))

            close(jax.jit(jax.grad(of_one))(operands[i]), everything[i])


def test_only_what_moves_is_derived():
    """A gradient by the head alone has no way back, and a value none either."""
    case = LossCase("tree_lstm", 8, jnp.float32, graphs=3, rows=5)
    of_head = jax.make_jaxpr(jax.grad(lambda head: case.loss((*case.operands[:-1], head))))
    of_all = jax.make_jaxpr(jax.value_and_grad(case.loss))(case.operands)

    def names(jaxpr):
        return [e.primitive for e in equations(jaxpr.jaxpr)]

    assert dynamic_loss_p not in names(of_head(case.head))
    assert dynamic_loss_p not in names(jax.make_jaxpr(case.loss)(case.operands))
    assert names(of_all).count(dynamic_loss_p) == 1


@pytest.mark.parametrize("of_scan", [False, True])
def test_gradients_of_biases_are_products(of_scan):
    """Sums of 16-bit numbers over all rows are slow on a GPU, whose kernels nobody need ask for."""
    case = LossCase("every_child", 8, jnp.bfloat16, graphs=3, rows=5)
    weights, carry, xs, bias, head = case.operands

    def run(bias):
        if of_scan:
            made = dynamic.scan(case.cell, weights, carry, case.script, xs, bias=bias)
            return sum(jnp.vdot(x, x).astype(jnp.float32) for x in jax.tree.leaves(made))
        return case.loss((weights, carry, xs, bias, head))

    jaxpr = jax.make_jaxpr(jax.grad(run))(bias)
    rows, columns = case.script.form.computed, bias.shape[0]
    taken = [(e.primitive.name, v.aval.shape) for e in equations(jaxpr.jaxpr) for v in e.invars]
    assert ("dot_general", (8, rows)) in taken and ("dot_general", (rows, columns)) in taken
    assert not any(n == "reduce_sum" and shape[:1] == (rows,) for n, shape in taken)


def test_gradients_of_weights_and_bias_are_one_product():
    """In 16 bits, and the same as by themselves."""
    case = LossCase("every_child", 16, jnp.bfloat16, graphs=5, rows=7)
    weights, carry, xs, bias, head = case.operands
    operands = weights, carry, xs, bias.astype(jnp.bfloat16), head

    def gradient(implementation):
        return jax.grad(functools.partial(case.loss, implementation=implementation))

    joined, apart = (gradient(implementation) for implementation in (None, "xla"))
    shapes = [
        [v.aval.shape for e in equations(jax.make_jaxpr(f)(operands).jaxpr) for v in e.invars]
        for f in (joined, apart)
    ]
    columns = case.script.form.computed, 3 * 16 + 8  # of 3 children, and of ones
    assert columns in shapes[0] and columns not in shapes[1]
    got, expected = (jax.jit(f)(operands) for f in (joined, apart))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.abs(a - b).max() <= 0.02 * np.abs(b).max()


def test_labels():
    """None at all, one that is no class, and NaN in padding."""
    case = LossCase("tree_lstm", 8, jnp.float32, graphs=7, rows=7)
    form = case.script.form
    channel = form.channel("label", "row")
    begin = form.channel_offset(channel)

    def with_labels(labels):
        words = case.script.words.copy()
        words[begin : begin + form.rows] = labels
        return dynamic.Script(words, form)

    run = jax.jit(lambda operands, script: jax.value_and_grad(case.loss)(operands, script))
    value, gradient = run(case.operands, with_labels(-1))
    assert value == 0 and all((x == 0).all() for x in jax.tree.leaves(gradient))
    labels = np.array(case.script.row("label"))
    labels[np.flatnonzero(labels >= 0)[0]] = 5
    assert jnp.isnan(run(case.operands, with_labels(labels))[0])
    weights, carry, *rest = case.operands
    used = int(case.script.used_leaves)
    assert used < form.leaves
    spoiled = jax.tree.map(lambda x: x.at[used:].set(jnp.nan), carry)
    got, expected = (run((weights, c, *rest), case.script) for c in (spoiled, carry))
    close(got, expected, 1e-6)


def test_vmap_and_shard_map():
    case = LossCase("every_child", 8, jnp.float32, graphs=6, rows=7)
    scripts = dynamic.pack(case.graphs, [[0, 1, 2], [3, 4, 5]], dynamic.Layout(slots=3))
    form = scripts.form
    weights, carry, _, bias, head = case.operands
    rng = np.random.default_rng(1)
    carry = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal((2, form.leaves, 8)), x.dtype), carry
    )
    xs = jnp.asarray(rng.standard_normal((2, form.inputs, 8)), jnp.float32)

    def of_one(weights, carry, xs, script, function):
        return jax.value_and_grad(function, (0,))((weights, carry, xs, bias, head), script)

    def of_both(function):
        run = functools.partial(of_one, function=function)
        return jax.jit(jax.vmap(run, (None, 0, 0, 0)))(weights, carry, xs, scripts)

    expected = of_both(case.composed)
    close(of_both(case.loss), expected, 1e-5)

    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))

    def on_device(weights, carry, xs, script):
        def loss(weights):
            own = [jax.tree.map(lambda x: x[0], tree) for tree in (carry, xs, script)]
            value = case.loss((weights, *own[:2], bias, head), own[2])
            return jax.lax.psum(value, "batch")

        return jax.value_and_grad(loss)(weights)

    in_specs = (P(), P("batch"), P("batch"), P("batch"))
    sharded = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=P()))
    first = jax.tree.map(lambda x: x[:1], (carry, xs, scripts))
    value, gradient = sharded(weights, *first)
    close((value, gradient), (expected[0][0], expected[1][0][0][0]), 1e-5)


def test_rows_of_several_kinds_in_an_exported_program():
    rng = np.random.default_rng(0)
    arrays = random_arrays(rng, graphs=6, most_rows=9, slots=2, kinds=2)
    script = dynamic.pack(dynamic.Graphs.from_arrays(**arrays), range(6), dynamic.Layout())
    cells = (dynamic.tree_lstm(2),) * 2

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    state, head = draw(script.form.leaves, 4), dynamic.SoftmaxHead(draw(4, 5))
    weights = (draw(8, 20) / 2, draw(8, 20) / 2)

    def loss(weights, head, script):
        return dynamic.loss(cells, weights, (state, state), script, head=head)

    def composed(weights, head, script):
        _, rows = dynamic.scan(cells, weights, (state, state), script)
        logits, labels = jnp.concatenate([state, rows]) @ head.weights, script.row("label")
        losses = -jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels]
        return script.mean(losses, "label")

    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    options = {"disabled_checks": EXPORT_DISABLED_CHECKS}
    exported = jax.export.export(run, **options)(weights, head, script)
    got = jax.export.deserialize(exported.serialize()).call(weights, head, script)
    close(got, jax.jit(jax.value_and_grad(composed, (0, 1)))(weights, head, script), 1e-5)


def test_a_graph_of_leaves_alone():
    graphs = dynamic.Graphs.from_arrays(
        offsets=[0, 2], children=np.full((2, 2), -1), row={"label": [1, -1]}
    )
    script = dynamic.pack(graphs, [0], dynamic.Layout())
    assert script.used_tiles == 0
    state = jnp.arange(16.0).reshape(8, 2)

    def loss(state):
        head = dynamic.SoftmaxHead(jnp.eye(2))
        return dynamic.loss(
            dynamic.tree_lstm(2), jnp.ones((4, 10)), (state, state), script, head=head
        )

    value, gradient = jax.value_and_grad(loss)(state)
    np.testing.assert_allclose(value, np.log1p(np.exp(-1.0)), rtol=1e-6)
    assert (gradient[0] != 0).all() and (gradient[1:] == 0).all()


def test_explain_names_it():
    case = LossCase("tree_lstm", 8, jnp.float32, graphs=3, rows=5)
    (found,) = explain(jax.value_and_grad(case.loss), case.operands, device=H200)
    assert found.operation == "dynamic_loss" and "5 classes" in str(found)


def test_errors():
    case = LossCase("tree_lstm", 8, jnp.float32, graphs=3, rows=5)
    weights, carry, _, _, (head, bias) = case.operands

    def loss(head, label="label", script=case.script, **options):
        if not isinstance(head, dynamic.SoftmaxHead | str):
            head = dynamic.SoftmaxHead(head, bias, label)
        return dynamic.loss(case.cell, weights, carry, script, head=head, **options)

    with pytest.raises(TypeError, match=r"dynamic.loss: head must be a dynamic.SoftmaxHead"):
        loss("softmax")
    for wrong in jnp.ones((7, 5)), jnp.ones((8, 65)), jnp.ones((8, 0)):
        with pytest.raises(ValueError, match=r"head.weights must be \(h, C\) with h = 8"):
            loss(wrong)
    with pytest.raises(ValueError, match=r"dynamic.loss: head.bias must have shape \(4,\)"):
        loss(head[:, :4])
    with pytest.raises(KeyError, match="no channel 'word' of a row or of a graph"):
        loss(head, "word")
    with pytest.raises(TypeError, match="labels must be integers, the channel 'weight' has float"):
        loss(head, "weight")
    with pytest.raises(ValueError, match=r"dynamic\.loss: the cell tree_lstm\(2\) fails with no x"):
        dynamic.loss(case.cell, None, carry, case.script, head=dynamic.SoftmaxHead(head))
    with pytest.raises(TypeError, match=r"dynamic.loss: script must be a dynamic.Script"):
        loss(head, script=None)
    with pytest.raises(ValueError, match=r"dynamic.loss: precision must be"):
        loss(head, precision="low")
    with pytest.raises(ValueError, match=r"dynamic.loss: implementation"):
        loss(head, implementation="gpu")


@pytest.mark.skipif(PLATFORM == "cuda", reason="there it can be had")
def test_a_kernel_that_cannot_be_had():
    case = LossCase("tree_lstm", 8, jnp.float32, graphs=3, rows=5)
    with pytest.raises(ValueError, match=r"dynamic.loss: implementation='cuda' was asked for"):
        jax.grad(functools.partial(case.loss, implementation="cuda"))(case.operands)


# ---- Kernels ----


def test_the_plan_of_a_tree_lstm():
    """Both passes have all weights in registers, as each of them by itself."""
    case = LossCase("tree_lstm", 256, jnp.bfloat16, groups=8)
    asked = functools.partial(case.loss, implementation="cuda")
    (found,) = explain(jax.grad(asked), case.operands, device=H200)
    plan = found.plan
    assert (plan.teams, plan.blocks, plan.in_registers) == (8, 16, 1.0), plan
    assert str(plan).startswith("value and gradient in one launch: team_tensor_cores")
    (chosen,) = explain(jax.grad(case.loss), case.operands, device=H200)
    assert chosen.plan == plan


def test_what_no_kernel_takes():
    def refusal(case, operands=None):
        asked = functools.partial(case.loss, implementation="cuda")
        (found,) = explain(jax.grad(asked), operands or case.operands, device=H200)
        assert str(found.plan).startswith("refused, because ")
        return found.plan.reason

    case = LossCase("tree_lstm", 64, jnp.bfloat16)
    *operands, (head, bias) = case.operands
    wide_head = (*operands, (head.astype(jnp.float32), bias))
    assert "a head's weights in the states' dtype, bfloat16" in refusal(case, wide_head)
    assert "tiles of 8 rows" in refusal(LossCase("tree_lstm", 64, jnp.bfloat16, width=16))
    assert "no multiple of 8" in refusal(LossCase("tree_lstm", 60, jnp.bfloat16))
    large = LossCase("tree_lstm", 1024, jnp.float32, graphs=2, rows=3, classes=64)
    assert "the head of 64 classes of 1024 units don't fit" in refusal(large)


@pytest.mark.parametrize(
    "name, dtype, variant, classes, delay",
    [
        ("tree_lstm_with_x", "bfloat16", "team_tensor_cores", 5, 0),
        ("every_child", "float16", "team_tensor_cores_barrier", 33, 1000),
        ("chain", "float32", "team_fma", 2, 0),
    ],
)
def test_every_kind_of_kernel_compiles(name, dtype, variant, classes, delay, monkeypatch):
    monkeypatch.setenv("JAXSPARSE_CACHE_DIR", "")
    monkeypatch.setenv("JAXSPARSE_SCAN_DELAY", str(delay))
    try:
        _ffi.nvrtc_version()
    except RuntimeError as error:
        pytest.skip(f"needs NVRTC: {error}")
    case = LossCase(name, 64, jnp.dtype(dtype), classes=classes)
    asked = functools.partial(case.loss, variant=variant, implementation="cuda")
    jaxpr = jax.make_jaxpr(jax.grad(asked))(case.operands)
    (eqn,) = (e for e in equations(jaxpr.jaxpr) if e.primitive is dynamic_loss_p)
    call = typed_call(OPERATIONS[dynamic_loss_p], eqn.params, [v.aval for v in eqn.invars])
    said = choose(call, H200).attributes
    kernel = _ffi.compile_kernel(said["name"], said["expression"], "sm_90a", said["source"])
    assert kernel.startswith(b"\x7fELF")


# ---- On a GPU ----


def by_both(case, **options):
    """Value and gradient by one launch, and by the plain path, as programs."""
    return [
        jax.jit(functools.partial(jax.value_and_grad(case.loss), **of))
        for of in ({"implementation": "cuda", **options}, {"implementation": "xla"})
    ]


@needs_gpu
@pytest.mark.parametrize(
    "dtype, variant",
    [
        ("bfloat16", "team_tensor_cores"),
        ("float16", "team_tensor_cores_barrier"),
        ("float32", "team_fma"),
        ("float32", "team_fma_barrier"),
    ],
)
@pytest.mark.parametrize(
    "name, label, classes",
    [
        ("tree_lstm", "label", 5),
        ("tree_lstm_with_x", "label", 64),
        ("every_child", "class", 9),
        ("chain", "label", 5),
    ],
)
def test_agrees_with_the_plain_path(name, label, classes, dtype, variant):
    """Value, gradients of all operands, and the same bits each time."""
    case = LossCase(name, 72, jnp.dtype(dtype), classes=classes, label=label)
    tolerance = {"bfloat16": 5e-2, "float16": 8e-3, "float32": 1e-4}[dtype]
    by_kernel, plain = by_both(case, variant=variant)
    got = by_kernel(case.operands)
    for a, b in zip(*(jax.tree.leaves(x) for x in (got, plain(case.operands))), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        size = np.abs(b).max()
        assert size > 0
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * size)
    jax.tree.map(np.testing.assert_array_equal, got, by_kernel(case.operands))
    check()


@needs_gpu
def test_delays_change_nothing(monkeypatch):
    case = LossCase("tree_lstm", 64, jnp.bfloat16, graphs=40)
    expected = by_both(case)[0](case.operands)
    monkeypatch.setenv("JAXSPARSE_SCAN_DELAY", "20000")
    got = by_both(case)[0](case.operands)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    check()
