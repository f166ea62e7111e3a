"""Recurrent cells as layers: a pointwise function with the layers of its input and its state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jaxsparse import recurrent
from jaxsparse.csr import CSR
from jaxsparse.nn import cell_functions
from jaxsparse.nn.cell_functions import Function
from jaxsparse.nn.headwise import HeadwiseLinear
from jaxsparse.nn.linear import Initializer, SparseLinear, as_integer, check_call, has_call_of
from jaxsparse.ops import arguments
from jaxsparse.precision import accumulator_dtype
from jaxsparse.recurrent.cells import Cell
from jaxsparse.topology import Topology


class RecurrentCell(nnx.RNNCellBase):
    r"""A recurrent cell of your own; :class:`SimpleCell`, GRUCell and LSTMCell are made of it.

    .. math::
        (c_t, y_t) = \operatorname{function}(x_t W_i + b_i,\; h_{t-1} W_h + b_h,\; c_{t-1})

    where :math:`h_t` is the last leaf of the carry :math:`c_t`. :class:`RNN` runs it over time;
    called as a Flax cell it makes one step, so that it also runs in `nnx.RNN`.

    Attributes: ``dense_i`` and ``dense_h``, each an `nnx.Linear` with a kernel
    (in_features, gates * h) or (h, gates * h), or a `SparseLinear` or `HeadwiseLinear` of as many
    features. Another layer of these kinds may be put in their place, one that
    `SparseLinear.from_dense` pruned for instance; as ``dense_i`` also one of a subclass, with a
    call of its own.

    Args:
        in_features: features of the input.
        hidden_features: h, the units.
        function: ``(x, r, carry) -> (carry, y)``, pointwise, of one array for each gate in the
            tuples ``x`` and ``r``. It must not be made anew for each layer: what is compiled is
            found again by the function.
        gates: how many arrays x and r are.
        carry_like: a pytree of the carry's structure; its leaves may be anything.
        use_bias: whether ``dense_i`` has a bias.
        use_recurrent_bias: whether ``dense_h`` has one.
        heads: if more than 1, ``dense_h`` is a `HeadwiseLinear` with a kernel
            (heads, h / heads, gates * h / heads): the units of a head take the state of that head
            alone. Each head's block is initialized as a kernel of its own.
        input_heads: the same for ``dense_i`` and the features of the input, which it divides.
        input_sparsity, input_topology: make ``dense_i`` a `SparseLinear`: the share of weights that
            are left out, or the stored positions, of shape (gates * h, in_features).
        recurrent_sparsity, recurrent_topology: the same for ``dense_h``: shape (gates * h, h).
        kernel_init: makes the kernel of ``dense_i``; by default LeCun's normal distribution.
        recurrent_kernel_init: makes the kernel of ``dense_h``, by default an orthogonal one; sparse
            weights are made as `SparseLinear` makes them.
        bias_init: makes the biases.
        dtype: of the products and of the outputs; by default that of inputs and parameters
            together. The cell itself is computed in float32 or float64.
        param_dtype: of the parameters, and of the carry at the start.
        precision: of both products, None or a ``jax.lax.Precision``; sparse ones are exact.
        carry_init: makes the carry at the start; by default zeros, for which no key is drawn.
        promote_dtype: brings inputs, kernel and bias to one dtype.
        keep_rngs: keeps a stream of random keys for ``carry_init``, forked from the stream "carry".
        rngs: random keys: the stream "params".
        kernel_metadata, recurrent_kernel_metadata, bias_metadata: metadata of the parameters.

    Raises:
        TypeError: if ``function`` is no (hashable) function, has parameters or returns something
            else, and for sizes that are no integers.
        ValueError: if it is not pointwise or uses what can't run in a kernel, naming it; if it uses
            traced values or arrays other than its operands; for sparsities, topologies and options
            as `SparseLinear`; and for heads that do not divide h, or have sparse weights.

    Method: Diamos et al. 2016, "Persistent RNNs", of which `jaxsparse.recurrent.scan` is the
    operation.

    >>> def MGU(x, r, h):
    ...     (x_f, x_n), (r_f, r_n) = x, r
    ...     f = jax.nn.sigmoid(x_f + r_f)
    ...     h = h + f * (jnp.tanh(x_n + f * r_n) - h)
    ...     return h, h
    >>> cell = RecurrentCell(3, 5, MGU, gates=2, recurrent_sparsity=0.6, rngs=nnx.Rngs(0))
    >>> cell.dense_i.kernel.shape, cell.dense_h.values.shape
    ((3, 10), (20,))
    >>> carry, y = cell(jnp.zeros((4, 5)), jnp.ones((4, 3)))
    >>> y.shape
    (4, 5)
    """

    # In which order the layers draw their random keys.
    _layers = ("dense_i", "dense_h")

    function: Any

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        function: Cell,
        *,
        gates: int = 1,
        carry_like: Any = 0,
        use_bias: bool = True,
        use_recurrent_bias: bool = False,
        heads: int = 1,
        input_heads: int = 1,
        input_sparsity: float | None = None,
        input_topology: Topology | None = None,
        recurrent_sparsity: float | None = None,
        recurrent_topology: Topology | None = None,
        kernel_init: Initializer | None = None,
        recurrent_kernel_init: Initializer | None = None,
        bias_init: Initializer = nnx.initializers.zeros,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        carry_init: Initializer | None = None,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        keep_rngs: bool = False,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        recurrent_kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
    ):
        operation = type(self).__name__
        in_features = as_integer(operation, "in_features", in_features)
        hidden_features = as_integer(operation, "hidden_features", hidden_features)
        gates = as_integer(operation, "gates", gates)
        heads = _checked_heads(
            operation, "heads", heads, hidden_features, recurrent_sparsity, recurrent_topology
        )
        input_heads = _checked_heads(
            operation, "input_heads", input_heads, in_features, input_sparsity, input_topology
        )
        if hidden_features % input_heads:
            raise ValueError(
                f"{operation}: input_heads must divide the {hidden_features} hidden_features, "
                f"got {input_heads}"
            )
        cell_functions.check_cell(operation, function, gates, carry_like)
        arguments.as_precision(operation, precision)
        self.in_features = in_features
        self.hidden_features = hidden_features
        if not hasattr(type(self), "function"):  # else it follows from other options
            self.function = function
        self.gates = gates
        self.carry_structure: Any = jax.tree.structure(carry_like)
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.carry_init = carry_init
        self.promote_dtype = promote_dtype
        self.rngs = rngs.carry.fork() if keep_rngs else nnx.data(None)
        arguments_of: dict[str, dict[str, Any]] = {
            "dense_i": {
                "in_features": in_features,
                "use_bias": use_bias,
                "sparsity": input_sparsity,
                "topology": input_topology,
                "kernel_init": kernel_init,
                "kernel_metadata": kernel_metadata,
                "dense_init": nnx.initializers.lecun_normal(),
                "heads": input_heads,
            },
            "dense_h": {
                "in_features": hidden_features,
                "use_bias": use_recurrent_bias,
                "sparsity": recurrent_sparsity,
                "topology": recurrent_topology,
                "kernel_init": recurrent_kernel_init,
                "kernel_metadata": recurrent_kernel_metadata,
                "dense_init": orthogonal,
                "heads": heads,
            },
        }
        self.dense_i: nnx.Linear | SparseLinear | HeadwiseLinear
        self.dense_h: nnx.Linear | SparseLinear | HeadwiseLinear
        for name in self._layers:
            layer = make_layer(
                **arguments_of[name],
                out_features=gates * hidden_features,
                gates=gates,
                bias_init=bias_init,
                dtype=dtype,
                param_dtype=param_dtype,
                precision=precision,
                promote_dtype=promote_dtype,
                rngs=rngs,
                bias_metadata=bias_metadata,
            )
            setattr(self, name, layer)

    @property
    def _carry_dtype(self) -> Any:
        """That of the carry at the start."""
        return self.param_dtype

    @property
    def num_feature_axes(self) -> int:
        """1: the last dimension of an input."""
        return 1

    def initialize_carry(
        self,
        input_shape: tuple[int, ...],
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        carry_init: Initializer | None = None,
    ) -> Any:
        """The carry at the start.

        Args:
            input_shape: ``(..., in_features)``, of one step.
            rngs: random keys for ``carry_init``: the stream "carry", one key for each leaf. By
                default the stream that the cell keeps.
            carry_init: makes each leaf; by default the cell's own, or else zeros.

        Returns:
            A carry of leaves ``(..., h)`` in ``param_dtype``.

        Raises:
            ValueError: if there is a ``carry_init``, but no stream.
        """
        shape, dtype = (*input_shape[:-1], self.hidden_features), self._carry_dtype
        initializer = self.carry_init if carry_init is None else carry_init
        count = self.carry_structure.num_leaves
        if initializer is None:
            leaves = [jnp.zeros(shape, dtype) for _ in range(count)]
        else:
            rngs = self.rngs if rngs is None else rngs
            stream = rngs.carry if isinstance(rngs, nnx.Rngs) else rngs
            if stream is None:
                raise ValueError(
                    f"{type(self).__name__}.initialize_carry: rngs must be given for carry_init, "
                    "got None"
                )
            leaves = [initializer(stream(), shape, dtype) for _ in range(count)]
        return jax.tree.unflatten(self.carry_structure, leaves)

    def __call__(self, carry: Any, inputs: jax.Array) -> tuple[Any, jax.Array]:
        """Makes one step.

        Args:
            carry: a pytree of ``(..., h)``.
            inputs: ``(..., in_features)``.

        Returns:
            The new carry, and y ``(..., h)``.

        Raises:
            TypeError, ValueError: as :class:`RNN`.
        """
        operation = type(self).__name__
        inputs = arguments.as_array(operation, "inputs", inputs, 1)
        operands = scan_operands(operation, self, inputs[None], carry)
        carry, ys = recurrent.scan(**operands)
        return with_batch(carry, inputs.shape[:-1]), with_batch(ys[0], inputs.shape[:-1])


class SimpleCell(RecurrentCell):
    r"""The simple (Elman) cell, with the parameters of `nnx.SimpleCell`; its carry is h.

    .. math:: h' = f(x W_i + b_i + h W_h), \quad h' = f(x W_i + b_i + h W_h + h)
        \text{ if residual}

    Args:
        in_features: features of the input.
        hidden_features: h, the units.
        residual: adds the state, as above.
        activation_fn: f, any pointwise function.
        dtype: of the computation: float32, as in Flax.
        options: those of :class:`RecurrentCell`.

    Raises:
        TypeError, ValueError: as :class:`RecurrentCell`.

    >>> cell = SimpleCell(3, 5, activation_fn=nnx.relu, rngs=nnx.Rngs(0))
    >>> cell.dense_h.kernel.shape, cell.dense_h.bias, cell.dense_i.bias.shape
    ((5, 5), None, (5,))
    """

    _layers = ("dense_h", "dense_i")  # Flax's order: one seed makes the same parameters

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        residual: bool = False,
        activation_fn: Function = nnx.tanh,
        dtype: Any = jnp.float32,
        **options: Any,
    ):
        self.residual = residual
        self.activation_fn = activation_fn
        super().__init__(in_features, hidden_features, self.function, dtype=dtype, **options)

    @property
    def function(self) -> Cell:
        """The pointwise function, of the options as they are now."""
        cell_functions.check_function("SimpleCell", "activation_fn", self.activation_fn)
        if self.residual:
            return cell_functions.residual_rnn(self.activation_fn)
        return recurrent.elman(self.activation_fn)


class GRUCell(RecurrentCell):
    r"""The gated recurrent unit, with the parameters of `nnx.GRUCell`; its carry is h.

    .. math::
        r &= \sigma(x W_{ir} + b_{ir} + h W_{hr} + b_{hr}) \\
        z &= \sigma(x W_{iz} + b_{iz} + h W_{hz} + b_{hz}) \\
        n &= \tanh(x W_{in} + b_{in} + r\,(h W_{hn} + b_{hn})) \\
        h' &= (1 - z)\, n + z\, h

    The gates lie side by side in the order r z n. :math:`b_h` is there with
    ``use_recurrent_bias=True``: PyTorch has it, Flax has not.

    Args:
        in_features: features of the input.
        hidden_features: h, the units.
        gate_fn: stands for :math:`\sigma`.
        activation_fn: stands for tanh.
        options: those of :class:`RecurrentCell`.

    Raises:
        TypeError, ValueError: as :class:`RecurrentCell`.

    Source: Cho et al. 2014, "Learning Phrase Representations using RNN Encoder-Decoder", with the
    reset gate moved behind the product.

    >>> cell = GRUCell(3, 5, rngs=nnx.Rngs(0))
    >>> cell.dense_h.kernel.shape, cell.dense_h.bias, cell.dense_i.bias.shape
    ((5, 15), None, (15,))
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: Function = nnx.sigmoid,
        activation_fn: Function = nnx.tanh,
        **options: Any,
    ):
        self.gate_fn = gate_fn
        self.activation_fn = activation_fn
        super().__init__(in_features, hidden_features, self.function, gates=3, **options)

    @property
    def function(self) -> Cell:
        """The pointwise function, of the options as they are now."""
        cell_functions.check_function("GRUCell", "gate_fn", self.gate_fn)
        cell_functions.check_function("GRUCell", "activation_fn", self.activation_fn)
        return cell_functions.gru(self.gate_fn, self.activation_fn)


