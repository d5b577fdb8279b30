"""Weights & Biases, offline: what it has written is read back from its file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from shown import history, key, metrics, read_wandb, row

from instrument.errors import ConfigError
from instrument.sinks.tracking import Tracked, TrackingSink, open_tracker


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true", "ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return tmp_path


def opened(folder: Path) -> TrackingSink:
    config = {"name": "tried/here", "train": {"steps": 3}, "hooks": {"seen": {"layers": ["a", "b"]}}}
    return open_tracker("wandb", Tracked.of(folder / "runs" / "first", config), "sink.wandb")


def test_a_run_has_its_name_its_configuration_and_one_entry_a_step(place: Path) -> None:
    sink = opened(place)
    for step in range(3):
        sink.write("metrics", [metrics(step, loss=step + 0.5, grad_norm=math.nan if step == 1 else None)])
        sink.write("stats", [row("stats", *key(step), mean=-1.0)])
        sink.end_step()
    sink.write("metrics", [metrics(3, "eval", loss=9.0)])
    sink.write("distributions", [row("distributions", *key(3), low=-1.0, high=1.0, counts=[3, 1])])
    sink.keep(key(3), [2, 8, 8], torch.rand(2, 8, 8))
    sink.write("events", [row("events", 3, 0, None, "budget", "less often", "warning")])
    sink.close()
    records = read_wandb(place)
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name) == ("tried_here", "runs/first")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["train"] == {"steps": 3}
    assert config["hooks"]["seen"]["layers"] == ["a", "b"]
    logged = history(records)
    assert logged[0] == {"train/loss": 0.5, "seen/a.0/mean": -1.0}
    assert math.isnan(float(logged[1]["train/grad_norm"]))
    assert list(logged) == [0, 1, 2, 3]
    assert (logged[3]["eval/loss"], logged[3]["events/warning"]) == (9.0, "budget: less often")
    assert logged[3]["seen/a.0/histogram"] == {"_type": "histogram", "values": [3, 1], "bins": [-1.0, 0.0, 1.0]}
    image = logged[3]["seen/a.0/image"]
    assert (image["_type"], image["width"], image["height"]) == ("image-file", 65, 32)
    (file,) = place.glob("wandb/offline-run-*/files/media/images/**/*.png")
    assert file.stat().st_size == image["size"]
    assert records[-1].exit.exit_code == 0


def test_a_run_that_failed_has_failed_there_too(place: Path) -> None:
    sink = opened(place)
    sink.write("events", [row("events", 0, 0, None, "error", "it broke", "error")])
    sink.close()
    assert read_wandb(place)[-1].exit.exit_code == 1


@pytest.mark.parametrize(("bins", "shown"), [(512, 512), (513, 257), (4096, 512)])
def test_a_histogram_has_no_more_bins_than_it_takes(place: Path, bins: int, shown: int) -> None:
    from instrument.sinks.histogram import Histogram
    from instrument.sinks.wandb import _few_bins

    counts, edges = _few_bins(Histogram(0.0, 1.0, [1] * bins))
    assert (len(counts), len(edges), counts.sum()) == (shown, shown + 1, bins)
    assert (edges[0], edges[-1]) == (0.0, 1.0)


def test_who_is_not_let_in_is_told_before_the_first_step(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def refuse(**given: object) -> None:
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError) as caught:
        opened(place)
    assert str(caught.value).splitlines()[0] == (
        "sink.wandb: wandb cannot be started: UsageError: No API key configured. Use `wandb login` to log in."
    )
