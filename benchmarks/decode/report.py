"""The table of decoding: how fast keys and values are read."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.panels import Panel, Table


def tables(panel: Panel) -> Iterator[Table]:
    """Gigabytes a second of what a step has to read, where something was measured."""
    cells = [["problem and implementation", "GB", "GB/s"]]
    for key, row in panel.rows.items():
        if row.get("bytes_read") and row.get("us"):
            nbytes = row["bytes_read"]
            cells.append([" ".join(key), f"{nbytes / 1e9:.3g}", f"{nbytes / row['us'] / 1e3:,.0f}"])
    if len(cells) > 1:
        yield Table(f"{panel.title}: keys and values read", cells, [])
