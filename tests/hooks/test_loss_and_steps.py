"""Kinds loss, parameter_grad_micro and step_pre, and the order of the actions on one gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hook_runs import assert_close, run_step, scale
from torch import Tensor, nn

import instrument
from instrument import Context, HookError, Probe


class Loop:
    """One linear layer, plain SGD, two micro-batches per step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batches = [torch.randn(4, 3) for _ in range(2)]

    def step(self, hooks: dict[str, Any]) -> Probe:
        """Run a step with hooks."""
        with instrument.attach(self.model, hooks, optimizer=self.optimizer) as probe:
            for batch in self.batches:
                probe.loss(self.model(batch).square().mean()).backward()
                probe.end_micro_step()
            self.optimizer.step()
            probe.end_step()
        return probe


def micro_batch_gradients(factor: float = 1.0) -> list[Tensor]:
    loop = Loop()
    losses = (factor * loop.model(batch).square().mean() for batch in loop.batches)
    return [torch.autograd.grad(loss, loop.model.weight)[0] for loss in losses]


def test_micro_batch_gradient_is_changed_before_accumulation() -> None:
    loop = Loop()
    loop.step({"x": scale("parameter_grad_micro", 3, params="weight")})
    first, second = micro_batch_gradients()
    torch.testing.assert_close(loop.model.weight.grad, 3 * first + 3 * second)


def test_loss_is_recorded_and_scaled() -> None:
    loop = Loop()
    hooks = {
        "seen": {"kind": "loss", "action": "record"},
        "scaled": {"kind": "loss", "action": "scale", "factor": 2.0},
        "after": {"kind": "loss", "action": "record"},
    }
    probe = loop.step(hooks)
    rows = probe.sink.records("stats")
    seen, after = ([row["mean"] for row in rows if row["hook"] == name] for name in ("seen", "after"))
    assert len(seen) == 2
    assert after == pytest.approx([2 * loss for loss in seen])
    first, second = micro_batch_gradients(2.0)
    torch.testing.assert_close(loop.model.weight.grad, first + second)


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_loss_penalty_equals_the_parameter_gradient_penalty(norm: str) -> None:
    by_loss, by_hook = Loop(), Loop()
    penalty = {"layers": "**", "action": "modify", "fn": norm, "coefficient": 0.05}
    by_loss.step({"p": {**penalty, "kind": "loss"}})
    by_hook.step({"p": {**penalty, "kind": "parameter_grad_micro"}})
    assert_close(by_loss.model.parameters(), by_hook.model.parameters(), rtol=1.3e-6, atol=1e-5)


def test_loss_that_is_not_passed_to_the_probe_is_reported() -> None:
    loop, loss = Loop(), lambda output: output.square().mean()
    _, probe = run_step(loop.model, {"seen": {"kind": "loss", "action": "record"}}, loop.batches[0], loss=loss)
    assert [row["cause"] for row in probe.coverage()] == [
        "the loss was not passed to the probe: call loss = probe.loss(loss) before loss.backward()"
    ]


def test_step_pre_and_step_post_record_around_the_step() -> None:
    loop = Loop()
    before = loop.model.weight.detach().clone()
    base = {"layers": ".", "params": "weight", "role": "param", "action": "record", "tensors": True}
    probe = loop.step({"pre": {**base, "kind": "step_pre"}, "post": {**base, "kind": "step_post"}})
    pre, post = (row["values"] for row in probe.sink.records("tensors"))
    assert torch.equal(pre, before)
    assert torch.equal(post, loop.model.weight)
    assert not torch.equal(pre, post)


def test_step_pre_sees_the_gradient_after_parameter_grad_in_any_order_of_the_specs() -> None:
    base = {"layers": ".", "params": "weight"}
    record = {**base, "kind": "step_pre", "role": "param_grad", "action": "record"}
    clear = {**base, "kind": "parameter_grad", "action": "modify", "fn": "zero"}
    for hooks in ({"seen": record, "clear": clear}, {"clear": clear, "seen": record}):
        assert [row["l2"] for row in Loop().step(hooks).sink.records("stats")] == [0.0]


def test_step_post_changes_the_optimizer_state() -> None:
    loop = Loop()
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1, momentum=0.9)
    hook = {"layers": "**", "kind": "step_post", "role": "state.momentum_buffer", "action": "modify", "fn": "zero"}
    loop.step({"forget": hook})
    assert all(not state["momentum_buffer"].any() for state in loop.optimizer.state.values())


def failing(tensor: Tensor, context: Context) -> Tensor:
    if context.path == "bias":
        raise ValueError("no")
    return tensor * 2


def test_failing_function_leaves_all_gradients_unchanged() -> None:
    loop = Loop()
    function = {"_target_": f"{__name__}.failing"}
    hook = {"layers": "**", "kind": "parameter_grad", "action": "modify", "fn": function}
    weight = loop.model.weight.detach().clone()
    with pytest.raises(HookError, match=r"hook 'mine' \(parameter_grad\) on layer '.', param_grad 'bias' at step 0"):
        loop.step({"mine": hook})
    first, second = micro_batch_gradients()
    assert torch.equal(loop.model.weight.grad, first + second)
    assert torch.equal(loop.model.weight, weight)


@pytest.mark.parametrize(("prepend", "order"), [(False, ["theirs", "ours"]), (True, ["ours", "theirs"])])
def test_prepend_puts_a_hook_before_existing_ones(prepend: bool, order: list[str]) -> None:
    calls = []
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda *_: calls.append("theirs"))
    fn = lambda tensor, context: (calls.append("ours"), tensor.clone())[1]  # noqa: E731
    hook = {"layers": ".", "kind": "forward", "prepend": prepend, "action": "modify", "fn": fn}
    run_step(model, {"ours": hook}, torch.zeros(1, 2))
    assert calls == order


def test_several_losses_of_one_step_have_call_numbers() -> None:
    model = nn.Linear(2, 1)
    with instrument.attach(model, {"loss": {"kind": "loss", "action": "record", "stats": ["mean"]}}) as probe:
        for value in (1.0, 2.0):
            probe.loss(torch.tensor(value))
        probe.end_step()
        probe.loss(torch.tensor(3.0))
        probe.end_step()
    assert [(row["step"], row["call"], row["mean"]) for row in probe.sink.records("stats")] == [
        (0, 0, 1.0),
        (0, 1, 2.0),
        (1, 0, 3.0),
    ]
