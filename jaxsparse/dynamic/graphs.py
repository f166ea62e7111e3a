"""Sets of graphs, each with its own shape: the data that scripts are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxsparse import _ffi
from jaxsparse.dynamic import graph_arrays
from jaxsparse.dynamic.form import PLACES, Channel
from jaxsparse.dynamic.graph_builder import GraphBuilder, build
from jaxsparse.integers import integer

Channels = Mapping[str, Any]


class Graphs:
    """Directed acyclic graphs, such as trees, sequences, circuits or plans of queries, in arrays.

    Graph g has rows ``offsets[g]`` to ``offsets[g + 1] - 1``. A row has up to K children, rows of
    the same graph, in any order; it may be a child of several rows, or twice of one. Rows without
    children are leaves, whose carries a scan is given; it computes the others.

    Channels are numbers for the program: integers, of which -1 says that there is none, or floats.
    A channel has a number for each leaf, for each row, for each computed row that has inputs of its
    own, or for each graph. Scripts carry them.

    Make one by `from_brackets`, `from_sequences`, `from_edges`, `from_arrays` or `from_function`.
    All arrays are copied, checked once and can't be written.

    Attributes:
        offsets: int64 ``(graphs + 1,)``.
        children: int32 ``(rows, K)``, which count from the first row of the graph; -1 is none.
        kinds: int32 ``(rows,)``: which cell computes a row, where there are several.
        roots: int32 ``(graphs,)``: the row whose state stands for the graph; -1 is none.
        has_input: bool ``(rows,)``: which computed rows have inputs of their own.
        any_input: whether any row has.
        levels: int32 ``(rows,)``: 0 of leaves, else 1 more than the highest of the children.
        tails: int32 ``(rows,)``: 0 of rows without parents, else 1 more than the longest of theirs.
        packable: what the C++ packer knows of them.
        vocabulary: the words that numbers of a channel stand for, or None.

    >>> graphs = Graphs.from_brackets("(3 (2 It) (4 (2 's) (4 great)))")
    >>> graphs
    Graphs(1 graph, 5 rows, 3 leaves, depth 2, slots=2, word of leaves, label of rows)
    >>> graphs.children.tolist()
    [[-1, -1], [-1, -1], [-1, -1], [1, 2], [0, 3]]
    >>> graphs.channel("word").tolist(), graphs.vocabulary
    ([0, 1, 2, -1, -1], ('It', "'s", 'great'))
    """

    def __init__(
        self,
        offsets: np.ndarray,
        children: np.ndarray,
        kinds: np.ndarray,
        roots: np.ndarray,
        has_input: np.ndarray,
        channels: Mapping[Channel, np.ndarray],
        vocabulary: Sequence[str] | None = None,
    ):
        """Checked arrays of the right dtypes, which nobody else may write: see `from_arrays`."""
        self.offsets, self.children, self.kinds, self.roots = offsets, children, kinds, roots
        self.has_input = has_input
        self.vocabulary = None if vocabulary is None else tuple(vocabulary)
        self._channels = dict(channels)
        described = [
            (PLACES.index(c.place), c.dtype == "float32", numbers.view(np.int32))
            for c, numbers in self._channels.items()
        ]
        try:
            self.packable, self.levels, self.tails = _ffi.make_graphs(
                offsets, children, kinds, roots, has_input.view(np.uint8), described
            )
        except ValueError as error:
            raise ValueError(f"Graphs: {error}") from None
        computed = kinds[self.levels > 0]
        self._kind_count = 1 + int(computed.max(initial=0))
        self.any_input = bool(has_input.any())
        for array in self._arrays():
            array.flags.writeable = False

    def _arrays(self) -> list[np.ndarray]:
        own = (self.offsets, self.children, self.kinds, self.roots, self.has_input)
        return [*own, self.levels, self.tails, *self._channels.values()]

    # ---- Making them ----

    @classmethod
    def from_arrays(
        cls,
        offsets: Any,
        children: Any,
        *,
        kinds: Any = None,
        roots: Any = None,
        has_input: Any = None,
        leaf: Channels | None = None,
        row: Channels | None = None,
        input: Channels | None = None,
        graph: Channels | None = None,
        vocabulary: Sequence[str] | None = None,
    ) -> Graphs:
        """From the arrays of the class.

        Args:
            offsets: integers ``(graphs + 1,)`` that rise from 0 to the number of rows.
            children: integers ``(rows, K)``.
            kinds: integers ``(rows,)``; by default all 0.
            roots: integers ``(graphs,)``; by default the last row of each graph.
            has_input: bool ``(rows,)``; by default all computed rows if there are channels of
                inputs, else none.
            leaf: channels of leaves by name, numbers ``(rows,)``: what stands at other rows is
                not read.
            row: channels of rows, numbers ``(rows,)``.
            input: channels of rows with inputs, numbers ``(rows,)``, likewise.
            graph: channels of graphs, numbers ``(graphs,)``.
            vocabulary: the words that numbers of a channel stand for.

        Raises:
            TypeError, ValueError: for arrays of other sizes or dtypes, and naming graph and row
                for a child that is out of range, a cycle, a kind outside of [0, 256), a root that
                is no row, and a leaf that has inputs.

        >>> Graphs.from_arrays([0, 3], [[-1, -1], [0, 0], [1, 0]]).levels.tolist()
        [0, 1, 2]
        >>> Graphs.from_arrays([0, 2], [[1], [0]])
        Traceback (most recent call last):
        ...
        ValueError: Graphs: graph 0, row 0: the row is its own descendant, the graph has a cycle
        """
        name = "Graphs.from_arrays"
        offsets = graph_arrays.integers(name, "offsets", offsets, 1, np.int64)
        children = graph_arrays.integers(name, "children", children, 2)
        rows, graphs = len(children), len(offsets) - 1
        graph_arrays.check_offsets(name, offsets, rows)
        if children.shape[1] < 1:
            raise ValueError(f"{name}: children must have at least one slot, got {children.shape}")
        lengths = np.diff(offsets)
        kinds = np.zeros(rows, np.int32) if kinds is None else kinds
        roots = lengths - 1 if roots is None else roots
        if has_input is None:
            has_input = (children >= 0).any(1) & bool(input)
        groups = ("leaf", leaf), ("row", row), ("input", input), ("graph", graph)
        return cls(
            offsets,
            children,
            graph_arrays.integers(name, "kinds", kinds, 1, size=rows),
            graph_arrays.integers(name, "roots", roots, 1, size=graphs),
            graph_arrays.booleans(name, "has_input", has_input, rows),
            graph_arrays.channels(name, {p: c or {} for p, c in groups}, rows, graphs),
            vocabulary,
        )

    @classmethod
    def from_brackets(
        cls, text: str, *, slots: int = 2, vocabulary: Sequence[str] | None = None
    ) -> Graphs:
        """Trees of a text in brackets, as the Stanford Sentiment Treebank has it.

        A bracket has a label, an integer >= 0, and a word or further brackets, its children:
        ``(3 (2 It) (4 (2 's) (4 great)))``. Trees follow one another. Rows are in the order in
        which brackets close, so that the root is the last one. Channels: ``label`` of rows, and
        ``word`` of leaves, which are numbered in the order in which they come.

        Args:
            text: the text, not its path.
            slots: K, children that a bracket may have.
            vocabulary: words and so their numbers, as those of a training set. Words that are not
                in it get the number ``len(vocabulary)``, for which a table needs a row more.

        Raises:
            TypeError, ValueError: if the text is no such text, naming tree and line.
        """
        slots = integer("Graphs.from_brackets", "slots", slots, 1, 2**20)
        if not isinstance(text, str):
            raise TypeError(f"Graphs.from_brackets: text must be a str, got {type(text).__name__}")
        known = [] if vocabulary is None else list(vocabulary)
        if isinstance(vocabulary, str) or not all(isinstance(word, str) for word in known):
            raise TypeError("Graphs.from_brackets: vocabulary must be a sequence of str")
        if len(set(known)) < len(known):
            raise ValueError("Graphs.from_brackets: words of the vocabulary must differ")
        try:
            offsets, children, labels, words, new = _ffi.parse_brackets(
                text, slots=slots, vocabulary=known, closed=vocabulary is not None
            )
        except ValueError as error:
            raise ValueError(f"Graphs.from_brackets: {error}") from None
        return cls.from_arrays(
            offsets,
            children.reshape(-1, slots),
            leaf={"word": words},
            row={"label": labels},
            vocabulary=known + new,
        )

    @classmethod
    def from_sequences(
        cls,
        lengths: Any,
        *,
        reverse: bool = False,
        kind: int = 0,
        input: Channels | None = None,
        graph: Channels | None = None,
    ) -> Graphs:
        """Sequences of any lengths, without padding between them: chains of rows with K = 1.

        Row 0 of each graph is a leaf, the carry before the sequence; row 1 + t is its entry t, and
        has inputs. The root is the row that is computed last, or the leaf of an empty sequence.

        Args:
            lengths: integers >= 0 ``(sequences,)``.
            reverse: whether sequences run from their last entries to the first. Entries keep their
                order in channels, so that states of both directions lie side by side
                (`Script.in_input_order`).
            kind: the kind of all rows.
            input: channels of entries by name, ``(sum of lengths,)``, sequence after sequence.
            graph: channels of sequences, ``(sequences,)``.

        Raises:
            TypeError, ValueError: for arrays of other sizes or dtypes, and lengths below 0.

        >>> Graphs.from_sequences([2, 0], input={"token": [7, 8]}).children[:, 0].tolist()
        [-1, 0, 1, -1]
        """
        name = "Graphs.from_sequences"
        lengths = graph_arrays.integers(name, "lengths", lengths, 1, np.int64)
        if (lengths < 0).any():
            raise ValueError(f"{name}: lengths must be >= 0, got {lengths.min()}")
        children = graph_arrays.chains(lengths, reverse)
        entry = children >= 0
        spread = {
            key: graph_arrays.spread(name, key, numbers, entry)
            for key, numbers in (input or {}).items()
        }
        return cls.from_arrays(
            np.append(0, np.cumsum(lengths + 1)),
            children[:, None],
            kinds=np.full(len(children), integer(name, "kind", kind, 0), np.int32),
            roots=np.minimum(lengths, 1) if reverse else lengths,
            has_input=entry,
            input=spread,
            graph=graph,
        )

    @classmethod
    def from_edges(
        cls, offsets: Any, child: Any, parent: Any, *, slots: int | None = None, **rest: Any
    ) -> Graphs:
        """From edges, as graph libraries have them: senders are children, receivers parents.

        Args:
            offsets: as in `from_arrays`.
            child: integers ``(edges,)``, rows that count through all graphs.
            parent: the same. The children of a row fill its slots in the order of the edges.
            slots: K; by default as many as the row with the most children has.
            rest: as in `from_arrays`.

        Raises:
            TypeError, ValueError: as `from_arrays`, and naming graph and row for edges from one
                graph to another, and more than K children.

        >>> Graphs.from_edges([0, 3], child=[0, 1, 0], parent=[1, 2, 2]).children.tolist()
        [[-1, -1], [0, -1], [1, 0]]
        """
        name = "Graphs.from_edges"
        offsets = graph_arrays.integers(name, "offsets", offsets, 1, np.int64)
        child = graph_arrays.integers(name, "child", child, 1, np.int64)
        parent = graph_arrays.integers(name, "parent", parent, 1, np.int64, size=len(child))
        slots = slots if slots is None else integer(name, "slots", slots, 1, 2**20)
        return cls.from_arrays(
            offsets, graph_arrays.of_edges(name, offsets, child, parent, slots), **rest
        )

    @classmethod
    def from_function(
        cls,
        function: Callable[[GraphBuilder, Any], None],
        examples: Iterable[Any],
        *,
        slots: int | None = None,
    ) -> Graphs:
        """From plain Python that builds the graph of one example: slow, for trying things out.

        Args:
            function: called with a `GraphBuilder` and an example; adds leaves and rows.
            examples: any objects.
            slots: K; by default as many as the row with the most children has.

        Raises:
            TypeError, ValueError: as `from_arrays`, and for rows with more than K children or
                channels that do not fit together.

        >>> def add_up(builder, numbers):
        ...     total = builder.leaf(number=numbers[0])
        ...     for number in numbers[1:]:
        ...         total = builder.row(total, builder.leaf(number=number))
        ...     builder.graph(sum=sum(numbers))
        >>> graphs = Graphs.from_function(add_up, [[1, 2, 3], [4]])
        >>> graphs.channel("number").tolist(), graphs.channel("sum").tolist()
        ([1, 2, -1, 3, -1, 4], [6, 4])
        """
        return cls.from_arrays(**build(function, examples, slots))

    @classmethod
    def concatenate(cls, parts: Sequence[Graphs]) -> Graphs:
        """All graphs of several sets, as many slots as that with the most has.

        Raises:
            ValueError: if there are none, or their channels or vocabularies differ.

        >>> one = Graphs.from_sequences([2])
        >>> len(Graphs.concatenate([one, one]))
        2
        """
        name, parts = "Graphs.concatenate", list(parts)
        if not parts:
            raise ValueError(f"{name}: needs at least one set of graphs")
        for i, part in enumerate(parts):
            for what in "channels", "vocabulary":
                first, other = getattr(parts[0], what), getattr(part, what)
                if first != other:
                    raise ValueError(f"{name}: parts 0 and {i} differ in their {what}")
        slots = max(part.slots for part in parts)
        begins = np.cumsum([0, *(part.offsets[-1] for part in parts)])
        offsets = [part.offsets[1:] + b for part, b in zip(parts, begins, strict=False)]
        return parts[0]._with(
            offsets=np.concatenate([np.zeros(1, np.int64), *offsets]),
            children=np.concatenate([graph_arrays.widened(p.children, slots) for p in parts]),
            kinds=np.concatenate([p.kinds for p in parts]),
            roots=np.concatenate([p.roots for p in parts]),
            has_input=np.concatenate([p.has_input for p in parts]),
            channels={
                c: np.concatenate([p.channel(c.name) for p in parts]) for c in parts[0].channels
            },
        )

    # ---- What they are ----

    @property
    def slots(self) -> int:
        """K, children that a row can have."""
        return int(self.children.shape[1])

    @property
    def kind_count(self) -> int:
        """Kinds of computed rows, at least 1."""
        return self._kind_count

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Names, places and dtypes of the channels."""
        return tuple(self._channels)

    def channel(self, name: str) -> np.ndarray:
        """The numbers of a channel: ``(rows,)``, of a channel of graphs ``(graphs,)``.

        Raises:
            KeyError: if there is none, naming those there are.
        """
        for channel, numbers in self._channels.items():
            if channel.name == name:
                return numbers
        there = ", ".join(repr(c.name) for c in self._channels) or "none"
        raise KeyError(f"Graphs.channel: no channel {name!r}; there are: {there}")

    @property
    def lengths(self) -> np.ndarray:
        """``(graphs,)``: the rows of each."""
        return np.diff(self.offsets)

    @property
    def depths(self) -> np.ndarray:
        """``(graphs,)``: the highest level of each, 0 of a graph without computed rows."""
        depths = np.zeros(len(self), np.int32)
        np.maximum.at(depths, np.repeat(np.arange(len(self)), self.lengths), self.levels)
        return depths

    def with_channel(self, name: str, place: str, numbers: Any) -> Graphs:
        """The same graphs with one channel more, or another one of that name.

        Args:
            name: of the channel.
            place: "leaf", "row", "input" or "graph".
            numbers: ``(rows,)``, or ``(graphs,)``.

        Raises:
            TypeError, ValueError: as `from_arrays`.

        >>> trees = Graphs.from_brackets("(3 (2 It) (4 works))")
        >>> trees.with_channel("positive", "graph", [1]).channel("positive").tolist()
        [1]
        """
        if place not in PLACES:
            raise ValueError(f"Graphs.with_channel: place must be one of {PLACES}, got {place!r}")
        added = graph_arrays.channels(
            "Graphs.with_channel", {place: {name: numbers}}, len(self.children), len(self)
        )
        kept = {c: numbers for c, numbers in self._channels.items() if c.name != name}
        return self._with(channels=kept | added)

    def _with(self, **changed: Any) -> Graphs:
        names = ("offsets", "children", "kinds", "roots", "has_input", "channels", "vocabulary")
        fields = dict(zip(names, self.__reduce__()[1], strict=True))
        return Graphs(**(fields | changed))

    def __len__(self) -> int:
        return len(self.roots)

    def __getitem__(self, ids: Any) -> Graphs:
        """The chosen graphs, by numbers, a slice or bools; one number is a set of one graph."""
        ids = np.atleast_1d(np.arange(len(self))[ids])
        if ids.ndim > 1:
            raise IndexError(f"Graphs: ids must have 1 dimension, got shape {ids.shape}")
        lengths = self.lengths[ids]
        offsets = np.append(0, np.cumsum(lengths))
        rows = np.arange(offsets[-1]) + np.repeat(self.offsets[ids] - offsets[:-1], lengths)
        return self._with(
            offsets=offsets,
            children=self.children[rows],
            kinds=self.kinds[rows],
            roots=self.roots[ids],
            has_input=self.has_input[rows],
            channels={
                c: numbers[ids if c.place == "graph" else rows]
                for c, numbers in self._channels.items()
            },
        )

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        arrays = (self.offsets, self.children, self.kinds, self.roots, self.has_input)
        return Graphs, (*arrays, self._channels, self.vocabulary)

    def __repr__(self) -> str:
        count, depth = len(self), int(self.levels.max(initial=0))
        channels = "".join(
            f", {c.name} of {'leaves' if c.place == 'leaf' else c.place + 's'}"
            for c in self._channels
        )
        return (
            f"Graphs({count} graph{'s' * (count != 1)}, {len(self.children)} rows, "
            f"{int((self.levels == 0).sum())} leaves, depth {depth}, slots={self.slots}{channels})"
        )
