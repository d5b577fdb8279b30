"""Errors in rules are reported before the first step, with the hook and the field to add."""

from __future__ import annotations

from typing import Any

import pytest

from instrument import ConfigError
from instrument.config.parse import parse_hooks, parse_rules
from instrument.config.rules import default_rules
from instrument.rules.requirements import check_rules

HOOKS = parse_hooks(
    {
        "seen": {"layers": "**", "kind": "forward", "action": "record", "every": 10},
        "norms": {"layers": "**", "kind": "parameter_grad", "action": "record", "stats": ["l2"]},
        "tame": {"layers": "**", "kind": "parameter_grad", "action": "clip", "norm": 1.0},
    }
)


def problems_of(rules: Any, **length: Any) -> str:
    with pytest.raises(ConfigError) as error:
        check_rules(parse_rules(rules), HOOKS, **length)
    return str(error.value)


def test_default_rules_are_inactive_without_their_statistics() -> None:
    check_rules(parse_rules(default_rules()), {}, has_targets=False, evaluations=1, steps=1)


def test_entry_with_the_name_of_a_rule_is_this_rule() -> None:
    named = {"dead_units": {"above": 0.9}, "mine": {"rule": "all_zero"}, "all_zero": {"rule": "non_finite"}}
    rules = parse_rules({**named, "overfit": {"watch": "metrics", "stat": "loss", "above": 1}})
    assert [getattr(rule, "rule", None) for rule in rules.values()] == ["dead_units", "all_zero", "non_finite", None]
    assert rules["dead_units"] == parse_rules({"dead_units": {"rule": "dead_units", "above": 0.9}})["dead_units"]
    message = problems_of({"dead_unit": {"above": 0.9}})
    assert "rules.dead_unit.rule: is missing" in message
    assert "similar  dead_units" in message


@pytest.mark.parametrize(
    ("rule", "parts"),
    [
        ({"rule": "dead_unit"}, ["rules.r.rule: unknown rule", "given    dead_unit", "similar  dead_units"]),
        ({"rule": "dead_units", "abov": 0.3}, ["rules.r: unknown field 'abov'", "similar  above"]),
        ({"role": "dead_units"}, ["rules.r.rule: is missing", "similar  role"]),
        (
            {"rule": "dead_units"},
            [
                "rules.r: no hook records what the rule reads: dead_fraction",
                "fix      add dead_fraction to hooks.seen.stats, such as stats: [default, dead_fraction]",
            ],
        ),
        (
            {"rule": "unchanged_parameter"},
            [
                "fix      add a hook that records parameters or updates (kind: step_post) with the statistics mean and l2"
            ],
        ),
        ({"rule": "vanishing_gradient"}, ["fix      add rms to hooks.norms.stats"]),
        ({"watch": "tame", "stat": "l2", "above": 1}, ["fix      set action: record and stats: [l2] in hooks.tame"]),
        (
            {"watch": "norms", "stat": "kurtosis", "above": 1},
            ["rules.r.stat: no hook records", "given    kurtosis", "fix      add kurtosis to hooks.norms.stats"],
        ),
        ({"watch": "norms", "stat": "l3", "above": 1}, ["rules.r.stat: no hook records", "given    l3", "similar  l2"]),
        ({"watch": "sean", "stat": "l2", "above": 1}, ["rules.r.watch: no hook has this name", "similar  seen"]),
        ({"rule": "all_zero", "hook": "sean"}, ["rules.r.hook: no hook has this name", "given    sean"]),
        (
            {"rule": "tied_weights", "hook": "seen"},
            ["rules.r.hook: the rule reads no rows of hooks", "given    ['seen']", "fix      remove 'hook'"],
        ),
        ({"rule": "loss_spike", "hook": ["seen"]}, ["rules.r.hook: the rule reads no rows of hooks"]),
        (
            {"_target_": "collections.Counter", "hook": "seen"},
            ["rules.r.hook: a custom rule gets the rows of all hooks", "fix      select rows in its method update"],
        ),
        ({"rule": "all_zero", "then": {"enable": "tam"}}, ["rules.r.then: no hook has this name", "similar  tame"]),
        (
            {"rule": "all_zero", "then": "halt"},
            ["rules.r.then: unknown action", "allowed  warn, stop, prune, checkpoint"],
        ),
        (
            {"rule": "all_zero", "then": {"enable": "a", "disable": "b"}},
            ["an action is warn, stop, prune, checkpoint, {enable"],
        ),
        ({"watch": "seen", "stat": "std"}, ["requires either 'above' or 'below'"]),
        (
            {"watch": "seen", "stat": "zero_fraction", "above": 1},
            ["above (1) cannot be reached: zero_fraction is at most 1"],
        ),
        ({"watch": "seen", "stat": "std", "below": 0}, ["below (0) cannot be reached: std is at least 0"]),
        ({"watch": "metrics", "stat": "los", "above": 1}, ["unknown metric", "similar  loss"]),
        ({"watch": "metrics", "stat": "grad_nrom", "above": 1}, ["unknown metric", "similar  grad_norm"]),
        ({"rule": "dead_units", "above": 1}, ["rules.r.above: "]),
        ({"watch": "metrics", "stat": "seconds", "below": 0}, ["below (0) cannot be reached: seconds is at least 0"]),
        ({"rule": "exploding_gradient", "window": 5, "after": 9}, ["after (9) cannot be reached"]),
        ({"rule": "update_ratio", "above": 1e-9}, ["below (1e-07) must be less than above (1e-09)"]),
        (
            {"watch": "seen", "stat": "std", "below": 1, "for": 4},
            ["rules.r.for: cannot be reached: 'seen' record at 3 of the 30 steps", "fix      reduce 'for', or 'every'"],
        ),
        ({"rule": "loss_spike", "after": 30}, ["rules.r.after: cannot be reached: the run has 30 steps"]),
        ({"rule": "overfit"}, ["rules.r.for: cannot be reached: the run has 1 evaluations", "train.eval_every"]),
        ({"rule": "class_imbalance"}, ["rules.r: no targets of samples are recorded", "data.ids=all"]),
        (
            {"watch": "seen", "stat": "std", "below": 1, "then": {"enable": "seen"}},
            ["rules.r: can never fire: it reads only hooks that are off until it fires", "seen"],
        ),
    ],
)
def test_error_names_the_rule_and_the_fix(rule: dict[str, Any], parts: list[str]) -> None:
    text = problems_of({"r": rule}, has_targets=False, evaluations=1, steps=30)
    assert [part for part in parts if part not in text] == [], text


def test_cycle_of_two_rules_is_reported_and_a_chain_is_not() -> None:
    below = {"stat": "l2", "below": 1.0}
    one = {"watch": "seen", **below, "then": {"enable": "norms"}}
    two = {"watch": "norms", **below, "then": {"enable": "seen"}}
    text = problems_of({"one": one, "two": two})
    assert "rules.one: can never fire" in text
    assert "rules.two: can never fire" in text
    check_rules(parse_rules({"one": one, "two": {**two, "then": "stop"}}), HOOKS)


@pytest.mark.parametrize("name", ["coverage", "control"])
def test_name_of_another_event_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="other events have this name"):
        parse_rules({name: {"rule": "non_finite"}})


def test_rule_with_an_action_is_not_optional() -> None:
    rules = {"dead_units": {"rule": "dead_units", "optional": True, "then": "stop"}}
    assert "no hook records what the rule reads" in problems_of(rules)
