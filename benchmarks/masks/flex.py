"""PyTorch's FlexAttention, compiled, by a block mask of the same mask."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.masks.made import Made, MaskCost, timed
from benchmarks.masks.problems import Problem
from benchmarks.memory import most_bytes
from jaxsparse.masks.kinds import _thresholds
from jaxsparse.timing import Program


def _lowbias32(x: Any) -> Any:
    """The hash of `jaxsparse.masks.random`, of int32 whose sums and products wrap around."""
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * (0x846CA68B - 2**32)
    return x ^ (x >> 16 & 0xFFFF)


def _causal(torch: Any, device: str, problem: Problem) -> Callable[..., Any]:
    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx <= q_idx

    return mask_mod


def _window(torch: Any, device: str, problem: Problem) -> Callable[..., Any]:
    size = problem.size

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (q_idx - kv_idx < size)

    return mask_mod


def _documents(torch: Any, device: str, problem: Problem) -> Callable[..., Any]:
    ids = torch.as_tensor(problem.ids, device=device)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (ids[q_idx] == ids[kv_idx])

    return mask_mod


def _strided(torch: Any, device: str, problem: Problem) -> Callable[..., Any]:
    stride = problem.size

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & ((q_idx - kv_idx) % stride == 0)

    return mask_mod


def _paper(torch: Any, device: str, problem: Problem) -> Callable[..., Any]:
    width = problem.size
    # What 31 bits are at most where a position is stored: -1 for never.
    most = _thresholds(0.95, problem.length, problem.size or 0).astype(np.int64) - 1
    limits = torch.as_tensor(most.astype(np.int32), device=device)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = q_idx - kv_idx
        row, column = q_idx.to(torch.int32), kv_idx.to(torch.int32)
        bits = _lowbias32(_lowbias32(2 * row) + _lowbias32(2 * column + 1))  # 0 is hashed to 0
        scattered = (bits >> 1 & 0x7FFFFFFF) <= limits[torch.abs(distance)]
        return (distance >= 0) & ((distance < width) | scattered)

    return mask_mod


# kind of a problem -> what makes its mask function
PREDICATES: dict[str, Callable[[Any, str, Problem], Callable[..., Any]]] = {
    "paper": _paper,
    "band": _window,
    "documents": _documents,
    "strided": _strided,
    "causal": _causal,
    "window": _window,
}


def _device(torch: Any) -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _finish(torch: Any) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@functools.lru_cache(maxsize=1)  # the passes of a problem share it
def _block_mask(problem: Problem) -> tuple[Any, MaskCost]:
    torch = importlib.import_module("torch")
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    predicate = PREDICATES[problem.kind](torch, _device(torch), problem)
    # With sums of whole rows in one program the compiler takes minutes at some lengths.
    options = {"triton.persistent_reductions": False}
    create = torch.compile(flex.create_block_mask, dynamic=False, options=options)

    def make() -> Any:
        length = problem.length
        made = create(predicate, None, None, length, length, device=_device(torch))
        _finish(torch)
        return made

    _, first = timed(make)
    peak = most_bytes(make)
    made, ms = timed(make)
    arrays = [x for x in made.as_tuple() if isinstance(x, torch.Tensor)]
    return made, MaskCost(ms, first, sum(map(_nbytes, arrays)), making_bytes=peak)


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def flex_attention(problem: Problem, dtype: str, passed: str) -> Made:
    """FlexAttention of heads that stand first, as it takes them."""
    torch = importlib.import_module("torch")
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    # Functions made in one place share what torch.compile keeps, and it keeps few programs of each.
    importlib.import_module("torch._dynamo").reset()
    block_mask, cost = _block_mask(problem)
    kind, is_forward = getattr(torch, dtype), passed == "forward"
    arrays = [np.asarray(problem.operands()[name]) for name in ("query", "key", "value")]
    dense = [
        torch.from_numpy(x.copy()).to(_device(torch)).to(kind).transpose(1, 2).contiguous()
        for x in arrays
    ]

    def attention(q: Any, k: Any, v: Any) -> Any:
        return flex.flex_attention(q, k, v, block_mask=block_mask)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v).float().square().sum()

    compiled = torch.compile(attention if is_forward else loss, dynamic=False, fullgraph=True)

    def forward(*operands: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            return (compiled(*operands),)

    def gradient(*operands: Any) -> tuple[Any, ...]:
        gradients: tuple[Any, ...] = torch.autograd.grad(compiled(*operands), operands)
        return gradients

    def operands() -> tuple[Any, ...]:
        return tuple(x.clone().requires_grad_(not is_forward) for x in dense)

    def results(out: tuple[Any, ...]) -> tuple[np.ndarray, ...]:
        return tuple(x.detach().transpose(1, 2).float().cpu().numpy() for x in out)

    program = Program(
        function=forward if is_forward else gradient,
        operands=operands,
        bytes_read=sum(map(_nbytes, dense)),
        wait=lambda out: _finish(torch),
        results=results,
    )

    def peak() -> int | None:
        beside = most_bytes(lambda: program.function(*operands()))
        return None if beside is None else beside + cost.nbytes

    return Made(program, 0.0, cost, peak)
