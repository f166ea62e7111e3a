"""Device code, without a GPU: every kernel compiles; the cache and its errors."""

from __future__ import annotations

import collections
import os
import re
import subprocess
import sys

import pytest
from covering import covering

from jaxsparse import _ffi, backend

try:
    _ffi.nvrtc_version()
except RuntimeError as error:
    pytest.skip(f"needs NVRTC: {error}", allow_module_level=True)

KERNELS = [kernel for entry in backend.TARGETS.values() for kernel in entry["kernels"]]
CHEAP = [kernel for kernel in KERNELS if "Densify" in kernel[1]]

# What other sizes ask for: (file, types and config of an instance, fields of the config).
DTYPES = ["float", "jaxsparse::bfloat16"]
SHORT_VECTORS = (
    ".lanes = 4, .step = 4, .head_vector = 1, .head_vectors = 3, .value_vector = 1, "
    ".value_vectors = 2, .whole_heads = true, .whole_values = false, .own_scores = true"
)
LONG_VECTORS = ".head_vectors = 2, .on_tensor_cores = true, .stages = 1"
OWN_SCORES = ".head_vector = 4, .value_vectors = 2, .own_scores = true, .on_tensor_cores = true"
SIZES = [
    (
        "spmm/kernels/tiled.cu",
        "SpmmTiled<float, float, uint16_t, jaxsparse::SpmmTiledConfig",
        [
            ".vector = 1, .lanes = 1, .rows = 128, .batched = true",
            ".vector = 2, .lanes = 16, .rows = 8, .at_once = 8, .batched = true",
            ".vector = 4, .lanes = 8, .rows = 4, .at_once = 8, .batched = true",
            ".vector = 4, .lanes = 32, .rows = 1, .batched = true",
        ],
    ),
    (
        "spmm/kernels/split.cu",
        "SpmmSplitRows<float, float, int32_t, jaxsparse::SpmmSplitConfig",
        [
            ".vector = 1, .lanes = 1, .batched = true",
            ".vector = 4, .lanes = 32, .group_units = 2",
            ".vector = 4, .lanes = 8, .at_once = 16, .permuted = true",
        ],
    ),
    (
        "spmm/kernels/staged.cu",
        "SpmmStaged<float, float, uint16_t, jaxsparse::SpmmStagedConfig",
        [
            ".lanes = 8, .rows = 1, .panel = 512, .prefetched = true, .permuted = true",
            ".lanes = 16, .rows = 8, .panel = 256, .permuted = true",
            ".lanes = 32, .rows = 4, .panel = 128, .permuted = true",
            ".lanes = 32, .rows = 8, .panel = 16, .permuted = true",
        ],
    ),
    (
        "sddmm/kernels/tiled.cu",
        "SddmmTiled<float, float, uint16_t, jaxsparse::SddmmTiledConfig",
        [
            ".lanes = 1, .chunks = 16, .own_rows = true, .whole = true, .scaled = true",
            ".lanes = 4, .vector = 2, .chunks = 2, .batched = true",
            ".lanes = 8, .vector = 4, .vectors = 3, .sharing = 8, .own_rows = true, "
            ".whole = true, .scaled = true, .batched = true",
            ".lanes = 32, .vector = 4, .vectors = 4, .sharing = 16",
        ],
    ),
    (
        "sddmm/kernels/staged.cu",
        "SddmmStaged<float, float, uint16_t, jaxsparse::SddmmStagedConfig",
        [
            ".lanes = 2, .vectors = 4, .rows = 8, .panel = 512, .stages = 3",
            ".lanes = 4, .vectors = 4, .rows = 8, .panel = 256, .stages = 3",
            ".lanes = 8, .vectors = 4, .rows = 1, .panel = 16, .stages = 2, .parts = 4",
        ],
    ),
    # Sizes of heads and stages for GPUs of less shared memory.
    (
        "attention/kernels/decode.cu",
        "AttentionDecode<jaxsparse::bfloat16, jaxsparse::AttentionDecodeConfig",
        [
            ".head_size = 256, .value_size = 256, .warps = 4, .stages = 2",
            ".head_size = 48, .value_size = 96, .warps = 8, .stages = 6",
        ],
    ),
    # Lanes that own a row, vectors in the registers of each.
    (
        "sparse_softmax/kernels/registers.cu",
        "SparseSoftmaxInRegisters<float, jaxsparse::SparseSoftmaxRegistersConfig",
        [
            f".lanes = {lanes}, .vectors = {vectors}, .backward = {backward}"
            for lanes, vectors in [(2, 2), (16, 2), (32, 8), (64, 8), (256, 8)]
            for backward in ("false", "true")
        ],
    ),
    (
        "sparse_softmax/kernels/runs.cu",
        "SparseSoftmaxRuns<jaxsparse::float16, jaxsparse::SparseSoftmaxRunsConfig",
        [".backward = true", ".units = 6, .batched = true"],
    ),
    (
        "reduce_rows/kernels/rows.cu",
        "ReduceRows<float, jaxsparse::ReduceRowsConfig",
        [
            f".reduction = jaxsparse::Reduction::{reduction}, .lanes = {lanes}"
            for lanes, reduction in [(2, "kMaximum"), (32, "kLogSumExp"), (512, "kMaximum")]
        ],
    ),
    *(
        (
            "reduce_rows/kernels/runs.cu",
            f"{kernel}<float, jaxsparse::ReduceRunsConfig",
            [f".reduction = jaxsparse::Reduction::{reduction}, .units = 8"],
        )
        for kernel, reduction in [("ReduceRuns", "kMaximum"), ("ReducePieces", "kLogSumExp")]
    ),
    # Attention by rows: short vectors, and some that not all lanes have a part of; tensor cores.
    *(
        (f"attention/kernels/{file}.cu", f"{kernel}, jaxsparse::AttentionCsrConfig", [fields])
        for file, kernel, fields in [
            ("csr", "AttentionCsr<float, uint16_t", SHORT_VECTORS),
            ("csr", "AttentionCsr<jaxsparse::float16, int32_t", LONG_VECTORS),
            ("csr_cotangent", "AttentionCsrCotangent<float, uint16_t, uint16_t", SHORT_VECTORS),
            ("csr_cotangent", f"AttentionCsrCotangent<{DTYPES[1]}, int32_t, uint16_t", OWN_SCORES),
            ("csr_cotangent", f"AttentionCsrCotangent<{DTYPES[1]}, int32_t, int32_t", LONG_VECTORS),
        ]
    ),
    # Tiles of tensor cores for small and large problems; products by two index types.
    *(
        ("spmm/kernels/tensor_cores.cu", f"{types}, jaxsparse::SpmmTensorConfig", fields)
        for dtype in DTYPES
        for types, fields in [
            (
                f"SpmmTensorCores<{dtype}, {dtype}, uint16_t, uint16_t",
                [f".columns = {columns}" for columns in (32, 64, 128)],
            ),
            (
                f"SpmmTensorCores<{dtype}, {dtype}, uint16_t, int32_t",
                [f".columns = {columns}, .transposed = true" for columns in (32, 64, 128)],
            ),
            (
                f"SpmmPrepare<{dtype}, uint16_t",
                [f".columns = {columns}" for columns in (32, 64, 128)],
            ),
        ]
    ),
    *(
        (
            "sddmm/kernels/tensor_cores.cu",
            f"SddmmTensorCores<{dtype}, {dtype}, uint16_t, jaxsparse::SddmmTensorConfig",
            [f".inner = {inner}, .scaled = true" for inner in (32, 64, 128)],
        )
        for dtype in DTYPES
    ),
    *(
        (
            "sddmm/kernels/tensor_cores.cu",
            f"SddmmPrepare<{dtype}, uint16_t, jaxsparse::SddmmTensorConfig",
            [f".inner = {inner}" for inner in (32, 64, 128)],
        )
        for dtype in DTYPES
    ),
]
# Kernels of attention with as much as registers have room for, and with less shared memory.
MMA_TILES = ".tiles = {{.head_size = {0}, .value_size = {0}, .number_bytes = 2, .rows = {1}}}"
SIZES += [
    (
        f"attention/kernels/{file}.cu",
        f"{kernel}<jaxsparse::bfloat16, jaxsparse::{config}",
        [MMA_TILES.format(256, rows) + more for rows in (64, 128)],
    )
    for file, kernel, config, more in [
        ("tiles_mma", "AttentionTilesMma", "AttentionMmaConfig", ""),
        (
            "rows_mma",
            "AttentionCotangentOfRowsMma",
            "CotangentMmaConfig",
            ", .stages = 1, .columns = 32",
        ),
        (
            "keys_mma",
            "AttentionCotangentOfKeysMma",
            "CotangentMmaConfig",
            ", .stages = 1, .columns = 32, .split = true",
        ),
    ]
]
INSTANCES = [
    *KERNELS,
    *(
        (file, f"jaxsparse::{kernel}{{{each}}}>")
        for file, kernel, fields in SIZES
        for each in fields
    ),
]


