"""Whether a layer becomes sparse, packed or stays dense: the fastest of them, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxsparse.pruning.kinds import Kind
from jaxsparse.pruning.measure import Call, Time, size_of, times_of
from jaxsparse.pruning.table import LayerReport, imbalance


def judge(
    name: str,
    layer: nnx.Module,
    kind: Kind,
    obstacle: str | None,
    calls: list[Call],
    unwanted: bool,
    faster_only: bool,
    seconds: float,
    packed: bool,
    dtype: Any,
) -> tuple[LayerReport, nnx.Module | None]:
    """What is to be said of a layer, and its twin if it becomes sparse or packed."""
    matrices = [] if obstacle else kind.weights(layer)
    size = sum(matrix.size for matrix in matrices)
    stored = sum(int(np.count_nonzero(matrix)) for matrix in matrices)
    batched = any(call.batched for call in calls)
    reasons = (
        ("asked for", unwanted),
        (obstacle, obstacle is not None),
        ("it is not pruned", stored == size),
        ("it is never called with example_inputs", not calls),
        (
            "it runs under jax.vmap, where it can't be timed: faster_only=False makes it sparse",
            batched and faster_only,
        ),
    )
    reason = next((text for text, holds in reasons if holds), None)
    sparse = kind.to_sparse(layer) if reason is None else None
    after_packing = note = None
    times: list[Any] = [None, None]
    packed_layers: Mapping[str, nnx.Module] = {}
    packed_form = packed_layer = not_packed = None
    if packed and sparse is not None:
        asked = {} if dtype is None else {"dtype": dtype}
        made: Any = "it can't be timed"
        if not batched:
            made = kind.to_packed(sparse, *_inputs_of(calls), **asked)
        packed_layers, not_packed = ({}, made) if isinstance(made, str) else (made, None)
    if batched:
        # The shapes are those of one example, not of the batch that will run.
        note = "not timed: it runs under jax.vmap" if sparse is not None else None
    elif calls:
        if sparse is not None and kind.prepare is not None:
            args, options = calls[0].arguments()
            note = kind.prepare(sparse, *args, **options)
        forms = [form for form in (layer, sparse, *packed_layers.values()) if form is not None]
        times = [*times_of(forms, calls, seconds), None]
    before, after, *others = times
    of_packed = dict(zip(packed_layers, others, strict=False))
    if of_packed:
        packed_form = min(of_packed, key=lambda form: of_packed[form].seconds)
        packed_layer, after_packing = packed_layers[packed_form], of_packed[packed_form]
    is_packed = after_packing is not None and _wins(after_packing, after, before, faster_only)
    twin, fastest = (packed_layer, after_packing) if is_packed else (sparse, after)
    if faster_only and before is not None and fastest is not None:
        reason = _why_not(fastest, before)
    if after_packing is not None and not is_packed and reason is None:
        not_packed = _why_not(after_packing, after)
    report = LayerReport(
        path=name,
        layer=type(layer).__name__,
        shapes=tuple((matrix.shape[0], matrix.shape[1]) for matrix in matrices),
        density=stored / size if size else None,
        imbalance=max(map(imbalance, matrices), default=None),
        dense_bytes=size_of(layer),
        sparse_bytes=None if sparse is None else size_of(sparse),
        dense_seconds=None if before is None else before.seconds,
        sparse_seconds=None if after is None else after.seconds,
        kept_dense=reason,
        note=note,
        packed_bytes=None if packed_layer is None else size_of(packed_layer),
        packed_seconds=None if after_packing is None else after_packing.seconds,
        packed=is_packed and reason is None,
        packed_form=packed_form,
        not_packed=not_packed,
    )
    return report, twin if reason is None else None


def _inputs_of(calls: list[Call]) -> list[Any]:
    """Those that are not integers: a layer without a dtype of its own computes in the widest."""
    arrays = [leaf for call in calls for leaf in call.leaves if hasattr(leaf, "dtype")]
    return [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]


def _wins(packed: Time, sparse: Time, dense: Time, faster_only: bool) -> bool:
    """Whether packed weights are to be taken rather than sparse ones, if any of the two are.

    Those are if packed ones are not clearly faster, but for where these alone beat dense ones.
    """
    if packed.is_clearly_less_than(sparse):
        return True
    alone = packed.is_clearly_less_than(dense) and not sparse.is_clearly_less_than(dense)
    return faster_only and alone and packed.seconds < sparse.seconds


def _why_not(one: Time, other: Time) -> str | None:
    """Why a form does not take the place of another one, or None if it does."""
    if one.is_clearly_less_than(other):
        return None
    slower = one.seconds >= other.seconds
    return "it would be slower" if slower else "it would not be clearly faster"
