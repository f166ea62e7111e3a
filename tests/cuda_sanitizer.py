"""The CUDA kernels of all operations, for a run under compute-sanitizer.

    export XLA_PYTHON_CLIENT_ALLOCATOR=platform
    export XLA_FLAGS="--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0"
    export JAXSPARSE_SCAN_WAIT_LIMIT=100
    compute-sanitizer --tool memcheck python tests/cuda_sanitizer.py

The other tools are initcheck, synccheck, and racecheck, which needs ``--barriers``: between the
steps of a scan, what orders the reads and writes of a block's shared memory is the data that come
from other blocks, and racecheck only knows barriers. Blocks of a scan wait for one another, which
takes long under a sanitizer.

Of packed weights racecheck reports errors in ``packed_wgmma`` where a copy overwrites rows of a
ring that have been read. The copy waits for a barrier at which a warp's first lane arrives behind
``__syncwarp``. Racecheck does not know that this orders the other lanes' reads, too: of the 32
lanes that read a mask it names 31. If all lanes arrive, which costs time, it still reports reads of
numbers that are absent, which are dropped.

``--part`` runs some of the kernels, so that several processes share the work; under a sanitizer a
part takes a minute or two. Where compute-sanitizer itself crashes, its log has no summary and the
part's process goes on: end that, and run the part again.

This is no selection of tests for pytest, since a sanitizer looks at each program that XLA compiles
for a test as well, which takes far longer than the kernels do.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
from checks import FOR_GRAPHS, fits
from patterns import skewed
from random_graphs import random_arrays
from sanitizer_attention import of_attention

from jaxsparse import (
    CSR,
    Topology,
    backend,
    depthwise_conv,
    dynamic,
    linear,
    recurrent,
    reduce_rows,
    sddmm,
    sparse_softmax,
    spmm,
)
from jaxsparse.ops.depthwise import depthwise_input_p
from jaxsparse.ops.multiply import multiply
from jaxsparse.ops.plain_depthwise import Window
from jaxsparse.primitive import bind


def main() -> None:
    """Runs the kernels on odd-sized patterns, one with padding, in float32 and 16 bits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--barriers", action="store_true", help="in scans, blocks meet each step")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS), help="what to run")
    asked = parser.parse_args()
    faulthandler.enable()
    for part in asked.part:
        rng, start = np.random.default_rng(0), time.monotonic()
        for dtype in (jnp.float32, jnp.bfloat16):
            for result in PARTS[part](rng, dtype, "_barrier" if asked.barriers else ""):
                assert np.isfinite(np.asarray(result, np.float32)).all()
        took = f"{time.monotonic() - start:.0f} s"
        print(f"all kernels of {part} ran on {jax.devices()[0].device_kind} in {took}", flush=True)


def padded_and_large(rng):
    """A pattern with padding, and one by which stages are filled several times."""
    padded = Topology.from_mask(rng.random((37, 53)) < 0.3, nse=700)
    return padded, Topology.from_mask(rng.random((150, 410)) < 0.3)


def of_products(rng, dtype, suffix):
    """The kernels of products, of one pattern each."""
    padded, large = padded_and_large(rng)
    results = [*products(rng, dtype, padded, 19), *products(rng, dtype, large, 40)]
    return results + long_rows(rng, dtype)


def of_sampled(rng, dtype, suffix):
    """The kernels of sampled products, of one pattern each."""
    results = []
    for topology, d in zip(padded_and_large(rng), (19, 40), strict=True):
        y, x = (jnp.asarray(rng.standard_normal((size, d)), dtype) for size in topology.shape)
        results += sampled_products(y, x, topology)
    return results + sampled_rows(rng, dtype)


def of_softmax(rng, dtype, suffix):
    """The kernels of the softmax, of one pattern each."""
    padded, _ = padded_and_large(rng)
    wide = Topology.from_mask(rng.random((5, 4000)) < 0.6)
    return softmaxes(rng, dtype, padded) + softmaxes(rng, dtype, wide)


def of_reductions(rng, dtype, suffix):
    """The kernels of reductions of rows: of rows that have some lanes each, or a block."""
    padded, _ = padded_and_large(rng)
    full = Topology.from_mask(np.ones((5, 4000), bool))
    return reductions(rng, dtype, padded, "rows") + reductions(rng, dtype, full, "rows")


def of_batches(rng, dtype, suffix):
    """All of these with batches, in 16 bits in float16."""
    return batches(rng, jnp.float32 if dtype == jnp.float32 else jnp.float16)


def of_skewed(rng, dtype, suffix):
    """The kernels for graphs, whose rows differ in length."""
    return graphs(rng, dtype)


