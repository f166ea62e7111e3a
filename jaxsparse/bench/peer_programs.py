"""Programs of SciPy, PyTorch and CuPy, which are imported only where they are asked for."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import scipy.sparse

from jaxsparse.bench.problems import Problem
from jaxsparse.bench.timing import Program
from jaxsparse.topology import Topology


def needs_cpu() -> str | None:
    """Why a library of the CPU is left out; None if it isn't."""
    return None if jax.default_backend() == "cpu" else "runs on a CPU only"


def needs_gpu() -> str | None:
    """Why what needs a GPU is left out; None if it isn't."""
    return None if jax.default_backend() == "gpu" else "runs on a GPU only"


def needs_torch() -> str | None:
    """Why PyTorch is left out; None if it isn't."""
    return needs_gpu() or _missing("torch", lambda torch: bool(torch.cuda.is_available()))


def needs_cupy() -> str | None:
    """Why CuPy is left out; None if it isn't."""
    return needs_gpu() or _missing("cupy", lambda cupy: bool(cupy.is_available()))


def _missing(module: str, sees_gpu: Callable[[Any], bool]) -> str | None:
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    try:
        return None if sees_gpu(importlib.import_module(module)) else f"{module} sees no GPU"
    except Exception as error:  # a broken installation can raise anything
        return f"{module} can't be used: {type(error).__name__}: {error}"


def _host_matrix(problem: Problem) -> Any:
    """SciPy's matrix of a problem, padding cut off."""
    topology = problem.topology()
    offsets, columns = np.asarray(topology.row_offsets), np.asarray(topology.column_indices)
    values = problem.operands()["values"][: topology.nnz]
    parts = (values, columns[: topology.nnz], offsets)
    return scipy.sparse.csr_array(parts, shape=topology.shape)


def scipy_spmm(problem: Problem, dtype: str, passed: str) -> Program:
    """The product of a `scipy.sparse.csr_array`, on one thread."""
    matrix, x = _host_matrix(problem), problem.operands()["x"]
    return Program(
        function=lambda matrix, x: matrix @ x,
        operands=lambda: (matrix.copy(), x.copy()),
        nbytes=matrix.data.nbytes + matrix.indices.nbytes + x.nbytes,
        wait=lambda out: out,
        results=lambda out: (np.asarray(out, np.float64),),
    )


def cupy_spmm(problem: Problem, dtype: str, passed: str) -> Program:
    """The product of a `cupyx.scipy.sparse.csr_matrix`: cuSPARSE; x by columns, as it likes it."""
    cupy = importlib.import_module("cupy")
    sparse = importlib.import_module("cupyx.scipy.sparse")
    host, x = _host_matrix(problem), problem.operands()["x"]

    def operands() -> tuple[Any, ...]:
        parts = (cupy.asarray(host.data), cupy.asarray(host.indices), cupy.asarray(host.indptr))
        return sparse.csr_matrix(parts, shape=host.shape), cupy.asarray(x, order="F")

    return Program(
        function=lambda matrix, x: matrix @ x,
        operands=operands,
        nbytes=host.data.nbytes + host.indices.nbytes + x.nbytes,
        wait=lambda out: cupy.cuda.Device().synchronize(),
        results=lambda out: (cupy.asnumpy(out).astype(np.float64),),
    )


# ---- PyTorch, which calls cuSPARSE ----


