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
    as_resets,
    check_precision,
    counted_steps,
)
from jaxsparse.recurrent.layers import CheckedLayer, Layer
from jaxsparse.recurrent.stack_graph import StackGraph


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
        variant: the name of a kernel variant to force for each layer.

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
    mask = counted_steps(operation, seq_lengths, length, b)
    if resets is not None:
        resets = as_resets(operation, "resets", resets, (length, b))
        # A step that does not count resets nothing.
        resets = resets if mask is None else resets & mask
    checked = check_layers(operation, layers, carries, xs)
    returned = range(len(checked)) if return_all else [len(checked) - 1]
    if length == 0 or b == 0:
        outputs = [jnp.zeros((length, b, checked[i].h), xs.dtype) for i in returned]
        last = [list(layer.carry) for layer in checked]
    else:
        graph = StackGraph(
            checked,
            xs,
            mask,
            frozenset(returned),
            resets=resets,
            reverse=bool(reverse),
            laid_out=implementation in (None, "cuda"),
            variant=variant,
        )
        last, outputs = graph.run(
            precision=precision,
            recompute=bool(recompute),
            implementation=implementation,
        )
    every = [jax.tree.unflatten(x.tree, leaves) for x, leaves in zip(checked, last, strict=True)]
    kept = tuple(every) if isinstance(carries, tuple) else every
    return kept, (outputs if return_all else outputs[0])


def check_layers(operation: str, layers: Any, carries: Any, xs: Any) -> list[CheckedLayer]:
    """The operands of all layers, checked."""
    for name, x in (("layers", layers), ("carries", carries)):
        if not isinstance(x, list | tuple):
            raise TypeError(
                f"{operation}: {name} must be a list or a tuple, got {type(x).__name__}"
            )
    if not layers or len(layers) != len(carries):
        raise ValueError(
            f"{operation}: needs at least one layer, and a carry for each, got {len(layers)} "
            f"layers and {len(carries)} carries"
        )
    length, b, features = xs.shape
    widths = [features]  # of the input, and of the layers' outputs
    checked = []
    for i, (layer, carry) in enumerate(zip(layers, carries, strict=True)):
        one = CheckedLayer(operation, i, layer, carry, (length, b), widths[-1])
        if one.skip is not None and widths[i + 1 - one.skip] != one.h:
            raise ValueError(
                f"{one.name}: skip={one.skip} adds what has {widths[i + 1 - one.skip]} features to "
                f"an output of {one.h} units: they must be equal"
            )
        checked.append(one)
        widths.append(one.h)
    return checked
