"""Runs the directions of a scan, and their heads: as one call of the primitive, or one each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import backend
from jaxsparse.csr import CSR
from jaxsparse.device import traced_for
from jaxsparse.precision import accumulator_dtype, promoted
from jaxsparse.recurrent.arguments import Direction, check_precision, counted_steps
from jaxsparse.recurrent.cell_checks import checked_step
from jaxsparse.recurrent.layout import (
    ScanLayout,
    ScanLayouts,
    can_be_laid_out,
    lay_out,
    lay_out_side_by_side,
    of_one_form,
    suits,
)
from jaxsparse.recurrent.plan import COMPUTE_CAPABILITY, SparseForm
from jaxsparse.recurrent.primitive import Operands, scan_bind
from jaxsparse.recurrent.stacking import (
    joined_heads,
    padded_values,
    stacked,
    stacked_heads,
    stacked_patterns,
)
from jaxsparse.recurrent.step import Resetting


class Options(NamedTuple):
    """What directions of a scan have in common, as the public functions are given it."""

    seq_lengths: Any
    precision: Any
    recompute: bool
    implementation: str | None
    variant: str | None


def run(
    operation: str, directions: list[Direction], reversed: tuple[bool, ...], options: Options
) -> list[tuple[Any, jax.Array | None]]:
    """The last carry and ys of each direction, of one form, by one scan if its kernel serves all.

    Args:
        operation: what errors name.
        directions: at least one.
        reversed: which of them run from the last step to the first.
        options: of all.
    """
    implementation, variant = options.implementation, options.variant
    backend.check_implementation(operation, implementation)
    precision = check_precision(operation, options.precision)
    one = directions[0]
    length, b, _ = one.xs.shape
    mask = counted_steps(operation, options.seq_lengths, length, b)
    cell_step = checked_step(
        operation,
        one.cell,
        (one.input_gates, one.gates),
        one.tree,
        one.parameter_tree if one.parameters else None,
        one.bias is not None,
        mask is not None,
        wide_leaves(one.carry, one.dtype),
    )
    if length == 0 or b == 0:
        return [
            (jax.tree.unflatten(d.tree, d.carry), d.xs[:, :, : d.h] if cell_step.has_y else None)
            for d in directions
        ]

    layouts: list[ScanLayout | str] = [""] * len(directions)
    if one.sparse and implementation in (None, "cuda"):
        layouts = layouts_of([d.recurrent for d in directions], one.gates, b, one.dtype, variant)
        if len({x.forms if isinstance(x, ScanLayout) else None for x in layouts}) > 1:
            # Kernels of different forms: each direction is a scan of its own.
            return [
                result
                for d, backwards in zip(directions, reversed, strict=True)
                for result in run(operation, [d], (backwards,), options)
            ]
    inputs, spans = _inputs(directions, mask)
    weights, forms = _weights(directions, [x for x in layouts if isinstance(x, ScanLayout)])
    accumulator, heads = accumulator_dtype(one.dtype), one.heads
    carries = tuple(
        stacked_heads([x.astype(accumulator) for x in leaves], heads)
        for leaves in zip(*(d.carry for d in directions), strict=True)
    )
    state = stacked_heads([d.carry[-1].astype(one.dtype) for d in directions], heads)
    _, last, ys = scan_bind(
        Operands(weights, jnp.expand_dims(state, -2), carries, inputs),
        step=cell_step if one.resets is None else Resetting(cell_step),
        sparse=one.sparse,
        forms=forms,
        not_laid_out=next((x for x in layouts if isinstance(x, str)), ""),
        transposed=False,
        reversed=tuple(backwards for backwards in reversed for _ in range(heads)),
        length=length,
        spans=spans,
        precision=precision,
        recompute=bool(options.recompute),
        implementation=implementation,
        variant=variant,
    )

    def result(d: Direction, own: slice) -> tuple[Any, jax.Array | None]:
        leaves = [joined_heads(c[own]).astype(x.dtype) for c, x in zip(last, d.carry, strict=True)]
        y = joined_heads(ys[0][own, :, :, 0]) if cell_step.has_y else None
        return jax.tree.unflatten(d.tree, leaves), y

    return [result(d, slice(i * heads, (i + 1) * heads)) for i, d in enumerate(directions)]


def wide_leaves(carry: Sequence[Any], dtype: Any) -> tuple[bool, ...]:
    """Which leaves of a carry a gradient keeps in float32 beside ``xs`` of 16 bits."""
    room = accumulator_dtype(dtype).itemsize > dtype.itemsize
    return tuple(room and x.dtype.itemsize > dtype.itemsize for x in carry)


def _inputs(
    directions: list[Direction], mask: Any
) -> tuple[tuple[jax.Array, ...], tuple[str, ...]]:
    """The inputs of the cell's step, and the dimensions that each does not repeat along."""
    one = directions[0]
    length, b, _ = one.xs.shape
    h, heads = one.h, one.heads
    xs = [d.xs.reshape(length, b, one.input_gates, h) for d in directions]
    inputs = [stacked_heads(xs, heads)]
    spans = ["tbh"]
    if one.bias is not None:
        # The kernels take the dtype of xs and float32.
        wide = promoted(one.bias.dtype, one.dtype)
        biases = [d.bias.astype(wide).reshape(1, 1, one.gates, h) for d in directions]
        inputs.append(stacked_heads(biases, heads))
        spans.append("h")
    if one.parameters:
        wide = promoted(*(x.dtype for x in one.parameters), one.dtype)
        every = [jnp.stack([x.astype(wide) for x in d.parameters]) for d in directions]
        inputs.append(stacked_heads([jnp.expand_dims(x, (0, 1)) for x in every], heads))
        spans.append("h")
    if mask is not None:
        same = [mask.astype(one.dtype).reshape(length, b, 1, 1)] * (len(directions) * heads)
        inputs.append(stacked(same))
        spans.append("tb")
    if one.resets is not None:
        # A step that does not count resets nothing.
        resets = [d.resets if mask is None else d.resets & mask for d in directions]
        every = [x.astype(one.dtype).reshape(length, b, 1, 1) for x in resets for _ in range(heads)]
        inputs.append(stacked(every))
        spans.append("tb")
    return tuple(inputs), tuple(spans)


