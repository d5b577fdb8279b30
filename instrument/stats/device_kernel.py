"""Statistics and histograms of a tensor by Triton kernels. One launch, which reads every element once, computes all statistics.

Several programs read blocks of the tensor. Each lane sums deviations from a shift, a finite value of the tensor, in float64. The
distance of the mean from any of n values is at most sqrt(n) standard deviations, so that the relative error of the variance
of a program that reads n elements is at most n * 2^-52. The program that ends last merges the results of all (Chan, Golub
and LeVeque, 1983).

The module requires Triton. `instrument.stats.device_choice` decides when it is used.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that the kernel reads. Sums of their squares do not overflow float64."""

_BLOCK = 1024  # elements that a program reads at once
_BLOCKS = 4  # least number of blocks of a program, if there are several programs
_PROGRAMS = 1024  # most programs: 8 for each multiprocessor of a large GPU
# Results of a program: n, NaN, zeros, minimum, maximum, mean, sum of squared deviations, sum of magnitudes.
_NUMBERS = tl.constexpr(8)


@triton.jit
def _measure(  # noqa: PLR0917
    elements,
    partials,
    arrived,
    results,
    numel,
    blocks,
    block_size: tl.constexpr,
    upper: tl.constexpr,
    is_bfloat16: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    inf = float("inf")
    n = tl.zeros([block_size], tl.int32)
    nan = tl.zeros([block_size], tl.int32)
    zeros = tl.zeros([block_size], tl.int32)
    low = tl.full([block_size], inf, tl.float32)
    high = tl.full([block_size], -inf, tl.float32)
    sums = tl.zeros([block_size], tl.float64)
    squares = tl.zeros([block_size], tl.float64)
    magnitudes = tl.zeros([block_size], tl.float64)
    shift = tl.min(low, 0)
    for block in range(program, blocks, programs):
        offsets = block * block_size + tl.arange(0, block_size).to(tl.int64)
        inside = offsets < numel
        x = _as_float(tl.load(elements + offsets, mask=inside, other=0), is_bfloat16)
        finite = inside & (tl.abs(x) < inf)
        low = tl.minimum(low, tl.where(finite, x, inf))
        high = tl.maximum(high, tl.where(finite, x, -inf))
        if shift == inf:  # no finite value before this block
            shift = tl.min(low, 0)
        n += finite.to(tl.int32)
        nan += (inside & (x != x)).to(tl.int32)  # noqa: PLR0124
        zeros += (inside & (x == 0.0)).to(tl.int32)
        value = tl.where(finite, x, 0.0).to(tl.float64)
        deviation = tl.where(finite, value - tl.where(shift < inf, shift, 0.0).to(tl.float64), 0.0)
        sums += deviation
        squares += deviation * deviation
        magnitudes += tl.abs(value)

    count, total = tl.sum(n.to(tl.float64), 0), tl.sum(sums, 0)
    mean = total / tl.maximum(count, 1.0)
    own = partials + program * _NUMBERS
    tl.store(own, count)
    tl.store(own + 1, tl.sum(nan.to(tl.float64), 0))
    tl.store(own + 2, tl.sum(zeros.to(tl.float64), 0))
    tl.store(own + 3, tl.min(low, 0).to(tl.float64))
    tl.store(own + 4, tl.max(high, 0).to(tl.float64))
    tl.store(own + 5, tl.where(shift < inf, shift, 0.0).to(tl.float64) + mean)
    tl.store(own + 6, tl.maximum(tl.sum(squares, 0) - total * mean, 0.0))
    tl.store(own + 7, tl.sum(magnitudes, 0))

    # The barrier orders the stores of all threads before the release, and the acquire orders the stores of other programs before the loads.
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.debug_barrier()
        _merge(partials, results, programs, upper)
        tl.store(arrived, 0)  # for the next launch on this stream


@triton.jit
def _as_float(x, is_bfloat16: tl.constexpr):
    return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True) if is_bfloat16 else x.to(tl.float32)


@triton.jit
def _merge(partials, results, programs, upper: tl.constexpr):
    index = tl.arange(0, upper)
    exists = index < programs
    each = partials + index * _NUMBERS
    counts = tl.load(each, mask=exists, other=0.0, cache_modifier=".cg")
    means = tl.load(each + 5, mask=exists, other=0.0, cache_modifier=".cg")
    count = tl.sum(counts, 0)
    mean = tl.sum(counts * means, 0) / tl.maximum(count, 1.0)
    within = tl.sum(tl.load(each + 6, mask=exists, other=0.0, cache_modifier=".cg"), 0)
    tl.store(results, count)
    tl.store(results + 1, tl.sum(tl.load(each + 1, mask=exists, other=0.0, cache_modifier=".cg"), 0))
    tl.store(results + 2, tl.sum(tl.load(each + 2, mask=exists, other=0.0, cache_modifier=".cg"), 0))
    tl.store(results + 3, tl.min(tl.load(each + 3, mask=exists, other=float("inf"), cache_modifier=".cg"), 0))
    tl.store(results + 4, tl.max(tl.load(each + 4, mask=exists, other=-float("inf"), cache_modifier=".cg"), 0))
    tl.store(results + 5, mean)
    tl.store(results + 6, within + tl.sum(counts * (means - mean) * (means - mean), 0))
    tl.store(results + 7, tl.sum(tl.load(each + 7, mask=exists, other=0.0, cache_modifier=".cg"), 0))
    tl.store(results + 8, 1.0)


