"""Sparse tensors: gradients of `nn.Embedding(sparse=True)`, and inputs of any sparse layout, such as an adjacency matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hook_runs import Calls, record, run_step, run_steps
from torch import Tensor, nn

import instrument
from instrument.errors import HookError

INDICES = torch.tensor([[1, 1, 4, 7]])  # one index twice: the gradient has an entry for each


def weight_after(spec: dict[str, Any], *, sparse: bool, kind: str) -> tuple[torch.Tensor, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 3, sparse=sparse), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instrument.attach(model, {"h": {"layers": "**", "kind": kind, **spec}}, optimizer=optimizer) as probe:
        for _ in range(2):
            optimizer.zero_grad()
            model(INDICES).square().sum().mul(40.0).backward()
            optimizer.step()
            probe.end_step()
    return model[0].weight.detach(), probe.sink.records("effects")


@pytest.mark.spread(1)
@pytest.mark.parametrize("kind", ["parameter_grad", "post_accumulate_grad", "parameter_grad_micro"])
@pytest.mark.parametrize(
    "spec",
    [
        {"action": "clip", "value": 0.5},
        {"action": "clip", "min": -0.25, "max": 1.0},
        {"action": "clip", "norm": 0.5, "scope": "tensor"},
        {"action": "scale", "factor": 0.5},
        {"action": "modify", "fn": "zero"},
        {"action": "modify", "fn": "sign"},
        {"action": "modify", "fn": "quantize", "to": "int8"},
    ],
    ids=str,
)
def test_sparse_entries_change_as_in_a_dense_gradient(spec: dict[str, Any], kind: str) -> None:
    sparse_weight, effects = weight_after(spec, sparse=True, kind=kind)
    dense_weight, dense_effects = weight_after(spec, sparse=False, kind=kind)
    assert torch.allclose(sparse_weight, dense_weight, rtol=1e-6, atol=0)
    assert len(effects) == len(dense_effects) == 6
    for row, dense in zip(effects, dense_effects, strict=True):
        assert (row["layer"], row["numel"], row["changed"]) == (dense["layer"], dense["numel"], dense["changed"])
        assert row["norm_after"] == pytest.approx(dense["norm_after"], rel=1e-5)


def test_total_norm_includes_sparse_gradients() -> None:
    spec = {"action": "clip", "norm": 0.5}
    sparse_weight, effects = weight_after(spec, sparse=True, kind="parameter_grad")
    dense_weight, _ = weight_after(spec, sparse=False, kind="parameter_grad")
    assert torch.allclose(sparse_weight, dense_weight, rtol=1e-6, atol=0)
    norms = [row["norm_after"] for row in effects if row["step"] == 0]
    assert sum(norm**2 for norm in norms) ** 0.5 == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize(
    "spec",
    [
        {"action": "clip", "min": 0.1},
        {"action": "clip", "quantile": 0.9},
        {"action": "scale", "factor": [1.0, 2.0, 3.0], "dim": 1},
        {"action": "modify", "fn": "noise", "std": 0.1},
        {"action": "modify", "fn": "l2", "coefficient": 0.1},
    ],
    ids=str,
)
def test_function_that_needs_a_dense_tensor_is_reported(spec: dict[str, Any]) -> None:
    with pytest.raises(HookError, match=r"'h' \(parameter_grad\) on layer '0'.*requires a dense tensor.*sparse=False"):
        weight_after({**spec, "types": "Embedding"}, sparse=True, kind="parameter_grad")


def propagate(to_layout: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a layer of a graph network: the weighted adjacency matrix, in a layout, times the features."""

    def forward(weight: Tensor, adjacency: nn.Module, features: Tensor) -> Tensor:
        matrix = adjacency(weight)
        return (matrix if matrix.layout == torch.strided else matrix.to_dense()) @ features

    return Calls(forward, weight=nn.Parameter(ADJACENCY.clone()), adjacency=Calls(to_layout))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "bsc": lambda x: x.to_sparse_bsc((2, 2)),
}
ADJACENCY = torch.tensor([[0.0, 2.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 3.0], [0.0, 0.0, 0.5, 0.0]])


