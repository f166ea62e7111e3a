"""Attention over a sparse pattern, for `nnx.MultiHeadAttention` and models of one's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn import dtypes

from jaxsparse.block_mask import BlockMask
from jaxsparse.masks import Mask
from jaxsparse.nn import decoding
from jaxsparse.nn.variables import TopologyVariable, own_topology, topology_of
from jaxsparse.ops import arguments
from jaxsparse.ops.attention_masks import with_block_mask
from jaxsparse.ops.score_functions import Indexed
from jaxsparse.ops.sparse_attention import sparse_attention
from jaxsparse.topology import Topology

Pattern = Topology | Callable[[Any, Any], Any]


class SparseAttention(nnx.Module):
    """Scaled dot-product attention over a pattern: an ``attention_fn`` of nnx.MultiHeadAttention.

    As a submodule it brings its pattern along: part of the model's state, an argument of jitted
    programs, no parameter. Layers that share one module share its pattern; else each has a copy.

    Args:
        pattern: a `jaxsparse.Topology` (T, S) for sequences of one length, or a batch of them: one
            for each head (1, N) or (N,), one for each sequence (..., 1), or (..., N); or a mask
            function (`jaxsparse.masks`) for any length. A function is made into a block mask where
            a program is traced, and becomes a constant of it, so for long sequences rather give a
            `BlockMask` in each call. None: each call has a ``mask``, as of packed documents that
            change with the batch.
        implementation: None (the platform's own), "cpu", "cuda" or "xla".

    Raises:
        TypeError: if ``pattern`` is neither, a function that can't be hashed, or a mask of traced
            arrays: make a block mask or a topology of it in the program instead.

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
        self.pattern: TopologyVariable | Callable[[Any, Any], Any] | None
        if isinstance(pattern, Topology):
            self.pattern = own_topology(with_block_mask(pattern))
        else:
            self.pattern = pattern
        self.implementation = implementation

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
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
            bias: added to the scores: it broadcasts to ``(..., N, T, S)``. Its gradient is summed
                as it was broadcast.
            module, is_causal: must be left out: the pattern says what is seen, and weights are not
                sown.
            mask: what is seen, in place of a pattern: a `jaxsparse.BlockMask`, a topology or an
                array of bool ``(T, S)``, or a batch of them as of a pattern. Beside a pattern an
                array of bool that broadcasts to ``(..., N, T, S)``, of what is seen of that.
            broadcast_dropout: drop the same probabilities for the whole batch and all heads.
            dropout_rng: random key for dropout.
            dropout_rate: share of the probabilities to drop; may be traced.
            deterministic: no dropout.
            dtype: of the computation; by default the operands' common one.
            precision: None or a ``jax.lax.Precision``; float32 is exact whichever it is.
            promote_dtype: brings the operands to one dtype.

        Returns:
            ``(..., T, N, H)``.

        Raises:
            ValueError: for arguments that must be left out, a mask beside a pattern that is no
                array or neither of them, dropout without a random key, and shapes that don't fit
                each other or the pattern.
        """
        given = [] if module is None else ["module (sow_weights)"]
        given += ["is_causal"] if is_causal else []
        if given:
            raise ValueError(
                f"SparseAttention: {', '.join(given)} can't be had: the pattern says what is seen "
                "(combine it with masks.causal() and the like)"
            )
        seen_of_pattern = None
        if self.pattern is not None and _is_array_of_bool(mask):
            mask, seen_of_pattern = None, mask
        self._check_mask(mask.mask if isinstance(mask, decoding.Cached) else mask)
        arguments.as_precision("SparseAttention", precision)
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
        drops = not deterministic and (isinstance(dropout_rate, jax.core.Tracer) or dropout_rate)
        if isinstance(mask, decoding.Cached):
            if drops:
                raise ValueError("SparseAttention: there is no dropout while decoding")
            if bias is not None:
                raise ValueError("SparseAttention: there is no bias while decoding")
            return mask.attend(query, key, value)
        if drops and dropout_rng is None:
            raise ValueError("SparseAttention: dropout_rng must be given for dropout, got None")
        batch = query.shape[:-3]
        shapes = [x.shape for x in (query, key, value)]
        if any(len(shape) < 3 or shape[:-3] != batch for shape in shapes):
            raise ValueError(
                "SparseAttention: query, key and value must have shapes (..., T, N, H) of the same "
                f"leading dimensions, got {', '.join(map(str, shapes))}"
            )
        scores = (*batch, query.shape[-2], query.shape[-3], key.shape[-3])
        options: dict[str, Any] = {}
        if bias is not None:
            options["bias"] = _broadcasting("bias", bias, scores)
        if seen_of_pattern is not None:
            options["score"] = _only_seen
            options["operands"] = {"seen": _broadcasting("mask", seen_of_pattern, scores)}
        size = math.prod(batch)
        query, key, value = (x.reshape(size, *x.shape[-3:]) for x in (query, key, value))
        out: jax.Array = sparse_attention(
            query,
            key,
            value,
            self._seen(mask, (query.shape[1], key.shape[1]), batch),
            dropout_rate=dropout_rate,
            dropout_key=None if deterministic else dropout_rng,
            broadcast_dropout=broadcast_dropout,
            implementation=self.implementation,
            **options,
        )
        attended: jax.Array = out.reshape(*batch, *out.shape[1:])
        return attended

    def decode(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        index: int | jax.Array,
        mask: BlockMask | Topology | jax.Array | None = None,
        *,
        longest_row: int | None = None,
    ) -> jax.Array:
        """Attends from new queries to a cache, which has their own keys and values already.

        What :class:`SparseMultiHeadAttention` does when it decodes, for models with a cache of
        their own. The query at position i sees the keys that row i of the pattern stores, and none
        behind those of the new queries. Several queries, as of a prompt, take the kernels, as does
        one on a CPU, and in 16 bits on a GPU. Elsewhere one query takes plain JAX. It reads only
        the keys of its row where they are at most a quarter of the cache; else it reads the whole
        cache, and NaN in a value that it does not see reaches it.

        Args:
            query: ``(..., T, N, H)``, of the positions ``index`` to ``index + T - 1``.
            key: the cache, ``(..., S, K, H)``; K divides N.
            value: the shape of ``key``.
            index: of the first new position; may be traced. One greater than S - T is taken as
                that.
            mask: in place of a pattern, its rows of the new queries: ``(T, S)``, or a batch of
                them.
            longest_row: of a topology that is an argument of the program, so that its rows are not
                known: :meth:`longest_row` of it, or another bound. Without one plain JAX reads the
                whole cache, as it does for a row that is longer after all.

        Returns:
            ``(..., T, N, H)``, of the query's dtype.

        Raises:
            ValueError: for a mask beside a pattern or neither, and shapes that don't fit.

        >>> from jaxsparse import masks
        >>> attend = SparseAttention(masks.band(8) & masks.causal())
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 2, 16))
        >>> y = attend.decode(q[:, 40:41], k, v, 40)
        >>> bool(jnp.allclose(y, attend(q, k, v)[:, 40:41], atol=1e-5))
        True
        """
        self._check_mask(mask)
        *batch, t, n, h = query.shape
        length, groups = key.shape[-3:-1]
        if key.shape != (*batch, length, groups, h) or key.shape != value.shape or t > length:
            raise ValueError(
                "SparseAttention.decode: query must have shape (..., T, N, H), key and value "
                f"(..., S, K, H) with S >= T, got {query.shape}, {key.shape} and {value.shape}"
            )
        if groups == 0 or n % groups:
            raise ValueError(f"SparseAttention.decode: {groups} key heads must divide {n} heads")
        index = jnp.minimum(index, length - t)
        pattern: Any
        row: Any
        if self.pattern is None:
            pattern, shape, row = mask, (t, length), 0
        else:
            pattern, shape, row = self._pattern_for(length), (length, length), index
        if not callable(pattern) and tuple(pattern.shape[-2:]) != shape:
            raise ValueError(
                f"SparseAttention.decode: {'the pattern' if mask is None else 'mask'} must have "
                f"shape {shape} for {t} queries and a cache of {length}, got {pattern.shape}"
            )
        if longest_row is None and mask is None:
            longest_row = decoding.longest_row(pattern, length)
        return decoding.attend_to_cache(
            query,
            key,
            value,
            pattern,
            row,
            index + t,
            longest_row=longest_row,
            implementation=self.implementation,
        )

    def longest_row(self, length: int) -> int | None:
        """The most keys, rounded up, that one query of :meth:`decode` sees; None if not known.

        Outside of programs it is known: their traced topologies have rows of any length.

        Args:
            length: of the cache.
        """
        return decoding.longest_row(self._pattern_for(length), length)

    def _pattern_for(self, length: int) -> Any:
        if isinstance(self.pattern, TopologyVariable):
            return topology_of(self.pattern, (length, length))
        return self.pattern

    def _check_mask(self, mask: Any) -> None:
        if (mask is None) == (self.pattern is None):
            raise ValueError(
                "SparseAttention: either the module has a pattern or the call a mask, got "
                f"{'neither' if mask is None else 'both'}"
            )

    def _seen(self, mask: Any, shape: tuple[int, int], batch: tuple[int, ...]) -> Any:
        """The mask of a call or the pattern, whose leading dimensions are those of the operands."""
        if isinstance(self.pattern, TopologyVariable):
            mask = topology_of(self.pattern, shape)
        elif self.pattern is not None:
            mask = self.pattern
        elif isinstance(mask, jax.Array | np.ndarray):
            mask = BlockMask.from_dense(mask)
        if len(batch) <= 1 or not isinstance(mask, Topology | BlockMask):
            return mask
        *leading, heads = mask.batch_shape or (1,)
        if tuple(leading) in (batch, (1,) * len(batch)):
            mask = mask.reshape_batch(math.prod(leading), heads)
        return mask


def _is_array_of_bool(mask: Any) -> bool:
    return isinstance(mask, jax.Array | np.ndarray) and mask.dtype == bool


def _only_seen(s: jax.Array, row: jax.Array, column: jax.Array, seen: jax.Array) -> jax.Array:
    return jnp.where(seen, s, -jnp.inf)


def _broadcasting(name: str, x: jax.Array, shape: tuple[int, ...]) -> Indexed:
    """An array that broadcasts to scores (..., N, T, S), by those of b, n, t, s that it has."""
    x = jnp.asarray(x)
    *batch, _, _, _ = shape
    sizes = (*(1,) * (len(shape) - x.ndim), *x.shape)
    if len(sizes) != len(shape) or any(a not in (1, b) for a, b in zip(sizes, shape, strict=True)):
        raise ValueError(
            f"SparseAttention: {name} must broadcast to the scores' shape {shape}, got {x.shape}"
        )
    own = sizes[: len(batch)]
    if any(n != 1 for n in own) and own != tuple(batch):
        x = jnp.broadcast_to(x.reshape(sizes), (*batch, *sizes[-3:]))
        own = tuple(batch)
    sizes, scores = (math.prod(own), *sizes[-3:]), (math.prod(batch), *shape[-3:])
    axes = [axis for axis, a, b in zip("bnts", sizes, scores, strict=True) if a == b]
    return Indexed(
        x.reshape([dict(zip("bnts", scores, strict=True))[a] for a in axes]), "".join(axes)
    )
