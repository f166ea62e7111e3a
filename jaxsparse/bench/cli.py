"""The commands bench, plot and table."""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import jax

from jaxsparse.bench import plan, plots, report
from jaxsparse.bench.choices import Asked, UsageError
from jaxsparse.bench.implementations import DTYPES, PASSES
from jaxsparse.bench.operations import OPERATIONS
from jaxsparse.bench.panels import read_result
from jaxsparse.bench.recurrent import plan as recurrent
from jaxsparse.bench.run import Effort, Result, execute

# what is measured -> the module that plans it
PLANS: dict[str, ModuleType] = {**dict.fromkeys(OPERATIONS, plan), "recurrent": recurrent}

INTERRUPTED = 130
"""Exit status after Ctrl-C, as of a shell."""


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"must be positive, got {text}")
        return value

    parse.__name__ = kind.__name__  # argparse names it in its messages
    return parse


def _sparsity(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be in [0, 1), got {text}")
    return value


_sparsity.__name__ = "float"


def _picture(option: str, text: str | None, *, beside: pathlib.Path) -> pathlib.Path:
    """Where a picture is written: what the option says, or beside a file."""
    path = beside.with_suffix(".png") if text is None else pathlib.Path(text)
    if path.suffix not in plots.FORMATS:
        raise UsageError(option, f"must end in {', '.join(plots.FORMATS)}, got {text!r}")
    if not plots.available():
        raise UsageError(option, plots.MISSING)
    return path


def add_commands(commands: Any) -> None:
    """Adds bench, plot and table to a parser's subcommands."""
    bench = commands.add_parser("bench", help="time an operation beside its peers")
    bench.add_argument("operation", metavar="OPERATION", choices=PLANS, help=_names(PLANS))
    bench.add_argument("--suite", nargs="+", metavar="NAME", help="problems, see --list")
    bench.add_argument(
        "--problem", nargs="+", action="extend", metavar="GLOB", help="only problems of such names"
    )
    bench.add_argument("--implementation", nargs="+", metavar="NAME", help="only these, see --list")
    bench.add_argument(
        "--variant", nargs="+", metavar="GLOB", default=(), help="also with such kernels forced"
    )
    bench.add_argument(
        "--dtype", nargs="+", choices=DTYPES, metavar="NAME",
        help=f"{', '.join(DTYPES)}; float32 by default; what has one of its own keeps it; in "
        "recurrent, that of weights and state in place of the problems' own",
    )  # fmt: skip
    bench.add_argument("--n", nargs="+", type=_positive(int), metavar="N", help="columns, features")
    bench.add_argument("--sparsity", nargs="+", type=_sparsity, metavar="S", help="from 0 to 1")
    bench.add_argument(
        "--length", nargs="+", type=_positive(int), metavar="T", help="steps of recurrent"
    )
    bench.add_argument(
        "--pass", nargs="+", choices=PASSES, dest="passes", metavar="NAME",
        help=f"{', '.join(PASSES)}; all that there are by default",
    )  # fmt: skip
    bench.add_argument("--repeats", type=_positive(int), default=Effort.repeats, metavar="R")
    bench.add_argument(
        "--seconds", type=_positive(float), metavar="S",
        help="for each figure, compilation not counted; 0.4, in recurrent 0.3 by default",
    )  # fmt: skip
    bench.add_argument("--output", type=pathlib.Path, metavar="FILE", help="write JSON here")
    bench.add_argument("--plot", nargs="?", const=True, metavar="FILE", help="draw the result")
    bench.add_argument("--list", action="store_true", help="show what there is to measure")
    bench.add_argument("--commit", help="of jaxsparse, for the record")
    bench.add_argument("--quiet", action="store_true", help="no progress")
    bench.set_defaults(run=lambda arguments: _bench(arguments, bench))

    table = commands.add_parser("table", help="show a result of bench")
    table.add_argument("result", type=pathlib.Path, metavar="FILE.json")
    table.add_argument("--markdown", action="store_true")
    table.set_defaults(run=lambda arguments: _table(arguments, table))

    plot = commands.add_parser("plot", help="draw results of bench")
    plot.add_argument("results", nargs="+", type=pathlib.Path, metavar="FILE.json")
    plot.add_argument(
        "--output", metavar="FILE",
        help=f"{', '.join(plots.FORMATS)}, written over if it is there; beside the first result, "
        "with .png in place of .json, by default",
    )  # fmt: skip
    plot.set_defaults(run=lambda arguments: _plot(arguments, plot))


def _names(table: dict[str, Any]) -> str:
    return ", ".join(table)


def _bench(arguments: argparse.Namespace, parser: Parser) -> int:
    # PyTorch and CuPy need room on the GPU: this must come before JAX starts it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if arguments.list:
        print(PLANS[arguments.operation].listing(arguments.operation))
        return 0
    try:
        picture = _plot_path(arguments)
        made = PLANS[arguments.operation].make_plan(asked(arguments), jax.default_backend())
        _check_writable("--output", arguments.output)
        _check_writable("--plot", picture)
    except UsageError as error:
        parser.error(str(error))
    result, whole = execute(
        made,
        Effort(arguments.seconds or made.seconds, arguments.repeats),
        commit=arguments.commit,
        say=lambda line: None if arguments.quiet else print(line, file=sys.stderr, flush=True),
        save=lambda result: _write(result, arguments.output),
    )
    _write(result, arguments.output)
    print(report.table(result))
    measured = any(row["us"] for row in result["results"])
    if picture is not None and measured:
        plots.plot(result["results"], picture)
    return (0 if measured else 1) if whole else INTERRUPTED


def asked(arguments: argparse.Namespace) -> Asked:
    """The parsed options that choose what is measured."""

    def some(values: Any) -> tuple[Any, ...] | None:
        return None if values is None else tuple(dict.fromkeys(values))

    return Asked(
        operation=arguments.operation,
        suites=some(arguments.suite),
        names=some(arguments.problem),
        implementations=some(arguments.implementation),
        variants=some(arguments.variant) or (),
        dtypes=some(arguments.dtype),
        n=some(arguments.n),
        sparsity=some(arguments.sparsity),
        lengths=some(arguments.length),
        passes=arguments.passes and tuple(p for p in PASSES if p in arguments.passes),
    )


def _plot_path(arguments: argparse.Namespace) -> pathlib.Path | None:
    if arguments.plot is None:
        return None
    stem = arguments.output or pathlib.Path(f"bench_{arguments.operation}")
    return _picture("--plot", None if arguments.plot is True else arguments.plot, beside=stem)


def _check_writable(option: str, path: pathlib.Path | None) -> None:
    """Makes the folder; so that a long run does not end by failing to write."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(option, f"can't make the folder {path.parent}: {error}") from None
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(option, f"can't write {path}")


def _write(result: Result, path: pathlib.Path | None) -> None:
    """Whole or not at all, also if it is killed meanwhile."""
    if path is not None:
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
        partial.replace(path)


def _table(arguments: argparse.Namespace, parser: Parser) -> int:
    try:
        text = report.table(read_result(arguments.result), markdown=arguments.markdown)
    except ValueError as error:
        parser.error(str(error))
    print(text)
    return 0


def _plot(arguments: argparse.Namespace, parser: Parser) -> int:
    try:
        rows = [row for path in arguments.results for row in read_result(path)["results"]]
        picture = _picture("--output", arguments.output, beside=arguments.results[0])
        _check_writable("--output", picture)
        plots.plot(rows, picture)
    except ValueError as error:
        parser.error(str(error))
    print(picture)
    return 0
