"""Runs of layers of a stack that one `recurrent.stack_scan` computes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jaxsparse import recurrent
from jaxsparse.csr import CSR
from jaxsparse.nn.cells import RecurrentCell, check_layers, flat_carry, with_batch
from jaxsparse.nn.headwise import HeadwiseLinear
from jaxsparse.nn.linear import SparseLinear, has_call_of
from jaxsparse.nn.recurrent import RNN, carry_stream
from jaxsparse.nn.sequences import first_steps, last_steps, time_first, time_restored
from jaxsparse.ops import arguments
from jaxsparse.precision import accumulator_dtype

# What takes its place for a while, to record calls for instance, must be called.
_CALL_OF_RNN = RNN.__call__


@dataclasses.dataclass(frozen=True)
class Block:
    """A layer of a stack with what stands before and behind it: a norm and a dropout, or None."""

    layer: Any
    norm: Any
    dropout: Any


def folds(norm: Any) -> bool:
    """Whether a norm is a linear map, which the weights of the next layer can take in."""
    return (
        norm is not None
        and has_call_of(norm, nnx.BatchNorm)
        and norm.use_running_average is True
        and norm.axis == -1
        and norm.promote_dtype is dtypes.promote_dtype
    )


def is_inside(norm: Any) -> bool:
    """Whether a norm, or none, can be part of a scan."""
    if norm is None or folds(norm):
        return True
    return (
        has_call_of(norm, *_NORMS)
        and norm.reduction_axes == norm.feature_axes == -1
        and norm.axis_name is None
        and norm.use_fast_variance
        and norm.promote_dtype is dtypes.promote_dtype
    )


# The norms of each step and row, by their names in `recurrent.Layer`.
_NORMS = {nnx.LayerNorm: "layer", nnx.RMSNorm: "rms"}


@dataclasses.dataclass(frozen=True)
class Wave:
    """The layers from some place on that are one scan, and which of them end skips within it."""

    blocks: tuple[Block, ...]
    skips: tuple[int | None, ...]
    options: Mapping[str, Any]  # of all layers

    @property
    def ends_skip(self) -> bool:
        """Whether the skip that the last layer ends, if any, is part of the scan."""
        return self.skips[-1] is not None


def wave_of(
    blocks: Sequence[Block], x: jax.Array, first: int, total: int, skip: int | None
) -> Wave:
    """As many layers as can be one scan, or the first one alone.

    A skip is part of the scan if it starts within or at the input. One that starts before makes its
    end the last layer. Where a later skip starts within, the layers up to there are a scan: what
    is returned is the output of the last one.

    Args:
        blocks: the layers that are left.
        x: what comes in; the norm of the first layer, unless it can be inside, is done already.
        first: the place of the first layer in the stack.
        total: the layers of the stack.
        skip: over how many layers skips lead, or None.
    """
    found: list[int | None] = []
    options: dict[str, Any] = {"dtype": x.dtype}
    widths = [x.shape[-1]]  # of the input and of the outputs
    for i, block in enumerate(blocks):
        own = _options_of(block, options["dtype"], widths[-1], i == 0)
        if own is None or (found and own != options):
            break
        options = own
        widths.append(block.layer.cell.hidden_features)
        if skip is None or (first + i + 1) % skip:
            found.append(None)
            continue
        start = i + 1 - skip  # among the widths
        # An input of a wider dtype makes a wider output.
        raw = start == 0 and is_inside(blocks[0].norm) and x.dtype == options["dtype"]
        inside = (start > 0 or raw) and widths[start] == widths[-1]
        found.append(skip if inside else None)
        if not inside:
            break
    count = len(found)
    if skip is not None and count < total - first:
        ends = [i for i in range(count) if (first + i + 1) % skip == 0]
        more = any((j + 1) % skip == 0 for j in range(first + count, total))
        if ends and more:
            count = ends[-1] + 1
    if count < 2:
        return Wave(tuple(blocks[:1]), (None,), {})
    return Wave(tuple(blocks[:count]), tuple(found[:count]), options)


def _options_of(block: Block, incoming: Any, width: int, is_first: bool) -> Any:
    """What must be the same in all layers of a scan, or None for a layer that is a run of its own.

    Args:
        block: the layer.
        incoming: the dtype of what comes in.
        width: its features.
        is_first: whether the norm, unless it can be inside, is done already.
    """
    layer, norm, dropout = block.layer, block.norm, block.dropout
    if not isinstance(layer, RNN) or type(layer).__call__ is not _CALL_OF_RNN:
        return None
    if not has_call_of(layer.cell, RecurrentCell):
        return None
    if not (is_inside(norm) or is_first):
        return None
    if not (dropout is None or has_call_of(dropout, nnx.Dropout)):
        return None
    cell = layer.cell
    sides = (cell.dense_i, cell.dense_h)
    if cell.in_features != width or not all(_is_plain(side, cell.gates) for side in sides):
        return None
    if layer.reverse and not layer.keep_order:
        return None  # the outputs lie in another order than the inputs
    dtype = incoming
    if norm is not None and is_inside(norm):
        if norm.num_features != width:
            return None
        names = ("mean", "var", "scale", "bias")
        parts = [getattr(norm, name, None) for name in names]
        dtype = _dtype_of(dtype, *parts, dtype=norm.dtype)
        # In 16 bits a mean far above the spread cancels what is left, and in float16 squares of
        # features overflow.
        rms = has_call_of(norm, nnx.RMSNorm)
        if dtype == jnp.float16 or (dtype == jnp.bfloat16 and not rms):
            return None
    of_sides = []
    for side in sides:
        dtype = _dtype_of(dtype, _weights(side), side.bias, dtype=side.dtype)
        of_sides.append(dtype)
    if of_sides[0] != of_sides[1]:
        return None
    if norm is not None and is_inside(norm) and jnp.promote_types(incoming, dtype) != dtype:
        return None  # the norm is of what comes in before it is rounded
    precisions = {arguments.as_precision("RecurrentStack", side.precision) for side in sides}
    if len(precisions) > 1:
        return None
    return {
        "dtype": dtype,
        "reverse": layer.reverse,
        "precision": precisions.pop(),
        "recompute": layer.recompute,
        "implementation": layer.implementation,
        "variant": layer.variant,
    }


def _is_plain(layer: Any, gates: int) -> bool:
    """Whether a layer of a cell is a product and a bias in one dtype, which a scan can compute."""
    if isinstance(layer, HeadwiseLinear) and layer.gates != gates:
        return False  # what it gives lies in another order
    return (
        has_call_of(layer, nnx.Linear, SparseLinear, HeadwiseLinear)
        and getattr(layer, "activation", None) is None
        and getattr(layer, "dot_general", jax.lax.dot_general) is jax.lax.dot_general
        and layer.promote_dtype is dtypes.promote_dtype
        and layer.preferred_element_type is None
    )


def _weights(layer: Any) -> Any:
    return layer.values if isinstance(layer, SparseLinear) else layer.kernel


def _dtype_of(incoming: Any, *variables: Any, dtype: Any) -> Any:
    """The dtype in which Flax computes with an array and these variables."""
    values = [None if v is None else v[...] for v in variables]
    return jnp.dtype(dtypes.canonicalize_dtype(jnp.zeros((), incoming), *values, dtype=dtype))


# ---- The scan ----


def run_wave(
    wave: Wave,
    carries: Sequence[Any],
    x: jax.Array,
    steps: dict[str, Any],
    *,
    time_major: bool,
    deterministic: bool | None,
    rngs: Any,
    carry_rngs: Any,
) -> tuple[list[Any], jax.Array]:
    """The last carries of the layers, and the outputs of the last one.

    Args:
        wave: of two layers or more.
        carries: one for each layer, or None for the layer's own.
        x: what comes in, its first norm done unless it can be inside.
        steps: ``seq_lengths`` and ``resets``.
        time_major: whether time is the first dimension.
        deterministic, rngs: of the dropouts.
        carry_rngs: random keys for the carries.
    """
    operation = "RecurrentStack"
    options = dict(wave.options)
    dtype = options.pop("dtype")
    xs, lengths = time_first(operation, x, steps["seq_lengths"], time_major)
    starts = first_steps(operation, xs, steps.get("resets"), lengths, time_major)
    length, *batch, features = xs.shape
    flat, layers = [], []
    for block, carry, skip in zip(wave.blocks, carries, wave.skips, strict=True):
        cell = block.layer.cell
        if carry is None:
            own = block.layer.rngs if carry_rngs is None else carry_rngs
            shape = (*batch, cell.in_features)
            carry = cell.initialize_carry(shape, carry_stream(own))
        flat.append(flat_carry("RNN", cell, carry, tuple(batch)))
        shape = (length, *batch, cell.hidden_features)
        mask = _mask(block.dropout, shape, dtype, time_major, deterministic, rngs)
        norm = block.norm if is_inside(block.norm) else None
        layers.append(_layer(cell, norm, dtype, skip, mask))
    last, ys = recurrent.stack_scan(
        layers,
        flat,
        xs.reshape(length, math.prod(batch), features).astype(dtype),
        seq_lengths=lengths,
        resets=last_steps(starts) if options["reverse"] else starts,
        **options,
    )
    carries = [with_batch(carry, tuple(batch)) for carry in last]
    return carries, time_restored(ys, tuple(batch), time_major)


def _layer(cell: RecurrentCell, norm: Any, dtype: Any, skip: Any, mask: Any) -> recurrent.Layer:
    """A cell as a layer of a scan, with the norm of its input, if that is inside."""
    check_layers("RNN", cell)
    weights, bias = _matrix(cell.dense_i), _bias(cell.dense_i)
    of_norm = {}
    if folds(norm):
        weights, bias = _folded(norm, weights, bias, cell.gates)
    elif norm is not None:
        shift = getattr(norm, "bias", None)
        of_norm = {
            "norm": next(name for cls, name in _NORMS.items() if isinstance(norm, cls)),
            "norm_scale": None if norm.scale is None else norm.scale[...],
            "norm_shift": None if shift is None else shift[...],
            "norm_epsilon": norm.epsilon,
        }
    own = _bias(cell.dense_h)
    return recurrent.Layer(
        cell.function,
        recurrent=_cast(_matrix(cell.dense_h), dtype),
        input=_cast(weights, dtype),
        bias=None if bias is None else bias.astype(dtype),
        recurrent_bias=None if own is None else own.astype(dtype),
        skip=skip,
        mask=mask,
        **of_norm,
    )


def _matrix(layer: Any) -> Any:
    if isinstance(layer, SparseLinear):
        return CSR(layer.values[...], layer.pattern)
    return layer.kernel[...]


def _bias(layer: Any) -> Any:
    return None if layer.bias is None else layer.bias[...]


def _cast(weights: Any, dtype: Any) -> Any:
    if isinstance(weights, CSR):
        return weights.with_values(weights.values.astype(dtype))
    return weights.astype(dtype)


def _folded(norm: nnx.BatchNorm, weights: Any, bias: Any, gates: int) -> tuple[Any, Any]:
    r"""Weights and bias of the map that normalises by running averages and multiplies then.

    .. math:: \bigl((x - \mu) s + t\bigr) W + b = x \,(s W) + (t - \mu s) W + b
    """
    values = weights.values if isinstance(weights, CSR) else weights
    wide = accumulator_dtype(jnp.result_type(norm.mean[...], values))
    weights = _cast(weights, wide)
    scale = jax.lax.rsqrt(norm.var[...].astype(wide) + norm.epsilon)
    if norm.scale is not None:
        scale = scale * norm.scale[...].astype(wide)
    shift = -norm.mean[...].astype(wide) * scale
    if norm.bias is not None:
        shift = shift + norm.bias[...].astype(wide)
    if isinstance(weights, CSR):
        moved, scaled = (weights @ shift[:, None])[:, 0], weights * scale
    else:
        heads, d, _ = (1, *weights.shape)[-3:]  # a matrix is one block
        moved = jnp.einsum(
            "kd,kdgu->gku",
            shift.reshape(heads, d),
            weights.reshape(heads, d, gates, -1),
            precision=jax.lax.Precision.HIGHEST,
        ).reshape(-1)
        scaled = weights * scale.reshape(*weights.shape[:-1], 1)
    return scaled, moved if bias is None else moved + bias.astype(wide)


def _mask(
    dropout: Any,
    shape: tuple[int, ...],
    dtype: Any,
    time_major: bool,
    deterministic: bool | None,
    rngs: Any,
) -> Any:
    """What a dropout multiplies an output (T, *batch, h) by: (T, B, h), (1, B, h) or None."""
    if dropout is None or dropout.rate == 0:
        return None
    if deterministic or (deterministic is None and dropout.deterministic):
        return None
    length, *batch, h = shape
    # As the outputs lie, so that random numbers are those of a call with them.
    ones = jnp.ones(shape if time_major else (*batch, length, h), dtype)
    axis = 0 if time_major else len(batch)
    mask = dropout(ones, deterministic=deterministic, rngs=rngs)
    mask = jnp.moveaxis(mask, axis, 0).reshape(length, math.prod(batch), h)
    return mask[:1] if axis in (d % ones.ndim for d in dropout.broadcast_dims) else mask
