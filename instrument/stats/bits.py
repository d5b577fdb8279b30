"""A fingerprint of the bits of a tensor, from PyTorch operations on any device."""

from __future__ import annotations

import torch
from torch import Tensor

_KEY = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as a signed number
_LOW = 0xFFFFFFFF
# Words that are hashed at once, so that the memory does not grow with the tensor. On the CPU, they fit into the cache of one core.
_CPU_WORDS, _DEVICE_WORDS = 1 << 14, 1 << 22


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a hash of the elements of a tensor and their positions, in logical order. It does not depend on strides.

    The hash is the sum over the 64-bit words w of lo32(x) * hi32(x) + x with x = w XOR (i + 1) * KEY, modulo 2^64. The last word
    is padded with zeros. NaN payloads and the sign of zero count, dtype and shape do not.

    Args:
        tensor: A strided tensor of any shape, dtype and device. It is not modified.

    Returns:
        A scalar, int64, on the device of the tensor.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    most = _CPU_WORDS if flat.is_cpu else _DEVICE_WORDS
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    keys = torch.arange(1, min(most, len(flat) // 8 + 1) + 1, device=flat.device) * _KEY
    for index, part in enumerate(flat.split(8 * most)):
        is_aligned = len(part) % 8 == part.storage_offset() % 8 == 0
        words = (part if is_aligned else torch.cat([part, part.new_zeros(-len(part) % 8)])).view(torch.int64)
        offset = (index * most * _KEY + (1 << 63)) % (1 << 64) - (1 << 63)
        x = (keys[: len(words)] + offset) ^ words
        total += ((x & _LOW) * ((x >> 32) & _LOW) + x).sum()
    return total
