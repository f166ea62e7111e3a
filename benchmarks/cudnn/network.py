"""A recurrent network as cuDNN sees it: its descriptors, its weights, its calls."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.cudnn.library import CudnnError, I, Library, N, P
from benchmarks.torch_arrays import torch_module

ALGORITHMS = {"standard": 0, "static": 1, "dynamic": 2, "small-h": 3}
CELLS = {"RNN": 1, "LSTM": 2, "GRU": 3}  # RNN with tanh
GATES = {"RNN": 1, "LSTM": 4, "GRU": 3}
DATA_TYPES = {"float32": 0, "tf32": 0, "float16": 2, "bfloat16": 9}
# 16-bit numbers and TF32 on tensor cores, summed in float32; float32 by multiply-adds.
MATH_TYPES = {"float32": 3, "tf32": 0, "float16": 1, "bfloat16": 1}
_LINEAR_INPUT, _SKIP_INPUT = 0, 1
_NOT_PADDED = 0
_TWO_BIASES = 2  # persistent algorithms take no other mode
_PACKED_BY_STEPS = 1
_INFERENCE, _TRAINING = 0, 1
_ADD_GRADIENT = 0  # there is no other mode: the gradient of the weights is cleared beforehand

MOST_DYNAMIC_UNITS = 2304
"""Above them the dynamic algorithm is not tried: it would compile a kernel that can't fit."""


@dataclass(frozen=True)
class Form:
    """Sizes of a network.

    Args:
        cell: a key of ``CELLS``.
        features: of the input, which as many weights multiply; None if it is not multiplied, but
            given to every gate: then it has as many features as there are units.
    """

    cell: str
    hidden: int
    batch: int
    length: int
    layers: int = 1
    directions: int = 1
    features: int | None = None


class Slots(NamedTuple):
    """Where the weights of a layer and direction lie, in bytes from the first: gate by gate.

    Matrices lie row by row, (hidden, inputs) or (hidden, hidden).
    """

    inputs: list[int]
    recurrent: list[int]
    biases: list[int]  # of the inputs' products; what is beside them stays 0


class Network:
    """The descriptors of a network, and the sizes of the arrays that cuDNN wants for it."""

    def __init__(self, library: Library, form: Form, dtype: str, algorithm: str) -> None:
        self.library, self.form = library, form
        kind, h = DATA_TYPES[dtype], form.hidden
        features = form.features or h
        self.dropout = self._descriptor("Dropout")
        library.call("cudnnSetDropoutDescriptor", self.dropout, library.handle, 0.0, None, 0, 0)
        self.rnn = self._descriptor("RNN")
        library.call(
            "cudnnSetRNNDescriptor_v8",
            self.rnn,
            ALGORITHMS[algorithm],
            CELLS[form.cell],
            _TWO_BIASES,
            form.directions - 1,
            _SKIP_INPUT if form.features is None else _LINEAR_INPUT,
            kind,
            DATA_TYPES["float32"],
            MATH_TYPES[dtype],
            features,
            h,
            h,  # no projection
            form.layers,
            self.dropout,
            _NOT_PADDED,
        )
        self.inputs = self._sequences(kind, features)
        self.outputs = self._sequences(kind, form.directions * h)
        self.state = self._descriptor("Tensor")
        states = form.layers * form.directions
        sizes, strides = _ints(states, form.batch, h), _ints(form.batch * h, h, 1)
        library.call("cudnnSetTensorNdDescriptor", self.state, kind, 3, sizes, strides)
        if algorithm == "dynamic":
            library.call("cudnnBuildRNNDynamic", library.handle, self.rnn, form.batch)

    def _sequences(self, kind: int, features: int) -> ctypes.c_void_p:
        made = self._descriptor("RNNData")
        lengths = _ints(*[self.form.length] * self.form.batch)
        self.library.call(
            "cudnnSetRNNDataDescriptor",
            made,
            kind,
            _PACKED_BY_STEPS,
            self.form.length,
            self.form.batch,
            features,
            lengths,
            None,
        )
        return made

    def _descriptor(self, kind: str) -> ctypes.c_void_p:
        made = self.library.made(f"cudnnCreate{kind}Descriptor")
        weakref.finalize(self, self.library.call, f"cudnnDestroy{kind}Descriptor", made)
        return made

    def weight_bytes(self) -> int:
        """Of all weights."""
        size = N()
        self.library.call(
            "cudnnGetRNNWeightSpaceSize", self.library.handle, self.rnn, ctypes.byref(size)
        )
        return size.value

    def work_bytes(self, mode: int) -> tuple[int, int]:
        """Of what a call needs for itself, and of what it keeps for the way back."""
        work, reserve = N(), N()
        self.library.call(
            "cudnnGetRNNTempSpaceSizes",
            self.library.handle,
            self.rnn,
            mode,
            self.inputs,
            ctypes.byref(work),
            ctypes.byref(reserve),
        )
        return work.value, reserve.value

    def slots(self, address: int, layer: int = 0, direction: int = 0) -> Slots:
        """Of the weights that lie at an address."""
        matrix, bias = self._descriptor("Tensor"), self._descriptor("Tensor")
        total, gates = self.weight_bytes(), GATES[self.form.cell]

        def slot(gate: int) -> tuple[int, int]:
            at, bias_at = P(), P()
            self.library.call(
                "cudnnGetRNNWeightParams",
                self.library.handle,
                self.rnn,
                layer * self.form.directions + direction,
                total,
                address,
                gate,  # those of the input come first
                matrix,
                ctypes.byref(at),
                bias,
                ctypes.byref(bias_at),
            )
            return (at.value or 0) - address, (bias_at.value or 0) - address

        of_inputs, recurrent = (
            [slot(gate) for gate in range(first, first + gates)] for first in (0, gates)
        )
        return Slots(
            [at for at, _ in of_inputs], [at for at, _ in recurrent], [at for _, at in of_inputs]
        )


