"""jaxsparse.explain: what sparse operations run as here and on a GPU, asked without one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import fits
from jax import export

import jaxsparse
from jaxsparse import CSR, H200, Topology, backend, explain, recurrent, sddmm, sparse_softmax, spmm
from jaxsparse import device as devices
from jaxsparse.ops.multiply import multiply
from jaxsparse.primitive import lowering
from jaxsparse.recurrent.plan import Plan

A100 = dataclasses.replace(H200, name="A100", compute_capability=80, shared_bytes=166912)
V100 = dataclasses.replace(H200, name="V100", compute_capability=70)
SPLIT = "tensor_cores_split_k"
TOPOLOGY = Topology.from_mask(np.random.default_rng(0).random((96, 64)) < 0.2)
X = jax.ShapeDtypeStruct((64, 32), jnp.float32)
VALUES = jax.ShapeDtypeStruct((TOPOLOGY.nse,), jnp.float32)
# The free choice on a CPU, by the shape of the result.
FREE = {(96, 3): "rows", (3, 96): "panels"}


def product(values, x, **options):
    return spmm(CSR(values, TOPOLOGY), x, **options)


def sampled(x, y, **options):
    return sddmm(x, y, TOPOLOGY, **options).values


def loss(values, x):
    return jnp.sum(product(values, x) ** 2)


def names(explanation):
    return [call.operation for call in explanation]


def assert_cheapest_is_chosen(call):
    costs = [cost for _, cost in call.variants]
    assert not call.otherwise and not call.forced and call.variant == call.variants[0][0]
    assert math.isfinite(costs[0]) and costs == sorted(costs)
    variants = [name for name, _ in call.variants]
    assert len({*variants}) == len(variants)


@pytest.mark.smoke
def test_a_product():
    explanation = explain(product, VALUES, X, device=H200)
    (call,) = explanation
    assert isinstance(explanation, tuple) and call.operation == "spmm"
    assert call.shape == (96, 64) and call.entries == TOPOLOGY.nse
    assert call.operands["x"] == X and call.operands["values"] == VALUES
    assert call.results == {"out": jax.ShapeDtypeStruct((96, 32), jnp.float32)}
    assert_cheapest_is_chosen(call)
    assert {name for name, _ in call.variants} <= {
        *backend.TARGETS["spmm"]["variants"]["cuda"],
    }
    problem, here, choice = str(explanation).splitlines()
    assert here == f"  on this machine's {call.here}"
    for part in ("spmm: matrix (96, 64)", f"{TOPOLOGY.nse} stored", "x float32 (64, 32)"):
        assert part in problem
    assert choice.startswith(f"  on NVIDIA H200: {call.variant}, about ") and " us" in choice
    by_name = choice.partition("by name only: ")[2]
    assert by_name.split(", ") == [name for name, cost in call.variants if math.isinf(cost)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("operation", ["spmm", "linear", "sddmm", "sparse_softmax"])
def test_every_operation_and_dtype(operation, dtype):
    def call(values, x):
        a = CSR(values, TOPOLOGY)
        return {
            "spmm": lambda: spmm(a, x),
            "linear": lambda: jaxsparse.linear(x.T, a, activation="gelu"),
            "sddmm": lambda: sampled(jnp.ones((96, 32), dtype), x),
            "sparse_softmax": lambda: sparse_softmax(a, scale=0.5),
        }[operation]()

    with jax.enable_x64(dtype == "float64"):
        arguments = (jax.ShapeDtypeStruct(s.shape, dtype) for s in (VALUES, X))
        (explained,) = explain(call, *arguments, device=H200)
    assert_cheapest_is_chosen(explained)
    expected = {"linear": "spmm_epilogue"}.get(operation, operation)
    assert explained.operation == expected and expected in str(explained)


def test_mixed_dtypes():
    narrow = jax.ShapeDtypeStruct(X.shape, jnp.bfloat16)
    gradient = jax.grad(lambda v, x: product(v, x).astype(jnp.float32).sum(), (0, 1))
    for call in explain(gradient, VALUES, narrow, device=H200):
        assert_cheapest_is_chosen(call)


VARIANTS = [
    (operation, variant)
    for operation in ("spmm", "sddmm", "sparse_softmax")
    for variant in backend.TARGETS[operation]["variants"]["cuda"]
]


@pytest.mark.parametrize(("operation", "variant"), VARIANTS)
def test_forced(operation, variant):
    """A variant that is asked for is the chosen one, or refused where it does not fit."""

    def call(values, x, variant=None):
        a = CSR(values, TOPOLOGY)
        return {
            "spmm": lambda: spmm(a, x, variant=variant),
            "sddmm": lambda: sampled(jnp.ones((96, 32)), x, variant=variant),
            "sparse_softmax": lambda: sparse_softmax(a, variant=variant),
        }[operation]()

    (free,) = explain(call, VALUES, X, device=H200)
    (forced,) = explain(functools.partial(call, variant=variant), VALUES, X, device=H200)
    if variant not in dict(free.variants):
        assert f"variant '{variant}' does not fit" in forced.otherwise
        return
    assert forced.variant == variant and forced.forced
    assert f"H200: {variant}, asked for by its name" in str(forced)
    # Whose workspace only those calls have that may use it.
    cores = {v for v, _ in free.variants if v.startswith("tensor_cores")}
    without = set() if variant in cores else cores
    assert sorted(forced.variants) == sorted(v for v in free.variants if v[0] not in without)
    others = [cost for _, cost in forced.variants[1:]]
    assert others == sorted(others)


def test_places_that_32_bits_do_not_hold():
    """Columns are scaled beforehand where 32 bits hold what becomes of them."""
    wide = Topology(np.array([0, 1, 2]), np.array([5, 2**20 - 1]), (2, 2**20))

    def call(values, x):
        return spmm(CSR(values, wide), x, variant="tiled_rows_prescaled")

    for n, taken in (1024, True), (1028, False):
        shapes = ((2,), (2**20, n))
        (forced,) = explain(
            call, *map(jax.ShapeDtypeStruct, shapes, [jnp.float32] * 2), device=H200
        )
        assert (forced.variant == "tiled_rows_prescaled") == taken
        assert taken or "does not fit" in forced.otherwise


def test_the_variant_that_takes_x_on_the_left():
    """It reads it as it is; the others' choice is that of a call with x transposed."""

    def call(values, x, variant=None):
        return jaxsparse.linear(x.T, CSR(values, TOPOLOGY), variant=variant)

    (forced,) = explain(functools.partial(call, variant="generic_dots"), VALUES, X, device=H200)
    assert forced.variant == "generic_dots" and "(dense_on_left)" in str(forced)
    (free,) = explain(call, VALUES, X, device=H200)
    assert free.variants == explain(product, VALUES, X, device=H200)[0].variants


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [0, 1, 32, 33, 64, 65, 130])
def test_tensor_cores_have_the_workspace_they_need(n, dtype):
    """Whatever the shape, the side of x, the batch and which of the two is batched."""
    values, x = jax.ShapeDtypeStruct(VALUES.shape, dtype), jax.ShapeDtypeStruct((64, n), dtype)
    batched = jax.ShapeDtypeStruct((3, *x.shape), dtype)
    forced = {"variant": "tensor_cores"}

    def shared(v, y):
        options = {"transpose": True, "dense_on_left": False, "variant": SPLIT}
        return multiply("spmm", CSR(v, TOPOLOGY), y, **options)

    def left(v, x):
        return jaxsparse.linear(x.T, CSR(v, TOPOLOGY), **forced)

    def inner(y, x):
        return sampled(y.T, x, **forced)

    calls = [
        explain(functools.partial(product, **forced), values, x, device=H200),
        explain(left, values, x, device=H200),
        explain(jax.vmap(functools.partial(product, **forced), (None, 0)), values, batched),
        explain(jax.vmap(inner, (None, 0)), jax.ShapeDtypeStruct((n, 96), dtype), batched),
    ]
    for (call,) in calls:
        taken = fits(call.operation, "tensor_cores", dtype=dtype, d=n)
        assert call.variant == ("tensor_cores" if taken else None), call.otherwise
    y, many = jax.ShapeDtypeStruct((96, n), dtype), jax.ShapeDtypeStruct((9, 96, n), dtype)
    for (call,) in (
        explain(shared, values, y, device=H200),
        explain(jax.vmap(shared, (None, 0)), values, many, device=H200),
    ):
        assert call.variant == SPLIT, call.otherwise


