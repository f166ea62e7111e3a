"""Recurrent layers on top of each other, with skips, normalisation and dropout between them."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsparse.nn.linear import as_integer
from jaxsparse.nn.recurrent import Rngs, shared_option
from jaxsparse.nn.sequences import check_resets, clipped_lengths, time_mask
from jaxsparse.nn.waves import Block, is_inside, run_wave, wave_of
from jaxsparse.ops import arguments


class RecurrentStack(nnx.Module):
    r"""Recurrent layers, one on top of the other, with a residual skip over every n of them.

    .. math::
        y^l = \operatorname{dropout}_l(\operatorname{layer}_l(\operatorname{norm}_l(y^{l-1})))
        \;+\; y^{l-n} \text{ where } n \text{ divides } l

    and :math:`y^0` are the inputs: skips lead from each n-th layer to the next. Widths must be the
    same at both ends of a skip, so a layer or projection that changes the width stands before the
    stack.

    `RNN` layers that follow one another are one `recurrent.stack_scan`, with the skips and dropouts
    between them; values are those of the layers one by one, up to rounding. Such a run ends before
    a layer with a norm, unless that is an `nnx.LayerNorm` over the features or an `nnx.BatchNorm`
    with ``use_running_average=True``, which becomes part of the layer's weights, both in float32 or
    wider, or an `nnx.RMSNorm` over the features, not in float16; at norms of an input that is wider
    than what the layer computes in; at layers and dropouts of other classes or with a call of their
    own; where options, dtypes, precisions or the order of time change; and with a run of
    ``checkpoint_every`` layers.

    Args:
        layers: `RNN` and `Bidirectional` layers, or others with their call.
        norms: as many normalisations over the features, or None for a layer without one. An
            `nnx.BatchNorm` takes its statistics over the batch and the steps that count.
        skip: n; None for no skips.
        dropouts: one rate: an `nnx.Dropout` of it after each layer but the last, as in
            torch.nn.LSTM. Or as many as layers: for each a rate, an `nnx.Dropout` or None. By
            default none.
        checkpoint_every: k: a gradient keeps what goes into each run of k layers, and computes what
            is inside of the run a second time (`nnx.remat`). Values and gradients are the same; one
            more forward pass is the price. By default everything is kept. In a run the patterns of
            sparse weights are arguments, as under `nnx.jit`: see `pack`.
        time_major: time is the first dimension, not the last but one. By default that of the
            layers; what is given here overrides it.
        return_carry: the call returns (carries, outputs); by default that of the layers.
        rngs: random keys for the dropouts that are made of rates: the stream "dropout" is forked
            for each. Without them the call takes them.

    Raises:
        TypeError: if ``skip`` or ``checkpoint_every`` is no integer, or a dropout neither a rate
            nor a layer.
        ValueError: if there is no layer, not one norm and one dropout for each, ``skip`` or
            ``checkpoint_every`` is not positive, or a rate not in [0, 1), and if the layers
            disagree about an option that is not given, naming them.

    Source: the residual stacks of Diamos et al. 2016, "Persistent RNNs", where skips over three or
    four layers served best, with the batch normalisation of Amodei et al. 2015, "Deep Speech 2";
    dropout between layers alone: Zaremba et al. 2014, "Recurrent Neural Network Regularization";
    recomputation: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".

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
        dropouts: float | Iterable[Any] | None = None,
        checkpoint_every: int | None = None,
        time_major: bool | None = None,
        return_carry: bool | None = None,
        rngs: Rngs | None = None,
    ):
        layers = list(layers)
        norms = [None] * len(layers) if norms is None else list(norms)
        if not layers or len(norms) != len(layers):
            raise ValueError(
                f"RecurrentStack: needs a layer and one norm for each, got {len(layers)} layers "
                f"and {len(norms)} norms"
            )
        named = {f"layers[{i}]": layer for i, layer in enumerate(layers)}
        self.layers = nnx.List(layers)
        self.norms = nnx.List(norms)
        self.dropouts = nnx.List(_dropouts(dropouts, len(layers), rngs))
        self.skip = _positive("skip", skip)
        self.checkpoint_every = _positive("checkpoint_every", checkpoint_every)
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
        deterministic: bool | None = None,
        rngs: Rngs | None = None,
    ) -> Any:
        """Runs all layers.

        Args:
            inputs: as in `RNN`.
            initial_carry: a sequence of one carry for each layer, or None for a layer's own.
            seq_lengths, resets, return_carry, time_major: as in RNN, for all layers.
            deterministic: True leaves the dropouts out; by default their own ``deterministic``,
                which `nnx.Module.train` and ``eval`` set.
            rngs: random keys, for the cells as in RNN (the stream "carry") and for the dropouts
                (the stream "dropout"); by default their own.

        Returns:
            The outputs of the last layer; with ``return_carry`` a tuple of all layers' carries and
            the outputs. Past the end of a row outputs are 0.

        Raises:
            TypeError, ValueError: as RNN, and for a skip between different widths, carries that
                are not as many as layers, and dropouts without random keys.
        """
        time_major = self.time_major if time_major is None else time_major
        return_carry = self.return_carry if return_carry is None else return_carry
        count = len(self.layers)
        given = [None] * count if initial_carry is None else list(initial_carry)
        if len(given) != count:
            raise ValueError(
                f"RecurrentStack: initial_carry must have {count} carries, one for each "
                f"layer, got {len(given)}"
            )
        inputs = arguments.as_array("RecurrentStack", "inputs", inputs, 2)
        lengths = clipped_lengths("RecurrentStack", inputs, seq_lengths, time_major)
        mask = None if lengths is None else time_mask(inputs, lengths, time_major)
        y = start = inputs if mask is None else jnp.where(mask, inputs, 0)
        steps = {"seq_lengths": lengths}
        if resets is not None:  # layers of other classes may not take them
            steps["resets"] = check_resets("RecurrentStack", resets, inputs.shape[:-1])
        modules = (self.layers, self.norms, self.dropouts)
        every = count if self.checkpoint_every is None else self.checkpoint_every
        carries: list[Any] = []
        for first in range(0, count, every):
            part = slice(first, first + every)
            # An nnx.List may hold what is no module, a function as a norm for instance.
            parts = tuple(nnx.List(of_all[part]) for of_all in modules)
            run: Any = functools.partial(_run, first, count, self.skip, time_major, deterministic)
            if self.checkpoint_every is not None:
                run = nnx.remat(run)
            last, y, start = run(parts, given[part], y, start, mask, steps, rngs)
            carries += last
        return (tuple(carries), y) if return_carry else y


