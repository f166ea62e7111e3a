"""Programs of SciPy, PyTorch and CuPy, which are imported only where they are asked for."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import scipy.sparse

from benchmarks.problems import Problem
from jaxsparse.timing import Program
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


def needs_tokamax() -> str | None:
    """Why tokamax is left out; None if it isn't."""
    return needs_gpu() or _missing("tokamax", lambda tokamax: True)


def needs_flax() -> str | None:
    """Why Flax is left out; None if it isn't."""
    return _missing("flax", lambda flax: True)


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


def _nbytes(*arrays: Any) -> int:
    return sum(int(array.nbytes) for array in arrays)


def scipy_spmm(problem: Problem, dtype: str, passed: str) -> Program:
    """The product of a `scipy.sparse.csr_array`, on one thread."""
    matrix, x = _host_matrix(problem), problem.operands()["x"]
    return Program(
        function=lambda matrix, x: matrix @ x,
        operands=lambda: (matrix.copy(), x.copy()),
        bytes_read=_nbytes(matrix.data, matrix.indices, matrix.indptr, x),
        wait=lambda out: out,
        results=lambda out: (np.asarray(out),),
    )


def cupy_spmm(problem: Problem, dtype: str, passed: str) -> Program:
    """The product of a `cupyx.scipy.sparse.csr_matrix`: cuSPARSE; x by columns, as it likes it."""
    cupy = importlib.import_module("cupy")
    sparse = importlib.import_module("cupyx.scipy.sparse")
    host = _host_matrix(problem)
    parts = [cupy.asarray(part) for part in (host.data, host.indices, host.indptr)]
    x = cupy.asarray(problem.operands()["x"], order="F")

    def operands() -> tuple[Any, ...]:
        own = tuple(part.copy() for part in parts)
        return sparse.csr_matrix(own, shape=host.shape), x.copy(order="F")

    return Program(
        function=lambda matrix, x: matrix @ x,
        operands=operands,
        bytes_read=_nbytes(*parts, x),
        wait=lambda out: cupy.cuda.Device().synchronize(),
        results=lambda out: (cupy.asnumpy(out),),
    )


# ---- PyTorch, which calls cuSPARSE ----


class _Pattern:
    """A pattern and, if it is asked for, its transpose on the GPU."""

    def __init__(self, torch: Any, topology: Topology, *, transpose: bool):
        self._torch = torch
        self.shape = topology.shape
        nnz = topology.nnz
        patterns = (topology.pattern, topology.transposed_pattern)[: 2 if transpose else 1]
        # Offsets and columns of the rows, then of the columns, then the permutation.
        self.arrays = [
            self._move(array)
            for pattern in patterns
            for array in (pattern.row_offsets, pattern.column_indices[:nnz])
        ]
        if transpose:
            self.arrays.append(self._move(topology.permutation[:nnz], np.int64))

    def _move(self, array: Any, dtype: Any = np.int32) -> Any:
        return self._torch.from_numpy(np.array(array, dtype)).cuda()

    @property
    def permutation(self) -> Any:
        return self.arrays[4]

    def matrix(self, values: Any) -> Any:
        return self._torch.sparse_csr_tensor(*self.arrays[:2], values, size=self.shape)

    def transposed(self, values: Any) -> Any:
        """Of values in the order of the transposed pattern."""
        return self._torch.sparse_csr_tensor(*self.arrays[2:4], values, size=self.shape[::-1])

    def copy(self) -> _Pattern:
        other = object.__new__(_Pattern)
        other._torch, other.shape = self._torch, self.shape
        other.arrays = [x.clone() for x in self.arrays]
        return other


def _torch_program(
    torch: Any,
    function: Callable[..., Any],
    operands: Callable[[], tuple[Any, ...]],
    read: Sequence[Any],
) -> Program:
    """Of a function that gives a sequence of tensors, and of all tensors that it reads."""

    def results(out: Sequence[Any]) -> tuple[np.ndarray, ...]:
        return tuple(x.float().cpu().numpy() for x in out)

    return Program(
        function=function,
        operands=operands,
        bytes_read=sum(x.numel() * x.element_size() for x in read),
        wait=lambda out: torch.cuda.synchronize(),
        results=results,
    )


