"""Recurrent layers from the weights of PyTorch's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxsparse.nn.cells import GRUCell, LSTMCell, RecurrentCell, SimpleCell
from jaxsparse.nn.recurrent import RNN, Bidirectional
from jaxsparse.ops import arguments

_CELLS: dict[int, Any] = {1: SimpleCell, 3: GRUCell, 4: LSTMCell}  # by the number of gates
_NONLINEARITIES = {"tanh": nnx.tanh, "relu": nnx.relu}
_KEY = re.compile(r"(weight|bias)_(ih|hh)_l(\d+)(_reverse)?")
_PROJECTION = re.compile(r"weight_hr_l\d+(_reverse)?")


def from_torch(
    state_dict: Mapping[str, Any],
    *,
    prefix: str = "",
    nonlinearity: str = "tanh",
    dtype: Any = None,
    time_major: bool = False,
    return_carry: bool = False,
    **options: Any,
) -> list[RNN | Bidirectional]:
    r"""Layers that compute what a torch.nn.RNN, GRU or LSTM of these weights computes.

    Each layer becomes an `RNN`, or a `Bidirectional` if it has weights of both directions;
    `RecurrentStack` makes one module of them. Which kind it is follows from the shapes. The order
    of the gates is PyTorch's (i f g o; r z n), so weights are transposed and nothing else:
    ``weight_ih`` and ``bias_ih`` become ``dense_i``, ``weight_hh`` and ``bias_hh`` ``dense_h``.
    The GRU's :math:`b_{hn}` stands inside of the reset gate there as here.

    PyTorch runs (T, B, features) unless ``batch_first``, which is ``time_major`` here; its carry of
    an LSTM is (h, c), here it is (c, h). Dropout between layers is not part of the weights.

    Args:
        state_dict: ``{"weight_ih_l0": ..., "bias_hh_l1_reverse": ...}``: arrays or tensors.
        prefix: what stands before these names, "encoder.rnn." for instance; other keys are left
            out.
        nonlinearity: of a torch.nn.RNN: "tanh" or "relu".
        dtype: of the computation, as in `RecurrentCell`; parameters keep theirs.
        time_major: time is the first dimension, not the last but one; of a `RecurrentStack` of the
            layers, too.
        return_carry: calls return (carry, outputs); those of a stack, too.
        options: of the scans: ``recompute``, ``implementation``, ``variant``.

    Returns:
        The layers, the one next to the inputs first.

    Raises:
        TypeError: for arrays that are not of a floating dtype, naming the key.
        ValueError: for ``weight_hr``, the projection of ``proj_size``, which is not supported; for
            keys that are missing or unknown, and shapes that don't fit, naming the key; and for
            another ``nonlinearity``.

    >>> rng = np.random.default_rng(0)
    >>> shapes = {"weight_ih_l0": (15, 3), "weight_hh_l0": (15, 5), "bias_ih_l0": (15,)}
    >>> shapes["bias_hh_l0"] = (15,)
    >>> (layer,) = from_torch({k: np.float32(rng.normal(size=s)) for k, s in shapes.items()})
    >>> type(layer.cell).__name__, layer(jnp.ones((2, 7, 3))).shape
    ('GRUCell', (2, 7, 5))
    """
    if nonlinearity not in _NONLINEARITIES:
        raise ValueError(
            f"from_torch: nonlinearity must be one of {list(_NONLINEARITIES)}, got {nonlinearity!r}"
        )
    parts = _parts(state_dict, prefix)
    depth = 1 + max(layer for layer, _ in parts)
    sides = sorted({reverse for _, reverse in parts})
    layers: list[RNN | Bidirectional] = []
    features = None  # those of the inputs are the first layer's own
    for i in range(depth):
        rnns = []
        for reverse in sides:
            name = f"{prefix}{{}}_l{i}{'_reverse' if reverse else ''}"
            cell = _cell(name, parts.get((i, reverse), {}), features, nonlinearity, dtype)
            rnns.append(RNN(cell, time_major=time_major, return_carry=return_carry, **options))
        features = sum(rnn.cell.hidden_features for rnn in rnns)
        if len(rnns) == 1:
            layers.append(rnns[0])
        else:
            layers.append(Bidirectional(*rnns, time_major=time_major, return_carry=return_carry))
    return layers


def _parts(
    state_dict: Mapping[str, Any], prefix: str
) -> dict[tuple[int, bool], dict[str, jax.Array]]:
    """The arrays of each layer and direction, by kind: "weight_ih" and so on."""
    parts: dict[tuple[int, bool], dict[str, jax.Array]] = {}
    for key, array in state_dict.items():
        if not key.startswith(prefix):
            continue
        name = key.removeprefix(prefix)
        if _PROJECTION.fullmatch(name):
            raise ValueError(f"from_torch: {key}: an LSTM with proj_size is not supported")
        match = _KEY.fullmatch(name)
        if match is None:
            raise ValueError(
                f"from_torch: {key}: after the prefix {prefix!r}, keys must be like weight_ih_l0 "
                "or bias_hh_l0_reverse"
            )
        kind, side, layer, reverse = match.groups()
        array = as_jax(array)
        arguments.check_floating("from_torch", **{key: array})
        parts.setdefault((int(layer), reverse is not None), {})[f"{kind}_{side}"] = array
    if not any(layer == 0 and not reverse for layer, reverse in parts):
        raise ValueError(
            f"from_torch: state_dict must have {prefix}weight_ih_l0, got the keys "
            f"{sorted(state_dict)[:8]}"
        )
    return parts


def as_jax(x: Any) -> jax.Array:
    """Of a tensor, too, without importing torch."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        if str(x.dtype) == "torch.bfloat16":  # which NumPy does not have
            return jnp.asarray(x.float().numpy(), jnp.bfloat16)
    return jnp.array(np.asarray(x))  # a copy: the other's may be trained on


