"""The persistent kernels on a GPU: the numbers of the plain path, bitwise the same each time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import PLATFORM
from covering import combinations
from recurrent_problems import CELLS, carry_like, pattern

from jaxsparse import CSR, Topology, explain, recurrent

pytestmark = pytest.mark.skipif(PLATFORM != "cuda", reason="needs a GPU")

# Rounding of a step's state, which the next steps contract.
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}


class Case:
    """Operands of a scan whose weights contract, dense or CSR."""

    def __init__(self, name, sparse, T, B, h, dtype, weights=None, seed=0, density=0.3):
        self.cell, gates, form = CELLS[name]
        rng = np.random.default_rng(seed)
        values = rng.standard_normal
        scale = 0.7 / np.sqrt(h * (density if sparse else 1))
        self.topology = pattern(gates * h, h, density, seed) if sparse else None
        size = (self.topology.nse,) if sparse else (h, gates * h)
        self.weights = jnp.asarray(values(size) * scale, weights or dtype)
        carry = carry_like(form, lambda *shape: values(shape), B, h)
        self.carry = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), carry)
        self.xs = jnp.asarray(values((T, B, gates * h)), dtype)
        self.bias = jnp.asarray(values(gates * h) / 2, dtype)

    @property
    def operands(self):
        return self.weights, self.carry, self.xs, self.bias

    def scan(self, **options):
        def function(weights, carry, xs, bias):
            w = weights if self.topology is None else CSR(weights, self.topology)
            carry, ys = recurrent.scan(self.cell, w, carry, xs, recurrent_bias=bias, **options)
            # Which of an sLSTM's exponentials is 1 is no smooth choice: its h alone is.
            return (carry[-1] if self.cell is recurrent.SLSTM else carry), ys

        return function

    def compiled(self, implementation, transform=lambda f: f, variant=None, **options):
        """A transformed scan by the kernel, which has variants, or by the plain path."""
        options["variant"] = variant if implementation == "cuda" else None
        function = transform(self.scan(implementation=implementation, **options))
        lowered = jax.jit(function).lower(*self.operands)
        assert ("jaxsparse_recurrent_scan" in lowered.as_text()) == (implementation == "cuda")
        # Products of the plain path take Triton half of the time that all of it takes to compile.
        return lowered.compile({"xla_gpu_enable_triton_gemm": implementation == "cuda"})

    def agree(self, transform=lambda f: f, **options):
        by_kernel, plain = (
            jax.device_get(self.compiled(implementation, transform, **options)(*self.operands))
            for implementation in ("cuda", "xla")
        )
        self.assert_close(by_kernel, plain)

    def assert_close(self, by_kernel, plain):
        tolerance = TOLERANCE[self.xs.dtype.name]
        for a, b in zip(jax.tree.leaves(by_kernel), jax.tree.leaves(plain), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            limit = tolerance * max(1.0, np.abs(b).max(initial=0))
            np.testing.assert_allclose(a, b, rtol=0, atol=limit)


def gradient(function):
    """All cotangents, for cotangents that are not constant."""

    def transformed(*operands):
        results, pull = jax.vjp(function, *operands)
        weighted = jax.tree.map(
            lambda x: jnp.sin(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype), results
        )
        return results, pull(weighted)

    return transformed


# (variant, dtype of the state, of the weights)
FORMS = [
    ("dense_fma", "float32", None),
    ("dense_tensor_cores", "bfloat16", None),
    ("dense_tensor_cores", "float16", None),
    ("dense_fma", "bfloat16", "float32"),
    ("sparse_pairs", "float32", None),
    ("sparse_pairs", "bfloat16", None),
    ("sparse_pairs", "float16", None),
    ("sparse_pairs", "bfloat16", "float32"),
]


@combinations(
    "name, variant, dtype, weights, T, B, h",
    [(name, *form) for name in CELLS for form in FORMS],
    [(9, 4, 64), (6, 3, 37), (17, 1, 200), (5, 8, 96)],
)
def test_values_and_gradients(name, variant, dtype, weights, T, B, h):
    case = Case(name, variant == "sparse_pairs", T, B, h, dtype, weights)
    lengths = jnp.arange(B) * T // max(B - 1, 1) if h == 37 else None
    case.agree(gradient, variant=variant, reverse=h == 64, seq_lengths=lengths)


@pytest.mark.parametrize("variant, dtype, weights", [*FORMS, ("dense_resident", "bfloat16", None)])
@pytest.mark.parametrize("name", ["LSTM", "SLSTM"])
def test_episodes(name, variant, dtype, weights):
    """What a reset puts aside, NaN included, reaches nothing; leaves are kept in float32."""
    T, B, h = 11, 4, 72
    case = Case(name, variant == "sparse_pairs", T, B, h, dtype, weights)
    resets = jnp.asarray(np.random.default_rng(0).random((T, B)) < 0.3).at[0].set(True)
    options = {"resets": resets, "seq_lengths": jnp.array([11, 4, 0, 9])}
    by_kernel = case.compiled("cuda", gradient, variant, **options)
    plain = case.compiled("xla", gradient, **options)
    clean = jax.device_get(by_kernel(*case.operands))
    case.carry = jax.tree.map(lambda x: x.at[0].set(jnp.nan), case.carry)
    bad = jax.device_get(by_kernel(*case.operands))
    jax.tree.map(np.testing.assert_array_equal, bad, clean)
    case.assert_close(bad, jax.device_get(plain(*case.operands)))


@pytest.mark.parametrize(
    "variant", ["dense_tensor_cores", "dense_resident", "masked_tensor_cores", "sparse_pairs"]
)
def test_slstm_gradients_in_bfloat16(variant):
    """As the plain path's: within the rounding of results, for a large stabiliser, too."""
    T, B, h = 40, 4, 32
    case = Case("SLSTM", not variant.startswith("dense"), T, B, h, "bfloat16")
    xs = case.xs.at[..., :h].add(20)
    zeros = jnp.zeros((B, h))
    weighted = jnp.asarray(np.random.default_rng(1).standard_normal((T, B, h)))

    def gradients(dtype, leaf, **options):
        def loss(weights, xs):
            carry = (zeros.astype(leaf),) * 4
            ys = case.scan(**options)(weights, carry, xs, case.bias.astype(dtype))[1]
            return jnp.sum(ys.astype(leaf) * weighted)

        run = jax.jit(jax.grad(loss, (0, 1)))
        return run(case.weights.astype(dtype), xs.astype(dtype))

    got = gradients(jnp.bfloat16, jnp.float32, implementation="cuda", variant=variant)
    with jax.enable_x64(True):
        expected = gradients(jnp.float64, jnp.float64, implementation="xla")
    # That of the weights is a product of rounded states and cotangents, rounded once more.
    for a, b, limit in zip(got, expected, (5e-3, 3e-3), strict=True):
        difference = np.float64(a) - np.float64(b)
        assert np.linalg.norm(difference) < limit * np.linalg.norm(np.float64(b))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", list(CELLS))
