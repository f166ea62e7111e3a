"""A script: the rows of a batch of graphs in the order in which a scan computes them.

A script is one int32 array, so that a batch is one copy to the device. What a program is compiled
for, its form, is static: sizes that are rounded up, so that few forms serve all batches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.dynamic.form import USED, Channel, Form, difference
from jaxsparse.dynamic.script_verify import verify


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Script:
    """A batch of graphs as a scan takes it: a pytree of one int32 array, with a static form.

    Rows 0 to ``leaves - 1`` are leaves, whose carries are given; row ``leaves + t * width + l`` is
    lane l of tile t, and computed. The rows of a tile are of one kind, and none is a child of
    another. Children are leaves, or rows of earlier tiles of the same group. A lane without
    children is padding. `pack` makes scripts; leading dimensions of ``words`` are several of them.

    Attributes:
        words: int32 ``(..., form.words)``: an array of NumPy or JAX, or a traced one.
        form: the sizes.

    >>> form = Form(leaves=8, tiles=1, width=8, slots=2, groups=1, graphs=1)
    >>> Script(np.full(form.words, -1, np.int32), form).sources.shape
    (1, 8, 2)
    """

    words: Any
    form: Form

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Leading dimensions, of several scripts; () for one."""
        shape: tuple[int, ...] = self.words.shape[:-1]
        return shape

    def _section(self, offset: int, *shape: int) -> Any:
        words = self.words[..., offset : offset + math.prod(shape)]
        return words.reshape(*self.batch_shape, *shape)

    def _used(self, name: str) -> Any:
        return self.words[..., 1 + USED.index(name)]

    @property
    def used_leaves(self) -> Any:
        """How many leaves there are; the others are padding."""
        return self._used("leaves")

    @property
    def used_tiles(self) -> Any:
        """How many tiles there are; those behind them are padding."""
        return self._used("tiles")

    @property
    def used_graphs(self) -> Any:
        """How many graphs there are; the others are padding."""
        return self._used("graphs")

    @property
    def used_inputs(self) -> Any:
        """How many computed rows have inputs; the others are padding."""
        return self._used("inputs")

    @property
    def group_tiles(self) -> Any:
        """``(groups + 1,)``: group g has tiles ``group_tiles[g]`` to ``group_tiles[g + 1] - 1``."""
        return self._section(self.form.group_tiles_offset, self.form.groups + 1)

    @property
    def _records(self) -> Any:
        return self._section(self.form.records_offset, self.form.tiles, self.form.record_words)

    @property
    def kinds(self) -> Any:
        """``(tiles,)``: the kind of each tile's rows; 0 for padding."""
        return self._records[..., 0]

    @property
    def waits(self) -> Any:
        """``(tiles,)``: the nearest later tile that has a parent of one of the rows; -1 if none."""
        return self._records[..., 1]

    @property
    def sources(self) -> Any:
        """``(tiles, width, slots)``: the rows of children; -1 where there is none."""
        form = self.form
        sources = self._records[..., 2 : 2 + form.width * form.slots]
        return sources.reshape(*self.batch_shape, form.tiles, form.width, form.slots)

    @property
    def x_rows(self) -> Any:
        """``(tiles, width)``: where each row's inputs are in ``xs``; -1 if it has none."""
        begin = 2 + self.form.width * self.form.slots
        return self._records[..., begin : begin + self.form.width]

    @property
    def input_places(self) -> Any:
        """``(tiles * width,)``: as `x_rows`, and behind all inputs for rows that have none.

        No two are equal, so that what scatters by them, as gradients do, adds up nothing: without
        atomic operations, which 16-bit numbers are slow in.
        """
        rows = self.x_rows.reshape(*self.batch_shape, self.form.computed)
        behind = self.form.inputs + jnp.arange(self.form.computed, dtype=rows.dtype)
        return jnp.where(rows < 0, behind, rows)

    @property
    def row_mask(self) -> Any:
        """Bool ``(leaves + tiles * width,)``: which rows are no padding."""
        xp = np if isinstance(self.words, np.ndarray) else jnp
        leaves = xp.arange(self.form.leaves) < self.used_leaves[..., None]
        computed = (self.sources >= 0).any(-1).reshape(*self.batch_shape, self.form.computed)
        return xp.concatenate([leaves, computed], axis=-1)

    @property
    def root_rows(self) -> Any:
        """``(graphs,)``: the row of each graph's root; -1 for padding, and graphs without rows."""
        return self._section(self.form.roots_offset, self.form.graphs)

    def roots(self, carry: Any, h: Any) -> Any:
        """What the roots have: ``(graphs, ...)``, one row a graph, 0 where there is no root.

        Args:
            carry: ``(leaves, ...)`` of the leaves, an array or a pytree of arrays.
            h: ``(tiles * width, ...)`` of the computed rows, likewise.

        Raises:
            ValueError: for arrays of other sizes, and if this is a batch of scripts, which
                ``jax.vmap`` takes one by one.
        """
        self._check_one("roots")
        leaves, computed, root = self.form.leaves, self.form.computed, self.root_rows

        def choose(carry: Any, h: Any) -> Any:
            carry, h = jnp.asarray(carry), jnp.asarray(h)
            for name, x, rows in ("carry", carry, leaves), ("h", h, computed):
                if not x.ndim or x.shape[0] != rows:
                    raise ValueError(
                        f"Script.roots: {name} must have {rows} rows, got shape {x.shape}"
                    )
            if carry.shape[1:] != h.shape[1:]:
                raise ValueError(
                    f"Script.roots: rows of carry and h must have one shape, got {carry.shape[1:]} "
                    f"and {h.shape[1:]}"
                )
            # A number below 0 would count from the end.
            of_leaf = carry.at[jnp.where(root < 0, leaves, root)]
            of_tile = h.at[jnp.where(root < leaves, computed, root - leaves)]
            is_leaf = (root < leaves).reshape(-1, *[1] * (carry.ndim - 1))
            given = of_leaf.get(mode="fill", fill_value=0)
            return jnp.where(is_leaf, given, of_tile.get(mode="fill", fill_value=0))

        return jax.tree.map(choose, carry, h)

    def in_input_order(self, h: Any) -> Any:
        """Computed rows that have inputs, in the order of these: ``(inputs, ...)``.

        So the states of sequences lie as their tokens do. Rows of padding are 0.

        Args:
            h: ``(tiles * width, ...)`` of the computed rows, an array or a pytree of arrays.

        Raises:
            ValueError: as `roots`.
        """
        self._check_one("in_input_order")
        place = self.input_places

        def order(h: Any) -> Any:
            h = jnp.asarray(h)
            if not h.ndim or h.shape[0] != self.form.computed:
                raise ValueError(
                    f"Script.in_input_order: h must have {self.form.computed} rows, "
                    f"got shape {h.shape}"
                )
            rows = jnp.zeros((self.form.inputs, *h.shape[1:]), h.dtype)
            return rows.at[place].set(h, mode="drop", unique_indices=True)

        return jax.tree.map(order, h)

    def leaf(self, name: str) -> Any:
        """``(leaves,)``: a channel of leaves, or what one of rows has for them.

        Raises:
            KeyError: if there is none of this name.
        """
        return self._channel(self.form.channel(name, "leaf", "row"))[..., : self.form.leaves]

    def row(self, name: str) -> Any:
        """``(leaves + tiles * width,)``: a channel of all rows, leaves first.

        Raises:
            KeyError: if there is none of this name.
        """
        return self._channel(self.form.channel(name, "row"))

    def input(self, name: str) -> Any:
        """``(inputs,)``: a channel of rows that have inputs, in the order of ``xs``.

        Raises:
            KeyError: if there is none of this name.
        """
        return self._channel(self.form.channel(name, "input"))

    def graph(self, name: str) -> Any:
        """``(graphs,)``: a channel of graphs.

        Raises:
            KeyError: if there is none of this name.
        """
        return self._channel(self.form.channel(name, "graph"))

    def _channel(self, channel: Channel) -> Any:
        words = self._section(self.form.channel_offset(channel), self.form.room(channel.place))
        if channel.dtype == "int32":
            return words
        if isinstance(words, np.ndarray):
            return words.view(np.float32)
        return jax.lax.bitcast_convert_type(words, jnp.float32)

    def mean(self, values: Any, channel: str) -> jax.Array:
        """The mean of values over the entries that a channel has.

        These are, of integers, those that are not -1; of floats all that are no padding. The mean
        of no entries is 0.

        Args:
            values: ``(entries, ...)``, one for each entry of the channel.
            channel: the name of a channel of rows, leaves, inputs or graphs.

        Raises:
            KeyError: if there is no such channel.
            ValueError: for another number of values, and if this is a batch of scripts.

        >>> from jaxsparse.dynamic import Graphs, Layout, pack
        >>> graphs = Graphs.from_sequences([3], input={"token": [4, -1, 6]})
        >>> script = pack(graphs, [0], Layout(slots=1))
        >>> script.mean(np.arange(8.0), "token")  # of the first number and the third one
        Array(1., dtype=float32)
        """
        self._check_one("mean")
        found = self.form.channel(channel, "row", "leaf", "input", "graph")
        entries = self.form.room(found.place)
        values = jnp.asarray(values)
        if not values.ndim or values.shape[0] != entries:
            raise ValueError(
                f"Script.mean: the channel {channel!r} of a {found.place} has {entries} entries, "
                f"values have shape {values.shape}"
            )
        counts = jnp.asarray(self._entries(found))
        chosen = jnp.where(counts.reshape(-1, *[1] * (values.ndim - 1)), values, 0)
        return chosen.sum(0) / jnp.maximum(count(counts), 1)

    def _entries(self, channel: Channel) -> Any:
        """Which entries of a channel count."""
        if channel.dtype == "int32":
            return self._channel(channel) != -1
        if channel.place == "row":
            return self.row_mask
        used = {"leaf": self.used_leaves, "input": self.used_inputs, "graph": self.used_graphs}
        return np.arange(self.form.room(channel.place)) < used[channel.place]

    def _check_one(self, method: str) -> None:
        if self.batch_shape:
            raise ValueError(
                f"Script.{method}: needs one script, got a batch {self.batch_shape}: use jax.vmap"
            )

    def verify(self) -> Script:
        """Checks concrete words, as from a file, against every rule of a script; returns it.

        Raises:
            ValueError: naming the tile and the lane, or the graph, that breaks a rule.
        """
        verify(self)
        return self

    def __repr__(self) -> str:
        form, batch = self.form, getattr(self.words, "shape", ())[:-1]
        several = f"batch {batch}, " if batch else ""
        return (
            f"Script({several}graphs={form.graphs}, leaves={form.leaves}, tiles={form.tiles}, "
            f"width={form.width}, groups={form.groups})"
        )


