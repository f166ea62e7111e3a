"""MobileNetV1 with channels first, and the form in which it runs: folded, and sparse if pruned."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxsparse import Topology
from jaxsparse.nn import DepthwiseConv, SparseConv1x1, batch_norm, fold_batch_norm

# The stride and the channels of each separable block, at width 1, after a first layer of 32.
BLOCKS = (
    (1, 64), (2, 128), (1, 128), (2, 256), (1, 256), (2, 512),
    *[(1, 512)] * 5, (2, 1024), (1, 1024),
)  # fmt: skip
POINTWISE = "blocks/*/mix/layer/kernel"  # What is pruned: as in the paper, all else stays dense.
LEAST_SIDE = 2  # Of the last images: small inputs are halved less often than the 224 of the paper.
HE = nnx.initializers.he_normal(in_axis=-1, out_axis=-2)  # Of kernels (outputs, inputs).


def channels_of(width: float, channels: int) -> int:
    """A multiple of 8 near ``width * channels``, and at least 8."""
    return max(8, 8 * round(width * channels / 8))


def strides_of(resolution: int) -> list[int]:
    """The strides of the first layer and of all blocks: the last ones that the inputs allow."""
    strides = [2, *(stride for stride, _ in BLOCKS)]
    halvings = max(0, int(np.log2(resolution / LEAST_SIDE)))
    for at in [i for i, stride in enumerate(strides) if stride == 2][: -halvings or None]:
        strides[at] = 1
    return strides


class FullConv(nnx.Module):
    """A convolution of 3 x 3 over all channels, as one product of windows: for few channels."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, rngs: nnx.Rngs):
        kernel = HE(rngs.params(), (outputs, 9 * inputs))
        self.kernel = nnx.Param(kernel)
        self.bias = nnx.data(None)
        self.activation: str | None = None
        self.stride = stride

    def __call__(self, x: Array) -> Array:
        """Maps (inputs, N, H, W) to (outputs, N, H', W')."""
        sides, s = x.shape[2:], self.stride
        # As "SAME" pads: zeros behind first.
        total = [max((-(-side // s) - 1) * s + 3 - side, 0) for side in sides]
        x = jnp.pad(x, [(0, 0), (0, 0), *((pad // 2, pad - pad // 2) for pad in total)])
        ends = [(-(-side // s) - 1) * s + 1 for side in sides]
        windows = [
            x[:, :, i : i + ends[0] : s, j : j + ends[1] : s] for i in range(3) for j in range(3)
        ]
        return product(self, jnp.concatenate(windows))


class Pointwise(nnx.Module):
    """A convolution of 1 x 1, dense: the twin of `SparseConv1x1`."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        kernel = HE(rngs.params(), (outputs, inputs))
        self.kernel = nnx.Param(kernel)
        self.bias = nnx.data(None)
        self.activation: str | None = None

    def __call__(self, x: Array) -> Array:
        """Maps (inputs, N, H, W) to (outputs, N, H, W)."""
        return product(self, x)


def product(layer: FullConv | Pointwise, x: Array) -> Array:
    """The kernel of a layer, (outputs, inputs), times each pixel of x, (inputs, N, H, W).

    The kernel has its outputs first, as a transposed one is multiplied slowly on a CPU where there
    are few pixels: images of 7 x 7 take three times as long.
    """
    y = layer.kernel[...] @ x.reshape(x.shape[0], -1)
    if layer.bias is not None:
        y = y + layer.bias[...][:, None]
    if layer.activation == "relu":
        y = jax.nn.relu(y)
    return y.reshape(-1, *x.shape[1:])


class Unit(nnx.Module):
    """A layer, batch normalisation and ReLU; the layer alone once they are part of it."""

    def __init__(self, layer: Any, features: int, *, rngs: nnx.Rngs):
        self.layer = layer
        self.norm = nnx.BatchNorm(features, axis=0, momentum=0.9, epsilon=1e-3, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Maps (C, N, H, W) to (features, N, H', W')."""
        y = self.norm(self.layer(x))
        return y if self.layer.activation == "relu" else jax.nn.relu(y)


class Block(nnx.Module):
    """A separable convolution: depthwise, then 1 x 1."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, rngs: nnx.Rngs):
        depthwise = DepthwiseConv(inputs, stride, use_bias=False, rngs=rngs)
        self.space = Unit(depthwise, inputs, rngs=rngs)
        self.mix = Unit(Pointwise(inputs, outputs, rngs=rngs), outputs, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Maps (inputs, N, H, W) to (outputs, N, H', W')."""
        return self.mix(self.space(x))


class MobileNet(nnx.Module):
    """MobileNetV1 of any width: Howard et al. 2017, table 1."""

    def __init__(self, width: float, resolution: int, channels: int, classes: int, *, seed: int):
        rngs = nnx.Rngs(seed)
        first, *strides = strides_of(resolution)
        features = channels_of(width, 32)
        self.first = Unit(FullConv(channels, features, first, rngs=rngs), features, rngs=rngs)
        blocks = []
        for stride, (_, outputs) in zip(strides, BLOCKS, strict=True):
            inputs, features = features, channels_of(width, outputs)
            blocks.append(Block(inputs, features, stride, rngs=rngs))
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(features, classes, rngs=rngs)

    def __call__(self, images: Array) -> Array:
        """Maps images (N, H, W, C) to logits (N, classes)."""
        x = self.first(jnp.moveaxis(images, -1, 0))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)).T)


LAYERS = batch_norm.LAYERS | {
    layer: batch_norm.Scaled("kernel", lambda layer: 0, lambda layer, factors: factors[:, None])
    for layer in (FullConv, Pointwise)
}


def for_inference(model: MobileNet, images: Any, *, sparse: bool) -> MobileNet:
    """The model with batch normalisation and ReLU in its layers.

    Args:
        model: left as it is.
        images: what it will be called with; the shape matters.
        sparse: whether the convolutions of 1 x 1 store the weights alone that are not 0.
    """
    folded = folded_at_once(model, images)
    for _, unit in nnx.iter_modules(folded):
        if isinstance(unit, Unit):
            if sparse and isinstance(unit.layer, Pointwise):
                unit.layer = sparse_twin(unit.layer)
            unit.layer.activation = "relu"
    return folded


def folded_at_once(model: MobileNet, images: Any) -> MobileNet:
    """`fold_batch_norm` as one program: by itself each operation is compiled for each shape."""
    graph, state = nnx.split(model)
    graphs = []

    def fold(state: Any) -> Any:
        folded = fold_batch_norm(nnx.merge(graph, state), images, layers=LAYERS)
        graph_of_folded, result = nnx.split(folded)
        graphs.append(graph_of_folded)
        return result

    result = jax.jit(fold)(state)
    folded: MobileNet = nnx.merge(graphs[0], result)
    return folded


def sparse_twin(layer: Pointwise) -> SparseConv1x1:
    """The layer with its weights that are not 0."""
    kernel, bias = np.asarray(layer.kernel[...]), layer.bias
    return SparseConv1x1(
        *reversed(kernel.shape),
        topology=Topology.from_mask(kernel != 0),
        use_bias=bias is not None,
        kernel_init=lambda *_: kernel.T,
        bias_init=lambda *_: bias[...],
        rngs=nnx.Rngs(0),
    )


def prune_by_magnitude(model: MobileNet, sparsity: float) -> None:
    """Sets the smallest weights of each convolution of 1 x 1 to 0, in place."""
    for block in model.blocks:
        kernel = np.array(block.mix.layer.kernel[...])
        pruned = round(sparsity * kernel.size)
        order = np.argpartition(np.abs(kernel), max(pruned - 1, 0), axis=None)
        kernel.flat[order[:pruned]] = 0
        block.mix.layer.kernel[...] = jnp.asarray(kernel)


def with_dtype(model: MobileNet, dtype: Any) -> MobileNet:
    """A copy of the model with parameters of another dtype."""
    graph, params, others = nnx.split(model, nnx.Param, ...)
    # By NumPy: JAX would compile a conversion for each shape.
    params = jax.tree.map(lambda x: jax.device_put(np.asarray(x).astype(dtype)), params)
    result: MobileNet = nnx.merge(graph, params, others)
    return result


def megabytes(model: MobileNet) -> float:
    """What parameters and patterns take."""
    return sum(x.nbytes for x in jax.tree.leaves(nnx.state(model))) / 1e6