class Calls:
    """Forward passes and gradients of a network, and the memory that they work in.

    States and inputs are tensors as cuDNN has them: ``x (length, batch, features)``, carries
    ``(layers * directions, batch, hidden)``, the cell state before the state.
    """

    def __init__(self, network: Network, *, training: bool) -> None:
        self.network, self._torch = network, torch_module()
        self._mode = _TRAINING if training else _INFERENCE
        form, torch = network.form, self._torch
        self._work, self._reserve = map(self._bytes, network.work_bytes(self._mode))
        self._lengths = torch.full((form.batch,), form.length, dtype=torch.int32, device="cuda")

    def _bytes(self, count: int) -> Any:
        return self._torch.zeros(count, dtype=self._torch.uint8, device="cuda")

    def weights(self) -> Any:
        """All of them, as bytes, 0."""
        return self._bytes(self.network.weight_bytes())

    def _spaces(self, weights: Any) -> list[int]:
        tensors = (weights, self._work, self._reserve)
        return [n for t in tensors for n in (t.numel(), t.data_ptr())]

    def forward(self, weights: Any, x: Any, carry: Sequence[Any]) -> Any:
        """The outputs of all steps."""
        n, form = self.network, self.network.form
        y = x.new_empty(form.length, form.batch, form.directions * form.hidden)
        (hx, cx), (hy, cy) = (_pointers(states) for states in (carry, _like(carry)))
        n.library.call(
            "cudnnRNNForward",
            n.library.handle,
            n.rnn,
            self._mode,
            self._lengths.data_ptr(),
            *(n.inputs, x.data_ptr(), n.outputs, y.data_ptr()),
            *(n.state, hx, hy, n.state, cx, cy),
            *self._spaces(weights),
        )
        return y

    def gradient(
        self, weights: Any, x: Any, carry: Sequence[Any], cotangent: Any
    ) -> tuple[Any, ...]:
        """Of weights, input, and the leaves of the carry."""
        n, y = self.network, self.forward(weights, x, carry)
        dx, d_carry = self._torch.empty_like(x), _like(carry)
        (hx, cx), (dhx, dcx) = _pointers(carry), _pointers(d_carry)
        n.library.call(
            "cudnnRNNBackwardData_v8",
            n.library.handle,
            n.rnn,
            self._lengths.data_ptr(),
            *(n.outputs, y.data_ptr(), cotangent.data_ptr(), n.inputs, dx.data_ptr()),
            *(n.state, hx, None, dhx, n.state, cx, None, dcx),
            *self._spaces(weights),
        )
        d_weights = self._torch.zeros_like(weights)
        n.library.call(
            "cudnnRNNBackwardWeights_v8",
            n.library.handle,
            n.rnn,
            _ADD_GRADIENT,
            self._lengths.data_ptr(),
            *(n.inputs, x.data_ptr(), n.state, hx, n.outputs, y.data_ptr()),
            *self._spaces(d_weights),
        )
        return d_weights, dx, *d_carry


def check_units(form: Form, algorithm: str) -> None:
    """Raises CudnnError for what would not end well."""
    if algorithm == "dynamic" and form.hidden > MOST_DYNAMIC_UNITS:
        raise CudnnError(f"not tried above {MOST_DYNAMIC_UNITS} units: its kernel would not fit")


def _ints(*values: int) -> Any:
    return (I * len(values))(*values)


def _like(states: Sequence[Any]) -> list[Any]:
    return [s.new_empty(s.shape) for s in states]


def _pointers(states: Sequence[Any]) -> tuple[int, int | None]:
    """Of the state, and of the cell state if there is one."""
    return states[-1].data_ptr(), states[0].data_ptr() if len(states) > 1 else None