def _run(
    first: int,
    total: int,
    skip: int | None,
    time_major: bool,
    deterministic: bool | None,
    modules: tuple[Any, Any, Any],
    carries: list[Any],
    y: jax.Array,
    start: jax.Array,
    mask: Any,
    steps: dict[str, Any],
    rngs: Any,
) -> tuple[list[Any], jax.Array, jax.Array]:
    """Some layers of a stack: their last carries, the outputs, and where the next skip starts."""
    blocks = [Block(*parts) for parts in zip(*modules, strict=True)]
    of_carries = _with_carries(rngs)
    last: list[Any] = []
    while len(last) < len(blocks):
        i = len(last)
        norm = blocks[i].norm
        x = y if is_inside(norm) else _normalised(norm, y, mask)
        wave = wave_of(blocks[i:], x, first + i, total, skip)
        end = i + len(wave.blocks)
        if end > i + 1:
            new, y = run_wave(
                wave,
                carries[i:end],
                x,
                steps,
                time_major=time_major,
                deterministic=deterministic,
                rngs=rngs,
                carry_rngs=of_carries,
            )
            last += new
        else:
            carry, y = blocks[i].layer(
                x if norm is None or not is_inside(norm) else _normalised(norm, y, mask),
                initial_carry=carries[i],
                return_carry=True,
                time_major=time_major,
                rngs=of_carries,
                **steps,
            )
            last.append(carry)
            if blocks[i].dropout is not None:
                y = blocks[i].dropout(y, deterministic=deterministic, rngs=rngs)
        if skip is not None and (first + end) % skip == 0:
            if not wave.ends_skip:
                y = _added(y, start, first + end - 1)
            start = y
    return last, y, start


def _added(y: jax.Array, start: jax.Array, place: int) -> jax.Array:
    if y.shape != start.shape:
        raise ValueError(
            f"RecurrentStack: the skip that ends at layer {place} needs equal shapes at both "
            f"ends, got {start.shape} and {y.shape}"
        )
    return y + start


def _normalised(norm: Any, y: jax.Array, mask: Any) -> jax.Array:
    takes_mask = mask is not None and isinstance(norm, nnx.BatchNorm)
    normalised: jax.Array = norm(y, mask=mask) if takes_mask else norm(y)
    return normalised


def _with_carries(rngs: Any) -> Any:
    """Random keys as layers take them: None if they have no stream for carries."""
    named = isinstance(rngs, nnx.Rngs)
    return None if named and "carry" not in rngs and "default" not in rngs else rngs


# ---- Options ----


def _positive(name: str, value: Any) -> int | None:
    if value is None:
        return None
    number = as_integer("RecurrentStack", name, value)
    if number < 1:
        raise ValueError(f"RecurrentStack: {name} must be at least 1, got {number}")
    return number


def _dropouts(given: Any, count: int, rngs: Any) -> list[Any]:
    """For each layer a dropout or None."""
    if given is None:
        return [None] * count
    if isinstance(given, numbers.Real):
        given = [_rate("RecurrentStack", "dropouts", given)] * (count - 1) + [None]
    given = list(given)
    if len(given) != count:
        raise ValueError(
            f"RecurrentStack: dropouts must be one rate or as many as layers, {count}, got "
            f"{len(given)}"
        )
    return [
        as_dropout("RecurrentStack", f"dropouts[{i}]", one, rngs) for i, one in enumerate(given)
    ]


def as_dropout(operation: str, name: str, given: Any, rngs: Any) -> Any:
    """An `nnx.Dropout` of a rate or of one that is given, or None for None."""
    if given is None or isinstance(given, nnx.Dropout):
        return given
    if not isinstance(given, numbers.Real):
        raise TypeError(
            f"{operation}: {name} must be a rate, an nnx.Dropout or None, got "
            f"{type(given).__name__}"
        )
    return nnx.Dropout(_rate(operation, name, given), rngs=rngs)


def _rate(operation: str, name: str, given: Any) -> float:
    rate = float(given)
    if not 0 <= rate < 1:
        raise ValueError(f"{operation}: {name} must be a rate in [0, 1), got {given}")
    return rate
