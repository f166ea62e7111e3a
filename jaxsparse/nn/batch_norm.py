"""Batch normalisation that becomes part of the layers in front of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxsparse.nn.calls import calls_through
from jaxsparse.nn.convolution import DepthwiseConv, SparseConv1x1
from jaxsparse.nn.linear import SparseLinear

M = TypeVar("M", bound=nnx.Module)

_PLACE = "fold_batch_norm_place"  # the attribute by which a module knows its place in the model


@dataclass(frozen=True)
class Scaled:
    """How the outputs of a layer are scaled.

    Args:
        weights: the name of the variable that holds its weights.
        channel_axis: layer -> the dimension of its results that its channels are.
        factors: (layer, a factor for each output) -> a factor for each weight.
    """

    weights: str
    channel_axis: Callable[[Any], int]
    factors: Callable[[Any, jax.Array], jax.Array]


def _of_entries(layer: SparseLinear, factors: jax.Array) -> jax.Array:
    """Those of a matrix's stored entries, by their rows."""
    return factors.at[layer.pattern.row_indices].get(mode="fill", fill_value=1)


_LAST = Scaled("kernel", lambda layer: -1, lambda layer, factors: factors)

# Layers that batch normalisation can become part of.
LAYERS: Mapping[type[nnx.Module], Scaled] = MappingProxyType(
    {
        nnx.Conv: _LAST,
        nnx.Linear: _LAST,
        DepthwiseConv: Scaled(
            "kernel",
            lambda layer: layer.channel_axis,
            lambda layer, factors: factors[:, None, None],
        ),
        SparseConv1x1: Scaled("values", lambda layer: layer.channel_axis, _of_entries),
        SparseLinear: Scaled("values", lambda layer: -1, _of_entries),
    }
)


class Identity(nnx.Module):
    """Stands where a layer was that is part of another one now: returns what it is called with."""

    def __call__(self, x: jax.Array, *args: Any, **options: Any) -> jax.Array:
        """Returns x; what else a layer would be called with makes no difference."""
        return x


def fold_batch_norm(
    model: M,
    example_inputs: Any,
    *,
    call: Callable[..., Any] | None = None,
    layers: Mapping[type[nnx.Module], Scaled] = LAYERS,
) -> M:
    r"""Makes batch normalisation part of the layers in front of it, for inference.

    With the running mean :math:`\mu` and variance :math:`\sigma^2`, what follows a layer is

    .. math:: \gamma\,\frac{(W x + b) - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta
              = (s W)\,x + s\,(b - \mu) + \beta, \qquad s = \gamma / \sqrt{\sigma^2 + \epsilon}

    so the weights are scaled by output, the stored values of a sparse matrix by row, and the layer
    gets a bias. Results are those of ``model.eval()``, up to rounding. The layers are `nnx.Conv`,
    `nnx.Linear`, `DepthwiseConv`, `SparseConv1x1` and `SparseLinear`.

    Which `nnx.BatchNorm` follows which layer is found by tracing a call of the model. It stays
    where it is if it can't be folded: if anything else uses the layer's result, an activation is in
    between or fused with the layer, it normalises another dimension than the layer's channels or
    returns another dtype, either is called elsewhere without the other or shares its parameters, or
    the call asks for the statistics of the batch.

    Args:
        model: left as it is.
        example_inputs: a tuple of positional arguments, or the only one; only their shapes and
            dtypes matter.
        call: ``(model, *example_inputs)`` runs the model, by default ``model(*example_inputs)``.
        layers: the types of layers, and how their outputs are scaled: those above by default. Those
            of a type of one's own have a ``bias``, an `nnx.Param` or None.

    Returns:
        A new model. Where a BatchNorm was there is a module that returns its input.

    Raises:
        TypeError: if ``model`` is no Flax NNX module.

    Source: Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference", section 3.2.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> rngs = nnx.Rngs(0)
    >>> model = nnx.Sequential(nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.BatchNorm(8, rngs=rngs))
    >>> folded = fold_batch_norm(model, jnp.ones((1, 6, 6, 3)))
    >>> [type(layer).__name__ for layer in folded.layers]
    ['Conv', 'Identity']
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"fold_batch_norm: model must be a Flax NNX module, got {type(model).__name__}"
        )
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    folded: M = nnx.clone(model)
    modules = [module for _, module in nnx.iter_modules(folded)]
    for place, module in enumerate(modules):
        setattr(module, _PLACE, place)
    pairs = _pairs(folded, modules, inputs, call, layers)
    for norm, layer in pairs.items():
        _fold(modules[layer], modules[norm], layers)

    def replaced(_: Any, node: Any) -> Any:
        return Identity() if getattr(node, _PLACE, None) in pairs else node

    result: M = nnx.recursive_map(replaced, folded)
    for _, module in nnx.iter_modules(result):
        if hasattr(module, _PLACE):
            delattr(module, _PLACE)
    return result


def _fold(layer: Any, norm: Any, layers: Mapping[type[nnx.Module], Scaled]) -> None:
    """Changes a layer's weights and bias in place."""
    scaled = layers[type(layer)]
    weights = getattr(layer, scaled.weights)
    factors = jax.lax.rsqrt(norm.var[...] + norm.epsilon)
    if norm.scale is not None:
        factors = factors * norm.scale[...]
    before = 0.0 if layer.bias is None else layer.bias[...]
    bias = (before - norm.mean[...]) * factors
    if norm.bias is not None:
        bias = bias + norm.bias[...]
    old = weights[...]
    weights[...] = (old * scaled.factors(layer, factors)).astype(old.dtype)
    if layer.bias is None:
        layer.bias = nnx.Param(bias.astype(old.dtype))
        layer.use_bias = True
    else:
        layer.bias[...] = bias.astype(layer.bias[...].dtype)


