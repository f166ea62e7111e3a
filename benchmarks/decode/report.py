"""The table of decoding: how fast keys and values are read."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.panels import Panel, Table


def tables(panel: Panel) -> Iterator[Table]:
    """Gigabytes a second of what a step has to read, beside those of a copy, if measured."""
    cells = [["problem and implementation", "GB", "GB/s", "of a copy"]]
    for key, row in panel.rows.items():
        if row.get("bytes_read") and row.get("us"):
            nbytes, speed = row["bytes_read"], row["bytes_read"] / row["us"]
            copied = row.get("copied_bytes_per_us")
            of_copy = f"{speed / copied:.2f}" if copied else ""
            cells.append([" ".join(key), f"{nbytes / 1e9:.3g}", f"{speed / 1e3:,.0f}", of_copy])
    if len(cells) > 1:
        yield Table(f"{panel.title}: keys and values read", cells, [])
