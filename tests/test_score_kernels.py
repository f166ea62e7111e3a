"""Kernels with functions of scores compiled into them, without a GPU."""

from __future__ import annotations

import struct

import jax
import jax.numpy as jnp
import pytest

from jaxsparse import H200, BlockMask, Indexed, _ffi, masks, sparse_attention
from jaxsparse.ops.attention import attention_cotangent_p
from jaxsparse.primitive import OPERATIONS, choose, equations, typed_call

try:
    _ffi.nvrtc_version()
except RuntimeError as error:
    pytest.skip(f"needs NVRTC: {error}", allow_module_level=True)

MMA_TILES = ".tiles = {{.head_size = {0}, .value_size = {0}, .number_bytes = 2, .rows = {1}}}"
SCORE = """
namespace jaxsparse {
struct Score {
  static constexpr bool kExists = true;
  static constexpr int kOperands = 2, kGradients = 2;
  static constexpr ScoreOperand kOperand[] = {
      {.by_head = true, .by_distance = true},
      {.by_row = true, .by_column = true, .type = ScoreType::kBFloat16}};
  static constexpr ScoreSums kSums[] = {ScoreSums::kByDistance, ScoreSums::kNone};
  template <typename Values>
  static float Apply(float score, int row, int column, const Values& values) {
    return score * values.template Number<0>() + values.template Number<1>();
  }
  template <typename Values>
  static float Differentiate(float score, int row, int column, const Values& values, float* by) {
    *by = values.template Number<0>();
    return Apply(score, row, column, values);
  }
  template <typename Values>
  static float DifferentiateAll(float score, int row, int column, const Values& values, float* by,
                                float* gradients) {
    gradients[0] = score;
    gradients[1] = 1;
    return Differentiate(score, row, column, values, by);
  }
};
}  // namespace jaxsparse
"""


@pytest.mark.parametrize(
    "file, kernel, fields",
    [
        ("tiles", "AttentionTiles", "AttentionTilesConfig{.head_size = 128, .value_size = 128}"),
        ("rows", "AttentionCotangentOfRows", "AttentionRowsConfig{.head_size = 128}"),
        ("keys", "AttentionCotangentOfKeys", "AttentionKeysConfig{.head_size = 128}"),
    ],
)
@pytest.mark.parametrize(
    "scoring", ["Score, false, true", "Score, true, true", "NoFunction, true, false"]
)
def test_kernels_with_functions_of_scores(file, kernel, fields, scoring, monkeypatch):
    """They compile, with little on the stack: `rows` has derivatives by both operands here."""
    monkeypatch.setenv("JAXSPARSE_CACHE_DIR", "")
    source = f"attention/kernels/{file}.cu"
    text = f'#include "attention/kernels/scores.cuh"\n{SCORE}#include "{source}"\n'
    expression = (
        f"jaxsparse::{kernel}<jaxsparse::bfloat16, jaxsparse::{fields}, "
        f"jaxsparse::Scoring<jaxsparse::{scoring}>>"
    )
    code = _ffi.compile_kernel(f"scored/{source}", expression, "sm_90a", text)
    assert frame_bytes(code) <= {"tiles": 32, "rows": 640, "keys": 64}[file]


@pytest.mark.parametrize(
    ("file", "kernel", "fields"),
    [
        ("tiles_mma", "AttentionTilesMma", f"AttentionMmaConfig{{{MMA_TILES.format(128, 128)}}}"),
        (
            "rows_mma",
            "AttentionCotangentOfRowsMma",
            f"CotangentMmaConfig{{{MMA_TILES.format(128, 64)}, .stages = 1}}",
        ),
        (
            "keys_mma",
            "AttentionCotangentOfKeysMma",
            f"CotangentMmaConfig{{{MMA_TILES.format(128, 64)}, .stages = 1, .columns = 32}}",
        ),
    ],
)
def test_kernels_by_single_warps_with_functions_of_scores(file, kernel, fields, monkeypatch):
    """They compile for older GPUs, and registers have room for all."""
    monkeypatch.setenv("JAXSPARSE_CACHE_DIR", "")
    source = f"attention/kernels/{file}.cu"
    score = SCORE.replace("ScoreSums::kByDistance", "ScoreSums::kByRow")
    text = f'#include "attention/kernels/scores.cuh"\n{score}#include "{source}"\n'
    expression = (
        f"jaxsparse::{kernel}<jaxsparse::bfloat16, jaxsparse::{fields}, "
        "jaxsparse::Scoring<jaxsparse::Score, true, true>>"
    )
    assert frame_bytes(_ffi.compile_kernel(f"scored/{source}", expression, "sm_80", text)) == 0


