"""`instrument.observe`: one look at the tensors of a model, which is left as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hook_runs import Calls
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instrument
from instrument import ConfigError


class Model(nn.Module):
    """Model with dropout, batch normalization, a layer called twice, and a nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU())
        self.shared = nn.Linear(6, 6)

    def forward(self, inputs: Tensor, *, factor: float = 1.0) -> dict[str, Tensor]:
        hidden = self.shared(self.shared(self.encoder(inputs))) * factor
        return {"logits": hidden, "codes": hidden.argmax(1)}


def state(model: nn.Module) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers()]
    gradients = [parameter.grad for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    hooks = [len(vars(module)["_forward_hooks"]) for module in model.modules()]
    random_states = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    copies = [None if tensor is None else tensor.detach().clone().tolist() for tensor in [*tensors, *gradients]]
    return [copies, modes, hooks, random_states]


@pytest.mark.spread(1)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("has_gradients", [True, False])
def test_observe_leaves_no_trace(training: bool, has_gradients: bool) -> None:
    model = Model().train(training)
    if has_gradients:
        model(torch.randn(5, 4))["logits"].square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    batch = torch.randn(5, 4, requires_grad=True)
    fired = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(fired.append)
    before = state(model)
    instrument.observe(model, batch, functions="*")
    assert state(model) == before
    assert all(one is other.grad for one, other in zip(gradients, model.parameters(), strict=True))
    assert batch.grad is None
    assert fired == []  # such as an optimizer step in the backward pass


def test_rows_are_in_execution_order_with_all_columns() -> None:
    model, batch = Model().eval(), torch.randn(5, 4)
    frame = instrument.observe(model, batch)
    outputs = frame[frame.role == "output"]
    assert list(zip(outputs.layer, outputs.call, outputs.path, strict=True)) == [
        *((f"encoder.{i}", 0, "") for i in range(4)),
        ("encoder", 0, ""),
        ("shared", 0, ""),
        ("shared", 1, ""),
        ("", 0, "logits"),
        ("", 0, "codes"),
    ]
    assert outputs.module_type.tolist()[:2] == ["Linear", "BatchNorm1d"]
    assert outputs["shape"].tolist() == [(5, 6)] * 8 + [(5,)]
    assert outputs.dtype.tolist() == ["float32"] * 8 + ["int64"]
    gradients = frame[frame.role == "grad_output"]
    assert frame.role.tolist() == ["output"] * 9 + ["grad_output"] * len(gradients)
    assert list(zip(gradients.layer, gradients.call, strict=True))[:3] == [("", 0), ("shared", 1), ("shared", 0)]
    assert gradients["layer"].tolist()[-1] == "encoder.0"
    logits = model(batch)["logits"].double()
    row = outputs.iloc[7]
    assert [row["mean"], row["min"], row["max"]] == pytest.approx(
        [logits.mean().item(), logits.min().item(), logits.max().item()]
    )
    assert row["std"] == pytest.approx(logits.std(correction=0).item())
    assert (row.nan_count, row.inf_count) == (0, 0)
    assert gradients.iloc[0]["mean"] == 1.0  # of the sum of outputs
    assert list(frame.columns) == [
        *("layer", "module_type", "call", "role", "path", "shape", "dtype"),
        *("mean", "std", "min", "max", "nan_count", "inf_count"),
    ]


@pytest.mark.spread(2)
@pytest.mark.parametrize("batch", [torch.ones(3, 4), (torch.ones(3, 4),), {"inputs": torch.ones(3, 4), "factor": 1.0}])
def test_batch_is_a_tensor_a_tuple_or_a_mapping(batch: Any) -> None:
    frame = instrument.observe(Model().eval(), batch, "shared")
    assert frame["shape"].tolist() == [(3, 6)] * 4
    assert frame["call"].tolist() == [0, 1, 1, 0]


def test_loss_replaces_the_sum_of_outputs() -> None:
    model = nn.Linear(2, 2)
    targets = torch.tensor([0, 1])
    frame = instrument.observe(
        model, torch.ones(2, 2), ".", loss=lambda output: nn.functional.cross_entropy(output, targets)
    )
    output = model(torch.ones(2, 2))
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(output, targets), output)
    assert frame.iloc[1][["mean", "max"]].tolist() == pytest.approx(
        [gradient.mean().item(), gradient.max().item()], abs=1e-7
    )