@triton.jit
def _count(  # noqa: PLR0917
    elements,
    results,
    counts,
    numel,
    blocks,
    bins,
    block_size: tl.constexpr,
    upper: tl.constexpr,
    is_bfloat16: tl.constexpr,
):
    low, high = tl.load(results + 3), tl.load(results + 4)
    scale = tl.where(high > low, bins / tl.where(high > low, high - low, 1.0), 0.0)
    found = tl.zeros([upper], tl.int32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        offsets = block * block_size + tl.arange(0, block_size).to(tl.int64)
        inside = offsets < numel
        x = _as_float(tl.load(elements + offsets, mask=inside, other=0), is_bfloat16)
        finite = inside & (tl.abs(x) < float("inf"))
        position = (tl.where(finite, x.to(tl.float64) - low, 0.0) * scale).to(tl.int32)
        found += tl.histogram(tl.minimum(position, bins - 1), upper, mask=finite)
    index = tl.arange(0, upper)
    tl.atomic_add(counts + index, found.to(tl.int64), mask=index < bins, sem="relaxed")


def measure_by_kernel(flat: Tensor, results: Tensor) -> Tensor:
    """Compute the sums of a tensor with one launch, which reads each element once and needs no memory of its size.

    Args:
        flat: Shape [elements], contiguous, not empty, of a dtype in `DTYPES`, on a device for which Triton compiles.
        results: float64 [9], contiguous, on the device. They are written to it.

    Returns:
        The results: n, NaN, zeros, minimum, maximum, mean, sum of squared deviations, sum of magnitudes, and 1, the unit. Without a
        finite element, the extremes are infinite.
    """
    _launch(flat, results, None)
    return results


def histogram_by_kernel(flat: Tensor, bins: int) -> Tensor:
    """Compute a histogram with few launches: the extremes, zeros for the counts, and the counts.

    Args:
        flat: A tensor as for `measure_by_kernel`.
        bins: The number of bins between the minimum and the maximum.

    Returns:
        Minimum, maximum, and the counts of the finite elements, float64 [2 + bins]; NaN instead of both extremes without one.
    """
    counts = torch.zeros(bins, dtype=torch.int64, device=flat.device)
    results = torch.empty(_NUMBERS.value + 1, dtype=torch.float64, device=flat.device)
    _launch(flat, results, counts)
    return torch.cat([torch.where(results[0] > 0, results[3:5], math.nan), counts.to(torch.float64)])


def _launch(flat: Tensor, results: Tensor, counts: Tensor | None) -> None:
    """Write the results of `_measure`, and add the elements of each bin to the counts."""
    numel = flat.numel()
    blocks = -(-numel // _BLOCK)
    programs = min(-(-blocks // _BLOCKS), _PROGRAMS)
    is_bfloat16 = flat.dtype == torch.bfloat16  # read as bits, because not every conversion keeps subnormal numbers
    elements = flat.view(torch.int16) if is_bfloat16 else flat
    is_current = not flat.is_cuda or flat.get_device() == torch.cuda.current_device()
    with nullcontext() if is_current else torch.cuda.device(flat.device):
        stream = driver.active.get_current_stream(flat.get_device()) if flat.is_cuda else 0
        partials, arrived = _memory(flat.device, stream)
        upper = _power_of_2(programs)
        _measure[(programs,)](elements, partials, arrived, results, numel, blocks, _BLOCK, upper, is_bfloat16)
        if counts is not None:
            upper = _power_of_2(len(counts))
            _count[(programs,)](elements, results, counts, numel, blocks, len(counts), _BLOCK, upper, is_bfloat16)


def _power_of_2(least: int) -> int:
    """Return the smallest power of 2 from 2 that is not less than a number."""
    return 1 << max((least - 1).bit_length(), 1)


@cache
def _memory(device: torch.device, stream: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """Return the memory of all launches on a stream, which run one after another: partial results, and a counter."""
    with torch.inference_mode(False):
        partials = torch.empty((_PROGRAMS, _NUMBERS.value), dtype=torch.float64, device=device)
        return partials, torch.zeros(1, dtype=torch.int32, device=device)
