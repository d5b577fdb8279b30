"""The phase that is read from the model, as the callbacks of trainers do."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import instrument
from instrument.probe.phase_watch import entry_modules

HOOKS = {
    "train": {"layers": "**", "kind": "forward", "action": "record"},
    "eval": {"layers": "**", "kind": "forward", "action": "record", "phase": "eval", "every": 2},
}


class Parts(nn.Module):
    """A model whose parts can be called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(3, 2), nn.ModuleDict({"a": nn.Linear(3, 1)})])
        self.encoder = nn.TransformerEncoderLayer(3, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.heads[0](self.body(2 * inputs))  # type: ignore[no-any-return]


def train_step(probe: Any, watch: Any, model: nn.Module) -> None:
    watch.begin_step()
    model(torch.zeros(1, 3))
    watch.end_step()
    probe.end_step()


def hooks_left(model: nn.Module) -> bool:
    return any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_entries_are_the_parts_that_methods_call() -> None:
    model = Parts()
    assert list(entry_modules(model)) == [model, model.body, model.heads[0], model.heads[1]["a"]]
    model = nn.Sequential(torch.jit.script(nn.Linear(1, 1)), nn.Tanh())
    assert list(entry_modules(model)) == [model, model[1]]


@pytest.mark.spread(2)
@pytest.mark.parametrize("entry", ["", "body", "heads.1.a"])
def test_first_call_of_a_phase_is_recorded(entry: str) -> None:
    model = Parts()
    hooks = {name: {**spec, "layers": entry or "."} for name, spec in HOOKS.items()}
    with instrument.attach(model, hooks, rules=None) as probe:
        watch = probe.follow_model()
        for step in range(4):
            train_step(probe, watch, model.get_submodule(entry))
            model.eval()
            model.get_submodule(entry)(torch.zeros(1, 3))
            assert probe.phase == "eval"
            model.train()
            assert probe.step == step + 1
    assert probe.stats.query("hook == 'train'").step.tolist() == [0, 1, 2, 3]
    assert probe.stats.query("hook == 'eval'").step.tolist() == [2, 4]


def test_copies_of_the_model_do_not_set_the_phase() -> None:
    model = Parts()
    with instrument.attach(model, HOOKS, rules=None) as probe:
        watch = probe.follow_model()
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other.eval()(torch.zeros(1, 3))
            assert probe.phase == "train"
        train_step(probe, watch, model)
    assert not hooks_left(model)


def test_exception_in_an_interrupting_call_continues_the_training() -> None:
    model = Parts()
    with instrument.attach(model, HOOKS, rules=None) as probe:
        watch = probe.follow_model()
        watch.begin_step()
        model(torch.zeros(1, 3))
        model.eval()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.zeros(1, 5))
        assert probe.phase == "train"
        model.train()(torch.zeros(1, 3))
        watch.end_step()
        probe.end_step()
    assert probe.stats.query("hook == 'train' and layer == ''").micro_step.tolist() == [0, 0]
    assert not hooks_left(model)


@pytest.mark.slow
def test_phase_follows_calls_of_a_model_compiled_in_place() -> None:
    """With `fullgraph=True`, a hook of Python code at the model would be an error."""
    model = Parts()
    model.compile(fullgraph=True, backend="eager")
    compiled = model._compiled_call_impl
    with instrument.attach(model, HOOKS, rules=None) as probe:
        watch = probe.follow_model()
        for _ in range(2):
            watch.begin_step()
            model.train()(torch.zeros(1, 3)).sum().backward()
            model.eval()(torch.zeros(1, 3))  # an evaluation within the step
            assert probe.phase == "train"
            with pytest.raises(TypeError):
                model(torch.zeros(1, 3), "one argument too many")
            assert probe.phase == "train"
            watch.end_step()
            probe.end_step()
            model(torch.zeros(1, 3))
            assert probe.phase == "eval"
            model.train()
        copy.deepcopy(model).eval()(torch.zeros(1, 3))
    found = probe.stats[probe.stats["layer"] == "heads.0"]
    assert found[found["phase"] == "train"].step.tolist() == [0, 1]
    assert found[found["phase"] == "eval"].step.tolist() == [0, 2]  # every second step
    assert model._compiled_call_impl is compiled
    torch.compiler.reset()


def test_watches_of_a_compiled_model_are_removed_in_any_order() -> None:
    model = Parts()
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        probes = [instrument.attach(model, HOOKS, rules=None) for _ in range(3)]
        for probe in [each.__enter__() for each in probes]:
            probe.follow_model()
        for index in order:
            probes[index].__exit__(None, None, None)
        assert model._compiled_call_impl is compiled


def test_model_that_is_compiled_again_is_followed_from_the_next_step_on() -> None:
    model = Parts()
    model.compile(backend="eager")
    with instrument.attach(model, HOOKS, rules=None) as probe:
        watch = probe.follow_model()
        model.compile(backend="eager", fullgraph=True)
        train_step(probe, watch, model)
        model.eval()(torch.zeros(1, 3))
        assert probe.phase == "eval"
    torch.compiler.reset()


@pytest.mark.slow
def test_compiled_model_is_not_split_at_its_parts() -> None:
    def graphs_of(*, watched: bool) -> int:
        graphs = []

        def backend(graph: torch.fx.GraphModule, _: object) -> object:
            graphs.append(graph)
            return graph.forward

        torch.compiler.reset()
        model = Parts()
        with instrument.attach(model, {"one": {**HOOKS["train"], "layers": "heads.0"}}, rules=None) as probe:
            if watched:
                probe.follow_model().begin_step()
            torch.compile(model, backend=backend)(torch.zeros(1, 3))
        return len(graphs)

    assert graphs_of(watched=True) == graphs_of(watched=False)