def template_of(expression):
    return expression.split("<")[0]


def arguments_of(expression):
    """Those of an instance, each with its place or name; fields of a config are arguments."""
    types, _, config = expression.partition("{")
    return {
        *enumerate(types.rstrip(">").split(", ")),
        *re.findall(r"(\w+) = ([\w:]+)", config),
    }


BY_TEMPLATE = collections.defaultdict(list)
for file, expression in INSTANCES:
    BY_TEMPLATE[template_of(expression)].append((file, expression))
COVERING = [
    instance
    for instances in BY_TEMPLATE.values()
    for instance in covering(instances, [arguments_of(expression) for _, expression in instances])
]
# For an older architecture one instance of each template.
OLDER = {template_of(expression): (file, expression) for file, expression in KERNELS}


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("file", sorted({file for file, _ in INSTANCES}))
def test_every_instance_is_sound(file, architecture):
    """All of a file at once, by NVRTC's front end: what comes behind it takes fifty times as long.

    An error that comes last keeps it from going on.
    """
    expressions = [expression for its_file, expression in INSTANCES if its_file == file]
    checks = [f"static_assert(&{expression} != nullptr);" for expression in expressions]
    last = "all instances are made"
    lines = [f'#include "{file}"', *checks, f'static_assert(false, "{last}");']
    with pytest.raises(RuntimeError) as caught:
        _ffi.compile_kernel("instances.cu", expressions[0], architecture, "\n".join(lines))
    message = str(caught.value)
    assert last in message and "\n1 error detected" in message, message


