"""What nets compute, in float64: their scans by the machine that runs scripts in NumPy.

The cells are written out here, forward and backward, apart from those that are measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.dynamic import models, training
from benchmarks.dynamic.batches import Scripts
from benchmarks.dynamic.problems import Problem
from jaxsparse import dynamic
from jaxsparse.dynamic import reference as machine

Array = np.ndarray
Arrays = Sequence[Array]


class Cell(NamedTuple):
    """Of gates z, the sums of products, bias and inputs, and for each child its carry.

    Args:
        forward: to the carry, its state last.
        backward: of these and the cotangent of the carry, to those of z and of each child's carry,
            as far as these do not go through z.
    """

    forward: Callable[[Arrays, Sequence[Arrays]], list[Array]]
    backward: Callable[[Arrays, Sequence[Arrays], Arrays], tuple[list[Array], list[list[Array]]]]


def _sigmoid(x: Array) -> Array:
    y: Array = 1 / (1 + np.exp(-x))
    return y


def _memory(
    i: Array, o: Array, u: Array, forget: Arrays, children: Sequence[Arrays]
) -> list[Array]:
    c = _sigmoid(i) * np.tanh(u)
    for f, (of_child, _) in zip(forget, children, strict=True):
        c = c + _sigmoid(f) * of_child
    return [c, _sigmoid(o) * np.tanh(c)]


def _memory_back(
    i: Array, o: Array, u: Array, forget: Arrays, children: Sequence[Arrays], d: Arrays
) -> tuple[Array, Array, Array, list[Array], list[list[Array]]]:
    """Cotangents of i, o, u, forget gates and children."""
    c, _ = _memory(i, o, u, forget, children)
    dc, dh = d
    s_i, s_o, t_u, t_c = _sigmoid(i), _sigmoid(o), np.tanh(u), np.tanh(c)
    dc = dc + dh * s_o * (1 - t_c**2)
    of_forget, of_children = [], []
    for f, (of_child, h) in zip(forget, children, strict=True):
        s_f = _sigmoid(f)
        of_forget.append(dc * of_child * s_f * (1 - s_f))
        of_children.append([dc * s_f, np.zeros_like(h)])
    of_u = dc * s_i * (1 - t_u**2)
    return dc * t_u * s_i * (1 - s_i), dh * t_c * s_o * (1 - s_o), of_u, of_forget, of_children


def _tree_lstm(z: Arrays, children: Sequence[Arrays]) -> list[Array]:
    i, o, u, *forget = z
    return _memory(i, o, u, forget, children)


def _tree_lstm_back(z: Arrays, children: Sequence[Arrays], d: Arrays) -> Any:
    i, o, u, *forget = z
    *of_gates, of_forget, of_children = _memory_back(i, o, u, forget, children, d)
    return [*of_gates, *of_forget], of_children


def _lstm(z: Arrays, children: Sequence[Arrays]) -> list[Array]:
    i, f, u, o = z
    return _memory(i, o, u, [f], children)


def _lstm_back(z: Arrays, children: Sequence[Arrays], d: Arrays) -> Any:
    i, f, u, o = z
    of_i, of_o, of_u, of_forget, of_children = _memory_back(i, o, u, [f], children, d)
    return [of_i, *of_forget, of_u, of_o], of_children


def _tanh(z: Arrays, children: Sequence[Arrays]) -> list[Array]:
    return [np.tanh(z[0])]


def _tanh_back(z: Arrays, children: Sequence[Arrays], d: Arrays) -> Any:
    return [d[0] * (1 - np.tanh(z[0]) ** 2)], [[np.zeros_like(h)] for (h,) in children]


def _gated(z: Arrays, children: Sequence[Arrays]) -> list[Array]:
    keep, mean = _sigmoid(z[0]), sum(h for (h,) in children) / len(children)
    return [keep * mean + (1 - keep) * np.tanh(z[1])]


def _gated_back(z: Arrays, children: Sequence[Arrays], d: Arrays) -> Any:
    keep, new = _sigmoid(z[0]), np.tanh(z[1])
    mean = sum(h for (h,) in children) / len(children)
    of_keep = d[0] * (mean - new) * keep * (1 - keep)
    own = d[0] * keep / len(children)
    return [of_keep, d[0] * (1 - keep) * (1 - new**2)], [[own]] * len(children)


CELLS: dict[dynamic.Cell, Cell] = {
    models.TREE_LSTM: Cell(_tree_lstm, _tree_lstm_back),
    models.LSTM: Cell(_lstm, _lstm_back),
    models.tanh_cell: Cell(_tanh, _tanh_back),
    models.gated_cell: Cell(_gated, _gated_back),
}


class _Run:
    """One scan by the machine, and what its derivative reads."""

    def __init__(self, cell: Cell, weights: Arrays, biases: Arrays, script: Any, xs: Array | None):
        self.cell, self.weights, self.biases = cell, weights, biases
        self.script, self.xs = script, xs
        # The machine says of a row's input only what it holds: here its number, from 1 on.
        inputs = script.form.inputs
        self.numbers = np.arange(1, inputs + 1)[:, None] if inputs else None

    def _gates(self, joined: Array) -> list[Array]:
        return np.split(joined, joined.shape[1] // self.h, axis=1)

    def forward(self, carry: Arrays) -> list[Array]:
        self.h, self.leaves = carry[-1].shape[1], len(carry)
        products = self.weights[0].shape[1]

        def step(kind: int, children: list[Any], x: Array | None) -> list[Array]:
            own = [child[: self.leaves] for child in children]
            z = np.concatenate([child[-1] for child in own], 1) @ self.weights[kind]
            z = z + self.biases[kind]
            if x is not None and self.xs is not None:
                has = x[:, 0] > 0
                z[has] += self.xs[x[has, 0].astype(int) - 1]
            return [*self.cell.forward(self._gates(z), own), z]

        room = np.zeros((len(carry[0]), products))
        self.rows = machine.run(self.script, step, [*carry, room], self.numbers)
        return self.rows[: self.leaves]

    def backward(self, d: Arrays) -> tuple[list[Array], list[Array], Array | None, list[Array]]:
        """Cotangents of weights, biases, xs and the carry, of those of all rows' carries."""
        *carries, z = self.rows
        slots = self.script.form.slots
        sources = self.script.sources.reshape(-1, slots)
        # Beside their sums rows are given their own number, which nobody adds to.
        number = np.arange(self.script.form.rows, dtype=np.float64)[:, None]
        d_weights = [np.zeros_like(w) for w in self.weights]
        d_biases = [np.zeros_like(b) for b in self.biases]
        d_xs = None if self.xs is None else np.zeros_like(self.xs)

        def step(kind: int, sums: list[Array], x: Array | None) -> list[list[Array]]:
            *own, at = sums
            rows = at[:, 0].astype(int)
            from_ = sources[rows - self.script.form.leaves]
            there = (from_ >= 0)[..., None]
            children = [
                [np.where(there[:, k], c[from_[:, k]], 0) for c in carries] for k in range(slots)
            ]
            of_z, of_children = self.cell.backward(self._gates(z[rows]), children, own)
            dz = np.concatenate(of_z, 1)
            d_weights[kind] += np.concatenate([child[-1] for child in children], 1).T @ dz
            d_biases[kind] += dz.sum(0)
            if x is not None and d_xs is not None:
                has = x[:, 0] > 0
                d_xs[x[has, 0].astype(int) - 1] += dz[has]
            through = np.split(dz @ self.weights[kind].T, slots, axis=1)
            return [
                [*child[:-1], child[-1] + state, np.zeros_like(at)]
                for child, state in zip(of_children, through, strict=True)
            ]

        given = [*(np.asarray(x, np.float64) for x in d), number]
        sums = machine.run_backwards(self.script, step, given, self.numbers)
        return d_weights, d_biases, d_xs, [x[: self.script.form.leaves] for x in sums[:-1]]


