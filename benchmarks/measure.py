"""Paired timing: two ways of making a step, one after the other, again and again in one process."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import torch

PACKAGES = ("torch", "torchvision", "numpy", "pyarrow", "pandas")


@dataclass(frozen=True)
class Ratio:
    """How much longer one way takes than the other.

    Attributes:
        ratio: The median of the rounds' ratios.
        low: The lower quartile.
        high: The upper quartile.
        bare: The median of the bare steps, in seconds.
    """

    ratio: float
    low: float
    high: float
    bare: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.low:.2f}-{self.high:.2f})"


def paired(
    bare: Callable[[], object], other: Callable[[], object], *, rounds: int, steps: int = 1, device: str = "cpu"
) -> Ratio:
    """Time both, `steps` at a time, for so many rounds; which goes first alternates.

    Args:
        bare: One step of the one.
        other: One step of the other.
        rounds: How many pairs.
        steps: Steps in each half of a round.
        device: A GPU is waited for at both ends of a half.
    """
    ratios, bares = [], []
    for number in range(rounds + 2):
        first, second = (bare, other) if number % 2 else (other, bare)
        times = {id(way): _time(way, steps, device) for way in (first, second)}
        if number >= 2:  # the first two warm up
            ratios.append(times[id(other)] / times[id(bare)])
            bares.append(times[id(bare)] / steps)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Ratio(middle, low, high, statistics.median(bares))


def _time(step: Callable[[], object], steps: int, device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def keep_memory() -> None:
    """Let glibc keep the memory that it was given.

    By default it hands large blocks back to the system and fetches them again in each step. How many depends on what else
    lies on the heap, which hooks change for better or worse: that moved ratios of the small network by up to 0.15.
    """
    libc = ctypes.util.find_library("c")
    if libc and hasattr(ctypes.CDLL(libc), "mallopt"):
        trim_threshold, mmap_threshold = -1, -3  # from malloc.h
        ctypes.CDLL(libc).mallopt(trim_threshold, 2**31 - 1)
        ctypes.CDLL(libc).mallopt(mmap_threshold, 2**30)


def machine() -> str:
    """What this was measured on."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = torch.get_num_threads()
    return f"{name}, {cores} cores, {threads} threads{gpu}; Python {platform.python_version()}, {versions}"
