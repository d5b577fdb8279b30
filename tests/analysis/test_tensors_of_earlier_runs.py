"""Activation patching: tensors recorded in one run replace those of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attached_runs import forward_steps
from hook_runs import run_step
from torch import Tensor, nn

import instrument
from instrument import ConfigError, HookError
from instrument.actions.base import Context, StepContext
from instrument.analysis.run_tables import RunTables
from instrument.analysis.tensors_of_earlier_runs import RunArchive

KEEP = {"layers": "0", "kind": "forward", "action": "record", "tensors": True}


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
    run(model_of(0), {"kept": {**KEEP, "layers": "*"}}, tmp_path / "clean")
    return tmp_path / "clean"


def patch_hook(run_folder: Path, **more: Any) -> dict[str, Any]:
    return {"p": {"layers": "0", "kind": "forward", "action": "modify", "run": str(run_folder), **more}}


def test_replaced_activation_determines_later_layers(clean: Path) -> None:
    other = model_of(1)
    other[2].load_state_dict(model_of(0)[2].state_dict())
    assert torch.equal(run(other, patch_hook(clean, fn="replace"))[1], run(model_of(0), {})[1])


def test_slice_of_an_activation_is_patched(clean: Path) -> None:
    seen: dict[str, Any] = {**patch_hook(clean, fn="patch", slice=":, 0:1"), "after": KEEP}
    other, original, batch = model_of(1), model_of(0), torch.ones(5, 3)
    _, probe = run_step(other, seen, batch)
    (row,) = probe.sink.records("tensors")
    assert torch.equal(row["values"][:, 0], original[0](batch)[:, 0])
    assert torch.equal(row["values"][:, 1:], other[0](batch)[:, 1:])


def test_tensor_of_another_phase_requires_its_hook(clean: Path) -> None:
    fields = {"fn": "replace", "phase": "eval", "step": 0}
    other = model_of(1)
    with instrument.attach(other, patch_hook(clean, **fields)) as probe, probe.in_phase("eval"):
        message = (
            "no tensor of step 0 at .*phase 'eval'.*, but one of hook 'kept' in phase 'train'; set 'hook' to use it"
        )
        with pytest.raises(HookError, match=message):
            other(torch.ones(5, 3))
    with instrument.attach(other, patch_hook(clean, hook="kept", **fields)) as probe, probe.in_phase("eval"):
        other(torch.ones(5, 3))
    assert len(probe.sink.records("effects")) == 1


def test_unrecorded_step_and_several_recording_hooks_are_reported(tmp_path: Path) -> None:
    run(model_of(0), {"one": KEEP, "two": KEEP}, tmp_path / "both")
    with pytest.raises(HookError, match=r"hook 'p' .*has no tensor of step 9"):
        run(model_of(1), patch_hook(tmp_path / "both", fn="replace", step=9))
    with pytest.raises(HookError, match=r"ambiguous: .*2 tensors \(hooks one, two\) of step 0 .*; set 'hook'"):
        run(model_of(1), patch_hook(tmp_path / "both", fn="replace"))
    run(model_of(1), patch_hook(tmp_path / "both", fn="replace", hook="two"))


@pytest.mark.parametrize("kind", ["nowhere", "empty"])
def test_missing_run_or_run_without_tensors_is_an_error(tmp_path: Path, kind: str) -> None:
    if kind == "empty":
        run(model_of(0), {"s": {"layers": "0", "kind": "forward", "action": "record"}}, tmp_path / "empty")
    with pytest.raises(ConfigError) as caught:
        run(model_of(1), patch_hook(tmp_path / kind, fn="replace"))
    assert caught.value.problems[0].where == "hooks.p.run"


def test_tensors_of_a_step_are_read_and_pinned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Identity())
    forward_steps(
        model, {"kept": KEEP}, [torch.full((2, 3), float(step)) for step in range(10)], out=tmp_path / "clean"
    )
    run = str(tmp_path / "clean")
    done: list[str] = []
    read = RunTables.tensors
    monkeypatch.setattr(
        RunTables, "tensors", lambda tables, **where: (done.append(f"read {where['step']}"), read(tables, **where))[1]
    )
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: (done.append(f"pin {tensor[0, 0]:.0f}"), tensor)[1])
    archive = RunArchive()
    archive.open(run, "kept", "hooks.p")
    for step in (0, 2, 4, 3):
        moment = StepContext(step, 0, 0, "train")
        context = Context("p", "forward", "output", "0", nn.Identity(), "", moment)
        found = [archive.find(run, "kept", None, context, pinned=True) for _ in range(2)]
        assert found[0] is found[1], "each is prepared once"
        assert torch.equal(found[0], torch.full((2, 3), float(step)))
    assert done == [f"{what} {step}" for step in (0, 2, 4, 3) for what in ("read", "pin")]


def test_run_that_is_still_recorded_is_read_step_by_step(tmp_path: Path) -> None:
    model, other = model_of(0), model_of(1)
    with instrument.attach(model, {"kept": KEEP}, out=tmp_path / "clean") as recording:
        model(torch.zeros(5, 3))
        recording.end_step()
        with instrument.attach(other, patch_hook(tmp_path / "clean", fn="replace")) as probe:
            for step in range(5):
                batch = torch.full((5, 3), float(step))
                output = other(batch)
                probe.end_step()
                model(batch + 1)
                recording.end_step()
                recorded = nn.functional.linear(batch, model[0].weight, model[0].bias)
                assert torch.equal(output, other[2](recorded.relu()))


def test_other_path_of_the_same_layer_is_reported(tmp_path: Path, clean: Path) -> None:
    """The message has the path, and the recorded paths and shapes of the layer."""
    relu = {"layers": "1", "kind": "function", "functions": "relu"}
    run(model_of(0), {"kept": {**relu, "action": "record", "tensors": True}}, tmp_path / "functions")
    mean = {"action": "modify", "fn": "mean_ablate"}
    message = r"no tensors of layer '1' with role 'output' and path 'relu\.0'\n(.|\n)*allowed .*1 \[5, 4\]"
    with pytest.raises(ConfigError, match=message):
        run(model_of(0), {"h": {**relu, **mean, "run": str(clean)}})
    message = r"no tensors of layer '1' with role 'output' and path ''\n(.|\n)*allowed .*1 relu\.0 \[5, 4\]"
    with pytest.raises(ConfigError, match=message):
        run(model_of(0), {"h": {"layers": "1", "kind": "forward", **mean, "run": str(tmp_path / "functions")}})


def test_folder_of_several_runs_is_refused(clean: Path) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a run") as refused:
        run(model_of(1), patch_hook(clean.parent, fn="replace"))
    assert refused.value.problems[0].where == "hooks.p.run"
    assert refused.value.problems[0].allowed == str(clean)
