"""step_post: the parameter, its gradient, its update, the buffers and the optimizer's state."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hook_runs import assert_equal, keep, refused
from tiers import tiered
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import instrument
from instrument.tables.reasons import NO_STATE, NOT_OPTIMIZED

RECORD = {"kind": "step_post", "action": "record", "stats": "none", "tensors": True}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, specs: Any, steps: int = 2) -> instrument.Probe:
    torch.manual_seed(1)
    with instrument.attach(model, specs, optimizer=optimizer) as probe:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()
            probe.end_step()
    return probe


def test_step_post_records_are_bit_identical() -> None:
    model, before = net(), net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    roles = ["param", "param_grad", "update", "state.exp_avg", "state.exp_avg_sq", "state.step"]
    specs = {role.replace(".", "_"): {"layers": "**", "types": "Linear", "role": role, **RECORD} for role in roles}
    probe = train(model, optimizer, {**specs, "buffer": {"layers": "1", "role": "buffer", **RECORD}}, steps=1)
    rows = probe.sink.records("tensors")
    assert len(rows) == len(roles) * 4 + 3
    for row in rows:
        if row["role"] == "buffer":
            assert torch.equal(row["values"], model[1].get_buffer(row["path"]))
            continue
        parameter = model.get_parameter(f"{row['layer']}.{row['path']}")
        start = before.get_parameter(f"{row['layer']}.{row['path']}")
        wanted = {"param": parameter.detach(), "param_grad": parameter.grad, "update": (parameter - start).detach()}
        wanted |= {f"state.{name}": value for name, value in optimizer.state[parameter].items()}
        assert torch.equal(row["values"], wanted[row["role"]]), row["role"]
    assert {row["path"] for row in rows if row["role"] == "buffer"} == dict(model[1].named_buffers()).keys()


HABITS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "one tensor at a time": {"foreach": False},
    "gradients set to zero": {"set_to_none": False},
    "activations offloaded": {"around": torch.autograd.graph.save_on_cpu},
    "compiled step": {"compiled": True},
}


def train_with(
    hooks: dict[str, Any],
    *,
    set_to_none: bool = True,
    around: Any = nullcontext,
    compiled: bool = False,
    **options: Any,
) -> tuple[list[torch.Tensor], list[torch.Tensor], instrument.Probe]:
    """Return the weights after a training, the changes of the first one at each step, and the probe."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(4, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    changes = []
    with instrument.attach(model, hooks, optimizer=optimizer, rules=None) as probe:
        for _ in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            with around():
                loss = model(batch).square().mean()
            loss.backward()
            before = model[0].weight.detach().clone()
            step()
            changes.append(model[0].weight.detach() - before)
            probe.end_step(loss=loss)
    return [parameter.detach() for parameter in model.parameters()], changes, probe


@pytest.mark.spread(3)
@pytest.mark.parametrize("habit", tiered(HABITS, {*HABITS} - {"compiled step"}))
def test_hooks_around_the_step_work_with_habits_of_gpu_trainings(habit: str) -> None:
    hooks = {
        "outputs": {"layers": "*", "kind": "forward", "action": "record"},
        "gradients": {"layers": "**", "kind": "parameter_grad", "action": "record"},
        "momentum": {"layers": "**", "kind": "step_post", "role": "state.exp_avg", "action": "record"},
        "updates": {"layers": "**", "kind": "step_post", "role": "update", "action": "record"},
    }
    weights, changes, probe = train_with(hooks, **HABITS[habit])
    expected, *_ = train_with({}, **HABITS[habit])
    assert_equal(weights, expected)
    assert {(row["hook"], row["fired"]) for row in probe.coverage()} == {(hook, 3) for hook in hooks}
    rows = [row for row in probe.sink.records("stats") if (row["hook"], row["layer"]) == ("updates", "0")]
    norms = [row["l2"] for row in rows if row["path"] == "weight"]
    assert norms == pytest.approx([torch.linalg.vector_norm(change.double()).item() for change in changes], rel=1e-5)


@pytest.mark.slow
def test_intervention_before_a_compiled_step_changes_what_it_uses() -> None:
    hooks = {"zero": {"layers": "**", "kind": "parameter_grad", "action": "scale", "factor": 0.0}}
    weights, _, probe = train_with(hooks, compiled=True, weight_decay=0.0)
    untrained, *_ = train_with(hooks, weight_decay=0.0)
    assert_equal(weights, untrained)
    assert all(row["fired"] == 3 for row in probe.coverage())
    _, changes, _ = train_with({}, compiled=True, weight_decay=0.0)
    assert all(change.any() for change in changes)  # without the hook, it changes