_PART = 128  # entries that are counted together, where there are more than 8 such parts


def count(chosen: Any) -> Any:
    """How many of an array (entries,) of bools are true.

    A long array is counted in parts. XLA would make a single sum in one block of a GPU, and with it
    all else that is computed of the same entries, such as the losses of rows.
    """
    entries = chosen.shape[0]
    if entries <= 8 * _PART:
        return chosen.sum()
    parts = jnp.pad(chosen, (0, -entries % _PART)).reshape(-1, _PART).sum(1)
    return jax.lax.optimization_barrier(parts).sum()


def stack(scripts: Sequence[Script]) -> Script:
    """Several scripts of one form as one, for ``jax.lax.scan``, ``jax.vmap`` or several devices.

    Raises:
        TypeError: if one is no script.
        ValueError: if there are none, or their forms differ; ``pack(..., form=)`` makes scripts of
            a given one, `Form.covering` says which has room for all.

    >>> form = Form(leaves=8, tiles=1, width=8, slots=2, groups=1, graphs=1)
    >>> script = Script(np.full(form.words, -1, np.int32), form)
    >>> stack([script, script]).batch_shape
    (2,)
    """
    scripts = list(scripts)
    if not scripts:
        raise ValueError("dynamic.stack: needs at least one script")
    for i, script in enumerate(scripts):
        if not isinstance(script, Script):
            raise TypeError(
                f"dynamic.stack: scripts[{i}] must be a dynamic.Script, got {type(script).__name__}"
            )
    form = scripts[0].form
    for i, script in enumerate(scripts):
        if script.form != form:
            raise ValueError(
                f"dynamic.stack: scripts 0 and {i}: {difference(form, script.form)}; pack them "
                "with form="
            )
    words = [script.words for script in scripts]
    xp = np if all(isinstance(w, np.ndarray) for w in words) else jnp
    return Script(xp.stack(words), form)


jax.tree_util.register_dataclass(Script, data_fields=["words"], meta_fields=["form"])
# So that exported programs may take scripts.
jax.export.register_pytree_node_serialization(
    Script,
    serialized_name="jaxsparse.dynamic.Script",
    serialize_auxdata=lambda meta: meta[0].to_json(),
    deserialize_auxdata=lambda data: (Form.from_json(data),),
)
