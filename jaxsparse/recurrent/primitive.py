r"""The recurrent scan as a JAX primitive, closed under differentiation.

For t = 0, ..., T - 1, or the other way round where a direction is reversed,

    products_t = states_{t-1} W                                   (or W^T: ``transposed``)
    states_t, carries_t, outputs_t = step(products_t, carries_{t-1}, inputs_t)

The states of a batch entry are S arrays of h units, so W takes S h numbers to P h. The tangent of a
scan is a scan by the same weights whose step is the step's tangent,

    dproducts_t = dstates_{t-1} W + states_{t-1} dW
    dstates_t, dcarries_t, doutputs_t = dstep(dproducts_t, dcarries_{t-1}, dinputs_t)

and its transpose runs the other way in time by the transposed weights: the cotangents of the
products take the place of the states. The second term of dproducts is one product over all steps,
whose transpose is the weights' gradient: one product, or one sampled product, after the scan.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching
from jax.sharding import NamedSharding, PartitionSpec

from jaxsparse.ops.arguments import PATTERN
from jaxsparse.precision import accumulator_dtype
from jaxsparse.primitive import (
    Operation,
    Signature,
    batch,
    bind,
    make_primitive,
    undefined,
)
from jaxsparse.recurrent import engine
from jaxsparse.recurrent.products import dense_form, product, products_of_steps
from jaxsparse.recurrent.step import Adjoint, Saved, Saving, Step, Tangent, without_repeats

_FULL = "tbh"  # the dimensions of an input that it does not repeat along


class Operands(NamedTuple):
    """The operands of a scan by their roles, each with leading dimensions (..., directions)."""

    # (k, m), or the values and the pattern of a sparse (m, k) matrix, with its layout on chip and
    # its transpose's if there are ``forms``.
    weights: tuple[Any, ...]
    state: Any  # (b, S, h)
    carries: tuple[Any, ...]  # (b, h) each
    inputs: tuple[Any, ...]  # (t, b, parts, h) each, t, b or h being 1 where it repeats


def _split(operands: Sequence[Any], params: dict[str, Any]) -> Operands:
    step = params["step"]
    count = (1 + len(PATTERN) if params["sparse"] else 1) + len(params["forms"])
    rest = operands[count + 1 :]
    return Operands(
        tuple(operands[:count]),
        operands[count],
        tuple(rest[: step.carries]),
        tuple(rest[step.carries :]),
    )


def scan_bind(operands: Operands, **params: Any) -> tuple[Any, list[Any], list[Any]]:
    """Binds the primitive; returns the states, the last carries and the outputs."""
    weights, state, carries, inputs = _with_batch_cut_alike(operands, params["spans"])
    step, places = without_repeats(params["step"])
    results = bind(recurrent_scan_p, *weights, state, *carries, *inputs, **{**params, "step": step})
    states, outputs = results[0], results[1 + step.carries :]
    return (
        states,
        list(results[1 : 1 + step.carries]),
        [states if place is None else outputs[place] for place in places],
    )


def _with_batch_cut_alike(operands: Operands, spans: Sequence[str]) -> Operands:
    """Under explicit axes: a batch that is cut in some operands is cut in all.

    A carry of zeros is replicated where a user's program makes it, beside inputs that are sharded.
    """
    of_batch = [(operands.state, -3), *((x, -2) for x in operands.carries)]
    of_batch += [(x, -3) for x, own in zip(operands.inputs, spans, strict=True) if "b" in own]
    shardings = [(jax.typeof(x).sharding, axis) for x, axis in of_batch]
    cut = [(s.mesh, s.spec[axis]) for s, axis in shardings if s.spec[axis] is not None]
    if not cut or len(cut) == len(of_batch):
        return operands
    mesh, axes = cut[0]

    def like_the_others(x: Any, axis: int) -> Any:
        spec = list(jax.typeof(x).sharding.spec)
        if spec[axis] is not None:
            return x
        spec[axis] = axes
        return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))

    return Operands(
        operands.weights,
        like_the_others(operands.state, -3),
        tuple(like_the_others(x, -2) for x in operands.carries),
        tuple(
            like_the_others(x, -3) if "b" in own else x
            for x, own in zip(operands.inputs, spans, strict=True)
        ),
    )


# ---- What it computes ----


def _signature(params: dict[str, Any]) -> Signature:
    step = params["step"]
    d, t = len(params["reversed"]), params["length"]
    if params["sparse"]:
        layouts = zip(("layout", "transposed layout"), params["forms"], strict=False)
        weights = (
            *((name, f"{d} {spec}") for name, spec in (("recurrent", "e"), *PATTERN)),
            *((name, f"{d} {form.words}") for name, form in layouts),
        )
    else:
        weights = (("recurrent", f"{d} k m"),)
    inputs = []
    for i, (parts, span) in enumerate(zip(step.inputs, params["spans"], strict=True)):
        size = {"t": t, "b": "b", "h": "h"}
        time, rows, units = (size[dim] if dim in span else 1 for dim in _FULL)
        inputs.append((f"input {i}", f"{d} {time} {rows} {parts} {units}"))
    return Signature(
        (
            *weights,
            ("state", f"{d} b {step.states} h"),
            *((f"carry {i}", f"{d} b h") for i in range(step.carries)),
            *inputs,
        ),
        (
            ("states", f"{d} {t} b {step.states} h"),
            *((f"carry {i}", f"{d} b h") for i in range(step.carries)),
            *((f"output {i}", f"{d} {t} b {n} h") for i, n in enumerate(step.outputs)),
        ),
    )


def operand_names(params: dict[str, Any]) -> list[str]:
    """What the operands are called, in their order."""
    return [name for name, _ in _signature(params).operands]


def _result_dtypes(avals: Any, params: dict[str, Any]) -> list[Any]:
    operands = _split(avals, params)
    carries = [x.dtype for x in operands.carries]
    return [operands.state.dtype, *carries, *[operands.state.dtype] * len(params["step"].outputs)]


_UNROLLED = 8  # steps of a loop on a GPU, where it waits for the start of kernels


def _plain(
    *operands: Any, reversed: tuple[bool, ...], on_gpu: bool = False, **params: Any
) -> list[Any]:
    """The scan as a loop of XLA, one direction after the other."""
    every = [
        _plain_direction(
            _split([x[d] for x in operands], params),
            reverse=reverse,
            on_gpu=on_gpu,
            **params,
        )
        for d, reverse in enumerate(reversed)
    ]
    return [jnp.stack(results) for results in zip(*every, strict=True)]


def _plain_direction(
    operands: Operands,
    *,
    on_gpu: bool,
    step: Step,
    sparse: bool,
    transposed: bool,
    reverse: bool,
    spans: tuple[str, ...],
    precision: Any,
    implementation: str | None,
    length: int,
    **_: Any,
) -> list[Any]:
    weights, state, carries, inputs = operands
    b, _, h = state.shape
    dtype, accumulator = state.dtype, carries[0].dtype
    densifies = on_gpu and sparse and implementation is None
    if densifies and (dense := dense_form(weights, length)) is not None:
        weights, sparse = (dense,), False

    steps_of = [x.reshape(*x.shape[:2], -1) for x in inputs]

    def group(x: Any, count: int, span: str, t: Any) -> list[Any]:
        """The arrays of an input at a step, (b, h) each.

        Each is cut out at once: on a CPU XLA does not vectorise what reads a slice of a slice.
        """
        rows, units = x.shape[1], x.shape[2] // count
        cut = functools.partial(
            jax.lax.dynamic_slice, x, slice_sizes=(1, rows, units), allow_negative_indices=False
        )
        at = t if "t" in span else 0
        arrays = [cut(start_indices=(at, 0, j * units))[0] for j in range(count)]
        return [jnp.broadcast_to(array.astype(accumulator), (b, h)) for array in arrays]

    def body(before: Any, t: Any) -> Any:
        state, carries = before
        z = product(
            weights,
            state,
            sparse=sparse,
            transposed=transposed,
            precision=precision,
            implementation=implementation,
            out_dtype=accumulator,
            local=True,
        )
        products = [z[:, p * h : (p + 1) * h] for p in range(step.products)]
        at_this_step = [
            group(*of_input, t) for of_input in zip(steps_of, step.inputs, spans, strict=True)
        ]
        states, carries, outputs = step(products, carries, at_this_step)
        # Joined here, while they are in a cache: products read them so, and the gradient of xs is.
        state, *joined = (jnp.concatenate(xs, 1).astype(dtype) for xs in (states, *outputs))
        return (state, [c.astype(accumulator) for c in carries]), (state, joined)

    first: Any = (state.reshape(b, -1), list(carries))
    unroll = _UNROLLED if on_gpu else 1
    (_, last), (states, outputs) = jax.lax.scan(
        body, first, jnp.arange(length), reverse=reverse, unroll=unroll
    )
    stacked = (x.reshape(length, b, -1, h) for x in (states, *outputs))
    return [next(stacked), *last, *stacked]


recurrent_scan_p = make_primitive(
    Operation(
        name="recurrent_scan",
        target="recurrent_scan",
        params=(
            "step",
            "sparse",
            "forms",
            "transposed",
            "reversed",
            "length",
            "spans",
            "precision",
            "recompute",
            "implementation",
        ),
        signature=_signature,
        result_dtypes=_result_dtypes,
        shardable=("b",),
        xla=_plain,
        xla_on_gpu=functools.partial(_plain, on_gpu=True),
        ffi=lambda params, avals, _: engine.ffi_call(params, avals, operand_names(params)),
    )
)


# ---- vmap: more sequences make a larger batch; more weights, one scan each ----


def _batching(operands: Any, dims: Any, **params: Any) -> Any:
    step = params["step"]
    axes = _split(dims, params)
    if any(axis is not None for axis in axes.weights):
        return batch(recurrent_scan_p, operands, dims, **params)
    size = next(x.shape[axis] for x, axis in zip(operands, dims, strict=True) if axis is not None)
    values = _split(operands, params)

    def folded(x: Any, axis: int | None, place: int, repeats: bool) -> Any:
        """The mapped axis behind the batch, which is `place` from the end, and one with it.

        Behind it, so that a sharded batch stays sharded.
        """
        if axis is None and repeats:
            return x
        x = batching.bdim_at_front(x, axis, size)
        rows = x.ndim - place - 1
        x = jnp.moveaxis(x, 0, rows + 1)
        if repeats:
            x = jnp.broadcast_to(x, (*x.shape[:rows], count, *x.shape[rows + 1 :]))
        return x.reshape(*x.shape[:rows], count * size, *x.shape[rows + 2 :])

    state_axis = axes.state
    rows = values.state.shape
    count = (rows if state_axis is None else rows[:state_axis] + rows[state_axis + 1 :])[-3]
    spans = tuple(
        own if axis is None or "b" in own else "".join(d for d in _FULL if d == "b" or d in own)
        for own, axis in zip(params["spans"], axes.inputs, strict=True)
    )
    results = bind(
        recurrent_scan_p,
        *values.weights,
        folded(values.state, axes.state, 3, False),
        *(folded(x, a, 2, False) for x, a in zip(values.carries, axes.carries, strict=True)),
        *(
            folded(x, a, 3, "b" not in own)
            for x, a, own in zip(values.inputs, axes.inputs, params["spans"], strict=True)
        ),
        **{**params, "spans": spans},
    )
    unfolded, at = [], []
    for i, x in enumerate(results):
        rows = x.ndim - (2 if 1 <= i <= step.carries else 3)
        unfolded.append(x.reshape(*x.shape[:rows], count, size, *x.shape[rows + 1 :]))
        at.append(rows + 1)
    return unfolded, at


batching.primitive_batchers[recurrent_scan_p] = _batching


# ---- Derivatives ----


def _is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero


def _instantiated(tangent: Any) -> Any:
    return ad.instantiate_zeros(tangent)


def _before(states: Any, first: Any, reversed: tuple[bool, ...]) -> Any:
    """Every step's state before it: (..., d, t, b, S, h) of the states after it and the first."""

    def shifted(states: Any, first: Any, backwards: bool) -> Any:
        first = jnp.broadcast_to(first, (*states.shape[:-4], *first.shape[-3:]))
        first = jnp.expand_dims(first, -4)
        if backwards:
            return jnp.concatenate([states[..., 1:, :, :, :], first], -4)
        return jnp.concatenate([first, states[..., :-1, :, :, :]], -4)

    parts = [
        shifted(states[..., d : d + 1, :, :, :, :], first[..., d : d + 1, :, :, :], backwards)
        for d, backwards in enumerate(reversed)
    ]
    return jnp.concatenate(parts, -5) if len(parts) > 1 else parts[0]


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    step = params["step"]
    x, dx = _split(primals, params), _split(tangents, params)
    active = tuple(i for i, t in enumerate(dx.inputs) if not _is_zero(t))
    shifted = not _is_zero(dx.weights[0])
    if not shifted and not active and all(map(_is_zero, (dx.state, *dx.carries))):
        results = bind(recurrent_scan_p, *primals, **params)
        return results, [ad.Zero(jax.typeof(r).to_tangent_aval()) for r in results]

    tangent = Tangent(step, active, shifted)
    recompute = params["recompute"] and tangent.saved.products
    keep = Saved(tangent.saved.products and not recompute, tangent.saved.carries)
    states, carries, outputs = scan_bind(
        x,
        **{**params, "step": Saving(step, keep)},
    )
    outputs, extra = outputs[: len(step.outputs)], outputs[len(step.outputs) :]
    dtype = x.state.dtype
    options = {n: params[n] for n in ("sparse", "transposed", "precision", "implementation")}
    spans = params["spans"]
    own_spans = (
        *(_FULL,) * tangent.saved.sizes,
        *(spans[i] for i in tangent.read),
        *(_FULL,) * shifted,
        *(spans[i] for i in active),
    )

    def linear(weights: Any, before: Any, saved: Any, read: Any, dweights: Any, rest: Any) -> Any:
        if recompute:
            saved = [products_of_steps(weights, before, step.products, dtype, options), *saved]
        shift = []
        if dweights is not None:
            moved = (dweights, *weights[1:])
            shift = [products_of_steps(moved, before, step.products, dtype, options)]
        dstate, dcarries, dinputs = rest
        return scan_bind(
            Operands(weights, dstate, dcarries, (*saved, *read, *shift, *dinputs)),
            **{**params, "step": tangent, "spans": own_spans},
        )

    before = _before(states, x.state, params["reversed"]) if shifted or recompute else None
    dstates, dcarries, doutputs = (jax.checkpoint(linear) if recompute else linear)(
        x.weights,
        before,
        extra,
        [x.inputs[i] for i in tangent.read],
        dx.weights[0] if shifted else None,
        (
            _instantiated(dx.state),
            tuple(map(_instantiated, dx.carries)),
            [dx.inputs[i] for i in active],
        ),
    )
    return [states, *carries, *outputs], [dstates, *dcarries, *doutputs]


