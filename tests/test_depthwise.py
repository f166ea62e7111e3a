"""depthwise_conv: every variant against float64, derivatives, limits, errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import DTYPES, PLATFORM, assert_close, cases
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.test_util import check_grads

import jaxsparse
from jaxsparse import depthwise_conv, explain
from jaxsparse.ops.depthwise import depthwise_input_p, depthwise_kernel_p
from jaxsparse.ops.depthwise_conv import _window
from jaxsparse.ops.plain_depthwise import plain_microseconds
from jaxsparse.primitive import bind


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def reference(x, kernel, stride, padding, channel_axis):
    """XLA's convolution, in float64."""
    x = x.swapaxes(0, 1) if channel_axis == 0 else x
    strides = stride if isinstance(stride, tuple) else (stride, stride)
    y = jax.lax.conv_general_dilated(
        x, kernel[:, None], strides, padding, feature_group_count=len(kernel)
    )
    return y.swapaxes(0, 1) if channel_axis == 0 else y


@functools.partial(jax.jit, static_argnames=("options",))
def convolutions(x, kernel, bias, cotangent, options):
    """All three primitives, and the epilogue, of every implementation and variant."""
    stride, padding, channel_axis = options
    out = {}
    for implementation, variant in cases("depthwise"):
        by = {"implementation": implementation, "variant": variant}
        form = {"stride": stride, "padding": padding, "channel_axis": channel_axis}
        plain = depthwise_conv(x, kernel, **form, **by)
        fused = depthwise_conv(x, kernel, bias=bias, activation="relu", **form, **by)
        window = _window(x.shape[2:], kernel.shape[1:], stride, padding)
        by |= {"window": window, "channel_axis": channel_axis, "out_dtype": x.dtype}
        if variant == "depthwise_staged" and stride == 2:
            by["variant"] = "depthwise_planes"  # the other one has no such transpose
        (of_x,) = bind(depthwise_input_p, cotangent, kernel, **by)
        by["variant"] = variant and cases("depthwise_kernel")[1][1]
        (of_kernel,) = bind(depthwise_kernel_p, x, cotangent, **by)
        out[f"{implementation} {variant}"] = plain, fused, of_x, of_kernel
    return out


# (planes, height, width), stride, padding: odd and tiny images, rows longer than any vector.
IMAGES = [
    ((3, 2), (1, 1), 1, "SAME"),
    ((2, 3), (1, 1), 2, "SAME"),
    ((5, 2), (7, 7), 1, "SAME"),
    ((4, 1), (7, 7), 2, "SAME"),
    ((2, 2), (6, 38), 1, "VALID"),
    ((2, 2), (8, 40), 2, "SAME"),
    ((1, 3), (9, 21), 2, ((2, 0), (2, 1))),
    ((3, 1), (4, 17), 1, ((0, 2), (2, 2))),
    ((2, 1), (5, 5), 2, "VALID"),
    ((2, 0), (5, 5), 1, "SAME"),
    ((2, 1), (2, 2), 1, "VALID"),
]
# What has no kernel: other sizes and strides.
OTHERS = [((2, 2), (5, 6), (1, 2), "SAME", (3, 3)), ((2, 2), (6, 5), 3, "SAME_LOWER", (2, 5))]


@pytest.mark.parametrize("channel_axis", [0, 1])
@pytest.mark.parametrize("case", range(len(IMAGES) + len(OTHERS)))
def test_against_float64(case, channel_axis):
    (channels, images), size, stride, padding, taps = [*((*i, (3, 3)) for i in IMAGES), *OTHERS][
        case
    ]
    name = list(DTYPES)[(case + channel_axis) % 4] if case not in (0, 2, 5) else "float32"
    with jax.enable_x64(True):
        planes = (channels, images) if channel_axis == 0 else (images, channels)
        dtype = DTYPES[name]
        x, kernel = jnp.asarray(normal(0, *planes, *size), dtype), normal(1, channels, *taps)
        kernel, bias = jnp.asarray(kernel, dtype), jnp.asarray(normal(2, channels), dtype)
        wide = [np.asarray(z, np.float64) for z in (x, kernel)]
        convolve = functools.partial(
            reference, stride=stride, padding=padding, channel_axis=channel_axis
        )

        @jax.jit
        def expected(x, kernel, bias, cotangent):
            y, pullback = jax.vjp(convolve, x, kernel)
            fused = jax.nn.relu(y + jnp.expand_dims(bias, tuple(range(1, 4 - channel_axis))))
            return y, fused, *pullback(cotangent)

        shape = jax.eval_shape(convolve, *wide).shape
        ct = jnp.asarray(normal(3, *shape), dtype)
        rest = [np.asarray(z, np.float64) for z in (bias, ct)]
        wanted = expected(*wide, *rest)
        most = expected(*(np.abs(z) for z in (*wide, *rest)))
        results = convolutions(x, kernel, bias, ct, (stride, padding, channel_axis))
    for got in results.values():
        for a, b, magnitude in zip(got, wanted, most, strict=True):
            assert a.dtype == dtype
            assert_close(a, b, dtype, magnitude)


