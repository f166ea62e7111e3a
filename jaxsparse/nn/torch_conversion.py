"""Recurrent layers from the weights of PyTorch's, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.nn.gate_matrices import (
    NONLINEARITIES,
    Layer,
    Matrices,
    layers_of,
    matrices_of,
    name_of,
)
from jaxsparse.ops import arguments

_KEY = re.compile(r"(weight|bias)_(ih|hh)_l(\d+)(_reverse)?")
_PROJECTION = re.compile(r"weight_hr_l\d+(_reverse)?")
_MODULES = ("RNN", "GRU", "LSTM")  # of torch.nn


def from_torch(
    module: Any,
    *,
    prefix: str = "",
    nonlinearity: str | None = None,
    dropout: float | None = None,
    time_major: bool | None = None,
    return_carry: bool = False,
    dtype: Any = None,
    rngs: Any = None,
    **options: Any,
) -> Layer:
    r"""The layer that computes what a torch.nn.RNN, GRU or LSTM computes.

    One layer becomes an `RNN`, or a `Bidirectional` if it has weights of both directions; several
    become a `RecurrentStack` of these. Which kind of cell it is follows from the shapes. The order
    of the gates is PyTorch's (i f g o; r z n), so weights are transposed and nothing else:
    ``weight_ih`` and ``bias_ih`` become ``dense_i``, ``weight_hh`` and ``bias_hh`` ``dense_h``.
    The GRU's :math:`b_{hn}` stands inside of the reset gate there as here.

    PyTorch's carry of an LSTM is (h, c), here it is (c, h); PyTorch stacks those of all layers and
    directions, here each layer has its own.

    Args:
        module: the module, whose options are taken over, too; or its ``state_dict``, or a model's,
            ``{"weight_ih_l0": ..., "bias_hh_l1_reverse": ...}``, of arrays or tensors. Parameters
            are copied.
        prefix: what stands before these names, "encoder.rnn." for instance; other keys are left
            out.
        nonlinearity: of a torch.nn.RNN: "tanh" or "relu"; by default the module's, or "tanh".
        dropout: the rate between layers; by default the module's, or 0. A module in evaluation mode
            gives a layer in evaluation mode.
        time_major: time is the first dimension, not the last but one; by default what the module's
            ``batch_first`` says, or False.
        return_carry: calls return (carry, outputs).
        dtype: of the computation, as in `RecurrentCell`; parameters keep theirs.
        rngs: random keys for dropout, as in `RecurrentStack`.
        options: of the scans: ``recompute``, ``implementation``, ``variant``.

    Raises:
        TypeError: for other modules, subclasses included (their ``state_dict`` can be taken), and
            for arrays that are not of a floating dtype, naming the key.
        ValueError: for ``weight_hr``, the projection of ``proj_size``, which is not supported; for
            keys that are missing or unknown, and shapes that don't fit, naming the key; and for
            another ``nonlinearity``.

    >>> rng = np.random.default_rng(0)
    >>> shapes = {"weight_ih_l0": (15, 3), "weight_hh_l0": (15, 5), "bias_ih_l0": (15,)}
    >>> shapes["bias_hh_l0"] = (15,)
    >>> layer = from_torch({k: np.float32(rng.normal(size=s)) for k, s in shapes.items()})
    >>> type(layer.cell).__name__, layer(jnp.ones((2, 7, 3))).shape
    ('GRUCell', (2, 7, 5))
    """
    of_module: dict[str, Any] = {}
    if not isinstance(module, Mapping):
        of_module = _module_options(module)
        module = module.state_dict()
    given = {"nonlinearity": nonlinearity, "dropout": dropout, "time_major": time_major}
    chosen: dict[str, Any] = (
        _DEFAULTS | of_module | {k: v for k, v in given.items() if v is not None}
    )
    if chosen["nonlinearity"] not in NONLINEARITIES:
        raise ValueError(
            f"from_torch: nonlinearity must be one of {list(NONLINEARITIES)}, got "
            f"{chosen['nonlinearity']!r}"
        )
    training = chosen.pop("training")
    layer: Any = layers_of(
        "from_torch",
        _matrices(module, prefix),
        prefix=prefix,
        return_carry=return_carry,
        dtype=dtype,
        rngs=rngs,
        options=options,
        **chosen,
    )
    if not training:
        layer.eval()
    converted: Layer = layer
    return converted


_DEFAULTS = {"nonlinearity": "tanh", "dropout": 0.0, "time_major": False, "training": True}


def to_torch(layer: Any, *, prefix: str = "") -> dict[str, jax.Array]:
    """The ``state_dict`` of the torch.nn.RNN, GRU or LSTM that computes what a layer computes.

    Parameters are copied, sparse weights as dense matrices. PyTorch has all biases or none: if
    there is one, those that are missing are zeros. What the module is made with is not among the
    weights: its sizes, ``bias``, ``nonlinearity``, ``batch_first``, ``bidirectional``, ``dropout``.

    Args:
        layer: an `RNN` or `Bidirectional` of `SimpleCell` (tanh or relu), `GRUCell` or `LSTMCell`,
            or a `RecurrentStack` of such layers.
        prefix: put before each name.

    Returns:
        ``{"weight_ih_l0": ...}`` in PyTorch's order. ``torch.from_dlpack`` makes tensors of the
        arrays, of every dtype: ``{k: torch.from_dlpack(v) for k, v in to_torch(layer).items()}``.

    Raises:
        TypeError: for other layers and cells, subclasses included.
        ValueError: for what PyTorch has not, naming it: norms and skips, layers that differ in
            their class, cell or number of units, a layer reversed alone, outputs merged other than
            side by side, other gate and activation functions, ``residual``; and for layers of a
            cell that are more than a product and a bias.

    >>> from flax import nnx
    >>> from jaxsparse.nn import RNN, LSTMCell
    >>> layer = RNN(LSTMCell(3, 5, recurrent_sparsity=0.5, rngs=nnx.Rngs(0)))
    >>> {name: array.shape for name, array in to_torch(layer).items()}
    {'weight_ih_l0': (20, 3), 'weight_hh_l0': (20, 5), 'bias_ih_l0': (20,), 'bias_hh_l0': (20,)}
    """
    return {
        prefix + name_of(kind, *key): matrices[kind]
        for key, matrices in matrices_of("to_torch", layer).items()
        for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        if kind in matrices
    }


def _module_options(module: Any) -> dict[str, Any]:
    """What a module says of itself, without importing torch."""
    cls = type(module)
    if cls.__module__ != "torch.nn.modules.rnn" or cls.__name__ not in _MODULES:
        raise TypeError(
            "from_torch: takes a torch.nn.RNN, GRU or LSTM, or a state_dict, got "
            f"{cls.__module__}.{cls.__name__}"
        )
    return {
        "nonlinearity": "relu" if module.mode == "RNN_RELU" else "tanh",
        "dropout": module.dropout,
        "time_major": not module.batch_first,
        "training": module.training,
    }


def _matrices(state_dict: Mapping[str, Any], prefix: str) -> dict[tuple[int, bool], Matrices]:
    """The arrays of each layer and direction by kind."""
    matrices: dict[tuple[int, bool], Matrices] = {}
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
        matrices.setdefault((int(layer), reverse is not None), {})[f"{kind}_{side}"] = array
    if not any(layer == 0 and not backward for layer, backward in matrices):
        raise ValueError(
            f"from_torch: state_dict must have {prefix}weight_ih_l0, got the keys "
            f"{sorted(state_dict)[:8]}"
        )
    return matrices


def as_jax(x: Any) -> jax.Array:
    """Of a tensor, too, without importing torch."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        if str(x.dtype) == "torch.bfloat16":  # which NumPy does not have
            return jnp.asarray(x.float().numpy(), jnp.bfloat16)
    return jnp.array(np.asarray(x))  # a copy: the other's may be trained on
