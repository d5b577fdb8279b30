"""Several optimizers of one model: hooks act at the step of the optimizer that holds the parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hook_runs import assert_equal, record, tensors_by
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import instrument
from instrument import ConfigError, Probe
from instrument.errors import HookError

RECORD = {"layers": "*", "action": "record", "tensors": True}
KINDS: dict[str, Any] = {
    "gradient": {**RECORD, "kind": "parameter_grad"},
    "before": {**RECORD, "kind": "step_pre"},
    "update": {**RECORD, "kind": "step_post", "role": "update"},
    "running": {**RECORD, "layers": "norm", "kind": "step_post", "role": "buffer", "params": "running_mean"},
}


class Pair(nn.Module):
    """A generator and a critic."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.norm, self.critic = nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)


def optimizers_of(model: Pair) -> tuple[Optimizer, Optimizer]:
    """Return the critic's optimizer first, since it makes more steps."""
    generator = [*model.generator.parameters(), *model.norm.parameters()]
    return SGD(model.critic.parameters(), lr=0.1, momentum=0.9), Adam(generator, lr=0.01)


def generate(model: Pair) -> Tensor:
    fake: Tensor = model.norm(model.generator(torch.ones(4, 2) * torch.arange(4.0).view(4, 1)))
    return fake


def train(
    model: Pair,
    optimizers: Sequence[Optimizer],
    end_step: Callable[[], object],
    *,
    steps: int = 6,
    critics: int = 1,
    every: int = 1,
) -> None:
    """Run `critics` critic steps in each step of the loop, and a generator step at every `every`-th step."""
    critic, generator = optimizers
    for step in range(steps):
        for _ in range(critics):
            critic.zero_grad()
            (model.critic(generate(model).detach()).mean() - model.critic(torch.ones(4, 3)).mean()).backward()
            critic.step()
        if step % every == 0:
            generator.zero_grad()
            (-model.critic(generate(model)).square().mean()).backward()
            generator.step()
        end_step()


def trained(hooks: dict[str, Any], as_type: type = list, **loop: int) -> tuple[Probe, Pair]:
    model = Pair()
    optimizers = optimizers_of(model)
    with instrument.attach(model, hooks, optimizer=as_type(optimizers)) as probe:
        train(model, optimizers, probe.end_step, **loop)
    return probe, model


