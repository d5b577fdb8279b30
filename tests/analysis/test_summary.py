"""Summary of a run by hook."""

from __future__ import annotations

from pathlib import Path

import torch
from attached_runs import forward_steps
from torch import nn

from instrument.analysis.findings import recorded


def test_summary_counts_rows_of_all_record_tables(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    both = {"layers": "*", "kind": "forward", "action": "record", "histogram": 4, "quantiles": [0.5]}
    kept = {"layers": "0", "kind": "forward", "action": "record", "stats": "none", "tensors": True}
    run = forward_steps(model, {"both": both, "kept": kept}, torch.randn(3, 2, 4), out=tmp_path / "run").run
    firings, rows, tensors = recorded(run)
    assert firings == {"both": 6, "kept": 3}
    assert rows == {"both": 12}
    assert tensors == {"kept": 3}
