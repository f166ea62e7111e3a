"""What the benchmark measures: every implementation against the oracle."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from bench_problems import edge_case

from benchmarks import operations
from benchmarks.cases import OperationCase
from benchmarks.implementations import IMPLEMENTATIONS, PASSES, implementations_of
from benchmarks.problems import SUITES, Problem, Request, attention_mask
from jaxsparse.timing.measurement import copies_to_rotate

CHECKED = [
    *(
        edge_case("padding", operation)
        for operation in ("spmm", "spmm_bias_relu", "spmm_pullback", "sddmm")
    ),
    edge_case("padding", "sparse_softmax"),
    edge_case("padding", "reduce_rows"),
    edge_case("vector", "spmm"),
    Problem(
        "attention", "40", "sparse_attention",
        functools.partial(attention_mask, 40, 0.5), 8, heads=2,
    ),
]  # fmt: skip
HERE = [i for i in IMPLEMENTATIONS if i.available() is None and i.operation != "dispatch"]


def oracle(problem):
    """Outputs, and gradients of the sum of their squares, from the tests' reference."""
    topology, x = problem.topology(), problem.operands()
    stored = slice(topology.nnz)
    if problem.operation == "spmm":
        dense, x64 = reference.to_dense(x["values"], topology), x["x"].astype(np.float64)
        y = dense @ x64
        sampled = reference.from_dense(2 * y @ x64.T, topology)[stored]
        return (y,), (sampled, dense.T @ (2 * y))
    if problem.operation == "spmm_bias_relu":
        dense, x64 = reference.to_dense(x["values"], topology), x["x"].astype(np.float64)
        y = np.maximum(dense @ x64 + x["bias"][:, None], 0)
        sampled = reference.from_dense(2 * y @ x64.T, topology)[stored]
        return (y,), (sampled, dense.T @ (2 * y), (2 * y).sum(1))
    if problem.operation == "spmm_pullback":
        dense, x64 = reference.to_dense(x["values"], topology), x["x"].astype(np.float64)
        sampled = reference.from_dense(x["dy"].astype(np.float64) @ x64.T, topology)[stored]
        return (sampled, dense.T @ x["dy"]), None
    if problem.operation == "sddmm":
        values = reference.sddmm(x["x"], x["y"], topology)
        slope = reference.to_dense(2 * values, topology)
        return (values[stored],), (slope @ x["y"], slope.T @ x["x"])
    if problem.operation == "sparse_softmax":
        y = reference.sparse_softmax(x["values"], topology)
        rows = np.asarray(topology.row_indices)[stored]
        y = y[stored]
        sums = np.bincount(rows, 2 * y * y, topology.shape[0])
        return (y,), (y * (2 * y - sums[rows]),)
    if problem.operation == "reduce_rows":
        y = reference.reduce_rows(x["values"], topology, "max")
        of_entries = y[np.asarray(topology.row_indices)[stored]]
        equal = x["values"][stored] == of_entries
        return (np.where(np.isneginf(y), 0, y),), (np.where(equal, 2 * of_entries, 0),)
    mask = reference.stored_mask(topology.row_offsets, topology.column_indices, topology.shape)
    return (reference.attention(x["query"], x["key"], x["value"], mask),), None


@pytest.mark.parametrize("implementation", HERE, ids=lambda i: f"{i.operation}-{i.name}")
def test_implementations_agree_with_the_oracle(implementation):
    precision = implementation.precision or implementation.dtypes[0]
    # Operands are rounded here and not in the oracle, and a gradient sums rounded outputs.
    limit = {"float32": 2e-5}.get(precision, 0.03)
    for problem in CHECKED:
        if problem.operation != implementation.operation:
            continue
        if implementation.computes is None:
            outputs, gradients = oracle(problem)
            for passed, expected in ("forward", outputs), ("gradient", gradients):
                if passed not in implementation.passes or expected is None:
                    continue
                program = implementation.build(problem, implementation.dtypes[0], passed)
                actual = program.results(program.function(*program.operands()))
                assert len(actual) == len(expected)
                for one, other in zip(actual, expected, strict=True):
                    assert operations.relative_error(one, other) < limit, (problem, passed)
        case = OperationCase(problem, implementation, implementation.dtypes[0], PASSES)
        check = case.check("forward")
        assert check.relative_error <= check.limit
        m, k = problem.topology().shape
        assert check.checked == (m + k if problem.operation == "spmm_pullback" else m)


