"""Kernels of scans over graphs: plans and sources without a GPU, numbers with one."""

from __future__ import annotations

import dataclasses
import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import PLATFORM
from dynamic_problems import CELLS
from random_graphs import random_arrays
from recurrent_problems import kernels

from jaxsparse import CSR, H200, _ffi, dynamic, explain
from jaxsparse.dynamic import engine
from jaxsparse.dynamic.plan import NoPlan, Plan, ScanForm, make_plan
from jaxsparse.recurrent.failures import check

needs_gpu = pytest.mark.skipif(PLATFORM != "cuda", reason="needs a GPU")
VARIANTS = ("team_tensor_cores", "team_tensor_cores_barrier")


class Case:
    """Operands of a scan over random graphs that have several parents, and children twice."""

    def __init__(self, name, h, dtype, *, graphs=12, rows=30, groups=3, width=8, seed=0):
        self.cell, products, gates, tree = CELLS[name]
        several = isinstance(self.cell, tuple)
        cells, products = (x if several else (x,) for x in (self.cell, products))
        rng = np.random.default_rng(seed)
        slots = max(cell.children for cell in cells)
        arrays = random_arrays(rng, graphs=graphs, most_rows=rows, slots=slots, kinds=len(cells))
        self.graphs = dynamic.Graphs.from_arrays(**arrays)
        layout = dynamic.Layout(width=width, groups=groups, slots=slots)
        self.script = dynamic.pack(self.graphs, range(graphs), layout)
        form = self.script.form
        draw = rng.standard_normal

        def of_kinds(make):
            made = [make(cell.children * h, p * h) for cell, p in zip(cells, products, strict=True)]
            return tuple(made) if several else made[0]

        self.weights = of_kinds(
            lambda k, p: jnp.asarray(draw((k, p)) / np.sqrt(2 * slots * h), dtype)
        )
        count = jax.tree.structure(tree).num_leaves
        leaves = [jnp.asarray(draw((form.leaves, h)), jnp.float32) for _ in range(count)]
        leaves[-1] = jnp.tanh(leaves[-1]).astype(dtype)
        self.carry = jax.tree.unflatten(jax.tree.structure(tree), leaves)
        self.bias = of_kinds(lambda _, p: jnp.asarray(draw(p) / 2, jnp.float32))
        self.xs = jnp.asarray(draw((form.inputs, gates * h)), dtype) if gates else None

    @property
    def operands(self):
        return self.weights, self.carry, self.xs, self.bias

    def scan(self, operands, **options):
        weights, carry, xs, bias = operands
        return dynamic.scan(self.cell, weights, carry, self.script, xs, bias=bias, **options)

    def loss(self, operands, **options):
        made = jax.tree.leaves(self.scan(operands, **options))
        return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in made)


FORM = ScanForm(
    products=5,
    slots=2,
    hidden=256,
    tiles=200,
    groups=8,
    state_dtype="bfloat16",
    weight_dtype="bfloat16",
)


def test_teams_fill_the_gpu():
    """The plan of a Tree-LSTM is the one that docs/team_kernels.md gives."""
    plan = make_plan(FORM, H200)
    assert (plan.teams, plan.blocks, plan.in_registers) == (8, 16, 1.0), plan
    assert ".sets = 2" in plan.constants and ".window = 64" in plan.constants
    assert "8 teams of 16 blocks" in str(plan) and "100 % of the weights in registers" in str(plan)
    waits, beside = (f"{x:.1f} us" for x in (plan.tile_microseconds, plan.beside_microseconds))
    assert str(plan).endswith(
        f"about {waits} a tile that waits for the one before it, about {beside} one that does not"
    )
    adjoint = make_plan(dataclasses.replace(FORM, emits=True), H200)
    assert adjoint.tile_microseconds > plan.tile_microseconds
    alone = make_plan(dataclasses.replace(FORM, groups=1), H200)
    assert alone.teams == 1 and alone.total_microseconds > plan.total_microseconds


def test_kinds_of_rows_share_a_block():
    """Their weights are in registers where these hold all, or else in shared memory."""
    chains = dataclasses.replace(FORM, products=4, slots=1, kinds=2)
    both, one = (make_plan(dataclasses.replace(chains, kinds=kinds), H200) for kinds in (2, 1))
    assert (both.teams, both.blocks, both.in_registers) == (8, 16, 1.0), both
    assert both.tile_microseconds == one.tile_microseconds
    many = make_plan(dataclasses.replace(chains, kinds=6), H200)
    assert many.in_registers == 0 and many.tile_microseconds > one.tile_microseconds
    # As many bytes as the weights of all kinds take of 16 blocks at least.
    assert many.blocks * many.shared_bytes > 6 * 4 * 256 * 256 * 2
    none = make_plan(dataclasses.replace(FORM, kinds=40), H200)
    assert "40 x 2 x 256 x 5 x 256 weights don't fit" in none.reason


