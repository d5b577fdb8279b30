"""`mode: forward`: rows, gradients and metrics of a model that is not trained, and its unchanged state."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hook_runs import Calls
from state_comparison import assert_same_tables, identical
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from training_runs import CONFIG, Dropping, prepared, run_in_memory, stop_and_resume, train_here

import instrument
from instrument import ConfigError, MemorySink
from instrument.probe.probe import Probe
from instrument.tasks import Outcome
from instrument.tasks.model_output import with_input_gradients
from instrument.training.checkpoint import Checkpoints
from instrument.training.experiment import Experiment
from instrument.training.loop import run_forward

SAMPLES, BATCH = 50, 16
OUTPUTS = {"layers": "**", "kind": "forward", "action": "record", "tensors": True}
SALIENCY = {"layers": "0", "kind": "full_backward", "action": "record", "tensors": True}
WEIGHTS = {"layers": "**", "kind": "parameter_grad_micro", "action": "record", "tensors": True}


class TwoOutputs(Dropping):
    """A model that returns its logits in a mapping, and changes its input in place."""

    def forward(self, images: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        images.mul_(2.0)
        logits = super().forward(images)
        return {"logits": logits, "probabilities": logits.softmax(-1)}


def parameterless() -> nn.Module:
    return Calls(lambda images: images.flatten(1)[:, :10])


class CallsPart:
    """A task that calls only a submodule of the model."""

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        loss = model.get_submodule("1")(batch[0].flatten(1)).mean()
        return Outcome(loss, len(batch[0]))


DATA = {**CONFIG["data"], "slice": {"stop": SAMPLES}}


def prepare_forward(**changes: Any) -> Experiment:
    model = {"_target_": "training_runs.Dropping"}
    return prepared(**{"mode": "forward", "model": model, "data": DATA, **changes})


def executed(experiment: Experiment) -> tuple[MemorySink, Any]:
    return run_in_memory(experiment, loop=run_forward)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def batches_of(experiment: Experiment) -> list[list[Tensor]]:
    """Return the batches of one pass in the order of the dataset."""
    samples = [experiment.data.train[i] for i in range(SAMPLES)]
    return [
        [torch.stack([image for image, _ in part]), torch.tensor([int(target) for _, target in part])]
        for part in (samples[start : start + BATCH] for start in range(0, SAMPLES, BATCH))
    ]


def values_at(sink: MemorySink, **where: Any) -> list[np.ndarray]:
    """Return the recorded tensors in these rows."""
    rows = [row for row in sink.records("tensors") if all(row[key] == value for key, value in where.items())]
    return [row["values"].numpy() for row in rows]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "changes",
    [
        *({"forward": settings} for settings in ({}, {"grad": True}, {"grad": True, "of": "[:, 3]"}, {"passes": 2})),
        {"model": {"_target_": "training_runs.Stateful"}},
    ],
    ids=str,
)
def test_forward_changes_no_parameter_and_no_buffer(changes: dict[str, Any]) -> None:
    experiment = prepare_forward(hooks={"outputs": OUTPUTS}, **changes)
    before, random = state_of(experiment.model), torch.get_rng_state()
    executed(experiment)
    assert identical(before, state_of(experiment.model))
    assert all(parameter.grad is None for parameter in experiment.model.parameters())
    assert torch.equal(random, torch.get_rng_state())


class Numbered(IterableDataset[Any]):
    """An iterable dataset with five samples."""

    def __init__(self, split: str) -> None:
        self.split = split

    def __iter__(self) -> Iterator[Any]:
        return ((torch.full((1, 8, 8), float(index)), index) for index in range(5))


def test_stream_ends_each_pass() -> None:
    data = {"dataset": {"_target_": f"{__name__}.Numbered"}, "slice": {"start": 1, "stop": 9}}
    hooks = {"outputs": {**OUTPUTS, "layers": "."}}
    experiment = prepare_forward(data=data, train={"steps": 1, "batch_size": 3}, forward={"passes": 2}, hooks=hooks)
    sink = MemorySink()
    with Probe(experiment.plan, sink) as probe:
        run_forward(experiment, probe, lambda _: None)
    samples = sink.frame("samples")
    assert samples["sample"].tolist() == samples["target"].tolist() == [1, 2, 3, 4] * 2
    assert samples["epoch"].tolist() == [0] * 4 + [1] * 4
    assert "the dataset ended after 4 of at most 6 batches" in probe.warnings[-1]


class HalfIgnored:
    """A task whose batches have no counted term, except the first one."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        return Outcome(model(batch[0]).mean() * 0 + 2.0 * self.number_of_terms(batch) / BATCH, len(batch[0]))

    def number_of_terms(self, batch: Any) -> int:
        return BATCH if torch.equal(batch[1], self.first(batch)) else 0

    def first(self, batch: Any) -> Tensor:
        return torch.arange(len(batch[1])) % 10


