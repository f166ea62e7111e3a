"""Commands of `benchmarks`, for tests: what their options select, and how they are refused."""

from __future__ import annotations

import pytest

from benchmarks import __main__ as cli
from benchmarks.recurrent import selection


def planned(argv, platform="cpu"):
    """What `run recurrent` selects."""
    arguments = cli.make_parser().parse_args(["run", "recurrent", *argv])
    return selection.select(cli.asked(arguments), platform)


def refused(argv, capsys):
    """The line in which a command says what is wrong with its options."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1
    return error
