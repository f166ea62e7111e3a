"""How kernels want a pattern laid out: what a topology carries beside its rows, by kind."""

from jaxsparse.layouts.kind import KINDS, LayoutKind, check_kinds, derived_layouts, register
from jaxsparse.layouts.tile_starts import TileStarts  # the first kind: every topology has it

__all__ = ["KINDS", "LayoutKind", "TileStarts", "check_kinds", "derived_layouts", "register"]
