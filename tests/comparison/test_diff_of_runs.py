"""`instrument.diff`: rows of two runs are matched, and the first tensor that differs is found."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from conftest import REPOSITORY
from run_folders import write_run
from tiers import tiered
from torch import Tensor, nn
from training_runs import train_here

import instrument
from instrument.analysis.load import Run
from instrument.comparison import recorded_differences
from instrument.comparison.result import Diff
from instrument.errors import ConfigError, InstrumentError

HOOKS: dict[str, Any] = {
    "inputs": {"layers": ".", "kind": "forward_pre", "action": "record"},
    "activations": {"layers": "**", "kind": "forward", "action": "record"},
    "flow": {"layers": "**", "kind": "full_backward", "role": "grad_output", "action": "record"},
    "gradients": {"layers": "**", "kind": "parameter_grad", "action": "record"},
}
TENSORS: dict[str, Any] = {
    "kept": {"layers": "**", "kind": "forward", "action": "record", "stats": "none", "tensors": True}
}


class Block(nn.Module):
    def __init__(self, size: int, wrong: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.linear = nn.Linear(size, size)
        self.activation = nn.LeakyReLU(0.02) if wrong else nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, x + self.activation(self.linear(self.norm(x))))


class Original(nn.Module):
    def __init__(self, wrong: int = -1) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.Sequential(*(Block(16, wrong == index) for index in range(2)))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.blocks(self.stem(x))))


class Port(nn.Module):
    """The same network with other names."""

    def __init__(self, wrong: int = -1) -> None:
        super().__init__()
        blocks = nn.Sequential(*(Block(16, wrong == index) for index in range(2)))
        self.backbone = nn.Sequential(OrderedDict(stem=nn.Linear(8, 16), layer=blocks))
        self.classifier = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.classifier(self.backbone(x)))


RENAME = {"stem": "backbone.stem", "blocks": "backbone.layer", "head": "classifier"}


def record(
    model: nn.Module,
    hooks: Mapping[str, Any] = HOOKS,
    *,
    steps: int = 3,
    dtype: torch.dtype | None = None,
    out: Path | None = None,
    before: Callable[[int], None] = lambda step: None,
) -> Run:
    """Train a model on fixed batches, with the weights of seed 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with instrument.attach(model, hooks, optimizer=optimizer, out=out) as probe:
        for step in range(steps):
            before(step)
            x, y = torch.randn(32, 8, generator=generator), torch.randint(3, (32,), generator=generator)
            with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
                loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    return probe.run


@pytest.fixture(scope="module")
def original() -> Run:
    return record(Original(), {**HOOKS, **TENSORS})


@pytest.fixture(scope="module")
def same(original: Run) -> Diff:
    return instrument.diff(original, record(Original(), {**HOOKS, **TENSORS}))


@pytest.fixture(scope="module")
def wrong() -> Run:
    """A run whose second block has another activation function."""
    return record(Original(wrong=1), {**HOOKS, **TENSORS})


@pytest.fixture(scope="module")
def different(original: Run, wrong: Run) -> Diff:
    return instrument.diff(original, wrong, steps=(None, 2))


def test_equal_runs_are_identical(original: Run, same: Diff) -> None:
    assert same.is_identical
    assert same.first is None
    assert same.tolerance == pytest.approx(6e-5, rel=0.01)
    assert "EQUAL STATISTICS: all compared numbers are equal." in str(same)
    assert same.common_steps == (0, 2, 3)
    assert same.layers["rows"].sum() == original.count("stats")
    assert same.tensors["tensors"].sum() == original.count("tensors")
    assert same.unmatched.empty
    assert same.unmatched_rows == (0, 0)


def test_layers_are_in_execution_order(same: Diff) -> None:
    layers = same.layers
    outputs = layers[layers["hook"] == "activations"]["layer"].tolist()
    assert outputs[:5] == ["stem", "blocks.0.norm", "blocks.0.linear", "blocks.0.activation", "blocks.0"]
    both = layers[layers["layer"] == "blocks.0.norm"]["hook"].tolist()
    assert both[:2] == ["activations", "kept"]
    assert layers["role"].drop_duplicates().tolist() == ["input", "output", "grad_output", "param_grad"]