def _weights(
    directions: list[Direction], layouts: list[ScanLayout]
) -> tuple[tuple[Any, ...], tuple[SparseForm, ...]]:
    """The weights as the primitive takes them, and the forms of their layouts if they have any."""
    if not directions[0].sparse:
        blocks = [d.recurrent for d in directions]
        return (stacked(blocks) if blocks[0].ndim == 2 else jnp.concatenate(blocks),), ()
    matrices = [d.recurrent for d in directions]
    weights = (stacked(padded_values(matrices)), *stacked_patterns([m.topology for m in matrices]))
    if not layouts:
        return weights, ()
    words = stacked([x.words for x in layouts]), stacked([x.transposed_words for x in layouts])
    return (*weights, *words), layouts[0].forms


def layouts_of(
    matrices: list[CSR], gates: int, batch: int, dtype: Any, variant: str | None
) -> list[ScanLayout | str]:
    """Where matrices lie on chip, side by side if they fit so; or why that is not known.

    Layouts that patterns have are used where they suit.
    """
    topologies, weight_dtype = [m.topology for m in matrices], matrices[0].dtype
    given: list[ScanLayout | None] = [t.layouts.get(ScanLayouts.name) for t in topologies]
    device = traced_for()
    if device is None:
        found = [
            x or "no GPU is here to lay it out for: recurrent.pack does, if it fits" for x in given
        ]
    elif lacks := device.lacks_for(COMPUTE_CAPABILITY):
        found = [x or lacks for x in given]
    elif not isinstance(batch, int):
        found = [x or "the batch is open" for x in given]
    elif not all(map(can_be_laid_out, topologies)):
        found = [x or "its pattern is traced: recurrent.pack lays it out before" for x in given]
    else:
        # One that was made for another batch is made anew, unless it is asked for.
        given = [x if x and (variant or suits(x, batch, dtype)) else None for x in given]
        if len(matrices) > 1 and not any(given):
            made = lay_out_side_by_side(topologies, gates, batch, dtype, weight_dtype, device)
            if made is not None:
                return list(made)
        pairs = zip(given, topologies, strict=True)
        found = [x or lay_out(t, gates, batch, dtype, device) for x, t in pairs]
    layouts = [x for x in found if isinstance(x, ScanLayout)]
    if 1 < len(matrices) == len(layouts):
        return list(of_one_form(layouts) or layouts)
    return found
