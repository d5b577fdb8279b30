"""`run.features`: the recorded tensors of a layer in the order of the dataset, equal to those of a hand-written hook."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import distributed_runs
import numpy as np
import pytest
import torch
from attached_runs import forward_steps
from hook_runs import Calls
from run_folders import write_run, write_steps
from tiers import tiered
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from training_runs import train_here

import instrument
from instrument import ConfigError, InstrumentError, InstrumentWarning
from instrument.analysis.features import recorded_positions
from instrument.analysis.raw_tensors import RawTensors
from instrument.config.base import parse_slice

RECORD = {"kind": "forward", "action": "record", "stats": "none", "tensors": True}
INPUTS = torch.randn(23, 1, 6, 6, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(23) % 3


class Nested(NamedTuple):
    scores: Tensor
    states: tuple[Tensor, Tensor]


def head(scores: nn.Module, inputs: Tensor) -> Nested:
    return Nested(scores(inputs), (inputs.relu(), inputs.half()))


class Model(nn.Module):
    """Small model with a pooling layer, a nested output, a layer called twice, and a layer without samples."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.avgpool, self.shared = nn.Conv2d(1, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Linear(5, 5)
        self.flat, self.head = nn.Flatten(0), Calls(head, scores=nn.Linear(5, 1))

    def forward(self, images: Tensor) -> Nested:
        pooled = self.avgpool(self.conv(images)).flatten(1)
        self.flat(pooled)
        return self.head(self.shared(self.shared(pooled)))


class HandWritten:
    def __init__(self, module: nn.Module, pick: Callable[[Any], Tensor]) -> None:
        self.pick = pick
        self.kept: list[Tensor] = []
        module.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: Any) -> None:
        self.kept.append(self.pick(output).detach().clone())