@pytest.mark.parametrize("names", [("clip", "update"), ("update", "clip")], ids="-".join)
def test_update_includes_earlier_interventions(names: tuple[str, ...]) -> None:
    """After a clip, the update is the clipped parameter minus the one before the step."""
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    specs = {
        "clip": {"layers": ".", "kind": "step_post", "action": "clip", "value": 0.01},
        "update": {"layers": ".", "kind": "step_post", "role": "update", "action": "record"},
    }
    with instrument.attach(model, {name: specs[name] for name in names}, optimizer=optimizer, rules=None) as probe:
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        probe.end_step()
    after = before - 0.4
    expected = (after.clamp(-0.01, 0.01) if names[0] == "clip" else after) - before
    assert probe.stats["mean"].tolist() == [pytest.approx(expected.double().mean().item(), rel=1e-6)]


class Wrapper(Tensor):
    """A tensor of a subclass that supports no operations on lists of tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_foreach" in func.__name__:
            raise NotImplementedError(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.spread(3)
@pytest.mark.parametrize("kind", ["plain", "subclass", "DTensor", "other dtype after the step"])
def test_update_of_parameters_of_any_class(kind: str) -> None:
    model = nn.Module()
    model.plain, model.other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    if kind == "subclass":
        model.other = nn.Parameter(torch.ones(4).as_subclass(Wrapper))
    if kind == "DTensor":
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        model.other = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    if kind.startswith("other"):
        optimizer.register_step_post_hook(
            lambda *_: setattr(model, "other", nn.Parameter(model.other.detach().double()))
        )
    hooks = {"update": {"layers": ".", "kind": "step_post", "role": "update", "action": "record"}}
    try:
        with instrument.attach(model, hooks, optimizer=optimizer, rules=None) as probe:
            for parameter in model.parameters():
                parameter.grad = 2.0 * torch.ones_like(parameter)
            optimizer.step()
            probe.end_step()
    finally:
        if kind == "DTensor":
            dist.destroy_process_group()
    assert probe.stats["path"].tolist() == ["plain", "other"]
    assert probe.stats["mean"].tolist() == pytest.approx([-0.2, -0.2], rel=1e-6)


def test_update_of_a_frozen_float8_weight_is_zero() -> None:
    """PyTorch does not promote float8."""
    model = nn.Linear(2, 1)
    model.weight = nn.Parameter(torch.ones(1, 2).to(torch.float8_e4m3fn), requires_grad=False)
    optimizer = torch.optim.SGD([model.bias], lr=0.1)
    updates = {"update": {"layers": ".", "kind": "step_post", "role": "update", "action": "record"}}
    with instrument.attach(model, updates, optimizer=optimizer, rules=None) as probe:
        model.bias.grad = torch.ones(1)
        optimizer.step()
        probe.end_step()
    assert probe.stats.set_index("path")["mean"].to_dict() == pytest.approx({"weight": 0.0, "bias": -0.1})


def test_step_post_intervention_changes_the_updated_parameter() -> None:
    model, plain = net(), net()
    clip = {"layers": "0", "params": "weight", "kind": "step_post", "action": "clip", "value": 0.1}
    probe = train(model, torch.optim.SGD(model.parameters(), lr=0.1), {"box": clip}, steps=1)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), {"r": {"layers": "0", **RECORD}}, steps=1)
    assert torch.equal(model[0].weight, plain[0].weight.clamp(-0.1, 0.1))
    assert torch.equal(model[0].bias, plain[0].bias)
    assert model[0].weight.requires_grad
    assert model[0].weight.is_leaf
    (row,) = probe.sink.records("effects")
    changed = int((plain[0].weight.abs() > 0.1).sum())
    assert (row["path"], row["changed"]) == ("weight", changed)
    assert changed > 0


@pytest.mark.parametrize(
    ("make", "role", "allowed"),
    [
        (torch.optim.SGD, "state.momentum_buffer", "none"),
        (torch.optim.Adam, "state.exp_average", "state.exp_avg, state.exp_avg_sq, state.step"),
        (torch.optim.Adam, "state.max_exp_avg_sq", "state.exp_avg, state.exp_avg_sq, state.step"),
        (torch.optim.Muon, "state.momentum", "state.momentum_buffer"),
    ],
)
def test_unknown_optimizer_state_is_refused_before_step_0(make: Any, role: str, allowed: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=False))
    random_state = torch.get_rng_state()
    optimizer = make(model.parameters(), lr=0.1)
    refusal = refused(model, {"h": {"layers": "0", "role": role, **RECORD}}, optimizer=optimizer)
    message = f"role {role!r} requires optimizer state that {make.__name__} does not keep with its current options"
    for part in (f"hooks.h.role: {message}", f"given    {role}", f"allowed  {allowed}"):
        assert part in refusal
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not optimizer.state


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("make", "role"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "momentum_buffer"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "max_exp_avg_sq"),
        (torch.optim.RMSprop, "square_avg"),
        (torch.optim.Adagrad, "sum"),
        (torch.optim.NAdam, "mu_product"),
        (torch.optim.Rprop, "prev"),
        (torch.optim.ASGD, "eta"),
    ],
)
def test_state_of_any_optimizer_is_recorded(make: Any, role: str) -> None:
    model = net()
    optimizer = make(model.parameters())
    probe = train(model, optimizer, {"h": keep("step_post", "0", params="weight", role=f"state.{role}")}, steps=1)
    (row,) = probe.sink.records("tensors")
    assert torch.equal(row["values"].double().view(-1), optimizer.state[model[0].weight][role].double().view(-1))


@pytest.mark.parametrize("was_trained", [False, True])
def test_target_network_has_no_update_and_is_not_unchanged(was_trained: bool) -> None:
    model = nn.ModuleDict({name: nn.Linear(3, 2, bias=False) for name in ("trained", "forgotten", "target")})
    if was_trained:
        sum(layer(torch.randn(5, 3)).square().mean() for layer in model.values()).backward()
    optimizer = torch.optim.SGD(model["trained"].parameters(), lr=0.1)
    hooks = {
        role: {"layers": "*", "kind": "step_post", "role": role, "action": "record"} for role in ("param", "update")
    }
    rules = {"unchanged": {"rule": "unchanged_parameter"}}
    with instrument.attach(model, hooks, optimizer=optimizer, rules=rules) as probe:
        for _ in range(4):
            inputs = torch.randn(5, 3)
            loss = (
                (model["trained"](inputs) + model["forgotten"](inputs) - model["target"](inputs).detach())
                .square()
                .mean()
            )
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    updates = {row["layer"]: row["l2"] for row in probe.sink.records("stats") if row["role"] == "update"}
    assert updates["trained"] > 0
    assert updates["forgotten"] == 0
    assert "target" not in updates
    assert [row["cause"] for row in probe.coverage() if row["layer"] == "target"] == ["", NOT_OPTIMIZED]
    events = [row for row in probe.sink.records("events") if row["rule"] == "unchanged"]
    assert {row["layer"] for row in events} == {"forgotten"}


def test_parameter_that_appears_during_the_step_has_no_update() -> None:
    model = nn.Linear(3, 2)
    kept = model.bias

    class Restoring(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            model.weight.sub_(model.weight.grad)
            model.bias = kept

    optimizer = Restoring(model.parameters(), {})
    with instrument.attach(
        model, {"update": {"layers": ".", "role": "update", **RECORD}}, optimizer=optimizer
    ) as probe:
        for _ in range(2):
            model.bias = None
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            probe.end_step()
    assert [row["path"] for row in probe.sink.records("tensors")] == ["weight", "weight"]


class Lazy(torch.optim.Optimizer):
    """Keeps a state for large parameters with a gradient, and a number for all of them, as optimizers of libraries do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.state["seed"] = 1

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.numel() > 4 and parameter.grad.any():
                self.state[parameter]["average"] = parameter.grad.clone()


