"""Runs of a model with hooks: forward passes, and training on the mean square of the output."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

import instrument
from instrument import Probe
from instrument.integrations.attached_probe import AttachedProbe


def forward_steps(
    model: nn.Module, hooks: Any, batches: Iterable[Any], *, sample_ids: Iterable[Any] = (), **options: Any
) -> AttachedProbe:
    """Call a model in one step for each batch, and return the probe.

    The ids of the samples of a batch may be None. The other options are those of `instrument.attach`.
    """
    with instrument.attach(model, hooks, **options) as probe:
        for batch, names in zip_longest(batches, sample_ids):
            if names is not None:
                probe.batch(ids=names)
            model(batch)
            probe.end_step()
    return probe


def train_steps(
    model: nn.Module,
    hooks: Any,
    batches: Iterable[Tensor],
    *,
    sample_ids: Iterable[Any] = (),
    lr: float = 0.1,
    **options: Any,
) -> AttachedProbe:
    """Train a model with SGD in one step for each batch, and return the probe. The options are those of `forward_steps`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with instrument.attach(model, hooks, optimizer=optimizer, **options) as probe:
        for batch, names in zip_longest(batches, sample_ids):
            if names is not None:
                probe.batch(ids=names)
            train_step(model, optimizer, probe, batch)
    return probe


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Probe, batch: Tensor) -> None:
    """Train a model with one batch. The loss is the mean square of the output."""
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    probe.end_step(loss=loss, samples=len(batch))
