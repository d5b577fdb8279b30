from __future__ import annotations

import pytest
import torch
from torch import nn

from instrument import ConfigError
from instrument.plan.hook_plan import make_plan
from instrument.plan.shape_inference import infer_shapes
from instrument.plan.tensor_path_checks import check_paths
from instrument.spec.parse import parse_hooks

MODEL = nn.Sequential(nn.LSTM(4, 8, batch_first=True))


def check(path: str, kind: str = "forward") -> None:
    plan = make_plan(parse_hooks({"mine": {"layers": "0", "kind": kind, "path": path, "action": "record"}}), MODEL)
    batch = torch.randn(2, 3, 4)
    inferred = infer_shapes(MODEL, lambda: MODEL(batch), training=True)
    check_paths(plan, {"train": inferred})


@pytest.mark.parametrize(
    ("path", "kind"), [("0", "forward"), ("1.*", "forward"), ("1.1", "tensor"), ("0", "forward_pre")]
)
def test_path_that_matches_a_tensor_is_accepted(path: str, kind: str) -> None:
    check(path, kind)


@pytest.mark.parametrize(
    ("path", "kind", "near"), [("1.2", "forward", "1.1"), ("hidden", "tensor", None), ("x", "forward_pre", None)]
)
def test_path_that_matches_no_tensor_is_refused(path: str, kind: str, near: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        check(path, kind)
    (problem,) = caught.value.problems
    assert problem.where == "hooks.mine.path"
    assert problem.given == path
    assert "0" in str(problem.allowed)
    assert near is None or near in problem.similar


def test_path_check_skips_modules_that_were_not_called() -> None:
    plan = make_plan(parse_hooks({"mine": {"layers": "0", "kind": "forward", "path": "9", "action": "record"}}), MODEL)
    check_paths(plan, {"train": {}})
    with pytest.raises(ConfigError):
        check_paths(plan, {"train": infer_shapes(MODEL, lambda: MODEL(torch.randn(2, 3, 4)), training=True)})
