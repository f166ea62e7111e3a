"""Prints a jaxpr of scalars as CUDA device code.

A recurrent kernel runs the pointwise part of a cell between two products, and the cell is the
user's: its jaxpr is printed as a struct that NVRTC compiles with the kernel. `PRIMITIVES` says how
each primitive is printed. Functions of the printed code that CUDA has not are in
``ffi/recurrent/pointwise.cuh``.

First the jaxpr is flattened: nested calls are inlined, and what only passes a value on gives the
value itself. Then equations that no result needs are dropped; all that is checked, counted or
printed here is what remains. Values are named in the order of their equations, so the text depends
on the jaxpr alone and can serve as a key.

A value of float32 is a ``float``, of int32 an ``int``, of uint32 an ``unsigned``, of bool a
``bool``. Values of bfloat16 and float16 are floats too, rounded to those types after each equation:
they are never more exact than the cell asks for.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

_NARROW = {"bfloat16": "ops::RoundToBFloat16", "float16": "ops::RoundToFloat16"}
_C_TYPES = {
    "float32": "float",
    "bfloat16": "float",
    "float16": "float",
    "int32": "int",
    "uint32": "unsigned",
    "bool": "bool",
}
_KINDS = {
    "float32": "floats",
    "bfloat16": "floats",
    "float16": "floats",
    "int32": "ints",
    "uint32": "ints",
    "bool": "bools",
}


@dataclasses.dataclass(frozen=True, eq=False)
class _Value:
    """What a step is given or an equation computes: one object, under however many names."""

    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _Constant:
    value: np.ndarray

    @property
    def dtype(self) -> str:
        return str(self.value.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape


_Operand = _Value | _Constant


@dataclasses.dataclass(frozen=True, eq=False)
class _Equation:
    primitive: str
    operands: tuple[_Operand, ...]
    results: tuple[_Value, ...]
    params: dict[str, Any]
    effects: bool


@dataclasses.dataclass(frozen=True)
class _Program:
    """A jaxpr without nested calls."""

    inputs: tuple[_Value, ...]
    equations: tuple[_Equation, ...]
    outputs: tuple[_Operand, ...]


class _UnsupportedError(Exception):
    """The primitive is in the table, this use of it is not; the message says which."""


# How primitives are printed.


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
    """The jaxprs in ``params["branches"]`` are all printed in place, and their results selected."""


# Gives the expression from an equation and the operands as they are printed.
_Printer = Callable[[_Equation, Sequence[str]], str]


def _kind(operand: _Operand) -> str:
    return _KINDS.get(operand.dtype, "")


def _dtypes(equation: _Equation) -> str:
    return ", ".join(operand.dtype for operand in equation.operands)


def _convert(equation: _Equation, operands: Sequence[str]) -> str:
    (x,) = operands
    source, target = equation.operands[0], equation.results[0]
    if _kind(target) == "floats":
        # To a narrow type it is rounded as every result of that type.
        return {"floats": x, "ints": f"static_cast<float>({x})", "bools": f"{x} ? 1.0f : 0.0f"}[
            _kind(source)
        ]
    if target.dtype == "bool":
        return f"{x} != {'0.0f' if _kind(source) == 'floats' else '0'}"
    if _kind(source) == "floats":
        return f"ops::{'ToInt' if target.dtype == 'int32' else 'ToUnsigned'}({x})"
    return f"static_cast<{_C_TYPES[target.dtype]}>({x})"


def _bitcast(equation: _Equation, operands: Sequence[str]) -> str:
    source, target = equation.operands[0].dtype, equation.results[0].dtype
    (x,) = operands
    integers = ("int32", "uint32")
    if source == "float32" and target in integers:
        return f"static_cast<{_C_TYPES[target]}>(ops::ToBits({x}))"
    if source in integers and target == "float32":
        return f"ops::FromBits(static_cast<unsigned>({x}))"
    if source in integers and target in integers:
        return f"static_cast<{_C_TYPES[target]}>({x})"
    raise _UnsupportedError(f"from {source} to {target}")


def _select(equation: _Equation, operands: Sequence[str]) -> str:
    which, *cases = operands
    if equation.operands[0].dtype == "bool":
        return f"{which} ? {cases[1]} : {cases[0]}"
    # XLA leaves a predicate out of range open, a cond does not: the nearest case is taken.
    suffix = "u" if equation.operands[0].dtype == "uint32" else ""
    tests = [f"{which} <= {i}{suffix} ? {case} : " for i, case in enumerate(cases[:-1])]
    return "".join(tests) + cases[-1]


def _integer_pow(equation: _Equation, operands: Sequence[str]) -> str:
    (x,) = operands
    if _kind(equation.operands[0]) != "floats":
        raise _UnsupportedError(f"of {_dtypes(equation)}")
    power = int(equation.params["y"])
    short = {1: x, 2: f"{x} * {x}", 3: f"{x} * {x} * {x}", -1: f"1.0f / {x}"}
    return short.get(power) or f"ops::IntegerPow<{power}>({x})"


def _pow(equation: _Equation, operands: Sequence[str]) -> str:
    kinds = [_kind(operand) for operand in equation.operands]
    if kinds[0] != "floats" or kinds[1] not in ("floats", "ints"):
        raise _UnsupportedError(f"of {_dtypes(equation)}")
    x, y = operands
    return f"powf({x}, {y if kinds[1] == 'floats' else f'static_cast<float>({y})'})"


def _polynomial(equation: _Equation, operands: Sequence[str]) -> str:
    if any(_kind(operand) != "floats" for operand in equation.operands):
        raise _UnsupportedError(f"of {_dtypes(equation)}")
    x, *coefficients = operands
    expression = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        expression = f"fmaf({expression}, {x}, {coefficient})"
    return expression


def _round(equation: _Equation, operands: Sequence[str]) -> str:
    # 0 is away from zero, 1 to even (jax.lax.RoundingMethod).
    return f"{('roundf', 'rintf')[int(equation.params['rounding_method'])]}({operands[0]})"


def _reduce_precision(equation: _Equation, operands: Sequence[str]) -> str:
    bits = int(equation.params["exponent_bits"]), int(equation.params["mantissa_bits"])
    if equation.operands[0].dtype != "float32":
        raise _UnsupportedError(f"of {_dtypes(equation)}")
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


# From a jaxpr to a program.


def _value(aval: Any) -> _Value:
    return _Value(str(getattr(aval, "dtype", aval)), tuple(getattr(aval, "shape", ())))


def _constant(x: Any, aval: Any) -> _Operand:
    if isinstance(x, jax.core.Tracer) or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return _value(aval)  # nothing defines it, which `_problems` finds
    return _Constant(np.asarray(x, dtype=aval.dtype))


def _flatten(jaxpr: ClosedJaxpr) -> _Program:
    equations: list[_Equation] = []

    def inline(body: Jaxpr | ClosedJaxpr, arguments: Sequence[_Operand]) -> list[_Operand]:
        consts: Sequence[Any] = ()
        if isinstance(body, ClosedJaxpr):
            consts = body.consts
            body = body.jaxpr
        environment: dict[Any, _Operand] = dict(zip(body.invars, arguments, strict=True))
        for variable, const in zip(body.constvars, consts, strict=True):
            environment[variable] = _constant(const, variable.aval)

        def read(atom: Any) -> _Operand:
            if isinstance(atom, Literal):
                return _constant(atom.val, atom.aval)
            return environment[atom]

        for equation in body.eqns:
            results = apply(equation, [read(atom) for atom in equation.invars])
            environment.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in body.outvars]

    def apply(equation: Any, operands: list[_Operand]) -> Sequence[_Operand]:
        name, params = equation.primitive.name, equation.params
        results = tuple(_value(variable.aval) for variable in equation.outvars)
        printed = PRIMITIVES.get(name)
        if isinstance(printed, Call):
            return inline(params[printed.param], operands)
        if isinstance(printed, Branches):
            index, *arguments = operands
            cases = [inline(branch, arguments) for branch in params["branches"]]
            return [choose(index, case, r) for *case, r in zip(*cases, results, strict=True)]
        if name == "select_n":
            return [choose(operands[0], operands[1:], results[0])]
        if name == "convert_element_type" and (folded := _fold(operands[0], results[0])):
            return [folded]
        if isinstance(printed, Zero):
            return [_Constant(np.zeros(results[0].shape, equation.outvars[0].aval.dtype))]
        if isinstance(printed, SameValue) and _all_same(operands, results):
            return operands
        emit(name, operands, results, params, bool(equation.effects))
        return results

    def choose(index: _Operand, cases: list[_Operand], result: _Value) -> _Operand:
        if all(case is cases[0] for case in cases):
            return cases[0]
        if isinstance(index, _Constant) and index.shape == ():
            return cases[min(max(int(index.value), 0), len(cases) - 1)]
        emit("select_n", [index, *cases], (result,))
        return result

    def emit(
        name: str,
        operands: Sequence[_Operand],
        results: tuple[_Value, ...],
        params: dict[str, Any] | None = None,
        effects: bool = False,
    ) -> None:
        equations.append(_Equation(name, tuple(operands), results, params or {}, effects))

    inputs = tuple(_value(variable.aval) for variable in jaxpr.jaxpr.invars)
    outputs = inline(jaxpr, inputs)
    return _Program(inputs, tuple(equations), tuple(outputs))


def _all_same(operands: Sequence[_Operand], results: Sequence[_Value]) -> bool:
    return len(operands) == len(results) and all(
        x.shape == y.shape == () and x.dtype == y.dtype
        for x, y in zip(operands, results, strict=True)
    )


def _fold(operand: _Operand, result: _Value) -> _Operand | None:
    """What a conversion gives without being computed: it changes nothing, or is of a constant.

    With 64-bit types enabled, Python's integers come as constants of a type that has no other use.
    """
    if operand.shape != ():
        return None
    if operand.dtype == result.dtype:
        return operand
    if not isinstance(operand, _Constant) or _kind(result) not in ("floats", "bools"):
        return None
    with np.errstate(all="ignore"):
        return _Constant(operand.value.astype(jax.numpy.dtype(result.dtype)))


def _live(program: _Program) -> _Program:
    """Without the equations that no result needs. What has an effect stays, to be complained of."""
    needed = set(program.outputs)
    kept = []
    for equation in reversed(program.equations):
        if equation.effects or needed.intersection(equation.results):
            kept.append(equation)
            needed.update(equation.operands)
    return dataclasses.replace(program, equations=tuple(reversed(kept)))


def _used(program: _Program) -> set[_Operand]:
    return {*program.outputs, *(x for equation in program.equations for x in equation.operands)}


# What can't be printed.


def _quoted(names: Sequence[str]) -> str:
    return " and ".join(", ".join(f"{name!r}" for name in names).rsplit(", ", 1))


def _expression(equation: _Equation, operands: Sequence[str]) -> str:
    """The C++ expression of an equation that has one result, or _UnsupportedError."""
    printed = PRIMITIVES[equation.primitive]
    if isinstance(printed, Expression):
        template = getattr(printed, _kind(equation.operands[0]), None)
        if template is None:
            raise _UnsupportedError(f"of {_dtypes(equation)}")
        text = str(template.format(*operands))
    elif isinstance(printed, SameValue | Zero | Call | Branches):
        raise _UnsupportedError(f"of {_dtypes(equation)}")
    else:
        text = printed(equation, operands)
    narrow = _NARROW.get(equation.results[0].dtype)
    return text if narrow is None else f"{narrow}({text})"


def _problems(program: _Program) -> list[str]:
    problems = []
    unsupported = {equation.primitive for equation in program.equations} - set(PRIMITIVES)
    if unsupported:
        # What does nothing to a scalar is not what somebody looks for here.
        supported = [
            name for name, how in PRIMITIVES.items() if not isinstance(how, SameValue | Call)
        ]
        problems.append(
            f"the cell uses {_quoted(sorted(unsupported))}, which can't run inside the kernel; "
            f"supported are {', '.join(sorted(supported))}"
        )
    known = {*program.inputs, *(x for equation in program.equations for x in equation.results)}
    if any(isinstance(x, _Value) and x not in known for x in _used(program)):
        problems.append("the cell closes over a traced value or a random key: make it an input")
    for what, values in (("input", program.inputs), ("result", program.outputs)):
        for index, value in enumerate(values):
            if value.shape != ():
                problems.append(f"{what} {index} of the cell has shape {value.shape}, expected ()")
            if value.dtype not in ("float32", "bool"):
                problems.append(f"{what} {index} of the cell is {value.dtype}, expected float32")

    # {problem: the primitives that have it}, in the order of the equations.
    shared: dict[str, dict[str, None]] = {}
    for equation in program.equations:
        values = (*equation.operands, *equation.results)
        found = [
            f"has values of shape {value.shape}, where all must be scalars,"
            for value in values
            if value.shape != ()
        ]
        if not found and equation.primitive not in unsupported:
            found = [
                f"has values of dtype {value.dtype}, which is none of {', '.join(_KINDS)},"
                for value in values
                if value.dtype not in _KINDS
            ] or _objection(equation)
        for problem in found:
            shared.setdefault(problem, {})[equation.primitive] = None
    return problems + [
        f"the cell {problem} in {_quoted(list(names))}" for problem, names in shared.items()
    ]


def _objection(equation: _Equation) -> list[str]:
    try:
        _expression(equation, ["x"] * len(equation.operands))
    except _UnsupportedError as error:
        return [f"has an equation {error}, which can't be printed,"]
    return []


def _checked(jaxpr: ClosedJaxpr, operation: str) -> _Program:
    program = _live(_flatten(jaxpr))
    problems = _problems(program)
    if problems:
        raise ValueError(f"{operation}: " + "; ".join(problems))
    return program


# What others call.


def check_pointwise(jaxpr: ClosedJaxpr, operation: str) -> None:
    """Raises ValueError if a jaxpr can't be printed, naming all that stands in the way.

    What no result needs is not looked at.

    Args:
        jaxpr: takes and returns scalars, float32 or bool.
        operation: what the message begins with, e.g. "recurrent.scan".
    """
    _checked(jaxpr, operation)


def uses(jaxpr: ClosedJaxpr) -> list[bool]:
    """For each in-variable, whether an out-variable depends on it."""
    program = _live(_flatten(jaxpr))
    used = _used(program)
    return [value in used for value in program.inputs]


def same_variable(jaxpr: ClosedJaxpr, i: int, j: int) -> bool:
    """Whether out-variables i and j are the same value, by whatever calls and copies it came."""
    outputs = _flatten(jaxpr).outputs
    x, y = outputs[i], outputs[j]
    if isinstance(x, _Constant) and isinstance(y, _Constant):
        return x.dtype == y.dtype and x.shape == y.shape and x.value.tobytes() == y.value.tobytes()
    return x is y


def _float_literal(value: np.float32) -> str:
    """A float that every compiler reads as exactly this one."""
    if not np.isfinite(value):
        return f"ops::FromBits({value.view(np.uint32):#010x}u)"
    decimal = repr(float(value))
    # Where few digits say it exactly, they are the easiest to read; others are hexadecimal, since
    # their decimal digits would have to be rounded.
    text = decimal if re.fullmatch(r"-?\d{1,6}\.\d{1,4}", decimal) else _hexadecimal(float(value))
    return f"({text}f)" if text.startswith("-") else f"{text}f"


def _hexadecimal(value: float) -> str:
    return re.sub(r"\.?0*p", "p", value.hex())


def _literal(constant: _Constant) -> str:
    value = constant.value
    if constant.dtype == "bool":
        return "true" if value else "false"
    if constant.dtype == "uint32":
        return f"{int(value)}u"
    if constant.dtype == "int32":
        # There are no negative literals, and 2147483648 is no int.
        if int(value) == -(2**31):
            return "(-2147483647 - 1)"
        return f"({int(value)})" if value < 0 else str(int(value))
    return _float_literal(np.float32(value))


def print_step(
    jaxpr: ClosedJaxpr,
    *,
    name: str,
    products: int,
    states: int,
    carries: int,
    inputs: int,
    outputs: int,
) -> str:
    """Prints a step of a recurrent scan as a struct for ``ffi/recurrent/pointwise.cuh``.

    Equal jaxprs give equal text.

    Args:
        jaxpr: takes products, carries and inputs, and returns states, carries and outputs, all
            scalars, float32 or bool. A bool is passed as a float: not 0 is true, true is 1.
        name: of the struct.
        products: how many products there are.
        states: how many states.
        carries: how many carries; they are read before they are written.
        inputs: how many inputs.
        outputs: how many outputs.

    Returns:
        The struct: the counts as ``kProducts`` and so on, and a function ``Apply(product, carry,
        input, state, output)`` of pointers. Only what is used is read, and a carry that stays as it
        is is not written.

    Raises:
        ValueError: the jaxpr can't be printed, or has other numbers of variables.
    """
    program = _checked(jaxpr, name)
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ValueError(f"the name of a step must be a C++ identifier, got {name!r}")
    taken, returned = products + carries + inputs, states + carries + outputs
    if (taken, returned) != (len(program.inputs), len(program.outputs)):
        raise ValueError(
            f"{name}: the jaxpr takes {len(program.inputs)} values and returns "
            f"{len(program.outputs)}, expected {taken} and {returned}"
        )

    # Where results go, without the carries that stay as they are.
    arrays = [("state", i) for i in range(states)]
    arrays += [("carry", i) for i in range(carries)]
    arrays += [("output", i) for i in range(outputs)]
    stores = [
        (array, index, operand)
        for operand, (array, index) in zip(program.outputs, arrays, strict=True)
        if not (array == "carry" and operand is program.inputs[products + index])
    ]

    names: dict[_Operand, str] = {}
    lines = []
    read = {operand for _, _, operand in stores}
    read.update(operand for equation in program.equations for operand in equation.operands)
    arrays = [("product", i) for i in range(products)]
    arrays += [("carry", i) for i in range(carries)]
    arrays += [("input", i) for i in range(inputs)]
    for value, (array, index) in zip(program.inputs, arrays, strict=True):
        if value in read:
            names[value] = f"{array[0]}{index}"
            test = " != 0.0f" if value.dtype == "bool" else ""
            lines.append(f"const {_C_TYPES[value.dtype]} {names[value]} = {array}[{index}]{test};")

    def text(operand: _Operand) -> str:
        return _literal(operand) if isinstance(operand, _Constant) else names[operand]

    for number, equation in enumerate(program.equations):
        (result,) = equation.results
        names[result] = f"v{number}"
        expression = _expression(equation, [text(operand) for operand in equation.operands])
        lines.append(f"const {_C_TYPES[result.dtype]} v{number} = {expression};")

    for array, index, operand in stores:
        converted = " ? 1.0f : 0.0f" if operand.dtype == "bool" else ""
        lines.append(f"{array}[{index}] = {text(operand)}{converted};")

    counts = (
        f"kProducts = {products}, kStates = {states}, kCarries = {carries}, kInputs = {inputs}, "
        f"kOutputs = {outputs}"
    )
    body = "\n".join(f"    {line}" for line in ["namespace ops = jaxsparse::pointwise;", *lines])
    return f"""\
struct {name} {{
  static constexpr int {counts};

  __device__ __forceinline__ static void Apply(const float* product, float* carry,
                                               const float* input, float* state, float* output) {{
{body}
  }}
}};
"""
