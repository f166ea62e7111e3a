"""The CUDA kernels of all products and the softmax, for a run under compute-sanitizer.

    export XLA_PYTHON_CLIENT_ALLOCATOR=platform
    compute-sanitizer --tool memcheck python tests/cuda_sanitizer.py

The other tools are racecheck, initcheck and synccheck.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import CSR, Topology, sddmm, sparse_softmax
from jaxsparse.ops import matmul


def main() -> None:
    """Runs the kernels on one odd-sized pattern with padding, in float32 and bfloat16."""
    rng = np.random.default_rng(0)
    topology = Topology.from_mask(rng.random((37, 53)) < 0.3, nse=700)

    for dtype in (jnp.float32, jnp.bfloat16):
        values, x, y = (
            jnp.asarray(rng.standard_normal(shape), dtype) for shape in (700, (53, 19), (37, 19))
        )
        a = CSR(values, topology)
        results = [sddmm(y, x, topology).values]
        for transpose, dense in ((False, x), (True, y)):
            for left in (False, True):
                operand = jnp.asarray(np.asarray(dense).T.copy()) if left else dense
                results.append(
                    matmul.product("spmm", a, operand, transpose=transpose, dense_on_left=left)
                )
        results += jax.jvp(
            lambda v: sparse_softmax(CSR(v, topology)).values, (a.values,), (results[0],)
        )
        for result in results:
            assert np.isfinite(np.asarray(result, np.float32)).all()
    print("all kernels ran on", jax.devices()[0].device_kind)


if __name__ == "__main__":
    main()
