"""Trap: gradient accumulation has a micro-batch gradient, a running sum, and the gradient that the optimizer uses."""

from __future__ import annotations

import copy

import torch
from hook_runs import assert_equal
from torch import Tensor, nn

import instrument

MICRO_BATCHES = 3
KEEP = {"layers": ".", "params": "weight", "action": "record", "stats": "none", "tensors": True}


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 3) for _ in range(MICRO_BATCHES)]


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def train(specs: dict[str, object], announce: bool = True) -> tuple[instrument.Probe, nn.Linear]:
    """Run one step of three micro-batches; `announce` says whether the loop calls `end_micro_step`."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instrument.attach(model, specs, optimizer=optimizer) as probe:
        for batch in batches():
            (model(batch).square().sum() / MICRO_BATCHES).backward()
            if announce:
                probe.end_micro_step()
        optimizer.step()
        probe.end_step()
    return probe, model


def micro_batch_gradients() -> list[Tensor]:
    gradients = []
    for batch in batches():
        model = net()
        (model(batch).square().sum() / MICRO_BATCHES).backward()
        gradients.append(model.weight.grad)
    return gradients


def test_each_kind_records_its_gradient() -> None:
    kinds = ["parameter_grad_micro", "post_accumulate_grad", "parameter_grad", "forward", "full_backward_pre"]
    probe, _ = train(
        {kind: {**KEEP, "kind": kind} for kind in kinds[:3]} | {k: {**KEEP, "kind": k, "params": []} for k in kinds[3:]}
    )
    rows = {(row["hook"], row["micro_step"]): row["values"] for row in probe.sink.records("tensors")}
    own = micro_batch_gradients()
    sums = [own[0], own[0] + own[1], own[0] + own[1] + own[2]]
    assert sorted(rows) == sorted(
        [(kind, i) for kind in kinds if kind != "parameter_grad" for i in range(MICRO_BATCHES)]
        + [("parameter_grad", MICRO_BATCHES - 1)]
    )
    for i in range(MICRO_BATCHES):
        assert torch.equal(rows["parameter_grad_micro", i], own[i])
        assert torch.equal(rows["post_accumulate_grad", i], sums[i])
    assert torch.equal(rows["parameter_grad", MICRO_BATCHES - 1], sums[-1])
    assert not any(row["cause"] for row in probe.coverage())


def test_clip_applies_to_the_accumulated_gradient() -> None:
    """Once per step, of the accumulated gradient, not of each micro-batch gradient."""
    bound = 0.25
    _, trained = train({"clip": {"layers": "**", "kind": "parameter_grad", "action": "clip", "norm": bound}})
    wanted = net()
    optimizer = torch.optim.SGD(wanted.parameters(), lr=0.1)
    for batch in batches():
        (wanted(batch).square().sum() / MICRO_BATCHES).backward()
    before = nn.utils.clip_grad_norm_(wanted.parameters(), bound)
    optimizer.step()
    assert before > bound
    assert_equal(trained.parameters(), wanted.parameters())
    _, each = train({"clip": {"layers": "**", "kind": "parameter_grad_micro", "action": "clip", "norm": bound}})
    assert not torch.equal(each.weight, wanted.weight)


def test_loop_without_end_micro_step_loses_nothing() -> None:
    specs = {
        "micro": {**KEEP, "kind": "parameter_grad_micro"},
        "boundary": {**KEEP, "kind": "parameter_grad"},
        "seen": {"layers": ".", "kind": "forward", "action": "record"},
    }
    probe, model = train(specs, announce=False)
    announced, same = train(specs)
    assert torch.equal(model.weight, same.weight)
    for hook in ("micro", "boundary"):
        trained, wanted = (
            [row["values"] for row in each.sink.records("tensors") if row["hook"] == hook]
            for each in (probe, announced)
        )
        assert len(trained) == len(wanted)
        assert all(map(torch.equal, trained, wanted))
    passes = [row["backward"] for row in probe.sink.records("tensors") if row["hook"] == "micro"]
    assert passes == list(range(MICRO_BATCHES))
    calls = probe.sink.frame("stats").call.tolist()
    assert calls == list(range(MICRO_BATCHES))
    assert not probe.warnings


def test_recording_does_not_change_the_accumulated_gradient() -> None:
    kinds = ["parameter_grad_micro", "post_accumulate_grad", "parameter_grad", "full_backward", "tensor"]
    _, trained = train({kind: {"layers": ".", "kind": kind, "action": "record"} for kind in kinds})
    _, baseline = train({})
    assert torch.equal(trained.weight, baseline.weight)
    assert torch.equal(copy.copy(trained.weight.grad), baseline.weight.grad)
