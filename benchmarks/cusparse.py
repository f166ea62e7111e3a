"""cuSPARSE's own interface, by ctypes: each algorithm of its products can be forced.

PyTorch brings the library, the memory and the stream, but does not say which algorithm it wants.
What cuSPARSE refuses raises `CusparseError`.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from benchmarks.problems import Problem
from benchmarks.torch_arrays import nbytes, to_device, torch_module
from jaxsparse.timing import Program

P, I, N, L = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_int64
_OUT_P, _OUT_N = ctypes.POINTER(P), ctypes.POINTER(N)
# Handle, both operations, alpha, the matrices, beta, the result, type of sums, algorithm.
_PRODUCT = [P, I, I, P, P, P, P, P, I, I]

# function -> types of its arguments in cuSPARSE 12
SIGNATURES: dict[str, list[Any]] = {
    "cusparseCreate": [_OUT_P],
    "cusparseSetStream": [P, P],
    "cusparseCreateCsr": [_OUT_P, L, L, L, P, P, P, I, I, I, I],
    "cusparseCreateDnMat": [_OUT_P, L, L, L, P, I, I],
    "cusparseDestroySpMat": [P],
    "cusparseDestroyDnMat": [P],
    "cusparseSpMM_bufferSize": [*_PRODUCT, _OUT_N],
    "cusparseSpMM_preprocess": [*_PRODUCT, P],
    "cusparseSpMM": [*_PRODUCT, P],
}
_INT32, _FROM_ZERO, _BY_ROWS, _AS_IT_IS = 2, 0, 2, 0
_TYPES = {"float32": 0, "bfloat16": 14, "float16": 2}
ALGORITHMS = {1: 4, 2: 6, 3: 12}
"""Of products by rows, by their numbers: the values of ``CUSPARSE_SPMM_CSR_ALG1`` and others."""


class CusparseError(RuntimeError):
    """A call that cuSPARSE refused."""


class Library:
    """The functions of libcusparse, each called by name; a status other than success raises."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions
        for name, types in SIGNATURES.items():
            getattr(functions, name).argtypes = types
        functions.cusparseGetErrorString.argtypes = [I]
        functions.cusparseGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the table."""
        status = getattr(self._functions, name)(*arguments)
        if status:
            text = self._functions.cusparseGetErrorString(status).decode()
            raise CusparseError(f"{name}: {text} ({status})")

    def made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """What a function makes, its first argument."""
        out = P()
        self.call(name, ctypes.byref(out), *arguments)
        return out


@functools.cache
def loaded() -> tuple[Library, ctypes.c_void_p]:
    """The one that PyTorch has loaded, and a handle on its stream."""
    torch = torch_module()
    library = Library(ctypes.CDLL("libcusparse.so.12"))
    handle = library.made("cusparseCreate")
    library.call("cusparseSetStream", handle, torch.cuda.current_stream().cuda_stream)
    return library, handle


class _Product:
    """A product of arrays of its own, with what cuSPARSE finds out of the pattern beforehand."""

    def __init__(self, arrays: Any, shape: tuple[int, int], kind: int, algorithm: int):
        torch = torch_module()
        self._arrays = offsets, columns, values, x = [array.clone() for array in arrays]
        self.out = torch.empty(shape[0], x.shape[1], dtype=x.dtype, device="cuda")
        self._library, handle = loaded()
        at = [array.data_ptr() for array in (offsets, columns, values)]
        types = (_INT32, _INT32, _FROM_ZERO, kind)
        self._sparse = self._library.made("cusparseCreateCsr", *shape, columns.numel(), *at, *types)
        self._dense = [
            self._library.made(
                "cusparseCreateDnMat",
                *array.shape,
                array.shape[1],
                array.data_ptr(),
                kind,
                _BY_ROWS,
            )
            for array in (x, self.out)
        ]
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        of_x, of_out = self._dense
        one, zero = ctypes.addressof(self._one), ctypes.addressof(self._zero)
        operands = (one, self._sparse, of_x, zero, of_out, _TYPES["float32"], algorithm)
        self._arguments = (handle, _AS_IT_IS, _AS_IT_IS, *operands)
        size = N()
        self._library.call("cusparseSpMM_bufferSize", *self._arguments, ctypes.byref(size))
        self._buffer = torch.empty(max(size.value, 1), dtype=torch.uint8, device="cuda")
        self._library.call("cusparseSpMM_preprocess", *self._arguments, self._buffer.data_ptr())

    def __call__(self) -> tuple[Any, ...]:
        self._library.call("cusparseSpMM", *self._arguments, self._buffer.data_ptr())
        return (self.out,)

    def __del__(self) -> None:
        for matrix in getattr(self, "_dense", ()):
            self._library.call("cusparseDestroyDnMat", matrix)
        if hasattr(self, "_sparse"):
            self._library.call("cusparseDestroySpMat", self._sparse)


def cusparse_spmm(problem: Problem, dtype: str, passed: str, *, algorithm: int) -> Program:
    """The product by one of cuSPARSE's algorithms, x by rows, the pattern looked at before."""
    torch = torch_module()
    topology, host = problem.topology(), problem.operands()
    pattern = (topology.row_offsets, topology.column_indices[: topology.nnz])
    arrays = [to_device(array.__array__(), "int32") for array in pattern]
    arrays += [to_device(array, dtype) for array in (host["values"][: topology.nnz], host["x"])]
    parts = (topology.shape, _TYPES[dtype], ALGORITHMS[algorithm])
    return Program(
        function=lambda product: product(),
        operands=lambda: (_Product(arrays, *parts),),
        bytes_read=nbytes(arrays),
        wait=lambda out: torch.cuda.synchronize(),
        results=lambda out: tuple(x.float().cpu().numpy() for x in out),
    )
