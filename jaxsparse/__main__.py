"""`python -m jaxsparse info`: what is installed, and what runs where."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from typing import Any

import jax
import jaxlib

import jaxsparse
from jaxsparse import _ffi, backend
from jaxsparse.device import DESCRIBED, AnyDevice, Device, default_device
from jaxsparse.primitive import OPERATIONS, lacks_kernel


def information(described: Device | None = None) -> dict[str, Any]:
    """Versions, platforms, operations, the kernel cache, and problems with CUDA.

    Of each operation it has what it runs as where JAX runs on this machine, and then what it would
    run as on a GPU that is described. It starts JAX's backends, since only they know the platforms.
    """
    try:
        nvrtc = _ffi.nvrtc_version()
    except RuntimeError as error:
        nvrtc = f"none ({str(error).splitlines()[0]})"
    devices = [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()]
    asked = [default_device(), *([] if described is None else [described])]
    return {
        "versions": {
            "jaxsparse": jaxsparse.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.version.__version__,
            "python": platform.python_version(),
            "nvrtc": nvrtc,
        },
        "platforms": sorted({d.platform for d in jax.devices()}),
        "devices": devices,
        "cpu_instruction_set": _ffi.cpu_isa(),
        "operations": {
            name: {
                "target": backend.target_name(name),
                "variants": entry["variants"],
                "runs": {
                    device.name: _runs_as(name, entry["variants"], device) for device in asked
                },
            }
            for name, entry in backend.TARGETS.items()
        },
        "kernel_cache": kernel_cache(),
        "cuda_problems": list(backend.cuda_problems()),
    }


def _runs_as(name: str, variants: dict[str, list[str]], device: AnyDevice) -> str:
    operation = next((x for x in OPERATIONS.values() if x.target == name), None)
    if operation is None:  # it checks patterns, and programs call it as it is
        lacks, otherwise = device.lacks, "nothing"
    else:
        lacks, otherwise = lacks_kernel(operation, device), operation.plain
    kernels = variants.get(device.platform, [])
    if not lacks and not kernels:
        lacks = "there is no kernel for it"
    return f"{otherwise}, because {lacks}" if lacks else ", ".join(kernels)


def kernel_cache() -> dict[str, Any]:
    """The folder of compiled kernels, what lies there, and why it can't be read if it can't."""
    folder, sizes, problem = _ffi.cache_folder(), [], None
    try:
        for file in os.scandir(folder) if folder else ():
            if file.name.endswith(".kernel"):
                sizes.append(file.stat().st_size)
    except FileNotFoundError:
        pass  # of a folder nobody has written to, or a file that another process has removed
    except OSError as error:
        problem = error.strerror
    return {
        "folder": folder or None,
        "kernels": len(sizes),
        "bytes": sum(sizes),
        "limit": _ffi.cache_limit(),
        "problem": problem,
    }


def as_text(facts: dict[str, Any]) -> str:
    """The information for people."""
    lines = [f"{name:<11}{version}" for name, version in facts["versions"].items()]
    lines += ["", "devices"] + [f"  {device}" for device in facts["devices"]]
    lines.append(f"  CPU kernels use {facts['cpu_instruction_set']}")
    lines += ["", "operations: FFI target, and as what it runs: kernels in order of preference"]
    for name, entry in facts["operations"].items():
        (here, choice), *described = entry["runs"].items()
        lines += [f"  {name}: {entry['target']}", f"    on this machine's {here}: {choice}"]
        lines += [f"    on {device}: {choice}" for device, choice in described]
        for where, variants in entry["variants"].items():
            listed = ", ".join(variants)
            if listed and listed not in entry["runs"].values():
                lines.append(f"    kernels for {where}: {listed}")
    cache = facts["kernel_cache"]
    where = cache["folder"] or "off (JAXSPARSE_CACHE_DIR is empty)"
    kept = f"{cache['kernels']} kernels, {cache['bytes']} of at most {cache['limit']} bytes"
    lines += ["", f"kernel cache: {where}, {cache['problem'] or kept}"]
    problems = facts["cuda_problems"]
    lines += ["", "CUDA: " + ("ready" if not problems else "not available, because")]
    lines += [f"  - {problem}" for problem in problems]
    return "\n".join(lines)


def _info(arguments: argparse.Namespace) -> int:
    facts = information(DESCRIBED.get(arguments.device))
    print(json.dumps(facts, indent=1) if arguments.json else as_text(facts))
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m jaxsparse", description=__doc__)
    parser.add_argument("--version", action="version", version=jaxsparse.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="what is installed and what runs where")
    info.add_argument("--json", action="store_true", help="print JSON")
    info.add_argument(
        "--device",
        choices=DESCRIBED,
        help="a GPU: what each operation runs as on this machine, then what it would run as there",
    )
    info.set_defaults(run=_info)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
