"""Copies of an instrumented model (copied, pickled or saved) work without hooks and without their data."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import instrument

HOOKS = {
    "seen": {"layers": "**", "kind": "forward", "action": "record"},
    "scaled": {"layers": "0", "kind": "forward_pre", "action": "scale", "factor": 3.0},
    "flow": {"layers": "**", "kind": "full_backward", "via": "module", "action": "record"},
    "own": {"layers": "**", "kind": "full_backward", "action": "record"},
    "functions": {"layers": "1", "kind": "function", "functions": "relu", "action": "record"},
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
        assert {row["hook"] for row in probe.sink.records("stats")} == HOOKS.keys() - {"scaled"}
        other(inputs).sum().backward()
        probe.end_step()
        assert len(probe.sink.rows["stats"]) == rows
