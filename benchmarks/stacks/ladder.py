"""The ladder of Appleyard et al. 2016: an LSTM's forward pass by cuBLAS, step by step faster.

Each rung adds one thing to the rung below it. A cell is one step of one layer.

    naive        a product for each gate and operand, a kernel for each pointwise operation
    grouped      the four gates of an operand in one product
    streams      the input's product beside the recurrent one, on a stream of its own
    fused        all that is pointwise in one kernel
    transposed   weights are transposed once, before the steps
    inputs-s     the input's products of s steps in one
    waves-s      layers run side by side, each on streams of its own, s steps behind each other

Source: J. Appleyard, T. Kočiský, P. Blunsom, "Optimizing Performance of Recurrent Neural Networks
on GPUs", 2016, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.stacks.jax_programs import stored
from benchmarks.stacks.problems import Problem, name
from benchmarks.stacks.torch_programs import states
from benchmarks.torch_arrays import as_float64, nbytes, tf32, to_device, torch_module
from benchmarks.torch_graphs import captured
from jaxsparse.timing import Program


@dataclass(frozen=True)
class Rung:
    """What an implementation does.

    Args:
        grouped: one product for all gates of an operand.
        streams: input and recurrent products side by side.
        fused: one pointwise kernel.
        transposed: weights are transposed beforehand.
        steps: of how many steps inputs are multiplied at once; None for all.
        waves: layers run side by side.
    """

    grouped: bool = True
    streams: bool = True
    fused: bool = True
    transposed: bool = True
    steps: int | None = 1
    waves: bool = False


RUNGS: dict[str, Rung] = {
    "naive": Rung(grouped=False, streams=False, fused=False, transposed=False),
    "grouped": Rung(streams=False, fused=False, transposed=False),
    "streams": Rung(fused=False, transposed=False),
    "fused": Rung(transposed=False),
    "transposed": Rung(),
    "inputs-2": Rung(steps=2),
    "inputs-4": Rung(steps=4),
    "inputs-16": Rung(steps=16),
    "inputs-all": Rung(steps=None),
    "waves-2": Rung(steps=2, waves=True),
    "waves-4": Rung(steps=4, waves=True),
    "waves-16": Rung(steps=16, waves=True),
}


class _Layer:
    """One layer's weights, its streams, and what it has computed so far."""

    def __init__(self, torch: Any, rung: Rung, parameters: tuple[Any, ...], carry: Any) -> None:
        self.torch, self.rung = torch, rung
        self.w, self.u, self.bias = parameters  # (4 hidden, inputs), (4 hidden, hidden)
        self.c, self.h = carry
        self.outputs: list[Any] = []
        self.ready: list[Any] = []  # an event for each chunk of steps
        self.kept: list[Any] = []
        if rung.transposed:
            self.w, self.u = (a.t().contiguous() for a in (self.w, self.u))
        if rung.fused:
            self.no_bias = torch.zeros_like(self.bias)

    def product(self, x: Any, weights: Any) -> Any:
        """Of all gates: (rows, 4 hidden)."""
        if self.rung.transposed:
            return x @ weights
        if self.rung.grouped:
            return x @ weights.t()
        return [x @ gate.t() for gate in weights.chunk(4)]

    def step(self, a: Any, r: Any) -> None:
        """The cell, of the products of input and state."""
        if self.rung.fused:
            cell = self.torch.ops.aten._thnn_fused_lstm_cell
            self.h, self.c, _ = cell(a, r, self.c, self.bias, self.no_bias)
        else:
            if self.rung.grouped:
                a, r = a.chunk(4, -1), r.chunk(4, -1)
            gates = [x + y + b for x, y, b in zip(a, r, self.bias.chunk(4), strict=True)]
            i, f, o = (gates[k].sigmoid() for k in (0, 1, 3))
            self.c = f * self.c + i * gates[2].tanh()
            self.h = o * self.c.tanh()
        self.outputs.append(self.h)


