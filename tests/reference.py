"""The oracle: every operation on dense matrices in NumPy or jnp, float64 where it matters."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np


def stored_mask(row_offsets, column_indices, shape):
    """Boolean (m, k): what one pattern stores."""
    mask = np.zeros(shape, bool)
    for row in range(shape[0]):
        mask[row, column_indices[row_offsets[row] : row_offsets[row + 1]]] = True
    return mask


def to_dense(values, topology):
    """The dense float64 matrix of one concrete pattern; its values may be batched."""
    offsets, columns = np.asarray(topology.row_offsets), np.asarray(topology.column_indices)
    rows = np.repeat(np.arange(topology.shape[0]), np.diff(offsets))
    values = np.asarray(values, np.float64)
    dense = np.zeros((*values.shape[:-1], *topology.shape))
    dense[..., rows, columns[: offsets[-1]]] = values[..., : offsets[-1]]
    return dense


def from_dense(dense, topology):
    """The entries of a dense matrix at one concrete pattern, padding 0."""
    offsets, columns = np.asarray(topology.row_offsets), np.asarray(topology.column_indices)
    rows = np.repeat(np.arange(topology.shape[0]), np.diff(offsets))
    values = np.zeros((*dense.shape[:-2], topology.nse), dense.dtype)
    values[..., : offsets[-1]] = dense[..., rows, columns[: offsets[-1]]]
    return values


def spmm(values, topology, x, bias=None, activation=None):
    """Only stored products are added, so that NaN and infinity stay where they belong."""
    dense = to_dense(values, topology)
    mask = stored_mask(topology.row_offsets, topology.column_indices, topology.shape)
    x = np.asarray(x, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        if np.isfinite(x).all() and np.isfinite(dense).all():
            z = dense @ x
        else:
            terms = np.where(mask[:, :, None], dense[..., None] * x[..., None, :, :], 0)
            z = terms.sum(-2)
    if bias is not None:
        z = z + np.asarray(bias, np.float64)[..., None]
    if activation == "relu":
        z = np.maximum(z, 0)
    if activation == "gelu":
        z = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    return z


def sddmm(x, y, topology, scale_by=None):
    """The dense product, sampled."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    values = from_dense(np.matmul(x, np.swapaxes(y, -1, -2)), topology)
    return values if scale_by is None else values * np.asarray(scale_by, np.float64)


def sparse_softmax(values, topology, scale=1.0):
    """As `jax.nn.softmax` of the dense matrix where it is stored, but compiles nothing."""
    mask = stored_mask(topology.row_offsets, topology.column_indices, topology.shape)
    if not mask.size:
        return np.zeros(np.shape(values))
    with np.errstate(invalid="ignore"):
        dense = np.where(mask, to_dense(values, topology) * scale, -np.inf)
        powers = np.where(mask, np.exp(dense - dense.max(-1, keepdims=True)), 0)
        soft = np.where(mask, powers / powers.sum(-1, keepdims=True), 0)
    return from_dense(soft, topology)


def reduce_rows(values, topology, reduction):
    """Row by row; a row with a NaN is one."""
    values, offsets = np.asarray(values, np.float64), np.asarray(topology.row_offsets)
    reduce = {
        "sum": np.sum,
        "mean": lambda v: v.mean() if v.size else 0.0,
        "max": lambda v: np.max(v, initial=-np.inf),
        "logsumexp": lambda v: np.logaddexp.reduce(v, initial=-np.inf),
    }[reduction]
    rows = [values[a:b] for a, b in itertools.pairwise(offsets)]
    with np.errstate(invalid="ignore"):
        return np.array([reduce(row) for row in rows])


def attention(query, key, value, mask, scale=None):
    """Dense attention in float64; mask (T, S) or (N, T, S); queries that see nothing get 0."""
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    scores = np.einsum("btnh,bsnh->bnts", q, k) * scale
    scores = np.where(mask, scores, -np.inf)
    most = np.max(scores, -1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(most), most, 0))
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total > 0, total, 1)
    return np.einsum("bnts,bsnh->btnh", weights, v)


def recurrent_scan(
    cell, weights, carry, xs, *, recurrent_bias=None, reverse=False, seq_lengths=None
):
    """One step after the other, in float64 under x64; weights are dense, (h, gates * h).

    As documented, what the product takes is rounded to the dtype of xs. Differentiable. In a
    program it is a loop of JAX's, which compiles sooner than as many steps.
    """
    wide = jnp.result_type(float)
    weights, carry = jax.tree.map(lambda x: jnp.asarray(x).astype(wide), (weights, carry))
    bias = 0 if recurrent_bias is None else jnp.asarray(recurrent_bias).astype(wide)
    length, h = xs.shape[0], weights.shape[0]
    gates = weights.shape[1] // h

    def step(carry, t):
        state = jax.tree.leaves(carry)[-1].astype(xs.dtype).astype(wide)
        r = jnp.matmul(state, weights, precision="highest") + bias
        x, r = (tuple(jnp.split(a, gates, -1)) for a in (xs[t].astype(wide), r))
        new, y = cell(x, r, carry)
        if seq_lengths is not None:
            counts = jnp.asarray(seq_lengths)[:, None] > t
            new = jax.tree.map(lambda a, b: jnp.where(counts, a, b), new, carry)
            y = jnp.where(counts, y, 0)
        return new, y

    if length and any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((carry, xs))):
        return jax.lax.scan(step, carry, jnp.arange(length), reverse=reverse)
    ys = [None] * length
    for t in reversed(range(length)) if reverse else range(length):
        carry, ys[t] = step(carry, t)
    return carry, jnp.stack(ys) if ys else jnp.zeros((0, xs.shape[1], h), wide)