def of_packed(rng, dtype, suffix):
    """The kernels of packed weights, by x of 16 bits."""
    return [] if dtype == jnp.float32 else packed_products(rng, dtype)


def of_depthwise(rng, dtype, suffix):
    """The kernels of depthwise convolutions and their transposes."""
    return convolutions(rng, dtype)


def of_recurrence(rng, dtype, suffix):
    """The kernels of scans and of waves; waves are of 16 bits."""
    results = scans(rng, dtype, suffix)
    return results if dtype == jnp.float32 else results + waves(rng, dtype, suffix)


def of_graphs(rng, dtype, suffix):
    """The kernels of scans over graphs, of their gradients, and of losses: teams of one script."""
    graphs = dynamic.Graphs.from_arrays(**random_arrays(rng, graphs=9, most_rows=25))
    h, cell = 40, dynamic.tree_lstm(2)
    script = dynamic.pack(graphs, range(9), dynamic.Layout(width=8, groups=3))
    weights = jnp.asarray(rng.standard_normal((2 * h, 5 * h)) / 8, dtype)
    carry = jnp.asarray(rng.standard_normal((script.form.leaves, h)))
    carry = carry, jnp.tanh(carry).astype(dtype)
    head = jnp.asarray(rng.standard_normal((h, 5)), dtype)
    variant = f"team_{'fma' if dtype == jnp.float32 else 'tensor_cores'}{suffix}"

    def scan(weights, carry):
        return dynamic.scan(cell, weights, carry, script, variant=variant)

    def loss(weights, carry, head):
        head = dynamic.SoftmaxHead(head)
        return dynamic.loss(cell, weights, carry, script, head=head, variant=variant)

    made, pull = jax.vjp(scan, weights, carry)
    of_loss = jax.value_and_grad(loss, (0, 1, 2))(weights, carry, head)
    recurrent.check()
    return jax.tree.leaves((made, pull(made), of_loss))


PARTS = {
    "products": of_products,
    "sampled": of_sampled,
    "softmax": of_softmax,
    "reductions": of_reductions,
    "batches": of_batches,
    "skewed": of_skewed,
    "packed": of_packed,
    "depthwise": of_depthwise,
    "attention": of_attention,
    "recurrence": of_recurrence,
    "graphs": of_graphs,
}


def sampled_products(x, y, topology, **options):
    return [
        sddmm(x, y, topology, variant=variant, **options).values
        for variant in backend.TARGETS["sddmm"]["variants"]["cuda"]
        if fits("sddmm", variant, dtype=x.dtype.name, d=x.shape[-1])
    ]


def sampled_rows(rng, dtype):
    """Sampled products with few and with many entries, in rows of their own or shared ones."""
    results = []
    for shape, density, d in (((90, 61), 0.1, 520), ((12, 3000), 0.5, 520), ((90, 3100), 0.9, 32)):
        topology = Topology.from_mask(rng.random(shape) < density)
        x, y = (jnp.asarray(rng.standard_normal((size, d)), dtype) for size in shape)
        results += sampled_products(x, y, topology)
    return results


def products(rng, dtype, topology, n):
    """By every variant, with the matrix, and its transpose, and x on either side."""
    (m, k), nse = topology.shape, topology.nse
    values, x, y = (jnp.asarray(rng.standard_normal(s), dtype) for s in (nse, (k, n), (m, n)))
    a, results = CSR(values, topology), []
    for transpose, dense in ((False, x), (True, y)):
        for variant, left in itertools.product(
            backend.TARGETS["spmm"]["variants"]["cuda"], (False, True)
        ):
            if not fits("spmm", variant, dense_on_left=left):
                continue
            operand = jnp.asarray(np.asarray(dense).T.copy()) if left else dense
            options = {"transpose": transpose, "dense_on_left": left, "variant": variant}
            results.append(multiply("spmm", a, operand, **options))
    return results


def convolutions(rng, dtype):
    """Of images with and without rows that begin at multiples of four, and their gradients."""
    results = []
    for stride, size in itertools.product((1, 2), ((5, 7, 1), (2, 3, 8), (9, 2, 14))):
        channels, images, width = size
        x, kernel, bias = (
            jnp.asarray(rng.standard_normal(s), dtype)
            for s in ((channels, images, 9, width), (channels, 3, 3), (channels,))
        )

        def loss(x, kernel, bias, stride=stride):
            form = {"activation": "relu", "stride": stride, "implementation": "cuda"}
            return depthwise_conv(x, kernel, bias=bias, **form).sum()

        results += jax.jit(jax.grad(loss, (0, 1, 2)))(x, kernel, bias)
        for variant in backend.TARGETS["depthwise"]["variants"]["cuda"]:
            form = {"stride": stride, "activation": "relu", "variant": variant}
            results.append(depthwise_conv(x, kernel, bias=bias, **form))
        if stride == 1:
            window = Window((9, width), (3, 3), (1, 1), (1, 1), (9, width))
            form = {"window": window, "channel_axis": 0, "out_dtype": x.dtype}
            for variant in backend.TARGETS["depthwise_input"]["variants"]["cuda"]:
                by = {"implementation": None, "variant": variant}
                results += bind(depthwise_input_p, x, kernel, **form, **by)
    return results


