"""Kinds parameter_grad and post_accumulate_grad."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hook_runs import Calls, assert_close, assert_equal, gradients, keep, record, refused, run_step, tensors_by
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import instrument
from instrument.tables.reasons import NO_SHARD_GRADIENT, NO_STATE, NO_STEP, REMOVED

RECORD = {"action": "record", "stats": "none", "tensors": True}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def batches(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 3, generator=generator) for _ in range(count)]


def accumulate(model: nn.Module, specs: Any, *, steps: int = 2, lr: float = 0.1, **options: Any) -> instrument.Probe:
    """Run steps of three micro-batches each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, **options)
    with instrument.attach(model, specs, optimizer=optimizer) as probe:
        for _ in range(steps):
            optimizer.zero_grad()
            for batch in batches():
                model(batch).square().mean().backward()
                probe.end_micro_step()
            optimizer.step()
            probe.end_step()
    return probe


def test_post_accumulate_grad_records_the_running_sum() -> None:
    model = net()
    reference = copy.deepcopy(model)
    wanted: dict[str, list[Tensor]] = {}
    for name, parameter in reference.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, n=name: wanted.setdefault(n, []).append(p.grad.detach().clone())
        )
    accumulate(reference, {"unused": record("forward", "0")})
    probe = accumulate(model, {"h": {"layers": "**", "kind": "post_accumulate_grad", **RECORD, "types": "Linear"}})
    rows = probe.sink.records("tensors")
    assert len(rows) == 2 * 3 * 4
    for row in rows:
        assert row["role"] == "param_grad"
        seen = wanted[f"{row['layer']}.{row['path']}"][row["step"] * 3 + row["micro_step"]]
        assert torch.equal(row["values"], seen)
    assert {(row["expected"], row["fired"]) for row in probe.coverage()} == {(6, 6)}


