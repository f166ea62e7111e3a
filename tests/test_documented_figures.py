"""Figures of the README, and their copies in the documentation, are those of the result files."""

from __future__ import annotations

import functools
import json
import math
import pathlib

import pytest

from benchmarks.panels import read_result

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@functools.cache
def times(name):
    """Microseconds by (problem, dtype, pass) and implementation.

    Of a scan they are those of a step, with the floor beside them, and the dtype is None, as peers
    choose theirs.
    """
    found = {}
    for row in read_result(RESULTS / name)["results"]:
        if row["us"] is None:
            continue
        steps = row.get("length", 1)
        dtype = None if "length" in row else row["dtype"]
        of_problem = found.setdefault((row["problem"], dtype, row["pass"]), {})
        if "floor_us" in row:
            of_problem["floor"] = row["floor_us"]
        name = row["implementation"]
        of_problem[name] = min(row["us"] / steps, of_problem.get(name, math.inf))
    return found


def on_a_cpu(problem, *passes):
    """Of jaxsparse, the dense product, BCSR, and in the forward pass SciPy."""
    rows = [times("cpu/spmm_square.json")[problem, "float32", name] for name in passes]
    ours_and_peers = [row[name] for name in ("jaxsparse", "dense", "bcsr") for row in rows]
    return *ours_and_peers, rows[0].get("scipy")


def over_cusparse(name):
    """Our time over that of cuSPARSE, which PyTorch calls: (geometric mean, least, most)."""
    ratios = [of["jaxsparse"] / of["torch"] for of in times(f"h200/{name}.json").values()]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)), min(ratios), max(ratios)


def speedup(name):
    """How many times as fast as cuSPARSE: (geometric mean, least)."""
    mean, _, most = over_cusparse(name)
    return 1 / mean, 1 / most


def sparsity(problem):
    return 100 * float(problem.rpartition("_s")[2])


def first_faster(dtype, peer, peer_dtype):
    """The percentage of sparsity from which on a product is faster than the dense one."""
    found = times("h200/spmm_crossover.json")
    problems = sorted({problem for problem, *_ in found}, key=sparsity)
    faster = [
        found[x, dtype, "forward"]["jaxsparse"] < found[x, peer_dtype, "forward"][peer]
        for x in problems
    ]
    first = faster.index(True)
    assert all(faster[first:])
    return [sparsity(problems[first])]


def attention(*masks):
    """Of masks, the forward pass and that with gradients; last cuDNN's, of dense attention."""
    found = times("h200/sparse_attention_masks.json")
    rows = [(f"{mask}_12288", "jaxsparse") for mask in masks]
    return [
        found[problem, "bfloat16", name][implementation]
        for problem, implementation in [*rows, ("causal_12288", "cudnn-bf16")]
        for name in ("forward", "gradient")
    ]


def attention_over_cudnn(mask):
    """Our time over that of cuDNN's dense attention, and the other way around."""
    forward, gradient, cudnn_forward, cudnn_gradient = attention(mask)
    ratios = forward / cudnn_forward, gradient / cudnn_gradient
    return *ratios, *(1 / ratio for ratio in ratios)


def tokens(work):
    """Tokens a second of the Transformer with sparse and with dense attention."""
    result = json.loads((RESULTS / "h200" / "sparse_transformer_throughput.json").read_text())
    return [result[name][work]["tokens_per_second"] for name in ("sparse", "dense")]


def step(name, problem):
    """Of a scan: (floor, ours, ours with the matrix stored densely or None, the fastest peer)."""
    of = times(f"h200/{name}.json")[problem, None, "forward"]
    peers = [us for x, us in of.items() if x != "floor" and not x.startswith("jaxsparse")]
    return of["floor"], of["jaxsparse"], of.get("jaxsparse-dense"), min(peers)


def layers():
    """Of all: our shortest and longest step, the least and largest ratio of the fastest peer's."""
    name = "recurrent_layers"
    steps = [step(name, problem) for problem, *_ in times(f"h200/{name}.json")]
    ours, ratios = [x for _, x, *_ in steps], [peer / x for _, x, _, peer in steps]
    return min(ours), max(ours), min(ratios), max(ratios)