class LSTMCell(RecurrentCell):
    r"""Long short-term memory, with the parameters of `nnx.OptimizedLSTMCell`; carry (c, h).

    .. math::
        i, f, o &= \sigma(x W_{i\cdot} + h W_{h\cdot} + b_{h\cdot}), \quad
        g = \tanh(x W_{ig} + h W_{hg} + b_{hg}) \\
        c' &= f\, c + i\, g, \quad h' = o \tanh(c')

    The gates lie side by side in the order i f g o.

    Args:
        in_features: features of the input.
        hidden_features: h, the units.
        gate_fn: stands for :math:`\sigma`.
        activation_fn: stands for tanh.
        use_bias: whether ``dense_i`` has a bias, too.
        use_recurrent_bias: whether ``dense_h`` has a bias.
        options: those of :class:`RecurrentCell`.

    Raises:
        TypeError, ValueError: as :class:`RecurrentCell`.

    Source: Hochreiter and Schmidhuber 1997, "Long Short-Term Memory", with the forget gate of Gers
    et al. 2000.

    >>> cell = LSTMCell(3, 5, rngs=nnx.Rngs(0))
    >>> cell.dense_h.kernel.shape, cell.dense_h.bias.shape, cell.dense_i.bias
    ((5, 20), (20,), None)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: Function = nnx.sigmoid,
        activation_fn: Function = nnx.tanh,
        use_bias: bool = False,
        use_recurrent_bias: bool = True,
        **options: Any,
    ):
        self.gate_fn = gate_fn
        self.activation_fn = activation_fn
        super().__init__(
            in_features,
            hidden_features,
            self.function,
            gates=4,
            carry_like=(0, 0),
            use_bias=use_bias,
            use_recurrent_bias=use_recurrent_bias,
            **options,
        )

    @property
    def function(self) -> Cell:
        """The pointwise function, of the options as they are now."""
        cell_functions.check_function("LSTMCell", "gate_fn", self.gate_fn)
        cell_functions.check_function("LSTMCell", "activation_fn", self.activation_fn)
        return cell_functions.lstm(self.gate_fn, self.activation_fn)


# ---- What a scan takes ----


def check_scannable(operation: str, cell: Any) -> None:
    """Raises TypeError unless a scan computes what a cell's calls, one after another, do."""
    if not isinstance(cell, RecurrentCell):
        hint = ": convert it by from_flax" if isinstance(cell, nnx.RNNCellBase) else ""
        raise TypeError(
            f"{operation}: cell must be a jaxsparse.nn.RecurrentCell, got {type(cell).__name__}"
            f"{hint}"
        )
    if not has_call_of(cell, RecurrentCell):
        raise TypeError(
            f"{operation}: cell must have the call of RecurrentCell, got {type(cell).__name__} "
            "with one of its own, which a scan would leave out: nnx.RNN runs it"
        )