@pytest.mark.parametrize(
    "file, expression, architecture",
    [(*k, "sm_90a") for k in COVERING] + [(*k, "sm_80") for k in OLDER.values()],
)
def test_kernels_compile(file, expression, architecture, monkeypatch):
    """With every value of every argument; all instances, where all combinations are asked for."""
    monkeypatch.setenv("JAXSPARSE_CACHE_DIR", "")
    assert _ffi.compile_kernel(file, expression, architecture).startswith(b"\x7fELF")


def test_arguments_are_covered():
    chosen = {expression for _, expression in COVERING}
    assert {file for file, _ in COVERING} == {file for file, _ in INSTANCES}
    for template, instances in BY_TEMPLATE.items():
        expressions = {expression for _, expression in instances}
        wanted, compiled = (
            set().union(*map(arguments_of, some)) for some in (expressions, expressions & chosen)
        )
        assert compiled == wanted, template


def test_every_operation_has_kernels():
    for name, entry in backend.TARGETS.items():
        if name.startswith(("recurrent_", "dynamic_")):
            continue  # printed for each plan: tests/test_recurrent_compilation.py and others
        assert len(entry["kernels"]) >= 2 and entry["variants"]["cuda"], name
    # Variants, pairs of dtypes, index types, permuted or not: none is another one's kernel.
    tiled = [expression for _, expression in KERNELS if "SpmmTiled" in expression]
    assert len(tiled) == 6 * 6 * 2 * 2
    # Variants, pairs of dtypes, index types, sizes.
    tiled = [expression for _, expression in KERNELS if "SddmmTiled" in expression]
    assert len(tiled) == 3 * 6 * 2 * 2


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSPARSE_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    return tmp_path / "deep" / "cache"


