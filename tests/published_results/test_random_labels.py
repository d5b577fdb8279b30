"""Zhang et al. 2017: networks fit random labels. The experiment of docs/gallery/random_labels.md, with several seeds."""

from __future__ import annotations

import pandas as pd
import pytest
from conftest import finished
from page_blocks import run_gallery_page

import instrument

pytestmark = pytest.mark.slow

FRACTION = "data.dataset.random_labels"
SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """The metrics of all seeds, with and without random labels."""
    folder = run_gallery_page("random_labels", tmp_path_factory.mktemp("random_labels")) / "random_labels"
    finished(folder / "others", "-m", "+exp=random_labels", f"{FRACTION}=0,0.5,1", "seed=1,2", "quiet=true")
    return instrument.load(folder).metrics.set_index([FRACTION, "seed"]).sort_index()


@pytest.mark.parametrize("seed", SEEDS)
def test_random_labels_are_fitted_without_generalization(metrics: pd.DataFrame, seed: int) -> None:
    trained = metrics.query("phase == 'train' and step >= 450").groupby([FRACTION, "seed"])["accuracy"].mean()
    tested = metrics.query("phase == 'eval' and step == 500")["accuracy"]
    assert trained[:, seed].min() > 0.985
    assert tested[0.0, seed] > 0.87
    assert 0.45 < tested[0.5, seed] < 0.75
    assert tested[1.0, seed] < 0.18  # a guess: 0.1


@pytest.mark.parametrize("seed", SEEDS)
def test_fitting_random_labels_takes_a_small_factor_longer(metrics: pd.DataFrame, seed: int) -> None:
    train = metrics.query("phase == 'train'")

    def epochs(fraction: float) -> int:
        accuracy = train.loc[(fraction, seed)].groupby("epoch")["accuracy"].mean()
        return int((accuracy > 0.95).idxmax()) + 1

    assert 3 * epochs(0) < epochs(1) < 20 * epochs(0)


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_of_random_labels_are_smaller_first_and_larger_later(metrics: pd.DataFrame, seed: int) -> None:
    train = metrics.query("phase == 'train'")

    def norm(fraction: float, steps: str) -> float:
        return float(train.loc[(fraction, seed)].query(steps)["grad_norm"].median())

    assert norm(1, "step < 25") < norm(0, "step < 25")
    assert norm(1, "step >= 200") > 30 * norm(0, "step >= 200")
