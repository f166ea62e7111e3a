"""Programs of another process in JAX's persistent compilation cache."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

CACHED = """
    import gc
    import sys
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    from jaxsparse import CSR, BlockMask, Topology, masks, recurrent, spmm

    found = []
    jax.monitoring.register_event_listener(
        lambda event, **_: found.append(event.rsplit("/")[-1]) if "cache_" in event else None
    )

    def compiled(function, *operands):
        found.clear()
        run = jax.jit(function).lower(*operands).compile()
        assert found.count("cache_hits") + found.count("cache_misses") == 1, found
        print("hit" if "cache_hits" in found else "miss")
        return np.asarray(run(*operands))

    topology = Topology.from_mask(np.eye(4, 5, dtype=bool) | np.eye(4, 5, 1, dtype=bool))
    values, x = jnp.arange(-4.0, 4), jnp.linspace(-1, 1, 60).reshape(4, 5, 3)
    product = lambda v, x, f: spmm(CSR(v, topology), x, activation=f)
    gradient = jax.grad(lambda v, x: jnp.sum(product(v, x, "gelu") ** 2))
    scan = lambda w, x: recurrent.scan(recurrent.elman("tanh"), w, jnp.zeros_like(x[0]), x)[1]
    weights, steps = jnp.eye(2), jnp.ones((3, 4, 2))
    expected = [f(*xs) for f, xs in ((gradient, (values, x)), (scan, (weights, steps)))]

    compiled(gradient, values, x)
    mesh = jax.make_mesh((4,), ("data",))
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    values, x = place(values), place(x, "data")
    with jax.set_mesh(mesh):
        got = compiled(gradient, values, x)
        np.testing.assert_allclose(got, expected[0], rtol=1e-5)
        got = compiled(scan, place(weights), place(steps, None, "data"))
        np.testing.assert_allclose(got, expected[1], rtol=1e-5)
        # What differs in a parameter alone is not taken for the same.
        jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
        relu, plain = (
            compiled(lambda v, x, f=f: product(v, x, f), values, x) for f in ("relu", None)
        )
        assert relu.min() == 0 > plain.min()
        # An equal program that is no more takes nothing with it.
        jax.config.update("jax_enable_compilation_cache", False)
        first, second = (jax.jit(lambda v, x: gradient(v, x)).lower(values, x) for _ in range(2))
        del second
        gc.collect()
        np.testing.assert_allclose(first.compile()(values, x), expected[0], rtol=1e-5)
"""


def test_compilation_cache_hits_in_another_process(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(textwrap.dedent(CACHED))
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    for outcome in ("miss", "hit"):
        run = subprocess.run(
            [sys.executable, str(worker), str(tmp_path / "programs")],
            capture_output=True,
            text=True,
            env={**os.environ, "XLA_FLAGS": flags, "PYTHONHASHSEED": str(len(outcome))},
            timeout=120,
        )
        assert run.returncode == 0, run.stderr[-3000:]
        assert run.stdout.split() == [outcome] * 5
