"""Makes a JAX primitive from a declaration of an operation.

This package and the operations' own rules (`ops`, `recurrent.primitive`) are all that knows JAX's
interpreters. An operation is declared (`declaration`); `make_primitive` gives it abstract
evaluation (`shapes`), eager evaluation (`binding`), lowering on every platform to what `choice`
says, batching and sharding. Its derivative rules are its own (`jaxsparse.ops`), made of what
`derivatives` has.
"""

from jaxsparse.primitive.batching import batch
from jaxsparse.primitive.binding import CALLS, bind, bind_local
from jaxsparse.primitive.choice import (
    Refused,
    TypedCall,
    UnavailableError,
    choose,
    choose_or_refuse,
    lacks_kernel,
    narrowed,
    variants_of,
)
from jaxsparse.primitive.declaration import Fallback, FfiCall, Operation, Signature, core_dims
from jaxsparse.primitive.derivatives import (
    define_multilinear_jvp,
    define_transpose,
    summed_to,
    undefined,
)
from jaxsparse.primitive.jaxpr import equations
from jaxsparse.primitive.lowering import typed_call
from jaxsparse.primitive.make import OPERATIONS, make_primitive
from jaxsparse.primitive.sharding import gathered

__all__ = [
    "CALLS",
    "OPERATIONS",
    "Fallback",
    "FfiCall",
    "Operation",
    "Refused",
    "Signature",
    "TypedCall",
    "UnavailableError",
    "batch",
    "bind",
    "bind_local",
    "choose",
    "choose_or_refuse",
    "core_dims",
    "define_multilinear_jvp",
    "define_transpose",
    "equations",
    "gathered",
    "lacks_kernel",
    "make_primitive",
    "narrowed",
    "summed_to",
    "typed_call",
    "undefined",
    "variants_of",
]
