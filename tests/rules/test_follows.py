"""`when` with the name of a rule: the hook runs in the step after the rule fired."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hook_runs import refused
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


LOOP = {"seen": {**SEEN, "when": "big"}}


@pytest.mark.parametrize(
    ("hooks", "rules", "parts"),
    [
        ({"halve": {**HALVE, "when": "bog"}, "seen": SEEN}, BIG, ("hooks.halve.when: no rule has this name", "big")),
        # The rule reads only the hook that waits for it.
        (LOOP, BIG, ("rules.big: can never fire: it reads only hooks that are off until it fires", "'when'")),
        # A default rule without its statistics could never fire.
        (
            {"h": {**HALVE, "when": "dead_units"}},
            {"dead_units": {"rule": "dead_units", "optional": True}},
            ("no hook records what the rule reads",),
        ),
    ],
    ids=["unknown", "cycle", "optional"],
)
def test_rule_that_a_hook_cannot_follow_is_reported(hooks: Any, rules: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        check_rules(parse_rules(rules), parse_hooks(hooks))
    assert all(part in str(error.value) for part in parts)


def test_rule_may_read_the_kept_tensors_of_a_hook_that_follows_it() -> None:
    check_rules(parse_rules(BIG), parse_hooks({"seen": {**LOOP["seen"], "tensors": True, "keep": 2}}))


def test_hook_without_rules_is_reported_by_attach() -> None:
    assert "hooks.halve.when: no rule has this name" in refused(net(), {"halve": HALVE}, rules=None)


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
