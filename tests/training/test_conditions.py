"""Conditions of hooks that a run does not reach."""

from __future__ import annotations

import pytest
from training_runs import compose

from instrument import ConfigError
from instrument.training.experiment import prepare


def test_number_of_earlier_values_that_cannot_be_reached_is_reported() -> None:
    when = "{stat: l2, above: 10, times: median, after: 4}"
    hook = f"{{layers: '**', kind: parameter_grad, action: clip, norm: 1.0, when: {when}}}"
    common = ["model=mlp", "data=digits", f"+hooks.tame={hook}"]
    message = r"hooks\.tame\.when\.after: cannot be reached: the hook fires 4 times at each parameter"
    with pytest.raises(ConfigError, match=message):
        prepare(compose(*common, "train.steps=4")[0])
    prepare(compose(*common, "train.steps=5")[0])