def _dense_weights(weights, units_of_head=0):
    """(k, gates * h) of what a layer may be given: gates side by side, heads within each."""
    if hasattr(weights, "topology"):
        t = weights.topology
        rows, columns = t.row_indices[: t.nnz], t.column_indices[: t.nnz]
        dense = jnp.zeros(t.shape, weights.values.dtype)
        return dense.at[rows, columns].set(weights.values[: t.nnz]).T
    weights = jnp.asarray(weights)
    if weights.ndim == 2:
        return weights
    heads, k, m = weights.shape
    gates = m // units_of_head
    blocks = weights.reshape(heads, k, gates, units_of_head)
    dense = jnp.zeros((heads, k, gates, heads, units_of_head), weights.dtype)
    own = jnp.arange(heads)
    dense = dense.at[own, :, :, own].set(blocks)
    return dense.reshape(heads * k, gates * heads * units_of_head)


def normalised(x, layer):
    """What a layer's norm makes of features."""
    if layer.norm == "layer":
        x = x - x.mean(-1, keepdims=True)
    if layer.norm is not None:
        x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + layer.norm_epsilon)
    if layer.norm_scale is not None:
        x = x * layer.norm_scale
    return x if layer.norm_shift is None else x + layer.norm_shift


def stack_scan(
    layers, carries, xs, *, seq_lengths=None, resets=None, reverse=False, return_all=False
):
    """Layer after layer and step after step, in float64 under x64. Differentiable.

    What products take is rounded to the dtype of xs, as documented.
    """
    wide, narrow = jnp.result_type(float), xs.dtype
    length, b = xs.shape[:2]
    steps = jnp.arange(length)
    counts = jnp.ones((length, b), bool)
    if seq_lengths is not None:
        counts = steps[:, None] < jnp.asarray(seq_lengths)[None]
    starts = jnp.zeros((length, b), bool) if resets is None else jnp.asarray(resets) & counts
    outputs, last = [xs], []
    for i, (layer, carry) in enumerate(zip(layers, carries, strict=True)):
        h = jax.tree.leaves(carry)[-1].shape[1]
        heads = layer.recurrent.shape[0] if len(layer.recurrent.shape) == 3 else 1
        recurrent = _dense_weights(layer.recurrent, h // heads).astype(wide)
        below = outputs[-1]
        if layer.between is not None:
            below = layer.between(below, None if seq_lengths is None else counts)
        below = jnp.where(counts[..., None], below, 0).astype(wide)
        if layer.input is not None:
            below = normalised(below, layer)
            heads = layer.input.shape[0] if len(layer.input.shape) == 3 else 1
            weights = _dense_weights(layer.input, h // heads).astype(wide)
            below = jnp.einsum("tbk,km->tbm", below, weights, precision="highest")
        if layer.bias is not None:
            below = below + jnp.asarray(layer.bias).astype(wide)
        bias = 0 if layer.recurrent_bias is None else jnp.asarray(layer.recurrent_bias)
        own = () if layer.parameters is None else (layer.parameters,)

        def step(carry, t, layer=layer, weights=recurrent, below=below, bias=bias, own=own, h=h):
            before = jax.tree.map(lambda x: jnp.where(starts[t][:, None], 0, x), carry)
            state = jax.tree.leaves(before)[-1].astype(narrow).astype(wide)
            r = jnp.matmul(state, weights, precision="highest") + bias
            gates = (tuple(jnp.split(a, a.shape[-1] // h, -1)) for a in (below[t], r))
            new, y = layer.cell(*gates, before, *own)
            kept = counts[t][:, None]
            return jax.tree.map(lambda a, b: jnp.where(kept, a, b), new, carry), y

        carry = jax.tree.map(lambda x: jnp.asarray(x).astype(wide), carry)
        if length:
            carry, ys = jax.lax.scan(step, carry, steps, reverse=reverse)
        else:
            ys = jnp.zeros((0, b, h), wide)
        if layer.mask is not None:
            ys = ys * layer.mask.astype(wide)
        if layer.skip is not None:
            ys = ys + outputs[i + 1 - layer.skip].astype(wide)
        ys = jnp.where(counts[..., None], ys, 0)
        outputs.append(ys.astype(narrow))
        last.append(carry)
    return last, (outputs[1:] if return_all else outputs[-1])


def packed_matrix(packed):
    """The matrix that a packed one's streams hold, without scales: all lanes read them in step."""
    if packed.cell == 0:
        return _matrix_of_gaps(packed)
    (m, k), parts, cell = packed.shape, packed.parts, packed.cell
    numbers_of_word = packed.values.shape[1] // 32
    values = np.asarray(packed.values, np.float64).reshape(-1, 32, numbers_of_word)
    masks, starts, panels = (np.asarray(x) for x in (packed.masks, packed.starts, packed.panels))
    pieces, lanes = np.arange(len(masks)), np.arange(32)
    width = 128 * panels.shape[1]
    matrix = np.zeros((len(masks) // parts * 16, parts * width))
    row = (pieces // parts * 16)[:, None] + lanes // 4
    first = (pieces % parts * width)[:, None] + 2 * (lanes % 4)
    at = np.broadcast_to(starts[:-1, None, None], (len(masks), 32, numbers_of_word)).copy()
    for group in range(panels.shape[1] * 16 if values.size else 0):
        step, g = divmod(group, 8 * cell)
        for j, e in np.ndindex(2, 2):
            bit = 8 * (2 * j + e) + g if cell == 1 else 8 * (2 * (g % 2) + j) + g // 2
            stored = masks[:, step] >> bit & 1 == 1
            stream = 2 * j + e if numbers_of_word == 4 else e
            numbers = values[np.minimum(at[..., stream], len(values) - 1), lanes, stream]
            matrix[(row + 8 * j)[stored], (first + 8 * group + e)[stored]] = numbers[stored]
            at[..., stream] += stored
        if group % 16 == 15:  # no stream is more than 16 words behind when a panel ends
            at = np.maximum(at, (starts[:-1] + panels[:, group // 16, 1] - 16)[:, None, None])
    in_order = np.zeros((m, k))
    in_order[np.asarray(packed.rows)] = matrix[:m, :k]
    return in_order


def _matrix_of_gaps(packed):
    """The same of numbers with gaps: two streams of each lane in turn, entry after entry."""
    (m, k), parts = packed.shape, packed.parts
    width = 8 * -(-k // (8 * parts))
    values = np.asarray(packed.values, np.float64).reshape(-1, 32, 8)
    masks, starts, rows = (np.asarray(x) for x in (packed.masks, packed.starts, packed.rows))
    matrix = np.zeros((m, k))
    for piece, (begin, end) in enumerate(itertools.pairwise(starts)):
        strip, part = divmod(piece, parts)
        row = 8 * strip + np.arange(32) // 4
        # Of either stream; in odd rows the odd columns are first.
        columns = [part * width + np.arange(32) % 4 * 2 + (row + s) % 2 - 8 for s in (0, 1)]
        for step in range(begin, end):
            for e in range(8):
                gap = (masks[step] >> 4 * e & 15).astype(np.int64)
                columns[e % 2] += 8 * gap
                stored = gap > 0
                at = rows[row[stored]], columns[e % 2][stored]
                matrix[at] = values[step, stored, e]
    return matrix


def pack_gaps(row_offsets, column_indices, row_order, *, columns, parts):
    """Gaps, starts and sources of a matrix of cell 0, stream by stream; -1 for no source."""
    m, width = len(row_order), 8 * -(-columns // (8 * parts))
    pieces = []
    for strip, part in np.ndindex(-(-m // 8), parts):
        streams = []
        for lane, s in np.ndindex(32, 2):
            place, entries, last = 8 * strip + lane // 4, [], -1
            of_pair = s if place % 2 == 0 else 1 - s
            row = row_order[place] if place < m else None
            stored = range(row_offsets[row], row_offsets[row + 1]) if row is not None else ()
            for entry in sorted(stored, key=lambda entry: column_indices[entry]):
                within = column_indices[entry] - part * width
                if 0 <= within < width and within % 8 == lane % 4 * 2 + of_pair:
                    while within // 8 - last > 15:
                        entries.append((15, -1))
                        last += 15
                    entries.append((within // 8 - last, entry))
                    last = within // 8
            streams.append(entries)
        steps = -(-max(map(len, streams)) // 4)
        piece = np.array([entries + [(0, -1)] * (4 * steps - len(entries)) for entries in streams])
        piece = piece.reshape(32, 2, steps, 4, 2).transpose(2, 0, 3, 1, 4)  # streams in turn
        pieces.append(piece.reshape(steps, 32, 8, 2))
    starts = np.cumsum([0, *map(len, pieces)]).astype(np.int32)
    gaps, sources = np.moveaxis(np.concatenate([np.zeros((0, 32, 8, 2), int), *pieces]), -1, 0)
    masks = (gaps.astype(np.uint32) << 4 * np.arange(8, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    return masks.reshape(-1), starts, sources.astype(np.int32).reshape(-1)