@pytest.mark.parametrize("entries", [0, 50])
def test_tensor_cores_take_batches_of_patterns(entries):
    masks = np.zeros((3, 96, 64), bool)
    masks.reshape(3, -1)[:, :entries] = True
    topology = Topology.from_mask(masks)
    values = jax.ShapeDtypeStruct((3, entries), "float32")
    dense = jax.ShapeDtypeStruct((3, 64, 32), "float32"), jax.ShapeDtypeStruct((96, 32), "float32")

    def call(values, x, y):
        a = CSR(values, topology)
        sums = sddmm(y, x, topology, variant="tensor_cores").values
        return spmm(a, x, variant="tensor_cores"), sums

    for found in explain(call, values, *dense, device=H200):
        assert found.variant == "tensor_cores", found.otherwise


def test_no_workspace_where_few_entries_are_stored():
    """There, another kernel is chosen."""
    few = Topology.from_mask(np.eye(256) > 0)
    values, x = jax.ShapeDtypeStruct((256,), "float32"), jax.ShapeDtypeStruct((256, 64), "float32")
    (call,) = explain(lambda v, x: spmm(CSR(v, few), x), values, x, device=H200)
    assert "tensor_cores" not in dict(call.variants)


def test_what_can_not_be_had_is_refused():
    for options, reason in (
        ({"variant": "none_such"}, "has no variant 'none_such'"),
        ({"variant": "generic_dots"}, "'generic_dots' does not fit"),
        ({"variant": "generic_rows", "implementation": "xla"}, "'xla' has no variant"),
        ({"implementation": "cpu"}, "asks for a CPU"),
    ):
        (call,) = explain(lambda v, x, o=options: product(v, x, **o), VALUES, X, device=H200)
        assert call.variant is None and call.variants == ()
        assert call.otherwise.startswith("refused, because ") and reason in call.otherwise
        assert call.otherwise in str(call) and "spmm: spmm:" not in call.otherwise
    (call,) = explain(lambda v, x: product(v, x, implementation="cuda"), VALUES, X, device=V100)
    assert "refused, because V100 has compute capability 7.0" in call.otherwise


