"""What the tests of CSR matrices share: a matrix of small integers, and a comparison."""

from __future__ import annotations

import jax
import numpy as np

from jaxsparse import CSR

SHAPE = (7, 9)


def integers(seed, *shape, dtype=np.float32):
    """Random integers from 1 to 7, so none is 0."""
    return np.random.default_rng(seed).integers(1, 8, shape).astype(dtype)


def sparse(seed, *shape, density=0.3, dtype=np.float32):
    """A dense array with zeros."""
    stored = np.random.default_rng(seed + 99).random(shape) < density
    return np.where(stored, integers(seed, *shape), 0).astype(dtype)


DENSE = sparse(0, *SHAPE)
A = CSR.fromdense(DENSE)


def assert_same(a, b):
    """Equal in structure, values and dtypes, of whatever kind their patterns are."""

    def dynamic(x):
        return CSR(x.values, x.topology.as_dynamic()) if isinstance(x, CSR) else x

    a, b = (jax.tree.map(dynamic, x, is_leaf=lambda x: isinstance(x, CSR)) for x in (a, b))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.dtype == y.dtype
