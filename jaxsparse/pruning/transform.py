"""Pruning as an optax transformation around an optimizer."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from jaxsparse.precision import promoted
from jaxsparse.pruning.masks import choose, make_masks, map_masked
from jaxsparse.pruning.schedules import PruningSchedule
from jaxsparse.pruning.scores import SCORES, Score
from jaxsparse.pruning.state import PruneState, dense_parameters
from jaxsparse.pruning.structures import SCOPES, STRUCTURES
from jaxsparse.pruning.targets import Where, is_floating, targets_of
from jaxsparse.pruning.verify import observe

T = TypeVar("T")


def prune(
    inner: optax.GradientTransformation,
    schedule: PruningSchedule,
    where: Where = "*",
    *,
    score: str | Score = "magnitude",
    scope: str = "layer",
    structure: str = "unstructured",
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Prunes parameters while an optimizer trains them: parameters are master times mask.

    With the master copy w, masks m and parameters :math:`p = m \odot w`, update t does

    .. math::
        g = \nabla L(p), \quad w \leftarrow w + u(g, w), \quad
        m \leftarrow \mathrm{masks}(w, g) \text{ if t is a pruning step}, \quad
        p \leftarrow m \odot w

    where u is the optimizer's update. The whole master is updated by every gradient, so a weight
    that was pruned can return at the next pruning step.

    A kept weight is stored once, in the parameters, and a pruned one once, in the state
    (`dense_parameters` puts the two together). So ``optax.apply_updates`` gives exactly
    :math:`m \odot w`, without rounding: a kept weight gets the optimizer's own update, a pruned one
    minus itself, and one that returns is added to 0. (A pruned weight that is infinite or NaN can't
    be brought to 0 by an addition and becomes NaN.)

    It belongs outermost: transformations go into ``inner``, or before it in a chain, as nothing may
    change the updates after it. Outside of ``jit`` an ``update`` that finds pruned weights that are
    not 0 warns, once; `verify` raises, and so do programs with ``JAXSPARSE_CHECK=1``. With
    ``optax.MultiSteps`` inside, steps count mini-batches; outside they count its emitted updates.
    Under ``optax.partition``, each group may have a schedule of its own; where a group has no
    parameters or, with the default ``where``, no matrices, nothing is pruned. Programs don't depend
    on the step: one compilation does for all.

    Arrays that are not floating, such as random keys and the indices of a pattern, are no
    parameters: ``inner`` does not see them, and their updates are zeros (of random keys, to which
    nothing can be added, what came).

    Args:
        inner: the optimizer. As parameters it sees the master copy.
        schedule: when to prune, and to which density: `one_shot`, `polynomial`, `half_epochs` or a
            `PruningSchedule`.
        where: which parameters, by name: see `Target`; by default all of two dimensions and more
            that are not called ``bias`` or ``scale``.
        score, scope, structure: as in `make_masks`; the gradients are those given to ``update``.
        seed: of the random keys that scores get.

    Returns:
        A transformation whose state is a `PruneState`. Updates have the common dtype of what came
        in, the optimizer's updates and the parameter. So it is the gradients' own, as
        `optax.apply_if_finite` and its like want it, unless theirs is narrower than the
        parameters': in that pruned weights would not be exactly 0. Cast such gradients before.

    Raises:
        TypeError: if ``schedule`` is no PruningSchedule.
        ValueError: for a score, scope or structure that is not known; from ``init``, for names that
            match none of its parameters; from ``update``, without parameters.

    Source: Guo et al. 2016, "Dynamic Network Surgery for Efficient DNNs", for the master copy that
    all gradients update; Zhu et al. 2018, "Sparse Persistent RNNs", appendix B, for pruning again
    at regular steps.

    >>> from jaxsparse.pruning import one_shot
    >>> params = {"kernel": jnp.array([[3.0, 1.0], [-4.0, 0.5]]), "bias": jnp.zeros(2)}
    >>> tx = prune(optax.adam(1e-3), one_shot(0.5, step=2), "kernel")
    >>> state = tx.init(params)
    >>> for _ in range(3):
    ...     gradients = jax.tree.map(jnp.ones_like, params)
    ...     updates, state = tx.update(gradients, state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> params["kernel"] != 0
    Array([[ True, False],
           [ True, False]], dtype=bool)
    """
    if not isinstance(schedule, PruningSchedule):
        raise TypeError(f"prune: schedule must be a PruningSchedule, got {type(schedule).__name__}")
    if not callable(score):
        choose("prune", "score", score, SCORES)
    choose("prune", "scope", scope, SCOPES)
    choose("prune", "structure", structure, STRUCTURES)
    within = optax.with_extra_args_support(inner)
    warned = False

    # Made once, so that a call outside of jit finds what it compiled the last time.
    def renew(step: Any, masks: Any, master: Any, gradients: Any) -> Any:
        return make_masks(
            master,
            schedule.density(step),
            where,
            gradients=gradients,
            score=score,
            scope=scope,
            structure=structure,
            key=jax.random.fold_in(jax.random.key(seed), step),
        )

    def keep(step: Any, masks: Any, master: Any, gradients: Any) -> Any:
        return masks

    def init(params: Any) -> PruneState:
        leaves, treedef = jax.tree.flatten(params)
        targets = targets_of("prune", params, where)

        def like(make: Any) -> Any:
            nodes = [
                optax.MaskedNode() if target is None else make(leaf)
                for leaf, target in zip(leaves, targets, strict=True)
            ]
            return jax.tree.unflatten(treedef, nodes)

        return PruneState(
            step=jnp.zeros([], jnp.int32),
            masks=like(lambda leaf: jnp.ones_like(leaf, bool)),
            pruned_weights=like(jnp.zeros_like),
            inner_state=within.init(_floating(params, params)),
        )

    def update(
        updates: Any, state: PruneState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, PruneState]:
        if params is None:
            raise ValueError("prune: update needs params, got None")
        nonlocal warned
        # Arithmetic on the state, as of optax.contrib.sam, makes integers of masks.
        before = jax.tree.map(lambda mask: mask.astype(bool), state.masks)
        warned = warned or observe(params, before)
        state = state._replace(masks=before)
        master = _floating(params, dense_parameters(params, state))
        gradients = _floating(params, updates)
        changes, inner_state = within.update(gradients, state.inner_state, master, **extra_args)
        step = optax.safe_increment(state.step)
        master = optax.apply_updates(master, changes)
        masks = jax.lax.cond(schedule.prunes(step), renew, keep, step, before, master, gradients)

        def visible(mask: Any, change: Any, before: Any, weight: Any, parameter: Any) -> Any:
            # Each case is exact in p + u, however a compiler contracts products and sums: a kept
            # weight is computed nowhere else, and -p + p and 0 + w don't round.
            returning = jnp.where(before, change, weight)
            return jnp.where(mask, returning, -parameter)

        visible_changes = map_masked(
            visible, lambda change, *_: change, masks, changes, before, master, params
        )
        return (
            _completed(visible_changes, params, updates),
            PruneState(
                step=step,
                masks=masks,
                pruned_weights=map_masked(
                    lambda mask, weight: jnp.where(mask, 0, weight),
                    lambda _: optax.MaskedNode(),
                    masks,
                    master,
                ),
                inner_state=inner_state,
            ),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _floating(params: T, tree: T) -> T:
    """A tree like the parameters with ``optax.MaskedNode()`` in the place of all but floats."""
    floating: T = jax.tree.map(
        lambda parameter, leaf: leaf if is_floating(parameter) else optax.MaskedNode(), params, tree
    )
    return floating


def _completed(changes: Any, params: Any, updates: Any) -> Any:
    """Updates of all parameters, of those that are no floats such that they stay as they are.

    None is narrower than the update that came in, which a condition around may return instead.
    """

    def completed(parameter: Any, change: Any, update: Any) -> Any:
        if is_floating(parameter):
            return change.astype(promoted(*map(jnp.result_type, (change, update))))
        is_key = jnp.issubdtype(jnp.result_type(parameter), jax.dtypes.prng_key)
        return update if is_key else jnp.zeros_like(parameter)

    return jax.tree.map(completed, params, changes, updates)