def test_forward_pass_alone_needs_no_gradient() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    with torch.no_grad():
        frame = instrument.observe(model, torch.full((1, 2), torch.inf), ["."], backward=False)
    assert frame.role.tolist() == ["output"]
    assert frame.inf_count[0] + frame.nan_count[0] == 2


def test_frozen_model_warns_that_it_has_no_gradients() -> None:
    with pytest.warns(instrument.InstrumentWarning, match="gradient"):
        frame = instrument.observe(nn.Linear(2, 2).requires_grad_(False), torch.ones(1, 2))
    assert frame.role.tolist() == ["output"]


@pytest.mark.parametrize(("loss", "given"), [(lambda output: output, r"shape \[1, 2\]"), (lambda output: 1.0, "float")])
def test_loss_that_is_no_scalar_is_refused(loss: Callable[[Any], Any], given: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=rf"loss: must return a scalar tensor[\s\S]*given +{given}"):
        instrument.observe(model, torch.ones(1, 2), loss=loss)
    assert not model._forward_hooks


def test_unknown_layer_and_failing_model_are_reported() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ConfigError) as refused:
        instrument.observe(model, torch.ones(1, 2), ["0", "encoder.**"])
    assert [(each.where, each.given) for each in refused.value.problems] == [("layers", "encoder.**")]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        instrument.observe(model, torch.ones(1, 3))
    assert caught.value.__notes__ == ["layer 0 (Linear), batch float32 [1, 3]"]
    with pytest.raises(TypeError, match="positional arguments") as caught:
        instrument.observe(model, (torch.ones(1, 2), torch.ones(1)))
    assert caught.value.__notes__ == ["layer . (Sequential), batch (float32 [1, 2], float32 [1])"]
    assert not model[0]._forward_hooks


def test_recomputed_passes_are_not_repeated() -> None:
    model = Calls(lambda layer, x: checkpoint(layer, x, use_reentrant=False), layer=nn.Linear(2, 2))
    frame = instrument.observe(model, torch.ones(1, 2), "layer")
    assert frame.role.tolist() == ["output", "grad_output"]


def test_observe_describes_results_of_functions_and_their_gradients() -> None:
    model = Calls(lambda x: torch.softmax(x @ x.mT, -1).sum(-1) + 1)
    frame = instrument.observe(model, torch.ones(3, 2, requires_grad=True), functions=["softmax", "add"])
    assert [(row.role, row.path, row.shape, row.mean) for row in frame.itertuples()] == [
        ("output", "softmax.0", (3, 3), pytest.approx(1 / 3)),
        ("output", "add.0", (3,), 2.0),
        ("output", "", (3,), 2.0),
        ("grad_output", "add.0", (3,), 1.0),
        ("grad_output", "", (3,), 1.0),
        ("grad_output", "softmax.0", (3, 3), 1.0),
    ]


def test_reentrant_checkpointing_is_observed_and_leaves_no_gradient() -> None:
    def network(*, is_checkpointed: bool) -> nn.Module:
        def forward(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
            return checkpoint(second, first(x), use_reentrant=True) if is_checkpointed else second(first(x))

        torch.manual_seed(0)
        return Calls(forward, first=nn.Linear(3, 3), second=nn.Sequential(nn.Linear(3, 3), nn.Tanh()))

    model, x = network(is_checkpointed=True), torch.ones(2, 3)
    model.first.weight.grad = kept = torch.ones(3, 3)
    order = ["role", "layer", "path"]
    found, expected = (
        instrument.observe(each, x, functions=["linear", "tanh"]).sort_values(order, ignore_index=True)
        for each in (model, network(is_checkpointed=False))
    )
    pd.testing.assert_frame_equal(found, expected)
    assert model.first.weight.grad is kept
    assert model.second[0].weight.grad is None
    assert kept.sum().item() == 9.0