def batches(size: int = 4) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Shuffled batches of indices, inputs and targets."""
    dataset = TensorDataset(torch.arange(23), INPUTS, TARGETS)
    generator = torch.Generator().manual_seed(3)
    yield from DataLoader(dataset, size, shuffle=True, generator=generator)


def record(
    hooks: dict[str, Any],
    folder: Path | None,
    *,
    epochs: int = 1,
    name: Callable[[Tensor], Any] | None = lambda ids: ids,
) -> instrument.Run:
    """Record a pass over the data and return the run."""
    torch.manual_seed(0)
    model = Model().eval()
    with torch.no_grad(), instrument.attach(model, hooks, out=folder) as probe:
        for epoch in range(epochs):
            probe.epoch = epoch
            for ids, images, targets in batches():
                if name is not None:
                    probe.batch(ids=name(ids), targets=targets)
                model(images + epoch)
                probe.end_step()
    return probe.run


def expected(pick: Callable[[Model], nn.Module], of: Callable[[Any], Tensor] = lambda output: output) -> np.ndarray:
    """Return the features of a hand-written hook, in the order of the dataset."""
    torch.manual_seed(0)
    model = Model().eval()
    hook = HandWritten(pick(model), of)
    order = []
    with torch.no_grad():
        for ids, images, _ in batches():
            model(images)
            order.append(ids)
    features: np.ndarray = torch.cat(hook.kept)[torch.cat(order).argsort()].numpy()
    return features


HOOKS = {
    "pool": {"layers": "avgpool", **RECORD},
    "head": {"layers": "head", **RECORD},
    "shared": {"layers": "shared", **RECORD},
    "flat": {"layers": "flat", **RECORD},
    "cut": {"layers": "conv", **RECORD, "samples": 3, "slice": "0:2, 1:3", "dtype": "bfloat16"},
    "second": {"layers": "conv", **RECORD, "slice": "::2, 0, 0, 0"},
    "one": {"layers": "conv", **RECORD, "slice": "1, :, 0, 0"},
    "few": {"layers": "conv", **RECORD, "max_elements": 8},
    "weight": {"layers": "conv", **RECORD, "kind": "forward_pre"},
}


@pytest.fixture(scope="module", params=tiered(["files", "bytes", "memory"], ["files"]))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    """A recorded pass: in Parquet, in small row groups, and in memory."""
    if request.param == "memory":
        return record(HOOKS, None)
    with pytest.MonkeyPatch.context() as patched:
        if request.param == "bytes":
            patched.setattr("instrument.storage.tensors.ROW_GROUP_BYTES", 100)
        return record(HOOKS, tmp_path_factory.mktemp("features") / "run")


def test_features_equal_a_hand_written_hook(run: instrument.Run) -> None:
    features = run.features("avgpool")
    assert isinstance(features, instrument.Features)
    X, y, ids = features
    assert X.dtype == np.float32
    assert np.array_equal(X, expected(lambda model: model.avgpool)[:, :, 0, 0])
    assert np.array_equal(ids, np.arange(23))
    assert ids.dtype == np.int64
    assert y is not None
    assert np.array_equal(y, TARGETS.numpy())
    assert y.dtype == np.int64
    assert repr(features) == "Features(X: float32 (23, 5), y: int64 (23,), ids: int64 (23,))"


@pytest.mark.slow
def test_features_in_small_row_groups_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.storage.tensors.ROW_GROUP_BYTES", 100)
    X, _, ids = record({"pool": HOOKS["pool"]}, tmp_path / "run").features("avgpool")
    assert np.array_equal(X, expected(lambda model: model.avgpool)[:, :, 0, 0])
    assert np.array_equal(ids, np.arange(23))


@pytest.mark.parametrize(
    ("path", "pick"),
    [
        ("scores", lambda output: output.scores),
        ("states.0", lambda output: output.states[0]),
        ("states.1", lambda output: output.states[1]),
    ],
)
def test_path_selects_a_tensor_of_a_nested_output(run: instrument.Run, path: str, pick: Any) -> None:
    X = run.features("head", path=path).X
    wanted = expected(lambda model: model.head, pick)
    assert X.dtype == wanted.dtype
    assert X.shape == wanted.shape  # the last dimension of scores has size 1 and is the only one of a sample
    assert np.array_equal(X, wanted)


def test_call_selects_one_of_several_calls(run: instrument.Run) -> None:
    first, second = (run.features("shared", call=call).X for call in (0, 1))
    assert not np.array_equal(first, second)
    both = []
    torch.manual_seed(0)
    model = Model().eval()
    hook = HandWritten(model.shared, lambda output: output)
    with torch.no_grad():
        model(INPUTS)
    both = [kept.numpy() for kept in hook.kept]
    assert np.allclose(first, both[0], atol=1e-6)
    assert np.allclose(second, both[1], atol=1e-6)


def test_recorded_parts_have_the_ids_of_their_samples(run: instrument.Run) -> None:
    full = expected(lambda model: model.conv)
    taken = {"cut": [], "second": []}
    for ids, _, _ in batches():
        taken["cut"] += ids[:3][0:2].tolist()
        taken["second"] += ids[::2].tolist()
    X, y, ids_of_cut = run.features("conv", hook="cut")
    assert ids_of_cut.tolist() == sorted(taken["cut"])
    assert np.array_equal(X, torch.from_numpy(full[ids_of_cut, 1:3]).bfloat16().float().numpy())
    assert np.array_equal(y, TARGETS[ids_of_cut])
    X, _, ids_of_second = run.features("conv", hook="second")
    assert ids_of_second.tolist() == sorted(taken["second"])
    assert np.array_equal(X, full[ids_of_second, 0, 0, 0])


@pytest.mark.spread(9)
@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"layer": 0}, r"layer: must be the name of one layer\n +given +0"),
        ({"layer": ["avgpool"]}, r"layer: must be the name of one layer\n +given +\['avgpool'\]"),
        ({"layer": "avgpool", "call": [0, 77]}, r"call: no recorded tensor of layer 'avgpool' has this call\n +given +77\n +allowed +0"),
        ({"layer": "avgpol"}, r"layer: no tensors of this layer[\s\S]*allowed +avgpool, conv.*\n +similar +avgpool\n +fix +set 'tensors"),
        ({"layer": "avgpool", "hook": "pol"}, r"hook: no recorded tensor of layer 'avgpool'[\s\S]*similar +pool"),
        ({"layer": "avgpool", "role": "input"}, r"role: no recorded tensor[\s\S]*given +input\n +allowed +output"),
        ({"layer": "avgpool", "phase": "eval"}, r"phase: no recorded tensor[\s\S]*allowed +train"),
        ({"layer": "avgpool", "step": 77}, r"step: no recorded tensor[\s\S]*given +77\n +allowed +0, 1, 2, 3, 4, 5"),
        ({"layer": "head"}, r"path: layer 'head' has tensors of several paths\n +allowed +scores, states.0, states.1"),
        ({"layer": "shared"}, r"call: layer 'shared' has tensors of several calls\n +allowed +0, 1\n +fix +pass call=0"),
        ({"layer": "conv"}, r"hook: layer 'conv' has tensors of several hooks\n +allowed +cut, few, one, second"),
        ({"layer": "flat"}, r"layer: the tensors of layer 'flat' have no samples in dimension 0: shape \[20\] in a batch of 4"),
        ({"layer": "conv", "hook": "one"}, r"no samples in dimension 0: shape \[5\] of \[4, 5, 4, 4\].*\n.*\n +fix.*'slice' that keeps"),
        ({"layer": "conv", "hook": "few"}, r"have no samples in dimension 0: shape \[8\] of.*\n.*\n +fix.*without 'max_elements'"),
    ],
)  # fmt: skip
def test_selection_that_is_wrong_or_ambiguous_is_refused(run: instrument.Run, choice: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run.features(**choice)
    assert not run.problems


def test_some_steps_give_some_samples(run: instrument.Run) -> None:
    first = [ids.tolist() for ids, _, _ in batches()]
    assert run.features("avgpool", step=1).ids.tolist() == sorted(first[1])
    assert run.features("avgpool", step=range(2)).ids.tolist() == sorted(first[0] + first[1])


def test_features_can_be_mapped_from_a_file(run: instrument.Run, tmp_path: Path) -> None:
    in_memory = run.features("avgpool").X
    mapped = run.features("avgpool", out=tmp_path / "X.npy").X
    assert isinstance(mapped, np.memmap)
    assert np.array_equal(mapped, in_memory)
    mapped.flush()
    assert np.array_equal(np.load(tmp_path / "X.npy"), in_memory)


def test_frame_has_a_column_for_each_feature(run: instrument.Run) -> None:
    features = run.features("avgpool")
    frame = features.to_frame()
    assert frame.columns.tolist() == ["target", *(f"f{i}" for i in range(5))]
    assert frame.index.tolist() == list(range(23))
    assert frame.index.name == "sample"
    assert np.array_equal(frame.drop(columns="target").to_numpy(), features.X)
    images = instrument.Features(np.zeros((2, 3, 4)), None, np.array(["a", "b"]))
    assert images.to_frame().shape == (2, 12)
    assert instrument.Features(np.zeros((0, 3, 4)), None, np.zeros(0)).to_frame().shape == (0, 12)


@pytest.mark.slow
def test_several_epochs_require_a_choice(tmp_path: Path) -> None:
    run = record({"pool": HOOKS["pool"]}, tmp_path / "run", epochs=3)
    message = r"step: the samples occur in several steps: sample \d+ in steps \d+, \d+, \d+\n[\s\S]*fix +pass step="
    with pytest.raises(ConfigError, match=message):
        run.features("avgpool")
    by_epoch = [run.features("avgpool", epoch=epoch).X for epoch in range(3)]
    assert np.array_equal(by_epoch[0], expected(lambda model: model.avgpool)[:, :, 0, 0])
    assert not np.array_equal(by_epoch[0], by_epoch[1])
    assert np.array_equal(run.features("avgpool", step=range(6, 12)).X, by_epoch[1])
    with pytest.raises(ConfigError, match="several steps"):
        run.features("avgpool", epoch=[0, 2])


def test_string_ids_keep_the_recorded_order(tmp_path: Path) -> None:
    run = record({"pool": HOOKS["pool"]}, tmp_path / "run", name=lambda ids: [f"image_{i}.png" for i in ids.tolist()])
    X, y, ids = run.features("avgpool")
    order = torch.cat([indices for indices, _, _ in batches()])
    assert ids.tolist() == [f"image_{i}.png" for i in order.tolist()]
    assert np.array_equal(X, expected(lambda model: model.avgpool)[order, :, 0, 0])
    assert np.array_equal(y, TARGETS[order])


def test_batches_with_numbers_and_strings_as_ids_give_strings() -> None:
    batches = [torch.zeros(2, 2), torch.zeros(1, 2)]
    probe = forward_steps(nn.Identity(), {"f": {"layers": ".", **RECORD}}, batches, sample_ids=[[4, 3], ["a"]])
    assert probe.features(".").ids.tolist() == ["4", "3", "a"]


@pytest.mark.slow
def test_run_without_ids_says_how_to_record_them(tmp_path: Path) -> None:
    run = record({"pool": HOOKS["pool"]}, tmp_path / "run", name=None)
    with pytest.raises(ConfigError, match=r"samples: the ids of the samples are unknown[\s\S]*probe\.batch\(ids=ids"):
        run.features("avgpool")
    shutil.rmtree(tmp_path / "run" / "samples")  # a run of an earlier version
    with pytest.raises(ConfigError, match="repeat a run of an earlier"):
        instrument.load(tmp_path / "run").features("avgpool")


def test_run_without_tensors_says_how_to_record_them(tmp_path: Path) -> None:
    run = record({"seen": {"layers": "avgpool", "kind": "forward", "action": "record"}}, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"no tensors of this layer were recorded\n[\s\S]*tensors: true"):
        run.features("avgpool")


def test_batches_without_ids_are_left_out_with_a_warning() -> None:
    hooks = {"f": {"layers": ".", **RECORD}}
    probe = forward_steps(nn.Identity(), hooks, torch.zeros(3, 1, 2), sample_ids=[[0], None, [2]])
    message = r"samples of 1 of 3 tensors are unknown \(step 1, micro_step 0, rank 0\)"
    with pytest.warns(InstrumentWarning, match=message):
        assert probe.features("").ids.tolist() == [0, 2]
    assert probe.problems == [
        "tensors: the samples of 1 of 3 tensors are unknown (step 1, micro_step 0, rank 0): skipped"
    ]
    with pytest.raises(ConfigError, match="ids of the samples"):
        probe.features("", step=1)


def test_batches_of_different_shape_are_refused() -> None:
    batches = [torch.zeros(1, 2), torch.zeros(1, 3)]
    probe = forward_steps(nn.Identity(), {"f": {"layers": ".", **RECORD}}, batches, sample_ids=[[2], [3]])
    message = r"differ in shape between batches\n +given +\['samples', 2\], \['samples', 3\]"
    with pytest.raises(ConfigError, match=message):
        probe.features(".")


def test_parameter_tensors_are_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = {"f": {"layers": ".", **RECORD, "kind": "parameter_grad"}}
    with instrument.attach(model, hooks, optimizer=optimizer) as probe:
        probe.batch(ids=[0])
        model(torch.zeros(1, 2)).sum().backward()
        optimizer.step()
        probe.end_step()
    assert probe.samples.empty
    with pytest.raises(ConfigError, match="tensors of kind parameter_grad have no samples"):
        probe.features(".", role="param_grad", path="weight")


def test_gradients_have_features_too() -> None:
    model = nn.Linear(2, 2)
    hooks = {"f": {"layers": ".", **RECORD, "kind": "full_backward", "role": "grad_output"}}
    with instrument.attach(model, hooks) as probe:
        for step in range(2):
            probe.batch(ids=[step])
            model(torch.zeros(1, 2)).mul(step).sum().backward()
            probe.end_step()
    assert probe.features(".", role="grad_output").X.tolist() == [[0.0, 0.0], [1.0, 1.0]]


@pytest.mark.gpu
def test_features_of_a_gpu_equal_a_hand_written_hook() -> None:
    model = nn.Linear(3, 2, device="cuda")
    hook = HandWritten(model, lambda output: output)
    ids = torch.tensor([4, 0, 3, 1, 2, 5], device="cuda")
    with instrument.attach(model, {"f": {"layers": ".", **RECORD}}) as probe:
        for batch in ids.split(2):
            probe.batch(ids=batch, targets=batch * 2)
            model(torch.randn(2, 3, device="cuda"))
            probe.end_step()
    X, y, found = probe.features(".")
    assert found.tolist() == list(range(6))
    assert y.tolist() == [0, 2, 4, 6, 8, 10]
    assert np.array_equal(X, torch.cat(hook.kept)[ids.argsort()].cpu().numpy())


def test_damaged_tensors_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record({"pool": HOOKS["pool"]}, tmp_path / "run")
    monkeypatch.setattr(RawTensors, "copy", lambda *_: np.load(tmp_path / "missing.npy"))
    with pytest.raises(InstrumentError, match="6 of 6 tensors cannot be read"):
        run.features("avgpool")


@pytest.mark.parametrize(
    ("shape", "cut", "wanted"),
    [
        ((4, 3), (None, None, None), [0, 1, 2, 3]),
        ((4, 3), (2, None, None), [0, 1]),
        ((4, 3), (3, "-2:", None), [1, 2]),
        ((4, 3), (None, ":, 1", None), [0, 1, 2, 3]),
        ((4, 3), (None, "1", None), None),
        ((4, 3), (None, None, 5), None),
        ((4, 3), (None, None, 12), [0, 1, 2, 3]),
        ((4,), (None, None, 3), [0, 1, 2]),
        ((1, 3), (None, None, None), [0]),
        ((4, 1, 1), (None, "1:3", None), [1, 2]),
        ((0, 3), (None, None, None), []),
        ((), (None, None, None), None),
        ((4, 3), ((3, -3), None, None), [3, 1]),
    ],
)
def test_positions_of_a_recorded_part(shape: Any, cut: Any, wanted: Sequence[int] | None) -> None:
    selected = recorded_positions((4, 1), (4, 3), {"max_elements": 5})  # units with few elements
    assert selected is not None
    assert selected.tolist() == [0, 1, 2, 3]
    is_cut = cut[2] is not None and math.prod(shape) > cut[2]
    samples = list(cut[0]) if isinstance(cut[0], tuple) else cut[0]
    spec = {"samples": samples, "slice": cut[1], "max_elements": cut[2]}
    positions = recorded_positions((cut[2],) if is_cut else shape, shape, spec)
    assert (None if positions is None else positions.tolist()) == wanted
    if wanted is not None and cut[1] is not None:
        numbers = np.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1)) + np.zeros(shape)
        assert np.array_equal(numbers[: cut[0]][parse_slice(cut[1])].reshape(len(wanted), -1)[:, 0], wanted)


NUMBERED = [
    "+model={_target_: distributed_models.Numbered}", "+data={dataset: {_target_: distributed_models.numbered}}",
    "+hooks.t={layers: head, kind: forward, action: record, stats: none, tensors: true}",
    "+hooks.e={layers: head, kind: forward, action: record, stats: none, tensors: true, phase: eval}",
    "train.epochs=2", "train.steps=null", "train.batch_size=8", "train.eval_every=6", "train.eval_batch_size=10",
    "data.eval_slice={split: test, stop: 30, shuffle: true}",
]  # fmt: skip


@pytest.mark.slow
def test_features_of_two_ranks_equal_a_hand_written_hook(tmp_path: Path) -> None:
    """40 shuffled samples are 5 steps per epoch. The hook in the model runs in each process, on the same batches."""
    done = distributed_runs.run_processes(
        tmp_path, *NUMBERED, "train.parallel=ddp", "hydra.run.dir=out", "data.ids=all", processes=2
    )
    assert done.returncode == 0, done.stderr
    run = instrument.load(tmp_path / "out")
    with pytest.raises(ConfigError, match="pass step=10, several steps"):
        run.features("head", hook="e", path="scores")
    assert set(run.samples["rank"]) == {0, 1}

    def by_hand(phase: str, calls: slice) -> dict[str, np.ndarray]:
        """Return the outputs of some calls in the order of the samples. Shape inference makes the first calls."""
        files = [sorted(tmp_path.glob(f"{phase}-{rank}-*.pt"))[calls] for rank in (0, 1)]
        parts = [torch.load(file) for of_rank in files for file in of_rank]
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        order = joined["ids"].argsort()
        return {name: values[order].numpy() for name, values in joined.items()}

    for hook, phase, step, calls in (
        ("t", "train", range(5), slice(-10, -5)),
        ("t", "train", range(5, 10), slice(-5, None)),
        ("e", "eval", 10, slice(-3, None)),
    ):
        wanted = by_hand(phase, calls)
        assert len(wanted["ids"]) == (30 if hook == "e" else 40)
        for path in ("scores", "states.0"):
            X, y, ids = run.features("head", hook=hook, path=path, step=step)
            assert np.array_equal(ids, wanted["ids"])
            assert y is not None
            assert np.array_equal(y, ids % 3)
            assert np.array_equal(X, wanted[path])
    epochs = [run.features("head", hook="t", path="scores", epoch=epoch).X for epoch in (0, 1)]
    assert not np.array_equal(*epochs)
    trained = run.samples[run.samples.phase == "train"]
    assert trained.groupby("step")["sample"].nunique().tolist() == [8] * 10
    first = trained[trained.epoch == 0]["sample"].tolist()
    assert first != sorted(first)


MEASURE = """
import instrument

