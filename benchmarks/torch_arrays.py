"""Arrays of PyTorch, which is imported only where it is asked for, and how exact its products are.

Float32 is float32 throughout, not TF32, unless that is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np


def torch_module() -> Any:
    """PyTorch, with float32 products that are exact."""
    torch = importlib.import_module("torch")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch


def to_device(array: np.ndarray, dtype: str) -> Any:
    """A tensor of so many bits on the GPU."""
    torch = torch_module()
    return torch.from_numpy(np.ascontiguousarray(array)).cuda().to(getattr(torch, dtype))


def as_float64(tensor: Any) -> np.ndarray:
    """On the host."""
    return np.asarray(tensor.detach().float().cpu().numpy(), np.float64)


def nbytes(tensors: Sequence[Any]) -> int:
    """Of all of them."""
    return sum(x.numel() * x.element_size() for x in tensors)


@contextmanager
def tf32(torch: Any, allowed: bool) -> Iterator[None]:
    """Products of float32 in TF32, or exactly."""
    switches = (torch.backends.cudnn, torch.backends.cuda.matmul)
    for switch in switches:
        switch.allow_tf32 = allowed
    try:
        yield
    finally:
        for switch in switches:
            switch.allow_tf32 = False
