"""Relations of optimizers, gradients and modes: each fault is found within a few steps, and no healthy program is reported."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import instrument
from instrument.analysis.rule_events import rule_events
from instrument.config.parse import parse_rules
from instrument.config.rules import default_rules
from instrument.integrations.attached_probe import AttachedProbe
from instrument.relations.accumulation_divides import MAX_LOSSES, AccumulationDivides
from instrument.relations.parameters_follow_gradients import ELEMENTS, _elements
from instrument.relations.rate_in_effect import RateInEffect

RELATIONS = (
    "accumulation_divides",
    "gradients_zeroed",
    "loss_scale",
    "mode_of_phase",
    "parameters_follow_gradients",
    "rate_in_effect",
)


@contextmanager
def attached(model: nn.Module, optimizer: Any, **options: Any) -> Iterator[AttachedProbe]:
    """Attach without hooks. Warnings are not raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", instrument.InstrumentWarning)
        with instrument.attach(model, {}, optimizer=optimizer, **options) as probe:
            yield probe


def rows(probe: AttachedProbe, relation: str, *, holds: bool) -> list[dict[str, Any]]:
    return [row for row in probe.relations.to_dict("records") if row["relation"] == relation and row["holds"] is holds]


def violations(probe: AttachedProbe) -> list[tuple[str, int]]:
    """Return each relation of this file that does not hold, with the step."""
    table = probe.relations.to_dict("records")
    return [(row["relation"], row["step"]) for row in table if row["holds"] is False and row["relation"] in RELATIONS]


def verified(probe: AttachedProbe) -> set[str]:
    return {row["relation"] for row in probe.relations.to_dict("records") if row["holds"] is True} & {*RELATIONS}


def network(*parts: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), *parts, nn.Linear(8, 3))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch), batch[:, :3].argmax(dim=1))


BATCHES = torch.randn(8, 16, 6, generator=torch.Generator().manual_seed(0))
Loop = Callable[[nn.Module, Any, AttachedProbe], None]


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


def train(
    model: nn.Module,
    optimizer: Any,
    *,
    zero: Callable[[Any], None] = lambda optimizer: optimizer.zero_grad(),
    change: Callable[[int], None] = lambda step: None,
    batches: Tensor = BATCHES,
    **options: Any,
) -> AttachedProbe:
    """Train in one step for each batch, and return the probe. `change` is called before each step."""
    with attached(model, optimizer, **options) as probe:
        for step, batch in enumerate(batches):
            change(step)
            loss = loss_of(model, batch)
            zero(optimizer)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    return probe


# ------------------------------------------------------------------------------------------------ gradients_zeroed


def test_gradients_that_are_never_zeroed_are_reported() -> None:
    model = network()
    probe = train(model, sgd(model), zero=lambda optimizer: None)
    (row,) = rows(probe, "gradients_zeroed", holds=False)
    assert (row["step"], row["layer"], row["path"]) == (1, "2", "bias")
    (event,) = probe.events[probe.events["rule"] == "gradients_zeroed"].to_dict("records")
    assert (event["layer"], event["severity"]) == ("2", "warning")


def zero_data(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.data.zero_()


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(50.0)[7:], torch.arange(48.0).view(6, 8).T, torch.tensor(3.0), torch.arange(3.0).expand(20, 3)],
    ids=["offset", "transposed", "scalar", "expanded"],
)
def test_compared_elements_are_at_equal_distances(tensor: Tensor) -> None:
    found = _elements(tensor).tolist()
    assert found == tensor.flatten().tolist()[:: math.ceil(tensor.numel() / ELEMENTS)]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "zero",
    [
        lambda optimizer: optimizer.zero_grad(),
        lambda optimizer: optimizer.zero_grad(set_to_none=False),
        zero_data,
    ],
    ids=["none", "zero", "data"],
)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Rprop])
def test_zeroed_gradients_hold(zero: Callable[[Any], None], optimizer: Any) -> None:
    model = network()
    probe = train(model, optimizer(model.parameters(), lr=0.01), zero=zero)
    assert violations(probe) == []
    assert verified(probe) == {"gradients_zeroed", "parameters_follow_gradients", "rate_in_effect"}


def test_accumulated_gradients_hold_and_those_of_the_last_step_do_not() -> None:
    for zeroed, found in ((True, []), (False, [("gradients_zeroed", 1)])):
        model = network()
        optimizer = sgd(model)
        with attached(model, optimizer) as probe:
            for batches in BATCHES.view(4, 2, 16, 6):
                for batch in batches:
                    (loss_of(model, batch) / 2).backward()
                    probe.end_micro_step()
                optimizer.step()
                if zeroed:
                    optimizer.zero_grad()
                probe.end_step()
        assert violations(probe) == found


def test_gradient_of_a_step_that_a_scaler_skipped() -> None:
    model = network()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with attached(model, optimizer, scaler=scaler) as probe:
        for step, batch in enumerate(BATCHES):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch) * (float("inf") if step in (1, 2) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            probe.end_step()
    assert violations(probe) == []


def closure_steps(model: nn.Module, optimizer: Any) -> AttachedProbe:
    with attached(model, optimizer) as probe:
        for batch in BATCHES:

            def closure(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)
            probe.end_step()
    return probe


def test_closures_hold() -> None:
    model = network()
    assert violations(closure_steps(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4))) == []
    model = network()
    assert violations(closure_steps(model, sgd(model))) == []


