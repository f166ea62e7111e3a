"""The package as a whole: importing it, its documentation, and exporting what uses it."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from importlib import metadata, resources

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxsparse
from jaxsparse import (
    CSR,
    Topology,
    depthwise_conv,
    masks,
    reduce_rows,
    sddmm,
    sparse_attention,
    sparse_softmax,
    spmm,
)

MODULES = ["jaxsparse"] + [
    module.name
    for module in pkgutil.walk_packages(jaxsparse.__path__, "jaxsparse.")
    if not module.name.rpartition(".")[2].startswith("_")
]


@pytest.mark.smoke
def test_import_starts_no_backend_and_changes_no_setting():
    program = """
import json, jax
from jax._src import xla_bridge
before = {name: repr(value) for name, value in jax.config.values.items()}
assert len(before) > 50
import jaxsparse
after = {name: repr(value) for name, value in jax.config.values.items()}
backends = list(xla_bridge._backends)
jax.devices()
print(json.dumps([before == after, backends, bool(xla_bridge._backends)]))
"""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    unchanged, backends, started = json.loads(result.stdout)
    assert unchanged and not backends
    assert started  # by jax.devices(): the question can be answered with yes


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    if name == "jaxsparse.display" and importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib")
    if importlib.util.find_spec("matplotlib") is not None:
        importlib.import_module("matplotlib").use("Agg")
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(importlib.import_module(name), optionflags=flags).failed == 0


def documented():
    """Every public function and class, and the public methods of the classes."""
    for name in jaxsparse.__all__:
        value = getattr(jaxsparse, name)
        if callable(value) or inspect.ismodule(value):
            yield name, value
        if inspect.isclass(value):
            for attribute, member in vars(value).items():
                is_slot = inspect.ismemberdescriptor(member)
                # The default of a field: the class says what it is.
                is_default = attribute in getattr(value, "__dataclass_fields__", ())
                if not (attribute.startswith("_") or is_slot or is_default):
                    yield f"{name}.{attribute}", member


@pytest.mark.parametrize(("name", "value"), list(documented()))
def test_public_names_are_documented(name, value):
    # Its own: a class or an instance would inherit its type's.
    assert (value.__doc__ or "").strip()


def test_operations_and_classes_have_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in jaxsparse, jaxsparse.dynamic:
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value):
                assert any(test.examples for test in finder.find(value, name)), name


def test_public_names():
    public = {name for name in vars(jaxsparse) if not name.startswith("_")}
    # Submodules are attributes of their package too.
    submodules = {name.split(".")[1] for name in MODULES if "." in name}
    assert public - submodules == set(jaxsparse.__all__) - submodules
    assert jaxsparse.__version__ == metadata.version("jaxsparse")


def test_is_typed():
    assert resources.files("jaxsparse").joinpath("py.typed").is_file()


# ---- jax.export ----

TOPOLOGY = Topology.from_mask(masks.band(3) & masks.strided(2), (6, 5), nse=14)
SQUARE = Topology.from_mask(masks.causal(), (5, 5))
HEADS = jax.tree.map(lambda x: jnp.stack([x, x]), SQUARE)


def attention_gradient(query, key, value):
    return jax.grad(lambda q: jnp.sum(sparse_attention(q, key, value, SQUARE) ** 2))(query)


# name -> (function, shapes of its operands; "b" is a dimension that is left open)
EXPORTED = {
    "spmm": (lambda v, x: spmm(CSR(v, TOPOLOGY), x), [(14,), ("b", 5, 3)]),
    "spmm_values": (lambda v, x: spmm(CSR(v, TOPOLOGY), x), [("b", 14), (5, 3)]),
    "spmm_columns": (lambda v, x: spmm(CSR(v, TOPOLOGY), x), [(14,), (5, "b")]),
    "spmm_epilogue": (
        lambda v, x, c: spmm(CSR(v, TOPOLOGY), x, bias=c, activation="relu"),
        [("b", 14), ("b", 5, 3), ("b", 6)],
    ),
    "left": (lambda x, v: x @ CSR(v, TOPOLOGY), [("b", 3, 6), (14,)]),
    "sddmm": (lambda x, y: sddmm(x, y, TOPOLOGY).values, [("b", 6, 4), ("b", 5, 4)]),
    "sparse_softmax": (lambda v: sparse_softmax(CSR(v, TOPOLOGY)).values, [("b", 14)]),
    "reduce_rows": (lambda v: reduce_rows(v, TOPOLOGY, "logsumexp"), [("b", 14)]),
    "sparse_attention": (
        lambda q, k, v: sparse_attention(q, k, v, SQUARE),
        [("b", 5, 2, 4)] * 3,
    ),
    "sparse_attention_heads": (
        lambda q, k, v: sparse_attention(q, k, v, HEADS),
        [("b", 5, 2, 4)] * 3,
    ),
    "gradient": (attention_gradient, [("b", 5, 2, 4)] * 3),
    "depthwise_conv": (
        lambda x, k: depthwise_conv(x, k, stride=2, activation="relu"),
        [(3, "b", 6, 5), (3, 3, 3)],
    ),
    "static": (lambda v, x: spmm(CSR(v, TOPOLOGY), x), [(14,), (5, 3)]),
}


def sized(shape, b):
    return tuple(b if size == "b" else size for size in shape)


def exported(name, **options):
    function, shapes = EXPORTED[name]
    (b,) = export.symbolic_shape("b")
    arguments = [jax.ShapeDtypeStruct(sized(shape, b), jnp.float32) for shape in shapes]
    make = export.export(jax.jit(function), **options)
    program = make(*arguments).serialize()
    return function, shapes, export.deserialize(program)


def assert_calls_are_equal(function, shapes, program, rounding=0.0):
    rng = np.random.default_rng(0)
    for b in 1, 3:
        operands = [
            jnp.asarray(rng.standard_normal(sized(shape, b)), jnp.float32) for shape in shapes
        ]
        got, expected = program.call(*operands), jax.jit(function)(*operands)
        np.testing.assert_allclose(got, expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("name", EXPORTED)
def test_export(name):
    # On a GPU XLA computes small convolutions, but not where a size is open.
    another_form = name == "depthwise_conv" and jax.default_backend() == "gpu"
    assert_calls_are_equal(
        *exported(name, disabled_checks=jaxsparse.EXPORT_DISABLED_CHECKS),
        rounding=1e-5 if another_form else 0.0,
    )


@pytest.mark.parametrize("name", ["spmm", "gradient"])
def test_export_for_several_platforms(name):
    function, shapes, program = exported(
        name,
        disabled_checks=jaxsparse.EXPORT_DISABLED_CHECKS,
        platforms=("cpu", "cuda", "tpu"),
    )
    assert program.platforms == ("cpu", "cuda", "tpu")
    assert_calls_are_equal(function, shapes, program)


def test_export_of_a_pattern_as_arguments():
    leaves, structure = jax.tree.flatten(TOPOLOGY)

    def product(leaves, values, x):
        return CSR(values, jax.tree.unflatten(structure, leaves)) @ x

    shapes = jax.eval_shape(lambda *args: args, leaves, jnp.ones(14), jnp.ones((5, 3)))
    make = export.export(jax.jit(product), disabled_checks=jaxsparse.EXPORT_DISABLED_CHECKS)
    program = export.deserialize(make(*shapes).serialize())
    other = Topology.from_mask(masks.band(2), (6, 5), nse=14)
    values, x = jnp.arange(14.0), jnp.arange(15.0).reshape(5, 3)
    for topology in TOPOLOGY, other:
        actual = program.call(jax.tree.leaves(topology), values, x)
        np.testing.assert_array_equal(actual, CSR(values, topology) @ x)


def test_export_needs_the_disabled_checks():
    with pytest.raises(ValueError, match="jaxsparse_spmm"):
        exported("spmm")


def test_exported_programs_take_matrices():
    a = jaxsparse.CSR.fromdense(np.array([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]], np.float32))
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    function = jax.jit(lambda a, x: (a @ x, 2 * a))
    exported = jax.export.export(function, disabled_checks=jaxsparse.EXPORT_DISABLED_CHECKS)(a, x)
    product, doubled = jax.export.deserialize(exported.serialize()).call(a, x)
    np.testing.assert_array_equal(product, a @ x)
    np.testing.assert_array_equal(doubled.todense(), 2 * a.todense())
    assert doubled.shape == (2, 3)


def test_topology_made_in_a_program_is_concrete():
    kept = []

    @jax.jit
    def function(x):
        kept.append(jaxsparse.Topology([0, 1, 2], [1, 0], (2, 2)))
        return jaxsparse.CSR(x, kept[0]) @ jnp.eye(2)

    np.testing.assert_array_equal(function(jnp.array([1.0, 2.0])), [[0, 1], [2, 0]])
    assert kept[0].nnz == 2
    np.testing.assert_array_equal(kept[0].T.column_indices, [1, 0])
