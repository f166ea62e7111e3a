"""Plans of recurrent scans, without a GPU: what fits, and why not."""

from __future__ import annotations

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrent_forms import dense, explain, loss_of, operands, variant_of

from jaxsparse import CSR, H200, Device, Topology, _ffi, backend, recurrent
from jaxsparse.recurrent.layout import lay_out
from jaxsparse.recurrent.plan import VARIANTS, NoPlan, Plan, WaveForm, make_plan, make_wave_plan

# Layers that a GPU with 132 multiprocessors has room for; the layer sizes are those of the papers.
FITTING = {
    "rnn 1152": dense(1, hidden=1152),
    "rnn 1152 float32": dense(1, hidden=1152, dtype="float32"),
    "rnn 1792 float32": dense(1, hidden=1792, dtype="float32"),
    "lstm 1024": dense(4),
    "lstm 1024 float32": dense(4, dtype="float32"),
    "lstm 1024, batch 16": dense(4, batch=16),
    "lstm 1024, batch 32": dense(4, batch=32),
    "lstm 1792": dense(4, hidden=1792),
    "gru 1024": dense(3),
    "adjoint of lstm 1024": dense(1, 4, inputs=14),
    "mixed": dense(4, hidden=331, batch=5, weights="float32"),
    "one unit": dense(1, hidden=1, batch=1),
}


def check_fits(plan, device):
    """All blocks of a launch run at once."""
    blocks = plan.layers * plan.scans * plan.blocks
    assert 0 < blocks <= plan.resident * device.multiprocessors
    assert plan.resident * plan.threads <= 2048 and plan.threads <= 1024
    assert plan.resident * (plan.shared_bytes + 1024) <= device.shared_bytes + 1024