@pytest.mark.spread(1)
@pytest.mark.parametrize("as_type", [list, tuple])
def test_each_parameter_is_recorded_at_its_optimizer_step(as_type: type) -> None:
    probe, model = trained(KINDS, as_type)
    baseline = Pair()
    train(baseline, optimizers_of(baseline), lambda: None)
    assert_equal(model.state_dict().values(), baseline.state_dict().values())
    assert [row for row in probe.coverage() if row["fired"] != 6 or row["expected"] != 6] == []
    rows = tensors_by(probe, "hook", "layer", "path", "step", "call")
    assert {call for *_, call in rows} == {0}
    replayed = Pair()
    optimizers = optimizers_of(replayed)

    def check(optimizer: Optimizer, _: object, __: object) -> None:
        """Check that the recorded gradients are those that this optimizer is about to use."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in replayed.named_parameters():
            if id(parameter) in held:
                layer, _, path = name.rpartition(".")
                assert parameter.grad is not None
                assert torch.equal(rows["gradient", layer, path, len(steps), 0], parameter.grad)
                assert torch.equal(rows["before", layer, path, len(steps), 0], parameter)

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(check)
    steps: list[int] = []
    train(replayed, optimizers, lambda: steps.append(0))
    for (hook, layer, path, step, _), update in rows.items():
        if hook == "update" and step < 5:
            later, earlier = rows["before", layer, path, step + 1, 0], rows["before", layer, path, step, 0]
            assert torch.equal(update, later - earlier)


def test_optimizers_with_different_rates_count_their_own_steps() -> None:
    probe, _ = trained(KINDS, steps=10, every=5)
    counts = {(row["hook"], row["layer"]): (row["expected"], row["fired"], row["cause"]) for row in probe.coverage()}
    assert {count for (_, layer), count in counts.items() if layer == "critic"} == {(10, 10, "")}
    assert {count for (_, layer), count in counts.items() if layer != "critic"} == {(2, 2, "")}
    assert probe.warnings == []
    steps = {row["step"] for row in probe.sink.records("stats") if row["layer"] == "generator"}
    assert steps == {0, 5}


def test_several_optimizer_steps_in_one_step_are_calls() -> None:
    probe, _ = trained(KINDS, steps=3, critics=5)
    rows = [row for row in probe.sink.records("stats") if row["hook"] == "gradient" and row["path"] == "weight"]
    calls = [(row["step"], row["call"]) for row in rows if row["layer"] == "critic"]
    assert calls == [(step, call) for step in range(3) for call in range(5)]
    assert [row["call"] for row in rows if row["layer"] == "generator"] == [0, 0, 0]
    expected = {row["layer"]: row["expected"] for row in probe.coverage() if row["hook"] == "update"}
    assert expected == {"generator": 3, "norm": 3, "critic": 15}
    assert probe.warnings == []


def test_clip_uses_the_gradients_of_the_stepping_optimizer() -> None:
    model, plain = Pair(), Pair()
    clip = {"tame": {"layers": "**", "kind": "parameter_grad", "action": "clip", "norm": 0.01}}
    optimizers = optimizers_of(model)
    with instrument.attach(model, clip, optimizer=optimizers) as probe:
        train(model, optimizers, probe.end_step)
    clipped = optimizers_of(plain)

    def clip_before_step(optimizer: Optimizer, _: object, __: object) -> None:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)

    for optimizer in clipped:
        optimizer.register_step_pre_hook(clip_before_step)
    train(plain, clipped, lambda: None)
    assert_equal(model.parameters(), plain.parameters())


def test_state_is_that_of_the_optimizer_of_the_parameter() -> None:
    hooks = {
        "moment": {**RECORD, "kind": "step_post", "role": "state.exp_avg"},
        "saved": {**RECORD, "kind": "state_dict_post", "role": "state.momentum_buffer"},
    }
    model = Pair()
    critic, generator = optimizers_of(model)
    with instrument.attach(model, hooks, optimizer=[critic, generator]) as probe:
        train(model, (critic, generator), probe.end_step, steps=1)
        critic.state_dict()
    tensors = tensors_by(probe, "hook", "layer", "path").items()
    rows = {(hook, layer): tensor for (hook, layer, path), tensor in tensors if path == "bias"}
    assert rows.keys() == {("moment", "generator"), ("moment", "norm"), ("saved", "critic")}
    assert torch.equal(rows["moment", "generator"], generator.state[model.generator.bias]["exp_avg"])
    assert torch.equal(rows["saved", "critic"], critic.state[model.critic.bias]["momentum_buffer"])
    message = "requires optimizer state that SGD and Adam do not keep with their current options"
    with pytest.raises(ConfigError, match=message):
        trained({"none": {**RECORD, "kind": "step_post", "role": "state.square"}})


def test_parameter_of_two_optimizers_is_recorded_at_both_steps() -> None:
    layer = nn.Linear(2, 1)
    both = [SGD(layer.parameters(), lr=0.1), SGD([layer.weight], lr=0.2)]
    hooks = {"g": record("parameter_grad")}
    with instrument.attach(layer, hooks, optimizer=both) as probe:
        layer(torch.ones(1, 2)).backward()
        for optimizer in both:
            optimizer.step()
        probe.end_step()
    rows = [(row["path"], row["call"]) for row in probe.sink.records("stats")]
    assert rows == [("weight", 0), ("bias", 0), ("weight", 1)]


def test_learning_rate_is_that_of_the_first_optimizer() -> None:
    assert [row["lr"] for row in trained({}, steps=2)[0].sink.records("metrics")] == [0.1, 0.1]


def scaled(factors: dict[str, float]) -> Probe:
    """Run a step with one gradient scaler and with losses multiplied by the factors."""
    model = Pair()
    optimizers = dict(zip(("critic", "generator"), optimizers_of(model), strict=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with instrument.attach(model, KINDS, optimizer=[*optimizers.values()], scaler=scaler) as probe:
        losses = {"critic": model.critic(torch.ones(4, 3)).mean(), "generator": generate(model).square().mean()}
        for name, factor in factors.items():
            scaler.scale(losses[name] * factor).backward()
        for name in factors:
            scaler.step(optimizers[name])
        scaler.update()
        probe.end_step()
    return probe


@pytest.mark.parametrize(
    ("factors", "skipped", "critic", "generator"),
    [
        ({"critic": 1.0, "generator": 1.0}, False, (1, 1), (1, 1)),
        ({"critic": 1.0, "generator": float("inf")}, False, (1, 1), (1, 0)),
        ({"critic": float("inf"), "generator": float("inf")}, True, (1, 0), (1, 0)),
        ({"critic": 1.0}, False, (1, 1), (0, 0)),
    ],
)
def test_optimizer_skipped_by_the_scaler_is_the_cause(
    factors: dict[str, float], skipped: bool, critic: tuple[int, int], generator: tuple[int, int]
) -> None:
    probe = scaled(factors)
    assert [row["skipped"] for row in probe.sink.records("metrics")] == [skipped]
    rows = {row["layer"]: row for row in probe.coverage() if row["hook"] == "gradient"}
    assert (rows["critic"]["expected"], rows["critic"]["fired"]) == critic
    assert (rows["generator"]["expected"], rows["generator"]["fired"]) == generator
    if generator == (1, 0):
        assert rows["generator"]["cause"].startswith("the gradient scaler skipped")
    if generator == (0, 0):
        assert rows["generator"]["cause"].startswith("the optimizer that holds the parameter made no step")


def test_step_announced_by_the_loop_has_to_name_the_optimizer() -> None:
    model = Pair()
    critic, generator = optimizers_of(model)
    with instrument.attach(model, KINDS, optimizer=[critic, generator], steps_by_loop=True) as probe:
        with pytest.raises(ValueError, match="is required"):
            probe.before_optimizer_step()
        with pytest.raises(ValueError, match="was not passed to this probe"):
            probe.before_optimizer_step(SGD(model.parameters(), lr=0.1))
        model.critic(torch.ones(1, 3)).backward()
        probe.before_optimizer_step(critic)
    assert {row["layer"] for row in probe.sink.records("stats")} == {"critic"}


@pytest.mark.parametrize("kind", ["parameter_grad", "step_post"])
def test_missing_and_repeated_announcements_of_steps_are_errors(kind: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    role = {"role": "update"} if kind == "step_post" else {}
    specs = {"h": {"layers": ".", "kind": kind, "action": "record", **role}}
    with instrument.attach(model, specs, optimizer=optimizer, steps_by_loop=True) as probe:
        for repeated in (False, True):
            model(torch.ones(1, 2)).backward()
            if repeated:
                probe.before_optimizer_step()
                with pytest.raises(HookError, match="called twice before"):
                    probe.before_optimizer_step()
                optimizer.step()
                probe.before_optimizer_step()
                optimizer.step()
            else:
                with pytest.raises(HookError, match=r"ran without probe\.before_optimizer_step"):
                    optimizer.step()
            probe.end_step()
        probe.before_optimizer_step()
        probe.end_step()  # the step did not follow, as with a gradient scaler that found infinities
        probe.before_optimizer_step()
        optimizer.step()
    refused = pytest.raises(ValueError, match="requires steps_by_loop=True")
    with instrument.attach(model, specs, optimizer=optimizer) as probe, refused:
        probe.before_optimizer_step()


def test_closure_can_announce_its_step_several_times() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    specs = {"h": record("parameter_grad")}
    with instrument.attach(model, specs, optimizer=optimizer, steps_by_loop=True) as probe:

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (model(torch.ones(1, 2)) - 1).square().sum()
            loss.backward()
            probe.before_optimizer_step()
            return loss

        for _ in range(2):
            optimizer.step(closure)
            probe.end_step()


@pytest.mark.parametrize("given", [nn.Linear(1, 1), [SGD([torch.ones(1)], lr=0.1), 3]])
def test_invalid_optimizer_is_refused_or_reported(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"optimizer: is not an optimizer(.|\n)*a list of them"):
        instrument.attach(Pair(), {}, optimizer=given).__enter__()
    others = [SGD(nn.Linear(1, 1).parameters(), lr=0.1) for _ in range(2)]  # without parameters of the model
    with instrument.attach(Pair(), {}, optimizer=others) as probe:
        pass
    assert [row["rule"] for row in probe.sink.records("events")] == ["optimizer"]
