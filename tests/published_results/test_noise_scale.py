"""McCandlish et al. 2018: the gradient noise scale. The experiment of docs/gallery/noise_scale.md, with several seeds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import finished
from page_blocks import run_gallery_page

import instrument

pytestmark = pytest.mark.slow

EXPERIMENT = ("+exp=noise_scale", "quiet=true")
BATCH = 32 * 16
HOOK = '+hooks.each={layers: "**", kind: parameter_grad_micro, action: record, stats: [l2]}'
SEEDS = (0, 1, 2)


def estimates(run: instrument.Run) -> pd.DataFrame:
    """Return the estimates of |G|^2 and S of each step."""
    sums = run.stats.groupby("step")[["gradient_signal", "gradient_noise"]].sum()
    return pd.DataFrame({"signal": sums["gradient_signal"], "noise": sums["gradient_noise"] * BATCH})


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_scale_grows_while_the_loss_falls(tmp_path: Path, seed: int) -> None:
    if seed == 0:
        trained = instrument.load(run_gallery_page("noise_scale", tmp_path) / "noise_scale")
    else:
        trained = finished(tmp_path / "trained", *EXPERIMENT, f"seed={seed}")
    table = estimates(trained)
    table["loss"] = trained.metrics.query("phase == 'train'").set_index("step")["loss"]
    means = table.groupby(table.index // 15).mean()
    scales = means["noise"] / means["signal"]
    assert 30 < scales[0] < 150
    assert scales.iloc[-3:].mean() > 7 * scales[0]
    assert np.corrcoef(np.log(means["loss"]), np.log(scales))[0, 1] < -0.9


@pytest.mark.parametrize("seed", SEEDS)
def test_estimate_equals_the_noise_scale_of_all_samples(tmp_path: Path, seed: int) -> None:
    fixed = finished(tmp_path / "fixed", *EXPERIMENT, f"seed={seed}", "optimizer.lr=0", "train.steps=60")
    means = estimates(fixed).mean()

    def squared_norms(name: str, batch_size: int) -> float:
        arguments = ("mode=forward", "forward.grad=true", "hooks.noise=null", HOOK, f"train.batch_size={batch_size}")
        batches = ("train.accumulate=1", "data.sampler=null")
        recorded = finished(tmp_path / name, *EXPERIMENT, f"seed={seed}", *batches, *arguments)
        return float((recorded.stats["l2"] ** 2).groupby(recorded.stats["step"]).sum().mean())

    signal = squared_norms("all", 1024)
    noise = squared_norms("each", 1) - signal
    assert means["signal"] == pytest.approx(signal, rel=0.1)
    assert means["noise"] == pytest.approx(noise, rel=0.05)
    assert means["noise"] / means["signal"] == pytest.approx(noise / signal, rel=0.12)
