"""The layer of the sLSTM against its formula, and from the weights of the package xlstm."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from nn_recurrent_problems import compiled, inputs  # noqa: E402

from jaxsparse.nn import RNN, HeadwiseLinear, SLSTMCell, SparseLinear, from_xlstm  # noqa: E402

T, B, IN, H = 7, 3, 6, 8


def formula(gates, recurrent_of, h):
    """Step by step, without a stabiliser: of pre-activations (B, T, 4, h)."""
    c = n = np.zeros((gates.shape[0], h))
    state, ys = np.zeros((gates.shape[0], h)), []
    for t in range(gates.shape[1]):
        i, f, z, o = np.moveaxis(gates[:, t] + recurrent_of(state), 1, 0)
        forget = 1 / (1 + np.exp(-f))
        c, n = forget * c + np.exp(i) * np.tanh(z), forget * n + np.exp(i)
        state = c / n / (1 + np.exp(-o))
        ys.append(state)
    return np.stack(ys, 1)


@pytest.mark.parametrize(
    "options", [{}, {"heads": 2, "input_heads": 2}, {"heads": 4}, {"recurrent_sparsity": 0.5}]
)
def test_the_formula(options):
    biases = {"bias_init": nnx.initializers.normal(1.0), "use_bias": True}
    cell = SLSTMCell(IN, H, **biases, **options, rngs=nnx.Rngs(0))
    x = inputs(B, T, IN)

    def matrix(layer):
        if isinstance(layer, HeadwiseLinear):
            return layer.matrix
        return layer.weight.todense().T if isinstance(layer, SparseLinear) else layer.kernel[...]

    w_i, w_h = (np.float64(matrix(layer)) for layer in (cell.dense_i, cell.dense_h))
    gates = (np.float64(x) @ w_i + cell.dense_i.bias[...]).reshape(B, T, 4, H)
    bias = np.float64(cell.dense_h.bias[...]).reshape(4, H)
    expected = formula(gates, lambda y: (y @ w_h).reshape(B, 4, H) + bias, H)
    got = compiled(lambda layer, x: layer(x))(RNN(cell), x)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    # One step after the other.
    np.testing.assert_allclose(nnx.RNN(cell)(x), expected, rtol=1e-5, atol=1e-6)
    assert isinstance(cell.dense_i, HeadwiseLinear) == ("input_heads" in options)
    assert isinstance(cell.dense_h, HeadwiseLinear) == ("heads" in options)


def test_the_carry_is_float32_whatever_the_parameters_are():
    cell = SLSTMCell(IN, H, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    carry, ys = RNN(cell, return_carry=True)(inputs(B, T, IN, dtype=jnp.bfloat16))
    assert ys.dtype == jnp.bfloat16 and {x.dtype for x in carry} == {jnp.dtype(jnp.float32)}
    normal = nnx.initializers.normal(1.0)
    made = cell.initialize_carry((B, IN), nnx.RngStream(0, tag="carry"), normal)
    assert {(x.shape, x.dtype.name) for x in made} == {((B, H), "float32")}


# ---- Weights of the package ----


def weights(heads, d, backend, convolution):
    """In the layout of its layer, and each gate's matrix (heads, in, out), in the order i f z o."""
    rng = np.random.default_rng(0)
    of_gates = rng.standard_normal((4, heads, d, d)).astype(np.float32)
    recurrent = rng.standard_normal((heads, d, 4, d)).astype(np.float32) / 2
    bias = rng.standard_normal((heads, 4, d)).astype(np.float32)
    # What the package's layer calls fgate opens the input gate.
    names = ("fgate", "igate", "zgate", "ogate")
    parts = {f"{n}.weight": w.transpose(0, 2, 1) for n, w in zip(names, of_gates, strict=True)}
    if backend == "cuda":
        kernel, flat = recurrent.reshape(heads, d, 4 * d), bias.reshape(-1)
    else:
        kernel = recurrent.transpose(0, 2, 3, 1).reshape(heads, 4 * d, d)
        flat = bias.transpose(1, 0, 2).reshape(-1)
    parts |= {"slstm_cell._recurrent_kernel_": kernel, "slstm_cell._bias_": flat}
    if convolution:
        parts["conv1d.conv.weight"] = np.zeros((heads * d, 1, 4), np.float32)
    parts["group_norm.weight"] = np.zeros(heads * d, np.float32)
    return {f"layer.{k}": v for k, v in parts.items()}, of_gates, recurrent, bias


@pytest.mark.parametrize("backend", ["vanilla", "cuda"])
@pytest.mark.parametrize("heads, convolution", [(2, True), (3, False), (1, True)])
def test_from_xlstm(heads, convolution, backend):
    d = 4
    state_dict, of_gates, recurrent, bias = weights(heads, d, backend, convolution)
    layer = from_xlstm(state_dict, prefix="layer.", return_carry=True)
    x = np.array(inputs(B, T, heads, d))
    convolved = np.array(inputs(B, T, heads, d, seed=1)) if convolution else x
    taken = [convolved, convolved, x, x]
    gates = [np.einsum("bthd,hdo->btho", a, w) for a, w in zip(taken, of_gates, strict=True)]
    gates = np.stack(gates, 2) + bias.transpose(1, 0, 2)

    def product(y):
        return np.einsum("bhd,hdgo->bgho", y.reshape(B, heads, d), recurrent).reshape(B, 4, -1)

    expected = formula(gates.reshape(B, T, 4, -1).astype(np.float64), product, heads * d)
    given = np.concatenate([convolved, x], -1) if convolution else x
    _, got = layer(jnp.asarray(given.reshape(B, T, -1)))
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "key, shape, text",
    [
        ("igate.weight", None, r"must have layer.igate.weight, got \['layer.conv1d"),
        ("zgate.weight", (2, 4, 5), r"layer.zgate.weight must have shape \(2, 4, 4\), got"),
        ("slstm_cell._bias_", (8,), r"layer.slstm_cell._bias_ must have shape \(32,\), got \(8,\)"),
        ("slstm_cell._recurrent_kernel_", (2, 4, 4), r"_kernel_ must have one of the shapes"),
    ],
)
def test_errors_of_from_xlstm(key, shape, text):
    state_dict = weights(2, 4, "cuda", True)[0]
    del state_dict[f"layer.{key}"]
    if shape is not None:
        state_dict[f"layer.{key}"] = np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=text):
        from_xlstm(state_dict, prefix="layer.")
    with pytest.raises(TypeError, match=r"layer\.fgate\.weight"):
        whole = {"layer.fgate.weight": np.zeros((2, 4, 4), int)}
        from_xlstm(weights(2, 4, "cuda", True)[0] | whole, prefix="layer.")


@pytest.mark.parametrize(
    "options, text",
    [
        ({"input_heads": 4}, "SLSTMCell: input_heads must divide the 6 in_features, got 4"),
        ({"input_heads": 3}, "SLSTMCell: input_heads must divide the 8 hidden_features, got 3"),
        ({"input_heads": 2, "input_sparsity": 0.5}, "2 input_heads have blocks .* input_sparsity"),
        ({"heads": 3}, "SLSTMCell: heads must divide the 8 hidden_features, got 3"),
    ],
)
def test_errors_of_heads(options, text):
    with pytest.raises(ValueError, match=text):
        SLSTMCell(IN, H, **options, rngs=nnx.Rngs(0))
