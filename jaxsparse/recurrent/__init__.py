"""Recurrent scans whose weights, dense or sparse, stay on chip."""

from jaxsparse.device import H200, Device
from jaxsparse.recurrent.cells import GRU, LSTM, RNN
from jaxsparse.recurrent.diagnose import check, explain
from jaxsparse.recurrent.layout import pack
from jaxsparse.recurrent.scan import bidirectional_scan, scan

__all__ = [
    "GRU",
    "H200",
    "LSTM",
    "RNN",
    "Device",
    "bidirectional_scan",
    "check",
    "explain",
    "pack",
    "scan",
]
