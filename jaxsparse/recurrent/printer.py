"""Prints the step of a recurrent scan as CUDA device code.

A recurrent kernel runs the pointwise part of a cell between two products, and the cell is the
user's: its jaxpr is printed as a struct that NVRTC compiles with the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jax.extend.core import ClosedJaxpr

from jaxsparse.codegen.check import checked_program
from jaxsparse.codegen.parts import in_two_parts
from jaxsparse.codegen.printer import Source, print_pointwise


def print_step(
    jaxpr: ClosedJaxpr,
    *,
    name: str,
    products: int,
    states: int,
    carries: int,
    inputs: int,
    outputs: int,
    carries_made: int | None = None,
    prepares: bool = False,
) -> str:
    """Prints a step of a recurrent scan as a struct for ``ffi/cuda/pointwise.cuh``.

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
        carries_made: how many carries it returns, in the places of those that it takes; as many if
            None.
        prepares: whether it is made in two parts, the first one before products and carries are
            there.

    Returns:
        The struct: the counts as ``kProducts`` and so on, and a function ``Apply(product, carry,
        input, state, output)`` of pointers; or if it ``prepares``, ``Prepare(input, prepared)``,
        which computes ``kPrepared`` values, and ``Finish(product, carry, prepared, state,
        output)``. Only what is used is read, and a carry that stays as it is is not written.

    Raises:
        ValueError: the jaxpr can't be printed, or has other numbers of variables.
    """
    program = checked_program(jaxpr, name)
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ValueError(f"the name of a step must be a C++ identifier, got {name!r}")
    made = carries if carries_made is None else carries_made
    taken, returned = products + carries + inputs, states + made + outputs
    if (taken, returned) != (len(program.inputs), len(program.outputs)):
        raise ValueError(
            f"{name}: the jaxpr takes {len(program.inputs)} values and returns "
            f"{len(program.outputs)}, expected {taken} and {returned}"
        )

    def sources(**counts: int) -> list[Source]:
        return [
            Source(f"{array[:1]}{index}", f"{array}[{index}]")
            for array, count in counts.items()
            for index in range(count)
        ]

    targets: list[str | None] = [
        f"{array}[{index}]"
        for array, count in (("state", states), ("carry", made), ("output", outputs))
        for index in range(count)
    ]
    # A carry that stays as it is is not written.
    for index in range(min(carries, made)):
        if program.outputs[states + index] is program.inputs[products + index]:
            targets[states + index] = None
    given = sources(product=products, carry=carries)
    counts = (
        f"kProducts = {products}, kStates = {states}, kCarries = {carries}, kInputs = {inputs}, "
        f"kOutputs = {outputs}"
    )
    if not prepares:
        lines = print_pointwise(program, [*given, *sources(input=inputs)], targets)
        reads = "const float* input, float* state, float* output"
        parts = _function("Apply", ["const float* product, float* carry", reads], lines)
    else:
        early, late = in_two_parts(program, products + carries)
        values = [Source(f"r{i}", f"prepared[{i}]") for i in range(len(early.outputs))]
        counts += f",\n                       kPrepared = {len(values)}"
        first = print_pointwise(early, sources(input=inputs), [place for _, place in values])
        second = print_pointwise(late, [*given, *values], targets)
        given_late = "const float* product, float* carry", "const float* prepared, float* state"
        parts = _function("Prepare", ["const float* input, float* prepared"], first) + "\n"
        parts += _function("Finish", [*given_late, "float* output"], second)
    return f"struct {name} {{\n  static constexpr int {counts};\n\n{parts}}};\n"


def _function(name: str, parameters: Sequence[str], lines: Sequence[str]) -> str:
    """A member function of parameters, some on each line, and statements."""
    head = f"  __device__ __forceinline__ static void {name}("
    listed = f",\n{' ' * len(head)}".join(parameters)
    body = "\n".join(f"    {line}" for line in ["namespace ops = jaxsparse::pointwise;", *lines])
    return f"{head}{listed}) {{\n{body}\n  }}\n"


def print_arrays(
    inputs: Sequence[int],
    input_dtypes: Sequence[str],
    outputs: Sequence[int],
    output_dtypes: Sequence[str],
) -> str:
    """Prints what a kernel's plan says of the arrays that its steps read and write.

    Args:
        inputs: how many parts each input has.
        input_dtypes: their dtypes, float32 or that of states.
        outputs: how many parts each output has.
        output_dtypes: the same of outputs.

    Returns:
        A member of the plan: the struct ``Arrays`` of ``ffi/recurrent/arrays.cuh``.
    """

    def table(name: str, sizes: Sequence[int]) -> str:
        # Arrays of length 0 are not C++.
        values = ", ".join(map(str, sizes or (0,)))
        return (
            f"    static constexpr int k{name}s = {len(sizes)};\n"
            f"    static constexpr int k{name}Parts[] = {{{values}}};\n"
        )

    def floats(name: str, dtypes: Sequence[str]) -> str:
        values = ", ".join(str(dtype == "float32").lower() for dtype in dtypes)
        return f"    static constexpr bool k{name}IsFloat[] = {{{values or 'false'}}};\n"

    return (
        f"  struct Arrays {{\n{table('Input', inputs)}{table('Output', outputs)}"
        f"{floats('Input', input_dtypes)}{floats('Output', output_dtypes)}  }};\n"
    )
