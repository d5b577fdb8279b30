"""Speed of recorded features: writing them in forward passes and reading them, compared with `np.save` and `np.load`; and
of `run.dataset`: batches of 1024 items in random order, compared with batches in the order in which they were recorded.

python benchmarks/features.py [--samples 50000] [--width 2048] [--batch 256] [--rounds 3] [--cold]

The model returns its input, so that only the recording takes time. The memory is that of the reading process: its peak
minus the size of the array and minus the memory before the call. `--cold`: the files are not in the page cache when they are
read. Linux only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from measure import machine
from torch import nn

import instrument

HOOKS = {"f": {"layers": ".", "kind": "forward", "action": "record", "stats": "none", "tensors": True}}


def write(folder: Path, values: torch.Tensor, batch: int) -> None:
    """Record the values in shuffled batches."""
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    model = nn.Identity()
    with instrument.attach(model, HOOKS, out=folder) as probe:
        for ids in order.split(batch):
            probe.batch(ids=ids, targets=ids % 1000)
            model(values[ids])
            probe.end_step()


def save(file: Path, values: torch.Tensor, batch: int) -> None:
    """Collect the same batches in a list, and write them in the order of the dataset with NumPy."""
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    kept = [values[ids].clone() for ids in order.split(batch)]
    array = np.empty(tuple(values.shape), np.float32)
    array[order.numpy()] = torch.cat(kept).numpy()
    np.save(file, array)


def drop_from_page_cache(folder: Path) -> None:
    """Write all files to the disk, and remove them from the page cache."""
    for file in filter(Path.is_file, folder.rglob("*")):
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def memory(field: str) -> float:
    """Return the resident memory of this process in MB: now (`VmRSS`), or at most so far (`VmHWM`)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) / 1024


def read(folder: Path, *, cold: bool) -> None:
    """Read the array and the features in this process; print the seconds of both, and the additional memory in MB."""
    started_at = time.perf_counter()
    size = np.load(folder / "X.npy").nbytes / 2**20
    load_seconds = time.perf_counter() - started_at
    run = instrument.load(folder / "run")
    print(run.features, instrument.Features, run.samples.shape)  # imports everything
    if cold:  # so that both get the memory of the page cache that the system has used before
        drop_from_page_cache(folder)
    before = memory("VmRSS")
    started_at = time.perf_counter()
    features = run.features(".")
    seconds = time.perf_counter() - started_at
    assert features.X.nbytes / 2**20 == size
    print(load_seconds, seconds, memory("VmHWM") - before - size)


ORDERS: dict[str, dict[str, int | None]] = {
    "in order": {},
    "shuffled in windows": {"shuffle": 0},
    "exact permutation": {"shuffle": 0, "window": None},
}


def iterate(folder: Path, rounds: int) -> None:
    """Print the seconds of iterations over the samples, and over the positions of sequences of which a mask excludes a tenth."""
    for name in ("run", "tokens"):
        data = instrument.load(folder / name).dataset(".", flatten="tokens" if name == "tokens" else None)
        seconds: dict[str, list[float]] = {label: [] for label in ORDERS}
        for _ in range(rounds):
            for label, order in ORDERS.items():
                started_at = time.perf_counter()
                for batch in data.batches(1024, window=order.get("window", 64 * 2**20), shuffle=order.get("shuffle")):
                    batch["x"][0, 0].item()
                seconds[label].append(time.perf_counter() - started_at)
        medians = {label: statistics.median(each) for label, each in seconds.items()}
        for label, median in medians.items():
            speed = len(data) * data.item_bytes / 1e6 / median
            print(f"| {name}, {label} | {speed:,.0f} | {medians['in order'] / median:.2f} |")


class Tokens(nn.Module):
    """Returns the input. The mask is only recorded."""

    def forward(self, values: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return values


def write_tokens(folder: Path, values: torch.Tensor) -> None:
    """Record the values as sequences of 100 positions, with padding of 0 to 20 positions, in batches of 16."""
    sequences = values[: len(values) // 100 * 100].view(-1, 100, values.shape[1])
    mask = torch.arange(100).expand(len(sequences), -1) < 100 - torch.arange(len(sequences))[:, None] % 21
    model = Tokens()
    hooks = {**HOOKS, "mask": {**HOOKS["f"], "kind": "forward_pre", "path": "attention_mask"}}
    with instrument.attach(model, hooks, out=folder) as probe:
        for ids in torch.arange(len(sequences)).split(16):
            probe.batch(ids=ids)
            model(sequences[ids], attention_mask=mask[ids])
            probe.end_step()


def main() -> None:
    """Print a table of speeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--width", type=int, default=2_048)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read is not None:
        read(args.read, cold=args.cold)
        return
    values = torch.randn(args.samples, args.width, generator=torch.Generator().manual_seed(0))
    size = values.nbytes / 1e6
    seconds: dict[str, list[float]] = {name: [] for name in ("np.save", "recorded", "np.load", "features")}
    additional = []
    with tempfile.TemporaryDirectory() as name:
        write(Path(name) / "run", values[:1], 1)  # imports everything
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as name:
            file, folder = Path(name) / "X.npy", Path(name) / "run"
            for label, action in (
                ("np.save", lambda file=file: save(file, values, args.batch)),
                ("recorded", lambda folder=folder: write(folder, values, args.batch)),
            ):
                started_at = time.perf_counter()
                action()
                seconds[label].append(time.perf_counter() - started_at)
            if args.cold:
                drop_from_page_cache(Path(name))
            command = [sys.executable, "-W", "ignore", __file__, "--read", name, *["--cold"] * args.cold]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            load_seconds, read_seconds, extra = map(float, done.stdout.splitlines()[-1].split())
            seconds["np.load"].append(load_seconds)
            seconds["features"].append(read_seconds)
            additional.append(extra)
    print(f"{machine()}\n{args.samples:,} samples x {args.width:,}, {size:,.0f} MB; medians of {args.rounds}\n")
    print("| | MB/s | relative to NumPy |\n|---|---|---|")
    for label, reference in (
        ("np.save", "np.save"),
        ("recorded", "np.save"),
        ("np.load", "np.load"),
        ("features", "np.load"),
    ):
        median, base = (statistics.median(seconds[name]) for name in (label, reference))
        print(f"| {label} | {size / median:,.0f} | {base / median:.2f} |")
    print(f"\nadditional memory of `features`: {statistics.median(additional):,.0f} MB\n")
    print("| `run.dataset` | MB/s | relative to the recorded order |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        write(Path(name) / "run", values, args.batch)
        write_tokens(Path(name) / "tokens", values)
        iterate(Path(name), args.rounds)


if __name__ == "__main__":
    main()
