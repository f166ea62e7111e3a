"""The recurrent cell of xLSTM as a layer."""

from __future__ import annotations

from typing import Any

from jaxsparse import recurrent
from jaxsparse.nn.cells import RecurrentCell
from jaxsparse.precision import accumulator_dtype


class SLSTMCell(RecurrentCell):
    r"""The LSTM with an exponential input gate of xLSTM; carry (c, n, m, h).

    .. math::
        \tilde\imath, \tilde f, \tilde z, \tilde o &= x W_i + h W_h + b_h \\
        c' &= \sigma(\tilde f)\, c + e^{\tilde\imath} \tanh(\tilde z), \quad
        n' = \sigma(\tilde f)\, n + e^{\tilde\imath} \\
        h' &= \sigma(\tilde o)\, c' / n'

    with c and n divided by :math:`e^m`, as `jaxsparse.recurrent.SLSTM` says. The gates lie side by
    side in the order i f z o. With ``heads`` the recurrent weights are those of xLSTM: the units of
    a head take the state of that head alone. ``input_heads`` does the same with the inputs.

    Args:
        in_features: features of the input.
        hidden_features: h, the units.
        use_bias: whether ``dense_i`` has a bias, too.
        use_recurrent_bias: whether ``dense_h`` has a bias.
        options: those of :class:`RecurrentCell`. The carry at the start is at least float32,
            whatever the ``param_dtype``; made by a ``carry_init`` of your own, its n should be at
            least 1.

    Raises:
        TypeError, ValueError: as :class:`RecurrentCell`.

    Source: Beck et al. 2024, "xLSTM: Extended Long Short-Term Memory".

    >>> from flax import nnx
    >>> cell = SLSTMCell(6, 8, heads=2, input_heads=2, rngs=nnx.Rngs(0))
    >>> cell.dense_i.kernel.shape, cell.dense_h.kernel.shape, cell.dense_h.bias.shape
    ((2, 3, 16), (2, 4, 16), (32,))
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        use_bias: bool = False,
        use_recurrent_bias: bool = True,
        **options: Any,
    ):
        super().__init__(
            in_features,
            hidden_features,
            recurrent.SLSTM,
            gates=4,
            carry_like=(0, 0, 0, 0),
            use_bias=use_bias,
            use_recurrent_bias=use_recurrent_bias,
            **options,
        )

    @property
    def _carry_dtype(self) -> Any:
        return accumulator_dtype(self.param_dtype)
