"""Block masks: the form of a mask that fused attention takes."""

from jaxsparse.block_mask.block_mask import BlockMask
from jaxsparse.block_mask.orders import Residues
from jaxsparse.block_mask.tiles import TileLists

__all__ = ["BlockMask", "Residues", "TileLists"]
