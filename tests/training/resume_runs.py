"""Runs that are killed several times, and resumed until they are done.

    python resume_runs.py FOLDER FIRST STOP

For each number, one run is never stopped, and one is killed within 10 ms after steps that depend on the number. The
steps do not depend on the speed of the machine; the moment within a step is random.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from training_runs import CONFIG, DIGITS, ObservedTerminal

import instrument.storage.parquet
from instrument.config.parse import parse_config
from instrument.training.loop import Progress
from instrument.training.runner import run
from instrument.training.terminal import Terminal

EVERY = 7  # steps from one checkpoint to the next


class Net(nn.Module):
    """Model with more state than its weights: batch normalization, dropout and a non-persistent buffer."""

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
    {
        "optimizer": {"_target_": "torch.optim.Adam", "lr": 0.01},
        "scheduler": {"_target_": "torch.optim.lr_scheduler.MultiStepLR", "milestones": [9, 60], "gamma": 0.5},
        "train": {"eval_every": 10, "accumulate": 2},
    },
    {
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
        "scheduler": {"_target_": "torch.optim.lr_scheduler.MultiStepLR", "milestones": [30, 60], "gamma": 0.5},
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
    "damp": {
        **{"layers": "**", "kind": "parameter_grad", "action": "scale", "factor": 0.9},
        # The condition holds in about half of the steps.
        "when": {"stat": "l2", "above": 1, "times": "median", "window": 7, "after": 3},
    },
    "tame": {"layers": "**", "kind": "parameter_grad", "action": "clip", "norm": 1.0},
    "moments": {"layers": "layers.5", "kind": "step_post", "role": "update", "action": "record"},
    "tests": {"layers": "layers.5", "kind": "forward", "action": "record", "phase": "eval"},
}


def config_of(number: int) -> dict[str, Any]:
    variant = VARIANTS[number % len(VARIANTS)]
    steps = 25 if number < len(VARIANTS) else 100
    return {
        **CONFIG,
        "name": "resumed",
        "seed": number,
        "model": {"_target_": "resume_runs.Net"},
        "data": {"dataset": DIGITS, "eval_slice": {"split": "test", "stop": 64}},
        "hooks": HOOKS,
        **variant,
        "train": {"steps": steps, "batch_size": 50, "checkpoint": {"every": EVERY}, **variant.get("train", {})},
    }


def killing_terminal(steps: int, delay: float) -> Terminal:
    """Return a terminal that kills its process some seconds after a number of steps of this process."""
    left = [steps]

    def count(progress: Progress) -> None:
        left[0] -= progress.phase == "train"
        if left[0] == 0:
            signal.setitimer(signal.ITIMER_REAL, delay)  # SIGALRM, for which Python has no handler

    return ObservedTerminal(count)


def train_in_a_process(config: dict[str, Any], folder: Path, terminal: Terminal) -> int:
    """Train in a forked process, from the last checkpoint if there is one; return its wait status."""
    if (process := os.fork()) != 0:
        return os.waitpid(process, 0)[1]
    try:
        torch.set_num_threads(1)
        instrument.storage.parquet.ROWS_JOURNAL_BYTES = 40_000
        parsed = parse_config({**config, "resume": str(folder) if folder.exists() else None})
        run(parsed, folder, terminal, raw=config, overrides={})
        os._exit(0)
    except BaseException as error:
        print(type(error).__name__, error, file=sys.stderr, flush=True)
        os._exit(3)


if __name__ == "__main__":
    folder, first, stop = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for number in range(first, stop):
        config, draw = config_of(number), random.Random(3 + number)
        assert train_in_a_process(config, folder / f"{number}-whole", Terminal(quiet=True)) == 0
        kills = 1 if number < len(VARIANTS) else 3
        for _ in range(kills):
            # After a checkpoint, before the end.
            steps = draw.randint(EVERY + 1, config["train"]["steps"] // (kills + 1))
            terminal = killing_terminal(steps, draw.uniform(0.0001, 0.01))
            assert os.WIFSIGNALED(train_in_a_process(config, folder / f"{number}-killed", terminal))
        assert train_in_a_process(config, folder / f"{number}-killed", Terminal(quiet=True)) == 0