def _cell(
    name: str,
    parts: dict[str, jax.Array],
    features: int | None,
    nonlinearity: str,
    dtype: Any,
) -> RecurrentCell:
    """A cell of the arrays of one layer and direction, and of so many features if known."""
    for kind in ("weight_ih", "weight_hh"):
        if kind not in parts or parts[kind].ndim != 2:
            got = parts[kind].shape if kind in parts else "none"
            raise ValueError(f"from_torch: {name.format(kind)} must be a matrix, got {got}")
    rows, h = parts["weight_hh"].shape
    features = parts["weight_ih"].shape[1] if features is None else features
    if h == 0 or rows % h or rows // h not in _CELLS:
        raise ValueError(
            f"from_torch: {name.format('weight_hh')} must have shape (gates * h, h) of "
            f"{', '.join(map(str, _CELLS))} gates, got {(rows, h)}"
        )
    expected = {"weight_ih": (rows, features), "bias_ih": (rows,), "bias_hh": (rows,)}
    for kind, shape in expected.items():
        if kind in parts and parts[kind].shape != shape:
            raise ValueError(
                f"from_torch: {name.format(kind)} must have shape {shape}, got {parts[kind].shape}"
            )
    if ("bias_ih" in parts) != ("bias_hh" in parts):
        raise ValueError(
            f"from_torch: {name.format('bias_ih')} and {name.format('bias_hh')} come together, "
            "got one of them"
        )
    cls = _CELLS[rows // h]
    activation = {"activation_fn": _NONLINEARITIES[nonlinearity]} if cls is SimpleCell else {}
    param_dtype = parts["weight_hh"].dtype
    zeros = nnx.initializers.zeros
    biased = "bias_ih" in parts
    cell = cls(
        features,
        h,
        use_bias=biased,
        use_recurrent_bias=biased,
        kernel_init=zeros,
        recurrent_kernel_init=zeros,
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=nnx.Rngs(0),
        **activation,
    )
    for layer, side in ((cell.dense_i, "ih"), (cell.dense_h, "hh")):
        layer.kernel.set_value(parts[f"weight_{side}"].T)
        if biased:
            layer.bias.set_value(parts[f"bias_{side}"])
    converted: RecurrentCell = cell
    return converted
