"""Speed of recorded features, compared with NumPy, and of `run.dataset`: batches of 1024 items in random order, compared with batches
in the order in which they were recorded.

Writing is compared with batches that are collected, put into the order of the dataset and written by one `np.save`, and with an
`np.save` of each batch. Reading the recorded tensors, and the features in the order of the dataset, is compared with `np.load` of that
order; the features also with files of each batch, which NumPy loads and puts into that order. All elements are summed.

python benchmarks/features.py [--samples 50000] [--width 2048] [--batch 256] [--rounds 3] [--cold]

The model returns its input, so that only the recording takes time. The sides alternate, and the ratios are those of each round. The memory
is that of the reading process: its peak minus the size of the array and minus the memory before the call. `--cold`: the files are not
in the page cache when they are read. Linux only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from measure import machine
from torch import nn

import instrument

HOOKS = {"f": {"layers": ".", "kind": "forward", "action": "record", "stats": "none", "tensors": True}}


def write(folder: Path, values: torch.Tensor, batch: int, *, shuffled: bool = True) -> None:
    """Record the values in batches, shuffled or in the order of the dataset."""
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    order = order if shuffled else torch.arange(len(values))
    model = nn.Identity()
    with instrument.attach(model, HOOKS, out=folder) as probe:
        for ids in order.split(batch):
            probe.batch(ids=ids, targets=ids % 1000)
            model(values[ids])
            probe.end_step()


def save_sorted(folder: Path, values: torch.Tensor, batch: int) -> None:
    """Collect the same batches in a list, and write them in the order of the dataset with NumPy."""
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    folder.mkdir()
    kept = [values[ids].clone() for ids in order.split(batch)]
    array = np.empty(tuple(values.shape), np.float32)
    array[order.numpy()] = torch.cat(kept).numpy()
    np.save(folder / "X.npy", array)


def save_each(folder: Path, values: torch.Tensor, batch: int) -> None:
    """Write the same batches with NumPy, each when it is computed."""
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    folder.mkdir()
    for step, ids in enumerate(order.split(batch)):
        np.save(folder / f"{step}.npy", values[ids].numpy())


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


def load_sorted(folder: Path) -> np.ndarray:
    """Load the batches of `save_each` into an array in the order of the dataset."""
    batches = [np.load(folder / f"{step}.npy", mmap_mode="r") for step in range(len(os.listdir(folder)))]
    order = torch.randperm(sum(map(len, batches)), generator=torch.Generator().manual_seed(0)).numpy()
    array, start = np.empty((len(order), batches[0].shape[1]), np.float32), 0
    for batch in batches:
        array[order[start : start + len(batch)]] = batch
        start += len(batch)
    return array


READERS: dict[str, Callable[[Path], Iterable[np.ndarray]]] = {
    "np.load": lambda folder: [np.load(folder / "X.npy")],
    "np.load of each batch, sorted": lambda folder: [load_sorted(folder / "each")],
    "tensors": lambda folder: instrument.load(folder / "run").tensors(layer="")["values"],
    "features": lambda folder: [instrument.load(folder / "run").features(".").X],
    "features, recorded in order": lambda folder: [instrument.load(folder / "ordered").features(".").X],
}
COMPARED = (
    ("tensors", "np.load"),
    ("features", "np.load of each batch, sorted"),
    ("features", "np.load"),
    ("features, recorded in order", "np.load"),
)


def read(folder: Path, rounds: int, *, cold: bool) -> None:
    """Sum all elements with each reader in turn; print the seconds of each round, and the additional memory of the features in MB."""
    run = instrument.load(folder / "run")
    print(run.features, instrument.Features, run.samples.shape)  # imports everything
    size = (folder / "X.npy").stat().st_size / 2**20
    for number in range(rounds):
        seconds = {}
        for name, arrays in [*READERS.items()][:: -1 if number % 2 else 1]:
            if cold:
                drop_from_page_cache(folder)
            before = memory("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            started_at = time.perf_counter()
            sum(float(array.sum()) for array in arrays(folder))
            seconds[name] = time.perf_counter() - started_at
            if name == "features":
                additional = memory("VmHWM") - before - size
        print(*(seconds[name] for name in READERS), additional)


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
        for label, each in seconds.items():
            speed = len(data) * data.item_bytes / 1e6 / statistics.median(each)
            ratios = [in_order / own for in_order, own in zip(seconds["in order"], each, strict=True)]
            print(
                f"| {name}, {label} | {speed:,.0f} | {min(ratios):.2f} | {statistics.median(ratios):.2f} | {max(ratios):.2f} |"
            )


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


WRITERS = {"sorted, one np.save": save_sorted, "np.save of each batch": save_each, "recorded": write}


def _row(label: str, size: float, pairs: Sequence[tuple[float, float]]) -> str:
    """Return a row of the table: the median speed of NumPy, and the speed of this package relative to NumPy in the same round."""
    ratios = sorted(numpy / own for numpy, own in pairs)
    speed = size / statistics.median(numpy for numpy, _ in pairs)
    return f"| {label} | {speed:,.0f} | {ratios[0]:.2f} | {statistics.median(ratios):.2f} | {ratios[-1]:.2f} |"


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
        read(args.read, args.rounds, cold=args.cold)
        return
    values = torch.randn(args.samples, args.width, generator=torch.Generator().manual_seed(0))
    size = values.nbytes / 1e6
    written = []
    with tempfile.TemporaryDirectory() as name:
        write(Path(name) / "first", values[:1], 1)  # imports everything
        for number in range(args.rounds):
            taken = {}
            for action in [*WRITERS.values()][:: -1 if number % 2 else 1]:
                folder = Path(name) / action.__name__
                started_at = time.perf_counter()
                action(folder, values, args.batch)
                taken[action] = time.perf_counter() - started_at
                shutil.rmtree(folder)
            written.append([taken[action] for action in WRITERS.values()])
        write(Path(name) / "run", values, args.batch)
        write(Path(name) / "ordered", values, args.batch, shuffled=False)
        np.save(Path(name) / "X.npy", values.numpy())
        save_each(Path(name) / "each", values, args.batch)
        command = [sys.executable, "-W", "ignore", __file__, "--read", name, "--rounds", str(args.rounds)]
        done = subprocess.run([*command, *["--cold"] * args.cold], capture_output=True, text=True, check=True)
    was_read = [[*map(float, line.split())] for line in done.stdout.splitlines()[-args.rounds :]]
    print(f"{machine()}\n{args.samples:,} samples x {args.width:,}, {size:,.0f} MB; {args.rounds} rounds\n")
    print("| | NumPy, MB/s | relative to NumPy: lowest | median | highest |\n|---|---|---|---|---|")
    *savers, _ = WRITERS
    for at, label in enumerate(savers):
        print(_row(f"recorded, {label}", size, [(row[at], row[-1]) for row in written]))
    names = [*READERS]
    for label, numpy in COMPARED:
        print(_row(f"{label}, {numpy}", size, [(row[names.index(numpy)], row[names.index(label)]) for row in was_read]))
    print(f"\nadditional memory of `features`: {statistics.median(row[-1] for row in was_read):,.0f} MB\n")
    print("| `run.dataset` | MB/s | relative to the recorded order: lowest | median | highest |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        write(Path(name) / "run", values, args.batch)
        write_tokens(Path(name) / "tokens", values)
        iterate(Path(name), args.rounds)


if __name__ == "__main__":
    main()