@pytest.mark.parametrize("is_trained", [True, False])
def test_lbfgs_that_has_converged_may_leave_its_parameters_unchanged(is_trained: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=50)
    hooks = {"weights": {"layers": "**", "kind": "step_post", "action": "record"}}
    x, y = BATCHES[0], BATCHES[1][:, :3]
    with warnings.catch_warnings(action="ignore"), instrument.attach(model, hooks, optimizer=optimizer) as probe:
        for _ in range(40):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            before = copy.deepcopy(model.state_dict())
            loss = optimizer.step(closure)
            if not is_trained:
                model.load_state_dict(before)
            probe.end_step(loss=loss.detach())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert model.weight.grad.abs().max() > 1e-7
    assert violations(probe) == []
    assert (probe.events.rule == "unchanged_parameter").any() != is_trained


class Gan(nn.Module):
    """A generator and a critic, each with an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (self.generator, self.critic)]


def gan_steps(gan: Gan, *, zero_critic: bool = True, critic_steps: int = 1) -> AttachedProbe:
    of_generator, of_critic = gan.optimizers()
    with attached(gan, [of_generator, of_critic]) as probe:
        for real in BATCHES:
            for _ in range(critic_steps):
                fake = gan.generator(torch.randn(16, 4)).detach()
                if zero_critic:
                    of_critic.zero_grad()
                F.softplus(-gan.critic(real)).mean().backward()
                F.softplus(gan.critic(fake)).mean().backward()
                of_critic.step()
            of_generator.zero_grad()
            F.softplus(-gan.critic(gan.generator(torch.randn(16, 4)))).mean().backward()
            of_generator.step()
            probe.end_step()
    return probe


@pytest.mark.spread(1)
@pytest.mark.parametrize("critic_steps", [1, 3])
def test_critic_that_gets_gradients_of_its_generator_holds(critic_steps: int) -> None:
    probe = gan_steps(Gan(), critic_steps=critic_steps)
    assert violations(probe) == []
    assert {"gradients_zeroed", "parameters_follow_gradients", "mode_of_phase"} <= verified(probe)


def test_critic_that_is_never_zeroed_is_reported() -> None:
    (row,) = rows(gan_steps(Gan(), zero_critic=False), "gradients_zeroed", holds=False)
    assert (row["step"], row["layer"]) == (1, "critic.3")


def test_gradients_of_functions_are_not_accumulated() -> None:
    """A penalty on gradients computes those of parameters without adding them to `parameter.grad`."""
    model = network()
    optimizer = sgd(model)
    with attached(model, optimizer) as probe:
        for batch in BATCHES:
            gradients = torch.autograd.grad(loss_of(model, batch), [*model.parameters()], create_graph=True)
            optimizer.zero_grad()
            (loss_of(model, batch) + sum(each.square().sum() for each in gradients)).backward()
            optimizer.step()
            probe.end_step()
    assert violations(probe) == []


@pytest.mark.slow
@pytest.mark.parametrize("zero", [True, False])
def test_sparse_and_complex_gradients_are_not_read(zero: bool) -> None:
    model = nn.ModuleDict({"words": nn.Embedding(9, 4, sparse=True), "head": nn.Linear(4, 2, dtype=torch.complex64)})
    optimizer = torch.optim.SGD([{"params": part.parameters()} for part in model.values()], lr=0.1)
    with attached(model, optimizer) as probe:
        for _ in range(5):
            if zero:
                optimizer.zero_grad()
            model["head"](model["words"](torch.arange(4)).to(torch.complex64)).abs().mean().backward()
            optimizer.step()
            probe.end_step()
    assert violations(probe) == ([] if zero else [("gradients_zeroed", 1)])


# ------------------------------------------------------------------------------------------------ accumulation_divides


def accumulated_steps(
    weight: float = 1.0, *, before_step: Callable[[nn.Module], object] = lambda model: None, **options: Any
) -> AttachedProbe:
    """Train with gradients of 4 micro-batches, whose losses are multiplied by a weight."""
    model = network()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", **{"enabled": False, **options})
    with attached(model, optimizer, scaler=scaler) as probe:
        for batches in BATCHES.view(2, 4, 16, 6):
            for batch in batches:
                scaler.scale(loss_of(model, batch) * weight).backward()
                probe.end_micro_step()
            scaler.unscale_(optimizer)
            before_step(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            probe.end_step()
    return probe


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def divide(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= 4


@pytest.mark.parametrize("options", [{}, {"enabled": True, "init_scale": 2.0**8}], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("before_step", [lambda model: None, clip], ids=["unclipped", "clipped"])
def test_gradients_that_are_added_completely_are_reported(before_step: Any, options: Any) -> None:
    (row,) = rows(accumulated_steps(before_step=before_step, **options), "accumulation_divides", holds=False)
    assert (row["step"], row["value"]) == (0, 4.0)


@pytest.mark.spread(3)
@pytest.mark.parametrize("options", [{}, {"enabled": True, "init_scale": 2.0**8}], ids=["unscaled", "scaled"])
@pytest.mark.parametrize(
    ("weight", "before_step"),
    [(0.25, lambda model: None), (0.25, clip), (1.0, divide)],
    ids=["plain", "clipped", "later"],
)
def test_gradients_that_are_divided_hold(weight: float, before_step: Any, options: Any) -> None:
    probe = accumulated_steps(weight, before_step=before_step, **options)
    assert violations(probe) == []
    assert ("accumulation_divides" in verified(probe)) == (weight == 0.25)


def test_losses_of_a_step_that_does_not_end_are_bounded() -> None:
    model = network()
    with attached(model, sgd(model)) as probe:
        for _ in range(MAX_LOSSES + 4):
            loss_of(model, BATCHES[0]).backward()
        relation = probe._relations._relations["accumulation_divides"]
        assert isinstance(relation, AccumulationDivides)
        assert [len(each) for each in relation._seeds.values()] == [MAX_LOSSES]


def test_micro_steps_of_several_optimizers_hold() -> None:
    """The loss of one part also gives gradients to the other one, which are zeroed before its own step."""
    first, second = network(), nn.Linear(3, 3)
    optimizers = [sgd(first), sgd(second)]
    with attached(nn.ModuleList([first, second]), optimizers) as probe:
        for batch in BATCHES:
            for optimizer in optimizers:
                optimizer.zero_grad()
                loss_of(nn.Sequential(first, second), batch).backward()
                optimizer.step()
                probe.end_micro_step()
            probe.end_step()
    assert violations(probe) == []


# ------------------------------------------------------------------------------------------------ loss_scale


def scaled_steps(count: int, factor: float, out: Path | None = None, **options: Any) -> AttachedProbe:
    model = network()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", **options)
    with attached(model, optimizer, scaler=scaler, out=out) as probe:
        for step in range(count):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, BATCHES[step % 8]) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            probe.end_step()
    return probe


@pytest.mark.parametrize(("unscaled", "steps"), [(False, [2]), (True, [])])
def test_gradients_that_are_clipped_before_the_scale_is_divided_out_are_reported(
    unscaled: bool, steps: list[int]
) -> None:
    model = network()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu")
    with attached(model, optimizer, scaler=scaler) as probe:
        for batch in BATCHES:
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            if unscaled:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            probe.end_step()
    assert violations(probe) == [("loss_scale", step) for step in steps]


@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_sums_of_losses_that_are_divided_by_the_number_of_tokens_are_not_clipped(max_norm: float | None) -> None:
    model, tokens = network(), 10_000
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu")
    with attached(model, optimizer, scaler=scaler) as probe:
        for batch in BATCHES:
            optimizer.zero_grad()
            scaler.scale(tokens * loss_of(model, batch)).backward()
            scaler.unscale_(optimizer)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= tokens
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            probe.end_step()
    assert violations(probe) == []


def test_scale_below_one_is_reported() -> None:
    probe = scaled_steps(4, float("inf"), init_scale=2.0)
    (row,) = rows(probe, "loss_scale", holds=False)
    assert (row["step"], row["value"]) == (1, 0.5)


def test_many_skipped_steps_in_succession_are_reported() -> None:
    events = scaled_steps(23, float("inf"), init_scale=2.0**40).events
    (event,) = events[events["rule"] == "loss_scale"].to_dict("records")
    assert (event["step"], event["value"]) == (19, 20.0)


@pytest.mark.slow
def test_rules_of_a_finished_run_decide_as_live(tmp_path: Path) -> None:
    scaled_steps(23, float("inf"), init_scale=2.0**20, out=tmp_path / "run")
    run = instrument.load(tmp_path / "run")
    live = run.events[run.events["rule"] == "loss_scale"]
    again = [event for event in rule_events(run, parse_rules(default_rules())) if event.rule == "loss_scale"]
    assert [event.step for event in again] == live["step"].to_list()
    assert [event.message for event in again] == live["message"].to_list()
    assert len(again) == 1


def test_scale_of_a_healthy_training_holds() -> None:
    for options in ({}, {"init_scale": 0.25}):
        probe = scaled_steps(8, 1.0, **options)
        assert violations(probe) == []
        assert ("loss_scale" in verified(probe)) == (not options)
    assert violations(scaled_steps(8, 1.0, enabled=False)) == []


# ------------------------------------------------------------------------------------------------ mode_of_phase


def test_training_after_an_evaluation_in_evaluation_mode_is_reported() -> None:
    for part in (nn.Dropout(0.3), nn.BatchNorm1d(8)):
        model = network(part)
        probe = train(model, sgd(model), change=lambda step, model=model: step == 2 and model.eval())  # type: ignore[misc]
        assert violations(probe) == [("mode_of_phase", 2)]


@pytest.mark.spread(1)
@pytest.mark.parametrize(("since", "found"), [(5, 8), (9, 9), (11, 16), (17, 17)])
def test_wrong_mode_in_a_short_training_is_reported(since: int, found: int) -> None:
    model = network(nn.Dropout(0.3))
    batches = torch.randn(25, 4, 6, generator=torch.Generator().manual_seed(1))
    probe = train(model, sgd(model), change=lambda step: step == since and model.eval(), batches=batches)  # type: ignore[arg-type, func-returns-value]
    assert violations(probe) == [("mode_of_phase", found)]


def test_model_that_is_never_in_training_mode_is_reported() -> None:
    model = network(nn.Dropout(0.3)).eval()
    assert violations(train(model, sgd(model))) == [("mode_of_phase", 0)]


def test_modes_of_healthy_trainings_hold() -> None:
    frozen_norm = network(nn.BatchNorm1d(8), nn.Dropout(0.3))
    frozen_norm[2].eval()
    always_evaluating = network(nn.BatchNorm1d(8), nn.Dropout(0.0)).eval()  # freezes the statistics
    frozen = nn.Sequential(network(nn.Dropout(0.3)).requires_grad_(False).eval(), nn.Linear(3, 3))
    without_modes = network().eval()
    for model in (frozen_norm, always_evaluating, frozen, without_modes):
        assert violations(train(model, sgd(model))) == []


def test_training_of_an_input_holds_in_evaluation_mode() -> None:
    model = network(nn.Dropout(0.3)).eval()
    image = nn.Parameter(BATCHES[0].clone())
    optimizer = torch.optim.SGD([image], lr=0.1)
    with attached(model, optimizer) as probe:
        for _ in range(3):
            optimizer.zero_grad()
            model(image).square().sum().backward()
            optimizer.step()
            probe.end_step()
    assert violations(probe) == []


def evaluations(model: nn.Module, *, prepare: Callable[[], object]) -> AttachedProbe:
    """Train and evaluate in alternation."""
    optimizer = sgd(model)
    with attached(model, optimizer) as probe:
        for batch in BATCHES:
            model.train()
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            probe.end_step()
            with probe.evaluating(), torch.no_grad():
                prepare()
                model(batch)
                model.train()
    return probe


@pytest.mark.spread(1)
@pytest.mark.parametrize("part", [nn.Dropout(0.3), nn.BatchNorm1d(8)], ids=["dropout", "norm"])
def test_evaluation_in_training_mode_is_reported(part: nn.Module) -> None:
    model = network(part)
    probe = evaluations(model, prepare=lambda: None)
    (row,) = rows(probe, "mode_of_phase", holds=False)
    assert (row["step"], row["phase"]) == (1, "eval")


def test_wrong_mode_is_reported_in_both_phases() -> None:
    model = network(nn.Dropout(0.3))
    optimizer = sgd(model)
    with attached(model, optimizer) as probe:
        for step, batch in enumerate(BATCHES[:4]):
            if step == 2:
                model.eval()
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            probe.end_step()
            if step == 1:
                with probe.evaluating(), torch.no_grad():
                    model(batch)
    events = probe.events[probe.events["rule"] == "mode_of_phase"]
    assert [(row["step"], row["phase"]) for row in rows(probe, "mode_of_phase", holds=False)] == [
        (2, "eval"),
        (2, "train"),
    ]
    assert len(events) == 2


def test_evaluations_in_evaluation_mode_hold() -> None:
    model = network(nn.Dropout(0.3), nn.BatchNorm1d(8))
    assert violations(evaluations(model, prepare=model.eval)) == []
    model = network(nn.Dropout(0.3))

    def sample_dropout() -> None:
        """Prepare Monte Carlo dropout (Gal and Ghahramani 2016)."""
        model.eval()
        model[2].train()

    assert violations(evaluations(model, prepare=sample_dropout)) == []
    model = network(nn.Dropout(0.0))
    assert violations(evaluations(model, prepare=lambda: None)) == []


@pytest.mark.parametrize(
    ("steps", "found"), [([2], [2]), ([5], [8]), ([10], [12]), ([2, 3, 5], [2]), ([], []), ([*range(12)], [])]
)
def test_evaluation_that_is_recorded_as_training_is_reported(steps: list[int], found: list[int]) -> None:
    model = network()
    optimizer = sgd(model)
    with attached(model, optimizer) as probe:
        for step in range(13):
            if step in steps:
                with torch.no_grad():
                    model.eval()(BATCHES[0])
            if step < 12:
                optimizer.zero_grad()
                loss_of(model.train(), BATCHES[0]).backward()
                optimizer.step()
                probe.end_step()
    assert violations(probe) == [("mode_of_phase", step) for step in found]
    if found:
        assert f"an evaluation or a rollout at step {steps[0]} is recorded as training" in probe.warnings[0]


def test_export_between_steps_is_not_an_evaluation() -> None:
    model = network()

    def export(step: int) -> None:
        if step == 5:
            with torch.no_grad():
                torch.export.export(model.eval(), (BATCHES[0],), strict=False)
            model.train()

    assert violations(train(model, sgd(model), change=export)) == []


def test_calls_without_training_are_not_evaluations() -> None:
    model = network().eval()
    with attached(model, None) as probe:
        for step in range(6):
            if step != 2:
                with torch.no_grad():
                    model(BATCHES[0])
            probe.end_step()
    assert violations(probe) == []


def test_copy_of_a_model_has_no_hook_that_reads_its_mode() -> None:
    model = network(nn.Dropout(0.3))
    with attached(model, sgd(model)) as probe, probe.evaluating():
        copied = copy.deepcopy(model)
        copied(BATCHES[0])
        model.eval()(BATCHES[0])
    assert rows(probe, "mode_of_phase", holds=False) == []


# ------------------------------------------------------------------------------------------------ parameters_follow_gradients


def test_optimizer_that_changes_nothing_is_reported() -> None:
    class Idle(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    model = network()
    assert violations(train(model, Idle(model.parameters(), lr=0.1))) == [("parameters_follow_gradients", 3)]


@pytest.mark.spread(1)
@pytest.mark.parametrize("factor", [1e-12, 0.0])
def test_small_updates_hold(factor: float) -> None:
    """A warm-up begins with a small rate, or with 0. A converged training has small gradients."""
    model = network()
    assert violations(train(model, sgd(model, lr=factor))) == []
    model = network()
    optimizer = sgd(model)
    with attached(model, optimizer) as probe:
        for batch in BATCHES:
            optimizer.zero_grad()
            (factor * loss_of(model, batch)).backward()
            optimizer.step()
            probe.end_step()
    assert violations(probe) == []


def test_forgotten_head_is_reported() -> None:
    model = network()
    probe = train(nn.Sequential(*model), torch.optim.SGD(model[0].parameters(), lr=0.1))  # as many: may be a choice
    assert violations(probe) == []
    model = network(nn.Linear(8, 8), nn.Linear(8, 8))
    probe = train(model, torch.optim.SGD(model[:4].parameters(), lr=0.1))
    found = rows(probe, "parameters_follow_gradients", holds=False)
    assert [(row["step"], row["layer"], row["path"]) for row in found] == [(3, "4", "weight"), (3, "4", "bias")]


def test_forgotten_bias_is_reported_in_its_fourth_step_if_the_weight_has_a_later_gradient() -> None:
    model = network(nn.Linear(8, 8), nn.Linear(8, 8))

    def freeze(step: int) -> None:
        model[4].weight.requires_grad_(step >= 2)

    probe = train(model, torch.optim.SGD(model[:4].parameters(), lr=0.1), change=freeze)
    found = rows(probe, "parameters_follow_gradients", holds=False)
    assert [(row["step"], row["layer"], row["path"]) for row in found] == [(3, "4", "bias")]


def test_layer_of_a_compiled_model_has_its_name_in_the_tables() -> None:
    model = network(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model[:4].parameters(), lr=0.1)
    probe = train(torch.compile(model, backend="eager"), optimizer)  # type: ignore[arg-type]
    found = rows(probe, "parameters_follow_gradients", holds=False)
    assert {row["layer"] for row in found} == {"4"} <= {*probe.layers["layer"]}


def test_parameter_that_was_replaced_is_reported() -> None:
    model = network()
    optimizer = sgd(model)

    def replace(step: int) -> None:
        if step == 1:
            model[0].weight = nn.Parameter(model[0].weight.detach().clone())

    (row,) = rows(train(model, optimizer, change=replace), "parameters_follow_gradients", holds=False)
    assert (row["step"], row["layer"], row["path"]) == (4, "0", "weight")


@pytest.mark.parametrize("units", [40, 4])
def test_forgotten_head_that_changes_its_size_is_reported(units: int) -> None:
    model = network(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model[:4].parameters(), lr=0.1)
    with attached(model, optimizer) as probe:
        for step, batch in enumerate(BATCHES):
            loss_of(model, batch).backward()
            optimizer.step()
            probe.end_step()
            if step == 0:
                for parameter in model[4].parameters():
                    parameter.grad, parameter.data = None, torch.ones(units, *parameter.shape[1:])
    found = rows(probe, "parameters_follow_gradients", holds=False)
    assert [(row["step"], row["layer"], row["path"]) for row in found] == [(4, "4", "weight"), (4, "4", "bias")]


def test_parameters_that_are_left_out_on_purpose_hold() -> None:
    model = network()
    assert violations(train(model, torch.optim.SGD(model[2].parameters(), lr=0.1))) == []  # a linear probe
    model[0].requires_grad_(False)
    assert violations(train(model, torch.optim.SGD(model[2].parameters(), lr=0.1))) == []
    model = network(nn.Linear(8, 8))
    of_norm = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    assert violations(train(model, torch.optim.SGD(of_norm, lr=0.1))) == []  # only biases (BitFit)


def test_parameter_that_the_loop_changes_itself_holds() -> None:
    model = network(nn.Linear(8, 8), nn.Linear(8, 8))

    @torch.no_grad()
    def change(step: int) -> None:
        for parameter in model[4:].parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None

    assert violations(train(model, torch.optim.SGD(model[:4].parameters(), lr=0.1), change=change)) == []


@pytest.mark.parametrize("set_to_none", [False, True])
def test_frozen_parameter_with_momentum_changes_only_with_a_gradient(set_to_none: bool) -> None:
    model = network()
    optimizer = sgd(model, momentum=0.9)

    def freeze(step: int) -> None:
        if step == 2:
            model[0].requires_grad_(False)

    probe = train(model, optimizer, zero=lambda each: each.zero_grad(set_to_none=set_to_none), change=freeze)
    found = {row["layer"] for row in rows(probe, "parameters_follow_gradients", holds=False)}
    assert found == (set() if set_to_none else {"0"})


@pytest.mark.parametrize("freezes", [False, True])
def test_layers_that_are_frozen_during_the_run_may_be_unchanged(freezes: bool) -> None:
    model = network()
    optimizer = torch.optim.SGD([{"params": part.parameters()} for part in (model[0], model[2])], lr=0.1)
    with instrument.attach(
        model,
        {
            "weights": {"layers": "*", "kind": "step_post", "action": "record"},
            "gradients": {"layers": "*", "kind": "parameter_grad", "action": "record"},
        },
        optimizer=optimizer,
        rules={"still": {"rule": "unchanged_parameter"}, "zero": {"rule": "all_zero"}},
    ) as probe:
        for step, batch in enumerate(BATCHES):
            if step == 3 and freezes:
                model[2].requires_grad_(False)
            elif step == 3:
                optimizer.param_groups[1]["lr"] = 0.0
            loss = loss_of(model, batch)
            optimizer.zero_grad(set_to_none=False)  # so that a frozen parameter has a gradient of zeros
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    events = probe.run.events
    assert events[events.rule == "still"].layer.tolist() == ([] if freezes else ["2"])
    assert "zero" not in {*events.rule}


class Pooled(nn.Module):
    """A classifier of features, with a pooler whose output it does not use. `stack`: the pooler has two layers."""

    def __init__(self, stack: bool) -> None:
        super().__init__()
        self.features, self.pooler, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.pooler = nn.Sequential(self.pooler, nn.Linear(8, 8)) if stack else self.pooler

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.features(x).relu()
        self.pooler(hidden)
        return self.head(hidden)


@pytest.mark.parametrize(("kind", "stack", "severity"), [
    ("full_backward", False, "info"), ("full_backward", True, "warning"), ("parameter_grad", False, "warning"),
])  # fmt: skip
def test_a_layer_whose_output_is_not_used_is_noted(kind: str, stack: bool, severity: str) -> None:
    """An optimizer that does not hold a parameter also leaves out the hook on its gradient, but not that on the gradient of the output."""
    model = Pooled(stack)
    optimizer = sgd(model)
    hooks: dict[str, Any] = {
        "weights": {"layers": "**", "kind": "step_post", "action": "record"},
        "gradients": {"layers": "**", "kind": kind, "action": "record"},
    }
    if kind == "full_backward":
        hooks["gradients"]["role"] = "grad_output"
    with (
        warnings.catch_warnings(action="ignore"),
        instrument.attach(model, hooks, optimizer=optimizer, rules={"still": {"rule": "unchanged_parameter"}}) as probe,
    ):
        for batch in BATCHES:
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    first = probe.events.iloc[0]
    assert (first.layer, first.severity) == ("pooler.0" if stack else "pooler", severity)
    assert ("its output is not used, or is detached" in first.message) == (severity == "info")


class Later(nn.Module):
    """A classifier with parts that are used later: a parameter, a head that is not called, and one whose loss has the factor 0."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.features.register_parameter("step_size", nn.Parameter(torch.ones(8)))
        self.exit = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
        self.angle = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        self.factor = 0.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.features(x).relu()
        return self.head(hidden) + self.factor * self.angle(hidden).mean()


