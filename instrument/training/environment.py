"""What the numbers of a run depend on besides its configuration: hardware, and the source files of custom code."""

from __future__ import annotations

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).parents[1]


def hardware(device: torch.device) -> dict[str, str | int | None]:
    """Return the hardware, libraries and settings of this process that affect the bits of a result.

    Args:
        device: The device of the run.
    """
    is_cuda = device.type == "cuda"
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if is_cuda else None,
        "cuda": torch.version.cuda if is_cuda else None,
        "cudnn": torch.backends.cudnn.version() if is_cuda else None,
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def _processor() -> str:
    """Return the model name of the CPU."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def code_hashes(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the first 16 hexadecimal digits of the SHA-256 of each file with custom code.

    Args:
        config: The composed configuration. Its targets are imported already.

    Returns:
        The hashes by name of the module. Installed packages are left out: they have versions.
    """
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    hashes = {}
    for target in sorted(set(_targets(config))):
        name = target.rpartition(".")[0]
        while name and name not in sys.modules:
            name = name.rpartition(".")[0]
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None or file.startswith(installed) or Path(file).is_relative_to(PACKAGE):
            continue
        with suppress(OSError):
            hashes[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    return hashes


def _targets(value: Any) -> Iterator[str]:
    """Yield each `_target_` in a configuration."""
    if isinstance(value, Mapping):
        if isinstance(value.get("_target_"), str):
            yield value["_target_"]
        for item in value.values():
            yield from _targets(item)
    elif isinstance(value, list):
        for item in value:
            yield from _targets(item)
