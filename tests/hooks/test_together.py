"""Hooks with `together: true`: one function for all tensors of a call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hook_runs import Calls, assert_close, refused
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instrument
from instrument import HookError

Tensors = dict[str, Tensor]


def split() -> nn.Module:
    """Return a module with two inputs, and nested outputs."""
    outputs = lambda linear, x, y: {"sum": linear(x) + y.sin(), "parts": (x * y, x.detach())}  # noqa: E731
    return Calls(outputs, linear=nn.Linear(3, 3, dtype=torch.float64))


class Model(nn.Module):
    """A module with two inputs and nested outputs. `edit_inputs` and `edit_outputs` change these by hand."""

    def __init__(self, edit_inputs: Any = None, edit_outputs: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.split = nn.Linear(3, 6, dtype=torch.float64), split()
        self.edit_inputs, self.edit_outputs = edit_inputs, edit_outputs

    def forward(self, batch: Tensor) -> Tensor:
        x, y = self.before(batch).chunk(2, -1)
        x, y = (x, y) if self.edit_inputs is None else self.edit_inputs(x, y)
        found = self.split(x, y)
        total, product = found["sum"], found["parts"][0]
        total, product = (total, product) if self.edit_outputs is None else self.edit_outputs(total, product)
        return total.tanh() * product + product.exp()


class Edited(torch.autograd.Function):
    """Changes two gradients by hand."""

    @staticmethod
    def forward(ctx: Any, change: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.change = change
        return x.clone(), y.clone()

    @staticmethod
    def backward(ctx: Any, x: Tensor, y: Tensor) -> tuple[None, Tensor, Tensor]:
        return (None, *ctx.change(x, y))


def exchange(tensors: Tensors, context: instrument.Context) -> Tensors:
    """Each tensor depends on the other one, not linearly."""
    (a, x), (b, y) = tensors.items()
    return {a: x * y.square(), b: y + 2 * x}


def by_hand(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * y.square(), y + 2 * x


def spec(kind: str, fn: Callable[..., Any] = exchange, **more: Any) -> dict[str, Any]:
    return {"layers": "split", "kind": kind, "action": "modify", "fn": fn, "together": True, **more}


def gradients(model: nn.Module, hooks: Mapping[str, Any], *, twice: bool = False) -> tuple[list[Tensor], Any]:
    """Return the output, and the gradients of the input and all parameters, with hooks."""
    batch = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3).requires_grad_()
    with instrument.attach(model, hooks) as probe:
        output = model(batch)
        (first,) = torch.autograd.grad(output.square().sum(), batch, create_graph=True)
        (first.square().sum() if twice else output.square().sum()).backward()
        probe.end_step()
    found = [output, first, batch.grad, *(parameter.grad for parameter in model.parameters())]
    return [tensor.detach() for tensor in found if tensor is not None], probe


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert_close(found, wanted, rtol=1e-13, atol=1e-13)


BY_HAND = {
    "forward_pre": {"edit_inputs": by_hand},
    "forward": {"edit_outputs": by_hand},
    "full_backward": {"edit_inputs": lambda x, y: Edited.apply(by_hand, x, y)},
    "full_backward_pre": {"edit_outputs": lambda x, y: Edited.apply(by_hand, x, y)},
}


@pytest.mark.parametrize("twice", [False, True], ids=["", "double_backward"])
@pytest.mark.parametrize("kind", BY_HAND)
def test_result_equals_code_by_hand(kind: str, twice: bool) -> None:
    def of_two(tensors: Tensors, context: instrument.Context) -> Tensors:
        tensors.pop("parts.1", None)  # it has no gradient
        return exchange(tensors, context)

    wanted, _ = gradients(Model(**BY_HAND[kind]), {}, twice=twice)
    found, probe = gradients(Model(), {"h": spec(kind, of_two)}, twice=twice)
    assert_same(found, wanted)
    effects = probe.sink.records("effects")
    paths = {"forward_pre": "01", "full_backward": "01"}.get(kind, ["sum", "parts.0"])
    assert [row["path"] for row in effects if row["backward"] == 0][:2] == [*paths]
    assert all(row["changed_fraction"] > 0 for row in effects[:2])
    assert all(row["fired"] == row["expected"] == 1 for row in probe.sink.records("coverage"))


@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre"])
def test_hooks_before_and_after_act_in_the_written_order(kind: str) -> None:
    more = {"layers": "split", "kind": kind}
    hooks = {
        "first": {**more, "action": "record", "stats": "none", "tensors": True},
        "scaled": {**more, "action": "scale", "factor": 2.0},
        "both": spec(kind),
        "clipped": {**more, "action": "clip", "value": 1e-3},
        "last": {**more, "action": "record", "stats": "none", "tensors": True},
    }

    def change(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.clamp(-1e-3, 1e-3) for tensor in by_hand(2 * x, 2 * y))

    edited = "edit_inputs" if kind == "full_backward" else "edit_outputs"
    wanted, _ = gradients(Model(**{edited: lambda x, y: Edited.apply(change, x, y)}), {})
    found, probe = gradients(Model(), hooks)
    assert_same(found, wanted)
    rows = [row for row in probe.sink.records("tensors") if row["backward"] == 0]
    first, last = ({row["path"]: row["values"] for row in rows if row["hook"] == name} for name in ("first", "last"))
    paths = ("0", "1") if kind == "full_backward" else ("sum", "parts.0")
    assert_same([last[path] for path in paths], [*change(*(first[path] for path in paths))])


@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre"])
def test_module_hooks_of_pytorch_give_the_same_gradients(kind: str) -> None:
    model = nn.Bilinear(2, 3, 4, dtype=torch.float64)
    inputs = [torch.randn(5, size, dtype=torch.float64, requires_grad=True) for size in (2, 3)]
    found = []
    for via in ("tensor", "module"):
        fn = (lambda tensors, context: {path: x * 3 for path, x in tensors.items()}) if kind[-1] == "e" else join_norms
        with instrument.attach(model, {"h": {**spec(kind, fn), "layers": ".", "via": via}}):
            found.append(torch.autograd.grad(model(*inputs).square().sum(), inputs))
    assert_same(list(found[0]), list(found[1]))
    assert not torch.equal(found[0][0], torch.autograd.grad(model(*inputs).square().sum(), inputs)[0])


def join_norms(tensors: Tensors, context: instrument.Context) -> Tensors:
    """Clip by the norm of all gradients of a call."""
    norm = torch.stack([tensor.norm() for tensor in tensors.values()]).norm()
    return {path: tensor / norm.clamp(min=1) for path, tensor in tensors.items()}


def test_function_kinds_act_on_all_tensors_of_a_call() -> None:
    x = torch.tensor([[4.0, 1.0, 3.0, 2.0]], dtype=torch.float64, requires_grad=True)
    seen = []

    def swap(tensors: Tensors, context: instrument.Context) -> Tensors:
        seen.append((context.kind, context.path, list(tensors)))
        first, second = tensors
        return {first: tensors[second], second: tensors[first]}

    base = {"layers": ".", "action": "modify", "fn": swap, "together": True}
    hooks = {
        "output": {**base, "kind": "function", "functions": "split"},
        "input": {**base, "kind": "function", "functions": "lerp", "role": "input", "path": "lerp.0.[01]"},
        "gradient": {**base, "kind": "function_grad", "functions": "split"},
    }
    found = {}
    for name, hook in hooks.items():
        seen.clear()
        model = Calls(lambda x: torch.lerp(*(x * 1.5).sort().values.split(2, -1), 0.25))
        with instrument.attach(model, {name: hook}) as probe:
            output = model(x)
            (gradient,) = torch.autograd.grad(output.sum(), x)
            probe.end_step()
        assert [(row["expected"], row["fired"], row["cause"]) for row in probe.coverage()] == [(1, 1, "")]
        found[name] = output[0, 0].item(), gradient[0].tolist()
        assert seen[0][1] == ("lerp.0" if name == "input" else "split.0")
    assert seen == [("function_grad", "split.0", ["split.0.0", "split.0.1"])]
    # The sorted values are 1.5, 3, 4.5 and 6. The positions in x: 4, 1, 3, 2.
    low, high = 0.75 * 1.5, 0.25 * 1.5
    exchanged = 0.25 * 1.5 + 0.75 * 4.5, [low, high, low, high]
    assert found == {"output": exchanged, "input": exchanged, "gradient": (0.75 * 1.5 + 0.25 * 4.5, exchanged[1])}


def test_context_has_the_values_and_selected_parts() -> None:
    seen = []

    def half(tensors: Tensors, context: instrument.Context) -> Tensors:
        seen.append({path: (tuple(x.shape), tuple(context.values[path].shape)) for path, x in tensors.items()})
        assert (context.path, context.value, context.selection) == ("", None, None)
        return {"0": tensors["0"] * 0.5}

    found, probe = gradients(Model(), {"h": spec("full_backward", half, units=[0, 2], keep_as="kept")})
    wanted, _ = gradients(
        Model(edit_inputs=lambda x, y: Edited.apply(lambda a, b: (a * torch.tensor([0.5, 1, 0.5]), b), x, y)), {}
    )
    assert_same(found, wanted)
    assert seen[0] == {"0": ((4, 2), (4, 2)), "1": ((4, 2), (4, 2))}
    assert [row["changed_fraction"] for row in probe.sink.records("effects")][:2] == [1.0, 0.0]


def test_function_gets_gradients_without_the_factor_of_a_scaler() -> None:
    found = []
    for scaler in (torch.amp.GradScaler("cpu", init_scale=1024.0), torch.amp.GradScaler("cpu", enabled=False)):
        model, batch = Model(), torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
        with instrument.attach(model, {"h": spec("full_backward")}, scaler=scaler):
            scaler.scale(model(batch).sum()).backward()
        found.append([batch.grad / scaler.get_scale(), model.before.weight.grad / scaler.get_scale()])
    assert_same(*found)


def test_graph_is_freed_immediately() -> None:
    batch = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
    model, hooks = Model(), {"a": spec("full_backward"), "b": spec("full_backward_pre")}
    with instrument.attach(model, hooks):
        inside = []
        handle = model.split.register_forward_pre_hook(lambda module, args: inside.append(weakref.ref(args[0])))
        output = model(batch)
        handle.remove()
        assert inside[0]() is not None, "the graph refers to it"
        output.sum().backward()
        del output
        assert inside[0]() is None


def test_checkpointed_module_gives_the_same_gradients() -> None:
    class Checkpointed(Model):
        def forward(self, batch: Tensor) -> Tensor:
            result: Tensor = checkpoint(super().forward, batch, use_reentrant=False)
            return result

    def run(model: nn.Module) -> list[Tensor]:
        batch = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
        hooks = {"a": spec("full_backward"), "b": spec("forward_pre"), "c": spec("full_backward_pre")}
        with instrument.attach(model, hooks) as probe:
            model(batch).sum().backward()
            assert all(row["fired"] == row["expected"] for row in probe.coverage())
        return [batch.grad, *(parameter.grad for parameter in model.parameters())]

    assert_same(run(Checkpointed()), run(Model()))


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (
            lambda tensors, context: {"2": tensors["0"]},
            r"returned the path '2', but its tensors have the paths '0', '1'",
        ),
        (lambda tensors, context: tensors["0"], "must return a dict of tensors by path or None, but returned Tensor"),
        (lambda tensors, context: {"1": tensors["1"][:1]}, r"input '1'.*must return shape \[4, 3\]"),
        (lambda tensors, context: {"1": 3}, "must return a tensor, but returned int"),
        (lambda tensors, context: {"1": tensors["1"].detach().mul_(2)}, "modified a tensor in place"),
        (lambda tensors, context: {"1": tensors["1"] + torch.rand(())}, "global random state"),
    ],
)
def test_invalid_result_is_reported(fn: Callable[..., Any], message: str) -> None:
    with pytest.raises(HookError, match=message):
        gradients(Model(), {"h": spec("forward_pre", fn)})


@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre"])
def test_in_place_operation_is_reported(kind: str) -> None:
    def edit(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.add_(1), y

    model = Model(edit_outputs=edit)
    if kind == "full_backward":
        model.split.forward = lambda x, y: {"sum": x * 1, "parts": (y.add_(1), x)}
    message = rf"hook 'h' \({kind}\) at step 0: with 'together'.*'split' \(Calls\)"
    with pytest.raises(HookError, match=message):
        gradients(model, {"h": spec(kind)})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "tensor"}, "for the gradients of each output, use full_backward_pre"),
        ({"kind": "tensor", "role": "input"}, "for the gradients of each input, use full_backward"),
        ({"kind": "parameter_grad"}, "a site of kind parameter_grad has one tensor"),
        ({"kind": "loss"}, "a site of kind loss has one tensor"),
    ],
)
def test_kinds_without_several_tensors_are_refused(fields: dict[str, Any], message: str) -> None:
    assert message in refused(Model(), {"h": {**spec("forward"), **fields}})