@pytest.mark.parametrize("unused", ["exit", "angle", "nothing"])
def test_parts_that_are_used_later_are_noted(unused: str) -> None:
    """But not if all gradients are zero."""
    model = Later()
    if unused != "exit":
        del model.exit
    optimizer = sgd(model)
    hooks = {
        "outputs": {"layers": "**", "kind": "forward", "action": "record"},
        "weights": {"layers": "**", "kind": "step_post", "action": "record"},
        "gradients": {"layers": "**", "kind": "parameter_grad", "action": "record"},
        "of_outputs": {"layers": "**", "kind": "full_backward", "role": "grad_output", "action": "record"},
    }
    with warnings.catch_warnings(action="ignore"), instrument.attach(model, hooks, optimizer=optimizer) as probe:
        for batch in BATCHES:
            loss = loss_of(model, batch) * (unused != "nothing")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss + 1.0)
    events = probe.events.query("rule in ['unchanged_parameter', 'all_zero', 'vanishing_gradient']")
    assert (events.severity == "warning").any() == (unused == "nothing")
    messages = [
        message.partition(": ")[2] for message in events.message[events.layer.fillna("").str.startswith(unused)]
    ]
    text = {"exit": "its layer is not called", "angle": "as a term with a factor of 0", "nothing": ""}[unused]
    assert all(text in message for message in messages)
    assert any("it is not used in these steps" in message for message in events.message)
    assert unused == "nothing" or messages