class _Known(NamedTuple):
    """Operands of one scan of a loss, as it is called."""

    weights: Any
    bias: Any
    carry: Any
    xs: Any


Loss = Callable[..., tuple[Any, Any]]


class _Net:
    """A loss whose scans the machine runs: what comes before, between and behind is compiled.

    A loss is called with scans that note their operands and return what is given for them. So it is
    a function of parameters and of all scans' results, to these operands and to loss and logits.
    """

    def __init__(self, loss: Loss):
        self._loss = loss
        self._calls: list[tuple[Any, Any]] = []  # cell and script of each scan
        self._apply = jax.jit(self._traced)
        self._pull = jax.jit(
            lambda d, params, rows, batch, given: jax.vjp(
                lambda params, rows, given: self._traced(params, rows, batch, given)[:2],
                params,
                rows,
                given,
            )[1](d)
        )

    def _traced(self, params: Any, rows: Any, batch: Any, given: Any) -> Any:
        noted: list[_Known] = []
        self._calls = []

        def scan(cell: Any, weights: Any, carry: Any, script: Any, xs: Any, *, bias: Any) -> Any:
            at = len(noted)
            noted.append(_Known(weights, bias, carry, xs))
            self._calls.append((cell, script.form))
            if at < len(given):
                return given[at]
            rows = script.form.computed
            return jax.tree.map(lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype), carry)

        value, logits = self._loss(scan, params, rows, batch)
        return noted, value, logits

    def run(self, params: Any, rows: Any, batch: Any) -> tuple[Any, list[_Run], list[Any]]:
        """Logits; the scans, and what they gave."""
        given: list[Any] = []
        runs: list[_Run] = []
        while True:
            noted, _, logits = self._apply(params, rows, batch, given)
            if len(given) == len(noted):
                return logits, runs, given
            known, (cell, form) = noted[len(given)], self._calls[len(given)]
            several = isinstance(cell, tuple)
            weights, biases = (
                [np.asarray(x) for x in (values if several else (values,))]
                for values in (known.weights, known.bias)
            )
            script = next(s for s in batch if s is not None and s.form == form)
            xs = None if known.xs is None else np.asarray(known.xs)
            made = _Run(CELLS[cell[0] if several else cell], weights, biases, script, xs)
            leaves = made.forward([np.asarray(x) for x in jax.tree.leaves(known.carry)])
            computed = [jnp.asarray(x[form.leaves :]) for x in leaves]
            given = [*given, jax.tree.unflatten(jax.tree.structure(known.carry), computed)]
            runs.append(made)

    def gradients(self, params: Any, rows: Any, batch: Any) -> tuple[Any, Any]:
        """Of parameters and of embedded words."""
        _, runs, given = self.run(params, rows, batch)
        noted, value, _ = self._apply(params, rows, batch, given)
        zero = jax.tree.map(jnp.zeros_like, noted)
        total = self._pull((zero, jnp.ones_like(value)), params, rows, batch, given)
        for i in reversed(range(len(runs))):
            leaves = runs[i].script.form.leaves
            d = [np.pad(np.asarray(x), [(leaves, 0), (0, 0)]) for x in jax.tree.leaves(total[2][i])]
            own = [*zero]
            own[i] = _as_noted(noted[i], runs[i].backward(d))
            more = self._pull((own, jnp.zeros_like(value)), params, rows, batch, given)
            total = jax.tree.map(jnp.add, total, more)
        of_params, of_rows, _ = total
        return of_params, of_rows


