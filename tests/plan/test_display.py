"""The printed plan of a small model: every module, every spec, and why something is not matched."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from instrument.config.parse import parse_hooks
from instrument.config.schedule import Evaluations
from instrument.plan.cost import Cost, Forecast, Length, firings_of
from instrument.plan.display import describe_action, output_tables, plan_notes, plan_view
from instrument.plan.hook_plan import HookPlan, make_plan
from instrument.plan.shape_inference import InferredCalls, infer_shapes


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), nn.Flatten())
        self.head = nn.Linear(8, 3)
        self.again = self.head
        self.unused = nn.Tanh()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(5))
        self.spare = [nn.Linear(1, 1)]

    def forward(self, images: Tensor) -> Tensor:
        return self.frozen(self.head(self.encoder(images))) * self.scale[0]


def planned(**hooks: dict[str, Any]) -> tuple[HookPlan, dict[str, InferredCalls]]:
    model = Small()
    plan = make_plan(parse_hooks(hooks), model)
    inferred = infer_shapes(model, lambda: model(torch.zeros(2, 1, 4, 4)), training=True)
    return plan, {"train": inferred, "eval": inferred}


def shown(steps: int = 20, width: int = 160, **hooks: dict[str, Any]) -> list[str]:
    plan, inferred_by_phase = planned(**hooks)
    length = Length(steps, 1, steps, Evaluations(steps, 0), 1)
    due = {name: firings_of(spec, length) for name, spec in plan.specs.items()}
    cost = {name: Cost(len(d.steps), 2 * d.times, 4200 * d.times, 0.001) for name, d in due.items()}
    forecast = Forecast(cost, 0.02, 0.021)
    console = Console(file=io.StringIO(), width=width)
    console.print(plan_view(plan, inferred_by_phase, forecast, steps, Path("runs/mine/now")))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def line_with(lines: list[str], start: str) -> str:
    (found,) = [line for line in lines if line.strip(" │├└─").startswith(start)]
    return found.strip(" │├└─")


LOOK = {"kind": "forward", "action": "record"}
SPECS: dict[str, dict[str, Any]] = {
    "all": {**LOOK, "layers": "**", "every": 5, "stats": ["mean"]},
    "maps": {**LOOK, "layers": "encoder.*", "steps": [0, 3], "tensors": True, "samples": 1},
    "tame": {"layers": "head", "kind": "parameter_grad", "action": "clip", "norm": 0.5},
}


def test_tree_line_shows_type_parameters_aliases_and_specs() -> None:
    lines = shown(**SPECS)
    assert lines[0].strip() == ". Small  5 parameters  [2, 3]  all"
    assert line_with(lines, "encoder") == "encoder Sequential  [2, 8]  all"
    assert line_with(lines, "0 Sequential") == "0 Sequential  [2, 2, 2, 2]  all → maps"
    assert line_with(lines, "0 Conv2d") == "0 Conv2d  20 parameters  [2, 2, 2, 2]  all"
    assert line_with(lines, "1 ReLU") == "1 ReLU  [2, 2, 2, 2]  all"
    assert line_with(lines, "1 Flatten") == "1 Flatten  [2, 8]  all → maps"
    assert line_with(lines, "head") == "head Linear  27 parameters  [2, 3]  also again  all, tame"
    assert line_with(lines, "unused") == "unused Tanh  all"
    assert line_with(lines, "frozen") == "frozen Linear  12 parameters  [2, 3]  all"
    assert sum(line.startswith(("├", "│", "└", "    ")) for line in lines) == len(list(Small().modules())) - 1


def test_tree_shows_specs_in_execution_order() -> None:
    legend = "a → b: both hooks act on the same tensor, a first"
    first = {"layers": "head", "kind": "forward", "action": "scale", "factor": 2.0}
    other = {"layers": "head", "kind": "full_backward", "action": "record"}
    lines = shown(double=first, other=other, seen={**LOOK, "layers": "head"})
    assert line_with(lines, "head").endswith("double → seen, other")
    assert legend in lines
    lines = shown(seen={**LOOK, "layers": "head"}, other=other, double=first)
    assert line_with(lines, "head").endswith("seen → double, other")
    assert legend not in shown(other=other, double=first)


def test_tree_indentation_follows_the_model() -> None:
    lines = shown(**SPECS)
    names = ("encoder", "0 Seq", "0 Conv", "head")
    columns = {name: next(line for line in lines if name in line).index(name) for name in names}
    assert columns["encoder"] == columns["head"] < columns["0 Seq"] < columns["0 Conv"]


def test_plan_row_shows_action_schedule_and_output() -> None:
    lines = shown(steps=20, **SPECS)
    assert "3 hooks in 20 steps" in [line.strip() for line in lines]
    header = next(line for line in lines if line.startswith("hook "))
    assert header.split() == ["hook", "action", "at", "when", "rows", "bytes", "time"]
    rows = {line.split()[0]: line.split() for line in lines[lines.index(header) + 1 :] if line}
    # "all" fires in 4 of 20 steps, at 9 modules; 1 ms more in each of them is 1% of the run.
    assert {name: " ".join(cells) for name, (_, *cells) in rows.items() if name in (*SPECS, "total")} == {
        "all": "forward: record stats 9 every 5 steps 8 16.8 kB +1.0%",
        "maps": "forward: record stats, tensors 2 steps 0, 3 4 8.4 kB +0.5%",
        "tame": "parameter_grad: clip norm 0.5 2 every step 40 84 kB +5.0%",
        "total": "13 52 109 kB +5.0%",
    }
    assert lines[lines.index(header) + 5].strip() == (
        "mean time per step on this machine: 20 ms without hooks, 21 ms with hooks (+5.0%)"
    )


def test_plan_shows_the_time_that_no_hook_takes() -> None:
    lines = shown(all=SPECS["all"], steps=20)  # 1% of 20 ms, of 1 ms in total
    assert line_with(lines, "rules and metrics of each step").split()[-1] == "+4.0%"
    assert line_with(lines, "total").split()[-1] == "+5.0%"


def test_plan_names_hooks_whose_functions_it_does_not_call() -> None:
    lines = shown(look={"layers": "**", "kind": "forward", "action": "call", "fn": {"_target_": "mine.look"}})
    (note,) = [i for i, line in enumerate(lines) if "which a plan does not call: look" in line]
    assert lines[note - 1].startswith("mean time per step")
    assert not any("does not call" in line for line in shown(**SPECS))


def test_spec_that_is_never_scheduled_is_marked() -> None:
    lines = shown(steps=1, late={**LOOK, "layers": "**", "start": 5})
    (line,) = [line for line in lines if line.startswith("late")]
    assert "never: every step of [5, end)" in line  # the brackets are not parsed as markup
    assert line.split()[-4:] == ["0", "0", "B", "+0.0%"]
    assert "1 hook in 1 step" in [line.strip() for line in lines]


def test_plan_without_hooks_shows_only_modules() -> None:
    lines = shown()
    assert line_with(lines, "head") == "head Linear  27 parameters  [2, 3]  also again"
    assert "0 hooks in 20 steps" in [line.strip() for line in lines]
    assert not any("total" in line for line in lines)


def test_plan_lists_output_tables_with_their_hooks() -> None:
    lines = [line.strip() for line in shown(more={**LOOK, "layers": "head", "stats": "none", "histogram": 4}, **SPECS)]
    start = lines.index("Output tables in a folder such as runs/mine/now")
    tables = [" ".join(line.split()) for line in lines[start + 1 : start + 5]]
    assert tables == ["stats/ all, maps", "distributions/ more", "tensors/ maps", "effects/ tame"]
    assert lines[start + 5] == "metrics/, coverage/, layers/, events/ and run.json are always written"


@pytest.mark.spread(4)
@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_names_and_numbers_are_never_truncated(width: int) -> None:
    lines = shown(width=width, **SPECS)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    for text_part in ("all", "maps", "tame", "16.8 kB", "+1.0%", "109 kB", "hook", "bytes"):
        assert text_part in text
    assert width < 80 or ("forward: record" in text and "parameter_grad:" in text)
    assert "…" not in text


HIDDEN = (
    "spare[0] (Linear) is in a plain Python list or dict, where PyTorch does not find it: its parameters are not trained, "
    "moved or saved, and no glob matches it; use nn.ModuleList or nn.ModuleDict"
)


def notes(**spec: Any) -> list[str]:
    plan, inferred_by_phase = planned(mine={"action": "record", **spec})
    found = list(plan_notes(plan, inferred_by_phase))
    assert found.pop() == HIDDEN
    return found


@pytest.mark.parametrize(
    ("spec", "messages"),
    [
        ({"layers": "head", "kind": "forward"}, []),
        ({"layers": "encoder.**", "kind": "forward"}, []),
        (
            {"layers": "encoder.*", "kind": "forward"},
            ["mine: 'encoder.*' does not match submodules; 'encoder.*.**' would also match encoder.0.0, encoder.0.1"],
        ),
        ({"layers": ["head", "unused"], "kind": "forward"}, ["mine: not called during shape inference: unused"]),
        (
            {"layers": ["head", "frozen.**"], "exclude": "frozen", "kind": "parameter_grad"},
            ["mine: excluded by 'exclude': frozen"],
        ),
        (
            {"layers": "encoder.**", "types": "ReLU", "kind": "forward"},
            ["mine: not of type ReLU: encoder, encoder.0, encoder.0.0, encoder.1"],
        ),
        ({"layers": "encoder.**", "kind": "parameter_grad"}, []),
        *(
            (
                {"layers": ["encoder.0", "head"], "kind": "parameter_grad", **of},
                ["mine: contains no parameters directly: encoder.0"],
            )
            for of in ({}, {"params": "bias"})
        ),
        ({"layers": "**", "kind": "parameter_grad", "params": "bias"}, ["mine: frozen.bias: the parameter is frozen"]),
    ],
)
def test_unmatched_modules_are_noted_with_the_reason(spec: dict[str, Any], messages: list[str]) -> None:
    assert notes(**spec) == messages


def test_notes_follow_the_plan() -> None:
    lines = [line.strip() for line in shown(mine={**LOOK, "layers": "unused"})]
    below = " ".join(lines[lines.index("Not matched or not recorded:") + 1 :])
    assert below == f"mine: not called during shape inference: unused {HIDDEN}"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"action": "record"}, "record stats"),
        ({"action": "record", "tensors": True}, "record stats, tensors"),
        ({"action": "record", "tensors": True, "stats": "none"}, "record tensors"),
        ({"action": "clip", "min": -1, "max": 2.5}, "clip min -1 max 2.5"),
        ({"action": "clip", "value": 0.1}, "clip value 0.1"),
        ({"action": "clip", "norm": 1.0}, "clip norm 1"),
        ({"action": "scale", "factor": 0.5}, "scale factor 0.5"),
        ({"action": "modify", "fn": "noise", "std": 0.05}, "modify noise std 0.05"),
        ({"action": "modify", "fn": "zero"}, "modify zero"),
        ({"action": "modify", "fn": {"_target_": "mine.shift", "by": 1}}, "modify mine.shift"),
        (
            {"kind": "parameter_grad", "action": "modify", "fn": "l2", "coefficient": 1e-4},
            "modify l2 coefficient 0.0001",
        ),
    ],
)
def test_action_is_described_briefly(spec: dict[str, Any], words: str) -> None:
    (parsed,) = parse_hooks([{"layers": "**", "kind": "forward", **spec}]).values()
    assert describe_action(parsed) == words


def test_hook_on_collectives_has_its_table_and_no_notes() -> None:
    hook = {"kind": "collective", "action": "record"}
    plan = make_plan(parse_hooks({"sent": hook}), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    tables = [line.plain.split() for line in output_tables(plan, {"sent": ""}, None)]
    assert ["collectives/", "sent"] in tables
    assert [*plan_notes(plan, {})] == []
