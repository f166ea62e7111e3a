"""Programs of cuDNN's own interface, by ctypes: every algorithm forced, the input not multiplied.

PyTorch does not say which algorithm it wants, nor skips the input's product. Here both are chosen,
and a batch can be filled up to one that a kernel likes better. What cuDNN refuses raises
`CudnnError` with its status. PyTorch brings the library, and the memory.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.recurrent.problems import Problem
from benchmarks.recurrent.torch_programs import (
    as_float64,
    carry_of,
    nbytes,
    to_device,
    torch_module,
)
from jaxsparse.timing import Program

ALGORITHMS = {"standard": 0, "static": 1, "dynamic": 2, "small-h": 3}
CELLS = {"RNN": 1, "LSTM": 2, "GRU": 3}  # RNN with tanh
DATA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 9}
# 16-bit numbers on tensor cores, summed in float32; float32 by multiply-adds, not TF32.
MATH_TYPES = {"float32": 3, "float16": 1, "bfloat16": 1}
_UNIDIRECTIONAL, _SKIP_INPUT, _NOT_PADDED = 0, 1, 0
_TWO_BIASES = 2  # left at 0; persistent algorithms take no other mode
_PACKED_BY_STEPS = 1
_INFERENCE, _TRAINING = 0, 1
_ADD_GRADIENT = 0  # there is no other mode: the gradient of the weights is cleared beforehand

MOST_DYNAMIC_UNITS = 2304
"""Above them the dynamic algorithm is not tried: it would compile a kernel that can't fit."""

_P, _I, _N = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_OUT_P, _OUT_N, _INTS = ctypes.POINTER(_P), ctypes.POINTER(_N), ctypes.POINTER(_I)
_SPACES = [_N, _P] * 3  # weights, work, reserve: bytes and address

# function -> types of its arguments in cuDNN 9
SIGNATURES: dict[str, list[Any]] = {
    "cudnnCreate": [_OUT_P],
    "cudnnSetStream": [_P, _P],
    "cudnnCreateRNNDescriptor": [_OUT_P],
    "cudnnCreateRNNDataDescriptor": [_OUT_P],
    "cudnnCreateTensorDescriptor": [_OUT_P],
    "cudnnCreateDropoutDescriptor": [_OUT_P],
    "cudnnDestroyRNNDescriptor": [_P],
    "cudnnDestroyRNNDataDescriptor": [_P],
    "cudnnDestroyTensorDescriptor": [_P],
    "cudnnDestroyDropoutDescriptor": [_P],
    "cudnnSetDropoutDescriptor": [_P, _P, ctypes.c_float, _P, _N, ctypes.c_ulonglong],
    "cudnnSetRNNDescriptor_v8": [_P, *[_I] * 12, _P, ctypes.c_uint32],
    "cudnnSetRNNDataDescriptor": [_P, *[_I] * 5, _INTS, _P],
    "cudnnSetTensorNdDescriptor": [_P, _I, _I, _INTS, _INTS],
    "cudnnBuildRNNDynamic": [_P, _P, _I],
    "cudnnGetRNNTempSpaceSizes": [_P, _P, _I, _P, _OUT_N, _OUT_N],
    "cudnnGetRNNWeightSpaceSize": [_P, _P, _OUT_N],
    "cudnnGetRNNWeightParams": [_P, _P, _I, _N, _P, _I, _P, _OUT_P, _P, _OUT_P],
    "cudnnRNNForward": [_P, _P, _I, *[_P] * 11, *_SPACES],
    "cudnnRNNBackwardData_v8": [*[_P] * 16, *_SPACES],
    "cudnnRNNBackwardWeights_v8": [_P, _P, _I, *[_P] * 7, *_SPACES],
}


class CudnnError(RuntimeError):
    """A call that cuDNN refused."""


class Library:
    """The functions of libcudnn, each called by name; a status other than success raises."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions
        for name, types in SIGNATURES.items():
            getattr(functions, name).argtypes = types
        functions.cudnnGetErrorString.restype = ctypes.c_char_p
        functions.cudnnGetLastErrorString.argtypes = [ctypes.c_char_p, _N]
        functions.cudnnGetLastErrorString.restype = None
        self.handle = self.made("cudnnCreate")

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the table."""
        status = getattr(self._functions, name)(*arguments)
        if status:
            text = self._functions.cudnnGetErrorString(status).decode()
            details = ctypes.create_string_buffer(1024)
            self._functions.cudnnGetLastErrorString(details, len(details))
            why = " ".join(details.value.decode(errors="replace").split())
            raise CudnnError(f"{name}: {text} ({status}) {why}".strip())

    def made(self, name: str) -> ctypes.c_void_p:
        """What a function makes that takes nothing."""
        out = _P()
        self.call(name, ctypes.byref(out))
        return out


