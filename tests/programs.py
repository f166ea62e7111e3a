"""A small program of every operation and layer, for tests that run all of them in some setting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxsparse import CSR, Topology, linear, masks, recurrent, sddmm, sparse_softmax, spmm
from jaxsparse.nn import (
    RNN,
    Bidirectional,
    GRUCell,
    LSTMCell,
    RecurrentStack,
    SimpleCell,
    SparseLinear,
    SparseMultiHeadAttention,
)
from jaxsparse.ops.sparse_attention import sparse_attention

B, T, IN, H, HEADS = 4, 3, 6, 4, 2
LENGTHS = np.array([3, 0, 2, 1])


class Program(NamedTuple):
    """A function of its parameters and of arrays with a batch dimension each."""

    function: Callable[..., Any]
    parameters: Any
    batched: tuple[Any, ...]
    axes: tuple[int, ...]  # where the batch is, in each array of `batched`

    def loss(self, parameters, *batched):
        """A number that depends on every result, and not linearly."""
        leaves = jax.tree.leaves(self.function(parameters, *batched))
        return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in leaves)

    def value_and_gradient(self, parameters, *batched):
        """The loss, and its gradient in all that is floating."""
        floating = [x for x in batched if jnp.issubdtype(x.dtype, jnp.floating)]
        arguments = (0, *range(1, 1 + len(floating)))
        return jax.value_and_grad(self.loss, arguments)(parameters, *batched)


def _draw(dtype, *shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), dtype)


def _pattern(rows, columns):
    mask = np.random.default_rng(0).random((rows, columns)) < 0.5
    return Topology.from_mask(mask, nse=int(mask.sum()) + 2)


# ---- Operations ----


def _spmm(dtype):
    t = _pattern(5, IN)
    parameters = _draw(dtype, t.nse), _draw(dtype, 5)

    def function(parameters, x):
        values, bias = parameters
        a = CSR(values, t)
        return spmm(a, x, bias=bias, activation="gelu"), spmm(a.T, spmm(a, x))

    return Program(function, parameters, (_draw(dtype, B, IN, 3),), (0,))


def _linear(dtype):
    t = _pattern(5, IN)
    parameters = _draw(dtype, t.nse), _draw(dtype, 5)

    def function(parameters, x):
        values, bias = parameters
        return linear(x, CSR(values, t), bias=bias, activation="relu")

    return Program(function, parameters, (_draw(dtype, B, T, IN),), (0,))


def _sddmm_and_softmax(dtype):
    t = _pattern(5, IN)

    def function(scale, x, y):
        scores = sddmm(x, y, t, scale_by=scale)
        return sparse_softmax(scores, scale=0.5).values, sparse_softmax(scores, scale=scale).values

    arrays = _draw(dtype, B, 5, 3), _draw(dtype, B, IN, 3)
    return Program(function, _draw(dtype, t.nse), arrays, (0, 0))


def _attention(dtype):
    t = Topology.from_mask(masks.causal(), (T, T))

    def function(parameters, q, k, v):
        return sparse_attention(q * parameters, k, v, t)

    arrays = [_draw(dtype, B, T, HEADS, H) for _ in range(3)]
    return Program(function, jnp.asarray(1.5, dtype), tuple(arrays), (0,) * 3)


def _scan(cell, gates, leaves, dtype, *, sparse, **options):
    t = _pattern(gates * H, H)
    weights = _draw(dtype, t.nse) if sparse else _draw(dtype, H, gates * H)
    parameters = weights, _draw(dtype, gates * H)

    def function(parameters, xs, lengths):
        weights, bias = parameters
        # As users make it: replicated, whatever the sharding of xs.
        carry = jax.tree.map(lambda _: jnp.zeros((B, H), dtype), leaves)
        return recurrent.scan(
            cell,
            CSR(weights, t) if sparse else weights,
            carry,
            xs,
            recurrent_bias=bias,
            seq_lengths=lengths,
            **options,
        )

    return Program(
        function, parameters, (_draw(dtype, T, B, gates * H), jnp.asarray(LENGTHS)), (1, 0)
    )


def _both_ways(dtype):
    def function(parameters, xs):
        weights, carry = parameters
        carry = jnp.broadcast_to(carry, (B, H))
        return recurrent.bidirectional_scan(
            recurrent.elman(), (weights, -weights), (carry, carry), (xs, 2 * xs)
        )

    return Program(function, (_draw(dtype, H, H), _draw(dtype, H)), (_draw(dtype, T, B, H),), (1,))


# ---- Layers ----


def _layer(module, *batched, **options):
    graphdef, parameters, rest = nnx.split(module, nnx.Param, ...)

    def function(parameters, *batched):
        # A copy: variables are written to.
        layer = nnx.merge(graphdef, parameters, rest, copy=True)
        names = ("seq_lengths",) if len(batched) > 1 else ()
        return layer(batched[0], **dict(zip(names, batched[1:], strict=True)), **options)

    return Program(function, parameters, batched, (0,) * len(batched))


def _rngs():
    return nnx.Rngs(0)


def _sparse_linear(dtype):
    layer = SparseLinear(IN, 5, sparsity=0.5, activation="gelu", param_dtype=dtype, rngs=_rngs())
    return _layer(layer, _draw(dtype, B, T, IN))


def _multi_head_attention(dtype):
    layer = SparseMultiHeadAttention(
        HEADS, IN, pattern=masks.causal(), dtype=dtype, param_dtype=dtype, rngs=_rngs()
    )
    return _layer(layer, _draw(dtype, B, T, IN))


def _options(dtype, sparse):
    sparsity = {"input_sparsity": 0.5, "recurrent_sparsity": 0.5} if sparse else {}
    return {"dtype": dtype, "param_dtype": dtype, "rngs": _rngs(), **sparsity}


def _cell(dtype):
    """One step, from a carry that a user's program makes."""
    cell = GRUCell(IN, H, **_options(dtype, True))
    graphdef, parameters, rest = nnx.split(cell, nnx.Param, ...)

    def function(parameters, x):
        layer = nnx.merge(graphdef, parameters, rest, copy=True)
        return layer(layer.initialize_carry(x.shape, nnx.Rngs(0)), x)

    return Program(function, parameters, (_draw(dtype, B, IN),), (0,))


