"""Runs of an example or a study as a user starts them, and stops them."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ocp = pytest.importorskip("orbax.checkpoint")

from examples.common.checkpoint import Checkpoints  # noqa: E402

Main = Callable[[list[str]], int]


def printed_by(main: Main, argv: list[str]) -> str:
    """What a program prints in a run that ends well."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(argv) == 0
    return printed.getvalue()


def metrics_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "metrics.json").read_text())


def saved_state(folder: Path, step: int) -> Any:
    """The state in a checkpoint after the last step."""
    checkpoints = Checkpoints("test", folder, {})
    assert checkpoints.manager.latest_step() == step
    args = ocp.args.Composite(state=ocp.args.StandardRestore())
    return checkpoints.manager.restore(step, args=args).state


def interrupt(
    monkeypatch: pytest.MonkeyPatch,
    trainer: type[Any],
    stop: int,
    counts: Callable[[Any], bool] = lambda trainer: True,
) -> None:
    """Lets Ctrl-C be pressed in the step of an index, of those that count, from now on."""
    step, indices = trainer.step, itertools.count()

    def interrupted_step(self: Any, batch: Any) -> Any:
        if counts(self) and next(indices) == stop:
            signal.raise_signal(signal.SIGINT)
        return step(self, batch)

    monkeypatch.setattr(trainer, "step", interrupted_step)


def assert_stops(
    main: Main,
    argv: list[str],
    output: Path,
    step: str,
    capsys: pytest.CaptureFixture[str],
    of: str = "",
) -> None:
    """Runs a program that Ctrl-C stops after a step: it is saved, and wants to be resumed.

    Args:
        argv: options, of which none is ``--resume``.
        step: as messages call it, such as "step 4 of 24".
        of: of which model, as the first of them says it.
    """
    handler = signal.getsignal(signal.SIGINT)
    assert main(argv) == 130
    assert signal.getsignal(signal.SIGINT) == handler
    assert f"stopped by SIGINT after {step}{of}, which is saved" in capsys.readouterr().err
    assert not (output / "metrics.json").exists()
    assert main(argv) == 2
    assert f"expected no unfinished run, got one after {step}" in capsys.readouterr().err
