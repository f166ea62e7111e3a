"""Programs of JAX: jaxsparse, dense products, JAX's own sparse matrices.

Patterns and values are arguments of the compiled function, never constants in it. A gradient is
that of the sum of the squares of the output, so that the forward pass is needed as well.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.problems import Problem
from jaxsparse.csr import CSR
from jaxsparse.ops.attention_masks import with_block_mask
from jaxsparse.ops.linear import linear
from jaxsparse.ops.matmul import sddmm, spmm
from jaxsparse.ops.sparse_attention import sparse_attention
from jaxsparse.ops.sparse_softmax import sparse_softmax
from jaxsparse.quantization import quantized
from jaxsparse.timing import Program
from jaxsparse.topology import Topology

Convert = Callable[[np.ndarray], np.ndarray]


def fresh_copies(operands: Any, read: Any) -> tuple[Callable[[], Any], int]:
    """What copies a pytree's arrays that are read, and shares the others; the bytes of a copy."""
    leaves, tree = jax.tree.flatten(operands)
    read_ids = {id(x) for x in jax.tree.leaves(read)}
    originals = [x for x in leaves if id(x) in read_ids]
    copy = jax.jit(lambda arrays: [jnp.copy(x) for x in arrays])  # one dispatch for all of them

    def fresh() -> Any:
        copies = iter(copy(originals))
        return jax.tree.unflatten(tree, [next(copies) if id(x) in read_ids else x for x in leaves])

    return fresh, sum(x.nbytes for x in originals)


def program_of(
    function: Callable[..., Any],
    differentiable: Sequence[Any],
    rest: Sequence[Any],
    passed: str,
    dtype: str,
    convert: Sequence[Convert | None] = (),
    output: Sequence[Convert | None] = (),
    read: Sequence[jax.Array] | None = None,
) -> Program:
    """Of a function of dense operands to differentiate, then of other arrays.

    ``convert`` and ``output`` turn gradients and outputs into what others compute. ``read`` are the
    arrays in ``rest`` that the pass reads, by default all. Gradients are those of a single output.
    """
    dense = tuple(jnp.asarray(x).astype(dtype) for x in differentiable)
    operands, bytes_read = fresh_copies((*dense, *rest), (dense, rest if read is None else read))

    def loss(*operands: Any) -> jax.Array:
        return jnp.sum(jnp.square(function(*operands).astype(jnp.float32)))

    forward = passed == "forward"
    which = tuple(range(len(differentiable)))
    compiled = jax.jit(function if forward else jax.value_and_grad(loss, argnums=which))

    def results(out: Any) -> tuple[np.ndarray, ...]:
        leaves = jax.tree.leaves(out if forward else out[1])
        arrays = [np.asarray(x) for x in leaves]
        changes = itertools.chain(output if forward else convert, itertools.repeat(None))
        return tuple(f(x) if f else x for f, x in zip(changes, arrays, strict=False))

    return Program(
        function=compiled,
        operands=operands,
        bytes_read=bytes_read,
        wait=jax.block_until_ready,
        results=results,
    )