@pytest.mark.parametrize("why", ["weights forgotten", "calls of one layer", "no gradients"])
def test_unchanged_parameter_of_a_layer_that_may_be_used_is_reported(why: str) -> None:
    """The optimizer holds only biases, or hooks do not show whether a layer whose group has no rate is called."""
    model = network()
    weights, biases = ([each for name, each in model.named_parameters() if part in name] for part in ("weight", "bias"))
    forgotten = why == "weights forgotten"
    groups = [{"params": biases}, *([] if forgotten else [{"params": weights, "lr": 0.0}])]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    hooks = {
        "outputs": {"layers": "**" if forgotten else "2", "kind": "forward", "action": "record"},
        "weights": {"layers": "**", "kind": "step_post", "action": "record"},
        "gradients": {"layers": "**" if forgotten else "2", "kind": "parameter_grad", "action": "record"},
    }
    if why == "no gradients":
        del hooks["gradients"]
    rules = {"still": {"rule": "unchanged_parameter"}}
    with (
        warnings.catch_warnings(action="ignore"),
        instrument.attach(model, hooks, optimizer=optimizer, rules=rules) as probe,
    ):
        for batch in BATCHES:
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    still = probe.events[probe.events.rule == "still"]
    assert still.severity.tolist().count("warning") == 1
    assert still.message.str.endswith("unchanged for 3 recorded steps").all()


