"""Pruning while training, as an optax transformation, and sparse layers from a pruned model.

`prune` wraps an optimizer: it multiplies parameters by masks that follow a schedule. `sparsify`
then replaces the pruned layers of a Flax model by sparse ones.
"""

try:
    import flax.nnx as _nnx  # noqa: F401
    import optax as _optax  # noqa: F401
except ImportError as error:
    raise ImportError(
        "jaxsparse.pruning needs Flax, which brings optax: pip install 'jaxsparse[flax]'"
    ) from error

from jaxsparse.pruning.bits import bits_like, bits_to_masks, masks_to_bits
from jaxsparse.pruning.kinds import KINDS, Kind
from jaxsparse.pruning.layers import SparseLinearGeneral
from jaxsparse.pruning.masks import apply_masks, make_masks
from jaxsparse.pruning.saving import load, save
from jaxsparse.pruning.schedules import PruningSchedule, half_epochs, one_shot, polynomial
from jaxsparse.pruning.scores import SCORES
from jaxsparse.pruning.sparsify import densify, sparsify
from jaxsparse.pruning.state import PruneState, dense_parameters
from jaxsparse.pruning.structures import SCOPES, STRUCTURES
from jaxsparse.pruning.table import SparsityTable
from jaxsparse.pruning.targets import Target
from jaxsparse.pruning.transform import prune
from jaxsparse.pruning.verify import verify

__all__ = [
    "KINDS",
    "SCOPES",
    "SCORES",
    "STRUCTURES",
    "Kind",
    "PruneState",
    "PruningSchedule",
    "SparseLinearGeneral",
    "SparsityTable",
    "Target",
    "apply_masks",
    "bits_like",
    "bits_to_masks",
    "dense_parameters",
    "densify",
    "half_epochs",
    "load",
    "make_masks",
    "masks_to_bits",
    "one_shot",
    "polynomial",
    "prune",
    "save",
    "sparsify",
    "verify",
]
