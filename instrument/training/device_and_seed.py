"""The device, the random seeds and the global settings that a run changes and restores."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import chdir, contextmanager

import numpy as np
import torch

from ..errors import ConfigError, Problem
from ..plan.shape_inference import preserve_random_state

GPUS = ("cuda", "mps", "xpu")


def choose_device(name: str) -> torch.device:
    """Return the device of this process.

    `auto` selects the CUDA GPU if one is available. If the environment variable `LOCAL_RANK` is set, as by torchrun, it
    selects the GPU: `LOCAL_RANK` modulo the number of GPUs.

    Raises:
        ConfigError: The device is not available.
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
