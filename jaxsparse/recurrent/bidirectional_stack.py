"""Stacks of layers that run in both directions: the public function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxsparse import backend
from jaxsparse.ops.arguments import check_floating
from jaxsparse.precision import accumulator_dtype
from jaxsparse.recurrent.arguments import (
    as_array_of_rank,
    as_resets,
    check_precision,
    counted_steps,
    without_padding,
)
from jaxsparse.recurrent.input_weights import input_products
from jaxsparse.recurrent.layer_step import Norm
from jaxsparse.recurrent.layers import CheckedLayer, Layer, between_layers, check_counts
from jaxsparse.recurrent.run import Options
from jaxsparse.recurrent.scan import scan_both_ways

_MERGES = ("concat", "sum")
_SHARED = ("skip", "norm", "norm_epsilon", "between")


def bidirectional_stack_scan(
    layers: Sequence[tuple[Layer, Layer]],
    carries: Any,
    xs: Any,
    *,
    merge: str = "concat",
    seq_lengths: Any = None,
    resets: Any = None,
    precision: Any = None,
    recompute: bool = False,
    return_all: bool = False,
    implementation: str | None = None,
    variant: str | None = None,
) -> tuple[Any, Any]:
    """Runs recurrent layers in both directions of time, each on what both of the one below give.

    As ``stack_scan``, but ``layers`` and ``carries`` are pairs (forward, backward), the resets a
    pair for all layers, and a layer's output is that of both directions, merged:

    ======== ============================================ ========
    merge    output                                       features
    ======== ============================================ ========
    "concat" the forward one's, then the backward one's   2 h
    "sum"    their sum                                    h
    ======== ============================================ ========

    A layer reads both ends of time, so it starts when the one below has ended: each is one
    ``bidirectional_scan``, the products of its input are those of all steps at once.

    Args:
        layers: at least one pair of `Layer`, the lowest first. Both have weights of one form, the
            same cell, skip, norm and function between layers; the skip adds to the merged output.
        carries: a pair of initial carries for each: a list or a tuple.
        xs: the input ``(T, B, k)``: float32, float64, bfloat16 or float16.
        merge: "concat" or "sum".
        seq_lengths, precision, recompute, implementation, variant: as those of ``stack_scan``.
        resets: a pair of booleans ``(T, B)``, as those of ``bidirectional_scan``.
        return_all: returns the outputs of every layer.

    Returns:
        The pairs of last carries, in a list or a tuple as the first ones are, and the outputs
        ``(T, B, h)`` or ``(T, B, 2 h)`` of the last layer, or with ``return_all`` a list of those
        of all layers.

    Raises:
        TypeError, ValueError: as ``stack_scan``, and where the layers of a pair differ in form.

    >>> import jax.numpy as jnp
    >>> from jaxsparse.recurrent import Layer, bidirectional_stack_scan, elman
    >>> layer = Layer(elman("relu"), recurrent=jnp.eye(2), input=jnp.eye(2))
    >>> h = jnp.zeros((1, 2))
    >>> _, ys = bidirectional_stack_scan(
    ...     [(layer, layer)], [(h, h)], jnp.ones((3, 1, 2)), merge="sum"
    ... )
    >>> ys[:, 0, 0]
    Array([4., 4., 4.], dtype=float32)
    """
    operation = "recurrent.bidirectional_stack_scan"
    backend.check_implementation(operation, implementation)
    check_precision(operation, precision)
    if merge not in _MERGES:
        raise ValueError(f"{operation}: merge must be one of {list(_MERGES)}, got {merge!r}")
    xs = as_array_of_rank(operation, "xs", xs, 3)
    check_floating(operation, xs=xs)
    mask = counted_steps(operation, seq_lengths, *xs.shape[:2])
    if resets is not None:
        _check_pair(operation, "resets", resets)
        resets = tuple(as_resets(operation, "resets", x, xs.shape[:2]) for x in resets)
    _check_pairs(operation, layers, carries)
    options = Options(seq_lengths, precision, recompute, implementation, variant)
    outputs, last = [xs], []
    for i, (pair, carry) in enumerate(zip(layers, carries, strict=True)):
        below = outputs[-1]
        between = pair[0].between
        if between is not None:
            below = between_layers(operation, i, between, below, mask, xs.dtype)
        width = below.shape[2]
        sides = [
            CheckedLayer(operation, i, layer, c, xs.shape[:2], width, side=side)
            for layer, c, side in zip(pair, carry, ("forward ", "backward "), strict=True)
        ]
        name = f"{operation}: layer {i}"
        new, y = _layer(name, pair, carry, sides, below, mask, resets, merge, options)
        skip = sides[0].skip
        if skip is not None:
            added = outputs[i + 1 - skip]
            if added.shape != y.shape:
                raise ValueError(
                    f"{operation}: layer {i}: skip={skip} adds what has {added.shape[2]} features "
                    f"to an output of {y.shape[2]}: they must be equal"
                )
            y = y + (added if mask is None else jnp.where(mask[:, :, None], added, 0))
        last.append(new)
        outputs.append(y)
    kept = tuple(last) if isinstance(carries, tuple) else last
    return kept, (outputs[1:] if return_all else outputs[-1])


def _layer(
    name: str,
    pair: tuple[Layer, Layer],
    carry: Any,
    sides: Sequence[CheckedLayer],
    below: Any,
    mask: Any,
    resets: Any,
    merge: str,
    options: Options,
) -> tuple[Any, Any]:
    """The last carries of a pair of layers, and what both give, merged."""
    if sides[0].input is not None:
        below = without_padding(below, mask)
    if sides[0].form != sides[1].form:
        raise ValueError(
            f"{name}: both directions must have one form, got {sides[0].form} and {sides[1].form}"
        )
    both = {
        "recurrent": tuple(layer.recurrent for layer in pair),
        "carry": carry,
        "xs": tuple(_pre_activations(side, below, mask, options) for side in sides),
        "recurrent_bias": tuple(side.recurrent_bias for side in sides),
        "parameters": tuple(layer.parameters for layer in pair),
        "resets": (None, None) if resets is None else resets,
    }
    new, ys = scan_both_ways(name, pair[0].cell, both, options)
    merged = []
    for y, side in zip(ys, sides, strict=True):
        if y is None:
            raise ValueError(f"{side.name}: its cell must return a y, got None")
        if side.mask is not None:
            factors = side.mask if mask is None else jnp.where(mask[:, :, None], side.mask, 0)
            wide = accumulator_dtype(y.dtype)
            y = (y.astype(wide) * factors.astype(wide)).astype(y.dtype)
        merged.append(y)
    return new, (jnp.concatenate(merged, -1) if merge == "concat" else merged[0] + merged[1])


def _pre_activations(side: CheckedLayer, below: Any, mask: Any, options: Options) -> Any:
    """What a direction's cell reads as x, of all steps."""
    dtype = below.dtype
    wide = accumulator_dtype(dtype)
    if side.input is None:
        x = below
    else:
        x = input_products(
            side,
            side.input,
            _normalised(below, mask, side).astype(dtype),
            dtype,
            precision=check_precision(side.name, options.precision),
            implementation=options.implementation,
        )
    return x if side.bias is None else (x.astype(wide) + side.bias.astype(wide)).astype(dtype)


