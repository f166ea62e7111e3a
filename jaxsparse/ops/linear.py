"""A linear layer's product, with a sparse weight matrix on the right of dense activations."""

from __future__ import annotations

import math
from typing import Any

import jax

from jaxsparse.csr import CSR, check_csr
from jaxsparse.ops import arguments
from jaxsparse.ops.multiply import multiply
from jaxsparse.ops.multiply_packed import multiply_packed
from jaxsparse.packed import Packed


def linear(
    x: Any,
    a: CSR | Packed,
    *,
    bias: Any = None,
    activation: str | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    implementation: str | None = None,
    variant: str | None = None,
) -> jax.Array:
    r"""Activations times a transposed sparse matrix, with bias and activation fused.

    .. math:: y_{ni} = f\Bigl(\sum_{j \in P_i} x_{nj}\, a_{ij} + b_i\Bigr)

    This is ``spmm`` for activations whose features come last. On a CPU neither ``x`` nor the result
    nor ``a`` is transposed in memory, and neither is the gradient of ``x``; a GPU's kernels get
    ``x`` transposed, and so their result is. The gradient of the values sums over the leading
    dimensions, for which their transposes are made. Sharding of the first leading dimension is
    kept, forward and backward; others are gathered under automatic axes, and refused by JAX under
    explicit ones. Otherwise as ``spmm``.

    Args:
        x: ``(..., k)``, float32, float64, bfloat16 or float16.
        a: one matrix (m, k): a row for each feature of the result. `jax.vmap` serves batches. Or a
            `Packed` one, with x in its dtype, or in bfloat16 or float16 if that has 8 bits.
        bias: ``(m,)``.
        activation: None, "relu" or "gelu" (the tanh form), applied last.
        precision: None or a ``jax.lax.Precision``: float32 products are as exact as float32, unless
            ``jax.default_matmul_precision`` is set, as in `spmm`.
        preferred_element_type: float32 for 16-bit operands, else their own dtype.
        implementation: None (the platform's own), "cpu", "cuda" or "xla".
        variant: the name of a kernel variant to force, see ``python -m jaxsparse info``.

    Returns:
        ``(..., m)``.

    Raises:
        TypeError: for operands that are no arrays or not of these dtypes.
        ValueError: for shapes that don't fit, a batch of matrices and options that don't exist; at
            lowering, for an implementation or variant that can't be had.

    >>> import jax.numpy as jnp
    >>> a = CSR.fromdense(jnp.array([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]]))
    >>> linear(jnp.array([1.0, 10.0, 100.0]), a, bias=jnp.array([0.0, 1.0]))
    Array([201.,   1.], dtype=float32)
    """
    operation = "linear"
    x = arguments.as_array(operation, "x", x, 1)
    options: dict[str, Any] = {
        "bias": bias,
        "activation": activation,
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "implementation": implementation,
        "variant": variant,
    }
    leading, features = x.shape[:-1], x.shape[-1]
    if isinstance(a, Packed):
        flat = x.reshape(math.prod(leading), features)
        out = multiply_packed(operation, a, flat, x_on_left=True, **options)
        return out.reshape(*leading, a.shape[0])
    check_csr(operation, a)
    if a.values.ndim > 1 or a.topology.batch_shape:
        raise ValueError(
            f"{operation}: a must be one matrix, got values of shape {a.values.shape} on patterns "
            f"of batch {a.topology.batch_shape}"
        )
    # One product for all leading dimensions: as batch dimensions they would each give the values a
    # gradient of their own, to be summed afterwards.
    out = multiply(
        operation,
        a,
        x.reshape(math.prod(leading), features),
        transpose=False,
        dense_on_left=True,
        **options,
    )
    return out.reshape(*leading, a.shape[0])
