"""Layers over graphs, against formulas of single rows, and as modules of Flax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from recurrent_problems import compiled

nnx = pytest.importorskip("flax.nnx")

from jaxsparse import dynamic, recurrent  # noqa: E402
from jaxsparse.nn import ChildSumTreeLSTM, GraphScan, SparseLinear, TreeLSTM  # noqa: E402

# Two trees, whose rows 2 and 4, and 2, have children.
CHILDREN = [[-1, -1], [-1, -1], [0, 1], [-1, -1], [2, 3], [-1, -1], [-1, -1], [1, -1]]


def trees(**channels):
    return dynamic.Graphs.from_arrays([0, 5, 8], CHILDREN, **channels)


def graphs_and_script(slots=2):
    has_input = np.isin(np.arange(8), [2, 7])
    graphs = trees(row={"row": np.arange(8)}, has_input=has_input)
    return dynamic.pack(graphs, [0, 1], dynamic.Layout(width=2, slots=slots))


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def with_bias(layer):
    """A layer whose bias is not zeros."""
    bias = layer.dense_h.bias
    bias[...] = draw(*bias.shape, seed=7)
    return layer


def by_row(layer, script, leaf_inputs, inputs, gates_of):
    """The carries (c, h) of rows, each by Tai's formula; ``gates_of(x, states)`` has the gates."""
    sigmoid = jax.nn.sigmoid
    form, rows = script.form, {}
    h = layer.hidden_features
    nothing = jnp.zeros(4 * h)
    for i in range(int(script.used_leaves)):
        rows[i] = layer.dense_i(leaf_inputs[i]), []
    for i, (sources, x) in enumerate(
        zip(script.sources.reshape(-1, form.slots), script.x_rows.reshape(-1), strict=True)
    ):
        if (sources >= 0).any():
            rows[form.leaves + i] = (layer.dense_i(inputs[x]) if x >= 0 else nothing), sources
    made = {}
    for row, (x, sources) in rows.items():
        zero = jnp.zeros(h)
        children = [made[s] if s >= 0 else (zero, zero) for s in sources]
        i, o, u, *forget = gates_of(x, [child[1] for child in children])
        c = sigmoid(i) * jnp.tanh(u)
        for f, child in zip(forget, children, strict=False):
            c = c + sigmoid(f) * child[0]
        made[row] = c, sigmoid(o) * jnp.tanh(c)
    return made