@pytest.mark.parametrize(
    ("sums", "most"), [("kByDistance, kByRow", 192), ("kByColumn, kByDistance", 768)]
)
def test_sums_over_columns_and_distances(sums, most, monkeypatch):
    """One of them stays in registers, but for little; two do not."""
    monkeypatch.setenv("JAXSPARSE_CACHE_DIR", "")
    source = "attention/kernels/rows.cu"
    of_call = ", ".join(f"ScoreSums::{each}" for each in sums.split(", "))
    score = SCORE.replace("ScoreSums::kByDistance, ScoreSums::kNone", of_call)
    assert of_call in score
    text = f'#include "attention/kernels/scores.cuh"\n{score}#include "{source}"\n'
    expression = (
        "jaxsparse::AttentionCotangentOfRows<jaxsparse::bfloat16, "
        "jaxsparse::AttentionRowsConfig{.head_size = 128}, "
        "jaxsparse::Scoring<jaxsparse::Score, true, true>>"
    )
    assert frame_bytes(_ffi.compile_kernel(f"scored/{source}", expression, "sm_90a", text)) <= most


def frame_bytes(code):
    """The stack frame of the one kernel in a file of machine code, by its sections .nv.info."""
    table, size, count, names = (
        struct.unpack_from(form, code, at)[0]
        for form, at in (("<Q", 0x28), ("<H", 0x3A), ("<H", 0x3C), ("<H", 0x3E))
    )
    sections = [struct.unpack_from("<IIQQQQ", code, table + i * size) for i in range(count)]
    frames = []
    for name, _, _, _, begin, length in sections:
        at = sections[names][4] + name
        if code[at : code.index(b"\0", at)] != b".nv.info":
            continue
        end = begin + length
        while begin < end:
            form, attribute, value = struct.unpack_from("<BBH", code, begin)
            if attribute == 0x11:  # EIATTR_FRAME_SIZE: the function's symbol and bytes
                frames.append(struct.unpack_from("<II", code, begin + 4)[1])
            begin += 4 + (value if form == 4 else 0)
    assert frames
    return max(frames)


def test_printed_functions_are_those_of_the_call():
    """A text that another call has, as in a damaged program, does not compile."""
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((2, 511), jnp.float32)
    mask = BlockMask.from_mask(masks.causal(), (256, 256))

    def gradient(x, table):
        def loss(table):
            out = sparse_attention(x, x, x, mask, bias=Indexed(table, "nd"))
            return jnp.sum(out.astype(jnp.float32))

        return jax.grad(loss)(table)

    jaxpr = jax.make_jaxpr(gradient)(x, table).jaxpr
    (eqn,) = (eqn for eqn in equations(jaxpr) if eqn.primitive is attention_cotangent_p)
    call = typed_call(OPERATIONS[attention_cotangent_p], eqn.params, [v.aval for v in eqn.invars])
    made = choose(call, H200)

    def compile_with(**attributes):
        types = [[(a.dtype.name, a.shape) for a in side] for side in (made.operands, made.results)]
        kernels = _ffi.kernels_on_cuda(
            "attention_cotangent",
            *types,
            {**made.attributes, **attributes},
            compute_capability=90,
            multiprocessors=132,
            shared_bytes=232448,
        )
        assert len(kernels) == 2
        for file, expression, text in kernels:
            # The front end is enough: what comes last keeps it from going on.
            end = 'static_assert(false, "the text is sound");'
            with pytest.raises(RuntimeError) as caught:
                _ffi.compile_kernel(file, expression, "sm_90a", f"{text}{end}")
            yield str(caught.value)

    with pytest.raises(ValueError, match="score_gradients must have at most 0 words"):
        list(compile_with(score_operands=""))
    text = made.attributes["score"]
    for message in compile_with():
        assert "the text is sound" in message and "1 error detected" in message, message
    for old, new in (
        (".by_distance = true", ".by_row = true, .by_column = true"),
        (".by_head = true, ", ""),
        ("kFloat32", "kBFloat16"),
        ("kOperands = 1", "kOperands = 2"),
        ("kByDistance", "kByRow"),
        ("kGradients = 1", "kGradients = 0"),
    ):
        assert old in text
        for message in compile_with(score=text.replace(old, new)):
            assert "the function of scores is that of another call" in message, message
