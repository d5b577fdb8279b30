"""Copies of an instrumented model (copied, pickled or saved) work without hooks and without their data."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import instrument

HOOKS = {
    "seen": {"layers": "**", "kind": "forward", "action": "record"},
    "scaled": {"layers": "0", "kind": "forward_pre", "action": "scale", "factor": 3.0},
    "flow": {"layers": "**", "kind": "full_backward", "via": "module", "action": "record"},
    "own": {"layers": "**", "kind": "full_backward", "action": "record"},
    "sums": {"layers": "**", "kind": "post_accumulate_grad", "action": "record"},
}


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, nn.Module)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved])
def test_copy_of_a_hooked_model_has_no_hooks(copied: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    inputs = torch.randn(2, 3, requires_grad=True)
    baseline = model(inputs).detach()
    with instrument.attach(model, HOOKS) as probe:
        other = copied(model)
        output = other(inputs)
        assert torch.equal(output, baseline)
        output.sum().backward()
        assert not any(probe.sink.rows[table] for table in ("stats", "effects"))
        model(inputs).sum().backward()
        probe.end_step()
        rows = len(probe.sink.rows["stats"])
        assert {row["hook"] for row in probe.sink.records("stats")} == {"seen", "flow", "own", "sums"}
        other(inputs).sum().backward()
        probe.end_step()
        assert len(probe.sink.rows["stats"]) == rows


@pytest.mark.parametrize("kept_by", ["AveragedModel", "forward hook", "step hook"])
def test_averages_of_weights_are_those_of_an_uninstrumented_training(kept_by: str) -> None:
    record = {name: spec for name, spec in HOOKS.items() if spec["action"] == "record"}

    def train(*, is_recorded: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        means = [parameter.detach().clone() for parameter in model.parameters()]

        def update(*_: object) -> None:
            for mean, parameter in zip(means, model.parameters(), strict=True):
                mean.lerp_(parameter.detach(), 0.1)

        with instrument.attach(model, record, optimizer=optimizer) if is_recorded else nullcontext() as probe:
            averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
            if kept_by != "AveragedModel":
                (optimizer.register_step_post_hook if "step" in kept_by else model[1].register_forward_hook)(update)
            for inputs in torch.randn(4, 5, 3).requires_grad_():
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
                averaged.update_parameters(model)
                if probe is not None:
                    probe.end_step()
        assert probe is None or [row["call"] for row in probe.sink.records("stats")].count(0) == len(probe.stats)
        return [*averaged.state_dict().values(), averaged(torch.ones(2, 3)), *means]

    baseline, recorded = train(is_recorded=False), train(is_recorded=True)
    assert all(torch.equal(one, other) for one, other in zip(baseline, recorded, strict=True))
