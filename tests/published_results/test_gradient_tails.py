"""Zhang et al. 2020: tails of gradient noise, and clipping. The experiment of docs/gallery/gradient_tails.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import finished

pytestmark = pytest.mark.slow

CNN = ("model=mnist_cnn", "model.image_size=8", "data=digits")
MEASURED_CNN = (*CNN, "data.slice.stop=200", "task=cross_entropy")
CLIP = '{layers: "**", kind: parameter_grad, action: clip, norm: 0.5}'


def noise_norms(folder: Path, name: str, *arguments: str) -> np.ndarray:
    """Return the norm of the gradient noise of each sample."""
    rows = finished(folder / name, "+exp=gradient_tails", *arguments, "quiet=true").tensors(hook="gradients")
    samples = rows.groupby("step")["values"]
    gradients = np.stack([np.concatenate([each.ravel() for each in values]) for _, values in samples])
    assert len(gradients) == 200
    norms: np.ndarray = np.linalg.norm(gradients - gradients.mean(0), axis=1)
    return norms


def spread(norms: np.ndarray) -> float:
    return float(np.quantile(norms, 0.99) / np.median(norms))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_initial_transformer_has_heavier_tails_than_the_cnn(tmp_path: Path, seed: int) -> None:
    from scipy.stats import kurtosis

    transformer = noise_norms(tmp_path, "transformer", f"seed={seed}")
    cnn = noise_norms(tmp_path, "cnn", *MEASURED_CNN, f"seed={seed}")
    assert kurtosis(transformer) > 3
    assert kurtosis(cnn) < 1
    assert spread(transformer) > 2 * spread(cnn)


def test_trained_cnn_has_heavier_tails_than_the_transformer(tmp_path: Path) -> None:
    training = ("+exp=language", "optimizer.lr=0.003", "train.save=true")
    weights = finished(tmp_path / "trained_transformer", *training, "quiet=true").path
    transformer = noise_norms(tmp_path, "transformer", f"init_from={weights}")
    weights = finished(tmp_path / "trained_cnn", *CNN, "train.save=true", "quiet=true").path
    cnn = noise_norms(tmp_path, "cnn", *MEASURED_CNN, f"init_from={weights}")
    assert spread(cnn) > 3 * spread(transformer)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clipping_prevents_divergence(tmp_path: Path, seed: int) -> None:
    def loss(name: str, *arguments: str) -> float:
        training = ("+exp=language", "train.steps=200", f"seed={seed}", "hooks.blocks=null", "hooks.gradients=null")
        trained = finished(tmp_path / name, *training, *arguments, "quiet=true")
        return float(trained.metrics.query("phase == 'train' and step >= 180")["loss"].mean(skipna=False))

    clipped = loss("clipped", "optimizer=sgd", "optimizer.lr=1", f"hooks.tame={CLIP}")
    unclipped = loss("unclipped", "optimizer=sgd", "optimizer.lr=1", "hooks.tame=null")
    adam = loss("adam", "optimizer.lr=0.003", "hooks.tame=null")
    assert clipped < 2.6
    assert not unclipped < clipped + 0.2  # usually NaN
    assert abs(clipped - adam) < 0.3
