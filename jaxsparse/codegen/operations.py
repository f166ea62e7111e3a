"""How the primitives of JAX are printed: as expressions in CUDA C++.

`PRIMITIVES` is the table. Functions of the printed code that CUDA has not are in
``ffi/cuda/pointwise.cuh``.

A value of float32 is a ``float``, of int32 an ``int``, of uint32 an ``unsigned``, of bool a
``bool``. Values of bfloat16 and float16 are floats too, rounded to those types after each equation:
they are never more exact than the function asks for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from jaxsparse.codegen.program import Equation, Operand

_NARROW = {"bfloat16": "ops::RoundToBFloat16", "float16": "ops::RoundToFloat16"}
C_TYPES = {
    "float32": "float",
    "bfloat16": "float",
    "float16": "float",
    "int32": "int",
    "uint32": "unsigned",
    "bool": "bool",
}
KINDS = {
    "float32": "floats",
    "bfloat16": "floats",
    "float16": "floats",
    "int32": "ints",
    "uint32": "ints",
    "bool": "bools",
}


class UnsupportedError(Exception):
    """The primitive is in the table, this use of it is not; the message says which."""


@dataclasses.dataclass(frozen=True)
class Expression:
    """An expression for each kind of operand; ``{0}``, ``{1}`` stand for the operands."""

    floats: str | None = None
    ints: str | None = None
    bools: str | None = None


@dataclasses.dataclass(frozen=True)
class SameValue:
    """The results are the operands, as long as those are scalars: nothing is printed."""


@dataclasses.dataclass(frozen=True)
class Zero:
    """The result is the constant 0."""


@dataclasses.dataclass(frozen=True)
class Call:
    """The primitive calls the jaxpr in this parameter: its equations are printed in place."""

    param: str


@dataclasses.dataclass(frozen=True)
class Branches:
    """One of the jaxprs in ``params["branches"]`` is run, each printed as a branch."""


# Gives the expression from an equation and the operands as they are printed.
_Printer = Callable[[Equation, Sequence[str]], str]


def kind(operand: Operand) -> str:
    """Which of an `Expression`'s forms is for an operand; empty if it has none."""
    return KINDS.get(operand.dtype, "")


def _dtypes(equation: Equation) -> str:
    return ", ".join(operand.dtype for operand in equation.operands)


def _convert(equation: Equation, operands: Sequence[str]) -> str:
    (x,) = operands
    source, target = equation.operands[0], equation.results[0]
    if kind(target) == "floats":
        # To a narrow type it is rounded as every result of that type.
        return {"floats": x, "ints": f"static_cast<float>({x})", "bools": f"{x} ? 1.0f : 0.0f"}[
            kind(source)
        ]
    if target.dtype == "bool":
        return f"{x} != {'0.0f' if kind(source) == 'floats' else '0'}"
    if kind(source) == "floats":
        return f"ops::{'ToInt' if target.dtype == 'int32' else 'ToUnsigned'}({x})"
    return f"static_cast<{C_TYPES[target.dtype]}>({x})"


def _bitcast(equation: Equation, operands: Sequence[str]) -> str:
    source, target = equation.operands[0].dtype, equation.results[0].dtype
    (x,) = operands
    integers = ("int32", "uint32")
    if source == "float32" and target in integers:
        return f"static_cast<{C_TYPES[target]}>(ops::ToBits({x}))"
    if source in integers and target == "float32":
        return f"ops::FromBits(static_cast<unsigned>({x}))"
    if source in integers and target in integers:
        return f"static_cast<{C_TYPES[target]}>({x})"
    raise UnsupportedError(f"from {source} to {target}")


def _select(equation: Equation, operands: Sequence[str]) -> str:
    which, *cases = operands
    if equation.operands[0].dtype == "bool":
        return f"{which} ? {cases[1]} : {cases[0]}"
    # XLA leaves a predicate out of range open, a cond does not: the nearest case is taken.
    suffix = "u" if equation.operands[0].dtype == "uint32" else ""
    tests = [f"{which} <= {i}{suffix} ? {case} : " for i, case in enumerate(cases[:-1])]
    return "".join(tests) + cases[-1]


def _integer_pow(equation: Equation, operands: Sequence[str]) -> str:
    (x,) = operands
    if kind(equation.operands[0]) != "floats":
        raise UnsupportedError(f"of {_dtypes(equation)}")
    power = int(equation.params["y"])
    short = {1: x, 2: f"{x} * {x}", 3: f"{x} * {x} * {x}", -1: f"1.0f / {x}"}
    return short.get(power) or f"ops::IntegerPow<{power}>({x})"


