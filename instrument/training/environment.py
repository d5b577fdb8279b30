"""What the numbers of a run depend on besides its configuration: the device, seeds and global settings, which the run changes and
restores, the hardware, source files of custom code, and some samples.
"""

from __future__ import annotations

import hashlib
import os
import platform
import random
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import ConfigError, Problem
from ..fields.field_types import nested_values
from ..plan.shape_inference import preserve_random_state
from .loader import Slice, preserved_random_states, seed_random_states

GPUS = ("cuda", "mps", "xpu")
PACKAGE = Path(__file__).parents[1]
SAMPLES = 16  # in the hash of a slice, evenly spaced from the first to the last


def choose_device(name: str) -> torch.device:
    """Return the device of this process; raise a ConfigError if it is not available.

    `auto` selects the CUDA GPU if one is available. If the environment variable `LOCAL_RANK` is set, as by torchrun, it
    selects the GPU: `LOCAL_RANK` modulo the number of GPUs.
    """
    if name != "cpu" and torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name in GPUS and not _is_available(name):
        backend = getattr(torch.backends, name, None)
        is_built = backend is None or backend.is_built()
        why = "PyTorch finds no GPU on this machine" if is_built else f"this build of PyTorch has no {name.upper()}"
        allowed = ", ".join(["auto", "cpu", *filter(_is_available, GPUS)])
        raise ConfigError(Problem("device", f"no GPU is available: {why}", given=name, allowed=allowed))
    return torch.device(name)


def _is_available(name: str) -> bool:
    module = torch.backends.mps if name == "mps" else getattr(torch, name)
    available: bool = module.is_available()
    return available


@contextmanager
def process_state(*, seed: int, deterministic: bool) -> Iterator[None]:
    """Seed the random generators inside the block, and restore the global state of the process afterwards.

    The state is restored because the jobs of a sweep run in the same process.
    """
    algorithms = torch.are_deterministic_algorithms_enabled()
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    default_dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    with preserve_random_state(), chdir(os.getcwd()):
        try:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)
            if deterministic:
                # Deterministic cuBLAS requires this variable, see PyTorch's note on reproducibility.
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                torch.use_deterministic_algorithms(True)
            yield
        finally:
            # Called only if necessary, because the call imports the compiler.
            if torch.are_deterministic_algorithms_enabled() != algorithms:
                torch.use_deterministic_algorithms(algorithms)
            torch.set_default_dtype(default_dtype)
            torch.set_num_threads(threads)
            if workspace is None:
                os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def hardware(device: torch.device) -> dict[str, str | int | None]:
    """Return the hardware, libraries and settings of this process that affect the bits of a result."""
    is_cuda, lines = device.type == "cuda", list[str]()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "machine": platform.machine(),
        "processor": next(named, platform.processor()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if is_cuda else None,
        "cuda": torch.version.cuda if is_cuda else None,
        "cudnn": torch.backends.cudnn.version() if is_cuda else None,
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def code_hashes(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the first 16 hexadecimal digits of the SHA-256 of each file with custom code, by name of the module.

    Its targets are imported already. Installed packages are left out: they have versions.
    """
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    targets = (value.get("_target_") for _, value in nested_values(config, "") if isinstance(value, Mapping))
    hashes = {}
    for target in sorted({target for target in targets if isinstance(target, str)}):
        name = target.rpartition(".")[0]
        while name and name not in sys.modules:
            name = name.rpartition(".")[0]
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None or file.startswith(installed) or Path(file).is_relative_to(PACKAGE):
            continue
        with suppress(OSError):
            hashes[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    return hashes


def content_hash(dataset: Dataset[Any] | None) -> str | None:
    """Return the first 16 hexadecimal digits of the SHA-256 of some samples of a slice.

    Random numbers of a transform are the same in each call, and the random states are restored. None for a slice that is iterable
    or missing, or whose samples cannot be hashed.
    """
    if not isinstance(dataset, Slice):
        return None
    size = len(dataset)
    digest = hashlib.sha256(repr(size).encode())
    with preserved_random_states():
        for index in sorted({i * (size - 1) // (SAMPLES - 1) for i in range(SAMPLES)}):
            seed_random_states(index)
            try:
                _add(digest, dataset[index])
            except Exception:  # The error of a broken sample is reported when its batch is loaded.
                return None
    return digest.hexdigest()[:16]


def _add(digest: hashlib._Hash, value: Any) -> None:
    digest.update(f"{type(value).__qualname__}(".encode())
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        digest.update(
            f"{plain.dtype}{tuple(plain.shape)}".encode() + plain.view(-1).view(torch.uint8).numpy().tobytes()
        )
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, str | int | float | complex | bool | np.generic | None):
        digest.update(repr(value).encode())
    elif isinstance(value, bytes):
        digest.update(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _add(digest, key)
            _add(digest, item)
    elif isinstance(value, list | tuple):
        for item in value:
            _add(digest, item)
    elif is_dataclass(value):
        for field in fields(value):
            _add(digest, getattr(value, field.name))
    elif type(value).__module__.startswith("PIL."):
        digest.update(repr((value.mode, value.size)).encode() + value.tobytes())
    else:
        raise TypeError(f"unknown type {type(value).__qualname__}")
    digest.update(b")")
