"""Several threads that call one model at the same time, and several batches in flight in one thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hook_runs import Calls, keep, record, scale
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import instrument
from instrument.hooks.hook_group import SuspendableModuleHooks
from instrument.probe.slab_rows import Slots

THREADS, CALLS = 6, 40
RECORD = {"action": "record", "stats": "none", "tensors": True}


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Let Python switch threads as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(function: Callable[[int], object], threads: int = THREADS) -> None:
    """Call a function in several threads that start at the same time."""
    barrier = threading.Barrier(threads, timeout=60)

    def started(index: int) -> None:
        barrier.wait()
        function(index)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(started, range(threads)))


def meeting(threads: int) -> nn.Module:
    """Return a module that doubles its input. All threads meet inside of a call."""
    barrier = threading.Barrier(threads, timeout=60)

    def forward(x: Tensor) -> Tensor:
        barrier.wait()
        y = x * 2
        barrier.wait()
        return y

    return Calls(forward)


@pytest.mark.spread(1)
@pytest.mark.parametrize("options", [{}, {"action": "record", "stats": ["mean"]}], ids=["general", "plain"])
def test_call_joins_input_and_output_of_one_call(options: dict[str, Any]) -> None:
    model = meeting(THREADS)
    specs = {"before": {**keep("forward_pre"), **options}, "after": {**keep("forward"), **options}}
    with instrument.attach(model, specs) as probe:
        in_threads(lambda index: [model(torch.full((3,), float(index * 5 + i))) for i in range(5)])
        probe.end_step()
    if options:
        values = {(row.hook, row.call): row.mean for row in probe.stats.itertuples()}
    else:
        values = {(row["hook"], row["call"]): float(row["values"][0]) for row in probe.sink.records("tensors")}
    assert len(values) == 2 * 5 * THREADS
    for call in range(5 * THREADS):
        assert values["after", call] == 2 * values["before", call]


def test_hook_gets_the_tensor_that_its_thread_kept() -> None:
    model = nn.Sequential(meeting(THREADS), meeting(THREADS))
    specs = {
        "keep": record("forward", "0", keep_as="first"),
        "use": {
            "layers": "1",
            "kind": "forward",
            "action": "modify",
            "fn": lambda tensor, context: tensor - 2 * context.tensors["first"]["0"],
        },
    }
    results: list[float] = []
    with instrument.attach(model, specs, rules=None):
        in_threads(lambda index: results.append(model(torch.full((3,), float(index))).abs().max().item()))
    assert results == [0.0] * THREADS


@pytest.mark.slow
def test_call_is_that_of_the_module_in_all_hook_groups() -> None:
    """An intervention and a hook on functions have hook groups of their own."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    specs = {
        "input": record("forward_pre", stats=["mean"]),
        "output": record("forward", stats=["mean"]),
        "half": scale("forward", 0.5),
        "function": record("function", functions="linear", stats=["mean"]),
    }
    with instrument.attach(model, specs) as probe:

        def call(index: int) -> None:
            for i in range(CALLS):
                number = float(index * CALLS + i + 1)
                (model(torch.full((1, 1), number, requires_grad=True)) * number).sum().backward()

        in_threads(call)
        probe.end_step()
    means = probe.stats.pivot(index="call", columns="hook", values="mean")
    assert len(means) == THREADS * CALLS
    assert (means.output == 2 * means.input).all()
    assert (means.function == 2 * means.input).all()


