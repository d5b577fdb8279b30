"""`keep_as` with activation checkpointing: a use for which gradients would be wrong is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hook_runs import assert_close
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instrument
from instrument import Context, HookError

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
CANNOT = "cannot be used with this activation checkpoint"
RECORD = {"action": "record", "keep_as": "k"}
SCALE = {"action": "scale", "factor": 3.0, "keep_as": "k"}


class Checkpointed(nn.Module):
    """Runs layers 0 to 3. Those from `start` to `stop` are one checkpoint; `reentrant` None disables it."""

    def __init__(self, start: int = 0, stop: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Sigmoid()).double()
        self.start, self.stop = start, stop
        self.reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[: self.start](x)
        middle = self.layers[self.start : self.stop]
        x = middle(x) if self.reentrant is None else checkpoint(middle, x, use_reentrant=self.reentrant)
        return self.layers[self.stop :](x)


def use(tensor: Tensor, context: Context) -> Tensor:
    return tensor * context.tensors["k"]["layers.0"]


def use_all(tensor: Tensor, context: Context) -> Tensor:
    return tensor * torch.stack([*context.tensors["k"].values()]).sum(0)


def gradients(model: Checkpointed, reentrant: bool | None, hooks: dict[str, Any], backwards: int = 1) -> list[Tensor]:
    """Return the gradients of two calls before one backward pass, at each of two steps."""
    model = copy.deepcopy(model)
    model.reentrant = reentrant
    first, second = (torch.randn(3, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(2))
    found = []
    with instrument.attach(model, hooks) as probe:
        for _ in range(2):
            leaves = first.clone().requires_grad_(), second.clone().requires_grad_()
            model.zero_grad()
            loss = model(leaves[0]).sum() + model(leaves[1]).square().sum()
            for i in range(backwards):
                loss.backward(retain_graph=i < backwards - 1)
            found += [each.grad.clone() for each in (*model.parameters(), *leaves) if each.grad is not None]
            probe.end_step()
    return found


def hooks_at(keeper: int, consumer: int, keep: dict[str, Any] = RECORD, fn: Any = use) -> dict[str, Any]:
    return {
        "keep": {"layers": f"layers.{keeper}", "kind": "forward", **keep},
        "use": {"layers": f"layers.{consumer}", "kind": "forward", "action": "modify", "fn": fn},
    }


@pytest.mark.spread(3)
@REENTRANT
@pytest.mark.parametrize("keep", [RECORD, SCALE], ids=["record", "scale"])
@pytest.mark.parametrize("start", [0, 2], ids=["kept inside", "kept outside"])
@pytest.mark.parametrize("fn", [use, use_all])
def test_use_in_a_checkpoint_is_refused(reentrant: bool, keep: dict[str, Any], start: int, fn: Any) -> None:
    with pytest.raises(HookError, match=rf"hook 'use' .*'k' at 'layers.0' {CANNOT}"):
        gradients(Checkpointed(start=start), reentrant, hooks_at(0, 3, keep, fn))


def test_kept_tensors_of_an_evaluation_with_checkpoints_are_available() -> None:
    model, x = Checkpointed(), torch.ones(3, 4).double().requires_grad_()
    with instrument.attach(model, hooks_at(0, 3)), torch.no_grad():
        expected = model(x)
        model.reentrant = True
        assert torch.equal(model(x), expected)


def test_use_after_a_reentrant_checkpoint_is_refused() -> None:
    """Its first pass has no graph, so the gradient would be lost. Another checkpoint keeps the graph."""
    model, hooks = Checkpointed(stop=2), hooks_at(0, 3)
    with pytest.raises(HookError, match=CANNOT):
        gradients(model, True, hooks)
    assert_close(gradients(model, False, hooks), gradients(model, None, hooks), rtol=1e-12, atol=1e-13)


def test_kept_gradient_of_a_reentrant_checkpoint_is_available() -> None:
    use_gradient = lambda tensor, context: tensor * context.tensors["k"]["layers.3"]  # noqa: E731
    hooks = {
        "keep": {"layers": "layers.3", "kind": "tensor", **RECORD},
        "use": {"layers": "layers.0", "kind": "tensor", "action": "modify", "fn": use_gradient},
    }
    model = Checkpointed()
    assert_close(gradients(model, True, hooks), gradients(model, False, hooks), rtol=1e-12, atol=1e-13)


def test_record_hook_without_statistics_only_keeps() -> None:
    model, x = Checkpointed(), torch.ones(3, 4, dtype=torch.float64)
    early = model.layers[0](x)
    with instrument.attach(model, hooks_at(0, 2, {**RECORD, "stats": "none"})) as probe:
        changed = model(x)
        probe.end_step()
    assert torch.equal(changed, model.layers[3](model.layers[2](model.layers[1](early)) * early))
    assert not probe.sink.records("stats")
    assert {row["hook"]: row["fired"] for row in probe.sink.records("coverage")} == {"keep": 1, "use": 1}
