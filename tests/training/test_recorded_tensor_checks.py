"""Hooks that insert tensors of another run: matching by batch, and refusal of tensors that do not fit before step 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import training_runs
from hook_runs import Calls
from torch import Tensor, nn
from training_runs import DIGITS

import instrument
from instrument import ConfigError, MemorySink
from instrument.analysis.tensors_of_earlier_runs import RunArchive
from instrument.config.parse import parse_config
from instrument.probe.probe import Probe
from instrument.storage.parquet import ParquetSink
from instrument.training import dry_run as profiling
from instrument.training.dry_run import dry_run
from instrument.training.experiment import Experiment
from instrument.training.loop import train

CONFIG: dict[str, Any] = {
    **training_runs.CONFIG,
    "data": {"dataset": DIGITS, "slice": {"stop": 50}, "eval_slice": {"split": "test", "stop": 50}},
    "train": {"steps": 2, "batch_size": 16, "accumulate": 2, "eval_batch_size": 20},
}
RECORD = {"layers": "layers.*", "kind": "forward", "action": "record", "stats": "none", "tensors": True}
REPLACE = {"layers": "layers.1", "kind": "forward", "action": "modify", "fn": "replace"}


def trained(
    hooks: dict[str, Any], out: Path | None = None, seed: int = 0, order: int = 0, **train_overrides: Any
) -> MemorySink:
    """Train with hooks, from the weights of a seed. With `out`, the tensors are recorded there for another run."""
    model = train_overrides.pop("model", CONFIG["model"])
    data = CONFIG["data"] | train_overrides.pop("data", {})
    train_config = CONFIG["train"] | train_overrides
    overrides = {"seed": order, "hooks": hooks, "model": model, "data": data, "train": train_config}
    torch.manual_seed(seed)
    experiment = Experiment(parse_config(CONFIG | overrides))
    sink = MemorySink()
    records = sink if out is None else ParquetSink(out)
    with Probe(experiment.plan, records, optimizer=experiment.optimizer, archive=experiment.archive) as probe:
        train(experiment, probe, lambda _: None)
    return sink


def recorded(out: Path, hooks: dict[str, Any] | None = None, **overrides: Any) -> str:
    out.mkdir()
    config = {"train": CONFIG["train"] | {name: overrides[name] for name in CONFIG["train"] if name in overrides}}
    config["data"] = CONFIG["data"] | overrides.get("data", {})
    data = {"train_split": config["data"].get("slice", {}).get("split", "train"), "eval_split": "test"}
    (out / "run.json").write_text(json.dumps({"status": "done", "ranks": 1, "config": config, "data": data}))
    records = {"train": RECORD, "eval": {**RECORD, "phase": "eval"}}
    trained(records if hooks is None else hooks, out, **overrides)
    return str(out)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a run with two steps of two micro-batches (50 samples) and an evaluation of three batches."""
    return recorded(tmp_path_factory.mktemp("source") / "clean")


def outputs(sink: MemorySink) -> dict[tuple[str, int, int], Tensor]:
    return {(row["phase"], row["step"], row["micro_step"]): row["values"] for row in sink.records("tensors")}


@pytest.mark.slow
@pytest.mark.combinations
@pytest.mark.parametrize("phase", ["train", "eval"])
@pytest.mark.parametrize("part", [{}, {"slice": ":, 0:3"}, {"units": [2, 0, 1]}], ids=["replace", "slice", "units"])
def test_each_batch_gets_its_recorded_tensor(clean: str, phase: str, part: dict[str, Any]) -> None:
    fn = "patch" if part else "replace"
    put = {**REPLACE, "fn": fn, "run": clean, "hook": phase, "phase": phase, **part}
    after = {**RECORD, "layers": "layers.1", "phase": phase}
    source, here = outputs(trained({"after": after})), outputs(trained({"put": put, "after": after}, seed=1))
    batches = {"train": [(0, 0), (0, 1), (1, 0), (1, 1)], "eval": [(2, 0), (2, 1), (2, 2)]}[phase]
    assert list(here) == [(phase, *batch) for batch in batches]
    for batch, values in here.items():
        columns = slice(0, 3) if fn == "patch" else slice(None)
        assert torch.equal(values[:, columns], source[batch][:, columns])
        if fn == "patch":
            assert not torch.equal(values[:, 3:], source[batch][:, 3:])


