"""Masks: which (row, column) positions of an (m, k) pattern are stored.

A :class:`Mask` is a predicate on positions: rows are queries, columns are keys. Masks combine by
``&``, ``|`` and ``~``, also with functions, which :func:`from_function` makes masks of.
:func:`nonzero` turns one into row offsets and column indices on the host, :func:`nonzero_traced`
does so under :func:`jax.jit`.
"""

from jaxsparse.masks.expression import Mask, from_function, offset
from jaxsparse.masks.kinds import (
    band,
    block,
    causal,
    documents,
    global_tokens,
    padding,
    random,
    sliding_window,
    strided,
)
from jaxsparse.masks.positions import nonzero, nonzero_traced

__all__ = [
    "Mask",
    "band",
    "block",
    "causal",
    "documents",
    "from_function",
    "global_tokens",
    "nonzero",
    "nonzero_traced",
    "offset",
    "padding",
    "random",
    "sliding_window",
    "strided",
]
