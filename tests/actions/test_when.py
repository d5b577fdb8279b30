"""`when` with a condition on the tensor: compared with hooks written by hand, on the host and with the path for devices."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from device_statistics import use_device_statistics
from hook_runs import Calls, scale
from tiers import tiered
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instrument
from instrument.actions.base import Context
from instrument.actions.clip import clip_norm
from instrument.config.parse import parse_hooks
from instrument.integrations.attached_probe import AttachedProbe
from instrument.plan.hook_plan import make_plan
from instrument.probe.probe import Probe
from instrument.storage.memory import MemorySink

STEPS = 18
SPIKES = (9, 15, 16)
RARE = {"stat": "l2", "above": 3, "times": "median", "window": 6, "after": 4}
TAME = {"layers": "*", "kind": "parameter_grad", "action": "clip", "norm": 0.01, "when": RARE}


@pytest.fixture(params=["host", "device"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test on the host, and with the path for devices."""
    if request.param == "device":
        use_device_statistics(monkeypatch)
    return str(request.param)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(step: int) -> Tensor:
    """Return a batch, which is large at some steps."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 4, generator=generator) * (20.0 if step in SPIKES else 1.0)


def train(model: nn.Module, hooks: dict[str, Any], steps: range = range(STEPS)) -> AttachedProbe:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with instrument.attach(model, hooks, optimizer=optimizer) as probe:
        for step in steps:
            optimizer.zero_grad()
            model(batch(step)).square().sum(1).mean().backward()
            optimizer.step()
            probe.end_step()
    return probe


def train_by_hand(model: nn.Module, change: Callable[[Tensor], Tensor], condition: Callable[[float, Any], bool]) -> Any:
    """Train with a condition that is written by hand. Return the decisions by step and parameter."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    previous: dict[str, list[float]] = defaultdict(list)
    decisions = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step)).square().sum(1).mean().backward()
        for name, parameter in model.named_parameters():
            norm = float(parameter.grad.double().norm())
            decisions[step, name] = condition(norm, previous[name])
            if decisions[step, name]:
                parameter.grad.copy_(change(parameter.grad))
            previous[name].append(norm)
        optimizer.step()
    return decisions


def decisions_of(probe: AttachedProbe) -> dict[tuple[int, str], bool]:
    return {(row["step"], f"{row['layer']}.{row['path']}"): row["held"] for row in probe.sink.records("effects")}


