"""Layers over graphs: a cell over the rows of any graphs, with the layers of inputs and states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jaxsparse import dynamic
from jaxsparse.csr import CSR
from jaxsparse.dynamic.arguments import check_script
from jaxsparse.dynamic.cell_checks import checked_step
from jaxsparse.dynamic.step import KindOfCell
from jaxsparse.integers import integer
from jaxsparse.nn.cells import check_product, make_layer, orthogonal
from jaxsparse.nn.linear import Initializer, SparseLinear, check_call
from jaxsparse.nn.recurrent import Rngs
from jaxsparse.nn.stack import as_dropout
from jaxsparse.ops import arguments
from jaxsparse.precision import accumulator_dtype
from jaxsparse.topology import Topology


class GraphScan(nnx.Module):
    r"""Runs a cell over the rows of graphs, children before their parents: `dynamic.scan`.

    .. math:: c_v = \operatorname{cell}\bigl(x_v W_i,\; \sum_k h_{v,k} W_k + b,\;
        (c_{v,1}, \ldots, c_{v,K})\bigr)

    where :math:`h_{v,k}` is the last leaf of the carry :math:`c_{v,k}` of row v's k-th child. The
    graphs are an argument, a script of `dynamic.pack`: other graphs compile nothing anew.

    Attributes: ``dense_i``, an `nnx.Linear` with a kernel (in_features, gates * h) and no bias, or
    None; ``dense_h``, one with a kernel (K h, products * h), or a `SparseLinear` of as many
    features, whose bias all computed rows and leaves with inputs have. Either may be replaced.

    Args:
        in_features: features of the inputs; None if no row has inputs.
        hidden_features: h, the units.
        cell: made by `dynamic.cell` or `dynamic.chain`.
        products: P, how many arrays r are.
        gates: how many arrays x are; by default as many as the products.
        carry_like: a pytree of the carry's structure; its leaves may be anything.
        use_bias: whether ``dense_h`` has a bias.
        recurrent_sparsity, recurrent_topology: make ``dense_h`` a `SparseLinear`: the share of
            weights that are left out, or the stored positions, of shape (products * h, K h).
        dropout: a rate, or an `nnx.Dropout`, of the inputs of rows and leaves.
        carry_dropout: the same of the leaves' carries.
        kernel_init: makes the kernel of ``dense_i``; by default LeCun's normal distribution.
        recurrent_kernel_init: makes the kernel of ``dense_h``, by default an orthogonal one.
        bias_init: makes the bias.
        dtype: of the products, and of the states; by default that of inputs and parameters
            together. The cell itself is computed in float32 or float64.
        param_dtype: of the parameters, and of leaves' carries but for their states.
        precision: of both products, None or a ``jax.lax.Precision``.
        promote_dtype: brings inputs, kernel and bias to one dtype.
        recompute: saves memory in gradients: see `dynamic.scan`.
        implementation: None (the platform's own), "cpu", "cuda" or "xla".
        variant: the name of a kernel variant to force.
        rngs: random keys: the stream "params"; the stream "dropout" is forked for dropouts that
            are made of rates.
        kernel_metadata, recurrent_kernel_metadata, bias_metadata: metadata of the parameters, as
            their shardings.

    Raises:
        TypeError: if the cell is none, a size no integer, or a dropout neither a rate nor a layer.
        ValueError: for sizes below 1, a carry without leaves, options as `SparseLinear`, and rates
            outside of [0, 1).

    Method: Khorasani et al. 2018, "In-Register Parameter Caching for Dynamic Neural Nets with
    Virtual Persistent Processor Specialization".

    >>> from jaxsparse import recurrent
    >>> graphs = dynamic.Graphs.from_sequences([3, 1])
    >>> script = dynamic.pack(graphs, [0, 1], dynamic.Layout(slots=1))
    >>> layer = GraphScan(5, 4, dynamic.chain(recurrent.GRU), products=3, rngs=nnx.Rngs(0))
    >>> states = layer(script, inputs=jnp.ones((script.form.inputs, 5)))
    >>> script.in_input_order(states[script.form.leaves :]).shape
    (8, 4)
    """

    def __init__(
        self,
        in_features: int | None,
        hidden_features: int,
        cell: dynamic.Cell,
        *,
        products: int,
        gates: int | None = None,
        carry_like: Any = 0,
        use_bias: bool = True,
        recurrent_sparsity: float | None = None,
        recurrent_topology: Topology | None = None,
        dropout: float | nnx.Dropout | None = None,
        carry_dropout: float | nnx.Dropout | None = None,
        kernel_init: Initializer | None = None,
        recurrent_kernel_init: Initializer | None = None,
        bias_init: Initializer = nnx.initializers.zeros,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        recompute: bool = False,
        implementation: str | None = None,
        variant: str | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        recurrent_kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
    ):
        operation = type(self).__name__
        if not isinstance(cell, dynamic.Cell):
            raise TypeError(
                f"{operation}: cell must be made by dynamic.cell or dynamic.chain, got "
                f"{type(cell).__name__}"
            )
        h = integer(operation, "hidden_features", hidden_features, 1)
        if in_features is not None:
            in_features = integer(operation, "in_features", in_features, 1)
        arguments.as_precision(operation, precision)
        self.in_features = in_features
        self.hidden_features = h
        self.cell = cell
        self.products = integer(operation, "products", products, 1)
        self.gates = self.products if gates is None else integer(operation, "gates", gates, 1)
        self.carry_structure: Any = jax.tree.structure(carry_like)
        if not jax.tree.leaves(carry_like):
            raise ValueError(f"{operation}: carry_like must have a leaf: the state, its last one")
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.recompute = recompute
        self.implementation = implementation
        self.variant = variant
        shared = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "promote_dtype": promote_dtype,
            "bias_init": bias_init,
            "heads": 1,
            "rngs": rngs,
        }
        self.dense_i = nnx.data(None)
        if in_features is not None:
            self.dense_i = make_layer(
                in_features,
                self.gates * h,
                gates=self.gates,
                use_bias=False,
                sparsity=None,
                topology=None,
                kernel_init=kernel_init,
                dense_init=nnx.initializers.lecun_normal(),
                kernel_metadata=kernel_metadata,
                **shared,
            )
        taken, made = self._recurrent_features
        self.dense_h = make_layer(
            taken,
            made,
            gates=self.products,
            use_bias=use_bias,
            sparsity=recurrent_sparsity,
            topology=recurrent_topology,
            kernel_init=recurrent_kernel_init,
            dense_init=orthogonal,
            kernel_metadata=recurrent_kernel_metadata,
            bias_metadata=bias_metadata,
            **shared,
        )
        self.dropout = as_dropout(operation, "dropout", dropout, rngs)
        self.carry_dropout = as_dropout(operation, "carry_dropout", carry_dropout, rngs)

    @property
    def _recurrent_features(self) -> tuple[int, int]:
        """What ``dense_h`` takes and gives."""
        return self.cell.children * self.hidden_features, self.products * self.hidden_features

    def _weights(self, kernel: Any, bias: Any) -> tuple[Any, Any]:
        """What the scan multiplies by and adds, of what ``dense_h`` has."""
        return kernel, bias

    def __call__(
        self,
        script: dynamic.Script,
        leaf_inputs: Any = None,
        inputs: Any = None,
        *,
        initial_carry: Any = None,
        return_carry: bool = False,
        deterministic: bool | None = None,
        rngs: Rngs | None = None,
    ) -> Any:
        """Runs the cell over all rows.

        Args:
            script: a batch of graphs.
            leaf_inputs: ``(leaves, in_features)``: the carries of leaves are what the cell makes of
                these, without children.
            inputs: ``(inputs, in_features)``, of computed rows that have inputs.
            initial_carry: carries of the leaves, a pytree of ``(leaves, h)``, in the place of
                ``leaf_inputs``. Without either they are zeros.
            return_carry: returns the pair of the carries and the states.
            deterministic: True leaves the dropouts out; by default their own ``deterministic``.
            rngs: random keys for the dropouts, the stream "dropout"; by default their own.

        Returns:
            The states ``(rows, h)``, those of the leaves first, in the computation's dtype. Padding
            is 0, and what stands there, NaN included, reaches no value and no gradient. With
            ``return_carry`` also the carries, a pytree of ``(rows, h)``.

        Raises:
            TypeError: for operands that are no arrays, a carry of another structure or not of a
                floating dtype, and a script or layers that are none.
            ValueError: for shapes that don't fit, inputs of a layer without ``dense_i``, both
                ``leaf_inputs`` and ``initial_carry``, and as `dynamic.scan`.
        """
        operation = type(self).__name__
        script = check_script(operation, script)
        self._check_layers(operation)
        if initial_carry is not None:
            if leaf_inputs is not None:
                raise ValueError(f"{operation}: got both leaf_inputs and initial_carry")
            self._check_carry(operation, initial_carry, script.form.leaves)
        drop = {"deterministic": deterministic, "rngs": rngs}
        is_leaf = jnp.arange(script.form.leaves) < script.used_leaves
        has_input = jnp.arange(script.form.inputs) < script.used_inputs
        of_leaves = self._pre_activations(operation, "leaf_inputs", leaf_inputs, is_leaf, drop)
        xs = self._pre_activations(operation, "inputs", inputs, has_input, drop)
        layer: Any = self.dense_h
        kernel = layer.values if isinstance(layer, SparseLinear) else layer.kernel
        bias = None if layer.bias is None else layer.bias[...]
        state = None if initial_carry is None else jax.tree.leaves(initial_carry)[-1]
        of_leaves, xs, state, kernel, bias = layer.promote_dtype(
            (of_leaves, xs, state, kernel[...], bias), dtype=layer.dtype
        )
        dtype = kernel.dtype
        if isinstance(layer, SparseLinear):
            kernel = CSR(kernel, layer.pattern)
        weights, bias = self._weights(kernel, bias)
        if initial_carry is None:
            carry = self._leaf_carry(script.form.leaves, of_leaves, bias, dtype)
        else:
            *others, _ = jax.tree.leaves(initial_carry)
            carry = jax.tree.unflatten(self.carry_structure, [*others, state])
        if self.carry_dropout is not None:
            carry = jax.tree.map(lambda x: self.carry_dropout(x, **drop), carry)
        carry = jax.tree.map(lambda x: jnp.where(is_leaf[:, None], x, 0), carry)
        computed = dynamic.scan(
            self.cell,
            weights,
            carry,
            script,
            xs,
            bias=bias,
            precision=arguments.as_precision(operation, layer.precision),
            recompute=self.recompute,
            implementation=self.implementation,
            variant=self.variant,
        )
        rows = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), carry, computed)
        states = jax.tree.leaves(rows)[-1]
        return (rows, states) if return_carry else states

    def _pre_activations(
        self, operation: str, name: str, inputs: Any, used: Any, drop: dict[str, Any]
    ) -> Any:
        """What ``dense_i`` makes of inputs, where they are used; None for None."""
        if inputs is None:
            return None
        if self.dense_i is None:
            raise ValueError(f"{operation}: has no in_features, got {name}")
        inputs = arguments.as_array(operation, name, inputs, 2)
        expected = (used.shape[0], self.in_features)
        if inputs.shape != expected:
            raise ValueError(f"{operation}: {name} must be {expected}, got shape {inputs.shape}")
        if self.dropout is not None:
            inputs = self.dropout(inputs, **drop)
        # The weights' gradient is a sum over all, in which 0 times NaN would be NaN.
        made: jax.Array = self.dense_i(jnp.where(used[:, None], inputs, 0))
        expected = (used.shape[0], self.gates * self.hidden_features)
        if made.shape != expected:
            raise ValueError(f"{operation}: dense_i must make {expected}, got shape {made.shape}")
        return made

    def _leaf_carry(self, leaves: int, x: Any, bias: Any, dtype: Any) -> Any:
        """The carries of the leaves: what the cell makes of their inputs, or zeros."""
        h, wide = self.hidden_features, accumulator_dtype(dtype)
        zero = jnp.zeros((leaves, h), wide)
        count = self.carry_structure.num_leaves
        carry = jax.tree.unflatten(self.carry_structure, [zero] * count)
        if x is not None:
            gates = tuple(jnp.split(x.astype(wide), self.gates, -1))
            r = (zero,) * self.products
            if bias is not None:
                # Repeated before it is cut, so that its gradient is one sum.
                rows = jnp.broadcast_to(bias.astype(wide), (leaves, self.products * h))
                r = tuple(jnp.split(rows, self.products, -1))
            kind = KindOfCell(self.cell, self.gates, self.products, bias is not None)
            children = self.cell.children
            checked_step("dynamic.scan", (kind,), children, self.carry_structure, (False,) * count)
            carry = self.cell(gates, r, (carry,) * children)
        *others, state = jax.tree.leaves(carry)
        others = [c.astype(self.param_dtype) for c in others]
        return jax.tree.unflatten(self.carry_structure, [*others, state.astype(dtype)])

    def _check_carry(self, operation: str, carry: Any, leaves: int) -> None:
        """Raises TypeError or ValueError unless a carry is one of so many leaves."""
        if jax.tree.structure(carry) != self.carry_structure:
            raise TypeError(
                f"{operation}: initial_carry must have the structure {self.carry_structure}, got "
                f"{jax.tree.structure(carry)}"
            )
        expected = (leaves, self.hidden_features)
        for x in jax.tree.leaves(carry):
            shape = arguments.as_array(operation, "initial_carry", x, 2).shape
            if shape != expected:
                raise ValueError(
                    f"{operation}: arrays of initial_carry must be {expected}, got shape {shape}"
                )

    def _check_layers(self, operation: str) -> None:
        """Raises TypeError or ValueError unless the scan can stand for ``dense_h``."""
        layer: Any = self.dense_h
        expected = f"{operation}: dense_h must be an nnx.Linear or a SparseLinear"
        check_call(expected, layer, nnx.Linear, SparseLinear)
        sizes = (layer.in_features, layer.out_features)
        if sizes != self._recurrent_features:
            raise ValueError(
                f"{operation}: dense_h must map {self._recurrent_features[0]} to "
                f"{self._recurrent_features[1]} features, got {sizes[0]} to {sizes[1]}"
            )
        check_product(operation, layer)
