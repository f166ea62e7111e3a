"""What the benchmark measures: every implementation against the oracle."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import reference

from jaxsparse.bench import operations, run
from jaxsparse.bench.implementations import IMPLEMENTATIONS, implementations_of
from jaxsparse.bench.problems import SUITES, Problem, Request, attention_mask


def edge_case(name, operation="spmm"):
    suite = SUITES["edge_cases"].problems(Request(operation))
    return next(problem for problem in suite if problem.name == name)


CHECKED = [
    *(edge_case("padding", operation) for operation in ("spmm", "sddmm", "sparse_softmax")),
    edge_case("vector", "spmm"),
    Problem(
        "attention", "40", "sparse_attention",
        functools.partial(attention_mask, 40, 0.5), 8, heads=2,
    ),
]  # fmt: skip
HERE = [i for i in IMPLEMENTATIONS if i.available() is None and i.operation != "dispatch"]


def oracle(problem):
    """Output and gradients of the sum of its squares, from the tests' reference."""
    topology, x = problem.topology(), problem.operands()
    stored = slice(topology.nnz)
    if problem.operation == "spmm":
        dense, x64 = reference.to_dense(x["values"], topology), x["x"].astype(np.float64)
        y = dense @ x64
        sampled = reference.from_dense(2 * y @ x64.T, topology)[stored]
        return y, (sampled, dense.T @ (2 * y))
    if problem.operation == "sddmm":
        values = reference.sddmm(x["x"], x["y"], topology)
        slope = reference.to_dense(2 * values, topology)
        return values[stored], (slope @ x["y"], slope.T @ x["x"])
    if problem.operation == "sparse_softmax":
        y = reference.sparse_softmax(x["values"], topology)
        rows = np.asarray(topology.row_indices())[stored]
        y = y[stored]
        sums = np.bincount(rows, 2 * y * y, topology.shape[0])
        return y, (y * (2 * y - sums[rows]),)
    mask = reference.stored_mask(topology.row_offsets, topology.column_indices, topology.shape)
    return reference.attention(x["query"], x["key"], x["value"], mask), None


@pytest.mark.parametrize("implementation", HERE, ids=lambda i: f"{i.operation}-{i.name}")
def test_implementations_agree_with_the_oracle(implementation):
    precision = implementation.precision or implementation.dtypes[0]
    # Operands are rounded here and not in the oracle, and a gradient sums rounded outputs.
    limit = {"float32": 2e-5}.get(precision, 0.03)
    for problem in CHECKED:
        if problem.operation != implementation.operation:
            continue
        if implementation.computes is None:
            output, gradients = oracle(problem)
            for passed, expected in ("forward", (output,)), ("gradient", gradients):
                if passed not in implementation.passes or expected is None:
                    continue
                program = implementation.build(problem, implementation.dtypes[0], passed)
                actual = program.results(program.function(*program.operands()))
                assert len(actual) == len(expected)
                for one, other in zip(actual, expected, strict=True):
                    assert operations.relative_error(one, other) < limit, (problem, passed)
        case = run.Case(problem, implementation, implementation.dtypes[0])
        error, rows = run._check(case)
        run._check_tolerance(case, error)
        assert rows == problem.topology().shape[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("operation", ["spmm", "sddmm", "sparse_softmax", "sparse_attention"])
def test_sixteen_bits_within_tolerance(operation, dtype):
    problem = next(p for p in CHECKED if p.operation == operation)
    case = run.Case(problem, implementations_of(operation)["jaxsparse"], dtype)
    error, _ = run._check(case)
    run._check_tolerance(case, error)


def test_some_rows_of_a_large_pattern_are_checked(monkeypatch):
    problem = edge_case("tall")
    whole = operations.rows_to_check(problem.topology())
    monkeypatch.setattr(operations, "_CHECKED_POSITIONS", 100)
    part = operations.rows_to_check(problem.topology())
    assert part.rows.size == 20 and part.rows[0] == 0 and part.rows[-1] == 300
    for name, computation in operations.COMPUTATIONS.items():
        if "attention" not in name:
            operands = {
                **edge_case("tall", "sddmm").operands(),
                **edge_case("tall", "sparse_softmax").operands(),
            }
            if name == "spmm":
                operands = problem.operands()
            result = computation.reference(operands, whole)
            np.testing.assert_allclose(
                computation.part(result, part), computation.reference(operands, part), rtol=1e-5
            )
