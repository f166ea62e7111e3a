"""Printed steps: numbers against JAX on the host, compilation for GPUs, what is refused and why."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import pathlib
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Primitive, primitives
from jax.interpreters import partial_eval

from jaxsparse import backend
from jaxsparse.codegen.check import check_pointwise
from jaxsparse.codegen.flatten import same_variable, uses
from jaxsparse.codegen.operations import PRIMITIVES, Call, SameValue
from jaxsparse.primitive import equations
from jaxsparse.recurrent.printer import print_step

FFI = pathlib.Path(__file__).parent.parent / "ffi"
HEADERS = ("cuda/pointwise.cuh", "cuda/arithmetic_instructions.cuh", "types.h")

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


# Cells, as functions of products, carries and inputs to states, carries and outputs.


def tanh_rnn(p, x):
    h = jnp.tanh(p + x)
    return h, h


def lstm(pi, pf, pg, po, c, xi, xf, xg, xo):
    i, f, g, o = jax.nn.sigmoid(pi + xi), jax.nn.sigmoid(pf + xf + 1), jnp.tanh(pg + xg), po + xo
    c = f * c + i * g
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return h, c, h


def gru(pr, pz, pn, h, xr, xz, xn, bias):
    r, z = jax.nn.sigmoid(pr + xr), jax.nn.sigmoid(pz + xz)
    h = (1 - z) * jnp.tanh(xn + r * (pn + bias)) + z * h
    return h, h, h


def masked_gru(pr, pz, pn, h, xr, xz, xn, bias, mask):
    _, new, _ = gru(pr, pz, pn, h, xr, xz, xn, bias)
    new = jnp.where(mask, new, h)
    return new, new, jnp.where(mask, new, 0.0)


@dataclasses.dataclass(frozen=True)
class Cell:
    name: str
    function: Callable[..., Any]
    products: int
    states: int
    carries: int
    inputs: int
    outputs: int
    bools: int = 0  # the last inputs

    @property
    def counts(self) -> dict[str, int]:
        names = ("products", "states", "carries", "inputs", "outputs")
        return {name: getattr(self, name) for name in names}

    @property
    def arity(self) -> int:
        return self.products + self.carries + self.inputs

    @functools.cached_property
    def jaxpr(self):
        arguments = [f32(0)] * (self.arity - self.bools) + [jnp.bool_(False)] * self.bools
        return jax.make_jaxpr(self.function)(*arguments)


def tangent(cell: Cell) -> Cell:
    """The cell and its tangent: of everything there is twice as much, in the same order."""

    def function(*both):
        return sum(zip(*jax.jvp(cell.function, both[::2], both[1::2]), strict=True), ())

    return Cell(f"{cell.name}_jvp", function, **{n: 2 * k for n, k in cell.counts.items()})


def adjoint(cell: Cell) -> Cell:
    """The transpose of the tangent, which takes the cell's arguments as inputs."""
    p, c = cell.products, cell.carries

    def function(*arguments):
        d_states, d_carries = arguments[: cell.states], arguments[cell.states :][:c]
        inputs = arguments[cell.states + c :]
        primals, d_outputs = inputs[: cell.arity], inputs[cell.arity :]
        transposed = jax.linear_transpose(
            lambda *tangents: jax.jvp(cell.function, primals, tangents)[1], *primals
        )
        return transposed((*d_states, *d_carries, *d_outputs))

    return Cell(
        f"{cell.name}_transpose",
        function,
        products=cell.states,
        states=p,
        carries=c,
        inputs=cell.arity + cell.outputs,
        outputs=cell.inputs,
    )


