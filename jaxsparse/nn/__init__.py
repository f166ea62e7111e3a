"""Flax NNX layers with sparse weights, sparse attention and recurrent scans.

Values are `flax.nnx.Param`, patterns are variables of a type of their own, so that gradients,
optimizers and filters see the values alone.
"""

try:
    import flax.nnx as _nnx  # noqa: F401
except ImportError as error:
    raise ImportError("jaxsparse.nn needs Flax: pip install 'jaxsparse[flax]'") from error

from jaxsparse.nn.attention import SparseAttention
from jaxsparse.nn.batch_norm import fold_batch_norm
from jaxsparse.nn.cells import GRUCell, LSTMCell, RecurrentCell, SimpleCell
from jaxsparse.nn.convolution import DepthwiseConv, SparseConv1x1
from jaxsparse.nn.flax_conversion import from_flax, to_flax
from jaxsparse.nn.graph_scan import GraphScan
from jaxsparse.nn.headwise import HeadwiseLinear
from jaxsparse.nn.jax_rnn_conversion import from_jax_rnn, to_jax_rnn
from jaxsparse.nn.linear import SparseLinear
from jaxsparse.nn.multi_head_attention import SparseMultiHeadAttention
from jaxsparse.nn.packed import PackedArray, PackedLinear
from jaxsparse.nn.packing import pack, unpack
from jaxsparse.nn.recurrent import RNN, Bidirectional
from jaxsparse.nn.slstm import SLSTMCell
from jaxsparse.nn.stack import RecurrentStack
from jaxsparse.nn.torch_conversion import from_torch, to_torch
from jaxsparse.nn.tree_lstm import ChildSumTreeLSTM, TreeLSTM
from jaxsparse.nn.variables import TopologyVariable, drop_transposes, verify
from jaxsparse.nn.xlstm_conversion import from_xlstm

__all__ = [
    "RNN",
    "Bidirectional",
    "ChildSumTreeLSTM",
    "DepthwiseConv",
    "GRUCell",
    "GraphScan",
    "HeadwiseLinear",
    "LSTMCell",
    "PackedArray",
    "PackedLinear",
    "RecurrentCell",
    "RecurrentStack",
    "SLSTMCell",
    "SimpleCell",
    "SparseAttention",
    "SparseConv1x1",
    "SparseLinear",
    "SparseMultiHeadAttention",
    "TopologyVariable",
    "TreeLSTM",
    "drop_transposes",
    "fold_batch_norm",
    "from_flax",
    "from_jax_rnn",
    "from_torch",
    "from_xlstm",
    "pack",
    "to_flax",
    "to_jax_rnn",
    "to_torch",
    "unpack",
    "verify",
]
