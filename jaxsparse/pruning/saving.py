"""A model with sparse layers in a folder, and back, in another process too."""

from __future__ import annotations

import functools
import math
import operator
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from flax import nnx

from jaxsparse.nn import (
    PackedLinear,
    SparseConv1x1,
    SparseLinear,
    TopologyVariable,
    drop_transposes,
)
from jaxsparse.nn.linear import LINEAR_OPTIONS
from jaxsparse.nn.pattern_array import to_array, to_topology
from jaxsparse.packed import Packed
from jaxsparse.pattern import COMPACT_COLUMNS
from jaxsparse.pruning.layers import SparseLinearGeneral
from jaxsparse.pruning.measure import paths_of
from jaxsparse.pruning.sparsify import with_layers
from jaxsparse.pruning.targets import join
from jaxsparse.topology import Topology

M = TypeVar("M", bound=nnx.Module)

_VERSION = 1
_TRACE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
)


def save(path: str | os.PathLike[str], model: nnx.Module) -> None:
    """Saves a model in a new folder: its state, and which of its layers are sparse.

    Of a sparse matrix the folder holds the values, the row offsets and the column indices, in 16
    bits where they fit; `load` derives the rest. Packed weights are saved as they are. Layouts for
    recurrent scans are left out. Orbax writes the arrays, and the names of the sparse layers as
    JSON.

    Args:
        path: of a folder that does not exist.
        model: with any layers, sparse or not. It is left as it is.

    Raises:
        ValueError: if there is something at ``path``, or a pattern or packed weights are corrupted.

    >>> import tempfile
    >>> dense = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    >>> sparse = SparseLinear.from_dense(dense, sparsity=0.9)
    >>> folder = tempfile.mkdtemp() + "/model"
    >>> save(folder, sparse)
    >>> restored = load(folder, lambda: nnx.Linear(64, 32, rngs=nnx.Rngs(0)))
    >>> bool((restored(jnp.ones((8, 64))) == sparse(jnp.ones((8, 64)))).all())
    True
    """
    folder = Path(path).resolve()
    if folder.exists():
        raise ValueError(f"save: path must be that of a new folder, got {folder}, which exists")
    layers = {
        join(place): _described(layer)
        for place, layer in nnx.iter_modules(model)
        if isinstance(layer, SparseLinear | SparseLinearGeneral | PackedLinear)
    }
    for place, layer in nnx.iter_modules(model):
        if isinstance(layer, PackedLinear):
            try:
                layer.weight.verify()
            except ValueError as error:
                raise ValueError(f"save: at {join(place)}: {error}") from error
    variables = {join(place): x for place, x in nnx.to_flat_state(nnx.state(model))}
    keys = {n: str(jax.random.key_impl(x[...])) for n, x in variables.items() if _is_key(x)}
    arrays = {name: _saved(variable) for name, variable in variables.items()}
    with _checkpointer() as checkpointer:
        checkpointer.save(
            folder,
            ocp.args.Composite(
                arrays=ocp.args.PyTreeSave(arrays),
                model=ocp.args.JsonSave({"version": _VERSION, "sparse": layers, "keys": keys}),
            ),
        )


def load(
    path: str | os.PathLike[str], make_model: Callable[[], M], *, inference: bool = False
) -> M:
    """Makes the model that `save` put in a folder.

    Args:
        path: the folder.
        make_model: makes the dense model, or one that is sparse in places already, of the layers
            and sizes that the saved one had before `sparsify`. Its own parameters don't matter; it
            is traced, not run, if that can be.
        inference: leaves out what only gradients need, see `jaxsparse.nn.drop_transposes`. What a
            large sparse layer holds is then 11 bytes an entry instead of 21, values included.

    Returns:
        The model, with a layer at each place as it was saved. Its arrays are on the default device.

    Raises:
        ValueError: if there is no such model at ``path``, or ``make_model`` makes another one,
            naming the first layer or array that differs, and if a pattern or packed weights are
            corrupted.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp() + "/model"
    >>> save(folder, SparseLinear(64, 32, sparsity=0.9, rngs=nnx.Rngs(0)))
    >>> layer = load(folder, lambda: nnx.Linear(64, 32, rngs=nnx.Rngs(0)), inference=True)
    >>> layer.values.shape
    (192,)
    """
    folder = Path(path).resolve()
    arrays, layers, keys = _read(folder)
    try:
        model = nnx.eval_shape(make_model)
    except _TRACE_ERRORS:
        model = make_model()
    model = _with_sparse_layers(model, layers, arrays)
    graphdef, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    _check_names({join(place) for place in flat}, set(arrays))
    restored = {}
    for place, variable in flat.items():
        name = join(place)
        restored[place] = _restored(name, variable, arrays[name], keys.get(name))
    result: M = nnx.merge(graphdef, nnx.from_flat_state(restored))
    _check_values(result)
    if inference:
        drop_transposes(result)
    return result


