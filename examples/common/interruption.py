"""Ctrl-C, SIGTERM and SIGHUP."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

SAME_REQUEST = 1.0  # Seconds in which more signals repeat the first: `timeout` sends it twice.


class Interrupted(Exception):
    """Training was stopped by a signal, after a step whose state is saved."""

    def __init__(self, number: int, message: str):
        super().__init__(message)
        self.exit_code = 128 + number


class StopRequest:
    """The number of the signal that asks to stop; 0 while there was none."""

    number = 0


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Lets the first signal only ask to stop, so that it cuts no step in two; a later one quits."""
    request = StopRequest()
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # Else started by nohup.
        signals.append(signal.SIGHUP)

    def on_signal(number: int, _: Any) -> None:
        request.number = request.number or number

    # Python runs its handlers once compiled code has returned, which may take many seconds. The
    # numbers of signals come through the pipe at once.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def quit_at_the_second() -> None:
        first = None
        while number := os.read(reader, 1):
            if number[0] not in signals:
                continue
            now = time.monotonic()
            first = now if first is None else first
            if now - first > SAME_REQUEST:
                os._exit(128 + number[0])

    watcher = threading.Thread(target=quit_at_the_second, daemon=True)
    watcher.start()
    previous = {each: signal.signal(each, on_signal) for each in signals}
    previous_pipe = signal.set_wakeup_fd(writer)
    try:
        yield request
    finally:
        signal.set_wakeup_fd(previous_pipe)
        for each, handler in previous.items():
            signal.signal(each, handler)
        os.close(writer)  # Ends the watcher.
        watcher.join()
        os.close(reader)
