"""Hooks and settings that the mode of a run does not support, and the default phase of each mode."""

from __future__ import annotations

from typing import Any

import pytest
from test_parse import CONFIG

from instrument import ConfigError
from instrument.config.experiment import RunConfig
from instrument.config.parse import parse_config

OUTPUTS = {"layers": "*", "kind": "forward", "action": "record"}


PROBED = {"dataset": {"_target_": "mine.Data"}, "probe_batch": 3}


def parsed(**changes: Any) -> RunConfig:
    return parse_config({**CONFIG, **changes})


def forward(hook: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Return the changes of a run with `mode: forward`."""
    return {"mode": "forward", **({} if hook is None else {"hooks": {"h": {**OUTPUTS, **hook}}}), **changes}


def test_hooks_act_in_the_phase_of_the_mode() -> None:
    hooks = {"seen": OUTPUTS, "written": {**OUTPUTS, "phase": "forward"}}
    assert parsed(hooks={"seen": OUTPUTS}).hooks["seen"].phase == "train"
    assert [spec.phase for spec in parsed(mode="forward", hooks=hooks).hooks.values()] == ["forward", "forward"]


@pytest.mark.parametrize(
    ("changes", "where", "words"),
    [
        (
            {"hooks": {"h": {**OUTPUTS, "kind": "function", "functions": "*"}}, "train": {"steps": 1, "compile": True}},
            "hooks.h.kind",
            "compiled code calls no functions",
        ),
        ({"hooks": {"h": {**OUTPUTS, "phase": "forward"}}}, "hooks.h.phase", "mode: train has no such phase"),
        (forward({"phase": "eval"}), "hooks.h.phase", "mode: forward has no such phase"),
        ({"hooks": {"h": {**OUTPUTS, "phase": "probe"}}}, "hooks.h.phase", "set data.probe_batch=N"),
        ({"data": PROBED, "hooks": {"h": OUTPUTS}}, "data.probe_batch", "no hook has phase: probe"),
        (forward({"kind": "tensor"}), "hooks.h.kind", "set forward.grad=true"),
        (
            forward({"kind": "parameter_grad"}, forward={"grad": True}),
            "hooks.h",
            "requires an optimizer step, which phase forward does not have; parameter_grad_micro sees",
        ),
        (
            forward({"kind": "state_dict_post"}),
            "hooks.h",
            "requires a state dict that is saved or loaded, which phase forward does not have",
        ),
        ({"hooks": {"h": {**OUTPUTS, "kind": "step_post", "phase": "probe"}}}, "hooks.h", "which phase probe does not"),
        (forward(train={"steps": 3, "accumulate": 2}), "train.accumulate", "accumulates no gradients"),
        (forward(data=PROBED), "data.probe_batch", "mode: forward does not train"),
        ({"mode": "forwards"}, "mode", "not an allowed value"),
        ({"forward": {"of": "[:, 3]"}}, "forward", "'of' requires 'grad: true'"),
        ({"forward": {"from_sample": 0}}, "forward", "'from_sample' requires 'grad: true'"),
        (
            forward({}, forward={"grad": True, "from_sample": 2}, train={"steps": 3, "batch_size": 2}),
            "forward.from_sample",
            "each batch needs this clean sample",
        ),
        ({"forward": {"grad": True, "of": "logits[a]"}}, "forward.of", "is not a slice"),
        ({"forward": {"grad": True, "of": "logits[0"}}, "forward.of", "is not a part of the model's output"),
        ({"forward": {"grad": True, "of": [":", 3]}}, "forward.of", "must be a string, not [':', 3] (list)"),
        ({"forward": "[:, 3]"}, "forward", "must be a mapping"),
        ({"forward": {"passes": 0}}, "forward.passes", "greater than or equal to 1"),
        ({"train": {"steps": 0}}, "train.steps", "set mode=forward"),
        ({"init_from": {"file": "a.pt"}}, "init_from", "unknown field 'file'"),
    ],
)
def test_setting_without_effect_is_reported(changes: dict[str, Any], where: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(**changes)
    assert where in [problem.where for problem in caught.value.problems]
    assert words in str(caught.value)


def test_path_of_weights_can_be_text() -> None:
    source = parsed(init_from="weights.pt").init_from
    assert (source.path, source.strict) == ("weights.pt", True)
    assert parsed(init_from=None).init_from.path is None