@pytest.mark.slow
def test_gradients_match_by_batch_and_parameters_by_step(clean: str, tmp_path: Path) -> None:
    kinds = {
        "flow": {**RECORD, "kind": "full_backward"},
        "out": {**RECORD, "kind": "full_backward_pre"},
        "micro": {**RECORD, "kind": "parameter_grad_micro"},
        "used": {**RECORD, "kind": "parameter_grad"},
        "weights": {**RECORD, "kind": "step_post"},
        "in": {**RECORD, "kind": "forward_pre"},
    }
    run = recorded(tmp_path / "gradients", kinds)
    put = {
        name: {**REPLACE, "kind": spec["kind"], "layers": spec["layers"], "run": run, "hook": name}
        for name, spec in kinds.items()
    }
    sink = trained(put, seed=1)
    effects = {(row["hook"], row["step"], row["micro_step"]) for row in sink.records("effects")}
    micro = {(name, step, batch) for name in ("flow", "out", "micro", "in") for step in (0, 1) for batch in (0, 1)}
    assert effects == micro | {(name, step, 1) for name in ("used", "weights") for step in (0, 1)}


@pytest.mark.slow
def test_dry_run_inserts_tensors_into_batches_of_equal_size(clean: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "SECONDS", 0.0)
    put = {name: {**REPLACE, "run": clean, "phase": name} for name in ("train", "eval")}
    torch.manual_seed(0)
    experiment = Experiment(parse_config(CONFIG | {"hooks": put}))  # micro-batches of 16, 16 and 16, 2 samples
    cost = dry_run(experiment).cost
    assert {name: spent.firings for name, spent in cost.items()} == {"train": 2, "eval": 1}


@pytest.mark.spread(6)
@pytest.mark.parametrize(
    ("spec", "overrides", "message"),
    [
        (
            {"phase": "eval"},
            {"eval_batch_size": 25},
            r"put.run: 'layers.1' was recorded in 3 batches of 20, 20, 10 samples at step 2, but this run has 2 batches of "
            r"25, 25 samples(.|\n)*fix      use the batches of the other run, or a schedule \(steps, every, start, stop\)",
        ),
        (
            {"phase": "eval"},
            {"data": {"eval_slice": {"split": "test", "stop": 36}}},
            r"3 batches of 20, 20, 10 samples at step 2, but this run has 2 batches of 20, 16 samples",
        ),
        (
            {},
            {"accumulate": 3},
            r"2 batches of 16, 16 samples at step 0, but this run has 3 batches of 16, 16, 16 samples",
        ),
        ({}, {"accumulate": 1}, r"2 batches of 16, 16 samples at step 0, but this run has 1 batch of 16 samples"),
        ({"step": 0}, {}, r"in 2 batches of 16, 16 samples at step 0, but this run has 2 batches of 16, 2 samples"),
        ({"step": 1}, {}, r"in 2 batches of 16, 2 samples at step 1, but this run has 2 batches of 16, 16 samples"),
        (
            {},
            {"batch_size": 10},
            r"in 2 batches of 16, 16 samples at step 0, but this run has 2 batches of 10, 10 samples",
        ),
        (
            {},
            {"steps": 4},
            r"put.step: the other run recorded no tensors at step 2, 3(.|\n)*allowed  one of 0, 1\n    fix      set 'step', or a schedule",
        ),
        ({"step": 7}, {}, r"put.step: the other run recorded no tensors at step 7\n.*given    7\n"),
        ({"hook": "trian"}, {}, r"put.hook: this run has no tensors recorded by this hook(.|\n)*similar  train"),
        (
            {"layers": "."},
            {},
            r"put.layers: the other run recorded no tensors with role 'output' in phase train at '\.'\n"
            r"(.|\n)*allowed  'layers.0' \[16, 16\], 'layers.1'",
        ),
        (
            {"kind": "forward_pre"},
            {},
            r"put.layers: the other run recorded no tensors with role 'input'(.|\n)*allowed  none",
        ),
        (
            {"fn": "patch", "slice": ":, 10"},
            {},
            r"put.slice: 10 is out of range for dimension 1 of the output of 'layers.1', which has shape \[16, 10\]",
        ),
        ({"fn": "patch", "slice": ":, :, 0"}, {}, r"put.slice: the slice has 3 dimensions"),
        (
            {"fn": "patch", "samples": [3], "step": 0},
            {},
            r"put.samples: 3 is out of range for dimension 0 of the output of 'layers.1', .* \[2, 10\] in the smallest batch",
        ),
        (
            {"layers": "layers.0"},
            {"model": {"_target_": "instrument.training.models.MLP", "sizes": [64, 12, 10]}},
            r"put.run: .*'layers.0' .*: the recorded tensor has shape \[16, 16\], the tensor to replace \[16, 12\]",
        ),
    ],
)
def test_mismatched_recording_is_refused_before_step_0(
    clean: str, spec: dict[str, Any], overrides: dict[str, Any], message: str
) -> None:
    put = {**REPLACE, "run": clean, "hook": spec.get("phase", "train"), **spec}
    with pytest.raises(ConfigError, match=message):
        prepare_only({"put": put}, **overrides)


