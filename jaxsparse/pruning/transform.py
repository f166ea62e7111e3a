"""Pruning as an optax transformation around an optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from jaxsparse.pruning.masks import choose, make_masks, map_masked
from jaxsparse.pruning.schedules import PruningSchedule
from jaxsparse.pruning.scores import SCORES, Score
from jaxsparse.pruning.structures import SCOPES, STRUCTURES
from jaxsparse.pruning.targets import Where, targets_of

T = TypeVar("T")


class PruneState(NamedTuple):
    """State of `prune`.

    ``masks`` and ``pruned_weights`` are trees like the parameters, sharded as they are, with
    ``optax.MaskedNode()`` for parameters that are not pruned.

    Args:
        step: updates so far, int32.
        masks: bool, True where a weight is kept.
        pruned_weights: the values that pruned weights have by now; 0 where a weight is kept.
        inner_state: that of the optimizer within.
    """

    step: jax.Array
    masks: Any
    pruned_weights: Any
    inner_state: Any


def dense_parameters(params: T, state: PruneState) -> T:
    """The master copy: kept weights as the parameters have them, pruned ones as the state does.

    >>> from jaxsparse.pruning import one_shot
    >>> params = {"kernel": jnp.array([[3.0, 1.0], [-4.0, 0.5]])}
    >>> tx = prune(optax.sgd(0.0), one_shot(0.5, step=1))
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> params = optax.apply_updates(params, updates)
    >>> params["kernel"], dense_parameters(params, state)["kernel"]
    (Array([[ 3.,  0.],
           [-4.,  0.]], dtype=float32), Array([[ 3. ,  1. ],
           [-4. ,  0.5]], dtype=float32))
    """
    return map_masked(
        lambda mask, kept, pruned: jnp.where(mask, kept, pruned),
        lambda x, _: x,
        state.masks,
        params,
        state.pruned_weights,
    )


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
    change the updates after it. With ``optax.MultiSteps`` inside, steps count mini-batches; outside
    they count its emitted updates. Under ``optax.multi_transform``, each group may have a schedule
    of its own. Programs don't depend on the step: one compilation does for all.

    Args:
        inner: the optimizer. As parameters it sees the master copy.
        schedule: when to prune, and to which density: `one_shot`, `polynomial`, `half_epochs` or a
            `PruningSchedule`.
        where: which parameters, by name: see `Target`; by default all of two dimensions and more
            that are not called ``bias`` or ``scale``.
        score, scope, structure: as in `make_masks`; the gradients are those given to ``update``.
        seed: of the random keys that scores get.

    Returns:
        A transformation whose state is a `PruneState`. Updates have the common dtype of the
        optimizer's updates and the parameter.

    Raises:
        TypeError: if ``schedule`` is no PruningSchedule.
        ValueError: for a score, scope or structure that is not known; from ``init``, for names that
            match nothing; from ``update``, without parameters.

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
        # optax.tree.map_params asks for the state of a placeholder without leaves.
        targets = targets_of("prune", params, where) if leaves else []

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
            inner_state=within.init(params),
        )

    def update(
        updates: Any, state: PruneState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, PruneState]:
        if params is None:
            raise ValueError("prune: update needs params, got None")
        master = dense_parameters(params, state)
        changes, inner_state = within.update(updates, state.inner_state, master, **extra_args)
        step = optax.safe_increment(state.step)
        master = optax.apply_updates(master, changes)
        masks = jax.lax.cond(schedule.prunes(step), renew, keep, step, state.masks, master, updates)

        def visible(mask: Any, change: Any, before: Any, weight: Any, parameter: Any) -> Any:
            # Each case is exact in p + u, however a compiler contracts products and sums: a kept
            # weight is computed nowhere else, and -p + p and 0 + w don't round.
            returning = jnp.where(before, change, weight)
            return jnp.where(mask, returning, -parameter)

        return (
            map_masked(
                visible, lambda change, *_: change, masks, changes, state.masks, master, params
            ),
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
