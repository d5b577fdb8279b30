"""The experiment `mnist_record`: it learns MNIST, and its losses equal those of a run without hooks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import instrument

WITHOUT_HOOKS = [f"hooks.{name}=null" for name in ("activations", "flow", "gradients", "updates")]


@pytest.mark.slow
def test_record_hooks_keep_losses_bit_identical_at_93_percent(
    cli: Callable[..., Any], mnist_root: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mnist_root is not None
    monkeypatch.setenv("INSTRUMENT_DATA", str(mnist_root))
    data = [] if real else ["data=digits", "data.dataset.size=28"]
    for name, more in (("recorded", []), ("baseline", WITHOUT_HOOKS)):
        cli("+exp=mnist_record", *data, *more, f"hydra.run.dir={name}").expect(0)
    recorded, baseline = instrument.load("recorded"), instrument.load("baseline")
    assert len(baseline.stats) == len(baseline.coverage) == 0
    assert set(recorded.stats.hook) == {"activations", "flow", "gradients", "updates"}
    assert len(recorded.stats) > 500
    for column in ("loss", "accuracy", "grad_norm"):
        assert recorded.metrics[column].equals(baseline.metrics[column])
    if real:
        assert recorded.info["data"]["train_samples"] == 6400
        assert recorded.info["data"]["eval_samples"] == 10_000
        assert recorded.info["metrics"]["accuracy"] >= 0.93
