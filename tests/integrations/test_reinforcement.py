"""Loops of reinforcement learning: rollouts, signed losses, replay buffers and several optimizers."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hook_runs import record
from torch import Tensor, nn
from training_runs import train_here

import instrument
from instrument import ConfigError, InstrumentWarning


def policy(zero_head: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 4))
    if zero_head:
        nn.init.zeros_(model[3].weight)
        nn.init.zeros_(model[3].bias)
    return model


def improve(model: nn.Module, optimizer: torch.optim.Optimizer, states: Tensor, actions: Tensor) -> Tensor:
    """Make a step of a policy gradient with normalized advantages. The right action is the sign of the first number."""
    right = (states[:, 0] > 0).long()
    rewards = (actions == right).float() + 2 * torch.randn(len(states))
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    chances = torch.distributions.Categorical(logits=model(states)).log_prob(actions)
    loss = -(chances * advantages).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def act(model: nn.Module, states: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.distributions.Categorical(logits=model(states)).sample()


HOOKS = {
    "acting": record("forward", "3", phase="rollout"),
    "evaluated": record("forward", "3", phase="eval"),
    "learning": record("forward", "3"),
}


def train(model: nn.Module, steps: int, probe: Any = None) -> list[Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        states = torch.randn(16, 3)
        if probe is None:
            actions = torch.cat([act(model, part) for part in states.split(8)])
            losses.append(improve(model, optimizer, states, actions))
            continue
        with probe.in_phase("rollout"):
            parts = []
            for part in states.split(8):
                parts.append(act(model, part))
                probe.end_micro_step()
            actions = torch.cat(parts)
            probe.log(episode_return=len(losses))
        losses.append(improve(model, optimizer, states, actions))
        probe.end_step(loss=losses[-1])
    return losses


def test_rollouts_have_their_own_phase() -> None:
    bare = policy()
    expected = train(bare, 3)
    state = torch.get_rng_state()
    model = policy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with instrument.attach(model, HOOKS) as probe:
            assert train(model, 3, probe) == expected
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), bare.parameters(), strict=True))
    rows = probe.stats.groupby("hook", observed=True)[["step", "micro_step", "phase"]]
    found = {name: [*group.itertuples(index=False, name=None)] for name, group in rows}
    assert found == {
        "acting": [(step, part, "rollout") for step in range(3) for part in range(2)],
        "learning": [(step, 0, "train") for step in range(3)],
    }
    metrics = probe.run.metrics
    assert metrics[metrics.phase == "rollout"][["step", "episode_return"]].to_numpy().tolist() == [
        [0, 0],
        [1, 1],
        [2, 2],
    ]
    assert metrics[metrics.phase == "train"]["loss"].tolist() == [float(loss) for loss in expected]
    causes = {row["hook"]: row["cause"] for row in probe.coverage()}
    assert (causes["acting"], causes["learning"]) == ("", "")
    assert "probe.evaluating()" in causes["evaluated"]
    assert probe.run.events.query("rule == 'mode_of_phase'").empty  # dropout is active in the rollouts


def test_phase_that_the_loop_never_entered_is_reported() -> None:
    model = policy()
    with (
        pytest.warns(
            InstrumentWarning, match=r"phase rollout, which the loop never entered \(with probe.in_phase\('rollout'\)"
        ),
        instrument.attach(model, {"acting": HOOKS["acting"]}) as probe,
    ):
        model(torch.zeros(1, 3))
        probe.end_step()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("full_backward", "kind full_backward requires gradients, which phase rollout does not compute"),
        ("step_post", "kind step_post requires gradients, which phase rollout does not compute"),
    ],
)
def test_rollouts_have_no_gradients_and_no_steps(kind: str, message: str) -> None:
    hooks = {"x": {"layers": "3", "kind": kind, "action": "record", "phase": "rollout"}}
    with pytest.raises(ConfigError, match=message), instrument.attach(policy(), hooks):
        pass


def test_command_line_has_no_rollouts(tmp_path: Any) -> None:
    hook = "+hooks.x={layers: layers.1, kind: forward, action: record, phase: rollout}"
    with pytest.raises(
        ConfigError, match=r"hooks\.x\.phase: mode: train has no such phase\n +given +rollout\n +allowed"
    ):
        train_here(tmp_path / "run", "model=mlp", "data=digits", hook)


@pytest.mark.slow
@pytest.mark.parametrize("warm_up", [False, True])
def test_loss_of_a_policy_without_preferences_is_no_reference(warm_up: bool) -> None:
    model = policy(zero_head=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3) if warm_up else 1.0)
    losses = []
    with instrument.attach(model, {"learning": HOOKS["learning"]}, optimizer=optimizer) as probe:
        for _ in range(30):
            states = torch.randn(16, 3)
            losses.append(float(improve(model, optimizer, states, act(model, states))))
            schedule.step()
            probe.end_step(loss=losses[-1])
    assert abs(losses[0]) < 1e-6 < max(map(abs, losses)) / 1000
    assert min(losses) < 0 < max(losses)
    assert probe.run.events.query("severity == 'warning'").empty


@pytest.mark.slow
@pytest.mark.parametrize("rollouts", [True, False])
@pytest.mark.parametrize("rule", ["loss_not_decreasing", "loss_spike"])
def test_losses_of_data_that_a_policy_collects_are_no_errors(rule: str, rollouts: bool) -> None:
    """The loss of PPO with its critic rises with the returns; that of DQN jumps when the target network is replaced."""
    noise = torch.rand(210, generator=torch.Generator().manual_seed(0))
    losses = 20 + 0.05 * torch.arange(210) if rule == "loss_not_decreasing" else 0.05 + 0.2 * noise
    if rule == "loss_spike":
        losses[0], losses[101:104] = 1.1, 1.05
    model = policy()
    with instrument.attach(model, {"learning": HOOKS["learning"]}) as probe, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step, loss in enumerate(losses):
            if rollouts and step % 10 == 0:
                with probe.in_phase("rollout"):
                    probe.log(episode_return=1.0)
            model(torch.zeros(1, 3))
            probe.end_step(loss=loss)
    assert probe.run.events.query("severity == 'warning'").rule.tolist() == ([] if rollouts else [rule])


@pytest.mark.parametrize("rollouts", [True, False])
def test_gradients_of_a_policy_are_small_beside_the_loss_of_its_critic(rollouts: bool) -> None:
    model = nn.ModuleDict({"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        instrument.attach(model, {"gradients": record("parameter_grad", "*")}, optimizer=optimizer) as probe,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for _ in range(5):
            with probe.in_phase("rollout") if rollouts else nullcontext():
                probe.log(episode_return=1.0)
            optimizer.zero_grad()
            states = torch.ones(4, 2)
            loss = 20 + model["critic"](states).mean() + 1e-6 * model["actor"](states)[:, 0].mean()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    assert probe.run.events.rule.eq("vanishing_gradient").any() != rollouts


def test_rollouts_with_random_actions_do_not_call_the_policy() -> None:
    model = policy()
    with warnings.catch_warnings():
        warnings.simplefilter("error", InstrumentWarning)
        with instrument.attach(model, {"acting": HOOKS["acting"]}) as probe:
            for step in range(6):
                with probe.in_phase("rollout"):
                    if step % 3 == 2:
                        model(torch.zeros(1, 3))
                model(torch.zeros(1, 3))
                probe.end_step()
    assert [(row["expected"], row["fired"], row["cause"]) for row in probe.coverage()] == [(2, 2, "")]
    assert probe.stats[["step", "micro_step", "call"]].to_numpy().tolist() == [[2, 0, 0], [5, 0, 0]]


def test_hook_that_no_rollout_calls_is_reported() -> None:
    model = policy()
    with (
        pytest.warns(
            InstrumentWarning, match="did not fire on 3: the module was not called while the hook was scheduled"
        ),
        instrument.attach(model, {"acting": HOOKS["acting"]}) as probe,
    ):
        with probe.in_phase("rollout"):
            pass
        model(torch.zeros(1, 3))
        probe.end_step()


def test_values_of_a_rollout_are_named(tmp_path: Any) -> None:
    model = policy()
    with instrument.attach(model, HOOKS, out=tmp_path) as probe, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with probe.in_phase("rollout"):
            model(torch.full((1, 3), torch.nan))
        probe.end_step()
    (message,) = instrument.load(tmp_path).events.query("rule == 'non_finite'").message
    assert "in the rollout after 0 steps" in message


def test_repeated_draws_of_a_buffer_are_numbered() -> None:
    model, draws = policy().eval(), [4, 1, 4, 4]
    hooks = {"seen": record("forward", "3", tensors=True, stats="none")}
    with instrument.attach(model, hooks) as probe:
        with pytest.raises(ConfigError, match="an id occurs twice in the batch"):
            probe.batch(ids=draws)
        for step in range(2):
            probe.batch(ids=[f"{index}/{draw}" for draw, index in enumerate(draws)])
            output = model(torch.arange(12.0).view(4, 3) + step)
            probe.end_step()
    X, _, ids = probe.features("3", step=1)
    assert ids.tolist() == ["4/0", "1/1", "4/2", "4/3"]
    assert torch.equal(torch.from_numpy(X), output.detach())
    with pytest.raises(ConfigError, match="the samples occur in several steps"):
        probe.features("3")


@pytest.mark.slow
def test_target_network_and_delayed_updates_have_no_warning() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(3, 1) for name in ("actor", "critic", "target")})
    model["target"].requires_grad_(False)
    optimizers = {name: torch.optim.Adam(model[name].parameters(), lr=0.01) for name in ("actor", "critic")}
    hooks = {
        "updates": {
            "layers": ["actor", "critic"],
            "params": "weight",
            "kind": "step_post",
            "role": "update",
            "action": "record",
        },
        "values": record("forward", "*"),
    }
    with instrument.attach(model, hooks, optimizer=[*optimizers.values()]) as probe:
        for step in range(40):
            states = torch.randn(16, 3)
            with torch.no_grad():
                best = states.sum(1, keepdim=True) + 0.5 * model["target"](states)
            error = (model["critic"](states) - best).square().mean()
            loss = -(model["actor"](states) * model["critic"](states).detach()).mean()
            for name, objective in (("critic", error), *([("actor", loss)] if step % 2 else [])):
                optimizers[name].zero_grad()
                objective.backward()
                optimizers[name].step()
            with torch.no_grad():
                for slow, fast in zip(model["target"].parameters(), model["critic"].parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
            probe.end_step(loss=error, actor_loss=loss)
    counts = probe.stats.query("hook == 'updates'").groupby("layer", observed=True)["step"].count().to_dict()
    assert counts == {"actor": 20, "critic": 40}
    assert probe.run.events.query("severity == 'warning'").empty, probe.run.events.message.tolist()