@pytest.mark.parametrize("role", ["param", "update"])
def test_layers_that_are_skipped_in_recorded_steps_have_changed(role: str) -> None:
    """As by stochastic depth: with the parameters, their changes between these steps are known."""
    model = network()
    optimizer = sgd(model)
    hook = {"layers": "2", "kind": "step_post", "action": "record", "every": 2}
    hooks = {"updates": {**hook, "role": "update"}, "weights": {**hook, "role": role}}
    hooks["means"] = {**hook, "role": "param", "stats": ["mean"]}  # as of another hook set
    with warnings.catch_warnings(action="ignore"), instrument.attach(model, hooks, optimizer=optimizer) as probe:
        for step, batch in enumerate(BATCHES):
            loss = loss_of(model, batch) if step % 2 else loss_of(model[0], batch)
            optimizer.zero_grad(set_to_none=False)  # so that a frozen parameter has a gradient of zeros
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    assert (probe.events.rule == "unchanged_parameter").any() == (role == "update")


# ------------------------------------------------------------------------------------------------ rate_in_effect


def test_scheduler_of_an_earlier_optimizer_is_reported() -> None:
    model = network()
    schedule = torch.optim.lr_scheduler.ExponentialLR(sgd(model, lr=0.25), 0.5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        probe = train(model, sgd(model), change=lambda step: schedule.step())
    (row,) = rows(probe, "rate_in_effect", holds=False)
    assert (row["step"], row["value"]) == (1, 0.25 * 0.5**2)  # after its second step
    assert torch.optim.lr_scheduler.LRScheduler.step.__qualname__ == "LRScheduler.step"


def test_scheduler_of_an_earlier_optimizer_with_the_rate_in_effect_is_not_reported() -> None:
    model = network()
    schedule = torch.optim.lr_scheduler.ConstantLR(sgd(model), 1.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        probe = train(model, sgd(model), change=lambda step: schedule.step())
    assert violations(probe) == []


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("length", "every", "start", "is_reported"),
    [(60, 30, 0, True), (60, 2, 0, False), (61, 30, 0, False), (50, 30, 0, False), (90, 30, 30, False)],
)
def test_schedule_of_batches_with_a_step_per_epoch_is_reported(
    length: int, every: int, start: int, is_reported: bool
) -> None:
    model = network()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length)
    batches = torch.randn(60, 4, 6, generator=torch.Generator().manual_seed(1))

    def change(step: int) -> None:
        if step % every == every - 1:
            schedule.step()

    probe = train(model, optimizer, change=change, batches=batches, rules="default", step=start)
    assert violations(probe) == [("rate_in_effect", 60)] * is_reported


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("configured", "steps", "factor", "is_reported"),
    [
        (0.05, 100, lambda step: (step + 1) / 20_000, True),
        (0.05, 99, lambda step: (step + 1) / 20_000, False),
        (0.05, 100, lambda step: (step + 1) / 2_000, False),
        (0.05, 100, lambda step: 0.001, False),  # it does not rise
        (1.0, 100, lambda step: 32**-0.5 * 4000**-1.5 * (step + 1), False),  # Vaswani et al. 2017
    ],
)
def test_warm_up_that_never_ends_is_reported(configured: float, steps: int, factor: Any, is_reported: bool) -> None:
    model = network()
    optimizer = sgd(model, lr=configured)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    batches = torch.randn(steps, 4, 6, generator=torch.Generator().manual_seed(1))
    probe = train(model, optimizer, change=lambda step: step and schedule.step(), batches=batches, rules="default")  # type: ignore[arg-type, func-returns-value]
    assert violations(probe) == [("rate_in_effect", steps)] * is_reported
    assert (probe.run.events.rule == "rate_in_effect").sum() == is_reported


