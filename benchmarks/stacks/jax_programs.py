"""Programs of JAX as a user would write them without jaxsparse, and of Flax.

Weights, inputs and carries are arguments of the compiled function, by the names of their operands.
A gradient is that of the sum of the outputs times a random cotangent, in all other operands.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.jax_programs import fresh_copies
from benchmarks.recurrent import jax_programs as of_layers
from benchmarks.stacks.problems import Problem, name, names
from benchmarks.stacks.reference import NORM_EPSILON
from jaxsparse import recurrent
from jaxsparse.timing import Program

Operands = dict[str, Any]
Layer = Callable[[list[Operands], Any], Any]
"""Of the operands of each direction, and of what enters: the output.

A direction has "U", "carry", and, if the problem has them, "W", "b", "resets" and "topology".
"""

CELLS = {**of_layers.CELLS, "sLSTM": recurrent.SLSTM}

# dtype -> how exact products of float32 are.
PRECISION = {"float32": "highest", "tf32": "tensorfloat32"}

FIXED = ("resets", "cotangent", "topology")
"""Operands without a gradient."""

UNROLLED = 8
"""Steps of a loop that are compiled as one: a GPU waits less between them."""


def stored(dtype: str) -> str:
    """The dtype of arrays: TF32 is a way to multiply float32."""
    return "float32" if dtype == "tf32" else dtype


def program(
    operands: Operands,
    function: Callable[[Operands], Any],
    dtype: str,
    passed: str,
    gradients: Callable[[Operands], tuple[np.ndarray, ...]],
    outputs: Callable[[np.ndarray], np.ndarray] = lambda ys: ys,
) -> Program:
    """Of a function of operands to its ys, compiled; "cotangent" is one of the operands."""

    def forward(operands: Operands) -> Any:
        return function(operands)

    def gradient(operands: Operands) -> Any:
        return gradient_of(function, operands)

    is_forward = passed == "forward"
    read = {key: x for key, x in operands.items() if key != "cotangent" or not is_forward}
    copies, bytes_read = fresh_copies((operands,), read)
    with jax.default_matmul_precision(PRECISION.get(dtype, "default")):
        compiled = jax.jit(forward if is_forward else gradient).lower(operands).compile()

    def results(out: Any) -> tuple[np.ndarray, ...]:
        if is_forward:
            return (outputs(np.asarray(out, np.float64)),)
        return gradients(out)

    return Program(
        function=compiled,
        operands=copies,
        bytes_read=bytes_read,
        wait=jax.block_until_ready,
        results=results,
    )


def gradient_of(function: Callable[[Operands], Any], operands: Operands) -> Operands:
    """In all operands that are not fixed."""
    fixed = {key: x for key, x in operands.items() if key in FIXED}
    rest = {key: x for key, x in operands.items() if key not in fixed}
    _, pull = jax.vjp(lambda given: function(given | fixed), rest)
    made: Operands = pull(operands["cotangent"])[0]
    return made


def by_names(problem: Problem, out: Operands) -> tuple[np.ndarray, ...]:
    """Gradients in the order in which they are compared."""
    return tuple(np.asarray(out[key], np.float64) for key in names(problem))


def arrays(problem: Problem, dtype: str, cell_dtype: str) -> Operands:
    """All in one dtype but what a carry has beside the state, and resets."""
    kinds = {"resets": "bool"}
    for layer in range(problem.layers):
        for direction in range(problem.directions):
            kinds |= {name(leaf, layer, direction): cell_dtype for leaf in problem.leaves[:-1]}
    return {key: jnp.asarray(x, kinds.get(key, dtype)) for key, x in problem.operands().items()}


def layer_by_layer(problem: Problem, operands: Operands, layer: Layer) -> Any:
    """The stack of a layer: norms and skips around it."""
    outputs = [operands["x"]]
    for at in range(problem.layers):
        below = outputs[-1]
        if problem.norm:
            wide = below.astype(jnp.float32)
            mean, variance = (f(wide, -1, keepdims=True) for f in (jnp.mean, jnp.var))
            below = ((wide - mean) * jax.lax.rsqrt(variance + NORM_EPSILON)).astype(below.dtype)
        own = [
            {
                **{kind: operands[name(kind, at, direction)] for kind in problem.kinds},
                **{key: operands[key] for key in ("resets", "topology") if key in operands},
                "carry": tuple(operands[name(leaf, at, direction)] for leaf in problem.leaves),
            }
            for direction in range(problem.directions)
        ]
        y = layer(own, below)
        outputs.append(y + outputs[at + 1 - problem.skip] if problem.ends_skip(at) else y)
    return outputs[-1]


def layered(
    problem: Problem, dtype: str, passed: str, layer: Layer, cell_dtype: str = "float32"
) -> Program:
    return program(
        arrays(problem, stored(dtype), cell_dtype),
        lambda operands: layer_by_layer(problem, operands, layer),
        dtype,
        passed,
        functools.partial(by_names, problem),
    )


def ahead(own: Operands, below: Any) -> Any:
    """The input's pre-activations of all steps, by one product."""
    if "W" not in own:
        return below
    product = jnp.dot(below, own["W"], preferred_element_type=jnp.float32)
    return (product + own["b"].astype(jnp.float32)).astype(below.dtype)


