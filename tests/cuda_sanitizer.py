"""The CUDA kernels of all operations, for a run under compute-sanitizer.

    export XLA_PYTHON_CLIENT_ALLOCATOR=platform
    export XLA_FLAGS="--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0"
    export JAXSPARSE_SCAN_WAIT_LIMIT=100
    compute-sanitizer --tool memcheck python tests/cuda_sanitizer.py

The other tools are initcheck, synccheck, and racecheck, which needs ``--barriers``: between the
steps of a scan, what orders the reads and writes of a block's shared memory is the data that come
from other blocks, and racecheck only knows barriers. Blocks of a scan wait for one another, which
takes long under a sanitizer.

``--part`` runs some of the kernels, so that several processes share the work.

This is no selection of tests for pytest, since a sanitizer looks at each program that XLA compiles
for a test as well, which takes far longer than the kernels do.
"""

from __future__ import annotations

import argparse
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from checks import FOR_GRAPHS, fits
from patterns import skewed
from random_graphs import random_arrays
from score_problems import arrays_of

from jaxsparse import (
    CSR,
    BlockMask,
    Topology,
    backend,
    depthwise_conv,
    dynamic,
    linear,
    masks,
    recurrent,
    sddmm,
    sparse_attention,
    sparse_softmax,
    spmm,
)
from jaxsparse.ops.multiply import multiply


