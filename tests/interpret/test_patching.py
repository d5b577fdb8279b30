"""Patching heat maps: cells, baselines, seeds, statistics, labels, and errors that name the keys of the sweep."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from figures import axis_labels, legend_of, make_run, mesh_of
from scipy import stats
from torch import Tensor, nn

import instrument
from instrument import InstrumentError
from instrument.plot import patching

LENGTH = 4
BATCH = torch.linspace(-1.0, 1.0, 2 * LENGTH * 6).reshape(2, LENGTH, 6)
ZERO = {"kind": "forward", "action": "modify", "fn": "zero"}
OUTPUT = {"layers": "10", "kind": "forward", "action": "record", "stats": ["mean", "std"]}


def loss_of(output: Tensor) -> Tensor:
    return output[:, -1].square().mean()


@pytest.fixture(scope="module")
def model() -> nn.Sequential:
    """Eleven layers, so that their order differs from that of their names."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6) if i in (2, 10) else nn.Tanh() for i in range(11)]
    with torch.no_grad():
        layers[10].bias.add_(1.0)
    return nn.Sequential(*layers)


Recorder = Callable[..., Path]


@pytest.fixture(scope="module")
def record(model: nn.Sequential) -> Recorder:
    def run(folder: Path, **fields: Any) -> Path:
        hooks = {**({"patch": {**ZERO, **fields}} if fields else {}), "output": OUTPUT}
        with torch.no_grad(), instrument.attach(model, hooks, out=folder) as probe:
            probe.end_step(loss=loss_of(model(BATCH)))
        return folder

    return run