def carry_of(own: Operands) -> Any:
    """As cells take it: of one leaf that leaf alone."""
    carry = own["carry"]
    return carry if len(carry) > 1 else carry[0]


# ---- jax.lax.scan ----


def _recurrent(problem: Problem, h: Any, u: Any) -> Any:
    """(batch, gates * hidden), gate by gate, in float32."""
    if problem.heads == 1:
        return jnp.dot(h, u, preferred_element_type=jnp.float32)
    heads, units = problem.heads, problem.hidden // problem.heads
    product = jnp.einsum(
        "bhi,hio->bho", h.reshape(-1, heads, units), u, preferred_element_type=jnp.float32
    )
    by_gate = product.reshape(-1, heads, problem.gates, units).swapaxes(1, 2)
    return by_gate.reshape(-1, problem.gates * problem.hidden)


def lax_scan(problem: Problem, dtype: str, passed: str) -> Program:
    """A loop for each layer; products of inputs for all steps.

    Products are summed and the cell is computed in float32, as in ours.
    """
    cell, gates = CELLS[problem.cell], problem.gates

    def scan(own: Operands, below: Any, reverse: bool) -> Any:
        def step(carry: Any, at: tuple[Any, Any]) -> Any:
            x, reset = at
            if reset is not None:
                carry = jax.tree.map(lambda a: jnp.where(reset[:, None], 0, a), carry)
            product = _recurrent(problem, jax.tree.leaves(carry)[-1], own["U"])
            wide = jax.tree.map(lambda a: a.astype(jnp.float32), carry)
            wide_x, r = (tuple(jnp.split(a.astype(jnp.float32), gates, -1)) for a in (x, product))
            new, y = cell(wide_x, r, wide)
            return jax.tree.map(lambda a, b: a.astype(b.dtype), new, carry), y.astype(x.dtype)

        xs = ahead(own, below), own.get("resets")
        return jax.lax.scan(step, carry_of(own), xs, unroll=UNROLLED, reverse=reverse)[1]

    def layer(own: list[Operands], below: Any) -> Any:
        ys = [scan(d, below, reverse=at == 1) for at, d in enumerate(own)]
        return ys[0] if len(ys) == 1 else jnp.concatenate(ys, -1)

    return layered(problem, dtype, passed, layer)


# ---- all layers in one loop ----