@functools.cache
def _library() -> Library:
    """The one that PyTorch has loaded."""
    torch = torch_module()
    library = Library(ctypes.CDLL(f"libcudnn.so.{torch.backends.cudnn.version() // 10000}"))
    stream = torch.cuda.current_stream().cuda_stream
    library.call("cudnnSetStream", library.handle, stream)
    return library


def _ints(*values: int) -> Any:
    return (_I * len(values))(*values)


class Layer:
    """The descriptors of a layer, and the sizes of the arrays that cuDNN wants for it."""

    def __init__(
        self, library: Library, problem: Problem, dtype: str, algorithm: str, batch: int
    ) -> None:
        self.library, self.gates = library, problem.gates
        kind, h = DATA_TYPES[dtype], problem.hidden
        self.dropout = self._descriptor("Dropout")
        library.call("cudnnSetDropoutDescriptor", self.dropout, library.handle, 0.0, None, 0, 0)
        self.rnn = self._descriptor("RNN")
        library.call(
            "cudnnSetRNNDescriptor_v8",
            self.rnn,
            ALGORITHMS[algorithm],
            CELLS[problem.cell],
            _TWO_BIASES,
            _UNIDIRECTIONAL,
            _SKIP_INPUT,
            kind,
            DATA_TYPES["float32"],
            MATH_TYPES[dtype],
            h,  # of the input, as it is not multiplied
            h,
            h,  # no projection
            1,
            self.dropout,
            _NOT_PADDED,
        )
        lengths = _ints(*[problem.length] * batch)
        self.sequences = self._descriptor("RNNData")
        library.call(
            "cudnnSetRNNDataDescriptor",
            self.sequences,
            kind,
            _PACKED_BY_STEPS,
            problem.length,
            batch,
            h,
            lengths,
            None,
        )
        self.state = self._descriptor("Tensor")
        sizes, strides = _ints(1, batch, h), _ints(batch * h, h, 1)
        library.call("cudnnSetTensorNdDescriptor", self.state, kind, 3, sizes, strides)
        if algorithm == "dynamic":
            library.call("cudnnBuildRNNDynamic", library.handle, self.rnn, batch)

    def _descriptor(self, kind: str) -> ctypes.c_void_p:
        made = self.library.made(f"cudnnCreate{kind}Descriptor")
        weakref.finalize(self, self.library.call, f"cudnnDestroy{kind}Descriptor", made)
        return made

    def weight_bytes(self) -> int:
        """Of all weights."""
        size = _N()
        self.library.call(
            "cudnnGetRNNWeightSpaceSize", self.library.handle, self.rnn, ctypes.byref(size)
        )
        return size.value

    def work_bytes(self, mode: int) -> tuple[int, int]:
        """Of what a call needs for itself, and of what it keeps for the way back."""
        work, reserve = _N(), _N()
        self.library.call(
            "cudnnGetRNNTempSpaceSizes",
            self.library.handle,
            self.rnn,
            mode,
            self.sequences,
            ctypes.byref(work),
            ctypes.byref(reserve),
        )
        return work.value, reserve.value

    def weight_offsets(self, address: int) -> list[int]:
        """In bytes from an address of weights: the recurrent matrix of each gate, row by row."""
        matrix, bias = self._descriptor("Tensor"), self._descriptor("Tensor")
        offsets = []
        for gate in range(self.gates, 2 * self.gates):  # those of the input come first
            at, bias_at = _P(), _P()
            self.library.call(
                "cudnnGetRNNWeightParams",
                self.library.handle,
                self.rnn,
                0,
                self.weight_bytes(),
                address,
                gate,
                matrix,
                ctypes.byref(at),
                bias,
                ctypes.byref(bias_at),
            )
            offsets.append((at.value or 0) - address)
        return offsets