# ---- Which follows which ----

_LAYER, _NORM = "jaxsparse layer ", "jaxsparse norm "  # what marks of results and inputs begin with
# They replace the kernels of what they hold, whatever these are, whenever they are called.
_NORMALISERS = (nnx.WeightNorm, nnx.SpectralNorm)


def _pairs(
    model: nnx.Module,
    modules: list[nnx.Module],
    inputs: tuple[Any, ...],
    call: Any,
    layers: Mapping[type[nnx.Module], Scaled],
) -> dict[int, int]:
    """From each BatchNorm that can be folded to the layer in front of it, by their places."""
    foldable = {*layers, nnx.BatchNorm}
    excluded = _excluded(modules)
    axes: dict[int, set[int]] = {}  # the dimension of channels, by place, in each call

    def marking(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def marked(self: Any, x: jax.Array, *args: Any, **options: Any) -> Any:
            place = getattr(self, _PLACE, None)
            if place is None or type(self) not in foldable:
                return original(self, x, *args, **options)
            if type(self) is not nnx.BatchNorm:
                out = original(self, x, *args, **options)
                axes.setdefault(place, set()).add(layers[type(self)].channel_axis(self) % out.ndim)
                return checkpoint_name(out, f"{_LAYER}{place}")
            out = original(self, checkpoint_name(x, f"{_NORM}{place}"), *args, **options)
            of_batch = options.get("use_running_average", args[0] if args else None) is False
            if of_batch or out.dtype != x.dtype or not isinstance(self.axis, int):
                excluded.add(place)
            else:
                axes.setdefault(place, set()).add(self.axis % x.ndim)
            return out

        return marked

    leaves, treedef = jax.tree.flatten(inputs)
    arrays = {i: x for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")}

    def run(arrays: dict[int, Any]) -> list[jax.Array]:
        copy = nnx.clone(model)  # whose variables are of this trace
        copy.eval()
        args = jax.tree.unflatten(treedef, [arrays.get(i, x) for i, x in enumerate(leaves)])
        result = copy(*args) if call is None else call(copy, *args)
        return [x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)]

    with calls_through(foldable, marking):
        jaxpr = jax.make_jaxpr(run)(arrays).jaxpr
    after, before = _neighbours(jaxpr)
    pairs = {}
    for norm, sources in before.items():
        layer = next(iter(sources))
        if layer is None or sources != {layer} or after[layer] != {norm}:
            continue
        if not {norm, layer} & excluded and axes[norm] == axes[layer]:
            pairs[norm] = layer
    return pairs


def _excluded(modules: list[nnx.Module]) -> set[int]:
    """The places of modules that can't be changed, or whose result is not linear."""
    owners: dict[int, list[int]] = {}
    excluded = set()
    for place, module in enumerate(modules):
        for variable in vars(module).values():
            if isinstance(variable, nnx.Variable):
                owners.setdefault(id(variable), []).append(place)
        stacked = isinstance(module, nnx.BatchNorm) and module.mean[...].ndim != 1
        if stacked or getattr(module, "activation", None) is not None:
            excluded.add(place)
    excluded.update(place for places in owners.values() if len(places) > 1 for place in places)
    normalised = {
        id(part)
        for module in modules
        if isinstance(module, _NORMALISERS)
        for _, part in nnx.iter_modules(module)
    }
    excluded.update(place for place, x in enumerate(modules) if id(x) in normalised)
    return excluded


Neighbours = dict[int, set[int | None]]


def _neighbours(jaxpr: Jaxpr) -> tuple[Neighbours, Neighbours]:
    """Which norms follow each layer, and which layers each norm; None is anything else."""
    after: Neighbours = {}
    before: Neighbours = {}
    for program in _programs(jaxpr):
        made_by: dict[Any, int] = {}  # the layer's place, by the result
        for equation in program.eqns:
            if (place := _place(equation, _LAYER)) is not None:
                made_by[equation.outvars[0]] = place
                after.setdefault(place, set())
        for equation in program.eqns:
            norm = _place(equation, _NORM)
            for x in equation.invars:
                layer = None if isinstance(x, Literal) else made_by.get(x)
                if layer is not None:
                    after[layer].add(norm)
                if norm is not None:
                    before.setdefault(norm, set()).add(layer)
        for x in program.outvars:
            if not isinstance(x, Literal) and x in made_by:
                after[made_by[x]].add(None)
    return after, before


def _place(equation: Any, mark: str) -> int | None:
    """The place that a mark of this kind has, or None for any other equation."""
    name = equation.params.get("name", "") if equation.primitive.name == "name" else ""
    return int(name.removeprefix(mark)) if name.startswith(mark) else None


def _programs(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    """A program and all within it: of loops, branches and compiled functions."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for leaf in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: isinstance(x, Jaxpr | ClosedJaxpr)
        ):
            if isinstance(leaf, ClosedJaxpr):
                leaf = leaf.jaxpr
            if isinstance(leaf, Jaxpr):
                yield from _programs(leaf)