def scan_operands(
    operation: str, cell: RecurrentCell, inputs: jax.Array, carry: Any
) -> dict[str, Any]:
    """The arguments of `recurrent.scan`, its batch one dimension.

    Args:
        operation: what errors name.
        cell: the cell.
        inputs: ``(T, *batch, in_features)``, of all steps: their product is taken here, at once.
        carry: of leaves ``(*batch, h)``.
    """
    batch = inputs.shape[1:-1]
    if inputs.shape[-1] != cell.in_features:
        raise ValueError(
            f"{operation}: inputs must have {cell.in_features} features, their last dimension, "
            f"got {inputs.shape[-1]}"
        )
    flat = flat_carry(operation, cell, carry, batch)
    check_layers(operation, cell)
    inputs = inputs.reshape(inputs.shape[0], math.prod(batch), cell.in_features)
    layer = cell.dense_h
    kernel: Any = layer.values if isinstance(layer, SparseLinear) else layer.kernel
    bias = None if layer.bias is None else layer.bias[...]
    if isinstance(cell.dense_i, SparseLinear):
        # Its product keeps the sharding of the first dimension alone, which must be the batch.
        xs = jnp.swapaxes(cell.dense_i(jnp.swapaxes(inputs, 0, 1)), 0, 1)
    else:
        xs = cell.dense_i(inputs)
    xs, weights, bias = layer.promote_dtype((xs, kernel[...], bias), dtype=layer.dtype)
    if isinstance(layer, SparseLinear):
        weights = CSR(weights, layer.pattern)
    return {
        "cell": cell.function,
        "recurrent": weights,
        "carry": flat,
        "xs": xs,
        "recurrent_bias": bias,
        "precision": arguments.as_precision(operation, layer.precision),
    }