@pytest.mark.slow
@pytest.mark.parametrize("only_records", [False, True])
def test_counters_hold_while_steps_end(only_records: bool) -> None:
    """One thread ends steps while the others call the model. Some hooks only record outputs and their gradients."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    specs = {"plain": record("forward", "*"), "grads": record("full_backward", "*", role="grad_output")}
    if not only_records:
        specs |= {"general": record("forward_pre", "*"), "flow": record("full_backward", "*")}
        specs |= {"half": scale("forward", 0.5, "*")}
    with instrument.attach(model, specs, rules=None) as probe:

        def call(index: int) -> None:
            for _ in range(CALLS):
                if index:
                    model(torch.ones(2, 4, requires_grad=True)).sum().backward()
                else:
                    probe.end_step()

        in_threads(call)
        probe.end_step()
    calls = (THREADS - 1) * CALLS
    counts = probe.stats.groupby(["hook", "layer"]).size()
    assert set(counts) == {calls}
    assert len(probe.effects) == (0 if only_records else 2 * calls)
    assert {(row["hook"], row["fired"]) for row in probe.coverage()} == {(name, calls) for name in specs}


def test_slot_has_its_identity_before_other_threads_get_its_number() -> None:
    class Identities(list[Any]):
        def append(self, identity: Any) -> None:
            assert identity not in slots._numbers
            super().append(identity)

    slots = Slots()
    slots._identities = Identities()
    assert [slots.slot((name,)) for name in "aba"] == [0, 1, 0]
    assert slots.layout(np.array([1, 0])).sites == [("b",), ("a",)]


class BlockingModule(nn.Module):
    """Waits inside its forward pass, or fails there, if requested."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.is_inside, self.may_continue = threading.Event(), threading.Event()

    def forward(self, x: Tensor, *, wait: bool = False, fail: bool = False) -> Tensor:
        if wait:
            self.is_inside.set()
            assert self.may_continue.wait(10)
        if fail:
            raise ArithmeticError
        return self.layer(x)  # type: ignore[no-any-return]


def test_call_across_a_step_in_another_thread_is_recorded() -> None:
    model = BlockingModule()
    with instrument.attach(model, {"seen": record("forward")}, rules=None) as probe:
        thread = threading.Thread(target=model, args=(torch.full((2, 3), 5.0),), kwargs={"wait": True})
        thread.start()
        assert model.is_inside.wait(10)
        probe.end_step()
        expected = [model(torch.ones(2, 3))]
        model.may_continue.set()
        thread.join()
        expected += [model.layer(torch.full((2, 3), 5.0)), model(torch.zeros(2, 3))]
        probe.end_step()
    rows = probe.stats
    assert rows["step"].tolist() == [1, 1, 1]
    assert rows["mean"].tolist() == pytest.approx([output.mean().item() for output in expected], rel=1e-6)


def test_exception_in_a_thread_is_not_reported_in_later_steps() -> None:
    model = BlockingModule()

    def fail() -> None:
        with suppress(ArithmeticError):
            model(torch.ones(2, 3), fail=True)

    with instrument.attach(model, {"grads": record("tensor")}, rules=None) as probe:
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        probe.end_step()
        for _ in range(3):
            model(torch.ones(2, 3)).sum()
            probe.end_step()
    (row,) = probe.sink.records("coverage")  # type: ignore[attr-defined]
    assert (row["expected"], row["fired"]) == (4, 0)
    assert row["cause"].startswith("no gradient arrived")


@pytest.mark.parametrize("during", ["end of the block", "suspension"])
def test_thread_in_a_call_stops_observing_when_the_call_ends(during: str) -> None:
    model, other, x = BlockingModule(), nn.Linear(3, 3), torch.ones(2, 3)
    specs = {"seen": record("function", "**", functions="*", every=2)}
    with ThreadPoolExecutor(1) as pool:
        with instrument.attach(nn.Sequential(model, other), specs, rules=None) as probe:
            call = pool.submit(model, x, wait=True)
            assert model.is_inside.wait(10)
            if during == "suspension":
                probe.end_step()
                model(x)
                model.may_continue.set()
                call.result(10)
        assert not other._forward_hooks, "no thread is in a call of it"
        model.may_continue.set()
        assert call.result(10).equal(model.layer(x))
        assert not pool.submit(_get_current_function_mode_stack).result(10)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.spread(1)
@pytest.mark.parametrize("shared", [False, True], ids=["own leaves", "shared leaf"])
def test_gradient_of_a_leaf_belongs_to_its_call(shared: bool) -> None:
    """Each thread runs its own backward pass. A hook of PyTorch on the same module gives the gradient of each call."""
    model, leaf = Calls(lambda x, factor: x * factor), torch.ones(3, requires_grad=True)
    specs = {"factor": record("forward"), "flow": record("full_backward"), "total": record("tensor", role="input")}
    with instrument.attach(model, specs, rules=None) as probe:

        def call(index: int) -> None:
            for i in range(CALLS):
                x = leaf if shared else torch.ones(3, requires_grad=True)
                model(x, float(index * CALLS + i)).sum().backward()

        in_threads(call)
        probe.end_step()
    by_hook = {name: rows.set_index("call")["mean"].sort_index() for name, rows in probe.stats.groupby("hook")}
    assert list(by_hook["factor"].index) == [*range(THREADS * CALLS)]
    for name in ("flow", "total"):
        assert by_hook[name].equals(by_hook["factor"]), "the gradient of x * factor is the factor"
    assert all(row["fired"] == row["expected"] == THREADS * CALLS for row in probe.coverage())


