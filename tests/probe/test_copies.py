"""Copies of an instrumented model (copied, pickled, saved, quantized or exported) work without hooks and without their data."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import instrument
from instrument.errors import HookError

HOOKS = {
    "seen": {"layers": "**", "kind": "forward", "action": "record"},
    "scaled": {"layers": "0", "kind": "forward_pre", "action": "scale", "factor": 3.0},
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


@pytest.mark.spread(2)
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


@pytest.mark.filterwarnings("ignore:torch.* deprecated")
@pytest.mark.parametrize("inplace", [False, True])
def test_quantized_modules_have_no_hooks(inplace: bool) -> None:
    def quantized(model: nn.Module) -> nn.Module:
        quantize = torch.ao.quantization.quantize_dynamic
        return quantize(model, {nn.Linear}, inplace=inplace)

    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3)
    baseline = quantized(copy.deepcopy(model))(inputs)
    hooks = {name: HOOKS[name] | {"layers": "0"} for name in ("seen", "scaled")}
    with instrument.attach(model, hooks) as probe:
        assert torch.equal(quantized(model)(inputs), baseline)
        probe.end_step()
    replaced = [row for row in probe.sink.records("events") if row["rule"] == "replaced"]
    assert bool(replaced) is inplace
    copied = [row["cause"] for row in probe.sink.records("coverage") if "a copy of it" in row["cause"]]
    assert bool(copied) is not inplace


SCALE = {"layers": "0", "action": "scale", "factor": 2.0}
EXPORTED: dict[str, dict[str, Any]] = {
    "forward": {"kind": "forward"},
    "gradient": {"kind": "full_backward"},
    "function": {"kind": "function", "functions": "*"},
}


EXPORTS: dict[str, Callable[[nn.Module, tuple[torch.Tensor, ...]], Any]] = {
    "torch.export": torch.export.export,
    "torch.jit.trace": torch.jit.trace,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("name", EXPORTED)
def test_export_with_an_intervention_is_refused(name: str, export: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    message = f"hook 'scaled' \\({EXPORTED[name]['kind']}\\) on layer '0': torch.export and torch.jit.trace cannot include an intervention"
    with instrument.attach(model, {"scaled": SCALE | EXPORTED[name]}), pytest.raises(HookError, match=message):
        EXPORTS[export](model, (torch.ones(2, 3),))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_traced_program_has_no_operations_of_record_hooks() -> None:
    model, inputs = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), (torch.ones(2, 3),)
    hooks = {name: spec for name, spec in HOOKS.items() if spec["action"] == "record"}
    with instrument.attach(model, hooks) as probe:
        traced = torch.jit.trace(model, inputs, check_trace=False)
        assert not len(probe.sink.rows["stats"])
        model(*inputs).sum().backward()
        probe.end_step()
        assert {row["hook"] for row in probe.sink.records("stats")} == hooks.keys()
    graphs = (program.inlined_graph for program in (traced, torch.jit.trace(model, inputs)))
    traced_nodes, expected = ([node.kind() for node in graph.nodes()] for graph in graphs)
    assert traced_nodes == expected


@pytest.mark.slow
def test_strict_export_with_an_intervention_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    message = "torch.export and torch.jit.trace cannot include an intervention"
    with instrument.attach(model, {"scaled": SCALE | {"kind": "forward"}}), pytest.raises(RuntimeError, match=message):
        torch.export.export(model, (torch.ones(2, 3),), strict=True)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_export_has_no_operations_of_record_hooks_and_is_not_counted(strict: bool) -> None:
    model, inputs = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), (torch.ones(2, 3),)
    hooks = {name: HOOKS[name] for name in ("seen", "own", *(() if strict else ("functions",)))}
    with instrument.attach(model, hooks) as probe:
        program = torch.export.export(model, inputs, strict=strict)
        model(*inputs).sum().backward()
        probe.end_step()
    assert {row["hook"]: row["call"] for row in probe.sink.records("stats")} == dict.fromkeys(hooks, 0)
    assert all(row["fired"] == row["expected"] for row in probe.coverage())
    expected = torch.export.export(model, inputs, strict=strict)
    assert [str(node) for node in program.graph.nodes] == [str(node) for node in expected.graph.nodes]


@pytest.mark.spread(1)
@pytest.mark.parametrize("kept_by", ["AveragedModel", "forward hook", "step hook"])
def test_averages_of_weights_are_those_of_an_uninstrumented_training(kept_by: str) -> None:
    record = {name: spec for name, spec in HOOKS.items() if spec["action"] == "record"}

    def train(*, is_recorded: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        means = [parameter.detach().clone() for parameter in model.parameters()]

        def update(*_: object) -> None:
            for mean, parameter in zip(means, model.parameters(), strict=True):
                mean.lerp_(parameter.detach(), 0.1)

        with instrument.attach(model, record, optimizer=optimizer) if is_recorded else nullcontext() as probe:
            averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
            if kept_by != "AveragedModel":
                (optimizer.register_step_post_hook if "step" in kept_by else model[1].register_forward_hook)(update)
            for inputs in torch.randn(4, 5, 3).requires_grad_():
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
                averaged.update_parameters(model)
                if probe is not None:
                    probe.end_step()
        assert probe is None or [row["call"] for row in probe.sink.records("stats")].count(0) == len(probe.stats)
        return [*averaged.state_dict().values(), averaged(torch.ones(2, 3)), *means]

    baseline, recorded = train(is_recorded=False), train(is_recorded=True)
    assert all(torch.equal(one, other) for one, other in zip(baseline, recorded, strict=True))