def test_devices():
    """What a variant needs of a GPU counts: bulk copies are of compute capability 9.0."""
    new, old = (
        {name for name, _ in explain(product, VALUES, X, device=device)[0].variants}
        for device in (H200, A100)
    )
    assert "staged_rows" in new and "staged_rows" not in old and old
    (call,) = explain(lambda v, x: product(v, x, variant="staged_rows"), VALUES, X, device=A100)
    assert "variant 'staged_rows' does not fit" in call.otherwise
    (call,) = explain(product, VALUES, X, device=V100)
    assert call.otherwise.startswith("plain XLA, because V100 has compute capability 7.0")
    tiny = dataclasses.replace(H200, multiprocessors=1, shared_bytes=1)
    assert_cheapest_is_chosen(explain(product, VALUES, X, device=tiny)[0])
    for count in (-1, 0, 2**31, 2**40):
        odd = dataclasses.replace(H200, multiprocessors=count)
        with pytest.raises(ValueError, match=f"NVIDIA H200 has {count} multiprocessors"):
            explain(product, VALUES, X, device=odd)


def test_plain_xla():
    (call,) = explain(lambda v, x: product(v, x, implementation="xla"), VALUES, X, device=H200)
    assert call.variant is None
    assert call.otherwise == "plain XLA, because implementation='xla' asks for it"


