"""Kinds forward_pre and forward, nested values, calls, schedules, and the order of several specs at one module."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hook_runs import Calls, counts, keep, record, run_step, run_steps, scale, tensors_by
from torch import Tensor, nn

import instrument
from instrument.tables.reasons import NO_TENSOR


def test_forward_hooks_record_what_pytorch_hooks_see() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), nn.Softmax(1))
    wanted: dict[tuple[str, str], Tensor] = {}
    batch = torch.randn(2, 3)
    reference = copy.deepcopy(model)
    for name, module in reference.named_modules():
        module.register_forward_pre_hook(lambda m, args, n=name: wanted.update({("pre", n): args[0].clone()}))
        module.register_forward_hook(
            lambda m, args, out, n=name: wanted.update({("out", n): out.clone(), ("in", n): args[0].clone()})
        )
    reference(batch)
    specs = {"pre": keep("forward_pre", "**"), "out": keep("forward", "**"), "in": keep("forward", "**", role="input")}
    _, probe = run_step(model, specs, batch)
    seen = tensors_by(probe, "hook", "layer")
    assert seen.keys() == wanted.keys()
    assert all(torch.equal(seen[key], wanted[key]) for key in wanted)
    roles = {(row["hook"], row["kind"], row["role"], row["path"]) for row in probe.sink.records("tensors")}
    assert roles == {
        ("pre", "forward_pre", "input", "0"),
        ("out", "forward", "output", ""),
        ("in", "forward", "input", "0"),
    }


def test_recorded_tensor_survives_in_place_overwrite() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    batch = torch.randn(4, 3)
    before = model[0](batch)
    assert (before < 0).any()
    _, probe = run_step(model, {"h": keep("forward", "0", stats=["min"])}, batch)
    assert torch.equal(probe.sink.records("tensors")[0]["values"], before)
    assert probe.sink.records("stats")[0]["min"] == before.min().item()


def test_in_place_input_is_recorded_before_and_after() -> None:
    specs = {"pre": keep("forward_pre"), "after": keep("forward", role="input")}
    _, probe = run_step(nn.ReLU(inplace=True), specs, torch.tensor([-1.0, 2.0]))
    assert {hook: x.tolist() for hook, x in tensors_by(probe, "hook").items()} == {
        "pre": [-1.0, 2.0],
        "after": [0.0, 2.0],
    }


@pytest.fixture
def chain() -> nn.Sequential:
    """Two linear maps, by 2 and by 5: y = w1 * w0 * x."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    nn.init.constant_(model[0].weight, 2.0)
    nn.init.constant_(model[1].weight, 5.0)
    return model


@pytest.mark.spread(6)
@pytest.mark.parametrize(
    ("spec", "output", "gradients"),
    [
        (scale("forward", 3.0, "0"), 3 * 5 * 2 * 7, (3 * 5 * 7, 3 * 2 * 7)),
        (scale("forward_pre", 3.0, "0"), 3 * 5 * 2 * 7, (3 * 5 * 7, 3 * 2 * 7)),
        (scale("forward_pre", 3.0, "1"), 3 * 5 * 2 * 7, (3 * 5 * 7, 3 * 2 * 7)),
        ({"layers": "0", "kind": "forward", "action": "clip", "max": 10.0}, 5 * 10, (0, 10)),
        ({"layers": "0", "kind": "forward", "action": "clip", "max": 20.0}, 5 * 14, (5 * 7, 14)),
        ({"layers": "0", "kind": "forward", "action": "modify", "fn": "zero"}, 0, (0, 0)),
        (scale("full_backward_pre", 3.0, "1"), 70, (3 * 5 * 7, 3 * 14)),
        (scale("full_backward_pre", 3.0, "0"), 70, (3 * 5 * 7, 14)),
        (scale("full_backward", 3.0, "1"), 70, (3 * 5 * 7, 14)),
        (scale("tensor", 3.0, "0"), 70, (3 * 5 * 7, 14)),
        (scale("tensor", 3.0, "1", role="input"), 70, (3 * 5 * 7, 14)),
        ({"layers": "1", "kind": "full_backward", "action": "clip", "value": 2.0}, 70, (2 * 7, 14)),
        ({"layers": "1", "kind": "full_backward", "action": "modify", "fn": "zero"}, 70, (0, 14)),
        ({"layers": "1", "kind": "full_backward", "action": "modify", "fn": "sign"}, 70, (7, 14)),
        ({"layers": "0", "kind": "tensor", "action": "modify", "fn": "l2", "coefficient": 0.5}, 70, (7 * (5 + 7), 14)),
        ({"layers": "0", "kind": "tensor", "action": "modify", "fn": "l1", "coefficient": 0.5}, 70, (7 * 5.5, 14)),
    ],
    ids=str,
)
def test_intervention_gives_the_expected_output_and_gradients(
    chain: nn.Sequential, spec: dict[str, Any], output: float, gradients: tuple[float, float]
) -> None:
    given, probe = run_step(chain, {"h": spec}, torch.tensor([[7.0]]), loss=torch.sum)
    assert given.item() == output
    assert (chain[0].weight.grad.item(), chain[1].weight.grad.item()) == gradients
    assert len(probe.sink.rows["effects"]) == 1


