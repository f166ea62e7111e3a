"""Flax NNX layers with sparse weights and sparse attention.

Values are `flax.nnx.Param`, patterns are variables of a type of their own, so that gradients,
optimizers and filters see the values alone.
"""

try:
    import flax.nnx as _nnx  # noqa: F401
except ImportError as error:
    raise ImportError("jaxsparse.nn needs Flax: pip install 'jaxsparse[flax]'") from error

from jaxsparse.nn.attention import SparseAttention, SparseMultiHeadAttention
from jaxsparse.nn.linear import SparseLinear
from jaxsparse.nn.variables import TopologyVariable, verify

__all__ = [
    "SparseAttention",
    "SparseLinear",
    "SparseMultiHeadAttention",
    "TopologyVariable",
    "verify",
]
