"""What cases have in common that are timed by the device where that can be had."""

from __future__ import annotations

from collections.abc import Hashable

import jax


class DeviceCase:
    """A case of `benchmarks.run.Case` that takes its own time, on a device if there is one."""

    timer = "device"

    @property
    def key(self) -> Hashable:
        """Itself: no two take the same time."""
        return self

    @property
    def traced(self) -> bool:
        """Whether there is a device whose time can be had."""
        return jax.default_backend() == "gpu"
