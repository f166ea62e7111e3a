"""Scans that timed out."""

from __future__ import annotations

from jaxsparse import _ffi
from jaxsparse.recurrent.engine import wait_limit


def check() -> None:
    """Waits for all GPUs that run scans, and raises if one of the scans timed out.

    A kernel whose blocks wait for one another longer than ``JAXSPARSE_SCAN_WAIT_LIMIT`` seconds (10
    if it is not set) waits no more, and what it did not compute is NaN. By then its call has
    returned, so the failure is reported here, or by the next scan on that GPU.

    Raises:
        RuntimeError: if a scan timed out since this was last asked, naming the GPU.

    >>> check()
    """
    failed = _ffi.take_scan_failures()
    if failed:
        gpus = ", ".join(map(str, failed))
        raise RuntimeError(
            f"recurrent.check: a scan on GPU {gpus} timed out: its blocks waited for one another "
            f"longer than {wait_limit():g} s (JAXSPARSE_SCAN_WAIT_LIMIT); what it did not "
            "compute is NaN"
        )
