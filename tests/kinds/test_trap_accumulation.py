"""Trap: with gradient accumulation there are a micro-batch's gradient, a running sum, and what the optimizer will use."""

from __future__ import annotations

import copy

import torch
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


def train(specs: dict[str, object], tell: bool = True) -> tuple[instrument.Probe, nn.Linear]:
    """One step of three micro-batches; the loop may leave out saying where one ends."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instrument.attach(model, specs, optimizer=optimizer) as probe:
        for batch in batches():
            (model(batch).square().sum() / MICRO_BATCHES).backward()
            if tell:
                probe.end_micro_step()
        optimizer.step()
        probe.end_step()
    return probe, model


def own_gradients() -> list[Tensor]:
    gradients = []
    for batch in batches():
        model = net()
        (model(batch).square().sum() / MICRO_BATCHES).backward()
        gradients.append(model.weight.grad)
    return gradients


def test_each_kind_sees_what_its_name_says() -> None:
    kinds = ["parameter_grad_micro", "post_accumulate_grad", "parameter_grad", "forward", "full_backward_pre"]
    probe, _ = train(
        {kind: {**KEEP, "kind": kind} for kind in kinds[:3]} | {k: {**KEEP, "kind": k, "params": []} for k in kinds[3:]}
    )
    rows = {(row["hook"], row["micro_step"]): row["values"] for row in probe.sink.records("tensors")}
    own = own_gradients()
    sums = [own[0], own[0] + own[1], own[0] + own[1] + own[2]]
    assert sorted(rows) == sorted(
        [(kind, i) for kind in kinds if kind != "parameter_grad" for i in range(MICRO_BATCHES)]
        + [("parameter_grad", MICRO_BATCHES - 1)]
    )
    for i in range(MICRO_BATCHES):
        assert torch.equal(rows["parameter_grad_micro", i], own[i])
        assert torch.equal(rows["post_accumulate_grad", i], sums[i])
    assert torch.equal(rows["parameter_grad", MICRO_BATCHES - 1], sums[-1])


def test_a_clip_is_of_the_gradient_that_the_optimizer_will_use() -> None:
    """As the textbook has it: once a step, of the accumulated gradient, and not of each micro-batch's."""
    bound = 0.25
    _, mine = train({"clip": {"layers": "**", "kind": "parameter_grad", "action": "clip", "norm": bound}})
    wanted = net()
    optimizer = torch.optim.SGD(wanted.parameters(), lr=0.1)
    for batch in batches():
        (wanted(batch).square().sum() / MICRO_BATCHES).backward()
    before = nn.utils.clip_grad_norm_(wanted.parameters(), bound)
    optimizer.step()
    assert before > bound
    assert torch.equal(mine.weight, wanted.weight)
    assert torch.equal(mine.bias, wanted.bias)
    _, each = train({"clip": {"layers": "**", "kind": "parameter_grad_micro", "action": "clip", "norm": bound}})
    assert not torch.equal(each.weight, wanted.weight)


def test_a_loop_that_does_not_tell_its_micro_steps_loses_nothing() -> None:
    specs = {
        "micro": {**KEEP, "kind": "parameter_grad_micro"},
        "boundary": {**KEEP, "kind": "parameter_grad"},
        "seen": {"layers": ".", "kind": "forward", "action": "record"},
    }
    probe, model = train(specs, tell=False)
    told, same = train(specs)
    assert torch.equal(model.weight, same.weight)
    for hook in ("micro", "boundary"):
        mine, wanted = (
            [row["values"] for row in each.sink.records("tensors") if row["hook"] == hook] for each in (probe, told)
        )
        assert len(mine) == len(wanted)
        assert all(map(torch.equal, mine, wanted))
    passes = [row["backward"] for row in probe.sink.records("tensors") if row["hook"] == "micro"]
    assert passes == list(range(MICRO_BATCHES))
    calls = probe.sink.frame("stats").call.tolist()
    assert calls == list(range(MICRO_BATCHES))
    assert not probe.warnings


def test_recording_leaves_the_accumulated_gradient_as_it_is() -> None:
    kinds = ["parameter_grad_micro", "post_accumulate_grad", "parameter_grad", "full_backward", "tensor"]
    _, mine = train({kind: {"layers": ".", "kind": kind, "action": "record"} for kind in kinds})
    _, bare = train({})
    assert torch.equal(mine.weight, bare.weight)
    assert torch.equal(copy.copy(mine.weight.grad), bare.weight.grad)