@pytest.mark.parametrize("stride", [1, 2])
def test_derivatives(stride):
    """Of float64, in jnp: the rules that bind kernels, too, which are tested one by one above."""
    form = {"stride": stride, "channel_axis": stride - 1}

    def plain(x, kernel):
        return depthwise_conv(x, kernel, **form)

    def fused(x, kernel, bias):
        return depthwise_conv(x, kernel, bias=bias, activation="gelu", **form)

    with jax.enable_x64(True):
        operands = [jnp.asarray(normal(0, 2, 2, 3, 4)), jnp.asarray(normal(1, 2, 3, 3))]
        check_grads(jax.jit(plain), operands, 3, modes=("rev",), eps=1e-4)
        operands.append(jnp.asarray(normal(2, 2)))
        check_grads(jax.jit(fused), operands, 2, modes=("fwd", "rev"), eps=1e-4)


def test_batches_and_layouts():
    """Kernels of a batch, or one for all, whose gradient is a sum; either order of planes."""
    x, kernels, ct = (
        jnp.asarray(normal(i, *shape), jnp.float32)
        for i, shape in enumerate([(3, 4, 2, 6, 5), (3, 4, 3, 3), (3, 4, 2, 3, 3)])
    )
    convolve = functools.partial(depthwise_conv, stride=2, implementation=PLATFORM)

    @jax.jit
    def mapped(x, kernels, ct):
        own, pullback = jax.vjp(jax.vmap(convolve), x, kernels)
        shared, pullback_of_one = jax.vjp(jax.vmap(convolve, (0, None)), x, kernels[0])
        other = jax.vmap(functools.partial(convolve, channel_axis=1))(x.swapaxes(1, 2), kernels)
        return own, other.swapaxes(1, 2), *pullback(ct), shared, pullback_of_one(ct)[1]

    @jax.jit
    def one_by_one(x, kernels, ct):
        pairs = [jax.vjp(convolve, *z) for z in zip(x, kernels, strict=True)]
        own = jnp.stack([y for y, _ in pairs])
        gradients = [p(c) for (_, p), c in zip(pairs, ct, strict=True)]
        pairs = [jax.vjp(convolve, z, kernels[0]) for z in x]
        of_one = sum(p(c)[1] for (_, p), c in zip(pairs, ct, strict=True))
        stacked = (jnp.stack(z) for z in zip(*gradients, strict=True))
        return own, own, *stacked, jnp.stack([y for y, _ in pairs]), of_one

    for a, b in zip(mapped(x, kernels, ct), one_by_one(x, kernels, ct), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@functools.partial(jax.jit, static_argnames="implementation")
def result_and_gradients(x, kernel, ct, implementation):
    convolve = functools.partial(
        depthwise_conv, padding="VALID", stride=2, implementation=implementation
    )
    y, pullback = jax.vjp(convolve, x, kernel)
    return y, *pullback(ct)


@pytest.mark.parametrize("implementation", ["xla", PLATFORM])
def test_nan_stays_and_results_repeat(implementation):
    """NaN of one plane stays there; what no window reads reaches nothing."""
    x, kernel, ct = normal(0, 3, 40, 8, 36), normal(1, 3, 3, 3), normal(2, 3, 40, 3, 17)
    x, kernel, ct = (jnp.asarray(z, jnp.float32) for z in (x, kernel, ct))
    compute = functools.partial(result_and_gradients, implementation=implementation)
    first = compute(x, kernel, ct)
    for _ in range(3):
        for a, b in zip(first, compute(x, kernel, ct), strict=True):
            assert a.tobytes() == b.tobytes()
    unread = x.at[:, :, -1].set(jnp.nan).at[..., -1].set(jnp.inf)
    for a, b in zip(first, compute(unread, kernel, ct), strict=True):
        assert a.tobytes() == b.tobytes()
    y, _, of_kernel = compute(x.at[1, 7, 2, 3].set(jnp.nan), kernel, ct)
    spoilt = np.isnan(y)
    assert spoilt[1, 7, :2, :2].sum() == 2  # the windows from rows 0 and 2 on, of column 2
    assert spoilt.sum() == 2
    assert np.isnan(of_kernel[1]).any()
    assert not np.isnan(of_kernel[::2]).any()


@pytest.mark.parametrize("cut", ["channels", "images", "images_by_hand"])
def test_sharded_operands_stay_sharded(cut):
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    spec = PartitionSpec("d") if cut == "channels" else PartitionSpec(None, "d")
    of_kernel = PartitionSpec("d") if cut == "channels" else PartitionSpec()
    x, kernel = (jnp.asarray(z, jnp.float32) for z in (normal(0, 4, 2, 5, 6), normal(1, 4, 3, 3)))
    bias = jnp.asarray(normal(2, 4), jnp.float32)

    def loss(x, kernel, bias):
        options = {"activation": "relu", "implementation": PLATFORM}
        return jnp.sum(depthwise_conv(x, kernel, bias=bias, **options) ** 2)

    expected = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, kernel, bias)
    if cut == "images_by_hand":
        by_parts = jax.shard_map(
            lambda *z: jax.lax.psum(loss(*z), "d"),
            mesh=mesh,
            in_specs=(spec, of_kernel, of_kernel),
            out_specs=PartitionSpec(),
        )
        got = jax.jit(jax.value_and_grad(by_parts, (0, 1, 2)))(x, kernel, bias)
    else:
        placed = [
            jax.device_put(z, NamedSharding(mesh, s))
            for z, s in ((x, spec), (kernel, of_kernel), (bias, of_kernel))
        ]
        program = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
        got = program(*placed)
        assert "all-gather" not in program.lower(*placed).compile().as_text()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_explained():
    x, kernel = jnp.ones((32, 8, 112, 112)), jnp.ones((32, 3, 3))
    gradient = jax.grad(lambda x, k: depthwise_conv(x, k, stride=2).sum(), (0, 1))
    calls = explain(gradient, x, kernel, device=jaxsparse.H200)
    assert {call.variant for call in calls} == {"depthwise_planes", "depthwise_sums"}
    behind = ((0, 1), (0, 4))
    (other,) = explain(lambda x, k: depthwise_conv(x, k, padding=behind), x[..., :1], kernel)
    assert "windows begin behind an image" in other.otherwise
    (other,) = explain(lambda x, k: depthwise_conv(x, k, stride=3), x, kernel)
    assert "kernels have strides 1 and 2" in other.otherwise
    assert "kernels of 3 x 3, stride 3" in str(other)