@pytest.mark.parametrize("name", list(FITTING))
def test_what_fits(name):
    problem = FITTING[name]
    plan = make_plan(problem, H200)
    assert isinstance(plan, Plan), plan
    resident = plan.variant == "dense_resident"
    units = problem.hidden if resident else int(re.search(r"\.units = (\d+)", plan.constants)[1])
    check_fits(plan, H200)
    assert plan.blocks * units >= problem.hidden
    item = 4 if problem.state_dtype == "float32" else 2
    slots = problem.length * problem.batch * problem.states * problem.hidden
    assert resident or plan.groups * plan.exchange_bytes >= slots * item
    # All weights are somewhere: registers hold 64 K words, and some are needed for the rest.
    on_chip = plan.blocks * (65536 * 4 // plan.resident + plan.shared_bytes)
    weights = problem.products * problem.states * problem.hidden**2
    assert on_chip > weights * (4 if problem.weight_dtype == "float32" else 2)
    assert (0.1 if resident else 0.5) < plan.microseconds < 6
    assert re.search(r"blocks? of \d+ threads, \d+ % of the weights in registers", str(plan))


def test_plans_of_any_size_fit():
    """On any GPU, or there is a reason: of scans, and of layers that are waves."""
    rng = np.random.default_rng(0)

    def some(*sizes):
        return int(rng.choice(sizes))

    made = 0
    for trial in range(400):
        huge = trial % 5 == 0
        device = Device("any", 90, some(1, 16, 78, 132), some(49152, 101376, 232448))
        products, states = some(1, 3, 4, 24), some(1, 1, 2, 4, 24)
        form = dense(
            products,
            states,
            hidden=some(4096, 2**24, 2**62) if huge else int(rng.integers(1, 600)),
            batch=some(512, 2**62) if huge else int(rng.integers(1, 70)),
            inputs=some(0, 10),
            outputs=some(0, 5),
            length=some(1, 2**40) if huge else 256,
            dtype=("float32", "bfloat16")[some(0, 1)],
            directions=some(1, 1, 2, 12, 128, 4096),
            sparse=some(0, 1) == 1,
        )
        layers = {
            "layers": some(1, 2, 4, 16),
            "own_products": tuple(range(some(1, products))),
            "own_states": tuple(range(some(1, states))),
            "below_products": (products - 1,),
            "below_states": (states - 1,),
        }
        fields = {f.name: getattr(form, f.name) for f in dataclasses.fields(form)}
        wave = WaveForm(**fields | layers | {"directions": 1, "sparse": False})
        plans = [make_plan(form, device, forced=True), make_plan(form, device, "dense_resident")]
        plans += [make_wave_plan(wave, device, name) for name in _ffi.WAVE_VARIANTS]
        for plan in plans:
            if isinstance(plan, Plan):
                check_fits(plan, device)
                assert form.batch % plan.groups == 0 and plan.microseconds > 0
                made += 1
            else:
                assert plan.reason
    assert made > 200


def test_larger_problems_take_longer():
    times = [make_plan(dense(4, batch=b), H200).microseconds for b in (1, 4, 8, 16, 32)]
    assert times == sorted(times)
    sizes = [make_plan(dense(1, hidden=h), H200).microseconds for h in (256, 1024, 2048, 3072)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    "problem, reason",
    [
        (dense(4, hidden=4096), "don't fit the registers and shared memory of 132"),
        (dense(batch=33), "a batch of 33 is more than 32, and not 2 to 16 equal parts of at most"),
        (dense(batch=132), "a batch of 132 is more than 32"),
        (dense(dtype="float32", batch=17), "a batch of 17 is more than 16"),
        (dense(4, hidden=1792, batch=48), "it takes about 3592 us for all steps, and"),
        (dense(dtype="float64"), "the dtype of the state is float64"),
        (dense(weights="float64"), "the dtype of the weights is float64"),
        (dense(length=2), "it takes about 8 us for all steps, and 17 would be taken by dense"),
        (dense(arrays=99), "99 arrays of one kind are more than"),
        (dense(25, hidden=64), "25 products of a step are more than 24"),
        (dense(1, 25, hidden=64), "25 states of a step are more than 24"),
        (dense(directions=4097, hidden=8), "4097 matrices are more than 4096"),
        (dense(4, hidden=2**40), f"{2**40} units are more than {2**22}"),
        (dense(batch=0), "there is nothing to scan"),
        (dense(length=0), "there is nothing to scan"),
        (dense(sparse=True, hidden=8192), "recurrent.pack"),
        (dense(sparse=True, hidden=8192), "masked_tensor_cores: 1 x 1 x 8192 x 8192 weights"),
        (dense(input_dtypes=("float16",)), "inputs of ['float16'] beside a state of bfloat16"),
    ],
)
def test_why_not(problem, reason):
    plan = make_plan(problem, H200)
    assert isinstance(plan, NoPlan) and reason in plan.reason
    assert str(plan).startswith("jax.lax.scan, because ")


def test_sparse_matrices_in_dense_form():
    """Where the pattern is traced; and where tensor cores are faster than the entries alone."""
    traced = make_plan(dense(sparse=True), H200)
    assert traced.variant == "masked_tensor_cores" and traced.dense_bytes == 2 * 1024**2
    assert make_plan(dense(sparse=True, dtype="float32"), H200).variant == "masked_fma"
    assert make_plan(dense(), H200).dense_bytes == 0

    def chosen(h, density, dtype, weights):
        mask = np.random.default_rng(0).random((h, h)) < density
        layout = lay_out(Topology.from_mask(mask), 1, 4, jnp.dtype(dtype), H200)
        problem = dense(1, hidden=h, sparse=True, dtype=dtype, weights=weights)
        return make_plan(dataclasses.replace(problem, layout_form=layout.forms[0]), H200).variant

    assert chosen(2304, 0.3, "bfloat16", None) == "masked_tensor_cores"
    assert chosen(1792, 0.1, "bfloat16", "float32") == "sparse_pairs"
    assert chosen(1792, 0.1, "float32", None) == "sparse_pairs"


def test_several_scans_share_the_gpu():
    one, two = (make_plan(dense(4, directions=d), H200) for d in (1, 2))
    assert two.scans == 2 and one.microseconds < two.microseconds < 2 * one.microseconds
    parts = make_plan(dense(4, batch=16), H200)
    assert (parts.groups, parts.scans) == (2, 2)
    assert make_plan(dense(4, batch=15), H200).groups == 1
    # No room for both directions at once.
    large = make_plan(dense(4, hidden=1792, directions=2), H200)
    assert large.scans == 1
    assert large.microseconds == 2 * make_plan(dense(4, hidden=1792), H200).microseconds


def config_of(plan):
    """What a kernel with dense weights is compiled for."""
    return {k: int(v) for k, v in re.findall(r"\.(\w+) = (\d+)", plan.constants)}


@pytest.mark.parametrize("batch", [16, 32, 64, 128])
@pytest.mark.parametrize("cell, gates, arrays", [("RNN", 1, 3), ("GRU", 3, 11), ("LSTM", 4, 10)])
def test_adjoints_of_large_batches_are_persistent(cell, gates, arrays, batch):
    """And a narrower layer hardly takes longer: its threads have room for their items."""
    times = []
    for hidden in (256, 362, 512, 1024):
        adjoint = dense(1, gates, hidden=hidden, batch=batch, inputs=arrays, length=256)
        plan = make_plan(adjoint, H200, "dense_tensor_cores")
        assert isinstance(plan, Plan), (hidden, plan)
        assert plan.scans * plan.blocks <= H200.multiprocessors
        config = config_of(plan)
        items = config["units"] * config["batch"] / (32 * config["pointwise_warps"])
        warps = config["warps"] + config["pointwise_warps"]
        registers = config["pointwise_registers"] or 65536 // (32 * warps)
        assert registers >= 24 + items * (arrays if items > 1 else 2 * arrays), config
        times.append(plan.microseconds)
    assert all(a < 1.1 * b for a, b in itertools.pairwise(times))


def test_parts_of_a_large_batch_follow_each_other():
    large, half = (make_plan(dense(4, hidden=1792, batch=b), H200) for b in (32, 16))
    assert (large.groups, large.scans) == (2, 1)
    assert large.microseconds == 2 * half.microseconds
    both = make_plan(dense(3, batch=32, dtype="float32"), H200)
    assert (both.groups, both.scans) == (4, 2)


def test_the_plain_path_where_it_is_faster():
    """Unless a kernel was asked for; and not because of what starting a kernel takes."""
    slow = dense(4, hidden=1792, batch=48)
    assert isinstance(make_plan(slow, H200), NoPlan)
    assert make_plan(slow, H200, forced=True).groups == 4
    assert make_plan(slow, H200, "dense_tensor_cores").groups == 4
    assert isinstance(make_plan(dense(length=3), H200), NoPlan)
    assert isinstance(make_plan(dense(length=16), H200), Plan)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_barriers_are_only_chosen_on_demand(name):
    variant = VARIANTS[name]
    problem = dense(
        sparse=variant.weights != "dense",
        dtype=("float32", "bfloat16")[variant.tensor_cores],
        hidden=48 if name == "dense_resident" else 1024,
    )
    if variant.weights == "pairs":
        layout = lay_out(Topology.from_mask(np.eye(1024, dtype=bool)), 1, 4, jnp.dtype("f4"), H200)
        problem = dataclasses.replace(problem, layout_form=layout.forms[0])
    assert not VARIANTS[make_plan(problem, H200).variant].barrier
    assert make_plan(problem, H200, name).variant == name
    barrier = f"kBarrier = {str(variant.barrier).lower()};"
    assert barrier in make_plan(problem, H200, name).constants
    assert name in backend.TARGETS["recurrent_scan"]["variants"]["cuda"]


def test_devices():
    small = Device("small", 90, 16, 100_000)
    old = dataclasses.replace(H200, name="old", compute_capability=80)
    assert "old has compute capability 8.0" in make_plan(dense(), old).reason
    assert isinstance(make_plan(dense(4), small), NoPlan)
    assert isinstance(make_plan(dense(1, hidden=8), Device("one", 90, 1, 100_000)), Plan)
    plan = make_plan(dense(4, hidden=256), small)
    assert plan.blocks <= 16 and plan.shared_bytes <= 100_000


def test_variants():
    assert "is more than 32" not in make_plan(dense(), H200, "dense_fma").reason
    assert "run on tensor cores" in make_plan(dense(), H200, "dense_fma").reason
    float32 = dense(dtype="float32")
    assert make_plan(float32, H200, "dense_fma").variant == "dense_fma"
    assert "needs 16-bit" in make_plan(float32, H200, "dense_tensor_cores").reason
    assert "the weights are dense" in make_plan(float32, H200, "sparse_pairs").reason
    assert isinstance(make_plan(dense(length=1), H200, forced=True), Plan)


@pytest.mark.parametrize("weights", ["dense", "masked", "pairs"])
def test_explain(weights):
    sparse, variant = weights != "dense", variant_of(weights, "bfloat16")
    cell, topology, shapes = operands("LSTM", sparse)
    loss = loss_of(cell, topology, variant=variant)
    (forward,) = explain(loss, *shapes)
    assert (forward.problem.products, forward.problem.states) == (4, 1)
    again, adjoint = explain(jax.jit(jax.grad(loss, (0, 1, 2, 3))), *shapes)
    assert (adjoint.problem.products, adjoint.problem.states) == (1, 4)
    assert again.problem.outputs == 5  # the products and c, for the adjoint
    # The cotangents of pre-activations and products are the adjoint's states.
    assert adjoint.problem.outputs == 0
    assert adjoint.plan.variant == forward.plan.variant == variant
    assert str(explain(loss, *shapes, device=H200)[0]).count("\n") == 2
    assert explain(loss, *shapes, device=Device("tiny", 90, 1, 1))[0].launches == 1


def test_explain_a_pattern_that_is_an_argument():
    def scan(matrix, h, xs):
        return recurrent.scan(recurrent.elman(), matrix, h, xs)[1]

    matrix = CSR.fromdense(jnp.eye(64))
    dynamic = CSR(matrix.values, matrix.topology.as_dynamic())
    arguments = (jnp.zeros((2, 64)), jnp.zeros((9, 2, 64)))
    (found,) = explain(scan, dynamic, *arguments)
    assert found.plan.variant == "masked_fma" and found.problem.layout_form is None
    assert explain(scan, matrix, *arguments)[0].problem.layout_form is not None
    packed = recurrent.pack(matrix, batch=2, dtype=jnp.float32)
    assert "scan_layout" in packed.topology.layouts
    assert explain(scan, packed, *arguments)[0].problem.layout_form is not None
    # For another batch it is laid out in another way.
    arguments = (jnp.zeros((5, 64)), jnp.zeros((9, 5, 64)))
    assert isinstance(explain(scan, packed, *arguments)[0].plan, NoPlan | Plan)


# Small layers and large batches, whose blocks keep all weights of their units.
RESIDENT = [(3, 128, 1024), (3, 256, 1024), (3, 256, 300), (4, 64, 2), (4, 192, 512), (1, 40, 33)]


@pytest.mark.parametrize("device", [H200, Device("a smaller one", 90, 78, 101376)])
@pytest.mark.parametrize("gates, hidden, batch", RESIDENT)
@pytest.mark.parametrize("adjoint", [False, True])
def test_blocks_that_keep_their_weights(gates, hidden, batch, adjoint, device):
    """They fit, and take every row once."""
    products, states = (1, gates) if adjoint else (gates, 1)
    form = dense(
        products, states, hidden=hidden, batch=batch, inputs=3 * gates if adjoint else gates
    )
    plan = make_plan(form, device, "dense_resident")
    if isinstance(plan, NoPlan):
        assert hidden > 128 and device is not H200, plan
        return
    config = config_of(plan)
    assert config["batch"] * plan.groups == batch
    assert plan.groups <= plan.scans * plan.launches < plan.groups + plan.scans
    check_fits(plan, device)
    units = plan.threads // 32 * 8 * config["unit_groups"]
    assert units * (plan.blocks - 1) < hidden <= units * plan.blocks
    # A word of 2 bytes for each weight is in registers or in shared memory.
    columns, kept = units * plan.blocks * states, config["register_chunks"] * 32
    rows = 16 * -(-config["unit_groups"] * products // 2) * plan.threads // 32
    assert plan.shared_bytes >= 2 * rows * (columns - kept)
    assert plan.threads * plan.resident * (rows * kept // plan.threads // 2 + 40) <= 65536
    assert (plan.exchange_bytes > 0) == (plan.blocks > 1)


def test_wait_limit(monkeypatch):
    from jaxsparse.recurrent.engine import wait_limit

    assert wait_limit() == 10
    monkeypatch.setenv("JAXSPARSE_SCAN_WAIT_LIMIT", "2.5")
    assert wait_limit() == 2.5
    for text in ("0", "-1", "soon"):
        monkeypatch.setenv("JAXSPARSE_SCAN_WAIT_LIMIT", text)
        with pytest.raises(ValueError, match="JAXSPARSE_SCAN_WAIT_LIMIT must be a number"):
            wait_limit()


def test_delay(monkeypatch):
    from jaxsparse.recurrent.engine import most_delay

    assert most_delay() == 0
    monkeypatch.setenv("JAXSPARSE_SCAN_DELAY", "2000")
    assert most_delay() == 2000
    for text in ("-1", "long", str(2**30)):
        monkeypatch.setenv("JAXSPARSE_SCAN_DELAY", text)
        with pytest.raises(ValueError, match="JAXSPARSE_SCAN_DELAY must be a number of clock"):
            most_delay()


def test_check_without_scans():
    recurrent.check()