@pytest.mark.slow
@pytest.mark.parametrize("block", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_wrong_layer_of_a_port_is_named(original: Run, block: int) -> None:
    found = instrument.diff(original, record(Port(block)), rename=RENAME)
    assert found.first is not None
    first = found.layers.loc[found.first.location]
    assert (first["layer"], first["layer_b"]) == (f"blocks.{block}.activation", f"backbone.layer.{block}.activation")
    assert (found.first.step, first["kind"], first["role"]) == (0, "forward", "output")
    assert found.cause == ""
    text = str(found)
    assert (
        f"DIFFERENT: the first difference is at step 0, blocks.{block}.activation = backbone.layer.{block}.activation"
        in text
    )
    assert "All tensors before it are equal." in text


@pytest.mark.slow
def test_correct_port_is_identical(original: Run) -> None:
    found = instrument.diff(original, record(Port()), rename=RENAME)
    assert found.is_identical
    left = found.unmatched
    assert set(left[left["run"] == "a"]["hook"]) == {"kept"}
    assert set(left[left["run"] == "b"]["layer"]) == {"backbone"}
    assert "only in B: backbone" in str(found)


@pytest.mark.slow
def test_bfloat16_is_within_its_tolerance(original: Run) -> None:
    found = instrument.diff(original, record(Original(), {**HOOKS, **TENSORS}, steps=1, dtype=torch.bfloat16))
    assert found.dtypes == ("float32", "bfloat16")
    assert found.tolerance == pytest.approx(10 / 256)
    assert not found.is_identical
    assert found.first is None, str(found)
    assert "WITHIN THE TOLERANCE" in str(found)
    assert found.layers["difference"].max() > 1e-4
    linear = found.tensors.loc[found.layers.query("hook == 'kept' and layer == 'blocks.0.linear'").index[0]]
    assert (linear["dtype_a"], linear["dtype_b"]) == ("float32", "bfloat16")
    assert linear["ulp"].sum() == linear["elements"]
    assert linear["ulp"][:3].sum() > 0.7 * linear["elements"]
    assert linear["cosine"] > 0.999


@pytest.mark.slow
def test_wrong_layer_is_named_in_bfloat16(original: Run) -> None:
    rounded = record(Original(), steps=1, dtype=torch.bfloat16)
    found = instrument.diff(rounded, record(scaled(Original()), steps=1))
    assert found.first is not None
    assert found.layers.loc[found.first.location, "layer"] == "blocks.1.linear"
    assert "It is a jump: " in str(found)
    assert instrument.diff(original, rounded).first is None


def scaled(model: Original) -> Original:
    model.get_submodule("blocks.1.linear").register_forward_hook(lambda module, inputs, output: output * 1.5)
    return model


Write = Callable[..., Path]


@pytest.fixture
def written(tmp_path: Path) -> Write:
    """Function that writes a run with rows of one table."""

    def write(rows: Sequence[Mapping[str, Any]], table: str = "stats", **record: Any) -> Path:
        return write_run(tmp_path / f"run{len(list(tmp_path.iterdir()))}", rows={table: rows}, **record)

    return write


def test_float64_has_a_small_tolerance(written: Write) -> None:
    values = np.random.default_rng(0).random((4, 3))
    rows = [{"step": i, "min": a, "max": b, "abs_max": c, "rms": a} for i, (a, b, c) in enumerate(values)]
    found = instrument.diff(written(rows), written(rows))
    assert found.dtypes == ("float64", "float64")
    assert found.tolerance == 1e-10


@pytest.mark.slow
def test_first_difference_in_time_is_found(original: Run) -> None:
    model = Original()

    def change(step: int) -> None:
        if step == 1:
            with torch.no_grad():
                model.get_submodule("blocks.1.linear").get_parameter("weight")[0, 0] += 0.5

    other = record(model, before=change)
    found = instrument.diff(original, other)
    assert found.first is not None
    assert (found.first.step, found.layers.loc[found.first.location, "layer"]) == (1, "blocks.1.linear")
    assert found.first.before == 0.0
    assert found.steps[0].max() == 0.0
    assert found.layers.query("layer == 'blocks.1.linear' and role == 'output'")["first_step"].tolist() == [1]
    assert instrument.diff(original, other, steps=(0, 1)).is_identical


@pytest.mark.slow
def test_steps_limit_the_comparison(original: Run, wrong: Run) -> None:
    found = instrument.diff(original, wrong, steps=(1, None))
    assert found.common_steps == (1, 2, 2)
    assert list(found.steps.columns) == [1, 2]


@pytest.mark.slow
def test_parts_of_tables_give_the_same_result(
    original: Run, wrong: Run, different: Diff, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_differences, "MAX_ROWS", 1)
    monkeypatch.setattr(recorded_differences, "MAX_BYTES", 20_000)
    parts = instrument.diff(original, wrong, steps=(0, 2))
    for name in ("layers", "steps", "metrics"):
        assert getattr(parts, name).equals(getattr(different, name)), name
    assert parts.first == different.first
    assert parts.tensors.drop(columns="ulp").equals(different.tensors.drop(columns="ulp"))
    assert np.array_equal(np.stack(parts.tensors["ulp"]), np.stack(different.tensors["ulp"]))


def test_tensors_show_differences_that_statistics_do_not(written: Write) -> None:
    values = np.arange(6, dtype=np.float32)
    tensor = {"dtype": "float32", "shape": [6], "source_shape": [6], "hook": "kept"}
    runs = [written([{**tensor, "values": each}], "tensors") for each in (values, values[::-1].copy())]
    found = instrument.diff(*runs)
    assert found.first is not None
    assert (found.first.statistic, found.first.location) == ("values", 0)
    assert found.tensors.loc[0, "l2"] == pytest.approx(
        float(np.linalg.norm(values - values[::-1]) / np.linalg.norm(values))
    )
    assert "element by element: relative difference" in str(found)


NAN, INF = math.nan, math.inf
VALUES: dict[str, tuple[Tensor, Tensor, str, str]] = {
    "permuted": (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 1.0, 2.0]), "EQUAL STATISTICS", "DIFFERENT"),
    "equal": (
        torch.tensor([1.0, 2.0]),
        torch.tensor([1.0, 2.0]),
        "EQUAL STATISTICS",
        "EQUAL BITS: all compared elements",
    ),
    "zero": (
        torch.tensor([0.0, 2.0]),
        torch.tensor([-0.0, 2.0]),
        "EQUAL STATISTICS",
        "EQUAL: all compared elements are equal",
    ),
    "shape": (torch.ones(2, 3), torch.ones(3, 2), "shape [2, 3] and [3, 2]", "shape [2, 3] and [3, 2]"),
    "empty": (torch.ones(0, 3), torch.ones(0, 3), "EQUAL STATISTICS", "EQUAL BITS: all compared elements"),
    "int64": (torch.tensor([2**53]), torch.tensor([2**53 + 1]), "WITHIN", "WITHIN"),
    "dtype": (
        torch.ones(3),
        torch.ones(3).bfloat16(),
        "EQUAL STATISTICS",
        "different dtypes: float32 and bfloat16 at 0 (Identity)",
    ),
    "complex": (torch.tensor([1j, 1]), torch.ones(2), "EQUAL STATISTICS", "DIFFERENT"),
    "nan": (torch.tensor([NAN]), torch.tensor([NAN]), "EQUAL STATISTICS", "EQUAL BITS: all compared elements"),
    "infinite": (torch.tensor([INF]), torch.tensor([-INF]), "EQUAL STATISTICS", "DIFFERENT"),
    "not_finite": (torch.tensor([NAN]), torch.tensor([INF]), "nan_count 1 and 0", "DIFFERENT"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUES)
