"""Test-wide settings: 8 CPU devices for sharding, exact dense products to compare with.

Patterns are checked only where a test asks.
"""

import os

# Before JAX starts a backend. A GPU stays the default platform where there is one.
flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"  # not TF32
os.environ.pop("JAXSPARSE_CHECK", None)