def packed_products(rng, dtype):
    """Of several parts and strips, with x on either side and with a number that is not finite."""
    results = []
    forms = (0, 0.3, dtype), (0, 0.3, jnp.int8), (0, 0.1, jnp.float8_e4m3fn)
    for cell, density, numbers in (*forms, (1, 0.5, dtype), (2, 0.1, dtype)):
        # initcheck names the scatter of XLA that finds the scales of rows of 8 bits: on the host.
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            topology = Topology.from_mask(rng.random((150, 2300)) < density)
            values = jnp.asarray(rng.standard_normal(topology.nse), dtype)
            packed = CSR(values, topology).pack(numbers, cell=cell, parts=3)
        packed = jax.device_put(packed, jax.devices()[0])
        x = jnp.asarray(rng.standard_normal((2300, 72)), dtype)
        results.append(packed.todense())
        for variant in backend.TARGETS["packed_product"]["variants"]["cuda"]:
            if variant.startswith("packed_gaps") != (cell == 0):
                continue
            product = functools.partial(spmm, packed, variant=variant)
            columns = (1, 2, 5, 8, 24) if cell == 0 else (5, 24, 72)
            results += [product(x[:, :n]) for n in columns]
            results += [linear(x[:, :n].T, packed, variant=variant) for n in (columns[-2], 72)]
            results.append(jnp.nan_to_num(product(x.at[3, 0].set(jnp.nan))))
    return results


def batches(rng, dtype):
    """Batches of values and of patterns, whose slices begin anywhere.

    Products have a bias and an activation, sampled ones are scaled.
    """
    topologies = (
        Topology.from_mask(rng.random((37, 53)) < 0.3),
        Topology.from_mask(rng.random((3, 37, 53)) < 0.3),
    )
    x, y = (jnp.asarray(rng.standard_normal((3, size, 5)), dtype) for size in (53, 37))
    bias = jnp.asarray(rng.standard_normal(37), dtype)
    results = []
    for topology in topologies:
        values = jnp.asarray(rng.standard_normal((3, topology.nse)), dtype)
        a = CSR(values, topology)
        for variant in backend.TARGETS["spmm"]["variants"]["cuda"]:
            if fits("spmm", variant):
                results.append(spmm(a, x, bias=bias, activation="relu", variant=variant))
        results += sampled_products(y, x, topology, scale_by=values)
        results += softmax_by_variant(a)
        results.append(reduce_rows(values, topology, "logsumexp", variant="rows"))
    return results


def long_rows(rng, dtype):
    """A product in which others help with long rows."""
    mask = rng.random((600, 700)) < np.where(np.arange(600)[:, None] % 97 == 5, 0.9, 0.01)
    topology = Topology.from_mask(mask)
    a = CSR(jnp.asarray(rng.standard_normal(topology.nse), dtype), topology)
    x = jnp.asarray(rng.standard_normal((700, 2048)), dtype)
    options = {"transpose": False, "dense_on_left": False, "variant": "tiled_rows"}
    return [multiply("spmm", a, x, **options)]


def graphs(rng, dtype):
    """By kernels for graphs: a power law with rows in pieces, and a batch of patterns."""
    topology = skewed(rng, 1500, 3000)
    results = []
    for t in topology, jax.tree.map(lambda x: jnp.stack([x, x]), topology.as_dynamic()):
        a = CSR(jnp.asarray(rng.standard_normal((*t.batch_shape, t.nse)), dtype), t)
        x, y = (jnp.asarray(rng.standard_normal((size, 36)), dtype) for size in (3000, 1500))
        options = {"dense_on_left": False, "variant": "split_rows"}
        results.append(multiply("spmm", a, x, transpose=False, **options))
        results.append(multiply("spmm", a, y, transpose=True, **options))
        results.append(sparse_softmax(a, variant="runs_of_rows").values)
        results += reductions(rng, dtype, t, "runs_of_rows")
        softmax = functools.partial(lambda t, v: sparse_softmax(CSR(v, t)).values, t)
        results += jax.jvp(softmax, (a.values,), (a.values,))
    return results