def random_program(seed: int) -> Cell:
    """A program of well-conditioned operations, some of them in nested calls, some dead."""
    rng = np.random.default_rng(seed)
    operations = [
        lambda x, y, z: jnp.sin(x) * y,
        lambda x, y, z: jnp.tanh(x + y),
        lambda x, y, z: jax.nn.sigmoid(x - z),
        lambda x, y, z: jnp.maximum(x, y) * 0.3 - jnp.minimum(y, z),
        lambda x, y, z: jax.nn.relu(x) + jax.nn.softplus(y),
        lambda x, y, z: lax.cond(z > 0.1, lambda: x * 0.5, lambda: jnp.clip(y, -1, 1)),
        lambda x, y, z: jnp.where(x > z, y, x),
        lambda x, y, z: y,
    ]
    wrappers = [jax.jit, jax.checkpoint, lambda f: f, lambda f: jax.jit(jax.jit(f))]
    chosen = [
        (wrappers[rng.integers(4)](operations[rng.integers(8)]), *rng.integers(0, 2**30, 3))
        for _ in range(10)
    ]
    results = rng.integers(0, 2**30, 4)

    def function(*given):
        values = list(given)
        for operation, i, j, k in chosen:
            # What is compared is given, so that it is the same in every precision.
            values.append(
                operation(values[i % len(values)], values[j % len(values)], given[k % len(given)])
            )
        return tuple(values[i % len(values)] for i in results)

    return Cell(f"random_{seed}", function, 2, 1, 2, 1, 1)


CELLS = [
    *(
        cell
        for base in (
            Cell("tanh_rnn", tanh_rnn, 1, 1, 0, 1, 1),
            Cell("lstm", lstm, 4, 1, 1, 4, 1),
            Cell("gru", gru, 3, 1, 1, 4, 1),
        )
        for cell in (base, tangent(base), adjoint(base), tangent(tangent(base)))
    ),
    Cell("masked_gru", masked_gru, 3, 1, 1, 5, 1, bools=1),
    *(random_program(seed) for seed in range(20)),
]
STEPS = [*CASES, *CELLS]


def printed(step: Case | Cell) -> str:
    return print_step(step.jaxpr, name=f"step_{step.name}", **step.counts)


def translation_unit(runner: str) -> str:
    """All steps and, for each, a function or kernel that applies it."""
    texts = ['#include "cuda/pointwise.cuh"', *map(printed, STEPS)]
    return "\n".join(texts + [runner.replace("NAME", step.name) for step in STEPS])


# On the host.

RUN = """
extern "C" void run_NAME(int n, const float* product, float* carry, const float* input,
                         float* state, float* output) {
  using S = step_NAME;
  for (int i = 0; i < n; ++i) {
    S::Apply(product + i * S::kProducts, carry + i * S::kCarries, input + i * S::kInputs,
             state + i * S::kStates, output + i * S::kOutputs);
  }
}"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("printed")
    (folder / "steps.cc").write_text("#include <cmath>\n" + translation_unit(RUN))
    # Unused variables are errors: nothing is printed that is not needed.
    build = subprocess.run(
        [
            compiler,
            "-std=c++20",
            "-O1",
            "-shared",
            "-fPIC",
            "-ffp-contract=off",
            "-Wall",
            "-Werror=unused-variable",
            f"-I{FFI / 'tests' / 'emulated'}",  # in front of the headers that it replaces
            f"-I{FFI / 'tests'}",
            f"-I{FFI}",
            str(folder / "steps.cc"),
            "-o",
            str(folder / "steps.so"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr[-4000:]
    assert not build.stderr, build.stderr[-4000:]
    return ctypes.CDLL(str(folder / "steps.so"))


def run(library: ctypes.CDLL, step: Case | Cell, values: np.ndarray) -> np.ndarray:
    """Applies a step to rows of arguments; the results are rows too."""
    counts, n = step.counts, len(values)
    ends = np.cumsum([counts["products"], counts["carries"]])
    product, carry, given = (
        np.ascontiguousarray(part, np.float32) for part in np.split(values, ends, axis=1)
    )
    state = np.full((n, counts["states"]), 77, np.float32)
    output = np.full((n, counts["outputs"]), 77, np.float32)
    arrays = (product, carry, given, state, output)
    getattr(library, f"run_{step.name}")(n, *(ctypes.c_void_p(a.ctypes.data) for a in arrays))
    return np.concatenate([state, carry, output], axis=1)


MAXIMUM = float(np.finfo(np.float32).max)
SPECIAL = np.float32(
    [
        *(0, 1e-45, 1e-40, 1.1e-38, LEAST_NORMAL, 2e-38, 1e-20, 6e-8, 1e-5, 1e-3, 0.25, 0.3, 0.5),
        *(0.7, 1 - 2**-24, 1, 1 + 2**-23, 1.5, 2, 2.5, 3, np.pi, 9, 20, 31, 32, 60, 87.5, 88.8),
        *(90, 103.9, 127.5, 128, 150, 1e4, 65519, 65520, 8388607.5, 1e9, 2**31, 3e9, 5e9),
        *(1e20, 1e38, 1.7e38, MAXIMUM, np.inf, np.nan),
    ]
)
SPECIAL = np.concatenate([SPECIAL, -SPECIAL])


def operands(arity: int, count: int = 4000) -> np.ndarray:
    """Special values in all combinations, and random ones: any bits, common sizes, all sizes."""
    rng = np.random.default_rng(arity)
    special = SPECIAL if arity < 3 else SPECIAL[::5]
    grid = np.stack(np.meshgrid(*[special] * arity), axis=-1).reshape(-1, arity)
    shape = (count, arity)
    bits = rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)
    common = rng.normal(size=shape) * 4
    sizes = np.exp2(rng.uniform(-30, 8, shape)) * rng.choice([-1, 1], shape)
    with np.errstate(invalid="ignore"):  # among the bits are signalling NaNs
        return np.concatenate([grid, bits, common, sizes, np.round(common)]).astype(np.float32)


def ulps(result: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Distances in units in the last place of the truth; infinity lies one beyond the maximum."""
    limit = 2.0**128
    x, t = np.clip(result.astype(np.float64), -limit, limit), np.clip(truth, -limit, limit)
    exponent = np.clip(np.frexp(t)[1] - 1, -126, 127)
    return np.abs(x - t) / np.exp2(exponent - 23.0)