def test_the_dense_product():
    """As the lowering chooses: without a kernel where that is faster, unless one is asked for."""
    topology = Topology.from_mask(np.random.default_rng(1).random((2048, 512)) < 0.3)
    x, y = (jax.ShapeDtypeStruct((n, 2048), jnp.float32) for n in topology.shape)

    def sampled(x, y, **options):
        return sddmm(x, y, topology, **options).values

    (call,) = explain(sampled, x, y, device=H200)
    assert call.variant is None and "plain XLA, because a dense product" in call.otherwise
    (asked,) = explain(lambda x, y: sampled(x, y, implementation="cuda"), x, y, device=H200)
    assert_cheapest_is_chosen(asked)
    lowered = jax.jit(sampled).trace(x, y).lower(lowering_platforms=("cuda",)).as_text()
    if not devices.lowered_for("cuda").lacks:
        assert "@jaxsparse_sddmm(" not in lowered


@pytest.mark.parametrize(
    "dtype, precision, reason",
    [
        ("bfloat16", None, "sums in float32 there, too"),
        ("float32", "tensorfloat32", "jax.default_matmul_precision 'tensorfloat32' allows TF32"),
        ("float32", None, None),
        ("float64", "tensorfloat32", None),
    ],
)
def test_the_dense_product_of_a_sparse_matrix(dtype, precision, reason):
    """Why it is taken, or what would allow it."""
    m, k, n, nse = 4096, 2048, 2048, 2**20
    shapes = ((nse, dtype), (m + 1, "int32"), (nse, "int32"))
    matrix = [jax.ShapeDtypeStruct((size,), dtype) for size, dtype in shapes]

    def call(values, offsets, columns, x, **options):
        return spmm(CSR(values, Topology(offsets, columns, (m, k))), x, **options)

    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision(precision):
        x = jax.ShapeDtypeStruct((k, n), dtype)
        (free,) = explain(call, *matrix, x, device=H200)
        asked = functools.partial(call, implementation="cuda")
        (asked,) = explain(asked, *matrix, x, device=H200)
        (small,) = explain(call, *matrix, jax.ShapeDtypeStruct((k, 4), dtype), device=H200)
        exact = functools.partial(call, precision=jax.lax.Precision.HIGHEST)
        (exact,) = explain(exact, *matrix, x, device=H200)
    assert ("is to be exact" in exact.remark) == (dtype == "float32")
    assert asked.variants and small.variants and not asked.remark and not small.remark
    if reason is None:
        assert free.variants == asked.variants
        assert ("is to be exact" in free.remark) == (dtype == "float32")
    else:
        assert free.variant is None and not free.remark
        for part in ("plain XLA, because a dense product", reason, "a kernel where x is not"):
            assert part in free.otherwise
    choice = f"on {H200.name}: {free.otherwise or free._choice()}"
    assert str(free).splitlines()[2:] == [f"  {line}" for line in (choice, free.remark) if line]


def test_gradients():
    explanation = explain(jax.grad(loss, (0, 1)), VALUES, X, device=H200)
    assert sorted(names(explanation)) == ["sddmm", "spmm", "spmm"]
    (transposed,) = (c for c in explanation if c.options.get("transpose"))
    assert transposed.results["out"].shape == X.shape and "(transpose)" in str(transposed)
    for call in explanation:
        assert_cheapest_is_chosen(call)
    matrix = CSR(jnp.ones(TOPOLOGY.nse), TOPOLOGY)
    of_matrix = jaxsparse.grad(lambda a, x: jnp.sum((a @ x) ** 2))
    assert "sddmm" in names(explain(of_matrix, matrix, X, device=H200))


@jax.custom_vjp
def rewritten(values, x):
    return product(values, x)


rewritten.defvjp(
    lambda values, x: (rewritten(values, x), values),
    lambda values, ct: (jnp.zeros_like(values), CSR(values, TOPOLOGY).T @ ct),
)

NESTED = {
    "jit": (jax.jit(product), 1),
    "scan": (
        lambda v, x: jax.lax.scan(lambda c, _: (c + product(v, x).sum(), None), 0.0, None, 3),
        1,
    ),
    "cond": (
        lambda v, x: jax.lax.cond(v[0] > 0, product, lambda v, x: product(2 * v, x), v, x),
        2,
    ),
    "while": (
        lambda v, x: jax.lax.while_loop(lambda c: c < 9, lambda c: c + product(v, x).sum(), 0.0),
        1,
    ),
    "remat": (jax.checkpoint(product), 1),
    "custom_vjp": (rewritten, 1),
    "gradient of custom_vjp": (jax.grad(lambda v, x: rewritten(v, x).sum(), 1), 2),
}