def _checkpointer() -> Any:
    items = {"arrays": ocp.PyTreeCheckpointHandler(), "model": ocp.JsonCheckpointHandler()}
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler(**items))


# ---- Arrays ----


def _saved(variable: Any) -> Any:
    """What a file holds of a variable."""
    value = variable.get_value()
    if isinstance(variable, TopologyVariable):
        topology = to_topology(value)  # raises if it is corrupted
        columns = np.asarray(topology.column_indices)
        fits = topology.shape[1] <= COMPACT_COLUMNS
        return {
            "row_offsets": np.asarray(topology.row_offsets),
            "column_indices": columns.astype(np.uint16) if fits else columns,
            "column_count": np.int32(topology.shape[1]),
        }
    return np.asarray(jax.random.key_data(value) if _is_key(variable) else value)


def _is_key(variable: Any) -> bool:
    dtype = getattr(variable.get_raw_value(), "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _topology(name: str, saved: Any) -> Topology:
    try:
        offsets, columns = saved["row_offsets"], saved["column_indices"]
        return Topology(offsets, columns, (offsets.shape[-1] - 1, int(saved["column_count"])))
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise ValueError(f"load: at {name}: expected a pattern, got {error}") from error


def _restored(name: str, variable: Any, array: Any, key_type: str | None) -> Any:
    """A variable like one of a model, abstract or not, with what a file holds of it."""
    if isinstance(variable, TopologyVariable):
        topology = _topology(name, array)
        try:
            return variable.replace(to_array(topology))
        except ValueError as error:
            raise ValueError(f"load: at {name}: {error}") from error
    array = jnp.asarray(array)
    if key_type is not None:
        array = jax.random.wrap_key_data(array, impl=key_type)
    value = variable.get_raw_value()
    is_sparse = name.rpartition("/")[2] == "values" and array.ndim == len(value.shape)
    if array.dtype != value.dtype or (array.shape != value.shape and not is_sparse):
        raise ValueError(
            f"load: at {name}: make_model must make {array.dtype} {array.shape}, as was saved, "
            f"got {value.dtype} {value.shape}"
        )
    return variable.replace(array)


def _check_names(made: set[str], saved: set[str]) -> None:
    if made != saved:
        lacking, unknown = sorted(saved - made), sorted(made - saved)
        raise ValueError(
            "load: make_model must make the arrays that were saved, got a model without "
            f"{', '.join(lacking) or 'none'} of them, and with {', '.join(unknown) or 'no'} others"
        )


def _check_values(model: nnx.Module) -> None:
    """Patterns say how many values there are: those of a model made anew may be others."""
    for place, layer in nnx.iter_modules(model):
        if isinstance(layer, SparseLinear):
            nse = layer.topology.get_raw_value().nse
            if layer.values[...].shape[-1] != nse:
                raise ValueError(
                    f"load: at {join(place)}: the pattern has {nse} entries, but there are values "
                    f"of shape {layer.values[...].shape}"
                )


def _read(
    folder: Path,
) -> tuple[dict[str, Any], Mapping[str, Mapping[str, Any]], Mapping[str, str]]:
    """The arrays, what each sparse layer is, and the type of each random key, by name."""
    try:
        with _checkpointer() as checkpointer:
            saved = checkpointer.restore(
                folder,
                ocp.args.Composite(model=ocp.args.JsonRestore()),
            ).model
            version, layers, keys = (saved[name] for name in ("version", "sparse", "keys"))
            names = checkpointer.metadata(folder).item_metadata.arrays.tree
            # As arrays of the host: the devices that they were saved from may not be here.
            on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), names)
            arrays = checkpointer.restore(
                folder,
                ocp.args.Composite(arrays=ocp.args.PyTreeRestore(restore_args=on_host)),
            ).arrays
    except (FileNotFoundError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"load: path must be a folder that save made, got {folder}: {error}"
        ) from error
    if version != _VERSION:
        raise ValueError(
            f"load: a model of version {_VERSION} of this format is expected, got version "
            f"{version}: it was saved by another version of jaxsparse"
        )
    return arrays, layers, keys


# ---- Layers ----


def _described(layer: Any) -> dict[str, Any]:
    """What is saved of a sparse layer beside its arrays."""
    linear = _linear_of(layer)
    described = {"type": type(layer).__name__, "activation": linear.activation}
    if isinstance(linear, PackedLinear) and linear.scales is not None:
        described["dtype"] = str(linear.dtype)  # which values of 8 bits don't tell
    if isinstance(layer, SparseConv1x1):
        described["channel_axis"] = layer.channel_axis
    return described


