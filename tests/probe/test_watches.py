"""Gradient scalers, and modules and parameters that are replaced while hooked."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from hook_runs import keep, record, run_step, tensors_by
from torch import Tensor, nn

import instrument
from instrument import Probe
from instrument.tables.reasons import MOVED, MOVED_TOGETHER, REPLACED

KINDS = ("parameter_grad", "parameter_grad_micro", "post_accumulate_grad")
GRADIENTS = {kind: keep(kind, "0", params="weight") for kind in KINDS}
GRADIENTS["flow"] = keep("full_backward", "0", role="grad_output")


def make() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 3)


def train(scaled: bool, factor: float = 1.0, fused: bool = False) -> tuple[Probe, nn.Module]:
    model, batch = make()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)
    with instrument.attach(model, GRADIENTS, optimizer=optimizer, scaler=scaler) as probe:
        loss = model(batch).square().mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        probe.end_step(loss=loss)
    return probe, model


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_recorded_unscaled(fused: bool) -> None:
    unscaled, scaled = (tensors_by(train(scaled, fused=fused)[0], "hook") for scaled in (False, True))
    assert unscaled.keys() == scaled.keys() == GRADIENTS.keys()
    for hook, values in unscaled.items():
        torch.testing.assert_close(scaled[hook], values, msg=hook)


@pytest.mark.parametrize("fused", [False, True])
def test_step_skipped_by_the_scaler_is_marked(fused: bool) -> None:
    probe, model = train(True, factor=float("inf"), fused=fused)
    assert [row["skipped"] for row in probe.sink.records("metrics")] == [True]
    assert torch.equal(model[0].weight, make()[0][0].weight)
    if not fused:  # a fused optimizer is called but does nothing
        causes = {row["hook"]: row["cause"] for row in probe.coverage()}
        assert causes["parameter_grad"].startswith("the gradient scaler skipped the optimizer's step")
    for scaled, skipped in ((True, False), (False, None)):
        assert [row["skipped"] for row in train(scaled)[0].sink.records("metrics")] == [skipped]


def test_clip_uses_the_unscaled_gradient_of_a_fused_optimizer() -> None:
    model, batch = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    hook = {"layers": "**", "kind": "parameter_grad", "action": "clip", "norm": 0.01}
    with instrument.attach(model, {"tame": hook}, optimizer=optimizer, scaler=scaler) as probe:
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer)
        probe.end_step()
    moved = torch.cat([(now - old).flatten() for now, old in zip(model.parameters(), before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.spread(2)
@pytest.mark.parametrize("kind", ["parameter_grad_micro", "post_accumulate_grad", "full_backward_pre"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_scaled_gradient_changes_only_where_effects_report_it(dtype: torch.dtype, kind: str) -> None:
    """Also where the scale is not a power of two, so that unscaling and rescaling loses a bit."""

    def gradients(bound: float | None) -> tuple[list[Tensor], list[int]]:
        model, batch = make()
        model, batch = model.to(dtype), batch.to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
        hooks = {} if bound is None else {"x": {"layers": "2", "kind": kind, "action": "clip", "value": bound}}
        with instrument.attach(model, hooks, optimizer=optimizer, scaler=scaler) as probe:
            scaler.scale(model(batch).square().mean()).backward()
            probe.end_step()
        found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return found, [row["changed"] for row in probe.sink.records("effects")]

    unscaled, _ = gradients(None)
    wide, changed = gradients(1e6)
    assert set(changed) == {0}
    assert all(torch.equal(one, other) for one, other in zip(unscaled, wide, strict=True))
    if kind != "full_backward_pre":
        narrow, changed = gradients(0.01)
        differ = [int((one != other).sum()) for one, other in zip(unscaled, narrow, strict=True)]
        assert sorted(changed) == sorted(differ[2:])
        assert any(changed)


def test_clip_handles_float16_gradients_that_underflow_unscaled() -> None:
    model = nn.Linear(4, 1, bias=False).to(torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(65536.0), torch.zeros(())  # as set by a scaler
    model.weight.grad = torch.full_like(model.weight, 1e-4)  # 1.5e-9 each when unscaled, below the smallest float16
    hook = {"layers": ".", "kind": "parameter_grad", "action": "clip", "norm": 1e-9}
    with instrument.attach(model, {"tame": hook}, optimizer=optimizer) as probe:
        optimizer.step()
        probe.end_step()
    (effect,) = probe.sink.records("effects")
    assert effect["norm_before"] == pytest.approx(2 * 1e-4 / 65536, rel=1e-3)
    assert effect["factor"] == pytest.approx(1e-9 / (effect["norm_before"] + 1e-6), rel=1e-3)


def test_replaced_module_is_reported() -> None:
    model, batch = make()
    with instrument.attach(model, {"seen": record("forward", "*")}) as probe:
        for step in range(3):
            model(batch)
            probe.end_step()
            if step == 0:
                model[1] = nn.ReLU()
    (event,) = [event for event in probe.sink.records("events") if event["rule"] == "replaced"]
    assert event["layer"] == "1"
    assert "replaced or removed" in event["message"]
    coverage = {row["layer"]: row for row in probe.coverage()}
    assert (coverage["1"]["fired"], coverage["1"]["expected"]) == (1, 3)
    assert "not called" in coverage["1"]["cause"] or "replaced" in coverage["1"]["cause"]
    assert coverage["0"]["fired"] == 3


def test_modules_that_move_together_are_reported_once() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(6)])
    with (
        pytest.warns(instrument.InstrumentWarning, match="moved"),
        instrument.attach(model, {"seen": {"layers": "*", "kind": "forward", "action": "record"}}) as probe,
    ):
        for step in range(3):
            if step == 1:
                model.insert(0, nn.Identity())
            model(torch.ones(1, 2))
            probe.end_step()
    messages = probe.events.query("rule == 'replaced'").message.tolist()
    assert messages == [f"6 modules with hooks, 0 to 5: {MOVED_TOGETHER.format(1)}"]
    assert probe.stats["layer"].value_counts().to_dict() == dict.fromkeys("012345", 3)


def test_moved_module_is_reported_and_recorded_until_it_is_removed() -> None:
    model, batch = make()
    with instrument.attach(model, {"seen": record("forward", "2")}) as probe:
        for step in range(6):
            if step == 1:
                model.insert(0, nn.Identity())
            elif step == 3:
                del model[3]
            model(batch)
            probe.end_step()
    messages = [event["message"] for event in probe.sink.records("events") if event["rule"] == "replaced"]
    assert messages == [f"hook 'seen' on 2: {reason}" for reason in (MOVED.format(3), REPLACED)]
    (row,) = probe.coverage()
    assert (row["fired"], row["expected"]) == (3, 6)
    assert row["cause"].startswith(REPLACED)


@pytest.mark.parametrize("replaced", ["1", "1.0"])
def test_parameter_rows_end_with_their_module(replaced: str) -> None:
    """Also if a module that contains it is replaced. A module that is put back has rows again."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.BatchNorm1d(4), nn.ReLU())), torch.randn(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = ("step_post", *KINDS)
    hooks = {kind: record(kind, "1.0", params="weight") for kind in kinds}
    hooks["buffer"] = record("step_post", "1.0", role="buffer", params="running_mean")
    original = model.get_submodule(replaced)
    with instrument.attach(model, hooks, optimizer=optimizer) as probe:
        for step in range(4):
            if step in (1, 3):
                model.set_submodule(replaced, original if step == 3 else copy.deepcopy(original))
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            probe.end_step()
    steps = {hook: [row["step"] for row in probe.sink.records("stats") if row["hook"] == hook] for hook in hooks}
    registered_at_the_end = [steps.pop(kind) for kind in ("parameter_grad_micro", "post_accumulate_grad")]
    assert registered_at_the_end == [[0], [0]]
    assert steps == {hook: [0, 3] for hook in steps}
    replacements = [row for row in probe.sink.records("events") if row["rule"] == "replaced"]
    (message,) = [row["message"] for row in replacements if row["severity"] == "warning"]
    assert message == f"hooks {', '.join(map(repr, hooks))} on 1.0: {REPLACED}"
    assert {row["cause"] for row in probe.coverage() if row["fired"] == 2} == {REPLACED}


