"""Trials of hooks on the tensors of shape inference before step 0."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hook_runs import Calls
from torch import Tensor, nn

from instrument import ConfigError, Context
from instrument.analysis.tensors_of_earlier_runs import RunArchive
from instrument.config.parse import parse_hooks
from instrument.config.schedule import Evaluations
from instrument.plan.cost import Length
from instrument.plan.hook_plan import make_plan
from instrument.plan.shape_inference import infer_shapes
from instrument.training.hook_trials import HookTrials
from instrument.training.loader import LoadedBatch, PhaseBatches


def in_place(tensor: Tensor, context: Context) -> Tensor:
    return tensor.mul_(2)


def too_short(tensor: Tensor, context: Context) -> Tensor:
    return tensor[:1]


def cut_off(tensor: Tensor, context: Context) -> Tensor:
    return tensor.detach()


def fails(tensor: Tensor, context: Context) -> Tensor:
    raise KeyError("no such thing")


def draws(tensor: Tensor, context: Context) -> Tensor:
    random.random()
    np.random.rand()
    return tensor + torch.rand((), generator=context.generator(tensor.device))


def draws_globally(tensor: Tensor, context: Context) -> Tensor:
    return tensor + torch.rand(())


LENGTH = Length(steps=20, accumulate=1, epoch_batches=20, evaluations=Evaluations(20, 10), eval_batches=1)


def batches_of(sizes: Callable[[int], Sequence[int]]) -> PhaseBatches:
    return PhaseBatches(LoadedBatch(None, [], 0), lambda _: LoadedBatch(None, [], 0), sizes, lambda _: None, None)


def try_hook(model: nn.Module, spec: dict[str, Any], *sizes: int, inputs: int = 4) -> HookTrials:
    """Return the trials of a hook on batches of the given sizes, in training and in evaluation."""
    plan = make_plan(parse_hooks({"mine": spec}), model)
    trials = HookTrials(plan, 0, RunArchive(), LENGTH, dict.fromkeys(("train", "eval"), batches_of(lambda _: sizes)))

    def forward(size: int) -> None:
        trials.on_loss(model(torch.ones(size, inputs, requires_grad=True)).sum())
        trials.on_parameters()

    for phase in ("train", "eval"):
        for size in sizes:
            with trials.on_batch(phase, LoadedBatch(None, [*range(size)], size), is_first=size == sizes[0]):
                infer_shapes(
                    model,
                    partial(forward, size),
                    training=phase == "train",
                    observe=trials.on_tensors,
                    function_sites=[site for site in plan.sites if site.spec.functions],
                    observe_function=trials.on_function,
                )
    return trials


def try_function(function: Callable[..., Any], *, model: nn.Module | None = None, **fields: Any) -> nn.Module:
    """Return the model after a trial of a function."""
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    trials = try_hook(model, {"layers": "0", "kind": "forward", "action": "modify", "fn": function, **fields}, 2)
    if problems := {**trials.failures, **trials.misfits}:
        raise ConfigError(*problems.values())
    return model


def test_function_of_kept_tensors_is_not_refused() -> None:
    try_function(lambda tensor, context: tensor + context.tensors["other"]["1"])


SIMPLE = "forward forward_pre full_backward full_backward_pre tensor parameter_grad post_accumulate_grad step_pre"
KINDS: list[dict[str, Any]] = [
    *({"kind": kind} for kind in (*SIMPLE.split(), "state_dict_post", "loss")),
    {"kind": "step_post", "role": "param"},
    {"kind": "function", "functions": "linear"},
    {"kind": "function", "functions": "linear", "role": "input"},
    {"kind": "function_grad", "functions": "linear"},
]


@pytest.mark.spread(8)
@pytest.mark.parametrize("fields", KINDS, ids=str)
@pytest.mark.parametrize("function", [too_short, in_place, fails], ids=lambda function: function.__name__)
def test_invalid_function_is_refused(function: Callable[..., Any], fields: dict[str, Any]) -> None:
    if function is too_short and fields.get("kind") == "loss":
        return  # a scalar cannot be sliced
    with pytest.raises(ConfigError) as caught:
        try_function(function, **fields)
    (problem,) = caught.value.problems
    assert problem.where == "hooks.mine.fn"
    assert problem.given == f"{__name__}.{function.__name__}"
    assert "hook 'mine'" in problem.message
    assert "a new tensor of the same shape and dtype" in str(problem.allowed)


@pytest.mark.parametrize(
    ("function", "message"), [(cut_off, "detached from the graph"), (draws_globally, "global random state")]
)
def test_function_that_changes_training_is_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        try_function(function)


def test_function_is_called_once_per_tensor_at_its_first_step() -> None:
    calls: list[tuple[str, str, int, str]] = []

    def seen(tensor: Tensor, context: Context) -> Tensor:
        calls.append((context.layer, context.path, context.step, context.moment.phase))
        return tensor * 1

    try_function(seen, layers="**", types=["Linear", "Tanh"], start=7)
    try_function(seen, kind="parameter_grad", steps=[9, 3])
    try_function(seen, phase="eval")
    assert [
        *[("0", "", 7, "train"), ("1", "", 7, "train")],
        *[("0", "weight", 3, "train"), ("0", "bias", 3, "train")],
        ("0", "", 10, "eval"),
    ] == calls


@pytest.mark.parametrize("kind", ["full_backward", "parameter_grad"])
def test_function_gets_the_value_of_its_gradient(kind: str) -> None:
    shapes: list[torch.Size] = []

    def values(tensor: Tensor, context: Context) -> Tensor:
        assert context.value is not None
        shapes.append(context.value.shape)
        assert context.value.shape == tensor.shape
        return tensor * 0

    try_function(values, kind=kind)
    assert shapes, "the trial called the function"


def test_trial_keeps_values_and_random_states() -> None:
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    model = try_function(draws, layers="**", types=["Linear"])
    after_trial = torch.rand(3)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[union-attr]
    torch.manual_seed(0)
    plain = nn.Linear(4, 3)
    torch.testing.assert_close(model[0].weight, plain.weight, rtol=0, atol=0)
    assert torch.equal(after_trial, torch.rand(3))
    assert model[0].weight.grad is None


def test_action_runs_on_the_first_and_on_the_smallest_batch() -> None:
    shapes: list[tuple[int, ...]] = []

    def even(tensor: Tensor, context: Context) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor.view(2, -1, *tensor.shape[1:]).flip(0).flatten(0, 1)

    spec = {"layers": "0", "kind": "forward", "action": "modify", "fn": even}
    model = nn.Sequential(nn.Linear(4, 3))
    trials = try_hook(model, spec, 6, 3)
    assert shapes == [(6, 3), (3, 3)]
    assert trials.smallest_batch_size("train") == 3
    problem = trials.failures["mine"]
    assert problem.where == "hooks.mine.fn"
    assert "the tensor is float32 [3, 3]" in problem.message
    trials = try_hook(model, {**spec, "phase": "eval"}, 6, 4)
    assert not trials.failures
    # Also without a hook that sees it, so that hooks change no count of calls.
    assert trials.smallest_batch_size("train") == 4


@pytest.mark.parametrize(
    "fields", [{"fn": "noise", "std": 1.0}, {"fn": "quantize", "to": "int8"}], ids=lambda each: each["fn"]
)
@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad], ids=["vmap", "grad"])
def test_module_in_a_transform_is_not_tried(transform: Callable[..., Any], fields: dict[str, Any]) -> None:
    spec = {"layers": "inner", "kind": "forward", "action": "modify", **fields}
    # A hook counts a miss there.
    model = Calls(lambda inner, x: transform(lambda row: inner(row).sum())(x), inner=nn.Linear(4, 4))
    trials = try_hook(model, spec, 2)
    assert not trials.failures
    assert not trials.misfits


def test_tensors_that_hooks_cannot_read_are_not_tried() -> None:
    meta = Calls(lambda x: x.to("meta"))
    model = Calls(lambda meta, linear, x: (meta(x), linear(x))[1], meta=meta, linear=nn.Linear(4, 3))
    spec = {"layers": "*", "kind": "forward", "action": "modify", "fn": "noise", "std": 1.0}
    assert not try_hook(model, spec, 2).failures


def test_moments_of_a_long_run_are_found_in_its_first_epoch() -> None:
    asked: list[int] = []

    def sizes(step: int) -> tuple[int, ...]:
        asked.append(step)
        return (2,)

    spec = {"layers": "0", "kind": "forward", "action": "scale", "factor": 2.0}
    plan = make_plan(parse_hooks({"mine": spec}), nn.Sequential(nn.Linear(4, 3)))
    length = Length(steps=10**12, accumulate=1, epoch_batches=3, evaluations=Evaluations(10**12, 10), eval_batches=1)
    HookTrials(plan, 0, RunArchive(), length, {"train": batches_of(sizes)})
    assert asked == [0, 1, 2]


def test_function_of_action_call_is_not_tried() -> None:
    spec = {"layers": "0", "kind": "forward", "action": "call", "fn": fails}
    trials = try_hook(nn.Sequential(nn.Linear(4, 3)), spec, 2)
    assert not trials.failures
    units = {**spec, "units": [3]}
    assert try_hook(nn.Sequential(nn.Linear(4, 3)), units, 2).misfits["mine"].where == "hooks.mine.units"


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    "fields",
    [
        {"action": "record", "stats": "all", "tensors": True},
        {"action": "clip", "norm": 1.0},
        {"action": "modify", "fn": "noise", "std": 1.0, "kind": "parameter_grad"},
        {"action": "clip", "norm": 1.0, "kind": "parameter_grad"},
        {"action": "record", "stats": "all", "kind": "step_post", "role": "update"},
        {"action": "record", "kind": "step_post", "role": "state.exp_avg"},
        {"action": "scale", "factor": 0.5, "when": {"stat": "l2", "above": 1}},
    ],
    ids=str,
)
def test_trial_of_a_built_in_action_leaves_the_model_unchanged(fields: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    trials = try_hook(model, {"layers": "*", "kind": "forward", **fields}, 4, 2)
    assert not trials.misfits
    assert not trials.failures
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training


def test_selection_of_an_intervention_ignores_integers() -> None:
    model = Calls(lambda inner, x: inner(x)[0], inner=Calls(lambda x: (x * 2, x.argmax(1))))
    zero = {"layers": "inner", "action": "modify", "fn": "zero", "units": [4]}
    for fields in ({"kind": "forward"}, {"kind": "function", "functions": ["mul", "argmax"]}):
        trials = try_hook(model, {**zero, **fields}, 2, inputs=5)
        assert not trials.misfits
        assert not trials.failures