def _joined(problem: Problem, host: dict[str, np.ndarray]) -> np.ndarray:
    """The weights of all layers, (layers, hidden + hidden, columns).

    Inputs' rows come first. A GRU multiplies the recurrent product of its last gate before it adds
    the input's, so these two have columns of their own.
    """
    h, joined = problem.hidden, []
    for at in range(problem.layers):
        w, u = (host[name(kind, at, 0)] for kind in ("W", "U"))
        if problem.cell == "GRU":
            nothing = np.zeros((h, h), np.float32)
            w = np.concatenate([w, nothing], 1)
            u = np.concatenate([u[:, : 2 * h], nothing, u[:, 2 * h :]], 1)
        joined.append(np.concatenate([w, u]))
    return np.stack(joined)


def _parted(problem: Problem, joined: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The gradients of W and U of one layer."""
    h = problem.hidden
    w, u = joined[:h], joined[h:]
    if problem.cell == "GRU":
        return w[:, : 3 * h], np.concatenate([u[:, : 2 * h], u[:, 3 * h :]], 1)
    return w, u


def wavefront(problem: Problem, dtype: str, passed: str) -> Program:
    """One loop of T + L - 1 steps in which layer l is l steps behind: one batched product a step.

    The weights are stacked beforehand.
    """
    host, layers, length = problem.operands(), problem.layers, problem.length
    cell, gates = CELLS[problem.cell], problem.gates
    numpy_operands = {
        **{key: host[key] for key in ("x", "cotangent", "resets") if key in host},
        "V": _joined(problem, host),
        "b": np.stack([host[name("b", at, 0)] for at in range(layers)]),
        **{
            leaf: np.stack([host[name(leaf, at, 0)] for at in range(layers)])
            for leaf in problem.leaves
        },
    }
    kind = stored(dtype)
    kinds = {"c": "float32", "resets": "bool"}
    operands = {key: jnp.asarray(x, kinds.get(key, kind)) for key, x in numpy_operands.items()}

    def scan(operands: Operands) -> Any:
        bias = operands["b"].astype(jnp.float32)[:, None]
        behind = jnp.arange(layers)[:, None, None]

        def step(carry: tuple[Any, ...], at: tuple[Any, Any]) -> Any:
            now, x = at
            below = jnp.concatenate([x[None], carry[-1][:-1]])
            runs = (now >= behind) & (now < behind + length)
            if problem.resets:
                # Layer l is at step now - l; where it does not run, this is of no consequence.
                reset = operands["resets"][jnp.clip(now - behind[:, 0, 0], 0, length - 1)]
                carry = tuple(jnp.where(reset[..., None] & runs, 0, a) for a in carry)
            both = jnp.concatenate([below, carry[-1]], -1)
            product = jnp.matmul(both, operands["V"], preferred_element_type=jnp.float32)
            wide = tuple(a.astype(jnp.float32) for a in carry)
            a = product[..., : bias.shape[-1]] + bias
            r: tuple[Any, ...] = (0.0,) * gates
            if problem.cell == "GRU":
                r = (0.0, 0.0, product[..., bias.shape[-1] :])
            new, _ = cell(tuple(jnp.split(a, gates, -1)), r, wide if len(wide) > 1 else wide[0])
            carry = tuple(
                jnp.where(runs, a.astype(b.dtype), b)
                for a, b in zip(jax.tree.leaves(new), carry, strict=True)
            )
            return carry, carry[-1][-1]

        xs = jnp.pad(operands["x"], ((0, layers - 1), (0, 0), (0, 0)))
        carry = tuple(operands[leaf] for leaf in problem.leaves)
        steps = (jnp.arange(length + layers - 1), xs)
        return jax.lax.scan(step, carry, steps, unroll=UNROLLED)[1][layers - 1 :]

    def gradients(out: Operands) -> tuple[np.ndarray, ...]:
        made = {"x": out["x"]}
        for at in range(layers):
            w, u = _parted(problem, np.asarray(out["V"][at], np.float64))
            made |= {name("W", at, 0): w, name("U", at, 0): u}
            made |= {name(key, at, 0): out[key][at] for key in ("b", *problem.leaves)}
        return by_names(problem, made)

    return program(operands, scan, dtype, passed, gradients)


# ---- Flax ----


def flax_rnn(problem: Problem, dtype: str, passed: str) -> Program:
    """`flax.nnx.RNN` of Flax's cells, layer by layer; carries are of the states' dtype."""
    nnx = importlib.import_module("flax.nnx")
    made = {"RNN": nnx.SimpleCell, "GRU": nnx.GRUCell, "LSTM": nnx.OptimizedLSTMCell}[problem.cell]
    kind = stored(dtype)

    def layer(own: list[Operands], below: Any) -> Any:
        (only,) = own
        cell = made(
            below.shape[-1],
            problem.hidden,
            dtype=kind,
            param_dtype=kind,
            kernel_init=nnx.initializers.zeros_init(),
            recurrent_kernel_init=nnx.initializers.zeros_init(),
            rngs=nnx.Rngs(0),
        )
        cell.dense_i.kernel[...] = only["W"]
        cell.dense_h.kernel[...] = only["U"]
        (cell.dense_h if problem.cell == "LSTM" else cell.dense_i).bias[...] = only["b"]
        rnn = nnx.RNN(cell, time_major=True, unroll=UNROLLED)
        return rnn(below, initial_carry=carry_of(only))

    return layered(problem, dtype, passed, layer, cell_dtype=kind)


# ---- jax.experimental.rnn ----


def experimental_rnn(problem: Problem, dtype: str, passed: str) -> Program:
    """`jax.experimental.rnn.lstm`: cuDNN, in float32 or TF32; weights are one flat array."""
    rnn = importlib.import_module("jax.experimental.rnn")
    host = problem.operands()
    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else jax.lax.Precision.HIGH
    pairs = [(at, d) for at in range(problem.layers) for d in range(problem.directions)]
    matrices = [host[name(kind, *pair)].T for pair in pairs for kind in ("W", "U")]
    biases = [
        part
        for pair in pairs
        for part in (host[name("b", *pair)], np.zeros(4 * problem.hidden, np.float32))
    ]
    operands = {
        "x": host["x"].swapaxes(0, 1),
        "cotangent": host["cotangent"].swapaxes(0, 1),
        "weights": np.concatenate([a.ravel() for a in (*matrices, *biases)]),
        **{leaf: np.stack([host[name(leaf, *pair)] for pair in pairs]) for leaf in ("h", "c")},
    }
    lengths = jnp.full(problem.batch, problem.length, jnp.int32)

    def scan(operands: Operands) -> Any:
        return rnn.lstm(
            operands["x"],
            operands["h"],
            operands["c"],
            operands["weights"],
            lengths,
            problem.inputs(0),
            problem.hidden,
            problem.layers,
            0.0,
            problem.directions == 2,
            precision=(precision, precision),
        )[0]

    def gradients(out: Operands) -> tuple[np.ndarray, ...]:
        flat = np.asarray(out["weights"], np.float64)
        sizes = [a.size for a in (*matrices, *biases)]
        parts = iter(np.split(flat, np.cumsum(sizes)[:-1]))
        made: Operands = {"x": np.asarray(out["x"]).swapaxes(0, 1)}
        made |= {
            name(kind, *pair): next(parts).reshape(host[name(kind, *pair)].T.shape).T
            for pair in pairs
            for kind in ("W", "U")
        }
        for index, pair in enumerate(pairs):
            made[name("b", *pair)] = next(parts)
            next(parts)
            made |= {name(leaf, *pair): out[leaf][index] for leaf in ("h", "c")}
        return by_names(problem, made)

    return program(
        {key: jnp.asarray(x) for key, x in operands.items()},
        scan,
        dtype,
        passed,
        gradients,
        outputs=lambda ys: ys.swapaxes(0, 1),
    )
