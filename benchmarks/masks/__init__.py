"""Attention over masks: fused kernels of several frameworks on the same masks and operands."""
