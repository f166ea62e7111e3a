"""The primitives behind depthwise convolutions.

A convolution y = F(x, k) is linear in the images x and in the kernels k. It and its two transposes
are one another's transposes, so derivatives of every order come from these three alone:

- ``depthwise``: y = F(x, k). Transposed: x of (y, k), k of (x, y).
- ``depthwise_input``: x of (y, k). Transposed: y = F(x, k), k of (x, y).
- ``depthwise_kernel``: k of (x, y). Transposed: x of (y, k), y = F(x, k).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive

from jaxsparse.device import AnyDevice
from jaxsparse.ops.epilogue import define_epilogue_jvp
from jaxsparse.ops.plain_depthwise import (
    depthwise_input_plain,
    depthwise_kernel_plain,
    depthwise_plain,
    plain_microseconds,
)
from jaxsparse.precision import common_dtype, cotangent_params
from jaxsparse.primitive import (
    OPERATIONS,
    Fallback,
    FfiCall,
    Operation,
    Signature,
    bind,
    define_multilinear_jvp,
    define_transpose,
    gathered,
    make_primitive,
    typed_call,
    undefined,
    variants_of,
)

_PLAIN = "a shifted multiply-add for each number of a kernel, in XLA"
_KERNEL = (3, 3)  # what the kernels are for
_STRIDES = ((1, 1), (2, 2))


# Of a GPU's kernels, which count units of four numbers in 32 bits.
_TOO_LARGE = Fallback("kernels take fewer images than that at once")

_PLAIN_IS_FASTER = Fallback("that is taken to be faster")


def _images(params: dict[str, Any], size: tuple[int, int]) -> str:
    leading = "c n" if params["channel_axis"] == 0 else "n c"
    return f"{leading} {size[0]} {size[1]}"


def _x(params: dict[str, Any]) -> str:
    return _images(params, params["window"].image)


def _y(params: dict[str, Any]) -> str:
    return _images(params, params["window"].out)


def _k(params: dict[str, Any]) -> str:
    rows, columns = params["window"].kernel
    return f"c {rows} {columns}"


def _out_dtypes(avals: Any, params: dict[str, Any]) -> list[Any]:
    return [params["out_dtype"]] * (2 if params.get("with_preactivation") else 1)


def _cast(params: dict[str, Any], avals: Sequence[ShapedArray]) -> tuple[dict[str, Any], list[Any]]:
    """The wider dtype where operands differ, as a float32 cotangent does beside 16 bits."""
    dtypes = [a.dtype for a in avals]
    if dtypes[0] != dtypes[1]:
        dtypes[:2] = [common_dtype(*dtypes[:2])] * 2
        params = {**params, "out_dtype": dtypes[0]}
    return params, dtypes


def _without_kernel(params: dict[str, Any], avals: Sequence[ShapedArray]) -> str:
    """Why no kernel takes a call; empty if one does."""
    window = params["window"]
    if window.kernel != _KERNEL:
        return f"kernels are for 3 x 3 numbers, not {window.kernel[0]} x {window.kernel[1]}"
    if window.stride not in _STRIDES:
        return f"kernels have strides 1 and 2, not {window.stride}"
    if any(before > 2 for before in window.before):
        return "kernels take at most 2 rows and columns of zeros in front of an image"
    places = zip(window.spans(), window.image, window.before, strict=True)
    if any(span > size + before for span, size, before in places):
        return "windows begin behind an image"
    if avals[0].dtype.itemsize > 4:
        return "there are no kernels for float64"
    return ""


def _ffi(
    params: dict[str, Any],
    avals: Sequence[ShapedArray],
    device: AnyDevice,
    *,
    operands: tuple[str, ...],
    workspace: int | None = 0,
) -> FfiCall | Fallback:
    reason = _without_kernel(params, avals)
    if reason:
        return Fallback(reason)
    window = params["window"]
    attributes = {
        "channel_axis": params["channel_axis"],
        "stride": window.stride[0],
        "above": window.before[0],
        "left": window.before[1],
        "activation": params.get("activation") or "none",
    }
    bias = ("bias",) if params.get("has_bias") else ()
    return FfiCall((*operands, *bias), attributes, workspace=workspace, fallback=_TOO_LARGE)


def _forward_ffi(
    params: dict[str, Any], avals: Sequence[ShapedArray], device: AnyDevice
) -> FfiCall | Fallback:
    made = _ffi(params, avals, device, operands=("x", "kernel"))
    free = params["implementation"] is None and params["variant"] is None
    if device.platform != "cuda" or not free or isinstance(made, Fallback):
        return made
    return _PLAIN_IS_FASTER if _plain_pays(params, avals, made, device) else made


def _plain_pays(
    params: dict[str, Any], avals: Sequence[ShapedArray], made: FfiCall, device: AnyDevice
) -> bool:
    """Whether XLA is taken to be faster than the kernel: in float32, of which this was measured."""
    primitive = depthwise_epilogue_p if "activation" in params else depthwise_p
    call = typed_call(OPERATIONS[primitive], params, avals)
    x, y = call.operands[0], call.results[0]
    if x.dtype != jnp.float32 or not all(isinstance(n, int) for n in (*x.shape, *y.shape)):
        return False
    plain = plain_microseconds(x, y)
    return any(plain < kernel for _, kernel in variants_of(call, made, device)[:1])


def _stored(params: dict[str, Any], operands: dict[str, Any]) -> tuple[str, tuple[int, int]]:
    window = params["window"]
    rows, columns = window.kernel
    return f"kernels of {rows} x {columns}, stride {window.stride[0]}", window.kernel


_PARAMS = ("window", "channel_axis", "out_dtype")


def _made(name: str, *more: str, **declared: Any) -> Primitive:
    return make_primitive(
        Operation(
            name=name,
            params=(*_PARAMS, *more),
            result_dtypes=_out_dtypes,
            cast=_cast,
            plain=_PLAIN,
            stored=_stored,
            called="depthwise_conv",
            **declared,
        )
    )


# ---- y = activation(F(x, k) + bias) ----


def _forward_signature(params: dict[str, Any]) -> Signature:
    y = _y(params)
    bias = (("bias", "c"),) if params.get("has_bias") else ()
    preactivation = (("preactivation", y),) if params.get("with_preactivation") else ()
    return Signature(
        (("x", _x(params)), ("kernel", _k(params)), *bias), (("out", y), *preactivation)
    )


def _forward(name: str, *more: str) -> Primitive:
    return _made(
        name,
        *more,
        target="depthwise",
        signature=_forward_signature,
        shardable=("c", "n"),
        xla=depthwise_plain,
        ffi=_forward_ffi,
    )


depthwise_p = _forward("depthwise")
depthwise_epilogue_p = _forward(
    "depthwise_epilogue", "has_bias", "activation", "with_preactivation"
)


# ---- x of (y, k) ----

depthwise_input_p = _made(
    "depthwise_input",
    target="depthwise_input",
    signature=lambda params: Signature(
        (("y", _y(params)), ("kernel", _k(params))), (("x", _x(params)),)
    ),
    shardable=("c", "n"),
    xla=depthwise_input_plain,
    ffi=functools.partial(_ffi, operands=("y", "kernel")),
)


# ---- k of (x, y) ----

depthwise_kernel_p = _made(
    "depthwise_kernel",
    target="depthwise_kernel",
    signature=lambda params: Signature(
        (("x", _x(params)), ("y", _y(params))), (("kernel", _k(params)),)
    ),
    shardable=("c",),
    summed=("n",),
    xla=depthwise_kernel_plain,
    ffi=functools.partial(_ffi, operands=("x", "y"), workspace=None),
)


# ---- Derivatives ----

# Of each primitive the two variables that it is linear in, and which one it gives.
_VARIABLES = {
    depthwise_p: ("x", "k", "y"),
    depthwise_input_p: ("y", "k", "x"),
    depthwise_kernel_p: ("x", "y", "k"),
}
_CORE_RANKS = {"x": 4, "y": 4, "k": 3}


def _transpose(
    ct: jax.Array, operands: Any, *, of: Primitive, cotangent_dtype: Any = None, **params: Any
) -> tuple[int, jax.Array]:
    """The rule of all three: with one variable undefined, its primitive of the other two."""
    *given, result = _VARIABLES[of]
    position = 0 if undefined(operands[0]) else 1
    wanted, other = given[position], given[1 - position]
    ct = ct if cotangent_dtype is None else ct.astype(cotangent_dtype)
    known = {result: ct, other: operands[1 - position]}
    (primitive,) = (p for p, names in _VARIABLES.items() if names[2] == wanted)
    if wanted == "k":  # a sum over images, which may be sharded
        images = -3 if params["channel_axis"] == 0 else -4
        known = {name: gathered(z, images) for name, z in known.items()}
    params = cotangent_params(
        ct,
        operands[position],
        ct.ndim - _CORE_RANKS[result],
        **{**params, "variant": None},
    )
    (out,) = bind(primitive, *(known[name] for name in _VARIABLES[primitive][:2]), **params)
    return position, out


def _linear(**params: Any) -> tuple[int, ...]:
    return 0, 1


for _primitive in _VARIABLES:
    define_multilinear_jvp(_primitive, _linear)
    define_transpose(_primitive, functools.partial(_transpose, of=_primitive))

define_epilogue_jvp(
    depthwise_epilogue_p,
    depthwise_p,
    _linear,
    lambda *, channel_axis, **_: channel_axis - 4,
)
