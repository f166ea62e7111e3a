"""What the tests of printed steps print: a function of scalars for each primitive."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Primitive, primitives

from jaxsparse.codegen.operations import PRIMITIVES, Call, SameValue
from jaxsparse.recurrent.printer import print_step

f32, i32, u32 = jnp.float32, jnp.int32, jnp.uint32
LEAST_NORMAL = 2.0**-126


# Primitives under names that this JAX may not have, or binds only inside a shard_map.


def stand_in(name: str) -> Primitive:
    """A primitive of that name with one scalar result, of its first operand's type."""
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x, *_, **__: jax.core.ShapedArray((), x.dtype))
    return primitive


def call_stand_in(name: str) -> Callable[..., Any]:
    """A function that calls sin under that name, with its jaxpr where the table expects it."""
    primitive = stand_in(name)
    body = jax.make_jaxpr(lambda x: lax.sin(x) * 2)(f32(0))
    return lambda x: primitive.bind(x, **{PRIMITIVES[name].param: body})


@jax.custom_jvp
def doubled_sine(x):
    return lax.sin(x) * 2


doubled_sine.defjvp(lambda x, t: (doubled_sine(x[0]), t[0]))


@jax.custom_vjp
def doubled_sine_too(x):
    return lax.sin(x) * 2


doubled_sine_too.defvjp(lambda x: (doubled_sine_too(x), x), lambda x, t: (t,))


@jax.custom_batching.custom_vmap
def doubled_sine_as_well(x):
    return lax.sin(x) * 2


doubled_sine_as_well.def_vmap(lambda size, batched, x: (lax.sin(x) * 2, True))


# One function of scalars for each primitive.


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of floats, or of the types that it converts them to, with one result."""

    name: str
    function: Callable[..., Any]
    arity: int = 1
    # Units in the last place, against the function in float64, or `oracle`, in NumPy, which takes
    # floats as float64.
    bound: float = 0.5
    oracle: Callable[..., Any] | None = None
    # Results below this may be 0.
    least: float = 0.0

    @functools.cached_property
    def jaxpr(self):
        return jax.make_jaxpr(self.function)(*[f32(0)] * self.arity)

    @property
    def counts(self) -> dict[str, int]:
        return {"products": self.arity, "states": 1, "carries": 0, "inputs": 0, "outputs": 0}

    def truth(self, values: np.ndarray) -> np.ndarray:
        """The results for rows of operands, in float64 as a rule.

        Not in float32, where JAX makes subnormal numbers 0 on a CPU, and its functions are less
        exact than those tested.
        """
        with np.errstate(all="ignore"), jax.enable_x64(True):
            columns = values.astype(np.float64).T
            if self.oracle is not None:
                return np.asarray(self.oracle(*columns), np.float64)
            return np.asarray(self.reference(*columns))

    @functools.cached_property
    def reference(self):
        return jax.jit(jax.vmap(self.function))


def unary(name: str, bound: float, **more: Any) -> Case:
    """A primitive of one operand; one that this JAX does not have is a stand-in."""
    primitive = getattr(primitives, f"{name}_p", None) or stand_in(name)
    function = getattr(lax, name, None) or primitive.bind
    return Case(name, function, 1, bound, **more)


def narrow(dtype: Any) -> Callable[[Any], Any]:
    def rounded(x):
        return np.float32(x).astype(dtype).astype(np.float32)

    return rounded


def reduced(exponent: int, mantissa: int) -> Case:
    """JAX's own is right where no subnormal number comes in or out, which it makes 0."""

    def oracle(x):
        return jax.jit(lambda x: lax.reduce_precision(x, exponent, mantissa))(np.float32(x))

    return Case(
        f"reduce_precision_{exponent}_{mantissa}",
        lambda x: lax.reduce_precision(x, exponent, mantissa),
        oracle=oracle,
        bound=0,
        least=LEAST_NORMAL,
    )


def on_integers(name: str, function: Callable[..., Any], arity: int = 2, dtype: Any = i32) -> Case:
    def whole(*xs):
        return function(*[x.astype(dtype) for x in xs]).astype(xs[0].dtype)

    return Case(name, whole, arity)


def on_bools(name: str, function: Callable[..., Any], arity: int = 2) -> Case:
    def logical(*xs):
        return lax.select(function(*[x > 0.25 for x in xs]), xs[0], xs[0] * 2)

    return Case(name, logical, arity)


def comparison(name: str) -> list[Case]:
    compare = getattr(lax, name)
    return [
        Case(name, lambda x, y: compare(x, y).astype(x.dtype), 2),
        on_integers(f"{name}_ints", compare),
        on_bools(f"{name}_bools", compare),
    ]


def float_bits(x):
    return lax.bitcast_convert_type(f32(x), i32)


def next_oracle(x, y):
    return np.nextafter(np.float32(x), np.float32(y))


