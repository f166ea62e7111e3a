"""Flax NNX layers with sparse weights, sparse attention and recurrent scans.

Values are `flax.nnx.Param`, patterns are variables of a type of their own, so that gradients,
optimizers and filters see the values alone.
"""

try:
    import flax.nnx as _nnx  # noqa: F401
except ImportError as error:
    raise ImportError("jaxsparse.nn needs Flax: pip install 'jaxsparse[flax]'") from error

from jaxsparse.nn.attention import SparseAttention
from jaxsparse.nn.cells import GRUCell, LSTMCell, RecurrentCell, SimpleCell
from jaxsparse.nn.flax_conversion import from_flax, to_flax
from jaxsparse.nn.headwise import HeadwiseLinear
from jaxsparse.nn.linear import SparseLinear
from jaxsparse.nn.multi_head_attention import SparseMultiHeadAttention
from jaxsparse.nn.packing import pack, unpack
from jaxsparse.nn.recurrent import RNN, Bidirectional
from jaxsparse.nn.stack import RecurrentStack
from jaxsparse.nn.torch_conversion import from_torch
from jaxsparse.nn.variables import TopologyVariable, drop_transposes, verify

__all__ = [
    "RNN",
    "Bidirectional",
    "GRUCell",
    "HeadwiseLinear",
    "LSTMCell",
    "RecurrentCell",
    "RecurrentStack",
    "SimpleCell",
    "SparseAttention",
    "SparseLinear",
    "SparseMultiHeadAttention",
    "TopologyVariable",
    "drop_transposes",
    "from_flax",
    "from_torch",
    "pack",
    "to_flax",
    "unpack",
    "verify",
]
