"""cuDNN's own interface to recurrent networks, by ctypes: every algorithm can be forced.

PyTorch does not say which algorithm it wants. What cuDNN refuses raises `CudnnError` with its
status. PyTorch brings the library, and the memory.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from benchmarks.torch_arrays import torch_module

P, I, N = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_OUT_P, _OUT_N, _INTS = ctypes.POINTER(P), ctypes.POINTER(N), ctypes.POINTER(I)
_SPACES = [N, P] * 3  # weights, work, reserve: bytes and address

# function -> types of its arguments in cuDNN 9
SIGNATURES: dict[str, list[Any]] = {
    "cudnnCreate": [_OUT_P],
    "cudnnSetStream": [P, P],
    "cudnnCreateRNNDescriptor": [_OUT_P],
    "cudnnCreateRNNDataDescriptor": [_OUT_P],
    "cudnnCreateTensorDescriptor": [_OUT_P],
    "cudnnCreateDropoutDescriptor": [_OUT_P],
    "cudnnDestroyRNNDescriptor": [P],
    "cudnnDestroyRNNDataDescriptor": [P],
    "cudnnDestroyTensorDescriptor": [P],
    "cudnnDestroyDropoutDescriptor": [P],
    "cudnnSetDropoutDescriptor": [P, P, ctypes.c_float, P, N, ctypes.c_ulonglong],
    "cudnnSetRNNDescriptor_v8": [P, *[I] * 12, P, ctypes.c_uint32],
    "cudnnSetRNNDataDescriptor": [P, *[I] * 5, _INTS, P],
    "cudnnSetTensorNdDescriptor": [P, I, I, _INTS, _INTS],
    "cudnnBuildRNNDynamic": [P, P, I],
    "cudnnGetRNNTempSpaceSizes": [P, P, I, P, _OUT_N, _OUT_N],
    "cudnnGetRNNWeightSpaceSize": [P, P, _OUT_N],
    "cudnnGetRNNWeightParams": [P, P, I, N, P, I, P, _OUT_P, P, _OUT_P],
    "cudnnRNNForward": [P, P, I, *[P] * 11, *_SPACES],
    "cudnnRNNBackwardData_v8": [*[P] * 16, *_SPACES],
    "cudnnRNNBackwardWeights_v8": [P, P, I, *[P] * 7, *_SPACES],
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
        functions.cudnnGetLastErrorString.argtypes = [ctypes.c_char_p, N]
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
        out = P()
        self.call(name, ctypes.byref(out))
        return out


@functools.cache
def loaded() -> Library:
    """The one that PyTorch has loaded."""
    torch = torch_module()
    library = Library(ctypes.CDLL(f"libcudnn.so.{torch.backends.cudnn.version() // 10000}"))
    stream = torch.cuda.current_stream().cuda_stream
    library.call("cudnnSetStream", library.handle, stream)
    return library