def _normalised(x: Any, mask: Any, side: CheckedLayer) -> Any:
    """What the norm of a layer makes of features, in float32; they are 0 where the mask is."""
    norm: Norm | None = side.norm
    if norm is None:
        return x
    wide = x.astype(accumulator_dtype(x.dtype))
    x = norm.of(wide, None if mask is None else mask[:, :, None])
    x = x if side.norm_scale is None else x * side.norm_scale.astype(x.dtype)
    return x if side.norm_shift is None else x + side.norm_shift.astype(x.dtype)


def _check_pair(operation: str, name: str, pair: Any) -> None:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(
            f"{operation}: {name} must be a pair (forward, backward), got {type(pair).__name__}"
        )


def _check_pairs(operation: str, layers: Any, carries: Any) -> None:
    check_counts(operation, "pair of layers", layers, carries)
    for i, (pair, carry) in enumerate(zip(layers, carries, strict=True)):
        _check_pair(operation, f"layer {i}", pair)
        _check_pair(operation, f"the carry of layer {i}", carry)
        for layer in pair:
            if not isinstance(layer, Layer):
                raise TypeError(
                    f"{operation}: layer {i} must be a pair of recurrent.Layer, got "
                    f"{type(layer).__name__}"
                )
        for name in ("cell", *_SHARED):
            forward, backward = (getattr(layer, name) for layer in pair)
            if forward != backward:
                raise ValueError(
                    f"{operation}: layer {i}: both directions must have the same {name}, got "
                    f"{forward!r} and {backward!r}"
                )