README, PERFORMANCE = "README.md", "docs/performance.md"
SCANS = "docs/persistent_scans.md"
CPU_PROBLEMS = {
    "90 % sparse, n = 128": "1024x1024_n128_s0.9",
    "90 % sparse, n = 4": "1024x1024_n4_s0.9",
    "90 % sparse, n = 1": "1024x1024_n1_s0.9",
    "70 % sparse, n = 128": "1024x1024_n128_s0.7",
}
CPU_ROWS = [
    (
        README,
        "{:,.0f} / {:,.0f} | {:,.0f} / {:,.0f} | {:,.0f} / {:,.0f} | {:,.0f} |",
        ["forward", "gradient"],
    ),
    (PERFORMANCE, "{:,.0f} | {:,.0f} | {:,.0f} | {:,.0f} |", ["forward"]),
    (PERFORMANCE, "{:,.0f} | {:,.0f} | {:,.0f} |", ["gradient"]),
]
SQUARE = CPU_PROBLEMS["90 % sparse, n = 128"]
TF32 = "float32", "dense-tf32", "float32"
BFLOAT16 = "bfloat16", "dense-bf16", "bfloat16"
LARGE = "recurrent_size", "RNN_4096_d0.1_b4_t256_bfloat16"
SPEECH = "recurrent_speech", "RNN_3072_d0.12_b1_t256_bfloat16"
# Rows by layer and page.
LAYERS = {
    "RNN_1152_dense_b4_t256_bfloat16": {
        PERFORMANCE: "| RNN 1152, dense | {:.2f} | {:.2f} | |",
        SCANS: "| RNN 1152 | {0:.2f} | | {1:.2f} | {3:.2f}, cuDNN |",
    },
    "LSTM_1024_dense_b4_t256_bfloat16": {
        PERFORMANCE: "| LSTM 1024, dense | {:.2f} | {:.2f} | |",
        SCANS: "| LSTM 1024 | {0:.2f} | | {1:.2f} | {3:.2f}, cuDNN |",
    },
    "LSTM_1792_dense_b4_t256_bfloat16": {
        PERFORMANCE: "| LSTM 1792, dense | {0:.2f} | {1:.2f} | | {3:.2f} |",
        SCANS: "| LSTM 1792 | {0:.2f} | | {1:.2f} | {3:.2f}, `lax.scan` |",
    },
    "RNN_1792_d0.1_b4_t256_float32": {
        PERFORMANCE: "| RNN 1792, 10 %, float32 | {:.2f} | {:.2f} | {:.2f} |",
        SCANS: "| RNN 1792, 10 %, float32 | {:.2f} | {:.2f}, pairs | {:.2f} | {:.2f}, cuDNN |",
    },
    "LSTM_1448_d0.047_b4_t256_bfloat16": {
        PERFORMANCE: "| LSTM 1448, 4.7 % | {:.2f} | {:.2f} | {:.2f} |",
        SCANS: "| LSTM 1448, 4.7 % | {:.2f} | {:.2f}, pairs | {:.2f} | {:.2f}, cuDNN |",
    },
    "RNN_5760_d0.01_b4_t256_bfloat16": {
        PERFORMANCE: "| RNN 5760, 1 % | {0:.2f} | {1:.2f} | | {3:.1f} |",
        SCANS: "| RNN 5760, 1 % | {0:.2f} | {1:.2f}, pairs | does not fit | {3:.1f}, `lax.scan` |",
    },
    "RNN_11520_d0.01_b4_t256_bfloat16": {
        PERFORMANCE: "| RNN 11520, 1 % | {0:.2f} | {1:.2f} | | {3:.1f} |",
        SCANS: "| RNN 11520, 1 % | {0:.2f} | {1:.2f}, pairs | does not fit | {3:.1f}, `lax.scan` |",
    },
}

