"""Fields that name dimensions, indices and dtypes, checked against the tensors that a hook receives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hook_runs import Calls
from torch import Tensor, nn

import instrument
from instrument import ConfigError
from instrument.config.parse import parse_hooks
from instrument.errors import Problem
from instrument.plan.hook_plan import make_plan
from instrument.plan.tensor_checks import check_parameters, misfit
from instrument.values.nested import iter_tensors


class Net(nn.Module):
    """`conv` [2, 3, 4, 4], `fc` [2, 5], `rnn` ([2, 1, 6], [1, 2, 6]), `wave` complex [2, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.fc = nn.Linear(48, 5)
        self.rnn = nn.GRU(5, 6, batch_first=True)
        self.wave = Calls(lambda x: torch.complex(x, x))

    def forward(self, images: Tensor) -> Tensor:
        features = self.fc(self.conv(images).flatten(1))
        self.wave(features)
        return self.rnn(features.unsqueeze(1))[0].sum()


BATCH = torch.zeros(2, 1, 4, 4)
RECORD = {"action": "record"}
KEEP = {"action": "record", "tensors": True}
DEAD = {"action": "record", "stats": ["dead_fraction"]}
SCALE = {"action": "scale"}
HEADS = {"heads": {"of": 2, "take": [0]}}
ZERO = {"action": "modify", "fn": "zero"}
MEAN = {"action": "modify", "fn": "mean"}
SWAP = {"action": "modify", "fn": "swap"}
COPY = {"action": "modify", "fn": "patch", "units": [0]}
PATCH = {"action": "modify", "fn": "patch", "run": "nowhere"}
WEIGHT = {"kind": "parameter_grad", "params": "weight"}


def problem(layers: str, fields: dict[str, Any]) -> Problem | None:
    model = Net()
    plan = make_plan(parse_hooks({"h": {"layers": layers, "kind": "forward", **fields}}), model)
    try:
        check_parameters(plan)
    except ConfigError as error:
        (found,) = error.problems
        return found
    if plan.specs["h"].kind == "loss":
        return misfit(plan.sites[0], "", torch.zeros(()))
    problems = []
    for site in plan.sites:
        is_input = "input" in site.spec.tensor_role

        def seen(_: nn.Module, inputs: Any, output: Any, site: Any = site, is_input: bool = is_input) -> None:
            for path, tensor in iter_tensors(inputs[0] if is_input else output):
                if site.spec.path in (None, path):
                    problems.append(misfit(site, path, tensor))

        if site.spec.definition.family == "module":
            site.layer.module.register_forward_hook(seen)
    model(BATCH)
    return next(filter(None, problems), None)


@pytest.mark.parametrize(
    ("layers", "fields", "field", "message", "allowed"),
    [
        ("fc", {**DEAD, "unit_dim": 99}, "unit_dim", "dim 99 is out of range for the output of 'fc'", "-2 to 1"),
        ("fc", {**DEAD, "unit_dim": -99}, "unit_dim", "dim -99 is out of range", "-2 to 1"),
        (".", {**DEAD, "unit_dim": 0}, "unit_dim", "output of '.', which has shape []", "a scalar has no dimensions"),
        (".", {**DEAD, "kind": "loss", "unit_dim": 0}, "unit_dim", "the loss", "a scalar has no dimensions"),
        ("fc", {**DEAD, **WEIGHT, "params": "bias", "unit_dim": 1}, "unit_dim", "param_grad of 'fc.bias'", "-1 to 0"),
        ("fc", {**KEEP, "slice": "2"}, "slice", "2 is out of range for dimension 0", "-2 to 1"),
        ("fc", {**KEEP, "slice": "0:3"}, "slice", "0:3 is out of range for dimension 0", "samples: N"),
        ("fc", {**KEEP, "slice": ":, -6:"}, "slice", "-6: is out of range for dimension 1", "-5 to 5"),
        ("fc", {**KEEP, "slice": ":, 3:3"}, "slice", "3:3 selects nothing along dimension 1", "a start before"),
        ("fc", {**KEEP, "slice": "0, 0, 0"}, "slice", "the slice has 3 dimensions", "at most 2 parts"),
        ("fc", {**KEEP, "samples": 1, "slice": "1"}, "slice", "1 is out of range for dimension 0", "-1 to 0"),
        (".", {**KEEP, "slice": "0:1"}, "slice", "the slice has 1 dimensions", "a scalar cannot be sliced"),
        ("fc", {**KEEP, **WEIGHT, "slice": "5"}, "slice", "param_grad of 'fc.weight'", "-5 to 4"),
        ("wave", {**KEEP, "dtype": "float32"}, "dtype", "float32 cannot represent the complex values", "complex64 is not converted"),
        ("fc", {**SCALE, "factor": [1, 2, 3]}, "factor", "3 factors do not fit dimension 1 of the output", "5 factors"),
        ("fc", {**SCALE, "factor": [1, 2], "dim": 3}, "dim", "dim 3 is out of range", "-2 to 1"),
        (".", {**SCALE, "factor": [1.0]}, "dim", "dim 1 is out of range", "one number as 'factor'"),
        ("fc", {**SCALE, "kind": "full_backward", "factor": [1, 2]}, "factor", "grad_input of 'fc'", "48 factors"),
        ("fc", {**SCALE, "kind": "tensor", "factor": [1, 2]}, "factor", "of the output of 'fc'", "5 factors"),
        ("fc", {**SCALE, **WEIGHT, "factor": [1, 2]}, "factor", "param_grad of 'fc.weight'", "48 factors"),
        ("fc", {**SCALE, "kind": "step_post", "role": "param", "factor": [1, 2]}, "factor", "param of 'fc.", "48 factors"),
        ("fc", {**SCALE, "kind": "state_dict_post", "factor": [1, 2]}, "factor", "entry of 'fc.weight'", "48 factors"),
        ("fc", {**MEAN, "dim": 55}, "dim", "dim 55 is out of range", "-2 to 1"),
        ("fc", {**MEAN, "dim": [0, -3]}, "dim", "dim -3 is out of range", "-2 to 1"),
        ("fc", {**MEAN, "dim": [1, -1]}, "dim", "the same dimension is given twice", "-2 to 1"),
        ("fc", {**PATCH, "slice": ":, 5"}, "slice", "5 is out of range for dimension 1", "-5 to 4"),
        ("conv|fc", {**MEAN, "dim": 3}, "dim", "the output of 'fc', which has shape [2, 5]", "-2 to 1"),
        ("conv", {**ZERO, "units": [0, 3]}, "units", "3 is out of range for dimension 1 of the output of 'conv'", "-3 to 2"),
        ("conv", {**ZERO, "units": [2, -1]}, "units", "two indices are the same along dimension 1", "each index once"),
        ("conv", {**ZERO, "units": [0], "unit_dim": 4}, "unit_dim", "dim 4 is out of range", "-4 to 3"),
        ("conv", {**ZERO, "positions": [0]}, "positions", "requires a dimension of sequence positions [N, T, ...] in", "'slice'"),
        ("conv", {**ZERO, "unit_dim": -1, "units": [0], **HEADS}, "heads", "'units' and 'heads' both select along dimension 3", "one of"),
        ("fc", {**ZERO, "positions": [0]}, "positions", "which has shape [2, 5]", "'slice' for any dimension"),
        ("fc", {**ZERO, "heads": {"of": 4, "take": [0]}}, "heads.of", "4 heads do not divide dimension 1", "a divisor of 5, such as 1, 5"),
        ("fc", {**ZERO, "heads": {"of": 5, "take": [5]}}, "heads.take", "5 is out of range for the 5 heads of", "-5 to 4"),
        ("conv", {**ZERO, "heads": {"of": 3, "take": [0]}}, "heads", "dimension 1 contains the 3 heads of", "'units: [...]'"),
        ("fc", {**ZERO, "samples": [2]}, "samples", "2 is out of range for dimension 0", "-2 to 1"),
        ("fc", {**ZERO, "slice": "[:, 5]"}, "slice", "5 is out of range for dimension 1", "-5 to 4"),
        (".", {**ZERO, "units": [0]}, "units", "'units' requires a dimension of units in the output of '.', which has shape []", "'slice'"),
        ("fc", {**SCALE, "factor": [1, 2], "units": [0, 2, 4]}, "factor", "2 factors do not fit dimension 1", "3 factors"),
        ("fc", {**DEAD, "unit_dim": 1, "slice": "0"}, "unit_dim", "dim 1 is out of range", "-1 to 0"),
        ("fc", {**ZERO, **WEIGHT, "units": [5]}, "units", "5 is out of range for dimension 0 of the param_grad of 'fc.weight'", "-5 to 4"),
        ("fc", {**SWAP, "samples": [0]}, "fn", "swap requires an even number of samples in the output of 'fc'", "two or more"),
        (".", SWAP, "fn", "swap requires an even number of samples", "two or more"),
        ("fc", {**COPY, "from_sample": 2}, "from_sample", "2 is out of range for dimension 0", "-2 to 1"),
        ("fc", {**PATCH, "units": [7]}, "units", "7 is out of range for dimension 1", "-5 to 4"),
        ("rnn", {**SCALE, "factor": [1]}, "factor", "output of 'rnn' at path '1', which has shape [1, 2, 6]", "2 factors"),
    ],
)  # fmt: skip
def test_field_that_does_not_fit_is_refused(
    layers: str, fields: dict[str, Any], field: str, message: str, allowed: str
) -> None:
    found = problem(layers if "|" not in layers else f"re:{layers}", fields)
    assert found is not None
    assert found.where == f"hooks.h.{field}"
    assert message in found.message
    assert allowed in str(found.allowed)
    assert found.given is not None


@pytest.mark.parametrize(
    ("layers", "fields"),
    [
        ("fc", {**DEAD, "unit_dim": -2}),
        ("fc", {**KEEP, "slice": "-2:2, ::2"}),
        ("fc", {**KEEP, "samples": 99, "slice": "1, 4"}),
        ("fc", {**KEEP, **WEIGHT, "slice": "4, 47"}),
        (".", {**KEEP, "samples": 9}),
        ("wave", KEEP),
        ("fc", {**SCALE, "factor": [1, 2, 3, 4, 5]}),
        ("fc", {**SCALE, "factor": [1, 2], "dim": -2}),
        ("fc", {**SCALE, "factor": {0: 1.0, 9: 0.0}}),
        ("rnn", {**SCALE, "path": "0", "factor": [1]}),
        ("rnn", {**ZERO, "path": "0", "positions": [-1], "samples": [1, 0], "heads": {"of": 3, "take": [-1]}}),
        ("fc", {**SCALE, "factor": [1, 2], "units": [0, 4]}),
        ("conv", {**DEAD, "units": 0, "unit_dim": 3}),
        ("fc", {**MEAN, "dim": None}),
        (".", {**MEAN, "dim": 0}),
        ("conv|fc", {**MEAN, "dim": [0, 1]}),
        ("fc", {**KEEP, "kind": "step_post", "role": "state.exp_avg", "params": "bias", "slice": "4"}),
    ],
)
def test_field_that_fits_is_accepted(layers: str, fields: dict[str, Any]) -> None:
    assert problem(layers if "|" not in layers else f"re:{layers}", fields) is None


def test_every_spec_that_does_not_fit_is_reported() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    specs = {name: {"layers": "0", "kind": "parameter_grad", **MEAN, "dim": 7} for name in ("a", "b")}
    with pytest.raises(ConfigError) as caught:
        check_parameters(make_plan(parse_hooks(specs), model))
    assert [found.where for found in caught.value.problems] == ["hooks.a.dim", "hooks.b.dim"]


@pytest.mark.spread(6)
@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({**SCALE, "factor": [1, 2, 3]}, "hooks.h.factor"),
        ({**MEAN, "dim": 55}, "hooks.h.dim"),
        ({**DEAD, "unit_dim": 9}, "hooks.h.unit_dim"),
        ({**KEEP, "slice": "100:200"}, "hooks.h.slice"),
        ({**KEEP, "slice": "0, 0, 0"}, "hooks.h.slice"),
        ({**SCALE, "kind": "full_backward", "factor": [1, 2, 3]}, "hooks.h.factor"),
        ({**ZERO, "heads": {"of": 2, "take": [0]}}, r"hooks.h.heads.of(.|\n)*given    2\n(.|\n)*a divisor of 5"),
    ],
)
def test_attach_refuses_a_misfit_at_the_first_call(fields: dict[str, Any], where: str) -> None:
    model = nn.Sequential(nn.Linear(4, 5))
    specs = {"h": {"layers": "0", "kind": "forward", **fields}}
    with pytest.raises(ConfigError, match=where), instrument.attach(model, specs):
        model(torch.zeros(2, 4, requires_grad=True)).sum().backward()
    assert not model[0]._forward_hooks


def test_attach_refuses_a_parameter_misfit_before_any_call() -> None:
    model = nn.Sequential(nn.Linear(4, 5))
    specs = {"h": {"layers": "0", "kind": "parameter_grad", **SCALE, "factor": [1, 2, 3]}}
    entered = []
    with (
        pytest.raises(ConfigError, match=r"hooks\.h\.factor"),
        instrument.attach(model, specs, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)),
    ):
        entered.append(True)
    assert not entered


def test_attach_defers_the_check_of_lazy_parameters() -> None:
    model = nn.Sequential(nn.LazyLinear(5))
    check_parameters(make_plan(parse_hooks({"h": {"layers": "0", **WEIGHT, **SCALE, "factor": [1]}}), model))


def test_slice_of_a_smaller_later_tensor_is_clamped() -> None:
    """The last batch of an epoch may be smaller: a slice valid for the first tensor is clamped as in NumPy."""
    model = nn.Identity()
    with instrument.attach(model, {"h": {"layers": ".", "kind": "forward", **KEEP, "slice": "0:4"}}) as probe:
        for samples in (4, 2):
            model(torch.ones(samples, 3))
            probe.end_step()
    assert [row["shape"] for row in probe.sink.records("tensors")] == [[4, 3], [2, 3]]