def test_batch_without_terms_has_no_weight_in_the_mean() -> None:
    experiment = prepare_forward(task={"_target_": f"{__name__}.HalfIgnored"}, hooks={})
    terms = [experiment.task.number_of_terms(batch) for batch in batches_of(experiment)]  # type: ignore[attr-defined]
    assert terms[0] == BATCH
    assert 0 in terms
    _, metrics = executed(experiment)
    assert metrics["loss"] == 2.0


def test_class_weights_do_not_weight_the_accuracy() -> None:
    weight = {"_target_": "torch.tensor", "data": [0.1, 3.0, 20.0, 1.0, 1.0, 1.0, 2.0, 9.0, 0.5, 1.0]}
    for reduction in ("mean", "sum"):
        loss = {"_target_": "torch.nn.CrossEntropyLoss", "weight": weight, "reduction": reduction}
        experiment = prepare_forward(task={"_target_": "instrument.tasks.Supervised", "loss": loss}, hooks={})
        inputs, classes = (torch.cat([batch[i] for batch in batches_of(experiment)]) for i in (0, 1))
        logits = copy.deepcopy(experiment.model).eval()(inputs)
        _, metrics = executed(experiment)
        assert metrics["loss"] == pytest.approx(experiment.task.loss(logits, classes).item(), rel=1e-5)  # type: ignore[attr-defined]
        assert metrics["accuracy"] == pytest.approx((logits.argmax(1) == classes).float().mean().item())


def test_forward_rows_equal_those_of_a_hand_written_hook() -> None:
    experiment = prepare_forward(hooks={"outputs": OUTPUTS}, forward={"passes": 2})
    plain = copy.deepcopy(experiment.model).eval()
    seen: list[Tensor] = []
    plain[1].register_forward_hook(lambda _, __, output: seen.append(output))
    losses, hits = [], []
    with torch.no_grad():
        for images, classes in batches_of(experiment) * 2:
            scores = plain(images)
            losses.append(nn.functional.cross_entropy(scores, classes).item())
            hits.append((scores.argmax(-1) == classes).float().mean().item())
    sink, means = executed(experiment)
    found = values_at(sink, layer="1")
    assert [values.tobytes() for values in found] == [tensor.numpy().tobytes() for tensor in seen]
    metrics = sink.frame("metrics")
    assert list(metrics.loss) == losses
    assert list(metrics.accuracy) == pytest.approx(hits)
    assert set(metrics.phase) == {"forward"}
    assert list(metrics.step) == [*range(8)]
    assert list(metrics.epoch) == [0] * 4 + [1] * 4
    assert metrics.lr.isna().all()
    rows = sink.frame("stats")
    assert (set(rows.phase), set(rows.micro_step)) == ({"forward"}, {0})
    sizes = [16, 16, 16, 2] * 2
    assert means["loss"] == pytest.approx(np.average(losses, weights=sizes))
    assert means["accuracy"] == pytest.approx(np.average(hits, weights=sizes))
    assert means["seconds"] == pytest.approx(metrics.seconds.sum())