def peak():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1e3

instrument.load("run").features("layer", step=0)  # imports everything
before = peak()
X = instrument.load("run").features("layer", step=range(1, 1000)).X
print(peak() - before, X.nbytes / 1e6)
"""


class RandomImages(Dataset[Any]):
    """A dataset whose items are random, so that two occurrences of a sample differ."""

    def __init__(self, split: str) -> None:
        self.split = split

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(1, 8, 8), index


class Repeating:
    """A sampler that gives a sample twice in a batch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        return iter([3, 1, 3, 0])


@pytest.mark.slow
def test_sample_that_a_sampler_repeats_is_returned_once(tmp_path: Path) -> None:
    sampled = (
        f"data.dataset={{_target_: {__name__}.RandomImages}}",
        f"data.sampler={{_target_: {__name__}.Repeating}}",
    )
    hook = "+hooks.f={layers: layers.0, kind: forward, action: record, tensors: true}"
    run = train_here(tmp_path / "run", *ARGUMENTS[:3], hook, "~data.dataset.size", *sampled, "mode=forward")
    assert run.samples["sample"].tolist() == [3, 1, 3, 0]
    (values,) = run.tensors()["values"]
    assert not np.array_equal(values[0], values[2])
    X, y, ids = run.features("layers.0")
    assert ids.tolist() == y.tolist() == [0, 1, 3]
    assert np.array_equal(X, values[[3, 1, 0]])