def main() -> None:
    """Runs the kernels on odd-sized patterns, one with padding, in float32 and 16 bits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--barriers", action="store_true", help="in scans, blocks meet each step")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS), help="what to run")
    asked = parser.parse_args()
    for part in asked.part:
        rng = np.random.default_rng(0)
        for dtype in (jnp.float32, jnp.bfloat16):
            for result in PARTS[part](rng, dtype, "_barrier" if asked.barriers else ""):
                assert np.isfinite(np.asarray(result, np.float32)).all()
        print("all kernels of", part, "ran on", jax.devices()[0].device_kind, flush=True)


def of_products(rng, dtype, suffix):
    """The kernels of products and of the softmax."""
    topology = Topology.from_mask(rng.random((37, 53)) < 0.3, nse=700)
    large = Topology.from_mask(rng.random((150, 410)) < 0.3)  # stages are filled several times
    results = [*products(rng, dtype, topology, 19), *products(rng, dtype, large, 40)]
    results += softmaxes(rng, dtype, topology)
    results += softmaxes(rng, dtype, Topology.from_mask(rng.random((5, 4000)) < 0.6))
    of_batches = jnp.float32 if dtype == jnp.float32 else jnp.float16
    results += [*long_rows(rng, dtype), *sampled_rows(rng, dtype), *batches(rng, of_batches)]
    results += graphs(rng, dtype)
    if dtype != jnp.float32:
        results += packed_products(rng, dtype)
    return results + convolutions(rng, dtype)


def of_attention(rng, dtype, suffix):
    """The kernels of attention."""
    results = attentions(rng, dtype) + attentions_by_rows(rng, dtype)
    if dtype != jnp.float32:
        results += few_queries(rng, dtype) + scored_attention(rng, dtype)
    return results


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
    "attention": of_attention,
    "recurrence": of_recurrence,
    "graphs": of_graphs,
}


# Sizes of heads that no kernel by warpgroups takes, and of those that they do.
OF_WARPS, OF_WARPGROUPS = [(192, 136)], [(64, 64), (128, 128)]


def attentions(rng, dtype):
    """Grouped heads, several tiles, cells of every state."""
    seen = rng.random((200, 300)) < 0.3
    seen[:64, 64:128], seen[64:128, :128] = True, False
    mask = BlockMask.from_dense(seen)
    sizes = {"tiles_mma": OF_WARPS, "tiles": OF_WARPGROUPS}
    if dtype == jnp.float32:
        sizes = {"tiles_mma": OF_WARPGROUPS}
    return gradients_of_attention(rng, mask, dtype, sizes)


def attentions_by_rows(rng, dtype):
    """A graph, with rows and columns that are cut into parts, and heads of odd size."""
    seen = rng.random((1500, 1300)) < 0.002
    seen[7], seen[:, 9] = True, True
    return gradients_of_attention(
        rng, Topology.from_mask(seen), dtype, {"csr": [(64, 64), (2, 64), (5, 7)]}
    )


def gradients_of_attention(rng, mask, dtype, sizes):
    """By variants, each with some sizes of heads."""

    @functools.partial(jax.jit, static_argnames="variant")
    def gradients(*operands, variant):
        def loss(q, k, v):
            out = sparse_attention(q, k, v, mask, variant=variant)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.grad(loss, (0, 1, 2))(*operands)

    results = []
    t, s = mask.shape
    for variant, of_variant in sizes.items():
        for h, e in of_variant:
            shapes = (2, t, 4, h), (2, s, 2, h), (2, s, 2, e)
            operands = (jnp.asarray(rng.standard_normal(x), dtype) for x in shapes)
            results += gradients(*operands, variant=variant)
    return results


def scored_attention(rng, dtype):
    """By functions of scores with gradients of what they read, and dropout; tangents.

    Kernels by warpgroups sum such gradients by distances and columns as well, others do not.
    """
    mask = BlockMask.from_mask(masks.causal() & masks.band(200), (500, 500))
    bias = jnp.asarray(rng.standard_normal((4, 500, 500)), jnp.float32)
    sizes = {"n": 4, "s": 500, "d": 999}

    def loss(q, k, v, named, bias):
        out = sparse_attention(
            *(q, k, v, mask),
            score=lambda s, row, column, slope, **more: (
                s - slope * (row - column) + sum(more.values())
            ),
            operands=named,
            bias=bias,
            dropout_rate=0.2,
            dropout_key=jax.random.key(0),
        )
        return jnp.sum(out.astype(jnp.float32) ** 2)

    def along(q, k, v):
        return jax.jvp(lambda q: sparse_attention(q, k, v, mask), (q,), (q,))[1]

    results = []
    of_warpgroups = {"slope": "n", "far": "nd", "tilt": "s"}
    for h, axes in ((64, of_warpgroups), (136, {"slope": "n"})):
        q, k, v = (jnp.asarray(rng.standard_normal((2, 500, n, h)), dtype) for n in (4, 2, 2))
        named = arrays_of(axes, sizes)
        results += jax.tree.leaves(jax.jit(jax.grad(loss, range(5)))(q, k, v, named, bias))
        results.append(jax.jit(along)(q, k, v))
    return results


def few_queries(rng, dtype):
    """Heads that share keys, sequences of different lengths; keys in order and in pages."""
    mask = BlockMask.from_lengths([300, 0, 77], (3, 320), causal=True).reshape_batch(3, 1)
    q, k, pool = (
        jnp.asarray(rng.standard_normal(s), dtype)
        for s in ((3, 3, 4, 64), (3, 320, 2, 64), (9, 64, 2, 64))
    )
    pages = rng.integers(0, 9, (3, 5))
    return [
        sparse_attention(q, k, k, mask, variant="decode"),
        sparse_attention(q, pool, pool, mask, pages=pages, variant="decode"),
    ]


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
    a = CSR(values, topology)
    results = sampled_products(y, x, topology)
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
    return results


def packed_products(rng, dtype):
    """Of several parts and strips, with x on either side and with a number that is not finite."""
    results = []
    for cell, density in (1, 0.5), (2, 0.1):
        topology = Topology.from_mask(rng.random((150, 2300)) < density)
        values = jnp.asarray(rng.standard_normal(topology.nse), dtype)
        packed = CSR(values, topology).pack(cell=cell, parts=3)
        x = jnp.asarray(rng.standard_normal((2300, 72)), dtype)
        results.append(packed.todense())
        for variant in backend.TARGETS["packed_product"]["variants"]["cuda"]:
            product = functools.partial(spmm, packed, variant=variant)
            results += [product(x), product(x[:, :5]), product(x[:, :24])]
            results.append(linear(x.T, packed, variant=variant))
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
