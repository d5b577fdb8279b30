"""Hooks on models compiled with torch.compile, and half precision."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import Answer
from tiers import tiered
from torch import nn
from training_runs import train_here

import instrument
from instrument import ConfigError
from instrument.plan.hook_plan import make_plan
from instrument.spec.spec_file import read_specs
from instrument.training.compiled_models import SLOWDOWN, cost_of_hooks

HOOKS = {
    "seen": {"layers": "*", "kind": "forward", "action": "record"},
    "flow": {"layers": "*", "kind": "full_backward", "role": "grad_output", "action": "record"},
}
SMALL = ["model=mlp", "data=digits", "model.sizes=[64,10]", "train.steps=3"]


@pytest.fixture(autouse=True)
def reset_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("called_before", "in_place"),
    [(False, True), (True, False), *(pytest.param(each, each, marks=pytest.mark.slow) for each in (False, True))],
)
def test_hooks_fire_on_a_compiled_model(called_before: bool, in_place: bool) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    batch = torch.randn(3, 4)
    baseline = model(batch).detach()
    compiled = model
    if in_place:
        model.compile(backend="eager")
    else:
        compiled = torch.compile(model, backend="eager")
    if called_before:
        compiled(batch)
    with instrument.attach(compiled, HOOKS) as probe:
        for _ in range(2):
            output = compiled(batch)
            output.sum().backward()
            probe.end_step()
    assert torch.equal(output, baseline)
    assert {(row["hook"], row["layer"], row["fired"]) for row in probe.coverage()} == {
        (hook, layer, 2) for hook in HOOKS for layer in "01"
    }
    assert torch.equal(compiled(batch), baseline)
    (message,) = [row["message"] for row in probe.sink.records("events") if row["rule"] == "graph_break"]
    count = int(message.split()[0])
    assert count >= 1
    assert message.startswith(f"{count} graph breaks: ")


def test_compiler_does_not_warn_about_hooks() -> None:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    model = nn.Sequential(*[nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU()) for _ in range(4)])
    compiled = torch.compile(model, backend="eager")
    logging.getLogger("torch._dynamo").addHandler(handler)
    try:
        with instrument.attach(compiled, {name: {**hook, "layers": "**"} for name, hook in HOOKS.items()}) as probe:
            for _ in range(3):
                compiled(torch.ones(2, 4)).sum().backward()
                probe.end_step()
    finally:
        logging.getLogger("torch._dynamo").removeHandler(handler)
    assert [row["fired"] for row in probe.coverage()] == [3] * 34
    assert not messages


def test_hooks_fire_if_the_compiler_is_imported_later(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    batch = torch.randn(3, 4)
    expected = model(batch).detach()
    imported = False
    monkeypatch.setattr("instrument.lazy_compiler.compiler_imported", lambda: imported)
    with instrument.attach(model, HOOKS) as probe:
        for imported in (False, True, True):
            if imported:
                model.compile(backend="eager")
            output = model(batch)
            output.sum().backward()
            probe.end_step()
            assert torch.equal(output, expected)
    assert [row["fired"] for row in probe.coverage()] == [3] * 4


def test_fullgraph_is_refused_with_the_supported_kinds() -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend="eager", fullgraph=True)
    with pytest.raises(ConfigError) as caught, instrument.attach(compiled, {"seen": {**HOOKS["seen"], "layers": "."}}):
        pass
    (problem,) = caught.value.problems
    assert problem.where == "hooks.seen.kind"
    allowed = "parameter_grad, parameter_grad_micro, post_accumulate_grad, step_pre, step_post, state_dict_pre"
    assert str(problem.allowed).startswith(allowed)
    assert problem.fix == "compile the model with fullgraph=False"
    sums = {"layers": ".", "kind": "post_accumulate_grad", "action": "record"}
    with instrument.attach(compiled, {"sums": sums}) as probe:
        compiled(torch.zeros(1, 2)).sum().backward()
        probe.end_step()
    assert [row["fired"] for row in probe.coverage()] == [1, 1]


@pytest.mark.parametrize("backend", tiered(["eager", "inductor"], quick=["eager"]))
def test_run_with_compile_reports_graph_breaks_and_their_cost(
    cli: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    hook = "+hooks.seen={layers:layers.*,kind:forward,action:record}"
    answer = cli(*SMALL, "train.compile=true", hook, "hydra.run.dir=out")
    assert answer.code == 0, answer.err
    (line,) = [line for line in answer.out.splitlines() if line.startswith("compile ")]
    assert line == f"compile     hooks on modules break the compiled graph: {SLOWDOWN}"
    run = instrument.load("out")
    assert run.coverage.fired.tolist() == [3]
    (message,) = run.events.query("rule == 'graph_break'").message
    assert "graph breaks" in message


def test_hooks_outside_of_modules_cost_nothing_in_compiled_code() -> None:
    hooks = read_specs({"sums": {"layers": ".", "kind": "post_accumulate_grad", "action": "record"}})
    assert cost_of_hooks(make_plan(hooks, nn.Linear(2, 2))) is None


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_run_trains_in_half_precision(workdir: Path, precision: str) -> None:
    hooks = [
        "+hooks.seen={layers:layers.*,kind:forward,action:record}",
        "+hooks.g={layers:'**',kind:parameter_grad,action:record}",
    ]
    run = train_here(workdir / "out", *SMALL, f"train.precision={precision}", *hooks)
    assert not run.coverage.cause.any()
    assert run.metrics.query("phase == 'train'").skipped.tolist() == (
        [None] * 3 if precision == "bf16" else [False] * 3
    )