def test_verdict_claims_only_what_was_compared(name: str) -> None:
    model = nn.Sequential(nn.Identity())
    for tensors, verdict in zip((False, True), VALUES[name][2:], strict=True):
        hook = {**TENSORS["kept"], "layers": "0", "stats": "none" if tensors else "default", "tensors": tensors}
        runs = []
        for value in VALUES[name][:2]:
            with instrument.attach(model, {"kept": hook}) as probe:
                model(value)
                probe.end_step()
            runs.append(probe.run)
        found = instrument.diff(*runs)
        assert verdict in str(found)
        assert found.is_identical is (verdict[:5] == "EQUAL")
        assert found.is_within_tolerance is ("DIFFERENT" not in str(found))


@pytest.mark.spread(1)
@pytest.mark.parametrize("stats", [["fingerprint"], ["default", "fingerprint"]], ids=["alone", "with_sums"])
def test_fingerprints_prove_equal_bits(stats: list[str]) -> None:
    def recorded(*values: Tensor) -> Run:
        model = nn.Sequential(nn.Identity())
        with instrument.attach(
            model, {"kept": {**TENSORS["kept"], "layers": "0", "stats": stats, "tensors": False}}
        ) as probe:
            for value in values:
                model(value)
                probe.end_step()
        return probe.run

    values = torch.tensor([0.0, 1.0, 2.0])
    found = instrument.diff(recorded(values, values), recorded(values, values.clone()))
    assert "EQUAL BITS: the fingerprints of all compared tensors are equal" in str(found)
    for other in (torch.tensor([-0.0, 1.0, 2.0]), torch.tensor([1.0, 0.0, 2.0])):
        found = instrument.diff(recorded(values, values), recorded(values, other))
        assert not found.is_identical
        assert found.first_bits == (1, 0, 0)
        if stats == ["fingerprint"]:
            assert "DIFFERENT: the first difference is at step 1, 0 (Identity), forward output" in str(found)
            assert "the fingerprints differ, and so do the bits" in str(found)
        else:
            assert found.is_within_tolerance
            assert "the first bits that differ: step 1, 0 (Identity), forward output" in str(found)


