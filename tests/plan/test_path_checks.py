from __future__ import annotations

import pytest
import torch
from torch import nn

from instrument import ConfigError
from instrument.plan.path_checks import refuse_idle_paths
from instrument.plan.shape_inference import try_forward
from instrument.plan.sites import make_plan
from instrument.spec.parse import parse_hooks

MODEL = nn.Sequential(nn.LSTM(4, 8, batch_first=True))


def check(path: str, kind: str = "forward") -> None:
    plan = make_plan(parse_hooks({"mine": {"layers": "0", "kind": kind, "path": path, "action": "record"}}), MODEL)
    batch = torch.randn(2, 3, 4)
    trial = try_forward(MODEL, lambda: MODEL(batch), training=True)
    refuse_idle_paths(plan, {"train": trial})


@pytest.mark.parametrize(
    ("path", "kind"), [("0", "forward"), ("1.*", "forward"), ("1.1", "tensor"), ("0", "forward_pre")]
)
def test_a_path_that_means_a_tensor_is_let_through(path: str, kind: str) -> None:
    check(path, kind)


@pytest.mark.parametrize(
    ("path", "kind", "near"), [("1.2", "forward", "1.1"), ("hidden", "tensor", None), ("x", "forward_pre", None)]
)
def test_a_path_that_means_none_is_told_with_those_that_there_are(path: str, kind: str, near: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        check(path, kind)
    (mistake,) = caught.value.mistakes
    assert mistake.where == "hooks.mine.path"
    assert mistake.written == path
    assert "0" in str(mistake.allowed)
    assert near is None or near in mistake.nearest


def test_a_module_that_was_not_called_is_the_ledgers_matter() -> None:
    plan = make_plan(parse_hooks({"mine": {"layers": "0", "kind": "forward", "path": "9", "action": "record"}}), MODEL)
    refuse_idle_paths(plan, {"train": {}})
    with pytest.raises(ConfigError):
        refuse_idle_paths(plan, {"train": try_forward(MODEL, lambda: MODEL(torch.randn(2, 3, 4)), training=True)})