def test_cache_is_filled_and_read(cache):
    file, expression = CHEAP[0]
    code = _ffi.compile_kernel(file, expression, "sm_80")
    (entry,) = cache.glob("*")
    assert entry.suffix == ".kernel" and _ffi.cache_folder() == str(cache)
    # NVRTC stamps what it compiles, so equal code was read and not compiled again.
    text = entry.read_bytes()
    before = entry.stat().st_mtime_ns
    assert _ffi.compile_kernel(file, expression, "sm_80") == code
    assert entry.stat().st_mtime_ns == before
    # Another architecture and another instance are other entries.
    _ffi.compile_kernel(file, expression, "sm_90a")
    _ffi.compile_kernel(*CHEAP[1], "sm_80")
    assert len(list(cache.glob("*.kernel"))) == 3
    # Torn, cut and foreign entries are compiled anew.
    for damage in (
        b"",
        text[:-40],
        text[: len(text) // 2],
        b"something else",
        text.replace(b"ELF", b"FLE"),
    ):
        entry.write_bytes(damage)
        again = _ffi.compile_kernel(file, expression, "sm_80")
        assert again.startswith(b"\x7fELF") and again in entry.read_bytes()


def test_cache_has_a_limit(cache, monkeypatch):
    """The kernels used longest ago go; foreign files, and the kernel just written, stay."""
    kernels = [(*CHEAP[0], "sm_80"), (*CHEAP[1], "sm_80"), (*CHEAP[2], "sm_80")]
    paths = []
    for age, kernel in enumerate(kernels):
        _ffi.compile_kernel(*kernel)
        (path,) = set(cache.iterdir()) - set(paths)
        paths.append(path)
        os.utime(path, (1000 + age, path.stat().st_mtime))
    _ffi.compile_kernel(*kernels[0])  # is read, and so used later than the other one
    foreign = cache / "notes.kernel.txt"
    foreign.write_text("a" * 10**6)
    limit = sum(path.stat().st_size for path in paths) - 1000
    paths[2].unlink()
    monkeypatch.setenv("JAXSPARSE_CACHE_BYTES", str(limit))
    assert _ffi.cache_limit() == limit
    _ffi.compile_kernel(*kernels[2])
    assert set(cache.iterdir()) == {paths[0], paths[2], foreign}
    monkeypatch.setenv("JAXSPARSE_CACHE_BYTES", "0")
    _ffi.compile_kernel(*kernels[1])
    assert set(cache.iterdir()) == {paths[1], foreign}
    monkeypatch.setenv("JAXSPARSE_CACHE_BYTES", "much")
    assert _ffi.cache_limit() == 2**30


def test_abandoned_files_are_removed(cache):
    cache.mkdir(parents=True)
    names = ["0123456789abcdef.kernel.77.0", "fedcba9876543210.kernel.78.3", "other.kernel.77.0"]
    old, new, foreign = files = [cache / name for name in names]
    for file in files:
        file.write_text("half a kernel")
    for file in (old, foreign):
        os.utime(file, (1000, 1000))
    _ffi.compile_kernel(*CHEAP[0], "sm_80")
    assert not old.exists() and new.exists() and foreign.exists()


def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("JAXSPARSE_CACHE_DIR", str(blocked / "cache"))
    assert _ffi.compile_kernel(*CHEAP[0], "sm_80")
    monkeypatch.setenv("JAXSPARSE_CACHE_DIR", str(tmp_path / ("long" * 100)))
    assert _ffi.compile_kernel(*CHEAP[0], "sm_80")


def test_processes_share_the_cache(cache):
    program = (
        "import sys, jaxsparse\nfrom jaxsparse import _ffi\n"
        f"code = _ffi.compile_kernel(*{KERNELS[0]!r}, 'sm_80')\n"
        "sys.stdout.buffer.write(code)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(3)
    ]
    codes = [process.communicate(timeout=120)[0] for process in processes]
    assert all(code.startswith(b"\x7fELF") for code in codes)
    (entry,) = cache.iterdir()  # nothing half-written is left behind
    assert any(code in entry.read_bytes() for code in codes)
    assert _ffi.compile_kernel(*KERNELS[0], "sm_80") in codes


def test_error_shows_the_source_line(tmp_path, cache):
    (tmp_path / "bad.cuh").write_text(
        "#pragma once\n__device__ int f() { return undeclared_name; }\n"
    )
    (tmp_path / "bad.cu").write_text(
        '#include "bad.cuh"\ntemplate <typename T> __global__ void Kernel(T x) { f(); }\n'
    )
    _ffi.configure_compiler(str(tmp_path), backend.nvrtc_candidates())
    try:
        with pytest.raises(RuntimeError) as caught:
            _ffi.compile_kernel("bad.cu", "Kernel<float>", "sm_80")
        with pytest.raises(RuntimeError, match=r"missing\.cu can't be read"):
            _ffi.compile_kernel("missing.cu", "Kernel<float>", "sm_80")
    finally:
        _ffi.configure_compiler(str(backend.device_source_folder()), backend.nvrtc_candidates())
    message = str(caught.value)
    assert "Kernel<float> of bad.cu for sm_80" in message
    assert "bad.cuh(2)" in message and "return undeclared_name;" in message
    assert not list(cache.glob("*")) if cache.exists() else True


def test_architectures():
    assert _ffi.architecture_name(80) == "sm_80"
    assert _ffi.architecture_name(90) == "sm_90a"
