"""The speed of decoding by the products of a known decoder, with random weights.

It says nothing of quality: nothing is trained. What pruning does not change is left out: embeddings
and the last layer; a sum stands in for attention.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxsparse import CSR, Packed, Topology, linear

from ..common.errors import memory_errors
from ..common.resumable import progress_bar
from ..common.timing import median_seconds

TIMED_CALLS = 5
DTYPE = jnp.bfloat16


class Decoder(NamedTuple):
    """The sizes of a decoder whose MLP has a gate, as those of Llama."""

    layers: int
    hidden: int
    filter: int

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The (outputs, inputs) of a layer's matrices; those with the same input are merged."""
        hidden = self.hidden
        return {
            "query_key_value": (3 * hidden, hidden),
            "merge": (hidden, hidden),
            "gate_up": (2 * self.filter, hidden),
            "down": (hidden, self.filter),
        }

    @property
    def products(self) -> int:
        """How many a step makes."""
        return self.layers * len(self.matrices)

    @property
    def weights(self) -> int:
        """How many there are."""
        return self.layers * sum(m * k for m, k in self.matrices.values())


SHAPES = {"llama-7b": Decoder(layers=32, hidden=4096, filter=11008)}

Layer = dict[str, Any]  # The matrices of a layer by their names, in one form.


def random_csr(shape: tuple[int, int], sparsity: float, seed: int) -> CSR:
    """A random matrix, for inference, scaled so that products keep the variance of x."""
    rng = np.random.default_rng(seed)
    mask = rng.random(shape, np.float32) >= sparsity
    # Dynamic, so that the pattern of each copy is in memory of its own, too.
    topology = Topology.from_mask(mask, transpose=False).as_dynamic()
    scale = 1 / np.sqrt(shape[1] * (1 - sparsity))
    values = scale * rng.standard_normal(topology.nse, np.float32)
    return CSR(jnp.asarray(values, DTYPE), topology)


def random_dense(shape: tuple[int, int], seed: int) -> Array:
    """The same without zeros, (inputs, outputs)."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape[::-1], np.float32) / np.sqrt(shape[1]), DTYPE)


def multiply(x: Array, a: Array | CSR | Packed) -> Array:
    """X times a dense (inputs, outputs) matrix, or the transpose of one with a row an output."""
    return linear(x, a) if isinstance(a, CSR | Packed) else x @ a


def norm_factor(x: Array) -> Array:
    """1 / RMS of each row of x."""
    return jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-6)


def normalised_product(x: Array, a: Array | CSR | Packed) -> Array:
    """The product of x, normalised, and a matrix, in float32.

    Each row's factor follows the product: then XLA sums the squares where it adds the residual, and
    multiplies by the factor in the kernel that reads the product.
    """
    return multiply(x, a) * norm_factor(x)


def one_layer(x: Array, layer: Layer) -> Array:
    """A decoder layer without attention: its four products, one after another."""
    query, key, value = jnp.split(normalised_product(x, layer["query_key_value"]), 3, axis=-1)
    attended = query + key + value  # Stands in for attention.
    x = x + multiply(attended.astype(DTYPE), layer["merge"])
    gate, up = jnp.split(normalised_product(x, layer["gate_up"]), 2, axis=-1)
    return x + multiply((jax.nn.silu(gate) * up).astype(DTYPE), layer["down"])


@functools.partial(jax.jit, static_argnames="steps")
def decode(layers: list[Layer], x: Array, steps: int) -> Array:
    """So many steps in one program, each of which has all products."""

    def step(x: Array, _: Any) -> tuple[Array, None]:
        for layer in layers:
            x = one_layer(x, layer)
        return (x * norm_factor(x)).astype(DTYPE), None

    return jax.lax.scan(step, x, length=steps)[0]


def measure(layer: Layer, decoder: Decoder, args: argparse.Namespace) -> dict[str, Any]:
    """The time of a step and the bytes of all layers.

    Layers are copies of one: their weights are equal, but stand in memory of their own, so that
    none is read from a cache.
    """
    layers = [jax.tree.map(jnp.copy, layer) for _ in range(decoder.layers)]
    rng = np.random.default_rng(args.seed)
    x = jnp.asarray(rng.standard_normal((args.decode_batch, decoder.hidden)), DTYPE)
    seconds = median_seconds(lambda: decode(layers, x, args.decode_steps), TIMED_CALLS)
    seconds /= args.decode_steps
    return {
        "milliseconds": 1e3 * seconds,
        "tokens_per_second": args.decode_batch / seconds,
        "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(layers)),
    }


def measure_shapes(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The speed of each form at each sparsity, with what it was measured of."""
    decoder = SHAPES[args.shapes]
    if args.decoder_layers is not None:
        decoder = decoder._replace(layers=args.decoder_layers)
    sparsities = sorted(x for x in args.sparsities if x)
    results = []
    with (
        memory_errors(f"decoding with the shapes of {args.shapes}", "--decoder-layers"),
        progress_bar(0, 1 + 2 * len(sparsities), args.quiet, args.shapes) as bar,
        ThreadPoolExecutor() as pool,
    ):

        def record(sparsity: float, form: str, layer: Layer, **more: str) -> None:
            about = {"products": decoder.products, "weights": decoder.weights}
            about |= {"sparsity": sparsity, "form": form, **more}
            results.append(about | measure(layer, decoder, args))
            bar.update()

        def each(make: Callable[..., Any], sources: dict[str, Any], **options: Any) -> Layer:
            made = pool.map(functools.partial(make, **options), sources.values())
            return dict(zip(sources, made, strict=True))

        shapes = decoder.matrices
        record(0.0, "dense", each(random_dense, shapes, seed=args.seed))
        for sparsity in sparsities:
            layer = each(random_csr, shapes, sparsity=sparsity, seed=args.seed)
            record(sparsity, "CSR", layer)
            layer = each(CSR.pack, layer, columns=args.decode_batch)
            cells = {a.cell for a in layer.values()}
            packed_by = ", ".join(sorted({"gaps" if cell == 0 else "cells" for cell in cells}))
            record(sparsity, "packed", layer, packed_by=packed_by)
    return results