@pytest.mark.slow
def test_tensors_of_another_phase_require_their_hook(clean: str, tmp_path: Path) -> None:
    trained_only = recorded(tmp_path / "train", {"kept": RECORD})
    evaluated_only = recorded(tmp_path / "eval", {"kept": {**RECORD, "phase": "eval"}})
    evaluation = {"eval_batch_size": 16, "data": {"eval_slice": {"split": "test", "stop": 32}}}
    for run, phase, step, overrides in (
        (trained_only, "eval", 0, evaluation),
        (evaluated_only, "train", 2, {"batch_size": 20}),
    ):
        put = {**REPLACE, "phase": phase, "run": run, "step": step, "steps": [2 if phase == "eval" else 0]}
        message = (
            rf"put.layers: the other run recorded no tensors with role 'output' in phase {phase} at 'layers.1'\n(.|\n)*"
            r"fix      set 'hook' to use the tensors of another phase"
        )
        with pytest.raises(ConfigError, match=message):
            prepare_only({"put": put}, **overrides)
        prepare_only({"put": {**put, "hook": "kept"}}, **overrides)
    with pytest.raises(ConfigError, match=r"put.step: .* no tensors at step 2\n.*given    2\n *allowed  one of 0, 1\n"):
        prepare_only({"put": {**REPLACE, "run": clean, "step": 2}})


@pytest.mark.slow
def test_tensors_of_the_same_phase_are_used(tmp_path: Path) -> None:
    """At step 1, tensors of both phases were recorded."""
    run = recorded(tmp_path / "both", eval_every=1)
    after = {**RECORD, "layers": "layers.1", "phase": "eval"}
    source = outputs(trained({"after": after}, eval_every=1))
    put = {**REPLACE, "phase": "eval", "run": run}
    here = outputs(trained({"put": put, "after": after}, seed=1, eval_every=1))
    assert here.keys() == source.keys()
    assert all(torch.equal(values, source[batch]) for batch, values in here.items())


def prepare_only(hooks: dict[str, Any], **overrides: Any) -> None:
    changed = {name: overrides.pop(name) for name in ("model",) if name in overrides}
    data = CONFIG["data"] | overrides.pop("data", {})
    Experiment(parse_config({**CONFIG, **changed, "hooks": hooks, "data": data, "train": CONFIG["train"] | overrides}))


PART = {**RECORD, "layers": "layers.0", "slice": "10"}
SAMPLES = {"layers": "layers.0", "kind": "forward", "action": "modify", "fn": "zero"}
FACTORS = {"layers": "layers.0", "kind": "forward", "action": "scale", "dim": 0, "factor": [1.0] * 16}


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("spec", "overrides", "message"),
    [
        (PART, {}, r"s.slice: 10 is out of range for dimension 0 of the output of 'layers.0', which has shape \[2, 16\] in "),
        ({**PART, "slice": "5:9"}, {}, r"s.slice: 5:9 selects nothing along dimension 0 .* in the smallest batch, of 2 samples"),
        ({**PART, "slice": "-9:-3"}, {}, r"s.slice: -9:-3 selects nothing"),
        ({**PART, "slice": "1:9"}, {}, None),  # shortened in the last batch
        ({**PART, "stop": 1}, {}, None),
        ({**PART, "steps": [0, 2]}, {"steps": 3}, None),
        ({**PART, "steps": [0, 3]}, {"steps": 4}, r"\[2, 16\] in the smallest batch, of 2 samples(.|\n)*fix      .*a schedule"),
        (PART, {"data": {"slice": {"stop": 48}}}, None),
        ({**PART, "layers": "layers.1", "kind": "full_backward"}, {}, r"s.slice: 10 is out of range"),
        ({**PART, "phase": "eval"}, {}, r"s.slice: 10 is out of range .* which has shape \[10, 16\]"),
        ({**PART, "phase": "eval", "slice": "9"}, {}, None),
        ({**SAMPLES, "samples": [0, 5]}, {}, r"s.samples: 5 is out of range for dimension 0 of .* in the smallest batch, of 2 samples"),
        ({**SAMPLES, "samples": [-1, 0]}, {}, None),
        ({**SAMPLES, "fn": "swap"}, {"data": {"slice": {"stop": 49}}}, r"s.fn: swap requires .* in the smallest batch, of 1 samples"),
        ({**SAMPLES, "fn": "patch", "from_sample": 3, "samples": [0]}, {}, r"s.from_sample: 3 is out of range"),
        ({**SAMPLES, "slice": "3"}, {}, r"s.slice: 3 is out of range"),
        (FACTORS, {}, r"s.factor: 16 factors do not fit dimension 0 of the output of 'layers.0', which has shape \[2, 16\] in "),
        ({**FACTORS, "stop": 1}, {}, None),
        ({**FACTORS, "dim": 1}, {}, None),
        ({**PART, "layers": "layers.0.0", "kind": "parameter_grad"}, {}, None),  # no dimension of samples
    ],
)  # fmt: skip
def test_slices_and_factors_must_fit_the_smallest_batch(
    spec: dict[str, Any], overrides: dict[str, Any], message: str | None
) -> None:
    """Batches of step 0 have 16 and 16 samples, of step 1 16 and 2; evaluation batches have 20, 20 and 10."""
    overrides = {"data": {}, **overrides}
    if message is None:
        trained({"s": spec}, **overrides)
        return
    with pytest.raises(ConfigError, match=message):
        prepare_only({"s": spec}, **overrides)


