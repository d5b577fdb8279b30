"""The device, the seeds, and the switches of the process that a run sets and puts back."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ..errors import ConfigError, Mistake


def choose_device(name: str) -> torch.device:
    """`auto`: the GPU where there is one; of several processes on one machine each has its own.

    Raises:
        ConfigError: `cuda` was asked for, and there is no GPU.
    """
    if name != "cpu" and torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        why = (
            "this build of PyTorch has no CUDA"
            if not torch.backends.cuda.is_built()
            else "PyTorch finds no GPU on this machine"
        )
        raise ConfigError(Mistake("device", f"there is no GPU: {why}", written=name, allowed="auto, cpu"))
    return torch.device(name)


@contextmanager
def process_state(*, seed: int, deterministic: bool) -> Iterator[None]:
    """Seed everything, choose the algorithms, and leave the process afterwards as it was: jobs of a sweep share it."""
    python, numpy = random.getstate(), np.random.get_state()
    algorithms = torch.are_deterministic_algorithms_enabled()
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    default_dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    with torch.random.fork_rng():
        try:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)
            if deterministic:
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # PyTorch's note on randomness asks for it
                torch.use_deterministic_algorithms(True)
            yield
        finally:
            if torch.are_deterministic_algorithms_enabled() != algorithms:  # the call imports the compiler
                torch.use_deterministic_algorithms(algorithms)
            torch.set_default_dtype(default_dtype)
            torch.set_num_threads(threads)
            random.setstate(python)
            np.random.set_state(numpy)
            if workspace is None:
                os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
