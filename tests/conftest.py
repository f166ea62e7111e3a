"""Test-wide settings: 8 CPU devices for sharding, programs that compile soon, exact dense products.

Benchmarks and examples are found in the checkout, after all that is installed.

Patterns are checked only where a test asks.
"""

import gc
import importlib.util
import os
import pathlib
import sys

import jaxlib

sys.path.append(str(pathlib.Path(__file__).parent.parent))

flags = {
    "xla_force_host_platform_device_count": "8",
    # Most programs run once: these would take longer than they save.
    "xla_llvm_disable_expensive_passes": "true",
    "xla_gpu_autotune_level": "0",
    # Small programs in one piece: each piece goes through LLVM's setup and the linker anew.
    "xla_cpu_parallel_codegen_split_count": "1",
    "xla_gpu_force_compilation_parallelism": "1",
}
if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
    # Nor is what LLVM makes faster worth its time; a GPU's programs stay those that users run.
    flags["xla_backend_optimization_level"] = "0"
if jaxlib.version.__version_info__ < (0, 11):
    # MLIR's passes take most of the time that is left. Newer versions have no other emitters.
    flags["xla_cpu_use_fusion_emitters"] = "false"

# Of several GPUs that are named, each of pytest's workers takes one. It keeps to a few cores: XLA
# has a thread for each core that a process may use, and those of dozens of workers are more than
# some machines start.
CORES_OF_WORKER = 6
gpus = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
if gpus and worker:
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker) % len(gpus)]
    cores = sorted(os.sched_getaffinity(0))
    first = int(worker) * len(cores) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.sched_setaffinity(0, {cores[(first + i) % len(cores)] for i in range(CORES_OF_WORKER)})

# Before JAX starts a backend. A GPU stays the default platform where there is one.
given = os.environ.get("XLA_FLAGS", "")
added = [f"--{flag}={value}" for flag, value in flags.items() if flag not in given]
os.environ["XLA_FLAGS"] = " ".join([*given.split(), *added])
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # nobody reads where they are from
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"  # not TF32
os.environ.pop("JAXSPARSE_CHECK", None)
# Tracing makes many small objects that live on: looking them through soon finds little to free.
gc.set_threshold(100_000, 50, 100)

import jax  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

from jaxsparse.dynamic.primitive import plain as dynamic_plain  # noqa: E402
from jaxsparse.recurrent.primitive import plain as recurrent_plain  # noqa: E402

UNROLLED = {module: module._UNROLLED for module in (dynamic_plain, recurrent_plain)}


def pytest_runtest_setup(item):
    """Skips what needs more devices than there are, as one of pytest's workers on a GPU has."""
    for mark in item.iter_markers("several_devices"):
        if jax.device_count() < mark.args[0]:
            pytest.skip(f"needs {mark.args[0]} devices, here {jax.device_count()}")


@pytest.fixture(scope="session", autouse=True)
def steps_compiled_once():
    """On a GPU plain scans take eight steps at a time, each of which takes its time to compile."""
    if jax.default_backend() == "gpu":
        for module in UNROLLED:
            module._UNROLLED = 1


@pytest.fixture
def unrolled(monkeypatch):
    """For programs with as many steps at a time as users have."""
    for module, steps in UNROLLED.items():
        monkeypatch.setattr(module, "_UNROLLED", steps)


@pytest.fixture(scope="module")
def compiled_fast():
    """For programs that run a few times: optimizing them takes longer."""
    name = "jax_disable_most_optimizations"
    previous = jax.config.values[name]
    jax.config.update(name, True)
    yield
    jax.config.update(name, previous)


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """For programs that are made again and again; yields the variables for other processes."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    previous = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # one that was looked for and not found is not looked for again
    yield {name.upper(): str(value) for name, value in settings.items()}
    for name, value in previous.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
