"""Table III of Gale et al. 2020: the Transformer with sparse and with dense attention.

    python -m experiments.sparse_transformer --preset paper --data train_data_batch_1.npz

This is ``python -m examples.sparse_transformer --compare``, with all of its options: throughput and
memory are measured after training. The result is ``comparison.json``, pictures and checkpoints are
in the folders ``sparse`` and ``dense``.
"""

from __future__ import annotations

import sys

from examples.sparse_transformer.__main__ import main as run_example


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    return run_example(["--compare", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
