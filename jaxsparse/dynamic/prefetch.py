"""Packs the scripts of the next steps while the device works on this one."""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import jax

from jaxsparse.dynamic.form import Form
from jaxsparse.dynamic.graphs import Graphs
from jaxsparse.dynamic.layout import Layout
from jaxsparse.dynamic.packing import pack
from jaxsparse.dynamic.script import Script
from jaxsparse.integers import integer


def prefetch(
    graphs: Graphs,
    batches: Iterable[Any],
    layout: Layout,
    *,
    form: Form | None = None,
    depth: int = 16,
    device: Any = None,
) -> Prefetch:
    """The scripts of batches, in order, packed by a thread and sent to the device ahead of use.

    A thread calls `pack`, which does not hold Python's lock, for at most ``depth`` scripts ahead,
    from when the first one is asked for. It sends half as many at a time, which costs less than one
    by one. It ends with the last one, when the loop over scripts ends early, by an exception or
    Ctrl-C, and with the interpreter. An exception in it, as one of ``batches``, comes where the
    script would have come.

    Args:
        graphs: the set of graphs.
        batches: for each step which graphs, as `pack` takes them. A generator runs in the thread.
        layout: how scripts are cut.
        form: the form of all scripts; by default each has its own.
        depth: how many scripts are packed ahead, at least 1.
        device: a device or a sharding, for ``jax.device_put``; by default JAX's own choice.

    Returns:
        An iterator of scripts, which knows its length where ``batches`` does, so that progress bars
        do. ``close`` ends it early, as does leaving a ``with`` block.

    Raises:
        TypeError, ValueError: as `pack`, in the step whose batch is at fault, and for ``depth``.

    >>> graphs = Graphs.from_sequences([3, 1, 2])
    >>> for script in prefetch(graphs, [[0], [1, 2]], Layout(slots=1)):
    ...     print(script)
    Script(graphs=1, leaves=8, tiles=3, width=8, groups=1)
    Script(graphs=2, leaves=8, tiles=2, width=8, groups=1)
    """
    depth = integer("dynamic.prefetch", "depth", depth, 1)
    try:
        each = iter(batches)
    except TypeError:
        raise TypeError(
            f"dynamic.prefetch: batches must be an iterable of ids, got {type(batches).__name__}"
        ) from None
    length = None
    with contextlib.suppress(TypeError):
        length = len(batches)  # type: ignore[arg-type]
    return Prefetch(_Scripts(graphs, each, layout, form, device), length, depth)


class _Scripts:
    """The next scripts, each time that they are asked for: what the thread runs."""

    def __init__(
        self,
        graphs: Graphs,
        batches: Iterator[Any],
        layout: Layout,
        form: Form | None,
        device: Any,
    ):
        self._graphs, self._batches, self._layout = graphs, batches, layout
        self._form, self._device = form, device
        # A default that is set for a block of code is not known to other threads.
        self._default_device = jax.config.jax_default_device  # type: ignore[attr-defined]

    def next(self, most: int) -> tuple[list[Script], Exception | None]:
        """Scripts on the device, and if they are too few, why: the end, or an error."""
        packed: list[Script] = []
        ended: Exception | None = None
        try:
            while len(packed) < most:
                ids = next(self._batches)
                packed.append(pack(self._graphs, ids, self._layout, form=self._form))
        except Exception as error:  # it comes behind the scripts before it
            ended = error
        with jax.default_device(self._default_device):
            sent: list[Script] = jax.device_put(packed, self._device)
        return sent, ended


class Prefetch(Iterator[Script]):
    """Scripts that come ahead; see `prefetch`, which makes them.

    >>> with prefetch(Graphs.from_sequences([3, 1]), [[0], [1]], Layout(slots=1)) as scripts:
    ...     print(len(scripts), next(scripts))
    2 Script(graphs=1, leaves=8, tiles=3, width=8, groups=1)
    """

    def __init__(self, scripts: _Scripts, length: int | None, depth: int):
        self._scripts, self._length, self._depth = scripts, length, depth
        self._together = max(1, depth // 2)  # scripts that are sent at a time
        self._ready: collections.deque[Script] = collections.deque()
        self._coming: collections.deque[Future[tuple[list[Script], Exception | None]]]
        self._coming = collections.deque()
        self._ended: Exception | None = None
        # An idle thread of an executor neither keeps the interpreter from ending nor outlives it.
        self._thread = ThreadPoolExecutor(1, "jaxsparse-prefetch")
        self._end = weakref.finalize(self, self._thread.shutdown, wait=False, cancel_futures=True)

    def __next__(self) -> Script:
        if not self._end.alive:
            raise StopIteration
        try:
            while not self._ready:
                if self._ended is not None:
                    raise self._ended
                if not self._coming:
                    self._ask()
                scripts, self._ended = self._coming.popleft().result()
                self._ready.extend(scripts)
            script = self._ready.popleft()
            while len(self._ready) + (len(self._coming) + 1) * self._together <= self._depth:
                self._ask()
        except StopIteration:
            self.close()
            raise
        except BaseException:  # KeyboardInterrupt too
            self._end()
            raise
        return script

    def _ask(self) -> None:
        self._coming.append(self._thread.submit(self._scripts.next, self._together))

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("dynamic.prefetch: batches do not know how many they are")
        return self._length

    def close(self) -> None:
        """Ends the thread, once it has packed the script that it is at, and forgets the others."""
        if self._end.alive:
            self._end()
            self._thread.shutdown(wait=True)

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
