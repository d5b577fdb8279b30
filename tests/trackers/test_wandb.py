"""The Weights & Biases sink in offline mode, read back from its file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tracker_files import history, keep_data_local, key, metrics, read_wandb, row

from instrument.errors import ConfigError
from instrument.trackers.tracking import TrackedRun, TrackingSink, open_tracker


@pytest.fixture
def wandb_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    keep_data_local(monkeypatch, tmp_path)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return tmp_path


def open_sink(folder: Path) -> TrackingSink:
    config = {"name": "tried/here", "train": {"steps": 3}, "hooks": {"seen": {"layers": ["a", "b"]}}}
    return open_tracker("wandb", TrackedRun.of(folder / "runs" / "first", config), "sink.wandb")


def test_run_has_name_config_and_one_entry_per_step(wandb_dir: Path) -> None:
    sink = open_sink(wandb_dir)
    for step in range(3):
        sink.write(
            "metrics", [metrics(step, loss=step + 0.5, grad_norm=math.nan if step == 1 else None, custom={"r": 2.0})]
        )
        sink.write("stats", [row("stats", *key(step), mean=-1.0)])
        sink.end_step()
    sink.write("metrics", [metrics(3, "eval", loss=9.0)])
    sink.write("distributions", [row("distributions", *key(3), low=-1.0, high=1.0, counts=[3, 1])])
    sink.write("events", [row("events", 3, 0, None, "budget", "less often", "warning")])
    sink.close()
    records = read_wandb(wandb_dir)
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name) == ("tried_here", "runs/first")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["train"] == {"steps": 3}
    assert config["hooks"]["seen"]["layers"] == ["a", "b"]
    logged = history(records)
    assert logged[0] == {"train/loss": 0.5, "train/r": 2.0, "seen/a.0/mean": -1.0}
    assert math.isnan(float(logged[1]["train/grad_norm"]))
    assert list(logged) == [0, 1, 2, 3]
    assert (logged[3]["eval/loss"], logged[3]["events/warning"]) == (9.0, "budget: less often")
    assert logged[3]["seen/a.0/histogram"] == {"_type": "histogram", "values": [3, 1], "bins": [-1.0, 0.0, 1.0]}
    assert records[-1].exit.exit_code == 0


@pytest.mark.slow
def test_failed_run_has_its_exit_code(wandb_dir: Path) -> None:
    sink = open_sink(wandb_dir)
    sink.write("events", [row("events", 0, 0, None, "error", "it broke", "error")])
    sink.close()
    assert read_wandb(wandb_dir)[-1].exit.exit_code == 1


@pytest.mark.parametrize(("bins", "shown"), [(512, 512), (513, 257), (4096, 512)])
def test_histogram_bins_are_limited(wandb_dir: Path, bins: int, shown: int) -> None:
    from instrument.trackers.step_summary import Histogram, few_bins

    counts, edges = few_bins(Histogram(0.0, 1.0, [1] * bins))
    assert (len(counts), len(edges), counts.sum()) == (shown, shown + 1, bins)
    assert (edges[0], edges[-1]) == (0.0, 1.0)


def test_login_error_is_reported_before_the_first_step(wandb_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def refuse(**given: object) -> None:
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError) as caught:
        open_sink(wandb_dir)
    assert str(caught.value).splitlines()[0] == (
        "sink.wandb: wandb cannot be started: UsageError: No API key configured. Use `wandb login` to log in."
    )
