"""Recurrent layers on top of each other, with skips and normalisation between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsparse.nn.linear import as_integer
from jaxsparse.nn.recurrent import shared_option
from jaxsparse.nn.sequences import check_resets, clipped_lengths, time_mask
from jaxsparse.ops import arguments


class RecurrentStack(nnx.Module):
    r"""Recurrent layers, one on top of the other, with a residual skip over every n of them.

    .. math::
        y^l = \operatorname{layer}_l(\operatorname{norm}_l(y^{l-1}))
        \;+\; y^{l-n} \text{ where } n \text{ divides } l

    and :math:`y^0` are the inputs: skips lead from each n-th layer to the next. Widths must be the
    same at both ends of a skip, so a layer or projection that changes the width stands before the
    stack.

    Args:
        layers: `RNN` and `Bidirectional` layers, or others with their call.
        norms: as many normalisations over the features, or None for a layer without one. An
            `nnx.BatchNorm` takes its statistics over the batch and the steps that count.
        skip: n; None for no skips.
        time_major: time is the first dimension, not the last but one. By default that of the
            layers; what is given here overrides it.
        return_carry: the call returns (carries, outputs); by default that of the layers.

    Raises:
        TypeError: if ``skip`` is no integer.
        ValueError: if there is no layer, not one norm for each, or ``skip`` is not positive, and if
            the layers disagree about an option that is not given, naming them.

    Source: the residual stacks of Diamos et al. 2016, "Persistent RNNs", where skips over three or
    four layers served best, with the batch normalisation of Amodei et al. 2015, "Deep Speech 2".

    >>> from jaxsparse.nn import RNN, SimpleCell
    >>> rngs = nnx.Rngs(0)
    >>> stack = RecurrentStack(
    ...     [RNN(SimpleCell(16, 16, activation_fn=nnx.relu, rngs=rngs)) for _ in range(8)],
    ...     norms=[nnx.BatchNorm(16, rngs=rngs) for _ in range(8)],
    ...     skip=4,
    ... )
    >>> stack(jnp.ones((2, 5, 16))).shape
    (2, 5, 16)
    """

    def __init__(
        self,
        layers: Iterable[Any],
        *,
        norms: Iterable[Any] | None = None,
        skip: int | None = None,
        time_major: bool | None = None,
        return_carry: bool | None = None,
    ):
        layers = list(layers)
        norms = [None] * len(layers) if norms is None else list(norms)
        if not layers or len(norms) != len(layers):
            raise ValueError(
                f"RecurrentStack: needs a layer and one norm for each, got {len(layers)} layers "
                f"and {len(norms)} norms"
            )
        skip = None if skip is None else as_integer("RecurrentStack", "skip", skip)
        if skip is not None and skip < 1:
            raise ValueError(f"RecurrentStack: skip must be at least 1, got {skip}")
        named = {f"layers[{i}]": layer for i, layer in enumerate(layers)}
        self.layers = nnx.List(layers)
        self.norms = nnx.List(norms)
        self.skip = skip
        self.time_major = shared_option("RecurrentStack", "time_major", time_major, named)
        self.return_carry = shared_option("RecurrentStack", "return_carry", return_carry, named)

    def __call__(
        self,
        inputs: jax.Array,
        *,
        initial_carry: Any = None,
        seq_lengths: Any = None,
        resets: Any = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        rngs: Any = None,
    ) -> Any:
        """Runs all layers.

        Args:
            inputs: as in `RNN`.
            initial_carry: a sequence of one carry for each layer, or None for a layer's own.
            seq_lengths, resets, return_carry, time_major, rngs: as in RNN, for all layers.

        Returns:
            The outputs of the last layer; with ``return_carry`` a tuple of all layers' carries and
            the outputs. Past the end of a row outputs are 0.

        Raises:
            TypeError, ValueError: as RNN, and for a skip between different widths or carries that
                are not as many as layers.
        """
        time_major = self.time_major if time_major is None else time_major
        return_carry = self.return_carry if return_carry is None else return_carry
        given = [None] * len(self.layers) if initial_carry is None else list(initial_carry)
        if len(given) != len(self.layers):
            raise ValueError(
                f"RecurrentStack: initial_carry must have {len(self.layers)} carries, one for each "
                f"layer, got {len(given)}"
            )
        inputs = arguments.as_array("RecurrentStack", "inputs", inputs, 2)
        lengths = clipped_lengths("RecurrentStack", inputs, seq_lengths, time_major)
        mask = None if lengths is None else time_mask(inputs, lengths, time_major)
        y = start = inputs if mask is None else jnp.where(mask, inputs, 0)
        episodes = {}  # layers of other classes may not take them
        if resets is not None:
            episodes["resets"] = check_resets("RecurrentStack", resets, inputs.shape[:-1])
        carries = []
        for i, (layer, norm, carry) in enumerate(zip(self.layers, self.norms, given, strict=True)):
            carry, y = layer(
                y if norm is None else _normalised(norm, y, mask),
                initial_carry=carry,
                seq_lengths=lengths,
                return_carry=True,
                time_major=time_major,
                rngs=rngs,
                **episodes,
            )
            carries.append(carry)
            if self.skip is not None and (i + 1) % self.skip == 0:
                if y.shape != start.shape:
                    raise ValueError(
                        f"RecurrentStack: the skip that ends at layer {i} needs equal shapes at "
                        f"both ends, got {start.shape} and {y.shape}"
                    )
                y = start = y + start
        return (tuple(carries), y) if return_carry else y


def _normalised(norm: Any, y: jax.Array, mask: Any) -> jax.Array:
    takes_mask = mask is not None and isinstance(norm, nnx.BatchNorm)
    normalised: jax.Array = norm(y, mask=mask) if takes_mask else norm(y)
    return normalised
