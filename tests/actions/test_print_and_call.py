"""Actions that change nothing: printed lines, and calls of custom functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_statistics import use_device_statistics
from hook_runs import assert_equal, run_step, run_steps
from torch import Tensor, nn

import instrument
from instrument.actions.record import line_of

KINDS = (
    *("forward_pre", "forward", "full_backward_pre", "full_backward", "tensor"),
    *("parameter_grad", "parameter_grad_micro", "post_accumulate_grad", "step_pre", "step_post", "loss"),
)
seen: list[tuple[Any, ...]] = []


def look(tensor: Tensor, context: instrument.Context, tag: str = "") -> None:
    seen.append((context.step, context.layer, context.path, tuple(tensor.shape), tensor.requires_grad, tag))


def train(specs: dict[str, Any], steps: int = 2, **options: Any) -> tuple[instrument.Probe, list[Tensor]]:
    """Train a small model with hooks; return the probe and the final weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(5, 4, requires_grad=True)
    with instrument.attach(model, specs, optimizer=optimizer, **options) as probe:
        for _ in range(steps):
            optimizer.zero_grad()
            probe.loss(model(inputs).square().mean()).backward()
            optimizer.step()
            probe.end_step()
    return probe, [parameter.detach().clone() for parameter in model.parameters()]


def spec(kind: str, **fields: Any) -> dict[str, Any]:
    return {"layers": "0", "kind": kind, **fields} if kind != "loss" else {"kind": kind, **fields}


@pytest.mark.spread(2)
@pytest.mark.parametrize("kind", KINDS)
def test_print_and_call_see_what_record_sees(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    seen.clear()
    specs = {
        "recorded": spec(kind, action="record", stats=["mean", "std", "min", "max"]),
        "printed": spec(kind, action="print"),
        "called": spec(kind, action="call", fn=look),
    }
    probe, weights = train(specs)
    rows = probe.sink.records("stats")
    assert rows
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(seen) == len(rows)
    for line, row, called in zip(lines, rows, seen, strict=True):
        assert called == (row["step"], row["layer"], row["path"], tuple(row["shape"]), False, "")
        numbers = "  ".join(f"{name} {row[name]:.4g}" for name in ("mean", "std", "min", "max"))
        place = f"{row['layer'] or '.'}  {row['role']} {row['path']}".rstrip()
        assert line == f"printed  step {row['step']}  {place}  {row['shape']} float32 cpu  {numbers}"
    fired = {row["hook"]: (row["expected"], row["fired"]) for row in probe.coverage()}
    assert fired["printed"] == fired["called"] == fired["recorded"]
    assert_equal(weights, train({})[1])


def test_schedule_and_statistics_of_a_print_are_selectable(capsys: pytest.CaptureFixture[str]) -> None:
    train({"p": spec("forward", action="print", every=2, start=1, stats=["l2", "dead_fraction"])}, steps=6)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1] for line in lines] == ["step 1", "step 3", "step 5"]
    assert all("  l2 " in line and line.split("  ")[-1].startswith("dead_fraction ") for line in lines)


def test_print_without_statistics_shows_the_shape(capsys: pytest.CaptureFixture[str]) -> None:
    train({"p": spec("forward", action="print", stats="none")}, steps=1)
    assert capsys.readouterr().out == "p  step 0  0  output  [5, 3] float32 cpu\n"


def test_print_names_call_phase_and_micro_step(capsys: pytest.CaptureFixture[str]) -> None:
    layer = nn.Identity()
    record = {"layers": ".", "kind": "forward", "action": "print", "stats": "none"}
    with instrument.attach(layer, {"p": record, "e": {**record, "phase": "eval"}}) as probe:
        layer(torch.ones(1, dtype=torch.int64))
        layer(torch.ones(()))
        probe.end_micro_step()
        layer(torch.ones(2))
        probe.end_step()
        with probe.evaluating():
            layer(torch.ones(3))
    assert capsys.readouterr().out.splitlines() == [
        "p  step 0  .  output  [1] int64 cpu",
        "p  step 0 call 1  .  output  [] float32 cpu",
        "p  step 0 micro-step 1  .  output  [2] float32 cpu",
        "e  eval step 1  .  output  [3] float32 cpu",
    ]


