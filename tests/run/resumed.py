"""Runs that are killed again and again, and resumed until they are done.

    python resumed.py FOLDER COUNT SEED

For each of COUNT experiments: one run that nobody stops, and one that is killed at random moments. One JSON line each.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import instrument.sinks.parquet
from instrument.run.runner import run
from instrument.run.terminal import Terminal
from instrument.spec.parse import parse_config


class Net(nn.Module):
    """What has a state besides its weights: batch normalisation, dropout, a buffer that is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 10)
        )
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        scores: torch.Tensor = self.layers(images)
        return scores * (1 + 0.001 * self.calls.sin())


VARIANTS: list[dict[str, Any]] = [
    {"optimizer": {"_target_": "torch.optim.Adam", "lr": 0.01}, "train": {"eval_every": 40}},
    {
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
        "scheduler": {"_target_": "torch.optim.lr_scheduler.MultiStepLR", "milestones": [50, 120], "gamma": 0.5},
        "train": {"accumulate": 3},
    },
    {
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.01},
        "scheduler": {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.02, "total_steps": 1000},
        "train": {"precision": "fp16"},
    },
    {"optimizer": {"_target_": "torch.optim.SGD", "lr": 0.05}, "sink": {"tensors": "bytes", "durability": "power"}},
]
HOOKS = {
    "seen": {"layers": "**", "kind": "forward", "action": "record"},
    "kept": {"layers": "layers.*", "kind": "tensor", "action": "record", "tensors": True, "every": 7},
    "noisy": {"layers": "layers.1", "kind": "forward", "action": "modify", "fn": "noise", "std": 0.01},
    "tame": {"layers": "**", "kind": "parameter_grad", "action": "clip", "norm": 1.0},
    "moments": {"layers": "layers.5", "kind": "step_post", "role": "update", "action": "record"},
    "tests": {"layers": "layers.5", "kind": "forward", "action": "record", "phase": "eval"},
}


def config_of(number: int) -> dict[str, Any]:
    variant = VARIANTS[number % len(VARIANTS)]
    return {
        "name": "resumed",
        "seed": number,
        "model": {"_target_": "resumed.Net"},
        "data": {
            "dataset": {"_target_": "instrument.run.datasets.digits"},
            "eval_slice": {"split": "test", "stop": 64},
        },
        "task": {"_target_": "instrument.run.tasks.Supervised", "loss": {"_target_": "torch.nn.CrossEntropyLoss"}},
        "hooks": HOOKS,
        **variant,
        "train": {"steps": 400, "batch_size": 50, "checkpoint": {"every": 11}, **variant.get("train", {})},
    }


def start(config: dict[str, Any], folder: Path) -> int:
    """The id of a process that trains: from the last checkpoint on, where there is one."""
    if (process := os.fork()) != 0:
        return process
    try:
        torch.set_num_threads(1)
        instrument.sinks.parquet.ROWS_JOURNAL_BYTES = 40_000
        resume = str(folder) if list(folder.glob("checkpoints/*.pt")) else None
        if resume is None:
            shutil.rmtree(folder, ignore_errors=True)
        parsed = parse_config({**config, "resume": resume})
        run(parsed, folder, Terminal(quiet=True), raw=config, overrides={})
        os._exit(0)
    except BaseException as error:
        print(type(error).__name__, error, file=sys.stderr, flush=True)
        os._exit(3)


def to_the_end(config: dict[str, Any], folder: Path, draw: random.Random, kills: int) -> int:
    """Train, and kill the process a number of times; gives how often it was."""
    killed = 0
    while True:
        process = start(config, folder)
        if killed < kills:
            time.sleep(0.15 + draw.random() * 0.4)
            os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return killed
        killed += 1
        if is_done(folder):  # it was killed with nothing left to do
            return killed


def is_done(folder: Path) -> bool:
    """Whether the run came to its end."""
    record = folder / "run.json"
    return record.exists() and json.loads(record.read_text())["status"] == "done"


if __name__ == "__main__":
    place, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for number in range(count):
        config = config_of(number)
        draw = random.Random(seed + number)
        to_the_end(config, place / f"{number}-whole", draw, 0)
        kills = to_the_end(config, place / f"{number}-killed", draw, 5)
        print(json.dumps({"number": number, "kills": kills}), flush=True)