def test_rate_that_is_not_a_number_is_reported() -> None:
    model = network()
    optimizer = sgd(model)

    def change(step: int) -> None:
        optimizer.param_groups[0]["lr"] = float("nan") if step == 2 else 0.1

    assert violations(train(model, optimizer, change=change))[0] == ("rate_in_effect", 2)


@pytest.mark.spread(3)
@pytest.mark.parametrize("rate", [torch.tensor([0.1, 0.2]), torch.tensor(0.1), lambda step: 0.1, None, "missing"])
def test_rates_that_are_no_numbers_do_not_end_the_training(rate: Any) -> None:
    class Own(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(0.1 * parameter.grad)

    model = network()
    optimizer = Own(model.parameters(), {} if rate == "missing" else {"lr": rate})
    probe = train(model, optimizer, rules="default")
    assert violations(probe) == []
    assert not any("failed" in row["text"] for row in probe.relations.to_dict("records"))
    is_number = isinstance(rate, torch.Tensor) and rate.numel() == 1
    assert probe.run.metrics["lr"].notna().all() == is_number


def test_failing_observation_of_a_step_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: RateInEffect, optimizer: Any) -> None:
        raise ValueError("wrong shape")

    monkeypatch.setattr(RateInEffect, "before_step", fail)
    model = network()
    table = train(model, sgd(model)).relations.to_dict("records")
    (text,) = [row["text"] for row in table if row["relation"] == "rate_in_effect"]
    assert text == "the check failed: ValueError: wrong shape"