def scan(problem: Problem, dtype: str, passed: str, *, algorithm: str, fill: int = 1) -> Program:
    """A layer by one algorithm, its batch filled up to a multiple of ``fill``.

    The rows that fill it repeat others, and have no part in the gradient.
    """
    if algorithm == "dynamic" and problem.hidden > MOST_DYNAMIC_UNITS:
        raise CudnnError(f"not tried above {MOST_DYNAMIC_UNITS} units: its kernel would not fit")
    torch, library, is_forward = torch_module(), _library(), passed == "forward"
    batch = -(-problem.batch // fill) * fill
    layer = Layer(library, problem, dtype, algorithm, batch)
    mode = _INFERENCE if is_forward else _TRAINING
    work_bytes, reserve_bytes = layer.work_bytes(mode)
    work, reserve, weights = (
        torch.zeros(size, dtype=torch.uint8, device="cuda")
        for size in (work_bytes, reserve_bytes, layer.weight_bytes())
    )
    h, item = problem.hidden, getattr(torch, dtype).itemsize
    gates = [
        slice(offset, offset + h * h * item) for offset in layer.weight_offsets(weights.data_ptr())
    ]
    host = problem.operands()
    matrices = to_device(host["weights"], dtype).split(h, 1)
    for gate, matrix in zip(gates, matrices, strict=True):
        weights[gate] = matrix.t().contiguous().view(torch.uint8).flatten()
    rows = np.arange(batch) % problem.batch
    x = to_device(host["x"][:, rows], dtype)
    carry = tuple(s[torch.from_numpy(rows).cuda()] for s in carry_of(problem, dtype))
    dy = to_device(host["cotangent"][:, rows] * (np.arange(batch) < problem.batch)[:, None], dtype)
    lengths = torch.full((batch,), problem.length, dtype=torch.int32, device="cuda")
    y, dx = torch.empty_like(x), torch.empty_like(x)
    last, d_carry = ([torch.empty_like(s) for s in carry] for _ in range(2))
    d_weights = torch.empty_like(weights)

    def pointers(states: Sequence[Any]) -> tuple[Any, Any]:
        """Of the state, and of the cell state if there is one."""
        return states[-1].data_ptr(), states[0].data_ptr() if len(states) > 1 else None

    def spaces(weights: Any) -> list[int]:
        return [n for t in (weights, work, reserve) for n in (t.numel(), t.data_ptr())]

    def forward(weights: Any, x: Any, carry: Any, dy: Any) -> Any:
        (hx, cx), (hy, cy) = pointers(carry), pointers(last)
        library.call(
            "cudnnRNNForward",
            library.handle,
            layer.rnn,
            mode,
            lengths.data_ptr(),
            *(layer.sequences, x.data_ptr(), layer.sequences, y.data_ptr()),
            *(layer.state, hx, hy, layer.state, cx, cy),
            *spaces(weights),
        )
        return (y,)

    def gradient(weights: Any, x: Any, carry: Any, dy: Any) -> Any:
        forward(weights, x, carry, dy)
        (hx, cx), (dhx, dcx) = pointers(carry), pointers(d_carry)
        library.call(
            "cudnnRNNBackwardData_v8",
            library.handle,
            layer.rnn,
            lengths.data_ptr(),
            *(layer.sequences, y.data_ptr(), dy.data_ptr(), layer.sequences, dx.data_ptr()),
            *(layer.state, hx, None, dhx, layer.state, cx, None, dcx),
            *spaces(weights),
        )
        d_weights.zero_()
        library.call(
            "cudnnRNNBackwardWeights_v8",
            library.handle,
            layer.rnn,
            _ADD_GRADIENT,
            lengths.data_ptr(),
            *(layer.sequences, x.data_ptr(), layer.state, hx, layer.sequences, y.data_ptr()),
            *spaces(d_weights),
        )
        return d_weights, dx, *d_carry

    def results(out: Any) -> tuple[np.ndarray, ...]:
        if is_forward:
            return (as_float64(out[0][:, : problem.batch]),)
        made, d_input, *d_states = out
        kind = getattr(torch, dtype)
        parts = [as_float64(made[gate].view(kind).view(h, h)).T for gate in gates]
        return (
            np.concatenate(parts, 1),
            as_float64(d_input[:, : problem.batch]),
            *(as_float64(s[: problem.batch]) for s in d_states),
        )

    return Program(
        function=forward if is_forward else gradient,
        operands=lambda: (weights.clone(), x.clone(), tuple(s.clone() for s in carry), dy.clone()),
        bytes_read=nbytes([weights, x, *carry, *([] if is_forward else [dy])]),
        wait=lambda out: torch.cuda.synchronize(),
        results=results,
    )
