"""Every operation and layer under the settings of JAX that refuse or change what programs do."""

from __future__ import annotations

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


# Under these a program is refused where it is traced or lowered, if it is.
TRACED = {
    "numpy_rank_promotion": functools.partial(jax.numpy_rank_promotion, "raise"),
    "numpy_dtype_promotion": functools.partial(jax.numpy_dtype_promotion, "strict"),
    "checking_leaks": jax.checking_leaks,
}
RUN = {
    "debug_nans": functools.partial(jax.debug_nans, True),
    "enable_x64": functools.partial(jax.enable_x64, True),
    "disable_jit": jax.disable_jit,
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_traced_and_lowered(name):
    p = PROGRAMS[name](jnp.bfloat16)
    for setting in TRACED.values():
        forget()
        with setting():
            jax.jit(lambda *operands: p.value_and_gradient(*operands)).lower(
                p.parameters, *p.batched
            )


@pytest.mark.smoke
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run(name):
    p = PROGRAMS[name](jnp.float32)
    expected = jax.jit(p.value_and_gradient)(p.parameters, *p.batched)
    for setting in RUN.values():
        forget()
        with setting():
            got = jax.jit(lambda *operands: p.value_and_gradient(*operands))(
                p.parameters, *p.batched
            )
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