def test_second_evaluation_at_a_step_is_refused() -> None:
    model, hooks = nn.Sequential(nn.Linear(2, 2)), {"h": {"layers": "0", **RECORD, "phase": "eval"}}
    with instrument.attach(model, hooks) as probe:
        for _ in range(2):
            with probe.evaluating():
                probe.batch(ids=[0, 1])
                model(torch.ones(2, 2))
    with pytest.raises(ConfigError, match="several tensors of the same batch"):
        probe.features("0")


@pytest.mark.spread(1)
@pytest.mark.parametrize("step", [np.int64(0), np.array(0), 0, [np.int64(0)]], ids=repr)
def test_step_of_numpy_selects(step: Any) -> None:
    model, hooks = nn.Sequential(nn.Linear(2, 2)), {"h": {"layers": "0", **RECORD}}
    probe = forward_steps(model, hooks, torch.ones(2, 2, 2), sample_ids=[[0, 1]] * 2)
    assert probe.features("0", step=step).X.shape == (2, 2)
    with pytest.raises(ConfigError, match="no recorded tensor of layer '0' has this step"):
        probe.features("0", step="last")


FEATURES = "{layers: layers.0, kind: forward, action: record, stats: none, tensors: true, phase: eval}"
ARGUMENTS = [
    *("model=mlp", "model.sizes=[64,8,10]", "data=digits", f"+hooks.f={FEATURES}"),
    *("train.steps=3", "train.batch_size=40", "train.eval_batch_size=100", "train.eval_every=2"),
    "data.eval_slice={split: test, stop: 300, shuffle: true}",
]


