"""Recurrent scans whose weights, dense or sparse, stay on chip."""

from jaxsparse.recurrent.bidirectional_stack import bidirectional_stack_scan
from jaxsparse.recurrent.cells import GRU, LSTM, SLSTM, elman
from jaxsparse.recurrent.failures import check
from jaxsparse.recurrent.layers import Layer
from jaxsparse.recurrent.layout import pack
from jaxsparse.recurrent.pipeline import pipelined_stack_scan
from jaxsparse.recurrent.scan import bidirectional_scan, scan
from jaxsparse.recurrent.stack import stack_scan

__all__ = [
    "GRU",
    "LSTM",
    "SLSTM",
    "Layer",
    "bidirectional_scan",
    "bidirectional_stack_scan",
    "check",
    "elman",
    "pack",
    "pipelined_stack_scan",
    "scan",
    "stack_scan",
]
