"""Statistics and histograms of a tensor by Triton kernels. One launch computes all statistics. It reads
every element once, and again those of programs that find NaN or an infinite one.

Several programs read blocks of the tensor. Each lane sums deviations from a shift, a finite value of the tensor, in float64. The
distance of the mean from any of n values is at most sqrt(n) standard deviations, so that the relative error of the variance
of a program that reads n elements is at most n * 2^-52. The program that ends last merges the results of all (Chan, Golub
and LeVeque, 1983).

The module requires Triton. `instrument.stats.device_choice` decides when it is used.
"""

from __future__ import annotations

import ctypes
import math
import re
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from .cast_operations import NUMBERS, TensorCast
from .cpu_kernel import add_launcher, connect_driver
from .fingerprint import SECOND_FACTOR
from .portable import constants
from .sums import FACTOR

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that the kernel reads. Sums of their squares do not overflow float64."""

_BLOCK = 1024  # elements that a program reads at once
_OPTIONS = {"num_warps": 4}
_BLOCKS = 4  # blocks per program, up to the maximum number of programs
# A multiprocessor of an H100 runs 3 programs at the same time (150 registers per thread). With more, a launch took up to twice the time.
_PROGRAMS_PER_MULTIPROCESSOR = 3
# Results of a program: n, NaN, zeros, minimum, maximum, mean, sum of squared deviations, sum of magnitudes, both halves of the sum of
# bits, and 5 numbers of a cast, if they are requested.
_NUMBERS = tl.constexpr(15)
_LOST = tl.constexpr(10)  # the first number of a cast
_MAGNITUDE, _INFINITE = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000)
_FACTOR, _SECOND_FACTOR, _LOW_HALF = tl.constexpr(FACTOR), tl.constexpr(SECOND_FACTOR), tl.constexpr(2**32 - 1)
_OTHERS = 4  # parameters of a kernel after its tensors: partials, arrived, results, numel
_STAGES = tl.constexpr(4)  # stages of the pipeline that loads blocks in advance
# Results of programs that one iteration merges: all results on GPUs with up to 170 multiprocessors.
_LANES = tl.constexpr(512)


@triton.jit(do_not_specialize=["results", "numel"])
def _measure(  # noqa: PLR0917
    elements,
    partials,
    arrived,
    results,
    numel: tl.int64,
    block_size: tl.constexpr,
    is_bfloat16: tl.constexpr,
    with_bits: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    _measure_part(elements, partials, arrived, results, numel, program, programs, block_size, is_bfloat16, with_bits)


# Measures several tensors. `table`: int64 [count + 1, 4]. Its columns are the address of the elements, the address of the results, the
# number of elements, and the first program of each tensor. The last row has only the number of all programs.
@triton.jit(do_not_specialize=["count"])
def _measure_batch(  # noqa: PLR0917
    table,
    partials,
    arrived,
    count: tl.int32,
    element: tl.constexpr,
    block_size: tl.constexpr,
    is_bfloat16: tl.constexpr,
):
    program = tl.program_id(0)
    # Find the tensor of this program by a binary search: the last one whose first program is not after it.
    index, end = count * 0, count
    while end - index > 1:
        middle = (index + end) // 2
        is_before = tl.load(table + middle * 4 + 3) <= program
        index = tl.where(is_before, middle, index)
        end = tl.where(is_before, end, middle)
    entry = table + index * 4
    elements = tl.multiple_of(tl.load(entry).to(tl.pointer_type(element)), 16)
    results = tl.load(entry + 1).to(tl.pointer_type(tl.float64))
    first = tl.load(entry + 3).to(tl.int32)
    programs = tl.load(entry + 7).to(tl.int32) - first
    partials += first * _NUMBERS
    numel = tl.load(entry + 2)
    _measure_part(
        elements, partials, arrived + index, results, numel, program - first, programs, block_size, is_bfloat16, False
    )


@triton.jit
def _measure_part(  # noqa: PLR0917
    elements,
    partials,
    arrived,
    results,
    numel,
    program,
    programs,
    block_size: tl.constexpr,
    is_bfloat16: tl.constexpr,
    with_bits: tl.constexpr,
):
    full_blocks = numel // block_size
    first = _as_float(tl.load(elements + program.to(tl.int64) * block_size), is_bfloat16)
    shift = tl.where(tl.abs(first) < float("inf"), first, 0.0).to(tl.float64)
    low = tl.full([block_size], float("inf"), tl.float32)
    high = tl.full([block_size], -float("inf"), tl.float32)
    zeros = tl.zeros([block_size], tl.int32)
    sums = tl.zeros([block_size], tl.float64)
    squares = tl.zeros([block_size], tl.float64)
    magnitudes = tl.zeros([block_size], tl.float64)
    bits = (numel * 0).to(tl.int64)
    # As if all elements were finite. Blocks without a mask are read in words of 16 bytes.
    lanes = tl.arange(0, block_size)
    for block in tl.range(program, full_blocks, programs, num_stages=_STAGES):
        stored = tl.load(elements + block * block_size + lanes)
        x = _as_float(stored, is_bfloat16)
        low, high = tl.minimum(low, x), tl.maximum(high, x)
        zeros += (x == 0.0).to(tl.int32)
        value = x.to(tl.float64)
        sums += value - shift
        squares += (value - shift) * (value - shift)
        magnitudes += tl.abs(value)
        if with_bits:
            bits += _bits_of_tile(stored, numel * 0 + block)
    count = tl.maximum((full_blocks - program + programs - 1) // programs, 0) * block_size
    remainder = numel - full_blocks * block_size
    if (remainder > 0) & (full_blocks % programs == program):
        inside = lanes < remainder
        stored = tl.load(elements + full_blocks * block_size + lanes, mask=inside, other=0)
        x = _as_float(stored, is_bfloat16)
        low, high = tl.minimum(low, tl.where(inside, x, low)), tl.maximum(high, tl.where(inside, x, high))
        zeros += (inside & (x == 0.0)).to(tl.int32)
        value = x.to(tl.float64)
        deviation = tl.where(inside, value - shift, 0.0)
        sums += deviation
        squares += deviation * deviation
        magnitudes += tl.abs(value)
        count += remainder
        if with_bits:
            bits += _bits_of_tile(stored, full_blocks)
    moments = count.to(tl.float64), (0 * count).to(tl.float64), shift, zeros, low, high, sums, squares, magnitudes
    if not (tl.abs(tl.sum(sums, 0)) < float("inf")):  # some elements are not finite
        moments, _, _ = _of_finite_elements(elements, numel, program, programs, block_size, is_bfloat16)
    _finish(moments, bits, partials, arrived, results, results, program, programs, with_bits, False)


# Measures a tensor and its cast. `tiles` of `block_size` elements have `blocks` blocks of `block` elements in all, 1 for a format without
# blocks. `scale`: float32. `lost`: float64 [5]. `errors`: float64 [blocks]. `rounding`: the last arguments of `_lost`. See `TensorCast` and
# `casts.c`.
@triton.jit(do_not_specialize=["results", "numel"])
def _measure_cast(  # noqa: PLR0917
    elements,
    partials,
    arrived,
    results,
    numel: tl.int64,
    scale,
    lost,
    errors,
    blocks: tl.int64,
    length,
    inner,
    block_size: tl.constexpr,
    is_bfloat16: tl.constexpr,
    block: tl.constexpr,
    rounding: tl.constexpr,
    with_bits: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    cast = scale, errors, blocks, length, inner
    moments, of_cast, bits = _of_finite_elements(
        elements, numel, program, programs, block_size, is_bfloat16, cast, block, rounding, with_bits
    )
    underflows, overflows, squared_errors, squares = of_cast
    counts, sums = (tl.sum(underflows, 0), tl.sum(overflows, 0)), (tl.sum(squared_errors, 0), tl.sum(squares, 0))
    _store_all(partials + program * _NUMBERS + _LOST, moments[:1] + counts + sums)
    _finish(moments, bits, partials, arrived, results, lost, program, programs, with_bits, True)


@triton.jit
def _store_all(memory, numbers):
    for at in tl.static_range(len(numbers)):
        tl.store(memory + at, numbers[at])


# Stores the results of a program. The last one merges those of all.
@triton.jit
def _finish(  # noqa: PLR0917
    moments, bits, partials, arrived, results, lost, program, programs, with_bits: tl.constexpr, with_cast: tl.constexpr
):
    n, nan, shift, zeros, low, high, sums, squares, magnitudes = moments
    total = tl.sum(sums, 0)
    mean = total / tl.maximum(n, 1.0)
    deviations = tl.maximum(tl.sum(squares, 0) - total * mean, 0.0)
    counts, ends = (n, nan, tl.sum(zeros, 0)), (tl.min(low, 0), tl.max(high, 0))
    program_results = results if programs == 1 else partials + program * _NUMBERS
    _store_all(program_results, counts + ends + (shift + mean, deviations, tl.sum(magnitudes, 0)))
    if with_bits:
        _store_bits(program_results + (9 if programs == 1 else 8), bits)
    if programs == 1:
        tl.store(results + 8, 1.0)
        if with_cast:
            tl.debug_barrier()
            _store_lost(partials, lost, programs)
    else:
        # The barrier orders the stores of all threads before the release, and the acquire orders the stores of other programs
        # before the loads.
        tl.debug_barrier()
        if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == programs - 1:
            tl.debug_barrier()
            _merge(partials, results, programs)
            if with_bits:
                halves = _total(partials + 8, programs), _total(partials + 9, programs)
                _store_bits(results + 9, halves[0].to(tl.int64) + (halves[1].to(tl.int64) << 32))
            if with_cast:
                _store_lost(partials, lost, programs)
            tl.store(arrived, 0)  # for the next launch on this stream


# The number of a tile in `instrument.stats.fingerprint`, mixed with its index. A block is a tile; elements after the last one are zeros.
@triton.jit
def _bits_of_tile(stored, block):
    if stored.dtype.primitive_bitwidth == 16:
        first, second = tl.split(tl.reshape(stored.to(tl.int16, bitcast=True), [stored.shape[0] // 2, 2]))
        halves = (first.to(tl.int32) & 0xFFFF) | (second.to(tl.int32) << 16)
    else:
        halves = stored.to(tl.int32, bitcast=True)
    low, high = tl.split(tl.reshape(halves, [halves.shape[0] // 2, 2]))
    keys = _mixed(_mixed((tl.arange(0, low.shape[0]) + 1).to(tl.int64)) + 1)
    x = ((low.to(tl.int64) & _LOW_HALF) | (high.to(tl.int64) << 32)) ^ keys
    products = tl.xor_sum((x & _LOW_HALF) * ((x >> 32) & _LOW_HALF), 0)
    words = tl.xor_sum(x, 0)
    number = products ^ _rotated(words, 11) ^ _rotated(words, 27) ^ _rotated(words, 43)
    return _mixed(number ^ ((block.to(tl.int64) + 1) * _FACTOR))


@triton.jit
def _mixed(number):
    product = number * _SECOND_FACTOR
    return (product ^ ((product >> 32) & _LOW_HALF)) * _FACTOR


@triton.jit
def _rotated(number, count: tl.constexpr):
    return (number << count) | ((number >> (64 - count)) & ((1 << count) - 1))


@triton.jit
def _store_bits(results, bits):
    tl.store(results, (bits & _LOW_HALF).to(tl.float64))
    tl.store(results + 1, ((bits >> 32) & _LOW_HALF).to(tl.float64))


@triton.jit
def _store_lost(partials, lost, programs):
    for number in tl.static_range(5):
        tl.store(lost + number, _total(partials + _LOST + number, programs))


# Returns two tuples and the sum of bits. First: n, NaN and the shift (float64 scalars), and per lane the zeros (int32), extremes (float32),
# and sums of deviations from the shift, of their squares, and of magnitudes (float64). Second, if `block` is not 0: what the cast of
# `_measure_cast` loses, per block of a tile: underflows and overflows (int32), and sums of squared errors and of squares (float64). The sum
# of bits (int64) is valid only if the blocks of each tile are consecutive.
@triton.jit
def _of_finite_elements(  # noqa: PLR0915, PLR0917
    elements,
    numel,
    program,
    programs,
    block_size: tl.constexpr,
    is_bfloat16: tl.constexpr,
    cast=None,
    block: tl.constexpr = 0,
    rounding: tl.constexpr = None,
    with_bits: tl.constexpr = False,
):
    if block:
        scale, errors, blocks, length, inner = cast
    inf = float("inf")
    n = tl.zeros([block_size], tl.int32)
    nan = tl.zeros([block_size], tl.int32)
    zeros = tl.zeros([block_size], tl.int32)
    low = tl.full([block_size], inf, tl.float32)
    high = tl.full([block_size], -inf, tl.float32)
    sums = tl.zeros([block_size], tl.float64)
    squares = tl.zeros([block_size], tl.float64)
    magnitudes = tl.zeros([block_size], tl.float64)
    in_tile: tl.constexpr = block_size // block if block else 1
    underflows = tl.zeros([in_tile], tl.int32)
    overflows = tl.zeros([in_tile], tl.int32)
    squared_errors = tl.zeros([in_tile], tl.float64)
    squared = tl.zeros([in_tile], tl.float64)
    bits = (numel * 0).to(tl.int64)
    first = tl.min(low, 0)
    for tile in range(program, tl.cdiv(blocks, in_tile) if block else tl.cdiv(numel, block_size), programs):
        if block:
            number = tile * in_tile + tl.arange(0, in_tile).to(tl.int64)
            in_row = tl.cdiv(length, block)  # blocks
            row = number // inner
            at = (row % in_row * block)[:, None] + tl.arange(0, block)[None, :]
            inside = (number < blocks)[:, None] & (at < length)
            offsets = ((row // in_row * length)[:, None] + at) * inner + (number % inner)[:, None]
        else:
            offsets = tile * block_size + tl.arange(0, block_size).to(tl.int64)
            inside = offsets < numel
        stored = tl.load(elements + offsets, mask=inside, other=0)
        x = _as_float(stored, is_bfloat16)
        if with_bits:
            bits += _bits_of_tile(tl.reshape(stored, [block_size]), numel * 0 + tile)
        if block:
            under, over, lost, all_squares = _lost(
                x, tl.load(scale), rounding[0], rounding[1], rounding[2], rounding[3], rounding[4]
            )
            underflows += under
            overflows += over
            squared_errors += lost
            squared += all_squares
            if rounding[0]:
                tl.store(errors + number, lost / all_squares, mask=number < blocks)
            x, inside = tl.reshape(x, [block_size]), tl.reshape(inside, [block_size])
        finite = inside & (tl.abs(x) < inf)
        low = tl.minimum(low, tl.where(finite, x, inf))
        high = tl.maximum(high, tl.where(finite, x, -inf))
        if first == inf:  # no finite value before this tile
            first = tl.min(low, 0)
        n += finite.to(tl.int32)
        nan += (inside & (x != x)).to(tl.int32)  # noqa: PLR0124
        zeros += (inside & (x == 0.0)).to(tl.int32)
        value = tl.where(finite, x, 0.0).to(tl.float64)
        deviation = tl.where(finite, value - tl.where(first < inf, first, 0.0).to(tl.float64), 0.0)
        sums += deviation
        squares += deviation * deviation
        magnitudes += tl.abs(value)
    start = tl.where(first < inf, first, 0.0).to(tl.float64)
    finite, nans = tl.sum(n.to(tl.float64), 0), tl.sum(nan.to(tl.float64), 0)
    moments = finite, nans, start, zeros, low, high, sums, squares, magnitudes
    return moments, (underflows, overflows, squared_errors, squared), bits


# The errors of the cast of blocks, float32 [blocks, elements]. See `add_lost` and `scale_of_block` in `casts.c`.
@triton.jit
def _lost(  # noqa: PLR0917
    x, scale, scales: tl.constexpr, shift: tl.constexpr, normal: tl.constexpr, step: tl.constexpr, largest: tl.constexpr
):
    bits = x.to(tl.int32, bitcast=True) & _MAGNITUDE
    bits = tl.where(bits < _INFINITE, bits, 0)
    magnitude = bits.to(tl.float32, bitcast=True)
    largest_bits = tl.full([1, 1], largest, tl.float32).to(tl.int32, bitcast=True)
    amax = tl.max(bits, 1)[:, None]
    if scales == 1:
        exponent = tl.maximum((amax >> 23) - (largest_bits >> 23), -127)
        factor = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        inverse = 1.0 / factor.to(tl.float64)
    elif scales == 2:
        ratio = tl.div_rn(amax.to(tl.float32, bitcast=True), tl.full([1, 1], largest, tl.float32))
        wide = _rounded(ratio * scale, 20, 0x3C800000, 16384.0).to(tl.float32, bitcast=True)
        stored = tl.minimum(wide, 448.0)
        factor = tl.where(stored > 0.0, tl.div_rn(scale, tl.where(stored > 0.0, stored, 1.0)), 0.0)
        inverse = stored.to(tl.float64) / scale.to(tl.float64)
    else:
        factor = scale
        inverse = 1.0 / scale.to(tl.float64)
    cast = _rounded(magnitude * factor, shift, normal, step)
    kept = tl.minimum(cast, largest_bits).to(tl.float32, bitcast=True)
    lost = magnitude.to(tl.float64) - kept.to(tl.float64) * inverse
    under, over = (cast == 0) & (bits != 0), cast > largest_bits
    wide_magnitude = magnitude.to(tl.float64)
    return (
        tl.sum(under.to(tl.int32), 1),
        tl.sum(over.to(tl.int32), 1),
        tl.sum(lost * lost, 1),
        tl.sum(wide_magnitude * wide_magnitude, 1),
    )


# The bits of a product, rounded half to even. The mask keeps a compiler from fusing the product with the sum.
@triton.jit
def _rounded(product, shift: tl.constexpr, normal: tl.constexpr, step: tl.constexpr):
    bits = product.to(tl.int32, bitcast=True) & _MAGNITUDE
    subnormal = ((bits.to(tl.float32, bitcast=True) + step) - step).to(tl.int32, bitcast=True)
    rounded = (bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1)) & -(1 << shift)
    return tl.where(bits < normal, subnormal, rounded)


@triton.jit
def _as_float(x, is_bfloat16: tl.constexpr):
    return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True) if is_bfloat16 else x.to(tl.float32)


@triton.jit
def _merge(partials, results, programs):
    lanes = tl.arange(0, _LANES)
    n = tl.zeros([_LANES], tl.float64)
    nan = tl.zeros([_LANES], tl.float64)
    zeros = tl.zeros([_LANES], tl.float64)
    low = tl.full([_LANES], float("inf"), tl.float64)
    high = tl.full([_LANES], -float("inf"), tl.float64)
    sums = tl.zeros([_LANES], tl.float64)
    squares = tl.zeros([_LANES], tl.float64)
    magnitudes = tl.zeros([_LANES], tl.float64)
    for start in range(0, programs, _LANES):
        each, exists = partials + (start + lanes) * _NUMBERS, start + lanes < programs
        count = tl.load(each, mask=exists, other=0.0, cache_modifier=".cg")
        n += count
        nan += tl.load(each + 1, mask=exists, other=0.0, cache_modifier=".cg")
        zeros += tl.load(each + 2, mask=exists, other=0.0, cache_modifier=".cg")
        low = tl.minimum(low, tl.load(each + 3, mask=exists, other=float("inf"), cache_modifier=".cg"))
        high = tl.maximum(high, tl.load(each + 4, mask=exists, other=-float("inf"), cache_modifier=".cg"))
        sums += count * tl.load(each + 5, mask=exists, other=0.0, cache_modifier=".cg")
        squares += tl.load(each + 6, mask=exists, other=0.0, cache_modifier=".cg")
        magnitudes += tl.load(each + 7, mask=exists, other=0.0, cache_modifier=".cg")
    total = tl.sum(n, 0)
    mean = tl.sum(sums, 0) / tl.maximum(total, 1.0)
    for start in range(0, programs, _LANES):
        each, exists = partials + (start + lanes) * _NUMBERS, start + lanes < programs
        distance = tl.load(each + 5, mask=exists, other=0.0, cache_modifier=".cg") - mean
        squares += tl.load(each, mask=exists, other=0.0, cache_modifier=".cg") * distance * distance
    counts, ends = (total, tl.sum(nan, 0), tl.sum(zeros, 0)), (tl.min(low, 0), tl.max(high, 0))
    _store_all(results, counts + ends + (mean, tl.sum(squares, 0), tl.sum(magnitudes, 0)))
    tl.store(results + 8, 1.0)


# Results, float64 [3]: the number of elements that differ (two NaN are equal), and the L2 norms of both tensors over their finite
# elements (NaN without any).
@triton.jit(do_not_specialize=["results", "numel"])
def _compare(  # noqa: PLR0917
    before, after, partials, arrived, results, numel: tl.int64, block_size: tl.constexpr, is_bfloat16: tl.constexpr
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    changed = tl.zeros([block_size], tl.int32)
    n_before = tl.zeros([block_size], tl.int32)
    n_after = tl.zeros([block_size], tl.int32)
    squares_before = tl.zeros([block_size], tl.float64)
    squares_after = tl.zeros([block_size], tl.float64)
    for block in range(program, tl.cdiv(numel, block_size), programs):
        offsets = block * block_size + tl.arange(0, block_size).to(tl.int64)
        inside = offsets < numel
        if (block + 1) * block_size <= numel:
            x, y = tl.load(before + offsets), tl.load(after + offsets)
        else:
            x, y = tl.load(before + offsets, mask=inside, other=0), tl.load(after + offsets, mask=inside, other=0)
        was, is_now = _as_float(x, is_bfloat16), _as_float(y, is_bfloat16)
        changed += ((was != is_now) & ((was == was) | (is_now == is_now))).to(tl.int32)  # noqa: PLR0124
        finite_before, finite_after = tl.abs(was) < float("inf"), tl.abs(is_now) < float("inf")
        n_before += (inside & finite_before).to(tl.int32)
        n_after += (inside & finite_after).to(tl.int32)
        value = tl.where(finite_before, was, 0.0).to(tl.float64)
        new = tl.where(finite_after, is_now, 0.0).to(tl.float64)
        squares_before += value * value
        squares_after += new * new
    counts = tl.sum(changed.to(tl.float64), 0), tl.sum(n_before.to(tl.float64), 0), tl.sum(n_after.to(tl.float64), 0)
    sums = tl.sum(squares_before, 0), tl.sum(squares_after, 0)
    _store_all(partials + program * _NUMBERS, counts + sums)
    tl.debug_barrier()  # as in `_measure`
    if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.debug_barrier()
        before_norm = _norm(_total(partials + 1, programs), _total(partials + 3, programs))
        after_norm = _norm(_total(partials + 2, programs), _total(partials + 4, programs))
        _store_all(results, (_total(partials, programs), before_norm, after_norm))
        tl.store(arrived, 0)


@triton.jit
def _total(numbers, programs):
    lanes = tl.arange(0, _LANES)
    total = tl.zeros([_LANES], tl.float64)
    for start in range(0, programs, _LANES):
        each = numbers + (start + lanes) * _NUMBERS
        total += tl.load(each, mask=start + lanes < programs, other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)


@triton.jit
def _norm(n, squares):
    return tl.where(n > 0, tl.sqrt(squares), float("nan"))


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
    histogram = tl.zeros([upper], tl.int32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        offsets = block * block_size + tl.arange(0, block_size).to(tl.int64)
        inside = offsets < numel
        x = _as_float(tl.load(elements + offsets, mask=inside, other=0), is_bfloat16)
        finite = inside & (tl.abs(x) < float("inf"))
        position = (tl.where(finite, x.to(tl.float64) - low, 0.0) * scale).to(tl.int32)
        histogram += tl.histogram(tl.minimum(position, bins - 1), upper, mask=finite)
    index = tl.arange(0, upper)
    tl.atomic_add(counts + index, histogram.to(tl.int64), mask=index < bins, sem="relaxed")


def measure_by_kernel(
    flat: Tensor, results: Tensor, cast: TensorCast | None = None, *, with_bits: bool = False
) -> Tensor:
    """Compute the sums of a tensor with one launch, which reads each element once and needs no memory of its size.

    Args:
        flat: Shape [elements], contiguous, not empty, of a dtype in `DTYPES`, on a device for which Triton compiles.
        results: float64 [9], or [11] with bits, contiguous, on the device. They are written to it.
        cast: A cast to compute in the same read. It receives what is lost.
        with_bits: Whether to compute the sum of bits; see `instrument.stats.fingerprint`. If the blocks of the cast are not consecutive,
            or are smaller at the end of a row, a second launch reads the elements again.

    Returns:
        The results: n, NaN, zeros, minimum, maximum, mean, sum of squared deviations, sum of magnitudes, and 1, the unit; then
        the lower and the upper 32 bits of the sum of bits. Without a finite element, the extremes are infinite.
    """
    reads_twice = (
        with_bits and cast is not None and cast.form.block and (cast.inner > 1 or cast.length % cast.form.block)
    )
    if cast is None or reads_twice:
        _launch(flat, results, None, with_bits=with_bits)
    if cast is not None:
        _launch_cast(flat, results, cast, with_bits=with_bits and not reads_twice)
    return results


def _launch_cast(flat: Tensor, results: Tensor, cast: TensorCast, *, with_bits: bool) -> None:
    form, device = cast.form, flat.device
    block, shift = form.block or 1, 23 - form.mantissa
    blocks, length = (cast.blocks, cast.length) if form.block else (flat.numel(), 1)
    is_given = not isinstance(cast.scale, Tensor)
    scale = constants((float(cast.scale),), torch.float32, device) if is_given else cast.scale
    numbers, errors = (torch.empty(size, dtype=torch.float64, device=device) for size in (NUMBERS, cast.blocks))
    with _on_gpu(_gpu_index(flat)):
        elements, is_bfloat16, _, stream = _prepared(flat)
        programs = min(-(-blocks * block // (_BLOCK * _BLOCKS)), _max_programs(device))
        given = (
            elements,
            *_memory(device, stream),
            results,
            flat.numel(),
            scale,
            numbers,
            errors,
            blocks,
            length,
            cast.inner,
        )
        rounding = form.scales, shift, (127 + form.least) << 23, 2.0 ** (form.least + shift), form.largest
        _measure_cast[programs,](*given, _BLOCK, is_bfloat16, block, rounding, with_bits, **_OPTIONS)
    cast.lost = numbers, errors


def measure_batch_by_kernel(
    device: torch.device, dtype: torch.dtype, tensors: np.ndarray[Any, np.dtype[np.int64]]
) -> None:
    """Compute the sums of several tensors of one dtype with one launch; see `measure_by_kernel`.

    `tensors` is int64 [tensors, 3]: the address of the elements, divisible by 16, their number, and the address of the results.
    """
    # About 4 * max_programs programs in proportion to the sizes, with 1 to max_programs for each tensor.
    max_programs = _max_programs(device)
    blocks = -(-tensors[:, 1] // (_BLOCK * _BLOCKS))
    ends = np.cumsum(np.minimum(-(-blocks // -(-int(blocks.sum()) // (4 * max_programs))), max_programs))
    table = np.zeros((len(tensors) + 1, 4), np.int64)
    table[:-1, :3] = tensors[:, [0, 2, 1]]
    table[1:, 3] = ends
    is_bfloat16, programs = dtype == torch.bfloat16, int(ends[-1])
    element = tl.int16 if is_bfloat16 else getattr(tl, str(dtype).removeprefix("torch."))
    with _on_gpu(device.index):
        stream = _current_stream(device.index)
        memory = _table_on(device, stream, table.tobytes()), *_batch_memory(device, stream, programs, len(tensors))
        _measure_batch[programs,](*memory, len(tensors), element, _BLOCK, is_bfloat16, **_OPTIONS)


@lru_cache(maxsize=32)
def _table_on(device: torch.device, stream: int, content: bytes) -> Tensor:  # noqa: ARG001
    """Return a table on a device: the same tensor as for the last equal table on this stream. Most steps use the same addresses."""
    on_host = torch.frombuffer(bytearray(content), dtype=torch.int64).view(-1, 4)
    return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host


def histogram_by_kernel(flat: Tensor, bins: int) -> Tensor:
    """Compute a histogram of a tensor as for `measure_by_kernel` with few launches.

    Returns:
        Minimum, maximum, and the counts of the finite elements, float64 [2 + bins]; NaN instead of both extremes without one.
    """
    counts = torch.zeros(bins, dtype=torch.int64, device=flat.device)
    results = torch.empty(_NUMBERS.value + 1, dtype=torch.float64, device=flat.device)
    _launch(flat, results, counts)
    return torch.cat([torch.where(results[0] > 0, results[3:5], math.nan), counts.to(torch.float64)])


def _launch(flat: Tensor, results: Tensor, counts: Tensor | None, *, with_bits: bool = False) -> None:
    """Write the results of `_measure`, and add the elements of each bin to the counts."""
    numel = flat.numel()
    blocks = -(-numel // _BLOCK)
    with _on_gpu(_gpu_index(flat)):
        elements, is_bfloat16, programs, stream = _prepared(flat)
        memory = _memory(flat.device, stream)
        _measure[programs](elements, *memory, results, numel, _BLOCK, is_bfloat16, with_bits, **_OPTIONS)
        if counts is not None:
            upper = 1 << max((len(counts) - 1).bit_length(), 1)  # a power of 2, at least 2
            _count[programs](elements, results, counts, numel, blocks, len(counts), _BLOCK, upper, is_bfloat16)
        if (compiled := _compiled.get((flat.device, flat.dtype))) is not None:
            _add_launchers(*compiled, flat.device, flat.dtype, stream)


def _gpu_index(flat: Tensor) -> int | None:
    """Return the index of the GPU with a tensor; None for the CPU, on which Triton's interpreter runs."""
    return flat.get_device() if flat.is_cuda else None


