"""Sparse-dense and sampled dense-dense products: the public functions."""

from __future__ import annotations

from typing import Any

import jax

from jaxsparse import backend
from jaxsparse.csr import CSR, check_csr
from jaxsparse.ops import arguments
from jaxsparse.ops.bilinear import sddmm_p
from jaxsparse.ops.multiply import multiply
from jaxsparse.ops.multiply_packed import multiply_packed
from jaxsparse.packed import Packed
from jaxsparse.primitive import bind
from jaxsparse.topology import Topology


def spmm(
    a: CSR | Packed,
    x: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    implementation: str | None = None,
    variant: str | None = None,
) -> jax.Array:
    r"""Sparse matrix times dense matrix, with bias and activation fused.

    .. math:: y_{ij} = f\Bigl(\sum_{k \in P_i} a_{ik} x_{kj} + b_i\Bigr)

    Only stored entries are read: a NaN or infinity in row k of ``x`` reaches only the rows of the
    result that store a value in column k. The kernels' results repeat bitwise. Sums of 16-bit
    operands are taken in float32, and so are derivatives until they are rounded. Differentiable to
    any order in the values, ``x`` and ``bias``; a differentiated call with an activation also keeps
    its argument, in float32 or float64.

    On a GPU the matrix is written out, and a dense product taken, where that is faster: for many
    columns of ``x`` and matrices that are not very sparse, in 16 bits, and in float32 if
    ``jax.default_matmul_precision`` is set to "tensorfloat32" or less. The matrix takes at most 256
    MiB, and about 12 bytes more for each entry; a kernel does it after all where ``x`` is not
    finite.

    Args:
        a: a matrix (m, k); its values and its pattern may have leading batch dimensions. Or a
            `Packed` one, with x in its dtype (bfloat16 or float16 if that has 8 bits) and a bias
            ``(m,)``.
        x: ``(..., k, n)``, float32, float64, bfloat16 or float16; batch dimensions broadcast.
        bias: ``(m,)`` or ``(..., m)``, added to every column.
        activation: None, "relu" or "gelu" (the tanh form), applied last.
        precision: None or a ``jax.lax.Precision``: float32 products are as exact as float32. With
            None or DEFAULT, and only where ``jax.default_matmul_precision`` was set and allows it,
            a GPU may multiply in TF32.
        preferred_element_type: float32 for 16-bit operands, else their own dtype.
        implementation: None (the platform's own), "cpu", "cuda" or "xla".
        variant: the name of a kernel variant to force, see ``python -m jaxsparse info``.

    Returns:
        ``(..., m, n)``.

    Raises:
        TypeError: for operands that are no arrays or not of these dtypes.
        ValueError: for shapes that don't fit and options that don't exist; at lowering, for an
            implementation or variant that can't be had.

    Method: rows of A by 1-D tiles of the result, after Gale et al. 2020, "Sparse GPU Kernels for
    Deep Learning".

    >>> import jax.numpy as jnp
    >>> a = CSR.fromdense(jnp.array([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]]))
    >>> spmm(a, jnp.ones((3, 2)), bias=jnp.array([0.0, -1.0]), activation="relu")
    Array([[3., 3.],
           [0., 0.]], dtype=float32)
    """
    options: dict[str, Any] = {
        "bias": bias,
        "activation": activation,
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "implementation": implementation,
        "variant": variant,
    }
    if isinstance(a, Packed):
        return multiply_packed("spmm", a, x, x_on_left=False, **options)
    check_csr("spmm", a)
    return multiply("spmm", a, x, transpose=False, dense_on_left=False, **options)


def sddmm(
    x: Any,
    y: Any,
    topology: Topology,
    *,
    scale_by: Any = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    implementation: str | None = None,
    variant: str | None = None,
) -> CSR:
    r"""Sampled dense-dense product: the entries of :math:`x y^T` at the stored positions only.

    .. math:: v_e = s_e \sum_d x_{i_e d}\, y_{j_e d}

    Every entry is one dot product, so a NaN or infinity in a row of ``x`` or ``y`` reaches only the
    entries of that row or column. Padding gets 0. The kernels' results repeat bitwise; sums of
    16-bit operands are taken in float32. On a GPU the dense product is computed, and its entries
    picked, where that is faster: for more than 256 features and patterns that are not very sparse.
    Differentiable to any order in ``x``, ``y`` and ``scale_by``.

    Args:
        x: ``(..., m, d)``, float32, float64, bfloat16 or float16; batch dimensions broadcast.
        y: ``(..., n, d)``.
        topology: stored positions of an (m, n) matrix; may have leading batch dimensions.
        scale_by: values ``(..., nse)`` to multiply with, entry by entry.
        precision: None or a ``jax.lax.Precision``: float32 products are as exact as float32, never
            TF32, whichever it is.
        preferred_element_type: float32 for 16-bit operands, else their own dtype.
        implementation: None (the platform's own), "cpu", "cuda" or "xla".
        variant: the name of a kernel variant to force, see ``python -m jaxsparse info``.

    Returns:
        A CSR matrix of shape (m, n) on ``topology``, with values ``(..., nse)``.

    Raises:
        TypeError: for operands that are no arrays or not of these dtypes.
        ValueError: for shapes that don't fit and options that don't exist; at lowering, for an
            implementation or variant that can't be had.

    Method: as in Gale et al. 2020, "Sparse GPU Kernels for Deep Learning", section VI.

    >>> import jax.numpy as jnp
    >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> sddmm(x, x, Topology([0, 1, 2], [1, 0], (2, 2))).values
    Array([11., 11.], dtype=float32)
    """
    operation = "sddmm"
    if not isinstance(topology, Topology):
        raise TypeError(f"sddmm: topology must be a Topology, got {type(topology).__name__}")
    x, y = (arguments.as_array(operation, n, v, 2) for n, v in (("x", x), ("y", y)))
    arguments.as_precision(operation, precision)
    backend.check_implementation(operation, implementation)
    m, n = topology.shape
    if x.shape[-2] != m or y.shape[-2] != n or x.shape[-1] != y.shape[-1]:
        raise ValueError(
            f"sddmm: x and y must have shapes (..., {m}, d) and (..., {n}, d) for a topology of "
            f"shape {topology.shape}, got {x.shape} and {y.shape}"
        )
    dense = {"x": x, "y": y}
    if scale_by is not None:
        scale_by = dense["scale_by"] = arguments.as_array(operation, "scale_by", scale_by, 1)
        arguments.check_values(operation, "scale_by", scale_by, topology)
    dtype = arguments.check_floating(operation, **dense)
    ranks = (2, 2) if scale_by is None else (2, 2, 1)
    (x, y, *rest), pattern = arguments.align(dense.values(), ranks, dtype, topology)
    values = bind(
        sddmm_p,
        x,
        y,
        *pattern,
        *rest,
        scaled=scale_by is not None,
        columns=arguments.columns_alone(topology),
        out_dtype=arguments.result_dtype(operation, dtype, preferred_element_type),
        implementation=implementation,
        variant=variant,
    )[0]
    return CSR(values, topology)
