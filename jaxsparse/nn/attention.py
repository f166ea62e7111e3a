"""Attention over a sparse pattern, for `nnx.MultiHeadAttention` and as a layer of its own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jaxsparse.block_mask import BlockMask
from jaxsparse.masks import Mask
from jaxsparse.nn.linear import check_call
from jaxsparse.nn.variables import TopologyVariable, own_topology, topology_of
from jaxsparse.ops import arguments
from jaxsparse.ops.attention_masks import with_block_mask
from jaxsparse.ops.sparse_attention import sparse_attention
from jaxsparse.topology import Topology

T = TypeVar("T")
Pattern = Topology | Callable[[Any, Any], Any]


class SparseAttention(nnx.Module):
    """Scaled dot-product attention over a pattern: an ``attention_fn`` of nnx.MultiHeadAttention.

    As a submodule it brings its pattern along: part of the model's state, an argument of jitted
    programs, no parameter. Layers that share one module share its pattern; else each has a copy.

    Args:
        pattern: a `jaxsparse.Topology` (T, S) for sequences of one length, or a batch of them: one
            for each head (1, N) or (N,), one for each sequence (..., 1), or (..., N); or a mask
            function (`jaxsparse.masks`) for any length. A mask is made into a topology where a
            program is traced and becomes a constant of it, so prefer a topology for long sequences.
            None: each call has a ``mask``, as of packed documents that change with the batch.
        implementation: None (the platform's own), "cpu", "cuda" or "xla".

    Raises:
        TypeError: if ``pattern`` is neither, a function that can't be hashed, or a mask of traced
            arrays: make a topology of it in the program instead.

    >>> from jaxsparse import masks
    >>> attend = SparseAttention(masks.band(8) & masks.causal())
    >>> layer = nnx.MultiHeadAttention(
    ...     4, 32, decode=False, attention_fn=attend, rngs=nnx.Rngs(0)
    ... )
    >>> layer(jax.numpy.ones((2, 64, 32))).shape
    (2, 64, 32)
    """

    def __init__(self, pattern: Pattern | None = None, *, implementation: str | None = None):
        if isinstance(pattern, Mask) and pattern.is_traced:
            raise TypeError(
                f"SparseAttention: the mask {pattern} depends on traced arrays: make a topology of "
                "it in the program, Topology.from_mask(mask, (T, S), nse=...), and give that"
            )
        hashable = callable(pattern) and isinstance(pattern, Hashable)
        if not isinstance(pattern, Topology | None) and not hashable:
            raise TypeError(
                "SparseAttention: pattern must be a Topology or a (hashable) mask function, "
                f"got {type(pattern).__name__}"
            )
        self.pattern = (
            own_topology(with_block_mask(pattern)) if isinstance(pattern, Topology) else pattern
        )
        self.implementation = implementation

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: None = None,
        mask: BlockMask | Topology | jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: None = None,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        is_causal: bool = False,
    ) -> jax.Array:
        """Attends; the arguments are those of `flax.nnx.dot_product_attention`.

        Args:
            query: ``(..., T, N, H)``.
            key: ``(..., S, K, H)``; K divides N.
            value: the shape of ``key``.
            bias, module, is_causal: must be left out: the pattern says what is seen, and weights
                are not sown.
            mask: what is seen, in place of a pattern: a `jaxsparse.BlockMask`, a topology or an
                array of bool ``(T, S)``, or a batch of them as of a pattern.
            broadcast_dropout: drop the same probabilities for the whole batch and all heads; where
                each head has a pattern of its own, those with the same place among its entries.
            dropout_rng: random key for dropout.
            dropout_rate: share of the probabilities to drop; may be traced.
            deterministic: no dropout.
            dtype: of the computation; by default the operands' common one.
            precision: None or a ``jax.lax.Precision``; float32 is exact whichever it is.
            promote_dtype: brings the operands to one dtype.

        Returns:
            ``(..., T, N, H)``.

        Raises:
            ValueError: for arguments that must be left out, a mask beside a pattern or neither,
                dropout without a random key, and shapes that don't fit each other or the pattern.
        """
        refused = {"bias": bias, "module (sow_weights)": module}
        given = [name for name, x in refused.items() if x is not None]
        given += ["is_causal"] if is_causal else []
        if given:
            raise ValueError(
                f"SparseAttention: {', '.join(given)} can't be had: the pattern says what is seen "
                "(combine it with masks.causal() and the like), and decoding is not supported"
            )
        if (mask is None) == (self.pattern is None):
            raise ValueError(
                "SparseAttention: either the module has a pattern or the call a mask, got "
                f"{'neither' if mask is None else 'both'}"
            )
        arguments.as_precision("SparseAttention", precision)
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
        drops = not deterministic and (isinstance(dropout_rate, jax.core.Tracer) or dropout_rate)
        if drops and dropout_rng is None:
            raise ValueError("SparseAttention: dropout_rng must be given for dropout, got None")
        batch = query.shape[:-3]
        shapes = [x.shape for x in (query, key, value)]
        if any(len(shape) < 3 or shape[:-3] != batch for shape in shapes):
            raise ValueError(
                "SparseAttention: query, key and value must have shapes (..., T, N, H) of the same "
                f"leading dimensions, got {', '.join(map(str, shapes))}"
            )
        size = math.prod(batch)
        query, key, value = (x.reshape(size, *x.shape[-3:]) for x in (query, key, value))
        out = sparse_attention(
            query,
            key,
            value,
            self._seen(mask, (query.shape[1], key.shape[1]), batch),
            dropout_rate=dropout_rate,
            dropout_key=None if deterministic else dropout_rng,
            broadcast_dropout=broadcast_dropout,
            implementation=self.implementation,
        )
        attended: jax.Array = out.reshape(*batch, *out.shape[1:])
        return attended

    def _seen(self, mask: Any, shape: tuple[int, int], batch: tuple[int, ...]) -> Any:
        """The mask of a call or the pattern, whose leading dimensions are those of the operands."""
        if isinstance(self.pattern, TopologyVariable):
            mask = topology_of(self.pattern, shape)
        elif self.pattern is not None:
            mask = _topology_of(self.pattern, shape)
        if len(batch) <= 1 or not isinstance(mask, Topology | BlockMask):
            return mask
        *leading, heads = mask.batch_shape or (1,)
        if tuple(leading) in (batch, (1,) * len(batch)):
            mask = mask.reshape_batch(math.prod(leading), heads)
        return mask


@functools.lru_cache(maxsize=32)
def _topology_of(mask: Callable[[Any, Any], Any], shape: tuple[int, int]) -> Topology:
    return Topology.from_mask(mask, shape)


def _copied(module: T) -> T:
    """A module with arrays of its own: a step that donates one must not delete the other's."""
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.tree.map(jnp.copy, state))


