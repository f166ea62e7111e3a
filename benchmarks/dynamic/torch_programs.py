"""Trees by levels in PyTorch: all rows of a level at once, as DGL's Tree-LSTM runs them.

Indices of the rows of each level are on the GPU beforehand.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from benchmarks.dynamic import models, training
from benchmarks.dynamic.problems import Problem
from benchmarks.dynamic.programs import Arrays, Built
from benchmarks.torch_arrays import as_float64, tf32, torch_module
from jaxsparse.timing import Program


class _Levels:
    """The rows of a batch, level by level, as indices of PyTorch."""

    def __init__(self, problem: Problem, step: np.ndarray, device: str):
        torch = torch_module()
        graphs = problem.graphs[problem.ids(step)]
        base = np.repeat(graphs.offsets[:-1], graphs.lengths)
        children = np.where(graphs.children < 0, -1, graphs.children + base[:, None])
        order = np.argsort(graphs.levels, kind="stable")  # leaves first
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        counts = np.bincount(graphs.levels)

        def send(x: np.ndarray) -> Any:
            return torch.from_numpy(np.ascontiguousarray(x, np.int64)).to(device)

        ends = np.cumsum(counts)
        self.words = send(graphs.channel("word")[order[: counts[0]]])
        self.children = [
            send(place[children[order[begin:end]]]) for begin, end in itertools.pairwise(ends)
        ]
        self.roots = send(place[graphs.offsets[:-1] + graphs.roots])
        labels = graphs.channel("label")
        self.by_row = len(labels) == len(order)
        self.labels = send(labels[order] if self.by_row else labels)


class _Net:
    """A net's parameters and its loss."""

    def __init__(self, problem: Problem, dtype: str, device: str):
        torch = torch_module()
        self.torch = torch
        self.narrow = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        self.cell = problem.net.cell
        self.hidden = problem.hidden
        self.params = {
            name: torch.from_numpy(x).to(device).requires_grad_(name != "table")
            for name, x in problem.net.parameters(problem.sizes).items()
        }

    def others(self) -> list[Any]:
        """All but the table, in the order of their names, as JAX has leaves of a dictionary."""
        return [self.params[name] for name in sorted(self.params) if name != "table"]

    def _product(self, x: Any, weights: Any, bias: Any) -> Any:
        return (x.to(self.narrow) @ weights.to(self.narrow)).float() + bias

    def _leaf(self, rows: Any) -> tuple[Any, Any]:
        made = self._product(rows, self.params["leaf"], self.params["leaf_bias"])
        if self.cell is models.tanh_cell:
            h = made.tanh()
            return h, h.to(self.narrow)
        i, o, u = made.chunk(3, -1)
        c = i.sigmoid() * u.tanh()
        return c, (o.sigmoid() * c.tanh()).to(self.narrow)

    def loss(self, levels: _Levels, rows: Any) -> tuple[Any, Any]:
        """And the logits of roots."""
        torch, p = self.torch, self.params
        c, h = self._leaf(rows)
        for children in levels.children:
            z = self._product(h[children].flatten(1), p["weights"], p["bias"])
            if self.cell is models.tanh_cell:
                new_c = new_h = z.tanh()
            else:
                i, o, u, left, right = z.chunk(5, -1)
                forget = torch.stack([left, right], 1).sigmoid()
                new_c = i.sigmoid() * u.tanh() + (forget * c[children]).sum(1)
                new_h = o.sigmoid() * new_c.tanh()
            c, h = torch.cat([c, new_c]), torch.cat([h, new_h.to(self.narrow)])
        roots = self._product(h[levels.roots], p["head"], p["head_bias"])
        logits = self._product(h, p["head"], p["head_bias"]) if levels.by_row else roots
        return torch.nn.functional.cross_entropy(logits, levels.labels), roots


def build(problem: Problem, dtype: str, passed: str, device: str = "cuda") -> Built:
    """All steps in turn, each with kernels of its own for every level."""
    torch, net = torch_module(), _Net(problem, dtype, device)
    groups = [[_Levels(problem, step, device) for step in steps] for steps in problem.groups()]
    factor = 1.0 if passed == "gradient" else -training.RATE

    def step(params: dict[str, Any], sums: dict[str, Any] | None, levels: _Levels) -> Any:
        rows = params["table"][levels.words]
        if sums is None:
            with torch.no_grad():
                return net.loss(levels, rows)[1]
        rows.requires_grad_(True)
        value, _ = net.loss(levels, rows)
        *grads, of_rows = torch.autograd.grad(value, [*net.others(), rows])
        with torch.no_grad():
            names = sorted(name for name in sums if name != "table")
            for name, grad in zip(names, grads, strict=True):
                sums[name].add_(grad, alpha=factor)
            sums["table"].index_add_(0, levels.words, of_rows, alpha=factor)
        return value

    def run(used: int | None = None) -> Any:
        sums = None
        start = {name: x.detach().clone() for name, x in net.params.items()}
        if passed == "gradient":
            sums = {name: torch.zeros_like(x) for name, x in start.items()}
        elif passed == "training":
            sums = {name: x.detach() for name, x in net.params.items()}  # shares the memory
        with tf32(torch, dtype == "tf32"):
            made = [step(net.params, sums, own) for group in groups for own in group[:used]]
        if passed == "training":  # the next call begins where this one did
            with torch.no_grad():
                added = {name: x.detach() - start[name] for name, x in net.params.items()}
                for name, x in net.params.items():
                    x.copy_(start[name])
            return added
        return made if passed == "forward" else sums

    def checked() -> Arrays:
        out = run(1)
        if passed == "forward":
            return (np.concatenate([as_float64(logits) for logits in out]),)
        return tuple(as_float64(out[name]) for name in sorted(out))

    def wait(_: Any) -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    program = Program(function=run, operands=tuple, bytes_read=0, wait=wait, results=lambda out: ())
    return Built(program, checked)
