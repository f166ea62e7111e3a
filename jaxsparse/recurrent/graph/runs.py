"""A graph some of whose nodes run together, and the others each on its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxsparse.batching import over_batch
from jaxsparse.primitive import core_dims
from jaxsparse.recurrent.graph.operands import (
    Operands,
    Results,
    flat_results,
    given_states,
    signature,
    split,
)
from jaxsparse.recurrent.graph.plain import node_alone

# Of a graph's operands, the states of the nodes before the run's first one, and the graph's params:
# the results of the run's nodes.
Compute = Callable[[Operands, Sequence[Any], dict[str, Any]], list[Results]]


def in_runs(runs: Mapping[int, Compute], *operands: jax.Array, **params: Any) -> list[Any]:
    """A graph's results where some nodes run together.

    Args:
        runs: by their first node, how the results of so many neighbouring nodes are computed.
        *operands: of the primitive, with all batch dimensions.
        **params: of the primitive.
    """
    core_rank = len(core_dims(signature(params).operands[0][1]))
    compute = functools.partial(_of_one_entry, runs, params)
    return over_batch(compute, operands[0].ndim - core_rank, *operands)


def _of_one_entry(
    runs: Mapping[int, Compute], params: dict[str, Any], *operands: jax.Array
) -> list[Any]:
    x = split(operands, params)
    every: list[Results] = []
    states: list[Any] = []
    while (n := len(every)) < len(params["nodes"]):
        if n in runs:
            results = runs[n](x, states, params)
        else:
            results = [node_alone(n, x, states, {**params, "variant": None})]
        for r in results:
            given = given_states(params["nodes"][len(every)])
            states.append(r.states if given is None else x.nodes[len(every)].inputs[given])
            every.append(r)
    return flat_results(params["nodes"], every)
