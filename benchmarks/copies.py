"""How fast the device copies, which what is bound by memory is compared with."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxsparse.timing import Program, measure

BYTES = 2**31

# The runtime's own copy, and a kernel that reads and writes as much.
COPIES = {"copy": jnp.copy, "kernel": lambda x: x ^ 1}


@functools.cache
def bytes_per_us(nbytes: int = BYTES) -> float:
    """Bytes read and written by the faster of two ways, at its best call."""
    x = jnp.zeros(nbytes // 4, jnp.uint32)
    least = min(_least_us(jax.jit(copy), x) for copy in COPIES.values())
    return 2 * x.nbytes / least


def _least_us(copy: jax.stages.Wrapped, x: jax.Array) -> float:
    program = Program(
        function=copy,
        operands=lambda: (x,),
        bytes_read=x.nbytes,
        wait=jax.block_until_ready,
        results=lambda out: (),
    )
    on_device = jax.default_backend() == "gpu"
    return measure(program, seconds=0.1, repeats=3, on_device=on_device).us_range[0]
