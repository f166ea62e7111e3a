"""Scans whose carry is reset: episodes in one array, against each one alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import PLATFORM
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from recurrent_problems import CELLS, compiled, problem

from jaxsparse import recurrent
from jaxsparse.primitive import equations

T, B = 7, 4
LENGTHS = jnp.array([7, 5, 0, 3])
# At the first step, at neighbours, nowhere in a row, and where steps do not count.
RESETS = np.zeros((T, B), bool)
RESETS[[0, 3, 4], 0] = RESETS[[2, 5, 6], 1] = RESETS[[0, 3], 2] = RESETS[1:, 3] = True

leaves = jax.tree.leaves
WEIGHTS = pytest.mark.parametrize("sparse", [False, True], ids=["dense", "csr"])
close = functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-12)


def total(results):
    return sum(jnp.sum(jnp.sin(x)) for x in leaves(results))


def cut(resets, lengths, reverse):
    """(row, begin, end, whether it starts from zeros) of episodes, in the order they run in."""
    for row in range(B):
        steps = range(lengths[row])
        steps = steps[::-1] if reverse else steps
        begin = 0
        for i in range(1, len(steps) + 1):
            if i == len(steps) or resets[steps[i], row]:
                part = steps[begin:i]
                yield row, min(part), max(part) + 1, begin > 0 or resets[steps[0], row]
                begin = i


def one_by_one(p, lengths, reverse, weights, carry, xs, bias):
    """Each episode by a scan of its own, from zeros or from the end of nothing before it."""
    ys = jnp.zeros((T, B, weights.shape[0]), xs.dtype)
    last = carry
    for row, begin, end, fresh in cut(RESETS, lengths, reverse):
        first = jax.tree.map(lambda x: x[row : row + 1] * (0 if fresh else 1), carry)  # noqa: B023
        part = xs[begin:end, row : row + 1]
        end_carry, y = p.reference(weights, first, part, bias, reverse=reverse)
        ys = ys.at[begin:end, row].set(y[:, 0])
        last = jax.tree.map(lambda a, b: a.at[row].set(b[0]), last, end_carry)  # noqa: B023
    return last, ys


@pytest.mark.parametrize(
    "name, sparse, reverse, recompute, ends",
    [
        ("LSTM", False, False, False, True),
        ("three_leaves", False, True, True, True),
        ("GRU", True, True, False, False),
    ],
)
def test_episodes(name, sparse, reverse, recompute, ends):
    """Values and gradients are those of each episode alone."""
    lengths = LENGTHS if ends else None
    with jax.enable_x64(True):
        p = problem(name, sparse, T=T, B=B, dtype=jnp.float64)
        p = p._replace(weights=jnp.nan_to_num(p.weights))
        options = {"seq_lengths": lengths, "reverse": reverse, "recompute": recompute}

        def ours(*operands):
            results = p.scan(*operands, resets=RESETS, **options)
            return total(results), results

        dense = p._replace(topology=None, weights=p.dense)
        of_all = np.full(B, T) if lengths is None else np.asarray(lengths)

        def alone(*operands):
            results = one_by_one(dense, of_all, reverse, *operands)
            return total(results), results

        runs = (jax.value_and_grad(f, (0, 1, 2, 3), has_aux=True) for f in (ours, alone))
        got, expected = (
            compiled(run)(*q.operands) for run, q in zip(runs, (p, dense), strict=True)
        )
        jax.tree.map(close, got[0], expected[0])
        jax.tree.map(close, got[1][1:], expected[1][1:])
        dweights = expected[1][0]
        if sparse:
            t = p.topology
            dweights = dweights.T[t.row_indices[: t.nnz], t.column_indices[: t.nnz]]
        close(got[1][0][: len(dweights)] if sparse else got[1][0], dweights)


def test_derivatives_by_differences():
    with jax.enable_x64(True):
        p = problem("RNN", T=4, B=2, h=3, dtype=jnp.float64)
        resets = jnp.array([[False, True], [True, False], [False, True], [False, False]])
        lengths = jnp.array([4, 3])
        for recompute, order in ((False, 2), (True, 1)):
            options = {"resets": resets, "seq_lengths": lengths, "recompute": recompute}
            function = jax.jit(functools.partial(p.scan, **options))
            check_grads(function, p.operands, order, modes=("fwd", "rev"), eps=1e-4)


def test_both_directions():
    p = problem("LSTM", T=T, B=B)
    run = jax.jit(functools.partial(recurrent.bidirectional_scan, p.cell))
    carries, ys = run(
        (p.weights, -p.weights),
        (p.carry, p.carry),
        (p.xs, p.xs),
        resets=(RESETS, RESETS[::-1]),
        seq_lengths=LENGTHS,
    )
    for i, (weights, resets) in enumerate([(p.weights, RESETS), (-p.weights, RESETS[::-1])]):
        options = {"resets": resets, "seq_lengths": LENGTHS, "reverse": i == 1}
        expected = p.scan(weights, p.carry, p.xs, **options)
        for a, b in zip(leaves((carries[i], ys[i])), leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


# ---- What must not spread ----


@WEIGHTS
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name, recompute", [("LSTM", False), ("GRU", True)])
def test_a_carry_that_is_put_aside_reaches_nothing(name, recompute, reverse, sparse):
    """In row 0 at the first step that runs, in row 1 after padding; row 3's has no step."""
    p = problem(name, sparse, T=4, B=4)
    resets = np.zeros((4, 4), bool)
    resets[3 if reverse else 0, 0] = resets[1 if reverse else 0, 1] = True
    lengths = jnp.array([4, 2, 4, 0])

    @compiled
    def value_and_gradient(*operands):
        def loss(*operands):
            carry, ys = p.scan(
                *operands, seq_lengths=lengths, resets=resets, reverse=reverse, recompute=recompute
            )
            kept = jax.tree.map(lambda x: x[:3], carry)
            return total((kept, ys)), (kept, ys)

        return jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(*operands)

    def with_carry(bad):
        carry = jax.tree.map(lambda x: x.at[jnp.array([0, 1, 3])].set(bad), p.carry)
        return value_and_gradient(*p._replace(carry=carry).operands)

    clean = with_carry(0.0)
    assert all(np.isfinite(x).all() for x in leaves(clean))
    for bad in (np.nan, np.inf):
        jax.tree.map(np.testing.assert_array_equal, with_carry(bad), clean)
    for gradient in leaves(clean[1][1]):
        assert not np.any(gradient[:2]) and np.all(gradient[2])


