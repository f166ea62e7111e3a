"""Kernels on an emulated GPU, with sanitizers: their results where there is no GPU."""

from __future__ import annotations

import pytest
import sanitized

OPTIONS = [
    "-Wno-psabi",
    "-Wno-unknown-pragmas",
    # These checks take a third of the time to compile; what they warn of, AddressSanitizer finds
    # where memory is accessed.
    "-fno-sanitize=null,object-size,pointer-overflow",
    f"-I{sanitized.FFI / 'tests' / 'emulated'}",  # in front of the headers that it replaces
    f"-I{sanitized.FFI / 'tests'}",
]

# Programs and how they are compiled: -O0 takes half of the time and runs in three times it. Those
# that take longest come first.
PROGRAMS = {
    "spmm": "-O1",
    "packed": "-O1",
    "packed_gaps": "-O1",
    "packed_gaps_mma": "-O1",
    "packed_wgmma": "-O1",
    "attention_tiles": "-O1",
    "attention_decode": "-O1",
    "attention_cotangent": "-O1",
    "attention_csr": "-O1",
    "attention_cotangent_mma": "-O1",
    "attention_tangent_mma": "-O1",
    "attention_mma": "-O1",
    "sddmm": "-O1",
    "sddmm_tiled": "-O1",
    "spmm_staged": "-O1",
    "sddmm_staged": "-O1",
    "spmm_tiled": "-O0",
    "spmm_split": "-O0",
    "recurrent_scan_dense": "-O1",
    "recurrent_wave": "-O1",
    "recurrent_wave_scatter": "-O1",
    "recurrent_wave_wgmma": "-O1",
    "recurrent_wave_stationary": "-O1",
    "recurrent_scan_resident": "-O1",
    "graph_scan_emit": "-O0",
    "graph_scan_gather": "-O0",
    "recurrent_scan_sparse": "-O0",
    "generic": "-O0",
    "sparse_softmax": "-O0",
    "reduce_rows": "-O0",
    "depthwise": "-O0",
    "sparse_softmax_runs": "-O0",
}


@pytest.mark.parametrize("operation", PROGRAMS)
def test_kernels(operation, tmp_path):
    source = sanitized.FFI / "tests" / "device" / f"{operation}_test.cc"
    options = [PROGRAMS[operation], *OPTIONS]
    assert "all results agree" in sanitized.output_of([source], options, tmp_path)
