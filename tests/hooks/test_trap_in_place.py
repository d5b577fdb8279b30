"""Trap: in-place operations after or inside a hooked module: `ReLU(inplace=True)`, `out += identity`.

PyTorch's backward hooks fail there. Here every module of an architecture has hooks of every gradient kind: training
is bit-identical to training without hooks, and records are bit-identical to those of the same model without in-place
operations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from architectures import CLASSES, TIMM, TORCHVISION, Architecture, of_timm, of_torchvision, small_network
from hook_locations import GRADIENT_LOCATIONS, INTERVENTION_LOCATIONS, record_hooks
from tiers import tiered
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from instrument import MemorySink, Probe
from instrument.config.parse import parse_hooks
from instrument.plan.hook_plan import make_plan
from instrument.tables.schemas import TABLES

HOOKS = record_hooks(GRADIENT_LOCATIONS)
STEPS = 2
Digest = int


class DigestSink(MemorySink):
    """Keep a digest of each recorded tensor, since the gradients of full models do not fit in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: dict[tuple[Any, ...], Digest] = {}

    def write(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
        pass

    def keep(
        self, key: tuple[Any, ...], source_shape: Sequence[int], tensor: Tensor, dtype: torch.dtype | None = None
    ) -> bool:
        row = dict(zip(TABLES["tensors"].names, key, strict=False))
        location = tuple(row[name] for name in ("step", "hook", "layer", "path", "call"))
        assert location not in self.digests
        self.digests[location] = digest(tensor)
        return True


class OutOfPlace(TorchFunctionMode):
    """Replace every in-place operation on a tensor with a gradient by its out-of-place variant."""

    def __init__(self) -> None:
        super().__init__()
        self.replaced = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].requires_grad and torch.is_grad_enabled():
            if kwargs.get("inplace"):  # torch.nn.functional
                self.replaced += 1
                return func(*args, **{**kwargs, "inplace": False})
            replacement = _out_of_place_variant(func)
            if replacement is not None:
                self.replaced += 1
                return replacement(*args, **kwargs)
        return func(*args, **kwargs)


def _out_of_place_variant(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return `relu` for `relu_` and `+` for `+=`; None for an operation that is not in place."""
    name = getattr(func, "__name__", "")
    if name.startswith("__i") and name.endswith("__") and name not in ("__index__", "__int__", "__invert__"):
        return getattr(Tensor, f"__{name[3:]}", None)
    if not name.endswith("_") or name.endswith("__") or name in ("requires_grad_", "retain_grad_"):
        return None
    namespaces = (torch._C._nn, torch, torch._C._VariableFunctions, Tensor)
    return next((getattr(location, name[:-1]) for location in namespaces if hasattr(location, name[:-1])), None)


def digest(tensor: Tensor) -> Digest:
    return hash(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def logits_of(output: Any) -> list[Tensor]:
    """Return the outputs that contribute to the loss, including auxiliary and distilled ones."""
    return [output] if isinstance(output, Tensor) else [part for part in output if isinstance(part, Tensor)]


def train(model: nn.Module, images: Tensor, probe: Probe | None = None) -> list[Digest]:
    """Run two steps; return digests of losses, of all gradients at each step, and of the final state dict."""
    targets = torch.arange(len(images)) % CLASSES
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    digests = []
    torch.manual_seed(2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([nn.functional.cross_entropy(part, targets) for part in logits_of(model(images))]).sum()
        loss.backward()
        digests.append(digest(loss))
        digests += [digest(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        if probe is not None:
            probe.end_step()
    return digests + [digest(value) for value in model.state_dict().values()]


def instrumented(
    model: nn.Module, images: Tensor, hooks: dict[str, Any] = HOOKS
) -> tuple[list[Digest], dict[tuple[Any, ...], Digest]]:
    sink = DigestSink()
    with Probe(make_plan(parse_hooks(hooks), model), sink) as probe:
        trained = train(model, images, probe)
    return trained, sink.digests


class SmallArchitecture:
    """A network with activations in place, sums in place, and chunks."""

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return small_network()

    def images(self) -> Tensor:
        return torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))


ARCHITECTURES: dict[str, Architecture | SmallArchitecture] = {
    "small": SmallArchitecture(),
    **{str(each): each for each in (*map(of_torchvision, TORCHVISION), *map(of_timm, TIMM))},
}
CHANGED = ("small", "torchvision mobilenet_v3_small")


def remove_in_place(model: nn.Module) -> None:
    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False


@pytest.mark.slow
@pytest.mark.parametrize("name", tiered(ARCHITECTURES, ["small"]))
def test_gradients_equal_those_without_in_place_operations(name: str) -> None:
    model, images = ARCHITECTURES[name].make(), ARCHITECTURES[name].images()
    start = copy.deepcopy(model.state_dict())
    uninstrumented = train(model, images)
    model.load_state_dict(start)
    hooked, recorded = instrumented(model, images)
    assert hooked == uninstrumented
    assert len(recorded) > STEPS * len(GRADIENT_LOCATIONS)
    model.load_state_dict(start)
    remove_in_place(model)
    with OutOfPlace():
        trained_out_of_place, wanted = instrumented(model, images)
    assert trained_out_of_place == uninstrumented
    assert recorded.keys() == wanted.keys()
    different = [key for key, value in wanted.items() if recorded[key] != value]
    assert not different, different[:5]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "role"), INTERVENTION_LOCATIONS)
@pytest.mark.parametrize("name", tiered(CHANGED, ["small"]))
def test_changes_equal_those_without_in_place_operations(name: str, kind: str, role: str) -> None:
    architecture = ARCHITECTURES[name]
    model, images = architecture.make(), architecture.images()
    start = copy.deepcopy(model.state_dict())
    halve = {"halve": {"layers": "**", "kind": kind, "role": role, "action": "scale", "factor": 0.5}}
    changed, _ = instrumented(model, images, halve)
    model.load_state_dict(start)
    remove_in_place(model)
    with OutOfPlace():
        wanted, _ = instrumented(model, images, halve)
    assert changed == wanted
    model.load_state_dict(start)
    assert changed != train(model, images)


@pytest.mark.slow
def test_every_family_of_torchvision_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of each classification model are of the same classes as those of a listed one."""
    from torchvision import models

    def classes(name: str) -> frozenset[type]:
        return frozenset(type(module) for module in list(of_torchvision(name).make().modules())[1:])

    for initialize in (
        "kaiming_normal_",
        "kaiming_uniform_",
        "normal_",
        "trunc_normal_",
        "uniform_",
        "xavier_uniform_",
    ):
        monkeypatch.setattr(nn.init, initialize, lambda tensor, *_, **__: tensor)
    listed = {classes(name) for name in TORCHVISION}
    assert len(listed) == len(TORCHVISION)
    assert {classes(name) for name in {*models.list_models(module=models)} - {"maxvit_t"}} == listed


def test_out_of_place_mode_replaces_every_operation() -> None:
    """Also the sums in residual blocks are replaced."""
    architecture = SmallArchitecture()
    with OutOfPlace() as replacement:
        train(architecture.make(), architecture.images())
    # The stem's SiLU; in each BasicBlock two times relu, and `out +=`; in the other block two times relu; Hardswish.
    assert replacement.replaced == STEPS * (1 + 2 * 3 + 2 + 1)