class _Pattern:
    """A pattern and its transpose on the GPU."""

    def __init__(self, torch: Any, topology: Topology):
        nnz = topology.nnz
        self._torch = torch
        self.shape = topology.shape
        self._rows, self._transposed = (
            (self._move(p.row_offsets, np.int32), self._move(p.column_indices[:nnz], np.int32))
            for p in (topology.pattern, topology.transposed_pattern)
        )
        self.permutation = self._move(topology.permutation[:nnz], np.int64)

    def _move(self, array: Any, dtype: Any) -> Any:
        return self._torch.from_numpy(np.array(array, dtype)).cuda()

    def matrix(self, values: Any) -> Any:
        return self._torch.sparse_csr_tensor(*self._rows, values, size=self.shape)

    def transposed(self, values: Any) -> Any:
        """Of values in the order of the transposed pattern."""
        return self._torch.sparse_csr_tensor(*self._transposed, values, size=self.shape[::-1])

    def copy(self) -> _Pattern:
        other = object.__new__(_Pattern)
        other._torch, other.shape = self._torch, self.shape
        other._rows = tuple(x.clone() for x in self._rows)
        other._transposed = tuple(x.clone() for x in self._transposed)
        other.permutation = self.permutation.clone()
        return other


def _torch_program(
    torch: Any,
    function: Callable[..., Any],
    operands: Callable[[], tuple[Any, ...]],
    arrays: Sequence[np.ndarray],
    topology: Topology,
) -> Program:
    """Of a function that gives a sequence of tensors."""
    pattern_bytes = 4 * (topology.nnz + topology.shape[0] + 1)

    def results(out: Sequence[Any]) -> tuple[np.ndarray, ...]:
        return tuple(x.float().cpu().numpy().astype(np.float64) for x in out)

    return Program(
        function=function,
        operands=operands,
        nbytes=sum(array.nbytes for array in arrays) + pattern_bytes,
        wait=lambda out: torch.cuda.synchronize(),
        results=results,
    )


def torch_spmm(problem: Problem, dtype: str, passed: str) -> Program:
    """The product of a CSR tensor.

    Its gradients are the transposed product, for which the transposed matrix is there already with
    its values, and the sampled product.
    """
    torch = importlib.import_module("torch")
    topology, kind = problem.topology(), getattr(torch, dtype)
    host = problem.operands()
    values, x = host["values"][: topology.nnz], host["x"]
    pattern = _Pattern(torch, topology)

    def operands() -> tuple[Any, ...]:
        own = pattern.copy()
        v, dense = (torch.from_numpy(array.copy()).cuda().to(kind) for array in (values, x))
        if passed == "forward":
            return own.matrix(v), dense
        return own.matrix(v), own.transposed(v[own.permutation]), dense

    def forward(a: Any, x: Any) -> tuple[Any, ...]:
        return (a @ x,)

    def gradient(a: Any, a_transposed: Any, x: Any) -> tuple[Any, ...]:
        y = a @ x
        _loss, dy = (y * y).sum(), 2 * y
        return torch.sparse.sampled_addmm(a, dy, x.t(), beta=0.0).values(), a_transposed @ dy

    function = forward if passed == "forward" else gradient
    return _torch_program(torch, function, operands, (values, x), topology)


def torch_sddmm(problem: Problem, dtype: str, passed: str) -> Program:
    """`torch.sparse.sampled_addmm`; its gradients are products of the result and its transpose."""
    torch = importlib.import_module("torch")
    topology, host = problem.topology(), problem.operands()
    pattern = _Pattern(torch, topology)

    def operands() -> tuple[Any, ...]:
        own = pattern.copy()
        ones = own.matrix(torch.ones(topology.nnz, device="cuda", dtype=torch.float32))
        x, y = (torch.from_numpy(host[name].copy()).cuda() for name in ("x", "y"))
        return own, ones, x, y

    def forward(own: _Pattern, ones: Any, x: Any, y: Any) -> tuple[Any, ...]:
        return (torch.sparse.sampled_addmm(ones, x, y.t(), beta=0.0).values(),)

    def gradient(own: _Pattern, ones: Any, x: Any, y: Any) -> tuple[Any, ...]:
        values = forward(own, ones, x, y)[0]
        _loss, dv = (values * values).sum(), 2 * values
        return own.matrix(dv) @ y, own.transposed(dv[own.permutation]) @ x

    function = forward if passed == "forward" else gradient
    return _torch_program(torch, function, operands, (host["x"], host["y"]), topology)
