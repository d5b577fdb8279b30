"""Paired timing: time two variants of a step alternately in one process."""

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
    """The duration of a step relative to the duration of a baseline step.

    Attributes:
        ratio: The median of the ratios of all rounds.
        low: The lower quartile of the ratios.
        high: The upper quartile of the ratios.
        baseline: The median duration of a baseline step, in seconds.
    """

    ratio: float
    low: float
    high: float
    baseline: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.low:.2f}-{self.high:.2f})"


def paired(
    baseline: Callable[[], object], variant: Callable[[], object], *, rounds: int, steps: int = 1, device: str = "cpu"
) -> Ratio:
    """Time two variants of a step. Their order alternates from round to round.

    Args:
        baseline: Function that makes one baseline step.
        variant: Function that makes one step of the other variant.
        rounds: The number of measured rounds.
        steps: The number of steps of each variant in a round.
        device: The device of the steps. A GPU is synchronized before and after each measurement.

    Returns:
        The duration of `variant` relative to `baseline`.
    """
    ratios, baselines = [], []
    for number in range(rounds + 2):
        first, second = (baseline, variant) if number % 2 else (variant, baseline)
        times = {id(step): _time(step, steps, device) for step in (first, second)}
        if number >= 2:  # the first two rounds are warm-up
            ratios.append(times[id(variant)] / times[id(baseline)])
            baselines.append(times[id(baseline)] / steps)
    low, median, high = statistics.quantiles(ratios, n=4)
    return Ratio(median, low, high, statistics.median(baselines))


def _time(step: Callable[[], object], steps: int, device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def keep_memory() -> None:
    """Configure glibc to keep freed memory.

    By default, glibc returns large blocks to the system in each step, and the number of blocks depends on the other content
    of the heap. Hooks change that content, which changed the ratios of the small network by up to 0.15 in both directions.
    """
    libc = ctypes.util.find_library("c")
    if libc and hasattr(ctypes.CDLL(libc), "mallopt"):
        trim_threshold, mmap_threshold = -1, -3  # from malloc.h
        ctypes.CDLL(libc).mallopt(trim_threshold, 2**31 - 1)
        ctypes.CDLL(libc).mallopt(mmap_threshold, 2**30)


def machine() -> str:
    """Return a description of the hardware and of the package versions."""
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
