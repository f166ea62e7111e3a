"""Which implementation is chosen where, and what is said when CUDA can't be had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import PLATFORM

import jaxsparse
from jaxsparse import CSR, H200, Device, Topology, _ffi, backend, spmm
from jaxsparse.__main__ import information, main
from jaxsparse.device import lowered_for
from jaxsparse.primitive import (
    OPERATIONS,
    UnavailableError,
    choose,
    equations,
    lacks_kernel,
    lowering,
    typed_call,
)
from jaxsparse.primitive.choice import TargetCall


def product(implementation=None, variant=None):
    a = CSR(jnp.ones(3), Topology([0, 2, 3], [0, 2, 1], (2, 3)))
    return spmm(a, jnp.ones((3, 1)), implementation=implementation, variant=variant)


@pytest.mark.skipif(PLATFORM != "cpu", reason="there is a GPU")
def test_cuda_without_a_gpu_says_why_and_what_mends_it():
    with pytest.raises(ValueError) as caught:
        product("cuda")
    message = str(caught.value)
    assert "spmm: implementation='cuda' was asked for, but it is lowered for 'cpu'" in message
    assert backend.cuda_problems()
    for problem in backend.cuda_problems():
        assert problem in message
    assert "pip install 'jax[cuda13]'" in message or "nvidia-smi" in message


@pytest.mark.parametrize(
    "devices, nvrtc, plugin, driver, expected",
    [
        ([("H200", 90)], "13.0", True, True, []),
        ([("H200", 90)], "13.0", False, True, ["plugin is not installed: pip install"]),
        ([("H200", 90)], None, True, True, ["no NVRTC here\n  mend it by: pip install"]),
        (None, "13.0", True, True, ["the NVIDIA driver shows no GPU: hidden"]),
        (
            [("V100", 70), ("H200", 90)],
            "13.0",
            True,
            True,
            ["V100 is sm_70, the kernels need sm_80"],
        ),
        ([], "13.0", True, False, [r"no NVIDIA driver (libcuda.so.1)"]),
    ],
)
def test_reasons(monkeypatch, devices, nvrtc, plugin, driver, expected):
    def version():
        if nvrtc is None:
            raise RuntimeError("no NVRTC here")
        return nvrtc

    def shown():
        if devices is None:
            raise RuntimeError("hidden")
        return devices

    find_spec = backend.importlib.util.find_spec
    monkeypatch.setattr(backend._ffi, "nvrtc_version", version)
    monkeypatch.setattr(backend._ffi, "cuda_devices", shown)
    monkeypatch.setattr(backend, "has_driver", lambda: driver)
    monkeypatch.setattr(
        backend.importlib.util,
        "find_spec",
        lambda name: (
            (object() if plugin else None) if name == "jax_cuda13_plugin" else find_spec(name)
        ),
    )
    problems = backend.cuda_problems.__wrapped__()
    assert len(problems) == len(expected)
    for problem, part in zip(problems, expected, strict=True):
        assert part in problem


def lowered_for_cuda(**options):
    """A fresh program, as text."""
    a = CSR(jnp.ones(3), Topology([0, 2, 3], [0, 2, 1], (2, 3)))
    traced = jax.jit(lambda x: spmm(a, x, **options)).trace(jnp.ones((3, 1)))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_lowering_for_cuda_where_it_cannot_run(monkeypatch):
    """None falls back on XLA with one warning, what is asked for is refused with the reasons."""
    monkeypatch.setattr(backend, "has_driver", lambda: True)
    monkeypatch.setattr(backend, "cuda_problems", lambda: ("V100 is sm_70", "no plugin"))
    lowering._warned.clear()
    with pytest.warns(UserWarning, match=r"XLA is used instead:\n  V100 is sm_70\n  no plugin"):
        assert "@jaxsparse_spmm(" not in lowered_for_cuda()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered_for_cuda()
    for options in ({"implementation": "cuda"}, {"variant": "tiled_rows"}):
        with pytest.raises(ValueError, match="was asked for, but\n  V100 is sm_70\n  no plugin"):
            lowered_for_cuda(**options)


def chosen(device, **options):
    """What a product runs as on a device."""
    a = CSR(jnp.ones(3), Topology([0, 2, 3], [0, 2, 1], (2, 3)))
    program = jax.make_jaxpr(lambda x: spmm(a, x, **options))(jnp.ones((3, 1)))
    (eqn,) = (eqn for eqn in equations(program.jaxpr) if eqn.primitive in OPERATIONS)
    avals = [v.aval for v in eqn.invars]
    return choose(typed_call(OPERATIONS[eqn.primitive], eqn.params, avals), device)


def test_choices_for_a_device_that_is_described(recwarn):
    """By what that one lacks, whatever this machine has, and without a warning."""
    old = Device("V100", 70, 80, 98304)
    cpu = lowered_for("cpu")
    assert chosen(old).reason == old.lacks
    assert isinstance(chosen(H200, implementation="cuda"), TargetCall)
    for device, options, reason in (
        (old, {"implementation": "cuda"}, old.lacks),
        (old, {"variant": "tiled_rows"}, old.lacks),
        (H200, {"implementation": "cpu"}, "implementation='cpu' asks for a CPU"),
        (cpu, {"implementation": "cuda"}, "implementation='cuda' asks for a GPU"),
    ):
        with pytest.raises(UnavailableError, match="was asked for, but") as caught:
            chosen(device, **options)
        assert caught.value.reason == reason
    with pytest.raises(UnavailableError, match="has no variant") as caught:
        chosen(H200, variant="none_such")
    assert caught.value.reason == str(caught.value)
    assert not recwarn.list


@pytest.mark.smoke
def test_choices():
    assert isinstance(chosen(lowered_for("cpu")), TargetCall)
    for platform in ("tpu", "rocm"):
        device = lowered_for(platform)
        assert chosen(device).reason == "there are no kernels for it"
        asked = chosen(device, implementation="xla")
        assert asked.reason == "implementation='xla' asks for it"
    with pytest.raises(ValueError, match=r"implementation='cpu' was asked for.*'tpu'"):
        chosen(lowered_for("tpu"), implementation="cpu")


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda x: x.name)
def test_what_is_said_to_have_no_kernel_has_none(operation):
    """What a declaration says of a CPU is what the extension module has."""
    entry = backend.TARGETS[operation.target]
    kernels = entry["targets"]
    assert ("cpu" in kernels) == (not lacks_kernel(operation, lowered_for("cpu")))
    # An operation whose calls never fit a kernel on a GPU has no target for one.
    assert ("cuda" in kernels) == bool(entry["variants"]["cuda"])
    assert not lacks_kernel(operation, H200)


def test_cross_lowering_for_every_platform():
    """Export for platforms that are not here: kernels for CPU and CUDA, plain XLA for TPU."""
    a = CSR(jnp.ones(3), Topology([0, 2, 3], [0, 2, 1], (2, 3)))
    function = jax.jit(lambda a, x: spmm(a, x))
    for platform, kernel in (("cpu", True), ("tpu", False)):
        exported = jax.export.export(
            function, platforms=[platform], disabled_checks=backend.EXPORT_DISABLED_CHECKS
        )(a, jnp.ones((3, 2)))
        assert ("@jaxsparse_spmm(" in exported.mlir_module()) == kernel
    if PLATFORM == "cpu" and not backend.has_driver():
        exported = jax.export.export(
            function, platforms=["cuda"], disabled_checks=backend.EXPORT_DISABLED_CHECKS
        )(a, jnp.ones((3, 2)))
        assert "@jaxsparse_spmm(" in exported.mlir_module()


def test_default_is_the_platforms_kernel():
    a = CSR(jnp.ones(3), Topology([0, 2, 3], [0, 2, 1], (2, 3)))
    text = jax.jit(lambda a, x: spmm(a, x)).lower(a, jnp.ones((3, 1))).as_text()
    assert "@jaxsparse_spmm(" in text
    plain = jax.jit(lambda a, x: spmm(a, x, implementation="xla")).lower(a, jnp.ones((3, 1)))
    assert "@jaxsparse_spmm(" not in plain.as_text()
    np.testing.assert_array_equal(product(), product("xla"))


def test_info(capsys):
    """First what each operation runs as on this machine, then kernels of other platforms."""
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for part in ("jaxlib", "jaxsparse_spmm", "kernel cache", "CUDA:"):
        assert part in text
    lines = text.splitlines()
    here = [line for line in lines if line.startswith("    on this machine's ")]
    assert len(here) == len(backend.TARGETS)
    if PLATFORM == "cpu":
        start = lines.index("  spmm: jaxsparse_spmm")
        assert lines[start + 1 : start + 3] == [
            f"    on this machine's CPU ({_ffi.cpu_isa()}): tiles, rows, panels, scalar",
            f"    kernels for cuda: {', '.join(backend.TARGETS['spmm']['variants']['cuda'])}",
        ]
        reason = "because on a CPU"
        for line, plain in zip(here[-4:-2], ("jax.lax.scan", "node by node"), strict=True):
            assert f"{plain}, {reason} only its sparse products" in line
        assert f"a loop of XLA over tiles, {reason} XLA's products" in here[-2]
        assert f"{reason} XLA's products" in here[-1]
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts["operations"]) == set(backend.TARGETS)
    assert facts["operations"]["spmm"]["variants"]["cpu"] == ["tiles", "rows", "panels", "scalar"]
    assert len(facts["operations"]["spmm"]["runs"]) == 1
    assert (facts["cuda_problems"] == []) == (PLATFORM == "cuda")


def test_info_of_operations_that_need_more_of_a_gpu():
    """Scans need more than products do."""
    old = Device("A100", 80, 108, 166912)
    operations = information(old)["operations"]
    assert "tiled_rows" in operations["spmm"]["runs"]["A100"]
    expected = "jax.lax.scan, because A100 has compute capability 8.0, and the kernels need 9.0"
    assert operations["recurrent_scan"]["runs"]["A100"] == expected
    older = Device("V100", 70, 80, 98304)
    operations = information(older)["operations"]
    assert operations["spmm"]["runs"]["V100"] == f"plain XLA, because {older.lacks}"
    assert operations["check_topology"]["runs"]["V100"] == f"nothing, because {older.lacks}"


def test_info_on_a_gpu_that_is_named(capsys, monkeypatch):
    """First what runs here, then what would run there."""
    assert main(["info", "--device", "H200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("  spmm: jaxsparse_spmm")
    here, there = lines[start + 1 : start + 3]
    kernels = ", ".join(backend.TARGETS["spmm"]["variants"]["cuda"])
    if PLATFORM == "cpu":
        assert here == f"    on this machine's CPU ({_ffi.cpu_isa()}): tiles, rows, panels, scalar"
        assert there == f"    on NVIDIA H200: {kernels}"
        scan = lines[lines.index("  recurrent_scan: jaxsparse_recurrent_scan") + 1 :][:2]
        assert "jax.lax.scan" in scan[0] and "dense_tensor_cores" in scan[1]

    assert main(["info", "--device", "H200", "--json"]) == 0
    choices = json.loads(capsys.readouterr().out)["operations"]["spmm"]["runs"]
    assert choices["NVIDIA H200"] == kernels and list(choices)[-1] == "NVIDIA H200"

    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert main(["info", "--device", "H200"]) == 0
    plain = "on this machine's TPU: plain XLA, because there are no kernels for it"
    assert plain in capsys.readouterr().out

    with pytest.raises(SystemExit):
        main(["info", "--device", "H9000"])
    assert "invalid choice: 'H9000'" in capsys.readouterr().err


def test_info_without_a_cache_that_can_be_read(capsys, monkeypatch):
    monkeypatch.setenv("JAXSPARSE_CACHE_DIR", "/" + "long" * 100)
    assert main(["info"]) == 0
    assert "File name too long" in capsys.readouterr().out


def test_command_line():
    run = subprocess.run(
        [sys.executable, "-m", "jaxsparse", "info", "--json"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAXSPARSE_CACHE_DIR": ""},
    )
    facts = json.loads(run.stdout)
    assert facts["platforms"] == ["cpu"] and facts["kernel_cache"]["folder"] is None


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_lesser_instruction_sets(isa):
    """The same numbers by the code for older processors."""
    program = (
        "import numpy as np, jax.numpy as jnp, jaxsparse as js\n"
        "rng = np.random.default_rng(0)\n"
        "d = (rng.standard_normal((40, 70)) * (rng.random((40, 70)) < 0.3)).astype(np.float32)\n"
        "a, x = js.CSR.fromdense(d), rng.standard_normal((70, 45)).astype(np.float32)\n"
        "np.testing.assert_allclose(a @ x, d @ x, rtol=1e-4, atol=1e-5)\n"
        "np.testing.assert_allclose(x.T @ a.T, x.T @ d.T, rtol=1e-4, atol=1e-5)\n"
        "s = js.sparse_softmax(js.sddmm(d, x.T, js.Topology.from_mask(np.ones((40, 45), bool))))\n"
        "np.testing.assert_allclose(s.todense().sum(1), 1, rtol=1e-5)\n"
        "from jaxsparse import _ffi\nprint(_ffi.cpu_isa())\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program.replace("x.T, js.Topology", "x.T[:, :70], js.Topology")],
        capture_output=True,
        text=True,
        env={**os.environ, "JAXSPARSE_ISA": isa, "JAX_PLATFORMS": "cpu"},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() in ("portable", isa)


def test_version(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out.strip() == jaxsparse.__version__
