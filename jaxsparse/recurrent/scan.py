"""Recurrent scans: the public functions."""

from __future__ import annotations

from typing import Any

import jax

from jaxsparse.recurrent.arguments import Direction
from jaxsparse.recurrent.cells import Cell
from jaxsparse.recurrent.run import Options, run


def scan(
    cell: Cell,
    recurrent: Any,
    carry: Any,
    xs: Any,
    *,
    recurrent_bias: Any = None,
    parameters: Any = None,
    reverse: bool = False,
    seq_lengths: Any = None,
    resets: Any = None,
    precision: Any = None,
    recompute: bool = False,
    implementation: str | None = None,
    variant: str | None = None,
) -> tuple[Any, Any]:
    r"""Runs a recurrent cell over time: ``jax.lax.scan`` with the recurrent product in its hands.

    .. math:: (c_t, y_t) = \operatorname{cell}(x_t,\; h_{t-1} W + b,\; c_{t-1})

    where :math:`h_t`, the state that the product takes, is the last leaf of the carry
    :math:`c_t`. Sums, products, carries and the cell are computed in float32 (in float64 for
    float64 ``xs``); what the product takes and ``ys`` are rounded to the dtype of ``xs``.

    Differentiable to any order, forward and in reverse: the tangent of a scan is a scan by the
    same weights, its transpose one by the transposed weights. A gradient keeps, for every step,
    the recurrent products and the carries that the cell's derivative reads, beside ``xs`` and the
    states: one array (T, B, gates * h) and at most one (T, B, h) for each leaf of the carry. They
    are kept in the dtype of ``xs``, leaves of the carry that have a wider one in float32. The
    gradient of the weights is one product over all steps after the
    scan, for a sparse matrix a sampled one.

    Args:
        cell: a function ``(x, r, carry) -> (carry, y)``, pointwise over h, of tuples ``x`` and
            ``r`` of one array for each gate: ``elman()``, ``GRU``, ``LSTM`` or your own. Its y may
            be None. Pass the same function object each time: another one is compiled anew.
        recurrent: the weights: ``(h, gates * h)``, or ``(heads, d, gates * d)`` with h = heads * d,
            or a CSR matrix ``(gates * h, h)``. Heads are the blocks of a block-diagonal matrix: the
            d units of a head take the state of that head alone; ``xs`` and carries stay as they
            are, units of a gate side by side. The weights' dtype may be wider than that of ``xs``.
            On a GPU a sparse matrix may be kept in dense form: there a NaN or infinity in a row's
            state reaches all units of the next one.
        carry: initial carry, a pytree of arrays ``(B, h)``; its leaves keep their dtypes outside.
        xs: pre-activations of the input ``(T, B, gates * h)``, the input's bias included: float32,
            float64, bfloat16 or float16. For a cell that takes it so, ``x`` may have other gates
            than ``r``: what else a step needs, as a mask of its own.
        recurrent_bias: ``(gates * h,)``, added to the recurrent product.
        parameters: what the cell learns for each unit, a pytree of arrays ``(h,)``: the cell is
            called ``cell(x, r, carry, parameters)``.
        reverse: runs from the last step to the first; ``ys`` stays in the order of ``xs``.
        seq_lengths: integers ``(B,)``: only the first so many steps of a row count. Past them
            ``ys`` is 0, the carry stays what it was, and nothing has a gradient.
        resets: booleans ``(T, B)``: where true the carry is zero before that step, in the order in
            which the scan runs: episodes in one array. What it was, NaN included, reaches this step
            and later ones in no way, values nor gradients. A step that does not count resets
            nothing.
        precision: of float32 products: None or HIGHEST for exact multiply-adds; DEFAULT, HIGH or
            "tensorfloat32" allow tensor cores with shorter factors.
        recompute: saves memory in a gradient: the recurrent products are not kept but computed
            again, all steps in one product.
        implementation: None (the platform's own), "cpu", "cuda" or "xla".
        variant: the name of a kernel variant to force.

    Returns:
        The last carry, and ``ys (T, B, h)``, or None if the cell's y is.

    Raises:
        TypeError: for operands that are no arrays or not of these dtypes.
        ValueError: for shapes that don't fit, options that don't exist, and cells that are not
            pointwise or use what can't run in a kernel, naming it.

    Method: Diamos et al. 2016, "Persistent RNNs"; Zhu et al. 2018, "Sparse Persistent RNNs". Heads:
    Beck et al. 2024, "xLSTM: Extended Long Short-Term Memory".

    >>> import jax.numpy as jnp
    >>> from jaxsparse.recurrent import elman
    >>> xs = jnp.ones((3, 1, 2))
    >>> carry, ys = scan(elman("relu"), jnp.eye(2), jnp.zeros((1, 2)), xs)
    >>> ys[:, 0, 0]
    Array([1., 2., 3.], dtype=float32)

    Two heads of one unit, of which the second forgets:

    >>> _, ys = scan(elman("relu"), jnp.array([[[1.0]], [[0.0]]]), jnp.zeros((1, 2)), xs)
    >>> ys[:, 0]
    Array([[1., 1.],
           [2., 1.],
           [3., 1.]], dtype=float32)
    """
    operation = "recurrent.scan"
    direction = Direction(
        operation, "", cell, recurrent, carry, xs, recurrent_bias, parameters, resets
    )
    (result,) = run(
        operation,
        [direction],
        (bool(reverse),),
        Options(seq_lengths, precision, recompute, implementation, variant),
    )
    return result


