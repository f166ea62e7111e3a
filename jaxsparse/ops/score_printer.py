"""Prints functions of scores as CUDA device code, for ``ffi/attention/kernels/scores.cuh``."""

from __future__ import annotations

import functools

from jaxsparse.codegen.check import checked_program
from jaxsparse.codegen.operations import APPROXIMATE
from jaxsparse.codegen.printer import Source, print_pointwise
from jaxsparse.ops.score_functions import ScoreFunction

_TYPES = {
    "float32": "kFloat32",
    "bfloat16": "kBFloat16",
    "float16": "kFloat16",
    "int32": "kInt32",
    "uint32": "kUint32",
    "bool": "kBool",
}
_FIELDS = {"n": "by_head", "t": "by_row", "s": "by_column", "d": "by_distance"}
_SUMS = {"t": "kByRow", "s": "kByColumn", "d": "kByDistance", "ts": "kNone"}
MOST_OPERANDS = 8  # kMaxScoreOperands in ffi/attention/problem.h


@functools.lru_cache(maxsize=256)
def print_score(
    function: ScoreFunction,
    axes: tuple[str, ...],
    dtypes: tuple[str, ...],
    varied: tuple[int, ...] = (),
    sums: tuple[str, ...] = (),
) -> str:
    """The struct of a function whose operands are indexed so and have these dtypes.

    With derivatives by the operands that are ``varied``, whose cotangents are summed by ``sums``:
    rows ("t"), columns ("s"), distances ("d") or nothing ("ts").

    Functions that take most of their time print in forms of about 11 bits: scores of kernels with
    operands of 16 bits have no more.

    Raises:
        ValueError: where it can't be printed, or has too many operands.
    """
    if len(axes) > MOST_OPERANDS:
        raise ValueError(f"it has {len(axes)} operands, kernels take {MOST_OPERANDS}")
    sources = [
        Source("s", "score"),
        Source("t", "row"),
        Source("u", "column"),
        *(Source(f"x{i}", f"values.template Number<{i}>()") for i in range(len(axes))),
    ]
    bodies = []
    gradients = [f"gradients[{i}]" for i in range(len(varied))]
    for jaxpr, targets in (
        (function.jaxpr, ["result"]),
        (function.derivatives(), ["result", "*derivative"]),
        (function.derivatives(varied), ["result", "*derivative", *gradients]),
    ):
        program = checked_program(
            jaxpr, "it can't be printed", function="function", dtypes=tuple(_TYPES)
        )
        lines = print_pointwise(program, sources, targets, APPROXIMATE)
        bodies.append("\n".join(f"    {line}" for line in lines))
    of_sums = ", ".join(f"ScoreSums::{_SUMS[each]}" for each in sums) or "{}"
    operands = ", ".join(_operand(a, d) for a, d in zip(axes, dtypes, strict=True)) or "{}"
    return f"""\
namespace jaxsparse {{

struct Score {{
  static constexpr bool kExists = true;
  static constexpr int kOperands = {len(axes)};
  static constexpr ScoreOperand kOperand[] = {{{operands}}};
  static constexpr int kGradients = {len(varied)};
  static constexpr ScoreSums kSums[] = {{{of_sums}}};

  template <typename Values>
  __device__ __forceinline__ static float Apply(float score, int row, int column,
                                                const Values& values) {{
    namespace ops = jaxsparse::pointwise;
    float result;
{bodies[0]}
    return result;
  }}
  template <typename Values>
  __device__ __forceinline__ static float Differentiate(float score, int row, int column,
                                                        const Values& values, float* derivative) {{
    namespace ops = jaxsparse::pointwise;
    float result;
{bodies[1]}
    return result;
  }}
  template <typename Values>
  __device__ __forceinline__ static float DifferentiateAll(float score, int row, int column,
                                                           const Values& values, float* derivative,
                                                           float* gradients) {{
    namespace ops = jaxsparse::pointwise;
    float result;
{bodies[2]}
    return result;
  }}
}};

}}  // namespace jaxsparse
"""


def _operand(axes: str, dtype: str) -> str:
    fields = [f".{_FIELDS[axis]} = true" for axis in axes if axis in _FIELDS]
    return "{" + ", ".join([*fields, f".type = ScoreType::{_TYPES[dtype]}"]) + "}"
