"""A hook that is not scheduled is taken out of its module, and put back at its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import instrument
from instrument.config.parse import parse_hooks
from instrument.hooks.hook_group import SuspendableHook
from instrument.plan.hook_plan import make_plan

EVERY_SECOND = {"layers": ".", "kind": "forward", "action": "record", "every": 2}


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Hide what other tests in this process have compiled."""
    torch._dynamo.utils.counters.pop("frames", None)
    yield
    torch._dynamo.utils.counters.pop("frames", None)


def registered(module: nn.Module) -> tuple[int, int]:
    """Return the number of forward pre hooks and of forward hooks."""
    return len(module._forward_pre_hooks), len(module._forward_hooks)


def test_hook_that_is_not_scheduled_is_suspended() -> None:
    model = nn.Linear(2, 2)
    seen = []
    with instrument.attach(model, {"h": {**EVERY_SECOND, "every": 3}}, rules=None) as probe:
        for _ in range(7):
            before = registered(model)
            model(torch.ones(1, 2))
            seen.append((before, registered(model)))
            probe.end_step()
    on, off = (1, 1), (0, 0)
    assert seen == [(on, on), (on, off), (off, off), (on, on), (off, off), (off, off), (on, on)]
    assert [row["step"] for row in probe.sink.records("stats")] == [0, 3, 6]
    assert probe.coverage()[0]["fired"] == probe.coverage()[0]["expected"] == 3


def test_probe_that_ends_while_a_hook_is_suspended_leaves_nothing() -> None:
    model = nn.Linear(2, 2)
    with instrument.attach(model, {"h": {**EVERY_SECOND, "start": 5, "always_call": True}}, rules=None) as probe:
        model(torch.ones(1, 2))
        probe.end_step()
        assert registered(model) == (0, 0)
    assert registered(model) == (0, 0)
    assert not model._forward_hooks_with_kwargs
    assert not model._forward_hooks_always_called


def test_suspended_hook_notices_another_phase() -> None:
    model = nn.Linear(2, 2)
    with instrument.attach(model, {"h": {**EVERY_SECOND, "start": 100}}) as probe:
        for _ in range(2):
            model(torch.ones(1, 2))
            probe.end_step()
        with probe.evaluating():
            model(torch.ones(1, 2))
        assert probe.plan.sites  # the plan is unchanged
    (attached,) = probe.attached_hooks
    assert attached.other_phases == {"train", "eval"}


@pytest.mark.slow
def test_code_that_was_compiled_without_a_suspended_hook_is_compiled_again() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    called: nn.Module | Callable[..., Any] = model
    with instrument.attach(model, {"h": {**EVERY_SECOND, "layers": "*", "start": 3, "every": 1}}) as probe:
        for step in range(5):
            if step == 1:  # the hooks are suspended since step 0
                called = torch.compile(model, backend="eager")
            called(torch.ones(1, 2))
            probe.end_step()
    assert [(row["step"], row["layer"]) for row in probe.sink.records("stats")] == [
        (step, layer) for step in (3, 4) for layer in ("0", "1")
    ]


class Recorder:
    """Registers hooks on a module and lists which ones a call runs."""

    def __init__(self) -> None:
        self.module = nn.Identity()
        self.ran: list[str] = []

    def register(self, name: str, *, prepend: bool = False) -> SuspendableHook:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            self.ran.append(name)

        return SuspendableHook(self.module.register_forward_hook(hook, prepend=prepend))

    def order(self) -> str:
        """Return the names of the hooks that a call runs."""
        self.ran.clear()
        self.module(torch.ones(1))
        return "".join(self.ran)


@pytest.mark.parametrize("removed", ["", "a", "c", "ac"])
def test_resumed_hook_has_its_place_among_the_others(removed: str) -> None:
    recorder = Recorder()
    hooks = {name: recorder.register(name) for name in "abc"}
    hooks["b"].suspend()
    assert hooks["b"].is_suspended
    assert recorder.order() == "ac"
    if removed != "ac":  # otherwise nothing separates it from a later hook
        recorder.register("p", prepend=True)
    recorder.register("n")
    for name in removed:
        hooks[name].remove()
    hooks["b"].resume()
    hooks["b"].resume()  # no effect
    assert recorder.order() == "".join(
        name for name in "pabcn" if name not in removed and (name != "p" or removed != "ac")
    )


# A module whose only hook was prepended is equal to one whose only hook was not.
@pytest.mark.parametrize("later", ["p", "n", "np", "npq", "nop", "npoq"])
def test_resumed_hook_without_others_follows_prepended_ones(later: str) -> None:
    recorder = Recorder()
    hook = recorder.register("b")
    hook.suspend()
    for name in later:
        recorder.register(name, prepend=name in "pq")
    others = recorder.order()
    hook.resume()
    assert recorder.order() == (others.replace("n", "bn") if "n" in later else f"b{others}")


