"""Trap: a module writes its result into a container that it was given, where the caller reads it.

Interventions and gradients equal those of plain hooks that replace the entry of the container.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hook_runs import Calls, assert_close, record, scale
from torch import Tensor, nn

import instrument
from instrument.plan.shape_inference import infer_shapes


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Tensor
    h: Tensor | None = None


def graph(x: Tensor) -> Any:
    from geometric import Data

    return Data(x=x)


GIVEN: dict[str, Callable[[Tensor], Any]] = {
    "dict": lambda x: {"x": x},
    "user dict": lambda x: UserDict(x=x),
    "list": lambda x: [x],
    "dataclass": Slotted,
    "namespace": lambda x: SimpleNamespace(x=x),
    "graph": graph,
}
RETURNED: dict[str, Callable[[Any, Tensor], Any]] = {
    "nothing": lambda given, h: None,
    "the container": lambda given, h: given,
    "a tuple": lambda given, h: (given, 1),
    "another tensor": lambda given, h: h.sum(),
}


def read(container: Any, key: str) -> Tensor:
    if isinstance(container, list):
        return container["xh".index(key)]
    return container[key] if hasattr(container, "__getitem__") else getattr(container, key)


def write(container: Any, key: str, value: Tensor) -> None:
    if isinstance(container, list):
        container["xh".index(key) :] = [value, *container["xh".index(key) + 1 :]]
    elif hasattr(container, "__setitem__"):
        container[key] = value
    else:
        setattr(container, key, value)


def model_of(returned: str) -> nn.Module:
    """Return a model that reads what its first module wrote, and not what it returned."""

    def write_output(linear: nn.Module, batch: Any) -> Any:
        h = linear(read(batch, "x"))
        write(batch, "h", h)
        return RETURNED[returned](batch, h)

    def forward(embed: nn.Module, out: nn.Module, batch: Any) -> Tensor:
        embed(batch)
        return out(read(batch, "h"))

    torch.manual_seed(0)
    return Calls(forward, embed=Calls(write_output, linear=nn.Linear(3, 4)), out=nn.Linear(4, 1))


class Result:
    """The output of a model, the gradients of its first weight and of its input, and its batch."""

    def __init__(self, model: nn.Module, given: str, specs: dict[str, dict[str, Any]]) -> None:
        x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
        self.batch = GIVEN[given](x)
        model.zero_grad()
        with instrument.attach(model, specs, rules=None) as probe:
            output = model(self.batch)
            output.sum().backward()
            probe.end_step()
        self.tensors = (output.detach(), model.embed.linear.weight.grad, x.grad)
        self.probe = probe
        assert read(self.batch, "x") is x, "the input of the caller is unchanged"

    def assert_equals(self, output: Tensor, weight: Tensor, x: Tensor) -> None:
        assert_close(self.tensors, (output, weight, x), rtol=1e-5, atol=1e-8)
        assert all((row["expected"], row["fired"]) == (1, 1) for row in self.probe.coverage())


def halve(key: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any = None) -> None:
        write(args[0], key, read(args[0], key) * 0.5)

    return hook


HALF = {"layers": "embed", "action": "scale", "factor": 0.5}


@pytest.mark.spread(1)
@pytest.mark.parametrize("returned", RETURNED)
@pytest.mark.parametrize("given", GIVEN)
def test_interventions_reach_the_container_of_the_caller(given: str, returned: str) -> None:
    model = model_of(returned)
    output, weight, x = Result(model, given, {}).tensors
    path = {"list": {"x": "0", "h": "1"}}.get(given, {"x": "x", "h": "h"})
    Result(model, given, {"g": {**HALF, "kind": "full_backward"}}).assert_equals(output, weight, x * 0.5)

    hook = model.embed.linear.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    expected = Result(model, given, {}).tensors
    hook.remove()
    at_input = {**HALF, "path": f"0.{path['x']}"}
    Result(model, given, {"p": {**at_input, "kind": "forward_pre"}}).assert_equals(*expected)

    if returned != "another tensor":
        prefix = "0." if returned == "a tuple" else ""
        hook = model.embed.register_forward_hook(halve("h"))
        expected = Result(model, given, {}).tensors
        hook.remove()
        at_output = {**HALF, "path": prefix + path["h"]}
        Result(model, given, {"f": {**at_output, "kind": "forward"}}).assert_equals(*expected)
        for kind in ("full_backward_pre", "tensor"):
            Result(model, given, {"b": {**at_output, "kind": kind}}).assert_equals(output, weight * 0.5, x * 0.5)


@pytest.mark.spread(3)
@pytest.mark.parametrize("returned", RETURNED)
@pytest.mark.parametrize("given", GIVEN)
def test_record_hooks_change_nothing(given: str, returned: str) -> None:
    model = model_of(returned)
    expected = Result(model, given, {}).tensors
    record = {"layers": "**", "action": "record"}
    kinds = ("forward", "forward_pre", "full_backward", "full_backward_pre", "tensor")
    found = Result(model, given, {kind: {**record, "kind": kind} for kind in kinds})
    assert all(torch.equal(one, other) for one, other in zip(found.tensors, expected, strict=True))


def test_module_without_a_result_has_the_containers_of_its_arguments() -> None:
    def write(one: dict[str, Tensor], sizes: list[int], *, other: dict[str, Tensor]) -> None:
        one["sum"] = other["sum"] = one["x"] + other["x"] + len(sizes)

    given = [torch.ones(2), torch.ones(2)]
    module = Calls(write)

    def run() -> tuple[Tensor, Tensor]:
        one, other = ({"x": x} for x in given)
        assert module(one, [1, 2], other=other) is None
        return one["sum"], other["sum"]

    hooks = {"r": record("forward"), "s": scale("forward", 0.0, path="other.sum")}
    with instrument.attach(module, hooks, rules=None) as probe:
        assert [each.tolist() for each in run()] == [[4.0, 4.0], [0.0, 0.0]]
        probe.end_step()
    paths = ["0.x", "0.sum", "other.x", "other.sum"]
    assert probe.stats["path"].tolist() == paths
    (outputs,) = infer_shapes(module, run, training=True)[id(module)].outputs
    assert [info.path for info in outputs] == paths


def test_recursive_module_on_a_tree_with_parents() -> None:
    @dataclasses.dataclass(eq=False)
    class Node:
        x: Tensor
        parent: Any = None
        children: list[Any] = dataclasses.field(default_factory=list)
        h: Tensor | None = None

    def forward(linear: nn.Module, node: Node) -> Tensor:
        node.h = linear(node.x) + sum(model(child) for child in node.children)
        return node.h

    def tree() -> Node:
        root = Node(torch.ones(1, 3))
        root.children = [Node(torch.full((1, 3), float(i)), root) for i in (2, 3)]
        return root

    torch.manual_seed(0)
    model, root = Calls(forward, linear=nn.Linear(3, 3)), tree()
    expected = model(tree()).detach()
    kinds = ("forward", "forward_pre", "full_backward", "tensor")
    hooks = {kind: {"layers": ".", "kind": kind, "action": "record"} for kind in kinds}
    with instrument.attach(model, hooks, rules=None) as probe:
        assert torch.equal(model(root), expected)
        root.h.sum().backward()  # type: ignore[union-attr]
        probe.end_step()
    paths = probe.stats.query("kind == 'forward_pre' and call == 0")["path"].tolist()
    assert paths == ["0.x", "0.children.0.x", "0.children.1.x"]
    scaled = scale("forward_pre", 0.0, path="0.x")
    with instrument.attach(model, {"s": scaled}, rules=None) as probe:
        root = tree()
        assert torch.allclose(model(root), 3 * model.linear.bias)
        probe.end_step()
    assert root.h is not None
    assert all(child.h is not None and child.parent is root for child in root.children)
    assert root.x.sum().item() == 3.0
    assert len(instrument.observe(model, tree(), ".")) == 6
