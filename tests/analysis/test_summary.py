"""Summary of a run by hook."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import instrument
from instrument.analysis.summary import recorded


def test_summary_counts_rows_of_all_record_tables(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    both = {"layers": "*", "kind": "forward", "action": "record", "histogram": 4, "quantiles": [0.5]}
    kept = {"layers": "0", "kind": "forward", "action": "record", "stats": "none", "tensors": True}
    with instrument.attach(model, {"both": both, "kept": kept}, out=tmp_path / "run") as probe:
        for _ in range(3):
            model(torch.randn(2, 4))
            probe.end_step()
    firings, rows, tensors = recorded(instrument.load(tmp_path / "run"))
    assert firings == {"both": 6, "kept": 3}
    assert rows == {"both": 12}
    assert tensors == {"kept": 3}
