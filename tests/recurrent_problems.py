"""Cells and random operands for the tests of the recurrent scan."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import reference

from jaxsparse import CSR, Topology, recurrent


def three_leaves(x, r, carry):
    """A cell with a carry of three leaves, whose y is not its state; two gates.

    Of zeros it makes no zeros.
    """
    (keep, new), (r_keep, r_new) = x, r
    keep = jax.nn.sigmoid(keep + r_keep)
    fast = keep * carry["fast"] + (1 - keep) * jnp.tanh(new + r_new)
    slow = 0.9 * carry["slow"] + 0.1 * fast * carry["state"]
    state = jnp.tanh(fast - slow + 0.25)
    return {"fast": fast, "slow": slow, "state": state}, state * (1 + fast) + 0.5 * new


# name -> (cell, its gates, a carry of its form: the least numbers that leaves have, 0 for any)
CELLS = {
    "RNN": (recurrent.elman(), 1, 0),
    "GRU": (recurrent.GRU, 3, 0),
    "LSTM": (recurrent.LSTM, 4, (0, 0)),
    "SLSTM": (recurrent.SLSTM, 4, (0, 1, 0, 0)),
    "three_leaves": (three_leaves, 2, {"fast": 0, "slow": 0, "state": 0}),
}


def compiled(function, **options):
    """`jax.jit` for programs that run once: most of their time is LLVM's, or that of Triton."""
    soon = {"xla_backend_optimization_level": 0, "xla_gpu_enable_triton_gemm": False}
    return jax.jit(function, compiler_options=soon, **options)


def compiled_with_triton(function):
    """`compiled`, but with Triton's products; for tests with the fixture `unrolled`."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


class Problem(NamedTuple):
    """The operands of a scan, its weights dense or values on a topology."""

    cell: Any
    weights: Any
    carry: Any
    xs: Any
    bias: Any
    topology: Any

    @property
    def operands(self):
        """What a scan is differentiable in."""
        return self.weights, self.carry, self.xs, self.bias

    @property
    def dense(self):
        """The weights as a dense matrix."""
        if self.topology is None:
            return self.weights
        return jnp.asarray(reference.to_dense(self.weights, self.topology).T)

    def scan(self, weights, carry, xs, bias=None, **options):
        """`recurrent.scan` as a function of what it is differentiable in."""
        if self.topology is not None:
            weights = CSR(weights, self.topology)
        return recurrent.scan(self.cell, weights, carry, xs, recurrent_bias=bias, **options)

    def reference(self, weights, carry, xs, bias=None, **options):
        """The oracle as a function of the same operands."""
        if self.topology is not None:
            t = self.topology
            rows, columns = t.row_indices[: t.nnz], t.column_indices[: t.nnz]
            dense = jnp.zeros(t.shape, weights.dtype).at[rows, columns].set(weights[: t.nnz])
            weights = dense.T
        return reference.recurrent_scan(
            self.cell, weights, carry, xs, recurrent_bias=bias, **options
        )


def pattern(rows, h, density=0.5, seed=0, padding=2):
    """A pattern with an empty row, and padding."""
    mask = np.random.default_rng(seed).random((rows, h)) < density
    mask[rows // 2] = False
    return Topology.from_mask(mask, nse=int(mask.sum()) + padding)


def carry_like(form, draw, *shape):
    """Random numbers in the form of a cell's carry in CELLS."""
    return jax.tree.map(lambda low: low + abs(draw(*shape)) if low else draw(*shape), form)


def problem(name, sparse=False, *, T=5, B=3, h=5, dtype=jnp.float32, seed=0):
    """Random operands. Padding among the values is NaN: it must never be read.

    A row of weights is of length 1/2 or so, so the scan contracts: a rounding error does not grow
    from step to step.
    """
    cell, gates, form = CELLS[name]
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.standard_normal(shape)

    topology = pattern(gates * h, h, seed=seed) if sparse else None
    weights = draw(topology.nse) if sparse else draw(h, gates * h)
    if sparse:
        weights[topology.nnz :] = np.nan
    xs, bias = draw(T, B, gates * h), draw(gates * h) / 2
    carry = carry_like(form, draw, B, h)
    weights = weights * (0.5 / np.sqrt(h))
    as_arrays = jax.tree.map(lambda x: jnp.asarray(x, dtype), (weights, carry, xs, bias))
    return Problem(cell, *as_arrays, topology)


def kernels(function, *shapes):
    """The sources of a program's kernels, from its text."""
    text = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r'name = "([^"]*)".*?source = "((?:[^"\\]|\\.)*)"', text)
    return [(name, _unescaped(source)) for name, source in found]


def _unescaped(text):
    return re.sub(r"\\([0-9A-Fa-f]{2})", lambda m: chr(int(m[1], 16)), text)
