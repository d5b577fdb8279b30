"""Trap: several probes on one model exit in any order; each removes only its own hooks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import instrument

FAMILIES: dict[str, dict[str, Any]] = {
    "seen": {"layers": "*", "kind": "forward", "action": "record"},
    "own": {"layers": "*", "kind": "full_backward", "action": "record"},
    "micro": {"layers": "*", "kind": "parameter_grad_micro", "action": "record"},
    "sums": {"layers": "*", "kind": "post_accumulate_grad", "action": "record"},
    "used": {"layers": "*", "kind": "parameter_grad", "action": "record"},
    "step": {"layers": "*", "kind": "step_post", "role": "update", "action": "record"},
    "saved": {"layers": "*", "kind": "state_dict_post", "action": "record"},
    "loaded": {"layers": "*", "kind": "load_state_dict_pre", "action": "record"},
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


def hooks_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return every registered hook, by identity and in order."""
    found: list[Any] = []
    for part in (*model.modules(), optimizer):
        for name, hooks in sorted(vars(part).items()):
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(hooks, dict):
                found += [(name, key, id(hook)) for key, hook in hooks.items()]
    for parameter in model.parameters():
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            found += [(key, id(hook)) for key, hook in (hooks or {}).items()]
    return found


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, *probes: instrument.Probe) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3, requires_grad=True)).sum().backward()
    optimizer.step()
    model.load_state_dict(model.state_dict())
    for probe in probes:
        probe.end_step()


@pytest.mark.spread(1)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_probes_may_exit_in_any_order(order: tuple[int, ...]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[str] = []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[1].register_full_backward_hook(lambda *_: seen.append("backward"))
    model[0].weight.register_hook(lambda gradient: seen.append("weight"))
    optimizer.register_step_post_hook(lambda *_: seen.append("step"))
    before = hooks_of(model, optimizer)
    blocks = [instrument.attach(model, FAMILIES, optimizer=optimizer) for _ in range(3)]
    probes = [block.__enter__() for block in blocks]
    train_step(model, optimizer, *probes)
    for done, which in enumerate(order, start=1):
        blocks[which].__exit__(None, None, None)
        train_step(model, optimizer, *(probes[i] for i in order[done:]))
    assert hooks_of(model, optimizer) == before
    assert seen == ["forward", "backward", "weight", "step"] * 4
    for exit_order, which in enumerate(order):
        assert set(probes[which].sink.frame("stats").groupby("hook").step.nunique()) == {exit_order + 1}
        assert set(probes[which].sink.frame("stats").hook) == set(FAMILIES)
        assert all(row["fired"] == row["expected"] > 0 for row in probes[which].coverage())


def test_hooks_of_other_code_are_untouched() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = model[0].register_forward_hook(lambda *_: None)
    with instrument.attach(model, FAMILIES, optimizer=optimizer) as probe:
        kept: list[torch.Tensor] = []
        model[0].register_forward_hook(lambda module, args, output: kept.append(output))
        first.remove()
        train_step(model, optimizer, probe)
    assert len(model[0]._forward_hooks) == 1
    train_step(model, optimizer)
    assert len(kept) == 2
