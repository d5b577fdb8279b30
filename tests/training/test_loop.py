"""The training loop: steps, accumulation, evaluations, metrics and schedules."""

from __future__ import annotations

import copy
import math
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tiers import tiered
from torch import nn
from torch.utils.data._utils.collate import default_collate_fn_map
from training_runs import CONFIG, DIGITS, prepared, run_in_memory

from instrument import ConfigError, MemorySink
from instrument.config.parse import parse_config
from instrument.config.schedule import Evaluations
from instrument.probe.probe import Probe
from instrument.tasks import Outcome, WeightedMean
from instrument.training.distributed.strategies import Strategy
from instrument.training.experiment import Experiment
from instrument.training.loader import first_batch
from instrument.training.loop import Progress, evaluate, gradient_norm, run_forward, train_step

DATA = {"dataset": DIGITS, "slice": {"stop": 48}, "eval_slice": {"split": "test", "stop": 50}}


def prepare_experiment(**overrides: Any) -> Experiment:
    return prepared(**{"data": DATA, **overrides})


class Measuring:
    """A task with further metrics: the mean of the inputs, a number, and one of some batches only."""

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        images, targets = batch
        found = {"brightness": images.double().mean(), "half": 0.5}
        if len(images) == 8:
            found["last"] = np.float32(len(images))
        return Outcome(nn.functional.cross_entropy(model(images), targets), len(images), metrics=found)


def test_metrics_of_a_task_are_means_over_samples() -> None:
    experiment = prepare_experiment(
        task={"_target_": f"{__name__}.Measuring"},
        train={"steps": 1, "batch_size": 20, "eval_every": 1, "accumulate": 3},
    )
    sink, last = run_in_memory(experiment)
    rows = {row["phase"]: row["custom"] for row in sink.records("metrics")}
    for phase, samples in (("train", experiment.data.train), ("eval", experiment.data.test)):
        brightness = np.mean([image.double().mean().item() for image, _ in samples])
        assert rows[phase]["brightness"] == pytest.approx(brightness, rel=1e-12)
        assert rows[phase]["half"] == 0.5
    assert rows["train"]["last"] == 8.0
    assert last["brightness"] == rows["eval"]["brightness"]


class Ratios:
    """A task with a ratio of two sums over a batch, weighted by its denominator."""

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        images, targets = batch
        weight = targets.double().sum()
        ratio = WeightedMean(images.double().sum() / weight, weight)
        return Outcome(nn.functional.cross_entropy(model(images), targets), len(images), metrics={"ratio": ratio})


def test_metric_with_a_weight_is_the_ratio_of_the_sums() -> None:
    task = {"_target_": f"{__name__}.Ratios"}
    train = {"steps": 1, "batch_size": 20, "eval_batch_size": 20}
    experiment = prepare_experiment(task=task, train={**train, "accumulate": 2})
    _, evaluated = run_in_memory(experiment)
    _, forward = run_in_memory(prepare_experiment(task=task, train=train, mode="forward"), loop=run_forward)
    for found, samples in ((evaluated, experiment.data.test), (forward, experiment.data.train)):
        pixels, classes = (sum(float(np.double(each[i]).sum()) for each in samples) for i in (0, 1))
        assert found["ratio"] == pytest.approx(pixels / classes, rel=1e-6)


def weights(experiment: Experiment) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in experiment.model.parameters()]


def test_loop_is_bit_identical_to_a_plain_pytorch_loop() -> None:
    experiment, plain = prepare_experiment(), prepare_experiment()
    sink, _ = run_in_memory(experiment)
    losses = []
    model, optimizer = plain.model, plain.optimizer
    model.train()
    for _, (loaded,) in plain.batches:
        images, classes = loaded.batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), classes)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(torch.equal(a, b) for a, b in zip(weights(experiment), weights(plain), strict=True))
    frame = sink.frame("metrics")
    assert list(frame[frame.phase == "train"].loss) == losses


