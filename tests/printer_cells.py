"""What the tests of printed steps print: cells, their derivatives, and random programs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from printer_cases import f32

# As functions of products, carries and inputs to states, carries and outputs.


def tanh_rnn(p, x):
    h = jnp.tanh(p + x)
    return h, h


def lstm(pi, pf, pg, po, c, xi, xf, xg, xo):
    i, f, g, o = jax.nn.sigmoid(pi + xi), jax.nn.sigmoid(pf + xf + 1), jnp.tanh(pg + xg), po + xo
    c = f * c + i * g
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return h, c, h


def gru(pr, pz, pn, h, xr, xz, xn, bias):
    r, z = jax.nn.sigmoid(pr + xr), jax.nn.sigmoid(pz + xz)
    h = (1 - z) * jnp.tanh(xn + r * (pn + bias)) + z * h
    return h, h, h


def masked_gru(pr, pz, pn, h, xr, xz, xn, bias, mask):
    _, new, _ = gru(pr, pz, pn, h, xr, xz, xn, bias)
    new = jnp.where(mask, new, h)
    return new, new, jnp.where(mask, new, 0.0)


@dataclasses.dataclass(frozen=True)
class Cell:
    name: str
    function: Callable[..., Any]
    products: int
    states: int
    carries: int
    inputs: int
    outputs: int
    bools: int = 0  # the last inputs

    @property
    def counts(self) -> dict[str, int]:
        names = ("products", "states", "carries", "inputs", "outputs")
        return {name: getattr(self, name) for name in names}

    @property
    def arity(self) -> int:
        return self.products + self.carries + self.inputs

    @functools.cached_property
    def jaxpr(self):
        arguments = [f32(0)] * (self.arity - self.bools) + [jnp.bool_(False)] * self.bools
        return jax.make_jaxpr(self.function)(*arguments)


def tangent(cell: Cell) -> Cell:
    """The cell and its tangent: of everything there is twice as much, in the same order."""

    def function(*both):
        return sum(zip(*jax.jvp(cell.function, both[::2], both[1::2]), strict=True), ())

    return Cell(f"{cell.name}_jvp", function, **{n: 2 * k for n, k in cell.counts.items()})


def adjoint(cell: Cell) -> Cell:
    """The transpose of the tangent, which takes the cell's arguments as inputs."""
    p, c = cell.products, cell.carries

    def function(*arguments):
        d_states, d_carries = arguments[: cell.states], arguments[cell.states :][:c]
        inputs = arguments[cell.states + c :]
        primals, d_outputs = inputs[: cell.arity], inputs[cell.arity :]
        transposed = jax.linear_transpose(
            lambda *tangents: jax.jvp(cell.function, primals, tangents)[1], *primals
        )
        return transposed((*d_states, *d_carries, *d_outputs))

    return Cell(
        f"{cell.name}_transpose",
        function,
        products=cell.states,
        states=p,
        carries=c,
        inputs=cell.arity + cell.outputs,
        outputs=cell.inputs,
    )


def random_program(seed: int) -> Cell:
    """A program of well-conditioned operations, some of them in nested calls, some dead."""
    rng = np.random.default_rng(seed)
    operations = [
        lambda x, y, z: jnp.sin(x) * y,
        lambda x, y, z: jnp.tanh(x + y),
        lambda x, y, z: jax.nn.sigmoid(x - z),
        lambda x, y, z: jnp.maximum(x, y) * 0.3 - jnp.minimum(y, z),
        lambda x, y, z: jax.nn.relu(x) + jax.nn.softplus(y),
        lambda x, y, z: lax.cond(z > 0.1, lambda: x * 0.5, lambda: jnp.clip(y, -1, 1)),
        lambda x, y, z: jnp.where(x > z, y, x),
        lambda x, y, z: y,
    ]
    wrappers = [jax.jit, jax.checkpoint, lambda f: f, lambda f: jax.jit(jax.jit(f))]
    chosen = [
        (wrappers[rng.integers(4)](operations[rng.integers(8)]), *rng.integers(0, 2**30, 3))
        for _ in range(10)
    ]
    results = rng.integers(0, 2**30, 4)

    def function(*given):
        values = list(given)
        for operation, i, j, k in chosen:
            # What is compared is given, so that it is the same in every precision.
            values.append(
                operation(values[i % len(values)], values[j % len(values)], given[k % len(given)])
            )
        return tuple(values[i % len(values)] for i in results)

    return Cell(f"random_{seed}", function, 2, 1, 2, 1, 1)


CELLS = [
    *(
        cell
        for base in (
            Cell("tanh_rnn", tanh_rnn, 1, 1, 0, 1, 1),
            Cell("lstm", lstm, 4, 1, 1, 4, 1),
            Cell("gru", gru, 3, 1, 1, 4, 1),
        )
        for cell in (base, tangent(base), adjoint(base), tangent(tangent(base)))
    ),
    Cell("masked_gru", masked_gru, 3, 1, 1, 5, 1, bools=1),
    *(random_program(seed) for seed in range(20)),
]