class _Equal(nn.Linear):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, nn.Linear)

    __hash__ = nn.Linear.__hash__


@pytest.mark.parametrize("by", ["nothing", "add_param_group", "a new optimizer"])
def test_new_modules_without_an_optimizer_are_reported_at_once(by: str) -> None:
    """Its rows and its layers are not needed: also after steps in which no relation is checked.

    A module that a new optimizer trains, which the probe does not know, has a second event at the end.
    """
    model, batch = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instrument.attach(model, {"seen": record("forward", "**")}, optimizer=optimizer) as probe:
        for step in range(9):
            if step in (6, 7):
                index, new = (2, _Equal(4, 1)) if step == 6 else (0, _Equal(3, 4))
                model[index] = new
                if by == "add_param_group":
                    optimizer.add_param_group({"params": new.parameters()})
                elif by == "a new optimizer":
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            probe.end_step()
    found = [row for row in probe.sink.records("events") if row["rule"] == "optimizer"]
    reported = [(6, "2", "warning"), (7, "0", "warning")]
    changed = [(9, "2", "info"), (9, "0", "info")] if by == "a new optimizer" else []
    expected = [] if by == "add_param_group" else [*reported, *changed]
    assert [(row["step"], row["layer"], row["severity"]) for row in found] == expected
    assert all(f"weight, bias of the new module {row['layer']}," in row["message"] for row in found[:2])


def test_new_modules_whose_values_cannot_be_read_do_not_end_the_training() -> None:
    """Lazy modules have no values before they are called, and sharded parameters have no memory between steps."""
    model, batch = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instrument.attach(model, {"seen": record("forward", "**")}, optimizer=optimizer) as probe:
        model[2] = nn.Linear(4, 1)
        model[2].unused = nn.LazyLinear(1)
        for _ in range(2):
            model(batch).square().mean().backward()
            probe.end_step()
        model[2].weight.untyped_storage().resize_(0)
    found = [(row["layer"], row["severity"]) for row in probe.sink.records("events") if row["rule"] == "optimizer"]
    assert found == [("2", "warning")]


