"""Watching a run: opening a long one, the cost of an update, memory, and the effect on the training.

    python benchmarks/watching.py [--rows 10000000] [--blocks 30]

The long run is written to a temporary folder with the code that writes the parts of a run, 100 rows per step. `opened` is the time
of a new process from its start to the first frame, and of the first page. `update` is the time to read and show the rows of ten more
steps, for runs of a tenth of the rows and of all rows. `growth` is the memory of the process after all rows were read, in addition to
that after a tenth of them. `step` is the duration of a step with a watcher relative to a step while the watcher is stopped; blocks of
20 steps alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import torch
from scale import LOCATIONS, STATS, rows_of
from torch import nn

import instrument
from instrument.commands.watch import OPENING_SECONDS
from instrument.report.live_run import LiveRun, frame
from instrument.report.live_server import LivePage
from instrument.storage.parts import Part, in_order, new_part

STEPS_PER_PART = 1_200  # 120,000 rows: a journal of 32 MB
MORE_STEPS = 10
BLOCK = 20
OPEN = """
import sys
from instrument.commands.watch import OPENING_SECONDS, open_view
view = open_view(sys.argv[1])
view.refresh(OPENING_SECONDS)
view.frame(50)
"""


def write_part(folder: Path, number: int, first: int, steps: int) -> None:
    """Write the statistics of some steps as one part."""
    rows = rows_of(0, steps)
    index = rows.schema.get_field_index("step")
    rows = rows.set_column(index, STATS.schema.field("step"), pa.array(rows["step"].to_numpy() + first))
    with new_part(folder, STATS, Part(0, number)) as writer:
        writer.write_table(in_order(STATS, rows), row_group_size=40_000)


def write_run(folder: Path, rows: int) -> int:
    """Write the folder of a run and return the number of its parts."""
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"status": "done", "name": folder.name}))
    parts = max(1, rows // (STEPS_PER_PART * len(LOCATIONS)))
    for number in range(parts):
        write_part(folder, number, number * STEPS_PER_PART, STEPS_PER_PART)
    return parts


def opening(folder: Path) -> tuple[float, float]:
    """Return the time of a new process to the first frame, and the time to the first page, in seconds."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", OPEN, str(folder)], check=True)
    process = time.perf_counter() - began
    began = time.perf_counter()
    live = LiveRun(folder)
    page = LivePage(live)
    live.refresh(OPENING_SECONDS)
    page.html()
    return process, time.perf_counter() - began


def update(folder: Path, parts: int) -> tuple[float, int, int]:
    """Read a run completely; return the time of an update in seconds, its size in bytes, and the memory in bytes."""
    live = LiveRun(folder)
    page = LivePage(live)
    live.refresh()
    page.changes(-1)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds, sizes = [], []
    for more in range(5):
        write_part(folder, parts + more, (parts * STEPS_PER_PART) + MORE_STEPS * more, MORE_STEPS)
        before, began = live.version, time.perf_counter()
        live.refresh(0)
        frame(live, 50)
        sizes.append(len(json.dumps(page.changes(before))))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), int(statistics.median(sizes)), memory


def step_ratio(folder: Path, blocks: int) -> float:
    """Return the duration of a step with a watcher relative to one without."""
    model = nn.Sequential(*(layer for _ in range(16) for layer in (nn.Linear(256, 256), nn.ReLU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    hooks = {"outputs": {"layers": "**", "kind": "forward", "action": "record"}}
    ratios = []
    with instrument.attach(model, hooks, optimizer=optimizer, out=folder) as probe:
        command = [sys.executable, "-m", "instrument.watch", str(folder)]
        watcher = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(5)
        for _ in range(blocks):
            seconds = {}
            for signal_sent in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(watcher.pid, signal_sent)
                began = time.perf_counter()
                for _ in range(BLOCK):
                    loss = model(torch.randn(64, 256)).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    probe.end_step(loss=loss)
                seconds[signal_sent] = time.perf_counter() - began
            ratios.append(seconds[signal.SIGCONT] / seconds[signal.SIGSTOP])
    watcher.wait()
    return statistics.median(ratios)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--blocks", type=int, default=30)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        print(
            f"step with a watcher: {step_ratio(Path(root) / 'trained', args.blocks):.3f} of a step without", flush=True
        )
        memory = {}
        for rows in (args.rows // 10, args.rows):
            folder = Path(root) / f"{rows}"
            parts = write_run(folder, rows)
            frame_seconds, page_seconds = opening(folder)
            seconds, size, memory[rows] = update(folder, parts)
            print(
                f"{rows:,} rows in {parts} parts: opened in {frame_seconds:.2f} s (new process), page in {page_seconds:.2f} s; "
                f"update {seconds * 1e3:.0f} ms, {size:,} bytes",
                flush=True,
            )
        small, large = memory.values()
        print(f"growth of memory from {args.rows // 10:,} to {args.rows:,} rows: {(large - small) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
