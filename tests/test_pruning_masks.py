"""Masks against an oracle in plain Python: scores, scopes, structures, targets, packing."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")
hypothesis = pytest.importorskip("hypothesis")

from covering import combinations  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from jaxsparse import CSR  # noqa: E402
from jaxsparse.nn import SparseLinear  # noqa: E402
from jaxsparse.pruning import (  # noqa: E402
    Target,
    apply_masks,
    bits_like,
    bits_to_masks,
    make_masks,
    masks_to_bits,
)

nnx = pytest.importorskip("flax.nnx")


# ---- The oracle ----


def kept(size, density):
    sparsity = np.float32(1) - np.float32(density)
    return max(size - int(np.rint(sparsity * np.float32(size))), min(size, 1))


def best_first(scores):
    """Places of a flat list: NaN first, then by falling score, of equal ones the earlier."""
    return sorted(
        range(len(scores)),
        key=lambda i: (0, 0.0, i) if math.isnan(scores[i]) else (1, -scores[i], i),
    )


def oracle(scores, density, gates=1, only=None, scope="layer", structure="unstructured"):
    """Masks of several (inputs, outputs) score arrays."""
    only = range(gates) if only is None else only
    groups = []  # lists of (parameter, output, [(input, score)...]) rows
    for index, array in enumerate(scores):
        height = array.shape[1] // gates
        by_gate = [
            [(index, out) for out in range(gate * height, (gate + 1) * height)] for gate in only
        ]
        groups += by_gate if scope == "gate" else [[row for rows in by_gate for row in rows]]
    sizes = [sum(scores[i].shape[0] for i, _ in rows) for rows in groups]
    flat = [[float(x) for i, out in rows for x in scores[i][:, out]] for rows in groups]
    if scope == "model":
        everything = [(g, x) for g, xs in enumerate(flat) for x in xs]
        order = best_first([x for _, x in everything])[: kept(sum(sizes), density)]
        budgets = [sum(everything[place][0] == g for place in order) for g in range(len(groups))]
    else:
        budgets = [kept(size, density) for size in sizes]
    masks = [np.ones(array.shape, bool) for array in scores]
    for rows, budget, values in zip(groups, budgets, flat, strict=True):
        if not values:
            continue
        length = len(values) // len(rows)
        if structure == "pairs":
            halves = 0.5 * np.asarray(values, np.float32).reshape(len(rows), length)
            with np.errstate(invalid="ignore"):  # of infinities
                means = [  # of the lone last one itself
                    (halves[row, pair] + halves[row, min(pair + 1, length - 1)], row, pair)
                    for row in range(len(rows))
                    for pair in range(0, length, 2)
                ]
            for index, out in rows:
                masks[index][:, out] = False
            count = (2 * budget * len(means) + len(values)) // (2 * len(values))
            for place in best_first([mean for mean, _, _ in means])[:count]:
                _, row, pair = means[place]
                index, out = rows[row]
                masks[index][pair : pair + 2, out] = True
            continue
        chosen = np.zeros(len(values), bool)
        chosen[best_first(values)[:budget]] = True
        chosen = chosen.reshape(len(rows), length)
        per_row = {
            "unstructured": None,
            "row_balanced": max(math.floor(budget / len(rows) + 0.5), 1),
            "refilled": chosen.sum(1).max(),
        }[structure]
        for place, (index, out) in enumerate(rows):
            row = chosen[place]
            if per_row is not None:
                row = np.zeros(length, bool)
                row[best_first([float(x) for x in scores[index][:, out]])[:per_row]] = True
            masks[index][:, out] = row
    return masks


def by_score(weight, gradient, key):
    return weight


SCOPES = ["gate", "layer", "model"]
STRUCTURES = ["unstructured", "row_balanced", "refilled", "pairs"]


# ---- Masks ----


# Inputs, and outputs of a gate, of one to three parameters: none, one and several. Every further
# size would be compiled for and no more: what varies within sizes is how many weights stay, which
# are tied, the gates, the scope and the structure.
SIZES = st.sampled_from(
    [
        [(5, 2)],
        [(0, 1)],
        [(1, 2), (5, 1)],
        [(5, 0), (1, 1)],
        [(0, 2), (5, 2)],
        [(5, 1), (5, 2), (1, 1)],
    ]
)


@st.composite
def problems(draw):
    gates = draw(st.integers(1, 3))
    only = draw(st.none() | st.sets(st.integers(0, gates - 1), min_size=1).map(sorted))
    # Few different scores, so that most are tied; zeros of both signs, infinities and NaN.
    score = st.sampled_from([0.0, -0.0, 1.0, 2.0, 3.5, math.inf, math.nan])
    arrays = []
    for inputs, outputs in draw(SIZES):
        outputs *= gates
        values = draw(st.lists(score, min_size=inputs * outputs, max_size=inputs * outputs))
        arrays.append(np.array(values, np.float32).reshape(inputs, outputs))
    density = draw(st.floats(0.001, 1.0))
    return arrays, density, gates, only


@settings(max_examples=60, deadline=None)
@given(
    problems(),
    st.sampled_from(SCOPES),
    st.sampled_from(STRUCTURES),
)
def test_masks_are_those_of_the_oracle(problem, scope, structure):
    arrays, density, gates, only = problem
    target = Target("*", gates=gates, only=None if only is None else tuple(only))
    options = {"scope": scope, "structure": structure}
    masks = make_masks([jnp.asarray(a) for a in arrays], density, target, score=by_score, **options)
    expected = oracle(arrays, density, gates, only, **options)
    for mask, array in zip(masks, expected, strict=True):
        assert mask.dtype == bool
        np.testing.assert_array_equal(mask, array)


@pytest.mark.smoke
@combinations("score, structure, scope", ["magnitude", "magnitude_gradient"], STRUCTURES, SCOPES)
def test_scores_of_floats(score, structure, scope):
    rng = np.random.default_rng(0)
    weights, gradients = (
        {name: rng.standard_normal((17, 12)).astype(np.float32) for name in "ab"} for _ in range(2)
    )
    scores = [
        np.abs(weights[k] * gradients[k]) if score == "magnitude_gradient" else np.abs(weights[k])
        for k in "ab"
    ]
    options = {"scope": scope, "structure": structure}
    expected = oracle(scores, 0.3, gates=4, **options)
    for function in make_masks, jax.jit(make_masks, static_argnums=2, static_argnames=OPTIONS):
        masks = function(
            weights, 0.3, Target("?", gates=4), gradients=gradients, score=score, **options
        )
        np.testing.assert_array_equal(masks["a"], expected[0])
        np.testing.assert_array_equal(masks["b"], expected[1])


OPTIONS = ("score", "scope", "structure")


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_density_1_keeps_all_and_a_tiny_one_something(structure, scope):
    params = {"a": jnp.zeros((5, 4)), "row": jnp.ones((1, 3)), "column": jnp.ones((3, 1))}
    masks = make_masks(params, 1.0, structure=structure, scope=scope)
    assert all(mask.all() for mask in masks.values())
    masks = make_masks(params, 1e-9, structure=structure, scope=scope)
    assert any(mask.any() for mask in masks.values())
    if scope != "model":
        assert all(mask.any() for mask in masks.values())


def test_density_1_keeps_all_of_more_weights_than_float32_counts():
    # 2**24 + 1 is the first integer that float32 does not hold.
    from jaxsparse.pruning import structures

    assert int(structures._kept(2**24 + 1, 1.0)) == 2**24 + 1


def test_balanced_rows_are_equally_long():
    weight = np.random.default_rng(0).standard_normal((40, 30)) ** 5
    balanced = make_masks([weight], 0.1, structure="row_balanced")[0]
    assert balanced.sum(0).tolist() == [4] * 30
    free = make_masks([weight], 0.1)[0]
    filled = make_masks([weight], 0.1, structure="refilled")[0]
    assert free.sum() == 120 and free.sum(0).max() > 4
    assert filled.sum(0).tolist() == [free.sum(0).max()] * 30
    assert (filled | ~free).all()  # nothing that was kept is lost


def test_the_pattern_is_that_of_a_sparse_layer():
    dense = nnx.Linear(17, 12, rngs=nnx.Rngs(0))
    mask = make_masks([dense.kernel[...]], 0.25)[0]
    layer = SparseLinear.from_dense(dense, sparsity=0.75)
    np.testing.assert_array_equal(mask.T, layer.weight.todense() != 0)


@combinations("structure, scope, dtype", STRUCTURES, SCOPES, ["float32", "bfloat16", "float16"])
def test_ties_and_nan_of_every_dtype(structure, scope, dtype):
    """Many equal scores among several hundred."""
    rng = np.random.default_rng(0)
    values = np.array([0.0, -0.0, 1.0, 1.0, 2.0, math.inf, -math.inf, math.nan, -math.nan])
    arrays = [rng.choice(values, shape).astype(np.float32) for shape in ((40, 24), (9, 12))]
    options = {"scope": scope, "structure": structure}
    for density in 0.01, 0.3, 0.77, 0.9:
        masks = make_masks(
            [jnp.asarray(a, dtype) for a in arrays],
            density,
            Target("*", gates=4),
            score=by_score,
            **options,
        )
        for mask, expected in zip(masks, oracle(arrays, density, 4, **options), strict=True):
            np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_nothing_is_sorted(structure, scope):
    """Sorts and cumulative sums take 10 times as long as counts on a CPU."""
    program = jax.make_jaxpr(lambda w: make_masks([w], 0.3, scope=scope, structure=structure))
    text = str(program(jnp.ones((6, 5))))
    assert " sort[" not in text and " cumsum[" not in text and " while[" in text


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_small_products_of_weight_and_gradient_are_not_lost(dtype):
    weight = jnp.array([[1e-4], [2e-4], [4e-4], [3e-4]], dtype)
    gradient = jnp.full((4, 1), 1e-5, dtype)
    masks = make_masks([weight], 0.5, gradients=[gradient], score="magnitude_gradient")
    assert masks[0][:, 0].tolist() == [False, False, True, True]


def test_weights_with_nan_gradients_are_kept_first():
    weight = jnp.array([[1.0], [2.0], [3.0], [4.0]])
    gradient = jnp.array([[math.nan], [1.0], [1.0], [1.0]])
    masks = make_masks([weight], 0.5, gradients=[gradient], score="magnitude_gradient")
    assert masks[0][:, 0].tolist() == [True, False, False, True]


def test_random_scores_follow_the_key_and_the_parameter():
    params = {"a": jnp.ones((20, 20)), "b": jnp.ones((20, 20))}
    first, again, other = (
        make_masks(params, 0.5, score="random", key=jax.random.key(seed)) for seed in (1, 1, 2)
    )
    assert (first["a"] == again["a"]).all()
    assert (first["a"] != other["a"]).any() and (first["a"] != first["b"]).any()
    assert first["a"].sum() == 200


def test_output_dimensions_of_attention_and_convolution():
    rng = np.random.default_rng(0)
    query, conv = rng.standard_normal((8, 2, 3)), rng.standard_normal((3, 3, 4, 5))
    masks = make_masks(
        {"query": query, "conv": conv},
        0.25,
        [Target("query", output_dims=2), "conv"],
        structure="row_balanced",
    )
    assert masks["query"].sum(0).tolist() == [[2] * 3] * 2
    assert masks["conv"].sum((0, 1, 2)).tolist() == [9] * 5
    expected = oracle([np.abs(query).reshape(8, 6)], 0.25, structure="row_balanced")[0]
    np.testing.assert_array_equal(masks["query"].reshape(8, 6), expected)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_stack_is_pruned_as_its_matrices(scope, structure):
    weight = np.random.default_rng(0).standard_normal((2, 3, 5, 2, 4)).astype(np.float32)
    target = Target("*", output_dims=2, gates=2, only=(1,), batch_dims=2)
    options = {"scope": scope, "structure": structure}
    mask = make_masks([weight], 0.3, target, **options)[0]
    assert mask.shape == weight.shape
    matrices = list(np.abs(weight).reshape(6, 5, 8))
    if scope == "model":
        expected = oracle(matrices, 0.3, 2, [1], **options)
    else:
        expected = [oracle([matrix], 0.3, 2, [1], **options)[0] for matrix in matrices]
    np.testing.assert_array_equal(np.asarray(mask).reshape(6, 5, 8), expected)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_outputs_first(scope, structure):
    """A weight of PyTorch has the mask of the kernel of Flax that it is the transpose of."""
    kernel = np.random.default_rng(0).standard_normal((2, 5, 3, 2, 4)).astype(np.float32)
    options = {"output_dims": 2, "gates": 2, "only": (1,), "batch_dims": 1}
    weight = kernel.transpose(0, 3, 4, 1, 2)
    expected = make_masks([kernel], 0.3, Target("*", **options), scope=scope, structure=structure)
    target = Target("*", layout="outputs_first", **options)
    mask = make_masks([weight], 0.3, target, scope=scope, structure=structure)[0]
    np.testing.assert_array_equal(mask, np.transpose(expected[0], (0, 3, 4, 1, 2)))


def test_balanced_rows_of_outputs_first():
    weight = np.random.default_rng(0).standard_normal((6, 20))
    target = Target("*", layout="outputs_first")
    mask = make_masks([weight], 0.25, target, structure="row_balanced")[0]
    assert mask.sum(1).tolist() == [5] * 6
    with pytest.raises(ValueError, match="the outputs of 0 must be a multiple of 4 gates, got 6"):
        make_masks([weight], 0.25, Target("*", gates=4, layout="outputs_first"))


@pytest.mark.parametrize("dtype", [jnp.int32, bool])
def test_arrays_that_are_not_floating_are_no_parameters(dtype):
    params = {"w": jnp.ones((2, 2)), "index": jnp.ones((2, 3), dtype)}
    assert make_masks(params, 0.5)["index"] == optax.MaskedNode()
    with pytest.raises(ValueError, match=r"floating parameters .* 'index', which matches"):
        make_masks(params, 0.5, "index")


def test_a_batch_of_sparse_matrices_is_no_matrix():
    a = CSR.fromdense(jnp.ones((2, 3, 4)), nse=12)
    params = {"a": a, "of_a_layer": nnx.Param(a), "w": jnp.ones((2, 2))}
    assert a.values.ndim == 2
    masks = make_masks(params, 0.5)
    assert [mask.shape for mask in jax.tree.leaves(masks)] == [(2, 2)]


def test_a_stack_of_linear_layers():
    @nnx.vmap(in_axes=0, out_axes=0)
    def layers(key):
        return nnx.Linear(8, 8, rngs=nnx.Rngs(key))

    params = nnx.as_pure(nnx.state(layers(jax.random.split(jax.random.key(0), 3)), nnx.Param))
    target = Target("*", batch_dims=1)
    for where in "*", target:
        masks = make_masks(params, 0.25, where, structure="row_balanced")
        assert masks["bias"] == optax.MaskedNode()
    assert masks["kernel"].sum(1).tolist() == [[2] * 8] * 3


def test_biases_and_scales_are_no_matrices():
    attention = nnx.MultiHeadAttention(2, 8, decode=False, normalize_qk=True, rngs=nnx.Rngs(0))
    params = nnx.as_pure(nnx.state(attention, nnx.Param))
    masks = make_masks(params, 0.25)
    assert params["query"]["bias"].ndim == 2
    for name in "query", "key", "value", "out":
        assert masks[name]["bias"] == optax.MaskedNode()
        assert masks[name]["kernel"].sum() == 16
    assert masks["query_ln"]["scale"] == optax.MaskedNode()
    assert make_masks(params, 0.25, "query/bias")["query"]["bias"].sum() == 2
    with pytest.raises(ValueError, match=r"'\*/\*as', which matches none of"):
        make_masks(params, 0.25, "*/*as")


def test_only_what_is_named_has_a_mask():
    params = {"a": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "b": {"kernel": jnp.ones(3)}}
    masks = make_masks(params, 0.5, "a/*")
    assert masks["a"]["kernel"].shape == (2, 2)
    assert masks["a"]["bias"] == masks["b"]["kernel"] == optax.MaskedNode()
    applied = apply_masks(params, masks)
    assert applied["a"]["kernel"].sum() == 2 and applied["a"]["bias"] is params["a"]["bias"]


def test_the_first_of_two_targets_counts():
    weight = jnp.arange(1.0, 9).reshape(2, 4)
    masks = make_masks([weight], 0.5, [Target("0", gates=2, only=(0,)), "*"])
    assert masks[0].tolist() == [[False, False, True, True], [True, True, True, True]]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"density": 0.0}, r"density must be in \(0, 1\], got 0.0"),
        ({"density": 1.5}, r"density must be in \(0, 1\], got 1.5"),
        ({"density": math.nan}, r"density must be in \(0, 1\], got nan"),
        ({"where": "kernle"}, "'kernle', which matches none of bias, kernel"),
        ({"where": "bias"}, "at least 2 dimensions, got 'bias'"),
        ({"where": Target("*", batch_dims=1)}, r"at least 3 dimensions, got '\*'"),
        ({"where": ["kernel", "nothing"]}, "'nothing', which matches none"),
        ({"where": []}, "where must name a parameter"),
        ({"where": Target("kernel", gates=3)}, "multiple of 3 gates, got 4"),
        ({"score": "size"}, "one of magnitude, magnitude_gradient, random, got 'size'"),
        ({"scope": "world"}, "scope must be one of gate, layer, model, got 'world'"),
        ({"structure": "2:4"}, "structure must be one of unstructured, row_balanced, refilled"),
        ({"score": "magnitude_gradient"}, "needs gradients, got None"),
        ({"gradients": [1]}, "the 2 leaves of params, got 1"),
        ({"score": lambda w, g, k: w.sum(0)}, r"shape of the weight, \(3, 4\), got float32 \(4,\)"),
        ({"score": lambda w, g, k: w > 0}, r"must be floating .* got bool"),
    ],
)
def test_errors(change, message):
    params = {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}
    with pytest.raises(ValueError, match=message):
        make_masks(**{"params": params, "density": 0.5, **change})


@pytest.mark.parametrize("density", ["0.5", None, [0.5], 0.5j, True, np.array([0.5])])
def test_a_density_must_be_a_number(density):
    with pytest.raises(TypeError, match="make_masks: density must be a number, got"):
        make_masks([jnp.ones((3, 4))], density)


@pytest.mark.parametrize("density", [1, np.float16(0.5), jnp.bfloat16(0.5), np.array(0.5)])
def test_numbers_of_other_types_are_densities(density):
    assert make_masks([jnp.ones((3, 4))], density)[0].sum() == 12 * float(density)


@pytest.mark.parametrize("only", [[0, 1], np.array([0, 1]), range(2)])
def test_gates_as_another_sequence(only):
    target = Target("*", gates=4, only=only)
    assert target == Target("*", gates=4, only=(0, 1)) and target.pruned_gates == (0, 1)
    assert make_masks([jnp.ones((2, 4))], 0.5, target)[0].sum() == 6


@pytest.mark.parametrize("only", [1, "01", (0.5,)])
def test_gates_must_be_integers(only):
    with pytest.raises(TypeError, match="Target: only must hold integers, got"):
        Target("*", gates=2, only=only)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"gates": 0}, "gates must be >= 1, got 0"),
        ({"batch_dims": -1}, "batch_dims must be >= 0, got -1"),
        ({"output_dims": 0}, "output_dims must be >= 1, got 0"),
        ({"gates": 2, "only": (2,)}, r"distinct gates of 0 to 1, got \(2,\)"),
        ({"gates": 2, "only": (1, 1)}, "distinct gates"),
        ({"only": ()}, "distinct gates"),
        ({"layout": "oi"}, "one of inputs_first, outputs_first, got 'oi'"),
    ],
)
def test_errors_of_targets(change, message):
    with pytest.raises(ValueError, match=message):
        Target("*", **change)


# ---- Packing ----


# No byte, a part of one, one and more: as above, every further size would be compiled for.
LEADING = st.sampled_from([(), (3,), (0, 2), (2, 3)])
PACKED = st.sampled_from([0, 1, 8, 11])


@settings(max_examples=30, deadline=None)
@given(LEADING, PACKED, st.integers(0, 2**32 - 1))
def test_packing_and_back(leading, size, seed):
    shape = (*leading, size)
    tree = {"mask": np.random.default_rng(seed).random(shape) < 0.5, "x": np.ones(3), "flag": True}
    tree = jax.tree.map(jnp.asarray, tree)
    packed = masks_to_bits(tree)
    assert packed["mask"].dtype == jnp.uint8
    np.testing.assert_array_equal(packed["mask"], np.packbits(tree["mask"], axis=-1))
    assert packed["x"] is tree["x"] and packed["flag"] is tree["flag"]
    like = jax.eval_shape(lambda: tree)
    restored = bits_to_masks(packed, like)
    assert restored["mask"].dtype == bool
    np.testing.assert_array_equal(restored["mask"], tree["mask"])


@pytest.mark.parametrize("bits", [jnp.zeros((3, 1), jnp.uint8), jnp.zeros((3, 2), jnp.int32)])
def test_unpacking_something_else(bits):
    with pytest.raises(ValueError, match=r"mask of shape \(3, 9\) .* uint8 \(3, 2\), got"):
        bits_to_masks(bits, jnp.ones((3, 9), bool))


def test_what_a_packed_state_is_like():
    tree = {"mask": jnp.ones((3, 9), bool), "x": np.ones(2), "key": jax.random.key(0), "n": 1}
    packed, like = masks_to_bits(tree), bits_like(tree)
    assert like["mask"].shape == (3, 2) and like["mask"].dtype == jnp.uint8
    assert like["mask"].sharding == tree["mask"].sharding
    assert like["x"].sharding is None and like["key"].dtype == tree["key"].dtype
    assert jax.tree.map(jnp.shape, packed) == jax.tree.map(jnp.shape, like)