class Like(nn.Sequential):
    """A block that compares its parts, as programs may define it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Like) and len(self) == len(other)

    __hash__ = nn.Module.__hash__


def test_new_block_that_equals_the_old_one_is_reported_without_the_parameters_of_the_old_one() -> None:
    block = Like(nn.Linear(1, 1), nn.Linear(1, 1))
    model = nn.Sequential(nn.Linear(3, 1), block)
    optimizer = torch.optim.SGD([*model[0].parameters(), *block[0].parameters()], lr=0.1)
    with instrument.attach(model, {"seen": record("forward", "1")}, optimizer=optimizer) as probe:
        model[1] = Like(*block)
        probe.end_step()
    found = [(row["rule"], row["layer"]) for row in probe.sink.records("events")]
    assert [each for each in found if each[0] != "coverage"] == [("replaced", "1")]


def test_parameter_rows_end_with_the_wrapper_of_their_module() -> None:
    model, batch = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = {"seen": record("step_post", "0", params="weight")}
    with instrument.attach(model, hooks, optimizer=optimizer, rules=None) as probe:
        for step in range(3):
            if step > 0:
                model[0] = nn.Sequential(model[0]) if step == 1 else copy.deepcopy(model[0])
            model(batch).square().mean().backward()
            optimizer.step()
            probe.end_step()
    assert [row["step"] for row in probe.sink.records("stats")] == [0, 1]


def test_added_parameters_without_hooks_are_reported() -> None:
    model, batch = make()
    hooks = {
        "weights": record("parameter_grad_micro", "**"),
        "bias": record("parameter_grad_micro", "0", params="bias"),
    }
    with instrument.attach(model, hooks) as probe:
        model[0].extra = nn.Parameter(torch.ones(4))
        (model(batch) * model[0].extra.sum()).mean().backward()
        probe.end_step()
    (message,) = [event["message"] for event in probe.sink.records("events") if event["rule"] == "added"]
    assert message.startswith(
        "hook 'weights' does not run on parameters that were added after it was attached: 0.extra;"
    )


def test_added_modules_without_hooks_are_reported() -> None:
    """Of a hook that selects them; also the parts of a module that replaces another one, but not a hooked part that it contains."""
    model, batch = make()
    hooks = {"all": record("forward", "**"), "first": record("forward", "0")}
    with instrument.attach(model, hooks) as probe:
        for step in range(2):
            model(batch)
            probe.end_step()
            if step == 0:
                model.add_module("8", nn.Identity())
                model.add_module("9", nn.Linear(model(batch).shape[-1], 2))
                model[0] = nn.Sequential(model[0], nn.Identity())
    found = [event["message"] for event in probe.sink.records("events") if event["rule"] == "added"]
    (message,) = found
    assert message.startswith("hook 'all' does not run on modules that were added after it was attached: 0.1, 8, 9;")


def test_proxy_of_a_module_is_no_part_of_the_model() -> None:
    model = nn.Bilinear(2, 2, 2)
    model.itself = weakref.proxy(model)
    _, probe = run_step(model, {"own": record("forward")}, torch.ones(1, 2), torch.ones(1, 2))
    assert [row["layer"] for row in probe.sink.records("stats")] == [""]


def test_replaced_parameter_is_hooked_again() -> None:
    model, batch = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instrument.attach(model, {"sums": record("post_accumulate_grad", "0")}, optimizer=optimizer) as probe:
        for _ in range(2):
            model(batch).square().mean().backward()
            probe.end_step()
            state = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
        model(batch).square().mean().backward()
        probe.end_step()
    messages = [event["message"] for event in probe.sink.records("events") if event["rule"] == "replaced"]
    assert any("0.weight was replaced" in message for message in messages)
    fired = {row["path"]: row["fired"] for row in probe.coverage()}
    assert fired == {"weight": 3, "bias": 3}
    assert not model._load_state_dict_post_hooks


def test_swapped_parameter_keeps_only_its_other_hooks() -> None:
    model, batch = make()
    hooks = {kind: record(kind, "0", params="weight") for kind in ("parameter_grad_micro", "post_accumulate_grad")}
    calls = []
    with instrument.attach(model, hooks) as probe:
        for step in range(3):
            if step == 1:
                other = nn.Parameter(torch.ones_like(model[0].weight))
                other.register_hook(lambda _: calls.append("micro"))
                other.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
                torch.utils.swap_tensors(model[0].weight, other)
            model(batch).square().mean().backward()
            probe.end_step()
    assert calls == ["micro", "accumulated"] * 2
    assert [row["fired"] for row in probe.coverage()] == [1, 1]
    assert all("swap_tensors" in row["cause"] for row in probe.coverage())
    assert any(
        "swap_tensors" in event["message"] for event in probe.sink.records("events") if event["rule"] == "replaced"
    )
