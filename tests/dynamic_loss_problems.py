"""Losses of random graphs, and the same by `dynamic.scan` and jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from test_dynamic_device import Case

from jaxsparse import dynamic


class LossCase(Case):
    """Operands of a loss over random graphs, by the labels of rows or of graphs ("class")."""

    def __init__(self, name, h, dtype, *, classes=5, label="label", **options):
        super().__init__(name, h, dtype, **options)
        rng = np.random.default_rng(7)
        self.label = label
        self.head = (
            jnp.asarray(rng.standard_normal((h, classes)) * (3 / np.sqrt(h)), dtype),
            # Kernels read it in the states' dtype, too.
            jnp.asarray(rng.standard_normal(classes), dtype if name == "chain" else jnp.float32),
        )

    @property
    def operands(self):
        return (*super().operands, self.head)

    def wide(self):
        """The operands in float64."""
        return jax.tree.map(lambda x: x.astype(jnp.float64), self.operands)

    def loss(self, operands, script=None, **options):
        """`dynamic.loss`, by its operands."""
        weights, carry, xs, bias, head = operands
        return dynamic.loss(
            self.cell,
            weights,
            carry,
            self.script if script is None else script,
            xs,
            bias=bias,
            head=dynamic.SoftmaxHead(*head, label=self.label),
            **options,
        )

    def composed(self, operands, script=None):
        """What it should be: a scan, a product, a softmax and a mean over labels."""
        weights, carry, xs, bias, (head, head_bias) = operands
        script = self.script if script is None else script
        made = dynamic.scan(self.cell, weights, carry, script, xs, bias=bias, implementation="xla")
        states = [jax.tree.leaves(x)[-1] for x in (carry, made)]
        if self.label == "class":
            rows, labels = script.roots(*states), script.graph(self.label)
            labels = jnp.where(script.root_rows < 0, -1, labels)
        else:
            rows, labels = jnp.concatenate(states), script.row(self.label)
        logits = rows @ head + head_bias
        chosen = jnp.take_along_axis(logits, labels[:, None] % logits.shape[1], 1)[:, 0]
        losses = jnp.where(labels == -1, 0, jax.nn.logsumexp(logits, -1) - chosen)
        return losses.sum() / jnp.maximum((labels != -1).sum(), 1)
