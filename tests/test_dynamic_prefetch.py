"""Scripts that a thread packs ahead: their order, errors, and how the thread ends."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from jaxsparse.dynamic import Graphs, Layout, pack, prefetch

GRAPHS = Graphs.from_sequences(np.arange(20), input={"token": np.arange(190)})
LAYOUT = Layout(slots=1)


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("jaxsparse-prefetch")]


def wait_for_the_end_of_threads():
    """What ends a thread without waiting for it lets it finish the script that it is at."""
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads()


def output_of(program):
    """What a program prints in an interpreter of its own, which says nothing else."""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0 and run.stderr == ""
    return run.stdout


@pytest.fixture(autouse=True)
def no_thread_is_left():
    assert not threads()
    yield
    wait_for_the_end_of_threads()


@pytest.mark.smoke
def test_scripts_come_in_order():
    batches = np.random.default_rng(0).integers(0, 20, (12, 3))
    form = pack(GRAPHS, batches, LAYOUT).form
    scripts = prefetch(GRAPHS, batches, LAYOUT, form=form, depth=10)  # by fives
    assert len(scripts) == 12
    for ids, script in itertools.zip_longest(batches, scripts):
        assert isinstance(script.words, jax.Array)
        np.testing.assert_array_equal(script.words, pack(GRAPHS, ids, LAYOUT, form=form).words)
    assert next(scripts, None) is None and not threads()


def test_devices():
    devices = jax.devices()
    (script,) = prefetch(GRAPHS, [[1]], LAYOUT, device=devices[-1])
    assert script.words.devices() == {devices[-1]}
    with jax.default_device(devices[-2 % len(devices)]):
        (script,) = prefetch(GRAPHS, [[1]], LAYOUT)
    assert script.words.devices() == {devices[-2 % len(devices)]}
    mesh = jax.make_mesh((len(devices),), ("data",))
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    batches = np.arange(2 * len(devices)).reshape(-1, 2) % 20
    (script,) = prefetch(GRAPHS, [batches], LAYOUT, device=sharding)
    assert script.batch_shape == (len(devices),) and script.words.sharding == sharding


@pytest.mark.parametrize("depth, ahead", [(2, [2] * 5), (7, [5, 7, 6, 5, 7])])  # by threes
def test_no_more_than_depth_scripts_are_ahead(depth, ahead):
    taken = []

    def batches():
        for i in itertools.count():
            taken.append(threading.current_thread().name)
            yield [i % 20]

    with prefetch(GRAPHS, batches(), LAYOUT, depth=depth) as scripts:
        with pytest.raises(TypeError, match="batches do not know how many they are"):
            len(scripts)
        for seen, more in enumerate(ahead, 1):
            next(scripts)
            deadline = time.monotonic() + 10
            while len(taken) < seen + more and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.01)  # in which one more would come
            assert len(taken) == seen + more
    assert all(name.startswith("jaxsparse-prefetch") for name in taken)
    assert not threads() and list(scripts) == []


def test_errors_come_in_their_place():
    """Those of packing and of what makes batches; behind one there are no more scripts."""
    scripts = prefetch(GRAPHS, [[0], [1], [20], [2]], LAYOUT)
    for _ in range(2):
        next(scripts)
    with pytest.raises(ValueError, match=r"dynamic\.pack: graph 20 is out of range, there are 20"):
        next(scripts)
    assert next(scripts, None) is None

    def batches():
        yield [0]
        raise OSError("the disk is gone")

    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        for script in prefetch(GRAPHS, batches(), LAYOUT):
            seen.append(script)
    assert len(seen) == 1
    with pytest.raises(ValueError, match=r"dynamic\.prefetch: depth must be >= 1, got 0"):
        prefetch(GRAPHS, [], LAYOUT, depth=0)
    with pytest.raises(TypeError, match=r"dynamic\.prefetch: batches must be an iterable .* int"):
        prefetch(GRAPHS, 3, LAYOUT)


def test_a_loop_that_ends_early():
    for _ in prefetch(GRAPHS, ([i % 20] for i in itertools.count()), LAYOUT):
        break
    wait_for_the_end_of_threads()
    scripts = prefetch(GRAPHS, ([i % 20] for i in itertools.count()), LAYOUT)
    next(scripts)
    assert threads()
    scripts.close()
    scripts.close()
    assert not threads()


INTERRUPTED = """
import signal, threading
import numpy as np
from jaxsparse.dynamic import Graphs, Layout, prefetch
signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background job ignores it.
goes_on, main = threading.Event(), threading.main_thread()
def batches():
    yield [0]
    signal.pthread_kill(main.ident, signal.SIGINT)
    goes_on.wait(30)
    yield [1]
scripts = prefetch(Graphs.from_sequences(np.arange(20)), batches(), Layout(slots=1), depth=1)
try:
    for _ in scripts:
        pass
except KeyboardInterrupt:
    goes_on.set()
    print("interrupted", next(scripts, None))
"""


def test_interruption():
    """Ctrl-C while a script is waited for ends the wait, and then the thread."""
    assert output_of(INTERRUPTED) == "interrupted None\n"


PROGRAM = """
import numpy as np
from jaxsparse.dynamic import Graphs, Layout, prefetch
graphs = Graphs.from_sequences(np.arange(500))
scripts = prefetch(graphs, ([i % 500] for i in range(10**9)), Layout(slots=1))
next(scripts)
print(next(scripts))
"""


def test_the_interpreter_ends_while_a_thread_packs():
    """With nothing to say, as of objects that are left."""
    script = "Script(graphs=1, leaves=8, tiles=1, width=8, groups=1)\n"
    assert output_of(PROGRAM) == script
