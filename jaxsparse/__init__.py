"""Sparse products, sampled products and sparse softmax as JAX primitives, on CPU and CUDA."""

from importlib.metadata import version as _version

from jaxsparse import backend as _backend
from jaxsparse import dynamic, masks, recurrent
from jaxsparse.backend import EXPORT_DISABLED_CHECKS
from jaxsparse.block_mask import BlockMask
from jaxsparse.csr import CSR
from jaxsparse.device import H200, Device
from jaxsparse.differentiate import grad, value_and_grad
from jaxsparse.explain import explain
from jaxsparse.layouts import block_mask as _block_mask  # noqa: F401, registers a kind
from jaxsparse.layouts import register as _register
from jaxsparse.layouts.row_cuts import RowCuts as _RowCuts
from jaxsparse.ops.depthwise_conv import depthwise_conv
from jaxsparse.ops.linear import linear
from jaxsparse.ops.matmul import sddmm, spmm
from jaxsparse.ops.merge_attention import merge_attention
from jaxsparse.ops.reduce_rows import reduce_rows
from jaxsparse.ops.score_functions import Indexed
from jaxsparse.ops.sparse_attention import sparse_attention
from jaxsparse.ops.sparse_softmax import sparse_softmax
from jaxsparse.packed import Packed
from jaxsparse.topology import Topology

__version__ = _version("jaxsparse")

__all__ = [
    "CSR",
    "EXPORT_DISABLED_CHECKS",
    "H200",
    "BlockMask",
    "Device",
    "Indexed",
    "Packed",
    "Topology",
    "depthwise_conv",
    "dynamic",
    "explain",
    "grad",
    "linear",
    "masks",
    "merge_attention",
    "recurrent",
    "reduce_rows",
    "sddmm",
    "sparse_attention",
    "sparse_softmax",
    "spmm",
    "value_and_grad",
]

_backend.register_targets()
_register(_RowCuts)
