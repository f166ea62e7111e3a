"""A suite of small problems for the benchmark: the edge cases that kernels are tested on."""

from __future__ import annotations

import functools

from edge_cases import EDGE_CASES

from benchmarks.problems import ON_MATRICES, SUITES, Problem, Request, Suite


def _edge_cases(request):
    for name, make in EDGE_CASES.items():
        for n in request.sizes((make()[1],)):
            label = name if n is None or request.n is None else f"{name}_n{n}"
            pattern = functools.partial(lambda make: make()[0], make)
            yield Problem("edge_cases", label, request.operation, pattern, n)


SUITES["edge_cases"] = Suite(_edge_cases, ON_MATRICES, "odd, empty, padded", has_sparsity=False)


def edge_case(name, operation="spmm"):
    problems = _edge_cases(Request(operation))
    return next(problem for problem in problems if problem.name == name)
