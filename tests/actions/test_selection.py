"""Actions on a selection: units, heads, positions, samples or a slice of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hook_runs import Calls, assert_equal, run_step
from tiers import tiered
from torch import Tensor, nn

import instrument
from instrument import ConfigError, HookError
from instrument.config.parse import parse_hooks
from instrument.tables.statistics import DEFAULT
from instrument.training.distributed.strategies import shard_problems

SEQUENCE = torch.randn(3, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))  # [N, T, C]
IMAGES = torch.randn(3, 4, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))  # [N, C, H, W]
ALL = slice(None)
SELECTIONS: dict[str, tuple[Tensor, dict[str, Any], Any]] = {
    "features": (SEQUENCE, {"units": [0, 3, 4]}, (ALL, ALL, [0, 3, 4])),
    "one feature": (SEQUENCE, {"units": -1}, (ALL, ALL, [11])),
    "channels": (IMAGES, {"units": [3, 1]}, (ALL, [3, 1])),
    "another dimension": (IMAGES, {"units": [0], "unit_dim": -1}, (..., [0])),
    "head": (SEQUENCE, {"heads": {"of": 4, "take": 1}}, (..., slice(3, 6))),
    "heads": (SEQUENCE, {"heads": {"of": 4, "take": [-1, 0]}}, (..., [9, 10, 11, 0, 1, 2])),
    "position": (SEQUENCE, {"positions": -1}, (ALL, [4])),
    "samples": (SEQUENCE, {"samples": [0, 2]}, ([0, 2],)),
    "slice": (SEQUENCE, {"slice": ":, -1, 4:8"}, (ALL, -1, slice(4, 8))),
    "slice in brackets": (IMAGES, {"slice": "[1:, 2]"}, (slice(1, None), 2)),
    "several": (
        SEQUENCE,
        {"samples": [0, 2], "positions": [4, 0, 1], "heads": {"of": 4, "take": [0, 1, 3]}},
        (torch.tensor([[[0]], [[2]]]), torch.tensor([[4], [0], [1]]), torch.tensor([0, 1, 2, 3, 4, 5, 9, 10, 11])),
    ),
}  # fmt: skip


def apply(
    tensor: Tensor, weights: Tensor | None = None, module: nn.Module | None = None, **spec: Any
) -> tuple[Tensor, Tensor, instrument.MemorySink]:
    """Return the output of a hooked module, the gradient of `(output * weights).sum()`, and the rows."""
    module = module or nn.Identity()
    given = tensor.clone().requires_grad_()
    with instrument.attach(module, {"h": {"layers": ".", "kind": "forward", **spec}}) as probe:
        output = module(given)
        (output * (torch.ones_like(output) if weights is None else weights)).sum().backward()
        probe.end_step()
    return output.detach(), given.grad, probe.sink


@pytest.mark.spread(12)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SELECTIONS)
def test_intervention_changes_the_selection_only(name: str, dtype: torch.dtype) -> None:
    complete, selection, index = SELECTIONS[name]
    complete = complete.to(dtype)
    weights = torch.randn(complete.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    reference = complete.clone().requires_grad_()
    expected = reference.clone()
    expected[index] = reference[index].clamp(-0.5, 0.5) * 1.0
    (expected * weights).sum().backward()
    output, gradient, sink = apply(complete, weights, action="clip", value=0.5, **selection)
    assert torch.equal(output, expected.detach())
    assert torch.equal(gradient, reference.grad)
    (effect,) = sink.records("effects")
    part, changed = complete[index], expected.detach()[index]
    assert effect["changed_fraction"] == pytest.approx((part != changed).double().mean().item())
    assert effect["norm_before"] == pytest.approx(part.double().norm().item())
    assert effect["norm_after"] == pytest.approx(changed.double().norm().item())


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", tiered(SELECTIONS, ("channels", "slice in brackets", "several")))
def test_gradient_through_a_selection_passes_gradcheck(name: str) -> None:
    complete, selection, _ = SELECTIONS[name]
    spec = {"layers": ".", "kind": "forward", "action": "clip", "norm": 0.5, **selection}
    module = nn.Identity()
    with instrument.attach(module, {"h": spec}):
        given = complete[:, :5, :12].clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x: module(x).square(), given)


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", SELECTIONS)
def test_records_are_of_the_selection(name: str) -> None:
    complete, selection, index = SELECTIONS[name]
    fields = {"action": "record", "stats": "default", "histogram": 4, "tensors": True}
    _, _, sink = apply(complete, **fields, **selection)
    _, _, of_part = apply(complete[index].contiguous(), **fields)
    names = (*DEFAULT, "shape")
    (found,), (wanted,) = (each.records("stats") for each in (sink, of_part))
    assert {key: found[key] for key in names} == {key: wanted[key] for key in names}
    assert sink.records("distributions")[0]["counts"] == of_part.records("distributions")[0]["counts"]
    (kept,) = sink.records("tensors")
    assert torch.equal(kept["values"], complete[index])
    assert kept["source_shape"] == list(complete.shape)


def test_statistics_of_units_use_the_dimension_of_the_units() -> None:
    tensor = torch.ones(2, 3, 4)
    tensor[:, :, 1] = 0.0
    _, _, sink = apply(tensor, action="record", stats=["dead_fraction"], units=[0, 1, 3])
    assert sink.records("stats")[0]["dead_fraction"] == pytest.approx(1 / 3)
    assert sink.records("stats")[0]["shape"] == [2, 3, 3]


def test_number_of_samples_limits_only_recorded_tensors() -> None:
    _, _, sink = apply(SEQUENCE, action="record", tensors=True, samples=2, units=[1])
    assert sink.records("stats")[0]["shape"] == [3, 5, 1]
    assert torch.equal(sink.records("tensors")[0]["values"], SEQUENCE[:2, :, 1:2])
    _, _, sink = apply(SEQUENCE, action="record", tensors=True, samples=2, slice="-1, :, 1:")
    assert torch.equal(sink.records("tensors")[0]["values"], SEQUENCE[1, :, 1:])
    assert sink.records("stats")[0]["shape"] == [5, 11]


@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre", "tensor"])
def test_selection_of_a_gradient(kind: str) -> None:
    weights = torch.randn(SEQUENCE.shape, dtype=torch.float64)
    heads = {"of": 3, "take": [1]}
    _, gradient, _ = apply(SEQUENCE, weights, nn.Tanh(), kind=kind, action="modify", fn="zero", heads=heads)
    expected = weights * (1 - SEQUENCE.tanh().square())
    expected[..., 4:8] = 0.0
    assert torch.equal(gradient[..., 4:8], expected[..., 4:8])
    assert torch.allclose(gradient, expected)


def test_selection_of_parameter_gradients() -> None:
    """Units are rows of a parameter. A norm over all tensors is that of the selected rows, and a penalty is added to them."""
    torch.manual_seed(0)
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hooks = {
        "decay": {"action": "modify", "fn": "l2", "coefficient": 0.5, "units": [0]},
        "tame": {"action": "clip", "norm": 0.1, "units": [0, 1, 3]},
    }
    before = [p.detach().clone() for p in model.parameters()]
    specs = {name: {"layers": ".", "kind": "parameter_grad", **spec} for name, spec in hooks.items()}
    with instrument.attach(model, specs, optimizer=optimizer) as probe:
        model(torch.ones(2, 4)).square().sum().backward()
        gradients = [p.grad for p in model.parameters()]
        expected = [gradient.clone() for gradient in gradients if gradient is not None]
        for gradient, parameter in zip(expected, before, strict=True):
            gradient[0] += 0.5 * parameter[0]
        total = torch.nn.utils.get_total_norm([gradient[[0, 1, 3]] for gradient in expected])
        for gradient in expected:
            gradient[[0, 1, 3]] *= 0.1 / (total + 1e-6)
        optimizer.step()
        probe.end_step()
    assert_equal(gradients, expected)
    assert [p.grad for p in model.parameters()] == gradients, "they are changed in place"


def test_parameter_is_changed_in_place_where_selected() -> None:
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    spec = {"layers": ".", "kind": "step_post", "params": "weight", "action": "scale", "factor": [0.0, 2.0], "dim": 0}
    before, weight = model.weight.detach().clone(), model.weight
    hooks = {"h": {**spec, "units": [4, 1]}}
    run_step(model, hooks, torch.ones(2, 4), loss=torch.sum, optimizer=optimizer)
    before[4] *= 0.0
    before[1] *= 2.0
    assert model.weight is weight
    assert torch.equal(weight, before)


def test_function_gets_the_selected_part() -> None:
    seen: list[tuple[torch.Size, tuple[int, ...]]] = []

    def halve(tensor: Tensor, context: instrument.Context) -> Tensor:
        assert torch.equal(context.selection.of(SEQUENCE), tensor)
        seen.append((tensor.shape, context.selection.shape))
        return tensor / 2

    output, _, _ = apply(SEQUENCE, action="modify", fn=halve, positions=[1])
    assert seen == [((3, 1, 12), (3, 5, 12))]
    assert torch.equal(output[:, 1], SEQUENCE[:, 1] / 2)
    assert torch.equal(output[:, 2:], SEQUENCE[:, 2:])
    spec = {"layers": ".", "kind": "forward", "action": "modify", "fn": lambda tensor, context: None, "units": [0]}
    assert run_step(nn.Identity(), {"h": spec}, SEQUENCE)[0] is SEQUENCE


def test_scaled_gradient_keeps_the_rest_bit_identical() -> None:
    model = nn.Linear(4, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spec = {"layers": ".", "kind": "post_accumulate_grad", "action": "modify", "fn": "zero", "units": [2]}
    x = torch.randn(3, 4)
    with instrument.attach(model, {"h": spec}, optimizer=optimizer, scaler=scaler):
        scaler.scale(model(x).square().sum()).backward()
    found = model.weight.grad
    model.zero_grad()
    scaler.scale(model(x).square().sum()).backward()
    model.weight.grad[2] = 0.0
    assert torch.equal(found, model.weight.grad)


def swapped(x: Tensor) -> Tensor:
    return torch.cat([x[2:3], x[1:2], x[0:1]])


def from_first_sample(x: Tensor) -> Tensor:
    new = x.clone()
    new[1:, -1, 4:8] = x[0, -1, 4:8]
    return new


def shifted(x: Tensor) -> Tensor:
    new = x.clone()
    new[..., [0, 5, 1]] += 0.5
    return new


FUNCTIONS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "swap": ({"fn": "swap", "samples": [0, 2]}, swapped),
    "from_sample": (
        {"fn": "patch", "from_sample": 0, "samples": [1, 2], "positions": -1, "heads": {"of": 3, "take": 1}},
        from_first_sample,
    ),
    "from_sample, slice": ({"fn": "patch", "from_sample": -3, "slice": "1:, -1, 4:8"}, from_first_sample),
    "add": ({"fn": "add", "value": 0.5, "units": [0, 5, 1]}, shifted),
}


@pytest.mark.parametrize(("fields", "by_hand"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_function_equals_the_same_change_by_hand(fields: dict[str, Any], by_hand: Callable[[Tensor], Tensor]) -> None:
    weights = torch.randn(SEQUENCE.shape, dtype=torch.float64)
    reference = SEQUENCE.clone().requires_grad_()
    expected = by_hand(reference)
    (expected * weights).sum().backward()
    output, gradient, _ = apply(SEQUENCE, weights, action="modify", **fields)
    assert torch.equal(output, expected.detach())
    assert torch.allclose(gradient, reference.grad, rtol=1e-15, atol=1e-15)  # the order of a sum differs


def test_swap_exchanges_the_halves_of_a_batch() -> None:
    images = torch.arange(8.0).reshape(4, 2)
    output, _, _ = apply(images, action="modify", fn="swap")
    assert torch.equal(output, images[[2, 3, 0, 1]])


@pytest.mark.spread(6)
@pytest.mark.parametrize(
    ("selection", "later", "message"),
    [
        ({"units": [4]}, (2, 3), r"4 is out of range for dimension 1 of the tensor of shape \[2, 3\] \(allowed: -3 to 2\)"),
        ({"positions": [3]}, (2, 3, 5), r"3 is out of range for dimension 1 of the tensor of shape \[2, 3, 5\]"),
        ({"heads": {"of": 5, "take": [0]}}, (2, 4), r"5 heads do not divide dimension 1 .* \(allowed: a divisor of 4, such as 1, 2, 4\)"),
        ({"slice": ":, 4"}, (2, 3), r"slice ':, 4' is out of range for shape \[2, 3\]"),
        ({"samples": [1]}, (1, 5), r"1 is out of range for dimension 0 of the tensor of shape \[1, 5\]"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("action", [{"action": "record"}, {"action": "scale", "factor": 2.0}], ids=["record", "scale"])
def test_later_tensor_without_the_selection_is_reported(
    selection: dict[str, Any], later: tuple[int, ...], message: str, action: dict[str, Any]
) -> None:
    model = nn.Identity()
    first = (2, 5, 5) if "positions" in selection else (2, 5)
    hook = {"layers": ".", "kind": "forward", **action, **selection}
    with instrument.attach(model, {"h": hook}):
        model(torch.ones(first))
        with pytest.raises(HookError, match=message):
            model(torch.ones(later))


def test_record_of_selected_rows_of_a_shard_is_refused() -> None:
    fields = {"layers": "**", "kind": "parameter_grad", "units": [3]}
    (problem,) = shard_problems(parse_hooks({"h": {**fields, "action": "record"}}), by_fsdp2=False)
    assert problem.where == "hooks.h.units"
    assert "indices differ from those of the full tensor" in problem.message
    assert shard_problems(parse_hooks({"h": {**fields, "action": "clip", "norm": 1.0}}), by_fsdp2=False) == []


def test_sparse_gradient_with_a_selection_is_refused() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spec = {"layers": ".", "kind": "parameter_grad", "action": "scale", "factor": 2.0, "units": [1]}
    with instrument.attach(model, {"h": spec}, optimizer=optimizer):
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(HookError, match="selects elements, which requires a dense tensor"):
            optimizer.step()


@pytest.mark.parametrize(
    "function",
    [lambda x: x.softmax(-1), lambda x: nn.functional.scaled_dot_product_attention(x, x, x)],
    ids=["softmax", "attention"],
)
def test_heads_of_a_tensor_with_a_dimension_of_heads_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    x, model = torch.randn(1, 4, 3, 8), Calls(function)
    fields = {"layers": ".", "kind": "function", "functions": "*", "action": "modify", "fn": "zero"}
    expected = model(x)
    expected[:, 1] = 0
    message = r"hooks\.h\.heads: .*dimension 1 contains the 4 heads(.|\n)*units: \[\.\.\.\]"
    with pytest.raises(ConfigError, match=message):
        run_step(model, {"h": {**fields, "heads": {"of": 4, "take": [1]}}}, x)
    output, _ = run_step(model, {"h": {**fields, "units": [1]}}, x)
    assert torch.equal(output, expected)


def test_later_tensor_with_a_dimension_of_heads_is_reported() -> None:
    model = nn.Identity()
    hook = {"layers": ".", "kind": "forward", "action": "modify", "fn": "zero", "heads": {"of": 4, "take": [1]}}
    with instrument.attach(model, {"h": hook}):
        model(torch.ones(2, 3, 8))
        with pytest.raises(HookError, match=r"dimension 1 contains the 4 heads of the tensor of shape \[2, 4, 3, 8\]"):
            model(torch.ones(2, 4, 3, 8))