@pytest.mark.slow
def test_tolerance_zero_counts_every_difference(written: Write) -> None:
    runs = [written([{"rms": 1.0, "max": 2.0, "custom": rest}]) for rest in (None, [("max_remainder", 1.0)])]
    assert instrument.diff(*runs).first is None
    found = instrument.diff(*runs, tolerance=0.0).first
    assert found is not None
    assert (found.statistic, found.difference) == ("max", 0.5)


def test_steps_of_one_run_are_reported(written: Write) -> None:
    runs = [written([{"rms": 1.0, "step": step} for step in range(steps)]) for steps in (5, 2)]
    found = instrument.diff(*runs)
    assert found.unmatched_rows == (3, 0)
    assert "rows only in A: 3 (other steps or tables," in str(found)


def test_rows_of_a_phase_at_a_common_step_are_counted_once(written: Write) -> None:
    training = [{"rms": 1.0, "step": step} for step in range(3)]
    runs = [
        written([*training, *({"rms": 1.0, "step": step, "phase": "eval"} for step in evaluated)])
        for evaluated in ((1, 2), (2,))
    ]
    assert instrument.diff(*runs).unmatched_rows == (1, 0)


def test_other_dtypes_are_reported_in_one_line(written: Write) -> None:
    rows = [{"layer": layer, "hook": "kept", "shape": [1], "source_shape": [1], "values": [1.0]} for layer in "abc"]
    runs = [written([{**row, "dtype": dtype} for row in rows], "tensors") for dtype in ("float32", "bfloat16")]
    lines = [line for line in str(instrument.diff(*runs)).splitlines() if line.startswith("different dtypes")]
    assert len(lines) == 1
    assert re.fullmatch(r"different dtypes: float32 and bfloat16 at a .* and 2 other locations", lines[0])


@pytest.mark.slow
def test_other_shapes_differ_and_other_selections_are_left_out(written: Write) -> None:
    tensor = {"dtype": "float32", "hook": "kept"}
    one, selection, other = (
        written([{**tensor, "shape": shape, "source_shape": source, "values": values}], "tensors")
        for shape, source, values in (([2], [2], [1.0, 2.0]), ([1], [2], [1.0]), ([1], [1], [1.0]))
    )
    found = instrument.diff(one, other)
    assert found.first is not None
    assert found.first.difference == np.inf
    with pytest.raises(ConfigError, match="different parts of the tensors"):
        instrument.diff(one, selection)


@pytest.mark.slow
def test_gradient_that_is_only_rounding_error_is_ignored() -> None:
    """The gradient of a bias before a batch norm is zero. What remains is rounding error."""
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)]
    model = nn.Sequential(nn.Linear(8, 64), nn.Unflatten(1, (1, 8, 8)), *layers)
    hooks = {"gradients": HOOKS["gradients"], "seen": HOOKS["activations"]}
    one, other = (record(model, hooks, steps=1, dtype=dtype) for dtype in (None, torch.bfloat16))
    found = instrument.diff(one, other)
    bias = found.layers.query("layer == '2' and path == 'bias'").iloc[0]
    assert one.stats.query("layer == '2' and path == 'bias'")["rms"].iloc[0] < 1e-6
    assert bias["difference"] < found.tolerance
    assert instrument.diff(one, other, tolerance=0.0).layers.loc[bias.name, "difference"] > 0.5


