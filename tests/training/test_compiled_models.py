"""Hooks on models compiled with torch.compile, and half precision."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import Answer
from torch import nn
from training_runs import train_here

import instrument

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


@pytest.mark.spread(1)
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
    messages = {row["rule"]: row["message"] for row in probe.sink.records("events")}
    assert messages == {"compiled": "the model was already compiled; it is compiled again: 2 hooks inside graphs"}


@pytest.mark.slow
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


def test_compiled_optimizer_step_traces_no_code_of_hooks() -> None:
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model, plain = (nn.Linear(4, 2) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    batch = torch.randn(3, 4)
    hooks = {"update": {"layers": ".", "kind": "step_post", "role": "update", "action": "record"}}
    rows = []
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        step = torch.compile(optimizer.step, backend="eager", disable=each is plain)
        with instrument.attach(each, hooks, optimizer=optimizer) as probe:
            for _ in range(3):
                each(batch).square().mean().backward()
                step()
                optimizer.zero_grad()
                probe.end_step()
        rows.append(probe.stats[["step", "path", "l2"]])
    assert rows[1].equals(rows[0])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_compiled_training_step_may_evaluate_and_end_the_step() -> None:
    torch.manual_seed(0)
    model, plain = (nn.Linear(4, 2) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    hooks = {
        phase: {"layers": ".", "kind": "forward", "action": "record", "phase": phase} for phase in ("train", "eval")
    }
    hooks["weights"] = {"layers": ".", "kind": "step_post", "role": "param", "action": "record"}
    rows = []
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        with instrument.attach(each, hooks, optimizer=optimizer) as probe:

            @partial(torch.compile, backend="eager", disable=each is plain)
            def train(
                batch: torch.Tensor,
                model: nn.Module = each,
                optimizer: torch.optim.Optimizer = optimizer,
                probe: instrument.AttachedProbe = probe,
            ) -> None:
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                with probe.evaluating(), torch.no_grad():
                    model(batch)
                probe.end_step(loss=loss)

            for step in range(3):
                train(torch.full((3, 4), step / 2))
        rows.append((probe.stats.sort_values(["step", "hook", "path"], ignore_index=True), probe.metrics["loss"]))
    (stats, losses), (expected, expected_losses) = rows[1], rows[0]
    columns = ["step", "phase", "hook", "path", "mean", "l2"]
    assert len(expected) == 12
    assert stats[columns].equals(expected[columns])
    assert losses.equals(expected_losses)


def test_compiled_backward_pass_traces_no_code_of_hooks() -> None:
    kinds = "parameter_grad_micro", "post_accumulate_grad", "parameter_grad"
    hooks = {kind: {"layers": ".", "kind": kind, "action": "record", "stats": ["l2"]} for kind in kinds}
    hooks["parameter_grad"]["stats"] = ["gradient_noise"]
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with instrument.attach(model, hooks, optimizer=optimizer) as probe:
        for is_compiled in (False, True):
            optimizer.zero_grad()
            for scale in (1, 2):
                loss = model(torch.full((1, 2), float(scale))).sum()
                with torch._dynamo.config.patch(compiled_autograd=True):
                    torch.compile(loss.backward, backend="eager", disable=not is_compiled)()
                probe.end_micro_step()
            optimizer.step()
            probe.end_step()
    columns = ["hook", "path", "micro_step", "l2", "gradient_noise"]
    plain, compiled = (rows[columns].reset_index(drop=True) for _, rows in probe.stats.groupby("step"))
    assert len(plain) == 10
    assert compiled.equals(plain)


@pytest.mark.slow
def test_hooks_fire_if_the_compiler_is_imported_later(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    batch = torch.randn(3, 4)
    expected = model(batch).detach()
    imported = False
    monkeypatch.setattr("instrument.runtime.lazy_compiler.compiler_imported", lambda: imported)
    with instrument.attach(model, HOOKS) as probe:
        for imported in (False, True, True):
            if imported:
                model.compile(backend="eager")
            output = model(batch)
            output.sum().backward()
            probe.end_step()
            assert torch.equal(output, expected)
    assert [row["fired"] for row in probe.coverage()] == [3] * 4


@pytest.mark.slow
def test_run_with_compile_has_its_hooks_inside_graphs(
    cli: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    hook = "+hooks.seen={layers:layers.*,kind:forward,action:record}"
    answer = cli(*SMALL, "train.compile={fullgraph: true, dynamic: false}", hook, "hydra.run.dir=out").expect(0)
    (line,) = [line for line in answer.out.splitlines() if line.startswith("compile ")]
    assert line == "compile     1 hook inside graphs"
    run = instrument.load("out")
    assert run.coverage.fired.tolist() == [3]
    assert run.events.query("rule == 'graph_break'").empty


@pytest.mark.slow
def test_run_breaks_graphs_only_if_the_configuration_says_so(
    cli: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    hook = "+hooks.total={layers:layers.*,kind:tensor,role:input,action:record}"
    answer = cli(*SMALL, "train.compile={graph_breaks: true}", hook, "hydra.run.dir=out").expect(0)
    (line,) = [line for line in answer.out.splitlines() if line.startswith("compile ")]
    assert line.startswith("compile     0 hooks inside graphs; hook 'total' breaks them: ")
    (message,) = instrument.load("out").events.query("rule == 'graph_break'").message
    assert "graph breaks" in message


@pytest.mark.slow
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