def _rnn(cell, dtype, sparse, **options):
    rnn = RNN(cell(IN, H, **_options(dtype, sparse)), return_carry=True, **options)
    return _layer(rnn, _draw(dtype, B, T, IN), jnp.asarray(LENGTHS))


def _bidirectional(dtype):
    layer = Bidirectional(
        *(RNN(SimpleCell(IN, H, residual=r, **_options(dtype, True))) for r in (True, True))
    )
    return _layer(layer, _draw(dtype, B, T, IN), jnp.asarray(LENGTHS))


def _stack(dtype):
    layers = [RNN(LSTMCell(H, H, **_options(dtype, i > 0))) for i in range(2)]
    # In 16 bits Flax's statistics promote dtypes unasked, which a setting of JAX forbids.
    exact = dtype == jnp.float32
    norms = [nnx.BatchNorm(H, rngs=_rngs()) if exact else None for _ in layers]
    stack = RecurrentStack(layers, norms=norms, skip=1)
    return _layer(stack, _draw(dtype, B, T, H), jnp.asarray(LENGTHS))


def _three_leaves(x, r, carry):
    """A cell whose last leaf is its state and whose y is another number."""
    (x,), (r,) = x, r
    kept = 0.9 * carry["kept"] + 0.1 * jnp.tanh(x * r)
    state = jax.nn.silu(x + r - carry["kept"])
    return {"kept": kept, "state": state}, kept + state


PROGRAMS: dict[str, Callable[[Any], Program]] = {
    "spmm": _spmm,
    "linear": _linear,
    "sddmm and softmax": _sddmm_and_softmax,
    "sparse_attention": _attention,
    "scan of an LSTM": lambda d: _scan(recurrent.LSTM, 4, (0, 0), d, sparse=False),
    "scan of a sparse GRU": lambda d: _scan(
        recurrent.GRU, 3, 0, d, sparse=True, reverse=True, recompute=True
    ),
    "scan of an own cell": lambda d: _scan(
        _three_leaves, 1, {"kept": 0, "state": 0}, d, sparse=True
    ),
    "bidirectional_scan": _both_ways,
    "SparseLinear": _sparse_linear,
    "SparseMultiHeadAttention": _multi_head_attention,
    "GRUCell": _cell,
    "RNN of SimpleCell": lambda d: _rnn(SimpleCell, d, False, reverse=True),
    "RNN of LSTMCell": lambda d: _rnn(LSTMCell, d, True),
    "Bidirectional": _bidirectional,
    "RecurrentStack": _stack,
}
"""{name: the program for operands of a dtype}"""