def stored_positions(topology: Topology) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the stored entries, without padding, on the host."""
    offsets, nnz = np.asarray(topology.row_offsets), topology.nnz
    rows = np.repeat(np.arange(topology.shape[0]), np.diff(offsets))
    return rows, np.asarray(topology.column_indices)[:nnz]


def _cut(nnz: int) -> Convert:
    return lambda values: values[:nnz]


# ---- jaxsparse ----


_OFFSETS, _COLUMNS, _ORDER, _STARTS = range(4)  # of what Pattern.operands gives, and of tiles
_ALL = (_OFFSETS, _COLUMNS, _ORDER, _STARTS)


def _read(
    topology: Topology, options: dict[str, Any], *parts: int, transposed: bool = False
) -> list[jax.Array]:
    """What a pass reads of a topology: parts of the pattern, or both orientations of it whole.

    Plain XLA scatters: it reads neither the transposed pattern nor what is derived of rows.
    """
    rows = (*topology.pattern.operands(), topology.layouts["tile_starts"])
    if options.get("implementation") == "xla":
        return [rows[part] for part in parts if part not in (_ORDER, _STARTS)]
    if transposed:
        return [*rows, *topology.transposed_pattern.operands(), topology.permutation]
    return [rows[part] for part in parts]


def jaxsparse_spmm(problem: Problem, dtype: str, passed: str, **options: Any) -> Program:
    """`spmm`, with its options ``implementation`` and ``variant``."""
    x, topology = problem.operands(), problem.topology()
    return program_of(
        lambda values, x, topology: spmm(CSR(values, topology), x, **options),
        (x["values"], x["x"]),
        (topology,),
        passed,
        dtype,
        convert=(_cut(topology.nnz),),
        read=_read(topology, options, *_ALL, transposed=passed != "forward"),
    )


def packed_spmm(
    problem: Problem,
    dtype: str,
    passed: str,
    *,
    x_on_left: bool = False,
    weights: str | None = None,
    form: str | None = None,
    **options: Any,
) -> Program:
    """`spmm` of a `Packed`, or `linear` of x that has a column of it in each row.

    ``weights`` is the matrix's dtype, if it is not x's. ``form`` is "cells" or "gaps"; by default
    it is what `CSR.pack` takes for as many columns as x has.
    """
    x, topology = problem.operands(), problem.topology()
    how: dict[str, Any] = {"columns": problem.n} if form is None else {}
    how["cell"] = 0 if form == "gaps" else None
    packed = CSR(jnp.asarray(x["values"]), topology).pack(weights or dtype, **how)
    multiply = functools.partial(linear if x_on_left else spmm, **options)
    return program_of(
        (lambda x, packed: multiply(x, packed)) if x_on_left else (lambda x, a: multiply(a, x)),
        (np.ascontiguousarray(x["x"].T) if x_on_left else x["x"],),
        (packed,),
        passed,
        dtype,
        output=(np.transpose,) if x_on_left else (),
    )


def jaxsparse_bias_relu(
    problem: Problem, dtype: str, passed: str, *, fused: bool = True, **options: Any
) -> Program:
    """`spmm` with bias and ReLU fused, or left to XLA."""
    x, topology = problem.operands(), problem.topology()

    def layer(values: jax.Array, x: jax.Array, bias: jax.Array, topology: Topology) -> jax.Array:
        a = CSR(values, topology)
        if fused:
            return spmm(a, x, bias=bias, activation="relu", **options)
        return jax.nn.relu(spmm(a, x, **options) + bias[:, None])

    return program_of(
        layer,
        (x["values"], x["x"], x["bias"]),
        (topology,),
        passed,
        dtype,
        convert=(_cut(topology.nnz),),
        read=_read(topology, options, *_ALL, transposed=passed != "forward"),
    )


def jaxsparse_pullback(problem: Problem, dtype: str, passed: str, **options: Any) -> Program:
    """The gradients of `spmm` in values and x, given that of its result."""
    x, topology = problem.operands(), problem.topology()

    def pullback(values: jax.Array, x: jax.Array, dy: jax.Array, topology: Topology) -> Any:
        def forward(values: jax.Array, x: jax.Array) -> jax.Array:
            return spmm(CSR(values, topology), x, **options)

        return jax.vjp(forward, values, x)[1](dy)

    return program_of(
        pullback,
        (x["values"], x["x"], x["dy"]),
        (topology,),
        passed,
        dtype,
        output=(_cut(topology.nnz),),
        read=_read(topology, options, _OFFSETS, _COLUMNS, _STARTS, transposed=True),
    )


def parts_of_pullback(problem: Problem, dtype: str, passed: str) -> Program:
    """`sddmm`, and `spmm` by the transposed matrix, which is there already with its values.

    Two calls, so that each is what it is by itself.
    """
    x, topology = problem.operands(), problem.topology()
    transposed = topology.T
    sampled = jax.jit(lambda dy, x, topology: sddmm(dy, x, topology).values)
    product = jax.jit(lambda values, dy, transposed: spmm(CSR(values, transposed), dy))
    values = x["values"][np.asarray(topology.permutation)]
    dense = [jnp.asarray(array).astype(dtype) for array in (values, x["x"], x["dy"])]
    patterns = [_read(t, {}, *_ALL) for t in (topology, transposed)]
    operands, bytes_read = fresh_copies((*dense, topology, transposed), (dense, patterns))

    def parts(values: Any, x: Any, dy: Any, topology: Any, transposed: Any) -> Any:
        return sampled(dy, x, topology), product(values, dy, transposed)

    def results(out: Any) -> tuple[np.ndarray, ...]:
        of_values, of_x = (np.asarray(x) for x in out)
        return of_values[: topology.nnz], of_x

    return Program(
        function=parts,
        operands=operands,
        bytes_read=bytes_read,
        wait=jax.block_until_ready,
        results=results,
    )


def jaxsparse_sddmm(problem: Problem, dtype: str, passed: str, **options: Any) -> Program:
    """`sddmm`, with its options."""
    x, topology = problem.operands(), problem.topology()
    return program_of(
        lambda x, y, topology: sddmm(x, y, topology, **options).values,
        (x["x"], x["y"]),
        (topology,),
        passed,
        dtype,
        output=(_cut(topology.nnz),),
        read=_read(topology, options, _OFFSETS, _COLUMNS, _STARTS, transposed=passed != "forward"),
    )


def jaxsparse_softmax(problem: Problem, dtype: str, passed: str, **options: Any) -> Program:
    """`sparse_softmax`, with its options."""
    topology = problem.topology()
    cut = _cut(topology.nnz)
    return program_of(
        lambda values, topology: sparse_softmax(CSR(values, topology), **options).values,
        (problem.operands()["values"],),
        (topology,),
        passed,
        dtype,
        convert=(cut,),
        output=(cut,),
        read=_read(topology, options, _OFFSETS, _ORDER),
    )


@functools.lru_cache(maxsize=1)  # both passes of a problem take it
def _with_block_mask(problem: Problem) -> Topology:
    return with_block_mask(problem.topology())


def jaxsparse_attention(problem: Problem, dtype: str, passed: str, **options: Any) -> Program:
    """`sparse_attention` by a topology, with its block mask where one pays, and its options."""
    topology = _with_block_mask(problem)
    mask = topology.layouts.get("block_mask")
    forward = passed == "forward"
    # A kernel reads the pattern or the mask; the composition reads all of the topology.
    read = _read(topology, options, *_ALL, transposed=not forward)
    if mask is not None:
        read += [*mask.rows, *(() if forward else mask.columns)]
    return program_of(
        lambda q, k, v, topology: sparse_attention(q, k, v, topology, **options),
        tuple(problem.operands()[name] for name in ("query", "key", "value")),
        (topology,),
        passed,
        dtype,
        read=read,
    )


def composition(q: jax.Array, k: jax.Array, v: jax.Array, topology: Topology) -> jax.Array:
    """Attention of `sddmm`, `sparse_softmax` and `spmm`, (B, T, N, H): scores of what is stored."""
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    scores = sddmm(query, key, topology, preferred_element_type=jnp.float32)
    weights = sparse_softmax(scores, scale=q.shape[-1] ** -0.5).values
    out = spmm(CSR(weights.astype(q.dtype), topology), value)
    return jnp.swapaxes(out, 1, 2)


def composed_attention(problem: Problem, dtype: str, passed: str) -> Program:
    """Attention composed of products and a softmax."""
    return program_of(
        composition,
        tuple(problem.operands()[name] for name in ("query", "key", "value")),
        (problem.topology(),),
        passed,
        dtype,
    )


def dispatched(problem: Problem, dtype: str, passed: str, *, jitted: bool) -> Program:
    """`spmm` called eagerly, or compiled: what a call costs."""
    program = jaxsparse_spmm(problem, dtype, passed)
    if jitted:
        return program
    values, x, topology = program.operands()
    a = CSR(values, topology)
    return Program(
        function=lambda a, x: spmm(a, x),
        operands=lambda: (a, x),
        bytes_read=program.bytes_read,
        wait=program.wait,
        results=program.results,
    )


# ---- peers ----


def _weights(problem: Problem) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """The matrix stored densely, and rows and columns of what is stored."""
    topology = problem.topology()
    stored = stored_positions(topology)
    weights = np.zeros(topology.shape, np.float32)
    weights[stored] = problem.operands()["values"][: topology.nnz]
    return weights, stored


def dense_spmm(problem: Problem, dtype: str, passed: str, *, precision: Any) -> Program:
    """The product with the matrix stored densely; its gradient is that of every weight."""
    x = problem.operands()
    weights, stored = _weights(problem)
    return program_of(
        lambda weights, x: jnp.dot(weights, x, precision=precision),
        (weights, x["x"]),
        (),
        passed,
        dtype,
        convert=(lambda gradient: gradient[stored],),
    )


def dense_quantized_spmm(problem: Problem, dtype: str, passed: str, *, weights: str) -> Program:
    """With a dense matrix of 8 bits, which XLA converts within the product, and scales of rows."""
    x, topology = problem.operands(), problem.topology()
    m, kind = topology.shape[0], jnp.dtype(weights)
    values = jnp.asarray(x["values"])
    numbers, scales = quantized(values, topology.row_indices, m=m, dtype=kind)
    matrix = np.zeros(topology.shape, kind)
    matrix[stored_positions(topology)] = np.asarray(numbers)[: topology.nnz]

    def product(x: jax.Array, matrix: jax.Array, scales: jax.Array) -> jax.Array:
        y = jnp.dot(matrix.astype(x.dtype), x, preferred_element_type=jnp.float32)
        return (y * scales[:, None]).astype(x.dtype)

    return program_of(product, (x["x"],), (jnp.asarray(matrix), scales), passed, dtype)


def dense_bias_relu(problem: Problem, dtype: str, passed: str, *, precision: Any) -> Program:
    """The same with the matrix stored densely; XLA fuses what follows the product."""
    x = problem.operands()
    weights, stored = _weights(problem)
    return program_of(
        lambda weights, x, bias: jax.nn.relu(
            jnp.dot(weights, x, precision=precision) + bias[:, None]
        ),
        (weights, x["x"], x["bias"]),
        (),
        passed,
        dtype,
        convert=(lambda gradient: gradient[stored],),
    )


def dense_pullback(problem: Problem, dtype: str, passed: str, *, precision: Any) -> Program:
    """The gradients of every weight and of x."""
    x = problem.operands()
    weights, stored = _weights(problem)
    return program_of(
        lambda weights, x, dy: (
            jnp.dot(dy, x.T, precision=precision),
            jnp.dot(weights.T, dy, precision=precision),
        ),
        (weights, x["x"], x["dy"]),
        (),
        passed,
        dtype,
        output=(lambda gradient: gradient[stored],),
    )


def dense_sddmm(problem: Problem, dtype: str, passed: str, *, precision: Any) -> Program:
    """All of x y^T, then the stored positions gathered."""
    x = problem.operands()
    return program_of(
        lambda x, y, rows, columns: jnp.dot(x, y.T, precision=precision)[rows, columns],
        (x["x"], x["y"]),
        tuple(jnp.asarray(indices, jnp.int32) for indices in stored_positions(problem.topology())),
        passed,
        dtype,
    )


def dense_attention(
    problem: Problem, dtype: str, passed: str, *, precision: Any, implementation: Any
) -> Program:
    """Causal attention over all positions: more than the pattern stores, as it can't skip any."""

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        with jax.default_matmul_precision(precision):
            return jax.nn.dot_product_attention(
                q,
                k,
                v,
                is_causal=True,
                implementation=implementation,
            )

    operands = tuple(problem.operands()[name] for name in ("query", "key", "value"))
    return program_of(attention, operands, (), passed, dtype)


def copy_of_values(problem: Problem, dtype: str, passed: str) -> Program:
    """Reads the values and writes as many: no softmax can move fewer bytes."""
    values = problem.operands()["values"][: problem.topology().nnz]
    return program_of(jnp.copy, (values,), (), passed, dtype)
