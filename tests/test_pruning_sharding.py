"""Pruning over several devices: states sharded like parameters, runs on fewer devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

optax = pytest.importorskip("optax")
ocp = pytest.importorskip("orbax.checkpoint")

from pruning_problems import (  # noqa: E402
    CUBIC,
    assert_same_bits,
    gradients_at,
    run,
)

from jaxsparse.pruning import (  # noqa: E402
    bits_like,
    bits_to_masks,
    masks_to_bits,
    prune,
)

DEVICES = jax.devices("cpu")


@pytest.mark.skipif(len(DEVICES) < 8, reason="needs 8 CPU devices (tests/conftest.py)")
@pytest.mark.parametrize(
    "kind, structure, scope",
    [
        (AxisType.Auto, "unstructured", "layer"),
        (AxisType.Auto, "row_balanced", "model"),
        (AxisType.Explicit, "unstructured", "model"),
        (AxisType.Explicit, "row_balanced", "layer"),
    ],
)
def test_state_is_sharded_like_the_parameters(kind, structure, scope):
    mesh = jax.make_mesh((4, 2), ("data", "model"), (kind, kind), devices=DEVICES[:8])
    rng = np.random.default_rng(0)
    params = {
        "a": jnp.asarray(rng.standard_normal((16, 8)), jnp.float32),
        "b": jnp.asarray(rng.standard_normal((8, 12)), jnp.float32),
    }
    shardings = {"a": NamedSharding(mesh, P("data", "model")), "b": NamedSharding(mesh, P("model"))}
    tx = prune(optax.sgd(0.125), CUBIC, structure=structure, scope=scope)
    expected = run(tx, params, 6)[-1]

    @jax.jit
    def update(gradients, state, params):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    def placed(gradients, state, params):
        return update(jax.device_put(gradients, shardings), state, params)

    with jax.set_mesh(mesh):
        history = run(tx, jax.device_put(params, shardings), 6, placed)
        for sharded, state in history:
            for tree in sharded, state.masks, state.pruned_weights:
                for name, x in tree.items():
                    assert x.sharding.is_equivalent_to(shardings[name], x.ndim), (name, x.sharding)
        first = jax.tree.leaves(tx.init(jax.device_put(params, shardings)).masks)
        assert [x.sharding.spec for x in first] == [P("data", "model"), P("model")]
        packed = jax.jit(masks_to_bits)(state.masks)
        restored = bits_to_masks(packed, state.masks)
        assert restored["a"].sharding.is_equivalent_to(shardings["a"], 2)
    assert update._cache_size() <= 2  # the first state's scalar is not committed
    assert_same_bits(sharded, expected[0])
    jax.tree.map(np.testing.assert_array_equal, state.masks, expected[1].masks)
    jax.tree.map(np.testing.assert_array_equal, restored, expected[1].masks)


@pytest.mark.skipif(len(DEVICES) < 8, reason="needs 8 CPU devices (tests/conftest.py)")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_runs_resume_on_fewer_devices(tmp_path, kind):
    """Saved on 8 devices, restored on 8, 4 and 1."""
    tx = prune(optax.adam(1e-2), CUBIC)
    # 4 bytes of a packed "a" divide among 4 devices, 2 of "b" do not.
    specs = {"a": P(None, "model"), "b": P("data", "model")}

    def run_on(devices):
        data = 2 if devices == 8 else 1
        mesh = jax.make_mesh(
            (data, devices // data), ("data", "model"), (kind, kind), devices=DEVICES[:devices]
        )
        shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        rng = np.random.default_rng(devices)
        params = {
            "a": jnp.asarray(rng.standard_normal((6, 28)), jnp.float32),
            "b": jnp.asarray(rng.standard_normal((8, 12)), jnp.float32),
        }
        params = jax.device_put(params, shardings)
        return mesh, shardings, params, tx.init(params)

    @jax.jit
    def update(gradients, state, params):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    mesh, shardings, params, state = run_on(8)
    with jax.set_mesh(mesh):
        for step in range(5):
            gradients = jax.device_put(gradients_at(step, params), shardings)
            params, state = update(gradients, state, params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", masks_to_bits((params, state)))
    saved = jax.tree.map(np.asarray, (params, state))
    assert not saved[1].masks["a"].all()

    for devices in 8, 4, 1:
        mesh, shardings, *fresh = run_on(devices)
        fresh = tuple(fresh)
        like = bits_like(fresh)
        with ocp.StandardCheckpointer() as checkpointer:
            packed = checkpointer.restore(tmp_path / "run", like)
        assert packed[1].masks["b"].shape == (8, 2)
        restored = bits_to_masks(packed, fresh)
        assert jax.tree.structure(restored) == jax.tree.structure(fresh)
        jax.tree.map(np.testing.assert_array_equal, restored, saved)
        params, state = restored
        for tree in params, state.masks, state.pruned_weights, state.inner_state[0].mu:
            for name, x in tree.items():
                assert x.sharding.is_equivalent_to(shardings[name], x.ndim), (name, x.sharding)
        assert state.step.sharding.is_fully_replicated
        with jax.set_mesh(mesh):
            gradients = jax.device_put(gradients_at(5, params), shardings)
            params, state = update(gradients, state, params)
        assert int(state.step) == 6


@pytest.mark.skipif(len(DEVICES) < 8, reason="needs 8 CPU devices (tests/conftest.py)")
def test_unpacking_places_every_leaf():
    mesh = jax.make_mesh((4,), ("model",), (AxisType.Auto,), devices=DEVICES[:4])
    split, whole = NamedSharding(mesh, P(None, "model")), NamedSharding(mesh, P())
    state = {
        "mask": jax.device_put(jnp.ones((3, 32), bool), split),
        "odd": jax.device_put(jnp.ones((3, 12), bool), split),
        "weight": jax.device_put(jnp.ones((3, 4)), split),
        "step": jnp.zeros([], jnp.int32),  # not committed: it belongs to no device
    }
    like = bits_like(state)
    assert like["mask"].sharding == like["weight"].sharding == split
    assert like["odd"].sharding.is_equivalent_to(whole, 2) and like["step"].sharding == whole
    packed = jax.tree.map(np.asarray, masks_to_bits(state))
    abstract = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=None if name == "step" else split)
        for name, x in state.items()
    }
    for target in state, abstract:
        restored = bits_to_masks(packed, target)
        for name in "mask", "odd", "weight":
            assert restored[name].sharding.is_equivalent_to(split, 2)
        jax.tree.map(np.testing.assert_array_equal, restored, state)
