"""Zhang et al. 2020: tails of gradient noise, and clipping. The experiment of docs/gallery/gradient_tails.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import finished
from page_blocks import run_gallery_page

import instrument

pytestmark = pytest.mark.slow

MEASURED_CNN = ("model=mnist_cnn", "model.image_size=8", "data=digits", "data.slice.stop=200", "task=cross_entropy")
CLIP = '{layers: "**", kind: parameter_grad, action: clip, norm: 0.5}'


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of the page."""
    return run_gallery_page("gradient_tails", tmp_path_factory.mktemp("gradient_tails"))


def run_of(folder: Path, seed: int, *arguments: str) -> instrument.Run:
    """Return a run of the page, or run it with another seed: then with these arguments."""
    if seed == 0:
        return instrument.load(folder)
    return finished(folder.with_name(f"seed{seed}_{folder.name}"), *arguments, f"seed={seed}", "quiet=true")


def noise_norms(run: instrument.Run) -> np.ndarray:
    """Return the norm of the gradient noise of each sample."""
    samples = run.tensors(hook="gradients").groupby("step")["values"]
    gradients = np.stack([np.concatenate([each.ravel() for each in values]) for _, values in samples])
    assert len(gradients) == 200
    norms: np.ndarray = np.linalg.norm(gradients - gradients.mean(0), axis=1)
    return norms


def spread(norms: np.ndarray) -> float:
    return float(np.quantile(norms, 0.99) / np.median(norms))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_initial_transformer_has_heavier_tails_than_the_cnn(page: Path, seed: int) -> None:
    from scipy.stats import kurtosis

    transformer = noise_norms(run_of(page / "tails/transformer", seed, "+exp=gradient_tails"))
    cnn = noise_norms(run_of(page / "tails/cnn", seed, "+exp=gradient_tails", *MEASURED_CNN))
    assert kurtosis(transformer) > 3
    assert kurtosis(cnn) < 1
    assert spread(transformer) > 2 * spread(cnn)


def test_trained_cnn_has_heavier_tails_than_the_transformer(page: Path) -> None:
    transformer, cnn = (noise_norms(instrument.load(page / "trained_tails" / name)) for name in ("transformer", "cnn"))
    assert spread(cnn) > 3 * spread(transformer)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clipping_prevents_divergence(page: Path, seed: int) -> None:
    def loss(name: str, *arguments: str) -> float:
        training = ("+exp=language", "train.steps=200", "hooks.blocks=null", "hooks.gradients=null")
        trained = run_of(page / name, seed, *training, *arguments)
        return float(trained.metrics.query("phase == 'train' and step >= 180")["loss"].mean(skipna=False))

    clipped = loss("clipped/2", "optimizer=sgd", "optimizer.lr=1", f"hooks.tame={CLIP}")
    unclipped = loss("clipped/3", "optimizer=sgd", "optimizer.lr=1", "hooks.tame=null")
    adam = loss("adam", "optimizer.lr=0.003", "hooks.tame=null")
    assert clipped < 2.6
    assert not unclipped < clipped + 0.2  # usually NaN
    assert abs(clipped - adam) < 0.3
