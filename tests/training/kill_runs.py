"""Fork one run after another, and kill each at a moment that depends on its number.

    python kill_runs.py FOLDER FIRST STOP

Each run reports completed steps through a pipe. The last step reported before the kill is printed, as one JSON line per
run. Journals and row groups are small, so that kills also hit the writing of parts.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import training_runs

import instrument.storage.parquet
import instrument.storage.tensors
from instrument.config.parse import parse_config
from instrument.training.loop import Progress
from instrument.training.runner import run

CONFIG = {
    **training_runs.CONFIG,
    "name": "killed",
    "train": {"steps": 100_000, "batch_size": 8, "eval_every": 50},
    "hooks": {
        "seen": {"layers": "**", "kind": "forward", "action": "record"},
        "kept": {"layers": "**", "kind": "forward", "action": "record", "stats": "none", "tensors": True, "every": 3},
        "changed": {"layers": "**", "kind": "parameter_grad", "action": "scale", "factor": 0.5},
    },
}


def child(folder: Path, pipe: int, row_group_bytes: int) -> None:
    """Train, and write each completed step to a pipe."""

    def report(progress: Progress) -> None:
        if progress.phase == "train":
            os.write(pipe, (progress.step - 1).to_bytes(4, "little"))

    torch.set_num_threads(1)
    instrument.storage.parquet.ROWS_JOURNAL_BYTES = 30_000
    instrument.storage.parquet.TENSORS_JOURNAL_BYTES = 20_000
    instrument.storage.tensors.ROW_GROUP_BYTES = row_group_bytes
    run(parse_config(CONFIG), folder, training_runs.ObservedTerminal(report), raw=CONFIG, overrides={})


def start_and_kill(folder: Path, draw: random.Random) -> int:
    """Start and kill a run; return the last reported step, or -1 if it reported no step."""
    read, write = os.pipe()
    process = os.fork()
    if not process:
        os.close(read)
        try:
            child(folder, write, draw.choice([2_000, 10_000]))  # a part at each step with tensors, or only the journal
        finally:
            os._exit(3)
    os.close(write)
    reported = b""
    if draw.random() < 0.9:  # most runs are killed during training
        reported += os.read(read, 4)
        time.sleep(draw.random() * 0.15)
    else:
        time.sleep(draw.random() * 0.2)
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status), "the run ended by itself"
    while part := os.read(read, 65_536):
        reported += part
    os.close(read)
    return int.from_bytes(reported[-4:], "little") if reported else -1


if __name__ == "__main__":
    folder, first, stop = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for number in range(first, stop):
        out = folder / str(number)
        print(json.dumps({"folder": str(out), "reported": start_and_kill(out, random.Random(7 + number))}), flush=True)
