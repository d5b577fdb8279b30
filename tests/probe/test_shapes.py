"""The shape of each measured tensor in `stats`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import instrument
from instrument.tables import message_template

RECORD = {"layers": "**", "kind": "forward", "action": "record"}


@pytest.mark.spread(1)
@pytest.mark.parametrize("plain", [True, False])
def test_shapes_follow_batches_of_different_sizes(plain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not plain:
        monkeypatch.setattr("instrument.hooks.attached_hook.direct_of", lambda attached: None)
    model = nn.Sequential(nn.Linear(4, 3), nn.Flatten(0))
    sizes = [(2, 5), (2, 5), (2, 5), (1, 5), (2, 7), (2, 5)]
    specs = {"outputs": RECORD, "gradients": {**RECORD, "kind": "tensor"}}
    with instrument.attach(model, specs, out=tmp_path / "run") as probe:
        for size in sizes:
            model(torch.randn(*size, 4)).sum().backward()
            probe.end_step()
    stats = instrument.load(tmp_path / "run").stats
    for hook in specs:
        for layer, expected in (("0", [(*size, 3) for size in sizes]), ("1", [(a * b * 3,) for a, b in sizes])):
            rows = stats[(stats.hook == hook) & (stats.layer == layer)]
            assert rows["shape"].to_list() == expected
            assert rows.numel.to_list() == [a * b * 3 for a, b in sizes]


def test_changed_shapes_reuse_the_message_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = message_template.as_record_batch

    def count(schema: Any, *given: Any) -> Any:
        batch = original(schema, *given)
        if "mean" in schema.names:
            made.append(batch.num_rows)
        return batch

    monkeypatch.setattr(message_template, "as_record_batch", count)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    inputs = [(5, 4), (5, 4), (2, 4), (5, 4), (7, 2, 4), (6, 1, 4), (4,), (2, 4)]
    with instrument.attach(model, {"h": RECORD}, out=tmp_path / "run") as probe:
        for size in inputs:
            model(torch.randn(*size))
            probe.end_step()
        running = instrument.load(tmp_path / "run").stats["shape"].to_list()
    assert made.count(3) == 4  # one for each change of the number of dimensions
    expected = [(*size[:-1], width) for size in inputs for width in (3, 2, 2)]
    assert running == instrument.load(tmp_path / "run").stats["shape"].to_list() == expected


def test_shapes_of_scalars_parameters_and_nested_tensors() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    specs = {
        "weights": {"layers": ".", "kind": "step_pre", "action": "record"},
        "loss": {"kind": "loss", "action": "record"},
        "integers": {"layers": ".", "kind": "forward_pre", "action": "record", "stats": "all"},
    }
    with instrument.attach(model, specs, optimizer=optimizer) as probe:
        probe.loss(model(torch.ones(2, 4)).sum()).backward()
        optimizer.step()
        probe.end_step()
    shapes = {(row["hook"], row["path"]): row["shape"] for row in probe.sink.records("stats")}
    assert shapes == {
        ("weights", "weight"): [3, 4],
        ("weights", "bias"): [3],
        ("loss", ""): [],
        ("integers", "0"): [2, 4],
    }