def test_hooks_with_other_names_are_matched(written: Write) -> None:
    rows = [{"rms": 1.0, "mean": 0.5}]
    found = instrument.diff(written(rows), written([{**rows[0], "hook": "other"}]))
    assert found.is_identical
    assert found.layers[["hook", "hook_b"]].to_numpy().tolist() == [["seen", "other"]]


def test_counts_of_non_finite_values_decide(written: Write) -> None:
    rows = {"rms": 1.0, "numel": 10, "inf_count": 0}
    found = instrument.diff(written([{**rows, "nan_count": 0}]), written([{**rows, "nan_count": 1}]))
    assert found.first is not None
    assert found.first.statistic == "nan_count"
    assert "It is the first recorded tensor of the step, so the weights or the batches may differ too." in str(found)


def test_fractions_and_extremes_do_not_decide(written: Write) -> None:
    rows = {"rms": 1.0, "zero_fraction": 0.5, "max": 2.0, "abs_max": 2.0}
    found = instrument.diff(written([rows]), written([{**rows, "zero_fraction": 0.6, "max": 1.9, "abs_max": 1.9}]))
    assert found.first is None
    assert found.layers.loc[0, "zero_fraction"] == pytest.approx(0.1)
    assert found.layers.loc[0, "max"] == pytest.approx(0.05)
    assert not found.is_identical


@pytest.mark.slow
def test_loss_decides_if_the_recorded_tensors_do_not_differ(tmp_path: Path) -> None:
    stats = [{"rms": 1.0}]
    losses = {"original": (1.0, 2.0, 3.0), "other": (1.0, 3.0, math.nan), "missing": (None, None, None)}
    runs = {
        name: write_run(
            tmp_path / name,
            rows={"stats": stats, "metrics": [{"step": i, "loss": each} for i, each in enumerate(values)]},
        )
        for name, values in losses.items()
    }
    found = instrument.diff(runs["original"], runs["other"])
    assert "DIFFERENT in the loss only" in str(found)
    assert found.first is None
    assert not found.is_within_tolerance
    assert found.other_losses["difference"].to_list() == [pytest.approx(1 / 3), math.inf]
    assert len(found.metrics) == 3
    assert instrument.diff(runs["original"], runs["missing"]).is_identical


def test_evaluation_precedes_the_step_of_its_number(written: Write) -> None:
    rows = [{"step": 4, "rms": 1.0}, {"step": 4, "rms": 1.0, "phase": "eval", "layer": "b"}]
    found = instrument.diff(written(rows), written([{**row, "rms": 2.0} for row in rows]))
    assert found.first is not None
    assert found.first.phase == "eval"
    assert "step 4 (eval), b (Linear), forward output (eval)" in str(found)


def test_averaged_rows_of_ranks_are_matched_with_one_process(written: Write) -> None:
    one = {"rms": 1.0, "kind": "parameter_grad", "role": "param_grad", "path": "weight", "scope": "global"}
    ranks = [{**one, "scope": "averaged", "rank": rank, "micro_step": 1} for rank in (0, 1)]
    found = instrument.diff(written([one]), written(ranks, used={"ranks": 2}))
    assert found.is_identical
    assert found.unmatched_rows == (0, 0)
    assert found.settings["ranks"] == ("1", "2")


