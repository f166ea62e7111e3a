"""Figures that stand beside those measured here, in tables and plots: of papers, and of DyNet.

T. Gale, M. Zaharia, C. Young, E. Elsen. Sparse GPU Kernels for Deep Learning. 2020. One V100.

F. Khorasani, H. Asghari Esfeden, N. Abu-Ghazaleh, V. Sarkar. In-Register Parameter Caching for
Dynamic Neural Nets with Virtual Persistent Processor Specialization. 2018. One Titan V.

DyNet was measured once, on an H200; it is no longer maintained, and not run by these benchmarks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.panels import OURS, Panel, forced_variant

SOURCE = "Gale et al. 2020, V100"
KHORASANI_SOURCE = "Khorasani et al. 2018, Titan V"
DYNET_SOURCE = "DyNet, H200"


class Speedup(NamedTuple):
    """Over cuSPARSE on a suite's problems: the geometric mean, the most, the most TFLOP/s."""

    mean: float
    most: float | None = None
    teraflops: float | None = None


# (suite, operation, dtype) -> Table I, and the text on recurrent networks. The suite `dlmc` has
# some of the paper's matrices.
_OVER_CUSPARSE = {
    ("dlmc", "spmm", "float32"): Speedup(3.58, 14.2, 4.29),
    ("dlmc", "spmm", "float16"): Speedup(5.97, 297.5, 5.57),
    ("dlmc", "sddmm", "float32"): Speedup(2.19, 6.58, 4.11),
    ("rnn", "spmm", "float32"): Speedup(3.47),
    ("rnn", "sddmm", "float32"): Speedup(2.69),
}

# (operation, variant) -> Table II: what is left of the throughput without a technique, in percent,
# by network and batch. It has pruned weights, in float32.
_NETWORKS = ("transformer_b1", "transformer_b8", "rn50_b1", "rn50_b256")
_WITHOUT_TECHNIQUE = {
    key: dict(zip(_NETWORKS, percent, strict=True))
    for key, percent in {
        ("spmm", "tiled_rows_unordered"): (96.1, 88.9, 91.7, 78.5),
        ("spmm", "tiled_rows_scalar"): (100.1, 80.9, 87.9, 64.8),
        ("spmm", "tiled_rows_rolled"): (92.0, 94.1, 87.8, 92.6),
        ("sddmm", "tiled_entries_unbalanced"): (101.1, 97.1, 100.9, 96.8),
        ("sddmm", "tiled_entries_scalar"): (98.3, 132.0, 120.2, 170.6),
    }.items()
}

# Figure 7: the throughput of spmm that is left where rows are most uneven, in percent of that with
# rows of one length; 8192 x 2048 by 128 columns, 75 % sparse, float32.
UNEVEN_ROWS = {"as they stand": 47.5, "reordered": 96.5}


def over_cusparse(panel: Panel, label: str) -> Speedup | None:
    """What stands beside our own on a panel's problems; None for others, and for gradients."""
    name, _, dtype = label.partition(" ")
    if name != OURS or panel.passed != "forward":
        return None
    return _OVER_CUSPARSE.get((panel.suite, panel.operation, dtype or "float32"))


def without_technique(panel: Panel, label: str) -> dict[str, float]:
    """What stands beside a kernel that was forced, by group of problems; nothing by others."""
    variant, dtype = forced_variant(label) or ("", "")
    if dtype or panel.passed != "forward":
        return {}
    return _WITHOUT_TECHNIQUE.get((panel.operation, variant), {})


# suite -> Table I, MB by batch, and Table II, seconds to compile and to load by net
KHORASANI: dict[str, dict[Any, str]] = {
    "weight_loads": {
        1: "352.62",
        2: "176.31",
        4: "88.15",
        8: "44.07",
        16: "22.03",
        32: "11.01",
        64: "5.50",
        128: "2.75",
    },
    "compile": {
        "bilstm": "28.66 + 14.65",
        "bilstm_letters": "28.27 + 20.02",
        "td_rnn": "73.85 + 46.69",
        "td_lstm": "11.43 + 7.40",
        "rvnn": "74.61 + 47.78",
        "tree_lstm": "11.10 + 7.29",
    },
}

# (net, batch) -> examples a second in training, hidden and embedding 256, packing included: the
# faster of DyNet's two ways to batch. Trees of SST, sentences of WikiNER.
DYNET: dict[tuple[str, int], float] = {
    ("tree_lstm", 1): 273.6,
    ("tree_lstm", 8): 856.4,
    ("tree_lstm", 64): 1945.8,
    ("tree_lstm", 256): 2023.0,
    ("bilstm", 1): 146.4,
    ("bilstm", 16): 724.3,
    ("bilstm", 128): 1713.7,
}
