"""Recurrent layers: a cell over time, and two of them both ways in time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.recurrent import flip_sequences

from jaxsparse import recurrent
from jaxsparse.nn.cells import RecurrentCell, check_scannable, scan_operands, with_batch
from jaxsparse.nn.sequences import first_steps, last_steps, time_first, time_restored

Rngs = nnx.Rngs | nnx.RngStream


def concatenated(forward: jax.Array, backward: jax.Array) -> jax.Array:
    """How the outputs of two directions are merged if nothing else is said."""
    return jnp.concatenate([forward, backward], -1)


class RNN(nnx.Module):
    r"""Runs a cell over a sequence: `nnx.RNN` by `jaxsparse.recurrent.scan`.

    .. math:: (c_t, y_t) = \operatorname{cell}(x_t,\; c_{t-1}), \quad t = 1, \ldots, T

    The product of the inputs is taken for all steps at once; on a GPU the recurrent weights stay on
    chip for the whole scan. Constructor and call are those of nnx.RNN, whose valid steps have the
    same outputs. Where they differ:

    - Past the end of a row (``seq_lengths``) outputs are 0, and what stands there, NaN included,
      reaches no value and no gradient. A row of length 0 keeps its initial carry.
    - ``seq_lengths`` goes with any number of batch dimensions.
    - Outputs have the dtype of the computation, not that of the carry.
    - A random stream is kept only if the cell has a ``carry_init``; there are no ``unroll``,
      ``state_axes`` and ``broadcast_rngs``.

    Args:
        cell: a `jaxsparse.nn.RecurrentCell`.
        time_major: time is the first dimension, not the last but one.
        return_carry: the call returns (carry, outputs).
        reverse: runs from the last step of each row to its first.
        keep_order: outputs of a reversed run lie in the order of the inputs; else in the order in
            which they were made.
        recompute: saves memory in gradients: see `jaxsparse.recurrent.scan`.
        implementation: None (the platform's own), "cpu", "cuda" or "xla".
        variant: the name of a kernel variant to force.
        rngs: random keys for the cell's ``carry_init``: nnx.Rngs (its stream "carry" is forked), a
            stream, True (one from seed 0) or False (none).

    Raises:
        TypeError: if ``cell`` is no RecurrentCell or its class has a ``__call__`` of its own, and
            if ``rngs`` is none of these.

    Method: Diamos et al. 2016, "Persistent RNNs"; Zhu et al. 2018, "Sparse Persistent RNNs".

    >>> from jaxsparse.nn import LSTMCell
    >>> layer = RNN(LSTMCell(3, 8, recurrent_sparsity=0.5, rngs=nnx.Rngs(0)), return_carry=True)
    >>> (c, h), outputs = layer(jnp.ones((2, 7, 3)))
    >>> h.shape, outputs.shape
    ((2, 8), (2, 7, 8))
    """

    def __init__(
        self,
        cell: RecurrentCell,
        *,
        time_major: bool = False,
        return_carry: bool = False,
        reverse: bool = False,
        keep_order: bool = False,
        recompute: bool = False,
        implementation: str | None = None,
        variant: str | None = None,
        rngs: Rngs | bool = True,
    ):
        check_scannable("RNN", cell)
        self.cell = cell
        self.time_major = time_major
        self.return_carry = return_carry
        self.reverse = reverse
        self.keep_order = keep_order
        self.recompute = recompute
        self.implementation = implementation
        self.variant = variant
        self.rngs = _stream("RNN", rngs, cell)

    def __call__(
        self,
        inputs: jax.Array,
        *,
        initial_carry: Any = None,
        seq_lengths: Any = None,
        resets: Any = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        rngs: Rngs | None = None,
    ) -> Any:
        """Runs the cell; options that are None are the layer's own.

        Args:
            inputs: ``(*batch, T, in_features)``, or ``(T, *batch, in_features)`` if time_major.
            initial_carry: a pytree of ``(*batch, h)``; by default ``cell.initialize_carry``.
            seq_lengths: integers ``(*batch,)`` of any width: only the first so many steps of a row
                count. Beyond T they mean T, below 0 they mean 0.
            resets: booleans ``(*batch, T)``, or ``(T, *batch)`` if time_major: true at the first
                step of each episode, where several follow one another in a row. The carry is zero
                at its start: before its first step, or before its last one if reversed.
            return_carry, time_major, reverse, keep_order: as in the constructor.
            rngs: random keys for the cell's ``carry_init``.

        Returns:
            Outputs ``(*batch, T, h)``, or ``(T, *batch, h)`` if time_major; with ``return_carry``
            the pair of the last carry, each row's own, and the outputs.

        Raises:
            TypeError: for operands that are no arrays or not of a floating dtype, and an
                ``initial_carry`` that is not of the cell's structure.
            ValueError: for shapes that don't fit, and options that don't exist.
        """
        time_major = _or(time_major, self.time_major)
        reverse = _or(reverse, self.reverse)
        inputs, lengths = time_first("RNN", inputs, seq_lengths, time_major)
        starts = first_steps("RNN", inputs, resets, lengths, time_major)
        operands = self._operands("RNN", inputs, initial_carry, carry_stream(_or(rngs, self.rngs)))
        carry, ys = recurrent.scan(
            **operands,
            reverse=reverse,
            seq_lengths=lengths,
            resets=last_steps(starts) if reverse else starts,
        )
        if reverse and not _or(keep_order, self.keep_order):
            ys = flip_sequences(ys, lengths, num_batch_dims=1, time_major=True)
        batch = inputs.shape[1:-1]
        outputs = time_restored(ys, batch, time_major)
        if _or(return_carry, self.return_carry):
            return with_batch(carry, batch), outputs
        return outputs

    def _operands(
        self, operation: str, inputs: jax.Array, carry: Any, stream: Any
    ) -> dict[str, Any]:
        """The scan's arguments, of inputs (T, *batch, in_features)."""
        check_scannable(operation, self.cell)
        if carry is None:
            carry = self.cell.initialize_carry(inputs.shape[1:], stream)
        return {
            **scan_operands(operation, self.cell, inputs, carry),
            "recompute": self.recompute,
            "implementation": self.implementation,
            "variant": self.variant,
        }


class Bidirectional(nnx.Module):
    """Runs one layer forward and one backward in time, and merges their outputs.

    `nnx.Bidirectional` of two :class:`RNN`. Where their cells are of one form (function, sizes,
    dtypes, both dense or both sparse) the two are one scan. Where nnx.Bidirectional is batch-major
    and returns no carry by default, this one does what its layers do.

    Args:
        forward_rnn: an RNN; its ``reverse``, ``keep_order`` and ``rngs`` do not count.
        backward_rnn: another; the same object means shared parameters.
        merge_fn: of the two outputs, both in the order of time; by default they are concatenated.
        time_major: time is the first dimension, not the last but one. By default that of the
            layers; what is given here overrides it.
        return_carry: the call returns (carries, outputs); by default that of the layers.
        rngs: as in :class:`RNN`.

    Raises:
        TypeError: if a layer is no `jaxsparse.nn.RNN`, or ``rngs`` is not what RNN takes.
        ValueError: if the layers disagree about an option that is not given.

    Source: Schuster and Paliwal 1997, "Bidirectional Recurrent Neural Networks".

    >>> from jaxsparse.nn import GRUCell
    >>> rngs = nnx.Rngs(0)
    >>> layer = Bidirectional(RNN(GRUCell(3, 4, rngs=rngs)), RNN(GRUCell(3, 4, rngs=rngs)))
    >>> layer(jnp.ones((2, 7, 3))).shape
    (2, 7, 8)
    """

    def __init__(
        self,
        forward_rnn: RNN,
        backward_rnn: RNN,
        *,
        merge_fn: Callable[[jax.Array, jax.Array], jax.Array] = concatenated,
        time_major: bool | None = None,
        return_carry: bool | None = None,
        rngs: Rngs | bool = True,
    ):
        rnns = {"forward_rnn": forward_rnn, "backward_rnn": backward_rnn}
        for name, rnn in rnns.items():
            if not isinstance(rnn, RNN):
                raise TypeError(
                    f"Bidirectional: {name} must be a jaxsparse.nn.RNN, got {type(rnn).__name__}"
                )
        self.forward_rnn = forward_rnn
        self.backward_rnn = backward_rnn
        self.merge_fn = merge_fn
        self.time_major = shared_option("Bidirectional", "time_major", time_major, rnns)
        self.return_carry = shared_option("Bidirectional", "return_carry", return_carry, rnns)
        self.rngs = _stream("Bidirectional", rngs, forward_rnn.cell, backward_rnn.cell)

    def __call__(
        self,
        inputs: jax.Array,
        *,
        initial_carry: tuple[Any, Any] | None = None,
        seq_lengths: Any = None,
        resets: Any = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        rngs: Rngs | None = None,
    ) -> Any:
        """Runs both layers.

        Args:
            inputs: as in :class:`RNN`.
            initial_carry: a pair (forward, backward) of carries.
            seq_lengths, resets, return_carry, time_major, rngs: as in RNN.
            reverse, keep_order: not used, as in nnx.Bidirectional.

        Returns:
            The merged outputs; with ``return_carry`` the pair of the carries (forward, backward)
            and the outputs.

        Raises:
            TypeError, ValueError: as RNN.
        """
        time_major = _or(time_major, self.time_major)
        carries = (None, None) if initial_carry is None else initial_carry
        if not isinstance(carries, tuple | list) or len(carries) != 2:
            raise TypeError(
                "Bidirectional: initial_carry must be a pair (forward, backward), "
                f"got {jax.tree.structure(carries)}"
            )
        inputs, lengths = time_first("Bidirectional", inputs, seq_lengths, time_major)
        starts = first_steps("Bidirectional", inputs, resets, lengths, time_major)
        ends = last_steps(starts)
        stream = _or(rngs, self.rngs)
        stream = stream.carry if isinstance(stream, nnx.Rngs) else stream
        rnns = (self.forward_rnn, self.backward_rnn)
        forward, backward = (
            rnn._operands("Bidirectional", inputs, carry, stream)
            for rnn, carry in zip(rnns, carries, strict=True)
        )
        if _form(forward) == _form(backward):
            arrays = {name: (forward[name], backward[name]) for name in _ARRAYS}
            both = None if starts is None else (starts, ends)
            last, ys = recurrent.bidirectional_scan(
                **forward | arrays, seq_lengths=lengths, resets=both
            )
        else:
            runs = ((forward, False, starts), (backward, True, ends))
            last, ys = zip(
                *(
                    recurrent.scan(**operands, reverse=reverse, seq_lengths=lengths, resets=resets)
                    for operands, reverse, resets in runs
                ),
                strict=True,
            )
        batch = inputs.shape[1:-1]
        outputs = self.merge_fn(*(time_restored(y, batch, time_major) for y in ys))
        if _or(return_carry, self.return_carry):
            return tuple(with_batch(carry, batch) for carry in last), outputs
        return outputs


_ARRAYS = ("recurrent", "carry", "xs", "recurrent_bias")


def _form(operands: dict[str, Any]) -> Any:
    """What two directions must share to be one scan: all but their arrays and their patterns."""
    weights = operands["recurrent"]
    arrays = [operands[name] for name in _ARRAYS if name != "recurrent"]
    options = {name: value for name, value in operands.items() if name not in _ARRAYS}
    leaves, structure = jax.tree.flatten(arrays)
    signature = [(x.shape, x.dtype) for x in leaves]
    return options, structure, signature, type(weights), weights.shape, weights.dtype


# ---- Arguments and results ----


def _or(given: Any, default: Any) -> Any:
    return default if given is None else given


def shared_option(operation: str, name: str, given: bool | None, layers: Mapping[str, Any]) -> bool:
    """An option of a layer made of others: as given, or else theirs, or ValueError.

    A default of its own would override what its layers were made with.
    """
    if given is not None:
        return given
    owners: dict[bool, list[str]] = {}
    for layer_name, layer in layers.items():
        # Layers of other classes may not have the option.
        value = getattr(layer, name, None)
        if value is not None:
            owners.setdefault(value, []).append(layer_name)
    if len(owners) > 1:
        got = " and ".join(f"{value} of {', '.join(names)}" for value, names in owners.items())
        raise ValueError(f"{operation}: {name} must be given or the same in all layers, got {got}")
    return next(iter(owners), False)


def _stream(operation: str, rngs: Any, *cells: RecurrentCell) -> Any:
    """The stream of a layer: without an initializer that draws from it, it would be dead state."""
    if rngs is True and any(cell.carry_init is not None for cell in cells):
        return nnx.RngStream(0, tag="carry")
    if isinstance(rngs, bool):
        return nnx.data(None)
    if not isinstance(rngs, Rngs):
        raise TypeError(
            f"{operation}: rngs must be nnx.Rngs, a stream or a bool, got {type(rngs).__name__}"
        )
    return carry_stream(rngs)


def carry_stream(rngs: Any) -> Any:
    """The stream that a layer draws its carry from: a fork of the one of random keys."""
    return rngs.carry.fork() if isinstance(rngs, nnx.Rngs) else rngs
