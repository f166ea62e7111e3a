"""Kernels on an emulated GPU, with sanitizers: their results where there is no GPU."""

from __future__ import annotations

import pytest
import sanitized

OPTIONS = [
    "-O1",
    "-Wno-psabi",
    "-Wno-unknown-pragmas",
    f"-I{sanitized.FFI / 'tests' / 'emulated'}",  # in front of the headers that it replaces
    f"-I{sanitized.FFI / 'tests'}",
]


@pytest.mark.parametrize(
    "operation",
    [
        "generic",
        "spmm",
        "spmm_staged",
        "spmm_tiled",
        "sddmm",
        "sddmm_staged",
        "sddmm_tiled",
        "sparse_softmax",
        "recurrent_scan_dense",
        "recurrent_scan_sparse",
    ],
)
def test_kernels(operation, tmp_path):
    source = sanitized.FFI / "tests" / "device" / f"{operation}_test.cc"
    assert "all results agree" in sanitized.output_of([source], OPTIONS, tmp_path)