def _linear_of(layer: Any) -> Any:
    """What holds the matrix of a layer."""
    return layer.linear if isinstance(layer, SparseLinearGeneral) else layer


def _with_sparse_layers(
    model: M, layers: Mapping[str, Mapping[str, Any]], arrays: Mapping[str, Any]
) -> M:
    names = {join(place): module for place, module in paths_of(model).items()}
    replacements: dict[str, nnx.Module] = {}
    for name, saved in layers.items():
        parent = name.rpartition("/")[0]
        if name and parent in layers and not isinstance(names.get(parent), SparseLinearGeneral):
            continue  # the matrix of a SparseLinearGeneral, which is made with it
        layer = names.get(name)
        if isinstance(layer, SparseLinear | SparseLinearGeneral) and saved["type"] != _PACKED:
            continue
        of_type = _SPARSE.get(saved["type"], {})
        make = of_type.get(type(layer))
        if make is None:
            expected = dict.fromkeys([*(cls.__name__ for cls in of_type), saved["type"]])
            raise ValueError(
                f"load: make_model must make a {' or '.join(expected)} at "
                f"{name or 'the top'}, got {'nothing' if layer is None else type(layer).__name__}"
            )
        replacements[name] = make(layer, name, saved, arrays)
    return with_layers(model, names, replacements)


def _sizes_of(layer: Any) -> tuple[int, int]:
    """All inputs and all outputs of a linear layer, of one dimension or several."""
    sizes = [math.prod(np.atleast_1d(x)) for x in (layer.in_features, layer.out_features)]
    return operator.index(sizes[0]), operator.index(sizes[1])


def _sparse_linear(
    layer: Any,
    name: str,
    saved: Mapping[str, Any],
    arrays: Mapping[str, Any],
    make: Callable[..., SparseLinear] = SparseLinear,
) -> SparseLinear:
    in_features, out_features = _sizes_of(layer)
    place = f"{name}/topology".lstrip("/")
    topology = _topology(place, arrays.get(place))
    options = {option: getattr(layer, option) for option in LINEAR_OPTIONS}
    return nnx.eval_shape(
        lambda: make(
            in_features,
            out_features,
            topology=topology,
            activation=saved["activation"],
            **options,
            rngs=nnx.Rngs(0),
        )
    )


def _sparse_conv(
    layer: Any, name: str, saved: Mapping[str, Any], arrays: Mapping[str, Any]
) -> SparseLinear:
    make = functools.partial(SparseConv1x1, channel_axis=saved["channel_axis"])
    sparse = _sparse_linear(layer, name, saved, arrays, make)
    assert isinstance(sparse, SparseConv1x1)
    sparse.kernel_size = layer.kernel_size
    return sparse


def _sparse_linear_general(
    layer: Any, name: str, saved: Mapping[str, Any], arrays: Mapping[str, Any]
) -> SparseLinearGeneral:
    place = f"{name}/linear".lstrip("/")
    make = _packed_linear if f"{place}/masks" in arrays else _sparse_linear
    linear = make(layer, place, saved, arrays)
    return SparseLinearGeneral(linear, layer.in_features, layer.out_features, axis=layer.axis)


def _packed_linear(
    layer: Any, name: str, saved: Mapping[str, Any], arrays: Mapping[str, Any]
) -> PackedLinear:
    keys = (*Packed.ARRAYS, "scales", "bias", "sources", "topology")
    at = {key: f"{name}/{key}".lstrip("/") for key in keys}
    found = {key: arrays.get(place) for key, place in at.items()}
    if found["topology"] is not None:
        found["topology"] = _topology(at["topology"], found["topology"])
    wanted = layer.preferred_element_type
    if wanted is None and not isinstance(layer, PackedLinear):
        wanted = layer.dtype  # as PackedLinear.from_sparse
    try:
        weight = Packed.from_arrays(found, _sizes_of(layer)[::-1])
    except (TypeError, ValueError) as error:
        raise ValueError(f"load: at {name or 'the top'}: {error}") from error
    return PackedLinear(
        weight,
        bias=found["bias"],
        activation=saved["activation"],
        preferred_element_type=wanted,
        dtype=saved.get("dtype"),
    )


_PACKED = PackedLinear.__name__

# From the type that was saved to the types that may be in its place, and what makes it of one.
_SPARSE: Mapping[str, Mapping[Any, Callable[..., nnx.Module]]] = {
    "SparseLinear": {nnx.Linear: _sparse_linear},
    "SparseLinearGeneral": {nnx.LinearGeneral: _sparse_linear_general},
    "SparseConv1x1": {nnx.Conv: _sparse_conv},
    _PACKED: dict.fromkeys((nnx.Linear, SparseLinear, PackedLinear), _packed_linear),
}