ADD = {"action": "modify", "fn": lambda tensor, context: tensor + 1}


@pytest.mark.spread(4)
@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward", "tensor"])
@pytest.mark.parametrize("first", ["scale", "add"])
def test_specs_at_one_module_act_in_the_written_order(kind: str, first: str) -> None:
    both = {"scale": scale(kind, 3.0), "add": {"layers": ".", "kind": kind, **ADD}}
    order = [first, *(name for name in both if name != first)]
    specs = {"before": keep(kind), order[0]: both[order[0]], "between": keep(kind), order[1]: both[order[1]]}
    specs["after"] = keep(kind)
    x = torch.tensor([2.0], requires_grad=True)
    output, probe = run_step(nn.Tanhshrink(), specs, x, loss=torch.sum)
    seen = tensors_by(probe, "hook")
    between = {"scale": lambda t: t * 3, "add": lambda t: t + 1}
    assert torch.equal(seen["between"], between[order[0]](seen["before"]))
    assert torch.equal(seen["after"], between[order[1]](seen["between"]))
    if kind == "forward":
        assert torch.equal(seen["after"], output)
    if kind == "full_backward":
        assert torch.equal(seen["after"], x.grad)


def test_full_backward_sees_the_gradient_after_earlier_hooks() -> None:
    specs = {
        "seen": keep("full_backward", role="grad_output"),
        "arrives": scale("full_backward_pre", 2.0),
        "leaves": scale("full_backward", 5.0),
    }
    x = torch.ones(1, requires_grad=True)
    _, probe = run_step(nn.Identity(), specs, x, loss=torch.sum)
    assert probe.sink.records("tensors")[0]["values"].item() == 2.0
    assert x.grad.item() == 10.0


def test_interventions_skip_integer_tensors() -> None:
    both = Calls(lambda x: (x, x.argmax(-1)))
    (x, best), probe = run_step(both, {"s": scale("forward", 2.0), "r": keep("forward")}, torch.eye(2))
    assert torch.equal(x, 2 * torch.eye(2))
    assert torch.equal(best, torch.tensor([0, 1]))
    assert [row["path"] for row in probe.sink.records("effects")] == ["0"]
    assert [(row["path"], row["dtype"]) for row in probe.sink.records("tensors")] == [("0", "float32"), ("1", "int64")]


Point = namedtuple("Point", "x y")


@dataclass
class Result:
    logits: Tensor
    note: str
    states: tuple[Tensor, ...] | None = None


