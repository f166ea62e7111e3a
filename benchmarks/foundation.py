"""Times of the CPU and CUDA kernels beside their peers, all in one run, as JSON.

    python benchmarks/foundation.py --output benchmarks/results/cpu/foundation.json

Every figure is the median over repeats of the mean wall time of a few calls of a compiled function,
in microseconds. Peers: dense XLA, `jax.experimental.sparse.BCSR`, SciPy (CPU only).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import platform
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import scipy
from jax.experimental import sparse as jsparse

import jaxsparse
from jaxsparse import CSR, spmm


def microseconds(function: Callable[[], Any], *, seconds: float = 0.4, repeats: int = 9) -> float:
    """Median over repeats of the mean time of a call."""
    jax.block_until_ready(function())
    start = time.perf_counter()
    jax.block_until_ready(function())
    calls = max(1, int(seconds / repeats / max(time.perf_counter() - start, 1e-7)))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            out = function()
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / calls * 1e6)
    return float(np.median(times))


def product_times(m: int, k: int, n: int, sparsity: float, seed: int = 0) -> dict[str, Any]:
    """Forward, and forward with gradients of values and x, of one random problem in float32."""
    rng = np.random.default_rng(seed)
    dense = rng.standard_normal((m, k)).astype(np.float32) * (rng.random((m, k)) >= sparsity)
    a = CSR.fromdense(dense)
    x = jnp.asarray(rng.standard_normal((k, n)), jnp.float32)
    bcsr = jsparse.BCSR.fromdense(dense)

    def bcsr_product(
        data: jax.Array, x: jax.Array, indices: jax.Array, indptr: jax.Array
    ) -> jax.Array:
        return jsparse.BCSR((data, indices, indptr), shape=bcsr.shape) @ x

    # name -> (function of weights, x and the rest; weights; the rest)
    cases: dict[str, tuple[Callable[..., jax.Array], jax.Array, tuple[Any, ...]]] = {
        "jaxsparse": (lambda v, x, topology: CSR(v, topology) @ x, a.values, (a.topology,)),
        "dense": (lambda w, x: jnp.dot(w, x, precision="highest"), jnp.asarray(dense), ()),
        "bcsr": (bcsr_product, bcsr.data, (bcsr.indices, bcsr.indptr)),
    }
    times: dict[str, dict[str, float]] = {}
    for name, (function, weights, rest) in cases.items():
        forward = jax.jit(function)
        # A gradient of a nonlinear loss, so that its forward pass is needed as well.
        gradient = jax.jit(
            jax.value_and_grad(lambda w, x, *rest, f=function: jnp.sum(f(w, x, *rest) ** 2), (0, 1))
        )
        times[name] = {
            "forward": microseconds(functools.partial(forward, weights, x, *rest)),
            "forward_and_gradient": microseconds(functools.partial(gradient, weights, x, *rest)),
        }
    if jax.default_backend() == "cpu":
        matrix, host = a.to_scipy(), np.asarray(x)
        times["scipy"] = {"forward": microseconds(lambda: matrix @ host)}
    return {"m": m, "k": k, "n": n, "sparsity": sparsity, "nnz": a.topology.nnz, "us": times}


def eager_overhead() -> dict[str, float]:
    """What an eager call costs above the jitted one, on a problem too small to matter."""
    a = CSR.fromdense(np.eye(8, dtype=np.float32))
    x = jnp.ones((8, 8), jnp.float32)
    jitted = jax.jit(lambda a, x: spmm(a, x))
    eager, compiled = microseconds(lambda: spmm(a, x)), microseconds(lambda: jitted(a, x))
    return {"eager": eager, "jitted": compiled, "difference": eager - compiled}


def _first_line(path: str, start: str) -> str | None:
    """The first line of a file that starts so, without the start; None if there is none."""
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except OSError:
        return None
    found = (line[len(start) :].strip(" \t:") for line in lines if line.startswith(start))
    return next(found, None)


def environment() -> dict[str, Any]:
    """What the figures hold for."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=pathlib.Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "device": jax.devices()[0].device_kind,
        "driver": _first_line("/proc/driver/nvidia/version", ""),
        "processor": _first_line("/proc/cpuinfo", "model name"),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "isa": jaxsparse.backend._ffi.cpu_isa(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "scipy": scipy.__version__,
        "jaxsparse": jaxsparse.__version__,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }


def table(results: dict[str, Any]) -> str:
    """The results as text."""
    lines = [f"{'problem':<34}{'implementation':<16}{'forward us':>12}{'fwd+grad us':>14}"]
    for row in results["products"]:
        name = f"{row['m']}x{row['k']} by {row['k']}x{row['n']}, {row['sparsity']:.0%} sparse"
        for implementation, times in row["us"].items():
            both = times.get("forward_and_gradient")
            lines.append(
                f"{name:<34}{implementation:<16}{times['forward']:>12.1f}"
                + (f"{both:>14.1f}" if both is not None else "")
            )
            name = ""
    overhead = results["eager_overhead_us"]
    lines.append(
        f"eager call {overhead['eager']:.1f} us, jitted {overhead['jitted']:.1f} us, "
        f"difference {overhead['difference']:.1f} us"
    )
    return "\n".join(lines)


def main() -> None:
    """Runs all problems."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=pathlib.Path, help="write the results here as JSON")
    arguments = parser.parse_args()
    results = {
        "environment": environment(),
        "eager_overhead_us": eager_overhead(),
        "products": [
            product_times(1024, 1024, n, sparsity)
            for n, sparsity in ((128, 0.9), (4, 0.9), (128, 0.7), (1, 0.9))
        ],
    }
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
