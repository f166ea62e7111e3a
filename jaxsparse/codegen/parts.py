"""Cuts a program of scalars in two parts: what can be computed before all inputs are there."""

from __future__ import annotations

from jaxsparse.codegen.program import Equation, Operand, Program, Value

_PASSED = ("float32", "bool")  # what passes from one part to the other


def in_two_parts(program: Program, late_inputs: int) -> tuple[Program, Program]:
    """The part of a program that its first inputs are not needed for, and the rest of it.

    Args:
        program: one without what no result needs.
        late_inputs: how many inputs come late, the first ones.

    Returns:
        The first part takes the other inputs and returns the values that the second part reads,
        float32 or bool. The second part takes the late inputs and these values.
    """
    comes_late: set[Operand] = set(program.inputs[:late_inputs])
    late: set[Equation] = set()
    for equation in program.equations:
        if any(x in comes_late for x in equation.operands):
            late.add(equation)
            comes_late.update(equation.results)
    # What can't be passed is computed where it is read.
    read: set[Operand] = set(program.outputs)
    for equation in reversed(program.equations):
        is_read = any(x in read for x in equation.results)
        if is_read and any(x.dtype not in _PASSED for x in equation.results):
            late.add(equation)
        if equation in late:
            read.update(equation.operands)
    made_late = {x for equation in late for x in equation.results}
    early_values = [
        *program.inputs[late_inputs:],
        *(x for equation in program.equations for x in equation.results if x not in made_late),
    ]
    passed: tuple[Value, ...] = tuple(x for x in early_values if x in read)
    second = Program(
        (*program.inputs[:late_inputs], *passed),
        tuple(equation for equation in program.equations if equation in late),
        program.outputs,
    )
    needed: set[Operand] = set(passed)
    first = []
    for equation in reversed(program.equations):
        if equation not in late and any(x in needed for x in equation.results):
            first.append(equation)
            needed.update(equation.operands)
    return Program(program.inputs[late_inputs:], tuple(reversed(first)), passed), second
