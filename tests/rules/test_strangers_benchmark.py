"""The programs of `benchmarks/strangers/`: what is registered about them, their halves, and the counting of results."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from instrument.config.rules import RULES, default_rules

STRANGERS = Path(__file__).parents[2] / "benchmarks" / "strangers"


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module that registers all programs."""
    monkeypatch.syspath_prepend(str(STRANGERS))
    import run

    return run


def test_each_fault_has_a_source_a_cause_and_a_twin(strangers: ModuleType) -> None:
    import registry

    programs = registry.PROGRAMS.values()
    names = [name for program in programs for name in (program.name, *(fault.name for fault in program.faults))]
    assert len({*names}) == len(names)
    for program in programs:
        assert program.group in registry.GROUPS
        assert program.source
        for fault in program.faults:
            assert re.search(r"\b20[12]\d$", fault.source), fault.name
            assert fault.category
            assert {cause.partition("@")[0] for cause in fault.causes} <= {
                "",
                *default_rules(),
                *registry.MISSING_RULES,
            }, fault.name
            assert fault.causes
            # The program that is registered as the twin distinguishes the fault.
            module = inspect.getmodule(program.train)
            assert module is not None
            assert inspect.getsource(module).count(f'"{fault.name}"') >= 2, fault.name


def test_collections_have_healthy_programs_and_faults(strangers: ModuleType) -> None:
    import registry

    for collection in registry.COLLECTIONS:
        programs = [program for program in registry.PROGRAMS.values() if program.collection == collection]
        assert len(programs) >= 26, collection
        assert sum(len(program.faults) for program in programs) >= 36, collection
        assert any(not program.faults for program in programs), collection


def result(strangers: ModuleType, loss: float = 1.0, events: Sequence[tuple[str, str | None, int]] = ()) -> Any:
    rows = [{"rule": rule, "layer": layer, "step": step, "message": ""} for rule, layer, step in events]
    return strangers.Result("program", 0, loss, [loss], 1.0, rows)


@pytest.mark.parametrize(
    ("event", "right", "wrong"),
    [
        (("all_zero", "fc1", 40), ["all_zero @ fc1"], []),
        (("all_zero", "fc1", 30), [], []),  # before its effect
        (("all_zero", "fc1", 241), [], []),  # too late
        (("all_zero", "head", 40), [], ["all_zero"]),
        (("overfit", "conv", 50), ["overfit @ conv"], []),  # each rule at this layer
        (("overfit", None, 50), [], ["overfit"]),
        (("dead_units", "fc1", 50), [], []),  # its twin warns, too
        (("reference", "conv", 50), [], []),  # counted separately
    ],
)
def test_warnings_are_compared_with_causes_and_twin(
    strangers: ModuleType, event: tuple[str, str | None, int], right: list[str], wrong: list[str]
) -> None:
    fault = strangers.Fault("fault", "data", "source", ("all_zero@fc*", "dead_units", "@conv"), since=40)
    twin = result(strangers, events=[("dead_units", "fc1", 90)])
    assert strangers.judge(fault, result(strangers, events=[event]), twin) == (right, wrong)


@pytest.mark.parametrize(
    ("losses", "changed"),
    [([1.0, 1.2], False), ([1.26, 1.3], True), ([1.24, 1.3], False), ([0.8, 0.9], True), ([math.nan, 1.0], True)],
)
def test_changed_loss_is_outside_the_losses_of_the_twin(
    strangers: ModuleType, losses: Sequence[float], changed: bool
) -> None:
    twins = [result(strangers, loss) for loss in (1.0, 1.2)]  # the margin is 0.055
    assert strangers.changes_loss([result(strangers, loss) for loss in losses], twins) is changed


def test_fault_runs_with_its_twin(strangers: ModuleType) -> None:
    program = strangers.PROGRAMS["causal_attention"]
    jobs = list(strangers.jobs_of(strangers.PROGRAMS.values(), ["attention_looks_ahead"], 2))
    assert jobs == [(program, fault, seed) for fault in ("", "attention_looks_ahead") for seed in (0, 1)]


@pytest.mark.spread(1)
@pytest.mark.parametrize("has_router", [False, True])
def test_hook_sets_fit_models_without_transformer_or_with_an_unknown_router(
    strangers: ModuleType, has_router: bool
) -> None:
    import registry

    model = nn.Module() if has_router else nn.Linear(4, 3)
    if has_router:
        model.gate, model.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    with registry.attach(model, torch.optim.SGD(model.parameters())) as probe:
        probe.end_step(loss=1.0)
    assert registry.RECORDING.losses == [1.0]
    registry.RECORDING.losses.clear()


def test_faults_and_healthy_programs_outside_of_the_reference_are_counted(
    strangers: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    name, fault = "causal_attention", "attention_looks_ahead"
    rule = "looks_ahead"  # names the cause of the fault
    stays, in_time, late = [], [("reference", "head", 10)], [("reference", "head", 210)]
    finding = lambda part: {"rule": "reference", "layer": "head", "advice": RULES["reference"].advice_in[part]}  # noqa: E731
    faulty = {"forward": in_time, "update": late, "backward": in_time, "": [*stays, (rule, None, 10)]}
    runs = {
        (name, ""): [result(strangers, 1.0, events) for events in (stays, stays, late, stays)],
        (name, fault): [
            replace(result(strangers, 2.0, events), findings=[finding(part)] if part else [])
            for part, events in faulty.items()
        ],
        (name, "tied_weights_separated"): [result(strangers, 1.0, in_time)] * 4,  # does not change the loss
    }
    strangers.report_reference(runs)
    lines = capsys.readouterr().out.splitlines()
    assert "| silent errors | 4 | 1 | 2 | 1 | 2 |" in lines  # an attention mask is of the forward pass
    assert "Healthy programs outside of the reference: 1 of 4" in lines


@pytest.mark.slow
def test_training_is_judged_with_a_reference(
    strangers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import registry

    def events_of(rate: float, **settings: Any) -> list[dict[str, Any]]:
        monkeypatch.setattr(registry, "RECORDING", recording := registry.Recording(**settings))
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        with registry.attach(model, optimizer := torch.optim.SGD(model.parameters(), rate)) as probe:
            for _ in range(21):
                optimizer.zero_grad()
                loss = model(torch.ones(2, 4)).square().mean()
                loss.backward()
                optimizer.step()
                probe.end_step(loss=loss)
        return recording.events

    assert events_of(0.1, rules=None, out=tmp_path / "healthy") == []
    rules = {"reference": {"rule": "reference", "from": str(tmp_path / "healthy"), "stats": ["rms"]}}
    assert events_of(0.1, rules=rules) == []
    (event,) = (event for event in events_of(0.0, rules=rules) if event["rule"] == "reference")
    assert event["step"] == 10  # the second recorded step without an update


def test_programs_without_a_reference_are_not_judged_with_one(
    strangers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(job: tuple[Any, str, int], **settings: Any) -> Any:
        name, seed = job[0].name, job[2]
        error = "Traceback\nValueError: wrong shape" if (name, seed) == ("causal_attention", 101) else None
        return strangers.Result(name, seed, 1.0, [1.0], 1.0, [], error)

    monkeypatch.setattr(strangers, "run", run)
    with ThreadPoolExecutor(1) as pool:
        assert strangers.references_of(["causal_attention", "dcgan"], 2, tmp_path, pool) == {}
    failed, without_runs = capsys.readouterr().out.splitlines()
    assert failed == "causal_attention is not judged with a reference: ValueError: wrong shape"
    assert without_runs.startswith("dcgan is not judged with a reference: ")
    assert "file or folder not found" in without_runs
