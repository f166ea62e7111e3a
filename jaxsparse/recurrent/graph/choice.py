"""What a graph is computed as on a GPU: waves, wavefronts, or node by node."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jax.core import ShapedArray

from jaxsparse.device import AnyDevice, Device
from jaxsparse.primitive import Fallback, UnavailableError
from jaxsparse.recurrent.graph.operands import recurrent_nodes, split
from jaxsparse.recurrent.graph.plain import PLAIN
from jaxsparse.recurrent.graph.runs import in_runs
from jaxsparse.recurrent.graph.wavefront import run_wavefront
from jaxsparse.recurrent.graph.wavefront_form import WavefrontForm, wavefront_forms
from jaxsparse.recurrent.graph.waves import BY_NAME, WAVE_VARIANTS, choose_waves, plan_alone
from jaxsparse.recurrent.plan import NoPlan

WAVEFRONT = "wavefront"
STACK_VARIANTS = (*WAVE_VARIANTS, WAVEFRONT)  # of several layers at once

# Weights of all layers that an L2 cache still serves at each step of a wavefront, which reads them
# all. Beyond that memory does, where layers one by one still find theirs in the cache. Measured on
# an H200 (docs/persistent_scans.md).
_CACHED_BYTES = 64 * 2**20


def choose(params: dict[str, Any], avals: Sequence[ShapedArray], device: AnyDevice) -> Fallback:
    """What is computed on a GPU that kernels of scans run on.

    Raises:
        UnavailableError: if what was asked for by its name is not to be had.
    """
    variant = params["variant"]
    if variant in (None, *STACK_VARIANTS) and len(recurrent_nodes(params["edges"])) < 2:
        # A derivative may reach one layer of many, for which several at once were asked.
        return Fallback("it has fewer than two layers", functools.partial(in_runs, {}), PLAIN)
    if variant == WAVEFRONT:
        found, reason = wavefront_forms(params, split(avals, params))
        if not found:
            message = f"recurrent.stack_scan: {variant} was asked for, but {reason}"
            raise UnavailableError(message, reason)
        return _as_wavefronts(found, BY_NAME)
    return choose_waves(params, avals, device)


def without_waves(
    params: dict[str, Any], avals: Sequence[ShapedArray], device: AnyDevice, fallback: Fallback
) -> Fallback:
    """What is computed on a GPU where no kernel takes the whole graph.

    Layers that have no kernel of their own are wavefronts, as far as they have the form of one,
    each of no more layers than a cache holds the weights of.
    """
    if params["variant"] is not None or params["implementation"] == "cuda":
        return fallback  # which asks for kernels of single layers
    x = split(avals, params)
    found, reason = wavefront_forms(params, x, _CACHED_BYTES)
    if not found:
        no_wavefront = f", and as no wavefront, because {reason}" if reason else ""
        return fallback._replace(reason=fallback.reason + no_wavefront)
    asked = params["implementation"] == "xla"
    if asked or fallback.warning or not isinstance(device, Device):
        made = _as_wavefronts(found, fallback.reason)
        return made._replace(warning=fallback.warning, subject=fallback.subject)
    plans = [(form, plan_alone(form.first, params, x, device)) for form in found]
    lacking = [(form, plan) for form, plan in plans if isinstance(plan, NoPlan)]
    if not lacking:
        return fallback
    form, plan = lacking[0]
    made = _as_wavefronts([form for form, _ in lacking], plan.reason)
    if plan.wanted:
        return made
    missed = f"recurrent.stack_scan: on {device.name} {made.called}, because {plan.reason}"
    return made._replace(warning=missed, subject=params["nodes"][form.first].cell_name)


def _as_wavefronts(found: Sequence[WavefrontForm], reason: str) -> Fallback:
    runs = {w.first: functools.partial(run_wavefront, w) for w in found}
    called = " and ".join(
        f"nodes {w.first} to {w.last} as a wavefront of {w.layers} layers" for w in found
    )
    return Fallback(reason, functools.partial(in_runs, runs), called)