def flat_carry(operation: str, cell: RecurrentCell, carry: Any, batch: tuple[int, ...]) -> Any:
    """A carry of leaves ``(*batch, h)`` with one batch dimension, or TypeError or ValueError."""
    h = cell.hidden_features
    if jax.tree.structure(carry) != cell.carry_structure:
        raise TypeError(
            f"{operation}: the carry of {type(cell).__name__} must have the structure "
            f"{cell.carry_structure}, got {jax.tree.structure(carry)}"
        )
    leaves = [arguments.as_array(operation, "carry", x, 1) for x in jax.tree.leaves(carry)]
    for x in leaves:
        if x.shape != (*batch, h):
            raise ValueError(
                f"{operation}: the leaves of the carry must have shape {(*batch, h)}, the batch "
                f"dimensions of the inputs and {h} units, got {x.shape}"
            )
    flat = [x.reshape(math.prod(batch), h) for x in leaves]
    return jax.tree.unflatten(cell.carry_structure, flat)


def with_batch(tree: Any, batch: tuple[int, ...]) -> Any:
    """Arrays ``(B, h)`` with the batch dimensions ``(*batch, h)``."""
    return jax.tree.map(lambda x: x.reshape(*batch, x.shape[-1]), tree)


_LAYERS = (nnx.Linear, SparseLinear, HeadwiseLinear)