class _Stack:
    """A call: which steps of which layer are launched when, and on which streams."""

    def __init__(self, torch: Any, rung: Rung, pool: list[Any]) -> None:
        self.torch, self.rung, self.pool = torch, rung, pool

    def __call__(self, parts: list[Any], x: Any, carries: list[Any]) -> Any:
        layers = [_Layer(self.torch, self.rung, p, c) for p, c in zip(parts, carries, strict=True)]
        length, size = len(x), self.rung.steps or len(x)
        chunks = [(first, min(first + size, length)) for first in range(0, length, size)]
        inputs = list(x.unbind())
        order = [(at, chunk) for at in range(len(layers)) for chunk in range(len(chunks))]
        if self.rung.waves:
            order.sort(key=sum)
        main = self.torch.cuda.current_stream()
        for stream in self.pool:
            stream.wait_stream(main)
        for at, chunk in order:
            below = layers[at - 1] if at else None
            entering = below.outputs if below else inputs
            if not self.pool:
                self._in_turn(layers[at], entering, *chunks[chunk])
                continue
            streams = self.pool[2 * at if self.rung.waves else 0 :][:2]
            if below:
                streams[0].wait_event(below.ready[chunk])
            self._side_by_side(layers[at], entering, *chunks[chunk], *streams)
        for stream in self.pool:
            main.wait_stream(stream)
        return self.torch.stack(layers[-1].outputs)

    def _entering(self, below: list[Any], first: int, last: int) -> Any:
        return below[first] if last == first + 1 else self.torch.cat(below[first:last])

    def _steps(self, layer: _Layer, a: Any, first: int, last: int) -> None:
        batch = len(layer.h)
        for t in range(last - first):
            own = a if last == first + 1 else a[t * batch : (t + 1) * batch]
            layer.step(own, layer.product(layer.h, layer.u))

    def _in_turn(self, layer: _Layer, below: list[Any], first: int, last: int) -> None:
        a = layer.product(self._entering(below, first, last), layer.w)
        self._steps(layer, a, first, last)

    def _side_by_side(
        self, layer: _Layer, below: list[Any], first: int, last: int, inputs: Any, states: Any
    ) -> None:
        """The products of the inputs on one stream, the recurrent ones and the cell on another."""
        stream = self.torch.cuda.stream
        with stream(inputs):
            a = layer.product(self._entering(below, first, last), layer.w)
        # Until the call ends its memory must not be given to what comes next on its stream.
        layer.kept.append(a)
        with stream(states):
            r = layer.product(layer.h, layer.u)
            states.wait_event(inputs.record_event())
            batch = len(layer.h)
            layer.step(a if last == first + 1 else a[:batch], r)
            if last > first + 1:
                self._steps(layer, a[batch:], first + 1, last)
            layer.ready.append(states.record_event())


def lstm(problem: Problem, dtype: str, passed: str, *, rung: str, graph: bool) -> Program:
    """A rung, launched kernel by kernel or captured in one CUDA graph."""
    torch, host, chosen = torch_module(), problem.operands(), RUNGS[rung]
    kind = stored(dtype)
    parts = [
        tuple(to_device(host[name(key, at, 0)].T, kind) for key in ("W", "U", "b"))
        for at in range(problem.layers)
    ]
    x, carry = to_device(host["x"], kind), states(problem, kind)
    count = 2 * (problem.layers if chosen.waves else 1) if chosen.streams else 0
    stack = _Stack(torch, chosen, [torch.cuda.Stream() for _ in range(count)])

    def run(parts: list[Any], x: Any, *carry: Any) -> Any:
        with torch.no_grad(), tf32(torch, dtype == "tf32"):
            carries = list(zip(*(leaf.unbind() for leaf in carry), strict=True))
            return stack(parts, x, carries)

    def copies() -> tuple[Any, ...]:
        own = [tuple(a.clone() for a in part) for part in parts]
        return own, *(a.clone() for a in (x, *carry))

    function, operands = captured(run, copies) if graph else (run, copies)
    return Program(
        function=function,
        operands=operands,
        bytes_read=nbytes([a for part in parts for a in part] + [x, *carry]),
        wait=lambda out: torch.cuda.synchronize(),
        results=lambda out: (as_float64(out),),
    )
