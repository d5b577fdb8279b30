"""Converts a file with the command, and records with the result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import instrument
from instrument.commands.convert import main
from instrument.integrations.attached_probe import AttachedProbe


@dataclass
class Converted:
    """The result of a conversion.

    Attributes:
        file: The experiment file.
        content: Its content.
        notes: The lines on stderr, without the name of the converted file.
    """

    file: Path
    content: dict[str, Any]
    notes: list[str]

    @property
    def hooks(self) -> dict[str, dict[str, Any]]:
        hooks: dict[str, dict[str, Any]] = self.content["hooks"]
        return hooks

    def has_note(self, *texts: str) -> bool:
        return any(all(text in note for text in texts) for note in self.notes)


class Converter:
    """Function that converts the configuration of a tool."""

    def __init__(self, folder: Path, tool: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.tool, self.capsys = folder, tool, capsys

    def __call__(self, source: str | Mapping[str, Any] | list[Any]) -> Converted:
        text = source if isinstance(source, str) else json.dumps(source)
        given = self.folder / ("source.yaml" if self.tool == "nvdlfw" else "source.json")
        given.write_text(text)
        file = self.folder / "mine.yaml"
        file.unlink(missing_ok=True)
        assert main([str(given), "--from", self.tool, "-o", str(file)]) == 0
        captured = self.capsys.readouterr()
        notes = [line.removeprefix(f"{given.name}: ") for line in captured.err.splitlines()]
        written = file.read_text()
        assert all(f"#   {note}" in written.splitlines() for note in notes)
        return Converted(file, yaml.safe_load(written), notes)


class Block(nn.Module):
    """An attention-like and an MLP part, with names as in large language models."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention = nn.ModuleDict({"qkv": nn.Linear(8, 8), "proj": nn.Linear(8, 8)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(8, 8), "relu": nn.ReLU(), "fc2": nn.Linear(8, 8)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attention["proj"](self.self_attention["qkv"](x))
        hidden: torch.Tensor = self.mlp["relu"](self.mlp["fc1"](x))
        out: torch.Tensor = x + self.mlp["fc2"](hidden)
        return out


class Net(nn.Module):
    """Three blocks, and a head that calls torch functions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.tanh = nn.Tanh()
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.tanh(x))
        return torch.relu(logits.permute(1, 0)).permute(1, 0)


def train(file: Path, steps: int) -> AttachedProbe:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    with instrument.attach(model, file, optimizer=optimizer) as probe:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.randint(4, (4,)))
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    return probe


def record(file: Path, steps: int = 3) -> dict[str, tuple[str, ...]]:
    """Return the layers at which each hook of an experiment file fired, with the name of the parameter if there is one."""
    fired: dict[str, tuple[str, ...]] = {}
    for row in train(file, steps).coverage():
        assert row["fired"] == row["expected"], row
        if row["fired"]:
            names = fired.setdefault(row["hook"], ())
            fired[row["hook"]] = (*names, ".".join(part for part in (row["layer"], row["path"]) if part))
    return fired


def record_paths(file: Path, table: str) -> dict[str, tuple[str, ...]]:
    """Return the paths in the rows of one table of each hook of an experiment file, in one step."""
    rows = train(file, 1).read(table, ["hook", "path"])
    return {str(hook): tuple(rows["path"][rows["hook"] == hook]) for hook in rows["hook"].unique()}
