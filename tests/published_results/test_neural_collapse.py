"""Papyan et al. 2020: neural collapse. The experiment of docs/gallery/neural_collapse.md, with several seeds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import finished
from page_blocks import run_gallery_page

import instrument

pytestmark = pytest.mark.slow

CLASSES = 10


def collapse(run: instrument.Run, step: int) -> dict[str, float]:
    """Return the measures of the paper after a number of steps."""
    features, targets, _ = run.features("layers.2", step=step)
    weight = run.tensors(hook="classifier", step=step - 1)["values"].iloc[0]
    means = np.stack([features[targets == c].mean(0) for c in range(CLASSES)])
    centered = means - means.mean(0)
    within = np.cov((features - means[targets]).T, bias=True)
    between = np.cov(means.T, bias=True)
    units = centered / np.linalg.norm(centered, axis=1, keepdims=True)
    cosines = (units @ units.T)[~np.eye(CLASSES, dtype=bool)]
    difference = weight / np.linalg.norm(weight) - centered / np.linalg.norm(centered)
    nearest = ((features[:, None] - means) ** 2).sum(2).argmin(1)
    return {
        "variability": float(np.trace(within @ np.linalg.pinv(between, rcond=1e-6))) / CLASSES,
        "angles": float(cosines.std()),
        "simplex": float(abs(cosines + 1 / (CLASSES - 1)).mean()),
        "alignment": float((difference**2).sum()),
        "nearest": float((nearest == targets).mean()),
    }


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of the page."""
    return run_gallery_page("neural_collapse", tmp_path_factory.mktemp("neural_collapse"))


def measures(run: instrument.Run) -> tuple[dict[str, float], dict[str, float]]:
    """Return the measures after 100 and after 1,500 steps. The training error is then zero."""
    accuracy = run.metrics.query("phase == 'eval'").set_index("step")["accuracy"]
    assert accuracy[1500] > 0.995
    return collapse(run, 100), collapse(run, 1500)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_features_collapse_to_a_simplex(page: Path, seed: int) -> None:
    run = page / "neural_collapse"
    if seed:
        run = finished(page / f"seed_{seed}", "+exp=neural_collapse", f"seed={seed}", "quiet=true").path
    first, last = measures(instrument.load(run))
    assert last["variability"] < min(0.01, first["variability"] / 5)
    assert last["angles"] < min(0.06, 0.7 * first["angles"])
    assert last["simplex"] < min(0.05, 0.7 * first["simplex"])
    assert last["alignment"] < min(0.04, first["alignment"] / 4)
    assert last["nearest"] > 0.999


def test_features_without_batch_norm_do_not_collapse(page: Path) -> None:
    first, last = measures(instrument.load(page / "without_norm"))
    assert last["variability"] > max(0.1, 0.8 * first["variability"])
    assert last["angles"] > 0.2