def test_a_carry_that_is_put_aside_reaches_no_second_derivative():
    p = problem("RNN", T=3, B=2)
    resets = jnp.zeros((3, 2), bool).at[0, 0].set(True)

    @compiled
    def second(bad):
        carry = jax.tree.map(lambda x: x.at[0].set(bad), p.carry)

        def value(weights):
            return total(p.scan(weights, carry, p.xs, resets=resets))

        return jax.grad(lambda weights: total(jax.grad(value)(weights)))(p.weights)

    clean = second(0.0)
    assert np.any(clean)
    np.testing.assert_array_equal(second(np.nan), clean)


def test_a_carry_that_became_nan_is_put_aside():
    p = problem("LSTM", T=T, B=B)
    bad = p.xs.at[2, 1].set(jnp.nan)
    resets = jnp.zeros((T, B), bool).at[4, 1].set(True)
    ys, expected = (p.scan(p.weights, p.carry, xs, resets=resets)[1] for xs in (bad, p.xs))
    assert np.isnan(ys[2:4, 1]).all()
    np.testing.assert_array_equal(ys[4:], expected[4:])


def test_resets_nowhere_change_no_bit():
    for dtype in (jnp.float32, jnp.bfloat16):
        p = problem("three_leaves", T=T, B=B, dtype=dtype)
        nowhere = jnp.zeros((T, B), bool)
        got, expected = (
            jax.jit(jax.value_and_grad(lambda o: total(p.scan(*o, resets=r))))(p.operands)  # noqa: B023
            for r in (nowhere, None)
        )
        jax.tree.map(functools.partial(same, eps=jnp.finfo(dtype).eps), got, expected)