def check_layers(operation: str, cell: RecurrentCell) -> None:
    """Raises TypeError or ValueError unless a scan can stand for the layers of a cell.

    They may be replaced, and `recurrent.scan` makes the product of the second one itself.
    """
    sizes = {"dense_i": cell.in_features, "dense_h": cell.hidden_features}
    for name, size in sizes.items():
        layer = getattr(cell, name)
        if name == "dense_h" or not isinstance(layer, _LAYERS):
            either = (
                f"{operation}: {name} must be an nnx.Linear, a SparseLinear or a HeadwiseLinear"
            )
            check_call(either, layer, *_LAYERS)
        expected = (size, cell.gates * cell.hidden_features)
        if (layer.in_features, layer.out_features) != expected:
            raise ValueError(
                f"{operation}: {name} must map {expected[0]} to {expected[1]} features, "
                f"got {layer.in_features} to {layer.out_features}"
            )
    layer = cell.dense_h
    if isinstance(layer, HeadwiseLinear) and layer.gates != cell.gates:
        raise ValueError(
            f"{operation}: dense_h must have the {cell.gates} gates of the cell, got {layer.gates}"
        )
    check_product(operation, layer)


def check_product(operation: str, layer: Any) -> None:
    """Raises ValueError unless a layer is the product and a bias alone, which a scan makes."""
    own = (
        layer.activation is not None
        if isinstance(layer, SparseLinear)
        else getattr(layer, "dot_general", jax.lax.dot_general) is not jax.lax.dot_general
    )
    if own:
        raise ValueError(
            f"{operation}: dense_h must be the product and a bias alone, got one with an "
            "activation or a dot_general of its own"
        )
    arguments.as_precision(f"{operation}: dense_h", layer.precision)
    weights: Any = layer.values if isinstance(layer, SparseLinear) else layer.kernel
    dtype = jax.dtypes.canonicalize_dtype(layer.dtype or weights.dtype)
    arguments.result_dtype(f"{operation}: dense_h", dtype, layer.preferred_element_type)