@pytest.mark.spread(1)
@pytest.mark.parametrize("of", [None, "[:, 3]"])
def test_gradients_equal_those_of_hand_written_saliency(of: str | None) -> None:
    experiment = prepare_forward(hooks={"pixels": SALIENCY, "weights": WEIGHTS}, forward={"grad": True, "of": of})
    plain = copy.deepcopy(experiment.model).eval()
    pixels, weights = [], []
    for images, classes in batches_of(experiment):
        images.requires_grad_()
        plain.zero_grad()
        scores = plain(images)
        (nn.functional.cross_entropy(scores, classes) if of is None else scores[:, 3].sum()).backward()
        assert images.grad is not None
        pixels.append(images.grad.numpy().tobytes())
        assert plain[1].weight.grad is not None
        weights.append(plain[1].weight.grad.numpy().tobytes())
    sink, _ = executed(experiment)
    assert [values.tobytes() for values in values_at(sink, hook="pixels")] == pixels
    assert [values.tobytes() for values in values_at(sink, layer="1", path="weight")] == weights


def test_output_unit_of_a_mapping_is_selected() -> None:
    hooks = {"pixels": {**SALIENCY, "layers": "1", "role": "grad_output"}}
    target = {"_target_": f"{__name__}.TwoOutputs"}
    experiment = prepare_forward(model=target, hooks=hooks, forward={"grad": True, "of": "probabilities[:, -1]"})
    plain = copy.deepcopy(experiment.model).eval()
    images = batches_of(experiment)[0][0]
    seen: list[Tensor] = []

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(seen.append)

    plain[1].register_forward_hook(watch)
    plain(images)["probabilities"][:, -1].sum().backward()
    sink, _ = executed(experiment)
    assert values_at(sink, step=0)[0].tobytes() == seen[0].numpy().tobytes()


