"""Scans beside other work on a GPU, for as many steps as asked: bitwise equal each time.

    python tests/cuda_soak.py --steps 10_000_000
    python tests/cuda_soak.py --part graphs          # scans over graphs alone, with gradients
    python tests/cuda_soak.py --delay 3_000          # warps held up, at most so many clock cycles
    python tests/cuda_soak.py --processes 2          # that share the GPU
    python tests/cuda_soak.py --devices 2            # gradients, summed over GPUs

A step of a scan over graphs is a tile of rows. Beside the scans PyTorch, where it is installed,
multiplies matrices in a stream of its own; with several GPUs, NCCL sums large arrays over them.
Blocks of a scan wait for one another, and kernels of NCCL for those of other GPUs, so what else
runs on a GPU changes when each of them gets on.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from random_graphs import random_arrays

from jaxsparse import CSR, Topology, dynamic, recurrent

# name -> cell, gates, units, density, state, weights, variant
SCANS = {
    "dense LSTM": (recurrent.LSTM, 4, 1024, None, "bfloat16", "bfloat16", "dense_tensor_cores"),
    "dense RNN": (recurrent.elman(), 1, 1152, None, "float32", "float32", "dense_fma"),
    "sparse RNN": (recurrent.elman(), 1, 1792, 0.1, "bfloat16", "float32", "sparse_pairs"),
    "wide sparse RNN": (recurrent.elman(), 1, 5760, 0.01, "bfloat16", "bfloat16", "sparse_pairs"),
    "masked GRU": (recurrent.GRU, 3, 1024, 0.1, "bfloat16", "bfloat16", "masked_tensor_cores"),
}
LENGTH, BATCH = 1000, 4

# name -> cell, products, units, dtype, rows of each graph: of a chain, or the most of a random one
TREE_LSTM = dynamic.tree_lstm(2)
GRAPHS = {
    "random graphs": (TREE_LSTM, 5, 256, "bfloat16", [400] * 64),
    "random graphs in float32": (TREE_LSTM, 5, 128, "float32", [400] * 64),
    "small graphs": (TREE_LSTM, 5, 256, "bfloat16", [40] * 6),
    "chains": (dynamic.chain(recurrent.LSTM), 4, 256, "bfloat16", [*range(20, 300, 20)]),
    "a chain of a million": (dynamic.chain(recurrent.LSTM), 4, 64, "bfloat16", [1_000_000]),
}


class Soaked(NamedTuple):
    """A program, what it takes, and how many steps a call makes."""

    function: Callable[..., Any]
    operands: tuple[Any, ...]
    steps: int

    @property
    def calls(self):
        """That follow each other without a wait."""
        return min(10, max(1, 100_000 // self.steps))


def scan_of(cell, gates, h, density, state, weights, variant):
    """A compiled scan and its operands."""
    rng = np.random.default_rng(0)
    xs = jnp.asarray(rng.standard_normal((LENGTH, BATCH, gates * h)), state)
    zeros = jnp.zeros((BATCH, h), state)
    carry = (zeros, zeros) if gates == 4 else zeros
    gain = 1 / np.sqrt(h * (density or 1))
    if density is None:
        topology, size = None, (h, gates * h)
    else:
        topology = Topology.from_mask(rng.random((gates * h, h)) < density)
        size = (topology.nse,)
    values = jnp.asarray(gain * rng.standard_normal(size), weights)

    @jax.jit
    def scan(values, carry, xs):
        matrix = values if topology is None else CSR(values, topology)
        return recurrent.scan(cell, matrix, carry, xs, variant=variant)

    return scan, (values, carry, xs)


def soaked_scan_of(devices, *form):
    """As `scan_of`; on several devices its gradient, summed over them."""
    made = scan_of(*form) if devices == 1 else summed_gradient_of(devices, *form)
    return Soaked(*made, LENGTH)


def soaked_graphs_of(cell, products, h, dtype, rows):
    """A scan over graphs by kernels, with all gradients."""
    rng = np.random.default_rng(0)
    slots, inputs = cell.children, cell.children == 1
    if inputs:
        graphs = dynamic.Graphs.from_sequences(rows)
    else:
        arrays = random_arrays(rng, graphs=len(rows), most_rows=max(rows), with_inputs=False)
        graphs = dynamic.Graphs.from_arrays(**arrays)
    draw = rng.standard_normal
    weights = jnp.asarray(draw((slots * h, products * h)) / np.sqrt(slots * h), dtype)
    layout = dynamic.Layout.teams(weights, sum(rows), slots)
    script = dynamic.pack(graphs, range(len(graphs)), layout)
    form = script.form
    state = jnp.asarray(np.tanh(draw((form.leaves, h))), dtype)
    carry = (state.astype(jnp.float32), state)
    xs = jnp.asarray(draw((form.inputs, products * h)), dtype) if inputs else None
    bias = jnp.zeros(products * h)

    @jax.jit
    def gradients(weights, carry, xs, script):
        def scan(weights, carry, xs):
            given = {"bias": bias, "implementation": "cuda"}
            return dynamic.scan(cell, weights, carry, script, xs, **given)

        made, pull = jax.vjp(scan, weights, carry, xs)
        return made, pull(made)

    operands = (weights, carry, xs, jax.device_put(script))
    return Soaked(gradients, operands, int(script.used_tiles))


# what is repeated -> (number of devices) to programs by name
PARTS = {
    "recurrence": lambda devices: {
        name: soaked_scan_of(devices, *form) for name, form in SCANS.items()
    },
    "graphs": lambda devices: {name: soaked_graphs_of(*form) for name, form in GRAPHS.items()},
}


def differences(a, b):
    """How many numbers of two results differ in any bit."""

    def words(x):
        return jax.lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32)

    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return sum(jnp.sum(words(x) != words(y)) for x, y in pairs)


class Products(threading.Thread):
    """Multiplies matrices of changing sizes in a stream of PyTorch's."""

    def __init__(self):
        super().__init__(daemon=True)
        self.stopping, self.count = threading.Event(), 0

    def run(self):
        try:
            import torch
        except ImportError:
            return
        sizes = (256, 1024, 3072)
        with torch.cuda.stream(torch.cuda.Stream()):
            matrices = [torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for n in sizes]
            while not self.stopping.is_set():
                for x in matrices:
                    x @ x
                    self.count += 1
                torch.cuda.current_stream().synchronize()


