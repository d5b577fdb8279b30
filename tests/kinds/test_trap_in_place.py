"""Trap: operations in place after or inside a hooked module: `ReLU(inplace=True)`, `out += identity`.

PyTorch's own backward hooks fail there. Here every module of an architecture has hooks of every kind that sees
gradients; the model trains as it does without them, and what they record is what they record on the same model with
every operation in place taken out of it: all of that to the bit.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from architectures import CLASSES, TIMM, TORCHVISION, Architecture, of_timm, of_torchvision
from places import CHANGES, GRADIENTS, records
from tiers import tiered
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from instrument import Probe
from instrument.capture.tables import TABLES
from instrument.plan.sites import make_plan
from instrument.spec.parse import parse_hooks

HOOKS = records(GRADIENTS)
STEPS = 2
ARCHITECTURES = {str(each): each for each in (*map(of_torchvision, TORCHVISION), *map(of_timm, TIMM))}
QUICK = (
    "torchvision googlenet",  # auxiliary outputs
    "torchvision resnet18",  # sums in place
    "torchvision shufflenet_v2_x0_5",  # chunks
    "timm deit_tiny_distilled_patch16_224",  # two outputs
    "timm test_efficientnet",  # activations in place
)
Digest = bytes


class DigestSink:
    """Keeps of each recorded tensor a digest of its bits: whole models' gradients do not fit in memory."""

    def __init__(self) -> None:
        self.digests: dict[tuple[Any, ...], Digest] = {}

    def write(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
        pass

    def keep(
        self, key: tuple[Any, ...], source_shape: Sequence[int], tensor: Tensor, dtype: torch.dtype | None = None
    ) -> bool:
        told = dict(zip(TABLES["tensors"].names, key, strict=False))
        place = tuple(told[name] for name in ("step", "hook", "layer", "path", "call"))
        assert place not in self.digests
        self.digests[place] = digest(tensor)
        return True

    def end_step(self) -> None:
        pass

    def close(self) -> None:
        pass


class OutOfPlace(TorchFunctionMode):
    """Whatever operation in place is about to be done to a tensor with a gradient is done beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.replaced = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].requires_grad and torch.is_grad_enabled():
            if kwargs.get("inplace"):  # of torch.nn.functional
                self.replaced += 1
                return func(*args, **{**kwargs, "inplace": False})
            beside = _beside(func)
            if beside is not None:
                self.replaced += 1
                return beside(*args, **kwargs)
        return func(*args, **kwargs)


def _beside(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """`relu` for `relu_`, `+` for `+=`; None for what is not in place."""
    name = getattr(func, "__name__", "")
    if name.startswith("__i") and name.endswith("__") and name not in ("__index__", "__int__", "__invert__"):
        return getattr(Tensor, f"__{name[3:]}", None)
    if not name.endswith("_") or name.endswith("__") or name in ("requires_grad_", "retain_grad_"):
        return None
    places = (torch._C._nn, torch, torch._C._VariableFunctions, Tensor)
    return next((getattr(place, name[:-1]) for place in places if hasattr(place, name[:-1])), None)


def digest(tensor: Tensor) -> Digest:
    plain = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(plain.numpy(), digest_size=16).digest()


def logits_of(output: Any) -> list[Tensor]:
    """The outputs that a loss is formed of: auxiliary ones and distilled ones too."""
    return [output] if isinstance(output, Tensor) else [part for part in output if isinstance(part, Tensor)]


def train(model: nn.Module, images: Tensor, probe: Probe | None = None) -> list[Digest]:
    """Two steps; digests of the losses, of all gradients at each, and of the weights and buffers at the end."""
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


def check(architecture: Architecture) -> tuple[int, int]:
    """Train bare, hooked, and hooked with nothing in place.

    Returns:
        How many gradients were recorded, and how many operations in place were taken out.
    """
    model = architecture.make()
    start = copy.deepcopy(model.state_dict())
    images = architecture.images()
    bare = train(model, images)
    model.load_state_dict(start)
    hooked, recorded = instrumented(model, images)
    assert hooked == bare
    assert len(recorded) > STEPS * len(GRADIENTS)
    model.load_state_dict(start)
    in_place = [module for module in model.modules() if getattr(module, "inplace", False) is True]
    for module in in_place:
        module.inplace = False
    with OutOfPlace() as beside:
        apart, wanted = instrumented(model, images)
    assert apart == bare
    assert recorded.keys() == wanted.keys()
    different = [key for key, value in wanted.items() if recorded[key] != value]
    assert not different, different[:5]
    return len(recorded), len(in_place) + beside.replaced


@pytest.mark.parametrize("name", tiered(ARCHITECTURES, QUICK))
def test_gradients_are_those_of_the_model_without_operations_in_place(name: str) -> None:
    check(ARCHITECTURES[name])


@pytest.mark.parametrize(("kind", "role"), CHANGES)
@pytest.mark.parametrize(
    "name", tiered(["resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5"], ["shufflenet_v2_x0_5"])
)
def test_changes_are_those_of_the_model_without_operations_in_place(name: str, kind: str, role: str) -> None:
    architecture = of_torchvision(name)
    model, images = architecture.make(), architecture.images()
    start = copy.deepcopy(model.state_dict())
    halve = {"halve": {"layers": "**", "kind": kind, "role": role, "action": "scale", "factor": 0.5}}
    changed, _ = instrumented(model, images, halve)
    model.load_state_dict(start)
    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False
    with OutOfPlace():
        wanted, _ = instrumented(model, images, halve)
    assert changed == wanted
    model.load_state_dict(start)
    assert changed != train(model, images)


def test_the_architectures_of_torchvision_are_all_that_it_has() -> None:
    from torchvision import models

    assert models.list_models(module=models) == TORCHVISION


def test_the_model_without_operations_in_place_has_none() -> None:
    """What the architectures are held against is what it says: in the residual blocks of ResNet the sums too."""
    model, images = of_torchvision("resnet18").make(), torch.randn(2, 3, 64, 64)
    with OutOfPlace() as beside:
        train(model, images)
    # relu after each block's first convolution, `out +=` and relu after it, and the stem's relu; in each of two steps
    assert beside.replaced == STEPS * (1 + 8 * 3)
