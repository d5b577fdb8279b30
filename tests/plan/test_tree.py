"""The module tree: each module once, and runs of equal blocks collapsed."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hook_runs import Calls
from rich.console import Console
from torch import nn

from instrument.config.parse import parse_hooks
from instrument.plan.display import module_tree
from instrument.plan.hook_plan import make_plan
from instrument.plan.shape_inference import InferredCalls, infer_shapes

ALL = {"layers": "**", "kind": "forward", "action": "record"}


def block(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())


def tree(model: nn.Module, *, inferred: InferredCalls | None = None, **hooks: dict[str, Any]) -> list[str]:
    plan = make_plan(parse_hooks(hooks), model)
    console = Console(file=io.StringIO(), width=100)
    console.print(module_tree(plan, inferred or {}, dict.fromkeys(hooks, "red")))
    assert isinstance(console.file, io.StringIO)
    return [line.strip(" │├└─") for line in console.file.getvalue().splitlines()]


def test_tree_contains_the_shapes_of_outputs() -> None:
    model = nn.Sequential(*(nn.Conv1d(1, 1, 2) for _ in range(4)), nn.Flatten(), nn.LSTM(2, 3))
    inferred = infer_shapes(model, lambda: model(torch.ones(5, 1, 6)), training=True)
    assert tree(model, inferred=inferred, seen=ALL) == [
        ". Sequential  [5, 3], [1, 3]  seen",
        "0 Conv1d  3 parameters  [5, 1, 5]  seen",
        "1 Conv1d  3 parameters  [5, 1, 4]  seen",
        "2 Conv1d  3 parameters  [5, 1, 3]  seen",
        "3 Conv1d  3 parameters  [5, 1, 2]  seen",
        "4 Flatten  [5, 2]  seen",
        "5 LSTM  84 parameters  [5, 3], [1, 3]  seen",
    ]


def attend(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(linear(x) / x.dim(), -1).chunk(2, 1)[0]


def test_tree_lists_the_functions_of_matched_modules() -> None:
    model = nn.Sequential(Calls(attend, linear=nn.Linear(4, 4)), nn.Flatten())
    functions = {"kind": "function", "functions": "softmax", "action": "record"}
    hooks = {
        "probabilities": {**functions, "layers": "0"},
        "scores": {**functions, "layers": "0", "functions": "div"},
        "own": {**functions, "layers": "0", "own": True},
    }
    plan = make_plan(parse_hooks(hooks), model)
    inferred = infer_shapes(model, lambda: model(torch.ones(2, 4)), training=True, function_sites=plan.sites)
    inside = "div.0 [2, 4], softmax.0 [2, 4], chunk.0 [2, 2]"
    assert tree(model, inferred=inferred, **hooks) == [
        ". Sequential  [2, 2]",
        "0 Calls  [2, 2]  probabilities → scores → own",
        f"probabilities, scores: linear.0 [2, 4], {inside}",
        f"own: {inside}",
        "linear Linear  20 parameters  [2, 4]",
        "1 Flatten  [2, 2]",
    ]


def test_tree_lists_the_shapes_of_attention_weights() -> None:
    attend = lambda x: F.scaled_dot_product_attention(x, x, x).relu()  # noqa: E731
    hooks = {"weights": {"layers": "**", "kind": "function", "role": "attention", "action": "record"}}
    model = nn.Sequential(Calls(attend), nn.Softmax(1))
    plan = make_plan(parse_hooks(hooks), model)
    inferred = infer_shapes(model, lambda: model(torch.ones(2, 3, 5, 4)), training=True, function_sites=plan.sites)
    assert tree(model, inferred=inferred, **hooks) == [
        ". Sequential  [2, 3, 5, 4]  weights",
        "0 Calls  [2, 3, 5, 4]  weights",
        "weights: scaled_dot_product_attention.0 [2, 3, 5, 5]",
        "1 Softmax  [2, 3, 5, 4]  weights",
    ]


def test_equal_blocks_are_collapsed() -> None:
    assert tree(nn.Sequential(*(block() for _ in range(60))), seen=ALL) == [
        ". Sequential  seen",
        "0 Sequential  seen",
        "0 Linear  20 parameters  seen",
        "1 ReLU  seen",
        "1 ... 59 Sequential  like 0",
    ]


@pytest.mark.parametrize(
    "different",
    [
        {"layers": "2.0", "kind": "forward", "action": "record"},
        {"layers": "2.0", "kind": "parameter_grad", "params": "bias", "action": "clip", "norm": 1.0},
        {"layers": "2", "kind": "forward", "action": "record"},
    ],
)
def test_block_with_different_hooks_is_not_collapsed(different: dict[str, Any]) -> None:
    lines = tree(nn.Sequential(*(block() for _ in range(5))), other=different)
    assert [line for line in lines if "like" in line] == ["1 Sequential  like 0", "4 Sequential  like 3"]
    assert any(line.startswith("2 Sequential") for line in lines)
    assert sum("other" in line for line in lines) == 1


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(block(4), block(5)),
        nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU()),
        nn.Sequential(block(), nn.ModuleDict({"0": nn.Linear(4, 4), "1": nn.ReLU()})),
        nn.Sequential(nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())),
    ],
    ids=["other sizes", "three lines", "other types", "two lines"],
)
def test_unequal_or_short_blocks_are_shown_in_full(model: nn.Module) -> None:
    lines = tree(model)
    assert len(lines) == len(list(model.modules()))
    assert not any("like" in line for line in lines)


def test_block_with_two_names_shows_both() -> None:
    shared = block()
    lines = tree(nn.Sequential(shared, shared, block(), block()))
    assert lines[1] == "0 Sequential  also 1"
    assert lines[-1] == "3 Sequential  like 2"
