"""The fingerprint of the bits of a tensor: arithmetic in Python integers is the right value."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from instrument.stats import bits
from instrument.stats.bits import fingerprint

KEY, ALL = 0x9E3779B97F4A7C15, 2**64 - 1


def expected(tensor: Tensor) -> int:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    data += b"\0" * (-len(data) % 8)
    total = 0
    for i in range(len(data) // 8):
        x = int.from_bytes(data[8 * i : 8 * i + 8], "little") ^ ((i + 1) * KEY & ALL)
        total += (x & 0xFFFFFFFF) * (x >> 32) + x
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(1000),
        torch.randn(7, 5).T,
        torch.randn(10)[1:],
        torch.tensor(True),
        torch.empty(0),
        torch.randn(5, dtype=torch.complex64),
        torch.randn(9).bfloat16(),
        torch.arange(5),
        torch.randn(()).expand(3, 3),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ],
)
def test_fingerprint_is_the_documented_sum(tensor: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "_CPU_WORDS", 16)
    assert int(fingerprint(tensor)) == expected(tensor)


def test_fingerprint_sees_zeros_nan_payloads_and_positions() -> None:
    one = torch.tensor([0.0, 1.0, 2.0, math.nan])
    payload = one.view(torch.int32).clone()
    payload[3] += 1
    others = [
        one.view(torch.int32).neg().view(torch.float32),
        one[[0, 2, 1, 3]],
        one.roll(1),
        payload.view(torch.float32),
    ]
    others.append(torch.tensor([-0.0, 1.0, 2.0, math.nan]))
    assert len({int(fingerprint(each)) for each in (one, *others)}) == 6
