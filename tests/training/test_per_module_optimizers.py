"""`PerModule`: separate optimizers for parts of a model."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from training_runs import DIGITS, prepared, run_in_memory

from instrument import ConfigError, MemorySink, attach
from instrument.training.experiment import Experiment
from instrument.training.per_module_optimizers import PerModule

ADAM = {"_target_": "torch.optim.Adam", "lr": 0.01, "betas": [0.0, 0.9]}
PART = {**ADAM, "_partial_": True}
EACH = {
    "_target_": "instrument.training.per_module_optimizers.PerModule",
    "optimizers": {"generator": PART, "critic": PART},
}


def experiment_of(optimizer: dict[str, Any], **overrides: Any) -> Experiment:
    return prepared(
        model={"_target_": "instrument.training.models.DenseGAN", "image": [1, 8, 8], "width": 8},
        data={"dataset": DIGITS, "slice": {"stop": 40}},
        task={"_target_": "instrument.tasks.WassersteinGAN"},
        optimizer=optimizer,
        **overrides,
    )


def trained(experiment: Experiment) -> MemorySink:
    torch.manual_seed(1)
    return run_in_memory(experiment)[0]


def test_two_equal_optimizers_train_like_a_single_one() -> None:
    one, two = experiment_of(ADAM), experiment_of(EACH)
    assert [len(each.optimizers) for each in (one, two)] == [1, 2]
    for experiment in (one, two):
        trained(experiment)
    for ours, theirs in zip(two.model.parameters(), one.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_parameters_belong_to_the_optimizer_of_their_module() -> None:
    sgd = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.5, "momentum": 0.9}
    record = {"layers": "**", "action": "record", "kind": "step_post"}
    hooks = {
        "tame": {"layers": "**", "kind": "parameter_grad", "action": "clip", "norm": 0.01},
        "used": {**record, "role": "param_grad"},
        "moment": {**record, "layers": "generator.**", "role": "state.exp_avg"},
        "momentum": {**record, "layers": "critic.**", "role": "state.momentum_buffer"},
    }
    experiment = experiment_of(EACH | {"optimizers": {"generator": PART, "critic": sgd}}, hooks=hooks)
    sink = trained(experiment)
    assert {row["cause"] for row in sink.records("coverage")} == {""}
    assert {(row["expected"], row["fired"]) for row in sink.records("coverage")} == {(3, 3)}
    norms: dict[tuple[int, str], float] = {}
    for row in sink.records("stats"):
        if row["hook"] == "used":
            place = (row["step"], row["layer"].partition(".")[0])
            norms[place] = norms.get(place, 0.0) + row["l2"] ** 2
    assert len(norms) == 6
    assert [norm**0.5 for norm in norms.values()] == pytest.approx([0.01] * 6, rel=1e-3)
    assert [row["lr"] for row in sink.records("metrics") if row["phase"] == "train"] == [0.01] * 3


def test_scheduler_and_state_dict_cover_all_optimizers() -> None:
    schedule = {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 1, "gamma": 0.5}
    one, other = (experiment_of(EACH, scheduler=schedule) for _ in range(2))
    trained(one)
    assert [part.param_groups[0]["lr"] for part in one.optimizers] == [0.01 / 8] * 2
    other.optimizer.load_state_dict(one.optimizer.state_dict())
    assert [part.param_groups[0]["lr"] for part in other.optimizers] == [0.01 / 8] * 2
    other.optimizer.param_groups[1]["lr"] = 7.0
    assert other.optimizers[1].param_groups[0]["lr"] == 7.0
    for ours, theirs in zip(one.optimizers, other.optimizers, strict=True):
        assert isinstance(ours, Adam)
        pairs = zip(ours.state.values(), theirs.state.values(), strict=True)
        assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in pairs)


def test_closure_is_evaluated_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
    optimizer = PerModule(model, dict.fromkeys("ab", partial(SGD, lr=0.1)))
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        return 3.0

    with torch.no_grad():
        assert optimizer.step(closure) == 3.0
    assert calls == [True]


LBFGS = {"_target_": "torch.optim.LBFGS", "_partial_": True}


@pytest.mark.parametrize(
    ("optimizers", "message"),
    [
        ({"critic": PART}, r"optimizer: .*'generator\..*' belongs to none of the submodules critic"),
        (
            {"generator": PART, "critic": PART, "critic.1": PART},
            r"optimizer: .*'critic\..*' belongs to several of the submodules gen",
        ),
        ({"generator": PART, "discriminator": PART}, "optimizer: .*has no attribute .discriminator"),
        ({"generator": PART, "critic": LBFGS}, "optimizer: .*the step of LBFGS requires a closure.*critic"),
    ],
)
def test_unsuitable_optimizers_are_refused(optimizers: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment_of(EACH | {"optimizers": optimizers})


@pytest.mark.parametrize("by_loop", [False, True])
def test_hooks_fire_at_the_steps_of_each_optimizer(by_loop: bool) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 1)})
    optimizer = PerModule(model, dict.fromkeys("ab", Adam))
    specs = {
        "state": {"layers": "*", "kind": "step_post", "role": "state.exp_avg", "action": "record"},
        "used": {"layers": "*", "kind": "parameter_grad", "action": "record"},
    }
    with attach(model, specs, optimizer=optimizer, steps_by_loop=by_loop) as probe:
        for _ in range(3):
            optimizer.zero_grad()
            model["b"](model["a"](torch.ones(4, 2))).sum().backward()
            if by_loop:
                probe.before_optimizer_step(optimizer)
            optimizer.step()
            probe.end_step()
    assert {(row["expected"], row["fired"], row["cause"]) for row in probe.coverage()} == {(3, 3, "")}
    assert len(probe.coverage()) == 8
