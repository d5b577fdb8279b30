"""Conditions of hooks that a run does not reach."""

from __future__ import annotations

from collections.abc import Callable

from conftest import Answer


def test_number_of_earlier_values_that_cannot_be_reached_is_reported(cli: Callable[..., Answer]) -> None:
    when = "{stat: l2, above: 10, times: median, after: 4}"
    hook = f"{{layers: '**', kind: parameter_grad, action: clip, norm: 1.0, when: {when}}}"
    common = ["model=mlp", "data=digits", "plan=true", f"+hooks.tame={hook}"]
    answer = cli(*common, "train.steps=4")
    assert answer.code == 2
    assert "hooks.tame.when.after: cannot be reached: the hook fires 4 times at each parameter" in answer.err
    assert cli(*common, "train.steps=5").code == 0
