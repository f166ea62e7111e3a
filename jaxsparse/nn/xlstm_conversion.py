"""Recurrent layers from the weights of the package xlstm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsparse.nn.recurrent import RNN
from jaxsparse.nn.slstm import SLSTMCell
from jaxsparse.nn.torch_conversion import as_jax
from jaxsparse.ops import arguments

# In the order of our gates, i f z o. The package calls what opens the input gate "fgate", and what
# opens the forget gate "igate".
_GATES = ("fgate.weight", "igate.weight", "zgate.weight", "ogate.weight")
_KERNEL, _BIAS = "slstm_cell._recurrent_kernel_", "slstm_cell._bias_"
_CONVOLUTION = "conv1d.conv.weight"


def from_xlstm(
    state_dict: Mapping[str, Any],
    *,
    prefix: str = "",
    dtype: Any = None,
    **options: Any,
) -> RNN:
    r"""The scan of an sLSTM layer of the package xlstm: its gates and its cell.

    Inputs of a layer without a convolution are its own. One with a convolution takes the gates i
    and f from the convolved features, z and o from those themselves: inputs here are both, side by
    side in each head, 2 D features of D. What comes before (the convolution and its SiLU) and
    after (the norm of each head) is pointwise over time or a layer of Flax; docs/flax.md has it.

    Args:
        state_dict: of an ``sLSTMLayer``, of the backend "vanilla" or "cuda": arrays or tensors.
        prefix: what stands before the layer's names, "xlstm_block_stack.blocks.1.xlstm." for
            instance.
        dtype: of the computation, as in `RecurrentCell`; parameters keep theirs.
        options: those of `RNN`.

    Returns:
        An `RNN` of an `SLSTMCell` with ``heads`` and ``input_heads``.

    Raises:
        TypeError: for arrays that are not of a floating dtype, naming the key.
        ValueError: for keys that are missing and shapes that don't fit, naming the key.

    Source: Beck et al. 2024, "xLSTM: Extended Long Short-Term Memory", and the layout of their
    package.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> shapes = {f"{g}gate.weight": (2, 4, 4) for g in "ifzo"}
    >>> shapes |= {"slstm_cell._recurrent_kernel_": (2, 4, 16), "slstm_cell._bias_": (32,)}
    >>> layer = from_xlstm({k: np.float32(rng.normal(size=s)) for k, s in shapes.items()})
    >>> layer(jnp.ones((3, 5, 8))).shape
    (3, 5, 8)
    """
    parts = {name: _part(state_dict, prefix, name) for name in (*_GATES, _KERNEL, _BIAS)}
    heads, width = parts[_GATES[0]].shape[0], parts[_GATES[0]].shape[-1]
    kernel = parts[_KERNEL]
    shapes = dict.fromkeys(_GATES, (heads, width, width)) | {_BIAS: (4 * heads * width,)}
    for name, shape in shapes.items():
        if parts[name].shape != shape:
            raise ValueError(
                f"from_xlstm: {prefix}{name} must have shape {shape}, got {parts[name].shape}"
            )
    of_backend = {(heads, width, 4 * width): "cuda", (heads, 4 * width, width): "vanilla"}
    if kernel.shape not in of_backend:
        raise ValueError(
            f"from_xlstm: {prefix}{_KERNEL} must have one of the shapes {list(of_backend)}, "
            f"got {kernel.shape}"
        )
    bias = parts[_BIAS]
    if of_backend[kernel.shape] == "vanilla":
        kernel = jnp.swapaxes(kernel, 1, 2)
    else:
        bias = jnp.swapaxes(bias.reshape(heads, 4, width), 0, 1).reshape(-1)
    gates = [jnp.swapaxes(parts[name], 1, 2) for name in _GATES]
    rows = [gates]
    if f"{prefix}{_CONVOLUTION}" in state_dict:
        none = [jnp.zeros_like(gates[0])] * 2
        rows = [gates[:2] + none, none + gates[2:]]
    inputs = jnp.concatenate([jnp.concatenate(row, -1) for row in rows], 1)
    zeros = nnx.initializers.zeros
    cell = SLSTMCell(
        heads * inputs.shape[1],
        heads * width,
        heads=heads,
        input_heads=heads,
        kernel_init=zeros,
        recurrent_kernel_init=zeros,
        bias_init=lambda *_: bias,
        dtype=dtype,
        param_dtype=kernel.dtype,
        rngs=nnx.Rngs(0),
    )
    pairs: list[tuple[Any, jax.Array]] = [(cell.dense_i, inputs), (cell.dense_h, kernel)]
    for layer, blocks in pairs:
        layer.kernel.set_value(blocks if heads > 1 else blocks[0])
    return RNN(cell, **options)


def _part(state_dict: Mapping[str, Any], prefix: str, name: str) -> jax.Array:
    key = f"{prefix}{name}"
    if key not in state_dict:
        raise ValueError(f"from_xlstm: state_dict must have {key}, got {sorted(state_dict)[:8]}")
    array = as_jax(state_dict[key])
    arguments.check_floating("from_xlstm", **{key: array})
    return array