def _pow(equation: Equation, operands: Sequence[str]) -> str:
    kinds = [kind(operand) for operand in equation.operands]
    if kinds[0] != "floats" or kinds[1] not in ("floats", "ints"):
        raise UnsupportedError(f"of {_dtypes(equation)}")
    x, y = operands
    return f"powf({x}, {y if kinds[1] == 'floats' else f'static_cast<float>({y})'})"


def _polynomial(equation: Equation, operands: Sequence[str]) -> str:
    if any(kind(operand) != "floats" for operand in equation.operands):
        raise UnsupportedError(f"of {_dtypes(equation)}")
    x, *coefficients = operands
    expression = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        expression = f"fmaf({expression}, {x}, {coefficient})"
    return expression


def _round(equation: Equation, operands: Sequence[str]) -> str:
    # 0 is away from zero, 1 to even (jax.lax.RoundingMethod).
    return f"{('roundf', 'rintf')[int(equation.params['rounding_method'])]}({operands[0]})"


def _reduce_precision(equation: Equation, operands: Sequence[str]) -> str:
    bits = int(equation.params["exponent_bits"]), int(equation.params["mantissa_bits"])
    if equation.operands[0].dtype != "float32":
        raise UnsupportedError(f"of {_dtypes(equation)}")
    return f"ops::ReducePrecision<{min(bits[0], 8)}, {min(bits[1], 23)}>({operands[0]})"


def _function(name: str) -> Expression:
    return Expression(floats=f"{name}({{0}})")


def _comparison(operator: str) -> Expression:
    return Expression(*[f"{{0}} {operator} {{1}}"] * 3)


def _bitwise(operator: str, logical: str) -> Expression:
    return Expression(ints=f"{{0}} {operator} {{1}}", bools=f"{{0}} {logical} {{1}}")