@pytest.mark.parametrize("result", [0, 1])
def test_every_result_is_checked(result):
    problem = edge_case("padding", "spmm_pullback")
    own = implementations_of("spmm_pullback")["parts"]

    def build(*options):
        program = own.build(*options)

        def wrong(out):
            results = list(program.results(out))
            results[result] = results[result] * 1.001
            return tuple(results)

        return dataclasses.replace(program, results=wrong)

    for spoiled, fine in (own, True), (dataclasses.replace(own, build=build), False):
        check = OperationCase(problem, spoiled, "float32", ("forward",)).check("forward")
        assert (check.relative_error <= check.limit) == fine


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "operation",
    [
        "spmm",
        "spmm_bias_relu",
        "spmm_pullback",
        "sddmm",
        "sparse_softmax",
        "reduce_rows",
        "sparse_attention",
    ],
)
def test_sixteen_bits_within_tolerance(operation, dtype):
    problem = next(p for p in CHECKED if p.operation == operation)
    implementation = implementations_of(operation)["jaxsparse"]
    check = OperationCase(problem, implementation, dtype, PASSES).check("forward")
    assert check.relative_error <= check.limit


def test_some_rows_of_a_large_pattern_are_checked(monkeypatch):
    problem = edge_case("tall")
    topology = problem.topology()
    whole = [operations.rows_to_check(topology, transposed=of) for of in (False, True)]
    monkeypatch.setattr(operations, "_CHECKED_POSITIONS", 100)
    part = [operations.rows_to_check(topology, transposed=of) for of in (False, True)]
    assert operations.rows_to_check(topology, n=50).rows.size == 16
    assert part[0].rows.size == 20 and part[0].rows[0] == 0 and part[0].rows[-1] == 300
    assert part[1].rows.size == min(16, topology.shape[1])
    for name, results in operations.COMPUTATIONS.items():
        if "attention" in name:
            continue
        operation = name if name in operations.MEASURED else "sparse_softmax"
        operands = edge_case("tall", operation).operands()
        for computation in results:
            of = computation.transposed
            result = computation.reference(operands, whole[of])
            np.testing.assert_allclose(
                computation.part(result, part[of]),
                computation.reference(operands, part[of]),
                rtol=1e-5,
            )


# ---- what a pass reads, which copies must keep out of a GPU's cache ----


def expected_bytes(problem, dtype, gradient):
    """By hand: values of dtype, 16-bit indices, all else 32 bits."""
    topology, n = problem.topology(), problem.n
    (m, k), nse, size = topology.shape, topology.nse, jnp.dtype(dtype).itemsize
    offsets, columns, order = 4 * (m + 1), 2 * nse, 4 * m
    starts = 4 * (m // 64) * (k // 64 + 1) * 64  # m and k are multiples of 64
    both = offsets + columns + order + starts + 4 * (k + 1) + 2 * nse + 4 * k + 4 * nse
    if problem.operation == "spmm":
        return size * (nse + k * n) + (both if gradient else offsets + columns + order + starts)
    if problem.operation == "sddmm":
        return size * n * (m + k) + (both if gradient else offsets + columns + starts)
    return size * nse + offsets + order


@pytest.mark.parametrize("operation", ["spmm", "sddmm", "sparse_softmax"])
def test_bytes_read_of_the_square_suite(operation):
    table = implementations_of(operation)
    for problem in SUITES["square"].problems(Request(operation)):
        for passed, dtype in itertools.product(PASSES, ("float32", "bfloat16")):
            read = table["jaxsparse"].build(problem, dtype, passed).bytes_read
            assert read == expected_bytes(problem, dtype, passed == "gradient")
            assert 2**27 < read * copies_to_rotate(read) <= 2**27 + read
        for implementation in table.values():
            if implementation.available() is None:
                for passed in implementation.passes:
                    dtype = implementation.dtype("float32")
                    read = implementation.build(problem, dtype, passed).bytes_read
                    assert read * copies_to_rotate(read) > 2**27


def test_wide_indices_are_read_where_16_bits_do_not_do():
    problem = edge_case("many_columns")
    topology = problem.topology()
    (m, k), nse, starts = topology.shape, topology.nse, topology.layouts["tile_starts"].size
    program = implementations_of("spmm")["jaxsparse"].build(problem, "float32", "forward")
    assert program.bytes_read == 4 * (nse + k * problem.n + m + 1 + nse + m + starts)


READERS = [(i, p) for i in HERE for p in i.passes if i.name.startswith("jaxsparse")]


@pytest.mark.parametrize(("implementation", "passed"), READERS, ids=lambda x: getattr(x, "name", x))
def test_what_is_read_is_copied_and_nothing_else_matters(implementation, passed):
    problem = next(p for p in CHECKED if p.operation == implementation.operation)
    program = implementation.build(problem, "float32", passed)
    first, second = program.operands(), program.operands()
    copied = [a is not b for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True)]
    leaves, tree = jax.tree.flatten(first)
    others = jax.tree.leaves(second)
    assert sum(x.nbytes for x, own in zip(leaves, copied, strict=True) if own) == (
        program.bytes_read
    )
    for a, b, own in zip(leaves, others, copied, strict=True):
        assert not own or a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer()
    erased = [x if own else jnp.zeros_like(x) for x, own in zip(leaves, copied, strict=True)]
    for a, b in zip(
        program.results(program.function(*first)),
        program.results(program.function(*jax.tree.unflatten(tree, erased))),
        strict=True,
    ):
        # Not bitwise: XLA's scatter on a GPU adds in any order.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