def test_tree_lstms_are_those_of_tai():
    script = graphs_and_script()
    leaf_inputs, inputs = draw(script.form.leaves, 3), draw(script.form.inputs, 3, seed=1)
    h = 4
    nary = with_bias(TreeLSTM(3, h, rngs=nnx.Rngs(0)))
    child_sum = with_bias(ChildSumTreeLSTM(3, h, children=2, rngs=nnx.Rngs(1)))

    def of_nary(x, states):
        r = nary.dense_h.bias[...]
        for k, state in enumerate(states):
            r = r + state @ nary.dense_h.kernel[k * h : (k + 1) * h]
        i, o, u, f = jnp.split(x, 4)
        return [a + b for a, b in zip((i, o, u, f, f), jnp.split(r, 5), strict=True)]

    def of_child_sum(x, states):
        kernel, bias = child_sum.dense_h.kernel[...], child_sum.dense_h.bias[...]
        total = sum(states, jnp.zeros(h)) @ kernel + bias + x
        x_f = x[3 * h :] + bias[3 * h :]
        return [*jnp.split(total, 4)[:3], *(x_f + s @ kernel[:, 3 * h :] for s in states)]

    for layer, gates_of in ((nary, of_nary), (child_sum, of_child_sum)):
        carry, states = layer(script, leaf_inputs, inputs, return_carry=True)
        assert states is carry[-1] and states.shape == (script.form.rows, h)
        expected = by_row(layer, script, leaf_inputs, inputs, gates_of)
        assert sorted(expected) == np.flatnonzero(script.row_mask).tolist()
        for row, (c, state) in expected.items():
            np.testing.assert_allclose(carry[0][row], c, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(states[row], state, rtol=1e-5, atol=1e-6)
        assert (np.asarray(states)[~script.row_mask] == 0).all()


def test_child_sums_do_not_depend_on_the_order():
    inputs = draw(8, 3)
    layer = with_bias(ChildSumTreeLSTM(3, 4, children=2, rngs=nnx.Rngs(0)))
    swapped = dynamic.Graphs.from_arrays([0, 5, 8], np.asarray(CHILDREN)[:, ::-1])
    roots = []
    for graphs in (trees(), swapped):
        script = dynamic.pack(graphs, [0, 1], dynamic.Layout())
        states = layer(script, inputs)
        roots.append(script.roots(*jnp.split(states, [script.form.leaves])))
    np.testing.assert_allclose(roots[0], roots[1], rtol=1e-5, atol=1e-6)
    assert float(jnp.abs(roots[0][:2]).min()) > 0


def test_both_directions_of_sequences():
    """Chains of two kinds in one scan, as two recurrent scans have them."""
    lengths, h = [3, 1], 4
    xs, w = draw(8, 4 * h), (draw(h, 4 * h, seed=1), draw(h, 4 * h, seed=2))
    graphs = dynamic.Graphs.concatenate(
        [
            dynamic.Graphs.from_sequences(lengths),
            dynamic.Graphs.from_sequences(lengths, reverse=True, kind=1),
        ]
    )
    script = dynamic.pack(graphs, [0, 1, 2, 3], dynamic.Layout(width=2, slots=1))
    first = jnp.zeros((script.form.leaves, h))
    cells = (dynamic.chain(recurrent.LSTM),) * 2
    _, states = dynamic.scan(cells, w, (first, first), script, xs)
    states = script.in_input_order(states)[:8].reshape(2, 4, h)
    for of_direction, x, weights, reverse in zip(
        states, xs.reshape(2, 4, -1), w, (False, True), strict=True
    ):
        for begin, length in ((0, 3), (3, 1)):
            part = x[begin : begin + length, None]
            carry = (jnp.zeros((1, h)),) * 2
            _, expected = recurrent.scan(recurrent.LSTM, weights, carry, part, reverse=reverse)
            got = of_direction[begin : begin + length]
            np.testing.assert_allclose(got, expected[:, 0], rtol=1e-5, atol=1e-6)


def test_dtypes_and_carries():
    script = graphs_and_script()
    leaf_inputs = draw(script.form.leaves, 3)
    half = TreeLSTM(3, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    carry, _ = half(script, leaf_inputs, return_carry=True)
    assert [x.dtype for x in carry] == [jnp.float32, jnp.bfloat16]
    # Carries that are given, and none: zeros.
    full = with_bias(TreeLSTM(None, 4, rngs=nnx.Rngs(0)))
    first = jnp.zeros((script.form.leaves, 4))
    np.testing.assert_array_equal(full(script), full(script, initial_carry=(first, first)))
    assert float(jnp.abs(full(script)).max()) > 0


def test_padding_and_dropout():
    """What stands in padding, NaN included, reaches nothing; dropouts have their rates."""
    script = graphs_and_script()
    form = script.form
    leaf_inputs = draw(form.leaves, 3).at[int(script.used_leaves) :].set(jnp.nan)
    inputs = draw(form.inputs, 3, seed=1).at[int(script.used_inputs) :].set(jnp.nan)
    layer = TreeLSTM(3, 4, dropout=0.5, carry_dropout=0.5, rngs=nnx.Rngs(0, dropout=1))

    def loss(layer, deterministic):
        return jnp.sum(layer(script, leaf_inputs, inputs, deterministic=deterministic) ** 2)

    gradient = nnx.grad(loss)(layer, True)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(nnx.to_pure_dict(gradient)))
    values = [float(loss(layer, flag)) for flag in (True, True, False, False)]
    assert values[0] == values[1] and len(set(values)) == 3
    layer.eval()
    assert float(loss(layer, None)) == values[0]


def test_training():
    """Trees whose label is the parity of their leaves' words: learnt, by one compiled program."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2, (64, 4))
    labels = words.sum(1) % 2
    # ((a b) (c d)) and (((a b) c) d)
    shapes = np.array(
        [
            [[-1, -1]] * 4 + [[0, 1], [2, 3], [4, 5]],
            [[-1, -1]] * 4 + [[0, 1], [4, 2], [5, 3]],
        ]
    )
    children = shapes[rng.integers(0, 2, 64)]
    every_word = np.concatenate([words, np.full((64, 3), -1)], 1)
    graphs = dynamic.Graphs.from_arrays(
        np.arange(65) * 7,
        children.reshape(-1, 2),
        leaf={"word": every_word.reshape(-1)},
        graph={"label": labels},
    )
    batches = [np.arange(64)[i::4] for i in range(4)]
    layout = dynamic.Layout.plain(16)
    form = dynamic.Form.covering(dynamic.pack(graphs, ids, layout).form for ids in batches)
    scripts = [dynamic.pack(graphs, ids, layout, form=form) for ids in batches]

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Embed(2, 8, rngs=rngs)
            self.tree = TreeLSTM(8, 16, rngs=rngs)
            self.head = nnx.Linear(16, 2, rngs=rngs)

        def __call__(self, script):
            states = self.tree(script, self.table(script.leaf("word")))
            return self.head(script.roots(*jnp.split(states, [script.form.leaves])))

    graphdef, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)
    optimizer = optax.adam(0.03)

    traced = []

    @compiled
    def step(params, state, script):
        traced.append(script.form)

        def loss(params):
            logits = nnx.merge(graphdef, params, rest)(script)
            of_graph = optax.softmax_cross_entropy_with_integer_labels(
                logits, script.graph("label")
            )
            right = script.mean(jnp.argmax(logits, -1) == script.graph("label"), "label")
            return script.mean(of_graph, "label"), right

        (_, right), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, right

    state = optimizer.init(params)
    for _ in range(60):
        accuracy = []
        for script in scripts:
            params, state, right = step(params, state, script)
            accuracy.append(float(right))
    assert np.mean(accuracy) == 1
    assert traced == [form]


def test_sparse_and_replaced_layers():
    script = graphs_and_script()
    leaf_inputs = draw(script.form.leaves, 3)
    layer = TreeLSTM(3, 4, recurrent_sparsity=0.5, rngs=nnx.Rngs(0))
    assert isinstance(layer.dense_h, SparseLinear)
    dense = TreeLSTM(3, 4, rngs=nnx.Rngs(0))
    dense.dense_i = layer.dense_i
    dense.dense_h.kernel[...] = layer.dense_h.weight.todense().T
    np.testing.assert_allclose(
        layer(script, leaf_inputs), dense(script, leaf_inputs), rtol=1e-5, atol=1e-6
    )
    named = TreeLSTM(3, 4, recurrent_kernel_metadata={"role": "recurrent"}, rngs=nnx.Rngs(0))
    assert named.dense_h.kernel.get_metadata()["role"] == "recurrent"


def test_errors():
    script = graphs_and_script()
    x = draw(script.form.leaves, 3)
    layer, rngs = TreeLSTM(3, 4, rngs=nnx.Rngs(0)), nnx.Rngs(0)
    first = jnp.zeros((script.form.leaves, 4))
    calls = {
        "leaf_inputs must be": lambda: layer(script, x[:1]),
        "both leaf_inputs": lambda: layer(script, x, initial_carry=(first, first)),
        "initial_carry must have the structure": lambda: layer(script, initial_carry=first),
        "initial_carry must have the structure .*, got": lambda: layer(script, initial_carry=()),
        r"initial_carry must be \(8, 4\), got shape \(1, 4\)": lambda: layer(
            script, initial_carry=(first[:1], first)
        ),
        "initial_carry must have at least 2 dim": lambda: layer(
            script, initial_carry=(first, first[0])
        ),
        "carry_like must have a leaf": lambda: GraphScan(
            3, 4, dynamic.tree_lstm(2), products=5, carry_like=(), rngs=rngs
        ),
        "the cell LSTM fails with 4 gates": lambda: GraphScan(
            3, 4, dynamic.chain(recurrent.LSTM), products=4, rngs=rngs
        )(script, x),
        "TreeLSTM: script must be": lambda: layer(x),
        "has no in_features": lambda: TreeLSTM(None, 4, rngs=rngs)(script, x),
        "dense_h must map": lambda: replaced("dense_h", nnx.Linear(4, 20, rngs=rngs))(script, x),
        "dense_h must be": lambda: replaced("dense_h", nnx.LayerNorm(4, rngs=rngs))(script, x),
        r"dense_i must make \(8, 16\), got shape \(8, 8\)": lambda: replaced(
            "dense_i", nnx.Linear(3, 8, rngs=rngs)
        )(script, x),
        "in_features must be >= 1": lambda: TreeLSTM(0, 4, rngs=rngs),
        "gates must be >= 1": lambda: GraphScan(
            3, 4, dynamic.tree_lstm(2), products=5, gates=0, rngs=rngs
        ),
        "cell must be made by": lambda: GraphScan(3, 4, recurrent.GRU, products=3, rngs=rngs),
        "dropout must be a rate": lambda: TreeLSTM(3, 4, dropout=1.5, rngs=rngs),
        "carry_dropout must be": lambda: TreeLSTM(3, 4, carry_dropout="no", rngs=rngs),
        "children must be": lambda: TreeLSTM(3, 4, children=0, rngs=rngs),
        "has no recurrent_sparsity": lambda: ChildSumTreeLSTM(
            3, 4, children=2, recurrent_sparsity=0.5, rngs=rngs
        ),
    }

    def replaced(name, by):
        other = TreeLSTM(3, 4, rngs=rngs)
        setattr(other, name, by)
        return other

    for message, call in calls.items():
        with pytest.raises((TypeError, ValueError), match=message):
            call()
