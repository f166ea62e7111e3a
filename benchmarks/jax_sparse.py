"""Programs of what JAX itself has for sparse matrices and graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse as jsparse

from benchmarks.jax_programs import program_of, stored_positions
from benchmarks.problems import Problem
from jaxsparse.timing import Program


def segments_spmm(problem: Problem, dtype: str, passed: str) -> Program:
    """What libraries for graphs in JAX do: gathers rows of x, and adds them by `segment_sum`."""
    x, topology = problem.operands(), problem.topology()
    rows, columns = stored_positions(topology)

    def product(values: jax.Array, x: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
        y: jax.Array = jax.ops.segment_sum(
            values[:, None] * x[columns], rows, topology.shape[0], indices_are_sorted=True
        )
        return y

    dense = (x["values"][: topology.nnz], x["x"])
    indices = (jnp.asarray(rows, jnp.int32), jnp.asarray(columns, jnp.int32))
    return program_of(product, dense, indices, passed, dtype)


def bcoo_spmm(problem: Problem, dtype: str, passed: str) -> Program:
    """The product with `jax.experimental.sparse.BCOO`."""
    x, topology = problem.operands(), problem.topology()
    indices = jnp.asarray(np.stack(stored_positions(topology), -1), jnp.int32)

    def product(data: jax.Array, x: jax.Array, indices: jax.Array) -> jax.Array:
        parts, sorted_so = (data, indices), {"indices_sorted": True, "unique_indices": True}
        y: jax.Array = jsparse.BCOO(parts, shape=topology.shape, **sorted_so) @ x
        return y

    return program_of(product, (x["values"][: topology.nnz], x["x"]), (indices,), passed, dtype)


def bcsr_spmm(problem: Problem, dtype: str, passed: str) -> Program:
    """The product with `jax.experimental.sparse.BCSR`, by cuSPARSE on a GPU."""
    x, topology = problem.operands(), problem.topology()
    nnz, shape = topology.nnz, topology.shape

    def product(data: jax.Array, x: jax.Array, indices: jax.Array, indptr: jax.Array) -> jax.Array:
        y: jax.Array = jsparse.BCSR((data, indices, indptr), shape=shape) @ x
        return y

    program = program_of(
        product,
        (x["values"][:nnz], x["x"]),
        (topology.column_indices[:nnz], topology.row_offsets),
        passed,
        dtype,
    )
    with _cusparse():
        program.wait(program.function(*program.operands()))  # compiles it
    return program


@contextlib.contextmanager
def _cusparse() -> Iterator[None]:
    """JAX's matrices use cuSPARSE on a GPU only with this flag, read when they are lowered."""
    name = "jax_bcoo_cusparse_lowering"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)