CLI = (
    *("model=mlp", "model.sizes=[64,8,10]", "data=digits", "hooks=activations", "hooks.activations.every=1"),
    *("train.steps=2", "data.ids=all", "quiet=true"),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: `base`, `seed`, with another seed, and `data`, with other samples."""
    folder = tmp_path_factory.mktemp("diff")
    for name, more in {"base": [], "seed": ["seed=1"], "data": ["data.slice.start=100"]}.items():
        train_here(folder / name, *CLI, *more)
    return folder


def test_changed_seed_names_no_layer(trained: Path) -> None:
    found = instrument.diff(trained / "base", trained / "seed")
    assert found.cause == "seed"
    assert found.settings["seed"] == ("0", "1")
    verdict = str(found).partition("DIFFERENT")[2]
    assert "The seeds are 0 and 1" in verdict
    assert "layers.0" not in verdict


@pytest.mark.spread(1)
@pytest.mark.parametrize(("mode", "cause"), [("forward", ""), ("train", "seed")])
def test_seed_is_no_cause_with_loaded_weights_in_forward_mode(written: Write, mode: str, cause: str) -> None:
    record: dict[str, Any] = {"config": {"mode": mode}, "used": {"init_from": {"path": "weights.pt"}}}
    assert instrument.diff(*(written([{"rms": 1.0 + seed}], seed=seed, **record) for seed in (0, 1))).cause == cause


def test_added_intervention_is_listed_by_its_fields(written: Write) -> None:
    scale = {"layers": "fc", "kind": "forward", "action": "scale", "factor": 2.0}
    runs = [written([{"rms": 1.0}], config={"hooks": hooks}) for hooks in ({}, {"loud": scale})]
    settings = instrument.diff(*runs).settings
    assert "hooks" not in settings
    assert settings["hooks.loud.factor"] == ("missing", "2")


def test_settings_of_record_hooks_are_listed(written: Write) -> None:
    record = {"layers": "fc", "kind": "forward", "action": "record"}
    runs = [written([{"rms": 1.0}], config={"hooks": {"fc": {**record, "every": every}}}) for every in (1, 2)]
    assert instrument.diff(*runs).settings == {"hooks.fc.every": ("1", "2")}


def test_settings_of_modules_are_listed(tmp_path: Path) -> None:
    for p in (0.1, 0.5):
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(p))
        record = {"layers": "**", "kind": "forward", "action": "record"}
        with instrument.attach(model, {"outputs": record}, out=tmp_path / str(p)) as probe:
            loss = model(torch.ones(1, 2)).sum()
            probe.end_step(loss=loss if p == 0.1 else loss.item())  # one of them has operators
    assert instrument.diff(tmp_path / "0.1", tmp_path / "0.5").settings == {"1.p": ("0.1", "0.5")}


def test_other_batches_name_no_layer(trained: Path) -> None:
    found = instrument.diff(trained / "base", trained / "data")
    assert found.cause == "batches"
    assert found.settings["data.slice.start"] == ("missing", "100")
    assert "The batches of this step consist of different samples." in str(found)
    assert "loss: the first difference is at step 0" in str(found)


VERSIONS = [REPOSITORY / "tests" / "recorded_runs" / f"torch-{version}" for version in ("2.13.0", "2.14.1")]


@pytest.mark.slow
def test_two_versions_of_torch_are_within_the_tolerance() -> None:
    found = instrument.diff(*VERSIONS)
    assert found.settings == {"torch version": ("2.13.0+cpu", "2.14.1")}
    assert found.first is None
    assert not found.is_identical
    assert 1e-8 < found.layers["difference"].max() < 6e-5
    assert len(found.layers) == 35
    attention = found.tensors.iloc[1]
    assert (attention["elements"], attention["ulp"].sum()) == (512, 512)
    assert 0 < attention["l2"] < 1e-6


def test_figure_shows_the_layers_and_the_steps() -> None:
    kept = {**TENSORS["kept"], "stats": "default"}
    hooks = {"kept": {**kept, "layers": ["stem", "blocks.1.*"]}, "again": {**kept, "layers": "stem"}}
    found = instrument.diff(record(Original(), hooks), record(Original(wrong=1), hooks), steps=(None, 2))
    figure = instrument.plot.diff(found)
    profile, by_step = figure.axes[:2]
    names = [label.get_text() for label in profile.get_yticklabels()]
    assert names[:2] == ["stem  output (kept)", "stem  output (again)"]
    assert "blocks.1.activation  output" in names
    assert by_step.get_xlabel() == "step"
    assert len(instrument.plot.diff(replace(found, steps=found.steps[[0]])).axes) == 1


def test_figure_of_something_else_than_differences_is_refused() -> None:
    with pytest.raises(
        InstrumentError, match=r"requires the result of instrument.diff\(run_a, run_b\), but a dict was"
    ):
        instrument.plot.diff({})


PROBLEMS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], str, str]] = {
    "layers": (
        [{"layer": "encoder.0"}, {"layer": "encoder.1"}],
        [{"layer": "backbone.0"}, {"layer": "backbone.1"}],
        "no layer was recorded by both runs",
        "pass --rename OLD=NEW, or in Python rename=",
    ),
    "hooks": ([{}], [{"role": "input"}], "the hooks of the two runs record different tensors", "same hooks"),
    "names": (
        [{"hook": "acts"}],
        [{"hook": "early"}, {"hook": "late"}],
        r"the hooks of the two runs record different tensors(.|\n)*A: acts \w+ \w+; B: early \w+ \w+, late ",
        "also the same names",
    ),
    "steps": ([{"step": 1}], [{"step": 2}, {"step": 3}], "no step was recorded by both runs", "every"),
    "scope": ([{"scope": "global"}], [{"scope": "local"}], "no row has a counterpart", "reduce=global"),
    "none": ([{}], [], "no tensor was recorded at the compared steps", "hooks=activations"),
    "counts": ([{"numel": 4}], [{"numel": 4, "rms": None, "std": 1.0}], "only counts and fractions", "stats=default"),
    "fractions": (
        [{"zero_fraction": 0.1, "rms": None}],
        [{"zero_fraction": 0.9, "rms": None}],
        "only counts and fractions",
        "stats=default",
    ),
}


@pytest.mark.parametrize("name", tiered(PROBLEMS, [name for name in PROBLEMS if name != "fractions"]))
def test_runs_with_nothing_in_common_are_reported(written: Write, name: str) -> None:
    one, other, message, fix = PROBLEMS[name]
    with pytest.raises(ConfigError, match=f"nothing to compare: {message}") as error:
        instrument.diff(*(written([{"rms": 1.0, **row} for row in rows]) for rows in (one, other)))
    assert fix in str(error.value)


def test_folder_with_several_runs_and_the_same_folder_are_refused(trained: Path) -> None:
    with pytest.raises(ConfigError, match="contains 3 runs") as error:
        instrument.diff(trained, trained / "base")
    assert str(trained / "base") in str(error.value)
    with pytest.raises(ConfigError, match="both runs are the same folder"):
        instrument.diff(trained / "base", trained / "seed" / ".." / "base")


def test_run_in_progress_requires_the_end_of_the_steps(original: Run) -> None:
    model = Original()
    with instrument.attach(model, {"activations": HOOKS["activations"]}) as probe:
        model(torch.zeros(32, 8))
        probe.end_step()
        with pytest.raises(ConfigError, match="the run is still in progress") as error:
            instrument.diff(original, probe.run)
        assert "0:100" in str(error.value)
        assert instrument.diff(original, probe.run, steps=(0, 1)).common_steps == (0, 0, 1)


@pytest.mark.parametrize("tolerance", [-1.0, float("nan"), float("inf"), "1e-3"])
def test_invalid_tolerance_is_refused(original: Run, tolerance: float) -> None:
    with pytest.raises(ConfigError, match="tolerance: must be a number of at least 0"):
        instrument.diff(original, original, tolerance=tolerance)


@pytest.mark.parametrize("steps", [5, (1,), ("1", None), (0.5, 2)])
def test_invalid_steps_are_refused(original: Run, steps: Any) -> None:
    with pytest.raises(ConfigError, match="steps: must be a range of steps"):
        instrument.diff(original, original, steps=steps)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_model_is_within_the_tolerance(original: Run, same: Diff, backend: str) -> None:
    torch.compiler.reset()
    model = Original()
    model.compile(backend=backend)
    found = instrument.diff(original, record(model))
    torch.compiler.reset()
    assert found.first is None, str(found)
    assert len(found.layers) == (same.layers["hook"] != "kept").sum()


def test_equal_tensors_of_runs_with_another_metric_name_it(tmp_path: Path) -> None:
    for name, rate in (("a", 0.1), ("b", 0.2)):
        write_run(tmp_path / name, rows={"stats": [{"rms": 1.0}], "metrics": [{"step": 0, "loss": 1.0, "lr": rate}]})
    text = str(instrument.diff(tmp_path / "a", tmp_path / "b"))
    assert "WITHIN THE TOLERANCE: the largest decisive difference is 0\n" in text
    assert "  metrics that differ: lr\n" in text + "\n"