def same(got, expected, eps):
    """To the last bit by one program on a CPU; GPUs contract what they add in either.

    A sum of many values near one can be near zero, so errors are measured against one at least.
    """
    got, expected = np.float32(got), np.float32(expected)
    atol = 4 * eps * max(1, np.abs(expected).max()) if PLATFORM == "cuda" else 0
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


# ---- vmap and devices ----


@pytest.mark.parametrize("names", [("resets",), ("xs", "resets"), ("weights", "resets"), ("xs",)])
def test_vmap(names):
    p = problem("LSTM", T=T, B=B)
    operands = {
        "weights": jnp.stack([p.weights, -p.weights]),
        "xs": jnp.stack([p.xs, p.xs / 2]),
        "resets": jnp.stack([jnp.asarray(RESETS), jnp.asarray(RESETS[::-1])]),
    }
    axes = {name: 0 if name in names else None for name in operands}
    given = {n: x if n in names else x[0] for n, x in operands.items()}

    def run(weights, xs, resets):
        loss = lambda *o: total(p.scan(o[0], p.carry, o[1], resets=resets))  # noqa: E731
        return jax.value_and_grad(loss, (0, 1))(weights, xs)

    got = compiled(jax.vmap(run, tuple(axes.values())))(*given.values())
    for i in range(2):
        one = run(*(x[i] if n in names else x for n, x in given.items()))
        for a, b in zip(leaves(got), leaves(one), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=2e-5, atol=2e-6)
    if "weights" not in names:
        jaxpr = jax.make_jaxpr(jax.vmap(run, tuple(axes.values())))(*given.values()).jaxpr
        sizes = {e.outvars[0].aval.shape[-3] for e in equations(jaxpr) if "step" in e.params}
        assert sizes == {2 * B}


@pytest.mark.parametrize("how", ["shard_map", "auto", "explicit"])
def test_a_batch_that_is_cut(how):
    devices = jax.devices("cpu")
    if len(devices) < 4:
        pytest.skip("needs 4 CPU devices (tests/conftest.py)")
    kind = AxisType.Explicit if how == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((4,), ("data",), (kind,), devices=devices[:4])
    p = problem("GRU", T=T, B=B)
    specs = (P(), P("data"), P(None, "data"), P(None, "data"), P("data"))
    operands = (p.weights, p.carry, p.xs, jnp.asarray(RESETS), LENGTHS)

    def run(weights, carry, xs, resets, lengths):
        def loss(weights, carry, xs):
            return total(p.scan(weights, carry, xs, resets=resets, seq_lengths=lengths)[1])

        return jax.grad(loss, (0, 1, 2))(weights, carry, xs)

    expected = jax.jit(run)(*operands)
    if how == "shard_map":
        got = jax.jit(
            jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs[:3], check_vma=True)
        )(*operands)
    else:
        placed = [
            jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(operands, specs, strict=True)
        ]
        with jax.set_mesh(mesh):
            got = jax.jit(run)(*placed)
        assert got[2].sharding.is_equivalent_to(NamedSharding(mesh, P(None, "data")), 3)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# ---- Errors ----


@pytest.mark.parametrize(
    "resets, text",
    [
        (np.zeros((T, B), np.float32), r"resets must be booleans of shape \(T, B\) = \(7, 4\)"),
        (np.zeros((B, T), bool), r"got bool of shape \(4, 7\)"),
        (np.zeros(T, bool), "must have"),
    ],
)
def test_errors(resets, text):
    p = problem("RNN", T=T, B=B)
    with pytest.raises(ValueError, match=text):
        p.scan(*p.operands, resets=resets)


def test_both_directions_are_given_resets_each():
    p = problem("RNN", T=T, B=B)
    pair = ((p.weights,) * 2, (p.carry,) * 2, (p.xs,) * 2)
    for resets, text in ((RESETS, "resets must be a pair"), ((RESETS, None), "must have one form")):
        with pytest.raises(ValueError, match=text):
            recurrent.bidirectional_scan(CELLS["RNN"][0], *pair, resets=resets)