PRIMITIVES: dict[str, Expression | SameValue | Zero | Call | Branches | _Printer] = {
    # Arithmetic.
    "add": Expression("{0} + {1}", "ops::Add({0}, {1})"),
    "add_any": Expression("{0} + {1}", "ops::Add({0}, {1})"),
    "sub": Expression("{0} - {1}", "ops::Subtract({0}, {1})"),
    "mul": Expression("{0} * {1}", "ops::Multiply({0}, {1})"),
    "div": Expression("{0} / {1}", "ops::Divide({0}, {1})"),
    "rem": Expression("fmodf({0}, {1})", "ops::Remainder({0}, {1})"),
    "neg": Expression("-{0}", "ops::Negate({0})"),
    "abs": Expression("fabsf({0})", "ops::Abs({0})"),
    "sign": Expression("ops::Sign({0})", "ops::Sign({0})"),
    "max": Expression("ops::Max({0}, {1})", "ops::Max({0}, {1})", "{0} || {1}"),
    "min": Expression("ops::Min({0}, {1})", "ops::Min({0}, {1})", "{0} && {1}"),
    "clamp": Expression(*["ops::Min(ops::Max({1}, {0}), {2})"] * 2),
    "square": Expression("{0} * {0}", "ops::Multiply({0}, {0})"),
    "one_minus_square": Expression("(1.0f + {0}) * (1.0f - {0})"),
    "integer_pow": _integer_pow,
    "pow": _pow,
    "polynomial": _polynomial,
    "sqrt": _function("sqrtf"),
    "rsqrt": _function("ops::Rsqrt"),
    "cbrt": _function("cbrtf"),
    "floor": _function("floorf"),
    "ceil": _function("ceilf"),
    "round": _round,
    "nextafter": Expression("nextafterf({0}, {1})"),
    # Functions.
    "exp": _function("expf"),
    "exp2": _function("exp2f"),
    "expm1": _function("expm1f"),
    "log": _function("logf"),
    "log1p": _function("log1pf"),
    "log2": _function("log2f"),
    "tanh": _function("ops::Tanh"),
    "logistic": _function("ops::Logistic"),
    "sin": _function("sinf"),
    "cos": _function("cosf"),
    "tan": _function("tanf"),
    "asin": _function("asinf"),
    "acos": _function("acosf"),
    "atan": _function("atanf"),
    "atan2": Expression("atan2f({0}, {1})"),
    "sinh": _function("sinhf"),
    "cosh": _function("coshf"),
    "asinh": _function("asinhf"),
    "acosh": _function("acoshf"),
    "atanh": _function("atanhf"),
    "erf": _function("erff"),
    "erfc": _function("erfcf"),
    "erf_inv": _function("ops::ErfInv"),
    # Comparisons, logic, choice.
    "eq": _comparison("=="),
    "ne": _comparison("!="),
    "lt": _comparison("<"),
    "le": _comparison("<="),
    "gt": _comparison(">"),
    "ge": _comparison(">="),
    "is_finite": _function("ops::IsFinite"),
    "and": _bitwise("&", "&&"),
    "or": _bitwise("|", "||"),
    "xor": _bitwise("^", "!="),
    "not": Expression(ints="~{0}", bools="!{0}"),
    "shift_left": Expression(ints="ops::ShiftLeft({0}, {1})"),
    "shift_right_arithmetic": Expression(ints="ops::ShiftRightArithmetic({0}, {1})"),
    "shift_right_logical": Expression(ints="ops::ShiftRightLogical({0}, {1})"),
    "select_n": _select,
    "cond": Branches(),
    # Types.
    "convert_element_type": _convert,
    "bitcast_convert_type": _bitcast,
    "reduce_precision": _reduce_precision,
    "zeros_like": Zero(),
    # Anything: what a derivative keeps of the branches that were not run.
    "empty2": Zero(),
    # What does nothing to a scalar. Some of these have had, or have, two names.
    "broadcast_in_dim": SameValue(),
    "reshape": SameValue(),
    "squeeze": SameValue(),
    "transpose": SameValue(),
    "reduce_sum": SameValue(),
    "reduce_prod": SameValue(),
    "reduce_max": SameValue(),
    "reduce_min": SameValue(),
    "reduce_and": SameValue(),
    "reduce_or": SameValue(),
    "copy": SameValue(),
    "copy_p": SameValue(),
    "name": SameValue(),
    "optimization_barrier": SameValue(),
    "stop_gradient": SameValue(),
    "pvary": SameValue(),
    "pcast": SameValue(),
    "reduced_vary_cast": SameValue(),
    "reduced_vary_cast_p": SameValue(),
    # Calls, under all the names that JAX gives them.
    "jit": Call("jaxpr"),
    "pjit": Call("jaxpr"),
    "call": Call("call_jaxpr"),
    "core_call": Call("call_jaxpr"),
    "closed_call": Call("call_jaxpr"),
    "core_closed_call": Call("call_jaxpr"),
    "remat": Call("jaxpr"),
    "remat2": Call("jaxpr"),
    "checkpoint": Call("jaxpr"),
    "custom_jvp_call": Call("call_jaxpr"),
    "custom_vjp_call": Call("call_jaxpr"),
    "custom_vjp_call_jaxpr": Call("fun_jaxpr"),
    "custom_vmap_call": Call("call"),
    "xla_metadata_call": Call("jaxpr"),
}
"""{primitive name: how it is printed}"""


APPROXIMATE: dict[str, Expression] = {
    "div": Expression("ops::ApproximateDivide({0}, {1})", "ops::Divide({0}, {1})"),
    "exp": _function("ops::ApproximateExp"),
    "exp2": _function("ops::ApproximateExp2"),
    "log": _function("ops::ApproximateLog"),
    "log1p": _function("ops::ApproximateLog1p"),
    "log2": _function("ops::ApproximateLog2"),
    "logistic": _function("ops::ApproximateLogistic"),
    "tanh": _function("ops::ApproximateTanh"),
}
"""The same of those that have a fast form, of about 11 bits: where results are rounded to 16."""


def expression(
    equation: Equation,
    operands: Sequence[str],
    instead: Mapping[str, Expression] = MappingProxyType({}),
) -> str:
    """The C++ expression of an equation that has one result, or UnsupportedError."""
    printed = instead.get(equation.primitive) or PRIMITIVES[equation.primitive]
    if isinstance(printed, Expression):
        template = getattr(printed, kind(equation.operands[0]), None)
        if template is None:
            raise UnsupportedError(f"of {_dtypes(equation)}")
        text = str(template.format(*operands))
    elif isinstance(printed, SameValue | Zero | Call | Branches):
        raise UnsupportedError(f"of {_dtypes(equation)}")
    else:
        text = printed(equation, operands)
    narrow = _NARROW.get(equation.results[0].dtype)
    return text if narrow is None else f"{narrow}({text})"