def summed_gradient_of(devices, *form):
    """A compiled gradient of a scan, each device's own batch, summed over devices; its operands.

    Beside the scans an array that has nothing to do with them is summed.
    """
    scan, (values, carry, xs) = scan_of(*form)
    mesh = jax.make_mesh((devices,), ("data",))
    shared, split = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")
    batches = jax.sharding.PartitionSpec(None, "data")

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(shared, split, batches, split),
        out_specs=(split, batches, shared, shared),
        check_vma=False,
    )
    def gradient(values, carry, xs, other):
        (carry, ys), pull = jax.vjp(scan, values, carry, xs)
        return carry, ys, jax.lax.psum(pull((carry, ys)), "data")[0], jax.lax.psum(other, "data")

    carry, xs = jax.tree.map(
        lambda x: jnp.concatenate([x * (1 + i) for i in range(devices)], x.ndim - 2), (carry, xs)
    )
    other = jnp.arange(devices << 24, dtype=jnp.float32)
    specs = (shared, split, batches, split)
    operands = tuple(
        jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        for x, spec in zip((values, carry, xs, other), specs, strict=True)
    )
    return gradient, operands


def soak(steps: int, devices: int, parts: list[str], delay: int) -> None:
    """Repeats every scan until all have made so many steps together.

    With a delay the first results are those of warps that nothing holds up.
    """
    products = Products()
    products.start()
    compared = jax.jit(differences)
    os.environ["JAXSPARSE_SCAN_DELAY"] = "0"
    programs = {name: made for part in parts for name, made in PARTS[part](devices).items()}
    first = {name: program.function(*program.operands) for name, program in programs.items()}
    for name, results in first.items():
        assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(results)), name
    if delay:
        os.environ["JAXSPARSE_SCAN_DELAY"] = str(delay)
        jax.clear_caches()  # the delay is part of a kernel, and of no key
    wrong = dict.fromkeys(programs, 0)
    done, start = 0, time.monotonic()
    while done < steps:
        counts = {}
        for name, program in programs.items():
            results = [program.function(*program.operands) for _ in range(program.calls)]
            counts[name] = sum(compared(first[name], r) for r in results)
            done += len(results) * program.steps
        for name, count in counts.items():
            wrong[name] += int(count)
        recurrent.check()
    seconds = time.monotonic() - start
    products.stopping.set()
    products.join()
    print(
        f"{done:,} steps in {seconds:.0f} s beside {products.count:,} products; numbers that "
        f"differed from the first time: {wrong}"
    )
    assert not any(wrong.values())


def main() -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--part", choices=PARTS, nargs="+", help="by default all of one device")
    parser.add_argument("--delay", type=int, default=0, help="clock cycles")
    arguments = parser.parse_args()
    several = arguments.devices > 1
    parts = arguments.part or (["recurrence"] if several else list(PARTS))
    if several and "graphs" in parts:
        parser.error("argument --part: scans over graphs have no batches to share between devices")
    if arguments.processes == 1:
        soak(arguments.steps, arguments.devices, parts, arguments.delay)
        return
    command = [sys.executable, __file__, "--steps", str(arguments.steps), "--part", *parts]
    command += ["--devices", str(arguments.devices), "--delay", str(arguments.delay)]
    # Each leaves memory to the others.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    others = [subprocess.Popen(command, env=environment) for _ in range(arguments.processes)]
    codes = [process.wait() for process in others]
    sys.exit(f"exit codes {codes}" if any(codes) else 0)


if __name__ == "__main__":
    main()
