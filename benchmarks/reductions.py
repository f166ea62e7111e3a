"""Programs that reduce the values of each row: ours, and those of XLA's segments.

Rows without entries come to -inf, in place of which results have 0: their largest number is what
differences are compared with.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.jax_programs import program_of, stored_positions
from benchmarks.problems import Problem
from jaxsparse.ops.reduce_rows import reduce_rows
from jaxsparse.timing import Program


def _without_empty(out: np.ndarray) -> np.ndarray:
    return np.where(np.isneginf(out), 0, out)


def jaxsparse_rows(
    problem: Problem, dtype: str, passed: str, *, reduction: str = "max", **options: Any
) -> Program:
    """`reduce_rows`, with its options."""
    topology = problem.topology()
    forward = passed == "forward"
    return program_of(
        lambda values, topology: reduce_rows(values, topology, reduction, **options),
        (problem.operands()["values"],),
        (topology,),
        passed,
        dtype,
        convert=(lambda gradient: gradient[: topology.nnz],),
        output=(_without_empty,),
        read=[topology.row_offsets, topology.pattern.row_order] if forward else None,
    )


def segments(problem: Problem, dtype: str, passed: str, *, reduction: str = "max") -> Program:
    """What libraries for graphs in JAX do: `segment_max`, and of logsumexp `segment_sum`, too."""
    topology = problem.topology()
    rows, _ = stored_positions(topology)

    def reduce(values: jax.Array, rows: jax.Array) -> jax.Array:
        options: Any = {"num_segments": topology.shape[0], "indices_are_sorted": True}
        most: jax.Array = jax.ops.segment_max(values, rows, **options)
        if reduction == "max":
            return most
        most = jax.lax.stop_gradient(jnp.where(jnp.isfinite(most), most, 0))
        sums = jax.ops.segment_sum(jnp.exp(values - most[rows]), rows, **options)
        return most + jnp.log(sums)

    return program_of(
        reduce,
        (problem.operands()["values"][: topology.nnz],),
        (jnp.asarray(rows, jnp.int32),),
        passed,
        dtype,
        output=(_without_empty,),
    )