def test_second_derivatives(name, sparse):
    case = Case(name, sparse, 6, 3, 40, "float32")

    def transform(function):
        def inner(*operands):
            return gradient(function)(*operands)[1]

        return lambda *operands: jax.jvp(inner, operands, jax.tree.map(jnp.sin, operands))

    case.agree(transform)


BATCHES = {
    ("dense_fma", "float32"): [1, 2, 4, 7, 8, 13, 16],
    ("dense_tensor_cores", "bfloat16"): [1, 7, 8, 13, 16],
    ("masked_fma", "float32"): [2, 7, 16],
    ("masked_tensor_cores", "bfloat16"): [1, 4, 13],
    ("sparse_pairs", "float32"): [1, 4, 7, 8],
    ("sparse_pairs", "bfloat16"): [2, 7, 13, 16],
}


@pytest.mark.parametrize(
    "variant, dtype, B", [(*form, B) for form in BATCHES for B in BATCHES[form]]
)
def test_batches_and_larger_layers(variant, dtype, B):
    case = Case("LSTM", not variant.startswith("dense"), 12, B, 512, dtype, density=0.1)
    case.agree(gradient, variant=variant)


@pytest.mark.parametrize("weights", ["dense", "masked"])
@pytest.mark.parametrize("B, dtype", [(48, "float32"), (288, "bfloat16")])
def test_parts_of_a_batch_follow_each_other(B, dtype, weights):
    """More parts than run side by side: launches take turns in one workspace."""
    variant = f"{weights}_{'fma' if dtype == 'float32' else 'tensor_cores'}"
    case = Case("LSTM", weights == "masked", 12, B, 256, dtype, density=0.1)
    explained = explain(case.scan(variant=variant), *case.operands)
    assert explained[0].launches > 1
    case.agree(gradient, variant=variant)