def equal_weights(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.spread(1)
@pytest.mark.parametrize("seed", tiered([0, 1], [0]))
def test_clip_of_rare_gradients_equals_code_by_hand(path: str, seed: int) -> None:
    """The seed of the feature: clip a gradient only where its norm exceeds a multiple of its running median."""
    model, by_hand = net(seed), net(seed)
    probe = train(model, {"tame": TAME})
    expected = train_by_hand(
        by_hand,
        lambda gradient: clip_norm(gradient, 0.01)[0],
        lambda norm, previous: len(previous) >= 4 and norm > 3 * float(np.median(previous[-6:])),
    )
    assert decisions_of(probe) == expected
    assert {step for (step, _), held in expected.items() if held} & set(SPIKES)
    assert equal_weights(model, by_hand)


@pytest.mark.spread(1)
def test_scale_of_small_gradients_equals_code_by_hand(path: str) -> None:
    small = {"stat": "l2", "below": 0.2}
    model, by_hand = net(), net()
    hooks = {"lift": {"layers": "*", "kind": "parameter_grad", "action": "scale", "factor": 4.0, "when": small}}
    probe = train(model, hooks)
    expected = train_by_hand(by_hand, lambda gradient: gradient * 4.0, lambda norm, previous: norm < 0.2)
    assert decisions_of(probe) == expected
    assert {*expected.values()} == {True, False}
    assert equal_weights(model, by_hand)


@pytest.mark.spread(1)
def test_effects_say_where_the_condition_held(path: str) -> None:
    rows = train(net(), {"tame": TAME, "always": {**TAME, "norm": 9.0, "when": None}}).sink.records("effects")
    assert {row["held"] for row in rows if row["hook"] == "always"} == {None}
    rows = [row for row in rows if row["hook"] == "tame"]
    assert len(rows) == 4 * STEPS
    for row in rows:
        if row["held"]:
            assert row["changed"]
            assert row["norm_after"] == pytest.approx(0.01, rel=1e-4)
            assert row["factor"] == pytest.approx(0.01 / row["norm_before"], rel=1e-3)
        else:
            assert (row["changed"], row["factor"], row["norm_after"]) == (0, None, row["norm_before"])


@pytest.mark.parametrize(
    ("times", "reference"), [("median", np.median), ("mean", np.mean), ("std", np.std)], ids=["median", "mean", "std"]
)
def test_running_value_is_that_of_the_previous_firings(
    path: str, times: str, reference: Callable[[list[float]], float]
) -> None:
    """The current value is left out. Firings without a value count for the window, but not for `after`."""
    values = [1.0, 3.0, math.nan, 2.0, 2.5, 9.0, math.nan, 0.1, 40.0, 4.0, 30.0, 31.0]
    when = {"stat": "abs_max", "above": 1.5, "times": times, "window": 4, "after": 3}
    held = []
    model = nn.Identity()
    hooks = {"zero": {"layers": ".", "kind": "forward", "action": "modify", "fn": "zero", "when": when}}
    with instrument.attach(model, hooks, rules=None) as probe:
        for value in values:
            held.append(bool((model(torch.full((2, 2), value)) == 0).all()))
            probe.end_step()
    expected = []
    for at, value in enumerate(values):
        window = [known for known in values[max(0, at - 4) : at] if not math.isnan(known)]
        is_ready = sum(not math.isnan(known) for known in values[:at]) >= 3
        expected.append(is_ready and value > 1.5 * reference(window))
    assert held == expected
    assert any(expected)


def test_record_hook_leaves_rows_out(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    when = {"stat": "abs_max", "above": 10}
    common = {"layers": "0", "kind": "forward_pre", "when": when}
    hooks = {
        "seen": {**common, "action": "record", "tensors": True, "histogram": True, "samples": 2},
        "shown": {**common, "action": "print", "stats": ["mean"]},
    }
    probe = train(net(), hooks)
    for table in ("stats", "distributions", "tensors"):
        assert [row["step"] for row in probe.sink.records(table)] == [*SPIKES], table
    for row, step in zip(probe.sink.records("tensors"), SPIKES, strict=True):
        assert torch.equal(torch.as_tensor(row["values"]).view(2, 4), batch(step)[:2])
    assert len(capsys.readouterr().out.splitlines()) == len(SPIKES)
    assert {row["fired"] for row in probe.coverage()} == {STEPS}


def test_custom_function_is_called_where_the_condition_holds() -> None:
    """On a device, it is called in any case, because the host does not know the decision."""
    seen: list[Any] = []
    when = {"stat": "abs_max", "above": 10}
    hooks = {"look": {"layers": "0", "kind": "forward_pre", "action": "call", "fn": None, "when": when}}
    hooks["look"]["fn"] = lambda tensor, context: seen.append((context.step, context.holds))
    train(net(), hooks)
    assert seen == [(step, True) for step in SPIKES]


def test_custom_function_gets_the_decision_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    use_device_statistics(monkeypatch)
    seen: list[tuple[int, Tensor]] = []
    when = {"stat": "abs_max", "above": 10}

    def look(tensor: Tensor, context: Context) -> None:
        assert isinstance(context.holds, Tensor)
        seen.append((context.step, context.holds))

    train(net(), {"look": {"layers": "0", "kind": "forward_pre", "action": "call", "fn": look, "when": when}})
    assert [step for step, holds in seen if holds] == [*SPIKES]
    assert len(seen) == STEPS


@pytest.mark.spread(1)
def test_gradient_flows_only_where_the_condition_holds(path: str) -> None:
    """A forward intervention that does not apply leaves values and gradients bit-identical."""
    model, bare = net(), net()
    hooks = {"noise": {"layers": "0", "kind": "forward", "action": "scale", "factor": 3.0, "when": None}}
    hooks["noise"]["when"] = {"stat": "abs_max", "above": 1e6}
    probe = train(model, hooks)
    train(bare, {})
    assert {row["held"] for row in probe.sink.records("effects")} == {False}
    assert equal_weights(model, bare)


@pytest.mark.spread(1)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_pass_repeats_the_decision_without_counting(path: str, reentrant: bool) -> None:
    def network(checkpointed: bool) -> nn.Module:
        def forward(layers: nn.Module, x: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(layers[:2], x, use_reentrant=reentrant) if checkpointed else layers[:2](x)
                x = x[:, :4]
            return x

        return Calls(forward, layers=net())

    when = {"stat": "l2", "above": 1, "times": "median", "window": 1, "after": 1}
    hooks = {"double": scale("forward", 2.0, "**.0", when=when)}
    found = []
    for checkpointed in (False, True):
        model = network(checkpointed)
        with instrument.attach(model, hooks) as probe:
            for step in range(4):
                model(batch(step).requires_grad_()).square().sum().backward()
                probe.end_step()
        gradients = [parameter.grad for parameter in model.layers[0].parameters()]
        found.append((gradients, [row["held"] for row in probe.sink.records("effects")]))
    assert found[0][1] == found[1][1]
    assert {*found[0][1]} == {True, False}
    assert all(torch.allclose(*pair, rtol=1e-6) for pair in zip(found[0][0], found[1][0], strict=True))


def test_each_tensor_of_a_nested_output_has_its_values() -> None:
    when = {"stat": "abs_max", "above": 5, "times": "mean", "window": 3, "after": 1}
    model = Calls(lambda x: {"small": x, "large": 100 * x})
    hook = {"layers": ".", "kind": "forward", "action": "modify", "fn": "zero", "when": when}
    with instrument.attach(model, {"zero": hook}) as probe:
        for value in (1.0, 1.0, 2.0, 50.0):
            model(torch.full((2,), value))
            probe.end_step()
    rows = probe.sink.records("effects")
    assert [(row["step"], row["path"]) for row in rows if row["held"]] == [(3, "small"), (3, "large")]


def test_condition_is_about_the_selected_part() -> None:
    model = nn.Identity()
    when = {"stat": "max", "above": 1}
    hook = {"layers": ".", "kind": "forward", "action": "modify", "fn": "zero", "slice": ":, 0", "when": when}
    with instrument.attach(model, {"zero": hook}):
        assert model(torch.tensor([[0.5, 9.0]])).tolist() == [[0.5, 9.0]]
        assert model(torch.tensor([[2.0, 9.0]])).tolist() == [[0.0, 9.0]]


@pytest.mark.slow
def test_condition_sees_unscaled_gradients() -> None:
    """The factor of a gradient scaler is not part of the value. Micro-steps are separate firings."""
    held = []
    for enabled in (False, True):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
        when = {"stat": "l2", "above": 1.5, "times": "mean", "window": 4, "after": 2}
        spec = {"layers": "*", "action": "scale", "factor": 0.5, "when": when}
        kinds = ("parameter_grad", "parameter_grad_micro", "full_backward_pre")
        hooks = {kind: {**spec, "kind": kind} for kind in kinds}
        with instrument.attach(model, hooks, optimizer=optimizer, scaler=scaler) as probe:
            for step in range(8):
                optimizer.zero_grad()
                for micro in range(2):
                    scaler.scale(model(batch(2 * step + micro)).square().mean()).backward()
                    probe.end_micro_step()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                probe.end_step()
        rows = probe.sink.records("effects")
        held.append([(row["hook"], row["layer"], row["path"], row["step"], row["held"]) for row in rows])
    assert held[0] == held[1]
    hooks_of = [row[0] for row in held[0]]
    assert hooks_of.count("parameter_grad_micro") == 2 * hooks_of.count("parameter_grad")
    assert {row[-1] for row in held[0]} == {True, False}


@pytest.mark.spread(1)
@pytest.mark.parametrize("paths", tiered(["hh", "dd", "hd", "dh"], ["hd", "dh"]))
def test_resumed_decisions_are_identical(paths: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The previous values are part of the state, also if the run continues on another device."""
    whole = decisions_of(train(net(), {"tame": TAME}))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    plan, sink = make_plan(parse_hooks({"tame": TAME}), model), MemorySink()
    state: dict[str, Any] | None = None
    for part, steps in zip(paths, (range(12), range(12, STEPS)), strict=True):
        with monkeypatch.context() as patched:
            if part == "d":
                use_device_statistics(patched)
            probe = Probe(plan, sink, optimizer=optimizer)
            if state is not None:
                probe.load_state_dict(state)
            with probe:
                for step in steps:
                    optimizer.zero_grad()
                    model(batch(step)).square().sum(1).mean().backward()
                    optimizer.step()
                    probe.end_step()
                state = probe.state_dict()
    found = {(row["step"], f"{row['layer']}.{row['path']}"): row["held"] for row in sink.records("effects")}
    assert found == whole


def test_memory_of_previous_values_is_bounded() -> None:
    probe = train(net(), {"tame": TAME}, range(2 * STEPS))
    states = [attached.state_dict()["condition"] for attached in probe.attached_hooks]
    assert all(len(values["values"]) == RARE["window"] for state in states for values in state.values())
