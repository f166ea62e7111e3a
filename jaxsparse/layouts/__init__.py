"""How kernels want a pattern laid out: what a topology carries beside its rows, by kind."""

from jaxsparse.layouts.kind import KINDS, LayoutKind, check_kinds, derived_layouts, register

__all__ = ["KINDS", "LayoutKind", "check_kinds", "derived_layouts", "register"]