@pytest.mark.spread(2)
@pytest.mark.parametrize("bound", [0.01, 0.3, 1e6])
@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_norm_clip_is_bit_identical_to_clip_grad_norm(bound: float, order: float) -> None:
    model = net()
    reference = copy.deepcopy(model)
    clip = {"layers": "**", "types": "Linear", "kind": "parameter_grad", "action": "clip", "norm": bound, "ord": order}
    probe = accumulate(model, {"tame": clip})
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for batch in batches():
            reference(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(reference.parameters(), bound, norm_type=order)
        optimizer.step()
    assert_equal(gradients(model), gradients(reference))
    assert_equal(model.parameters(), reference.parameters())
    factors = probe.sink.frame("effects").groupby("step").factor
    assert (factors.nunique() == 1).all()
    assert (factors.max() < 1).all() == (bound < 1)


def test_norm_scope_is_all_matches_or_each_tensor() -> None:
    clip = {"layers": "2", "kind": "parameter_grad", "action": "clip", "norm": 0.05}
    totals, largest = {}, {}
    for scope in ("all", "tensor"):
        model = net()
        accumulate(model, {"tame": {**clip, "scope": scope}}, steps=1)
        norms = [parameter.grad.norm() for parameter in model[2].parameters()]
        totals[scope], largest[scope] = torch.stack(norms).norm().item(), max(norms).item()
        assert model[0].weight.grad.norm() > 0.05, "unmatched parameters are unchanged"
    assert totals["all"] == pytest.approx(0.05, rel=1e-4)
    assert largest["tensor"] == pytest.approx(0.05, rel=1e-4)
    assert totals["tensor"] > 0.051


@pytest.mark.parametrize("kind", ["parameter_grad", "post_accumulate_grad"])
def test_gradient_specs_act_in_the_written_order(kind: str) -> None:
    model, reference = net(), net()
    base = {"layers": "2", "kind": kind, "params": "bias"}
    specs = {
        "before": {**base, **RECORD},
        "half": {**base, "action": "scale", "factor": 0.5},
        "between": {**base, **RECORD},
        "capped": {**base, "action": "clip", "value": 1e-3},
        "after": {**base, **RECORD},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    start = model[2].bias.detach().clone()

    loss = lambda output: output.square().mean()  # noqa: E731
    _, probe = run_step(model, specs, batches()[0], loss=loss, optimizer=optimizer)
    seen = tensors_by(probe, "hook")
    reference(batches()[0]).square().mean().backward()
    full = reference[2].bias.grad
    assert torch.equal(seen["before"], full)
    assert torch.equal(seen["between"], full * 0.5)
    assert torch.equal(seen["after"], (full * 0.5).clamp(-1e-3, 1e-3))
    assert torch.equal(model[2].bias.grad, seen["after"])
    assert torch.equal(model[2].bias, start - seen["after"])


def test_change_of_the_running_sum_affects_the_final_sum() -> None:
    model = nn.Linear(1, 1, bias=False)
    halve = {"layers": ".", "kind": "post_accumulate_grad", "action": "scale", "factor": 0.5}
    with instrument.attach(model, {"h": halve}) as probe:
        for value in (8.0, 2.0):
            model(torch.tensor([[value]])).sum().backward()
            probe.end_micro_step()
        probe.end_step()
    assert model.weight.grad.item() == (8.0 * 0.5 + 2.0) * 0.5


def test_changed_gradient_stays_the_same_tensor() -> None:
    model = net()
    model(batches()[0]).sum().backward()
    held = model[0].weight.grad
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = {"layers": "0", "kind": "parameter_grad", "action": "scale", "factor": 0.0}
    with instrument.attach(model, {"h": scale}, optimizer=optimizer):
        optimizer.step()
    assert model[0].weight.grad is held
    assert not held.any()


def test_l2_is_bit_identical_to_weight_decay() -> None:
    model, reference = net(), net()
    decay = {"layers": "*", "types": "Linear", "kind": "parameter_grad", "action": "modify", "fn": "l2"}
    accumulate(model, {"decay": {**decay, "coefficient": 0.01}}, steps=4)
    accumulate(reference, {"unused": record("forward", "0")}, steps=4, weight_decay=0.01)
    assert_close(model.parameters(), reference.parameters(), rtol=0, atol=0)


def test_l1_equals_a_penalty_in_the_loss() -> None:
    model, reference = net(), net()
    penalty = {"layers": "0", "params": "weight", "kind": "parameter_grad", "action": "modify", "fn": "l1"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instrument.attach(model, {"p": {**penalty, "coefficient": 0.2}}, optimizer=optimizer):
        model(batches()[0]).square().mean().backward()
        optimizer.step()
    (reference(batches()[0]).square().mean() + 0.2 * reference[0].weight.abs().sum()).backward()
    torch.testing.assert_close(model[0].weight.grad, reference[0].weight.grad)
    assert torch.equal(model[0].bias.grad, reference[0].bias.grad)


def test_tied_parameters_are_recorded_once() -> None:
    def tied() -> nn.Module:
        embed, head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        head.weight = embed.weight
        return Calls(lambda embed, head, x: head(embed(x)), embed=embed, head=head)

    for layers, name in (("**", "embed"), ("head", "head")):
        model = tied()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scale = {"layers": layers, "kind": "parameter_grad", "action": "scale", "factor": 0.5}
        with instrument.attach(model, {"h": scale}, optimizer=optimizer) as probe:
            model(torch.arange(4)).sum().backward()
            full = model.embed.weight.grad.clone()
            optimizer.step()
            probe.end_step()
        assert [row["layer"] for row in probe.sink.records("effects")] == [name]
        assert torch.equal(model.embed.weight.grad, full * 0.5)


def test_missing_optimizer_step_is_reported() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instrument.attach(model, {"h": keep("parameter_grad", "0")}, optimizer=optimizer) as probe:
        for step in range(2):
            model(batches()[0]).sum().backward()
            if step:
                optimizer.step()
            probe.end_step()
    assert [(row["expected"], row["fired"]) for row in probe.coverage()] == [(2, 1), (2, 1)]
    assert {row["cause"] for row in probe.coverage()} == {NO_STEP}


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("kind", "role"),
    [
        ("parameter_grad_micro", None),
        ("post_accumulate_grad", None),
        ("parameter_grad", None),
        ("step_pre", "param"),
        ("step_post", "update"),
        ("step_post", "state.momentum_buffer"),
    ],
)
def test_parameter_set_to_none_is_reported_as_the_cause(kind: str, role: str | None) -> None:
    model = net()
    specs = {"h": record(kind, "0", params="bias") | ({"role": role} if role else {})}
    optimizers = [torch.optim.SGD(model[part].parameters(), lr=0.1, momentum=0.9) for part in (0, 2)]
    with (
        pytest.warns(instrument.InstrumentWarning, match="set to None"),
        instrument.attach(model, specs, optimizer=optimizers) as probe,
    ):
        for step in range(3):
            if step == 1:
                model[0].bias = None
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(batches()[0]).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            probe.end_step()
    assert [(row["expected"], row["fired"], row["cause"]) for row in probe.coverage()] == [(3, 1, REMOVED)]


def test_missing_state_of_a_removed_parameter_is_reported() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    specs = {"h": record("state_dict_pre", "0", params="bias", role="state.momentum_buffer")}
    with (
        pytest.warns(instrument.InstrumentWarning, match="no such state"),
        instrument.attach(model, specs, optimizer=optimizer) as probe,
    ):
        model[0].bias = None
        optimizer.state_dict()
        probe.end_step()
    assert [(row["expected"], row["fired"], row["cause"]) for row in probe.coverage()] == [(1, 0, NO_STATE)]


@pytest.mark.parametrize("kind", ["parameter_grad", "step_post"])
def test_optimizer_kinds_require_an_optimizer(kind: str) -> None:
    message = refused(net(), {"mine": record(kind, "0")})
    assert "hooks.mine.kind" in message
    assert kind in message


def test_sparse_gradients_are_recorded() -> None:
    model = nn.Embedding(6, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = {"h": record("parameter_grad", tensors=True)}
    _, probe = run_step(model, hooks, torch.tensor([1, 1, 4]), loss=torch.sum, optimizer=optimizer)
    wanted = torch.zeros(6, 2)
    wanted[1], wanted[4] = 2.0, 1.0
    assert torch.equal(probe.sink.records("tensors")[0]["values"], wanted)
    assert probe.sink.records("stats")[0]["max"] == 2.0


def test_noise_is_the_same_in_all_processes_if_the_wrapper_is_around_the_model() -> None:
    """Trainers wrap the model, and their callbacks get it without the wrapper."""
    hooks = {
        "noise": {
            "layers": "**",
            "kind": "parameter_grad",
            "params": "weight",
            "action": "modify",
            "fn": "noise",
            "std": 1.0,
        },
        "seen": record("parameter_grad", "**", params="weight"),
    }
    found, scopes = [], set()
    for rank in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            wrapper = DistributedDataParallel(nn.Linear(3, 2))
            optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
            with instrument.attach(wrapper.module, hooks, optimizer=optimizer) as probe:
                wrapper.module.weight.grad = torch.zeros(2, 3)
                optimizer.step()
                probe.end_step()
        finally:
            dist.destroy_process_group()
        found.append(wrapper.module.weight.grad)
        scopes.update(row["scope"] for row in probe.sink.records("stats"))
    assert found[0].any()
    assert torch.equal(*found)
    assert scopes == {"averaged"}


def test_parameters_that_an_evaluation_leaves_gathered_are_hooked_as_shards() -> None:
    """FSDP2 keeps the parameters of the root module until the next backward pass, also after an evaluation."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = net()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            model(batches()[0])
        assert model[0].weight.shape == (4, 3), "it is not sharded now"
        hooks = {"sum": record("post_accumulate_grad", "**"), "used": record("parameter_grad", "**")}
        attached = instrument.attach(model, hooks, optimizer=optimizer)
        with pytest.warns(instrument.InstrumentWarning, match=re.escape(NO_SHARD_GRADIENT)), attached as probe:
            for _ in range(2):
                for index, batch in enumerate(batches(2)):
                    model.set_requires_gradient_sync(index == 1)
                    model(batch).square().mean().backward()
                    probe.end_micro_step()
                optimizer.step()
                with torch.no_grad(), probe.evaluating():
                    model(batches()[0])
                probe.end_step()
    finally:
        dist.destroy_process_group()
    assert [event["rule"] for event in probe.sink.records("events")] == ["coverage"]
    rows = [(row["hook"], row["step"], row["scope"]) for row in probe.sink.records("stats")]
    parameters = 4
    assert sorted(rows) == sorted((hook, step, "shard") for hook in hooks for step in (0, 1) for _ in range(parameters))
