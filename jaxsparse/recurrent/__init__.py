"""Recurrent scans whose weights, dense or sparse, stay on chip."""

from jaxsparse.recurrent.cells import GRU, LSTM, SLSTM, elman
from jaxsparse.recurrent.failures import check
from jaxsparse.recurrent.layout import pack
from jaxsparse.recurrent.scan import bidirectional_scan, scan

__all__ = [
    "GRU",
    "LSTM",
    "SLSTM",
    "bidirectional_scan",
    "check",
    "elman",
    "pack",
    "scan",
]
