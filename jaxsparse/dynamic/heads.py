"""What is computed of the states of rows: the heads of a net over graphs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse import _ffi
from jaxsparse.dynamic.script import Script, count
from jaxsparse.ops.arguments import check_floating
from jaxsparse.precision import accumulator_dtype, promoted
from jaxsparse.recurrent.arguments import as_array_of_rank, as_vector

MOST_CLASSES: int = _ffi.LOSS_MOST_CLASSES


@dataclasses.dataclass(frozen=True)
class SoftmaxHead:
    """Classes of rows, by the softmax of ``state @ weights + bias``, against labels in a channel.

    A pytree, so that it may be among the parameters that a loss is differentiated by.

    Attributes:
        weights: ``(h, C)``, for up to 64 classes.
        bias: ``(C,)``, or None.
        label: the name of the channel, of rows or of graphs, whose roots then have the labels.
            Integers from 0 to C - 1; -1 where there is none.

    >>> SoftmaxHead(jnp.zeros((16, 5))).label
    'label'
    """

    weights: Any
    bias: Any = None
    label: str = "label"


jax.tree_util.register_dataclass(
    SoftmaxHead, data_fields=["weights", "bias"], meta_fields=["label"]
)
jax.export.register_pytree_node_serialization(
    SoftmaxHead,
    serialized_name="jaxsparse.dynamic.SoftmaxHead",
    serialize_auxdata=lambda meta: meta[0].encode(),
    deserialize_auxdata=lambda data: (bytes(data).decode(),),
)


def checked_head(operation: str, head: Any, script: Script, h: int) -> tuple[Any, Any]:
    """The head's weights and bias, or TypeError, ValueError or KeyError."""
    if not isinstance(head, SoftmaxHead):
        raise TypeError(
            f"{operation}: head must be a dynamic.SoftmaxHead, got {type(head).__name__}"
        )
    weights = as_array_of_rank(operation, "head.weights", head.weights, 2)
    check_floating(operation, **{"head.weights": weights})
    rows, classes = weights.shape
    if rows != h or not 1 <= classes <= MOST_CLASSES:
        raise ValueError(
            f"{operation}: head.weights must be (h, C) with h = {h} and up to {MOST_CLASSES} "
            f"classes, got shape {weights.shape}"
        )
    channel = script.form.channel(head.label, "row", "graph")
    if channel.dtype != "int32":
        raise TypeError(
            f"{operation}: labels must be integers, the channel {head.label!r} has {channel.dtype}"
        )
    if head.bias is None:
        return weights, jnp.zeros((classes,), weights.dtype)
    return weights, as_vector(operation, "head.bias", head.bias, classes)


def labels_of_rows(script: Script, name: str) -> jax.Array:
    """The label of every row, leaves first; -1 where there is none."""
    form = script.form
    if form.channel(name, "row", "graph").place == "row":
        return jnp.asarray(script.row(name))
    root = jnp.asarray(script.root_rows)
    labels = jnp.full((form.rows,), -1, jnp.int32)
    # A number below 0 would count from the end.
    return labels.at[jnp.where(root < 0, form.rows, root)].set(script.graph(name), mode="drop")


def labels_offset(script: Script, name: str) -> int | None:
    """Where in the script the labels of all rows lie; None where only its graphs have some."""
    channel = script.form.channel(name, "row", "graph")
    return script.form.channel_offset(channel) if channel.place == "row" else None


def exact_unless(precision: Any) -> Any:
    """The precision of a product: exact, unless another one is asked for."""
    return jax.lax.Precision.HIGHEST if precision is None else precision


def logits_of(states: Any, weights: Any, bias: Any, precision: Any) -> Any:
    """The logits of rows (rows, h): (rows, C), with sums in float32 at least."""
    dtype = promoted(states.dtype, weights.dtype)
    wide = accumulator_dtype(dtype)
    z = jnp.einsum(
        "nh,hc->nc",
        states.astype(dtype),
        weights.astype(dtype),
        precision=exact_unless(precision),
        preferred_element_type=wide,
    )
    return z + bias.astype(wide)


def losses_of(logits: Any, labels: Any) -> Any:
    """The cross entropy of each row: 0 without a label, NaN for one that is no class."""
    classes = logits.shape[-1]
    chosen = jnp.take_along_axis(logits, jnp.clip(labels, 0, classes - 1)[:, None], -1)[:, 0]
    chosen = jnp.where((labels >= 0) & (labels < classes), chosen, jnp.nan)
    return jnp.where(labels == -1, 0, jax.nn.logsumexp(logits, axis=-1) - chosen)


def cotangents_of_logits(logits: Any, labels: Any) -> Any:
    """The gradient of the sum of losses, by logits."""
    ones = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return jnp.where((labels == -1)[:, None], 0, jax.nn.softmax(logits, axis=-1) - ones)


def mean_of(losses: Any, labels: Any) -> Any:
    """The mean of the losses of rows that have labels, 0 if none has."""
    return jnp.sum(losses) / jnp.maximum(count_labels(labels, losses.dtype), 1)


def count_labels(labels: Any, dtype: Any) -> Any:
    """How many rows have labels."""
    return count(labels != -1).astype(dtype)
