"""Multi-head attention over a sparse pattern, which can decode with a cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsparse.nn.attention import Pattern, SparseAttention
from jaxsparse.nn.decoding import Cached
from jaxsparse.nn.linear import check_call
from jaxsparse.nn.variables import TopologyVariable, topology_of
from jaxsparse.ops import arguments

T = TypeVar("T")


def _copied(module: T) -> T:
    """A module with arrays of its own: a step that donates one must not delete the other's."""
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.tree.map(jnp.copy, state))


# What an nnx.MultiHeadAttention keeps of its constructor's options, and what has state.
_OPTIONS = (
    "num_kv_heads",
    "in_kv_features",
    "dtype",
    "param_dtype",
    "broadcast_dropout",
    "dropout_rate",
    "deterministic",
    "decode",
    "precision",
    "use_bias",
    "normalize_qk",
    "qkv_promote_dtype",
    "out_promote_dtype",
    "ln_promote_dtype",
    "qkv_dot_general",
    "out_dot_general",
    "qkv_dot_general_cls",
    "out_dot_general_cls",
)
_SUBMODULES = ("query", "key", "value", "out", "query_ln", "key_ln", "rngs")


class SparseMultiHeadAttention(nnx.MultiHeadAttention):
    """Multi-head attention in which each query sees the keys that a pattern stores.

    `nnx.MultiHeadAttention` with a :class:`SparseAttention`; projections, grouped heads, dropout
    and normalization are Flax's. Call it with a sequence ``(..., T, features)``, or with queries,
    keys and values.

    With ``decode=True``, here or in a call, it decodes as Flax's: :meth:`init_cache` makes a cache
    of keys and values, and each call takes the next position, ``(..., 1, features)``, or unlike
    Flax's the next T positions, as of a prompt. The query at position i sees the keys that row i of
    the pattern stores, as far as they are written; `SparseAttention.decode` says how. A ``mask`` of
    the call is the rows of the new queries, ``(T, S)`` for a cache of S positions. Behind its end a
    full cache goes on as Flax's: each new position takes the place of the last one.

    Args:
        num_heads, in_features, qkv_features, ...: those of nnx.MultiHeadAttention, by position or
            name; ``attention_fn`` at its default alone.
        pattern: a topology (T, S), also a batch of them, or a mask function, as of SparseAttention.
            None: each call has a ``mask``, a `jaxsparse.BlockMask` for instance.
        implementation: None (the platform's own), "cpu", "cuda" or "xla".
        decode: whether calls decode that don't say; None is False.

    Raises:
        TypeError: if ``pattern`` is no topology or mask function.
        ValueError: as nnx.MultiHeadAttention, and for a ``precision`` that is a dot algorithm;
            when called, for ``is_causal`` or ``sow_weights``, for a ``mask`` beside a pattern or
            neither, for shapes that don't fit the pattern or the cache, and for decoding with
            dropout or without a cache.

    Source: the sparse Transformer of Gale et al. 2020, "Sparse GPU Kernels for Deep Learning",
    section VII-C.

    >>> from jaxsparse import Topology, masks
    >>> topology = Topology.from_mask(masks.band(8) & masks.causal(), (64, 64))
    >>> layer = SparseMultiHeadAttention(4, 32, pattern=topology, rngs=nnx.Rngs(0))
    >>> layer(jax.numpy.ones((2, 64, 32))).shape
    (2, 64, 32)
    >>> layer.init_cache((2, 64, 32))
    >>> prompt = layer(jax.numpy.ones((2, 10, 32)), decode=True)
    >>> layer(jax.numpy.ones((2, 1, 32)), decode=True).shape
    (2, 1, 32)
    """

    attention_fn: SparseAttention

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        pattern: Pattern | None,
        implementation: str | None = None,
        attention_fn: Callable[..., Any] = nnx.dot_product_attention,
        decode: bool | None = None,
        precision: Any = None,
        **options: Any,
    ):
        if attention_fn is not nnx.dot_product_attention:
            raise ValueError(
                "SparseMultiHeadAttention: attention_fn can't be chosen: attention is over the "
                "pattern"
            )
        arguments.as_precision("SparseMultiHeadAttention", precision)
        super().__init__(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            in_kv_features,
            attention_fn=SparseAttention(pattern, implementation=implementation),
            decode=bool(decode),
            precision=precision,
            **options,
        )
        self.longest_row: int | None = None

    @functools.wraps(nnx.MultiHeadAttention.__call__)
    def __call__(  # type: ignore[override]
        self, *inputs: Any, decode: bool | None = None, mask: Any = None, **options: Any
    ) -> Any:
        if self.decode if decode is None else decode:
            mask = Cached(self, mask)
        return super().__call__(*inputs, decode=False, mask=mask, **options)

    def init_cache(self, input_shape: Sequence[int], dtype: Any = jnp.float32) -> None:
        """Makes an empty cache to decode with, or empties it; the variables are Flax's.

        These are ``cached_key`` and ``cached_value`` ``(..., S, K, H)`` and ``cache_index``, all
        `nnx.Cache`. Also notes how long the rows of a topology are, in ``longest_row``: a program
        that takes the layer as an argument does not see that. So call it outside of programs, and
        again after the topology was changed; else decoding is as right, and slower on a GPU.

        Args:
            input_shape: ``(..., S, features)``, for S positions at most.
            dtype: of the cache.

        Raises:
            ValueError: if the pattern is a topology of another shape than (S, S).
        """
        length = input_shape[-2]
        pattern = self.attention_fn.pattern
        if isinstance(pattern, TopologyVariable):
            shape = topology_of(pattern, (length, length)).shape
            if shape != (length, length):
                raise ValueError(
                    f"SparseMultiHeadAttention.init_cache: the pattern must have shape "
                    f"{(length, length)} for a cache of {length} positions, got {shape}"
                )
        super().init_cache(input_shape, dtype)
        self.longest_row = self.attention_fn.longest_row(length)

    @classmethod
    def from_dense(
        cls,
        layer: nnx.MultiHeadAttention,
        pattern: Pattern,
        *,
        implementation: str | None = None,
    ) -> SparseMultiHeadAttention:
        """The same layer, its parameters copied, with attention over a pattern and no cache yet.

        Raises:
            TypeError: if ``layer`` is no nnx.MultiHeadAttention, or of a subclass with a call
                of its own.
            ValueError: if it has an ``attention_fn`` other than Flax's own.
        """
        expected = "SparseMultiHeadAttention.from_dense: layer must be an nnx.MultiHeadAttention"
        check_call(expected, layer, nnx.MultiHeadAttention)
        if layer.attention_fn is not nnx.dot_product_attention:
            raise ValueError(
                "SparseMultiHeadAttention.from_dense: layer must have Flax's own attention_fn, got "
                f"{layer.attention_fn}"
            )
        sparse = cls(
            layer.num_heads,
            layer.in_features,
            layer.qkv_features,
            layer.out_features,
            pattern=pattern,
            implementation=implementation,
            **{name: getattr(layer, name) for name in _OPTIONS},
            rngs=nnx.Rngs(0),
        )
        for name in _SUBMODULES:
            part = getattr(layer, name)
            setattr(sparse, name, part if part is None else _copied(part))
        return sparse