@pytest.mark.parametrize(
    ("changes", "where", "words"),
    [
        ({"forward": {"grad": True, "of": "logit[:, 3]"}}, "forward.of", "the model's output has no such tensor"),
        ({"forward": {"grad": True, "of": "[:, 10]"}}, "forward.of", r"the slice is outside of the tensor of shape \[16, 10\]"),
        ({"forward": {"grad": True, "of": "[:, 3:1]"}}, "forward.of", r"the slice selects no element of the tensor of shape \[16, 10\]"),
        ({"forward": {"grad": True, "of": "[:, 3]"}, "task": {"_target_": f"{__name__}.CallsPart"}}, "forward.of", "only submodules"),
        ({"data": {"dataset": {"_target_": f"{__name__}.Numbered"}}}, "data.slice.stop", r"data\.slice\.stop"),
        ({"model": {"_target_": f"{__name__}.parameterless"}, "mode": "train"}, "model", "set mode=forward"),
        *(
            ({"task": {"_target_": "instrument.tasks.ForwardOnly"}, **changes}, "task", f"returned no loss.*{fix}")
            for changes, fix in (({"mode": "train"}, "set mode=forward"), ({"forward": {"grad": True}}, r"forward\.of"))
        ),
    ],
)  # fmt: skip
def test_invalid_forward_is_reported(changes: dict[str, Any], where: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare_forward(**changes)
    (problem,) = caught.value.problems
    assert problem.where == where
    assert re.search(words, str(problem))


def backwards(dataset: Any) -> list[int]:
    """Return the indices from the last to the first."""
    return [*range(len(dataset) - 1, -1, -1)]


def as_entries(samples: list[Any]) -> dict[str, Tensor]:
    """Join samples into a mapping."""
    images, classes = zip(*samples, strict=True)
    return {"input": torch.stack(images), "labels": torch.tensor([int(each) for each in classes])}


class Classifier(Dropping):
    """A model with the interface of those of Transformers."""

    def forward(self, input: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"logits": super().forward(input)}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_forward_takes_mappings_in_the_order_of_a_sampler(workers: int) -> None:
    data = {
        **DATA,
        "sampler": {"_target_": f"{__name__}.backwards"},
        "collate_fn": {"_target_": f"{__name__}.as_entries"},
        "num_workers": workers,
    }
    outputs = {"outputs": {**OUTPUTS, "layers": "4"}}
    model, task = {"_target_": f"{__name__}.Classifier"}, {"_target_": "instrument.tasks.HuggingFace"}
    experiment = prepare_forward(model=model, task=task, data=data, forward={"passes": 2}, hooks=outputs)
    plain = prepare_forward(hooks=outputs)
    images, classes = (torch.cat(parts) for parts in zip(*batches_of(plain), strict=True))
    with torch.no_grad():
        scores = plain.model.eval()(images.flip(0))
    sink, means = executed(experiment)
    samples = sink.frame("samples")
    assert samples["sample"].tolist() == [*range(SAMPLES - 1, -1, -1)] * 2
    assert samples["target"].tolist() == classes.flip(0).tolist() * 2
    assert np.allclose(np.concatenate(values_at(sink)), torch.cat([scores, scores]), atol=1e-6)
    assert means["loss"] == pytest.approx(nn.functional.cross_entropy(scores, classes.flip(0)).item(), rel=1e-5)


@pytest.mark.slow
def test_task_without_a_loss_runs_in_forward() -> None:
    task = {"_target_": "instrument.tasks.ForwardOnly"}
    sink, means = executed(prepare_forward(task=task, hooks={"outputs": OUTPUTS}))
    expected, _ = executed(prepare_forward(hooks={"outputs": OUTPUTS}))
    assert [row.tobytes() for row in values_at(sink)] == [row.tobytes() for row in values_at(expected)]
    assert (means["loss"], means["accuracy"]) == (None, None)
    gradients = {"grad": True, "of": "[:, 3]"}
    seen, _ = executed(prepare_forward(task=task, hooks={"pixels": SALIENCY}, forward=gradients))
    known, _ = executed(prepare_forward(hooks={"pixels": SALIENCY}, forward=gradients))
    assert [row.tobytes() for row in values_at(seen)] == [row.tobytes() for row in values_at(known)]


def test_forward_runs_a_model_without_parameters() -> None:
    target = {"_target_": f"{__name__}.parameterless"}
    sink, means = executed(prepare_forward(model=target, hooks={"outputs": OUTPUTS}))
    assert len(sink.frame("stats")) == 4
    assert means["loss"] is not None
    hooks = {"pixels": {**SALIENCY, "layers": "."}}
    sink, _ = executed(prepare_forward(model=target, hooks=hooks, forward={"grad": True}))
    assert len(sink.frame("stats")) == 4


def test_interventions_act_in_forward() -> None:
    ablate = {"ablate": {"layers": "4", "kind": "forward", "action": "modify", "fn": "zero"}}
    _, means = executed(prepare_forward(hooks=ablate))
    assert means["loss"] == pytest.approx(np.log(10), rel=1e-6)


def test_loss_hooks_see_the_output_unit() -> None:
    hooks = {"loss": {"kind": "loss", "action": "record", "tensors": True}}
    experiment = prepare_forward(hooks=hooks, forward={"grad": True, "of": "[:, 3]"})
    with torch.no_grad():
        sums = [experiment.model.eval()(images)[:, 3].sum().item() for images, _ in batches_of(experiment)]
    sink, _ = executed(experiment)
    assert [values.item() for values in values_at(sink)] == sums


def test_input_gradients_leave_targets_and_integers_unchanged() -> None:
    images, scores, tokens = torch.rand(2, 3), torch.rand(2), torch.ones(2, dtype=torch.int64)
    changed = with_input_gradients((images, tokens, scores))
    assert [tensor.requires_grad for tensor in changed] == [True, False, False]
    assert changed[0] is not images
    assert torch.equal(changed[0], images)
    assert changed[2] is scores
    assert with_input_gradients({"x": images})["x"].requires_grad
    assert with_input_gradients([images])[0].requires_grad


COMMAND = [
    *("model=mlp", "model.sizes=[64,16,10]", "data=digits", "data.slice.stop=200", "train.batch_size=20"),
    *("mode=forward", "hooks=activations", "hooks.activations.every=2"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with an uninterrupted run, and an equal run that failed at batch 8 and was resumed."""
    folder = tmp_path_factory.mktemp("forward")
    command = [*COMMAND, "train.checkpoint.every=3"]
    train_here(folder / "whole", *command, "report=true")
    stop_and_resume(folder / "stopped", *command, calls=8, function="loop.forward_step")
    return folder


@pytest.mark.slow
def test_resumed_forward_run_equals_an_uninterrupted_run(runs: Path) -> None:
    whole, resumed = (instrument.load(runs / name) for name in ("whole", "stopped"))
    assert_same_tables(whole, resumed, "stats", "coverage", "layers", "metrics")
    assert list(resumed.events[resumed.events.rule == "resumed"].message) == ["the run continues after 6 steps"]
    assert [whole.info["metrics"][name] for name in ("loss", "accuracy")] == [
        resumed.info["metrics"][name] for name in ("loss", "accuracy")
    ]


@pytest.mark.slow
def test_forward_checkpoint_contains_no_weights(runs: Path) -> None:
    state = Checkpoints(runs / "whole").load()
    assert set(state) == {"version", "step", "metrics", "parts", "probe", "batches", "random"}
    assert (runs / "whole" / "checkpoints" / "step-00000010.pt").exists()


@pytest.mark.slow
def test_report_describes_a_forward_run(runs: Path) -> None:
    from instrument.report.run_page import content

    assert (runs / "whole" / "report.html").exists()
    words, numbers = content(instrument.load(runs / "whole"))
    facts = dict(words["facts"])
    assert facts["mode"] == "forward, no training: 1 pass in order, no gradients"
    assert (facts["batches"], facts["samples"]) == ("10", "200")
    assert float(facts["mean loss"]) == pytest.approx(instrument.load(runs / "whole").info["metrics"]["loss"], 1e-3)
    assert set(numbers["metrics"]) == {"forward"}, "the training chart shows the phases train and eval only"


@pytest.mark.slow
def test_plots_show_forward_rows_by_default(runs: Path) -> None:
    from instrument import plot

    run = instrument.load(runs / "whole")
    assert "(forward)" in plot.heatmap(run).axes[0].get_title()


@pytest.mark.slow
def test_forward_commands(cli: Callable[..., Any], runs: Path) -> None:
    from instrument import plot

    answer = cli(*COMMAND, "plan=true").expect(0)
    rows = len(instrument.load(runs / "whole").stats)
    assert "1 hook in 10 steps" in answer.out
    assert f"{rows}" in answer.out
    answer = cli("-m", *COMMAND, "objective=accuracy", "seed=0", "train.batch_size=20,40", "hydra.sweep.dir=sweep")
    assert answer.code == 0, answer.err
    sweep = instrument.load("sweep")
    assert sweep.metrics.groupby("run").size().tolist() == [10, 5]
    assert "10 steps" in instrument.load("sweep/0")._repr_html_()
    effects = sweep.effects_of("train.batch_size").query("table == 'metrics' and statistic == 'loss'")
    assert list(effects.phase) == ["forward"]
    assert plot.compare(sweep).axes[0].get_title() == "loss (forward)"
    assert "\nmean  " in cli(*COMMAND).out
    assert "\nmean  " not in cli(*COMMAND, "task=forward").expect(0).out


def test_verify_refuses_forward(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from instrument.commands.verify import main

    monkeypatch.setattr("sys.argv", ["verify", *COMMAND])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "mode: verification compares two trainings" in capsys.readouterr().err