def test_dimension_of_batch_size_by_chance_is_not_the_samples() -> None:
    """The output of `table` is always [16, 4]."""
    prepare_only({"s": {**RECORD, "layers": "table", "slice": "10"}}, model={"_target_": f"{__name__}.positions"})


def positions() -> nn.Module:
    """Create a network with a layer whose output does not depend on the batch."""

    def forward(table: nn.Module, last: nn.Module, images: Tensor) -> Tensor:
        logits: Tensor = last(images.flatten(1)) + table(torch.arange(16)).mean()
        return logits

    return Calls(forward, table=nn.Embedding(16, 4), last=nn.Linear(64, 10))


@pytest.mark.slow
def test_number_of_reads_does_not_depend_on_the_steps(clean: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is checked by the sizes of its batches. Tensors are read once for each size of a batch."""
    read = []
    find = RunArchive.find
    monkeypatch.setattr(RunArchive, "find", lambda *args, **kwargs: read.append(args) or find(*args, **kwargs))
    put = {**REPLACE, "layers": "layers.*", "fn": "patch", "slice": ":, 0:10", "run": clean, "hook": "train", "step": 0}
    prepare_only({"put": put}, steps=3000, data={"slice": {"stop": 32}})
    assert len(read) == 2  # one per layer, since both batches have the same size


@pytest.mark.slow
def test_ambiguous_recording_hook_is_refused_before_step_0(tmp_path: Path) -> None:
    run = recorded(tmp_path / "both", {"one": RECORD, "two": RECORD})
    message = r"put.run: .* ambiguous: .* \(hooks one, two\) of step 0 .*; set 'hook'"
    with pytest.raises(ConfigError, match=message):
        prepare_only({"put": {**REPLACE, "run": run}})
    prepare_only({"put": {**REPLACE, "run": run, "hook": "two"}})


def other_layouts() -> nn.Module:
    """Create layers with samples in dimension 1, in dimension 0 (times 4), and in no dimension."""

    def forward(second: nn.Module, flat: nn.Module, few: nn.Module, last: nn.Module, images: Tensor) -> Tensor:
        steps = images.flatten(1).view(len(images), 4, 16)
        joined = flat(second(steps.transpose(0, 1)).transpose(0, 1).reshape(-1, 16))  # [4, N, 16], then [4 N, 4]
        records = few(joined[joined[:, 0] > 0])  # [depends on the data, 4]
        logits: Tensor = last(joined.view(-1, 16)) + records.mean()
        return logits

    return Calls(forward, second=nn.Linear(16, 16), flat=nn.Linear(16, 4), few=nn.Identity(), last=nn.Linear(16, 10))


@pytest.mark.slow
def test_tensors_in_other_layouts_are_accepted(tmp_path: Path) -> None:
    model = {"_target_": f"{__name__}.other_layouts"}
    keep = {"k": {**RECORD, "layers": ["second", "flat", "few", "last"], "phase": "eval"}}
    run = recorded(tmp_path / "turned", keep, model=model)
    put = {**REPLACE, "layers": keep["k"]["layers"], "run": run, "phase": "eval"}
    sink = trained({"put": put}, model=model)
    assert len(sink.records("effects")) == 4 * 3
    message = r"put.run: .*'flat' .*: the recorded tensor has shape \[80, 4\], the tensor to replace \[100, 4\]"
    with pytest.raises(ConfigError, match=message):
        prepare_only({"put": {**put, "layers": "flat"}}, model=model, eval_batch_size=25)


@pytest.mark.slow
def test_partial_samples_fit_batches_of_other_sizes(tmp_path: Path) -> None:
    run = recorded(tmp_path / "few", {"kept": {**RECORD, "samples": 2}})
    put = {**REPLACE, "fn": "patch", "slice": "0:2", "run": run}
    assert len(trained({"put": put}, seed=1, batch_size=12).records("effects")) == 4
    with pytest.raises(
        ConfigError, match=r"'layers.1' .*: the recorded tensor has shape \[2, 10\], the tensor to replace \[16, 10\]"
    ):
        prepare_only({"put": {**REPLACE, "run": run}})


class SmallEvaluationBatches(nn.Linear):
    """Layer that fails in evaluations of more than 20 samples."""

    def forward(self, images: Tensor) -> Tensor:
        if not self.training and len(images) > 20:
            raise ValueError("too many")
        return super().forward(images.flatten(1))


def test_failing_evaluation_is_refused_before_step_0() -> None:
    model = {"_target_": f"{__name__}.SmallEvaluationBatches", "in_features": 64, "out_features": 10}
    prepare_only({}, model=model)
    with pytest.raises(ConfigError, match="too many"):
        prepare_only({}, model=model, eval_batch_size=25)


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": "layers.0"}, None),
        ({"layers": "."}, r"hooks.put.run: this run recorded no tensors of layer '.' with role 'output'(.|\n)*layers.0 \[16, 16\]"),
        ({"layers": "layers.0", "layer": "layers.1"}, r"hooks.put.run: the vector has 10 numbers, but .* 'layers.0' has 16 units"),
    ],
)  # fmt: skip
def test_vectors_of_another_run_are_computed_before_step_0(
    clean: str, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str | None
) -> None:
    read: list[str] = []
    tensors_at = RunArchive.tensors_at

    def counted(archive: RunArchive, *args: Any, **kwargs: Any) -> Any:
        read.append(args[2])
        return tensors_at(archive, *args, **kwargs)

    monkeypatch.setattr(RunArchive, "tensors_at", counted)
    put = {**REPLACE, "fn": "mean_ablate", "run": clean, "hook": "train", **fields}
    if message is None:
        assert len(trained({"put": put}).records("effects")) == 4
        assert read == ["layers.0"]
        return
    with pytest.raises(ConfigError, match=message):
        prepare_only({"put": put})


def by_sample(sink: MemorySink, hook: str = "after") -> dict[int, Tensor]:
    """Return the recorded values of each sample."""
    tensors = {
        row["step"] * 100 + row["micro_step"]: row["values"] for row in sink.records("tensors") if row["hook"] == hook
    }
    rows = sink.records("samples")
    return {row["sample"]: tensors[row["step"] * 100 + row["micro_step"]][row["position"]] for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "part"),
    [
        pytest.param("train", {}, marks=pytest.mark.slow),
        pytest.param("train", {"units": [2, 0, 1]}),
        pytest.param("eval", {}, marks=pytest.mark.slow),
        pytest.param("eval", {"slice": "2:, 0:3"}),
    ],
    ids=str,
)
def test_samples_get_their_values_in_any_batch(clean: str, phase: str, part: dict[str, Any]) -> None:
    fn = "patch" if part else "replace"
    put = {**REPLACE, "fn": fn, "run": clean, "hook": phase, "phase": phase, "match": "id", **part}
    after = {**RECORD, "layers": "layers.1", "phase": phase}
    other = {"order": 5, "batch_size": 10, "accumulate": 1, "steps": 5, "eval_batch_size": 25}
    source = by_sample(trained({"after": after}))
    plain = by_sample(trained({"after": after}, seed=1, **other))
    here = trained({"put": put, "after": after}, seed=1, **other)
    found = by_sample(here)
    assert len(found) == 50
    positions = {row["sample"]: row["position"] for row in here.records("samples")}
    for sample, values in found.items():
        wanted = plain[sample].clone()
        if phase == "train":
            wanted = values.clone()  # the weights depend on the batches
        if "slice" not in part or positions[sample] >= 2:
            columns = slice(0, 3) if part else slice(None)
            wanted[columns] = source[sample][columns]
        assert torch.equal(values, wanted)


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("fields", "overrides", "message"),
    [
        ({}, {"data": {"slice": {"stop": 60}}},
         r"put.run: the other run has no values of 10 of the 60 samples at 'layers.1'(.|\n)*indices 50, 51,"),
        ({"steps": [0]}, {"data": {"slice": {"start": 45, "stop": 80}}}, r"no values of 27 of the 32 samples"),
        ({"layers": "."}, {},
         r"put.layers: in the other run, no tensors of this layer were recorded(.|\n)*allowed  layers.0, layers.1"),
        ({"layers": "layers.0"}, {"model": {**CONFIG["model"], "sizes": [64, 12, 10]}},
         r"put.run: .*'layers.0' .*: the recorded tensor has shape \[16, 16\], the tensor to replace \[16, 12\]"),
        ({"step": 1}, {}, r"no values of 32 of the 50 samples"),
        ({"kind": "parameter_grad"}, {}, r"'match: id' requires a batch, which the tensors of kind parameter_grad"),
    ],
    ids=str,
)  # fmt: skip
def test_samples_without_values_are_refused_before_step_0(
    clean: str, fields: dict[str, Any], overrides: dict[str, Any], message: str
) -> None:
    put = {**REPLACE, "run": clean, "hook": "train", "match": "id", **fields}
    with pytest.raises(ConfigError, match=message):
        prepare_only({"put": put}, **overrides)


def test_samples_of_another_split_are_refused_before_step_0(tmp_path: Path) -> None:
    """The evaluation has the split `test`. Its sample 0 is not that of the split `train`."""
    run = recorded(tmp_path / "run", {"kept": {**RECORD, "phase": "eval"}})
    put = {**REPLACE, "run": run, "match": "id"}
    message = "put.match: the other run recorded samples of the split test, but phase train has samples of train"
    with pytest.raises(ConfigError, match=message):
        prepare_only({"put": put})
    prepare_only({"put": {**put, "hook": "kept"}})
    prepare_only({"put": put}, data={"slice": {"split": "test", "stop": 50}})


def test_samples_of_several_steps_require_a_step(tmp_path: Path) -> None:
    run = recorded(tmp_path / "twice", {"kept": RECORD}, steps=4)
    put = {**REPLACE, "run": run, "match": "id"}
    message = r"put.step: in the other run, the samples occur in several steps(.|\n)*set 'step' to one of them"
    with pytest.raises(ConfigError, match=message):
        prepare_only({"put": put})
    prepare_only({"put": {**put, "step": 0, "steps": [0]}}, steps=1)


def test_attach_names_the_samples(tmp_path: Path) -> None:
    model, inputs = nn.Sequential(nn.Linear(3, 2), nn.AdaptiveAvgPool1d(1)), torch.randn(4, 3)
    names = ["a", "b", "c", "d"]
    record = {"k": {"layers": "1", "kind": "forward", "action": "record", "tensors": True}}
    with instrument.attach(model, record, out=tmp_path / "run") as probe:
        probe.batch(ids=names)
        recorded_values = model(inputs)
        probe.end_step()
    put = {"put": {**REPLACE, "layers": "1", "run": str(tmp_path / "run"), "match": "id"}}
    with instrument.attach(model, put) as probe:
        for chosen in (["d", "a"], ["c"]):
            probe.batch(ids=chosen)
            found = model(torch.zeros(len(chosen), 3))
            assert torch.equal(found, recorded_values[[names.index(name) for name in chosen]])
            probe.end_step()
        with pytest.raises(instrument.HookError, match="ids of the samples are unknown"):
            model(inputs)
        probe.end_step()
        probe.batch(ids=["a", "x"])
        with pytest.raises(instrument.HookError, match="has no values of sample 'x' at layer '1'"):
            model(inputs[:2])


@pytest.mark.slow
def test_dry_run_uses_values_of_other_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "SECONDS", 0.0)
    data = {"slice": {"stop": 64}}
    run = recorded(tmp_path / "second", {"kept": {**RECORD, "steps": [1]}}, data=data)
    put = {"put": {**REPLACE, "run": run, "match": "id", "steps": [1]}}
    experiment = Experiment(parse_config(CONFIG | {"hooks": put, "data": CONFIG["data"] | data}))
    assert dry_run(experiment).cost["put"].firings == 1  # with a batch of step 0, which has no recorded values
