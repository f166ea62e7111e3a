"""Scans of several recurrent layers: the public functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse import backend
from jaxsparse.ops.arguments import check_floating
from jaxsparse.recurrent.arguments import (
    as_array_of_rank,
    check_precision,
    steps_and_resets,
)
from jaxsparse.recurrent.layers import CheckedLayer, Layer, between_layers, check_counts
from jaxsparse.recurrent.stack_graph import StackGraph, cell_step


def stack_scan(
    layers: Sequence[Layer],
    carries: Any,
    xs: Any,
    *,
    seq_lengths: Any = None,
    resets: Any = None,
    reverse: bool = False,
    precision: Any = None,
    recompute: bool = False,
    return_all: bool = False,
    implementation: str | None = None,
    variant: str | None = None,
) -> tuple[Any, Any]:
    r"""Runs recurrent layers over time, each on the outputs of the one below.

    Step t of layer l, with :math:`o^0` = ``xs``:

    .. math::
        a_t = o^{l-1}_t W + b, \quad r_t = h_{t-1} U + c, \quad
        (\mathrm{carry}_t, y_t) = \operatorname{cell}(a_t, r_t, \mathrm{carry}_{t-1}), \quad
        o^l_t = m_t y_t + o^{l-n}_t

    where all but the cell and U may be left out (`Layer`). All layers are one primitive. It is
    differentiable to any order as ``scan`` is, and what is rounded is, too: the states, the outputs
    of layers, and the sums of what a gradient keeps, to the dtype of ``xs``. Where a cell reads its
    gates only as sums :math:`a_g + r_g`, as an LSTM does, a gradient keeps each sum in one array
    (T, B, h), not both terms: g, one for the states, and one for each other leaf of the carry that
    the cell's derivative reads.

    Args:
        layers: at least one `Layer`, the lowest first.
        carries: the initial carry of each layer, as that of ``scan``: a list or a tuple.
        xs: the input ``(T, B, k)``: float32, float64, bfloat16 or float16.
        seq_lengths: as that of ``scan``, for all layers. Past a row's end the outputs are 0, and
            what stands there, NaN included, reaches nothing.
        resets: as that of ``scan``, for all layers.
        reverse: runs from the last step to the first, in all layers.
        precision, recompute, implementation: as those of ``scan``.
        return_all: returns the outputs of every layer.
        variant: what to force on a GPU: the name of a kernel variant, of single layers or of
            waves, in which several layers run at once; or "wavefront", layers in one loop of XLA.
            A single layer runs alone where several at once are asked for.

    Returns:
        The last carries, in a list or a tuple as the first ones are, and the outputs
        ``(T, B, h)`` of the last layer, or with ``return_all`` a list of those of all layers.

    Raises:
        TypeError: for operands that are no arrays or not of these dtypes, and layers that are none.
        ValueError: for shapes that don't fit, options that don't exist, and cells that are not
            pointwise or use what can't run in a kernel. Errors name the layer, counted from 0.

    Method: Diamos et al. 2016, "Persistent RNNs", with skips between layers; joined gates as in
    Appleyard et al. 2016, "Optimizing Performance of Recurrent Neural Networks on GPUs".

    >>> import jax.numpy as jnp
    >>> from jaxsparse.recurrent import Layer, elman, stack_scan
    >>> layer = Layer(elman("relu"), recurrent=jnp.eye(2), input=jnp.eye(2))
    >>> h = jnp.zeros((1, 2))
    >>> _, ys = stack_scan([layer, layer], [h, h], jnp.ones((3, 1, 2)))
    >>> ys[:, 0, 0]
    Array([1., 3., 6.], dtype=float32)
    """
    operation = "recurrent.stack_scan"
    backend.check_implementation(operation, implementation)
    precision = check_precision(operation, precision)
    xs = as_array_of_rank(operation, "xs", xs, 3)
    check_floating(operation, xs=xs)
    length, b, _ = xs.shape
    mask, resets = steps_and_resets(operation, seq_lengths, resets, length, b)
    return run_layers(
        operation,
        layers,
        carries,
        xs,
        mask,
        resets,
        reverse=reverse,
        precision=precision,
        recompute=recompute,
        return_all=return_all,
        implementation=implementation,
        variant=variant,
    )


def run_layers(
    operation: str,
    layers: Sequence[Layer],
    carries: Any,
    xs: jax.Array,
    mask: jax.Array | None,
    resets: jax.Array | None,
    *,
    reverse: bool,
    precision: Any,
    recompute: bool,
    return_all: bool,
    implementation: str | None,
    variant: str | None,
) -> tuple[Any, Any]:
    """`stack_scan` for the operation that errors name, its input and options checked.

    Args:
        mask: booleans (T, B), the steps that count, or None if all do.
        resets: booleans (T, B), none at a step that does not count, or None.
    """
    length, b, _ = xs.shape
    runs = check_layers(operation, layers, carries)
    last = len(layers) - 1
    returned = {*range(last + 1)} if return_all else {last}
    outputs: dict[int, Any] = {-1: xs}  # of layers below, by number, where they are needed
    every: list[Any] = []
    for run in runs:
        lowest = run[0]
        below = outputs[lowest - 1]
        between = layers[lowest].between
        if between is not None:
            below = between_layers(operation, lowest, between, below, mask, xs.dtype)
        checked = checked_layers(operation, layers, carries, run, below, outputs)
        if length == 0 or b == 0:
            for layer in checked.values():  # elsewhere the graph checks cells as it makes steps
                cell_step(layer, xs.dtype, biased=False, masked=False)
            own = {i: layer.carry for i, layer in checked.items()}
            made = {i: jnp.zeros((length, b, x.h), xs.dtype) for i, x in checked.items()}
        else:
            graph = StackGraph(
                checked,
                below,
                outputs,
                mask=mask,
                resets=resets,
                reverse=bool(reverse),
                returned=(returned | _read_later(layers, run)) & {*run},
                laid_out=implementation in (None, "cuda"),
                variant=variant,
            )
            own, made = graph.run(
                precision=precision, recompute=bool(recompute), implementation=implementation
            )
        every += [jax.tree.unflatten(layer.tree, own[i]) for i, layer in checked.items()]
        outputs |= made
    kept = tuple(every) if isinstance(carries, tuple) else every
    return kept, ([outputs[i] for i in range(last + 1)] if return_all else outputs[last])


def check_layers(operation: str, layers: Any, carries: Any) -> list[range]:
    """The numbers of the layers that are one graph: a function between two layers parts them."""
    check_counts(operation, "layer", layers, carries)
    for i, layer in enumerate(layers):
        if not isinstance(layer, Layer):
            raise TypeError(
                f"{operation}: layer {i} must be a recurrent.Layer, got {type(layer).__name__}"
            )
    first = [i for i, layer in enumerate(layers) if i == 0 or layer.between is not None]
    ends = [*first[1:], len(layers)]
    return [range(*pair) for pair in zip(first, ends, strict=True)]


def _read_later(layers: Sequence[Layer], run: range) -> set[int]:
    """The layers of which layers above a run read the outputs."""
    above = range(run.stop, len(layers))
    skips = {i - n for i in above if isinstance(n := layers[i].skip, int)}
    return skips | ({run.stop - 1} if above else set())


def checked_layers(
    operation: str,
    layers: Sequence[Layer],
    carries: Sequence[Any],
    run: range,
    below: Any,
    outputs: dict[int, Any],
) -> dict[int, CheckedLayer]:
    """The layers of a run, by number."""
    length, b, features = below.shape
    widths = {i: x.shape[2] for i, x in outputs.items()}
    checked = {}
    for i in run:
        one = CheckedLayer(operation, i, layers[i], carries[i], (length, b), features)
        features = widths[i] = one.h
        if one.skip is not None and widths[i - one.skip] != one.h:
            raise ValueError(
                f"{one.name}: skip={one.skip} adds what has {widths[i - one.skip]} features to an "
                f"output of {one.h} units: they must be equal"
            )
        checked[i] = one
    return checked
