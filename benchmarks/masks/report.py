"""Tables of attention over masks: how many times as fast as each peer, and what comes before."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.panels import OURS, Panel, Table
from benchmarks.run import Row

_COSTS = {
    "first call, s": ("first_call_s", 1, ".1f"),
    "mask, ms": ("mask_ms", 1, ".3g"),
    "the first, ms": ("mask_first_ms", 1, ".3g"),
    "in the program, ms": ("mask_in_program_ms", 1, ".3g"),
    "mask, MB": ("mask_bytes", 1e6, ".3g"),
    "making it, MB": ("mask_making_bytes", 1e6, ".3g"),
    "memory, MB": ("peak_bytes", 1e6, ",.0f"),
}


def tables(panel: Panel) -> Iterator[Table]:
    """Both tables, where there is something to show."""
    yield from _ratios(panel)
    yield from _costs(panel)


def _ratios(panel: Panel) -> Iterator[Table]:
    for label in (label for label in panel.labels if label.split()[0] == OURS):
        peers = [peer for peer in panel.labels if peer.split()[0] != OURS]
        cells = [["mask", *peers]]
        for problem in panel.problems:
            ratios = (panel.speedups(label, peer, [problem]) for peer in peers)
            cells.append([problem, *(f"{ratio[0]:.2f}" if ratio else "-" for ratio in ratios)])
        if peers:
            yield Table(f"{panel.title}: times as fast {label} is as", cells, [])


def _costs(panel: Panel) -> Iterator[Table]:
    measured = {key: row for key, row in panel.rows.items() if row.get("first_call_s")}
    if measured:
        cells = [["mask and implementation", *_COSTS]]
        cells += [[" ".join(key), *_shown(row)] for key, row in measured.items()]
        yield Table(f"{panel.title}: before the first result, and memory", cells, [])


def _shown(row: Row) -> Iterator[str]:
    for key, unit, digits in _COSTS.values():
        value = row.get(key)
        yield "-" if value is None else format(value / unit, digits)