# The page, its text, and the function of the result files, with arguments, that gives its numbers.
FIGURES = [
    (
        README,
        "128 columns: {:,.0f} us, a dense product takes {:,.0f} |",
        on_a_cpu,
        SQUARE,
        "forward",
    ),
    *(
        (page, f"| {label} | {row}", on_a_cpu, problem, *passes)
        for label, problem in CPU_PROBLEMS.items()
        for page, row, passes in CPU_ROWS
    ),
    (README, "H200: {:.2f} of the time of cuSPARSE (geometric mean) |", over_cusparse, "spmm_rnn"),
    (README, "{1:.2f} to {2:.2f} of the time of cuSPARSE", over_cusparse, "spmm_rnn"),
    (README, "(geometric mean of 72 problems {:.2f})", over_cusparse, "spmm_rnn"),
    (README, "{1:.2f} to {2:.2f} of cuSPARSE's", over_cusparse, "spmm_rnn_float16"),
    (README, "in float16 ({:.2f})", over_cusparse, "spmm_rnn_float16"),
    (README, "sampled product {1:.2f} to {2:.2f} ({0:.2f})", over_cusparse, "sddmm_rnn"),
    (PERFORMANCE, "| 3.2 times as fast | {:.2f}, the least {:.2f} |", speedup, "spmm_rnn"),
    (PERFORMANCE, "| 4 times as fast | {:.2f}, the least {:.2f} |", speedup, "spmm_rnn_float16"),
    (PERFORMANCE, "| 2.8 times as fast | {:.2f}, the least {:.2f} |", speedup, "sddmm_rnn"),
    (PERFORMANCE, "none slower | {:.2f}, the least {:.2f} |", speedup, "spmm_dlmc"),
    (PERFORMANCE, "144 problems | | {:.2f}, the least {:.2f} |", speedup, "sddmm_dlmc"),
    (README, "in float32 from {:.0f} % sparsity on", first_faster, "float32", "dense", "float32"),
    (README, "those in TF32 from {:.0f} %", first_faster, *TF32),
    (README, "dense ones in bfloat16 from {:.0f} %", first_faster, *BFLOAT16),
    (PERFORMANCE, "float32 from {:.0f} % sparsity on", first_faster, "float32", "dense", "float32"),
    (PERFORMANCE, "than TF32 from {:.0f} %", first_faster, *TF32),
    (PERFORMANCE, "than dense bfloat16 from {:.0f} % on", first_faster, *BFLOAT16),
    (
        README,
        "on an H200: {:.0f} us, with gradients {:.0f}; cuDNN's dense causal attention takes "
        "{:.0f} and {:,.0f} |",
        attention,
        "band256",
    ),
    (
        PERFORMANCE,
        "cuDNN takes {2:.2f} of our time in bfloat16, and {3:.2f} with gradients",
        attention_over_cudnn,
        "causal",
    ),
    (
        README,
        "takes {:.2f} times as long as cuDNN's dense causal attention, and {:.2f} times with",
        attention_over_cudnn,
        "paper256",
    ),
    (PERFORMANCE, "| causal | 4,656 of 9,216 | {:.0f} / {:,.0f} |", attention, "causal"),
    (PERFORMANCE, "causal | 4,656 | {:.0f} / {:,.0f} |", attention, "paper256"),
    (PERFORMANCE, "| a band of 256, causal | 285 | {:.0f} / {:.0f} |", attention, "band256"),
    (README, "{:,.0f} tokens/s with sparse attention and at {:,.0f} with", tokens, "training"),
    (PERFORMANCE, "| training, tokens/s | {:,.0f} | {:,.0f} |", tokens, "training"),
    (PERFORMANCE, "| forward, tokens/s | {:,.0f} | {:,.0f} |", tokens, "forward"),
    (README, "the fastest peer takes {2:.2f} to {3:.1f} times as long |", layers),
    (README, "above takes {:.2f} to {:.2f} us", layers),
    (README, "with dense or sparse weights, takes {2:.2f} to {3:.1f} times as long", layers),
    (PERFORMANCE, "of all peers takes {2:.2f} to {3:.1f} times as long as jaxsparse", layers),
    *(
        (page, text, step, "recurrent_layers", problem)
        for problem, texts in LAYERS.items()
        for page, text in texts.items()
    ),
    (SCANS, "| RNN 4096, 10 % | {:.2f} | {:.2f}, dense form | {:.2f} | {:.2f}", step, *LARGE),
    (SCANS, "| RNN 3072, 12 %, batch 1 | {:.2f} | {:.2f}, pairs | {:.2f} | {:.2f}", step, *SPEECH),
]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: f"{figure[0]}: {figure[1]}")
def test_figures_are_those_measured(figure):
    page, text, of_results, *arguments = figure
    expected = text.format(*of_results(*arguments))
    assert expected in " ".join((ROOT / page).read_text().split())