def _torch_pullback(torch: Any, a: Any, a_transposed: Any, x: Any, dy: Any) -> tuple[Any, ...]:
    return torch.sparse.sampled_addmm(a, dy, x.t(), beta=0.0).values(), a_transposed @ dy


def torch_pullback(problem: Problem, dtype: str, passed: str) -> Program:
    """The gradients of a product: the sampled one, and that by a transposed matrix made before."""
    torch = importlib.import_module("torch")
    topology, host = problem.topology(), problem.operands()
    arrays = (host["values"][: topology.nnz], host["x"], host["dy"])
    values, x, dy = (torch.from_numpy(array.copy()).cuda() for array in arrays)
    pattern = _Pattern(torch, topology, transpose=True)

    def operands() -> tuple[Any, ...]:
        own, v = pattern.copy(), values.clone()
        return own.matrix(v), own.transposed(v[own.permutation]), x.clone(), dy.clone()

    def pullback(*operands: Any) -> tuple[Any, ...]:
        return _torch_pullback(torch, *operands)

    # The sampled product reads no values: it writes as many.
    return _torch_program(torch, pullback, operands, [*pattern.arrays[:4], values, x, dy])


def torch_spmm(problem: Problem, dtype: str, passed: str) -> Program:
    """The product of a CSR tensor.

    Its gradients are the transposed product, for which the transposed matrix is there already with
    its values, and the sampled product.
    """
    torch = importlib.import_module("torch")
    topology, kind = problem.topology(), getattr(torch, dtype)
    host, is_forward = problem.operands(), passed == "forward"
    arrays = (host["values"][: topology.nnz], host["x"])
    values, x = (torch.from_numpy(array.copy()).cuda().to(kind) for array in arrays)
    pattern = _Pattern(torch, topology, transpose=not is_forward)

    def operands() -> tuple[Any, ...]:
        own, v = pattern.copy(), values.clone()
        if is_forward:
            return own.matrix(v), x.clone()
        return own.matrix(v), own.transposed(v[own.permutation]), x.clone()

    def forward(a: Any, x: Any) -> tuple[Any, ...]:
        return (a @ x,)

    def gradient(a: Any, a_transposed: Any, x: Any) -> tuple[Any, ...]:
        y = a @ x
        _loss, dy = (y * y).sum(), 2 * y
        return _torch_pullback(torch, a, a_transposed, x, dy)

    # The transposed matrix has values of its own; the permutation has done its work.
    read = [*pattern.arrays[:4], x, *([values] if is_forward else [values, values])]
    return _torch_program(torch, forward if is_forward else gradient, operands, read)


def torch_sddmm(problem: Problem, dtype: str, passed: str) -> Program:
    """`torch.sparse.sampled_addmm`; its gradients are products of the result and its transpose."""
    torch = importlib.import_module("torch")
    topology, host, is_forward = problem.topology(), problem.operands(), passed == "forward"
    pattern = _Pattern(torch, topology, transpose=not is_forward)
    x, y = (torch.from_numpy(host[name].copy()).cuda() for name in ("x", "y"))
    ones = torch.ones(topology.nnz, device="cuda", dtype=torch.float32)

    def operands() -> tuple[Any, ...]:
        own = pattern.copy()
        return own, own.matrix(ones.clone()), x.clone(), y.clone()

    def forward(own: _Pattern, ones: Any, x: Any, y: Any) -> tuple[Any, ...]:
        return (torch.sparse.sampled_addmm(ones, x, y.t(), beta=0.0).values(),)

    def gradient(own: _Pattern, ones: Any, x: Any, y: Any) -> tuple[Any, ...]:
        values = forward(own, ones, x, y)[0]
        _loss, dv = (values * values).sum(), 2 * values
        return own.matrix(dv) @ y, own.transposed(dv[own.permutation]) @ x

    read = [*pattern.arrays, ones, x, y]
    return _torch_program(torch, forward if is_forward else gradient, operands, read)
