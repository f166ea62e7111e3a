"""Makes a JAX primitive from a declaration of an operation.

This package and the operations' own rules (`ops`, `recurrent.primitive`) are all that knows JAX's
interpreters. An
operation is declared (`declaration`); `make_primitive` gives it abstract evaluation (`shapes`),
eager evaluation (`binding`), lowering on every platform, batching and sharding. Its derivative
rules are its own (`jaxsparse.ops`), made of what `derivatives` has.
"""

from jaxsparse.primitive.batching import batch
from jaxsparse.primitive.binding import bind, bind_local
from jaxsparse.primitive.declaration import FfiCall, Instead, Operation, Signature
from jaxsparse.primitive.derivatives import define_multilinear_jvp, define_transpose, undefined
from jaxsparse.primitive.jaxpr import equations
from jaxsparse.primitive.lowering import TargetCall, call_types, target_call
from jaxsparse.primitive.make import OPERATIONS, make_primitive
from jaxsparse.primitive.sharding import gathered

__all__ = [
    "OPERATIONS",
    "FfiCall",
    "Instead",
    "Operation",
    "Signature",
    "TargetCall",
    "batch",
    "bind",
    "bind_local",
    "call_types",
    "define_multilinear_jvp",
    "define_transpose",
    "equations",
    "gathered",
    "make_primitive",
    "target_call",
    "undefined",
]
