"""Every operation and layer under the settings of JAX that refuse or change what programs do."""

from __future__ import annotations

import contextlib
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax.nnx")

from programs import PROGRAMS


@functools.cache
def caches():
    return [
        x
        for x in gc.get_objects()
        if isinstance(x, functools._lru_cache_wrapper) and str(x.__module__).startswith("jaxsparse")
    ]


def forget():
    """Clears what the library keeps of earlier traces: a setting must not find it done before."""
    for cache in caches():
        cache.cache_clear()


@contextlib.contextmanager
def little_to_collect():
    """Passes over what earlier tests made, which each check for leaks would collect anew."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def together(*settings):
    """Settings none of which hides what another one refuses: one trace or run does for all."""
    forget()
    with contextlib.ExitStack() as stack:
        for setting in settings:
            stack.enter_context(setting)
        yield


# Under these a program is refused where it is traced or lowered, if it is.
def strict():
    return together(
        little_to_collect(),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.checking_leaks(),
    )


RUN = {
    "debug_nans and enable_x64": lambda: together(jax.debug_nans(True), jax.enable_x64(True)),
    "disable_jit": lambda: together(jax.disable_jit()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_traced_and_lowered(name):
    p = PROGRAMS[name](jnp.bfloat16)
    with strict():
        jax.jit(p.value_and_gradient).lower(p.parameters, *p.batched)


@pytest.mark.smoke
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run(name):
    """With results of the types that they have without settings, and the same under each."""
    p = PROGRAMS[name](jnp.float32)
    types = jax.eval_shape(p.value_and_gradient, p.parameters, *p.batched)
    results = []
    for setting in RUN.values():
        with setting():
            results.append(
                jax.jit(lambda *operands: p.value_and_gradient(*operands))(p.parameters, *p.batched)
            )
        assert jax.tree.structure(results[-1]) == jax.tree.structure(types)
    for a, b, t in zip(*map(jax.tree.leaves, (*results, types)), strict=True):
        assert a.dtype == b.dtype == t.dtype
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