CASES = [
    # Exact operations are right to half a unit.
    Case("add", lax.add, 2),
    Case("add_any", stand_in("add_any").bind, 2, oracle=np.add),
    Case("sub", lax.sub, 2),
    Case("mul", lax.mul, 2),
    Case("div", lax.div, 2),
    Case("rem", lax.rem, 2),
    Case("nextafter", lax.nextafter, 2, bound=0, oracle=next_oracle),
    Case("max", lax.max, 2),
    Case("min", lax.min, 2),
    Case("clamp", lax.clamp, 3),
    Case("atan2", lax.atan2, 2, bound=1.5),
    Case("pow", lax.pow, 2, bound=1),
    Case("pow_int", lambda x, y: lax.pow(x, lax.clamp(i32(-9), y.astype(i32), i32(9))), 2, bound=1),
    *[unary(name, 0.5) for name in ("neg", "abs", "sign", "floor", "ceil", "sqrt", "square")],
    unary("one_minus_square", 2, oracle=lambda x: (1 + x) * (1 - x)),
    unary("rsqrt", 1.5),
    unary("cbrt", 1),
    Case("round_away", lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO)),
    Case("round_even", lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)),
    *[
        Case(f"integer_pow_{y}", lambda x, y=y: lax.integer_pow(x, y), bound=y)
        for y in (2, 3, 4, 7)
    ],
    *[
        # Through a power that under- or overflows, as XLA has it.
        Case(
            f"integer_pow_minus_{-y}",
            lambda x, y=y: lax.integer_pow(x, y),
            bound=2,
            oracle=lambda x, y=y: 1 / np.prod([np.float32(x)] * -y, axis=0),
        )
        for y in (-1, -2, -3)
    ],
    Case("integer_pow_0", lambda x: stand_in("integer_pow").bind(x, y=0), oracle=np.ones_like),
    Case(
        "polynomial",
        lambda x: stand_in("polynomial").bind(x, f32(1.5), f32(-2), f32(0.25)),
        bound=1,
        oracle=lambda x: np.float32(0.25 * x - 2) * x + 1.5,
    ),
    # Functions.
    unary("exp", 1),
    unary("exp2", 1),
    unary("expm1", 1),
    unary("log", 1),
    unary("log1p", 1),
    unary("log2", 1, oracle=np.log2),
    unary("tanh", 1.5),
    unary("logistic", 2.5, least=LEAST_NORMAL),
    unary("sin", 1),
    unary("cos", 1),
    unary("tan", 1),
    unary("asin", 1),
    unary("acos", 1),
    unary("atan", 1),
    unary("sinh", 2),
    unary("cosh", 2),
    unary("asinh", 2),
    unary("acosh", 2),
    unary("atanh", 2),
    unary("erf", 1),
    unary("erfc", 3),
    unary("erf_inv", 4),
    # Comparisons, logic, choice.
    *itertools.chain.from_iterable(map(comparison, ("eq", "ne", "lt", "le", "gt", "ge"))),
    Case("is_finite", lambda x: lax.is_finite(x).astype(x.dtype)),
    on_bools("and", lax.bitwise_and),
    on_bools("or", lax.bitwise_or),
    on_bools("xor", lax.bitwise_xor),
    on_bools("not", lax.bitwise_not, 1),
    on_bools("max_bools", lambda x, y: primitives.max_p.bind(x, y)),
    on_bools("min_bools", lambda x, y: primitives.min_p.bind(x, y)),
    Case("select_n", lambda x, y: lax.select_n(x > y, x, y * 2), 2),
    Case(
        "select_n_ints",
        lambda p, x, y: lax.select_n(lax.clamp(i32(0), p.astype(i32), i32(3)), x, y, x * 2, y * 2),
        3,
    ),
    Case("cond", lambda x, y: lax.cond(x > y, lambda: x * 2, lambda: -y), 2),
    Case(
        "switch",
        lambda x: lax.switch(x.astype(i32), [lambda x: x, jnp.negative, lambda x: x * x], x),
    ),
    # Its branches keep other values for the derivative each, of which some are NaN elsewhere.
    Case(
        "derivative_of_a_switch",
        jax.grad(
            lambda x: lax.switch(
                (x > 1).astype(i32) + (x > 3).astype(i32),
                [lax.sin, lambda x: lax.sqrt(x - 1), lambda x: x * x / 4],
                x,
            )
        ),
        bound=3,
    ),
    # Integers.
    on_integers("add_ints", lax.add),
    on_integers("sub_ints", lax.sub),
    on_integers("mul_ints", lax.mul),
    on_integers("div_ints", lax.div),
    on_integers("rem_ints", lax.rem),
    on_integers("max_ints", lax.max),
    on_integers("min_ints", lax.min),
    on_integers("clamp_ints", lax.clamp, 3),
    on_integers("and_ints", lax.bitwise_and),
    on_integers("or_ints", lax.bitwise_or),
    on_integers("xor_ints", lax.bitwise_xor),
    on_integers("not_ints", lax.bitwise_not, 1),
    on_integers("neg_ints", lax.neg, 1),
    on_integers("abs_ints", lax.abs, 1),
    on_integers("sign_ints", lax.sign, 1),
    on_integers("square_ints", lax.square, 1),
    on_integers("shift_left", lax.shift_left),
    on_integers("shift_right_arithmetic", lax.shift_right_arithmetic),
    on_integers("shift_right_logical", lax.shift_right_logical),
    on_integers("sub_unsigned", lax.sub, dtype=u32),
    on_integers("div_unsigned", lax.div, dtype=u32),
    on_integers("rem_unsigned", lax.rem, dtype=u32),
    on_integers("max_unsigned", lax.max, dtype=u32),
    on_integers("min_unsigned", lax.min, dtype=u32),
    on_integers("sign_unsigned", lax.sign, 1, dtype=u32),
    on_integers("shift_right_unsigned", lax.shift_right_logical, dtype=u32),
    on_integers("int_to_bool", lambda x: x.astype(bool), 1),
    on_integers("int_to_unsigned", lambda x: x.astype(u32), 1),
    on_integers("unsigned_to_int", lambda x: x.astype(i32), 1, dtype=u32),
    on_integers("constants", lambda x: (x ^ i32(-(2**31))) - i32(-5), 1),
    # Types.
    Case("to_bool", lambda x: x.astype(bool).astype(x.dtype)),
    Case("bool_to_int", lambda x: (x > 0).astype(i32).astype(x.dtype)),
    Case(
        "signbit",
        lambda x: (float_bits(x) >> 31).astype(f32),
        oracle=lambda x: np.where(np.signbit(x), -1.0, 0.0),
    ),
    Case(
        "from_bits",
        lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(x, u32) & u32(0xFFFFF000), f32),
        bound=0,
        oracle=lambda x: (np.float32(x).view(np.uint32) & 0xFFFFF000).view(np.float32),
    ),
    Case(
        "bfloat16",
        lambda x: x.astype(jnp.bfloat16).astype(f32),
        bound=0,
        oracle=narrow(jnp.bfloat16),
    ),
    Case(
        "float16", lambda x: x.astype(jnp.float16).astype(f32), bound=0, oracle=narrow(np.float16)
    ),
    Case(
        "bfloat16_product",
        lambda x, y: (x.astype(jnp.bfloat16) * y.astype(jnp.bfloat16) * 3).astype(f32),
        2,
        bound=0,
        oracle=lambda x, y: x.astype(jnp.bfloat16) * y.astype(jnp.bfloat16) * jnp.bfloat16(3),
    ),
    reduced(5, 10),
    reduced(8, 7),
    reduced(4, 3),
    reduced(8, 23),
    Case("zeros_like", stand_in("zeros_like").bind, oracle=np.zeros_like),
    # What does nothing to a scalar.
    Case(
        "broadcast_to_scalar",
        lambda x: primitives.broadcast_in_dim_p.bind(
            x, shape=(), broadcast_dimensions=(), sharding=None
        ),
    ),
    Case("reshape_to_scalar", lambda x: lax.reshape(x, ()) + lax.squeeze(x, ())),
    *[
        Case(name, stand_in(name).bind, oracle=np.positive)
        for name, how in PRIMITIVES.items()
        if isinstance(how, SameValue)
    ],
    Case("optimization_barrier_pair", lambda x: lax.sub(*lax.optimization_barrier((x, x / 2)))),
    Case("checkpoint_name", lambda x: checkpoint_name(x, "x") + lax.stop_gradient(x)),
    Case("reductions", lambda x: jnp.where(jnp.all(x > 0), jnp.sum(x), jnp.max(x))),
    # Calls.
    Case("jit", jax.jit(lambda x: jax.jit(lax.sin)(x) * 2), bound=1),
    Case("checkpoint", jax.checkpoint(lambda x: lax.sin(x) * 2), bound=1),
    Case("custom_jvp", doubled_sine, bound=1),
    Case("custom_vjp", doubled_sine_too, bound=1),
    Case("custom_vmap", doubled_sine_as_well, bound=1),
    *[
        Case(f"call_{name}", call_stand_in(name), bound=1, oracle=lambda x: 2 * np.sin(x))
        for name, how in PRIMITIVES.items()
        if isinstance(how, Call)
    ],
]


def traced(function: Callable[..., Any], *arguments: Any) -> ClosedJaxpr:
    return jax.make_jaxpr(function)(*(arguments or [f32(0)]))


def body(jaxpr: ClosedJaxpr, **counts: int) -> list[str]:
    """The lines of a printed step that come from the jaxpr."""
    given = {"products": 0, "states": 0, "carries": 0, "inputs": 0, "outputs": 0, **counts}
    lines = [line.strip() for line in print_step(jaxpr, name="S", **given).splitlines()]
    return lines[lines.index("namespace ops = jaxsparse::pointwise;") + 1 : -2]
