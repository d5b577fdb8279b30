"""Zhang et al. 2017: networks fit random labels. The experiment of docs/gallery/random_labels.md."""

from __future__ import annotations

import pandas as pd
import pytest
from conftest import finished

pytestmark = pytest.mark.slow

FRACTION = "data.dataset.random_labels"


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """The metrics with and without random labels."""
    arguments = ("-m", "+exp=random_labels", f"{FRACTION}=0,0.5,1", "quiet=true")
    found = finished(tmp_path_factory.mktemp("random_labels") / "sweep", *arguments).metrics
    return found.set_index(FRACTION).sort_index()


def test_random_labels_are_fitted_without_generalization(metrics: pd.DataFrame) -> None:
    trained = metrics.query("phase == 'train' and step >= 450").groupby(FRACTION)["accuracy"].mean()
    tested = metrics.query("phase == 'eval' and step == 500")["accuracy"]
    assert trained.min() > 0.985
    assert tested[0.0] > 0.87
    assert 0.45 < tested[0.5] < 0.75
    assert tested[1.0] < 0.18  # a guess: 0.1


def test_fitting_random_labels_takes_a_small_factor_longer(metrics: pd.DataFrame) -> None:
    train = metrics.query("phase == 'train'")

    def epochs(fraction: float) -> int:
        accuracy = train.loc[fraction].groupby("epoch")["accuracy"].mean()
        return int((accuracy > 0.95).idxmax()) + 1

    assert 3 * epochs(0) < epochs(1) < 20 * epochs(0)


def test_gradients_of_random_labels_are_smaller_first_and_larger_later(metrics: pd.DataFrame) -> None:
    train = metrics.query("phase == 'train'")

    def norm(fraction: float, steps: str) -> float:
        return float(train.loc[fraction].query(steps)["grad_norm"].median())

    assert norm(1, "step < 25") < norm(0, "step < 25")
    assert norm(1, "step >= 200") > 30 * norm(0, "step >= 200")
