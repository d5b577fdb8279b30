from __future__ import annotations

from typing import Any

import pytest
import torch
from hook_runs import Calls
from torch import nn

from instrument import ConfigError
from instrument.config.parse import parse_hooks
from instrument.errors import Problem
from instrument.plan.hook_plan import make_plan
from instrument.plan.shape_inference import infer_shapes
from instrument.plan.tensor_checks import check_functions, check_paths

MODEL = nn.Sequential(nn.LSTM(4, 8, batch_first=True))


def check(path: str, kind: str = "forward") -> None:
    plan = make_plan(parse_hooks({"mine": {"layers": "0", "kind": kind, "path": path, "action": "record"}}), MODEL)
    batch = torch.randn(2, 3, 4)
    inferred = infer_shapes(MODEL, lambda: MODEL(batch), training=True)
    check_paths(plan, {"train": inferred})


@pytest.mark.spread(3)
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


@pytest.mark.parametrize(
    ("spec", "where", "near"),
    [
        ({"functions": ["softmax", "sofmax"]}, "functions", ["softmax"]),
        ({"functions": "dim"}, "functions", []),
        ({"functions": "softmax", "layers": "."}, "functions", ["softmax"]),
        ({"functions": "*", "path": "add.1"}, "path", ["add.0"]),
        ({"functions": "add", "role": "input", "path": "add.0.2"}, "path", ["add.0.0", "add.0.1"]),
        ({"functions": "dim", "role": "input"}, None, []),
        ({"functions": ["add", "soft*"], "path": "softmax.0"}, None, []),
    ],
    ids=str,
)
def test_functions_and_their_paths_are_checked(spec: dict[str, Any], where: str | None, near: list[str]) -> None:
    model = nn.Sequential(Calls(lambda x: x + torch.softmax(x, x.dim() - 1)), nn.Linear(4, 4))
    own = {"own": True} if spec.get("layers") == "." else {}
    plan = make_plan(
        parse_hooks({"mine": {"layers": "0", "kind": "function", "action": "record", **spec, **own}}), model
    )
    inferred = infer_shapes(model, lambda: model(torch.randn(2, 4)), training=True, function_sites=plan.sites)
    problems: list[Problem] = []
    for check in (check_functions, check_paths):
        try:
            check(plan, {"train": inferred})
        except ConfigError as error:
            problems += error.problems
    assert [problem.where for problem in problems] == ([] if where is None else [f"hooks.mine.{where}"])
    if own:
        assert problems[0].allowed == "none: these modules call no torch function themselves"
    elif problems:
        assert set(near) <= set(problems[0].similar)
