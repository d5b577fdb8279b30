"""The experiment that only looks: it learns real MNIST, and its losses are the bare run's to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import instrument

BARE = [f"hooks.{name}=null" for name in ("activations", "flow", "gradients", "updates")]


def test_record_only_hooks_change_no_loss_by_a_bit_and_6400_images_are_enough_for_93_percent(
    cli: Callable[..., Any], mnist_root: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mnist_root is not None
    monkeypatch.setenv("INSTRUMENT_DATA", str(mnist_root))
    data = [] if real else ["data=digits", "data.dataset.size=28"]
    for name, more in (("watched", []), ("bare", BARE)):
        answer = cli("+exp=mnist_record", *data, *more, f"hydra.run.dir={name}")
        assert answer.code == 0, answer.err
    watched, bare = instrument.load("watched"), instrument.load("bare")
    assert len(bare.stats) == len(bare.coverage) == 0
    assert set(watched.stats.hook) == {"activations", "flow", "gradients", "updates"}
    assert len(watched.stats) > 500
    for column in ("loss", "accuracy", "grad_norm"):
        assert watched.metrics[column].equals(bare.metrics[column])
    if real:
        assert watched.info["data"]["train_samples"] == 6400
        assert watched.info["data"]["eval_samples"] == 10_000
        assert watched.info["metrics"]["accuracy"] >= 0.93