def _on_gpu(gpu: int | None) -> AbstractContextManager[Any]:
    """Make a GPU the current one, on which Triton launches."""
    return nullcontext() if gpu is None or gpu == torch.cuda.current_device() else torch.cuda.device(gpu)


def _current_stream(gpu: int | None) -> int:
    """Return the handle of the current stream of a GPU; 0 for None, the CPU."""
    return 0 if gpu is None else int(driver.active.get_current_stream(gpu))


def _prepared(flat: Tensor) -> tuple[Tensor, bool, tuple[int], int]:
    """Return the elements as the kernels read them, whether they are bits of bfloat16, the grid and the stream of a launch."""
    is_bfloat16 = flat.dtype == torch.bfloat16  # read as bits, because not every conversion keeps subnormal numbers
    programs = min(-(-flat.numel() // (_BLOCK * _BLOCKS)), _max_programs(flat.device))
    return flat.view(torch.int16) if is_bfloat16 else flat, is_bfloat16, (programs,), _current_stream(_gpu_index(flat))


_compiled: dict[tuple[torch.device, torch.dtype], tuple[Any, Any, Any]] = {}
"""`_measure`, `_compare`, and `_measure` with bits by device and dtype, compiled for addresses divisible by 16."""


def enable_launches(flat: Tensor) -> None:
    """Let slabs launch the kernels for tensors of a device and dtype, which takes less time than a launch by Triton.

    Compiles and runs these kernels once, with a tensor whose address is divisible by 16. A further stream is added when
    `measure_by_kernel` runs on it.
    """
    with _on_gpu(_gpu_index(flat)):
        elements, is_bfloat16, programs, stream = _prepared(flat)
        results = torch.empty(_NUMBERS.value + 1, dtype=torch.float64, device=flat.device)
        given = (*_memory(flat.device, stream), results, flat.numel(), _BLOCK, is_bfloat16)
        measure, with_bits = (_measure[programs](elements, *given, each, **_OPTIONS) for each in (False, True))
        compare = _compare[programs](elements, elements, *given, **_OPTIONS)
        _compiled[flat.device, flat.dtype] = compiled = measure, compare, with_bits
        _add_launchers(*compiled, flat.device, flat.dtype, stream)


@cache
def _add_launchers(
    measure: Any, compare: Any, with_bits: Any, device: torch.device, dtype: torch.dtype, stream: int
) -> None:
    if torch.version.cuda is None:
        return
    _connect_driver()
    for kernel, (compiled, tensors) in enumerate(((measure, 1), (compare, 2), (with_bits, 1)), start=1):
        header = compiled.asm["ptx"].partition("{")[0]
        parameters = len(re.findall(r"\.param \.u64\b", header))
        # Triton adds up to two parameters for scratch memory, which the kernels do not need.
        if len(re.findall(r"\.param\b", header)) == parameters and 0 <= parameters - tensors - _OTHERS <= 2:
            made = compiled.metadata
            size = made.num_warps * made.target.warp_size, made.shared
            add_launcher(device, dtype, stream, kernel, compiled.function, size, _memory(device, stream))


@cache
def _connect_driver() -> None:
    library = ctypes.CDLL("libcuda.so.1")
    functions = (library.cuLaunchKernel, library.cuStreamIsCapturing, library.cuCtxGetDevice)
    launch, capture_status, current_device = (ctypes.cast(each, ctypes.c_void_p).value or 0 for each in functions)
    connect_driver((launch, capture_status, current_device), _BLOCK * _BLOCKS)


@cache
def _max_programs(device: torch.device) -> int:
    """Return the maximum number of programs of one tensor. For Triton's interpreter, it is that of a large GPU."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 128
    return _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors


@cache
def _memory(device: torch.device, stream: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """Return the memory of all launches on a stream, which run one after another: partial results, and a counter."""
    with torch.inference_mode(False):
        partials = torch.empty((_max_programs(device), _NUMBERS.value), dtype=torch.float64, device=device)
        return partials, torch.zeros(1, dtype=torch.int32, device=device)


_batch_memories: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}


def _batch_memory(device: torch.device, stream: int, programs: int, tensors: int) -> tuple[Tensor, Tensor]:
    """Return the memory of all batches on a stream: partial results, float64 [programs, 15], and counters that are zero between two
    launches, int32 [tensors].
    """
    memory = _batch_memories.get((device, stream))
    if memory is None or len(memory[0]) < programs or len(memory[1]) < tensors:
        with torch.inference_mode(False):
            partials = torch.empty((programs, _NUMBERS.value), dtype=torch.float64, device=device)
            memory = partials, torch.zeros(tensors, dtype=torch.int32, device=device)
        _batch_memories[device, stream] = memory
    return memory
