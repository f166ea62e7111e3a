"""Operations over devices of two processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap

WORKER = """
    import sys
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    rank, port = int(sys.argv[1]), sys.argv[2]
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    from jaxsparse import CSR, BlockMask, Topology, masks, spmm

    topology = Topology.from_mask(np.eye(4, 5, dtype=bool) | np.eye(4, 5, 1, dtype=bool))
    values = jnp.arange(1.0, topology.nse + 1)
    x = np.random.default_rng(0).standard_normal((4, 5, 3)).astype(np.float32)
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P("data"))
    sharded = jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
    loss = lambda v, x: jnp.sum(jnp.sin(spmm(CSR(v, topology), x)))
    gradient = jax.jit(jax.grad(loss), out_shardings=NamedSharding(mesh, P()))(values, sharded)
    got = np.asarray(gradient.addressable_data(0))
    with jax.default_device(jax.local_devices()[0]):
        expected = jax.grad(loss)(values, jnp.asarray(x))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    print("equal", rank)
"""


def test_two_processes(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(textwrap.dedent(WORKER))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    outputs = [p.communicate(timeout=120)[0] for p in processes]
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0 and f"equal {rank}" in output, output[-3000:]