class ModelOutput(OrderedDict):
    """As in transformers: a mapping whose entries are also attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True)
class Frozen:
    value: Tensor


VALUES: dict[str, tuple[Any, dict[str, float]]] = {
    "tensor": (lambda x: x, {"": 1}),
    "tuple": (lambda x: (x, 2 * x), {"0": 1, "1": 2}),
    "list": (lambda x: [x, None, 2 * x], {"0": 1, "2": 2}),
    "dict": (lambda x: {"a": x, "b": {"c": 2 * x}, 3: 3 * x}, {"a": 1, "b.c": 2, "3": 3}),
    "nested tuple": (lambda x: (x, (2 * x, [3 * x])), {"0": 1, "1.0": 2, "1.1.0": 3}),
    "named tuple": (lambda x: Point(x, 2 * x), {"x": 1, "y": 2}),
    "dataclass": (lambda x: Result(x, "n", (2 * x,)), {"logits": 1, "states.0": 2}),
    "frozen dataclass": (Frozen, {"value": 1}),
    "model output": (lambda x: ModelOutput(logits=x, past=(2 * x,)), {"logits": 1, "past.0": 2}),
    "return type": (lambda x: x.max(1), {"0": 1}),
}


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors_of(v)]
    if isinstance(value, list | tuple):
        return [t for v in value for t in tensors_of(v)]
    return [t for v in vars(value).values() for t in tensors_of(v)] if hasattr(value, "__dict__") else []


@pytest.mark.spread(4)
@pytest.mark.parametrize("name", VALUES)
def test_every_tensor_of_a_nested_output_has_a_row(name: str) -> None:
    make, paths = VALUES[name]
    x = torch.randn(3, 2)
    kept: list[Any] = []
    model = Calls(make)
    model.register_forward_hook(lambda module, args, output: kept.append(output))
    output, probe = run_step(model, {"h": keep("forward")}, x)
    rows = {row["path"]: row["values"] for row in probe.sink.records("tensors") if row["dtype"] == "float32"}
    assert rows.keys() == paths.keys()
    if name != "return type":
        assert all(torch.equal(rows[path], times * x) for path, times in paths.items())
    assert output is kept[0], "recording returns the same object"


@pytest.mark.spread(4)
@pytest.mark.parametrize("name", VALUES)
def test_intervention_keeps_the_type_of_a_nested_output(name: str) -> None:
    make, paths = VALUES[name]
    x = torch.randn(3, 2, requires_grad=True)
    plain = make(x)
    output, probe = run_step(Calls(make), {"h": scale("forward", 10.0)}, x)
    assert type(output) is type(plain)
    for new, old in zip(tensors_of(output), tensors_of(plain), strict=True):
        assert torch.equal(new, 10 * old)
    assert [row["path"] for row in probe.sink.records("effects")] == list(paths)
    assert getattr(output, "note", "n") == "n"


@pytest.mark.parametrize(("path", "changed"), [("logits", [10, 1]), ("states.*", [1, 10]), ("**", [10, 10])])
def test_path_selects_inside_a_nested_output(path: str, changed: list[int]) -> None:
    x = torch.ones(2)
    output, probe = run_step(Calls(lambda x: Result(x, "n", (x,))), {"h": scale("forward", 10.0, path=path)}, x)
    assert [output.logits[0].item(), output.states[0][0].item()] == changed
    assert len(probe.sink.rows["effects"]) == sum(factor == 10 for factor in changed)


def test_gradients_of_a_nested_output_have_paths() -> None:
    model = Calls(lambda x: Result(x * 1, "n", (2 * x, 3 * x)))
    x = torch.ones(2, requires_grad=True)
    specs = {"all": keep("full_backward_pre"), "one": scale("full_backward_pre", 10.0, path="states.1")}
    _, probe = run_step(model, specs, x, loss=lambda output: (output.logits + 5 * output.states[1]).sum())
    rows = {path: values.tolist() for path, values in tensors_by(probe, "path").items()}
    assert rows == {"logits": [1.0, 1.0], "states.1": [5.0, 5.0]}  # states.0 is not used
    assert x.grad.tolist() == [151.0, 151.0]  # 1 + 3 * 5 * 10
    assert [row["cause"] for row in probe.coverage()] == ["", ""]


def test_keyword_arguments_are_recorded_and_changed() -> None:
    x, mask = torch.ones(2, requires_grad=True), torch.full((2,), 2.0)
    specs = {
        "seen": keep("forward_pre"),
        "after": keep("forward", role="input"),
        "grad": keep("full_backward"),
        "mask": scale("forward_pre", 5.0, path="mask"),
    }
    named = Calls(lambda *, x, mask, extra: x * mask)
    output, probe = run_step(named, specs, x=x, mask=mask, extra={"k": [mask]}, loss=torch.sum)
    assert output.tolist() == [10.0, 10.0]
    rows = [(row["hook"], row["path"]) for row in probe.sink.records("tensors")]
    assert rows == [
        *[("seen", path) for path in ("x", "mask", "extra.k.0")],
        *[("after", path) for path in ("x", "mask", "extra.k.0")],
        ("grad", "x"),
    ]


def test_path_without_tensor_is_reported_in_coverage() -> None:
    _, probe = run_step(Calls(lambda x: (x, x)), {"h": keep("forward", path="logits")}, torch.ones(1))
    (row,) = probe.sink.records("coverage")
    assert (row["expected"], row["fired"]) == (1, 0)
    assert "path" in row["cause"]
    assert len(probe.sink.rows["events"]) == 1


@pytest.mark.spread(4)
@pytest.mark.parametrize("value", [None, 3, "words", {}, ()], ids=repr)
def test_output_without_tensor_is_reported_in_coverage(value: Any) -> None:
    output, probe = run_step(Calls(lambda x: value), {"h": keep("forward"), "g": keep("tensor")}, torch.ones(1))
    assert output == value
    assert all((row["fired"], row["cause"]) != (1, "") for row in probe.sink.records("coverage"))
    assert all("no tensor" in row["cause"] for row in probe.sink.records("coverage"))


def thrice() -> nn.Module:
    """Return a model that calls one layer three times, by two names."""
    layer = nn.Linear(2, 2)
    return Calls(lambda shared, alias, x: alias(shared(shared(x))), shared=layer, alias=layer)


def test_backward_calls_match_the_forward_calls() -> None:
    model = thrice()
    x = torch.randn(1, 2, requires_grad=True)
    wanted = {}
    hidden = x
    for call in range(3):
        hidden = model.shared(hidden)
        hidden.retain_grad()
        wanted[call] = hidden
    hidden.sum().backward()
    specs = {"out": keep("forward", "shared"), "grad": keep("full_backward_pre", "shared")}
    _, probe = run_step(model, specs, x, loss=torch.sum)
    rows = probe.sink.records("tensors")
    assert [(row["hook"], row["call"]) for row in rows if row["hook"] == "out"] == [("out", i) for i in range(3)]
    assert [row["call"] for row in rows if row["hook"] == "grad"] == [2, 1, 0]
    for row in rows:
        tensor = wanted[row["call"]]
        assert torch.equal(row["values"], tensor if row["hook"] == "out" else tensor.grad)
    assert {(row["layer"], row["expected"], row["fired"]) for row in probe.sink.records("coverage")} == {
        ("shared", 3, 3)
    }


def test_call_and_micro_step_numbers_restart() -> None:
    model = thrice()
    with instrument.attach(model, {"h": keep("forward", "shared"), "g": keep("full_backward", "shared")}) as probe:
        for _ in range(2):
            for _ in range(3):
                model(torch.randn(1, 2, requires_grad=True)).sum().backward()
                probe.end_micro_step()
            probe.end_step()
    table = probe.sink.frame("tensors")
    for hook in ("h", "g"):
        seen = table[table.hook == hook][["step", "micro_step", "call"]].values.tolist()
        assert sorted(seen) == [[s, m, c] for s in range(2) for m in range(3) for c in range(3)]
    assert counts(probe) == [(18, 18), (18, 18)]


def test_two_calls_of_the_model_in_one_step_are_numbered() -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    probe = run_steps(model, {"h": keep("forward")}, lambda: [model(x), model(x)], 2)
    assert [*tensors_by(probe, "step", "call")] == [(0, 0), (0, 1), (1, 0), (1, 1)]


counted_calls: list[tuple[str, int, str]] = []


def count(tensor: Tensor, context: instrument.Context) -> Tensor:
    counted_calls.append((context.hook, context.step, context.moment.phase))
    return tensor * 1


COUNTING = {"action": "modify", "fn": {"_target_": f"{__name__}.count"}}
MODULE_KINDS = ["forward_pre", "forward", "full_backward_pre", "full_backward", "tensor"]
ALL_KINDS = [*MODULE_KINDS, "parameter_grad", "post_accumulate_grad", "step_post"]


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"every": 2}, [0, 2, 4]),
        ({"every": 2, "start": 1}, [1, 3, 5]),
        ({"start": 1, "stop": 3}, [1, 2]),
        ({"steps": [0, 5]}, [0, 5]),
    ],
    ids=str,
)
@pytest.mark.combinations
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_action_runs_at_the_scheduled_steps_only(kind: str, schedule: dict[str, Any], steps: list[int]) -> None:
    counted_calls.clear()
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = {"h": {"layers": ".", "kind": kind, **COUNTING, **schedule}}
    with instrument.attach(model, hooks, optimizer=optimizer) as probe:
        for _ in range(6):
            model(torch.ones(1, 2, requires_grad=True)).sum().backward()
            optimizer.step()
            probe.end_step()
            with probe.evaluating():
                model(torch.ones(1, 2, requires_grad=True))
    assert counted_calls == [("h", step, "train") for step in steps]
    (row,) = probe.coverage()
    assert (row["expected"], row["fired"], row["cause"]) == (len(steps), len(steps), "")


def test_evaluation_has_the_number_of_completed_steps() -> None:
    counted_calls.clear()
    model = nn.Linear(2, 1)
    specs = {"e": {"layers": ".", "kind": "forward", "phase": "eval", "every": 2, **COUNTING}}
    with instrument.attach(model, specs) as probe:
        for _ in range(4):
            model(torch.ones(1, 2))
            probe.end_step()
            with probe.evaluating():
                for _ in range(2):
                    model(torch.ones(1, 2))
                    probe.end_micro_step()
    assert counted_calls == [("e", step, "eval") for step in (2, 2, 4, 4)]
    rows = [(row["step"], row["micro_step"], row["phase"]) for row in probe.sink.records("effects")]
    assert rows == [(2, 0, "eval"), (2, 1, "eval"), (4, 0, "eval"), (4, 1, "eval")]


def test_unscheduled_hook_adds_nothing_to_the_graph() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    specs = {kind: record(kind, "**", start=1) for kind in MODULE_KINDS}
    outputs: list[Tensor] = []
    model[0].register_forward_hook(lambda module, args, output: outputs.append(output))
    handed: list[Tensor] = []
    model[1].register_forward_pre_hook(lambda module, args: handed.append(args[0]))
    run_steps(model, specs, lambda: model(torch.ones(1, 2, requires_grad=True)), 2)
    unscheduled, scheduled = outputs[0], outputs[1]
    assert unscheduled._backward_hooks is None
    assert handed[0] is unscheduled
    assert scheduled._backward_hooks


@pytest.mark.parametrize("training", [True, False])
def test_hooks_fire_in_train_and_eval_mode(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).train(training)
    with torch.no_grad():
        _, probe = run_step(layer, {"h": keep("forward", "**", exclude="self_attn.out_proj")}, torch.randn(1, 3, 4))
    assert {row["cause"] for row in probe.coverage()} == {""}


@pytest.mark.parametrize("always_call", [True, False])
def test_always_call_runs_after_another_hook_raised(always_call: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2))

    def raising(*_: Any) -> None:
        raise KeyError("another's")

    model[0].register_forward_hook(raising)
    batch = torch.ones(1, 2)
    with instrument.attach(model, {"seen": keep("forward", "0", always_call=always_call)}) as probe:
        with pytest.raises(KeyError, match="another's"):
            model(batch)
        probe.end_step()
        model[0]._forward_hooks.popitem(last=False)  # remove the failing hook
        model(batch)
        probe.end_step()
    wanted = nn.functional.linear(batch, model[0].weight, model[0].bias)
    rows = tensors_by(probe, "step", "call")
    assert [*rows] == ([(0, 0)] if always_call else []) + [(1, 0)]
    assert all(torch.equal(values, wanted) for values in rows.values())


def test_always_call_after_a_failed_module_reports_the_cause() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("no")

    model = nn.Sequential(Calls(fail))
    with instrument.attach(model, {"seen": keep("forward", "0", always_call=True)}) as probe:
        with pytest.raises(ValueError, match="no"):
            model(torch.ones(1))
        probe.end_step()
    (row,) = probe.coverage()
    assert (row["expected"], row["fired"], row["cause"]) == (1, 0, NO_TENSOR)
