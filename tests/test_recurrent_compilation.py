"""Programs of recurrent scans, without a GPU: they call kernels, and every kernel compiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from covering import combinations
from recurrent_forms import compiles, loss_of, operands, shape, variant_of
from recurrent_problems import CELLS, kernels

from jaxsparse import CSR, _ffi, recurrent
from jaxsparse.recurrent.engine import EXPRESSION


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", list(CELLS))
def test_a_program_for_cuda_calls_the_kernel(name, sparse):
    cell, topology, shapes = operands(name, sparse)

    def lowered(**options):
        loss = loss_of(cell, topology, **options)
        function = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
        return function.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()

    assert lowered().count("@jaxsparse_recurrent_scan") == 2
    assert lowered(implementation="cuda").count("@jaxsparse_recurrent_scan") == 2
    plain = lowered(implementation="xla")
    assert "@jaxsparse_recurrent_scan" not in plain and "while" in plain
    wrong = "dense_fma" if sparse else "sparse_pairs"
    with pytest.raises(ValueError, match=f"{wrong} was asked for, but"):
        lowered(variant=wrong)


@combinations(
    "name, dtype, weights",
    CELLS,
    [(d, w) for d in ("float32", "bfloat16", "float16") for w in ("dense", "masked", "pairs")],
)
def test_every_kind_of_kernel_compiles(name, dtype, weights, monkeypatch):
    monkeypatch.setenv("JAXSPARSE_CACHE_DIR", "")
    try:
        _ffi.nvrtc_version()
    except RuntimeError as error:
        pytest.skip(f"needs NVRTC: {error}")
    cell, topology, shapes = operands(name, weights != "dense", jnp.dtype(dtype))
    lengths = jnp.array([1, 5, 16])
    variant = variant_of(weights, dtype) + ("_barrier" if name == "GRU" else "")
    if name == "RNN":
        monkeypatch.setenv("JAXSPARSE_SCAN_DELAY", "1000")
    loss = loss_of(cell, topology, seq_lengths=lengths, reverse=True, variant=variant)
    found = kernels(jax.grad(loss, (0, 1, 2, 3)), *shapes)
    assert len(found) == 2
    for file, source in found:
        assert "struct PrintedStep" in source and "struct PrintedPlan" in source
        assert _ffi.compile_kernel(file, EXPRESSION, "sm_90a", source).startswith(b"\x7fELF")


@pytest.mark.parametrize("sparse", [False, True])
def test_kernels_of_odd_cases_compile(sparse):
    try:
        _ffi.nvrtc_version()
    except RuntimeError as error:
        pytest.skip(f"needs NVRTC: {error}")
    # A float32 bias beside bfloat16 inputs is read as float32.
    cell, topology, (weights, carry, xs, bias) = operands("GRU", sparse)
    loss = loss_of(cell, topology)
    sources = compiles(jax.grad(loss, 3), weights, carry, xs, shape(*bias.shape))
    assert len(sources) == 2 and "kInputIsFloat[] = {false, true}" in sources[0]
    narrow = shape(*bias.shape, dtype=jnp.float16)  # takes float32 to hold both
    assert "kInputIsFloat[] = {false, true}" in compiles(loss, weights, carry, xs, narrow)[0]
    # Outputs: the products, and what a gradient keeps of the carry, in float32 as the carry is.
    kept = compiles(jax.grad(loss, 2), weights, carry, xs, bias)[0]
    assert "kOutputParts[] = {3, 1}" in kept and "kOutputIsFloat[] = {false, true}" in kept
    resetting = loss_of(cell, topology, resets=jnp.ones((16, 3), bool))
    forward, _ = compiles(jax.grad(resetting, 2), weights, carry, xs, bias)
    assert "int kInputs = 3;" in forward and "int kInputs = 2;" in kept
    if sparse:
        empty = CSR.fromdense(jnp.zeros((40, 40)))
        packed = recurrent.pack(empty, batch=2, dtype=jnp.float32)

        def scan(h, xs):
            return recurrent.scan(recurrent.elman(), packed, h, xs)[1]

        assert len(compiles(scan, shape(2, 40), shape(9, 2, 40))) == 1
        # Batches that its registers have no room for take the plain path.
        assert not compiles(scan, shape(256, 40), shape(9, 256, 40))


def test_kernels_of_a_large_batch_compile():
    try:
        _ffi.nvrtc_version()
    except RuntimeError as error:
        pytest.skip(f"needs NVRTC: {error}")

    def last(w, h, xs):
        ys = recurrent.scan(recurrent.GRU, w, h, xs, variant="dense_tensor_cores")[1]
        return ys.astype(jnp.float32).sum()

    h, b, dtype = 512, 64, jnp.bfloat16
    shapes = shape(h, 3 * h, dtype=dtype), shape(b, h, dtype=dtype), shape(9, b, 3 * h, dtype=dtype)
    forward, adjoint = compiles(jax.grad(last), *shapes)
    assert "kGroups = 8" in forward and "kScans = 8" in forward
    assert ".loads_ahead = 4" in adjoint and ".pointwise_registers = 0" not in adjoint


def test_kernels_of_few_blocks_compile():
    try:
        _ffi.nvrtc_version()
    except RuntimeError as error:
        pytest.skip(f"needs NVRTC: {error}")

    def scan(w, h, xs):
        return recurrent.scan(recurrent.GRU, w, h, xs, variant="dense_resident")[1]

    h, b, dtype = 256, 1024, jnp.bfloat16
    shapes = shape(h, 3 * h, dtype=dtype), shape(b, h, dtype=dtype), shape(9, b, 3 * h, dtype=dtype)
    (source,) = compiles(scan, *shapes)
    assert ".blocks = 4" in source and ".resident = 2" in source
    assert ".unit_groups = 2" in source and ".register_chunks = 4" in source