def test_features_of_a_sweep_are_refused(tmp_path: Path) -> None:
    for name in ("0", "1"):
        write_run(tmp_path / name)
    with pytest.raises(ConfigError, match=r"run: the folder contains 2 runs[\s\S]*pass one of them"):
        instrument.load(tmp_path).features("layers.0")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
@pytest.mark.parametrize("tensors", tiered(["list", "bytes"], []))
def test_features_need_little_more_memory_than_the_array(tmp_path: Path, tensors: Any) -> None:
    values = torch.arange(512 * 8192, dtype=torch.float32).reshape(512, 8192)  # 17 MB, one row group
    steps = []
    for step in range(17):
        batch = values[:1] if step == 0 else values  # the other steps have 268 MB
        cells = {"step": step, "target": 1.0, "target_dtype": "int64"}
        samples = [{**cells, "position": at, "sample": 512 * step + (at * 7) % 512} for at in range(len(batch))]
        steps.append({"tensors": [{"step": step, "layer": "layer", "values": batch}], "samples": samples})
    write_steps(tmp_path / "run", steps, tensors=tensors)
    done = subprocess.run([sys.executable, "-c", MEASURE], cwd=tmp_path, capture_output=True, text=True, check=True)
    used, size = map(float, done.stdout.split())
    assert size > 250
    assert used < size + 200
