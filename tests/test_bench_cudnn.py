"""cuDNN's own interface, without cuDNN: what the benchmarks call it with."""

from __future__ import annotations

import ctypes

import pytest

from benchmarks.cudnn import library
from benchmarks.cudnn.network import Form, Network
from benchmarks.recurrent import cudnn
from benchmarks.recurrent.problems import GATES, Problem


class Functions:
    """Stands for the library: keeps what it is called with, and answers what a test needs."""

    WEIGHTS_AT, GATE_BYTES = 1 << 40, 4096

    def __init__(self, refused=None):
        self.calls, self.refused, self.made = [], refused, 0

    def __getattr__(self, name):
        def function(*arguments):
            self.calls.append((name, arguments))
            if name == self.refused:
                return 3000
            if name == "cudnnCreate" or name.startswith("cudnnCreate"):
                self.made += 1
                arguments[0]._obj.value = self.made
            if name == "cudnnGetRNNWeightSpaceSize":
                arguments[-1]._obj.value = 12345
            if name == "cudnnGetRNNTempSpaceSizes":
                arguments[-2]._obj.value, arguments[-1]._obj.value = 10, 20
            if name == "cudnnGetRNNWeightParams":
                # Of a layer and direction all matrices come first, then all biases.
                first = self.WEIGHTS_AT + arguments[2] * 16 * self.GATE_BYTES
                arguments[7]._obj.value = first + arguments[5] * self.GATE_BYTES
                arguments[9]._obj.value = first + (8 + arguments[5]) * self.GATE_BYTES
            return 0

        self.__dict__[name] = function
        return function

    @staticmethod
    def cudnnGetErrorString(status):
        return b"CUDNN_STATUS_NOT_SUPPORTED"

    @staticmethod
    def cudnnGetLastErrorString(buffer, size):
        buffer.value = b"no such\n kernel"

    def all_arguments_of(self, name):
        return [
            [getattr(a, "value", a) for a in arguments]
            for called, arguments in self.calls
            if called == name
        ]

    def arguments_of(self, name):
        (found,) = self.all_arguments_of(name)
        return found


@pytest.mark.parametrize(
    ("cell", "dtype", "algorithm", "numbers"),
    [
        ("RNN", "float32", "standard", [0, 1, 2, 0, 1, 0, 0, 3]),
        ("LSTM", "float16", "static", [1, 2, 2, 0, 1, 2, 0, 1]),
        ("GRU", "bfloat16", "dynamic", [2, 3, 2, 0, 1, 9, 0, 1]),
        ("LSTM", "float16", "small-h", [3, 2, 2, 0, 1, 2, 0, 1]),
    ],
)
def test_cudnn_is_told_what_it_is_to_run(cell, dtype, algorithm, numbers):
    functions = Functions()
    form = Form(cell, hidden=32, batch=8, length=7)
    made = Network(library.Library(functions), form, dtype, algorithm)
    given = functions.arguments_of("cudnnSetRNNDescriptor_v8")
    assert len(given) == len(library.SIGNATURES["cudnnSetRNNDescriptor_v8"])
    assert given[1:13] == [*numbers, 32, 32, 32, 1] and given[-1] == 0
    for data in functions.all_arguments_of("cudnnSetRNNDataDescriptor"):
        assert data[1:6] == [numbers[5], 1, 7, 8, 32] and list(data[6]) == [7] * 8
    state = functions.arguments_of("cudnnSetTensorNdDescriptor")
    assert state[1:3] == [numbers[5], 3]
    assert [list(x) for x in state[3:]] == [[1, 8, 32], [256, 32, 1]]
    built = [a for name, a in functions.calls if name == "cudnnBuildRNNDynamic"]
    assert [a[2] for a in built] == ([8] if algorithm == "dynamic" else [])
    assert made.weight_bytes() == 12345 and made.work_bytes(1) == (10, 20)
    gates = GATES[cell]
    assert made.slots(functions.WEIGHTS_AT).recurrent == [
        gate * functions.GATE_BYTES for gate in range(gates, 2 * gates)
    ]
    del made
    names = [name for name, _ in functions.calls]
    for kind in "RNN", "RNNData", "Tensor", "Dropout":
        created, destroyed = (f"cudnn{verb}{kind}Descriptor" for verb in ("Create", "Destroy"))
        assert names.count(created) == names.count(destroyed) > 0


def test_stacks_have_layers_directions_and_products_of_their_inputs():
    functions = Functions()
    form = Form("GRU", 32, batch=3, length=7, layers=5, directions=2, features=20)
    made = Network(library.Library(functions), form, "tf32", "standard")
    given = functions.arguments_of("cudnnSetRNNDescriptor_v8")
    assert given[1:13] == [0, 3, 2, 1, 0, 0, 0, 0, 20, 32, 32, 5]
    widths = [a[5] for a in functions.all_arguments_of("cudnnSetRNNDataDescriptor")]
    assert widths == [20, 64]
    state = functions.arguments_of("cudnnSetTensorNdDescriptor")
    assert [list(x) for x in state[3:]] == [[10, 3, 32], [96, 32, 1]]
    unit = functions.GATE_BYTES
    slots = made.slots(functions.WEIGHTS_AT, 3, 1)  # the eighth of ten
    assert slots.inputs == [(7 * 16 + gate) * unit for gate in (0, 1, 2)]
    assert slots.recurrent == [(7 * 16 + gate) * unit for gate in (3, 4, 5)]
    assert slots.biases == [(7 * 16 + 8 + gate) * unit for gate in (0, 1, 2)]


def test_what_cudnn_refuses_is_an_error_with_its_status():
    functions = Functions(refused="cudnnSetRNNDescriptor_v8")
    with pytest.raises(library.CudnnError) as refused:
        Network(library.Library(functions), Form("LSTM", 24, 4, 10), "float16", "static")
    assert str(refused.value) == (
        "cudnnSetRNNDescriptor_v8: CUDNN_STATUS_NOT_SUPPORTED (3000) no such kernel"
    )
    with pytest.raises(library.CudnnError, match="not tried above 2304 units"):
        cudnn.scan(Problem("test", "LSTM", 2305), "float32", "forward", algorithm="dynamic")


def test_signatures_of_cudnn_hold_pointers_and_sizes():
    for name in "cudnnRNNForward", "cudnnRNNBackwardData_v8", "cudnnRNNBackwardWeights_v8":
        assert library.SIGNATURES[name][-6:] == [ctypes.c_size_t, ctypes.c_void_p] * 3
    lengths = {name: len(types) for name, types in library.SIGNATURES.items()}
    assert lengths["cudnnRNNForward"] == 20
    assert lengths["cudnnRNNBackwardData_v8"] == 22
    assert lengths["cudnnRNNBackwardWeights_v8"] == 16
