"""The nets over trees whose loss and gradient are one launch, in the suites of dynamic networks."""

from __future__ import annotations

import numpy as np
import pytest
from test_bench_dynamic import made_data, small  # noqa: F401

from benchmarks.dynamic import counted, models
from benchmarks.dynamic.batches import Scripts
from benchmarks.dynamic.implementations import IMPLEMENTATIONS
from jaxsparse import dynamic


@pytest.mark.parametrize("model", ["tree_lstm", "td_rnn"])
def test_the_loss_of_one_launch_is_that_of_the_net(model):
    """By labels of rows, and of graphs."""
    problem = small(model)
    assert IMPLEMENTATIONS["jaxsparse-loss"].takes(problem)
    net, (step,) = problem.net, problem.groups()[0]
    batches = Scripts(8)
    batch = batches.one(problem, step, batches.room(problem, [step]))
    params = net.parameters(problem.sizes)
    rows = params["table"][np.maximum(net.word_ids(batch), 0)]
    expected, _ = net.loss(dynamic.scan, params, rows, batch)
    found, _ = models.loss_of_words(dynamic.loss, net.cell, params, rows, batch)
    assert expected > 0.1 and found == pytest.approx(float(expected), rel=1e-5)


def test_weights_are_loaded_as_often_as_by_scans():
    problem = small("tree_lstm")
    loads = [
        counted.weight_bytes(problem, name, "bfloat16", "training")
        for name in ("jaxsparse-loss", "jaxsparse-teams")
    ]
    assert loads[0] == loads[1]
    assert not IMPLEMENTATIONS["jaxsparse-loss"].takes(small("lstm"))
