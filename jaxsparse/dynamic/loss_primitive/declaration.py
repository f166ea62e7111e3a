"""The primitive of the losses of rows, and its tangent."""

from __future__ import annotations

from typing import Any

import jax
from jax.interpreters import ad

from jaxsparse.dynamic import loss_engine
from jaxsparse.dynamic.loss_primitive.operands import operand_names, result_dtypes, signature
from jaxsparse.dynamic.loss_primitive.plain import losses_by_scans, plain_losses
from jaxsparse.dynamic.plan import PLAIN_LOSS
from jaxsparse.primitive import Fallback, Operation, make_primitive
from jaxsparse.recurrent.plan import COMPUTE_CAPABILITY

dynamic_loss_p = make_primitive(
    Operation(
        name="dynamic_loss",
        target="dynamic_loss",
        called="dynamic.loss",
        params=(
            "step",
            "active",
            "wide",
            "form",
            "dtype",
            "spans",
            "labels_offset",
            "precision",
            "implementation",
        ),
        signature=signature,
        result_dtypes=result_dtypes,
        shardable=(),
        xla=plain_losses,
        plain_takes_batch=True,
        ffi=lambda params, avals, device: loss_engine.ffi_call(
            params, avals, operand_names(params), device
        ),
        plain=PLAIN_LOSS,
        on_cpu=Fallback("on a CPU XLA's products are what takes the time"),
        compute_capability=COMPUTE_CAPABILITY,
    )
)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    """The tangent of the same computation by scans."""
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def of_moving(*moved: Any) -> list[Any]:
        operands = list(primals)
        for i, x in zip(moving, moved, strict=True):
            operands[i] = x
        return losses_by_scans(*operands, **params)

    return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])


ad.primitive_jvps[dynamic_loss_p] = _jvp
