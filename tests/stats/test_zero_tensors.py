"""Zero tensors without memory, as the gradient of `sgn` is one."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

import instrument
from instrument.stats.cpu_kernel import add_to_bins
from instrument.stats.fingerprint import fingerprint
from instrument.stats.measure import measure_statistics


def zero_tensor() -> Tensor:
    x = torch.rand(4, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(x.sgn().sum(), x)
    assert gradient._is_zerotensor()
    return gradient


def test_statistics_are_those_of_zeros() -> None:
    assert measure_statistics(zero_tensor(), ("min", "max", "mean", "std", "l2", "nan_count")) == [0, 0, 0, 0, 0, 0]
    assert fingerprint(zero_tensor()) == fingerprint(torch.zeros(4, 3))
    assert not add_to_bins(zero_tensor().view(-1), 0, 1, np.zeros(2, np.int64))


def test_gradient_without_memory_is_recorded() -> None:
    class Sign(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sgn()

    model = nn.Sequential(nn.Linear(3, 3), Sign())
    hooks = {"gradients": {"layers": "1", "kind": "full_backward", "action": "record"}}
    with instrument.attach(model, hooks) as probe:
        with probe.record_operators():
            model(torch.rand(2, 3)).sum().backward()
        probe.end_step()
    assert [*probe.run.stats["l2"]] == [0.0]
    assert (probe.run.operators["l2"] >= 0).any()