def check(case: Case, values: np.ndarray, result: np.ndarray) -> None:
    truth = case.truth(values)
    wrong = np.isnan(result) != np.isnan(truth)
    assert not wrong.any(), (values[wrong][:5], result[wrong][:5], truth[wrong][:5])
    there = ~np.isnan(truth)
    values, result, truth = values[there], result[there], truth[there]
    error = ulps(result, truth)
    error[(np.abs(truth) < case.least) & (np.abs(result) <= case.least)] = 0
    wrong = error > case.bound + 1e-6
    assert not wrong.any(), (
        f"up to {error.max()} ulp: {values[wrong][:5]}: {result[wrong][:5]} "
        f"instead of {truth[wrong][:5]}"
    )
    zeros = (truth == 0) & (result == 0)
    wrong = zeros & (np.signbit(truth) != np.signbit(result))
    assert not wrong.any(), (values[wrong][:5], result[wrong][:5])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_primitive(library, case):
    values = operands(case.arity)
    check(case, values, run(library, case, values)[:, 0])


@pytest.mark.parametrize("name", ["tanh", "logistic", "exp", "erf"])
def test_accuracy(library, name):
    """Many more values, where the bounds are part of what the functions promise."""
    (case,) = [case for case in CASES if case.name == name]
    values = np.linspace(-20, 20, 2_000_001, dtype=np.float32)[:, None]
    check(case, values, run(library, case, values)[:, 0])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32), min_size=3, max_size=3))
def test_any_floats(library, values):
    row = np.float32([values])
    for case in CASES:
        part = row[:, : case.arity]
        if case.name in ("tanh", "logistic", "max", "min", "clamp", "sign"):
            check(case, part, run(library, case, part)[:, 0])