def test_states_of_other_optimizers_are_not_guessed() -> None:
    model = net()
    hooks = {name: keep("step_post", "0", params="weight", role=f"state.{name}") for name in ("average", "averag")}
    probe = train(model, Lazy(model.parameters()), hooks, steps=1)
    assert [row["hook"] for row in probe.sink.records("tensors")] == ["average"]
    assert [row["cause"] for row in probe.coverage()] == ["", NO_STATE]


def test_parameter_without_gradient_has_no_optimizer_state() -> None:
    model = net()
    unused = nn.Linear(2, 2)
    model.register_module("unused", unused)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    optimizer = torch.optim.Adam(model.parameters())
    probe = train(model, optimizer, {"h": {"layers": ["0", "unused"], "role": "state.exp_avg", **RECORD}})
    coverage = {row["layer"]: (row["expected"], row["fired"], row["cause"]) for row in probe.coverage()}
    assert coverage == {"0": (2, 2, ""), "unused": (2, 0, NO_STATE)}


def test_parameter_that_grows_during_the_step_has_no_update() -> None:
    model = nn.Linear(3, 2, bias=False)

    class Growing(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            model.weight = self.param_groups[0]["params"][0] = nn.Parameter(model.weight.repeat(2, 1))

    optimizer = Growing(model.parameters(), {})
    with instrument.attach(
        model, {"update": {"layers": ".", "role": "update", **RECORD}}, optimizer=optimizer
    ) as probe:
        optimizer.step()
        probe.end_step()
    (row,) = probe.coverage()
    assert (row["expected"], row["fired"]) == (1, 0)