def _transpose(cotangents: Any, *operands: Any, **params: Any) -> Any:
    step = params["step"]
    weights, state, carries, inputs = _split(operands, params)
    if any(map(undefined, weights)):
        raise ValueError("recurrent.scan: it is not linear in its weights")
    ct_states, *rest = cotangents
    ct_carries, ct_outputs = rest[: step.carries], rest[step.carries :]
    if all(map(_is_zero, cotangents)):
        return [None] * len(operands)
    linear = tuple(i for i, x in enumerate(inputs) if undefined(x))
    used = tuple(i for i, ct in enumerate(ct_outputs) if not _is_zero(ct))
    adjoint = Adjoint(step, linear, not _is_zero(ct_states), used)

    def aval(x: Any) -> Any:
        return x.aval if undefined(x) else jax.typeof(x)

    shape = aval(state).shape
    zeros = jnp.zeros((*shape[:-2], step.products, shape[-1]), aval(state).dtype)
    backwards = tuple(map(operator.not_, params["reversed"]))
    states, carries_out, outputs = scan_bind(
        Operands(
            weights,
            zeros,
            tuple(map(_instantiated, ct_carries)),
            (
                *(inputs[i] for i in adjoint.fixed),
                *([ct_states] if adjoint.states_used else []),
                *(ct_outputs[i] for i in used),
            ),
        ),
        **{
            **params,
            "step": adjoint,
            "transposed": not params["transposed"],
            "reversed": backwards,
            "spans": (
                *(params["spans"][i] for i in adjoint.fixed),
                *(_FULL,) * (adjoint.states_used + len(used)),
            ),
        },
    )

    def summed(ct: Any, x: Any) -> Any:
        """The cotangent of an operand of its own shape and dtype: summed where it repeats."""
        if not undefined(x):
            return None
        axes = tuple(
            i for i, (a, b) in enumerate(zip(ct.shape, x.aval.shape, strict=True)) if a != b
        )
        ct = jnp.sum(ct.astype(accumulator_dtype(ct.dtype)), axes, keepdims=True) if axes else ct
        return ct.astype(x.aval.dtype)

    ct_state = None
    if undefined(state):
        # The adjoint's last states, which no further step has taken, by the transposed weights.
        options = {n: params[n] for n in ("sparse", "precision", "implementation")}
        ends = [states[..., d, 0 if back else -1, :, :, :] for d, back in enumerate(backwards)]
        last = jnp.stack(ends, -4)
        z = product(
            weights,
            last.reshape(*last.shape[:-2], -1),
            transposed=not params["transposed"],
            out_dtype=accumulator_dtype(last.dtype),
            **options,
        )
        ct_state = summed(z.reshape(*z.shape[:-1], step.states, shape[-1]), state)
    given = dict(zip(linear, outputs, strict=True))
    return [
        *[None] * len(weights),
        ct_state,
        *(summed(ct, x) for ct, x in zip(carries_out, carries, strict=True)),
        *(summed(given[i], x) if i in given else None for i, x in enumerate(inputs)),
    ]


ad.primitive_jvps[recurrent_scan_p] = _jvp
ad.primitive_transposes[recurrent_scan_p] = _transpose
