"""Statistics of a tensor by few operations on the complete tensor, for any device.

No operation waits for the device, branches on a value or widens the tensor to float64. Deviations are measured from
one of the elements and multiplied by a power of two, so that squares of any magnitude neither overflow nor underflow, and a
spread in the last bits of a large mean is exact. The relative error of `std` is about 6e-8 times (1 + k^2 m), where k is the
distance of the mean from that element in standard deviations, and m the number of values that are not finite per finite one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..nested import to_device
from .device_numbers import widest

# For each dtype, integers of the same size, the upper bits of the exponent, and the same bits with the lowest bit of the
# exponent: `scale_of` replaces E by 2^bits - 3 - E, where E is the exponent rounded down to a multiple of four.
_EXPONENTS = {
    torch.float16: (torch.int16, 0x7000, 0x7400),
    torch.bfloat16: (torch.int16, 0x7E00, 0x7E80),
    torch.float32: (torch.int32, 0x7E000000, 0x7E800000),
    torch.float64: (torch.int64, 0x7FC0 << 48, 0x7FD0 << 48),
}
_BYTE = 255  # as many ones fit into one byte
_LANES = _BYTE * 8
_HALF = (torch.float16, torch.bfloat16)


def measure_by_operations(flat: Tensor, *, with_magnitudes: bool) -> dict[str, Tensor]:
    """Compute the numbers from which the sums of a tensor follow (`instrument.stats.device_sums.RAW`).

    Those of a float32 tensor take 14 launches, or 15 if its size has no suitable divisor, and move 52 bytes per element. The memory
    for one tensor of the input's size is used meanwhile.

    Args:
        flat: Shape [elements], real, contiguous, not empty.
        with_magnitudes: Whether the sum of magnitudes is requested.

    Returns:
        Tensors of any dtype: the counts [3], or that of non-zeros only for integers, and scalars by their names.
    """
    if not flat.is_floating_point():
        return _measure_integers(flat, with_magnitudes=with_magnitudes)
    x = flat.to(torch.float32) if flat.element_size() == 1 else flat
    codes, counts = _classify(x)
    is_not_finite = codes.view(torch.uint8)[1::4]
    element = torch.take(x, is_not_finite.argmin())  # it is finite if any element is
    # A float32 element takes the place of its own code. PyTorch refuses this overlap for a single element.
    place = codes.view(x.dtype) if x.dtype == torch.float32 and len(x) > 1 else None
    filled = torch.where(is_not_finite.view(torch.bool), element, x, out=place)
    del codes, is_not_finite, place
    low, high = torch.aminmax(filled)
    scale = scale_of(high - low)
    numbers = {"nonzero": counts, "low": low, "high": high, "origin": element, "scale": scale}
    numbers["variance"], numbers["mean"] = _deviations(filled, element, scale)
    return numbers | _magnitudes(x) if with_magnitudes else numbers


def count_masks(masks: Sequence[Tensor]) -> Tensor:
    """Count the true elements of masks of the same size, int64 [masks]."""
    rows = _masks(len(masks), masks[0].numel(), masks[0].device)
    for row, mask in zip(rows, masks, strict=True):
        row[: mask.numel()].view(mask.shape).copy_(mask)
    return _counts(rows)


def count_changed(before: Tensor, after: Tensor) -> Tensor:
    """Count the elements that differ between two tensors of the same shape and dtype. NaN that stays NaN is equal.

    Returns:
        int64 [2]: the elements that differ, and those of them that stay NaN.
    """
    return count_masks([before != after, before.isnan().logical_and_(after.isnan())])


def _masks(rows: int, numel: int, device: torch.device) -> Tensor:
    """Return memory for masks, bool [rows, elements and more]. What is more is false."""
    masks = torch.empty((rows, -(-numel // _LANES) * _LANES), dtype=torch.bool, device=device)
    masks[:, numel:].zero_()
    return masks


def _counts(masks: Tensor) -> Tensor:
    """Count the true elements of each row of `_masks`, int64 [rows].

    `torch.sum` and `torch.count_nonzero` would first copy a mask on a GPU to int64, eight times its size. Eight elements are
    added at once instead, as the bytes of an integer.
    """
    sums = masks.view(torch.int64).view(len(masks), -1, _BYTE).sum(-1)
    return sums.view(torch.uint8).sum(-1)


def _classify(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the code of each element, int32 [elements], and the sums of the codes' lower three bytes, int64 [3].

    The bytes of a code, the lowest first: 1 if the element is finite and not zero, 1 if it is not finite, 1 if it is NaN.
    """
    integer = _EXPONENTS[x.dtype][0]
    # 255 codes are added at once without a carry. Most sizes have a divisor that is not much smaller.
    pairs = next((pairs for pairs in range(_BYTE, 63, -1) if len(x) % (2 * pairs) == 0), _BYTE)
    padded = torch.empty(-(-len(x) // (2 * pairs)) * 2 * pairs, dtype=torch.int32, device=x.device)
    codes = padded[: len(x)]
    if len(padded) > len(x):
        padded[len(x) :].zero_()
    # Without the sign, floating-point numbers have the order of their bits as integers. NaN is above infinity.
    magnitudes = codes if integer == torch.int32 else torch.empty_like(x, dtype=integer)
    torch.bitwise_and(x.view(integer), torch.iinfo(integer).max, out=magnitudes)
    torch.bucketize(magnitudes, _boundaries(x.dtype, x.device), right=True, out_int32=True, out=codes)
    sums = padded.view(torch.int64).view(-1, pairs).sum(-1)
    return codes, sums.view(torch.uint8).view(-1, 4).sum(0)[:3]


@lru_cache(maxsize=32)
def _boundaries(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return magnitudes as integers, such that the number of boundaries up to a magnitude is the code of `_classify`."""
    integer, upper, inverted = _EXPONENTS[dtype]
    lowest = inverted - upper  # the lowest bit of the exponent; infinity has this and all higher bits, except the sign
    infinity = torch.iinfo(integer).max + 1 - lowest
    with torch.inference_mode(False):
        boundaries = [1] + [infinity] * 0xFF + [infinity + 1] * 0x10000
        moved: Tensor = to_device(torch.tensor(boundaries, dtype=integer), device)
    return moved


def scale_of(width: Tensor) -> Tensor:
    """Return a power of two.

    Args:
        width: A scalar of any floating-point dtype, not negative.

    Returns:
        The factor, with the same dtype. Its product with the width is in [0.5, 16), or smaller for the smallest numbers.
    """
    integer, upper, inverted = _EXPONENTS[width.dtype]
    return width.view(integer).bitwise_and(upper).bitwise_xor(inverted).view(width.dtype)


def _deviations(filled: Tensor, origin: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return variance and mean of (origin - filled) * scale, in float32 or wider. `filled` is overwritten."""
    if filled.dtype in _HALF:
        # One dimension more than a scalar determines the dtype of the result.
        wide = scale.to(torch.float32).view(1)
        return torch.var_mean(torch.addcmul(origin * wide, filled, wide, value=-1.0), correction=0)
    return torch.var_mean(torch.addcmul(origin * scale, filled, scale, value=-1.0, out=filled), correction=0)


def _magnitudes(x: Tensor) -> dict[str, Tensor]:
    """Return the sum of |x| * scale over the finite elements, and the scale."""
    scaled, scale = _scaled(torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0))
    return {"magnitudes": scaled.abs_().sum(), "magnitudes_scale": scale}


def _scaled(finite: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elements times a power of two, so that no square overflows, in float32 or wider, and that factor."""
    scale = scale_of(torch.linalg.vector_norm(finite, math.inf, dtype=_wide(finite)))
    # One dimension more than a scalar determines the dtype of the result.
    return finite * scale.view(1), scale


def _measure_integers(flat: Tensor, *, with_magnitudes: bool) -> dict[str, Tensor]:
    """Compute the numbers of integers or booleans."""
    x = flat.to(_wide(flat))
    masks = _masks(1, len(x), x.device)
    torch.ne(x, 0.0, out=masks[0, : len(x)])
    low, high = torch.aminmax(x)
    numbers = _magnitudes(x) if with_magnitudes else {}
    numbers["variance"], numbers["mean"] = torch.var_mean(torch.sub(low, x, out=x), correction=0)
    return numbers | {"nonzero": _counts(masks), "low": low, "high": high}


def _wide(flat: Tensor) -> torch.dtype:
    """Return the floating-point dtype that represents the values of a tensor as exactly as the device allows."""
    if flat.is_floating_point():
        return torch.float64 if flat.dtype == torch.float64 else torch.float32
    return torch.float32 if flat.element_size() <= 2 else widest(flat.device)


def as_comparable_floats(tensor: Tensor) -> Tensor:
    """Return the tensor; float8, which supports few operations, and integers as wider floats."""
    return tensor if tensor.is_floating_point() and tensor.element_size() > 1 else tensor.to(_wide(tensor))


def norm_by_operations(flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the L2 norm of the finite elements: three scalars, the arguments of `norm_of`.

    Args:
        flat: Shape [elements], real, contiguous.
    """
    if not flat.numel():
        wide = torch.full((), math.nan, dtype=widest(flat.device), device=flat.device)
        return wide, wide, wide
    x = as_comparable_floats(flat)
    finite = torch.nan_to_num(x, nan=math.inf, posinf=math.inf, neginf=math.inf)
    low = finite.amin()
    scaled, scale = _scaled(finite.nan_to_num_(posinf=0.0))
    return low, scale, torch.linalg.vector_norm(scaled)


def norm_of(low: Any, scale: Any, norm: Any) -> Any:
    """Return the norm from the results of `norm_by_operations`, or from these as numbers on the host; NaN without a finite element."""
    if isinstance(norm, Tensor):
        return torch.where(low < math.inf, norm.to(widest(norm.device)) / scale, math.nan)
    return norm / scale if low < math.inf else math.nan
