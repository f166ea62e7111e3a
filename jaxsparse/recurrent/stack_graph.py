"""The graph of a stack of layers: its nodes, its edges and their operands."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp

from jaxsparse.csr import CSR
from jaxsparse.precision import accumulator_dtype, promoted
from jaxsparse.recurrent.arguments import without_padding
from jaxsparse.recurrent.cell_checks import checked_step
from jaxsparse.recurrent.graph import Edge, OfNode, Operands, Results, graph_bind
from jaxsparse.recurrent.input_weights import edge_operands, input_biases, scaled, sums_of_weights
from jaxsparse.recurrent.layer_step import InputStep, LayerStep, gives_state, joined_gates, slots_of
from jaxsparse.recurrent.layers import CheckedLayer
from jaxsparse.recurrent.layout import ScanLayout
from jaxsparse.recurrent.primitive.operands import FULL
from jaxsparse.recurrent.run import layouts_of, wide_leaves
from jaxsparse.recurrent.step import CellStep, Step


class StackGraph:
    """The graph of some layers of a stack, one on top of the other.

    Args:
        layers: by their numbers in the stack, from the lowest one on.
        xs: what the lowest one takes.
        outputs: of the layers below all of them, by number, -1 being the stack's input.
        mask: the steps that count, or None if all do.
        resets: before which of them the carry is zero, or None.
        reverse: whether time runs backwards.
        returned: the layers whose outputs are results.
        laid_out: whether sparse recurrent weights are laid out for kernels of scans.
        variant: of kernels, that is asked for.
    """

    def __init__(
        self,
        layers: dict[int, CheckedLayer],
        xs: Any,
        outputs: dict[int, Any],
        *,
        mask: Any,
        resets: Any,
        reverse: bool,
        returned: Collection[int],
        laid_out: bool,
        variant: str | None,
    ):
        lowest = min(layers)
        if layers[lowest].input is not None:
            xs = without_padding(xs, mask)
        self.layers, self.xs, self.returned = layers, xs, returned
        self.mask, self.resets, self.reverse = mask, resets, reverse
        self.laid_out, self.variant = laid_out, variant
        self.nodes: list[Step] = []
        self.units: list[int] = []
        self.of_nodes: list[OfNode] = []
        self.spans: list[tuple[str, ...]] = []
        self.edges: list[Edge] = []
        self.weights: list[tuple[Any, ...]] = []
        # The node and the state of each layer's output, and of what is below them.
        self.outputs: dict[int, tuple[int, int]] = {}
        self.places: dict[int, int] = {}
        skipped = {i - x.skip for i, x in layers.items() if x.skip is not None}
        below = {i - 1 for i, x in layers.items() if x.input is not None}
        if lowest - 1 in below:
            step = InputStep(passes_square=layers[lowest].norm is not None)
            self.input = self._node(step, xs.shape[-1], [(xs[:, :, None], FULL)]), 0
            if layers[lowest].between is None:
                self.outputs[lowest - 1] = self.input
        for i in sorted(skipped - layers.keys() - self.outputs.keys()):
            inputs = [(outputs[i][:, :, None], FULL)]
            self.outputs[i] = self._node(InputStep(), outputs[i].shape[-1], inputs), 0
        # The last of several layers passes its output on as those below it do: layers of one form
        # share a kernel.
        read = below | skipped | ({max(layers)} if len(layers) > 1 else set())
        for i, layer in layers.items():
            above = layers.get(i + 1)
            self._add(i, layer, i in read, above is not None and above.norm is not None)

    def run(self, **options: Any) -> tuple[dict[int, list[Any]], dict[int, Any]]:
        """The last carries of all layers, and the outputs of those that are returned."""
        results = graph_bind(
            Operands(tuple(self.weights), tuple(self.of_nodes)),
            nodes=tuple(self.nodes),
            edges=tuple(self.edges),
            units=tuple(self.units),
            spans=tuple(self.spans),
            transposed=False,
            reverse=self.reverse,
            length=self.xs.shape[0],
            variant=self.variant,
            **options,
        )
        carries = {
            i: [last.astype(first.dtype) for last, first in zip(of_node, layer.carry, strict=True)]
            for i, layer in self.layers.items()
            for of_node in [results[self.places[i]].carries]
        }
        return carries, {i: self._output(i, results[self.places[i]]) for i in self.returned}

    def _output(self, i: int, results: Results) -> Any:
        if results.outputs:
            return results.outputs[0][:, :, 0]
        _, state = self.outputs[i]
        y = results.states[:, :, state]
        if state == 0 and self.mask is not None:  # the cell's, which stays what it was
            y = jnp.where(self.mask[:, :, None], y, 0)
        return y

    def _node(
        self,
        step: Step,
        units: int,
        inputs: Sequence[tuple[Any, str]],
        state: Any = None,
        carries: Sequence[Any] = (),
    ) -> int:
        """Adds a node and returns its place."""
        self.nodes.append(step)
        self.units.append(units)
        self.of_nodes.append(OfNode(state, tuple(carries), tuple(x for x, _ in inputs)))
        self.spans.append(tuple(span for _, span in inputs))
        return len(self.nodes) - 1

    def _edge(self, edge: Edge, weights: tuple[Any, ...] = ()) -> None:
        self.edges.append(edge)
        self.weights.append(weights)

    def _add(self, i: int, layer: CheckedLayer, is_read: bool, squared: bool) -> None:
        """Adds a layer's node, and the edges that lead to it."""
        h, dtype = layer.h, self.xs.dtype
        biases = [] if layer.input is None else input_biases(layer)
        biased = layer.recurrent_bias is not None or bool(biases)
        step = cell_step(layer, dtype, biased=biased, masked=self.mask is not None)
        resetting = self.resets is not None
        changes = resetting or layer.mask is not None or layer.skip is not None
        other = changes or not gives_state(_bare(step))  # the output is not the state
        passes = is_read and other
        node = LayerStep(
            step,
            slots=_slots(step, layer),
            norm=layer.norm,
            resetting=resetting,
            dropping=layer.mask is not None,
            skipping=layer.skip is not None,
            passes_output=passes,
            passes_square=squared,
            gives_output=i in self.returned and other and not passes,
        )
        inputs = self._inputs(layer, node, biases)
        state = layer.carry[-1].astype(dtype)[:, None]
        if resetting:
            first = self.resets[-1 if self.reverse else 0]
            state = jnp.where(first[:, None, None], 0, state)
        if node.states > 1:
            state = jnp.concatenate([state, *[jnp.zeros_like(state)] * (node.states - 1)], 1)
        accumulator = accumulator_dtype(dtype)
        place = self._node(node, h, inputs, state, [x.astype(accumulator) for x in layer.carry])
        self.outputs[i], self.places[i] = (place, int(passes)), place

        if layer.input is not None:
            source, output = self.outputs[i - 1] if i - 1 in self.layers else self.input
            kind, weights = edge_operands(scaled(layer))
            self._edge(Edge(source, place, (output,), node.slots, 0, kind), weights)
            if layer.norm is not None:
                square = self.nodes[source].states - 1
                read = (output, square)[-layer.norm.statistics :]
                self._edge(Edge(source, place, read, node.means, 0, "mean"))
        if layer.skip is not None:
            source, output = self.outputs[i - layer.skip]
            self._edge(Edge(source, place, (output,), (node.gates,), 0, "identity"))
        matrix = layer.recurrent
        kind, weights = edge_operands(matrix)
        edge = Edge(place, place, (0,), tuple(range(layer.gates)), 1, kind)
        if isinstance(matrix, CSR) and self.laid_out:
            batch = self.xs.shape[1]
            (made,) = layouts_of([matrix], layer.gates, batch, dtype, self.variant)
            if isinstance(made, ScanLayout):
                edge = dataclasses.replace(edge, forms=made.forms)
                weights = (*weights, made.words, made.transposed_words)
            else:
                edge = dataclasses.replace(edge, not_laid_out=made)
        self._edge(edge, weights)

    def _inputs(
        self, layer: CheckedLayer, node: LayerStep, biases: Sequence[Any]
    ) -> list[tuple[Any, str]]:
        """The inputs of a layer's step, with the dimensions that each does not repeat along."""
        length, b, _ = self.xs.shape
        h, dtype = layer.h, self.xs.dtype
        inputs = []
        if layer.input is None:
            x = self.xs.reshape(length, b, layer.input_gates, h)
            if layer.bias is not None:
                wide = accumulator_dtype(dtype)
                x = (x.astype(wide) + layer.bias.astype(wide).reshape(-1, h)).astype(dtype)
            inputs.append((x, FULL))
        if layer.norm is not None and layer.norm.kind == "layer":
            sums = sums_of_weights(layer, accumulator_dtype(dtype))
            inputs.append((sums[None, None], "h"))
        if node.step.biased:
            inputs.append((_bias(layer, node, biases, dtype), "h"))
        if layer.parameters:
            wide = promoted(*(x.dtype for x in layer.parameters), dtype)
            stacked = jnp.stack([x.astype(wide) for x in layer.parameters])
            inputs.append((stacked[None, None], "h"))
        if self.mask is not None:
            inputs.append((self.mask.astype(dtype).reshape(length, b, 1, 1), "tb"))
        if node.resetting:
            inputs.append((_now_and_next(self.resets, self.reverse).astype(dtype), "tb"))
        if layer.mask is not None:
            # Kernels take the dtype of xs and float32.
            wide = promoted(layer.mask.dtype, dtype)
            mask = layer.mask.astype(wide)[:, :, None]
            inputs.append((mask, FULL if mask.shape[0] == length else "bh"))
        return inputs