def test_every_primitive_is_tested():
    tested = {e.primitive.name for case in CASES for e in equations(case.jaxpr.jaxpr)}
    assert set(PRIMITIVES) - tested == set()
    assert len({step.name for step in STEPS}) == len(STEPS)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_cell(library, cell):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(500, cell.arity)).astype(np.float32)
    if cell.name in ("tanh_rnn", "lstm", "gru", "masked_gru"):  # derivatives would be 0 there
        values[::7] *= 30
    columns = list(values.T)
    if cell.bools:
        values[:, -cell.bools :] = rng.integers(0, 2, (500, cell.bools))
        columns = [*values.T[: -cell.bools], *values.T[-cell.bools :].astype(bool)]
    result = run(library, cell, values).T

    def reference(columns: list[np.ndarray]) -> np.ndarray:
        return np.stack(jax.jit(jax.vmap(cell.function))(*columns))

    with jax.enable_x64(True):
        truth = reference([c if c.dtype == bool else c.astype(np.float64) for c in columns])
    # A few roundings of what goes in, each as large as the largest in its row.
    scale = np.maximum(np.abs(values).max(axis=1), 1)
    scale = np.maximum(scale, np.abs(truth).max(axis=0))
    assert (np.abs(result - truth) <= 16 * 2.0**-24 * scale).all()
    assert (np.abs(result - reference(columns)) <= 64 * 2.0**-24 * scale).all()


# For GPUs.

KERNEL = """
__global__ void KernelNAME(const float* product, float* carry, const float* input, float* state,
                           float* output) {
  step_NAME::Apply(product, carry, input, state, output);
}"""


@pytest.fixture(scope="module")
def nvrtc():
    reasons = []
    for path in backend.nvrtc_candidates():
        try:
            # The builtins lie beside it, and the loader would not find them there.
            for builtins in pathlib.Path(path).parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))
            return ctypes.CDLL(path)
        except OSError as error:
            reasons.append(str(error))
    pytest.skip(f"needs NVRTC: {reasons}")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_every_step_compiles_for_gpus(nvrtc, architecture):
    program = ctypes.c_void_p()
    names = (ctypes.c_char_p * 3)(*[name.encode() for name in HEADERS])
    texts = (ctypes.c_char_p * 3)(*[(FFI / name).read_bytes() for name in HEADERS])
    source = translation_unit(KERNEL).encode()
    assert not nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"steps.cu", 3, texts, names)
    try:
        options = [f"--gpu-architecture={architecture}", "--std=c++20"]
        options.append("--device-as-default-execution-space")
        array = (ctypes.c_char_p * 3)(*[option.encode() for option in options])
        status = nvrtc.nvrtcCompileProgram(program, 3, array)
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        assert status == 0 and not log.value, log.value.decode()[:4000]
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
        assert code.raw.startswith(b"\x7fELF")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


# The text.


def traced(function: Callable[..., Any], *arguments: Any) -> ClosedJaxpr:
    return jax.make_jaxpr(function)(*(arguments or [f32(0)]))


def body(jaxpr: ClosedJaxpr, **counts: int) -> list[str]:
    """The lines of a printed step that come from the jaxpr."""
    given = {"products": 0, "states": 0, "carries": 0, "inputs": 0, "outputs": 0, **counts}
    lines = [line.strip() for line in print_step(jaxpr, name="S", **given).splitlines()]
    return lines[lines.index("namespace ops = jaxsparse::pointwise;") + 1 : -2]


def test_text():
    text = print_step(
        traced(lambda p, c, x, m: (p * x + 0.5, jnp.where(m, c, p), c > x), 0.0, 0.0, 0.0, False),
        name="Step",
        products=1,
        states=1,
        carries=1,
        inputs=2,
        outputs=1,
    )
    assert (
        text
        == """\
struct Step {
  static constexpr int kProducts = 1, kStates = 1, kCarries = 1, kInputs = 2, kOutputs = 1;

  __device__ __forceinline__ static void Apply(const float* product, float* carry,
                                               const float* input, float* state, float* output) {
    namespace ops = jaxsparse::pointwise;
    const float p0 = product[0];
    const float c0 = carry[0];
    const float i0 = input[0];
    const bool i1 = input[1] != 0.0f;
    const float v0 = p0 * i0;
    const float v1 = v0 + 0.5f;
    const float v2 = i1 ? c0 : p0;
    const bool v3 = c0 > i0;
    state[0] = v1;
    carry[0] = v2;
    output[0] = v3 ? 1.0f : 0.0f;
  }
};
"""
    )