@pytest.mark.parametrize("accumulate", [1, 3])
def test_closure_of_lbfgs_is_bit_identical_to_a_plain_pytorch_loop(accumulate: int) -> None:
    record = {"layers": "1", "action": "record"}
    config: dict[str, Any] = {
        "model": {"_target_": "training_runs.Dropping"},
        "optimizer": {"_target_": "torch.optim.LBFGS", "max_iter": 4, "line_search_fn": "strong_wolfe"},
        "train": {"steps": 3, "batch_size": 16, "accumulate": accumulate},
        "hooks": {"outputs": {**record, "kind": "forward"}, "gradients": {**record, "kind": "parameter_grad"}},
    }
    recorded, bare, plain = prepare_experiment(**config), *(prepare_experiment(**{**config, "hooks": {}}) for _ in "ab")
    random_states = []
    losses: list[list[float]] = []
    for experiment in (recorded, bare):
        torch.manual_seed(1)
        sink, _ = run_in_memory(experiment)
        random_states.append(torch.get_rng_state())
        losses.append(sink.frame("metrics").query("phase == 'train'")["loss"].tolist())
        if experiment is recorded:
            stats = sink.frame("stats")
    torch.manual_seed(1)
    model, optimizer = plain.model, plain.optimizer
    assert optimizer is not None
    model.train()
    values: list[list[float]] = []
    for _, batches in plain.batches:
        values.append([])

        def closure(batches: Any = batches) -> torch.Tensor:
            optimizer.zero_grad()
            parts = []
            for images, classes in (each.batch for each in batches):
                parts.append(nn.functional.cross_entropy(model(images), classes) / len(batches))
                parts[-1].backward()
            values[-1].append(torch.stack(parts).sum().item())
            return torch.stack(parts).sum()

        optimizer.step(closure)
    assert torch.equal(*random_states)
    assert torch.equal(random_states[0], torch.get_rng_state())
    for a, b, c in zip(weights(recorded), weights(bare), weights(plain), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(b, c)
    assert losses[0] == losses[1] == pytest.approx([each[0] for each in values], rel=1e-6)
    assert accumulate > 1 or losses[0] == [each[0] for each in values]
    # Each evaluation has a number: `micro_step` in the forward pass, `call` at the boundary of the optimizer.
    for step, evaluations in enumerate(values):
        assert len(evaluations) > 2
        of_step = stats[(stats["step"] == step)]
        numbers = of_step[of_step["hook"] == "outputs"]["micro_step"].tolist()
        assert numbers == list(range(len(evaluations) * accumulate))
        calls = of_step[(of_step["hook"] == "gradients") & (of_step["path"] == "weight")]["call"].tolist()
        assert calls == list(range(len(evaluations)))


def test_closure_is_refused_with_several_processes() -> None:
    strategy = Strategy()
    strategy.processes = object()  # type: ignore[assignment]
    config = parse_config({**CONFIG, "optimizer": {"_target_": "torch.optim.LBFGS"}})
    with pytest.raises(ConfigError, match="the step of LBFGS requires a closure, which works in a single process only"):
        Experiment(config, strategy)


LANGUAGE: dict[str, Any] = {
    "model": {"_target_": "torch.nn.Embedding", "num_embeddings": 7, "embedding_dim": 7},
    "data": {"dataset": {"_target_": "distributed_models.partly_ignored"}},
    "task": {"_target_": "instrument.tasks.NextToken"},
}


def partly_labelled(split: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return inputs and classes; half of the classes are ignored, such as that of the first sample."""
    generator = torch.Generator().manual_seed(0)
    inputs, classes = torch.randn(48, 4, generator=generator), torch.randint(3, (48,), generator=generator)
    classes[::4] = classes[1::4] = -100
    return list(zip(inputs, classes, strict=True))


CLASSES: dict[str, Any] = {
    "model": {"_target_": "torch.nn.Linear", "in_features": 4, "out_features": 3},
    "data": {"dataset": {"_target_": f"{__name__}.partly_labelled"}},
}


@pytest.mark.spread(1)
@pytest.mark.parametrize("config", [LANGUAGE, CLASSES], ids=["tokens", "classes"])
@pytest.mark.parametrize("batch_size", tiered([1, 12, 20], quick=[20]))
def test_accumulation_weights_counted_targets_equally(config: dict[str, Any], batch_size: int) -> None:
    parts = prepare_experiment(
        **config, train={"steps": 1, "batch_size": batch_size, "accumulate": 48, "eval_batch_size": 1}
    )
    single_batch = prepare_experiment(**config, train={"steps": 1, "batch_size": 48, "eval_batch_size": 48})
    found, expected = (run_in_memory(experiment)[0].frame("metrics") for experiment in (parts, single_batch))
    for column in ("loss", "accuracy", "grad_norm"):
        assert list(found[column]) == pytest.approx(list(expected[column]), rel=1e-5, nan_ok=True)
    gradients = [next(experiment.model.parameters()).grad for experiment in (parts, single_batch)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def several_parts(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss of two parts, a mean over the samples."""
    return nn.functional.cross_entropy(output, targets) + 0.1 * output.square().mean()


TORCH, CLASS_WEIGHTS = "torch.nn", [0.1, 3.0, 20.0, 1.0, 1.0, 1.0, 2.0, 9.0, 0.5, 1.0]
VECTOR = {"_target_": "torch.tensor", "data": CLASS_WEIGHTS}
ONE_HOT = {"targets": "one_hot", "smoothing": 0.1}
LOSSES: dict[str, dict[str, Any]] = {
    "plain": {"_target_": f"{TORCH}.CrossEntropyLoss"},
    "weight": {"_target_": f"{TORCH}.CrossEntropyLoss", "weight": VECTOR},
    "smoothing": {"_target_": f"{TORCH}.CrossEntropyLoss", "weight": VECTOR, "label_smoothing": 0.2},
    "ignored": {"_target_": f"{TORCH}.CrossEntropyLoss", "weight": VECTOR, "ignore_index": 4},
    "nll": {"_target_": f"{TORCH}.NLLLoss", "weight": VECTOR},
    "sum": {"_target_": f"{TORCH}.CrossEntropyLoss", "weight": VECTOR, "reduction": "sum"},
    "function": {"_target_": f"{TORCH}.functional.cross_entropy", "_partial_": True, "weight": VECTOR},
    "parts": {"_target_": f"{__name__}.several_parts", "_partial_": True},
    "distributions": {"_target_": f"{TORCH}.CrossEntropyLoss", "weight": VECTOR},
    "bce": {"_target_": f"{TORCH}.BCEWithLogitsLoss", "weight": VECTOR, "pos_weight": VECTOR},
    "bce_sum": {"_target_": f"{TORCH}.BCEWithLogitsLoss", "pos_weight": VECTOR, "reduction": "sum"},
}


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", LOSSES)
def test_accumulated_losses_have_the_gradient_of_one_batch(name: str) -> None:
    task = {**CONFIG["task"], "loss": LOSSES[name], **(ONE_HOT if name in ("distributions", "bce", "bce_sum") else {})}
    config = {"task": task, "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.0}}
    experiment = prepare_experiment(
        **config, train={"steps": 1, "batch_size": 20, "accumulate": 3, "eval_batch_size": 7}
    )
    rows = run_in_memory(experiment)[0].frame("metrics").set_index("phase")
    loss: Any = experiment.task.loss  # type: ignore[attr-defined]
    for phase, dataset in (("eval", experiment.data.test), ("train", experiment.data.train)):
        images, classes = (torch.stack([torch.as_tensor(item[i]) for item in dataset]) for i in (0, 1))  # type: ignore[attr-defined, union-attr]
        logits = experiment.model(images)
        targets = classes
        if "targets" in task:
            targets = nn.functional.one_hot(classes, 10) * 0.9 + 0.01
        expected = loss(logits, targets)
        assert rows.loss[phase] == pytest.approx(expected.item(), rel=1e-5)
        counted = classes != (4 if name == "ignored" else -100)
        assert rows.accuracy[phase] == pytest.approx((logits.argmax(1) == classes)[counted].float().mean().item())
    parameters = [*experiment.model.parameters()]
    gradients = torch.autograd.grad(expected, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    assert rows.grad_norm["train"] == pytest.approx(
        sum(each.square().sum().item() for each in gradients) ** 0.5, rel=1e-5
    )


@pytest.mark.parametrize("config", [LANGUAGE, CLASSES], ids=["tokens", "classes"])
def test_step_with_only_ignored_targets_changes_nothing(config: dict[str, Any]) -> None:
    experiment = prepare_experiment(**config, train={"steps": 1, "batch_size": 1})
    before = weights(experiment)
    task, (_, group) = experiment.task, next(iter(experiment.batches))
    group[0].batch[1].fill_(-100)
    assert task.number_of_terms(group[0].batch) == 0
    with Probe(experiment.plan, MemorySink(), optimizer=experiment.optimizer) as probe:
        metrics = train_step(experiment, probe, group)
    assert (metrics["loss"], metrics["grad_norm"], metrics["accuracy"]) == (0.0, 0.0, 0.0)
    assert all(torch.equal(one, other) for one, other in zip(before, weights(experiment), strict=True))


def named_rows(split: str) -> list[UserDict[str, Any]]:
    """Return items with three entries, whose batches are `UserDict` mappings."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(150, 8, generator=generator)
    return [UserDict(id=i, rows=row, classes=int(row[0] > 0) + int(row[1] > 0)) for i, row in enumerate(rows)]


class MappingTask:
    """Custom task for batches of `named_rows`."""

    def __call__(self, model: nn.Module, batch: UserDict[str, Any]) -> Outcome:
        assert isinstance(batch, UserDict)
        return Outcome(nn.functional.cross_entropy(model(batch["rows"]), batch["classes"]), len(batch["id"]))


@pytest.mark.parametrize("accumulate", tiered([1, 2, 3], quick=[2]))
def test_mapping_batches_train_like_plain_pytorch(accumulate: int) -> None:
    overrides: dict[str, Any] = {
        "model": {"_target_": "instrument.training.models.MLP", "sizes": [8, 6, 3]},
        "data": {"dataset": {"_target_": f"{__name__}.named_rows"}},
        "task": {"_target_": f"{__name__}.MappingTask"},
        "train": {"steps": 5, "batch_size": 64, "accumulate": accumulate},
    }
    experiment, plain = prepare_experiment(**overrides), prepare_experiment(**overrides)
    run_in_memory(experiment)
    sizes = []
    plain.model.train()
    for _, group in plain.batches:
        micro_batches = [each.batch for each in group]
        plain.optimizer.zero_grad()
        total = sum(len(batch["id"]) for batch in micro_batches)  # batches of an epoch: 64, 64 and 22
        for batch in micro_batches:
            loss = nn.functional.cross_entropy(plain.model(batch["rows"]), batch["classes"])
            (loss * (len(batch["id"]) / total)).backward()
        plain.optimizer.step()
        sizes.append(total)
    assert set(sizes) == {1: {64, 22}, 2: {128, 22}, 3: {150}}[accumulate]
    assert all(torch.equal(a, b) for a, b in zip(weights(experiment), weights(plain), strict=True))


@dataclass
class GraphSample:
    """A sample with a custom collate function that concatenates rows, as for batches of graphs."""

    rows: torch.Tensor
    graph: bool = True


def concatenate(items: list[GraphSample], **_: Any) -> Any:
    rows = torch.cat([item.rows for item in items])
    return {"rows": rows, "sizes": torch.tensor([len(item.rows) for item in items])} if items[0].graph else rows


@pytest.mark.parametrize("graph", [True, False])
def test_number_of_samples_is_the_number_of_items(graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, GraphSample, concatenate)
    items = [GraphSample(torch.zeros(2, 8), graph)] * 16
    assert first_batch(items, 16).samples == 16  # type: ignore[arg-type]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("steps", "every", "at"), [(10, 0, [10]), (10, 5, [5, 10]), (10, 4, [4, 8, 10]), (3, 7, [3]), (2, 1, [1, 2])]
)
def test_evaluations_are_every_n_steps_and_at_the_end(steps: int, every: int, at: list[int]) -> None:
    assert [step for step in range(steps + 2) if step in Evaluations(steps, every)] == at
    shown: list[Progress] = []
    experiment = prepare_experiment(train={"steps": steps, "batch_size": 16, "eval_every": every})
    sink, last = run_in_memory(experiment, shown.append)
    frame = sink.frame("metrics")
    assert list(frame[frame.phase == "eval"].step) == at
    assert list(frame[frame.phase == "train"].step) == list(range(steps))
    assert [progress.step for progress in shown if progress.phase == "train"] == list(range(1, steps + 1))
    assert last["loss"] == frame[frame.phase == "eval"].loss.iloc[-1]


def test_evaluation_uses_the_full_slice_in_eval_mode() -> None:
    experiment = prepare_experiment(
        model={"_target_": "training_runs.Dropping"}, train={"steps": 1, "batch_size": 16, "eval_batch_size": 7}
    )
    model = experiment.model
    images, classes = (torch.stack([torch.as_tensor(item[i]) for item in experiment.data.test]) for i in (0, 1))  # type: ignore[attr-defined]
    for mode in (True, False):
        model.train(mode)
        before = copy.deepcopy(model.state_dict())
        with Probe(experiment.plan, MemorySink(), optimizer=experiment.optimizer) as probe:
            found = evaluate(experiment, probe)
        assert all(module.training is mode for module in model.modules())
        assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
        with torch.no_grad():
            output = copy.deepcopy(model).eval()(images)
        assert found["loss"] == pytest.approx(nn.functional.cross_entropy(output, classes).item(), rel=1e-6)
        assert found["accuracy"] == pytest.approx((output.argmax(1) == classes).float().mean().item())


def test_evaluation_interval_does_not_change_training() -> None:
    model = {"_target_": "training_runs.Dropping"}
    often, once = (
        prepare_experiment(model=model, train={"steps": 4, "batch_size": 16, "eval_every": every}) for every in (1, 0)
    )
    for experiment in (often, once):
        torch.manual_seed(5)
        run_in_memory(experiment)
    assert all(torch.equal(a, b) for a, b in zip(weights(often), weights(once), strict=True))


SCHEDULERS = [
    ({"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 1, "gamma": 0.5}, {"steps": 4}, [0.1 / 2**i for i in range(5)]),
    *(
        ({"_target_": "instrument.training.schedulers.cosine"}, length, [0.05 * (1 + math.cos(math.pi * i / 6)) for i in range(7)])
        for length in ({"steps": 6}, {"epochs": 2})
    ),
]  # fmt: skip


@pytest.mark.spread(2)
@pytest.mark.parametrize(("scheduler", "length", "rates"), SCHEDULERS)
def test_recorded_learning_rate_is_the_one_of_the_step(
    scheduler: dict[str, Any], length: dict[str, int], rates: list[float]
) -> None:
    experiment = prepare_experiment(scheduler=scheduler, train={"batch_size": 16, **length})
    recorded = run_in_memory(experiment)[0].frame("metrics").query("phase == 'train'").lr
    assert [*recorded, experiment.optimizer.param_groups[0]["lr"]] == pytest.approx(rates, rel=1e-9, abs=1e-12)


def test_gradient_norm_is_global_and_before_clipping() -> None:
    hooks = {"tame": {"layers": "**", "kind": "parameter_grad", "action": "clip", "norm": 0.01}}
    sink, _ = run_in_memory(prepare_experiment(hooks=hooks))
    effects, metrics = sink.frame("effects"), sink.frame("metrics").query("phase == 'train'")
    norms = effects.groupby("step").norm_before.agg(lambda parts: (parts**2).sum() ** 0.5)
    assert list(metrics.grad_norm) == pytest.approx(list(norms), rel=1e-5)
    assert gradient_norm(nn.Linear(1, 1)) is None
    half = nn.Linear(3000, 3, bias=False).to(torch.float16)
    half.weight.grad = torch.full_like(half.weight, 1000.0)  # the norm overflows float16
    norm = gradient_norm(half)
    assert norm is not None
    assert norm.item() == pytest.approx(1000.0 * 9000**0.5, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradient_norm_supports_sparse_complex_and_double(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.words = nn.Embedding(5, 2, sparse=True, dtype=dtype)
    model.wave = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    model.exact = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    model.words(torch.tensor([1, 1, 3])).sum().backward()  # gradients of 2 and 1 in two elements each
    model.wave.grad, model.exact.grad = torch.full_like(model.wave, 3 + 4j), torch.full_like(model.exact, 1.0)
    norm = gradient_norm(model)
    assert norm is not None
    assert norm.item() == pytest.approx((2 * 4 + 2 * 1 + 25 + 1) ** 0.5, rel=1e-6)


def test_metrics_have_seconds_and_samples_per_second() -> None:
    frame = run_in_memory(prepare_experiment())[0].frame("metrics")
    assert (frame.seconds > 0).all()
    rates = frame.samples_per_second * frame.seconds
    assert list(rates) == pytest.approx([16, 16, 16, 50])
    assert list(frame.epoch) == [0, 0, 0, 0]


def test_task_without_accuracy_has_null_accuracy() -> None:
    task = {"_target_": "instrument.tasks.Supervised", "loss": {"_target_": "torch.nn.MSELoss"}}
    data = {"dataset": {"_target_": f"{__name__}.numbers"}}
    frame = run_in_memory(prepare_experiment(task=task, data=data))[0].frame("metrics")
    assert frame.accuracy.isna().all()
    assert frame.loss.notna().all()


def numbers(split: str) -> torch.utils.data.TensorDataset:
    """Return a dataset of numeric inputs and targets."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(48, 64, generator=generator)
    return torch.utils.data.TensorDataset(inputs, inputs[:, :10])
