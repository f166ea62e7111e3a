"""The recurrent scan as a JAX primitive, closed under differentiation.

For t = 0, ..., T - 1, or the other way round where a direction is reversed,

    products_t = states_{t-1} W                                   (or W^T: ``transposed``)
    states_t, carries_t, outputs_t = step(products_t, carries_{t-1}, inputs_t)

The states of a batch entry are S arrays of h units, so W takes S h numbers to P h. The tangent of a
scan is a scan by the same weights whose step is the step's tangent,

    dproducts_t = dstates_{t-1} W + states_{t-1} dW
    dstates_t, dcarries_t, doutputs_t = dstep(dproducts_t, dcarries_{t-1}, dinputs_t)

and its transpose runs the other way in time by the transposed weights: the cotangents of the
products take the place of the states. The second term of dproducts is one product over all steps,
whose transpose is the weights' gradient: one product, or one sampled product, after the scan.
"""

from jax.interpreters.ad import primitive_jvps, primitive_transposes
from jax.interpreters.batching import primitive_batchers

from jaxsparse.recurrent.primitive.batching import batching_rule
from jaxsparse.recurrent.primitive.binding import scan_bind
from jaxsparse.recurrent.primitive.declaration import recurrent_scan_p
from jaxsparse.recurrent.primitive.derivatives import jvp, transpose
from jaxsparse.recurrent.primitive.operands import Operands, operand_names

__all__ = ["Operands", "operand_names", "recurrent_scan_p", "scan_bind"]

primitive_batchers[recurrent_scan_p] = batching_rule
primitive_jvps[recurrent_scan_p] = jvp
primitive_transposes[recurrent_scan_p] = transpose
