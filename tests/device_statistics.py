"""Computation of statistics by the code for accelerators, on CPU tensors, so that it is tested without a device."""

from __future__ import annotations

import pytest
from torch import Tensor

from instrument.stats import device_numbers, device_operations, distribution
from instrument.stats.device_numbers import DeviceNumbers
from instrument.stats.device_operations import measure_by_operations
from instrument.stats.flatten import as_vector
from instrument.stats.unit_statistics import dead_fraction_on_device, saturated_fraction_on_device


def forget_constants() -> None:
    """Clear the caches of tensors that a process creates once per device, so that a test covers their creation."""
    for cached in (device_numbers.constants, device_operations._boundaries, distribution._sample_indices):
        cached.cache_clear()


def use_general_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all hooks take the general path until the end of the test, also those that record plain tensors."""
    for kind in ("PlainRecord", "PlainIntervention"):
        monkeypatch.setattr(f"instrument.kinds.plain_record.{kind}.of", lambda attached: None)


def use_device_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the statistics functions by their versions for accelerators, until the end of the test."""
    use_general_path(monkeypatch)

    def measure(tensor: Tensor, names: tuple[str, ...]) -> DeviceNumbers:
        return measure_by_operations(as_vector(tensor), names)

    def measure_distribution(tensor: Tensor, levels: tuple[float, ...], bins: int) -> DeviceNumbers:
        return distribution.distribution_on_device(tensor.detach().reshape(-1), levels, bins)

    for module in ("actions.measurement", "actions.intervention", "actions.condition", "stats.unit_statistics"):
        monkeypatch.setattr(f"instrument.{module}.measure", measure)
    monkeypatch.setattr("instrument.actions.intervention.effect_of_plain", lambda before, after: None)
    monkeypatch.setattr("instrument.stats.table_rows.distribution", measure_distribution)
    monkeypatch.setattr("instrument.actions.measurement.dead_fraction", dead_fraction_on_device)
    monkeypatch.setattr("instrument.actions.measurement.saturated_fraction", saturated_fraction_on_device)