@pytest.mark.parametrize("name", NESTED)
def test_nested(name):
    function, count = NESTED[name]
    explanation = explain(function, VALUES, X, device=H200)
    assert names(explanation) == ["spmm"] * count


def test_vmap():
    batch = jax.ShapeDtypeStruct((5, *X.shape), jnp.float32)
    (call,) = explain(jax.vmap(product, (None, 0)), VALUES, batch, device=H200)
    assert call.operands["x"].shape == batch.shape and call.results["out"].shape == (5, 96, 32)
    assert_cheapest_is_chosen(call)
    patterns = jax.tree.map(lambda x: jnp.stack([x] * 5), TOPOLOGY)
    (call,) = explain(lambda t, v, x: spmm(CSR(v, t), x), patterns, VALUES, X, device=H200)
    assert call.shape == TOPOLOGY.shape and call.entries == TOPOLOGY.nse


@pytest.mark.parametrize(
    "shape, n", [((0, 4), 3), ((4, 0), 3), ((0, 0), 0), ((5, 7), 0), ((5, 7), 1), ((1, 1), 33)]
)
def test_odd_and_empty_shapes(shape, n):
    m, k = shape
    empty = Topology(np.zeros(m + 1, np.int32), np.zeros(0, np.int32), shape)
    full = Topology.from_mask(np.ones(shape, bool))
    for topology in (empty, full):
        values = jnp.ones(topology.nse)
        functions = (
            lambda x, t=topology, v=values: spmm(CSR(v, t), x),
            lambda x, t=topology: sddmm(jnp.ones((m, n)), x, t).values,
            lambda x, t=topology, v=values: sparse_softmax(CSR(x.sum() * v, t)).values,
        )
        for function, batch in itertools.product(functions, (None, 0, 2)):
            x = jax.ShapeDtypeStruct((k, n) if batch is None else (batch, k, n), jnp.float32)
            batched = function if batch is None else jax.vmap(function)
            (call,) = explain(batched, x, device=H200)
            assert call.shape == shape and call.entries == topology.nse
            assert call.variant and str(call)
            assert not any(math.isnan(cost) for _, cost in call.variants)


def test_an_open_size():
    (b,) = export.symbolic_shape("b")
    (call,) = explain(product, VALUES, jax.ShapeDtypeStruct((64, b), jnp.float32), device=H200)
    assert call.variant is None and "a size is open" in call.otherwise and "(64, b)" in str(call)


def test_scans_and_products_in_their_order():
    def model(w, h, xs, values):
        states = recurrent.scan(recurrent.elman(), w, h, xs)[1]
        return product(values, states[-1].T)

    shapes = ((64, 64), (2, 64), (9, 2, 64), VALUES.shape)
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    explanation = explain(model, *arguments, device=H200)
    assert names(explanation) == ["recurrent_scan", "spmm"]
    assert isinstance(explanation[0].plan, Plan) and explanation[0].device == "NVIDIA H200"
    assert str(explanation) == f"{explanation[0]}\n{explanation[1]}"


@jax.custom_jvp
def with_odd_derivative(x):
    return jnp.log1p(x * x)


with_odd_derivative.defjvps(lambda t, out, x: jax.lax.digamma(1 + x * x) * t)


def odd_cell(x, r, carry):
    """Its derivative needs digamma, which no kernel has."""
    h = with_odd_derivative(x[0] + r[0])
    return h, h