# Layers of MobileNetV1, (channels, size, stride, images): microseconds of the kernel that reads
# rows from memory and of the plain form, forward with bias and ReLU, float32; of one image on an
# H100, of 256 on an H200.
MEASURED = {
    (32, 112, 1, 1): (3.26, 2.66),
    (64, 112, 2, 1): (2.94, 2.27),
    (128, 56, 1, 1): (3.26, 2.75),
    (128, 56, 2, 1): (2.66, 1.76),
    (256, 28, 1, 1): (2.56, 2.14),
    (256, 28, 2, 1): (2.37, 1.5),
    (32, 112, 1, 256): (210, 377),
    (64, 112, 2, 256): (233, 419),
    (128, 56, 1, 256): (210, 374),
    (128, 56, 2, 256): (120, 217),
    (256, 28, 1, 256): (111, 184),
    (256, 28, 2, 256): (68.8, 91.9),
    (512, 14, 1, 256): (114, 126),
    (512, 14, 2, 256): (63.9, 40.6),
}


def chosen(layer, images=1, dtype="float32", batch=(), epilogue=True, **options):
    """What `explain` says of the forward operation of a layer on an H200."""
    channels, size, stride = layer

    def convolve(x, kernel, bias):
        more = {"bias": bias, "activation": "relu"} if epilogue else {}
        return depthwise_conv(x, kernel, stride=stride, **more, **options)

    for _ in batch:
        convolve = jax.vmap(convolve, (0, None, None))
    shapes = ((*batch, channels, images, size, size), (channels, 3, 3), (channels,))
    operands = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    (call,) = explain(convolve, *operands, device=jaxsparse.H200)
    return call


# In bfloat16, on an H200: of the faster kernel and of the plain form, and which is chosen.
MEASURED_IN_16_BITS = {
    (32, 112, 1): ("depthwise_planes", 130, 284),
    (128, 56, 1): ("depthwise_planes", 133, 284),
    (128, 56, 2): ("depthwise_planes", 78, 130),
    (256, 28, 1): ("depthwise_planes", 95.7, 143),
    (256, 28, 2): ("depthwise_staged", 52.4, 64),
    (512, 14, 1): ("depthwise_staged", 68.8, 129),
    (512, 14, 2): ("depthwise_staged", 38.8, 29.5),
    (1024, 7, 1): ("depthwise_staged", 38.6, 65),
}


