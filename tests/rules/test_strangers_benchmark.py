"""The programs of `benchmarks/strangers/`: what is registered about them, their halves, and the counting of results."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from instrument.config.rules import default_rules

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
            assert re.search(r"\w, 20[12]\d$", fault.source), fault.name
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


def test_halves_have_healthy_programs_and_faults(strangers: ModuleType) -> None:
    import registry

    for half in registry.HALVES:
        programs = [program for program in registry.PROGRAMS.values() if program.half == half]
        assert len(programs) >= 32, half
        assert sum(len(program.faults) for program in programs) >= 44, half
        for group in {program.group for program in programs} - {"healthy"}:
            assert sum(len(program.faults) for program in programs if program.group == group) >= 15, (half, group)


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