def test_steps_in_a_graph_capture_are_not_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    model = network(nn.Dropout(0.3))
    assert verified(train(model, sgd(model))) == set()


def test_schedulers_of_trained_optimizers_hold() -> None:
    schedules = torch.optim.lr_scheduler
    for make in (
        lambda optimizer: schedules.OneCycleLR(optimizer, 0.1, total_steps=20),
        lambda optimizer: schedules.LinearLR(optimizer, 0.0001),
        lambda optimizer: schedules.ChainedScheduler(
            [schedules.ConstantLR(optimizer), schedules.ExponentialLR(optimizer, 0.9)]
        ),
    ):
        model = network()
        optimizer = sgd(model)
        schedule = make(optimizer)
        assert violations(train(model, optimizer, change=lambda step, each=schedule: step and each.step())) == []  # type: ignore[misc]


def test_relations_of_optimizers_change_nothing() -> None:
    model, other = network(nn.BatchNorm1d(8), nn.Dropout(0.3)), network(nn.BatchNorm1d(8), nn.Dropout(0.3))
    torch.manual_seed(1)
    train(model, sgd(model, momentum=0.9))
    after = torch.get_rng_state()
    torch.manual_seed(1)
    optimizer = sgd(other, momentum=0.9)
    for batch in BATCHES:
        loss = loss_of(other, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    assert torch.equal(torch.get_rng_state(), after)
    assert not model._forward_pre_hooks
    assert not any(each._backward_hooks for each in model.parameters())


def test_losses_and_gradients_are_observed_in_checked_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.relations.observations.has_compiled", lambda: False)  # by another test
    model, function, observed = network(), torch._C._nn.cross_entropy_loss, []
    with attached(model, optimizer := sgd(model)) as probe:
        for step in range(20):
            has_hooks = any(each._backward_hooks is not None for each in model.parameters())
            assert has_hooks == (torch._C._nn.cross_entropy_loss is not function)
            observed += [step] * has_hooks
            loss_of(model, BATCHES[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
            probe.end_step()
    assert observed == [0, 1, 2, 3, 4, 8, 9, 16, 17]
    assert torch._C._nn.cross_entropy_loss is function


def test_hooks_of_a_parameter_stay_in_its_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch would read the memory of hooks that are freed while one of them runs."""
    monkeypatch.setattr("instrument.relations.observations.has_compiled", lambda: False)
    model, kept = network(), []
    with attached(model, sgd(model)) as probe:
        (observed,) = (each for each in model.parameters() if each._backward_hooks)

        def stop(gradient: Tensor) -> None:
            handle.remove()
            probe.detach()
            kept.append(observed._backward_hooks)

        handle = observed.register_hook(stop)
        loss_of(model, BATCHES[0]).backward()
    assert kept == [{}]


@pytest.mark.slow
def test_compiled_model_is_not_compiled_again_for_checked_steps() -> None:
    from torch._dynamo.testing import CompileCounter

    counts, weights = [], []
    for is_attached in (False, True):
        torch.compiler.reset()
        model = network(nn.Dropout(0.3))
        optimizer, count = sgd(model), CompileCounter()
        compiled = torch.compile(model, backend=count)
        torch.manual_seed(1)
        with attached(model, optimizer) if is_attached else nullcontext() as probe:
            for _ in range(10):
                optimizer.zero_grad()
                loss_of(compiled, BATCHES[0]).backward()
                optimizer.step()
                if probe is not None:
                    probe.end_step()
        counts.append(count.frame_count)
        weights.append(model[0].weight)
    assert counts == [1, 1]
    assert torch.equal(*weights)


@pytest.mark.slow
def test_compiled_steps_are_not_observed_and_stay_the_same() -> None:
    from torch._dynamo.testing import CompileCounter

    graphs, weights = [], []
    for is_attached in (False, True):
        torch.compiler.reset()
        model = network(nn.Dropout(0.0))
        optimizer = sgd(model)
        count = CompileCounter()
        step = torch.compile(optimizer.step, backend=count)
        with attached(model, optimizer) if is_attached else nullcontext() as probe:
            for batch in BATCHES[:3]:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                step()
                if probe is not None:
                    probe.end_step()
        graphs.append((count.frame_count, count.op_count))
        weights.append(model[0].weight)
    assert violations(probe) == []  # type: ignore[arg-type]
    assert graphs[0] == graphs[1]
    assert torch.equal(*weights)
