"""Activation patching: tensors recorded in one run are put into another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instrument
from instrument import ConfigError, HookError


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def run(model: nn.Module, hooks: dict[str, Any], out: Path | None = None, steps: int = 2) -> list[Tensor]:
    batch = torch.ones(5, 3)
    with instrument.attach(model, hooks, out=out) as probe:
        outputs = []
        for _ in range(steps):
            outputs.append(model(batch).detach())
            probe.end_step()
    return outputs


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    keep = {"layers": "*", "kind": "forward", "action": "record", "tensors": True}
    run(model_of(0), {"kept": keep}, tmp_path / "clean")
    return tmp_path / "clean"


def patched(run_folder: Path, **more: Any) -> dict[str, Any]:
    return {"p": {"layers": "0", "kind": "forward", "action": "modify", "run": str(run_folder), **more}}


def test_what_comes_after_a_replaced_activation_is_the_other_runs(clean: Path) -> None:
    other = model_of(1)
    other[2].load_state_dict(model_of(0)[2].state_dict())
    assert torch.equal(run(other, patched(clean, fn="replace"))[1], run(model_of(0), {})[1])


def test_a_part_alone_is_patched(clean: Path) -> None:
    seen: dict[str, Any] = patched(clean, fn="patch", slice=":, 0:1")
    seen["after"] = {"layers": "0", "kind": "forward", "action": "record", "tensors": True}
    other, original = model_of(1), model_of(0)
    batch = torch.ones(5, 3)
    with instrument.attach(other, seen) as probe:
        other(batch)
        probe.end_step()
    (row,) = probe.sink.records("tensors")
    assert torch.equal(row["values"][:, 0], original[0](batch)[:, 0])
    assert torch.equal(row["values"][:, 1:], other[0](batch)[:, 1:])


def test_a_step_that_was_not_recorded_is_told(clean: Path) -> None:
    with pytest.raises(HookError, match=r"hook 'p' .*holds no tensor of step 9"):
        run(model_of(1), patched(clean, fn="replace", step=9))


def test_several_hooks_that_kept_it_have_to_be_told_apart(tmp_path: Path) -> None:
    keep = {"layers": "0", "kind": "forward", "action": "record", "tensors": True}
    run(model_of(0), {"one": keep, "two": keep}, tmp_path / "both")
    with pytest.raises(HookError, match="2 tensors, by the hooks one, two"):
        run(model_of(1), patched(tmp_path / "both", fn="replace"))
    run(model_of(1), patched(tmp_path / "both", fn="replace", hook="two"))


@pytest.mark.parametrize("kind", ["nowhere", "empty"])
def test_a_run_that_is_not_there_or_kept_no_tensors_is_a_mistake(tmp_path: Path, kind: str) -> None:
    if kind == "empty":
        run(model_of(0), {"s": {"layers": "0", "kind": "forward", "action": "record"}}, tmp_path / "empty")
    with pytest.raises(ConfigError) as caught:
        run(model_of(1), patched(tmp_path / kind, fn="replace"))
    assert caught.value.mistakes[0].where == "hooks.p.run"