def test_equal_jaxprs_give_equal_text():
    def trace(wrap):
        function = wrap(lambda x: jnp.tanh(x) * jax.nn.relu(x) - 0.1)
        return body(traced(function), products=1, states=1)

    plain = trace(lambda f: lambda x: f(x))
    assert trace(lambda f: lambda x: f(x)) == plain
    # Calls leave no trace in it.
    assert trace(jax.jit) == trace(jax.checkpoint) == plain
    assert body(traced(lambda x: jnp.tanh(x) - 0.1), products=1, states=1) != plain


def test_nothing_dead_is_printed():
    def function(p, c0, c1, x):
        lax.sort(jnp.stack([p, c0]))  # what is dead need not be supported
        unused = jax.jit(lambda y: (jnp.sin(y), jnp.cos(y)))(c0)
        return unused[1], c0, p

    lines = body(traced(function, *[f32(0)] * 4), products=1, states=1, carries=2, inputs=1)
    assert lines == [
        "const float p0 = product[0];",
        "const float c0 = carry[0];",
        "const float v0 = cosf(c0);",
        "state[0] = v0;",
        "carry[1] = p0;",
    ]


def test_carries_are_read_before_they_are_written():
    lines = body(traced(lambda a, b: (b, a), f32(0), f32(0)), carries=2)
    assert lines == [
        "const float c0 = carry[0];",
        "const float c1 = carry[1];",
        "carry[0] = c1;",
        "carry[1] = c0;",
    ]


def test_constants_of_other_types_are_converted():
    with jax.enable_x64(True):  # where Python's integers are int64
        jaxpr = traced(lambda x: jnp.clip(x, -1, 2))
    assert body(jaxpr, products=1, states=1)[1:3] == [
        "const float v0 = ops::Max((-1.0f), p0);",
        "const float v1 = ops::Min(2.0f, v0);",
    ]


def test_constant_predicates_choose():
    def function(x):
        return lax.select_n(np.int32(1), x, x * 2, x * 3), jnp.where(True, x, 1), x

    lines = body(traced(function), products=1, states=3)
    assert lines == [
        "const float p0 = product[0];",
        "const float v0 = p0 * 2.0f;",
        "state[0] = v0;",
        "state[1] = p0;",
        "state[2] = p0;",
    ]


@pytest.mark.parametrize(
    "value, text",
    [
        (0.5, "0.5f"),
        (-2, "(-2.0f)"),
        (0.1, "0x1.99999ap-4f"),
        (-1e-45, "(-0x1p-149f)"),
        (-0.0, "(-0.0f)"),
        (-np.inf, "ops::FromBits(0xff800000u)"),
    ],
)
def test_literals(value, text):
    assert f"state[0] = {text};" in body(traced(lambda x: f32(value)), products=1, states=1)


def read_literal(text: str) -> np.float32:
    text = text.strip("()")
    if text.startswith("ops::FromBits"):
        return np.uint32(int(text[len("ops::FromBits") + 1 : -1], 16)).view(np.float32)
    assert text.endswith("f") and ("." in text or "p" in text)
    text = text[:-1]
    return np.float32(float.fromhex(text) if "x" in text else float(text))


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_literals_are_exact(bits):
    value = np.uint32(bits).view(np.float32)
    jaxpr = traced(lambda x: x * value)
    (line,) = [line for line in body(jaxpr, products=1, states=1) if "*" in line]
    literal = line.removeprefix("const float v0 = p0 * ").removesuffix(";")
    assert read_literal(literal).tobytes() == value.tobytes()


# What depends on what.


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_uses(cell):
    _, expected = partial_eval.dce_jaxpr(cell.jaxpr.jaxpr, [True] * len(cell.jaxpr.jaxpr.outvars))
    assert uses(cell.jaxpr) == list(expected)


def test_uses_what_the_derivative_needs():
    x = jax.ShapeDtypeStruct((), f32)
    tangent = jax.make_jaxpr(lambda a, b, t: jax.jvp(lambda a: jnp.sin(a) + b, (a,), (t,))[1])
    assert uses(tangent(x, x, x)) == [True, False, True]
    assert uses(traced(lambda x, y: (y, 1.0), f32(0), f32(0))) == [False, True]


