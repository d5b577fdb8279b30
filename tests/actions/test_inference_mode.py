"""Under torch.inference_mode() every intervention gives the same result as under torch.no_grad()."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hook_runs import Calls, record, run_steps, scale
from torch import Tensor, nn

import instrument
from instrument import HookResultError

RECORDED = {"run": "recorded", "step": 0}
ACTIONS: dict[str, dict[str, Any]] = {
    "clip by value": {"action": "clip", "value": 0.1},
    "clip between": {"action": "clip", "min": 0.0, "max": 0.2},
    "clip by norm": {"action": "clip", "norm": 0.1},
    "clip by norm of each sample": {"action": "clip", "norm": 0.1, "scope": "sample"},
    "clip by quantile": {"action": "clip", "quantile": 0.5},
    "scale": {"action": "scale", "factor": 2.0},
    "scale by a schedule": {"action": "scale", "factor": {0: 3.0, 10: 1.0}},
    "scale channels": {"action": "scale", "factor": [1.0, 2.0, 3.0], "dim": 1},
    "reverse": {"action": "scale", "factor": 1.0, "reverse": True},
    "zero": {"fn": "zero"},
    "noise": {"fn": "noise", "std": 0.1},
    "mean": {"fn": "mean"},
    "resample": {"fn": "resample"},
    "shuffle": {"fn": "shuffle"},
    "dropout": {"fn": "dropout", "p": 0.5},
    "quantize": {"fn": "quantize"},
    "quantize to float8": {"fn": "quantize", "to": "float8_e4m3fn"},
    "sign": {"fn": "sign"},
    "sign, straight through": {"fn": "sign", "straight_through": True},
    "nan": {"fn": "nan", "count": 3},
    "add": {"fn": "add", "value": 0.5},
    "swap": {"fn": "swap"},
    "patch from a sample": {"fn": "patch", "from_sample": 0, "units": [0, 2]},
    "replace": {"fn": "replace", **RECORDED},
    "patch": {"fn": "patch", "slice": ":, 0:2", **RECORDED},
    "a custom function": {"fn": lambda tensor, context: tensor / 2},
    "a function that changes nothing": {"fn": lambda tensor, context: tensor},
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a working directory with a run that recorded the tensors of `inner`."""
    folder = tmp_path_factory.mktemp("inference")
    model = make()
    hooks = {"kept": record("forward", "inner", tensors=True), "given": record("forward_pre", "inner", tensors=True)}
    run_steps(model, hooks, lambda: model(torch.ones(4, 3)), out=folder / "recorded")
    return folder


def make() -> nn.Module:
    """Return a model with a nested output."""
    torch.manual_seed(0)
    return Calls(lambda inner, x: {"hidden": inner(x), "whole": [x, 3]}, inner=nn.Linear(3, 3))


def result(spec: dict[str, Any], mode: Any, *, trained: bool = True) -> tuple[Tensor, list[dict[str, Any]]]:
    """Return the output and the effects of a hooked model; its parameters are inference tensors unless `trained`."""
    with torch.inference_mode(not trained):
        model = make()
    torch.manual_seed(1)
    batch = torch.randn(4, 3)
    with instrument.attach(model, {"mine": {"layers": "inner", "action": "modify", **spec}}) as probe:
        with mode:
            hidden = model(batch)["hidden"]
        probe.end_step()
    assert [(row["expected"], row["fired"], row["cause"]) for row in probe.coverage()] == [(1, 1, "")]
    effects = [
        {key: row[key] for key in ("changed_fraction", "norm_before", "norm_after", "factor")}
        for row in probe.sink.records("effects")
    ]
    return hidden, effects


@pytest.mark.spread(1)
@pytest.mark.combinations
@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
@pytest.mark.parametrize("name", ACTIONS)
def test_interventions_equal_those_under_no_grad(
    name: str, kind: str, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recorded)
    spec = {"kind": kind, **ACTIONS[name]}
    wanted, effects = result(spec, torch.no_grad())
    assert len(effects) == 1
    for mode, trained in ((torch.inference_mode(), True), (torch.inference_mode(), False), (torch.no_grad(), False)):
        found, result_effects = result(spec, mode, trained=trained)
        assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
        assert repr(result_effects) == repr(effects)


def test_in_place_write_is_an_error_under_inference_mode() -> None:
    with pytest.raises(HookResultError, match="modified its tensor in place"):
        result({"kind": "forward", "fn": lambda tensor, context: tensor.mul_(2)}, torch.inference_mode())


def test_loss_of_an_evaluation_is_changed() -> None:
    model = make()
    hook = {"layers": ".", "kind": "loss", "phase": "eval", "action": "scale", "factor": 3.0}
    with instrument.attach(model, {"mine": hook}) as probe, probe.evaluating(), torch.inference_mode():
        loss = model(torch.ones(4, 3))["hidden"].square().sum()
        assert torch.equal(probe.loss(loss), 3 * loss)


def test_state_dict_of_inference_tensors_is_changed() -> None:
    with torch.inference_mode():
        model = make()
    hook = {"layers": "inner", "kind": "state_dict_post", "action": "modify", "fn": "zero"}
    with instrument.attach(model, {"mine": hook}) as probe:
        state = model.state_dict()
        probe.end_step()
    assert not state["inner.weight"].any()
    assert model.inner.weight.any()


def test_gradient_hooks_under_inference_mode_report_the_cause() -> None:
    model = make()
    kinds = ("full_backward_pre", "full_backward", "tensor")
    hooks = {kind: scale(kind, 2.0, "**") for kind in kinds}
    batch = torch.randn(4, 3)
    with torch.inference_mode():
        wanted = model(batch)["hidden"]
    with pytest.warns(instrument.InstrumentWarning, match=r"called under torch\.inference_mode"):  # noqa: SIM117
        with instrument.attach(model, hooks) as probe:
            with torch.inference_mode():
                assert torch.equal(model(batch)["hidden"], wanted)
            probe.end_step()