def schedule(model: nn.Module, inputs: list[Tensor], after: Callable[[], object] = lambda: None) -> None:
    """Run passes of several batches in the order of a 1F1B pipeline."""
    losses = [model(inputs[0]).square().sum()]
    for i in range(len(inputs)):
        if i + 1 < len(inputs):
            losses.append(model(inputs[i + 1]).square().sum())
        losses[i].backward()
        after()


@pytest.mark.spread(3)
@pytest.mark.parametrize("ends_micro_steps", [False, True])
@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre", "tensor"])
def test_gradients_of_batches_in_flight_belong_to_their_calls(kind: str, ends_micro_steps: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    inputs = [torch.randn(5, 4, requires_grad=True) for _ in range(4)]
    wanted: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    handles = [
        layer.register_full_backward_hook(
            lambda module, into, out, i=i: wanted[i].append((into if kind == "full_backward" else out)[0].clone())
        )
        for i, layer in enumerate(model)
    ]
    schedule(model, inputs)
    for handle in handles:
        handle.remove()
    with instrument.attach(model, {"flow": {"layers": "*", "kind": kind, **RECORD}}) as probe:
        schedule(model, inputs, probe.end_micro_step if ends_micro_steps else lambda: None)
        probe.end_step()
    rows = probe.sink.records("tensors")
    for i, gradients in wanted.items():
        recorded = [row for row in rows if row["layer"] == str(i)]
        assert len(recorded) == len(gradients) == 4
        assert all(torch.equal(row["values"], gradient) for row, gradient in zip(recorded, gradients, strict=True))
        assert ends_micro_steps or [row["call"] for row in recorded] == [0, 1, 2, 3]
    assert all(row["fired"] == row["expected"] == 4 for row in probe.coverage())


def test_interleaved_passes_of_one_leaf_are_separated() -> None:
    """The same leaf is in flight twice. The factor of each call is its gradient."""
    model, leaf = Calls(lambda x: x * model.factor), torch.ones(3, requires_grad=True)
    specs = {"flow": keep("full_backward"), "total": scale("tensor", 10.0, role="input")}
    with instrument.attach(model, specs) as probe:
        losses = []
        for factor in (2.0, 3.0, 5.0):
            model.factor = factor
            losses.append(model(leaf).sum())
        for i in (1, 0, 2):
            losses[i].backward()
        probe.end_step()
    seen = [(row["call"], row["values"].tolist()) for row in probe.sink.records("tensors")]
    assert seen == [(1, [3.0] * 3), (0, [2.0] * 3), (2, [5.0] * 3)]
    assert leaf.grad.tolist() == [100.0] * 3
    assert all(row["fired"] == row["expected"] == 3 for row in probe.coverage())


def test_repeated_passes_of_one_leaf_belong_to_their_calls() -> None:
    model, leaf = Calls(lambda x, factor: x * factor), torch.ones(3, requires_grad=True)
    specs = {"flow": keep("full_backward"), "total": keep("tensor", role="input")}
    with instrument.attach(model, specs, rules=None) as probe:
        losses = [model(leaf, 2.0).sum()]
        losses[0].backward(retain_graph=True)
        losses.append(model(leaf, 3.0).sum())
        for i in (0, 1, 0):
            torch.autograd.grad(losses[i], leaf, retain_graph=True)
        probe.end_step()
    rows = probe.sink.records("tensors")
    for name in specs:
        seen = [(row["call"], row["backward"], row["values"].tolist()) for row in rows if row["hook"] == name]
        assert seen == [(0, 0, [2.0] * 3), (0, 1, [2.0] * 3), (1, 0, [3.0] * 3), (0, 2, [2.0] * 3)]
    assert all(row["fired"] == row["expected"] == 2 for row in probe.coverage())


def test_repeated_pass_in_a_later_step_is_not_missed() -> None:
    model, leaf = Calls(lambda x, factor: x * factor), torch.ones(3, requires_grad=True)
    specs = {
        "flow": record("full_backward"),
        "out": record("full_backward", role="grad_output"),
        "total": record("tensor", role="input"),
    }
    with instrument.attach(model, specs, rules=None) as probe:
        loss = model(leaf, 2.0).sum()
        for _ in range(2):
            loss.backward(retain_graph=True)
            probe.end_step()
    assert sorted(zip(probe.stats.hook, probe.stats.step, strict=True)) == [
        (name, step) for name in sorted(specs) for step in (0, 1)
    ]
    assert {(row["hook"], row["expected"], row["fired"]) for row in probe.coverage()} == {
        (name, 1, 1) for name in specs
    }


def test_concurrent_passes_through_one_graph_belong_to_their_call() -> None:
    barrier = threading.Barrier(2, timeout=60)

    class Meet(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            if threading.current_thread() is not threading.main_thread():
                barrier.wait()
            return gradient

    model, leaf = Calls(lambda x, factor: Meet.apply(x * factor)), torch.ones(3, requires_grad=True)
    with instrument.attach(model, {"flow": keep("tensor", role="input")}) as probe:
        losses = [model(leaf, factor).sum() for factor in (2.0, 3.0)]
        losses[1].backward(retain_graph=True)
        in_threads(lambda index: losses[0].backward(retain_graph=True), 2)
        probe.end_step()
    seen = sorted((row["call"], row["backward"], row["values"].tolist()) for row in probe.sink.records("tensors"))
    assert seen == [(0, 0, [2.0] * 3), (0, 1, [2.0] * 3), (1, 0, [3.0] * 3)]


def test_concurrent_passes_record_a_view_that_is_modified_in_place_once() -> None:
    barrier = threading.Barrier(2, timeout=60)

    def wait(gradient: Tensor) -> None:  # until each pass has run the hook on the view
        barrier.wait()

    def view_of(x: Tensor) -> Tensor:
        base = x * 1.0
        base.register_hook(wait)
        return base.view(-1)

    model, leaf = Calls(view_of), torch.ones(3, requires_grad=True)
    with instrument.attach(model, {"flow": keep("tensor")}) as probe:
        view = model(leaf)
        loss = (view * 2.0).sum()
        view.mul_(3.0)
        in_threads(lambda index: loss.backward(retain_graph=True), 2)
        probe.end_step()
    seen = sorted((row["backward"], row["values"].tolist()) for row in probe.sink.records("tensors"))
    assert seen == [(0, [2.0] * 3), (1, [2.0] * 3)]


@pytest.mark.parametrize("kind", ["forward", "function"])
def test_step_that_begins_during_an_unscheduled_call_is_recorded(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Another thread ends the step after a hook has found that it is not scheduled, before it is suspended."""
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    remaining = ["end of step 1"]

    def active(hooks: SuspendableModuleHooks) -> bool:
        value = hooks.__dict__["active"]
        if not value and is_armed.is_set() and remaining:
            remaining.clear()
            thread = threading.Thread(target=probe.end_step)
            thread.start()
            thread.join()
        return bool(value)

    is_armed = threading.Event()
    setter = lambda hooks, value: hooks.__dict__.update(active=value)  # noqa: E731
    monkeypatch.setattr(SuspendableModuleHooks, "active", property(active, setter), raising=False)
    functions = {} if kind == "forward" else {"functions": "linear"}
    with instrument.attach(model, {"seen": record(kind, "0", every=2, **functions)}, rules=None) as probe:
        model(x)
        probe.end_step()
        is_armed.set()
        model(x)
        assert not remaining
        model(x)
        model(x)
        probe.end_step()
    assert (probe.stats.step == 2).sum() >= 2
    assert all(row["fired"] == row["expected"] for row in probe.coverage())


def test_hook_on_a_leaf_ends_with_its_graph() -> None:
    model, leaf = nn.Linear(3, 3), torch.ones(3, requires_grad=True)
    with instrument.attach(model, {"total": record("tensor", role="input")}) as probe:
        for _ in range(20):
            model(leaf)  # no backward pass
            probe.end_step()
        model(leaf).sum().backward()
        probe.end_step()
        assert len(leaf._backward_hooks) == 1
    assert list(probe.stats.step) == [20]
    assert not leaf._backward_hooks