def test_same_variable():
    def function(x, y):
        z = jax.jit(lambda x: x + 1)(x)
        copies = jax.jit(lambda z: (jnp.copy(z), lax.reshape(z, ())))(z)
        return z, *copies, x, x + 1, y, 2.0, lax.full_like(x, 2), 0.0, -0.0

    jaxpr = traced(function, f32(0), f32(0))
    same = {
        (i, j)
        for i, j in itertools.combinations(range(len(jaxpr.jaxpr.outvars)), 2)
        if same_variable(jaxpr, i, j)
    }
    assert same == {(0, 1), (0, 2), (1, 2), (6, 7)}


# What is refused.

KEY = jax.random.key(0)


def test_unsupported_primitives_are_named():
    def function(x):
        return lax.lgamma(x) + jax.jit(lambda y: lax.digamma(y) + lax.lgamma(y))(x)

    with pytest.raises(ValueError) as caught:
        check_pointwise(traced(function), "recurrent.scan")
    message = str(caught.value)
    assert message.startswith(
        "recurrent.scan: the cell uses 'digamma' and 'lgamma', which can't run inside the kernel; "
        "supported are abs, acos, "
    )
    assert " tanh, " in message and "pjit" not in message

    with pytest.raises(ValueError, match="uses 'bessel_i0e', 'digamma' and 'lgamma', which"):
        check_pointwise(traced(lambda x: function(x) + lax.bessel_i0e(x)), "f")


@pytest.mark.parametrize(
    "function, message",
    [
        (
            lambda x: jnp.sum(jnp.stack([x, x, x])),
            r"shape \(3,\), where all must be scalars, in .*'reduce_sum'",
        ),
        (lambda x: x * np.ones(2, np.float32).sum() + jnp.arange(4.0)[2], "shape"),
        (lambda x: jnp.ones(5) * x, r"result 0 of the cell has shape \(5,\), expected \(\)"),
        (lambda x: x.astype(i32), "result 0 of the cell is int32, expected float32"),
        (lambda x: x.astype(jnp.int8).astype(f32), "dtype int8, .* in 'convert_element_type'"),
        (lambda x: lax.integer_pow(x.astype(i32), 3).astype(f32), "of int32, .*'integer_pow'"),
        (lambda x: lax.bitcast_convert_type(x, i32).astype(jnp.complex64).real, "complex64"),
        (lambda x: lax.while_loop(lambda y: y < 3, lambda y: y + 1, x), "uses 'while'"),
        (lambda x: jax.random.uniform(KEY) * x, "a random key"),
        (lambda x: (jax.debug.callback(print, x), x)[1], "uses 'debug_callback'"),
    ],
)
def test_refused(function, message):
    jaxpr = traced(function)
    for call in (check_pointwise, lambda j, n: body(j, products=1, states=1)):
        with pytest.raises(ValueError, match=message):
            call(jaxpr, "recurrent.scan")


def test_arguments_are_checked():
    with pytest.raises(ValueError, match=r"input 1 of the cell has shape \(2,\)"):
        check_pointwise(traced(lambda x, y: x, f32(0), jnp.ones(2)), "f")
    with pytest.raises(ValueError, match="input 0 of the cell is bfloat16, expected float32"):
        check_pointwise(traced(lambda x: x.astype(f32), jnp.bfloat16(0)), "f")
    with pytest.raises(ValueError, match="takes 1 values and returns 1, expected 2 and 1"):
        body(traced(jnp.sin), products=2, states=1)
    with pytest.raises(ValueError, match="a C\\+\\+ identifier, got 'a b'"):
        print_step(
            traced(jnp.sin), name="a b", products=1, states=1, carries=0, inputs=0, outputs=0
        )


def test_closing_over_a_traced_value_is_refused():
    def outer(y):
        jaxpr = jax.make_jaxpr(lambda x: x * y)(f32(0))
        check_pointwise(jaxpr, "recurrent.scan")
        return y

    with pytest.raises(ValueError, match=r"recurrent\.scan: the cell closes over a traced value"):
        jax.jit(outer)(f32(1))
