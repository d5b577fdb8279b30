"""Tensors of other runs for replace and patch, with equal and different numbers of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from instrument.actions.base import Context, StepContext
from instrument.analysis.tensors_of_earlier_runs import RunArchive
from instrument.storage.parquet import ParquetSink

BATCH = np.arange(12, dtype=np.float32).reshape(6, 2)


def context(rank: int = 0, **changed: Any) -> Context:
    given: dict[str, Any] = {"kind": "forward", "role": "output", "rank": rank}
    moment = StepContext(0, 0, 0, "train")
    return Context(hook="kept", layer="0", module=nn.Linear(2, 2), path="", moment=moment, **given | changed)


def recorded(folder: Path, ranks: int, scope: str, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> str:
    """Write a run whose processes each recorded a batch shard, or the full batch if they all have the same."""
    from instrument.probe.rank_merging import identity_columns

    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"status": "done", "ranks": ranks, "config": {}}))
    for rank in range(ranks):
        monkeypatch.setenv("RANK", str(rank))
        sink = ParquetSink(folder)
        part = BATCH if scope in ("global", "averaged") else np.array_split(BATCH, ranks)[rank]
        sink.keep(identity_columns(context(rank, scope=scope, **changed)), part.shape, torch.from_numpy(part), None)
        sink.close()
    monkeypatch.delenv("RANK")
    return str(folder)


def find(run: str, ranks: int, rank: int = 0, **changed: Any) -> list[list[float]]:
    def shard(batch: range) -> range:
        return batch[rank * len(batch) // ranks : (rank + 1) * len(batch) // ranks]

    archive = RunArchive(ranks, shard)
    archive.open(run, None, "hooks.h")
    found: list[list[float]] = archive.find(run, None, None, context(rank, **changed)).tolist()
    return found


def test_batch_of_several_processes_is_found_in_full_or_by_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded(tmp_path / "run", 3, "local", monkeypatch)
    assert find(run, 1) == BATCH.tolist()
    assert [find(run, 3, rank) for rank in range(3)] == [part.tolist() for part in np.array_split(BATCH, 3)]


def test_several_processes_find_shards_of_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(tmp_path / "run", 1, "global", monkeypatch)
    assert [find(run, 2, rank) for rank in range(2)] == [part.tolist() for part in np.array_split(BATCH, 2)]
    run = recorded(tmp_path / "gradient", 1, "global", monkeypatch, kind="parameter_grad", role="grad")
    assert find(run, 2, 1, kind="parameter_grad", role="grad") == BATCH.tolist()


@pytest.mark.spread(2)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("scope", "location"),
    [
        ("averaged", {"kind": "parameter_grad", "role": "grad"}),  # equal on every rank
        ("shard", {"kind": "step_post", "role": "param"}),  # combined: an intervention applies to the full parameter
    ],
    ids=["equal", "shards"],
)
def test_full_parameter_is_found_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, scope: str, location: dict[str, str]
) -> None:
    run = recorded(tmp_path / "run", 2, scope, monkeypatch, **location)
    assert find(run, ranks, ranks - 1, **location) == BATCH.tolist()


@pytest.mark.parametrize(
    ("ranks", "kind"), [(3, "forward"), (1, "post_accumulate_grad")], ids=["other count", "no parts of a batch"]
)
def test_shards_that_cannot_be_combined_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, kind: str
) -> None:
    run = recorded(tmp_path / "run", 2, "local", monkeypatch, kind=kind)
    message = f"the tensor of step 0 .* was recorded by 2 processes; cannot be used with {ranks}"
    with pytest.raises(LookupError, match=message):
        find(run, ranks, kind=kind)
