"""`when` with the name of a rule: the hook runs in the step after the rule fired."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_rule_actions import LARGE, SEEN, attached, net, run_steps

import instrument
from instrument.config.parse import parse_hooks, parse_rules
from instrument.errors import ConfigError
from instrument.plan.hook_plan import make_plan
from instrument.probe.probe import Probe
from instrument.rules.requirements import check_rules
from instrument.storage.memory import MemorySink

BIG = {"big": LARGE}  # fires at the steps 2 and 6
HALVE = {"layers": "*", "kind": "forward", "action": "scale", "factor": 0.5, "when": "big"}
HOOKS = {"seen": SEEN, "halve": HALVE}


def problem_of(hooks: dict[str, Any], rules: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        check_rules(parse_rules(rules), parse_hooks(hooks))
    return str(error.value)


def test_hook_runs_in_the_step_after_the_rule_fired() -> None:
    probe, _ = attached({"halve": HALVE, "seen": {**SEEN, "kind": "forward_pre"}}, BIG)
    rows = probe.sink.records("effects")
    assert [(row["step"], row["held"], row["factor"]) for row in rows] == [(3, True, 0.5)]


def test_coverage_explains_a_hook_whose_rule_never_fired() -> None:
    probe, _ = attached(HOOKS, {"big": {**LARGE, "above": 1e9}})
    (row,) = [row for row in probe.coverage() if row["hook"] == "halve"]
    assert (row["expected"], row["fired"]) == (0, 0)
    assert "rule" in row["cause"]


def test_hook_stays_on_as_long_as_an_action_says() -> None:
    """`enable` and `when` name the same hook: the longer one counts."""
    rules = {"big": {**LARGE, "then": {"enable": "halve", "steps": 3}}}
    probe, _ = attached({"halve": HALVE, "seen": {**SEEN, "kind": "forward_pre"}}, rules)
    assert [row["step"] for row in probe.sink.records("effects")] == [3, 4, 5]


def test_decision_survives_a_checkpoint() -> None:
    """The rule fires at the last step before the checkpoint."""
    hooks = {"halve": HALVE, "seen": {**SEEN, "kind": "forward_pre"}}
    model, sink = net(), MemorySink()
    plan, rules = make_plan(parse_hooks(hooks), model), parse_rules(BIG)
    with Probe(plan, sink, rules=rules) as first:
        run_steps(first, model, (1.0, 1.0, 100.0))
        state = first.state_dict()
    second = Probe(plan, sink, rules=rules)
    second.load_state_dict(state)
    with second:
        run_steps(second, model, (1.0, 1.0))
    assert [row["step"] for row in sink.records("effects")] == [3]


def test_unknown_rule_is_reported_with_similar_names() -> None:
    message = problem_of({"halve": {**HALVE, "when": "bog"}, "seen": SEEN}, BIG)
    assert "hooks.halve.when: no rule has this name" in message
    assert "big" in message


def test_hook_without_rules_is_reported_by_attach() -> None:
    with (
        pytest.raises(ConfigError, match=r"hooks.halve.when: no rule has this name"),
        instrument.attach(net(), {"halve": HALVE}, rules=None),
    ):
        pass


def test_cycle_is_reported() -> None:
    """The rule reads only the hook that waits for it."""
    hooks = {"seen": {**SEEN, "when": "big"}}
    message = problem_of(hooks, BIG)
    assert "rules.big: can never fire: it reads only hooks that are off until it fires" in message
    assert "'when'" in message
    check_rules(parse_rules(BIG), parse_hooks({"seen": {**SEEN, "tensors": True, "keep": 2, "when": "big"}}))


def test_optional_rule_that_a_hook_names_is_required() -> None:
    """A default rule without its statistics could never fire."""
    rules = {"dead_units": {"rule": "dead_units", "optional": True}}
    message = problem_of({"h": {**HALVE, "when": "dead_units"}}, rules)
    assert "no hook records what the rule reads" in message


def test_conditional_clip_of_all_gradients_is_the_standard_one() -> None:
    """With the name of a rule, the norm is that of all gradients together, as in `clip_grad_norm_`."""
    clip = {"layers": "**", "kind": "parameter_grad", "action": "clip", "norm": 0.5, "when": "big"}
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = {**SEEN, "kind": "forward_pre"}
    with (
        pytest.warns(instrument.InstrumentWarning),
        instrument.attach(model, {"clip": clip, "seen": seen}, optimizer=optimizer, rules=BIG) as probe,
    ):
        for scale in (1.0, 100.0, 100.0):
            optimizer.zero_grad()
            model(torch.full((4, 2), scale)).square().mean().backward()
            optimizer.step()
            probe.end_step()
    norms = [parameter.grad.norm() for parameter in model.parameters()]
    assert float(torch.stack(norms).norm()) == pytest.approx(0.5, rel=1e-4)
    assert {row["step"] for row in probe.sink.records("effects")} == {2}
