"""Fingerprints of tensors: 64 bits that depend on dtype, shape, and all bits of the elements with their positions.

The elements are read in row-major order, as 64-bit words w of tiles of 1024 elements. The last tile is padded with zeros. With x = w ^ key,
where the key of a word is a mixed number of its position in the tile (multiples of the position would give a 4 in one place and a 2 in
another one equal products), the number of a tile is p ^ r(s): p is the XOR of all low(x) * high(x), products of 32-bit halves as in NH
(Black et al., "UMAC", CRYPTO 1999), s is that of all x, and r(s), the XOR of s rotated by 11, 27 and 43 bits, is one to one. The numbers
are mixed with the indices of their tiles, one to one, and added modulo 2^64. So the order in which tiles are read does not matter.

A change of one bit always changes the sum. Bit b of a half changes p by 2^b times a number below 2^32: no bit below b changes, and those
from bit b + 32 on only by a carry, without a gap. In r(s), for bits of both halves, a bit below b changes, or one above b + 32 and not bit
b + 32. Other changes are missed with a probability of about 2^-32 or less. It is not a cryptographic hash.

A fingerprint is this sum, plus a number of 52 bits for dtype and shape times an odd constant (`Sums.fingerprint`). `native.c`, the Triton
kernel and PyTorch operations give equal results. Both kernels compute it with the other sums from one read of the elements.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..tables.statistics import BITS_HIGH, BITS_LOW, FORM, Sum
from ..values.dtensor import local_shard
from ..values.sparse import as_coo, is_sparse
from .cpu_kernel import kernel_bits
from .flatten import is_on_host
from .portable import widest
from .sums import FACTOR

TILE = 1024
"""The number of elements of a tile."""
SECOND_FACTOR = 0xD6E8FEB86659FD93 - 2**64
_LOW_HALF, _MODULUS = 2**32 - 1, 2**64
_TILES = 1 << 11  # that operations read at once


def sums_of_bits(tensor: Tensor, context: object = None, dim: int | None = None) -> Mapping[Sum, float | Tensor]:  # noqa: ARG001
    """Return the sums of which a fingerprint consists; see `Sum.function`. Empty on devices without float64 (Apple's GPUs)."""
    if widest(tensor.device) != torch.float64:
        return {}
    stored, form = _stored(tensor)
    total = kernel_bits(stored) if is_on_host(stored) else None
    if total is not None:
        return {BITS_LOW: float(total & _LOW_HALF), BITS_HIGH: float(total >> 32), FORM: form}
    low, high = portable_bits(stored)
    return {BITS_LOW: low, BITS_HIGH: high, FORM: form}


def fingerprint(tensor: Tensor) -> Tensor:
    """Return the fingerprint of a tensor of any layout, dtype and device: a scalar, int64, on its device (for Apple's GPUs: the CPU)."""
    low, high, form = sums_of_bits(tensor if widest(tensor.device) == torch.float64 else tensor.cpu()).values()
    low, high = (torch.as_tensor(half, dtype=torch.int64) for half in (low, high))
    return low + (high << 32) + (int(form) * FACTOR + _MODULUS // 2) % _MODULUS - _MODULUS // 2


def projection(tensor: Tensor) -> Tensor | None:
    """Return the sum of the elements of a dense tensor, each multiplied by 1 or -1: a scalar; None for integers.

    The signs are products of those of the row and the column of an element in [elements / 1024, 1024], and are the same on all devices.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    if flat._is_zerotensor():
        flat = torch.zeros_like(flat)
    count = len(flat) // TILE
    bits = _mixed(torch.arange(1, TILE + count + 1, device=flat.device)) < 0
    signs = torch.where(bits, -1.0, 1.0).to(flat.dtype)
    rest = flat[count * TILE :]
    return (flat[: count * TILE].view(count, TILE) @ signs[:TILE]) @ signs[TILE:] + rest @ signs[: len(rest)]


def _stored(tensor: Tensor) -> tuple[Tensor, float]:
    """Return all bits of a tensor, contiguous [elements], and the number for its dtype and shape."""
    tensor = local_shard(tensor).detach()
    if tensor.is_nested:
        parts = tensor.unbind()
        return _joined(parts), form_of(tensor.dtype, [size for part in parts for size in part.shape])
    form = form_of(tensor.dtype, tensor.shape)
    if is_sparse(tensor):
        coo = as_coo(tensor)
        tensor = _joined([coo.indices(), coo.values()])
    elif tensor.layout != torch.strided:  # MKL-DNN
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1), form


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.contiguous().view(-1).view(torch.uint8) for each in tensors])


def form_of(dtype: torch.dtype, shape: Sequence[int]) -> float:
    """Return a number of 52 bits for a dtype and a shape."""
    form = zlib.crc32(str(dtype).encode())
    for size in (len(shape), *shape):
        form = (form ^ size) * SECOND_FACTOR % _MODULUS
        form ^= form >> 32
    return float(form >> 12)


def portable_bits(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower and the upper 32 bits of the sum over the tiles of a contiguous vector, by PyTorch operations: float64 scalars."""
    words = TILE * stored.element_size() // 8
    total = torch.zeros((), dtype=torch.int64, device=stored.device)
    keys = _mixed(_mixed(torch.arange(1, words + 1, device=stored.device)) + 1)
    rotations = torch.arange(11, 44, 16, device=stored.device)[:, None]
    for start in range(0, len(stored), TILE * _TILES):
        part = stored[start : start + TILE * _TILES]
        memory = torch.zeros(-(-len(part) // TILE) * words, dtype=torch.int64, device=stored.device)
        memory.view(torch.uint8)[: len(part) * stored.element_size()] = part.view(torch.uint8)
        x = memory.view(-1, words) ^ keys
        both = torch.stack([(x & _LOW_HALF) * ((x >> 32) & _LOW_HALF), x])
        while (half := both.shape[-1] // 2) > 0:  # the number of words is a power of two
            both = both[..., :half].bitwise_xor_(both[..., half:])
        products, x = both[..., 0]
        rotated = (x << rotations) | ((x >> (64 - rotations)) & ((1 << rotations) - 1))
        numbers = products ^ rotated[0] ^ rotated[1] ^ rotated[2]
        indices = torch.arange(1, len(x) + 1, device=stored.device) + start // TILE
        total += _mixed(numbers ^ indices * FACTOR).sum()
    low, high = total & _LOW_HALF, (total >> 32) & _LOW_HALF
    return low.to(torch.float64), high.to(torch.float64)


def _mixed(numbers: Tensor) -> Tensor:
    products = numbers * SECOND_FACTOR
    return (products ^ ((products >> 32) & _LOW_HALF)) * FACTOR
