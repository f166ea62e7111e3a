"""Long short-term memory of trees, as layers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxsparse import dynamic
from jaxsparse.csr import CSR
from jaxsparse.nn.graph_scan import GraphScan
from jaxsparse.nn.linear import as_integer


class TreeLSTM(GraphScan):
    r"""The N-ary Tree-LSTM, with a forget gate and weights of its own for each child.

    .. math::
        i, o &= \sigma\bigl(W^{i,o} x + \sum_l U_l^{i,o} h_l + b^{i,o}\bigr), \quad
        u = \tanh\bigl(W^u x + \sum_l U_l^u h_l + b^u\bigr) \\
        f_k &= \sigma\bigl(W^f x + \sum_l U_{kl}^f h_l + b_k^f\bigr) \\
        c &= i\, u + \sum_k f_k\, c_k, \quad h = o \tanh(c)

    A row without inputs has x = 0; leaves have inputs and no children. Gates lie side by side:
    i o u f of ``dense_i``, i o u f_1 ... f_K of ``dense_h``.

    Args:
        in_features: features of the inputs.
        hidden_features: h, the units.
        children: K, how many children a row has at most.
        options: those of :class:`GraphScan`.

    Raises:
        TypeError, ValueError: as :class:`GraphScan`.

    Source: Tai et al. 2015, "Improved Semantic Representations From Tree-Structured Long
    Short-Term Memory Networks", where all forget gates have one bias.

    >>> from flax import nnx
    >>> trees = dynamic.Graphs.from_brackets("(3 (2 It) (4 (2 's) (4 great)))")
    >>> script = dynamic.pack(trees, [0], dynamic.Layout())
    >>> layer = TreeLSTM(3, 4, rngs=nnx.Rngs(0))
    >>> table = jnp.ones((4, 3))
    >>> states = layer(script, table[script.leaf("word")])
    >>> script.roots(*jnp.split(states, [script.form.leaves])).shape
    (1, 4)
    """

    def __init__(
        self, in_features: int | None, hidden_features: int, *, children: int = 2, **options: Any
    ):
        children = as_integer(type(self).__name__, "children", children)
        super().__init__(
            in_features,
            hidden_features,
            dynamic.tree_lstm(children),
            products=3 + children,
            gates=4,
            carry_like=(0, 0),
            **options,
        )


class ChildSumTreeLSTM(TreeLSTM):
    r"""The child-sum Tree-LSTM, whose children share their weights: their order does not count.

    .. math::
        i, o &= \sigma\bigl(W^{i,o} x + U^{i,o} \sum_k h_k + b^{i,o}\bigr), \quad
        u = \tanh\bigl(W^u x + U^u \sum_k h_k + b^u\bigr) \\
        f_k &= \sigma\bigl(W^f x + U^f h_k + b^f\bigr) \\
        c &= i\, u + \sum_k f_k\, c_k, \quad h = o \tanh(c)

    As dependency trees have it, in which every row has inputs. ``dense_h`` has a kernel (h, 4 h),
    the gates i o u f side by side.

    Args:
        in_features: features of the inputs.
        hidden_features: h, the units.
        children: K, how many children a row has at most. The scan multiplies by a matrix
            (K h, (3 + K) h), in most of which the weights repeat or are 0: it is for few children.
        options: those of :class:`GraphScan`, without ``recurrent_sparsity`` and
            ``recurrent_topology``.

    Raises:
        TypeError, ValueError: as :class:`GraphScan`.

    Source: Tai et al. 2015, "Improved Semantic Representations From Tree-Structured Long
    Short-Term Memory Networks".

    >>> from flax import nnx
    >>> layer = ChildSumTreeLSTM(3, 4, children=5, rngs=nnx.Rngs(0))
    >>> layer.dense_h.kernel.shape
    (4, 16)
    """

    def __init__(
        self, in_features: int | None, hidden_features: int, *, children: int, **options: Any
    ):
        for name in "recurrent_sparsity", "recurrent_topology":
            if options.get(name) is not None:
                raise ValueError(f"ChildSumTreeLSTM: has no {name}, its weights are repeated")
        super().__init__(in_features, hidden_features, children=children, **options)

    @property
    def _recurrent_features(self) -> tuple[int, int]:
        return self.hidden_features, 4 * self.hidden_features

    def _weights(self, kernel: Any, bias: Any) -> tuple[Any, Any]:
        children, h = self.cell.children, self.hidden_features
        if isinstance(kernel, CSR):
            kernel = jnp.swapaxes(kernel.todense(), 0, 1)
        shared, forget = jnp.split(kernel, [3 * h], -1)
        # Child k takes part in its own forget gate alone.
        own = jnp.eye(children, dtype=forget.dtype)
        of_gates = jnp.where(own[:, None, :, None] != 0, forget[None, :, None], 0)
        weights = jnp.concatenate(
            [jnp.tile(shared, (children, 1)), of_gates.reshape(children * h, children * h)], -1
        )
        if bias is not None:
            bias = jnp.concatenate([bias[: 3 * h], jnp.tile(bias[3 * h :], children)])
        return weights, bias