def cell_step(layer: CheckedLayer, dtype: Any, *, biased: bool, masked: bool) -> CellStep:
    """The step of a layer's cell; ValueError unless it is pointwise and returns a y."""
    step = checked_step(
        layer.name,
        layer.cell,
        (layer.input_gates, layer.gates),
        layer.tree,
        layer.parameter_tree if layer.parameters else None,
        biased,
        masked,
        wide_leaves(layer.carry, dtype),
    )
    if not step.has_y:
        raise ValueError(f"{layer.name}: the cell {step.cell_name} must return a y, got None")
    return step


def _now_and_next(resets: Any, reverse: bool) -> Any:
    """Whether the carry is zero before each step, and before that run next: (t, b, 2, 1)."""
    none = jnp.zeros_like(resets[:1])
    after = [none, resets[:-1]] if reverse else [resets[1:], none]
    return jnp.stack([resets, jnp.concatenate(after)], -1)[..., None]


def _bare(step: CellStep) -> CellStep:
    """The step of the cell alone."""
    return dataclasses.replace(step, biased=False, masked=False)


def _slots(step: CellStep, layer: CheckedLayer) -> tuple[int, ...]:
    """The product of each gate of the input: that of the recurrent gate, or one of its own."""
    if layer.input is None:
        return ()
    # What is normalised is scaled before the recurrent product is added to it.
    return slots_of(step, [x and layer.norm is None for x in joined_gates(_bare(step))])


def _bias(layer: CheckedLayer, node: LayerStep, biases: Sequence[Any], dtype: Any) -> Any:
    """The biases of all products that are gates, (1, 1, gates, h)."""
    given = [(x, node.slots) for x in biases]
    if layer.recurrent_bias is not None:
        given.append((layer.recurrent_bias, tuple(range(layer.gates))))
    wide = promoted(*(x.dtype for x, _ in given), dtype)
    rows = (_in_slots(x.astype(wide).reshape(-1, layer.h), p, node.gates) for x, p in given)
    return functools.reduce(jnp.add, rows)[None, None]


def _in_slots(x: Any, slots: tuple[int, ...], count: int) -> Any:
    """The rows of x at their slots among so many rows, the others 0.

    Not by a scatter, which would be a kernel of its own. At a slice that is all of an array it
    would have indices of no elements, too: jaxlib 0.11 crashes where `shard_map` takes these.
    """
    if slots == tuple(range(len(slots))):
        return jnp.pad(x, ((0, count - len(slots)), (0, 0)))
    rows = dict(zip(slots, x, strict=True))
    return jnp.stack([rows.get(i, jnp.zeros_like(x[0])) for i in range(count)])
