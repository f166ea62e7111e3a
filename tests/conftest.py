"""Test-wide settings: 8 CPU devices for sharding, programs that compile soon, exact dense products.

Patterns are checked only where a test asks.
"""

import os

# Before JAX starts a backend. A GPU stays the default platform where there is one.
flags = os.environ.get("XLA_FLAGS", "")
for flag, value in (
    ("xla_force_host_platform_device_count", "8"),
    # Most programs run once: these would take longer than they save.
    ("xla_llvm_disable_expensive_passes", "true"),
    ("xla_gpu_autotune_level", "0"),
):
    if flag not in flags:
        flags = f"{flags} --{flag}={value}"
os.environ["XLA_FLAGS"] = flags.strip()
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"  # not TF32
os.environ.pop("JAXSPARSE_CHECK", None)
