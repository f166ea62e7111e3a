"""Constructors and calls of the layers against those of Flax that they stand for.

What is left out is listed, with the reason, in docs/flax.md, and nowhere else.
"""

from __future__ import annotations

import inspect
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from jaxsparse import Topology  # noqa: E402
from jaxsparse.nn import (  # noqa: E402
    RNN,
    Bidirectional,
    GRUCell,
    LSTMCell,
    SimpleCell,
    SparseAttention,
    SparseLinear,
    SparseMultiHeadAttention,
)
from jaxsparse.pruning import SparseLinearGeneral  # noqa: E402

CELLS = {SimpleCell: nnx.SimpleCell, GRUCell: nnx.GRUCell, LSTMCell: nnx.OptimizedLSTMCell}
MODULES = CELLS | {
    SparseLinear: nnx.Linear,
    RNN: nnx.RNN,
    Bidirectional: nnx.Bidirectional,
    SparseMultiHeadAttention: nnx.MultiHeadAttention,
}
TOPOLOGY = Topology.from_mask(np.tri(4, dtype=bool))


def cell():
    return GRUCell(4, 4, rngs=nnx.Rngs(0))


def array(*shape):
    return jnp.ones(shape)


# What has no default, of Flax and of the layer here.
REQUIRED = {
    SparseLinear: lambda: {"in_features": 4, "out_features": 4, "sparsity": 0.5},
    RNN: lambda: {"cell": cell()},
    Bidirectional: lambda: {"forward_rnn": RNN(cell()), "backward_rnn": RNN(cell())},
    SparseMultiHeadAttention: lambda: {"num_heads": 2, "in_features": 4, "pattern": TOPOLOGY},
} | dict.fromkeys(CELLS, lambda: {"in_features": 4, "hidden_features": 4})

# The calls, as they are named in the documents, and what Flax calls so.
CALLS = {f"{cls.__name__}.__call__": (cls.__call__, of.__call__) for cls, of in MODULES.items()}
CALLS |= {
    "SparseAttention.__call__": (SparseAttention.__call__, nnx.dot_product_attention),
    "SparseLinearGeneral.__call__": (SparseLinearGeneral.__call__, nnx.LinearGeneral.__call__),
} | {
    f"{cls.__name__}.initialize_carry": (cls.initialize_carry, of.initialize_carry)
    for cls, of in CELLS.items()
}
SIGNATURES = {cls.__name__: (cls, of) for cls, of in MODULES.items()} | CALLS

# Defaults that the documents say to be others: None is what the layers inside have.
OTHER_DEFAULTS = {("Bidirectional", "time_major"), ("Bidirectional", "return_carry")}


def parameters(function):
    """Of a function, or of a class's constructor and those that it hands its ``options`` to."""
    if not inspect.isclass(function):
        return dict(inspect.signature(function).parameters)
    found = {}
    for cls in function.__mro__:
        own = inspect.signature(vars(cls)["__init__"]).parameters if "__init__" in vars(cls) else {}
        found = found | {name: p for name, p in own.items() if name not in found}
        if own and not any(p.kind is p.VAR_KEYWORD for p in own.values()):
            break
    return found


def listed(column):
    """The table of docs/flax.md with such a column: a set of names for each layer or call."""
    text = (pathlib.Path(__file__).parents[1] / "docs/flax.md").read_text()
    table = re.search(rf"^\| layer \| {column} \| why \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.M)
    rows = [line.strip("|").split("|") for line in table[1].splitlines()]
    assert all(why.strip() for *_, why in rows)
    names = re.compile(r"`([\w.]+)`")
    return {
        layer: set(names.findall(options))
        for layers, options, _ in rows
        for layer in names.findall(layers)
    }


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_flax_but_for_what_the_documents_list(name):
    ours, theirs = (parameters(function) for function in SIGNATURES[name])
    theirs = {k: p for k, p in theirs.items() if k != "self"}
    assert theirs.keys() - ours.keys() == listed("not there").get(name, set())
    positional = [k for k, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [k for k in ours if k != "self"][: len(positional)] == positional
    for key, parameter in theirs.items():
        default = parameter.default
        simple = default is None or isinstance(default, bool | int | float | str | type)
        if simple and key in ours and (name, key) not in OTHER_DEFAULTS:
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                assert ours[key].kind is ours[key].POSITIONAL_OR_KEYWORD, key
            assert ours[key].default == default, key


@pytest.mark.parametrize("cls", MODULES)
def test_the_defaults_of_flax_can_be_given(cls):
    given = {
        name: p.default
        for name, p in parameters(MODULES[cls]).items()
        if p.default is not p.empty and name in parameters(cls)
    }
    options = REQUIRED[cls]() | ({} if "rngs" in given else {"rngs": nnx.Rngs(0)})
    assert isinstance(cls(**options, **given), cls)


# A value of each option that is listed as taken at its default alone, other than that.
def other(*args, **options):
    raise AssertionError("it is not called")


OTHERS = {"attention_fn": other, "dot_general": other, "module": cell()}


def test_what_the_documents_list_as_fixed_is_refused():
    attention = SparseMultiHeadAttention(2, 4, pattern=TOPOLOGY, rngs=nnx.Rngs(0))
    calls = {
        "SparseMultiHeadAttention.__call__": lambda **o: attention(array(1, 4, 4), **o),
        "SparseAttention.__call__": lambda **o: SparseAttention(TOPOLOGY)(
            *(array(1, 4, 2, 2),) * 3, **o
        ),
    } | {
        cls.__name__: lambda cls=cls, **o: cls(**REQUIRED[cls](), **o, rngs=nnx.Rngs(0))
        for cls in MODULES
    }
    fixed = listed("only with its default")
    assert fixed
    for name, options in fixed.items():
        assert options <= parameters(SIGNATURES[name][0]).keys()
        calls[name]()
        for option in options:
            with pytest.raises(ValueError, match=f"{option}|cache"):
                calls[name](**{option: OTHERS.get(option, True)})
