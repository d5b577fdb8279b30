"""Long training: `python long_training.py FOLDER STEPS`. Prints the used resources after 500 steps and at the end."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import warnings
from pathlib import Path

import torch
from attached_runs import train_step
from torch import nn

import instrument


def used_resources(step: int) -> dict[str, int]:
    """Return resident memory in kB, threads and open files of this process, without those of events.

    The training ends with gradients near zero, and the rule on vanishing gradients then writes its first event.
    """
    gc.collect()
    status = Path("/proc/self/status").read_text()
    resident = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))
    return {
        "step": step,
        "resident": resident,
        "threads": threading.active_count(),
        "files": sum(
            "/journal/events-" not in os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
        ),
    }


def main(folder: Path, steps: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    specs = {
        "acts": {"layers": "**", "kind": "forward", "action": "record"},
        "grads": {"layers": "**", "kind": "tensor", "action": "record"},
        "kept": {"layers": "*", "kind": "forward", "action": "record", "stats": "none", "tensors": True, "every": 100},
    }
    batch = torch.randn(8, 16)
    with instrument.attach(model, specs, optimizer=optimizer, out=folder) as probe:
        for step in range(steps):
            train_step(model, optimizer, probe, batch)
            if step + 1 in (500, steps):
                print(json.dumps(used_resources(step + 1)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