def test_shared_memory_that_a_kernel_gets_unasked():
    """48 KiB with its static arrays: this one's dynamic memory alone takes that."""
    case = Case("RNN", True, 3, 4, 2880, "float32", density=0.002)
    (explained,) = explain(case.scan(variant="sparse_pairs"), *case.operands)
    assert explained.plan.shared_bytes == 48 << 10
    case.agree(variant="sparse_pairs")


@pytest.mark.parametrize("variant", ["dense_fma", "masked_fma", "sparse_pairs"])
def test_one_step_and_many(variant):
    for T in (1, 2, 3, 3000):
        Case("GRU", variant != "dense_fma", T, 2, 48, "float32").agree(variant=variant)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", [None, "sparse_pairs"])
def test_repeats_bitwise(variant, dtype):
    case = Case("LSTM", variant is not None, 50, 4, 512, dtype)
    function = jax.jit(gradient(case.scan(implementation="cuda", variant=variant)))
    first = jax.device_get(function(*case.operands))
    for _ in range(20):
        again = jax.device_get(function(*case.operands))
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))
    recurrent.check()


@pytest.mark.parametrize("bits", [0xFFFFFFFF, 0x7FC00000])
@pytest.mark.parametrize("variant", ["dense_fma", "masked_fma", "sparse_pairs"])
def test_nan_stays_in_its_row(variant, bits):
    """Also one whose bits are those of an exchange buffer that was not written yet."""
    case = Case("RNN", variant != "dense_fma", 8, 4, 64, "float32")
    bad = np.asarray(case.xs).copy()
    bad.view(np.uint32)[2, 1, :] = bits
    case.xs = jnp.asarray(bad)
    by_kernel, plain = (
        np.isnan(case.scan(implementation=i, variant=v)(*case.operands)[1])
        for i, v in (("cuda", variant), ("xla", None))
    )
    if variant == "masked_fma":  # what is not stored multiplies by zero
        plain[3:, 1] = True
    np.testing.assert_array_equal(by_kernel, plain)
    assert by_kernel[2, 1].all() and by_kernel[3:, 1].any()
    assert not by_kernel[:2].any() and not by_kernel[:, [0, 2, 3]].any()


