"""`keep_as` with activation checkpointing: gradients equal those of the model without checkpointing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hook_runs import assert_close, run_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instrument
from instrument import Context, HookError

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
CANNOT = "cannot be used across activation checkpoints"
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


@REENTRANT
@pytest.mark.parametrize("keep", [RECORD, SCALE], ids=["record", "scale"])
@pytest.mark.parametrize("fn", [use, use_all])
def test_tensor_of_the_same_checkpoint_gives_the_gradients_without_it(
    reentrant: bool, keep: dict[str, Any], fn: Any
) -> None:
    model = Checkpointed()
    hooks = hooks_at(0, 3, keep, fn)
    expected = gradients(model, None, hooks)
    found = gradients(model, reentrant, hooks)
    assert len(found) == len(expected) == 12
    assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_second_backward_pass_recomputes_the_kept_tensor() -> None:
    model, hooks = Checkpointed(), hooks_at(0, 3)
    assert_close(gradients(model, False, hooks, 2), gradients(model, None, hooks, 2), rtol=1e-12, atol=1e-13)


@REENTRANT
def test_record_hook_that_keeps_writes_no_second_row(reentrant: bool) -> None:
    model = Checkpointed()
    model.reentrant = reentrant
    _, probe = run_step(model, hooks_at(0, 3), torch.ones(3, 4).double().requires_grad_(), loss=torch.sum)
    (row,) = probe.sink.records("stats")
    assert not row["recompute"]
    assert [(row["fired"], row["expected"]) for row in probe.coverage()] == [(1, 1)] * 2


@REENTRANT
@pytest.mark.parametrize("fn", [use, use_all])
def test_use_in_a_checkpoint_of_a_tensor_from_outside_is_refused(reentrant: bool, fn: Any) -> None:
    with pytest.raises(HookError, match=rf"hook 'use' .*'k' at 'layers.0' {CANNOT}"):
        gradients(Checkpointed(start=2), reentrant, hooks_at(0, 3, fn=fn))


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


@REENTRANT
@pytest.mark.parametrize("keep", [RECORD, SCALE], ids=["record", "scale"])
def test_result_of_a_function_in_the_same_checkpoint_is_kept(reentrant: bool, keep: dict[str, Any]) -> None:
    use_relu = lambda tensor, context: tensor * context.tensors["k"]["layers.1.relu.0"]  # noqa: E731
    function = {"layers": "layers.*", "kind": "function"}
    hooks = {
        "keep": {**function, "functions": "relu", **keep},
        "use": {**function, "functions": "sigmoid", "action": "modify", "fn": use_relu},
    }
    model = Checkpointed()
    assert_close(gradients(model, reentrant, hooks), gradients(model, None, hooks), rtol=1e-12, atol=1e-13)