@pytest.mark.parametrize("layer", MEASURED_IN_16_BITS)
def test_the_faster_form_is_chosen_in_16_bits(layer):
    variant, kernel, plain = MEASURED_IN_16_BITS[layer]
    call = chosen(layer, 256, "bfloat16")
    if plain < kernel:
        assert call.otherwise.endswith("in XLA, because that is taken to be faster")
    else:
        assert call.variant == variant
    forced = chosen(layer, 256, "bfloat16", variant=variant)
    assert abs(dict(forced.variants)[variant] / kernel - 1) < 0.17


@pytest.mark.parametrize("measured", MEASURED)
def test_the_faster_form_is_chosen(measured):
    kernel, plain = MEASURED[measured]
    *layer, images = measured
    channels, size, stride = layer
    x = jax.ShapeDtypeStruct((channels, images, size, size), jnp.float32)
    y = jax.ShapeDtypeStruct((channels, images, size // stride, size // stride), jnp.float32)
    assert 0.75 < plain_microseconds(x, y) / plain < 1.15
    call = chosen(layer, images)
    if plain < kernel:
        assert call.otherwise.endswith("in XLA, because that is taken to be faster")
        assert chosen(layer, images, epilogue=False).otherwise == call.otherwise
    else:
        of_small = size % 4 != 0
        assert call.variant == ("depthwise_staged" if of_small else "depthwise_planes")
    forced = chosen(layer, images, variant="depthwise_planes")
    assert abs(dict(forced.variants)["depthwise_planes"] / kernel - 1) < 0.12


def test_what_keeps_the_kernel():
    """What was asked for; a batch counts as a whole."""
    layer = 256, 28, 2
    changes = ({"implementation": "cuda"}, {"batch": (64,)})
    assert {chosen(layer, **change).variant for change in changes} == {"depthwise_planes"}
    assert not chosen(layer, batch=(2,)).variants


def test_kernels_of_small_planes():
    """Where rows begin anywhere, there are enough planes for a GPU, and they fit."""
    options = {"implementation": "cuda"}
    for dtype in "float32", "bfloat16":
        for layer in (512, 14, 1), (512, 14, 2), (1024, 7, 1):
            assert chosen(layer, 256, dtype, **options).variant == "depthwise_staged"
        for layer, images in ((512, 14, 1), 1), ((8, 63, 1), 256), ((512, 28, 1), 256):
            assert chosen(layer, images, dtype, **options).variant == "depthwise_planes"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": np.ones((2, 4, 4))}, ValueError, "x must have at least 4 dimensions"),
        ({"x": np.ones((3, 1, 4, 4))}, ValueError, r"shapes \(c, n, h, w\) and \(c, kh, kw\)"),
        ({"x": "image"}, TypeError, "x must be an array, got str"),
        ({"kernel": np.ones((2, 3, 3), int), "x": np.ones((2, 1, 4, 4), int)}, TypeError, "needs"),
        ({"kernel": np.ones((2, 0, 3))}, ValueError, "a kernel must have elements"),
        ({"bias": np.ones(3)}, ValueError, r"bias must have shape \(2,\), one for each channel"),
        ({"activation": "swish"}, ValueError, "activation must be one of"),
        ({"stride": 0}, ValueError, "stride must be >= 1, got 0"),
        ({"stride": 1.5}, TypeError, "stride must be an integer, got 1.5"),
        ({"channel_axis": 3}, ValueError, "channel_axis must be 0 or 1, got 3"),
        ({"padding": "FULL"}, ValueError, "padding must be 'SAME', 'SAME_LOWER', 'VALID' or"),
        ({"padding": (1, 1)}, ValueError, "padding must be"),
        ({"padding": ((1, -1), (0, 0))}, ValueError, "padding must be >= 0, got -1"),
        ({"implementation": "tpu"}, ValueError, "implementation"),
        ({"variant": "nope"}, ValueError, "no variant 'nope'"),
    ],
)
def test_errors(change, error, message):
    arguments = {"x": np.ones((2, 1, 4, 4)), "kernel": np.ones((2, 3, 3)), **change}
    with pytest.raises(error, match=f"depthwise_conv: .*{message}"):
        depthwise_conv(**arguments)
