"""The experiments of docs/guides/examples.md: each runs, and what it records equals its description."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import REPOSITORY, run_in
from tiers import tiered

import instrument

GUIDE = REPOSITORY / "docs" / "guides" / "examples.md"
SMALL = ("data=digits", "quiet=true")
TINY_CNN = (*SMALL, "model.image_size=8", "data.slice.stop=64", "data.eval_slice.stop=16", "train.steps=2")
Experiment = Callable[..., instrument.Run]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """Function that runs an experiment with its command, and loads the run."""
    folder = tmp_path_factory.mktemp("experiments")
    numbers = itertools.count()

    def run(name: str, *overrides: str, multirun: bool = False) -> instrument.Run:
        path = folder / f"{name}_{next(numbers)}"
        where = f"hydra.{'sweep' if multirun else 'run'}.dir={path}"
        answer = run_in(folder, *(["-m"] if multirun else []), f"+exp={name}", *overrides, where).expect(0)
        path.with_suffix(".txt").write_text(answer.out)
        return instrument.load(path)

    return run


def rows_of(run: instrument.Run, hook: str) -> pd.DataFrame:
    return run.stats[run.stats.hook == hook]


def test_guide_lists_the_experiments_with_their_commands() -> None:
    rows = re.findall(r"^\| .+ \| `((?:-m )?\+exp=.+?)` \| .+ \|$", GUIDE.read_text(), re.M)
    names = [re.search(r"\+exp=(\w+)", row).group(1) for row in rows]
    assert len(names) == len(set(names)) >= 15
    for name, row in zip(names, rows, strict=True):
        command = (REPOSITORY / "conf" / "exp" / f"{name}.yaml").read_text().splitlines()[1]
        assert f"{command} ".startswith(f"# python -m instrument {row} ")
    tested = Path(__file__).read_text() + (REPOSITORY / "tests/interpret/test_class_activation_map.py").read_text()
    tested += (REPOSITORY / "tests/training/test_sparse_autoencoder.py").read_text()
    assert [name for name in names if f'"{name}"' not in tested and f"+exp={name}" not in tested] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", tiered(["feature_maps", "gradient_maps", "gradient_change"], {"feature_maps"}))
def test_maps_of_one_digit_are_recorded_before_and_after_the_training(experiment: Experiment, name: str) -> None:
    hooks = {"feature_maps": ("digit", "input", "output", "gradient"), "gradient_maps": ("digit", "gradients")}
    steps = [f"hooks.{hook}.steps=[0,2]" for hook in hooks.get(name, ())] or [
        f"hooks.{hook}.every=2" for hook in ("digit", "maps")
    ]
    run = experiment(name, *TINY_CNN, *steps)
    tensors = run.tensors()
    shapes = {
        (row["hook"], row["layer"], row["step"]): row["values"].shape
        for row in tensors.to_dict("records")
        if row["hook"] != "digit"
    }
    blocks = {"feature_maps": ["encoder.1"], "gradient_maps": [f"encoder.{i}" for i in range(3)]}.get(
        name, ["encoder.0"]
    )
    assert {layer for _, layer, _ in shapes} == set(blocks)
    assert {step for *_, step in shapes} == {0, 2}
    digits = tensors[tensors.hook == "digit"]["values"].tolist()
    assert [digit.shape for digit in digits] == [(1, 1, 8, 8)] * 2
    np.testing.assert_array_equal(*digits)
    if name == "feature_maps":
        assert shapes["input", "encoder.1", 0] == (1, 16, 4, 4)
        assert shapes["output", "encoder.1", 0] == shapes["gradient", "encoder.1", 0] == (1, 32, 2, 2)
        assert run.info["config"]["task"]["smoothing"] == 0.1
    if name == "gradient_change":
        assert set(rows_of(run, "gradients").step) == {0}
        assert len(run.distributions) == 10
    image, *maps = [axes for axes in instrument.plot.feature_maps(run, scale="channel").axes if axes.get_title()]
    assert image.get_title() == "image, step 0"
    assert maps


@pytest.mark.slow
def test_all_gradients_are_clipped_to_a_hundredth(experiment: Experiment) -> None:
    run = experiment("clip_gradients", *SMALL, "train.steps=4")
    before, after = (rows_of(run, hook).abs_max.to_numpy() for hook in ("before", "after"))
    assert len(before) == len(after) == 4 * 6
    assert before.max() > 0.011
    np.testing.assert_array_equal(after, np.minimum(before, np.float32(0.01)))


@pytest.mark.slow
def test_exploding_gradient_is_reported_and_clipped_only_there(experiment: Experiment) -> None:
    run = experiment("exploding_gradient", *SMALL, "train.steps=42")
    assert run.events[["step", "rule", "layer", "severity"]].to_numpy().tolist() == [
        [40, "exploding", "layers.1.0", "warning"]
    ]
    clipped = run.effects.query("held == True")
    assert clipped[["step", "layer", "path"]].to_numpy().tolist() == [
        [40, "layers.1.0", "weight"],
        [40, "layers.1.0", "bias"],
    ]
    assert clipped.norm_after.to_numpy() == pytest.approx([1.0, 1.0], rel=1e-5)
    assert len(run.effects.query("hook == 'tame'")) == 42 * 6


@pytest.mark.slow
def test_units_stay_equal_if_all_weights_are_one(experiment: Experiment) -> None:
    run = experiment("ones", *SMALL, "train.steps=3", "hooks.weights.steps=[0,2]")
    first, last = run.tensors()["values"]
    assert (np.abs(first - 1) < 1e-3).all()
    assert last.std(0).max() < 1e-5


@pytest.mark.slow
def test_functions_become_linear_layers_with_a_trained_bias(experiment: Experiment) -> None:
    run = experiment("linear_functions", *SMALL, "train.steps=3", "hooks.biases.every=1")
    assert list(run.layers[run.layers.layer.isin(["layers.0.1", "layers.1.1"])].module_type) == ["Linear", "Linear"]
    assert "ReLU" not in set(run.layers.module_type)
    first = rows_of(run, "outputs").query("step == 0")
    assert (first["min"] < 0).all()
    biases = rows_of(run, "biases")
    assert biases.query("step == 0")["mean"].to_numpy() == pytest.approx([0.1, 0.1], abs=0.01)
    assert (biases.query("step == 2")["std"] > 0).all()


@pytest.mark.slow
def test_optimizer_hooks_record_the_step_of_adam(experiment: Experiment) -> None:
    run = experiment("optimizer_steps", *SMALL, "train.steps=2")
    norms = run.stats.query("step == 0").pivot_table(index=["layer", "path"], columns="hook", values="l2")
    assert norms["first_moment"].to_numpy() == pytest.approx(0.1 * norms["gradient"].to_numpy(), rel=1e-4)
    largest = rows_of(run, "update").query("step == 0")["abs_max"]
    assert largest.to_numpy() == pytest.approx(run.info["config"]["optimizer"]["lr"], rel=1e-2)
    last = run.stats.query("step == 1 and hook == 'before'").set_index(["layer", "path"]).l2
    assert last.to_numpy() == pytest.approx(norms["after"].reindex(last.index).to_numpy())


@pytest.mark.slow
def test_state_dict_hooks_record_the_checkpoints(experiment: Experiment) -> None:
    run = experiment("state_dict", *TINY_CNN, "train.checkpoint.every=1")
    saved = rows_of(run, "saved")
    assert sorted(set(saved.step)) == [1, 2]
    assert set(saved.path) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    counts = saved.query("path == 'num_batches_tracked' and layer == 'encoder.0.1'")
    assert counts["mean"].tolist() == [1, 2]
    assert set(rows_of(run, "moments").role) == {"state.exp_avg"}


@pytest.mark.slow
def test_l2_hook_equals_weight_decay_and_l1_makes_weights_smaller(experiment: Experiment) -> None:
    penalties = "hooks.penalty=null,{fn: l1},{fn: l2}"
    run = experiment("weight_decay", *SMALL, penalties, multirun=True)
    last = rows_of(run, "weights").query("step == 180").groupby("run").l1.sum()
    assert last["1"] < 0.7 * last["0"]
    assert last["1"] < last["2"] < 0.95 * last["0"]
    plain = experiment("weight_decay", *SMALL, "hooks.penalty=null", "+optimizer.weight_decay=0.002", "train.steps=21")
    hooked = experiment("weight_decay", *SMALL, "train.steps=21")
    pd.testing.assert_series_equal(plain.metrics.loss, hooked.metrics.loss)


@pytest.mark.slow
def test_modules_of_resnet_50_are_printed_and_its_features_recorded(experiment: Experiment) -> None:
    from torchvision.models import resnet50

    small = ("data.dataset.shape=[3,64,64]", "data.slice.stop=2")
    run = experiment("verbose", *small)
    lines = [line for line in run.path.with_suffix(".txt").read_text().splitlines() if line.startswith("shapes ")]
    modules = dict(resnet50(weights=None).named_modules())
    calls = sum(name.endswith(".relu") and 2 for name in modules)  # each ReLU of a block is called three times
    assert len(lines) == len(modules) + calls
    assert "  conv1  output  [2, 64, 32, 32] float32" in lines[0]
    assert "  fc  output  [2, 1000]" in lines[-2]
    features = experiment("resnet_features", *small)
    assert features.features("layer4").X.shape == (2, 2048, 2, 2)
    pooled = features.features("avgpool").X
    np.testing.assert_allclose(pooled, features.features("layer4").X.mean((2, 3)), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_gradient_penalty_sweep(experiment: Experiment) -> None:
    run = experiment("wgan_gp", "task.penalty=0,1,10", "train.steps=6", "quiet=true", multirun=True)
    assert sorted(run.runs["task.penalty"]) == [0, 1, 10]
    assert rows_of(run, "critic_gradients").groupby("task.penalty").l2.max().gt(0).all()


@pytest.mark.slow
def test_record_hooks_keep_losses_bit_identical_at_93_percent(experiment: Experiment, mnist_root: Path | None) -> None:
    data = ["data=digits", "data.dataset.size=28"] if mnist_root is None else [f"data.root={mnist_root}"]
    hooks = ("activations", "flow", "gradients", "updates")
    recorded = experiment("mnist_record", *data)
    baseline = experiment("mnist_record", *data, *(f"hooks.{name}=null" for name in hooks))
    assert len(baseline.stats) == len(baseline.coverage) == 0
    assert set(recorded.stats.hook) == set(hooks)
    assert len(recorded.stats) > 500
    for column in ("loss", "accuracy", "grad_norm"):
        assert recorded.metrics[column].equals(baseline.metrics[column])
    if mnist_root is not None:
        assert recorded.info["data"]["train_samples"] == 6400
        assert recorded.info["data"]["eval_samples"] == 10_000
        assert recorded.info["metrics"]["accuracy"] >= 0.93
