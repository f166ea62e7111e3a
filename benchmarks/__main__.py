"""`python -m benchmarks`: times operations of jaxsparse beside their peers; tables, pictures."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import jax

from benchmarks import comparison, environment, plots, report, selection
from benchmarks.choices import Asked, UsageError, one_of
from benchmarks.depthwise import selection as depthwise
from benchmarks.dynamic import selection as dynamic
from benchmarks.implementations import DTYPES, PASSES
from benchmarks.masks import selection as masks
from benchmarks.merging import merge
from benchmarks.operations import MEASURED
from benchmarks.panels import read_result
from benchmarks.recurrent import selection as recurrent
from benchmarks.run import Effort, Result, execute

# what is measured -> the module that selects what of it
SELECTIONS: dict[str, ModuleType] = {
    **dict.fromkeys(MEASURED, selection),
    "sparse_attention": masks,
    "depthwise": depthwise,
    "recurrent": recurrent,
    "dynamic": dynamic,
}

# what is measured -> its passes and dtypes, where they are others than all have
PASSES_OF: dict[str, tuple[str, ...]] = {"dynamic": dynamic.PASSES, "depthwise": depthwise.PASSES}
DTYPES_OF: dict[str, tuple[str, ...]] = {"dynamic": dynamic.DTYPES}

INTERRUPTED = 130
"""Exit status after Ctrl-C, as of a shell."""

SLOWER = 3
"""Exit status where something of jaxsparse is slower than in the result that is given."""


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


def make_parser() -> Parser:
    """The command line."""
    parser = Parser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_run(commands.add_parser("run", help="time an operation beside its peers"))

    table = commands.add_parser("table", help="show a result")
    table.add_argument("result", type=pathlib.Path, metavar="FILE.json")
    table.add_argument("--markdown", action="store_true")
    _add_against(table)
    table.set_defaults(run=lambda arguments: _table(arguments, table))

    merged = commands.add_parser("merge", help="put parts of a result into one file")
    merged.add_argument("results", nargs="+", type=pathlib.Path, metavar="FILE.json")
    merged.add_argument("--output", type=pathlib.Path, metavar="FILE", required=True)
    merged.set_defaults(run=lambda arguments: _merge(arguments, merged))

    plot = commands.add_parser("plot", help="draw results")
    plot.add_argument("results", nargs="+", type=pathlib.Path, metavar="FILE.json")
    plot.add_argument(
        "--output", metavar="FILE",
        help=f"{', '.join(plots.FORMATS)}, written over if it is there; beside the first result, "
        "with .png in place of .json, by default",
    )  # fmt: skip
    plot.set_defaults(run=lambda arguments: _plot(arguments, plot))
    return parser


def _add_run(parser: Parser) -> None:
    parser.add_argument(
        "operation", metavar="OPERATION", choices=SELECTIONS, help=_names(SELECTIONS)
    )
    parser.add_argument("--suite", nargs="+", metavar="NAME", help="problems, see --list")
    parser.add_argument(
        "--problem", nargs="+", action="extend", metavar="GLOB", help="only problems of such names"
    )
    parser.add_argument(
        "--implementation", nargs="+", metavar="NAME", help="only these, see --list"
    )
    parser.add_argument(
        "--variant", nargs="+", metavar="GLOB", default=(), help="also with such kernels forced"
    )
    parser.add_argument(
        "--dtype", nargs="+", choices=tuple(dict.fromkeys((*DTYPES, *dynamic.DTYPES))),
        metavar="NAME",
        help=f"{', '.join(DTYPES)}; float32 by default, bfloat16 in masks on a GPU; what has one "
        "of its own keeps it; in recurrent, that of weights and state, in place of the layers' "
        f"own; in dynamic {', '.join(dynamic.DTYPES)}",
    )  # fmt: skip
    parser.add_argument(
        "--n", nargs="+", type=_positive(int), metavar="N", help="columns, features"
    )
    parser.add_argument("--sparsity", nargs="+", type=_sparsity, metavar="S", help="from 0 to 1")
    parser.add_argument(
        "--length", nargs="+", type=_positive(int), metavar="T",
        help="steps of recurrent, positions of masks, steps of training in a program of dynamic",
    )  # fmt: skip
    parser.add_argument(
        "--pass", nargs="+", choices=sorted({*PASSES, *itertools.chain(*PASSES_OF.values())}),
        dest="passes", metavar="NAME",
        help=f"{', '.join(PASSES)}; all that there are by default; in dynamic "
        f"{', '.join(dynamic.PASSES)}, by default those of the suite; in depthwise "
        f"{', '.join(depthwise.PASSES)}, by default the first two",
    )  # fmt: skip
    parser.add_argument("--repeats", type=_positive(int), default=Effort.repeats, metavar="R")
    parser.add_argument(
        "--seconds", type=_positive(float), metavar="S",
        help="for each figure, compilation not counted; 0.4, in recurrent and masks 0.3 by default",
    )  # fmt: skip
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE", help="write JSON here")
    parser.add_argument("--plot", nargs="?", const=True, metavar="FILE", help="draw the result")
    parser.add_argument("--list", action="store_true", help="show what there is to measure")
    parser.add_argument("--commit", help="of jaxsparse, for the record")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    _add_against(parser)
    parser.set_defaults(run=lambda arguments: _run(arguments, parser))


def _add_against(parser: Parser) -> None:
    parser.add_argument(
        "--against", type=pathlib.Path, metavar="OLD.json",
        help=f"name what is slower than in an earlier result; exit with {SLOWER} if anything is",
    )  # fmt: skip


def _names(table: dict[str, Any]) -> str:
    return ", ".join(table)


def _run(arguments: argparse.Namespace, parser: Parser) -> int:
    # PyTorch and CuPy need room on the GPU: this must come before JAX starts it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if arguments.list:
        print(SELECTIONS[arguments.operation].listing(arguments.operation))
        return 0
    try:
        before = _earlier(arguments.against, environment.environment)
        picture = _plot_path(arguments)
        made = SELECTIONS[arguments.operation].select(asked(arguments), jax.default_backend())
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
    if not whole:
        return INTERRUPTED
    if not measured:
        return 1
    return 0 if before is None else _compare(result, before, parser)


def _earlier(path: pathlib.Path | None, here: Callable[[], dict[str, Any]]) -> Result | None:
    """The result to compare with, if one is given: it must be of the same device."""
    if path is None:
        return None
    try:
        before = read_result(path)
        comparison.check_device(here(), before)
    except ValueError as error:
        raise UsageError("--against", str(error)) from None
    return before


def _compare(result: Result, before: Result, parser: Parser, *, markdown: bool = False) -> int:
    """Prints what changed since an earlier result; the exit status."""
    try:
        compared = comparison.compare(result, before)
    except ValueError as error:
        parser.error(f"argument --against: {error}")
    print(report.comparison(compared, markdown=markdown))
    return SLOWER if compared.slower else 0


def asked(arguments: argparse.Namespace) -> Asked:
    """The parsed options that choose what is measured.

    Raises:
        UsageError: for passes and dtypes that the operation has not.
    """
    operation = arguments.operation
    passes = PASSES_OF.get(operation, PASSES)
    one_of("--pass", arguments.passes or (), passes, operation)
    one_of("--dtype", arguments.dtype or (), DTYPES_OF.get(operation, DTYPES), operation)

    def some(values: Any) -> tuple[Any, ...] | None:
        return None if values is None else tuple(dict.fromkeys(values))

    return Asked(
        operation=operation,
        suites=some(arguments.suite),
        names=some(arguments.problem),
        implementations=some(arguments.implementation),
        variants=some(arguments.variant) or (),
        dtypes=some(arguments.dtype),
        n=some(arguments.n),
        sparsity=some(arguments.sparsity),
        lengths=some(arguments.length),
        passes=arguments.passes and tuple(p for p in passes if p in arguments.passes),
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
        result = read_result(arguments.result)
        before = _earlier(arguments.against, lambda: result.get("environment", {}))
        text = report.table(result, markdown=arguments.markdown)
    except ValueError as error:
        parser.error(str(error))
    print(text)
    if before is None:
        return 0
    return _compare(result, before, parser, markdown=arguments.markdown)


def _merge(arguments: argparse.Namespace, parser: Parser) -> int:
    try:
        result = merge([read_result(path) for path in arguments.results])
        _check_writable("--output", arguments.output)
    except ValueError as error:
        parser.error(str(error))
    _write(result, arguments.output)
    print(report.table(result))
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


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    arguments = make_parser().parse_args(argv)
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