def softmax_by_variant(a):
    variants = backend.TARGETS["sparse_softmax"]["variants"]["cuda"]
    variants = [variant for variant in variants if variant not in FOR_GRAPHS]
    return [sparse_softmax(a, variant=variant).values for variant in variants]


def softmaxes(rng, dtype, topology):
    """By every variant, and the derivative."""
    values = jnp.asarray(rng.standard_normal(topology.nse), dtype)

    def softmax(values):
        return sparse_softmax(CSR(values, topology)).values

    results = softmax_by_variant(CSR(values, topology))
    return [*results, *jax.jvp(softmax, (values,), (values,))]


def reductions(rng, dtype, topology, variant):
    """By a variant; rows without entries, which get -inf, left out."""
    values = jnp.asarray(rng.standard_normal((*topology.batch_shape, topology.nse)), dtype)
    filled = jnp.diff(topology.row_offsets) > 0
    return [
        jnp.where(filled, reduce_rows(values, topology, by, variant=variant), 0)
        for by in ("max", "logsumexp")
    ]


def scans(rng, dtype, suffix):
    """A dense and a sparse LSTM with gradients, of odd size, of heads, and by few blocks."""
    h, steps, batch = 37, 5, 3
    heads = 6
    blocks = jnp.asarray(rng.standard_normal((heads, h, 4 * h)) / 4, dtype)
    mask = rng.random((4 * h, h)) < 0.3
    dense = mask * rng.standard_normal(mask.shape) / 4
    sparse = CSR(jnp.asarray(dense[mask], dtype), Topology.from_mask(mask))
    carry = (jnp.zeros((batch, h)), jnp.zeros((batch, h)))
    xs = jnp.asarray(rng.standard_normal((steps, batch, 4 * h)), dtype)
    narrow = carry, xs
    wide = jax.tree.map(lambda x: jnp.tile(x, heads), narrow)
    results = []
    units = "fma" if dtype == jnp.float32 else "tensor_cores"
    forms = [
        (f"dense_{units}{suffix}", jnp.asarray(dense.T, dtype), lambda w: w, narrow),
        (f"dense_{units}{suffix}", blocks, lambda w: w, wide),
        (f"masked_{units}{suffix}", sparse.values, lambda v: CSR(v, sparse.topology), narrow),
        (f"sparse_pairs{suffix}", sparse.values, lambda v: CSR(v, sparse.topology), narrow),
    ]
    if units == "tensor_cores":
        forms.append(("dense_resident", blocks, lambda w: w, wide))
        h = 150
        shared = jnp.asarray(rng.standard_normal((h, 4 * h)) / 8, dtype)
        carry = (jnp.zeros((batch, h)), jnp.zeros((batch, h)))
        xs = jnp.asarray(rng.standard_normal((steps, batch, 4 * h)), dtype)
        forms.append(("dense_resident", shared, lambda w: w, (carry, xs)))
    for variant, weights, matrix, (carry, xs) in forms:

        def scan(weights, xs, carry=carry, matrix=matrix, variant=variant):
            return recurrent.scan(recurrent.LSTM, matrix(weights), carry, xs, variant=variant)[1]

        ys, pull = jax.vjp(scan, weights, xs)
        results += [ys, *pull(ys)]
    recurrent.check()
    return results


def waves(rng, dtype, suffix):
    """Three layers at once with their gradients, of odd size; products of one matrix only."""
    h, steps = 37, 5
    results = []
    cells = (recurrent.LSTM, 4), (recurrent.GRU, 3)
    forms = [(name, *cell, 3) for name in ("wave_mma", "wave_wgmma") for cell in cells]
    forms.append(("wave_stationary", recurrent.LSTM, 4, 32))
    if not suffix:  # blocks that send sums have no barriers
        forms += [("wave_scatter", *cell, 3) for cell in cells]
    for name, cell, gates, batch in forms:
        weights = jnp.asarray(rng.standard_normal((3, 2, h, gates * h)) / 8, dtype)
        carry = jnp.zeros((batch, h))
        carries = [(carry, carry) if gates == 4 else carry] * 3

        def stack(weights, xs, cell=cell, carries=carries, variant=name + suffix):
            layers = [recurrent.Layer(cell, recurrent=u, input=w) for u, w in weights]
            return recurrent.stack_scan(layers, carries, xs, variant=variant)[1]

        xs = jnp.asarray(rng.standard_normal((steps, batch, h)), dtype)
        ys, pull = jax.vjp(stack, weights, xs)
        results += [ys, *pull(ys)]
    recurrent.check()
    return results


if __name__ == "__main__":
    main()