@pytest.mark.parametrize("emits", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_plans_fit(emits, dtype):
    """Of sizes that are drawn: all weights are somewhere, and blocks within what a GPU has."""
    rng = np.random.default_rng(0)
    planned = 0
    for _ in range(200):
        form = dataclasses.replace(
            FORM,
            emits=emits,
            products=int(rng.integers(1, 9)),
            slots=int(rng.integers(1, 5)),
            kinds=int(rng.choice([1, 1, 2, 6])),
            carries=int(rng.integers(0, 3)),
            hidden=8 * int(rng.integers(1, 130)),
            tiles=int(rng.integers(1, 3000)),
            groups=int(rng.integers(0, 40)),
            state_dtype=dtype,
            weight_dtype=dtype,
        )
        small = dataclasses.replace(H200, name="small", multiprocessors=int(rng.integers(1, 133)))
        plan = make_plan(form, small)
        if isinstance(plan, NoPlan):
            assert "don't fit the registers and shared memory" in plan.reason
            # Of a block with as few units as there can be; FMA has a tile's states there, too.
            units = 8 * -(-form.hidden // 8 // small.multiprocessors)
            matrix = form.products * form.slots * form.hidden * units
            weights = jnp.dtype(dtype).itemsize * form.kinds * matrix
            columns = form.hidden * (form.products if emits else form.slots)
            states = 8 * 4 * columns if dtype == "float32" else 0
            assert weights + states > 0.5 * small.shared_bytes, (form, small)
            continue
        planned += 1
        assert plan.teams * plan.blocks <= small.multiprocessors
        assert plan.teams <= form.groups or form.groups == 0
        assert plan.shared_bytes <= small.shared_bytes and plan.threads <= 1024
        assert plan.in_registers == 0 or form.kinds <= 4
        config = dict(re.findall(r"\.(\w+) = (\d+)", plan.constants))
        config = {name: int(value) for name, value in config.items()}
        assert config["units"] * plan.blocks >= form.hidden > config["units"] * (plan.blocks - 1)
        others = config["pointwise_warps"] + config["sum_warps"]
        assert plan.threads == 32 * (config["warps"] + others)
        assert (config["sum_warps"] > 0) == emits
        sets = config["sets"]
        assert config["pointwise_warps"] == 4 * sets and sets in (1, 2)
        kinds = ("product", "pointwise", "sum")
        warps = [config[name] for name in ("warps", "pointwise_warps", "sum_warps")]
        registers = [config[f"{kind}_registers"] for kind in kinds]
        if registers[0]:
            assert all(count % 4 == 0 for count in warps)
            assert 32 * np.dot(warps, registers) <= 65536
        window = config["window"]
        assert window == plan.window and window in (0, 8, 16, 32, 64, 128)
        # What the kernel asserts, since two sets and six stages need more than the least of 8.
        assert window > config["stages"] + sets or not emits
    assert planned > 50


def test_layouts_have_a_group_for_each_team():
    weights = jax.ShapeDtypeStruct((512, 1280), jnp.bfloat16)
    layout = dynamic.Layout.teams(weights, 1200, device=H200)
    assert layout == dynamic.Layout(width=8, groups=8, slots=2)
    half = dataclasses.replace(H200, name="half", multiprocessors=66)
    assert dynamic.Layout.teams(weights, 1200, device=half).groups == 4
    assert dynamic.Layout.choose(weights, 64, 1200, device=H200) == layout
    narrow = jax.ShapeDtypeStruct((500, 1250), jnp.bfloat16)  # 250 units are no multiple of 8
    assert dynamic.Layout.choose(narrow, 64, 1200, device=H200) == dynamic.Layout(64)
    with pytest.raises(ValueError, match=r"no kernel takes these weights: .* don't fit"):
        dynamic.Layout.teams(jax.ShapeDtypeStruct((8192, 20480), "bfloat16"), 9, device=H200)
    with pytest.raises(ValueError, match=r"must be \(K h, P h\) with K = 3, got \(512, 1280\)"):
        dynamic.Layout.teams(weights, 9, 3)
    # Rows of several kinds, whose cells take as many children or fewer.
    one_child = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    layout = dynamic.Layout.teams((weights, one_child), 1200, device=H200)
    of_kinds = make_plan(dataclasses.replace(FORM, kinds=2, tiles=150, groups=0), H200)
    assert layout == dynamic.Layout(width=8, groups=of_kinds.teams, slots=2)
    for wrong in (1280, 256), (256, 250), (768, 256), (256,), (0, 256):
        kinds = weights, jax.ShapeDtypeStruct(wrong, jnp.bfloat16)
        with pytest.raises(
            ValueError, match=r"weights\[\d\] must be \(K h, P h\) with K = up to 2"
        ):
            dynamic.Layout.teams(kinds, 9)
    with_none = dynamic.Layout.teams((weights, None), 1200, device=H200)
    assert with_none == layout
    for none in None, (None, None):
        with pytest.raises(ValueError, match="no kernel yet for cells without products"):
            dynamic.Layout.teams(none, 9)
        assert dynamic.Layout.choose(none, 4, 9, device=H200) == dynamic.Layout(8)
    with pytest.raises(ValueError, match=r"Layout\.choose: .* of one kind of rows at least"):
        dynamic.Layout.choose((), 4, 9)
    sparse = CSR.fromdense(np.eye(80, 32, dtype=np.float32))  # (P h, K h) of 16 units
    assert dynamic.Layout.teams(sparse, 9, device=H200) == dynamic.Layout.teams(
        jax.ShapeDtypeStruct((32, 80), jnp.float32), 9, device=H200
    )
    with pytest.raises(TypeError, match=r"Layout\.choose: weights must be arrays, got str"):
        dynamic.Layout.choose("weights", 4, 9)
    with pytest.raises(TypeError, match=r"Layout\.choose: batch must be an integer"):
        dynamic.Layout.choose(weights, 4.0, 9, device=H200)


def test_what_no_kernel_takes():
    def reason(**changes):
        plan = make_plan(dataclasses.replace(FORM, **changes), H200)
        assert isinstance(plan, NoPlan)
        return plan.reason

    assert "tiles of 8 rows, and the script's have 16" in reason(width=16)
    assert "cells without products" in reason(products=0)
    assert "one dtype" in reason(weight_dtype="float32")
    assert "250 units are no multiple of 8" in reason(hidden=250)
    assert "don't fit" in reason(hidden=4096)
    assert "5 children of a row are more than 4" in reason(slots=5, emits=True)
    for changes in {"slots": 25}, {"products": 25}, {"products": 25, "emits": True}:
        assert "up to 24 products and 24 children" in reason(hidden=8, **changes)
    assert "inputs of ['float16']" in reason(input_dtypes=("float16",))
    old = make_plan(FORM, dataclasses.replace(H200, name="A100", compute_capability=80))
    assert "compute capability 8.0" in old.reason


def test_explain_says_the_plan():
    case = Case("tree_lstm", 64, jnp.bfloat16)
    (by_kernel,) = explain(
        functools.partial(case.scan, implementation="cuda"), case.operands, device=H200
    )
    assert isinstance(by_kernel.plan, Plan) and by_kernel.plan.variant == VARIANTS[0]
    (chosen,) = explain(case.scan, case.operands, device=H200)
    assert chosen.plan == by_kernel.plan
    (batch,) = explain(
        jax.vmap(case.scan),
        jax.tree.map(lambda x: x[None].repeat(40, 0), case.operands),
        device=H200,
    )
    assert "a loop of XLA over tiles, because it is predicted to take about" in str(batch)
    kinds = Case("two_cells", 64, jnp.bfloat16)
    (of_kinds,) = explain(
        functools.partial(kinds.scan, implementation="cuda"), kinds.operands, device=H200
    )
    assert isinstance(of_kinds.plan, Plan) and "2 kinds" in of_kinds.problem
    wide = Case("tree_lstm", 64, jnp.bfloat16, width=16)
    (refused,) = explain(
        functools.partial(wide.scan, implementation="cuda"), wide.operands, device=H200
    )
    assert "refused, because kernels take tiles of 8 rows" in str(refused)


@pytest.mark.parametrize(
    "name, dtype, variant, delay",
    [
        ("tree_lstm", "bfloat16", VARIANTS[0], 0),
        ("every_child", "float16", VARIANTS[1], 1000),
        ("chain", "float32", "team_fma", 0),
        ("two_directions", "bfloat16", VARIANTS[0], 0),
        ("two_cells", "float32", "team_fma", 0),
    ],
)
def test_every_kind_of_kernel_compiles(name, dtype, variant, delay, monkeypatch):
    monkeypatch.setenv("JAXSPARSE_CACHE_DIR", "")
    monkeypatch.setenv("JAXSPARSE_SCAN_DELAY", str(delay))
    try:
        _ffi.nvrtc_version()
    except RuntimeError as error:
        pytest.skip(f"needs NVRTC: {error}")
    case = Case(name, 64, jnp.dtype(dtype))
    loss = functools.partial(case.loss, variant=variant, implementation="cuda")
    found = kernels(jax.grad(loss), case.operands)
    assert len(found) == 2
    for (file, source), expression in zip(found, engine.EXPRESSIONS.values(), strict=True):
        assert variant in file and "struct PrintedStep" in source
        assert _ffi.compile_kernel(file, expression, "sm_90a", source).startswith(b"\x7fELF")


# ---- On a GPU ----


def both(function, **options):
    """A function of a case's operands by the kernel and by the plain path, as programs."""
    return [
        jax.jit(functools.partial(function, **of))
        for of in ({"implementation": "cuda", **options}, {"implementation": "xla"})
    ]


@needs_gpu
@pytest.mark.parametrize(
    "dtype, variant",
    [
        ("bfloat16", "team_tensor_cores"),
        ("float16", "team_tensor_cores_barrier"),
        ("float32", "team_fma"),
        ("float32", "team_fma_barrier"),
    ],
)
@pytest.mark.parametrize(
    "name",
    ["tree_lstm", "tree_lstm_with_x", "every_child", "chain", "two_cells", "two_directions"],
)
def test_agrees_with_the_plain_path(name, dtype, variant):
    """Values, gradients of all operands, and the same bits each time."""
    case = Case(name, 72, jnp.dtype(dtype))
    tolerance = {"bfloat16": 5e-2, "float16": 8e-3, "float32": 1e-4}[dtype]

    def size(x):
        return float(jnp.abs(x.astype(jnp.float32)).max())

    def compare(got, expected):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert a.dtype == b.dtype and size(b) > 0
            assert size(a.astype(jnp.float32) - b) < tolerance * (1 + size(b))

    compare(*(run(case.operands) for run in both(case.scan, variant=variant)))
    by_kernel, plain = both(jax.grad(case.loss), variant=variant)
    gradient = by_kernel(case.operands)
    compare(gradient, plain(case.operands))
    jax.tree.map(np.testing.assert_array_equal, gradient, by_kernel(case.operands))
    check()


@needs_gpu
def test_states_are_the_same_in_any_packing():
    """Of another number of groups, where tiles and teams are others."""
    states = []
    for groups in (1, 2, 5):
        case = Case("tree_lstm", 64, jnp.bfloat16, groups=groups)
        _, h = jax.jit(functools.partial(case.scan, implementation="cuda"))(case.operands)
        states.append(case.script.roots(case.carry[1], h))
    for other in states[1:]:
        np.testing.assert_array_equal(states[0], other)


@needs_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_from_far_away(dtype):
    """A group of more tiles than its window, whose other sums are in memory that holds anything."""
    case = Case("tree_lstm", 64, jnp.dtype(dtype), graphs=2, rows=1500, groups=1)
    gradient = jax.grad(functools.partial(case.loss, implementation="cuda"))
    _, adjoint = explain(gradient, case.operands, device=H200)
    assert case.script.used_tiles > adjoint.plan.window + 10
    tolerance = 1e-4 if dtype == "float32" else 5e-2
    got, expected = (jax.tree.leaves(run(case.operands)) for run in both(jax.grad(case.loss)))
    for a, b in zip(got, expected, strict=True):
        a, b = np.float32(a), np.float32(b)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * (1 + np.abs(b).max()))


@needs_gpu
def test_delays_change_nothing(monkeypatch):
    case = Case("tree_lstm", 64, jnp.bfloat16, graphs=40)
    expected = both(jax.grad(case.loss))[0](case.operands)
    monkeypatch.setenv("JAXSPARSE_SCAN_DELAY", "20000")
    got = both(jax.grad(case.loss))[0](case.operands)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@needs_gpu
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("dtype, variant", [("bfloat16", VARIANTS[0]), ("float32", "team_fma")])
def test_times_out_on_blocks_that_do_not_come(dtype, variant, backwards, monkeypatch):
    """NaN and an error in less than two seconds; what comes after is as ever."""
    case = Case("tree_lstm", 64, jnp.dtype(dtype), graphs=4, rows=20)
    scan = functools.partial(case.scan, variant=variant)
    expected, operands = jax.jit(scan)(case.operands), case.operands
    if backwards:
        made, scan = jax.vjp(scan, operands)
        expected, operands = jax.jit(scan)(made), made
    check()
    with monkeypatch.context() as held_up:
        held_up.setenv("JAXSPARSE_SCAN_DELAY", str(10**8))  # 50 ms
        held_up.setenv("JAXSPARSE_SCAN_WAIT_LIMIT", "0.001")
        late = jax.jit(lambda operands: scan(operands))
        for _ in range(2):  # the first call compiles the kernel
            begin = time.monotonic()
            results = jax.tree.leaves(jax.block_until_ready(late(operands)))
            seconds = time.monotonic() - begin
            assert any(bool(jnp.isnan(x).any()) for x in results)
            with pytest.raises(RuntimeError, match=r"recurrent\.check: a scan on GPU 0 timed out"):
                check()
    assert seconds < 2
    again = jax.jit(lambda operands: scan(operands))(operands)
    jax.tree.map(np.testing.assert_array_equal, again, expected)
    check()
