"""Problems that tests measure."""

from __future__ import annotations

from jaxsparse.bench.problems import SUITES, Request


def edge_case(name, operation="spmm"):
    suite = SUITES["edge_cases"].problems(Request(operation))
    return next(problem for problem in suite if problem.name == name)
