"""Rules read the numbers of the tables `spectra`, `experts` and `casts` like statistics of the same tensors, live and afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instrument
from instrument.analysis.rule_events import rule_events
from instrument.config.parse import parse_hooks, parse_rules
from instrument.errors import HookError
from instrument.rules.requirements import check_rules
from instrument.rules.rule import NO_WEIGHT
from instrument.rules.rule_set import make_rule


def largest(tensor: Tensor) -> float:
    return tensor.max().item()


HOOKS: dict[str, Any] = {
    "router": {"layers": "0", "kind": "forward", "action": "record", "experts": 1, "every": 2},
    "seen": {"layers": "*", "kind": "forward", "action": "record", "spectrum": 2},
    "custom": {"layers": "0", "kind": "forward", "action": "record", "stats": [{"_target_": largest, "name": "cv"}]},
    "cast": {
        "layers": "1",
        "kind": "forward",
        "role": "input",
        "action": "record",
        "cast": {"to": "float8_e5m2", "scale": 1e5},
    },
    "blocks": {
        "layers": "1",
        "kind": "forward",
        "role": "input",
        "action": "record",
        "stats": "numel",
        "cast": "mxfp8_e4m3",
    },
    "evaluated": {"layers": "1", "kind": "forward", "action": "record", "spectrum": 1, "phase": "eval"},
}
RULES: dict[str, Any] = {
    "imbalance": {"watch": "router", "stat": "cv", "above": 1.0},
    "collapse": {"watch": "seen", "stat": "effective_rank", "below": 1.5, "for": 2},
    "both": {"watch": ["router", "seen"], "stat": "dead_experts", "above": 2},
    "large": {"watch": "evaluated", "stat": "spectral_norm", "above": 5},
    "named": {"watch": "custom", "stat": "cv", "above": 1.0},
    "overflow": {"rule": "overflow", "above": 0.1, "for": 2},
    "lost": {"rule": "quantization_error", "above": 1e-5, "hook": "cast"},
    "underflow": {"watch": "cast", "stat": "underflow_fraction", "above": 0.01},
    "norm": {"watch": "seen", "stat": "l2", "above": 1e6},
}


@pytest.mark.spread(1)
@pytest.mark.filterwarnings("ignore::instrument.InstrumentWarning")
@pytest.mark.parametrize("again", [False, True])
def test_rules_decide_afterwards_as_they_did_live(tmp_path: Path, again: bool) -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 3))
    balanced, skewed = torch.eye(4).repeat(3, 1), torch.eye(4)[[0] * 12] + 0.001 * torch.rand(12, 4)
    with instrument.attach(model, HOOKS, rules=RULES, out=tmp_path / "run") as probe:
        for batch in (balanced, skewed, skewed, skewed, balanced, skewed):
            model(batch)
            if again:
                model(batch)  # several calls in a step
            with probe.evaluating():
                model(100 * batch)
            probe.end_step()
    run = instrument.load(tmp_path / "run")
    names = [name for name in RULES if name not in ("norm", "underflow")]
    live = [(row["rule"], row["step"], row["value"], row["location"]) for row in run.events.to_dict("records")]
    live = [event for event in live if event[0] in RULES]
    after = [(event.rule, event.step, event.value, event.location) for event in rule_events(run, parse_rules(RULES))]
    assert sorted(after) == sorted(live)
    assert {rule for rule, *_ in live} == {*names}
    steps = {name: [step for rule, step, *_ in live if rule == name] for name in names}
    assert steps["imbalance"] == [2]  # its hook records the steps 0, 2 and 4
    assert steps["collapse"][0] == 2
    (value,) = {event[2] for event in live if event[:2] == ("imbalance", 2)}
    assert value == pytest.approx(3**0.5)  # one of four experts has all tokens


@pytest.mark.parametrize(
    ("stat", "stats", "fields", "fix"),
    [
        ("cv", ["rms"], {}, "set experts in hooks.h, next to a statistic"),
        ("effective_rank", ["rms"], {}, "set spectrum in hooks.h, next to a statistic"),
        ("cv", "none", {"experts": 2}, "set experts in hooks.h, next to a statistic"),
        ("cv", ["rms"], {"experts": 2}, ""),
    ],
)
def test_rule_requires_the_field_and_a_statistic(stat: str, stats: Any, fields: dict[str, Any], fix: str) -> None:
    hooks = parse_hooks(
        {"h": {"layers": "*", "kind": "forward", "action": "record", "stats": stats, "tensors": True, **fields}}
    )
    rules = parse_rules({"r": {"watch": "h", "stat": stat, "above": 1}})
    if fix:
        with pytest.raises(instrument.ConfigError, match=fix):
            check_rules(rules, hooks)
    else:
        check_rules(rules, hooks)


class Heads(nn.Module):
    """A network with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(inputs)
        return self.first(hidden), self.second(hidden)


@pytest.mark.parametrize("name", ["vanishing_gradient", "unchanged_parameter"])
def test_rule_reads_further_statistics_afterwards(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live, a rule can read all statistics. Afterwards, one that its class does not name is an error."""
    model, hooks = Heads(), {"gradients": {"layers": "?*", "kind": "full_backward_pre", "action": "record"}}
    for hook, kind in (("parameters", "step_post"), ("of_parameters", "parameter_grad")):
        hooks[hook] = {"layers": "?*", "kind": kind, "action": "record"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    entries = {"found": {"rule": name}}
    with instrument.attach(model, hooks, optimizer=optimizer, rules=entries, out=tmp_path / "run") as probe:
        for _ in range(4):
            first, second = model(torch.ones(4, 3))
            loss = (first - 10).square().mean() + 0 * second.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    run, rules = instrument.load(tmp_path / "run"), parse_rules(entries)
    (message,) = run.events[run.events.rule == "found"].message
    assert NO_WEIGHT in message
    assert [event.message for event in rule_events(run, rules)] == [message]
    monkeypatch.setattr(type(make_rule(rules["found"])), "further_statistics", ())
    with pytest.raises(
        HookError, match=r"rules\.found: .* neither statistics nor further_statistics .* 'zero_fraction'"
    ):
        rule_events(run, rules)