@pytest.mark.parametrize("sparse", [False, True])
def test_bidirectional_and_vmap(sparse):
    a, b = (Case("LSTM", sparse, 7, 3, 48, "float32", seed=s) for s in (0, 1))

    def two(implementation):
        matrices = [c.weights if not sparse else CSR(c.weights, a.topology) for c in (a, b)]
        if sparse:
            matrices[1] = CSR(b.weights[: a.topology.nse], a.topology)
        return recurrent.bidirectional_scan(
            a.cell, matrices, (a.carry, b.carry), (a.xs, b.xs), implementation=implementation
        )

    if not sparse or b.weights.size >= a.topology.nse:
        for x, y in zip(*(jax.tree.leaves(two(i)) for i in ("cuda", "xla")), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=2e-5)
    weights = jnp.stack([a.weights, 0.5 * a.weights])
    for implementation in ("cuda", "xla"):
        f = a.scan(implementation=implementation)
        many = jax.vmap(f, (0, None, None, None))(weights, *a.operands[1:])
        one = f(weights[1], *a.operands[1:])
        for x, y in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
            np.testing.assert_allclose(x[1], y, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name, heads, d, B", [("LSTM", 12, 64, 16), ("GRU", 13, 37, 5), ("RNN", 300, 16, 3)]
)
def test_heads(name, heads, d, B, dtype):
    case = Case(name, False, 20, B, heads * d, dtype)
    gates = case.weights.shape[1] // (heads * d)
    values = np.random.default_rng(1).standard_normal((heads, d, gates * d))
    case.weights = jnp.asarray(values * 0.7 / np.sqrt(d), dtype)
    (explained,) = explain(case.scan(implementation="cuda"), *case.operands)
    assert explained.problem.directions == heads
    assert (explained.launches > 1) == (heads > 128)
    case.agree(gradient, reverse=name == "GRU", seq_lengths=jnp.arange(B) * 20 // (B - 1))


@combinations(
    "name, T, B, h, dtype",
    CELLS,
    [(9, 4, 64), (6, 3, 37), (1, 1, 8), (5, 24, 48), (300, 16, 61)],
    ["bfloat16", "float16"],
)
def test_blocks_keep_their_weights(name, T, B, h, dtype):
    case = Case(name, False, T, B, h, dtype)
    lengths = jnp.arange(B) * T // max(B - 1, 1) if h == 37 else None
    case.agree(gradient, variant="dense_resident", reverse=h == 64, seq_lengths=lengths)


@pytest.mark.parametrize("name, B, h", [("GRU", 520, 128), ("LSTM", 384, 256), ("SLSTM", 270, 64)])
def test_large_batches(name, B, h):
    """In parts that one block or a few scan, some of them in further launches."""
    T, rng = 7, np.random.default_rng(0)
    case = Case(name, False, T, B, h, "bfloat16")
    resets = jnp.asarray(rng.random((T, B)) < 0.3)
    lengths = jnp.asarray(rng.integers(0, T + 1, B))
    case.agree(gradient, variant="dense_resident", resets=resets, seq_lengths=lengths)


# {variant: whether the weights are sparse, dtypes}
VARIANTS = {
    "dense_tensor_cores": (False, ["bfloat16", "float16"]),
    "dense_fma": (False, ["float32"]),
    "masked_tensor_cores": (True, ["bfloat16", "float16"]),
    "masked_fma": (True, ["float32"]),
    "sparse_pairs": (True, ["float32", "bfloat16", "float16"]),
}


@combinations(
    "variant, dtype, barrier, name, T, B, h",
    [(variant, dtype) for variant, (_, dtypes) in VARIANTS.items() for dtype in dtypes],
    ["", "_barrier"],
    [("LSTM", 9, 4, 72), ("GRU", 5, 3, 37)],
)
def test_variants(variant, dtype, barrier, name, T, B, h):
    case = Case(name, VARIANTS[variant][0], T, B, h, dtype)
    case.agree(gradient, variant=variant + barrier, reverse=name == "GRU")


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_delays_change_nothing(variant, monkeypatch):
    """Blocks that come late, at any place, in any order: bitwise the same."""
    sparse, (dtype, *_) = VARIANTS[variant]
    case = Case("LSTM", sparse, 40, 4, 256, dtype, density=0.1)
    results = []
    for delay in (0, 3_000, 100_000):
        monkeypatch.setenv("JAXSPARSE_SCAN_DELAY", str(delay))
        function = jax.jit(gradient(case.scan(variant=variant)))
        assert f"kMostDelay = {delay}" in function.lower(*case.operands).as_text()
        results.append(jax.tree.leaves(jax.device_get(function(*case.operands))))
    for delayed in results[1:]:
        for a, b in zip(results[0], delayed, strict=True):
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize("barrier", ["", "_barrier"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_times_out_on_blocks_that_do_not_come(variant, barrier, monkeypatch):
    sparse, (dtype, *_) = VARIANTS[variant]
    case = Case("RNN", sparse, 5, 4, 256, dtype, density=0.1)
    recurrent.check()
    monkeypatch.setenv("JAXSPARSE_SCAN_DELAY", str(10**8))  # 50 ms
    monkeypatch.setenv("JAXSPARSE_SCAN_WAIT_LIMIT", "0.001")
    late = jax.jit(case.scan(variant=variant + barrier))
    _, ys = late(*case.operands)
    if not barrier:  # there it is the meeting that is missed, and the data may still be in time
        assert np.isnan(np.asarray(ys[-1], np.float32)).any()
    with pytest.raises(RuntimeError, match=r"recurrent\.check: a scan on GPU 0 timed out"):
        recurrent.check()
    jax.block_until_ready(late(*case.operands))
    monkeypatch.setenv("JAXSPARSE_SCAN_DELAY", "0")
    in_time = jax.jit(case.scan(variant=variant + barrier))
    with pytest.raises(Exception, match="an earlier scan on GPU 0 timed out"):
        jax.block_until_ready(in_time(*case.operands))
    case.agree(variant=variant + barrier)
    recurrent.check()


@pytest.mark.parametrize("variant", ["dense_tensor_cores", "masked_tensor_cores", "sparse_pairs"])
@pytest.mark.parametrize("B", [2, 16])
def test_scans_side_by_side(B, variant):
    """Two directions, and parts of a batch, in one launch each."""
    sparse = variant != "dense_tensor_cores"
    a, b = (Case("LSTM", sparse, 11, B, 96, "bfloat16", seed=s) for s in (0, 1))
    matrix = (lambda c: CSR(c.weights, c.topology)) if sparse else (lambda c: c.weights)

    def two(variant, implementation):
        def function(cases):
            return recurrent.bidirectional_scan(
                a.cell,
                [matrix(c) for c in (a, b)],
                (a.carry, b.carry),
                (a.xs, b.xs),
                variant=variant,
                implementation=implementation,
            )

        return function

    assert [s.launches for s in explain(two(variant, "cuda"), ())] == [1]
    results = (jax.tree.leaves(two(*p)(())) for p in ((variant, "cuda"), (None, "xla")))
    for x, y in zip(*results, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=0, atol=3e-2)


FUNCTIONS = {
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "gelu": jax.nn.gelu,
    "softplus": jax.nn.softplus,
    "silu": jax.nn.silu,
    "erf": jax.lax.erf,
    "exp": lambda x: jnp.exp(-jnp.abs(x)),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "rsqrt": lambda x: jax.lax.rsqrt(1 + x * x),
    "sin": jnp.sin,
    "max": lambda x: jnp.maximum(x, 0.5) - jnp.minimum(x, 0.25),
    "power": lambda x: jnp.abs(x) ** 1.7,
    "sign": lambda x: jnp.sign(x) * jnp.floor(x),
    "narrow": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
}


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_printed_functions(name):
    """A cell of one function, without recurrence: what the GPU's own instructions make of it."""
    rng = np.random.default_rng(0)
    xs = (rng.standard_normal((8, 4, 64)) * 10.0 ** rng.integers(-3, 2, (8, 4, 64))).astype("f4")
    weights, carry = jnp.zeros((64, 64)), jnp.zeros((4, 64))
    cell = recurrent.elman(FUNCTIONS[name])
    _, ys = recurrent.scan(cell, weights, carry, jnp.asarray(xs), implementation="cuda")
    with jax.enable_x64(True):
        expected = np.asarray(FUNCTIONS[name](jnp.asarray(xs, jnp.float64)))
    if name == "narrow":
        expected = np.asarray(FUNCTIONS[name](jnp.asarray(xs)))
    # gelu's tail is a difference of nearly equal numbers, in any implementation.
    smallest = 2e-7 if name == "gelu" else 1e-37
    np.testing.assert_allclose(np.asarray(ys), expected, rtol=2e-6, atol=smallest)


def test_a_matrix_that_is_an_argument():
    case = Case("GRU", True, 6, 4, 64, "float32")
    matrix = CSR(case.weights, case.topology)
    packed = recurrent.pack(matrix, batch=4, dtype=jnp.float32)

    def by(variant):
        def scan(matrix):
            return recurrent.scan(case.cell, matrix, case.carry, case.xs, variant=variant)[1]

        return jax.jit(scan)

    expected = case.scan(implementation="xla")(*case.operands[:3], jnp.zeros_like(case.bias))[1]
    for variant, argument in (("sparse_pairs", packed), ("masked_fma", packed), (None, matrix)):
        np.testing.assert_allclose(by(variant)(argument), expected, rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match=r"recurrent\.pack"):
        by("sparse_pairs")(matrix)


def test_a_traced_pattern_with_repeated_columns():
    """As they stand: what stands twice in a row adds up, as in a product."""
    h = 64
    rng = np.random.default_rng(0)
    columns = jnp.asarray(rng.integers(0, h, (h, 5)).ravel(), jnp.int32)
    offsets = jnp.arange(0, 5 * h + 1, 5, dtype=jnp.int32)
    values = jnp.asarray(rng.standard_normal(5 * h) / 3, jnp.float32)
    xs = jnp.asarray(rng.standard_normal((6, 2, h)), jnp.float32)

    def by(implementation):
        def scan(offsets, columns, values):
            matrix = CSR(values, Topology(offsets, columns, (h, h)))
            carry = jnp.zeros((2, h))
            return recurrent.scan(
                recurrent.elman(), matrix, carry, xs, implementation=implementation
            )[1]

        return jax.jit(scan)(offsets, columns, values)

    np.testing.assert_allclose(by("cuda"), by("xla"), rtol=0, atol=2e-5)
