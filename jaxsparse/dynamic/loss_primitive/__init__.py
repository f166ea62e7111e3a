"""The sum of the losses of rows, and what its gradient is made of, as a JAX primitive.

A scan over graphs that gathers, the heads of its rows, and the scan that emits what the gradient
of the sum of all losses is made of:

    products_v = sum over k of state_source(v, k) W_k
    state_v, carries_v, saved_v = step(products_v, (carries_source(v, k))_k, inputs_v)
    logits_v = state_v V + c,   d_v = softmax(logits_v) - onehot(label_v), 0 without a label
    dproducts_v, (dcarries_v,k)_k, dinputs_v = adjoint(a_v, b_v, saved_v, d_v V^T)
    to each source(v, k): emit dproducts_v W_k^T and dcarries_v,k
    totals = sum over v of loss_v, and how many v have labels;   dc = sum over v of d_v

a_v and b_v are the sums of what was emitted to row v. On a GPU all of it is one launch. What one
product over all rows makes of that is not part of it: the gradients of both weights.

It is no function to be differentiated often: its tangent is that of the same computation by scans,
which are closed under differentiation.
"""

from jaxsparse.dynamic.loss_primitive.binding import loss_bind
from jaxsparse.dynamic.loss_primitive.declaration import dynamic_loss_p
from jaxsparse.dynamic.loss_primitive.operands import Operands, Results

__all__ = ["Operands", "Results", "dynamic_loss_p", "loss_bind"]
