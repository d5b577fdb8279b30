"""Computation of statistics by the code for accelerators, on CPU tensors, so that it is tested without a device."""

from __future__ import annotations

import pytest
from torch import Tensor

from instrument.probe.recorder import Recorder
from instrument.stats import distribution, portable


def forget_constants() -> None:
    """Clear the caches of tensors that a process creates once per device, so that a test covers their creation."""
    for cached in (portable.constants, distribution._sample_indices):
        cached.cache_clear()


def use_general_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all hooks take the general path until the end of the test, also those that record plain tensors."""
    monkeypatch.setattr("instrument.hooks.attached_hook.direct_of", lambda attached: None)


def use_device_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the statistics functions by their versions for accelerators, until the end of the test."""
    use_general_path(monkeypatch)

    def measure_distribution(tensor: Tensor, levels: tuple[float, ...], bins: int) -> Tensor:
        return distribution.distribution_on_device(tensor.detach().reshape(-1), levels, bins)

    for module in ("stats.measure", "stats.unit_statistics", "actions.intervention", "actions.measurement"):
        monkeypatch.setattr(f"instrument.{module}.is_on_host", lambda tensor: False)
    monkeypatch.setattr(Recorder, "memory", lambda self, device: self._memory.row(device))
    monkeypatch.setattr("instrument.actions.intervention.effect_of_plain", lambda before, after: None)
    monkeypatch.setattr("instrument.stats.table_rows.distribution", measure_distribution)