def test_a_derivative_that_no_kernel_can_run(monkeypatch):
    """What is explained is what a program has; that a kernel is missed is said once, by name."""

    def loss(w, h, xs, **options):
        return jnp.sum(recurrent.scan(odd_cell, w, h, xs, **options)[1])

    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (2, 64), (99, 2, 64))]
    gradient = jax.grad(loss)
    forward, adjoint = (
        call for call in explain(gradient, *arguments) if call.operation == "recurrent_scan"
    )
    assert isinstance(forward.plan, Plan) and not isinstance(adjoint.plan, Plan)
    assert "digamma" in str(adjoint)
    monkeypatch.setattr(devices, "present_device", lambda: H200)
    lowering._warned.clear()

    def lowered(function):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()

    missed = (
        "recurrent.scan: the transpose of the tangent of the cell odd_cell runs on NVIDIA H200 "
        r"as jax.lax.scan, because .*digamma"
    )
    with pytest.warns(UserWarning, match=missed):
        assert lowered(gradient).count("@jaxsparse_recurrent_scan") == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered(lambda *xs: jax.grad(loss)(*xs))  # said once
        for sizes in (  # the loop is faster, or takes what no kernel does
            ((64, 64), (2, 64), (1, 2, 64)),
            ((64, 64), (999, 64), (99, 999, 64)),
        ):
            shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in sizes]
            jax.jit(loss).trace(*shapes).lower(lowering_platforms=("cuda",))
        with monkeypatch.context() as patch:
            patch.setattr(devices, "present_device", lambda: A100)  # too old for all of them
            lowered(lambda *xs: loss(*xs))
    forced = functools.partial(loss, implementation="cuda")
    (_, refused) = explain(jax.grad(forced), *arguments)[:2]
    assert "refused, because" in str(refused)
    with pytest.raises(ValueError, match=r"implementation='cuda' was asked for, but .*digamma"):
        lowered(jax.grad(forced))


@pytest.mark.parametrize(
    "options",
    [
        {"implementation": "cpu"},
        {"implementation": "xla", "variant": "dense_fma"},
        {"variant": "sparse_pairs"},
    ],
)
def test_scans_that_are_refused(options):
    """By lowering as by what explains it."""
    scan = functools.partial(recurrent.scan, recurrent.LSTM, **options)
    state = jax.ShapeDtypeStruct((2, 64), jnp.float32)
    weights, xs = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 256), (9, 2, 256)))
    arguments = weights, (state, state), xs
    (call,) = explain(scan, *arguments, device=H200)
    assert str(call.plan).startswith("refused, because ")
    with pytest.raises(ValueError):
        jax.jit(scan).trace(*arguments).lower(lowering_platforms=("cuda",))


def here(function, *arguments):
    """As what a function of one operation runs where JAX runs on this machine."""
    (call,) = explain(function, *arguments, device=H200)
    assert str(call).splitlines()[1] == f"  on this machine's {call.here}"
    return call.here.partition(": ")[2]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of a machine without a GPU")
@pytest.mark.parametrize("variant", [None, *backend.TARGETS["spmm"]["variants"]["cpu"]])
def test_this_processor(variant):
    """What is said to run does run: of each kernel by its name, and of what is chosen freely."""
    a, x = CSR(jnp.ones(TOPOLOGY.nse), TOPOLOGY), jnp.ones((64, 3))
    for function in (
        lambda x: spmm(a, x, variant=variant),
        lambda x: jaxsparse.linear(x.T, a, variant=variant),
    ):
        says = here(function, x)
        if says.startswith("refused"):
            with pytest.raises(
                jax.errors.JaxRuntimeError, match=f"variant '{variant}' does not fit"
            ):
                function(x).block_until_ready()
        else:
            assert says == (
                f"{variant}, asked for by its name" if variant else FREE[function(x).shape]
            )
            function(x).block_until_ready()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of a machine without a GPU")
