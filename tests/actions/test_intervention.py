"""Behaviour of all interventions: invalid results and exceptions are reported with hook, kind, layer and step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instrument
from instrument.actions.base import Context, StepContext
from instrument.actions.intervention import check_result, effect_of


def raise_key_error(tensor: Tensor, context: Context) -> Tensor:
    raise KeyError("gone")


def return_invalid(tensor: Tensor, context: Context, what: str) -> Any:
    return {
        "a list": [tensor],
        "a number": 3.0,
        "another shape": tensor[..., :1],
        "another dtype": tensor.double(),
        "another device": tensor.to("meta"),
        "detached": tensor.detach() * 2,
    }[what]


def write_in_place(tensor: Tensor, context: Context) -> Tensor:
    with torch.no_grad():
        return tensor.mul_(2)


def draw_globally(tensor: Tensor, context: Context) -> Tensor:
    return tensor + torch.randn_like(tensor)


KINDS = {
    "forward_pre": "input",
    "forward": "output",
    "full_backward_pre": "grad_output",
    "full_backward": "grad_input",
    "tensor": "output",
    "post_accumulate_grad": "param_grad",
    "parameter_grad": "param_grad",
    "step_post": "param",
}


def train(kind: str, fn: str, **arguments: Any) -> instrument.Probe:
    """Run two steps with the hook scheduled in the second; a hook on the first layer records from step 0."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    target = {"_target_": f"{__name__}.{fn}", **arguments}
    specs = {
        "before": {"layers": "0", "kind": "forward", "action": "record"},
        "mine": {"layers": "1", "kind": kind, "action": "modify", "fn": target, "start": 1},
    }
    caught: BaseException | None = None
    with instrument.attach(model, specs, optimizer=optimizer) as probe:
        try:
            for _ in range(2):
                model(torch.ones(3, 2, requires_grad=True)).square().sum().backward()
                optimizer.step()
                probe.end_step()
        except BaseException as error:
            caught = error
    probe.error = caught  # type: ignore[attr-defined]
    return probe


@pytest.mark.spread(3)
@pytest.mark.parametrize("kind", KINDS)
def test_exception_names_hook_kind_layer_step_and_keeps_records(kind: str) -> None:
    probe = train(kind, "raise_key_error")
    error = probe.error
    assert type(error) is instrument.HookError
    where = (
        "'mine'",
        f"({kind})",
        "layer '1'",
        "step 1",
        "KeyError",
        "gone",
        "test_intervention.py",
        "raise_key_error",
    )
    assert all(part in str(error) for part in where)
    assert isinstance(error.__cause__, KeyError)
    assert error.exit_code == 1
    recorded = [(row["hook"], row["layer"], row["step"]) for row in probe.sink.records("stats")]
    assert recorded == [("before", "0", 0), ("before", "0", 1)]
    assert probe.sink.closed


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a list", "must return a tensor, but returned list"),
        ("a number", "must return a tensor, but returned float"),
        ("another shape", ", but returned shape ["),
        ("another dtype", r"must return dtype torch.float32, but returned dtype torch.float64"),
        ("another device", "must return device cpu, but returned device meta"),
    ],
)
@pytest.mark.combinations
@pytest.mark.parametrize("kind", KINDS)
def test_result_that_does_not_fit_is_reported(kind: str, what: str, message: str) -> None:
    error = train(kind, "return_invalid", what=what).error
    assert type(error) is instrument.HookResultError
    assert all(part in str(error) for part in ("'mine'", f"({kind})", "layer '1'", "step 1", message))


@pytest.mark.parametrize("kind", ["forward_pre", "forward"])
def test_detached_result_is_reported(kind: str) -> None:
    error = train(kind, "return_invalid", what="detached").error
    assert type(error) is instrument.HookResultError
    assert "detached from the graph" in str(error)


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("fn", "error_class", "message"),
    [
        ("write_in_place", instrument.HookResultError, "in place"),
        (
            "draw_globally",
            instrument.HookError,
            "changes the global random state, which affects the rest of the run; pass generator=context.generator",
        ),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_side_effect_is_reported(kind: str, fn: str, error_class: type[Exception], message: str) -> None:
    error = train(kind, fn).error
    assert type(error) is error_class
    assert all(part in str(error) for part in ("'mine'", f"({kind})", "layer '1'", "step 1", message))


def test_result_without_graph_is_accepted_where_none_is_needed() -> None:
    context = Context("h", "forward", "output", "l", nn.Identity(), "", StepContext(0, 0, 0, "train"))
    trained, plain = torch.ones(2, requires_grad=True), torch.ones(2)
    check_result(plain, plain * 2, context)
    with torch.no_grad():
        check_result(trained, trained * 2, context)
    with pytest.raises(instrument.HookResultError):
        check_result(trained, plain, context)


def test_message_names_the_evaluation() -> None:
    context = Context("h", "forward", "output", "", nn.Identity(), "0.x", StepContext(7, 0, 0, "eval"))
    with pytest.raises(instrument.HookResultError, match=r"layer '\.', output '0\.x' at step 7 in eval"):
        check_result(torch.ones(2), 3, context)


def test_effect_of_a_tensor_with_gradient_holds_no_graph() -> None:
    before = torch.ones(3, requires_grad=True)
    factor = (before.sum() / 6).reshape(())
    effect = effect_of(before, before * factor, factor, before.numel())
    assert isinstance(effect.factor, Tensor)
    assert effect.factor.grad_fn is None
    assert list(effect.measures) == pytest.approx([3, 3**0.5, 0.75**0.5])