def bidirectional_scan(
    cell: Cell,
    recurrent: Any,
    carry: Any,
    xs: Any,
    *,
    recurrent_bias: Any = None,
    parameters: Any = None,
    seq_lengths: Any = None,
    resets: Any = None,
    precision: Any = None,
    recompute: bool = False,
    implementation: str | None = None,
    variant: str | None = None,
) -> tuple[tuple[Any, Any], tuple[jax.Array, jax.Array]]:
    """Two scans at once, one forward and one backward in time.

    As ``scan``, but ``recurrent``, ``carry``, ``xs``, ``recurrent_bias``, ``parameters`` and
    ``resets`` are pairs (forward, backward) of equal shapes and dtypes; two sparse matrices may
    store different positions. Where an episode begins at step t, the forward scan is reset before
    step t and the backward one before step t - 1.

    Returns:
        The pair of last carries (the backward one is that before the first step), and the pair of
        ``ys``, both in the order of time.

    Raises:
        TypeError, ValueError: as ``scan``, and if the two directions differ in form.

    >>> import jax.numpy as jnp
    >>> from jaxsparse.recurrent import elman
    >>> xs = jnp.ones((3, 1, 2))
    >>> w, h = jnp.eye(2), jnp.zeros((1, 2))
    >>> _, (forward, backward) = bidirectional_scan(elman("relu"), (w, w), (h, h), (xs, xs))
    >>> backward[:, 0, 0]
    Array([3., 2., 1.], dtype=float32)
    """
    operation = "recurrent.bidirectional_scan"
    pairs = {
        "recurrent": recurrent,
        "carry": carry,
        "xs": xs,
        "recurrent_bias": (None, None) if recurrent_bias is None else recurrent_bias,
        "parameters": (None, None) if parameters is None else parameters,
        "resets": (None, None) if resets is None else resets,
    }
    for name, pair in pairs.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(
                f"{operation}: {name} must be a pair (forward, backward), got {type(pair).__name__}"
            )
    return scan_both_ways(
        operation, cell, pairs, Options(seq_lengths, precision, recompute, implementation, variant)
    )


def scan_both_ways(
    operation: str, cell: Cell, pairs: dict[str, Any], options: Options
) -> tuple[tuple[Any, Any], tuple[jax.Array, jax.Array]]:
    """`bidirectional_scan` for the operation that errors name, its pairs by the names of these."""
    directions = [
        Direction(operation, f"{side} ", cell, *parts)
        for side, *parts in zip(("forward", "backward"), *pairs.values(), strict=True)
    ]
    first, second = (d.form for d in directions)
    if first != second:
        raise ValueError(
            f"{operation}: both directions must have one form, got {first} and {second}"
        )
    results = run(operation, directions, (False, True), options)
    carries, ys = zip(*results, strict=True)
    return carries, ys