def result_with(spec: dict[str, Any], to_layout: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Any]:
    """Return the output and the gradient of a layer with a hook on its matrix, and the effects."""
    model, hooks = propagate(to_layout), {"h": {"layers": "adjacency", **spec}}
    features = torch.linspace(-1.0, 1.0, 12).reshape(4, 3)
    output, probe = run_step(model, hooks, features, loss=lambda output: output.square().sum())
    return output.detach(), model.weight.grad[ADJACENCY != 0], probe.sink.records("effects")


@pytest.mark.spread(3)
@pytest.mark.filterwarnings("ignore:Sparse .* is in beta")
@pytest.mark.parametrize("kind", ["forward", "tensor", "full_backward_pre"])
@pytest.mark.parametrize(
    "spec",
    [{"action": "clip", "value": 0.7}, {"action": "scale", "factor": 0.5}, {"action": "modify", "fn": "sign"}],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensor_of_every_layout_changes_like_a_dense_one(layout: str, spec: dict[str, Any], kind: str) -> None:
    output, gradient, effects = result_with({"kind": kind, **spec}, LAYOUTS[layout])
    wanted, wanted_gradient, dense_effects = result_with({"kind": kind, **spec}, Tensor.clone)
    assert torch.allclose(output, wanted, rtol=1e-6, atol=0)
    assert torch.allclose(gradient, wanted_gradient, rtol=1e-6, atol=0)
    assert [row["numel"] for row in effects] == [row["numel"] for row in dense_effects] == [16]


@pytest.mark.spread(2)
@pytest.mark.filterwarnings("ignore:Sparse .* is in beta")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_change_that_fills_a_sparse_tensor_is_refused(layout: str) -> None:
    for change in ({"action": "modify", "fn": "noise", "std": 0.1}, {"action": "clip", "norm": 1.0, "scope": "sample"}):
        with pytest.raises(HookError, match=r"'h' \(forward\) on layer 'adjacency'.*requires a dense tensor"):
            result_with({"kind": "forward", **change}, LAYOUTS[layout])


@pytest.mark.filterwarnings("ignore:Sparse .* is in beta")
@pytest.mark.parametrize("to_layout", [Tensor.coalesce, Tensor.to_sparse_csr], ids=["coo", "csr"])
def test_huge_sparse_input_is_recorded_and_never_dense(to_layout: Callable[[Tensor], Tensor]) -> None:
    size = 1_000_000  # 4 TB as a dense tensor
    places = torch.arange(10).expand(2, 10)
    matrix = to_layout(torch.sparse_coo_tensor(places, torch.ones(10), (size, size), check_invariants=True))
    hook = record("forward_pre")
    model = nn.Identity()
    _, probe = run_step(model, {"h": {**hook, "stats": "all", "histogram": 2}}, matrix)
    (row,), (distribution,) = probe.sink.records("stats"), probe.sink.records("distributions")
    assert (row["numel"], row["max"], row["l1"]) == (size**2, 1.0, 10.0)
    assert row["l2"] == pytest.approx(10**0.5)
    assert row["dead_fraction"] == (size - 10) / size
    assert distribution["counts"] == [size**2 - 10, 10]
    message = r"'h' \(forward_pre\).*sparse with shape \[1000000, 1000000\].* 4 TB .*statistics"
    for fields in ({"tensors": True}, {"samples": [0]}):
        with pytest.raises(HookError, match=message):
            run_step(model, {"h": {**hook, **fields}}, matrix)


@pytest.mark.filterwarnings("ignore:Sparse .* is in beta")
def test_first_elements_are_recorded_without_a_dense_tensor() -> None:
    dense = ADJACENCY.reshape(2, 8).repeat(1, 2)
    size = 1_000_000
    huge = torch.sparse_coo_tensor(torch.tensor([[0, 9], [3, 9]]), torch.ones(2), (size, size), check_invariants=True)
    model = nn.Identity()
    hook = record("forward", tensors=True, max_elements=21)
    given = (dense.to_sparse(), dense.to_sparse(1), dense.to_sparse_csr(), huge)
    probe = run_steps(model, {"h": hook}, lambda: [*map(model, given)])
    *small, first = probe.sink.records("tensors")
    assert all(torch.equal(row["values"], dense.reshape(-1)[:21]) for row in small)
    assert first["values"].tolist() == [0.0, 0.0, 0.0, 1.0] + [0.0] * 17
    assert instrument.observe(nn.Identity(), huge)["max"].tolist() == [1.0]