def test_line_reports_non_finite_and_missing_values() -> None:
    names = ("numel", "mean", "nan_count", "inf_count")
    assert line_of("x", names, [4.0, 1.5, 0.0, 0.0]) == "x  mean 1.5"
    assert line_of("x", names, [4.0, None, 3.0, 1.0]) == "x  mean -  3 NaN  1 Inf"


def test_values_of_a_device_are_printed_when_they_are_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train({"p": spec("forward", action="print")})
    on_host = capsys.readouterr().out
    use_device_statistics(monkeypatch)
    train({"p": spec("forward", action="print")})
    assert capsys.readouterr().out == on_host


def test_call_gets_its_arguments_and_every_dtype() -> None:
    seen.clear()
    layer = nn.Identity()
    fn = {"_target_": f"{__name__}.look", "tag": "mine"}
    with instrument.attach(layer, {"c": {"layers": ".", "kind": "forward", "action": "call", "fn": fn}}) as probe:
        layer(torch.ones(2, dtype=torch.int64))
        with torch.inference_mode():
            layer(torch.ones(3))
        probe.end_step()
    assert seen == [(0, "", "", (2,), False, "mine"), (0, "", "", (3,), False, "mine")]


def test_call_observes_gradients_with_their_values() -> None:
    values = []
    fn = lambda tensor, context: values.append(context.value)  # noqa: E731
    train({"c": spec("tensor", action="call", fn=fn)}, steps=1)
    assert values[0].shape == (5, 3)


def writes_in_place(tensor: Tensor, context: instrument.Context) -> None:
    tensor.zero_()


def draws_random_numbers(tensor: Tensor, context: instrument.Context) -> None:
    torch.rand(1)


def fails(tensor: Tensor, context: instrument.Context) -> None:
    raise KeyError("gone")


@pytest.mark.spread(6)
@pytest.mark.parametrize("kind", ["forward", "full_backward", "parameter_grad"])
@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda tensor, context: tensor, "must return None, but returned Tensor; use action modify"),
        (writes_in_place, "modified its tensor in place"),
        (draws_random_numbers, "changes the global random state"),
        (fails, r"KeyError: 'gone' \(in .*test_print_and_call.py"),
    ],
)
def test_function_that_does_not_only_observe_is_an_error(kind: str, fn: Any, message: str) -> None:
    with pytest.raises(instrument.HookError, match=message) as caught:
        train({"mine": spec(kind, action="call", fn=fn)})
    assert f"hook 'mine' ({kind}) on layer '0'" in str(caught.value)


def test_in_place_change_of_an_inference_tensor_does_not_reach_the_model() -> None:
    layer, output = nn.Identity(), torch.ones(2)
    specs = {"c": {"layers": ".", "kind": "forward", "action": "call", "fn": writes_in_place}}
    with pytest.raises(instrument.HookError, match="in place"), torch.inference_mode():
        run_step(layer, specs, output := output.clone())
    assert output.tolist() == [1.0, 1.0]


def writes_through_numpy(tensor: Tensor, context: instrument.Context) -> None:
    seen.append(tensor)
    tensor.numpy()[...] = 7


@pytest.mark.spread(2)
@pytest.mark.parametrize("kind", KINDS)
def test_writes_through_numpy_do_not_reach_the_model(kind: str) -> None:
    seen.clear()
    _, weights = train({"mine": spec(kind, action="call", fn=writes_through_numpy)})
    assert seen
    assert all((tensor == 7).all() for tensor in seen)  # the function can keep its copies
    assert_equal(weights, train({})[1])


def test_call_does_not_try_a_function_without_a_signature() -> None:
    specs = {"mine": spec("forward", action="call", fn=torch.relu)}  # written in C; takes one argument
    model = nn.Sequential(nn.Linear(4, 3))
    run_steps(model, specs, lambda: None)
    with pytest.raises(instrument.HookError, match="relu"):
        run_step(model, specs, torch.ones(2, 4))


@pytest.mark.parametrize("fields", [{}, {"fn": "zero"}, {"fn": f"{__name__}.look", "std": 1.0}])
def test_call_requires_a_function(fields: dict[str, Any]) -> None:
    with pytest.raises(instrument.ConfigError, match=r"hooks\.c"):
        train({"c": spec("forward", action="call", **fields)})


def test_budget_limits_printed_and_called_hooks() -> None:
    probe, _ = train(
        {"p": spec("forward", action="print"), "c": spec("forward", action="call", fn=look)}, budget={"time": "1%"}
    )
    assert len(probe.budget.record_hooks) == 2