_TO_DECODE = (
    "To decode, give sparse_attention the keys and values so far, and a topology of the new "
    "queries' rows: Topology.from_mask(masks.offset(mask, rows=S - T), (T, S))"
)

# What an nnx.MultiHeadAttention keeps of its constructor's options, and what has state.
_OPTIONS = (
    "num_kv_heads",
    "in_kv_features",
    "dtype",
    "param_dtype",
    "broadcast_dropout",
    "dropout_rate",
    "deterministic",
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

    Args:
        num_heads, in_features, qkv_features, ...: those of nnx.MultiHeadAttention, by position or
            name; ``attention_fn`` and ``decode`` at their defaults alone.
        pattern: a topology (T, S), also a batch of them, or a mask function, as of SparseAttention.
            None: each call has a ``mask``, a `jaxsparse.BlockMask` for instance.
        implementation: None (the platform's own), "cpu", "cuda" or "xla".

    Raises:
        TypeError: if ``pattern`` is no topology or mask function.
        ValueError: as nnx.MultiHeadAttention, and for a ``precision`` that is a dot algorithm;
            when called, for ``is_causal``,
            ``sow_weights`` or ``decode``, for a ``mask`` beside a pattern or neither, and for
            shapes that don't fit the pattern.

    Source: the sparse Transformer of Gale et al. 2020, "Sparse GPU Kernels for Deep Learning",
    section VII-C.

    >>> from jaxsparse import masks
    >>> topology = Topology.from_mask(masks.band(8) & masks.causal(), (64, 64))
    >>> layer = SparseMultiHeadAttention(4, 32, pattern=topology, rngs=nnx.Rngs(0))
    >>> layer(jax.numpy.ones((2, 64, 32))).shape
    (2, 64, 32)
    """

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
        chosen = {"attention_fn": attention_fn is not nnx.dot_product_attention, "decode": decode}
        if given := [name for name, is_given in chosen.items() if is_given]:
            raise ValueError(
                f"SparseMultiHeadAttention: {' and '.join(given)} can't be chosen: attention is "
                f"over the pattern, for which decoding is not supported. {_TO_DECODE}"
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
            decode=False,
            precision=precision,
            **options,
        )

    @functools.wraps(nnx.MultiHeadAttention.__call__)
    def __call__(  # type: ignore[override]
        self, *inputs: Any, decode: bool | None = None, **options: Any
    ) -> Any:
        if self.decode if decode is None else decode:
            raise ValueError(
                f"SparseMultiHeadAttention: decode must be False, got True. {_TO_DECODE}"
            )
        return super().__call__(*inputs, decode=False, **options)

    def init_cache(self, *shape: Any, **options: Any) -> None:
        """Not supported: raises ValueError."""
        raise ValueError(f"SparseMultiHeadAttention: there is no cache. {_TO_DECODE}")

    @classmethod
    def from_dense(
        cls,
        layer: nnx.MultiHeadAttention,
        pattern: Pattern,
        *,
        implementation: str | None = None,
    ) -> SparseMultiHeadAttention:
        """The same layer, its parameters copied, with attention over a pattern.

        Raises:
            TypeError: if ``layer`` is no nnx.MultiHeadAttention, or of a subclass with a call
                of its own.
            ValueError: if it decodes or has an ``attention_fn`` other than Flax's own.
        """
        expected = "SparseMultiHeadAttention.from_dense: layer must be an nnx.MultiHeadAttention"
        check_call(expected, layer, nnx.MultiHeadAttention)
        if layer.decode or layer.attention_fn is not nnx.dot_product_attention:
            raise ValueError(
                "SparseMultiHeadAttention.from_dense: layer must have decode=False and Flax's own "
                f"attention_fn, got decode={layer.decode} and {layer.attention_fn}"
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