def _as_noted(known: _Known, found: Any) -> _Known:
    """Cotangents in the structure of a scan's operands."""
    d_weights, d_biases, d_xs, d_carry = found
    several = isinstance(known.weights, tuple)
    weights, bias = (
        tuple(map(jnp.asarray, x)) if several else jnp.asarray(x[0]) for x in (d_weights, d_biases)
    )
    carry = jax.tree.unflatten(jax.tree.structure(known.carry), list(map(jnp.asarray, d_carry)))
    return _Known(weights, bias, carry, None if d_xs is None else jnp.asarray(d_xs))


def _host() -> Any:
    """The CPU, which compiles faster; where JAX has none, None for its default device."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return None


class Expected(NamedTuple):
    """Arrays, and by how much each may differ because float32 holds parameters no more exactly."""

    arrays: tuple[Array, ...]
    slack: tuple[float, ...]


@functools.lru_cache(maxsize=32)
def expected(problem: Problem, passed: str) -> Expected:
    """What `programs` give of the first step of each group: forward logits, or gradients.

    Those of a training pass are what the steps, one after the other, add to the parameters.
    """
    batches, net = Scripts(8), problem.net
    steps = [group[0] for group in problem.groups()]
    room = batches.room(problem, steps)
    with jax.enable_x64(True), jax.default_device(_host()):
        start = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), net.parameters(problem.sizes))
        params, total = start, jax.tree.map(jnp.zeros_like, start)
        whole, logits = _Net(net.loss), []
        for step in steps:
            batch = batches.one(problem, step, room)
            words = net.word_ids(batch)
            others, rows = training.without_table(params), training.embedded(params, words)
            if passed == "forward":
                made = np.asarray(whole.run(others, rows, batch)[0])
                logits.append(batches.logits(problem, step, made))
                continue
            grads = whole.gradients(others, rows, batch)
            if passed == "gradient":
                total = training.added(total, grads, words, 1.0)
            else:
                params = training.added(params, grads, words, -training.RATE)
        if passed == "forward":
            return Expected((np.concatenate(logits),), (0.0,))
        if passed == "training":
            total = jax.tree.map(jnp.subtract, params, start)
        arrays = tuple(np.asarray(x) for x in jax.tree.leaves(total))
    if passed == "gradient":
        return Expected(arrays, (0.0,) * len(arrays))
    first = [np.asarray(x) for x in jax.tree.leaves(start)]
    changed = [np.linalg.norm(x[y != 0]) for x, y in zip(first, arrays, strict=True)]
    return Expected(arrays, tuple(len(steps) * 2.0**-24 * float(x) for x in changed))


def error(passed: str, results: Sequence[Array], problem: Problem) -> float:
    """Of logits the largest difference over the largest, of gradients the largest by length."""
    wanted, slack = expected(problem, passed)
    if [x.shape for x in results] != [x.shape for x in wanted]:
        return float("inf")
    if passed == "forward":
        return float(np.abs(results[0] - wanted[0]).max() / np.abs(wanted[0]).max())
    errors = [
        float((np.linalg.norm(x - y) - allowed) / np.linalg.norm(y))
        for x, y, allowed in zip(results, wanted, slack, strict=True)
    ]
    return max(0.0, *errors) if np.isfinite(errors).all() else float("inf")
