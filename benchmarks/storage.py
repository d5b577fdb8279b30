"""Recorded tensors on disk: write and read rates compared with other formats and with a raw write.

    python benchmarks/storage.py [--megabytes 512] [--repeats 3] [--tensor MEGABYTES] [--only WORD ...]

The tensors have the shapes of one step of the MNIST CNN: few large and many small ones; with `--tensor 4`, each step has one of 4 MB.
They are written through the page cache without a sync, and read as arrays of their original shapes: from the page cache, and from the
disk. `instrument` verifies all bytes that it reads. `in progress` leaves out the time to open and close a run. Formats without an
installed package are skipped and listed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from measure import machine
from torch import Tensor

import instrument
from instrument.storage.parquet import ParquetSink

SHAPES = [(64, 32, 26, 26), (64, 64, 24, 24), (64, 64, 12, 12), *[(64, 128)] * 40]
KEY = (0, 0, "train", 0, "kept", "layer", "Conv2d", "forward", "output", "", 0, 0, False, "", "", "global")

Write = Callable[[Path, Sequence[Sequence[Tensor]]], float | None]  # may return its seconds
Read = Callable[[Path], int]


def write_raw(folder: Path, steps: Sequence[Sequence[Tensor]]) -> None:
    with open(folder / "raw", "wb", buffering=0) as file:
        for tensors in steps:
            for tensor in tensors:
                file.write(memoryview(tensor.numpy()).cast("B"))


def read_raw(folder: Path) -> int:
    return int(np.fromfile(folder / "raw", np.float32).nbytes)


def write_instrument(mode: str, *, in_progress: bool = False) -> Write:
    def write(folder: Path, steps: Sequence[Sequence[Tensor]]) -> float | None:
        sink = ParquetSink(folder, tensors=mode)  # type: ignore[arg-type]
        if in_progress:
            sink.keep((0, *KEY), (1,), torch.ones(1))
            sink.end_step()
        start = time.perf_counter()
        for step, tensors in enumerate(steps):
            for tensor in tensors:
                sink.keep((step, *KEY), tensor.shape, tensor)
            sink.end_step()
        seconds = time.perf_counter() - start
        sink.close()
        (folder / "run.json").write_text(json.dumps({"status": "done"}))
        return seconds if in_progress else None

    return write


def read_instrument(folder: Path) -> int:
    return sum(values.nbytes for values in instrument.load(folder).tensors()["values"] if values.size > 1)


def write_numpy(folder: Path, steps: Sequence[Sequence[Tensor]]) -> None:
    for step, tensors in enumerate(steps):
        for i, tensor in enumerate(tensors):
            np.save(folder / f"{step}-{i}.npy", tensor.numpy())


def read_numpy(folder: Path) -> int:
    return sum(np.load(file).nbytes for file in folder.glob("*.npy"))


def write_one(folder: Path, steps: Sequence[Sequence[Tensor]]) -> float:
    array = np.concatenate([tensor.numpy().reshape(-1) for tensors in steps for tensor in tensors])
    start = time.perf_counter()
    np.save(folder / "all.npy", array)
    return time.perf_counter() - start


def read_one(folder: Path) -> int:
    return int(np.load(folder / "all.npy").nbytes)


def drop_from_page_cache(folder: Path) -> None:
    for file in filter(Path.is_file, folder.rglob("*")):
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_torch(folder: Path, steps: Sequence[Sequence[Tensor]]) -> None:
    for step, tensors in enumerate(steps):
        for i, tensor in enumerate(tensors):
            torch.save(tensor, folder / f"{step}-{i}.pt")


def read_torch(folder: Path) -> int:
    return sum(torch.load(file, weights_only=True).nbytes for file in folder.glob("*.pt"))


def write_safetensors(folder: Path, steps: Sequence[Sequence[Tensor]]) -> None:
    from safetensors.torch import save_file

    for step, tensors in enumerate(steps):
        save_file({str(i): tensor for i, tensor in enumerate(tensors)}, folder / f"{step}.safetensors")


def read_safetensors(folder: Path) -> int:
    from safetensors.torch import load_file

    return sum(t.clone().nbytes for file in folder.glob("*.safetensors") for t in load_file(file).values())


def write_hdf5(folder: Path, steps: Sequence[Sequence[Tensor]]) -> None:
    import h5py

    with h5py.File(folder / "all.h5", "w") as file:
        for step, tensors in enumerate(steps):
            for i, tensor in enumerate(tensors):
                file.create_dataset(f"{step}/{i}", data=tensor.numpy())


def read_hdf5(folder: Path) -> int:
    import h5py

    with h5py.File(folder / "all.h5") as file:
        return sum(data[()].nbytes for group in file.values() for data in group.values())


def write_zarr(folder: Path, steps: Sequence[Sequence[Tensor]]) -> None:
    import zarr

    root = zarr.open_group(folder / "all.zarr", mode="w")
    for step, tensors in enumerate(steps):
        for i, tensor in enumerate(tensors):
            root.create_array(f"{step}-{i}", data=tensor.numpy(), chunks=tuple(tensor.shape), compressors=None)


def read_zarr(folder: Path) -> int:
    import zarr

    return sum(array[:].nbytes for _, array in zarr.open_group(folder / "all.zarr", mode="r").arrays())


FORMATS: dict[str, tuple[Write, Read]] = {
    "raw write, np.fromfile (reference)": (write_raw, read_raw),
    "instrument, bytes": (write_instrument("bytes"), read_instrument),
    "instrument, bytes, in progress": (write_instrument("bytes", in_progress=True), read_instrument),
    "instrument, list<float>": (write_instrument("list"), read_instrument),
    "np.save, one array": (write_one, read_one),
    "np.save, one file per tensor": (write_numpy, read_numpy),
    "torch.save, one file per tensor": (write_torch, read_torch),
    "safetensors, one file per step": (write_safetensors, read_safetensors),
    "HDF5, one dataset per tensor": (write_hdf5, read_hdf5),
    "zarr v3, no compressor": (write_zarr, read_zarr),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tensor", type=int, metavar="MEGABYTES")
    parser.add_argument("--only", nargs="*", default=[""], metavar="WORD", help="the formats with one of these words")
    options = parser.parse_args()
    megabytes = min(options.tensor or 0, options.megabytes)
    tensors = [torch.randn(*shape) for shape in ([(megabytes, 2**18)] if megabytes else SHAPES)]
    size = sum(tensor.nbytes for tensor in tensors)
    steps = [tensors] * max(1, options.megabytes * 2**20 // size)
    total = size * len(steps)
    print(machine())
    print(f"{total / 1e6:.0f} MB in {len(steps)} steps of {len(tensors)} tensors; medians of {options.repeats}\n")
    formats = {name: each for name, each in FORMATS.items() if any(word in name for word in options.only)}
    rates: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in formats}
    missing = set()
    for _ in range(options.repeats):
        for name, (write, read) in formats.items():
            folder = Path(tempfile.mkdtemp())
            try:
                start = time.perf_counter()
                seconds = [write(folder, steps) or time.perf_counter() - start]
                for is_cold in (False, True):
                    if is_cold:
                        drop_from_page_cache(folder)
                    start = time.perf_counter()
                    assert read(folder) == total, name
                    seconds.append(time.perf_counter() - start)
                disk = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                rates[name].append((*(total / each for each in seconds), disk / total))
            except ImportError as error:
                missing.add(f"{name}: {error}")
            finally:
                shutil.rmtree(folder)
    print("| format | written, MB/s | read from the page cache, MB/s | read from the disk, MB/s | relative size |")
    print("|---|---|---|---|---|")
    for name, measurements in rates.items():
        if measurements:
            *speeds, relative_size = (statistics.median(column) for column in zip(*measurements, strict=True))
            shown = " | ".join(f"{rate / 1e6:,.0f}" for rate in speeds)
            print(f"| {name} | {shown} | {relative_size:.2f} |")
    for reason in sorted(missing):
        print(f"skipped: {reason}")


if __name__ == "__main__":
    main()