@pytest.mark.parametrize(
    ("model", "layer", "options", "compiles"),
    [
        # Without hooks, evaluations would take PyTorch's fast path, which rounds differently.
        (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(), "linear1", {}, False),
        (nn.Identity(), ".", {"prepend": True}, False),
        (nn.Identity(), ".", {}, True),
    ],
    ids=["encoder layer", "prepended", "after any compilation"],
)
def test_hooks_that_code_may_rely_on_stay_registered(
    model: nn.Module, layer: str, options: dict[str, Any], compiles: bool
) -> None:
    if compiles:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    hooked = model.get_submodule(layer.strip("."))
    with instrument.attach(model, {"h": {**EVERY_SECOND, "layers": layer, "start": 5, **options}}, rules=None) as probe:
        for _ in range(2):
            model(torch.ones(1, 3, 4))
            probe.end_step()
            assert registered(hooked) == (1, 1)


def test_resumed_probe_suspends_the_same_hooks() -> None:
    def train(steps: int, state: dict[str, Any] | None = None) -> tuple[list[tuple[int, int]], dict[str, Any]]:
        model, seen = nn.Linear(2, 2), []
        plan = make_plan(parse_hooks({"h": {**EVERY_SECOND, "every": 4}}), model)
        probe = instrument.Probe(plan, instrument.MemorySink())
        if state is not None:
            probe.load_state_dict(state)
        with probe:
            for _ in range(steps):
                seen.append(registered(model))
                model(torch.ones(1, 2))
                probe.end_step()
            return seen, probe.state_dict()

    complete, _ = train(9)
    first, state = train(3)
    second, _ = train(6, state)
    assert first + second == complete
    assert (0, 0) in complete


@pytest.mark.parametrize("kept", ["", "x", "y", "xy"])
@pytest.mark.parametrize("order", list(permutations("abc")), ids="".join)
def test_several_suspended_hooks_return_in_their_order(order: tuple[str, ...], kept: str) -> None:
    recorder = Recorder()
    hooks = {name: recorder.register(name) for name in "xabcy"}
    for name in sorted({*"xy"} - {*kept}):
        hooks[name].remove()
    for first in permutations("abc"):
        for name in first:
            hooks[name].suspend()
            hooks[name].suspend()  # no effect
        assert recorder.order() == kept
        for name in order:
            hooks[name].resume()
        assert recorder.order() == "".join(sorted({*"abc", *kept}, key="xabcy".index))


def test_records_see_both_changes_after_an_evaluation_if_a_hook_is_prepended() -> None:
    model = nn.Identity()
    scale = {"layers": ".", "kind": "forward", "action": "scale"}
    hooks = {"first": {**scale, "factor": 3.0, "prepend": True}, "second": {**scale, "factor": 7.0}}
    with instrument.attach(model, {**hooks, "output": EVERY_SECOND}, rules=None) as probe:
        for step in range(3):
            model(torch.ones(1, 2))
            probe.end_step()
            if step == 1:
                with probe.evaluating():
                    model(torch.ones(1, 2))
    assert [row["abs_max"] for row in probe.sink.records("stats")] == [21.0, 21.0]


@pytest.mark.parametrize("is_written_first", [True, False])
def test_record_sees_the_changed_output_after_an_evaluation_suspended_both_hooks(is_written_first: bool) -> None:
    model = nn.Identity()
    input_seen = {"layers": ".", "kind": "forward", "role": "input", "action": "record", "every": 2}
    zero = {"layers": ".", "kind": "forward", "action": "modify", "fn": "zero"}
    gradient = {**EVERY_SECOND, "kind": "tensor"}
    pair = {"input": input_seen, "zero": zero} if is_written_first else {"zero": zero, "input": input_seen}
    hooks = {**pair, "output": EVERY_SECOND, "gradient": gradient}
    with instrument.attach(model, hooks, rules=None) as probe:
        for step in range(3):
            model(torch.ones(1, 2, requires_grad=True)).square().sum().backward()
            probe.end_step()
            if step == 1:
                with probe.evaluating():
                    model(torch.ones(1, 2))
    expected = (("gradient", 0.0), ("input", 1.0), ("output", 0.0))
    seen = [(row["hook"], row["step"], row["abs_max"]) for row in probe.sink.records("stats")]
    assert sorted(seen) == [(name, step, value) for name, value in expected for step in (0, 2)]


def test_removed_hook_does_not_return() -> None:
    recorder = Recorder()
    hook = recorder.register("a")
    hook.suspend()
    hook.remove()
    hook.resume()
    assert recorder.order() == ""