def test_what_this_machine_refuses_or_has_no_kernel_for():
    state, xs = jnp.ones((2, 64)), jnp.ones((9, 2, 64))
    for options, says in (
        ({"implementation": "cuda"}, "refused, because implementation='cuda' asks for a GPU"),
        ({"implementation": "xla"}, "plain XLA, because implementation='xla' asks for it"),
        ({"variant": "tiled_rows"}, "refused, because spmm: implementation 'cpu' has no variant"),
    ):
        assert here(lambda v, x, o=options: product(v, x, **o), VALUES, X).startswith(says)
    square = CSR.fromdense(jnp.eye(64))
    plain = "jax.lax.scan, because on a CPU only its sparse products have kernels, those of spmm"
    for weights, options, says in (
        (jnp.eye(64), {}, plain),
        (square, {}, plain),
        (square, {"implementation": "cpu"}, plain),
        (square, {"implementation": "xla"}, "jax.lax.scan, because implementation='xla' asks for"),
        (square, {"implementation": "cuda"}, "refused, because implementation='cuda' asks for a"),
        (square, {"variant": "sparse_pairs"}, "refused, because on a CPU only its sparse products"),
    ):
        scan = functools.partial(recurrent.scan, recurrent.elman(), weights, **options)
        assert here(lambda h, xs, scan=scan: scan(h, xs)[1], state, xs).startswith(says)


def test_a_machine_with_a_gpu_or_another_device(monkeypatch):
    """One line where the GPU that is described is the machine's."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(devices, "present_device", lambda: A100)
    (call,) = explain(product, VALUES, X)
    assert call.here == "" and call.device == "A100"
    assert str(call).splitlines()[1].startswith(f"  on this machine's A100: {call.variant}, about")
    (call,) = explain(product, VALUES, X, device=H200)
    assert call.here.startswith("A100: ") and call.device == "NVIDIA H200"
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    assert here(product, VALUES, X).startswith("plain XLA, because it can't run the kernels, see")
    forced = here(functools.partial(product, implementation="cuda"), VALUES, X)
    assert forced.startswith("refused, because it can't run the kernels, see")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert here(product, VALUES, X) == "plain XLA, because there are no kernels for it"


def test_nothing_to_explain():
    assert explain(jnp.sin, 1.0) == ()
    assert str(explain(jnp.sin, 1.0)) == "no sparse operations"


def test_arrays_are_as_good_as_their_types():
    """And nothing is computed by them: the same answer from types alone, on this machine's GPU."""
    given = explain(product, jnp.ones(VALUES.shape), jnp.ones(X.shape))
    assert given == explain(product, VALUES, X)


def test_choices_that_are_not_among_variants():
    """The extension module says why it has no answer."""
    ask = {"compute_capability": 90, "multiprocessors": 132, "shared_bytes": 232448}
    for operation in ("recurrent_scan", "none_such"):
        with pytest.raises(ValueError, match=f"{operation} has no table of variants"):
            backend._ffi.choose_cuda_variant(operation, [], [], {}, **ask)
        with pytest.raises(ValueError, match=f"{operation} has no table of variants"):
            backend._ffi.choose_cpu_variant(operation, [], [], {})
    with pytest.raises(ValueError, match="paged_attention has no variants for CPUs"):
        backend._ffi.choose_cpu_variant("paged_attention", [], [], {})
    with pytest.raises(ValueError, match="at least one multiprocessor"):
        backend._ffi.choose_cuda_variant("spmm", [], [], {}, **{**ask, "multiprocessors": 0})
    with pytest.raises(ValueError, match="spmm: attribute variant must be a string, got none"):
        backend._ffi.choose_cuda_variant("spmm", [], [], {}, **ask)
    with pytest.raises(ValueError, match=r"sddmm: result 0 \(out\) must be float32, .* got none"):
        backend._ffi.choose_cuda_variant("sddmm", [], [], {"variant": "", "workspace": 0}, **ask)


def test_sharding():
    """Inside shard_map and under explicit axes."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(None, "data")
    mapped = jax.shard_map(
        lambda x: product(jnp.ones(TOPOLOGY.nse), x), mesh=mesh, in_specs=spec, out_specs=spec
    )
    (call,) = explain(mapped, X, device=H200)
    assert_cheapest_is_chosen(call)
    explicit = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(explicit):
        x = jax.device_put(jnp.ones(X.shape), jax.NamedSharding(explicit, spec))
        (call,) = explain(product, jnp.ones(TOPOLOGY.nse), x, device=H200)
    assert_cheapest_is_chosen(call)