# ---- Parameters ----


def _checked_heads(
    operation: str, name: str, heads: Any, features: int, sparsity: Any, topology: Any
) -> int:
    """How many heads a layer has, or TypeError or ValueError.

    Args:
        operation: what errors name.
        name: of the option.
        heads: what was given.
        features: what they divide.
        sparsity, topology: options of the same layer, which heads can't have.
    """
    count = as_integer(operation, name, heads)
    side = "input" if name == "input_heads" else "recurrent"
    if count < 1 or features % count:
        kind = "in_features" if side == "input" else "hidden_features"
        raise ValueError(f"{operation}: {name} must divide the {features} {kind}, got {count}")
    if count > 1 and (sparsity is not None or topology is not None):
        raise ValueError(
            f"{operation}: {count} {name} have blocks of dense weights, got {side}_sparsity or "
            f"{side}_topology, too"
        )
    return count


def make_layer(
    in_features: int,
    out_features: int,
    *,
    sparsity: float | None,
    topology: Topology | None,
    kernel_init: Initializer | None,
    dense_init: Initializer,
    heads: int,
    gates: int,
    **options: Any,
) -> nnx.Linear | SparseLinear | HeadwiseLinear:
    """A layer of a cell, of the kind that its options ask for."""
    if sparsity is None and topology is None:
        init: Any = dense_init if kernel_init is None else kernel_init
        options |= {"kernel_init": init}
        if heads > 1:
            return HeadwiseLinear(in_features, out_features, heads=heads, gates=gates, **options)
        return nnx.Linear(in_features, out_features, **options)
    options |= {"sparsity": sparsity, "topology": topology, "kernel_init": kernel_init}
    return SparseLinear(in_features, out_features, **options)


def orthogonal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Flax's initializer, also for 16-bit dtypes, in which JAX decomposes no matrix."""
    wide = accumulator_dtype(dtype)
    return nnx.initializers.orthogonal()(key, shape, wide).astype(dtype)
