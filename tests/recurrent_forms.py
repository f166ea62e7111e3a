"""Forms of recurrent scans, and programs of shapes alone, for tests of plans and of kernels."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from recurrent_problems import CELLS, kernels

import jaxsparse
from jaxsparse import CSR, Topology, _ffi, recurrent
from jaxsparse.recurrent.engine import EXPRESSION
from jaxsparse.recurrent.plan import ScanForm


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def dense(products=1, states=1, hidden=1024, batch=4, dtype="bfloat16", weights=None, **changes):
    form = ScanForm(
        products=products,
        states=states,
        inputs=products,
        outputs=0,
        arrays=1,
        hidden=hidden,
        batch=batch,
        length=256,
        state_dtype=dtype,
        weight_dtype=weights or dtype,
        sparse=False,
        input_dtypes=(dtype,),
    )
    return dataclasses.replace(form, **changes)


def explain(function, *arguments, **options):
    """The scans of a function alone."""
    every = jaxsparse.explain(function, *arguments, **options)
    return [call for call in every if call.operation == "recurrent_scan"]


def operands(name, sparse, dtype=jnp.bfloat16, T=16, B=3, h=40):
    cell, gates, form = CELLS[name]
    carry = jax.tree.map(lambda _: shape(B, h), form)
    xs, bias = shape(T, B, gates * h, dtype=dtype), shape(gates * h, dtype=dtype)
    if not sparse:
        return cell, None, (shape(h, gates * h, dtype=dtype), carry, xs, bias)
    mask = np.random.default_rng(0).random((gates * h, h)) < 0.3
    topology = Topology.from_mask(mask)
    packed = recurrent.pack(CSR(jnp.zeros(topology.nse, dtype), topology), batch=B, dtype=dtype)
    return cell, packed.topology, (shape(topology.nse, dtype=dtype), carry, xs, bias)


def loss_of(cell, topology, **options):
    def loss(weights, carry, xs, bias):
        w = weights if topology is None else CSR(weights, topology)
        _, ys = recurrent.scan(cell, w, carry, xs, recurrent_bias=bias, **options)
        return ys.astype(jnp.float32).sum()

    return loss


def variant_of(weights, dtype):
    wide = jnp.dtype(dtype) == jnp.float32
    return "sparse_pairs" if weights == "pairs" else f"{weights}_{('tensor_cores', 'fma')[wide]}"


def compiles(function, *shapes):
    found = kernels(function, *shapes)
    for file, source in found:
        assert _ffi.compile_kernel(file, EXPRESSION, "sm_90a", source).startswith(b"\x7fELF")
    return [source for _, source in found]