@pytest.fixture(scope="module")
def positions(record: Recorder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep over two layers and two positions, with a baseline."""
    root = tmp_path_factory.mktemp("patching") / "positions"
    record(root / "baseline")
    for layer in ("10", "2"):
        for position in (-1, 0):
            record(root / f"{layer}{position}", layers=layer, positions=[position])
    return root


def change(folder: Path, **values: Any) -> None:
    file = folder / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def by_hand(model: nn.Sequential, layer: int, position: int, number: Callable[[Tensor], Tensor] = loss_of) -> float:
    """Return the difference of a number with and without the zeros."""
    with torch.no_grad():
        hidden = model[: layer + 1](BATCH)
        hidden[:, position] = 0.0
        return number(model[layer + 1 :](hidden)).item() - number(model(BATCH)).item()


@pytest.mark.slow
def test_cells_are_differences_to_the_baseline(model: nn.Sequential, positions: Path) -> None:
    figure = patching(instrument.load(positions))
    axes, bar = figure.axes
    expected = [[by_hand(model, layer, position) for position in (0, -1)] for layer in (2, 10)]
    values = mesh_of(axes).get_array()
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-8)
    assert axis_labels(axes) == ["2", "10"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "-1"]
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("hooks.patch.layers", "hooks.patch.positions")
    assert bar.get_ylabel() == "loss minus baseline"
    assert mesh_of(axes).get_clim() == (-np.abs(values).max(), np.abs(values).max())
    written = [float(text.get_text()) for text in axes.texts]
    np.testing.assert_allclose(written, values.ravel(), atol=0.06 * np.abs(values).max())


def test_statistic_of_a_layer_is_a_metric(model: nn.Sequential, positions: Path) -> None:
    values = mesh_of(patching(instrument.load(positions), "std").axes[0]).get_array()
    deviation = lambda output: output.std(correction=0)  # noqa: E731
    expected = [[by_hand(model, layer, position, deviation) for position in (0, -1)] for layer in (2, 10)]
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-6)
    message = r"(?s)metric: no location has this statistic.*given    std.*hook='output'.*layer='10'"
    with pytest.raises(InstrumentError, match=message):
        patching(instrument.load(positions), "std", layer="3")


def test_tokens_are_labels_of_positions(positions: Path) -> None:
    axes = patching(instrument.load(positions), tokens=["the", "cat", "sat", "down"]).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["the (0)", "down (-1)"]
    axes = patching(instrument.load(positions), tokens=["$", "cat", "sat", "a_b"]).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == [r"\$ (0)", "a_b (-1)"]
    with pytest.raises(InstrumentError, match=r"(?s)tokens: there is no token at position 0.*given    0 tokens"):
        patching(instrument.load(positions), tokens=[])


@pytest.mark.slow
def test_baseline_is_optional_or_an_argument(model: nn.Sequential, positions: Path, tmp_path: Path) -> None:
    folders = sorted(folder for folder in positions.iterdir() if folder.name != "baseline")
    runs = [instrument.load(folder) for folder in folders]
    figure = patching(runs)
    assert figure.axes[1].get_ylabel() == "loss"
    losses = mesh_of(figure.axes[0]).get_array()
    assert mesh_of(figure.axes[0]).get_clim() == (losses.min(), losses.max())
    figure = patching(runs, baseline=instrument.load(positions / "baseline"))
    np.testing.assert_allclose(mesh_of(figure.axes[0]).get_array(), losses - loss_of(model(BATCH)).item(), rtol=1e-6)


def test_baseline_must_be_one_run_without_the_intervention(positions: Path) -> None:
    sweep = instrument.load(positions)
    with pytest.raises(InstrumentError, match=r"baseline: the folder contains 5 runs"):
        patching(sweep, baseline=sweep)
    with pytest.raises(InstrumentError, match=r"baseline: this run has the intervention 'patch'"):
        patching(sweep, baseline=instrument.load(positions / "20"))


@pytest.mark.slow
def test_seeds_are_averaged_and_matched(positions: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(positions, tmp_path / "positions"))
    for folder in sorted(positions.iterdir()):
        copied = Path(shutil.copytree(folder, root / f"{folder.name}_seed1"))
        change(copied, seed=1, metrics={"loss": 5.0 if folder.name == "baseline" else 7.0})
    change(root / "20", status="failed")
    change(root / "20_seed1", status="failed")
    figure = patching(instrument.load(root))
    values, before = (mesh_of(each.axes[0]).get_array() for each in (figure, patching(instrument.load(positions))))
    np.testing.assert_allclose(np.ma.filled(values, np.nan), [[np.nan, (before[0, 1] + 2) / 2], (before[1] + 2) / 2])
    assert figure.axes[0].get_xlabel().splitlines() == [
        "hooks.patch.positions",
        "mean of 2 seeds",
        "2 runs are not shown: its status is failed",
    ]
    assert legend_of(figure) == ["no finished run with a baseline"]


@pytest.mark.slow
def test_runs_of_a_seed_without_a_baseline_are_not_averaged(positions: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(positions, tmp_path / "positions"))
    for name in ("20", "100"):
        change(Path(shutil.copytree(root / name, root / f"{name}_seed1")), seed=1, metrics={"loss": 7.0})
    axes = patching(instrument.load(root)).axes[0]
    expected = mesh_of(patching(instrument.load(positions)).axes[0]).get_array()
    np.testing.assert_array_equal(mesh_of(axes).get_array(), expected)
    assert axes.get_xlabel().splitlines()[1:] == ["2 runs are not shown: no baseline with the same seed"]


@pytest.mark.slow
def test_heads_of_one_layer_are_one_row(record: Recorder, tmp_path: Path) -> None:
    for head in (2, 0, 1):
        record(tmp_path / str(head), layers="2", heads={"of": 3, "take": [head]})
    axes = patching(instrument.load(tmp_path)).axes[0]
    assert axis_labels(axes) == ["2"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "2"]
    assert axes.get_xlabel() == "hooks.patch.heads.take"
    with pytest.raises(InstrumentError, match=r"(?s)tokens are labels of positions.*hooks\.patch\.heads\.take"):
        patching(instrument.load(tmp_path), tokens=["a"])


@pytest.mark.slow
def test_layers_alone_are_one_column(record: Recorder, tmp_path: Path) -> None:
    for layer in ("2", "3"):
        record(tmp_path / layer, layers=layer)
    axes = patching(instrument.load(tmp_path)).axes[0]
    assert axis_labels(axes) == ["2", "3"]
    assert mesh_of(axes).get_array().shape == (2, 1)
    assert axes.get_xlabel() == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "lost"}, "metric: unknown metric or statistic.*'lost'.*loss"),
        ({"metric": "accuracy"}, "metric: no run and its baseline have a finite value.*accuracy"),
        (
            {"intervention": "patched"},
            r"intervention: the runs do not differ.*given    patched.*hooks\.patch\.layers",
        ),
    ],
)
def test_argument_that_the_runs_do_not_have_is_refused(positions: Path, options: Any, message: str) -> None:
    with pytest.raises(InstrumentError, match=f"(?s){message}"):
        patching(instrument.load(positions), **options)


def test_errors_name_the_swept_keys(record: Recorder, positions: Path, tmp_path: Path) -> None:
    extra = record(tmp_path / "three", layers="3", positions=[0], scale=0.5, fn="add", value=1.0)
    message = r"(?s)differ in more than two fields of 'patch'.*hooks\.patch\.layers.*hooks\.patch\.fn"
    with pytest.raises(InstrumentError, match=message):
        patching([instrument.load(positions), instrument.load(extra)])
    plain = [
        make_run(tmp_path / f"plain{seed}", seed=seed, steps=1, overrides={"optimizer.lr": seed}) for seed in (0, 1)
    ]
    message = r"(?s)do not differ in any field of an intervention \(2 of 2 runs.*optimizer\.lr"
    with pytest.raises(InstrumentError, match=message):
        patching(plain)


def test_intervention_is_selected(positions: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(positions, tmp_path / "positions"))
    for folder in root.iterdir():
        config = json.loads((folder / "run.json").read_text())["config"]
        if patch := config["hooks"].get("patch"):
            change(folder, config={**config, "hooks": {**config["hooks"], "second": {**patch, "name": "second"}}})
    message = r"(?s)differ in several interventions.*intervention='patch' or intervention='second'"
    with pytest.raises(InstrumentError, match=message):
        patching(instrument.load(root))
    axes, bar = patching(instrument.load(root), intervention="second").axes
    assert (axes.get_ylabel(), bar.get_ylabel()) == ("hooks.second.layers", "loss")  # no run without only this one


def test_runs_of_a_cell_must_be_equal(positions: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(positions, tmp_path / "positions"))
    config = json.loads((root / "20" / "run.json").read_text())["config"]
    change(Path(shutil.copytree(root / "20", root / "more")), config={**config, "optimizer": {"lr": 0.5}})
    with pytest.raises(InstrumentError, match=r"(?s)also differ in other keys.*given    optimizer\.lr"):
        patching(instrument.load(root))


def test_means_over_seeds_have_students_intervals(positions: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(positions, tmp_path / "positions"))
    for seed, loss in ((1, 7.0), (2, 8.0)):
        for folder in sorted(positions.iterdir()):
            copied = Path(shutil.copytree(folder, root / f"{folder.name}_seed{seed}"))
            change(copied, seed=seed, metrics={"loss": 5.0 if folder.name == "baseline" else loss})
    (first,) = mesh_of(patching(instrument.load(positions)).axes[0]).get_array()[1, :1]
    differences = np.array([first, 2.0, 3.0])
    for interval, arguments in ((0.95, {}), (0.8, {"interval": 0.8})):
        axes = patching(instrument.load(root), width=7.0, **arguments).axes[0]
        low, high = stats.t.interval(interval, 2, differences.mean(), stats.sem(differences))
        texts = {text.get_position(): text.get_text() for text in axes.texts}
        mean, width = (float(text.lstrip("±")) for text in texts[0.5, 1.5].splitlines())
        assert (mean, width) == pytest.approx((differences.mean(), (high - low) / 2), abs=0.05)
        assert f"mean of 3 seeds ± half of its {100 * interval:g}% interval" in axes.get_xlabel().replace("\n", " ")
    assert not any("±" in text.get_text() for text in patching(instrument.load(root), interval=0).axes[0].texts)
