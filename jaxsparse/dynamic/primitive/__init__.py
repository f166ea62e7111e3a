"""The scan over graphs as a JAX primitive, of two forms, and closed under differentiation.

Rows 0, ..., F - 1 are given, rows F, F + 1, ... are computed, a tile of rows at a time. A script
says of each computed row v which rows before it are its children: ``source(v, k)``, for K slots,
or none. The first form gathers from children, in the order of the tiles:

    products_v = sum over k of state_source(v, k) W_k
    state_v, carries_v, outputs_v = step(products_v, (carries_source(v, k))_k, inputs_v)

The second form emits to them, in the opposite order; a_v and b_v are the sums of what was emitted
to row v:

    states_v, (carries_v,k)_k, outputs_v = step(a_v, b_v, inputs_v)
    to each source(v, k): emit states_v W_k^T and carries_v,k

Each is the other's transpose, by the transposed step. The tangent of either is a scan of the same
form by the step's tangent, to whose products the change of the weights adds a product over all
rows at once, which is the weights' gradient when it is transposed. Rows of padding are 0 in every
result, whatever the step makes of zeros. `jaxsparse.recurrent.primitive` is the case K = 1 of rows
that follow one another.
"""

from jax.interpreters.ad import primitive_jvps, primitive_transposes

from jaxsparse.dynamic.primitive.binding import scan_bind
from jaxsparse.dynamic.primitive.declaration import dynamic_scan_p
from jaxsparse.dynamic.primitive.derivatives import jvp, transpose
from jaxsparse.dynamic.primitive.operands import Operands, operand_names

__all__ = ["Operands", "dynamic_scan_p", "operand_names", "scan_bind"]

primitive_jvps[dynamic_scan_p] = jvp
primitive_transposes[dynamic_scan_p] = transpose
