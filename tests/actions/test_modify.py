"""Modify: built-in and custom functions."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hook_runs import Calls, assert_equal, gradients, record, refused, run_step, run_steps, scale
from torch import Tensor, nn

import instrument
from instrument import HookError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def apply_modify(tensor: Tensor, model: nn.Module | None = None, seed: int = 0, **fields: Any) -> Tensor:
    model = model or nn.Identity()
    spec = {"layers": ".", "kind": "forward", "action": "modify", **fields}
    with instrument.attach(model, {"h": spec}, seed=seed):
        return model(tensor)


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"fn": "zero"}, [[0, 0], [0, 0]]),
        ({"fn": "sign"}, [[1, -1], [0, 1]]),
        ({"fn": "mean"}, [[2, 0], [2, 0]]),
        ({"fn": "mean", "dim": 1}, [[-0.5, -0.5], [2.5, 2.5]]),
        ({"fn": "mean", "dim": -1}, [[-0.5, -0.5], [2.5, 2.5]]),
        ({"fn": "mean", "dim": [0, 1]}, [[1, 1], [1, 1]]),
        ({"fn": "mean", "dim": None}, [[1, 1], [1, 1]]),
        ({"fn": "noise", "std": 0.0}, [[3, -4], [0, 5]]),
        ({"fn": "noise", "std": 0.0, "mean": 2.0}, [[5, -2], [2, 7]]),
    ],
    ids=str,
)
def test_each_function_computes_its_formula(fields: dict[str, Any], wanted: list[list[float]]) -> None:
    tensor = torch.tensor([[3.0, -4.0], [0.0, 5.0]])
    if fields["fn"] == "mean" and "dim" not in fields:
        tensor = torch.tensor([[4.0, -4.0], [0.0, 4.0]])
    result = apply_modify(tensor, **fields)
    assert torch.equal(result, torch.tensor(wanted, dtype=torch.float32))


@pytest.mark.spread(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("fields", "gradient"),
    [({"fn": "zero"}, 0.0), ({"fn": "sign"}, 0.0), ({"fn": "mean"}, 1.0), ({"fn": "noise", "std": 1.0}, 1.0)],
    ids=str,
)
def test_modify_keeps_shape_dtype_and_graph(dtype: torch.dtype, fields: dict[str, Any], gradient: float) -> None:
    for shape in ((4, 3), (4,), ()):
        tensor = torch.randn(shape, dtype=dtype, requires_grad=True)
        result = apply_modify(tensor, **fields)
        assert (result.shape, result.dtype, result.device) == (tensor.shape, dtype, tensor.device)
        result.sum().backward()
        assert torch.equal(tensor.grad, torch.full_like(tensor, gradient))


def test_zero_and_sign_of_non_finite_values() -> None:
    odd = torch.tensor([math.nan, math.inf, -math.inf])
    assert apply_modify(odd, fn="zero").tolist() == [0.0, 0.0, 0.0]
    signs = apply_modify(odd, fn="sign")
    assert signs[0].isnan()
    assert signs[1:].tolist() == [1.0, -1.0]


def noise(seed: int = 0, name: str = "n", steps: int = 2) -> list[Tensor]:
    """Return the noise added to zeros: per step, two calls of `a` and one of `b`."""
    model = Calls(lambda a, b, x: [a(x), a(x), b(x)], a=nn.Identity(), b=nn.Identity())
    spec = {"layers": "*", "kind": "forward", "action": "modify", "fn": "noise", "std": 1.0}
    drawn: list[Tensor] = []
    run_steps(model, {name: spec}, lambda: drawn.extend(model(torch.zeros(1000))), steps, seed=seed)
    return drawn


def test_noise_depends_on_seed_hook_layer_call_and_step() -> None:
    first = noise()
    torch.manual_seed(99)
    again = noise()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    others = [*first, *noise(seed=1), *noise(name="m")]
    assert len({tuple(tensor.tolist()) for tensor in others}) == len(others) == 18


def test_noise_has_the_requested_mean_and_deviation() -> None:
    drawn = apply_modify(torch.zeros(200_000), fn="noise", std=0.5, mean=3.0)
    assert drawn.mean().item() == pytest.approx(3.0, abs=0.01)
    assert drawn.std().item() == pytest.approx(0.5, abs=0.01)


def test_generator_of_the_context_leaves_the_global_state_unchanged() -> None:
    fn = lambda tensor, context: tensor + torch.randn(3, generator=context.generator(tensor.device))  # noqa: E731
    before = torch.get_rng_state()
    assert apply_modify(torch.zeros(3), fn=fn).all()
    assert torch.equal(torch.get_rng_state(), before)


def test_noise_leaves_global_random_states_unchanged() -> None:
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    noise()
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


contexts: list[instrument.Context] = []


def plus(tensor: Tensor, context: instrument.Context, amount: float = 1.0) -> Tensor:
    contexts.append(context)
    return tensor + amount


class Counting:
    """Add the number of earlier calls."""

    def __init__(self, start: int = 0) -> None:
        if start < 0:
            raise ValueError("counts from 0")
        self.calls = start

    def __call__(self, tensor: Tensor, context: instrument.Context) -> Tensor:
        self.calls += 1
        return tensor + (self.calls - 1)


def only_tensor(tensor: Tensor) -> Tensor:
    return tensor


class Broken:
    def __init__(self) -> None:
        raise KeyError("gone")


async def later(tensor: Tensor, context: instrument.Context) -> None:
    pass


class Yielding:
    def __call__(self, tensor: Tensor, context: instrument.Context) -> Iterator[Tensor]:
        yield tensor


def target(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"{__name__}.{name}", **arguments}


def test_custom_function_receives_tensor_context_and_arguments() -> None:
    contexts.clear()
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.Identity())
    spec = {"layers": "0", "kind": "forward", "action": "modify", "fn": target("plus", amount=2.5)}
    x = torch.ones(1, 2)
    with instrument.attach(model, {"mine": spec}, seed=4) as probe:
        for _ in range(2):
            result = model(x)
            probe.end_step()
    assert torch.equal(result, layer(x) + 2.5)
    last = contexts[-1]
    assert (last.hook, last.kind, last.role, last.layer, last.path) == ("mine", "forward", "output", "0", "")
    assert (last.step, last.moment.phase, last.call, last.seed, last.recompute) == (1, "train", 0, 4, False)
    assert last.module is layer


@pytest.mark.parametrize("kind", ["tensor", "parameter_grad", "post_accumulate_grad", "full_backward"])
def test_custom_gradient_function_receives_its_value(kind: str) -> None:
    contexts.clear()
    layer = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(1, 2, requires_grad=True)
    before = layer.weight.detach().clone()
    hooks = {"h": {"layers": ".", "kind": kind, "action": "modify", "fn": target("plus")}}
    with instrument.attach(layer, hooks, optimizer=optimizer):
        output = layer(x)
        output.sum().backward()
        wanted = {"tensor": output.detach(), "full_backward": x.detach()}.get(kind, before)
        if kind == "parameter_grad":
            optimizer.step()
            wanted = contexts[0].value
            assert wanted is layer.weight
    assert torch.equal(contexts[0].value, wanted)


@pytest.mark.parametrize("kind", ["forward", "tensor", "parameter_grad"])
def test_function_that_returns_none_leaves_the_tensor_unchanged(kind: str) -> None:
    model, batch = nn.Linear(2, 2), torch.ones(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen: list[Tensor] = []
    fn = lambda tensor, context: seen.append(tensor.detach().clone())  # noqa: E731
    expected = model(batch)
    specs = {"h": {"layers": ".", "kind": kind, "action": "modify", "fn": fn, "straight_through": kind == "forward"}}
    with instrument.attach(model, specs, optimizer=optimizer) as probe:
        found = model(batch)
        found.sum().backward()
        optimizer.step()
        probe.end_step()
    assert torch.equal(found, expected)
    effects = probe.sink.records("effects")
    assert len(effects) == len(seen) > 0
    for effect, tensor in zip(effects, seen, strict=True):
        assert (effect["numel"], effect["changed"]) == (tensor.numel(), 0)
        assert effect["norm_before"] == effect["norm_after"] == pytest.approx(tensor.norm().item())


def test_closure_is_called_with_its_variables(tmp_path: Path) -> None:
    factor = 3.0

    def triple(tensor: Tensor, context: instrument.Context) -> Tensor:
        return factor * tensor

    model = nn.Identity()
    spec = {"layers": ".", "kind": "forward", "action": "modify", "fn": triple}
    with instrument.attach(model, {"h": spec}, out=tmp_path / "run"):
        assert model(torch.ones(2)).tolist() == [3.0, 3.0]
    name = instrument.load(tmp_path / "run").info["config"]["hooks"]["h"]["fn"]["_target_"]
    assert name == f"triple at test_modify.py:{triple.__code__.co_firstlineno}"


def test_class_is_instantiated_once_per_hook() -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    spec = {"layers": "*", "kind": "forward", "action": "modify", "fn": target("Counting", start=10)}
    with instrument.attach(model, {"h": spec}) as probe:
        for wanted in (10 + 11, 12 + 13):
            assert model(torch.zeros(())).item() == wanted
            probe.end_step()


@pytest.mark.spread(12)
@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (target("plus", amonut=1), "amonut"),
        (target("only_tensor"), r"cannot be called as fn\(tensor, context\)"),
        (target("Counting", stop=1), "stop"),
        (target("Counting", start=-1), "counts from 0"),
        (target("pluss"), f"similar  {__name__}.plus"),
        (target("contexts"), "not a class or function"),
        ({"_target_": "nowhere.at_all"}, "no module named 'nowhere'"),
        (target("Broken"), f"{__name__}.Broken could not be built: KeyError: 'gone'"),
        (target("later"), "asynchronous function"),
        (target("Yielding"), "generator does not run"),
    ],
    ids=[
        *("unknown argument", "no context", "class", "class refuses", "misspelt", "no function", "no module"),
        *("class raises", "asynchronous", "generator"),
    ],
)
@pytest.mark.parametrize("action", ["modify", "call"])
def test_invalid_custom_function_is_reported_before_step_0(fn: dict[str, Any], message: str, action: str) -> None:
    model = nn.Identity()
    message_of = refused(model, {"mine": {"layers": ".", "kind": "forward", "action": action, "fn": fn}})
    assert re.search(message, message_of)
    assert "hooks.mine.fn" in message_of
    assert not model._forward_hooks


def test_function_gets_the_tensors_that_other_hooks_kept() -> None:
    """The copy is taken when the hook fires, has the graph, and is gone in the next step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    given = model[0](x)
    expected = model[2](given.relu() + given)
    wanted = torch.autograd.grad(expected.square().sum(), [*model.parameters()])

    def add_kept(tensor: Tensor, context: instrument.Context) -> Tensor:
        return tensor + context.tensors["early"]["0"]

    hooks = {
        "early": record("forward", "0", keep_as="early", stop=1),
        "late": {"layers": "1", "kind": "forward", "action": "modify", "fn": add_kept},
    }
    with instrument.attach(model, hooks) as probe:
        output = model(x)
        output.square().sum().backward()
        probe.end_step()
        assert torch.equal(output, expected)
        assert_equal(gradients(model), wanted)
        assert len(probe.sink.rows["stats"]) == 1
        with pytest.raises(HookError, match=r"no hook has kept a tensor as 'early' in this step .*\(kept: none\)"):
            model(x)


def test_kept_tensor_is_complete_and_changed() -> None:
    seen: list[Tensor] = []

    def look(tensor: Tensor, context: instrument.Context) -> None:
        seen.extend(context.tensors[name][""] for name in ("first", "second"))

    fields = {"layers": ".", "kind": "forward"}
    hooks = {
        "double": scale("forward", 2.0, units=[0], keep_as="first"),
        "clip": {**fields, "action": "clip", "max": 1.0, "keep_as": "second"},
        "look": {**fields, "action": "call", "fn": look},
    }
    run_step(nn.Identity(), hooks, torch.ones(2, 3))
    assert [tensor.tolist() for tensor in seen] == [[[2.0, 1.0, 1.0]] * 2, [[1.0] * 3] * 2]


def test_hook_that_keeps_a_tensor_is_not_paused() -> None:
    specs = {"h": record("forward", keep_as="kept")}
    with instrument.attach(nn.Identity(), specs) as probe:
        (attached,) = probe.attached_hooks
        attached.is_paused = True
        attached.update_schedule(True, has_new_spec=False)
        assert attached.is_scheduled
    with instrument.attach(nn.Identity(), specs, budget={"bytes": 1}) as probe:
        assert probe.budget.record_hooks == []
