"""Tensors without readable values do not stop a run: coverage reports the cause, and all others are recorded."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hook_runs import Calls, record, run_step
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import instrument
from instrument import Probe

EVERYTHING = {"stats": "all", "quantiles": True, "histogram": 4, "tensors": True}


class WithoutStorage(Tensor):
    """A tensor subclass without storage, as libraries use for other storage formats."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> WithoutStorage:
        new: WithoutStorage = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        new.inner = inner
        return new

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError


class WithStorage(Tensor):
    """A foreign tensor subclass with ordinary storage."""


def plain() -> Tensor:
    return torch.linspace(-1.0, 1.0, 24).reshape(4, 6).relu()


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.empty(4, 6)


UNREADABLE: dict[str, tuple[Callable[[], Tensor], str]] = {
    "quantized": (lambda: torch.quantize_per_tensor(plain(), 0.1, 0, torch.qint8), r"quantized \(torch.qint8\)"),
    "quantized by channel": (
        lambda: torch.quantize_per_channel(plain(), torch.ones(4), torch.zeros(4), 0, torch.quint8),
        r"quantized \(torch.quint8\)",
    ),
    "meta": (lambda: plain().to("meta"), "meta device"),
    "fake": (fake, "is a FakeTensor"),
    "a class without storage": (lambda: WithoutStorage(plain()), "is a WithoutStorage"),
    "a type of bits": (lambda: torch.zeros(4, 6, dtype=torch.uint8).view(torch.bits8), "type torch.bits8"),
    "float4": (lambda: torch.zeros(4, 6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "torch.float4_e2m1fn_x2"),
}
READABLE: dict[str, Callable[[], Tensor]] = {
    "coo": lambda: plain().to_sparse(),
    "coo with dense parts": lambda: plain().to_sparse(1),
    "csr": lambda: plain().to_sparse_csr(),
    "csc": lambda: plain().to_sparse_csc(),
    "bsr": lambda: plain().to_sparse_bsr((2, 2)),
    "bsc": lambda: plain().to_sparse_bsc((2, 2)),
    "mkldnn": lambda: plain().to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([plain(), plain()]),
    "jagged": lambda: torch.nested.nested_tensor([plain(), plain()], layout=torch.jagged),
    "another class": lambda: plain().as_subclass(WithStorage),
}


def recorded(value: Any, **fields: Any) -> Probe:
    return run_step(Calls(lambda x: value), {"h": record("forward", **EVERYTHING, **fields)}, torch.zeros(1))[1]


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("kind", UNREADABLE)
def test_unreadable_tensor_is_reported_in_coverage(kind: str) -> None:
    make, cause = UNREADABLE[kind]
    probe = recorded((make(), plain()), path="0")
    (row,) = probe.coverage()
    assert (row["expected"], row["fired"]) == (1, 0)
    assert re.search(cause, row["cause"])
    assert not probe.sink.records("stats")


@pytest.mark.spread(6)
@pytest.mark.parametrize("kind", READABLE)
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype", "ignore:Sparse .* is in beta")
def test_every_readable_layout_is_recorded(kind: str) -> None:
    probe = recorded(READABLE[kind]())
    (stats,), (tensor,) = probe.sink.records("stats"), probe.sink.records("tensors")
    parts = 2 if kind in ("nested", "jagged") else 1
    assert stats["numel"] == 24 * parts
    assert stats["l1"] == pytest.approx(plain().sum().item() * parts)
    assert torch.equal(tensor["values"].reshape(-1)[:24], plain().reshape(-1))
    assert [row["cause"] for row in probe.coverage()] == [""]


def test_update_of_an_unreadable_parameter_is_reported_in_coverage() -> None:
    """Libraries train quantized weights as parameters of their own class."""
    model = nn.Linear(3, 4)
    model.quantized = nn.Parameter(WithoutStorage(torch.ones(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = record("step_post", role="update")
    with instrument.attach(model, {"update": update}, optimizer=optimizer) as probe:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        probe.end_step()
    causes = {row["path"]: row["cause"] for row in probe.coverage()}
    assert (causes["weight"], probe.stats["path"].tolist()) == ("", ["weight", "bias"])
    assert "is a WithoutStorage" in causes["quantized"]


@pytest.mark.spread(1)
@pytest.mark.parametrize("action", [{"action": "record"}, {"action": "clip", "value": 1.0}], ids=["record", "clip"])
def test_training_on_the_meta_device_continues(action: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = (
        *("forward_pre", "forward", "full_backward_pre", "full_backward", "tensor", "parameter_grad"),
        *("parameter_grad_micro", "post_accumulate_grad", "step_pre", "step_post", "state_dict_post", "loss"),
    )
    hooks = {kind: {"layers": "." if kind == "loss" else "2", "kind": kind, **action} for kind in kinds}
    with instrument.attach(model, hooks, optimizer=optimizer) as probe:
        loss = probe.loss(model(torch.empty(5, 3, device="meta")).sum())
        loss.backward()
        optimizer.step()
        model.state_dict()
        probe.end_step()
    assert {row["hook"] for row in probe.coverage()} == set(hooks)
    for row in probe.coverage():
        assert row["fired"] == 0, row
        assert "meta device" in row["cause"], row
